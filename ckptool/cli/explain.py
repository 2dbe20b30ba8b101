"""``ckptool explain``: what an error message means, and what in a file causes it."""

from __future__ import annotations

import os
import sys

import click

from ckptool.arguments import as_utf8
from ckptool.cli.options import AnyPath
from ckptool.cli.printing import print_json, with_hints
from ckptool.cli.text import advised, say
from ckptool.cli.verbs import Command, flag
from ckptool.errors import CkptoolError
from ckptool.messages import show
from ckptool.sources.paths import command_line, shown_path
from ckptool.sources.paths import exists as is_there

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
        say(advised("not a message that is known here", hint="Look at the file.", command=command), err=True)
    for number, one in enumerate(found if not as_json else ()):
        if number:
            say("")
        in_file = [] if shown is None or one.in_file is None else [f"{shown}: {one.in_file}"]
        say(advised(f"{one.kind}: {one.meaning}", *in_file, hint=one.hint, command=one.command))
    return 0 if found else 1
