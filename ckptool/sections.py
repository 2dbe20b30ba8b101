"""
The parts of a report: lines, labelled facts and tables; and their forms as text, HTML and JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, takewhile
from typing import Any, Final, NamedTuple, TypeAlias

from ckptool.messages import LISTED, cut, labelled, listed, show

Row: TypeAlias = Sequence[str]


class Fact(NamedTuple):
    """A label, and a line for each item."""

    label: str
    items: Sequence[str]
    most: int | None = LISTED
    """How many items are shown; None for all."""


class Lines(NamedTuple):
    """Lines that stay as they are, however long."""

    lines: Iterable[str]


class Table(NamedTuple):
    """Rows of cells; the first column has the names."""

    headers: Row
    rows: Sequence[Row]
    numbers: Sequence[bool]
    """For each column, whether it is of numbers, which are aligned to the right."""
    spare: Sequence[str] = ()
    """Headers of columns that may be left out on a narrow terminal."""


class Sides(NamedTuple):
    """Facts about several things in columns: each row is a label, and then one cell for each thing."""

    headers: Row
    facts: Sequence[Row]


Section: TypeAlias = str | Fact | Lines | Table | Sides

_ROWS: Final = 60
"""Rows of a table in a notebook…"""
_LONGEST: Final = 1 << 10
"""…and characters of a cell of it."""
_NARROWEST_NAME: Final = 24
_NARROWEST_ON: Final = 80
"""The width of a terminal from which names get at least ``_NARROWEST_NAME`` cells; below it, two thirds of that."""
_WIDEST: Final = 256
"""Longer cells extend beyond their column, because they would widen it in every line."""
_GAP: Final = 2


def text_of(sections: Iterable[Section]) -> Iterator[str]:
    """Yield the lines of a report."""
    for section in sections:
        yield from section_lines(section)


def section_lines(section: Section, width: int | None = None) -> Iterator[str]:
    """Yield the lines of one section; with a ``width``, tables are laid out for a terminal of that many cells."""
    if isinstance(section, str):
        yield section
    elif isinstance(section, Fact):
        yield from listed(*section)
    elif isinstance(section, Lines):
        yield from section.lines
    elif isinstance(section, Sides):
        label = len(labelled("", "")) - _GAP - 2
        rows = [[f"{name:<{label}}", *cells] for name, *cells in section.facts]
        table = Table(["", *section.headers], rows, [False] * (1 + len(section.headers)))
        lines = [f"  {line}" for line in _aligned(table, None)]
        if width is not None and any(len(line) > width for line in lines):  # each fact in a line of its own
            lines = [labelled(name, " -> ".join(dict.fromkeys(cells))) for name, *cells in section.facts]
        yield from lines
    else:
        yield from _aligned(section, width)


def html_of(caption: str, sections: Iterable[Section]) -> str:
    """
    Return a report as an HTML table for notebooks: a row for each item of a fact, and for each row of a table.

    Markup and characters that are not printable are escaped, so a file can bring in neither tags nor text that runs
    the other way.
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
    """Yield the rows of a section, each with the tag of its cells, ``th`` or ``td``."""
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


def _aligned(table: Table, width: int | None) -> Iterator[str]:
    """
    Yield the lines of a table with aligned columns.

    With a ``width`` (in terminal cells), names are cut in the middle until lines fit, but never below ``_narrowest``.
    """
    name, *others = _widths(table)
    if width is None:
        widths = [min(room, _WIDEST) for room in (name, *others)]
    else:
        others = [min(room, width // 2) for room in others]
        left = width - sum(_GAP + room for room in others)
        widths = [max(min(name, _narrowest(width)), min(name, left)), *others]
    sides = zip(table.numbers, widths, strict=True)
    plain = (" " * _GAP).join(f"{{:{'>' if number else '<'}{room}}}" for number, room in sides)
    for row in (table.headers, *table.rows):
        cells = row if width is None else [cut_middle(cell, room) for cell, room in zip(row, widths, strict=True)]
        if "".join(cells).isascii():  # a cell of the terminal for each character
            yield plain.format(*cells).rstrip()
            continue
        columns = zip(cells, widths, table.numbers, strict=True)
        yield (" " * _GAP).join(padded(cell, room, right=number) for cell, room, number in columns).rstrip()


def fitted(table: Table, width: int) -> tuple[Table, list[str]]:
    """
    Return a table that fits a width, and the headers of the columns that were left out for that.

    Only ``spare`` columns are left out: first those with the same cell in each row, then the others in their order.
    """
    headers = list(table.headers)
    widths = [min(room, width // 2) for room in _widths(table)]
    needed = min(widths[0], _narrowest(width)) + sum(_GAP + room for room in widths[1:])
    left_out: set[int] = set()
    spare = [headers.index(one) for one in table.spare if one in headers]
    for index in sorted(spare, key=lambda index: len({row[index] for row in table.rows}) > 1):
        if needed > width:
            left_out.add(index)
            needed -= _GAP + widths[index]
    kept = [index for index in range(len(headers)) if index not in left_out]
    rows = [[row[index] for index in kept] for row in table.rows]
    shown = Table([headers[index] for index in kept], rows, [table.numbers[index] for index in kept])
    return shown, [headers[index] for index in sorted(left_out)]


def _widths(table: Table) -> list[int]:
    columns = zip(table.headers, *table.rows, strict=True)
    return [max(map(_cells, column)) for column in columns]


def _narrowest(width: int) -> int:
    return _NARROWEST_NAME if width >= _NARROWEST_ON else _NARROWEST_NAME * 2 // 3


def _cells(text: str) -> int:
    """Return how many cells of a terminal a text takes up."""
    return len(text) if text.isascii() else sum(map(_char_cells, text))


def _char_cells(char: str) -> int:
    import unicodedata  # a large table, for names that are not ASCII

    return 0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF")


def cut_middle(text: str, room: int) -> str:
    """Return text cut in the middle to at most ``room`` cells of a terminal."""
    if _cells(text) <= room:
        return text
    head = (room - 1) // 2
    return f"{_take(text, head)}…{_take(text[::-1], room - 1 - head)[::-1]}"


def _take(text: str, room: int) -> str:
    """Return as much of the beginning of a text as fits into ``room`` cells."""
    ends = accumulate(map(_char_cells, text))
    return text[: sum(1 for _ in takewhile(lambda end: end <= room, ends))]


def padded(text: str, room: int, *, right: bool = False) -> str:
    """Return text padded with blanks to ``room`` cells of a terminal; with ``right``, aligned to the right."""
    fill = " " * (room - _cells(text))
    return fill + text if right else text + fill


def completed(report: object) -> list[str]:
    """Return the names for ``dir()`` of a named tuple: its own fields, properties and methods, not those of tuples."""
    return [name for name in type(report).__dict__ if not name.startswith("_")]


def as_json(value: Any) -> Any:
    """Return a value for JSON: named tuples as objects; infinity, NaN and complex numbers, which it lacks, as text."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {name: as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    if isinstance(value, complex) or (isinstance(value, float) and not abs(value) < float("inf")):
        return str(value)
    return value
