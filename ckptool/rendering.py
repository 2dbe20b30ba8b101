"""
What a report consists of, whatever it is about: lines, labelled facts and tables; and what makes text and HTML of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from ckptool.messages import LISTED, cut, labelled, listed, show

Row: TypeAlias = Sequence[str]


class Fact(NamedTuple):
    """What is said under one label: a line for each of its items."""

    label: str
    items: Sequence[str]
    most: int | None = LISTED
    """How many of them are shown; None for all."""


class Lines(NamedTuple):
    """Lines that stay as they are, however long."""

    lines: Iterable[str]


class Table(NamedTuple):
    """Columns of cells, the first of which are names."""

    headers: Row
    rows: Sequence[Row]
    numbers: Sequence[bool]
    """Which columns are numbers."""
    spare: Sequence[str] = ()
    """Headers of columns that a narrow terminal does without;"""
    spare_if_same: Sequence[str] = ()
    """of those that it does without first, where all rows have the same."""


class Sides(NamedTuple):
    """Facts about several things side by side: each is its label, and what is said of each of them."""

    headers: Row
    facts: Sequence[Row]


Section: TypeAlias = str | Fact | Lines | Table | Sides

_ROWS: Final = 60
"""Rows of a table in a notebook…"""
_LONGEST: Final = 1 << 10
"""…and characters of a cell of it."""
_NARROWEST_NAME: Final = 24
_NARROWEST_ON: Final = 80
"""Columns of a terminal from which on names have at least so much room; on narrower ones, it is two thirds of that."""
_WIDEST: Final = 256
"""Longer cells stand out of their column, which would otherwise be as wide in every line."""
_GAP: Final = 2
_ROWS_AT_ONCE: Final = 1 << 10


def text_of(sections: Iterable[Section], width: int | None = None) -> Iterator[str]:
    """Yield the lines of a report; with a ``width``, tables are laid out for a terminal of so many columns."""
    for section in sections:
        yield from section_lines(section, width)


def section_lines(section: Section, width: int | None) -> Iterator[str]:
    """Yield the lines of one section."""
    if isinstance(section, str):
        yield section
    elif isinstance(section, Fact):
        yield from listed(*section)
    elif isinstance(section, Lines):
        yield from section.lines
    elif isinstance(section, Sides):
        yield from _side_by_side(section, width)
    else:
        yield from plain_table(section, width)


def _side_by_side(section: Sides, width: int | None) -> Iterator[str]:
    """Yield a table; where that is too wide, each fact in a line of its own."""
    label = len(labelled("", "")) - _GAP - 2
    rows = [[f"{name:<{label}}", *cells] for name, *cells in section.facts]
    table = Table(["", *section.headers], rows, [False] * (1 + len(section.headers)))
    lines = [f"  {line}" for line in plain_table(table, None)]
    if width is not None and any(len(line) > width for line in lines):
        lines = [labelled(name, " -> ".join(dict.fromkeys(cells))) for name, *cells in section.facts]
    yield from lines


def html_of(caption: str, sections: Iterable[Section]) -> str:
    """
    Return a report as a table for notebooks, with nothing in it but text: a row for each item of a fact, and for each
    of a table.

    What is not printable appears as an escape, so neither markup nor text that runs the other way comes from a file.
    """
    from html import escape

    def row(cells: Row, tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(show(cut(cell, _LONGEST)))}</{tag}>' for cell in cells)}</tr>"

    rows = [one for section in sections for one in _html_rows(section)]
    most = _ROWS + sum(tag == "th" for tag, _ in rows)
    lines = [row(cells, tag) for tag, cells in rows[:most]]
    if len(rows) > most:
        lines.append(row([f"and {len(rows) - most:,} more"], "td"))
    return "\n".join(["<table>", f"<caption>{escape(show(cut(caption, _LONGEST)))}</caption>", *lines, "</table>"])


def _html_rows(section: Section) -> Iterator[tuple[str, Row]]:
    """Yield rows, each with the tag of its cells."""
    if isinstance(section, str | Lines):
        yield from (("td", [line]) for line in ([section] if isinstance(section, str) else section.lines) if line)
    elif isinstance(section, Fact):
        yield from (("td", [section.label, item]) for item in section.items)
    elif isinstance(section, Sides):
        yield "th", ["", *section.headers]
        yield from (("td", fact) for fact in section.facts)
    else:
        yield "th", section.headers
        yield from (("td", cells) for cells in section.rows)


def plain_table(table: Table, width: int | None) -> Iterator[str]:
    """
    Yield the lines of a table with aligned columns.

    With a ``width`` (in terminal cells), names are cut in the middle until lines fit; never below a readable rest.
    """
    widths = _widths(table)
    if width is None:
        widths = [min(room, _WIDEST) for room in widths]
    else:
        widths = [widths[0], *(min(room, width // 2) for room in widths[1:])]
        excess = sum(widths) + _GAP * (len(widths) - 1) - width
        widths[0] = max(min(widths[0], _narrowest(width)), widths[0] - max(0, excess))
    yield from _aligned([table.headers], widths, table.numbers, is_cut=width is not None)
    for begin in range(0, len(table.rows), _ROWS_AT_ONCE):
        yield from _aligned(table.rows[begin : begin + _ROWS_AT_ONCE], widths, table.numbers, is_cut=width is not None)


def _aligned(rows: Sequence[Row], widths: Sequence[int], numbers: Sequence[bool], *, is_cut: bool) -> Iterator[str]:
    """Yield a line for each row: by columns, which takes a third of what single cells would."""
    columns = [
        _padded_column(cells, room, right=number, is_cut=is_cut)
        for cells, room, number in zip(zip(*rows, strict=True), widths, numbers, strict=True)
    ]
    gap = " " * _GAP
    for row in zip(*columns, strict=True):
        yield gap.join(row).rstrip()


def _padded_column(cells: Row, room: int, *, right: bool, is_cut: bool) -> Iterable[str]:
    if not "".join(cells).isascii() or (is_cut and max(map(len, cells)) > room):
        return [padded(cut_middle(cell, room) if is_cut else cell, room, right=right) for cell in cells]
    return [cell.rjust(room) for cell in cells] if right else [cell.ljust(room) for cell in cells]


def fitted(table: Table, width: int) -> tuple[Table, list[str]]:
    """
    Return a table without as many of its columns as it takes to fit, and the headers of those left out.

    Those with the same in each row go first, then the other ``spare`` ones, in the order in which they are named.
    """
    widths = [min(room, width // 2) for room in _widths(table)]
    needed = min(widths[0], _narrowest(width)) + sum(_GAP + room for room in widths[1:])
    left_out: set[int] = set()
    for index in _in_order(table):
        if needed <= width:
            break
        left_out.add(index)
        needed -= _GAP + widths[index]
    kept = [index for index in range(len(table.headers)) if index not in left_out]
    rows = [[row[index] for index in kept] for row in table.rows]
    shown = Table([table.headers[index] for index in kept], rows, [table.numbers[index] for index in kept])
    return shown, [table.headers[index] for index in sorted(left_out)]


def _in_order(table: Table) -> Iterator[int]:
    headers = list(table.headers)
    various = [len({row[index] for row in table.rows}) > 1 for index in range(len(headers))]
    both = [headers.index(header) for header in (*table.spare_if_same, *table.spare) if header in headers]
    yield from (index for index in both if not various[index])
    yield from (index for index in both if various[index] and headers[index] in table.spare)


def _widths(table: Table) -> list[int]:
    columns = zip(table.headers, *table.rows, strict=True)
    return [max(map(len if "".join(column).isascii() else _cells, column)) for column in columns]


def _narrowest(width: int) -> int:
    return _NARROWEST_NAME if width >= _NARROWEST_ON else _NARROWEST_NAME * 2 // 3


def _cells(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(_char_cells(char) for char in text)


def _char_cells(char: str) -> int:
    import unicodedata  # a large table, for names that are not ASCII

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


def padded(text: str, room: int, *, right: bool = False) -> str:
    """Return text with blanks up to so many cells of a terminal."""
    fill = " " * (room - _cells(text))
    return fill + text if right else text + fill
