"""What `report` writes: one file that forbids everything but itself, with what the other verbs say, and no more."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import shutil
import stat
import zipfile
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.cli.page import ASSETS, SCRIPTS, joined_script
from ckptool.messages import show_nbytes
from tests.missing import on_windows
from tests.page.pages import HOSTILE, content_of, mixture, report, rows_of, write_safetensors
from tests.program import VALID, invoke

FINE = VALID / "lenet-state-dict-cpu-zip.pth"
TRAINING = VALID / "checkpoint-ddp-forged-cuda0-zip.pth"


class Elements(HTMLParser):
    """The elements of a page, as a browser takes them."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.policy = ""
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"] or ""


def made(tmp_path: Path, *arguments: object) -> bytes:
    path = tmp_path / "page.html"
    done = report(*arguments, "--force", "-o", path)
    assert done.exit_code == 0, done.output
    return path.read_bytes()


def as_json(*arguments: object) -> Any:
    return json.loads(invoke([*map(str, arguments), "--json"]).stdout)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "</title><script>x.pth".replace("/", "\u2215")
    torch.save({name: torch.ones(number + 2) for number, name in enumerate(HOSTILE)}, path)
    return path


def test_nothing_runs_but_what_the_policy_names(tmp_path: Path) -> None:
    page = made(tmp_path, FINE)
    policy = Elements(page).policy
    inside = (rb"<style>(.*?)</style>", rb'<script type="module">(.*?)</script>')
    texts = [match[1] for match in (re.search(pattern, page, re.DOTALL) for pattern in inside) if match]
    hashes = [f"'sha256-{base64.b64encode(sha256(text).digest()).decode()}'" for text in texts]

    assert policy == (
        f"default-src 'none'; style-src {hashes[0]}; script-src {hashes[1]}; base-uri 'none'; form-action 'none'"
    )


def test_names_are_never_markup(tmp_path: Path, hostile: Path) -> None:
    page = made(tmp_path, hostile)

    assert Elements(page).tags == Elements(made(tmp_path, FINE)).tags
    shown = [name.encode("unicode_escape").decode() if "\0" in name or "\u202e" in name else name for name in HOSTILE]
    for name, expected in zip([row["name"] for row in rows_of(page)], shown, strict=True):
        assert name == (expected or "(root)") or name.startswith(expected[:1024] + "…")


def test_the_same_file_makes_the_same_page(tmp_path: Path) -> None:
    assert made(tmp_path, TRAINING, "--values") == made(tmp_path, TRAINING, "--values")


def test_it_says_what_inspect_says(tmp_path: Path) -> None:
    page = made(tmp_path, TRAINING)
    rows, found = rows_of(page), as_json("inspect", TRAINING)

    assert [row["name"] for row in rows] == [one["name"] for one in found["tensors"]]
    for row, one in zip(rows, found["tensors"], strict=True):
        (what,) = row["tensors"]
        assert (what["shape"], what["what"]) == (str(one["shape"]), one["kind"])
        assert [what[name] for name in ("dtype", "device", "nbytes", "numel")] == [
            one[name] for name in ("dtype", "device", "nbytes", "numel")
        ]
    ties = [(at, row["tied_to"]) for at, row in enumerate(rows) if "tied_to" in row]
    assert all(to < at for at, to in ties)
    assert len(ties) == found["summary"]["tied"]
    assert {row["role"] for row in rows} == {one["role"] for one in found["state_dicts"]}
    text = invoke(["inspect", "-q", str(TRAINING)]).stdout
    for label, items in content_of(page)["files"][0]["facts"]:
        assert f"  {label:<13}{items[0]}" in text


def test_it_says_what_check_says(tmp_path: Path) -> None:
    file = content_of(made(tmp_path, TRAINING))["files"][0]
    found = as_json("check", TRAINING)

    assert file["findings"] == found["findings"]
    outcome = found["verdict"].partition("; ")[0]
    assert (file["verdict"], file["loading"]) == (f"{outcome}; looked at the structure alone", found["loading"])


def test_it_says_that_values_were_looked_at(tmp_path: Path) -> None:
    verdict = content_of(made(tmp_path, FINE, "--values"))["files"][0]["verdict"]
    assert verdict == "nothing wrong found; looked at the structure and at every value"


def test_the_page_of_a_folder_of_several_has_the_tensors_of_all(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("first.pth", "second.pth"):
        (folder / name).write_bytes(FINE.read_bytes())
    page = made(tmp_path, folder, "--values")
    alone = made(tmp_path, FINE, "--values")

    rows, expected = rows_of(page), rows_of(alone)
    assert [row["name"] for row in rows] == [
        f"{name}.{one['name']}" for name in ("first.pth", "second.pth") for one in expected
    ]
    assert [row["values"] for row in rows] == [row["values"] for row in expected] * 2
    file = content_of(page)["files"][0]
    assert [(one["name"], one["tensors"], one["file_nbytes"]) for one in file["files"]] == [
        (name, len(expected), FINE.stat().st_size) for name in ("first.pth", "second.pth")
    ]
    assert (file["worst"], file["findings"]) == (None, [])
    assert file["verdict"] == "2 files: nothing wrong found in them; looked at the structure and at every value"


def test_values_are_those_of_stat(tmp_path: Path) -> None:
    values = [row["values"][0] for row in rows_of(made(tmp_path, FINE, "--values"))]
    rows = as_json("stat", FINE)["rows"]

    for name in ("mean", "std", "min", "max", "norm", "zeros", "nan", "infinite", "total", "histogram"):
        assert [one[name] for one in values] == [pytest.approx(row["values"][name], rel=1e-5) for row in rows]


def test_values_that_are_no_numbers_have_a_reason(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.ones(3).to_sparse()}, tmp_path / "sparse.pth")
    a, b = (row["values"][0] for row in rows_of(made(tmp_path, tmp_path / "sparse.pth", "--values")))

    assert (a["mean"], len(a["histogram"])) == (1, 8)
    assert list(b) == ["why"]


def test_two_files_show_what_diff_says(tmp_path: Path) -> None:
    a = {name: torch.arange(1.0, 5.0) for name in ("same", "values", "shape", "dtype", "gone", "nan", "inf")}
    b = {**a, "values": a["values"] + 0.5, "shape": torch.ones(3), "dtype": a["dtype"].half(), "new": torch.ones(2)}
    b |= {"nan": torch.tensor([1, torch.nan, 3, 4]), "inf": torch.tensor([1, 2, 3, torch.inf])}
    del b["gone"]
    torch.save(a, tmp_path / "a.pth")
    torch.save(b, tmp_path / "b.pth")
    page = made(tmp_path, tmp_path / "a.pth", tmp_path / "b.pth", "--values")
    found = as_json("diff", tmp_path / "a.pth", tmp_path / "b.pth", "--stat")
    rows = {row["name"]: row for row in rows_of(page)}
    status = {name: row["change"] for name, row in rows.items()}

    assert status == {
        "same": "same",
        **dict.fromkeys(("values", "nan", "inf"), "values"),
        "shape": "shape",
        "dtype": "dtype",
        "gone": "only in A",
        "new": "only in B",
    }
    measured = {name: row["measures"] for name, row in rows.items() if row["measures"]}
    assert list(measured) == [one["name"] for one in found["values"]]
    for one in found["values"]:
        for field in ("differing", "nan", "max_abs", "max_rel", "at", "a", "b"):
            expected = float(f"{one[field]:.6g}") if isinstance(one[field], float) else one[field]
            assert measured[one["name"]][field] == expected
    for one in found["likeness"]:
        assert measured[one["name"]]["cosine"] == pytest.approx(one["cosine"], rel=1e-5)
    assert [rows[name]["tensors"][side] for side, name in ((0, "new"), (1, "gone"))] == [None, None]
    assert content_of(page)["compared"]["verdict"].startswith("different: 2 names in one alone")
    assert [one["mean"] for one in rows["same"]["values"]] == [2.5, 2.5]


def test_values_that_were_not_compared_are_not_called_the_same(tmp_path: Path) -> None:
    rows = rows_of(made(tmp_path, FINE, FINE, "--no-values"))

    assert {row["change"] for row in rows} == {"not compared"}


def test_a_file_that_cannot_be_opened_has_a_page_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "cut.pth").write_bytes(FINE.read_bytes()[:90_000])
    done = report(tmp_path / "cut.pth", "-o", tmp_path / "page.html")
    content = content_of((tmp_path / "page.html").read_bytes())

    assert done.exit_code == 2
    assert "truncated" in done.stderr
    assert content["tensors"] is None
    assert content["files"][0]["error"]["kind"] == "truncated-zip"
    assert content["files"][0]["findings"][0]["code"] == "CK106"


def test_a_folder_that_lacks_a_part_has_a_page_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-00001-of-00001.safetensors"}}')
    done = report(tmp_path, "-o", tmp_path / "page.html")

    assert done.exit_code == 2
    assert "model-00001-of-00001" in content_of((tmp_path / "page.html").read_bytes())["files"][0]["error"]["message"]


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_the_page_of_a_folder_says_of_each_file_what_check_says(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name in ("team10/a", "team2/a", "team2/b"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.pth").write_bytes(TRAINING.read_bytes())
    (folder / "cut.pth").write_bytes(FINE.read_bytes()[:90_000])
    (folder / "fine.pth").write_bytes(FINE.read_bytes())
    (folder / "evil.pkl").write_bytes(pickle.dumps(Runs()))
    (folder / "notes.txt").write_text("no checkpoint")
    file = content_of(made(tmp_path, folder))["files"][0]
    found = {one["path"]: one for one in as_json("check", "-r", folder)}

    assert len(file["files"]) == len(found) == 6
    for row in file["files"]:
        one = found[str(folder / row["name"])]
        codes = dict.fromkeys(
            [*([one["error"]["kind"]] if "error" in one else []), *(of["code"] for of in one["findings"])]
        )
        assert (row["worst"], row["codes"]) == (one["worst"], list(codes))
    grades = {row["name"]: row["grade"] for row in file["files"]}
    assert (grades["evil.pkl"], grades["fine.pth"]) == ("system", "data")
    assert file["verdict"] == "6 files: 2 with errors, 3 with warnings; looked at the structure alone"
    assert file["worst"] == "error"
    counts = {one["code"]: one["files"] for one in file["findings"]}
    assert (counts["CK301"], counts["truncated-zip"], counts["CK205"]) == (3, 1, 1)
    assert len(counts) == len(file["findings"])
    assert dict(file["facts"])["files"] == [f"6; {show_nbytes(file['nbytes'])}"]


def test_what_is_wrong_with_a_folder_itself_has_a_row(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.pth").write_bytes(FINE.read_bytes())
    (folder / "c.pth.incomplete").write_bytes(b"x")
    file = content_of(made(tmp_path, folder))["files"][0]

    assert [(one["name"], one["worst"], one["codes"]) for one in file["files"]] == [
        (".", "warning", ["CK163"]),
        ("a/model.pth", None, []),
        ("b/model.pth", None, []),
    ]
    assert (
        file["verdict"]
        == "2 files: nothing wrong found in them, and 1 finding about the folder; looked at the structure alone"
    )


def test_the_page_of_an_archive_has_a_row_for_each_member(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name in ("a.pth", "sub/b.pth"):
            archive.write(FINE, name)
    page = made(tmp_path, tmp_path / "all.zip")

    assert [one["name"] for one in content_of(page)["files"][0]["files"]] == ["a.pth", "sub/b.pth"]
    assert {row["name"].partition(".pth.")[0] for row in rows_of(page)} == {"a", "sub/b"}


def test_the_foot_has_the_digest_that_inspect_has(tmp_path: Path) -> None:
    file = content_of(made(tmp_path, FINE, "--digest"))["files"][0]

    expected = {
        "SHA-256": sha256(FINE.read_bytes()).hexdigest(),
        "weights": as_json("inspect", FINE, "--digest")["digest"],
    }
    assert (file["digests"], file["nbytes"]) == (expected, FINE.stat().st_size)
    assert set(content_of(made(tmp_path, FINE))["files"][0]["digests"].values()) == {None}


@pytest.mark.parametrize("files", [["absent.pth"], ["absent.pth", FINE], [FINE, "absent.pth"]])
def test_what_cannot_be_shown_leaves_no_page(tmp_path: Path, files: list[object]) -> None:
    done = report(*files, "-o", tmp_path / "page.html")

    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])


@pytest.mark.parametrize("output", ["s3://bucket/page.html", "page", "page.pth"])
def test_pages_have_names_of_pages(tmp_path: Path, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert report(FINE, "-o", output).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_replaced_without_being_asked(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    done = report(FINE, "-o", page)

    assert (done.exit_code, page.read_text()) == (2, "mine")
    assert "exists already" in done.stderr
    assert "--force" in done.stderr
    assert report(FINE, "-o", page, "--force").exit_code == 0


def test_nothing_but_pages_is_written(tmp_path: Path) -> None:
    model, linked = tmp_path / "model.pth", tmp_path / "model.html"
    model.write_bytes(FINE.read_bytes())
    linked.hardlink_to(model)
    for output in (model, linked):
        done = report(model, "-o", output, "--force")
        assert (done.exit_code, model.read_bytes()) == (2, FINE.read_bytes()), done.output


def test_pages_of_20000_tensors_are_small(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "moe.safetensors", mixture())
    page = made(tmp_path, path)

    assert len(content_of(page)["files"][0]["facts"]) > 3
    assert len(rows_of(page)) == 20_419
    assert len(page) <= 200_000


def test_scripts_import_what_is_there_and_stands_before_them() -> None:
    exported: dict[str, set[str]] = {}
    assert {f"{name}.js" for name in SCRIPTS} == {path.name for path in ASSETS.glob("*.js")}
    for name in SCRIPTS:
        text = (ASSETS / f"{name}.js").read_text("utf-8")
        for names, module in re.findall(r'^import \{ (.*) \} from "\./(\w+)\.js";$', text, re.MULTILINE):
            assert set(names.split(", ")) <= exported[module]
            for one in names.split(", "):
                assert len(re.findall(rf"\b{one}\b", text)) > 1, f"{name} imports {one} and does not use it"
        exported[name] = set(re.findall(r"^export (?:async )?(?:function\*?|class|const) (\w+)", text, re.MULTILINE))
        assert text.startswith("/** "), "a module says what it is"
        assert text.count("\n") <= 400


def test_names_are_unique_in_the_joined_script() -> None:
    texts = "".join((ASSETS / f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    names = re.findall(r"^(?:export )?(?:async )?(?:function\*?|class|const|let) (\w+)", texts, re.MULTILINE)

    assert len(set(names)) == len(names) > 50
    assert {"import", "export"}.isdisjoint(re.findall(r"^\w+", joined_script(), re.MULTILINE))


@pytest.mark.parametrize(
    "what",
    ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "fetch(", "http", "src"],
)
def test_no_script_makes_markup_or_asks_for_anything(what: str) -> None:
    assert what not in joined_script().replace("http://www.w3.org/2000/svg", "")


NAN, INF = float("nan"), float("inf")
ODD: dict[str, dict[str, torch.Tensor]] = {
    "NaN in one": {"a": torch.ones(4), "b": torch.tensor([1.0, NAN, NAN])},
    "NaN in bfloat16": {"a": torch.tensor([NAN, 0.0], dtype=torch.bfloat16)},
    "NaN in float8": {"a": torch.tensor([NAN, 2.0]).to(torch.float8_e4m3fn)},
    "NaN in complex": {"a": torch.tensor([complex(NAN, 1)]), "b": torch.tensor([complex(1, INF)])},
    "infinite": {"a": torch.tensor([INF, 1.0]), "b": torch.tensor([-INF, 1.0])},
    "infinite and zeros": {"a": torch.tensor([INF, 0.0]), "mask": torch.tensor([-INF, 0.0]), "z": torch.zeros(2)},
    "half infinite": {"a": torch.tensor([INF, 0.0], dtype=torch.float16), "m": torch.tensor([0.0, -INF]).bfloat16()},
    "range of an observer": {"obs.min_val": torch.tensor(INF), "obs.max_val": torch.tensor(-INF), "a": torch.ones(1)},
    "zeros": {"a": torch.zeros(3), "b": torch.zeros(3, dtype=torch.int64), "c": torch.ones(1)},
    "fine": {"a": torch.ones(3)},
}


@pytest.mark.parametrize("which", ODD)
def test_what_is_odd_about_values_is_said_at_the_head_as_check_says_it(which: str, tmp_path: Path) -> None:
    for content in (ODD[which], {"epoch": 1, "state_dict": ODD[which], "best": torch.tensor(-INF)}):
        torch.save(content, tmp_path / "model.pth")
        file = content_of(made(tmp_path, tmp_path / "model.pth", "--values"))["files"][0]
        found = as_json("check", "--values", tmp_path / "model.pth")

        def of_values(findings: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
            return [(one["code"], one["severity"], one["message"]) for one in findings if one["code"][:4] == "CK11"]

        assert of_values(file["findings"]) == of_values(found["findings"])
        assert file["worst"] == found["worst"]
        assert file["verdict"].partition(";")[0] == found["verdict"].partition(";")[0]
        assert ("CK110" in str(file["findings"])) == which.startswith("NaN")


def test_a_page_of_two_says_of_each_what_its_values_are(tmp_path: Path) -> None:
    weights = torch.load(FINE)
    weights["fc1.weight"][0, 0] = NAN
    torch.save({"model": weights, "optimizer": {"state": {0: {"exp_avg": torch.zeros(4)}}}}, tmp_path / "b.pth")
    page = content_of(made(tmp_path, FINE, tmp_path / "b.pth", "--values"))

    a, b = page["files"]
    assert (a["worst"], a["findings"]) == (None, [])
    assert b["worst"] == "warning"
    (nan,) = (one for one in b["findings"] if one["code"] == "CK110")
    assert "model.fc1.weight (1 of 23,040)" in nan["message"]
    assert "looked at the structure and at" in b["verdict"]
    plain = content_of(made(tmp_path, FINE, tmp_path / "b.pth"))
    assert {one["verdict"].partition("; ")[2] for one in plain["files"]} == {"looked at the structure alone"}


def test_the_page_of_a_folder_says_which_file_has_nan(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name in ("new/good.pth", "new/also.pth", "run/one.pth", "run/two.pth"):
        weights = torch.load(FINE)
        weights["fc1.weight"][0, 0] = NAN if name == "run/one.pth" else 1.0
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, folder / name)

    file = content_of(made(tmp_path, folder, "--values"))["files"][0]

    assert file["worst"] == "warning"
    (nan,) = (one for one in file["findings"] if one["code"] == "CK110")
    assert nan["some"] == "run/one.pth"


def test_sums_of_folders_in_folders_are_those_of_their_files(tmp_path: Path) -> None:
    for name in ("a/1.pth", "a/2.pth", "b/1.pth", "b/2.pth", "b/3.pth"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(FINE.read_bytes())

    found, nbytes = as_json("inspect", tmp_path), FINE.stat().st_size

    assert found["file_nbytes"] == 5 * nbytes
    members = {one["name"]: (one["tensors"], one["nbytes"]) for one in found["members"]}
    assert members == {"a": (20, 2 * nbytes), "b": (30, 3 * nbytes)}
    assert " 0 B" not in invoke(["inspect", str(tmp_path)]).stdout


@on_windows("it has no modes for groups and others")
@pytest.mark.parametrize(
    ("kind", "mode"), [("one", 0o644), ("one", 0o640), ("two", 0o600), ("folder", 0o600), ("refused", 0o600)]
)
def test_a_page_is_for_nobody_who_may_not_read_the_files(tmp_path: Path, kind: str, mode: int) -> None:
    old = os.umask(0o022)
    try:
        folder = tmp_path / "of"
        folder.mkdir()
        path = folder / "a.pth"
        shutil.copy(FINE, path)
        if kind == "refused":
            path.write_bytes(path.read_bytes()[:5000])
        path.chmod(mode)
        shutil.copy(FINE, tmp_path / "b.pth")
        files = {"two": [tmp_path / "b.pth", path], "folder": [folder]}.get(kind, [path])

        done = invoke(["report", *map(str, files), "-o", str(tmp_path / "page.html")])
    finally:
        os.umask(old)

    assert done.exit_code == (2 if kind == "refused" else 0), done.output
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == mode
