"""``LazyTensor``: the elements of any strided view, gathered from the bytes of its storage, some at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from ckptool.arguments import check_arguments
from ckptool.errors import LimitExceeded, UnsupportedFeature
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.sources.source import BytesSource, FarSource, Source, far_under
from ckptool.tensors.tensor import StorageRef, TensorInfo, row_major

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Dims: TypeAlias = list[tuple[int, int]]
_CODES: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
SWAP_CODES: Final = {2: "H", 4: "I", 8: "Q"}
"""What ``array`` calls unsigned integers of so many bytes."""
_LONG: Final = 16
_WIDE: Final = 64
"""Rows of so many elements are made one by one: what is written is consecutive then, which is twice as fast."""
_BLOCK_COLUMNS: Final = 1 << 11
_BLOCK_NBYTES: Final = 1 << 10
"""Of each column in a block."""
_LINE_NBYTES: Final = 64
_PLACES: Final = 1 << 16
_SPAN_NBYTES: Final = 1 << 19
"""A span that is always read in one piece."""
_MOST_NBYTES: Final = 1 << 26
"""Of a span that is read in one piece because reading its runs one by one would be more work."""
_PER_READ_NBYTES: Final = 1 << 12
"""What can be copied in the time of one read."""


class LazyTensor:
    """A ``TensorInfo`` with its name, and a way to read its bytes. Reading from several threads is safe."""

    __slots__ = ("info", "name")

    def __init__(self, name: str, info: TensorInfo) -> None:
        self.name = name
        self.info = info

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def dtype(self) -> str:
        """torch's name of the element type, without ``torch.``: ``float32``."""
        return self.info.dtype.name

    @property
    def numel(self) -> int:
        return self.info.numel

    @property
    def nbytes(self) -> int:
        """Size of the elements, with those of its parts if it has any."""
        return self.info.total_nbytes

    @property
    def device(self) -> str:
        """The device tag as saved. The bytes are in the file, wherever they were then."""
        return self.info.location

    def numpy(self, *, limits: Limits = DEFAULT_LIMITS) -> NDArray[Any]:
        """
        Return the elements as a new array, which nothing else shares.

        Raises:
            UnsupportedFeature: numpy has no such type (bfloat16, float8, quantised), or ``read`` cannot give the bytes.
            LimitExceeded: As ``read``.
            CkptoolError: numpy is not installed.
        """
        from ckptool import _numpy  # the package knows who can: nothing here knows numpy or torch

        found: NDArray[Any] = _numpy(self, limits)
        return found

    def torch(self) -> Tensor:
        """
        Return the tensor as ``load`` would give it: on the CPU, with its own strides, sparse or quantised if it is.

        It shares memory with no other tensor. ``load`` keeps such sharing, among the tensors of a state dict.

        Raises:
            UnsupportedFeature: Only code of its own can make it, or this torch does not have its type.
            CkptoolError: torch is not installed, or the file cannot be read any more.
        """
        from ckptool import _torch

        found: Tensor = _torch(self)
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return what ``numpy`` does, for ``numpy.asarray``; it says so if numpy has no such type."""
        if copy is False:
            raise ValueError(f"{self!r} is not in memory: an array of it is always a copy")
        try:
            found = self.numpy()
        except UnsupportedFeature as error:
            raise TypeError(f"{error.message}; call torch(), or read() for the bytes") from error
        return found if dtype is None else found.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """Hand over what ``torch`` returns, for ``torch.as_tensor`` and whoever else takes DLPack."""
        return self.torch().detach().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU

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
        return _read_in_pieces(info._replace(storage=in_memory(info.storage)) if info.storage else info, nbytes)

    def _check_readable(self, limits: Limits) -> None:
        if type(limits) is not Limits:  # many tensors are read
            check_arguments(LazyTensor.read, {"limits": limits})
        info = self.info
        if info.storage is None:
            why = "it is on the meta device" if info.location == "meta" else info.subclass or info.layout
            raise UnsupportedFeature(
                f"tensor {self.name!r} has no plain bytes: {why}",
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


def in_memory(storage: StorageRef) -> StorageRef:
    """Inflate a compressed storage into memory, to read it more than once; return others as they are."""
    if not storage.source.is_compressed:
        return storage
    content = storage.source.read(storage.offset, storage.nbytes)
    return storage._replace(source=BytesSource(content, storage.source.cancellation), offset=0)


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
    assert info.storage is not None  # _check_readable saw it
    return _resolve(info, _read_elements(info, info.storage))


def _read_elements(info: TensorInfo, storage: StorageRef) -> bytes:
    if info.numel == 0:
        return b""
    itemsize = info.dtype.itemsize
    if info.is_contiguous:
        start = info.storage_offset * itemsize
        if info.dtype.packed > 1 and start:
            # The file does not say how rows were packed.
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
    storage = in_memory(storage)
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

    Reads the span that they cover in one piece if that is small, or mostly wanted, or less work than a read for each
    run; else in slices along the dimension of the largest step. What a step of 0 repeats is read once.
    """
    if not dims:
        return source.read(offset, unit)
    span = unit * (1 + sum((size - 1) * step for size, step in dims))
    count = prod(size for size, _ in dims)
    if len(dims) == 1 and dims[0][1] == 1:
        return source.read(offset, span)
    if span <= max(_SPAN_NBYTES, 4 * unit * count) or span <= min(_MOST_NBYTES, _PER_READ_NBYTES * _runs(dims)):
        return _pack(source.read(offset, span), unit, dims)
    axis = min(range(len(dims)), key=lambda at: (dims[at][1] > 0, -dims[at][1]))
    size, step = dims[axis]
    inner = dims[:axis] + dims[axis + 1 :]
    if step and len(inner) == 1 and inner[0][1] == 1:
        nbytes = inner[0][0] * unit
        slices = [source.read(offset + index * step * unit, nbytes) for index in range(size)]
    elif step:
        slices = [gather(source, offset + index * step * unit, unit, inner) for index in range(size)]
    else:
        slices = [gather(source, offset, unit, inner)] * size
    return _stack(slices, prod(size for size, _ in dims[:axis]))


def _runs(dims: Dims) -> int:
    """Return how many runs of consecutive elements there are."""
    run = 1
    for size, step in sorted(dims, key=lambda dim: dim[1]):
        run *= size if step == run else 1
    return prod(size for size, _ in dims) // run


def _stack(slices: list[bytes], rows: int) -> bytes:
    """Return slices of as many rows each, side by side: row 0 of each, then row 1 of each…"""
    if rows == 1:
        return b"".join(slices)
    width = len(slices[0]) // rows
    if width in _CODES:
        return _pack(b"".join(slices), width, [(rows, 1), (len(slices), rows)])
    return b"".join(one[start : start + width] for start in range(0, rows * width, width) for one in slices)


def _pack(data: bytes, unit: int, dims: Dims) -> bytes:
    code = _CODES[unit]
    view = memoryview(data).cast(code)
    output = bytearray(unit * prod(size for size, _ in dims))
    target = memoryview(output).cast(code)
    longest = max(range(len(dims)), key=lambda axis: dims[axis][0])
    if len(dims) == 2 and dims[0][1] == 1 and dims[0][0] >= _LONG and dims[1][0] >= _WIDE:
        _pack_columns(view, target, dims[0][0], *dims[1])
    elif dims[-1][0] >= _WIDE:
        _pack_rows(view, target, dims, len(dims) - 1)
    elif dims[longest][0] >= _LONG:
        _pack_rows(view, target, dims, longest)
    else:
        _pack_elements(view, target, dims)
    return bytes(output)


def _pack_rows(view: memoryview, target: memoryview, dims: Dims, axis_in_c: int) -> None:
    """Run one dimension in C: one slice assignment for each position of the others."""
    steps = row_major([size for size, _ in dims])
    size, step = dims[axis_in_c]
    out_step = steps[axis_in_c]
    others = [axis for axis in range(len(dims)) if axis != axis_in_c]
    for position in product(*(range(dims[axis][0]) for axis in others)):
        begin = sum(index * dims[axis][1] for index, axis in zip(position, others, strict=True))
        out = sum(index * steps[axis] for index, axis in zip(position, others, strict=True))
        if step:
            row = view[begin : begin + (size - 1) * step + 1 : step]
        else:
            row = memoryview(view[begin : begin + 1].tobytes() * size).cast(view.format)  # type: ignore[call-overload]
        target[out : out + (size - 1) * out_step + 1 : out_step] = row


def _pack_columns(view: memoryview, target: memoryview, rows: int, columns: int, step: int) -> None:
    """
    Pack what is stored column by column, ``step`` elements from one to the next.

    A block at a time, which stays in a core's cache. There, columns are an odd number of cache lines apart: with a
    power of two, all elements of a row would have to be in the same few places of the cache.
    """
    height = _BLOCK_NBYTES // view.itemsize
    apart = height + _LINE_NBYTES // view.itemsize
    block = memoryview(bytearray(min(columns, _BLOCK_COLUMNS) * apart * view.itemsize)).cast(_CODES[view.itemsize])
    for first, left in product(range(0, rows, height), range(0, columns, _BLOCK_COLUMNS)):
        count, width = min(height, rows - first), min(_BLOCK_COLUMNS, columns - left)
        for column in range(width):
            begin = (left + column) * step + first
            block[column * apart : column * apart + count] = view[begin : begin + count]
        for row in range(count):
            out = (first + row) * columns + left
            target[out : out + width] = block[row : row + (width - 1) * apart + 1 : apart]


def _pack_elements(view: memoryview, target: memoryview, dims: Dims) -> None:
    """Where every dimension is short, look the elements up one by one, by a list of places that is used again."""
    from array import array  # few tensors are read in such places

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


def _resolve(info: TensorInfo, data: bytes) -> bytes:
    """Return the values of stored bytes: byte order, conjugate and negative bits applied."""
    unit = info.dtype.swap_nbytes
    if info.storage is not None and info.storage.big_endian and unit > 1:
        from array import array

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


def announce(tensors: Iterable[LazyTensor]) -> None:
    """Announce the storages of tensors, those of their parts too, to the sources that they are read from."""
    found: dict[int, tuple[FarSource, list[tuple[int, int]]]] = {}
    todo = [tensor.info for tensor in tensors]
    while todo:
        info = todo.pop()
        todo.extend(part for _, part in info.parts)
        storage = info.storage
        under = None if storage is None else far_under(storage.source)
        if storage is None or under is None:
            continue
        far, shift = under
        start = shift + storage.offset
        found.setdefault(id(far), (far, []))[1].append((start, start + storage.nbytes))
    for far, ranges in found.values():
        far.prefetch(ranges)
