"""Names as a tree: what `inspect --tree` shows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from ckptool.messages import counted, show, show_nbytes
from ckptool.sections import cut_middle
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity

_DEEPEST_INDENT: Final = 40
_NARROWEST_NAME: Final = 16
_NUMBER: Final = re.compile("0|[1-9][0-9]{0,8}")
_NUMBERS: Final = re.compile("[0-9]{1,18}")


class _Branch:
    """A component of names. ``kind`` is equal for branches with the same content, whatever their names."""

    __slots__ = ("below", "dtypes", "kind", "leaf", "nbytes", "numel", "tensors")

    def __init__(self) -> None:
        self.below: dict[str, _Branch] = {}
        self.leaf: LazyTensor | None = None
        self.tensors = self.numel = self.nbytes = self.kind = 0
        self.dtypes: dict[str, None] = {}

    @property
    def total(self) -> str:
        dtypes = f", {', '.join(self.dtypes)}" if self.dtypes else ""
        sizes = f"{counted(self.numel, 'element')}, {show_nbytes(self.nbytes)}{dtypes}"
        return f"{counted(self.tensors, 'tensor')}, {sizes}"


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
            said.append(branch.total)
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
        first = int(component) if _NUMBER.fullmatch(component) else -1
        found.append((component, one, 1 if first >= 0 else 0))
    return found
