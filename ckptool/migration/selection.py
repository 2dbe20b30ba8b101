"""Refuse or note, before anything is written: names that are not there, and a target without tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from heapq import nlargest
from itertools import takewhile
from typing import Protocol

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.quantized import KEEP
from ckptool.checkpoints.weights import NameChanges, Weights, by_name, prepare
from ckptool.errors import MigrationRefused
from ckptool.formats.directories.beside import quantization_of
from ckptool.migration.changes import Changes, NameRule
from ckptool.names import renaming
from ckptool.names.patterns import Trials
from ckptool.tensors.tensor import TensorInfo

_NEAREST = 3


class Kept(Protocol):
    """What a plan says about the tensors that are in the result."""

    @property
    def expected(self) -> Sequence[tuple[str | None, TensorInfo]]: ...

    @property
    def dropped(self) -> tuple[str, ...]: ...

    @property
    def renamed(self) -> tuple[tuple[str, str], ...]: ...

    @property
    def tied(self) -> Mapping[str, str]: ...


class _Noted:
    """A substitution that is tried within bounds, and remembers whether it has changed any name."""

    def __init__(self, rule: renaming.Substitution, trials: Trials) -> None:
        self.rule = rule
        self._trials = trials
        self.has_changed = False

    def __call__(self, names: Sequence[str]) -> list[str]:
        renamed = [self._trials.on(name, self.rule.renamed) for name in names]
        self.has_changed = self.has_changed or renamed != list(names)
        return renamed


def noted(items: Sequence[NameRule], trials: Trials) -> tuple[renaming.Rule, ...]:
    """Return the rules of one migration so that ``notes`` can tell which did nothing."""
    rules = [item if callable(item) else renaming.substitute(*item) for item in items]
    return tuple(_Noted(rule, trials) if isinstance(rule, renaming.Substitution) else rule for rule in rules)


def refuse_nothing(checkpoint: Checkpoint, weights: Weights | None, plan: Kept, changes: Changes) -> None:
    """
    Refuse a plan that leaves none of the tensors that there are; ``weights`` is None where everything is taken.

    Raises:
        MigrationRefused: No tensor is left, or none that has elements, or an ``include`` matches no name; or what is
            quantised would mean nothing any more.
    """
    wrong = None if changes.break_quantized else broken(checkpoint, weights, plan)
    if wrong is not None:
        raise MigrationRefused(wrong, kind="breaks-quantized", hint=KEEP)
    if changes.allow_empty:
        return
    many = next((len(before) for before, left in _sides(checkpoint, weights, plan, changes) if before and not left), 0)
    gone = ("the only tensor is left out" if many == 1 else f"none of the {many:,} tensors is left") if many else ""
    names = _names(checkpoint, weights) if changes.include else []
    unmatched = _unmatched(changes.include, names)
    if unmatched and names:
        listed = f"{_words('include', unmatched)} match{'es' if len(unmatched) == 1 else ''} none"
        raise MigrationRefused(
            f"{gone}: {listed}" if gone else f"{listed} of the {len(names):,} names",
            kind="no-tensor-left" if gone else "no-such-name",
            hint=f"The nearest names are {', '.join(_nearest(unmatched[0], names))}.",
        )
    if gone:
        hint = "Leave out less, or say with `allow_empty=True` that this is meant."
        raise MigrationRefused(f"{gone}{_by(changes)}", kind="no-tensor-left", hint=hint)
    for before, left in _sides(checkpoint, weights, plan, changes):
        if left and not any(info.numel for info in left) and (weights or any(info.numel for info in before)):
            raise MigrationRefused(
                _none_has_elements(len(left)),
                kind="no-elements",
                hint="Where training was partitioned, the values are in other files: put them together first. "
                "If this is meant, say so with `allow_empty=True`.",
            )


def broken(checkpoint: Checkpoint, weights: Weights | None, plan: Kept) -> str | None:
    """Return which quantised weights a plan casts, or leaves without their scales; None if it does not."""
    old = weights.old_names if weights is not None else {new: name for name, new in plan.renamed}
    head = f"{weights.state_dict.key}." if weights is not None and weights.state_dict.key else ""
    left = {head + old.get(name, name): info.dtype.name for name, info in plan.expected if name is not None}
    left |= {head + old.get(name, name): left[head + old.get(kept, kept)] for name, kept in plan.tied.items()}
    before = {name: tensor.info.dtype.name for name, tensor in checkpoint.tensors.items()}
    found = None if left == before else quantization_of(checkpoint)
    return found.damage(left) if found is not None else None


def notes(checkpoint: Checkpoint, weights: Weights | None, changes: NameChanges) -> Iterator[str]:
    """Yield what was asked for by name and has changed nothing, and whether weights that are taken hold nothing."""
    taken = checkpoint.weights if weights is None else weights.state_dict
    if taken and not any(tensor.info.numel for tensor in taken.values()):
        yield f"{_none_has_elements(len(taken))}: their values may be in other files"
    names = [] if changes.filter.takes_all else _names(checkpoint, weights)
    for option, globs in (("include", changes.filter.include), ("exclude", changes.filter.exclude)):
        yield from (f"{_words(option, [glob])} matches no name" for glob in _unmatched(globs, names))
    for rule in changes.rules:
        if isinstance(rule, _Noted) and not rule.has_changed:
            yield f"{_words('rename', [str(rule.rule)])} changes no name"


def _none_has_elements(count: int) -> str:
    return f"all {count:,} tensors of the weights have no elements" if count > 1 else "the weights have no elements"


def _sides(
    checkpoint: Checkpoint, weights: Weights | None, plan: Kept, changes: Changes
) -> Iterator[tuple[list[TensorInfo], list[TensorInfo]]]:
    """Yield the tensors before and after; where everything is taken, also those whose names globs are compared with."""
    left = [info for _, info in plan.expected]
    if weights is not None:
        yield [tensor.info for tensor in weights.state_dict.values()], left
        return
    yield [tensor.info for tensor in checkpoint.tensors.values()], left
    if changes.include or changes.exclude:
        paths = {
            f"{one.key}.{name}" if one.key else name: tensor.info
            for one in by_name(checkpoint)
            for name, tensor in one.items()
        }
        yield list(paths.values()), [paths[path] for path in paths.keys() - set(plan.dropped)]


def _names(checkpoint: Checkpoint, weights: Weights | None) -> list[str]:
    """Return the names that globs are compared with."""
    if weights is not None:
        return [*weights.old_names.values(), *weights.dropped]
    return [name for one in by_name(checkpoint) for name in prepare(checkpoint, one, NameChanges()).names]


def _unmatched(globs: Sequence[str], names: Sequence[str]) -> list[str]:
    return [glob for glob in globs if not any(fnmatchcase(name, glob) for name in names)]


def _nearest(glob: str, names: Sequence[str]) -> list[str]:
    """Return the names that contain the text of a glob, or else share the longest beginning with it."""
    text = glob.strip("*?.")

    def likeness(name: str) -> tuple[bool, int]:
        return text in name, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name, glob, strict=False)))

    return nlargest(_NEAREST, names, key=likeness)


def _by(changes: Changes) -> str:
    """Return the options that leave something out."""
    given = (("include", changes.include), ("exclude", changes.exclude), ("drop", changes.drop))
    words = [_words(option, values) for option, values in given if values]
    words += ["drop_unsupported"] if changes.drop_unsupported else []
    return f": {', '.join(words)}" if words else ""


def _words(option: str, values: Sequence[str]) -> str:
    return ", ".join(f"{option} {value!r}" for value in values)
