"""Which findings are shown, and which fail a check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckptool.checking.codes import CODES
from ckptool.checking.policy import QUESTIONS, question_of
from ckptool.cli import cli
from tests.build import call, floats, named, storage, tensor, torch_zip

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
    (tmp_path / "broken").write_bytes(b"PK")
    return tmp_path


def code(folder: Path, name: str, *options: str) -> int:
    return CliRunner().invoke(cli, ["check", str(folder / name), *options]).exit_code


FAILS = {
    (): {"system", "code", "named"},
    ("warning",): {"system", "code", "named"},
    ("error",): {"system"},
    ("info",): {"system", "code", "named", "wrapped"},
    ("system",): {"system"},
    ("code",): {"system", "code"},
    ("CK205",): {"system"},
    ("CK206",): {"code"},
    ("CK206", "CK205"): {"code", "system"},
    ("CK301",): {"wrapped"},
}


@pytest.mark.parametrize("conditions", FAILS)
def test_what_fails_is_what_was_asked_for(conditions: tuple[str, ...], folder: Path) -> None:
    options = [word for one in conditions for word in ("--fail-on", one)]
    assert {name for name in FILES if code(folder, name, *options)} == FAILS[conditions]
    assert code(folder, "broken", *options) == 2


@pytest.mark.parametrize("option", [("--fail-on", "CK999"), ("--fail-on", "bad"), ("--only", "safe,nice")])
def test_what_is_no_condition_is_refused(option: tuple[str, str], folder: Path) -> None:
    result = CliRunner().invoke(cli, ["check", str(folder / "plain"), *option])
    assert result.exit_code == 2
    assert "is none of" in result.output


@pytest.mark.parametrize(
    ("questions", "codes"),
    [("whole", set()), ("safe", {"CK201", "CK202", "CK205"}), ("loads", {"CK301"}), ("loads,fits", {"CK301"})],
)
def test_only_what_was_asked_is_reported_and_fails(questions: str, codes: set[str], tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(torch_zip({"m": {"module.w": W}, "x": FILES["system"]["x"]}, {"0": floats()}))
    result = CliRunner().invoke(cli, ["check", str(path), "--only", questions, "--json"])

    assert {one["code"] for one in json.loads(result.stdout)["findings"]} == codes
    assert result.exit_code == int("safe" in questions)
    assert f" about {questions.replace(',', ', ')};" in json.loads(result.stdout)["verdict"]


def test_each_code_answers_one_question() -> None:
    assert {question_of(code) for code in CODES} == set(QUESTIONS)
