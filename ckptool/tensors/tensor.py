"""
The facts about a tensor and its storage, without bytes: ``TensorInfo``, ``StorageRef``.

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
"""What torch calls the parts of a sparse tensor, by its layout."""
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
    whole: StorageRef | None = None
    """The storage that this one is a slice of, where the file says so (legacy streams, tars)."""

    def __repr__(self) -> str:
        return f"<StorageRef {self.key!r} {self.location} of {self.nbytes} bytes>"

    @property
    def file_offset(self) -> int | None:
        """Offset of the first byte in the file; None where the file holds the bytes compressed or encoded."""
        return self.source.file_offset(self.offset)


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
    parts: tuple[tuple[str, TensorInfo], ...] = ()
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
    def is_as_stored(self) -> bool:
        """Whether the storage holds the tensor's elements as they are, one after the other."""
        swapped = self.storage is not None and self.storage.big_endian and self.dtype.swap_nbytes > 1
        return self.is_contiguous and not (self.conj or self.neg or swapped)

    @property
    def known_crc32(self) -> int:
        """The checksum that the file has of the tensor's elements in their order; 0 where it has none."""
        storage = self.storage
        return storage.crc32 if storage is not None and self.nbytes == storage.nbytes and self.is_as_stored else 0


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
        raise malformed_tensor(f"a tensor of {rank} dimensions with {len(stride)} strides")
    if type(last) is not int or not 0 <= last < MAX_SIZE:
        raise malformed_tensor("a tensor whose offset is no size")
    bits = 0  # of all sizes and steps: negative if one of them is, and too large if one of them is
    for size, step in zip(shape, stride):  # noqa: B905 - as many, as was seen
        if type(size) is not int or type(step) is not int:
            bits = -1
            break
        bits |= size | step
        last += (size - 1) * step
    if not 0 <= bits < MAX_SIZE:
        raise malformed_tensor("a tensor whose shape or strides are no sizes")
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
        raise malformed_tensor("a tensor of 2^63 elements or more")


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
    storages = [info.storage for info in infos]
    places = [None if one is None else (id(one.source), one.offset) for one in storages]
    ordered = sorted(place for place in places if place is not None)  # a set of all would take ten times the memory
    shared = set(compress(ordered, map(eq, ordered, islice(ordered, 1, None))))
    if not shared and len(ordered) == len(infos):
        return infos
    found: dict[object, TensorInfo] = {}
    for number, (info, place) in each(enumerate(zip(infos, places, strict=True)), cancellation):
        found.setdefault(identity(info) if place is None or place in shared else number, info)
    return list(found.values())


def with_parts(infos: Iterable[TensorInfo]) -> Iterator[TensorInfo]:
    """Yield tensors, each with its parts behind it, and theirs."""
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
    """Return the size of the storages of tensors, and of their parts, each once."""
    return sum({(id(one.source), one.offset): one.nbytes for one in storages_of(infos)}.values())


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of packed rows; an empty dimension counts as one, as torch has it."""
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


class View(NamedTuple):
    """A storage that is a slice of another."""

    key: str
    offset: int
    """In bytes, from the start of the root storage."""
    nbytes: int


class StorageId(NamedTuple):
    """A persistent id, its types checked."""

    dtype: DType
    """uint8 for UntypedStorage, as torch has it: its tensors say their type themselves."""
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
    Return the parts of a storage's persistent id, or None if it is about something else.

    Raises:
        MalformedFile: It is about a storage, and its parts are of the wrong kind.
        UnsupportedFeature: It names a storage class that is not known.
        LimitExceeded: Its key or its device tag is longer than any that was ever written.
    """
    if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"):
        return None
    _, cls, key, location, numel = pid if len(pid) == 5 else pid[:5]
    if type(key) is int:
        key = str(key)  # litgpt writes numbers
    if type(key) is not str or type(location) is not str or type(numel) is not int or not 0 <= numel < MAX_SIZE:
        raise MalformedFile("a storage whose key, location or size is of the wrong kind", kind="malformed-storage")
    if len(key) + len(location) > _SHORT:
        refuse_long("a storage's key or device tag", key, location)
    dtype = dtypes.BY_STORAGE_CLASS.get(cls.name) if type(cls) is Global else None
    if dtype is None:
        dtype = _dtype(cls)
    itemsize = dtype.itemsize
    view = None if len(pid) == 5 else _view(pid[5], itemsize)
    return StorageId(dtype, key, location, numel * itemsize, view)


def unify(seen: TypedStorage, again: TypedStorage) -> TypedStorage:
    """
    Return the storage that a second reference to one key means.

    An empty storage has no type of its own: torch, too, gives each reference the type that it asks for.

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


def _dtype(cls: Inert) -> DType:
    found = cls if isinstance(cls, Global) else nodes.global_of(cls)
    # torch, too, goes by the class's name alone: old files say torch.cuda.FloatStorage.
    if found is not None and found.name in dtypes.BY_STORAGE_CLASS:
        return dtypes.BY_STORAGE_CLASS[found.name]
    if found is not None and found.name in ("UntypedStorage", "_UntypedStorage"):
        return dtypes.BY_NAME["uint8"]
    raise UnsupportedFeature(f"storage class {nodes.class_name(cls)} is not known", kind="storage-class")


def _view(view: Inert, itemsize: int) -> View | None:
    if view is None:
        return None
    if not (isinstance(view, tuple) and len(view) == 3 and isinstance(view[0], str) and all(map(is_size, view[1:]))):
        raise MalformedFile("a storage view of the wrong kind", kind="malformed-storage")
    return View(view[0], view[1] * itemsize, view[2] * itemsize)
