"""
What a file says of a tensor, and reading its bytes: ``StorageRef``, ``TensorInfo``, ``LazyTensor``.

Strides and offsets count elements, as torch counts them; sizes in bytes are called ``nbytes``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Final, Literal, NamedTuple, TypeAlias

from ckptool.archives.archive import InflatedSource
from ckptool.errors import LimitExceeded, MalformedFile, UnsupportedFeature
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.sources.cancellable import cancellable
from ckptool.sources.files import BytesSource, Source
from ckptool.tensors.dtypes import DType

Kind: TypeAlias = Literal["parameter", "buffer"]
Dims: TypeAlias = list[tuple[int, int]]

MAX_RANK: Final = 64  # torch's own limit
_MAX_SIZE: Final = 1 << 63
_CODES: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
SWAP_CODES: Final = {2: "H", 4: "I", 8: "Q"}
"""What ``array`` calls unsigned integers of so many bytes."""
_LONG: Final = 16
_PLACES: Final = 1 << 16
_SPAN_NBYTES: Final = 1 << 24


class StorageRef(NamedTuple):
    """One storage's bytes: where they are, and the device tag that they were saved with."""

    key: str
    location: str
    """As saved: ``cpu``, ``cuda:0``, ``npu:0``… Reported, never obeyed."""
    nbytes: int
    source: Source
    offset: int
    """Of the first byte, in ``source``."""
    big_endian: bool = False
    crc32: int = 0
    """Of all its bytes, as the file has it; 0 where it has none."""
    whole: StorageRef | None = None
    """The storage that this one is a slice of, where the file says so (legacy streams)."""

    def __repr__(self) -> str:
        return f"<StorageRef {self.key!r} {self.location} of {self.nbytes} bytes>"

    @property
    def file_offset(self) -> int | None:
        """Where the first byte stands in the file; None where the bytes stand there compressed or encoded."""
        return self.source.file_offset(self.offset)


class TensorInfo(NamedTuple):
    """
    What the file says about one tensor, without its bytes.

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
    """The tensor class that the file asks for, where it is neither Tensor nor Parameter."""
    details: tuple[tuple[str, int | float], ...] = ()
    """Numbers that belong to the layout: scale and zero point, the channel axis."""
    conj: bool = False
    neg: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

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
        return self.nbytes + sum(part.total_nbytes for _, part in self.parts)

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True


def check_extent(info: TensorInfo) -> None:
    """
    Raise MalformedFile unless every element lies inside the storage.

    Exact integers: offset + 1 + Σ (size - 1) · stride elements, 0 if any size is 0.
    """
    dtype, shape, stride, last, storage = info[:5]
    if len(shape) != len(stride) or len(shape) > MAX_RANK:
        raise _malformed(f"a tensor of {len(shape)} dimensions with {len(stride)} strides")
    if type(last) is not int or not 0 <= last < _MAX_SIZE:
        raise _malformed("a tensor whose offset is no size")
    bits = 0  # of all sizes and steps: negative if one of them is, and too large if one of them is
    for size, step in zip(shape, stride):  # noqa: B905 - as many, as was seen
        if type(size) is not int or type(step) is not int:
            bits = -1
            break
        bits |= size | step
        last += (size - 1) * step
    if not 0 <= bits < _MAX_SIZE:
        raise _malformed("a tensor whose shape or strides are no sizes")
    if storage is None or 0 in shape:
        return
    held = storage.nbytes // dtype.itemsize * dtype.packed
    if last >= held or (dtype.packed > 1 and info.nbytes > storage.nbytes):
        raise MalformedFile(
            f"a tensor needs {last + 1:,} elements of storage {storage.key!r}, which has {held:,}",
            kind="malformed-tensor",
            needed=last + 1,
            actual=held,
        )


def identity(info: TensorInfo) -> tuple[object, ...]:
    """Return what two names of one tensor have in common: the same elements of the same memory, seen the same way."""
    storage = info.storage
    if storage is None or not info.numel:
        return (id(info),)
    place = (id(storage.source), storage.offset, info.storage_offset)
    # As text, whose hash nobody can foresee: numbers chosen to have one hash would take a dict hours.
    return *place, info.dtype.name, str((info.shape, info.stride)), info.conj, info.neg


class LazyTensor:
    """A ``TensorInfo`` with its name, and a way to read its bytes. Reading from several threads is safe."""

    __slots__ = ("info", "name")

    def __init__(self, name: str, info: TensorInfo) -> None:
        self.name = name
        self.info = info

    def read(self, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
        """
        Return the elements in row-major order, without gaps, little-endian.

        Views are gathered, expanded elements repeated, conjugate and negative views resolved: the bytes are those of
        the tensor that torch would show. Quantised tensors give their integers.

        Raises:
            UnsupportedFeature: The file has no plain bytes for the tensor: a sparse layout, a wrapper subclass.
            LimitExceeded: Strides of 0 make it far larger than its storage.
        """
        self._check_readable(limits)
        return _read_resolved(self.info)

    def chunks(self, nbytes: int, *, limits: Limits = DEFAULT_LIMITS) -> Iterator[bytes]:
        """Yield what ``read`` returns in pieces of at most ``nbytes``, or of one element where that is more."""
        self._check_readable(limits)
        info = self.info
        return _read_in_pieces(info._replace(storage=at_hand(info.storage)) if info.storage else info, nbytes)

    def _check_readable(self, limits: Limits) -> None:
        info = self.info
        if info.storage is None:
            raise UnsupportedFeature(
                f"tensor {self.name!r} has no plain bytes: {info.subclass or info.layout}",
                kind="no-plain-bytes",
                hint="Read its parts instead." if info.parts else None,
            )
        allowed = limits.expanded(info.storage.nbytes)
        if info.nbytes > allowed:
            raise LimitExceeded(
                f"tensor {self.name!r} repeats {info.storage.nbytes:,} bytes into {info.nbytes:,}",
                needed=info.nbytes,
                actual=allowed,
            )

    def __repr__(self) -> str:
        info = self.info
        return f"<LazyTensor {self.name!r} {info.dtype} {list(info.shape)} {info.location}>"


def at_hand(storage: StorageRef) -> StorageRef:
    """Return a storage for being read more than once: in memory, if each read would inflate it anew."""
    if not isinstance(storage.source, InflatedSource):
        return storage
    content = BytesSource(storage.source.read(storage.offset, storage.nbytes))
    return storage._replace(source=cancellable(content, storage.source.limits.cancellation), offset=0)


def _read_in_pieces(info: TensorInfo, nbytes: int) -> Iterator[bytes]:
    if info.nbytes <= nbytes or not info.shape or info.dtype.packed > 1:
        yield _read_resolved(info)
        return
    rows = max(1, nbytes // (info.nbytes // info.shape[0]))
    for start in range(0, info.shape[0], rows):
        count = min(rows, info.shape[0] - start)
        # A single row is split along the next dimension.
        shape, stride = (info.shape[1:], info.stride[1:]) if rows == 1 else ((count, *info.shape[1:]), info.stride)
        offset = info.storage_offset + start * info.stride[0]
        yield from _read_in_pieces(info._replace(shape=shape, stride=stride, storage_offset=offset), nbytes)


def _read_resolved(info: TensorInfo) -> bytes:
    assert info.storage is not None  # noqa: S101 - _check_readable saw it
    return _resolve(info, _read_elements(info, info.storage))


def _read_elements(info: TensorInfo, storage: StorageRef) -> bytes:
    if info.numel == 0:
        return b""
    itemsize = info.dtype.itemsize
    if info.is_contiguous:
        start = info.storage_offset * itemsize
        if info.dtype.packed > 1 and start:
            # How rows were packed is not known any more.
            raise UnsupportedFeature(f"a view of {info.dtype}", kind="no-plain-bytes")
        return storage.source.read(storage.offset + start, info.nbytes)
    if info.dtype.packed > 1:
        raise UnsupportedFeature(f"a strided view of {info.dtype}", kind="no-plain-bytes")
    # memoryview has no 16-byte element: take such elements as pairs of 8.
    unit = min(itemsize, 8)
    scale = itemsize // unit
    dims = [(size, step * scale) for size, step in zip(info.shape, info.stride, strict=True)]
    if scale > 1:
        dims.append((scale, 1))
    storage = at_hand(storage)
    return gather(storage.source, storage.offset + info.storage_offset * itemsize, unit, _merge(dims))


def _merge(dims: Dims) -> Dims:
    """Drop dimensions of one element and join neighbours that are one run in memory."""
    merged: Dims = []
    for size, step in dims:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * step:
            merged[-1] = (merged[-1][0] * size, step)
        else:
            merged.append((size, step))
    return merged


def gather(source: Source, offset: int, unit: int, dims: Dims) -> bytes:
    """
    Return elements of ``unit`` bytes (1, 2, 4 or 8) in row-major order of ``dims``, pairs of size and step.

    Reads the span that they cover in one piece if it is small or mostly wanted, else slice by slice.
    """
    if not dims:
        return source.read(offset, unit)
    span = unit * (1 + sum((size - 1) * step for size, step in dims))
    wanted = unit * prod(size for size, _ in dims)
    if span > max(_SPAN_NBYTES, 4 * wanted):
        (size, step), inner = dims[0], dims[1:]
        return b"".join(gather(source, offset + index * step * unit, unit, inner) for index in range(size))
    return _pack(source.read(offset, span), unit, dims)


def _pack(data: bytes, unit: int, dims: Dims) -> bytes:
    code = _CODES[unit]
    view = memoryview(data).cast(code)
    output = bytearray(unit * prod(size for size, _ in dims))
    target = memoryview(output).cast(code)
    longest = max(range(len(dims)), key=lambda axis: dims[axis][0])
    if dims[longest][0] >= _LONG:
        _pack_rows(view, target, dims, longest)
    else:
        _pack_elements(view, target, dims)
    return bytes(output)


def _pack_rows(view: memoryview, target: memoryview, dims: Dims, longest: int) -> None:
    """Run the longest dimension in C: one slice assignment for each position of the others."""
    steps = row_major([size for size, _ in dims])
    size, step = dims[longest]
    out_step = steps[longest]
    others = [axis for axis in range(len(dims)) if axis != longest]
    for position in product(*(range(dims[axis][0]) for axis in others)):
        begin = sum(index * dims[axis][1] for index, axis in zip(position, others, strict=True))
        out = sum(index * steps[axis] for index, axis in zip(position, others, strict=True))
        if step:
            row = view[begin : begin + (size - 1) * step + 1 : step]
        else:
            row = memoryview(view[begin : begin + 1].tobytes() * size).cast(view.format)  # type: ignore[call-overload]
        target[out : out + (size - 1) * out_step + 1 : out_step] = row


def _pack_elements(view: memoryview, target: memoryview, dims: Dims) -> None:
    """Where every dimension is short, look the elements up one by one, by a list of places that is used again."""
    inner = len(dims)
    while inner and prod(size for size, _ in dims[inner - 1 :]) <= _PLACES:
        inner -= 1
    places = [0]
    for size, step in dims[inner:]:
        places = [place + index * step for place in places for index in range(size)]
    out = 0
    for position in product(*(range(size) for size, _ in dims[:inner])):
        begin = sum(index * step for index, (_, step) in zip(position, dims[:inner], strict=True))
        part = view[begin:]
        target[out : out + len(places)] = memoryview(array(view.format, map(part.__getitem__, places)))
        out += len(places)


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of packed rows; an empty dimension counts as one, as torch has it."""
    steps = []
    step = 1
    for size in reversed(sizes):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def _resolve(info: TensorInfo, data: bytes) -> bytes:
    """Return the stored bytes as the values they stand for: byte order, conjugate and negative bits applied."""
    unit = info.dtype.swap_nbytes
    if info.storage is not None and info.storage.big_endian and unit > 1:
        swapped = array(SWAP_CODES[unit], data)
        swapped.byteswap()
        data = swapped.tobytes()
    if info.conj:
        data = _flip_signs(data, [False, True], unit)
    if info.neg:
        data = _flip_signs(data, [True], unit)
    return data


def _flip_signs(data: bytes, which: Sequence[bool], unit: int) -> bytes:
    """Flip the sign bit of the numbers of ``unit`` bytes that the repeating pattern ``which`` selects."""
    pattern = b"".join(b"\0" * (unit - 1) + (b"\x80" if flip else b"\0") for flip in which)
    mask = pattern * (len(data) // len(pattern))
    flipped = int.from_bytes(data, "little") ^ int.from_bytes(mask, "little")
    return flipped.to_bytes(len(data), "little")


def _malformed(what: str) -> MalformedFile:
    return MalformedFile(what, kind="malformed-tensor")
