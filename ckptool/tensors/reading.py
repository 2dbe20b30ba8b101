"""``LazyTensor``: read the elements of any strided view from the bytes of its storage, some at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from ckptool.arguments import check_arguments
from ckptool.errors import CkptoolError, LimitExceeded, UnsupportedFeature
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.sources.checksums import PIECE_NBYTES, Buffer
from ckptool.sources.files import file_under
from ckptool.sources.source import BytesSource, RemoteSource, SliceSource, Source, remote_under
from ckptool.tensors.tensor import StorageRef, TensorInfo, row_major, storages_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, in elements."""
Dims: TypeAlias = list[tuple[int, int, int]]
"""Size, step in the source, and step in the target of each dimension, in elements."""
CODES: Final[dict[int, Literal["B", "H", "I", "Q"]]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""Codes of unsigned integers, by their size in bytes."""
_LONG: Final = 256
"""A dimension of this many elements is long enough to copy it with one call for each row."""
_SPAN_NBYTES: Final = 1 << 19
"""A span up to this size is always read in one piece."""
_MOST_NBYTES: Final = 1 << 26
"""Bytes of the largest span that is read in one piece to avoid many small reads."""
_PER_READ_NBYTES: Final = 1 << 12
"""Bytes that can be copied in the time of one read."""
_APART_NBYTES: Final = 1 << 15
"""Unneeded bytes of a file that are read rather than skipped between two runs: reading them takes no longer."""
_PIECE: Final = Buffer()
"""Memory of each thread for what was read of a file and is copied at once."""


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
        """Size of the elements in bytes, including those of its parts."""
        return self.info.total_nbytes

    @property
    def device(self) -> str:
        """The device tag as saved: where the tensor was then. Its bytes are in the file."""
        return self.info.location

    def numpy(self, *, limits: Limits = DEFAULT_LIMITS) -> NDArray[Any]:
        """
        Return the elements as a new array that shares no memory.

        Raises:
            UnsupportedFeature: numpy has no such type (bfloat16, float8, quantised), or as ``read``.
            LimitExceeded: As ``read``.
            CkptoolError: numpy is not installed.
        """
        from ckptool import _numpy  # indirectly, because this package must not import numpy or torch

        found: NDArray[Any] = _numpy(self, limits)
        return found

    def torch(self) -> Tensor:
        """
        Return the tensor as ``load`` would give it: on the CPU, with its own strides, sparse or quantised if it is.

        It shares memory with no other tensor. ``load`` keeps such sharing, among the tensors of a state dict. A local
        file is mapped, as by ``load``: to truncate it kills the process.

        Raises:
            UnsupportedFeature: Only code of its own can make it, or this torch does not have its type.
            CkptoolError: torch is not installed, or the file cannot be read any more.
        """
        from ckptool import _torch

        found: Tensor = _torch(self)
        return found

    def __getitem__(self, rows: slice | tuple[slice, ...]) -> LazyTensor:
        """
        Return a lazy tensor of some rows, as ``tensor[2:10]``, or columns, as ``tensor[:, 2:10]``.

        It reads only their bytes if they are consecutive, as rows are, and otherwise few more.

        Raises:
            TypeError: The index is not a slice, or has more slices than the tensor has dimensions.
            ValueError: A step is below 1.
            UnsupportedFeature: The file has no plain rows: the tensor is sparse, or packs several values in a byte.
        """
        info, storage = self.info, self.info.storage
        given: tuple[object, ...] = rows if isinstance(rows, tuple) else (rows,)
        slices = [one for one in given if isinstance(one, slice)]
        if not slices or len(slices) < len(given) or len(slices) > len(info.shape):
            what = "takes a slice of each dimension, as tensor[2:10]" if info.shape else "has one element"
            raise TypeError(f"{self!r} {what}: torch() and numpy() give what can be indexed")
        taken = [range(size)[one] for one, size in zip(slices, info.shape, strict=False)]
        if any(one.step < 1 for one in taken):
            raise ValueError(f"the step of a slice is at least 1, not {min(one.step for one in taken)}")
        if storage is None or info.layout != "strided" or info.dtype.packed > 1:
            raise UnsupportedFeature(f"tensor {self.name!r} has no plain rows: {info.layout}", kind="no-plain-bytes")
        shape = (*map(len, taken), *info.shape[len(taken) :])
        steps = (*(one.step * step for one, step in zip(taken, info.stride, strict=False)), *info.stride[len(taken) :])
        first = sum(one.start * step for one, step in zip(taken, info.stride, strict=False))
        begin = info.storage_offset + first if prod(shape) else info.storage_offset
        info = info._replace(shape=shape, stride=steps, storage_offset=begin, parts=())
        if info.is_contiguous:  # then a slice of the source can be its storage
            own = SliceSource(storage.source, storage.offset + begin * info.dtype.itemsize, info.nbytes)
            info = info._replace(
                storage=storage._replace(source=own, offset=0, nbytes=info.nbytes, crc32=0, whole=None),
                storage_offset=0,
            )
        return LazyTensor(f"{self.name}[{', '.join(map(_spelled, slices))}]", info)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the array of ``numpy()``, for ``numpy.asarray``; raise TypeError if numpy has no such type."""
        if copy is False:
            raise ValueError(f"{self!r} is not in memory: an array of it is always a copy")
        try:
            found = self.numpy()
        except UnsupportedFeature as error:
            raise TypeError(f"{error.message}; call torch(), or read() for the bytes") from error
        return found if dtype is None else found.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """Return the tensor of ``torch()`` as DLPack, for ``torch.as_tensor`` and others that take it."""
        return self.torch().detach().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU

    def read(self, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
        """
        Return the elements in row-major order, without gaps, little-endian.

        Views are gathered, expanded elements repeated, conjugate and negative views resolved: the bytes are the values
        that torch would show. Quantised tensors give their integers.

        Raises:
            UnsupportedFeature: The file has no plain bytes for the tensor: a sparse layout, a wrapper subclass.
            LimitExceeded: Strides of 0 make it far larger than its storage.
        """
        self._check_readable(limits)
        return _read(self.info)

    def chunks(self, nbytes: int, *, limits: Limits = DEFAULT_LIMITS) -> Iterator[bytes]:
        """Yield the bytes of ``read`` in pieces of at most ``nbytes`` bytes, but at least one element."""
        self._check_readable(limits)
        info, zero = self.info, (0,) * len(self.shape)
        whole = info if info.storage is None else info._replace(storage=in_memory(info.storage))
        is_one = info.nbytes <= nbytes or info.dtype.packed > 1
        boxes = [(zero, info.shape)] if is_one else cut_up(zero, info.shape, max(1, nbytes // info.dtype.itemsize))
        return (_read(part_of(whole, *box)) for box in boxes)

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


def _spelled(one: slice) -> str:
    """Return the source text of a slice."""
    start, stop, step = ("" if bound is None else str(bound) for bound in (one.start, one.stop, one.step))
    return f"{start}:{stop}{f':{step}' if step not in ('', '1') else ''}"


def in_memory(storage: StorageRef) -> StorageRef:
    """Inflate a compressed storage into memory, to read it more than once; return others as they are."""
    if not storage.source.is_compressed:
        return storage
    content = storage.source.read(storage.offset, storage.nbytes)
    return storage._replace(source=BytesSource(content, storage.source.cancellation), offset=0)


def part_of(info: TensorInfo, offsets: Sequence[int], sizes: tuple[int, ...]) -> TensorInfo:
    """Return a box of a tensor as a tensor of its own."""
    return info._replace(shape=sizes, storage_offset=info.storage_offset + sum(map(mul, offsets, info.stride)))


def cut_up(offsets: tuple[int, ...], sizes: tuple[int, ...], numel: int) -> Iterator[Box]:
    """Yield parts of a box of at most ``numel`` elements each, in row-major order."""
    if prod(sizes) <= numel:
        yield offsets, sizes
        return
    axis = next(at for at, size in enumerate(sizes) if size > 1)
    rows = max(1, numel // prod(sizes[axis + 1 :]))
    for start in range(0, sizes[axis], rows):
        own = (*offsets[:axis], offsets[axis] + start, *offsets[axis + 1 :])
        part = own, (*sizes[:axis], min(rows, sizes[axis] - start), *sizes[axis + 1 :])
        yield from cut_up(*part, numel) if rows == 1 else (part,)


def _read(info: TensorInfo) -> bytes:
    storage, itemsize = info.storage, info.dtype.itemsize
    assert storage is not None  # _check_readable saw it
    start = info.storage_offset * itemsize
    if info.numel and info.dtype.packed > 1 and (start or not info.is_contiguous):
        # It is not known how rows were packed.
        raise UnsupportedFeature(f"a view of {info.dtype}", kind="no-plain-bytes")
    if not info.numel or info.is_contiguous:
        data = storage.source.read(storage.offset + start, info.nbytes) if info.numel else b""
    else:
        output = bytearray(info.nbytes)
        gather(info._replace(storage=in_memory(storage)), row_major(info.shape), memoryview(output), 0)
        data = bytes(output)
    unit = info.dtype.swap_nbytes
    if storage.big_endian and unit > 1:
        data = swapped(data, unit)
    if info.conj:
        data = _flip_signs(data, [False, True], unit)
    return _flip_signs(data, [True], unit) if info.neg else data


def gather(info: TensorInfo, steps: Sequence[int], target: memoryview, at: int) -> None:
    """Read the stored elements of a tensor to their places in a buffer: the first one ``at``, the next by ``steps``."""
    storage, itemsize = info.storage, info.dtype.itemsize
    assert storage is not None  # the caller saw it
    dims = _merged(list(zip(info.shape, info.stride, steps, strict=True)))
    _gather(storage.source, storage.offset + info.storage_offset * itemsize, dims, itemsize, target, at)


def _merged(dims: Dims) -> Dims:
    """Drop dimensions of one element, and join adjacent dimensions that are contiguous in both source and target."""
    merged: Dims = []
    for size, step, to in dims:
        if merged and merged[-1][1:] == (size * step, size * to):
            merged[-1] = merged[-1][0] * size, step, to
        elif size > 1:
            merged.append((size, step, to))
    return merged


def _gather(source: Source, offset: int, dims: Dims, itemsize: int, target: memoryview, at: int) -> None:
    """
    Read the elements of a box to their places in a buffer; ``at`` is the place of the first one.

    The span that they cover is read in one piece if it is small, or mostly needed, or less work than a read for each
    run; otherwise in slices along the dimension with the largest step. Of a file, pieces are read that stay in a
    core's cache.
    """
    count = prod(size for size, _, _ in dims)
    span = itemsize * (1 + sum((size - 1) * step for size, step, _ in dims))
    most = min(_MOST_NBYTES, _PER_READ_NBYTES * count // _run(dims))
    under = file_under(source, offset)
    if span <= (PIECE_NBYTES if under is not None else max(_SPAN_NBYTES, 4 * itemsize * count, most)):
        if under is None:
            data = memoryview(source.read(offset, span))
        else:
            data = _PIECE.view[:span]
            under[0].read_into(under[1], data)
        copy_box(data, target, at, dims, itemsize)
        return
    axis = max(range(len(dims)), key=lambda axis: dims[axis][1])
    (size, step, to), others = dims[axis], dims[:axis] + dims[axis + 1 :]
    within, apart = span - itemsize * (size - 1) * step, itemsize * step
    rows = 1
    if under is not None and within <= PIECE_NBYTES and apart - within <= _APART_NBYTES:
        rows += (PIECE_NBYTES - within) // apart
    for index in range(0, size, rows):
        part = [*others, (min(rows, size - index), step, to)] if rows > 1 else others
        _gather(source, offset + index * apart, part, itemsize, target, at + index * to)


def _run(dims: Dims) -> int:
    """Return how many elements are consecutive in the source at a time."""
    run = 1
    for size, step, _ in sorted(dims, key=lambda dim: dim[1]):
        run *= size if step == run else 1
    return run


def copy_box(source: memoryview, target: memoryview, at: int, dims: Dims, itemsize: int) -> None:
    """
    Copy the elements of a box from the start of one buffer to the place ``at`` of another.

    ``dims`` are size, step in the source, and step in the target of each dimension. All units are elements.
    """
    unit = min(itemsize, 8)
    if unit < itemsize:  # memoryview has no items of 16 bytes: they are copied as pairs
        scale = itemsize // unit
        dims = [*((size, step * scale, to * scale) for size, step, to in dims), (scale, 1, 1)]
        at *= scale
    dims = _merged(dims) or [(1, 1, 1)]
    source, target = (side.cast("B").cast(CODES[unit]) for side in (source, target))
    # One dimension is copied by C code: of the long ones the one with the smallest steps, else the longest.
    axis = max(range(len(dims)), key=lambda axis: (min(dims[axis][0], _LONG), -sum(dims[axis][1:]), -dims[axis][2]))
    size, step, to = dims.pop(axis)
    *outer, (count, skip, skip_to) = sorted(dims) or [(1, 0, 0)]
    for place in product(*(range(one) for one, _, _ in outer)):
        first = sum(index * one for index, (_, one, _) in zip(place, outer, strict=True))
        out = at + sum(index * one for index, (_, _, one) in zip(place, outer, strict=True))
        for _ in range(count):
            if step:
                row = source[first : first + (size - 1) * step + 1 : step]
            else:
                row = memoryview(source[first : first + 1].tobytes() * size).cast(CODES[unit])
            target[out : out + (size - 1) * to + 1 : to] = row
            first, out = first + skip, out + skip_to


def swapped(data: bytes, unit: int) -> bytes:
    """Return numbers of ``unit`` bytes in the other byte order."""
    from array import array  # few files are big-endian

    values = array(CODES[unit], data)
    values.byteswap()
    return values.tobytes()


def _flip_signs(data: bytes, which: Sequence[bool], unit: int) -> bytes:
    """Flip the sign bit of the numbers of ``unit`` bytes that the repeating pattern ``which`` selects."""
    pattern = b"".join(b"\0" * (unit - 1) + (b"\x80" if flip else b"\0") for flip in which)
    mask = pattern * (len(data) // len(pattern))
    flipped = int.from_bytes(data, "little") ^ int.from_bytes(mask, "little")
    return flipped.to_bytes(len(data), "little")


def fault_of(source: Source) -> CkptoolError | None:
    """Return the known error that reading a source would raise, or None."""
    found: CkptoolError | None = getattr(source, "fault", None)  # a PiecesSource has it
    return found


def announce(tensors: Iterable[LazyTensor]) -> None:
    """Announce the storages of tensors, and of their parts, to the remote sources that they are read from."""
    found: dict[int, tuple[RemoteSource, list[tuple[int, int]]]] = {}
    for storage in storages_of(tensor.info for tensor in tensors):
        if under := remote_under(storage.source):
            far, shift = under
            start = shift + storage.offset
            found.setdefault(id(far), (far, []))[1].append((start, start + storage.nbytes))
    for far, ranges in found.values():
        far.prefetch(ranges)
