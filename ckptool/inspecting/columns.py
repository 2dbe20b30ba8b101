"""Columns of tables of tensors: their names, their headers, and how each gets its value from a tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckptool.checkpoints.summary import sharing
from ckptool.messages import show, show_nbytes, some
from ckptool.sections import Table, cut_middle
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo

if TYPE_CHECKING:
    from ckptool.checkpoints.checkpoint import Checkpoint

_SHARED_SHOWN = 3
LONGEST_CELL: Final = 256
"""Most characters in a cell if all are as wide as the longest one, and in a cell that is not a name."""


class Related(NamedTuple):
    """How the tensors of a file are related, by name."""

    shared: Mapping[str, Sequence[str]] = MappingProxyType({})
    """The names of all tensors that share memory with a tensor, its own included."""
    parameters: Mapping[str, str] = MappingProxyType({})
    """The parameter for which an optimizer keeps a tensor."""


class Column(NamedTuple):
    """One column: its header, whether its values are numbers, and how to get one from a tensor."""

    header: str
    is_number: bool
    value: Callable[[str, TensorInfo, Related], str]
    raw: Callable[[TensorInfo], object] | None = None
    """The value for programs, where its text is for people."""


def _of_info(
    header: str, raw: Callable[[TensorInfo], object], shown: Callable[[Any], str] = str, *, is_number: bool = True
) -> Column:
    """Return a column whose value depends only on the facts of a tensor; ``shown`` makes the text for people."""
    if is_number:  # most tensors share a few sizes
        shown = lru_cache(1024)(shown)
    return Column(header, is_number, lambda _name, info, _related: shown(raw(info)), raw)


def _dtype(_name: str, info: TensorInfo, _related: Related) -> str:
    what = info.subclass or info.layout
    return info.dtype.name if what == "strided" else f"{info.dtype.name} ({show(what[:LONGEST_CELL])})"


def _shared_with(name: str, _info: TensorInfo, related: Related) -> str:
    others = [show(cut_middle(other, LONGEST_CELL)) for other in related.shared.get(name, ()) if other != name]
    return some(others, _SHARED_SHOWN)


def _pieces(_name: str, info: TensorInfo, _related: Related) -> str:
    from ckptool.tensors.pieces import cut_of  # a column that is rarely requested

    found = cut_of(info)
    return "-" if found is None else f"{found}: {some([show(cut_middle(file, LONGEST_CELL)) for file in found.files])}"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _yes_no(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


COLUMNS: dict[str, Column] = {
    "name": Column("name", False, lambda name, _info, _related: show(name) or "(root)"),
    "shape": _of_info("shape", lambda info: list(info.shape), is_number=False),
    "dtype": Column("dtype", False, _dtype),
    "device": Column("device", False, lambda _name, info, _related: show(info.location)),
    "elements": _of_info("elements", lambda info: info.numel, "{:,}".format),
    "size": _of_info("size", lambda info: info.total_nbytes, show_nbytes),
    "bytes": _of_info("bytes", lambda info: info.total_nbytes),
    "stride": _of_info("stride", lambda info: list(info.stride), is_number=False),
    "storage": Column("storage", False, lambda _name, info, _related: show(info.storage.key) if info.storage else "-"),
    "storage_offset": _of_info("storage offset", lambda info: info.storage_offset),
    "file_offset": _of_info("file offset", lambda info: tensor_file_offset(info), _or_dash),
    "requires_grad": _of_info("requires grad", lambda info: info.requires_grad, _yes_no, is_number=False),
    "kind": _of_info("kind", lambda info: info.kind, lambda kind: kind or "-", is_number=False),
    "of_parameter": Column("of parameter", False, lambda name, _info, related: show(related.parameters.get(name, "-"))),
    "shared_with": Column("shared with", False, _shared_with),
    "pieces": Column("pieces", False, _pieces),
}
"""By name, which is the header with ``_`` for a space."""
_OTHER_NAMES = {"numel": "elements", "parameters": "elements", "nbytes": "bytes", "parameter": "of_parameter"}
DEFAULT_COLUMNS = ("name", "shape", "dtype", "device", "elements", "size")

_NUMBERS = re.compile("([0-9]{1,18})")
SORT_KEYS: dict[str, Callable[[LazyTensor], object]] = {
    "file": lambda _tensor: 0,
    "name": lambda tensor: [int(one) if at % 2 else one for at, one in enumerate(_NUMBERS.split(tensor.name))],
    "size": lambda tensor: -tensor.info.total_nbytes,
    "elements": lambda tensor: -tensor.info.numel,
    "dtype": lambda tensor: tensor.info.dtype.name,
    "device": lambda tensor: tensor.info.location,
}
OTHER_SORT_KEYS = {"numel": "elements", "parameters": "elements", "bytes": "size", "nbytes": "size"}
"""Other names for them, as those of columns."""


def column_named(text: str) -> str:
    """Return the name of the column that a text means; an unknown one is returned in the same spelling."""
    name = "_".join(text.lower().replace("-", " ").split())
    return _OTHER_NAMES.get(name, name)


def tensor_file_offset(info: TensorInfo) -> int | None:
    """Return the offset of a tensor's first element in the file; None if its bytes are not there as plain bytes."""
    start = info.storage.file_offset if info.storage else None
    return None if start is None else start + info.storage_offset * info.dtype.itemsize // info.dtype.packed


def tensor_table(
    checkpoint: Checkpoint, tensors: Iterable[LazyTensor], columns: Sequence[str], *, is_raw: bool = False
) -> Table:
    """
    Return a table with a row for each tensor, and one for each part of a tensor.

    With ``is_raw``, for programs, headers are the names of columns, and numbers are numbers, in elements and bytes.
    """
    chosen = [COLUMNS[name] for name in columns]
    related = _related(checkpoint, columns)
    named = ((name, info, its) for tensor in tensors for name, info, its in _with_parts(tensor, related))
    if is_raw:
        rows: list[Any] = [
            [one.raw(info) if one.raw else one.value(name, info, its) for one in chosen] for name, info, its in named
        ]
    else:
        values = [one.value for one in chosen]
        rows = [[value(name, info, its) for value in values] for name, info, its in named]
    headers = columns if is_raw else [one.header for one in chosen]
    return Table(headers, rows, [one.is_number for one in chosen])


def _related(checkpoint: Checkpoint, columns: Sequence[str]) -> Related:
    shared: dict[str, Sequence[str]] = {}
    parameters: dict[str, str] = {}
    if "shared_with" in columns:
        shared = {name: group for group in sharing(checkpoint.tensors.values()) for name in group}
    if "of_parameter" in columns:
        from ckptool.checkpoints.training import parameter_names  # rarely requested

        parameters = parameter_names(checkpoint)
    return Related(shared, parameters)


def _with_parts(tensor: LazyTensor, related: Related) -> Iterator[tuple[str, TensorInfo, Related]]:
    yield tensor.name, tensor.info, related
    for part, info in tensor.info.parts:
        yield f"{tensor.name}[{part}]", info, Related()
