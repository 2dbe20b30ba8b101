"""Statistics of the values of a checkpoint: for each tensor, or for all tensors of a module together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from ckptool.cancellation import check_cancelled
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import Failure, LimitExceeded, MissingPackage, SourceChanged
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.sources.meter import Meter, Progress
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity
from ckptool.torch_ops.statistics import Statistics, Tally

_VALUES_AT_ONCE: Final = 1 << 20


class ValueRow(NamedTuple):
    """What the values of a tensor, or of the tensors of a module, are like."""

    name: str
    tensors: int
    """How many it is about; tied ones count once."""
    dtypes: tuple[str, ...]
    shape: tuple[int, ...] | None
    """None for a module."""
    values: Statistics | None
    """None where there are none to compute with; ``why`` says the reason."""
    why: str | None = None


def statistics_of(
    checkpoint: Checkpoint,
    tensors: Sequence[LazyTensor],
    *,
    depth: int | None,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[ValueRow]:
    """
    Yield what the values of each of these tensors are like; with ``depth``, those of each module together, by so many
    components of the names.

    Tensors are read one after the other, in pieces; ``progress`` is called with the bytes that were read so far, and
    those to be read in all. Needs numpy, and no torch.

    Raises:
        MissingPackage: numpy is not installed.
        SourceChanged: The file is no longer what was opened.
    """
    checkpoint.announce(tensors)
    left = limits.expanded(checkpoint.file_nbytes)  # many tensors may be views of the same bytes
    meter = Meter(progress, sum(tensor.info.nbytes for tensor in tensors))
    for name, group in _groups(tensors, depth):
        check_cancelled(checkpoint.source.cancellation)
        whole = Tally()
        reasons: dict[str, None] = {}
        seen: set[tuple[object, ...]] = set()
        for tensor in group:
            if identity(tensor.info) in seen:
                continue
            seen.add(identity(tensor.info))
            left -= tensor.info.nbytes
            try:
                if left < 0:
                    raise LimitExceeded("its tensors repeat the bytes of the file many times over")
                tally = whole if len(group) == 1 else Tally()
                tally.add(_counted(tensor.chunks(_VALUES_AT_ONCE, limits=limits), meter), tensor.dtype)
                if tally is not whole:
                    whole.join(tally)
            except (SourceChanged, MissingPackage):
                raise
            except Failure as error:
                reasons.setdefault(error.message)
        values = whole.result() if len(seen) > len(reasons) or not reasons else None
        shape = group[0].shape if depth is None else None
        dtypes = tuple(dict.fromkeys(tensor.dtype for tensor in group))
        yield ValueRow(name, len(seen), dtypes, shape, values, next(iter(reasons), None))


def _counted(pieces: Iterable[bytes], meter: Meter) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        meter.read(len(piece))


def _groups(tensors: Iterable[LazyTensor], depth: int | None) -> Iterator[tuple[str, list[LazyTensor]]]:
    """Yield tensors, those of a module together, in the order in which the modules are first met."""
    if depth is None:
        yield from ((tensor.name, [tensor]) for tensor in tensors)
        return
    found: dict[str, list[LazyTensor]] = {}
    for tensor in tensors:
        module = ".".join(tensor.name.split(".")[:-1][:depth])
        found.setdefault(module, []).append(tensor)
    yield from found.items()
