"""Which findings are shown, and which fail a check."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.build import call, floats, named, pickled, storage, tensor, torch_zip
from tests.program import as_json, invoke, run

W = tensor(storage())
FILES = {
    "plain": {"w": W},
    "system": {"w": W, "x": call(named("os", "system"), "true")},
    "code": {"w": W, "x": call(named("argparse", "Namespace"))},
    "named": {"w": W, "x": named("os", "system")},
    "wrapped": {"module.w": W},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, tree in FILES.items():
        (tmp_path / name).write_bytes(torch_zip(tree, {"0": floats()}))
    (tmp_path / "broken").write_bytes(torch_zip({}, {"0": floats()})[:-30])
    return tmp_path


def code(folder: Path, name: str, *options: str) -> int:
    return invoke(["check", str(folder / name), *options]).exit_code


FAILS = {
    (): {"system", "code", "named"},
    ("warning",): {"system", "code", "named"},
    ("error",): {"system"},
    ("info",): {"system", "code", "named", "wrapped"},
    ("system",): {"system"},
    ("code",): {"system", "code", "named"},
    ("CK205",): {"system"},
    ("CK206",): {"code"},
    ("CK206", "CK205"): {"code", "system"},
    ("CK301",): {"wrapped"},
}


@pytest.mark.parametrize("conditions", FAILS)
def test_what_fails_is_what_was_asked_for(conditions: tuple[str, ...], folder: Path) -> None:
    options = [word for one in conditions for word in ("--fail-on", one)]
    assert {name for name in FILES if code(folder, name, *options)} == FAILS[conditions]
    assert code(folder, "broken", *options) == (1 if conditions == ("info",) else 2)  # CK106


@pytest.mark.parametrize("option", [("--fail-on", "CK999"), ("--fail-on", "bad"), ("--only", "safe,nice")])
def test_what_is_no_condition_is_refused(option: tuple[str, str], folder: Path) -> None:
    result = run("check", folder / "plain", *option, code=2)
    assert "is none of" in result.output


@pytest.mark.parametrize(
    ("questions", "codes"),
    [("whole", set()), ("safe", {"CK201", "CK202", "CK205"}), ("loads", {"CK301"}), ("whole,loads", {"CK301"})],
)
def test_only_what_was_asked_is_reported_and_fails(questions: str, codes: set[str], tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(torch_zip({"m": {"module.w": W}, "x": FILES["system"]["x"]}, {"0": floats()}))
    found = as_json("check", path, "--only", questions, code=int("safe" in questions))

    assert {one["code"] for one in found["findings"]} == codes
    assert f" about {questions.replace(',', ', ')};" in found["verdict"]


SYSTEM = call(named("os", "system"), "true")
REFUSED: dict[str, Callable[[bytes], bytes]] = {
    "cut gzip": lambda value: gzip.compress(pickled(value) + bytes(range(256)) * 9)[:-60],
    "a pickle without its end": lambda value: pickled(value)[:-1] + b"N" * 9,
    "text behind a pickle of protocol 0": lambda value: b"(lp0\n" + value + b"a\xff",
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_grade_of_a_refused_file_is_said(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    for value, grade in ((SYSTEM, "system"), (FILES["code"]["x"], "code")):
        path.write_bytes(REFUSED[name](value))
        # What cannot be opened may be worse.
        found = as_json("check", path, "--fail-on", "system", code=1 if grade == "system" else 2)

        assert found["grade"] == grade
        assert found["verdict"].startswith("cannot be opened; what unpickles it all the same ")
        assert ("os.system('true')" in found["verdict"]) == (grade == "system")
        assert {"system": "CK205", "code": "CK206"}[grade] in {one["code"] for one in found["findings"]}


def test_no_refused_file_that_calls_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "data").write_bytes(REFUSED["text behind a pickle of protocol 0"](SYSTEM))
    result = run("check", "-b", "-r", tmp_path, code=1)
    assert "calls os.system('true')" in result.stdout
    said = [line for line in result.stdout.splitlines() if "notes.txt" in line]
    assert said == [f"  passed over  1 file of other kinds: {tmp_path}/notes.txt"]


def test_what_was_not_looked_at_may_be_of_any_grade(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(torch_zip({"w": W}, {"0": floats()}, members={"a/x": b"\x04\x22\x4d\x18 packed"}))
    for condition in ("code", "system"):
        assert code(tmp_path, "x", "--fail-on", condition) == 1
    assert code(tmp_path, "x", "--fail-on", "error") == 0
    report = as_json("check", path, code=1)
    assert report["grade"] == "code"
    assert report["unseen"] == ["a/x: packed with Zstandard or LZ4"]


@pytest.mark.parametrize(("code", "option"), [("CK110", "--values"), ("CK105", "--deep")])
def test_a_code_that_is_not_looked_for_is_no_gate(code: str, option: str, tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([torch.nan])}, tmp_path / "x.pth")
    done = run("check", "--fail-on", code, tmp_path / "x.pth", code=2)

    assert f"found only with {option}" in done.output
    assert invoke(["check", "--fail-on", code, option, tmp_path / "x.pth"]).exit_code == (code == "CK110")


def test_a_policy_that_is_not_there_is_named(tmp_path: Path) -> None:
    for option in ("--policy", "--baseline"):
        assert "gone.x: no such file" in invoke(["check", option, tmp_path / "gone.x", tmp_path]).output


def test_a_folder_in_which_nothing_was_looked_at_does_not_pass(tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
    (tmp_path / "model.pth").write_text(pointer)
    gate = ["check", "--fail-on", "code"]

    assert invoke([*gate, tmp_path / "model.pth"]).exit_code == 0  # a hook gives what was changed, whatever it is
    done = invoke([*gate, "-r", tmp_path])
    assert (done.exit_code, "no checkpoint among 1 file" in done.output) == (2, True)
    torch.save({"w": torch.ones(1)}, tmp_path / "other.pth")
    assert invoke([*gate, "-r", tmp_path]).exit_code == 0


def test_what_is_odd_in_a_baseline_or_a_policy_is_named(tmp_path: Path) -> None:
    deep, known = tmp_path / "deep.toml", tmp_path / "known.json"
    deep.write_text(f"a = {'[' * 100_000}")
    assert "deep.toml: nested too deep" in run("check", "--policy", deep, tmp_path, code=2).stderr
    for findings in ("[[1]]", "[{}]", "null", "[1]"):
        known.write_text(f'{{"sha256": "0", "findings": {findings}}}')
        said = run("check", "--baseline", known, tmp_path, code=2).stderr
        assert "known.json: no baseline: findings have no code" in said
