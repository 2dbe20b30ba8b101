"""
Tables of tensors: which columns there are, and how rows become text.

Nothing from a file reaches a terminal raw: ``show`` escapes all that is not printable (control characters,
bidirectional marks, zero-width and private characters, lone surrogates).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptool.messages import show, show_nbytes, some
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo

Row = Sequence[str]

_NARROWEST_NAME = 24
_SHARED_SHOWN = 3
_WIDEST = 256
"""Longer cells stand out of their column, which would otherwise be as wide in every line."""
_LONGEST = 1 << 10
"""What a cell shows at most where all are as wide as the longest, and of whatever is no name."""


class Column(NamedTuple):
    """One column: its header, whether its values are numbers, and how to get one from a tensor."""

    header: str
    is_number: bool
    value: Callable[[str, TensorInfo, Mapping[str, Sequence[str]]], str]


def _dtype(_name: str, info: TensorInfo, _shared: Mapping[str, Sequence[str]]) -> str:
    what = info.subclass or info.layout
    return info.dtype.name if what == "strided" else f"{info.dtype.name} ({show(what[:_LONGEST])})"


def _file_offset(_name: str, info: TensorInfo, _shared: Mapping[str, Sequence[str]]) -> str:
    offset = tensor_file_offset(info)
    return "-" if offset is None else str(offset)


def _shared_with(name: str, _info: TensorInfo, shared: Mapping[str, Sequence[str]]) -> str:
    others = [show(_cut(other, _LONGEST)) for other in shared.get(name, ()) if other != name]
    return some(others, _SHARED_SHOWN)


COLUMNS: dict[str, Column] = {
    "name": Column("name", False, lambda name, _info, _shared: show(name) or "(root)"),
    "shape": Column("shape", False, lambda _name, info, _shared: str(list(info.shape))),
    "dtype": Column("dtype", False, _dtype),
    "device": Column("device", False, lambda _name, info, _shared: show(info.location)),
    "numel": Column("parameters", True, lambda _name, info, _shared: f"{info.numel:,}"),
    "size": Column("size", True, lambda _name, info, _shared: show_nbytes(info.total_nbytes)),
    "nbytes": Column("bytes", True, lambda _name, info, _shared: str(info.total_nbytes)),
    "stride": Column("stride", False, lambda _name, info, _shared: str(list(info.stride))),
    "storage": Column("storage", False, lambda _name, info, _shared: show(info.storage.key) if info.storage else "-"),
    "storage_offset": Column("offset in storage", True, lambda _name, info, _shared: str(info.storage_offset)),
    "file_offset": Column("offset in file", True, _file_offset),
    "requires_grad": Column("requires grad", False, lambda _name, info, _shared: _yes_no(info.requires_grad)),
    "kind": Column("kind", False, lambda _name, info, _shared: info.kind or "-"),
    "shared_with": Column("shares memory with", False, _shared_with),
}
DEFAULT_COLUMNS = ("name", "shape", "dtype", "device", "numel", "size")

SORT_KEYS: dict[str, Callable[[LazyTensor], object]] = {
    "file": lambda _tensor: 0,
    "name": lambda tensor: tensor.name,
    "size": lambda tensor: -tensor.info.total_nbytes,
    "numel": lambda tensor: -tensor.info.numel,
    "dtype": lambda tensor: tensor.info.dtype.name,
    "device": lambda tensor: tensor.info.location,
}


def tensor_file_offset(info: TensorInfo) -> int | None:
    """Return the offset of a tensor's first element in the file; None where its bytes are not there as they are."""
    start = info.storage.file_offset if info.storage else None
    return None if start is None else start + info.storage_offset * info.dtype.itemsize // info.dtype.packed


def tensor_rows(
    tensors: Iterable[LazyTensor], columns: Sequence[str], shared: Mapping[str, Sequence[str]]
) -> Iterator[list[str]]:
    """Yield a row for each tensor, and one for each part of a tensor that is in parts."""
    values = [COLUMNS[name].value for name in columns]
    for tensor in tensors:
        yield [value(tensor.name, tensor.info, shared) for value in values]
        for part, info in tensor.info.parts:
            yield [value(f"{tensor.name}[{part}]", info, {}) for value in values]


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
            _pad(_cut(cell, room) if width else cell, room, right=number)
            for cell, room, number in zip(row, widths, numbers, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def formatted_table(headers: Row, rows: Sequence[Row], numbers: Sequence[bool], table_format: str) -> str:
    """Return a table in one of tabulate's formats, or as CSV, with what the format would take for markup disarmed."""
    if table_format == "csv":
        return _csv(headers, rows)
    from tabulate import tabulate  # thirty milliseconds that only this path needs

    rows = [[_cut(cell, _LONGEST) for cell in row] for row in rows]
    if table_format in ("github", "pipe", "jira"):
        rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return tabulate(
        rows,
        headers=list(headers),
        tablefmt=table_format,
        disable_numparse=True,
        colalign=["right" if number else "left" for number in numbers] if rows else None,
    )


def table_formats() -> list[str]:
    """Return the names that ``formatted_table`` takes."""
    from tabulate import tabulate_formats

    # "unsafehtml" and "latex_raw" pass what the file says on as markup.
    return sorted({*tabulate_formats, "csv"} - {"unsafehtml", "latex_raw"})


def _csv(headers: Row, rows: Sequence[Row]) -> str:
    import csv
    import io

    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(headers)
    # A spreadsheet would take such a cell for a formula.
    writer.writerows(
        [
            [f"'{cell}" if cell.startswith(("=", "+", "-", "@")) and cell != "-" else cell for cell in row]
            for row in rows
        ]
    )
    return output.getvalue().rstrip("\n")


def _yes_no(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def _cells(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(_char_cells(char) for char in text)


def _char_cells(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _cut(text: str, room: int) -> str:
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
