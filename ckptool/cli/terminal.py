"""The terminal: whether there is one, how wide it is, lines that fit it, and a pager for those that are many."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

_HANGING: Final = " " * 15
"""Below the text of a labelled line."""
_SENTENCE: Final = re.compile(r"(?:Error|Hint|Note): |[AB]  |(?:different|the same)\b")
"""What lines begin with that stand at the edge and are no paths: errors, and what `diff` says of both files."""
_NARROWEST: Final = 40
"""Text in narrower columns than this is not readable: the terminal may break it."""

pages: list[list[str]] = []
"""What waits for the pager, while there is one."""


def width(*, err: bool = False) -> int | None:
    """Return how many columns the terminal has that standard output, or error, goes to; None if it goes elsewhere."""
    stream = sys.stderr if err else sys.stdout
    if not stream.isatty():
        return None
    return os.get_terminal_size(stream.fileno()).columns or None


def wrapped(lines: Iterable[str], room: int | None) -> Iterator[str]:
    """Yield the lines of a report so that they fit, broken between words. Commands stay whole: they are copied."""
    for line in lines:
        fits = room is None or room < _NARROWEST or len(line) <= room
        if fits or line.lstrip().startswith("Run: "):
            yield line
        elif line.startswith((" ", "…")):
            yield from _broken(line, line[: len(_HANGING)] if line.startswith(" ") else "", _HANGING, room or 0)
        elif start := _SENTENCE.match(line):
            label = start[0] if start[0].endswith(" ") else ""
            yield from _broken(line, label, " " * (len(label) or 2), room or 0)
        else:
            yield line


def _broken(line: str, label: str, hanging: str, room: int) -> Iterator[str]:
    """Yield a line in several. A word that is too long for any line of its column, a path say, is broken nowhere."""
    from textwrap import TextWrapper  # most lines fit

    wrapper = TextWrapper(room, label, hanging, break_long_words=False, break_on_hyphens=False)
    yield from wrapper.wrap(line[len(label) :])


@contextmanager
def pager(*, asked: bool) -> Iterator[None]:
    """Show what is said meanwhile in the user's pager, if that was asked for and there is a terminal."""
    if not asked or not sys.stdout.isatty():
        yield
        return
    import click

    pages.append([])
    try:
        yield
    finally:
        click.echo_via_pager("".join(pages.pop()))
