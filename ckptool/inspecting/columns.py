"""The table and the tree of tensors: columns, each with the value that it gets from a tensor."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckptool.checkpoints.summary import sharing
from ckptool.messages import counted, show, show_nbytes, some
from ckptool.sections import Table, cut_middle
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, identity

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
    value: Callable[[str, TensorInfo, Related], object]
    shown: Callable[[Any], str] | None = None
    """Makes the text for people of a value; None if it is one."""

    def text(self, name: str, info: TensorInfo, related: Related) -> str:
        """Return the text for people."""
        value = self.value(name, info, related)
        return str(value) if self.shown is None else self.shown(value)


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
    return "-" if value is None or value == "" else str(value)


_yes_no: Final = {None: "-", True: "yes", False: "no"}.__getitem__

COLUMNS: dict[str, Column] = {
    "name": Column("name", False, lambda name, _info, _related: show(name) or "(root)"),
    "shape": Column("shape", False, lambda _name, info, _related: list(info.shape), str),
    "dtype": Column("dtype", False, _dtype),
    "device": Column("device", False, lambda _name, info, _related: show(info.location)),
    "elements": Column("elements", True, lambda _name, info, _related: info.numel, "{:,}".format),
    "size": Column("size", True, lambda _name, info, _related: info.total_nbytes, show_nbytes),
    "bytes": Column("bytes", True, lambda _name, info, _related: info.total_nbytes, str),
    "stride": Column("stride", False, lambda _name, info, _related: list(info.stride), str),
    "storage": Column("storage", False, lambda _name, info, _related: show(info.storage.key) if info.storage else "-"),
    "storage_offset": Column("storage offset", True, lambda _name, info, _related: info.storage_offset, str),
    "file_offset": Column("file offset", True, lambda _name, info, _related: tensor_file_offset(info), _or_dash),
    "requires_grad": Column("requires grad", False, lambda _name, info, _related: info.requires_grad, _yes_no),
    "kind": Column("kind", False, lambda _name, info, _related: info.kind, _or_dash),
    "of_parameter": Column("of parameter", False, lambda name, _info, related: show(related.parameters.get(name, "-"))),
    "shared_with": Column("shared with", False, _shared_with),
    "pieces": Column("pieces", False, _pieces),
}
"""By name, which is the header with ``_`` for a space."""
OTHER_NAMES: Final = {"numel": "elements", "parameters": "elements", "nbytes": "bytes", "parameter": "of_parameter"}
DEFAULT_COLUMNS = ("name", "shape", "dtype", "device", "elements", "size")

_NUMBERS: Final = re.compile("([0-9]{1,18})")
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
    values = [one.value if is_raw or one.shown is None else one.text for one in chosen]
    shared: dict[str, Sequence[str]] = {}
    parameters: dict[str, str] = {}
    if "shared_with" in columns:
        shared = {name: group for group in sharing(checkpoint.tensors.values()) for name in group}
    if "of_parameter" in columns:
        from ckptool.checkpoints.training import parameter_names  # rarely requested

        parameters = parameter_names(checkpoint)
    related = Related(shared, parameters)
    rows: list[Any] = []
    for tensor in tensors:
        rows.append([value(tensor.name, tensor.info, related) for value in values])
        for part, info in tensor.info.parts:
            rows.append([value(f"{tensor.name}[{part}]", info, Related()) for value in values])
    return Table(columns if is_raw else [one.header for one in chosen], rows, [one.is_number for one in chosen])


_DEEPEST_INDENT: Final = 40
_NARROWEST_NAME: Final = 16
_INDEX: Final = re.compile("0|[1-9][0-9]{0,8}")


class _Branch:
    """A component of names. ``kind`` is equal for branches with the same content, whatever their names."""

    __slots__ = ("below", "dtypes", "kind", "leaf", "nbytes", "numel", "tensors")

    def __init__(self) -> None:
        self.below: dict[str, _Branch] = {}
        self.leaf: LazyTensor | None = None
        self.tensors = self.numel = self.nbytes = self.kind = 0
        self.dtypes: dict[str, None] = {}


def tree_lines(
    tensors: Iterable[LazyTensor], depth: int | None = None, *, fold: bool = True, width: int | None = None
) -> Iterator[str]:
    """
    Yield the names as a tree, each component once, with count, elements, size and types of what is below it.

    Tied tensors have several names, but their elements and their size count once in a total.

    ``depth`` is how many levels are shown. With ``fold``, neighbours with consecutive numbers that hold the same names,
    shapes, types and devices are one line, with how many there are. Numbers come in their own order, whatever the
    file's is: many writers sort names as text. With a ``width``, names are cut in the middle until lines fit it.
    """
    root = _grown(tensors)
    todo = [(name, branch, count, 0) for name, branch, count in reversed(_folded(root, fold=fold))]
    while todo:
        name, branch, count, level = todo.pop()
        # A chain of single components (module.encoder.) is one line.
        while branch.leaf is None and len(branch.below) == 1:
            ((component, only),) = branch.below.items()
            name, branch = f"{name}.{component}", only
        said = []
        if branch.leaf is not None:
            info = branch.leaf.info
            said.append(f"{list(info.shape)} {info.dtype} {show(info.location)}")
        if branch.below:
            sizes = f"{counted(branch.numel, 'element')}, {show_nbytes(branch.nbytes)}"
            said.append(", ".join([counted(branch.tensors, "tensor"), sizes, *branch.dtypes]))
        for text in said:
            before, after = "  " * min(level, _DEEPEST_INDENT), f"  {f'{count:,} × ' if count > 1 else ''}{text}"
            shown = show(name)
            if width is not None:
                shown = cut_middle(shown, max(_NARROWEST_NAME, width - len(before) - len(after)))
            yield f"{before}{shown}{after}"
        if branch.below and (depth is None or level + 1 < depth):
            below = _folded(branch, fold=fold)
            todo.extend((inner, one, number, level + 1) for inner, one, number in reversed(below))


def _grown(tensors: Iterable[LazyTensor]) -> _Branch:
    root = _Branch()
    branches = [root]  # inner ones after outer ones
    everything = list(tensors)
    many = Counter(identity(tensor.info) for tensor in everything)
    counted_in: set[tuple[int, object]] = set()
    for tensor in everything:
        branch = root
        memory = identity(tensor.info)
        is_tied = many[memory] > 1
        for component in tensor.name.split("."):
            branch.tensors += 1
            place = (id(branch), memory)
            if not is_tied or place not in counted_in:
                branch.numel += tensor.info.numel
                branch.nbytes += tensor.info.total_nbytes
            if is_tied:
                counted_in.add(place)
            branch.dtypes.setdefault(tensor.dtype)
            below = branch.below.get(component)
            if below is None:
                below = branch.below[component] = _Branch()
                branches.append(below)
            branch = below
        branch.leaf = tensor
    kinds: dict[object, int] = {}
    for branch in reversed(branches):
        info = branch.leaf.info if branch.leaf is not None else None
        leaf = None if info is None else (info.dtype.name, info.location, str(info.shape))
        branch.below = _in_order(branch.below)
        inside = tuple(sorted((component, one.kind) for component, one in branch.below.items()))
        branch.kind = kinds.setdefault((leaf, inside, branch.numel), len(kinds))
    return root


def _in_order(below: dict[str, _Branch]) -> dict[str, _Branch]:
    """Return components, with those that differ only by numbers (`10`, `layer10`) sorted among their own places."""
    alike: dict[str, list[str]] = {}
    for name in below:
        alike.setdefault(_NUMBERS.sub("#", name), []).append(name)
    ordered = {
        kind: iter(sorted(names, key=lambda name: [*map(int, _NUMBERS.findall(name))])) for kind, names in alike.items()
    }
    return {name: below[name] for name in (next(ordered[_NUMBERS.sub("#", name)]) for name in below)}


def _folded(branch: _Branch, *, fold: bool) -> list[tuple[str, _Branch, int]]:
    """Return the branches below one: the name, the branch, and how many equal neighbours it stands for."""
    found: list[tuple[str, _Branch, int]] = []
    first = 0
    for component, one in branch.below.items():
        name, last, count = found[-1] if found else ("", one, 0)
        if fold and count and one.kind == last.kind and component == str(first + count):
            found[-1] = f"{name.partition('–')[0]}–{component}", last, count + 1
            continue
        first = int(component) if _INDEX.fullmatch(component) else -1
        found.append((component, one, 1 if first >= 0 else 0))
    return found
