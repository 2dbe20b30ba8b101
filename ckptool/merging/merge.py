"""
Merge: a migration of one checkpoint with weights of others in it.

Everything that ``migrate`` guarantees holds here, too: forms, types, verification, bounded memory.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeAlias

from ckptool.arguments import checked
from ckptool.errors import about
from ckptool.formats import open_checkpoint
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.merging.adapters import Adapter, read_adapter
from ckptool.merging.averages import AverageMerge
from ckptool.merging.lora import LoraMerge
from ckptool.migration.changes import ChangeOptions, Changes, changes_of
from ckptool.migration.migrate import WriteOptions, migrate_by
from ckptool.migration.report import MigrationReport
from ckptool.sources.paths import is_remote
from ckptool.sources.source import Progress
from ckptool.torch_ops import check_installed

if sys.version_info >= (3, 11):
    from typing import Unpack
elif TYPE_CHECKING:
    from typing_extensions import Unpack

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
        merging: LoraMerge | AverageMerge
        if lora is not None:
            if shares is not None or ema is not None:
                raise ValueError("shares are for average: adapters have their numbers")
            found = [(_opened(opened, path, limits), weight) for path, weight in _with_weights(lora, scale).items()]
            merging = LoraMerge(found, allow_unmatched=asked.allow_unmatched)
        else:
            if scale != 1.0:
                raise ValueError("scale is for lora: averages have shares")
            others = _paths(average or ())
            if len(_real([base, *others])) <= len(others):
                raise ValueError("one file is given twice: give it a larger share")
            merging = AverageMerge(
                [opened.enter_context(open_checkpoint(one, limits=limits)) for one in others],
                _checked(shares, ema, len(others) + 1),
                asked,
            )
        how = WriteOptions(force, verify, dry_run, False, progress, read_back, limits)
        report = migrate_by(None, os.fspath(base), os.fspath(dst), asked, how, merge=merging)
    return report._replace(notes=(*report.notes, *merging.notes), assumed=tuple(merging.assumed))


def _opened(opened: ExitStack, path: str, limits: Limits) -> Adapter:
    checkpoint = opened.enter_context(open_checkpoint(path, limits=limits))
    with about(checkpoint.path):
        return read_adapter(checkpoint)


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
    found = {os.fspath(path): scale * weights.get(path, 1.0) for path in (weights or paths)}
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
    if len(shares) != count or not all(math.isfinite(one) and one >= 0 for one in shares):
        raise ValueError(f"shares are {count} numbers that are not negative, not {list(shares)}")
    if not 0 < sum(shares) < math.inf:
        raise ValueError(f"shares have a finite sum above 0, not {list(shares)}")
    return shares
