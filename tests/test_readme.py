"""
The README is a promise: what it shows is what the program prints, and what it names exists.

CKPTOOL_WRITE_README=1 writes the output of each ``console`` block anew, to be read in review.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckptool.cli import cli

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"^```console\n\$ ckptool (.*)\n((?:(?!```).*\n)*)```", re.MULTILINE)
COMMANDS = [match.group(1) for match in BLOCK.finditer(README.read_text(encoding="utf-8"))]


def output_of(command: str) -> str:
    result = CliRunner().invoke(cli, shlex.split(command), prog_name="ckptool")
    return result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_a_shown_output_is_what_the_program_prints(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = output_of(command)
    text = README.read_text(encoding="utf-8")
    if os.environ.get("CKPTOOL_WRITE_README"):
        text = BLOCK.sub(lambda m: f"```console\n$ ckptool {m[1]}\n{found}```" if m[1] == command else m[0], text)
        README.write_text(text, encoding="utf-8")

    assert f"$ ckptool {command}\n{found}```" in text


def test_every_module_is_named_where_the_readme_says_how_it_is_built() -> None:
    built = README.read_text(encoding="utf-8").partition("## How it is built")[2]
    names = {path.stem for path in (ROOT / "ckptool").glob("[a-z]*.py")} | {
        f"{path.parent.name}/" for path in (ROOT / "ckptool").glob("*/__init__.py")
    }

    assert sorted(name for name in names if f"`{name}`" not in built) == []


def test_ci_runs_the_test_command_of_the_readme() -> None:
    (command,) = re.findall(r"^pip install (.*'\.\[test\]') && (.*)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")

    assert command[1] in script.splitlines()
    assert "--editable '.[test]'" in script
    assert "--constraint tests/constraints.txt" in script
