"""
``merge``: adapters into their model, or the mean of several checkpoints.

Everything that ``migrate`` guarantees holds here, too: forms, types, verification, bounded memory. A mean is computed
while it is read, a few megabytes of each file at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from typing import Final, TypeAlias

from ckptool.arguments import Unpack, checked
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import NameChanges, Weights, choose, prepare
from ckptool.errors import MigrationRefused, about
from ckptool.formats import open_checkpoint
from ckptool.formats.json_beside import quantization_of
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.merging.lora import END, read_adapter, refused, with_adapters
from ckptool.messages import as_path, counted, some
from ckptool.migration.casting import TARGETS, memory_of
from ckptool.migration.changes import ChangeOptions, Changes, changes_of
from ckptool.migration.make_plan import Merge
from ckptool.migration.migrate import WriteOptions, migrate_by
from ckptool.migration.report import MigrationReport
from ckptool.names.renaming import Filter
from ckptool.sources.paths import is_remote
from ckptool.sources.source import Progress
from ckptool.tensors.payloads import ComputedWeight, have_same_bytes
from ckptool.tensors.reading import LazyTensor
from ckptool.torch_ops import check_installed

Path: TypeAlias = str | os.PathLike[str]


@checked(options=Changes._fields)
def merge(
    base: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    changes: Changes | None = None,
    *,
    lora: str | os.PathLike[str] | Sequence[Path] | Mapping[Path, float] | None = None,
    scale: float = 1.0,
    average: str | os.PathLike[str] | Sequence[Path] | None = None,
    shares: Sequence[float] | None = None,
    ema: float | None = None,
    force: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
    read_back: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
    **options: Unpack[ChangeOptions],
) -> MigrationReport:
    """
    Write a checkpoint with LoRA adapters in its weights, or its mean with others. Nothing in the files runs.

    ``lora`` is an adapter, several, or several with what each is multiplied by, too: ``{"style.safetensors": 0.7}``;
    ``scale`` multiplies all. Each weight is what peft's ``merge_and_unload`` makes of it on a CPU, in its own type.
    ``average`` are the checkpoints whose mean with ``base`` is written, in the types of ``base``; ``shares``, one for
    ``base`` and one for each, are divided by their sum; with ``ema``, each file in its order counts as in a moving
    average that keeps this share of what was before. Sums are made in float64. With form ``same``, all else that
    ``base`` holds is written, too.

    All else is as in ``migrate``: pass ``Changes`` or its fields; ``dst`` is never half written, and appears after it
    was read back. It needs torch. One weight of an adapter is in memory at a time, with what is added to it; of
    averages, some megabytes of each file.

    Raises:
        MigrationRefused: A part of an adapter fits no weight, by name or shape; an adapter is of another kind; names,
            shapes or integers of what is to be averaged differ; or what ``migrate`` refuses.
        CkptoolError: What ``migrate`` raises.
        ValueError: Neither ``lora`` nor ``average`` is given, or both; or shares or scales are not valid.
    """
    asked = changes_of(changes, options)
    if (lora is None) == (average is None):
        raise ValueError("give lora, or average: one of them")
    check_installed()
    with ExitStack() as opened:
        merging: Merge
        notes, assumed, odd = list[str](), list[str](), dict[str, int]()
        if lora is not None:
            if shares is not None or ema is not None:
                raise ValueError("shares are for average: adapters have their numbers")
            found = []
            for path, weight in _with_weights(lora, scale).items():
                checkpoint = opened.enter_context(open_checkpoint(path, limits=limits))
                with about(checkpoint.path):
                    found.append((read_adapter(checkpoint), weight))
            allows = asked.allow_unmatched
            merging = partial(with_adapters, found, allow_unmatched=allows, notes=notes, assumed=assumed)
        else:
            if scale != 1.0:
                raise ValueError("scale is for lora: averages have shares")
            others = _paths(average or ())
            if len(_real([base, *others])) <= len(others):
                raise ValueError("one file is given twice: give it a larger share")
            open_others = [opened.enter_context(open_checkpoint(one, limits=limits)) for one in others]
            each_share = _checked(shares, ema, len(others) + 1)
            merging = partial(_averaged, open_others, each_share, asked.in_full(), notes=notes, odd=odd)
        how = WriteOptions(force, verify, dry_run, False, progress, read_back, limits)
        report = migrate_by(None, os.fspath(base), os.fspath(dst), asked, how, merge=merging)
    counts = ((name, counted(many, "value")) for name, many in odd.items() if many)
    notes += [f"{name!r} has {many} that are NaN or infinite, as in the first" for name, many in counts]
    return report._replace(notes=(*report.notes, *notes), assumed=tuple(assumed))


def _paths(given: Path | Sequence[Path]) -> list[str]:
    paths = [given] if isinstance(given, str | os.PathLike) else list(given)
    if not paths:
        raise ValueError("no path is given to merge with")
    return [os.fspath(one) for one in paths]


def _real(paths: Sequence[Path]) -> set[str]:
    """Return the paths of the files, without links."""
    return {path if is_remote(path) else os.path.realpath(path) for path in [os.fspath(one) for one in paths]}


def _with_weights(given: Path | Sequence[Path] | Mapping[Path, float], scale: float) -> dict[str, float]:
    """Return the factor of each adapter, by its path."""
    weights = given if isinstance(given, Mapping) else {}
    paths = _paths(given if isinstance(given, str | os.PathLike) else list(given))
    real = _real(paths)
    if len(real) < len(paths):
        raise ValueError("one adapter is given twice")
    if both := next((one for one in real if not is_remote(one) and os.path.dirname(one) in real), None):
        raise ValueError(f"one adapter is given twice, as a folder and as a file in it: {os.path.basename(both)}")
    found = {os.fspath(path): scale * float(weights.get(path, 1.0)) for path in (weights or paths)}
    if not all(map(math.isfinite, found.values())):
        raise ValueError(f"adapters are multiplied by finite numbers, not {list(found.values())}")
    return found


def _checked(shares: Sequence[float] | None, ema: float | None, count: int) -> Sequence[float]:
    if ema is not None:
        if shares is not None or not 0 < ema < 1:
            raise ValueError(f"ema is a number between 0 and 1, without shares, not {ema}")
        return [ema ** (count - 1), *((1 - ema) * ema ** (count - 1 - number) for number in range(1, count))]
    if shares is None:
        return [1.0] * count
    shares = [float(one) for one in shares]
    if len(shares) != count or not all(math.isfinite(one) and one >= 0 for one in shares):
        raise ValueError(f"shares are {count} numbers that are not negative, not {shares}")
    if not 0 < sum(shares) < math.inf:
        raise ValueError(f"shares have a finite sum above 0, not {shares}")
    return shares


_PIECE_NUMEL: Final = 1 << 20
_refused: Final = partial(refused, what="averaged")
_COUNTS: Final = "num_batches_tracked"
"""The number of batches that a BatchNorm has seen: it differs in each checkpoint of a run, and needs no mean."""


class _Average(ComputedWeight):
    """The bytes of a mean, in the type of the first tensor."""

    def __init__(
        self,
        name: str,
        tensors: Sequence[LazyTensor],
        shares: Sequence[float],
        said: str,
        paths: Sequence[str],
        odd: dict[str, int],
    ) -> None:
        super().__init__(name, tensors[0].nbytes, said, tensors[1:])
        self._tensors = tensors
        self._shares = shares
        self._paths = paths
        self._odd = odd
        odd[name] = 0

    def made(self) -> Iterator[bytes]:
        from ckptool.torch_ops import values

        types = [one.dtype for one in self._tensors]
        self._odd[self.name] = 0
        # The same elements of each, a few megabytes at a time.
        sides = (one.chunks(_PIECE_NUMEL * one.info.dtype.itemsize) for one in self._tensors)
        for pieces in zip_longest(*sides, fillvalue=b""):
            mean = values.average(pieces, types, self._shares)
            facts = values.survey([mean], types[0])
            if odd := facts.nan + facts.infinite:
                before = values.survey([pieces[0]], types[0])
                if lost := odd - before.nan - before.infinite:
                    fact = (
                        f"{counted(lost, 'value')} of {self.name!r} would be infinite or NaN, and finite in the first"
                    )
                    others = zip(self._paths[1:], pieces[1:], types[1:], strict=True)
                    found = ((path, values.survey([piece], dtype)) for path, piece, dtype in others)
                    path = next((path for path, one in found if one.nan or one.infinite), None)
                    hint = "Leave it out, or this tensor of all with `exclude=`."
                    hint = f"Another file has values that are too large for {types[0]}." if path is None else hint
                    raise MigrationRefused(f"it cannot be averaged: {fact}", kind="not-averaged", path=path, hint=hint)
                self._odd[self.name] += odd
            yield mean


def _averaged(
    others: Sequence[Checkpoint],
    shares: Sequence[float],
    changes: Changes,
    first: Checkpoint,
    weights: Weights,
    *,
    notes: list[str],
    odd: dict[str, int],
) -> tuple[Weights, Sequence[ComputedWeight]]:
    """
    Return weights with their means with those of other checkpoints, and the weights that are computed. What is to be
    said about them is added to ``notes``; ``odd`` gets how many values of each mean are NaN or infinite because they
    are so in the first, once it was made.

    Raises:
        MigrationRefused: Names, shapes, or values that are not floats differ, or something is quantised.
    """
    shares = [one / sum(shares) for one in shares]
    every = [{old: weights.tensors[name] for name, old in weights.old_names.items() if name in weights.tensors}]
    for other in (first, *others):
        quantised = quantization_of(other)
        if quantised is not None and quantised.bound:
            raise _refused(other, "it is quantised", "Make it plain first: `ckptool.migrate(…, dequantize=True)`.")
    wanted = NameChanges(filter=Filter(tuple(changes.include), tuple(changes.exclude)))
    for other in others:
        chosen = choose(other, changes.key, changes.weights)
        tensors = prepare(other, chosen, wanted).tensors
        lacking = [name for name in every[0] if name not in tensors]
        more = [name for name in tensors if name not in every[0] and name not in weights.dropped]
        if lacking or more:
            facts = [f"it does not have {some(lacking)}"] * bool(lacking) + [f"it has {some(more)}"] * bool(more)
            hint = "Leave them out of all with `exclude=`, or change names first."
            raise _refused(other, f"{', and '.join(facts)}, unlike {as_path(first.path)}", hint)
        every.append(tensors)
    paths = [one.path for one in (first, *others)]
    said = " + ".join(f"{share:.4g} of {as_path(path)}" for share, path in zip(shares, paths, strict=True))
    made: dict[object, _Average] = {}
    changed = dict(weights.tensors)
    for new, old in weights.old_names.items():
        if new not in weights.tensors:
            continue
        same = [one[old] for one in every]
        _refuse_unlike(others, old, same)
        if same[0].dtype in TARGETS:
            memories = tuple(memory_of(one.info) for one in same)  # names that are tied everywhere stay so
            source = made.setdefault(memories, _Average(new, same, shares, said, paths, odd))
            changed[new] = LazyTensor(new, source.tensor(same[0].info, same[0].info.dtype))
    if any(map(END.search, every[0])):
        notes.append("these are halves of products (LoRA): their mean is not that of what adapters add")
    if any(old.endswith(_COUNTS) for old in every[0]):
        notes.append(f"{_COUNTS!r} is that of {as_path(first.path)}")
    return weights._replace(tensors=changed), list(made.values())


def _refuse_unlike(others: Sequence[Checkpoint], name: str, same: Sequence[LazyTensor]) -> None:
    """Refuse tensors that cannot be averaged: of different shapes, or not of floats, and not equal."""
    first = same[0]
    for other, one in zip(others, same[1:], strict=True):
        if one.shape != first.shape:
            raise _refused(other, f"{name!r} is {list(one.shape)}, and {list(first.shape)} in the first")
        if any(tensor.info.layout != "strided" or tensor.info.storage is None for tensor in (first, one)):
            raise _refused(other, f"{name!r} is not of plain values")
        if first.dtype in TARGETS and one.dtype in TARGETS:
            continue
        is_equal = first.dtype == one.dtype and have_same_bytes(first.info, one.info)
        if not is_equal and not name.endswith(_COUNTS):
            fact = f"{name!r} is {one.dtype}, of which no mean is made, and not equal to that in the first"
            raise _refused(other, fact, "Leave it out with `exclude=`.")
