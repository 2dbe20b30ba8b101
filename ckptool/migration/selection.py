"""Whether names that were asked for are there, and any tensor is left: told before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from heapq import nlargest
from itertools import takewhile
from shlex import join

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import NameChanges, Weights, by_name, prepare
from ckptool.errors import MigrationRefused
from ckptool.migration.changes import Changes, NameRule
from ckptool.migration.safetensors_plan import SafetensorsPlan
from ckptool.migration.torch_plan import TorchPlan
from ckptool.names import renaming
from ckptool.tensors.tensor import TensorInfo

_NEAREST = 3


class _Noted:
    """A substitution that knows whether it has changed any name."""

    def __init__(self, rule: renaming.Substitution) -> None:
        self.rule = rule
        self.has_changed = False

    def __call__(self, names: Sequence[str]) -> list[str]:
        renamed = self.rule(names)
        self.has_changed = self.has_changed or renamed != list(names)
        return renamed


def noted(items: Sequence[NameRule]) -> tuple[renaming.Rule, ...]:
    """Return the rules of one migration so that ``notes`` can tell which did nothing."""
    rules = [item if callable(item) else renaming.substitute(*item) for item in items]
    return tuple(_Noted(rule) if isinstance(rule, renaming.Substitution) else rule for rule in rules)


def refuse_nothing(
    checkpoint: Checkpoint, weights: Weights | None, plan: TorchPlan | SafetensorsPlan, changes: Changes
) -> None:
    """
    Refuse a plan that leaves none of the tensors that there are; ``weights`` is None where everything is taken.

    Raises:
        MigrationRefused: No tensor is left, or none that has elements, or an ``include`` matches no name.
    """
    if changes.allow_empty:
        return
    many = next((len(before) for before, left in _sides(checkpoint, weights, plan, changes) if before and not left), 0)
    gone = ("the only tensor is left out" if many == 1 else f"none of the {many:,} tensors is left") if many else ""
    names = _names(checkpoint, weights) if changes.include else []
    unmatched = _unmatched(changes.include, names)
    if unmatched and names:
        listed = f"{_words('--include', unmatched)} match{'es' if len(unmatched) == 1 else ''} none"
        raise MigrationRefused(
            f"{gone}: {listed}" if gone else f"{listed} of the {len(names):,} names",
            kind="no-tensor-left" if gone else "no-such-name",
            hint=f"The nearest names are {', '.join(_nearest(unmatched[0], names))}.",
        )
    if gone:
        hint = "Leave out less, or say with --allow-empty that this is meant."
        raise MigrationRefused(f"{gone}{_by(changes)}", kind="no-tensor-left", hint=hint)
    for before, left in _sides(checkpoint, weights, plan, changes):
        if left and not any(info.numel for info in left) and (weights or any(info.numel for info in before)):
            raise MigrationRefused(
                _none_has_elements(len(left)),
                kind="no-elements",
                hint="Where training was partitioned, the values are in other files: put them together first. "
                "If this is meant, say so with --allow-empty.",
            )


def notes(checkpoint: Checkpoint, weights: Weights | None, changes: NameChanges) -> Iterator[str]:
    """Yield what was asked for by name and has changed nothing, and whether weights that are taken hold nothing."""
    taken = checkpoint.weights if weights is None else weights.state_dict
    if taken and not any(tensor.info.numel for tensor in taken.values()):
        yield f"{_none_has_elements(len(taken))}: their values may be in other files"
    globs = (("--include", changes.include), ("--exclude", changes.exclude))
    names = _names(checkpoint, weights) if changes.include or changes.exclude else []
    for option, given in globs:
        yield from (f"{_words(option, [glob])} matches no name" for glob in _unmatched(given, names))
    for rule in changes.rules:
        if isinstance(rule, _Noted) and not rule.has_changed:
            yield f"{_words('--rename', [str(rule.rule)])} changes no name"


def _none_has_elements(count: int) -> str:
    return f"all {count:,} tensors of the weights have no elements" if count > 1 else "the weights have no elements"


def _sides(
    checkpoint: Checkpoint, weights: Weights | None, plan: TorchPlan | SafetensorsPlan, changes: Changes
) -> Iterator[tuple[list[TensorInfo], list[TensorInfo]]]:
    """Yield the tensors that there are and those that are left; where all is taken, those that globs go by, too."""
    if weights is not None:
        before = [tensor.info for tensor in weights.state_dict.values()]
        if isinstance(plan, TorchPlan):
            yield before, [info for _, info in plan.expected]
        else:
            yield before, [weights.tensors[name].info for name, _ in plan.tensors]
        return
    assert isinstance(plan, TorchPlan)  # noqa: S101 - nothing else takes everything
    yield [tensor.info for tensor in checkpoint.tensors.values()], [info for _, info in plan.expected]
    if changes.include or changes.exclude:
        paths = {
            f"{one.key}.{name}" if one.key else name: tensor.info
            for one in by_name(checkpoint)
            for name, tensor in one.items()
        }
        yield list(paths.values()), [paths[path] for path in paths.keys() - set(plan.dropped)]


def _names(checkpoint: Checkpoint, weights: Weights | None) -> list[str]:
    """Return the names that globs go by."""
    if weights is not None:
        return [*weights.old_names.values(), *weights.dropped]
    return [name for one in by_name(checkpoint) for name in prepare(checkpoint, one, NameChanges()).names]


def _unmatched(globs: Sequence[str], names: Sequence[str]) -> list[str]:
    return [glob for glob in globs if not any(fnmatchcase(name, glob) for name in names)]


def _nearest(glob: str, names: Sequence[str]) -> list[str]:
    """Return the names that have the text of a glob in them, or else begin most like it."""
    text = glob.strip("*?.")

    def likeness(name: str) -> tuple[bool, int]:
        return text in name, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name, glob, strict=False)))

    return nlargest(_NEAREST, names, key=likeness)


def _by(changes: Changes) -> str:
    """Return the options that leave something out, as they are written on a command line."""
    given = (("--include", changes.include), ("--exclude", changes.exclude), ("--drop", changes.drop))
    words = [_words(option, values) for option, values in given if values]
    words += ["--drop-unsupported"] if changes.drop_unsupported else []
    return f": {' '.join(words)}" if words else ""


def _words(option: str, values: Sequence[str]) -> str:
    return join([word for value in values for word in (option, value)])
