"""A gate: what fails, what nobody knows, what is something else, and what a policy lets through and counts."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.build import call, floats, index_of_shards, named, pickled, storage, tensor, torch_zip, zip_file
from tests.checking.test_one_verdict import PLACES
from tests.each import each
from tests.hostile.cases.canaries import CANARIES
from tests.program import as_json, invoke, run, validated

ROOT = Path(__file__).parents[2]
W = tensor(storage())
SYSTEM = call(named("os", "system"), "true")
CODE = call(named("myproject.net", "Config"), 3)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12\n"
OTHERS = {
    "notes.th": b"About these models.\n",
    "firmware.bin": bytes(range(200, 256)) * 9,
    "picture.bin": b"\x89PNG\r\n\x1a\n" + bytes(range(99)),
    "pointer.pth": LFS,
}
"""What is surely no checkpoint, no pickle and no archive of them."""
DOUBTFUL = {
    "import.pkl": b"cevilmod\nx\n\xff\xff",
    "lz4.pkl": b"\x04\x22\x4d\x18" + bytes(range(64)),
    "locked.bin": b"Salted__" + bytes(range(200)),
    "cut.pkl": pickled({"a": [1] * 99})[:-40],
    "cut.pth": torch_zip({"w": W}, {"0": floats()})[:-30],
    "zeros.pth": bytes(999),
    "nothing.pth": b"",
    "site.pth": b"import os; os.system('true')\n",
    "graph.bin": b"\n\x0a\x12\x05Const" + bytes(9),
}
"""What nobody looked into, or could be a pickle, or a program."""


def checkpoint(path: Path, x: object = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(torch_zip({"w": W, "x": x}, {"0": floats()}))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a folder with one of each kind."""
    for name, x in (("fine.pth", None), ("bad.pth", SYSTEM), ("own.pth", CODE)):
        checkpoint(tmp_path / "models" / name, x)
    (tmp_path / "models" / "cut.pth").write_bytes(DOUBTFUL["cut.pth"])
    for name, content in OTHERS.items():
        (tmp_path / "models" / name).write_bytes(content)
    return tmp_path / "models"


def policy(folder: Path, text: str) -> Path:
    path = folder.parent / "policy.toml"
    path.write_text(text, encoding="utf-8")
    return path


@each(
    ("names", "options", "code"),
    [
        (["bad.pth", "cut.pth"], ["--fail-on", "system"], 1),
        (["cut.pth", "bad.pth", "fine.pth"], [], 1),
        (["own.pth", "cut.pth"], ["--fail-on", "system"], 2),
        (["fine.pth", "cut.pth"], [], 2),
        (["fine.pth", *OTHERS], ["--fail-on", "code"], 0),
        (["fine.pth", *OTHERS], ["--fail-on", "error"], 0),
        (["fine.pth", "notes.th"], ["--fail-on", "code", "--fail-on", "unreadable"], 1),
        (["cut.pth"], ["--fail-on", "unreadable"], 1),
        (["fine.pth", "pointer.pth"], [], 2),
        (["own.pth"], ["--fail-on", "code"], 1),
    ],
)
def test_the_exit_code_says_whether_anything_fails(
    names: list[str], options: list[str], code: int, tmp_path: Path
) -> None:
    for name in names:
        content = OTHERS.get(name) or DOUBTFUL.get(name)
        if content is None:
            checkpoint(tmp_path / name, {"bad.pth": SYSTEM, "own.pth": CODE}.get(name))
        else:
            (tmp_path / name).write_bytes(content)
    paths = [tmp_path / name for name in names]
    run("check", *paths, *options, code=code)
    if names == ["bad.pth", "cut.pth"] or not options:
        run("scan", "--jobs", 1, *paths, *options, code=code if options else 2)


@each("name", DOUBTFUL)
def test_what_could_be_a_pickle_or_a_program_does_not_pass(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(DOUBTFUL[name])
    for condition in ("code", "system", "error"):
        run("check", tmp_path / name, "--fail-on", condition, code=2)


def test_no_payload_passes(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    for number, value in enumerate(CANARIES.values()):
        kind = list(PLACES)[number % len(PLACES)]
        (folder / f"{number} {kind}.pth").write_bytes(PLACES[kind](value))
        (folder / f"{number} cut.pkl").write_bytes(pickled(value)[:-1])
        (folder / f"{number} text.bin").write_bytes(b"(lp0\n" + value + b"a\xff")
    found = as_json("check", *folder.iterdir(), "--fail-on", "code", code=1)
    passed = [Path(one["path"]).name for one in found if one["gate"] in ("passes", "other")]
    assert (len(found), passed) == (len(CANARIES) * 3, [])


def test_quiet_prints_only_what_fails(folder: Path) -> None:
    for number in range(9):
        checkpoint(folder / f"fine{number}.pth")
    shown = run("check", "-q", "-r", folder, "--fail-on", "system", code=1).stdout
    assert shown.startswith("error    CK205 Unpickling would call what reaches the system")
    assert f"(1)\n  {folder}/bad.pth: unpickling calls os.system('true')" in shown
    assert f"not opened (1)\n  {folder}/cut.pth: truncated: " in shown
    assert "fine0" not in shown
    assert f"not here     1 pointer in the place of files that were not fetched: {folder}/pointer.pth\n" in shown
    brief = run("check", "-b", "-q", "-r", folder, "--fail-on", "system", code=1).stdout.splitlines()
    assert [line.split()[0] for line in brief[: brief.index("")]] == ["error", "error"]
    assert run("check", "-q", folder / "fine.pth", "--fail-on", "system").stdout == ""


def test_a_pointer_in_the_place_of_a_file_has_a_line(folder: Path) -> None:
    shown = run("check", folder / "pointer.pth", folder / "fine.pth", "--fail-on", "code").stdout
    assert f"{folder}/pointer.pth: passed over: not a checkpoint: a Git LFS pointer to a file of 12 bytes" in shown


def test_the_hook_prints_nothing_of_what_is_fine(folder: Path) -> None:
    lines = (ROOT / ".pre-commit-hooks.yaml").read_text("utf-8").splitlines()
    (entry,) = [line.partition(": ")[2] for line in lines if line.strip().startswith("entry:")]
    words = entry.split()[1:]
    run(*words, folder / "fine.pth", *(folder / name for name in OTHERS))
    assert "fine.pth" not in run(*words, folder / "fine.pth", folder / "bad.pth", code=1).stdout


# What a policy lets through


POLICIES: dict[str, tuple[str, dict[str, int]]] = {
    "nothing": ("", {"fine.pth": 0, "own.pth": 1, "bad.pth": 1, "cut.pth": 2}),
    "fail-on": ('fail-on = ["system"]', {"own.pth": 0, "bad.pth": 1, "notes.th": 0}),
    "allow": ('fail-on = ["code"]\nallow = ["myproject.*"]', {"own.pth": 0, "bad.pth": 1}),
    "allow with a reason": ('allow = [{ name = "myproject.*", reason = "ours" }]', {"own.pth": 0, "bad.pth": 1}),
    "allow another": ('fail-on = ["code"]\nallow = ["other.*"]', {"own.pth": 1}),
    "allow the system": ('fail-on = ["system"]\nallow = ["*", "os.system", "posix.system"]', {"bad.pth": 1}),
    "ignore": ('[[ignore]]\ncode = "CK206"\n[[ignore]]\ncode = "CK202"', {"own.pth": 0, "bad.pth": 1}),
    "ignore a grade": ('fail-on = ["code"]\n[[ignore]]\ncode = "CK206"', {"own.pth": 0, "bad.pth": 1}),
    "ignore there": ('fail-on = ["code"]\n[[ignore]]\ncode = "CK206"\npath = "*/models/own.*"', {"own.pth": 0}),
    "ignore elsewhere": ('fail-on = ["code"]\n[[ignore]]\ncode = "CK206"\npath = "*/other/*"', {"own.pth": 1}),
    "ignore until": (
        'fail-on = ["code"]\n[[ignore]]\ncode = "CK206"\nuntil = 2999-01-01\nreason = "soon"',
        {"own.pth": 0},
    ),
    "ignored until": ('fail-on = ["code"]\n[[ignore]]\ncode = "CK206"\nuntil = 2020-01-01', {"own.pth": 1}),
    "ignore the unreadable": ('[[ignore]]\ncode = "unreadable"', {"cut.pth": 0, "bad.pth": 1}),
    "limits": ("[limits]\ntensors = 0", {"fine.pth": 2}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_each_key_of_a_policy(name: str, folder: Path) -> None:
    text, codes = POLICIES[name]
    path = policy(folder, text)
    for file, code in codes.items():
        run("check", folder / file, "--policy", path, code=code)


@each(
    ("text", "said"),
    [
        ("alow = []", "unknown key 'alow'\nHint: Did you mean 'allow'?"),
        (
            '[[ignore]]\ncode = "CK206"\nuntill = 2027-01-01',
            "unknown key ignore: 'untill'\nHint: Did you mean 'until'?",
        ),
        ('[[ignore]]\npath = "x"', "ignore: code is missing"),
        ('ignore = ["CK999"]', "'CK999' is none of these: the code of a finding, unreadable"),
        ('fail-on = ["sytem"]', "Did you mean 'system'?"),
        ("fail-on = []", "fail-on is not a list of what fails"),
        ('allow = "x"', "allow is not a list"),
        ("allow = [3]", "allow has what is not a table: 3"),
        ('accept = ["aa"]', "accept: reason is missing"),
        ('[[accept]]\nsha256 = "AA"\nreason = "x"', "no SHA-256, which is 64 digits of 0-9 and a-f: 'AA'"),
        ("[limits]\ntensor = 3", "unknown key limits.'tensor'\nHint: Did you mean 'tensors'?"),
        ('[limits]\ntensors = "3"', "limits.tensors is not a number of 0 or more"),
        (
            '[[ignore]]\ncode = "CK206"\nuntil = "2027-01-01"',
            "ignore: until is not a date, as 2027-01-31: '2027-01-01'",
        ),
        ("x", "no TOML: "),
    ],
)
def test_what_a_policy_has_and_means_nothing_is_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text, encoding="utf-8")
    assert said in run("check", checkpoint(tmp_path / "a.pth"), "--policy", path, code=2).stderr


def test_a_policy_in_the_folder_that_is_checked_counts_for_nothing(folder: Path) -> None:
    for name in ("policy.toml", "ckptool.toml", ".ckptool.toml", "pyproject.toml"):
        (folder / name).write_text('fail-on = ["CK101"]\nallow = ["*"]\n[[ignore]]\ncode = "CK205"\n')
    run("check", "-r", folder, code=1)


def test_no_name_inside_a_file_is_taken_for_its_path(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    path.write_bytes(zip_file({"legacy/data.pkl": pickled(CODE), "legacy/version": b"3\n"}))
    rules = policy(tmp_path / "x", 'fail-on = ["code"]\n[[ignore]]\ncode = "CK206"\npath = "*/legacy/*"')
    run("check", path, "--policy", rules, code=1)


def test_paths_of_a_policy_begin_where_one_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = policy(folder, 'fail-on = ["code"]\n[[ignore]]\ncode = "CK206"\npath = "models/own.*"')
    run("check", folder / "own.pth", "--policy", rules, code=1)
    monkeypatch.chdir(folder.parent)
    for path in ("models/own.pth", "models/../models/own.pth", folder / "own.pth"):
        run("check", path, "--policy", rules)


def test_what_is_no_path_is_an_error_like_others(tmp_path: Path) -> None:
    for path in ("", "\0", tmp_path / "none.pth"):
        for options in ([], ["--ignore", "CK206"], ["--fail-on", "code"]):
            assert "Error: " in run("check", path, *options, code=2).stderr


def test_a_python_without_toml_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, name, None)
    rules = policy(folder, "")
    assert "pip install tomli" in run("check", folder / "own.pth", "--policy", rules, code=2).stderr


def test_options_of_one_call_let_through_what_they_name(folder: Path) -> None:
    run("check", folder / "own.pth", "--fail-on", "code", "--allow", "myproject.*")
    run("check", folder / "own.pth", "--allow", "myproject.net.Config")
    run("check", folder / "own.pth", "--ignore", "CK206", code=1)  # CK202 is there, too
    run("check", folder / "own.pth", "--ignore", "CK206", "--ignore", "CK202")
    assert "is none of these" in run("check", folder / "own.pth", "--ignore", "CK26", code=2).stderr


def test_no_name_is_allowed_where_another_module_may_take_its_place(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "a.pth", named("collections", "OrderedDict"))
    run("check", path, "--fail-on", "code")
    (tmp_path / "collections.py").touch()
    run("check", path, "--fail-on", "code", "--allow", "collections.*", "--allow", "torch.*", code=1)


def test_many_allowed_names_hide_none_that_is_not(tmp_path: Path) -> None:
    calls = [call(named("ours", f"f{number}")) for number in range(1100)]
    for number, others in enumerate(([], [call(named("theirs", "run"))])):
        few = checkpoint(tmp_path / f"few{number}.pth", [*calls[:100], *others])
        run("check", few, "--fail-on", "code", "--allow", "ours.*", code=len(others))
    run("check", checkpoint(tmp_path / "x.pth", [*calls, *others]), "--fail-on", "code", "--allow", "ours.*", code=1)


def test_a_file_is_accepted_by_what_is_in_it(folder: Path) -> None:
    for name in ("bad.pth", "cut.pth"):
        content = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        path = policy(folder, f'[[accept]]\nsha256 = "{content}"\nreason = "a sample for tests"')
        run("check", folder / name, "--policy", path)
        run("scan", "--jobs", 1, folder / name, "--policy", path)
        with (folder / name).open("ab") as stream:
            stream.write(b"\0")
        assert invoke(["check", folder / name, "--policy", path]).exit_code


def test_an_index_is_not_accepted_for_the_files_that_it_names(folder: Path, tmp_path: Path) -> None:
    index = folder / "model.bin.index.json"
    index.write_bytes(index_of_shards({"w": "bad.pth"}))
    content = hashlib.sha256(index.read_bytes()).hexdigest()
    path = policy(folder, f'[[accept]]\nsha256 = "{content}"\nreason = "a sample for tests"')
    assert invoke(["check", index, "--policy", path]).exit_code
    assert invoke(["check", index, "--digest", "--json", "-o", tmp_path / "base.json"]).exit_code
    checkpoint(folder / "bad.pth", [CODE, SYSTEM])
    run("check", index, "--fail-on", "unreadable", "--baseline", tmp_path / "base.json", code=1)


def test_what_was_there_is_not_new(folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base.json"
    run("check", "-r", folder, "--digest", "--json", "-o", base, "-q", code=1)
    run("check", "-r", folder, "--baseline", base, "--fail-on", "code", "--fail-on", "unreadable")
    checkpoint(folder / "own.pth", [CODE, SYSTEM])
    shown = run("check", "-q", "-r", folder, "--baseline", base, code=1).stdout
    assert "own.pth" in shown
    assert "bad.pth" not in shown
    assert "let through  by the policy: " in shown
    rows = tmp_path / "rows.jsonl"
    run("scan", "--jobs", 1, folder, "--digest", "-o", rows, code=2)
    run("scan", "--jobs", 1, folder, "--baseline", rows, "--fail-on", "code")
    (tmp_path / "plain.json").write_text(run("check", "--json", folder / "own.pth", code=1).stdout)
    assert "objects have no sha256" in run("check", folder, "--baseline", tmp_path / "plain.json", code=2).stderr


def test_what_is_let_through_is_in_every_form(folder: Path, tmp_path: Path) -> None:
    path = policy(folder, 'fail-on = ["code"]\nallow = [{ name = "myproject.*", reason = "ours" }]')
    both = [folder / "own.pth", folder / "fine.pth"]
    shown = run("check", *both, "--policy", path).stdout
    assert "  let through  CK206 unpickling runs code of myproject: " in shown
    assert "by the policy: CK202 (1), CK206 (1)" in shown
    found = validated(as_json("check", *both, "--policy", path), "check")
    assert [one["gate"] for one in found] == ["passes", "passes"]
    assert {one["code"]: one["reason"] for one in found[0]["let_through"]} == {"CK202": "ours", "CK206": "ours"}
    assert {"CK202", "CK206"} <= {one["code"] for one in found[0]["findings"]}
    assert found[0]["grade"] == "code"
    sarif = tmp_path / "x.sarif"
    run("check", *both, "--policy", path, "--sarif", "-o", sarif, "-b")
    (one,) = json.loads(sarif.read_text())["runs"]
    kept = {result["ruleId"]: result.get("suppressions") for result in one["results"]}
    assert kept["CK206"] == [{"kind": "external", "status": "accepted", "justification": "ours"}]
    assert all(rule["helpUri"].startswith("https://") for rule in one["tool"]["driver"]["rules"])


def test_o_replaces_json_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    for _ in range(2):
        shown = run("check", "-b", "--json", "-o", out, folder / "fine.pth").stdout
        assert shown.startswith("fine ")
        assert json.loads(out.read_text())["worst"] is None
    before = (folder / "fine.pth").read_bytes()
    assert "not a JSON" in run("check", "--json", "-o", folder / "fine.pth", folder / "bad.pth", code=2).stderr
    assert (folder / "fine.pth").read_bytes() == before
    run("inspect", "--jsonl", "-o", out, folder / "fine.pth", "-q")
    assert json.loads(out.read_text())["schema"].startswith("ckptool.inspect/")
    assert "give one of them" in run("check", "-o", out, folder / "fine.pth", code=2).stderr


# scan


def test_scan_fails_on_what_it_is_told_to_and_goes_on_as_it_was_told(folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    told = ["scan", "--jobs", 1, folder, "-o", rows]
    run(*told, code=2)
    first = run(*told, "--fail-on", "system", code=1)
    assert f"fails  {folder}/bad.pth: CK205\n" in first.stderr
    again = run(*told, "--fail-on", "system", code=1)
    assert "skipped" in again.stderr
    assert "fails" not in again.stderr
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert {Path(one["path"]).name: one["gate"]["outcome"] for one in found if "gate" in one} == {
        "bad.pth": "fails",
        "own.pth": "passes",
        "fine.pth": "passes",
        "cut.pth": "unknown",
        **dict.fromkeys(OTHERS, "other"),
    }
    for one in found:
        validated(one, "scan")


def test_a_summary_counts_what_there_is(folder: Path) -> None:
    found = validated(as_json("scan", "--jobs", 1, folder, "--summary", "--fail-on", "system", code=1), "summary")
    assert found["severities"] == {"fine": 1, "error": 1, "warning": 1, "unreadable": 1}
    assert found["grades"] == {"data": 1, "system": 1, "code": 1, "unknown": 1}
    assert (found["formats"], found["not_here"], found["passed_over"]) == ({"torch_zip": 3}, 1, 3)
    text = run("scan", "--jobs", 1, folder, "--summary", code=2).stdout
    assert "grades       data (1), code (1), system (1)" in text
    assert '{"schema"' not in text


# One reading


def test_both_digests_come_from_one_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = struct.pack("<300000f", *range(300000))
    path = tmp_path / "a.pth"
    tree = {"w": tensor(storage("0", 300000), (300000,), (1,)), "half": tensor(storage("0", 300000), (9,), (1,), 5)}
    path.write_bytes(torch_zip(tree, {"0": big}))
    read = 0
    pread, preadv = os.pread, os.preadv

    def counted(fd: int, nbytes: int, at: int) -> bytes:
        nonlocal read
        data = pread(fd, nbytes, at)
        read += len(data)
        return data

    def counted_into(fd: int, buffers: Any, at: int) -> int:
        nonlocal read
        done = preadv(fd, buffers, at)
        read += done
        return done

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(os, "preadv", counted_into)
    for options in (["--digest"], ["--digest", "--deep"]):
        read = 0
        found = as_json("check", path, *options)
        assert found["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert path.stat().st_size <= read < path.stat().st_size + 100_000  # what is read to open it
        shown = run("inspect", "-q", "--digest", path).stdout
        assert found["digest"] in shown
