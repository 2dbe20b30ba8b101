"""``ckptool explain``: what an error message means, and what in a file causes it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ckptool.arguments import as_utf8
from ckptool.cli.options import AnyPath
from ckptool.cli.printing import print_json, with_hints
from ckptool.cli.text import say, with_options
from ckptool.cli.verbs import Command, flag
from ckptool.errors import CkptoolError
from ckptool.messages import show
from ckptool.sources.paths import command_line, shown_path
from ckptool.sources.paths import exists as is_there

if TYPE_CHECKING:
    from ckptool.checking.explain import Explanation

SCHEMA = "ckptool.explain/2"
_MOST_TEXT = 1 << 20


@click.command(cls=Command)
@click.argument("text", metavar="TEXT")
@click.argument("path", required=False, metavar="[FILE]", type=AnyPath())
@flag("--json", "as_json", says="Print one JSON object.")
def explain(text: str, path: str | None, *, as_json: bool) -> None:
    """
    Say what an error message means, and what to do.

    TEXT is the message, or all that was printed around it; '-' reads it from standard input. With a FILE, say what in
    the file causes it, and where the names in it are. Exit code 1: the message is not known, and names nothing in the
    file; 2: the file cannot be opened.
    """
    sys.exit(print_explanations(text, path, as_json=as_json))


def print_explanations(text: str, path: str | None, *, as_json: bool) -> int:
    """Print what a message means, and return the exit code."""
    from ckptool.checking.explain import explain as explanations

    if text != "-" and is_there(text):
        what = "folder" if os.path.isdir(text) else "file"
        look = show(command_line(text, "check"))
        raise click.UsageError(f"{show(text)} is a {what}, and TEXT is the message to explain. To look at it: {look}")
    shown = None if path is None else shown_path(path)
    text = as_utf8(sys.stdin.buffer.read(_MOST_TEXT)).decode(errors="replace") if text == "-" else text
    try:
        found = explanations(text, path)
    except CkptoolError as error:
        if not as_json:
            raise
        print_json(with_hints({"schema": SCHEMA, "path": shown, "error": error.as_dict()}))
        return 2
    if as_json:
        print_json({"schema": SCHEMA, "path": shown, "explanations": [one._asdict() for one in found]})
    elif not found:
        command = command_line(path or "FILE", "check")
        say(f"not a message that is known here\nHint: Look at the file.\nRun: {show(command)}", err=True)
    for number, one in enumerate(found if not as_json else ()):
        if number:
            say("")
        say("\n".join(_lines(one, shown)))
    return 0 if found else 1


def _lines(one: Explanation, path: str | None) -> Iterator[str]:
    yield f"{one.kind}: {show(one.meaning)}"
    if path is not None and one.in_file is not None:
        yield f"{show(path)}: {show(one.in_file)}"
    if one.hint is not None:
        yield f"Hint: {show(with_options(one.hint))}"
    if one.command is not None:
        yield f"Run: {show(one.command)}"
