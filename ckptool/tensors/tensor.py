"""
``TensorInfo``, ``StorageRef``: the facts about a tensor and its storage, without bytes.

Strides and offsets count elements, as torch counts them; sizes in bytes are called ``nbytes``.

The persistent ids of storages: ``("storage", class, key, location, numel[, view])``.

``numel`` counts elements of the class's type, or bytes for UntypedStorage. The view, in legacy streams only, is
``(key, offset, numel)`` in elements of the same type. See persistent_id in torch/serialization.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, compress, islice
from math import prod
from operator import eq, mul
from typing import Final, Literal, NamedTuple, TypeAlias

from ckptool.cancellation import Cancellation, each
from ckptool.errors import AmbiguousFile, MalformedFile, UnsupportedFeature
from ckptool.limits import refuse_long
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Global, Inert
from ckptool.sources.source import Source
from ckptool.tensors import dtypes
from ckptool.tensors.dtypes import DType

Kind: TypeAlias = Literal["parameter", "buffer"]

ARRAY: Final = "numpy.ndarray"
SPARSE_PARTS: Final = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}
"""torch's names of the parts of a sparse tensor, by its layout."""
MAX_RANK: Final = 64  # torch's own limit
MAX_SIZE: Final = 1 << 63
"""Sizes, strides and offsets are below this: torch stores them as signed integers of 64 bits."""


class StorageRef(NamedTuple):
    """
    One storage's bytes: where they are, and the device tag that they were saved with.

    Storages of one source with different offsets do not overlap, unless they are slices of one ``whole``.
    """

    key: str
    location: str
    """The device tag as saved: ``cpu``, ``cuda:0``, ``npu:0``… It is reported, never used."""
    nbytes: int
    source: Source
    offset: int
    """Offset of the first byte in ``source``."""
    big_endian: bool = False
    crc32: int = 0
    """The file's checksum of all its bytes; 0 if it has none."""
    whole: StorageRef | None = None
    """The storage that this one is a slice of, if there is one (in legacy streams and tars)."""

    def __repr__(self) -> str:
        return f"<StorageRef {self.key!r} {self.location} of {self.nbytes} bytes>"

    @property
    def file_offset(self) -> int | None:
        """Offset of the first byte in the file; None if the file has the bytes compressed or encoded."""
        return self.source.file_offset(self.offset)


class TensorInfo(NamedTuple):
    """
    The facts about one tensor, without its bytes.

    A tensor that is not plain strided memory has a ``layout`` and ``parts`` (sparse: indices and values; quantised per
    channel: scales and zero points; a wrapper subclass: the tensors that it wraps).
    """

    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    storage: StorageRef | None
    """Tensors that share memory have equal storages. None if the file has no bytes of the tensor itself."""
    location: str
    requires_grad: bool | None = None
    kind: Kind | None = None
    layout: str = "strided"
    parts: tuple[tuple[str, TensorInfo], ...] = ()
    subclass: str | None = None
    """The tensor's class if it is neither Tensor nor Parameter; ``ARRAY`` for numpy arrays."""
    details: tuple[tuple[str, int | float], ...] = ()
    """Numbers of the layout: scale and zero point, or the channel axis."""
    conj: bool = False
    neg: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_array(self) -> bool:
        """Whether it is a numpy array in the file: described as a tensor, but loaded as an array."""
        return self.subclass == ARRAY

    @property
    def nbytes(self) -> int:
        """Size in bytes of its own elements, packed; 0 if only its parts have bytes."""
        if not self.storage:
            return 0
        packed = self.dtype.packed
        if packed > 1 and self.shape:  # each row begins at a new byte
            return prod(self.shape[:-1]) * -(-self.shape[-1] // packed)
        return self.numel * self.dtype.itemsize

    @property
    def total_nbytes(self) -> int:
        """Size in bytes of its elements, and of its parts'."""
        return sum(one.nbytes for one in with_parts([self])) if self.parts else self.nbytes

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True

    @property
    def is_plain(self) -> bool:
        """Whether the storage has the tensor's elements as they are, with any strides."""
        swapped = self.storage is not None and self.storage.big_endian and self.dtype.swap_nbytes > 1
        return not (self.conj or self.neg or swapped)

    @property
    def is_as_stored(self) -> bool:
        """Whether the storage has the tensor's elements as they are, consecutively."""
        return self.is_contiguous and self.is_plain

    @property
    def known_crc32(self) -> int:
        """The file's checksum of the tensor's elements in their order; 0 if it has none."""
        storage = self.storage
        return storage.crc32 if storage is not None and self.nbytes == storage.nbytes and self.is_as_stored else 0


def is_size(value: object) -> bool:
    """Return whether a value from a file can be a size, a stride or an offset in torch."""
    return type(value) is int and 0 <= value < MAX_SIZE


def is_countable(sizes: Iterable[int]) -> bool:
    """Return whether torch can count the elements of a shape: the product, taken in order, stays below 2^63."""
    return all(product < MAX_SIZE for product in accumulate(sizes, mul))


def check_extent(info: TensorInfo) -> None:
    """
    Raise MalformedFile unless every element is inside the storage, and torch can count them.

    Needed are offset + 1 + Σ (size - 1) · stride elements, in exact integers; 0 if any size is 0.
    """
    dtype, shape, stride, last, storage = info[:5]
    rank = len(shape)
    if rank != len(stride) or rank > MAX_RANK:
        raise malformed_tensor(f"a tensor of {rank} dimensions with {len(stride)} strides")
    if type(last) is not int or not 0 <= last < MAX_SIZE:
        raise malformed_tensor("a tensor whose offset is not a size")
    bits = 0  # the bits of all sizes and steps: negative, or too large, if one of them is
    for size, step in zip(shape, stride):  # noqa: B905 - equal lengths, as checked above
        if type(size) is not int or type(step) is not int:
            bits = -1
            break
        bits |= size | step
        last += (size - 1) * step
    if not 0 <= bits < MAX_SIZE:
        raise malformed_tensor("a tensor whose shape or strides are not sizes")
    if storage is not None and 0 not in shape:
        held = storage.nbytes // dtype.itemsize * dtype.packed
        if last >= held or (dtype.packed > 1 and info.nbytes > storage.nbytes):
            raise MalformedFile(
                f"a tensor needs {last + 1:,} elements of storage {storage.key!r}, which has {held:,}",
                kind="malformed-tensor",
                needed=last + 1,
                actual=held,
            )
    if (bits >> 15 or rank > 4) and not is_countable(shape):  # the product of smaller ones is small enough
        raise malformed_tensor("a tensor of 2^63 elements or more")


def identity(info: TensorInfo) -> tuple[object, ...]:
    """Return a key that is equal for tied tensors: the same elements of the same memory, in the same order."""
    storage = info.storage
    if storage is None or not info.numel:
        return (id(info),)
    place = (id(storage.source), storage.offset, info.storage_offset)
    # As text, whose hash is random: a file could choose numbers with equal hashes, on which a dict takes hours.
    return *place, info.dtype.name, str((info.shape, info.stride)), info.conj, info.neg


def distinct(infos: Sequence[TensorInfo], cancellation: Cancellation | None = None) -> Sequence[TensorInfo]:
    """Return the tensors, one of each group of tied ones. The same sequence comes back if no storages are shared."""
    storages = [info.storage for info in infos]
    places = [None if one is None else (id(one.source), one.offset) for one in storages]
    ordered = sorted(place for place in places if place is not None)  # a set of all takes ten times the memory
    shared = set(compress(ordered, map(eq, ordered, islice(ordered, 1, None))))
    if not shared and len(ordered) == len(infos):
        return infos
    found: dict[object, TensorInfo] = {}
    for number, (info, place) in each(enumerate(zip(infos, places, strict=True)), cancellation):
        found.setdefault(identity(info) if place is None or place in shared else number, info)
    return list(found.values())


def with_parts(infos: Iterable[TensorInfo]) -> Iterator[TensorInfo]:
    """Yield tensors, each followed by its parts, and their parts."""
    for info in infos:
        yield info
        todo = [info] if info.parts else []
        while todo:
            parts = [part for _, part in todo.pop().parts]
            yield from parts
            todo += parts


def storages_of(infos: Iterable[TensorInfo]) -> Iterator[StorageRef]:
    """Yield the storages of tensors, and of their parts."""
    return (one.storage for one in with_parts(infos) if one.storage is not None)


def storages_nbytes(infos: Iterable[TensorInfo]) -> int:
    """Return the total size in bytes of the storages of tensors and of their parts; each storage counts once."""
    return sum({(id(one.source), one.offset): one.nbytes for one in storages_of(infos)}.values())


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a packed row-major tensor; an empty dimension counts as 1, as in torch."""
    steps = []
    step = 1
    for size in reversed(sizes):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def malformed_tensor(what: str) -> MalformedFile:
    """Return the error for a tensor that contradicts itself."""
    return MalformedFile(what, kind="malformed-tensor")


_SHORT: Final = 256
# As in torch, only the last component of the class's name counts: old files have torch.cuda.FloatStorage.
_BY_CLASS: Final = {
    **dtypes.BY_STORAGE_CLASS,
    **dict.fromkeys(("UntypedStorage", "_UntypedStorage"), dtypes.BY_NAME["uint8"]),
}


class View(NamedTuple):
    """A storage that is a slice of another."""

    key: str
    offset: int
    """In bytes, from the start of the root storage."""
    nbytes: int


class StorageId(NamedTuple):
    """The parts of a storage's persistent id, with checked types."""

    dtype: DType
    """uint8 for UntypedStorage, as in torch: its tensors have their own types."""
    key: str
    location: str
    nbytes: int
    view: View | None


class TypedStorage(NamedTuple):
    """A storage, and the element type that the file gives it."""

    ref: StorageRef
    dtype: DType


def storage_id(pid: Inert) -> StorageId | None:
    """
    Return the parts of a storage's persistent id, or None if it is of something else.

    Raises:
        MalformedFile: It is of a storage, and its parts have wrong types.
        UnsupportedFeature: Its storage class is not known.
        LimitExceeded: Its key or its device tag is longer than any that was ever written.
    """
    if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"):
        return None
    _, cls, key, location, numel = pid if len(pid) == 5 else pid[:5]
    if type(key) is int:
        key = str(key)  # litgpt writes integers
    if type(key) is not str or type(location) is not str or type(numel) is not int or not 0 <= numel < MAX_SIZE:
        raise MalformedFile("a storage whose key, location or size is of the wrong kind", kind="malformed-storage")
    if len(key) + len(location) > _SHORT:
        refuse_long("a storage's key or device tag", key, location)
    found = cls if type(cls) is Global else nodes.global_of(cls)
    dtype = _BY_CLASS.get(found.name) if found is not None else None
    if dtype is None:
        raise UnsupportedFeature(f"storage class {nodes.class_name(cls)} is not known", kind="storage-class")
    view = None
    if len(pid) > 5 and pid[5] is not None:
        view = pid[5]
        if not (
            isinstance(view, tuple) and len(view) == 3 and isinstance(view[0], str) and all(map(is_size, view[1:]))
        ):
            raise MalformedFile("a storage view of the wrong kind", kind="malformed-storage")
        view = View(view[0], view[1] * dtype.itemsize, view[2] * dtype.itemsize)
    return StorageId(dtype, key, location, numel * dtype.itemsize, view)


def unify(seen: TypedStorage, again: TypedStorage) -> TypedStorage:
    """
    Return the storage for a second reference to a key.

    An empty storage has no type of its own: as in torch, each reference has the type that it names.

    Raises:
        AmbiguousFile: The two differ in type, size or device.
    """
    same_place = (seen.ref.location, seen.ref.nbytes) == (again.ref.location, again.ref.nbytes)
    if not same_place or (seen.dtype != again.dtype and seen.ref.nbytes):
        raise AmbiguousFile(
            f"storage {seen.ref.key!r} is {_describe(seen)} in one place and {_describe(again)} in another",
            kind="ambiguous-storage",
        )
    return TypedStorage(seen.ref, again.dtype)


def _describe(storage: TypedStorage) -> str:
    return f"{storage.dtype}, {storage.ref.nbytes:,} bytes on {storage.ref.location!r}"
