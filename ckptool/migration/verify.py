"""
Compares what was written, read back, with its plan.

1. Every byte: each payload, and everything between payloads together, has the checksum of what was written.
2. Every tensor: the result is opened as any checkpoint is, by readers that share no code with the writers, and has the
   tensors that were planned, each with its name, type, shape, device and place in the file.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple, TypeAlias

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import Weights
from ckptool.errors import Failure, OutputFailed
from ckptool.formats import open_checkpoint
from ckptool.limits import Limits
from ckptool.migration.changes import retagged
from ckptool.migration.plan import Plan
from ckptool.sources.checksums import checksums_of_file
from ckptool.sources.files import open_source
from ckptool.sources.source import BytesSource, Meter
from ckptool.tensors.payloads import Payload, StoragePayload, have_same_bytes
from ckptool.tensors.pieces import PiecesSource
from ckptool.tensors.tensor import StorageRef, TensorInfo, row_major


class Written(NamedTuple):
    """The checksums of a file that was written: each byte of it belongs to exactly one."""

    starts: array[int]
    """Offset of each payload."""
    ends: array[int]
    checksums: array[int]
    rest: int
    """The checksum of all bytes outside payloads."""


@contextmanager
def reading_back(path: str | None, hint: str) -> Iterator[None]:
    """Raise OutputFailed for any failure to read what was written; the error names ``path``."""
    try:
        yield
    except Failure as error:
        what = error.message if isinstance(error, OutputFailed) else f"cannot be read back: {error.message}"
        raise OutputFailed(what, kind="verification-failed", path=path, hint=hint) from error


def compare_bytes(path: str, written: Written, limits: Limits, meter: Meter) -> None:
    """Read every byte of a file back, and raise OutputFailed unless the checksums are those of ``written``."""
    source, _ = open_source(path, limits.cancellation)
    with closing(source):
        source.prefetch([(0, source.nbytes)])
        ranges = list(zip(written.starts, written.ends, strict=True))
        found, rest = checksums_of_file(source, ranges, meter)
    for (start, end), one, other in zip(ranges, found, written.checksums, strict=True):
        if one != other:
            raise _failed(f"its bytes {start:,} to {end:,} were not written as they were read")
    if rest != written.rest:
        raise _failed("what is between its tensors is not what was written")


OffsetOf: TypeAlias = Callable[[StorageRef], int | None]
"""Returns the offset of a storage in a file; None if the file does not hold its bytes unchanged."""


class Expected(NamedTuple):
    """A tensor that must be found. There may be many: each takes little memory."""

    name: str | None
    """None for a tensor nested in an entry."""
    tag: str | None
    """Its device tag; None where the format has none."""
    like: TensorInfo
    """A tensor that differs from it only in its offset; many expected tensors share one."""
    begin: int | None
    """Offset of the first element in the file; None if the file does not hold plain elements."""


def in_its_file(storage: StorageRef) -> int | None:
    """Return the offset of a storage in the file that it was read from."""
    return storage.file_offset


def among(payloads: Sequence[Payload], starts: Sequence[int]) -> OffsetOf:
    """Return a function from storages to their offsets in a new file with these payloads at these offsets."""
    found = {
        (id(one.storage.source), one.storage.offset, one.nbytes): start
        for one, start in zip(payloads, starts, strict=True)
        if isinstance(one, StoragePayload)
    }

    def place(storage: StorageRef) -> int | None:
        whole = storage.whole or storage
        start = found.get((id(whole.source), whole.offset, whole.nbytes))
        return None if start is None else start + storage.offset - whole.offset

    return place


def expected_tensors(plan: Plan, place: OffsetOf | None, begins: Sequence[int] = ()) -> Iterator[Expected]:
    """
    Yield the tensors to be found, in order.

    ``place`` gives the offsets of storages that are written whole; ``begins``, if any, the offset of each tensor.
    """
    known: dict[object, TensorInfo] = {}
    packed = plan.packed or ()
    for number, (name, info) in enumerate(plan.expected):
        is_packed = name in packed
        if is_packed:
            info = info._replace(stride=row_major(info.shape), conj=False, neg=False)
        begin = begins[number] if begins else _begin_of(info, place) if info.layout == "strided" else None
        like = info if begin is None else known.setdefault(_kind_of(info), info)
        yield Expected(name, None if is_packed else retagged(info, plan.location), like, begin)


def compare_tensors(
    found: Checkpoint, expected: Iterable[Expected], place: OffsetOf | None, packed: Collection[str] | None = None
) -> None:
    """
    Compare the tensors of an opened result with the expected ones; raise OutputFailed if they differ.

    With ``packed``, only these names are compared, in any order of files: other tensors are inside values.
    """
    odd = found.damage or next(iter(found.notes), None)
    if odd:
        raise _failed(f"it is not as usual: {odd}")
    ties = found.recorded.ties  # names that only the metadata ties to others: they have no tensors of their own
    stored = {name: tensor.info for name, tensor in found.tensors.items() if name not in ties}
    wanted = [one for one in expected if packed is None or one.name in packed]
    if packed is not None:
        stored = {name: stored[name] for name in (one.name for one in wanted) if name in stored}
    elif not any(one.like.is_array for one in wanted):
        stored = {name: info for name, info in stored.items() if not info.is_array}
    if len(stored) != len(wanted):
        raise _failed("the tensors in it are not those that were to be written")
    opened: set[object] = set()
    for (name, info), one in zip(stored.items(), wanted, strict=True):
        tag = one.tag if found.traits.keeps_devices else None
        is_unlike = _kind_of(info) != _kind_of(one.like)
        if one.begin is None and place is not None:
            is_unlike = _differ(info, one.like, place)
        elif one.begin is not None:
            is_unlike = is_unlike or _begin_of(info, in_its_file) != one.begin
        if one.name not in (None, name) or tag not in (None, info.location) or is_unlike:
            raise _failed(f"tensor {name!r} is not as it was to be written")
        source = info.storage and info.storage.source
        if isinstance(source, PiecesSource) and (info.dtype.name, info.shape) not in opened:
            opened.add((info.dtype.name, info.shape))  # it is enough to open the pieces of one of each kind
            for number in range(len(source.pieces)):
                source.info(number)


def compare_values(path: str, weights: Weights, limits: Limits, meter: Meter) -> None:
    """Read back a whole model that torch saved, and compare every tensor's bytes with the weights."""
    with open_checkpoint(path, limits=limits) as found:
        for name, tensor in weights.tensors.items():
            if name not in found.tensors or found.tensors[name].read() != tensor.read():
                raise _failed(f"tensor {name!r} was not written as it was read")
            meter.read(tensor.info.nbytes)


def _differ(found: TensorInfo, like: TensorInfo, place: OffsetOf) -> bool:
    """Return whether two tensors differ; ``place`` gives the expected offsets of the second one's storages."""
    if _kind_of(found) != _kind_of(like):
        return True
    begin, wanted = _begin_of(found, in_its_file), _begin_of(like, place)
    if begin != wanted or (begin is None and found.storage):
        # The bytes of both may be inside the pickles themselves, as numpy's are.
        storages = [info.storage for info in (found, like) if info.storage is not None]
        inside = [isinstance(storage.source, BytesSource) and storage.file_offset is None for storage in storages]
        is_inside = inside == [True, True] or (found.is_array and like.is_array)
        if not is_inside or found.nbytes != like.nbytes or not have_same_bytes(found, like):
            return True
    if found.layout == "strided":
        return False  # the parts of a plain tensor (a gradient, attributes) are not its value
    parts, others = ([part for _, part in info.parts] for info in (found, like))
    return len(parts) != len(others) or any(_differ(*pair, place) for pair in zip(parts, others, strict=True))


def _kind_of(info: TensorInfo) -> tuple[object, ...]:
    """Return all facts about a tensor but its elements and where they are."""
    return info.dtype.name, info.shape, info.stride, info.layout, info.conj, info.neg


def _begin_of(info: TensorInfo, place: OffsetOf | None) -> int | None:
    """Return the offset of a tensor's first element; None where the file does not hold its elements unchanged."""
    start = None if info.storage is None or place is None else place(info.storage)
    return None if start is None else start + info.storage_offset * info.dtype.itemsize // info.dtype.packed


def _failed(what: str) -> OutputFailed:
    return OutputFailed(what, kind="verification-failed")
