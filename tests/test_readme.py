"""
The README is a promise: what it shows is what the program prints, and what it names exists.

CKPTOOL_WRITE_README=1 writes the output of each ``console`` and ``pycon`` block anew, and the files that it shows, to
be read in review.
"""

from __future__ import annotations

import doctest
import io
import os
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from click.testing import CliRunner

from ckptool.cli import cli

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"^```console\n\$ ckptool (.*)\n((?:(?!```).*\n)*)```", re.MULTILINE)
COMMANDS = [match.group(1) for match in BLOCK.finditer(README.read_text(encoding="utf-8"))]
SESSION = re.compile(r"(?<=^```pycon\n)((?:(?!```).*\n)*)", re.MULTILINE)
SHOWN_FILE = re.compile(r"(\(`(tests/[\w/]+\.py)`\):\n\n```python\n)((?:(?!```).*\n)*)")


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


def written(text: str) -> None:
    if os.environ.get("CKPTOOL_WRITE_README"):
        README.write_text(text, encoding="utf-8")


def test_the_sessions_are_what_python_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {"__name__": "__main__"}

    def run(session: re.Match[str]) -> str:
        shown = ""
        for example in doctest.DocTestParser().get_examples(session[1]):
            first, *others = example.source.splitlines()
            shown += f">>> {first}\n" + "".join(f"... {line}\n" for line in others)
            with redirect_stdout(io.StringIO()) as output:
                exec(compile(example.source, "README.md", "single"), names)
            shown += output.getvalue()
        return shown

    text = README.read_text(encoding="utf-8")
    found = SESSION.sub(run, text)
    assert SESSION.search(text)
    written(found)

    assert README.read_text(encoding="utf-8") == found


def test_a_shown_file_is_the_file_that_the_tests_run() -> None:
    text = README.read_text(encoding="utf-8")
    found = SHOWN_FILE.sub(lambda shown: shown[1] + (ROOT / shown[2]).read_text(encoding="utf-8"), text)
    assert SHOWN_FILE.search(text)
    written(found)

    assert README.read_text(encoding="utf-8") == found


def test_every_recipe_is_named_and_says_what_it_was_run_with() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "tests/constraints.txt").read_text("utf-8"), re.MULTILINE))
    text = README.read_text(encoding="utf-8")
    for path in (ROOT / "tests/serving/recipes").glob("*.py"):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        versions = re.findall(r"([\w-]+) (\d[\w.]*\d)", first)

        assert f"`{path.stem}`" in text
        assert first.startswith("# Run with ")
        assert versions
        assert all(pinned.get(name.lower(), version) == version for name, version in versions)


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
