"""The text of an error, as every verb prints it; and text for people, in colours where a terminal shows them."""

from __future__ import annotations

import os
import re
import sys
from typing import Final

import click

from ckptool.cli import terminal
from ckptool.errors import OPTION, CkptoolError
from ckptool.messages import show


def with_options(text: str) -> str:
    """Return a hint with its options as they are written on the command line: `force=True` as --force."""
    return re.sub(OPTION, lambda found: _spelled(found[1], found[2]), text)


def _spelled(name: str, value: str) -> str:
    flag = "--model-arg" if name == "model_arguments" else f"--{name.replace('_', '-')}"
    return flag if value in ("", "True") else f"{flag} {value.strip(chr(39))}"


def error_text(error: CkptoolError) -> str:
    """Return the one to three lines that a person sees of an error: the fact, what to do about it, what to run."""
    hint = f"\nHint: {show(with_options(error.hint))}" if error.hint else ""
    command = f"\nRun: {show(error.command)}" if error.command and error.command not in error.message else ""
    return f"Error: {show(str(error))}{hint}{command}"


_COLOURS: Final = {"error": "red", "warning": "magenta", "Error:": "red"}
"""Of what matters alone, and only such as can be read on light and on dark terminals alike."""
_BOLD: Final = ("error", "Error:", "Hint:", "Run:")
# The names of tensors begin lines, too: those of reports are followed by more blanks.
_MARKED: Final = r"(?m)^(  (?=(?:error|warning) {4})| *(?=(?:Error|Hint|Run): ))(\w+:?)(.*)$"


def say(text: str, *, err: bool = False) -> None:
    """Print text; on a terminal, in colours by severity, and with commands that stand out."""
    if err and not terminal.pages and (room := terminal.width(err=True)) is not None:
        text = "\n".join(terminal.wrapped(text.split("\n"), room))
    shown = re.sub(_MARKED, _painted, text) if _shows_colours(err=err) else text
    if terminal.pages:
        terminal.pages[-1].append(f"{shown}\n")
    else:
        click.echo(shown, err=err)


def painted(word: str) -> str:
    """Return a severity in its colour, if standard output shows colours."""
    return _styled(word) if _shows_colours(err=False) else word


def _painted(line: re.Match[str]) -> str:
    indent, word, rest = line.groups()
    return f"{indent}{_styled(word)}{click.style(rest, bold=True) if word == 'Run:' else rest}"


def _styled(word: str) -> str:
    return click.style(word, fg=_COLOURS.get(word), bold=word in _BOLD or None)


def _has_no_colours() -> bool:
    """Say whether colours are not wanted (https://no-color.org), or the terminal has none."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def _shows_colours(*, err: bool) -> bool:
    """Say whether to colour: as --color asks, else on a terminal that has them, unless NO_COLOR is set."""
    context = click.get_current_context(silent=True)
    asked = context.find_root().color if context is not None else None
    stream = sys.stderr if err else sys.stdout
    return asked if asked is not None else stream.isatty() and not _has_no_colours()
