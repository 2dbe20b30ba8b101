"""
The facts about a tensor and its storage, without bytes: ``TensorInfo``, ``StorageRef``.

Strides and offsets count elements, as torch counts them; sizes in bytes are called ``nbytes``.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, compress, islice
from math import prod
from operator import attrgetter, eq, mul
from typing import Final, Literal, NamedTuple, TypeAlias

from ckptool.cancellation import Cancellation, each
from ckptool.errors import MalformedFile
from ckptool.sources.source import Source
from ckptool.tensors.dtypes import DType

Kind: TypeAlias = Literal["parameter", "buffer"]

ARRAY: Final = "numpy.ndarray"
MAX_RANK: Final = 64  # torch's own limit
MAX_SIZE: Final = 1 << 63
"""Sizes, strides and offsets are below this: torch has them as signed integers of 64 bits."""


class StorageRef(NamedTuple):
    """
    One storage's bytes: where they are, and the device tag that they were saved with.

    Those of one source that begin at different places are apart, unless they are slices of one that is whole.
    """

    key: str
    location: str
    """As saved: ``cpu``, ``cuda:0``, ``npu:0``… Reported, never obeyed."""
    nbytes: int
    source: Source
    offset: int
    """Position of the first byte in ``source``."""
    big_endian: bool = False
    crc32: int = 0
    """Checksum of all its bytes, as the file has it; 0 where it has none."""
    whole: "StorageRef | None" = None
    """The storage that this one is a slice of, where the file says so (legacy streams, tars)."""

    def __repr__(self) -> str:
        return f"<StorageRef {self.key!r} {self.location} of {self.nbytes} bytes>"

    @property
    def file_offset(self) -> int | None:
        """Offset of the first byte in the file; None where the file holds the bytes compressed or encoded."""
        return self.source.file_offset(self.offset)


make_storage_ref: "Callable[[tuple[str, str, int, Source, int, bool, int, StorageRef | None]], StorageRef]" = partial(
    tuple.__new__, StorageRef
)
"""Makes one of all its fields: thrice as fast as its constructor, which counts for thousands of tensors."""


class TensorInfo(NamedTuple):
    """
    The facts about one tensor, without its bytes.

    A tensor that is not plain strided memory has a ``layout`` that names it and ``parts`` that are (sparse: indices
    and values; quantised per channel: scales and zero points; a wrapper subclass: what it wraps).
    """

    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    storage: StorageRef | None
    """Tensors that share memory hold equal storages. None where the file has no bytes for the tensor itself."""
    location: str
    requires_grad: bool | None = None
    kind: Kind | None = None
    layout: str = "strided"
    parts: "tuple[tuple[str, TensorInfo], ...]" = ()
    subclass: str | None = None
    """The tensor class that the file asks for, where it is neither Tensor nor Parameter; ``ARRAY`` for arrays."""
    details: tuple[tuple[str, int | float], ...] = ()
    """Numbers that belong to the layout: scale and zero point, the channel axis."""
    conj: bool = False
    neg: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_array(self) -> bool:
        """Whether the file has it as an array of numpy: what it says is a tensor's, but it loads as an array."""
        return self.subclass == ARRAY

    @property
    def nbytes(self) -> int:
        """Size of its own elements packed together; 0 where it has no bytes but its parts'."""
        if not self.storage:
            return 0
        packed = self.dtype.packed
        if packed > 1 and self.shape:  # each row begins with a byte of its own
            return prod(self.shape[:-1]) * -(-self.shape[-1] // packed)
        return self.numel * self.dtype.itemsize

    @property
    def total_nbytes(self) -> int:
        """Size of its elements, and of its parts'."""
        return self.nbytes + (sum(part.total_nbytes for _, part in self.parts) if self.parts else 0)

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True

    @property
    def is_as_stored(self) -> bool:
        """Whether the storage holds the tensor's elements as they are, one after the other."""
        swapped = self.storage is not None and self.storage.big_endian and self.dtype.swap_nbytes > 1
        return self.is_contiguous and not (self.conj or self.neg or swapped)

    @property
    def known_crc32(self) -> int:
        """The checksum that the file has of the tensor's elements in their order; 0 where it has none."""
        storage = self.storage
        return storage.crc32 if storage is not None and self.nbytes == storage.nbytes and self.is_as_stored else 0


_Fields: TypeAlias = (
    "tuple[DType, tuple[int, ...], tuple[int, ...], int, StorageRef | None, str, bool | None, Kind | None, str,"
    " tuple[tuple[str, TensorInfo], ...], str | None, tuple[tuple[str, int | float], ...], bool, bool]"
)
make_tensor_info: Callable[[_Fields], TensorInfo] = partial(tuple.__new__, TensorInfo)  # as make_storage_ref


_STORAGE: Final = attrgetter("storage")
_SOURCE: Final = attrgetter("source")
_OFFSET: Final = attrgetter("offset")


def is_size(value: object) -> bool:
    """Say whether a value from a file can be a size, a stride or an offset of torch's."""
    return type(value) is int and 0 <= value < MAX_SIZE


def is_countable(sizes: Iterable[int]) -> bool:
    """Say whether torch could count the elements of a shape: the product, taken in order, stays below 2^63."""
    return all(product < MAX_SIZE for product in accumulate(sizes, mul))


def check_extent(info: TensorInfo) -> None:
    """
    Raise MalformedFile unless every element lies inside the storage, and torch could count them.

    Exact integers: offset + 1 + Σ (size - 1) · stride elements, 0 if any size is 0.
    """
    dtype, shape, stride, last, storage = info[:5]
    rank = len(shape)
    if rank != len(stride) or rank > MAX_RANK:
        raise _malformed(f"a tensor of {rank} dimensions with {len(stride)} strides")
    if type(last) is not int or not 0 <= last < MAX_SIZE:
        raise _malformed("a tensor whose offset is no size")
    bits = 0  # of all sizes and steps: negative if one of them is, and too large if one of them is
    for size, step in zip(shape, stride):  # noqa: B905 - as many, as was seen
        if type(size) is not int or type(step) is not int:
            bits = -1
            break
        bits |= size | step
        last += (size - 1) * step
    if not 0 <= bits < MAX_SIZE:
        raise _malformed("a tensor whose shape or strides are no sizes")
    if storage is not None and 0 not in shape:
        held = storage.nbytes // dtype.itemsize * dtype.packed
        if last >= held or (dtype.packed > 1 and info.nbytes > storage.nbytes):
            raise MalformedFile(
                f"a tensor needs {last + 1:,} elements of storage {storage.key!r}, which has {held:,}",
                kind="malformed-tensor",
                needed=last + 1,
                actual=held,
            )
    if (bits >> 15 or rank > 4) and not is_countable(shape):  # smaller ones need not be multiplied
        raise _malformed("a tensor of 2^63 elements or more")


def identity(info: TensorInfo) -> tuple[object, ...]:
    """Return a key that is equal for two names of one tensor: the same elements of the same memory, in one order."""
    storage = info.storage
    if storage is None or not info.numel:
        return (id(info),)
    place = (id(storage.source), storage.offset, info.storage_offset)
    # As text, because its hash is random: numbers chosen to have one hash would take a dict hours.
    return *place, info.dtype.name, str((info.shape, info.stride)), info.conj, info.neg


def distinct(infos: Sequence[TensorInfo], cancellation: Cancellation | None = None) -> Sequence[TensorInfo]:
    """Return the tensors, of those that are tied one; where no two begin at one place, none are."""
    places = _places(infos)
    ordered = sorted(place for place in places if place is not None)  # a set of all would take ten times the memory
    shared = set(compress(ordered, map(eq, ordered, islice(ordered, 1, None))))
    if not shared and len(ordered) == len(infos):
        return infos
    known: set[tuple[object, ...]] = set()
    found = []
    for info, place in each(zip(infos, places, strict=True), cancellation):
        if place is None or place in shared:
            key = identity(info)
            if key in known:
                continue
            known.add(key)
        found.append(info)
    return found


def _places(infos: Sequence[TensorInfo]) -> Sequence[tuple[int, int] | int | None]:
    """Return where the storage of each tensor begins, and in which source if there are several; None without one."""
    storages = list(map(_STORAGE, infos))
    if all(storages):
        sources = list(map(_SOURCE, storages))
        if sources and sources.count(sources[0]) == len(sources):
            return list(map(_OFFSET, storages))
    return [None if storage is None else (id(storage.source), storage.offset) for storage in storages]


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of packed rows; an empty dimension counts as one, as torch has it."""
    steps = []
    step = 1
    for size in reversed(sizes):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def _malformed(what: str) -> MalformedFile:
    return MalformedFile(what, kind="malformed-tensor")
