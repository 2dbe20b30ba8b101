"""
``diff``: opens both checkpoints, matches their names, and compares facts and values.

Everything but the values comes from the two indexes. Values are compared in bounded pieces, and numpy is imported
only to compute by how much they differ.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ckptool.arguments import checked
from ckptool.cancellation import each
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import left_beside
from ckptool.diffing.report import UNREAD, DiffedFile, DiffReport, OrderChange, ShapeChange
from ckptool.diffing.sides import Scope, Side, heads, scope_of, side_of
from ckptool.diffing.trees import ABSENT, NOTHING, Change, tree_changes
from ckptool.diffing.values import ValueComparer
from ckptool.errors import MissingPackage, UnsupportedFeature, about
from ckptool.formats import open_checkpoint
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.messages import counted
from ckptool.pickles.nodes import Call, Inert, PersistentId, global_of
from ckptool.recipes import NO_NUMBERS, requested_recipe
from ckptool.sources.files import Origin
from ckptool.sources.source import Meter, Progress
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, identity
from ckptool.torch_ops.differences import Likeness, Tolerance

if TYPE_CHECKING:
    from ckptool.recipes.find import Layout

_MOST_CHANGES: Final = 1000


@checked()
def diff(
    a: Origin,
    b: Origin,
    *,
    key_a: str | None = None,
    key_b: str | None = None,
    recipe: str | os.PathLike[str] | None = None,
    reverse: bool = False,
    recipe_arguments: Mapping[str, int] = NO_NUMBERS,
    ignore_wrappers: bool = False,
    ignore_order: bool = False,
    ignore_device: bool = False,
    ignore_dtype: bool = False,
    rtol: float | None = None,
    atol: float | None = None,
    values: bool = True,
    stat: bool = False,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> DiffReport:
    """
    Compare two checkpoints of any forms. Nothing in them runs.

    Two of one kind with more than weights (training checkpoints, whole models) are compared in everything but code;
    otherwise the weights of one are compared with those of the other, and ``key_a`` or ``key_b`` names the state dict
    if it is not clear which one is meant. A ``recipe`` puts the weights of ``a`` into another layout. Facts that a
    format cannot record are no difference: safetensors has no devices, no ties, no order but by ckptool's own note.

    Values are the same if their bits are. With ``rtol`` or ``atol`` (0 where only the other is given), floating
    values are the same where ``|a - b| <= atol + rtol * |b|`` in float64, and NaN is the same as NaN. Tensors of two
    types are the same if they are the same numbers. ``values=False`` compares all but the values.
    ``stat`` also reports how alike tensors are whose values differ, as vectors; it needs numpy. ``progress`` is
    called with the bytes that were compared so far, and those to be compared in all.

    Memory stays bounded whatever the size, and numpy is not imported unless values differ.

    Raises:
        Cancelled: The cancellation in ``limits`` was triggered.
        MissingPackage: numpy is not installed, and ``stat`` needs it, or, where bytes differ, a tolerance or
            ``ignore_dtype``.
        CkptoolError: A file cannot be read, or it is not clear what in it is to be compared.
        ValueError: A tolerance is not a finite number of 0 or more; or there is one, or ``stat``, without values.
    """
    tolerance = _tolerance(rtol, atol, has_values=values, stat=stat)
    layout = requested_recipe(recipe, recipe_arguments, reverse=reverse)
    asked = {"order": ignore_order, "devices": ignore_device, "dtypes": ignore_dtype}
    ignored = {aspect for aspect, is_ignored in asked.items() if is_ignored}
    with ExitStack() as stack:
        checkpoints = [stack.enter_context(open_checkpoint(path, limits=limits)) for path in (a, b)]
        scope, keys = scope_of(checkpoints[0], checkpoints[1], key_a, key_b, layout), (key_a, key_b)
        size = sum(checkpoint.file_nbytes for checkpoint in checkpoints)

        def compared(*, aligned: bool) -> DiffReport:
            sides = _sides(checkpoints, scope, keys, layout, aligned=aligned)
            infos = [tensor.info for name, tensor in sides[0].tensors.items() if name in sides[1].tensors]
            meter = Meter(progress, sum({identity(info): info.nbytes for info in infos}.values()))
            paths = checkpoints[0].path, checkpoints[1].path
            comparer = ValueComparer(size, tolerance, limits, paths, meter) if values else None
            found = _Differences(checkpoints, sides, comparer, ignored)
            found.compare(sides[0].tensors, sides[1].tensors)
            found.compare(sides[0].attributes, sides[1].attributes)
            report = found.report(scope, keys)
            if report.only_a and report.only_b:
                a, b = (side.tensors.keys() for side in _sides(checkpoints, scope, keys, layout, aligned=True))
                report = report._replace(wrapped=len(a & b) > len(infos))
            return report._replace(likeness=tuple(found.likeness())) if stat else report

        for checkpoint in checkpoints if values else ():
            checkpoint.announce(checkpoint.tensors.values())
        report = compared(aligned=ignore_wrappers)
        if report.wrapped and not ignore_wrappers:
            report = report._replace(unwrapped=compared(aligned=True).verdict)
        for checkpoint in checkpoints:
            with about(checkpoint.path):
                checkpoint.check_unchanged()
        return report


def _tolerance(rtol: float | None, atol: float | None, *, has_values: bool, stat: bool) -> Tolerance | None:
    """Return how far apart values may be; None if they have to be the same."""
    for name, given in (("rtol", rtol), ("atol", atol)):
        if given is not None and not 0 <= given < float("inf"):
            raise ValueError(f"{name}={given!r} is not a tolerance: give a finite number, 0 or more")
    if not has_values and (stat or rtol is not None or atol is not None):
        raise ValueError("stat, rtol and atol need values=True: they are about them")
    return None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0)


def _file(checkpoint: Checkpoint, side: Side) -> DiffedFile:
    path = f"{checkpoint.path}::{checkpoint.member}" if checkpoint.member else checkpoint.path
    also = () if side.key is None else checkpoint.also_under(side.key)
    return DiffedFile(path, checkpoint.format, checkpoint.form, side.key, also)


def _sides(
    checkpoints: Sequence[Checkpoint],
    scope: Scope,
    keys: tuple[str | None, str | None],
    recipe: Layout | None,
    *,
    aligned: bool,
) -> tuple[Side, Side]:
    sides = []
    for checkpoint, key, label, layout in zip(checkpoints, keys, "ab", (recipe, None), strict=True):
        with about(checkpoint.path):
            sides.append(side_of(checkpoint, scope, key, label, aligned=aligned, recipe=layout))
    return sides[0], sides[1]


_T = TypeVar("_T")
_KINDS: Final = ("only_a", "only_b", "shapes", "dtypes", "devices", "layouts", "ties_a", "ties_b", "values", "close")
"""Fields of a report that are collected tensor by tensor."""


class _Differences:
    """Collects the differences between two sides."""

    def __init__(
        self,
        checkpoints: Sequence[Checkpoint],
        sides: tuple[Side, Side],
        comparer: ValueComparer | None,
        ignored: set[str],
    ) -> None:
        self._checkpoints = checkpoints
        self._cancellation = checkpoints[0].source.cancellation
        self._a, self._b = sides
        self._comparer = comparer
        self._ignored = {*ignored, *self._a.lacks, *self._b.lacks}
        """Aspects that were not asked for, or that a format does not record."""
        self._tensors = 0
        self._found: dict[str, list[Any]] = {kind: [] for kind in _KINDS}
        self._unknown: list[str] = []
        """Names of tensors without known bytes or parts."""
        self._two_types: list[str] = []
        """Names of tensors of two types, whose values cannot be compared without numpy."""

    def compare(self, a: Mapping[str, LazyTensor], b: Mapping[str, LazyTensor]) -> None:
        """Compare the tensors of two mappings, name by name."""
        self._note_missing("only", a, b)
        common = [name for name in a if name in b]
        self._tensors += len(common)
        if "ties" not in self._ignored:
            ties_a, ties_b = (dict.fromkeys(_ties(each(common, self._cancellation), tensors)) for tensors in (a, b))
            self._note_missing("ties", ties_a, ties_b)
        for name in each(common, self._cancellation):
            self._compare_infos(name, a[name].info, b[name].info)

    def _note_missing(self, kind: str, a: Mapping[_T, object], b: Mapping[_T, object]) -> None:
        """Note what only one of two mappings has."""
        self._found[f"{kind}_a"] += [one for one in a if one not in b]
        self._found[f"{kind}_b"] += [one for one in b if one not in a]

    def _compare_infos(self, name: str, a: TensorInfo, b: TensorInfo) -> None:
        todo = [(name, a, b)]
        while todo:
            name, a, b = todo.pop()
            if a.shape != b.shape:
                self._found["shapes"].append(ShapeChange(name, a.shape, b.shape))
            for kind, one, other in (
                ("dtypes", a.dtype.name, b.dtype.name),
                ("devices", a.location, b.location),
                ("layouts", _layout(a), _layout(b)),
            ):
                if one != other and kind not in self._ignored:
                    self._found[kind].append(Change(name, one, other))
            parts_a, parts_b = self._parts(name, a), self._parts(name, b)
            self._note_missing("only", parts_a, parts_b)
            todo += [(part, info, parts_b[part]) for part, info in reversed(parts_a.items()) if part in parts_b]
            if a.shape == b.shape and self._comparer is not None:
                self._compare_values(name, a, b, self._comparer)

    def _compare_values(self, name: str, a: TensorInfo, b: TensorInfo, comparer: ValueComparer) -> None:
        if a.storage is None or b.storage is None:
            if not (a.parts or b.parts) and a.numel:
                self._unknown.append(name)
            return
        try:
            found = comparer.difference(name, a, b)
        except MissingPackage:
            if a.dtype == b.dtype or "dtypes" in self._ignored:
                raise  # nothing else says whether they differ
            self._two_types.append(name)
            return
        if found is not None:
            self._found["values" if found.differing else "close"].append(found)

    def likeness(self) -> Iterator[Likeness]:
        """Yield how alike the tensors are whose values differ, but for types that numpy does not compute with."""
        for found in (*self._found["values"], *self._found["close"]):
            one, other = (
                side.tensors.get(found.name) or side.attributes.get(found.name) for side in (self._a, self._b)
            )
            if one is not None and other is not None and self._comparer is not None:
                with suppress(UnsupportedFeature):
                    yield self._comparer.likeness(found.name, one.info, other.info)

    def _parts(self, name: str, info: TensorInfo) -> dict[str, TensorInfo]:
        """Return a tensor's parts by name; if only weights are compared, those of their values, but no gradients."""
        if self._a.key is not None and info.storage is not None and info.layout == "strided":
            return {}
        parts: dict[str, TensorInfo] = {}
        for label, part in info.parts:
            key = f"{name}[{label}]"
            while key in parts:
                key += "'"
            parts[key] = part
        return parts

    def report(self, scope: Scope, keys: tuple[str | None, str | None]) -> DiffReport:
        """Return the report of all differences, those of facts and of other values included."""
        a, b = self._a, self._b
        trees = (
            (path, *(side.others.get(path, NOTHING) for side in (a, b)))
            for path in dict.fromkeys((*a.others, *b.others))
        )
        others = tree_changes(trees, self._same_outside, self._cancellation)
        found: dict[str, Any] = {kind: tuple(these) for kind, these in self._found.items()}
        return DiffReport(
            a=_file(self._checkpoints[0], a),
            b=_file(self._checkpoints[1], b),
            scope=scope,
            tensors=self._tensors,
            order=None if "order" in self._ignored else _order(a, b),
            metadata=tuple(_metadata(a, b)),
            others=tuple(islice(others, 0 if "values that are no tensors" in self._ignored else _MOST_CHANGES)),
            values_compared=self._comparer is not None,
            not_compared=tuple(self._not_compared(keys)),
            wrapped=False,
            **found,
        )

    def _same_outside(self, one: Inert, other: Inert) -> bool | None:
        """Return whether two nodes are the same tensors, storages or devices; None for other nodes."""
        rebuilders = [(side.rebuilder, node) for side, node in zip(self._checkpoints, (one, other), strict=True)]
        if any(rebuilder is not None and rebuilder.tensor(node) is not None for rebuilder, node in rebuilders):
            return True  # tensors are compared by name
        if not (isinstance(one, PersistentId) and isinstance(other, PersistentId)):
            return True if "devices" in self._ignored and _is_device(one) and _is_device(other) else None
        left, right = (rebuilder.storage(node) if rebuilder is not None else None for rebuilder, node in rebuilders)
        if left is None or right is None:
            return None
        if (left.dtype, left.ref.nbytes) != (right.dtype, right.ref.nbytes):
            return False
        if left.ref.location != right.ref.location and "devices" not in self._ignored:
            return False
        return self._comparer is None or self._comparer.same_bytes((left.ref, right.ref), (0, 0), left.ref.nbytes)

    def _not_compared(self, keys: tuple[str | None, str | None]) -> Iterator[str]:
        """Yield texts on what is next to the weights, not recorded, not readable, or not computed."""
        sides = (self._a, self._b)
        for checkpoint, side, key, label in zip(self._checkpoints, sides, keys, "AB", strict=True):
            weights = checkpoint.weights
            is_chosen = weights is not None and side.key == weights.key
            if weights is not None and is_chosen and (what := left_beside(checkpoint, key, weights)):
                yield f"in {label}, {what}"
        yield from dict.fromkeys(
            f"what is in the others: {part.what}" for one in self._checkpoints if (part := one.part_of) is not None
        )
        for label, side, other in (("A", *sides), ("B", self._b, self._a)):
            if lost := sorted((side.lacks - other.lacks) & other.has):
                yield f"{', '.join(lost)}, which {label} does not record"
        if any(side.has_models for side in sides):
            yield "what models hold beside tensors, for wrappers were to be ignored"
        unreadable = [*dict.fromkeys(name for side in sides for name in side.unreadable)]
        for what, names in zip(UNREAD, (unreadable, self._unknown), strict=True):
            if names:
                yield f"{counted(len(names), 'tensor')} {what}: {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
        missing = self._comparer.numpy_missing if self._comparer is not None else None
        if missing is not None and self._found["values"]:
            yield f"by how much values differ: {missing.message}"
        if missing is not None and self._two_types:
            yield f"the values of {counted(len(self._two_types), 'tensor')} of two types: {missing.message}"


def _layout(info: TensorInfo) -> str:
    words = [info.layout, *(f"{name} {value!r}" for name, value in info.details if name != "is_coalesced")]
    if info.subclass and not info.is_array:
        words.insert(0, info.subclass)
    if info.storage is None and not info.parts and info.numel:
        words.append("no bytes")
    return ", ".join(words)


def _ties(names: Iterable[str], tensors: Mapping[str, LazyTensor]) -> list[tuple[str, ...]]:
    """Return the groups of names that share one tensor."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        info = tensors[name].info
        if info.storage is not None and info.numel:
            groups.setdefault(identity(info), []).append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _order(a: Side, b: Side) -> OrderChange | None:
    ours = (name for name in a.tensors if name in b.tensors)
    theirs = (name for name in b.tensors if name in a.tensors)
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((OrderChange(position, *pair) for position, pair in pairs if pair[0] != pair[1]), None)


def _metadata(a: Side, b: Side) -> Iterator[Change]:
    if "module versions" not in a.lacks | b.lacks:
        inside = _prefixes(a.tensors), _prefixes(b.tensors)
        for key in dict.fromkeys((*a.facts, *b.facts)):
            path, fact = key
            one, other = a.facts.get(key, ABSENT), b.facts.get(key, ABSENT)
            # The names of tensors already show that a module is on one side only.
            if one != other and not any((head in inside[0]) != (head in inside[1]) for head in (path, *heads(path))):
                yield Change(f"{path}.{fact}" if path else fact, one, other)
    if a.metadata is not None and b.metadata is not None:
        for name in dict.fromkeys((*a.metadata, *b.metadata)):
            one, other = a.metadata.get(name, ABSENT), b.metadata.get(name, ABSENT)
            if one != other:
                yield Change(name, one, other)


def _prefixes(names: Iterable[str]) -> set[str]:
    """Return the parents of all names, and the root."""
    found = {""}
    for name in names:
        for head in heads(name):
            if head in found:
                break
            found.add(head)
    return found


def _is_device(node: Inert) -> bool:
    return isinstance(node, Call) and str(global_of(node.func)) == "torch.device"
