"""The terminal: whether there is one, how wide it is, lines that fit it, and a pager for those that are many."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

_HANGING: Final = " " * 15
"""Below the text of a labelled line."""
_NARROWEST: Final = 40
"""Text in narrower columns than this is not readable: the terminal may break it."""

pages: list[list[str]] = []
"""What waits for the pager, while there is one."""


def width() -> int | None:
    """Return how many columns the terminal has that standard output goes to; None if it goes elsewhere."""
    if not sys.stdout.isatty():
        return None
    return os.get_terminal_size(sys.stdout.fileno()).columns or None


def wrapped(lines: Iterable[str], room: int | None) -> Iterator[str]:
    """Yield the lines of a report so that they fit, broken between words. Commands stay whole: they are copied."""
    for line in lines:
        fits = room is None or room < _NARROWEST or len(line) <= room
        if fits or not line.startswith((" ", "…")) or line.lstrip().startswith("Run: "):
            yield line
        else:
            yield from _broken(line, room or 0)


def _broken(line: str, room: int) -> Iterator[str]:
    """Yield a line in several. A word that is too long for any line of its column, a path say, is broken nowhere."""
    from textwrap import TextWrapper  # most lines fit

    label = line[: len(_HANGING)] if line.startswith(" ") else ""
    wrapper = TextWrapper(room, label, _HANGING, break_long_words=False, break_on_hyphens=False)
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
