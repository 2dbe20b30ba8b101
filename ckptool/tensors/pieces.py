"""
Tensors in pieces: several boxes, in several files, that together are one tensor.

A box is a pair ``(offsets, sizes)`` inside the shape of the whole, in elements. ``PiecesSource`` makes of them a source
of the whole tensor's bytes, packed in row-major order: whoever reads, copies or compares a storage reads it as any
other. A tensor that was flattened before it was cut is one of pieces of a shape of one dimension.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Final, NamedTuple, TypeAlias
from zlib import crc32

from ckptool.cancellation import Cancellation, check_cancelled
from ckptool.errors import DamagedFile, MalformedFile
from ckptool.sources.files import FileSource, file_under
from ckptool.tensors.dtypes import DType
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import StorageRef, TensorInfo, row_major

_BAND_NBYTES: Final = 1 << 22
"""What is put together at a time."""
_CODES: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}
_NARROW: Final = 64
"""Rows of fewer bytes are copied by columns: one call for each column instead of one for each row."""


class Piece(NamedTuple):
    """A box of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    """Name of the file that holds it, for people."""
    open: Callable[[], TensorInfo]
    """Returns the facts of the piece as a tensor of its own, of shape ``sizes``. May read headers; is called once."""

    @property
    def numel(self) -> int:
        return prod(self.sizes)


class Extent(NamedTuple):
    """Consecutive bytes of a tensor that a file holds as they are."""

    file: FileSource
    offset: int
    nbytes: int
    crc32: int = 0
    """Of these bytes, as the file has it; 0 where it has none."""
    what: str = ""
    """What the checksum is of, for the message."""

    def check(self, found: int) -> None:
        """Raise DamagedFile if the file has a checksum of these bytes, and it is not this one."""
        if self.crc32:
            compare(found, self.crc32, self.what)


class PiecesSource:
    """
    The bytes of a tensor that is stored as pieces, which have to tile it: ``check_tiling`` says so.

    A piece is opened when its bytes are first asked for, and compared with what was said of it. Threads may share it.
    """

    is_compressed = False

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        pieces: Sequence[Piece],
        cancellation: Cancellation | None = None,
        *,
        name: str = "",
    ) -> None:
        self.shape = shape or (1,)
        self.dtype = dtype
        self.cancellation = cancellation
        self.name = name
        self.nbytes = prod(shape) * dtype.itemsize
        own = [one if shape else one._replace(offsets=(0,), sizes=(1,)) for one in pieces]
        self.pieces = tuple(sorted((one for one in own if one.numel), key=lambda one: one.offsets))
        """Those that have elements, in row-major order of their first ones."""
        self._steps = row_major(self.shape)
        self._infos: dict[int, TensorInfo] = {}
        self._lock = threading.Lock()
        axis = 0  # rows are along the first dimension whose rows are no larger than a band
        while axis < len(self.shape) - 1 and self._steps[axis] * dtype.itemsize > _BAND_NBYTES:
            axis += 1
        self._axis = axis

    def info(self, index: int) -> TensorInfo:
        """
        Return the facts of a piece, as a tensor of its own.

        Raises:
            MalformedFile: It is not of the size or type that was said.
            CkptoolError: It cannot be read.
        """
        known = self._infos.get(index)
        if known is None:
            piece = self.pieces[index]
            with self._lock:
                found = piece.open()
            flat = len(piece.sizes) == 1 and found.numel == piece.numel and found.is_contiguous
            if flat:
                found = found._replace(shape=piece.sizes, stride=(1,))
            if found.shape != piece.sizes:
                raise self._contradiction(piece, f"has shape {list(found.shape)}, not {list(piece.sizes)}")
            if found.dtype != self.dtype:
                raise self._contradiction(piece, f"is of {found.dtype}, not {self.dtype}")
            if found.storage is None or found.layout != "strided":
                raise self._contradiction(piece, "is no plain tensor")
            known = self._infos[index] = found
        return known

    def _contradiction(self, piece: Piece, what: str) -> MalformedFile:
        return MalformedFile(
            f"the piece of {self.name!r} at {list(piece.offsets)} in {piece.file!r} {what}",
            kind="piece",
            hint="Get the folder again, from one save.",
        )

    @cached_property
    def _runs(self) -> tuple[int, ...] | None:
        """Where each piece begins, in elements, if each is one run of the whole; None if one is not."""
        for piece in self.pieces:
            sizes = piece.sizes
            axis = next((at for at, size in enumerate(sizes) if size != 1), len(sizes))
            if sizes[axis + 1 :] != self.shape[axis + 1 :]:
                return None
        return tuple(
            sum(offset * step for offset, step in zip(piece.offsets, self._steps, strict=True)) for piece in self.pieces
        )

    def extents(self) -> list[Extent] | None:
        """Return the bytes as runs of files, in order; None where a piece is not such a run, or is not as it is."""
        if self._runs is None:
            return None
        found = []
        for index in range(len(self.pieces)):
            info = self.info(index)
            storage = info.storage
            assert storage is not None  # noqa: S101 - info() saw it
            under = file_under(storage.source, storage.offset + info.storage_offset * info.dtype.itemsize)
            if under is None or not _is_as_it_is(info, storage):
                return None
            is_whole = info.nbytes == storage.nbytes
            crc = storage.crc32 if is_whole else 0
            found.append(Extent(*under, info.nbytes, crc, self._place(index)))
        return found

    def _place(self, index: int) -> str:
        piece = self.pieces[index]
        return f"{self.name!r} at {list(piece.offsets)} in {piece.file!r}"

    def read(self, offset: int, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from ``offset``."""
        if self._runs is not None:
            self._fill_runs(self._runs, offset, buffer)
            return
        for start, band in self._bands(offset, offset + buffer.nbytes):
            begin, end = max(start, offset), min(start + len(band), offset + buffer.nbytes)
            buffer[begin - offset : end - offset] = memoryview(band)[begin - start : end - start]

    def chunks(self) -> Iterator[bytes | bytearray]:
        """
        Yield all bytes in order, and compare the pieces with the checksums that their files have.

        Raises:
            DamagedFile: At the end, if a piece is not what was saved.
        """
        found: dict[int, int] = {}

        def note(index: int, data: bytes) -> None:
            found[index] = crc32(data, found.get(index, 0))

        yield from (band for _, band in self._bands(0, self.nbytes, note))
        for index in range(len(self.pieces)):
            info = self.info(index)
            storage = info.storage
            if storage is None or not storage.crc32:
                continue
            in_order = _is_as_it_is(info, storage) and info.nbytes == storage.nbytes and self._axis == 0
            compare(found[index] if in_order else _checksum(storage), storage.crc32, self._place(index))

    def _bands(
        self, start: int, stop: int, note: Callable[[int, bytes], None] | None = None
    ) -> Iterator[tuple[int, bytearray]]:
        """Yield whole rows that together hold the bytes from ``start`` to ``stop``, and where each band begins."""
        axis, itemsize = self._axis, self.dtype.itemsize
        row, rows = self._steps[axis] * itemsize, self.shape[axis]
        at_once = max(1, _BAND_NBYTES // row)
        index = start // row
        while index * row < stop:
            check_cancelled(self.cancellation)
            outer, first = divmod(index, rows)
            count = min(at_once, rows - first, -(-stop // row) - index)
            band = bytearray(count * row)
            self._fill_rows(self._position(outer), first, count, memoryview(band), note)
            yield index * row, band
            index += count

    def _position(self, outer: int) -> tuple[int, ...]:
        """Return the position in the dimensions before that of the rows, from its number in row-major order."""
        found = []
        for size in reversed(self.shape[: self._axis]):
            outer, at = divmod(outer, size)
            found.append(at)
        return tuple(reversed(found))

    def _fill_runs(self, runs: tuple[int, ...], offset: int, buffer: memoryview) -> None:
        itemsize = self.dtype.itemsize
        index = max(0, bisect_right(runs, offset // itemsize) - 1)
        while buffer.nbytes:
            check_cancelled(self.cancellation)
            start = offset - runs[index] * itemsize
            info = self.info(index)
            count = min(buffer.nbytes, info.nbytes - start)
            read_part(info, start, buffer[:count])
            buffer, offset, index = buffer[count:], offset + count, index + 1

    def _fill_rows(
        self,
        outer: tuple[int, ...],
        first: int,
        rows: int,
        buffer: memoryview,
        note: Callable[[int, bytes], None] | None,
    ) -> None:
        """Fill a band of rows from the pieces that are in it."""
        axis = self._axis
        for index, (offsets, sizes, *_) in enumerate(self.pieces):
            begin, end = max(first, offsets[axis]), min(first + rows, offsets[axis] + sizes[axis])
            at = [place - offset for place, offset in zip(outer, offsets, strict=False)]
            if begin >= end or not all(0 <= place < size for place, size in zip(at, sizes, strict=False)):
                continue
            info = self.info(index)
            at.append(begin - offsets[axis])
            skipped = sum(place * step for place, step in zip(at, info.stride, strict=False))
            part = info._replace(
                shape=(end - begin, *sizes[axis + 1 :]),
                stride=info.stride[axis:],
                storage_offset=info.storage_offset + skipped,
            )
            data = LazyTensor(self.name, part).read()
            if note is not None:
                note(index, data)
            place_in_band = (begin - first, *offsets[axis + 1 :])
            scatter(data, part.shape, buffer, self._steps[axis:], place_in_band, self.dtype.itemsize)

    def check(self) -> None:
        """
        Compare every piece that has a checksum in its file with it. All of them are read.

        Raises:
            DamagedFile: One is not what was saved.
        """
        for index in range(len(self.pieces)):
            storage = self.info(index).storage
            if storage is None or not storage.crc32:
                continue
            compare(_checksum(storage), storage.crc32, self._place(index))

    def file_offset(self, offset: int) -> None:  # noqa: ARG002 - a source
        """The whole is in no file as it is."""
        return

    def close(self) -> None:
        """Its files belong to the folder, which closes them."""


def _checksum(storage: StorageRef) -> int:
    found = 0
    for start in range(0, storage.nbytes, _BAND_NBYTES):
        count = min(_BAND_NBYTES, storage.nbytes - start)
        found = crc32(storage.source.read(storage.offset + start, count), found)
    return found


def compare(found: int, saved: int, what: str) -> None:
    """Raise DamagedFile unless a checksum is the saved one."""
    if found != saved:
        raise DamagedFile(
            f"the piece of {what} is damaged: its CRC-32 is {found:08x}, not {saved:08x}",
            hint="Get the file again.",
        )


def in_pieces(name: str, shape: tuple[int, ...], dtype: DType, source: PiecesSource, location: str) -> TensorInfo:
    """Return the facts of the whole tensor: packed, in row-major order, on a storage that is ``source``."""
    storage = StorageRef(name, location, source.nbytes, source, 0)
    return TensorInfo(dtype, shape, row_major(shape), 0, storage, location)


def read_part(info: TensorInfo, start: int, buffer: memoryview) -> None:
    """Fill a buffer with bytes of a tensor, packed in row-major order, from ``start``."""
    storage = info.storage
    assert storage is not None  # noqa: S101 - the caller saw it
    if _is_as_it_is(info, storage):
        offset = storage.offset + info.storage_offset * info.dtype.itemsize + start
        under = file_under(storage.source, offset)
        if under is not None and hasattr(under[0], "read_into"):
            under[0].read_into(under[1], buffer)
        else:
            buffer[:] = storage.source.read(offset, buffer.nbytes)
        return
    position = 0
    for chunk in LazyTensor("", info).chunks(_BAND_NBYTES):
        begin, end = max(start, position), min(start + buffer.nbytes, position + len(chunk))
        if begin < end:
            buffer[begin - start : end - start] = chunk[begin - position : end - position]
        position += len(chunk)
        if position >= start + buffer.nbytes:
            return


def _is_as_it_is(info: TensorInfo, storage: StorageRef) -> bool:
    """Say whether the storage holds the tensor's elements as they are, one after the other."""
    return info.is_contiguous and not (info.conj or info.neg or storage.big_endian) and info.dtype.packed == 1


def scatter(
    data: bytes,
    sizes: tuple[int, ...],
    buffer: memoryview,
    steps: Sequence[int],
    offsets: tuple[int, ...],
    itemsize: int,
) -> None:
    """Copy a packed box of elements to its place in a buffer whose dimensions have these steps, in elements."""
    inner = len(sizes)
    run = 1  # elements that are consecutive in the buffer, too
    while inner and steps[inner - 1] == run:
        run *= sizes[inner - 1]
        inner -= 1
    outer, begin = sizes[:inner], sum(offset * step for offset, step in zip(offsets, steps, strict=True))
    width = run * itemsize
    rows = outer[-1] if outer else 1
    view = memoryview(data)
    if outer and width < _NARROW and rows > 2 * run:
        _scatter_columns(view, outer, buffer, steps[:inner], begin, itemsize, run)
        return
    source = 0
    for place in _places(outer, steps[:inner], begin):
        target = place * itemsize
        buffer[target : target + width] = view[source : source + width]
        source += width


def _places(sizes: Sequence[int], steps: Sequence[int], begin: int) -> Iterator[int]:
    """Yield the place, in elements, of each position of some dimensions, in row-major order."""
    if not sizes:
        yield begin
        return
    for index in range(sizes[0]):
        yield from _places(sizes[1:], steps[1:], begin + index * steps[0])


def _scatter_columns(
    data: memoryview,
    outer: Sequence[int],
    buffer: memoryview,
    steps: Sequence[int],
    begin: int,
    itemsize: int,
    run: int,
) -> None:
    """Copy a box of many short rows: element by element of a row, each for all rows in one assignment."""
    unit = min(itemsize, 8)
    scale = itemsize // unit
    target = buffer.cast(_CODES[unit])  # type: ignore[call-overload]
    source = data.cast(_CODES[unit])  # type: ignore[call-overload]
    rows, step, width = outer[-1], steps[-1] * scale, run * scale
    at = 0
    for place in _places(outer[:-1], steps[:-1], begin):
        start = place * scale
        for column in range(width):
            target[start + column : start + column + (rows - 1) * step + 1 : step] = source[
                at + column : at + column + (rows - 1) * width + 1 : width
            ]
        at += rows * width


def check_tiling(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """
    Raise MalformedFile unless boxes of ``(offsets, sizes)`` fill a shape, each element once.

    Costs as much as sorting them, where they are cut along one dimension after the other, as all known writers do.
    """
    inside = []
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise _bad_tiling(name, f"a piece of {len(sizes)} dimensions, in a tensor of {len(shape)}")
        for offset, size, whole in zip(offsets, sizes, shape, strict=True):
            if offset < 0 or size < 0 or offset + size > whole:
                raise _bad_tiling(name, f"the piece at {list(offsets)} of {list(sizes)} is not inside {list(shape)}")
        if 0 not in sizes:
            inside.append((offsets, sizes))
    if not prod(shape):
        return
    held = sum(prod(sizes) for _, sizes in inside)
    overlapping = _overlap(inside, 0, len(shape))
    if overlapping is not None:
        raise _bad_tiling(name, f"two pieces overlap at {list(overlapping)}")
    if held < prod(shape):
        raise MalformedFile(
            f"{name!r} has a hole: its pieces hold {held:,} of {prod(shape):,} elements",
            kind="missing-piece",
            hint="A file of the set is missing, or was not written.",
            needed=prod(shape),
            actual=held,
        )


Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def _overlap(boxes: list[Box], axis: int, rank: int) -> tuple[int, ...] | None:
    """Return the offsets of a box that has elements in common with another; None if none has."""
    if len(boxes) < 2:
        return None
    if axis == rank:
        return boxes[1][0]
    group: list[Box] = []
    end = 0
    for box in sorted(boxes, key=lambda box: (box[0][axis], box[1][axis])):
        if box[0][axis] >= end:
            found = _overlap_in_group(group, axis, rank)
            if found is not None:
                return found
            group = []
        group.append(box)
        end = max(end, box[0][axis] + box[1][axis])
    return _overlap_in_group(group, axis, rank)


def _overlap_in_group(group: list[Box], axis: int, rank: int) -> tuple[int, ...] | None:
    """As ``_overlap``, for boxes none of which is beside all others along an axis."""
    if len({(offsets[axis], sizes[axis]) for offsets, sizes in group}) < 2:
        return _overlap(group, axis + 1, rank)
    # Their sides are not equal: cut at every side, and look at each slab.
    for begin in sorted({offsets[axis] for offsets, _ in group}):
        slab = [box for box in group if box[0][axis] <= begin < box[0][axis] + box[1][axis]]
        found = _overlap(slab, axis + 1, rank)
        if found is not None:
            return found
    return None


def _bad_tiling(name: str, what: str) -> MalformedFile:
    return MalformedFile(f"{name!r}: {what}", kind="bad-piece", hint="Get the folder again, from one save.")
