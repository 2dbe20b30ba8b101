"""The pages of the project, and what in them is output: found, and written anew by running it."""

from __future__ import annotations

import doctest
import io
import re
import shlex
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from tests.docs.generated import PARTS
from tests.program import invoke

ROOT = Path(__file__).parents[2]
PAGES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)
"""As paths from the root."""

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"^```(console|pycon)\n((?:(?!```).*\n)*)```$", re.MULTILINE)
PASTED = re.compile(r"^```sh\n((?:(?!```).*\n)*)```\n((?:(?!```).*\n)*)```text\n((?:(?!```).*\n)*)```$", re.MULTILINE)
"""Lines to paste into a shell, and below them what they print: ``tests/serving/test_fastapi.py`` runs them."""
SHOWN_FILE = re.compile(r"(\(`(tests/[\w/.]+)`\):\n\n```(?:python|toml|yaml|groovy)\n)((?:(?!```).*\n)*)")
PART = re.compile(
    r"^<!-- begin (\w+), written by tests/docs/generated\.py -->\n(.*?)^<!-- end \1 -->$", re.MULTILINE | re.DOTALL
)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def outputs(text: str) -> str:
    """Return a page with what its commands and Python print: in the current folder, in the page's order."""
    names: dict[str, object] = {"__name__": "__main__"}

    def run(block: re.Match[str]) -> str:
        shown = _commands(block[2]) if block[1] == "console" else _session(block[2], names)
        return f"```{block[1]}\n{shown}```"

    return OUTPUT.sub(run, text)


def _commands(block: str) -> str:
    typed = [line for line in block.splitlines() if line.startswith("$ ")]
    return "".join(f"{line}\n{_printed(line)}" for line in typed)


def _printed(line: str) -> str:
    program, *arguments = shlex.split(line.removeprefix("$ "))
    assert program == "ckptool", f"only ckptool is run here: {line}"
    return invoke(arguments, prog_name="ckptool").output


def _session(block: str, names: dict[str, object]) -> str:
    shown = ""
    for example in doctest.DocTestParser().get_examples(block):
        first, *others = example.source.splitlines()
        shown += f">>> {first}\n" + "".join(f"... {line}".rstrip() + "\n" for line in others)
        with redirect_stdout(io.StringIO()) as output:
            exec(compile(example.source, "page", "single"), names)
        shown += output.getvalue()
    return shown


def files(text: str) -> str:
    """Return a page with the files that it shows, which the tests run."""
    return SHOWN_FILE.sub(lambda shown: shown[1] + text_of(shown[2]), text)


def parts(text: str) -> str:
    """Return a page with what is generated from the code: tables of codes, names and modules."""

    def written(part: re.Match[str]) -> str:
        name = part[1]
        return f"<!-- begin {name}, written by tests/docs/generated.py -->\n\n{PARTS[name]()}\n<!-- end {name} -->"

    return PART.sub(written, text)


FRESH: dict[str, Callable[[str], str]] = {
    "outputs": outputs,
    "files": files,
    "parts": parts,
}
"""What in a page is output, and the function that writes it anew."""
