"""
Tables of tensors: which columns there are, and how rows become text.

Nothing from a file reaches a terminal raw: ``show`` escapes all that is not printable (control characters,
bidirectional marks, zero-width and private characters, lone surrogates).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ckptool.messages import show, show_nbytes, some
from ckptool.tables import Row, cut_middle
from ckptool.tensors.cuts import cut_of
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo

_SHARED_SHOWN = 3
_LONGEST = 256
"""What a cell shows at most where all are as wide as the longest, and of whatever is no name."""

_TAKE_HTML = frozenset(
    {"github", "pipe", "mediawiki", "moinmoin", "textile", "jira", "youtrack", "unsafehtml", "orgtbl", "asciidoc"}
)
"""Formats of pages that may render the HTML in a cell."""


class Related(NamedTuple):
    """What the tensors of a file have to do with each other, by name."""

    shared: Mapping[str, Sequence[str]] = MappingProxyType({})
    """All names of tensors that share memory."""
    parameters: Mapping[str, str] = MappingProxyType({})
    """The parameter that an optimizer keeps a tensor for."""


class Column(NamedTuple):
    """One column: its header, whether its values are numbers, and how to get one from a tensor."""

    header: str
    is_number: bool
    value: Callable[[str, TensorInfo, Related], str]


def _dtype(_name: str, info: TensorInfo, _related: Related) -> str:
    what = info.subclass or info.layout
    return info.dtype.name if what == "strided" else f"{info.dtype.name} ({show(what[:_LONGEST])})"


def _file_offset(_name: str, info: TensorInfo, _related: Related) -> str:
    offset = tensor_file_offset(info)
    return "-" if offset is None else str(offset)


def _shared_with(name: str, _info: TensorInfo, related: Related) -> str:
    others = [show(cut_middle(other, _LONGEST)) for other in related.shared.get(name, ()) if other != name]
    return some(others, _SHARED_SHOWN)


def _pieces(_name: str, info: TensorInfo, _related: Related) -> str:
    found = cut_of(info)
    return "-" if found is None else f"{found}: {some([show(cut_middle(file, _LONGEST)) for file in found.files])}"


COLUMNS: dict[str, Column] = {
    "name": Column("name", False, lambda name, _info, _related: show(name) or "(root)"),
    "shape": Column("shape", False, lambda _name, info, _related: str(list(info.shape))),
    "dtype": Column("dtype", False, _dtype),
    "device": Column("device", False, lambda _name, info, _related: show(info.location)),
    "numel": Column("parameters", True, lambda _name, info, _related: f"{info.numel:,}"),
    "size": Column("size", True, lambda _name, info, _related: show_nbytes(info.total_nbytes)),
    "nbytes": Column("bytes", True, lambda _name, info, _related: str(info.total_nbytes)),
    "stride": Column("stride", False, lambda _name, info, _related: str(list(info.stride))),
    "storage": Column("storage", False, lambda _name, info, _related: show(info.storage.key) if info.storage else "-"),
    "storage_offset": Column("offset in storage", True, lambda _name, info, _related: str(info.storage_offset)),
    "file_offset": Column("offset in file", True, _file_offset),
    "requires_grad": Column("requires grad", False, lambda _name, info, _related: _yes_no(info.requires_grad)),
    "kind": Column("kind", False, lambda _name, info, _related: info.kind or "-"),
    "parameter": Column("of parameter", False, lambda name, _info, related: show(related.parameters.get(name, "-"))),
    "shared_with": Column("shares memory with", False, _shared_with),
    "pieces": Column("pieces", False, _pieces),
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


def tensor_rows(tensors: Iterable[LazyTensor], columns: Sequence[str], related: Related) -> Iterator[list[str]]:
    """Yield a row for each tensor, and one for each part of a tensor that is in parts."""
    values = [COLUMNS[name].value for name in columns]
    for tensor in tensors:
        yield [value(tensor.name, tensor.info, related) for value in values]
        for part, info in tensor.info.parts:
            yield [value(f"{tensor.name}[{part}]", info, Related()) for value in values]


def formatted_table(headers: Row, rows: Sequence[Row], numbers: Sequence[bool], table_format: str) -> str:
    """Return a table in one of tabulate's formats, or as CSV, with what the format would take for markup disarmed."""
    if table_format == "csv":
        return _csv(headers, rows)
    if table_format == "tsv":
        rows = [[_no_formula(cell) for cell in row] for row in rows]
    from html import escape

    from tabulate import tabulate  # thirty milliseconds that only this path needs

    rows = [[cut_middle(cell, _LONGEST) for cell in row] for row in rows]
    if table_format in _TAKE_HTML:
        rows = [[escape(cell, quote=False) for cell in row] for row in rows]
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
    writer.writerows([[_no_formula(cell) for cell in row] for row in rows])
    return output.getvalue().rstrip("\n")


def _no_formula(cell: str) -> str:
    """Return a cell so that no spreadsheet takes it for a formula."""
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@")) and cell != "-" else cell


def _yes_no(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"
