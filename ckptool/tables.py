"""Tables: as lines of text with aligned columns, and as HTML for notebooks."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from ckptool.messages import cut, show

Row: TypeAlias = Sequence[str]

_ROWS: Final = 60
"""Rows of a table in a notebook…"""
_LONGEST: Final = 1 << 10
"""…and characters of a cell of it."""
_NARROWEST_NAME: Final = 24
_WIDEST: Final = 256
"""Longer cells stand out of their column, which would otherwise be as wide in every line."""


def plain_table(headers: Row, rows: Sequence[Row], numbers: Sequence[bool], width: int | None) -> Iterator[str]:
    """
    Yield the lines of a table with aligned columns.

    With a ``width`` (in terminal cells), names are cut in the middle until lines fit; never below a readable rest.
    """
    widths = [max(map(_cells, column)) for column in zip(headers, *rows, strict=True)]
    if width is None:
        widths = [min(room, _WIDEST) for room in widths]
    else:
        excess = sum(widths) + 2 * (len(widths) - 1) - width
        widths[0] = max(min(widths[0], _NARROWEST_NAME), widths[0] - max(0, excess))
    for row in (headers, *rows):
        cells = [
            _pad(cut_middle(cell, room) if width else cell, room, right=number)
            for cell, room, number in zip(row, widths, numbers, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def html_table(caption: str, headers: Row, rows: Iterable[Row], total: int) -> str:
    """
    Return the first rows of a table of ``total`` rows as HTML, with nothing in it but text.

    What is not printable appears as an escape, so neither markup nor text that runs the other way comes from a file.
    """
    from html import escape
    from itertools import islice

    def row(cells: Row, tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(show(cut(cell, _LONGEST)))}</{tag}>' for cell in cells)}</tr>"

    lines = [row(headers, "th"), *(row(cells, "td") for cells in islice(rows, _ROWS))]
    if total > _ROWS:
        lines.append(row([f"and {total - _ROWS:,} more"], "td"))
    return "\n".join(["<table>", f"<caption>{escape(show(cut(caption, _LONGEST)))}</caption>", *lines, "</table>"])


def _cells(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(_char_cells(char) for char in text)


def _char_cells(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def cut_middle(text: str, room: int) -> str:
    """Return text that takes at most so many cells of a terminal: its beginning and its end."""
    if _cells(text) <= room:
        return text
    head = (room - 1) // 2
    tail = room - 1 - head
    return f"{_take(text, head)}…{_take(text[::-1], tail)[::-1]}"


def _take(text: str, room: int) -> str:
    taken = 0
    for index, char in enumerate(text):
        taken += _char_cells(char)
        if taken > room:
            return text[:index]
    return text


def _pad(text: str, room: int, *, right: bool) -> str:
    fill = " " * (room - _cells(text))
    return fill + text if right else text + fill
