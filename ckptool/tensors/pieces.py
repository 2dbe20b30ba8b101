"""
Tensors in pieces: several boxes, in several files, that together are one tensor.

A box is a pair ``(offsets, sizes)`` inside the shape of the whole tensor, in elements. ``PiecesSource`` joins pieces to
a source of the whole tensor's bytes, packed in row-major order, which is read, copied and compared as any storage. A
tensor that was flattened before it was cut has pieces of a shape with one dimension.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import isqrt, prod
from operator import mul, sub
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias
from zlib import crc32

from ckptool.cancellation import Cancellation, check_cancelled
from ckptool.errors import CkptoolError, DamagedFile, Failure, LimitExceeded, MalformedFile
from ckptool.limits import DEFAULT_LIMITS
from ckptool.sources.checksums import PIECE_NBYTES, checksum_of_range, joined_crc32
from ckptool.sources.checksums import pieces as parts_of_file
from ckptool.sources.files import FileSource, file_under
from ckptool.sources.source import Source
from ckptool.tensors.dtypes import DType
from ckptool.tensors.reading import Box as Box
from ckptool.tensors.reading import LazyTensor, copy_box, cut_up, gather, part_of
from ckptool.tensors.tensor import MAX_RANK, StorageRef, TensorInfo, is_countable, row_major

if TYPE_CHECKING:
    from typing_extensions import Self


# Rules, and why:
# 1. Pieces cover each element once. An index that leaves a hole would give values that nobody saved, and one with an
#    overlap two values for an element. It is checked in time proportional to the number of pieces, before any is read.
# 2. A piece is opened when it is first read: a folder may have hundreds of thousands, each with a header in a file.
#    What it turns out to be then must fit the index, in shape and type, as the two may be of different saves.
# 3. Bytes are compared with the checksum of their file while they are copied, which saves a second reading. That needs
#    each byte of a storage once; what was read in part or twice is read again by ``check``.
# 4. A part is read straight to its place where its bytes are consecutive on both sides; else its runs are gathered; it
#    goes through memory of its own if its checksum is needed, or if it is compressed, swapped or conjugated.
# 5. A piece may be a view with strides of 0, so its size is compared with that of its storage before it is read.

_MOST_CORNERS: Final = 1 << 22
_MOST_AXES: Final = 3
"""Up to this many cut dimensions, any number of boxes is allowed: known writers cut along two at most."""
_MOST_PLACES: Final = 1 << 66
"""Below this, too few numbers have equal hashes to slow a dict down."""


def check_tiling(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """
    Check that boxes cover each element of a shape exactly once; the time is proportional to their number.

    Raises:
        MalformedFile: They overlap, leave a hole, or are not inside the shape.
        LimitExceeded: They are cut along too many dimensions to check them quickly.
    """
    if len(shape) > MAX_RANK or not is_countable(shape):
        raise _bad(name, f"a tensor of {len(shape)} dimensions, and more elements than torch can count")
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise _bad(name, f"a piece of {len(sizes)} dimensions, in a tensor of {len(shape)}")
        for offset, size, whole in zip(offsets, sizes, shape, strict=True):
            if offset < 0 or size < 0 or offset + size > whole:
                raise _bad(name, f"the piece at {list(offsets)} of {list(sizes)} is not inside {list(shape)}")
    total = prod(shape)
    inside = [box for box in boxes if 0 not in box[1]]
    held = sum(prod(sizes) for _, sizes in inside)
    if held == total and (len(inside) <= 1 or _is_tiled(name, shape, inside)):
        return
    if held < total:
        raise MalformedFile(
            f"{name!r} has a hole: its pieces hold {held:,} of {total:,} elements",
            kind="missing-piece",
            hint="A file of the set is missing, or was not written.",
            needed=total,
            actual=held,
        )
    raise _bad(name, "two pieces overlap")


def _is_tiled(name: str, shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """
    Return whether boxes inside a shape cover each of its elements once.

    1. The number of boxes that cover an element is a function of its place, which is determined by its jumps.
    2. Each box adds a jump at each of its corners, with alternating signs.
    3. The number is one everywhere if the jumps of all boxes add up to the jumps of the whole shape.
    """
    axes = [axis for axis, whole in enumerate(shape) if any(sizes[axis] != whole for _, sizes in boxes)]
    grid = [shape[axis] + 1 for axis in axes]
    if len(axes) > _MOST_AXES and (len(boxes) << len(axes) > _MOST_CORNERS or prod(grid) > _MOST_PLACES):
        what = f"{name!r}: {len(boxes):,} pieces, which are cut along {len(axes)} dimensions"
        raise LimitExceeded(what, hint="Get the folder again, from one save.", actual=len(boxes))
    steps = row_major(grid)
    jumps: dict[int, int] = {}
    whole = ((0,) * len(shape), shape)
    for sign, (offsets, sizes) in ((1, whole), *((-1, box) for box in boxes)):
        corners = [(0, sign)]
        for axis, step in zip(axes, steps, strict=True):
            begin, end = offsets[axis] * step, (offsets[axis] + sizes[axis]) * step
            corners = [(at + begin, jump) for at, jump in corners] + [(at + end, -jump) for at, jump in corners]
        for at, jump in corners:
            left = jumps.pop(at, 0) + jump
            if left:
                jumps[at] = left
    return not jumps


def _bad(name: str, what: str) -> MalformedFile:
    return MalformedFile(f"{name!r}: {what}", kind="bad-piece", hint="Get the folder again, from one save.")


def intersection(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    low = tuple(map(max, one[0], other[0]))
    sizes = []
    for begin, a, a_size, b, b_size in zip(low, *one, *other, strict=True):
        size = min(a + a_size, b + b_size) - begin
        if size <= 0:
            return None
        sizes.append(size)
    return low, tuple(sizes)


class BoxIndex:
    """Finds the boxes that intersect another, among many that do not overlap and are sorted."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        size = max(8, isqrt(len(boxes)))
        self._groups = [
            (start, start + size, _hull(boxes[start : start + size])) for start in range(0, len(boxes), size)
        ]

    def meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the index of each box that intersects ``box``, in order, and the intersection."""
        for start, stop, hull in self._groups:
            if len(self._groups) > 1 and intersection(hull, box) is None:
                continue
            for index, own in enumerate(self._boxes[start:stop], start):
                if (found := intersection(own, box)) is not None:
                    yield index, found


def _hull(boxes: Sequence[Box]) -> Box:
    low = tuple(map(min, zip(*(offsets for offsets, _ in boxes), strict=True)))
    ends = (map(sum, zip(offsets, sizes, strict=True)) for offsets, sizes in boxes)
    high = map(max, zip(*ends, strict=True))
    return low, tuple(end - begin for begin, end in zip(low, high, strict=True))


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that together are the elements from ``start`` to ``stop``, in row-major order, each maximal."""
    steps = row_major(shape)
    while start < stop:
        axis = next(at for at, step in enumerate(steps) if not start % step and start + step <= stop)
        place = tuple(start // step % size for step, size in zip(steps, shape, strict=True))
        count = min((stop - start) // steps[axis], shape[axis] - place[axis])
        yield place, (*((1,) * axis), count, *shape[axis + 1 :])
        start += count * steps[axis]


_BAND_NBYTES: Final = 1 << 23
"""Bytes that are joined at a time."""

Place: TypeAlias = tuple[object, int]
"""Identifies a storage, by its file and its offset."""


class Piece(NamedTuple):
    """A box of a tensor, and the file that has its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    """Name of the file that contains it, for messages."""
    open: Callable[[], TensorInfo]
    """Returns the piece as a tensor of its own, of shape ``sizes``. It may read headers."""

    @property
    def numel(self) -> int:
        return prod(self.sizes)


class Extent(NamedTuple):
    """Consecutive bytes of a tensor that a file contains as they are."""

    file: FileSource
    offset: int
    nbytes: int
    crc32: int = 0
    """The file's checksum of these bytes; 0 if it has none."""
    what: str = ""
    """What the checksum belongs to, for messages."""

    def check(self, found: int) -> None:
        """Raise DamagedFile if the file has a checksum of these bytes that differs from ``found``."""
        if self.crc32:
            _compare(found, self.crc32, self.what)


class PiecesSource(Source):
    """
    The bytes of a tensor that is stored as pieces, which have to tile it: see ``check_tiling``.

    A piece is opened when its bytes are first read, and its shape and dtype are compared then. Threads may share the
    source: at worst, two open the same piece.
    """

    __slots__ = (
        "_boxes",
        "_given",
        "_infos",
        "_pieces",
        "cancellation",
        "dtype",
        "fault",
        "is_compared",
        "name",
        "nbytes",
        "shape",
        "steps",
        "sums",
    )  # there is one for each tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        pieces: Sequence[Piece] | Callable[[], Sequence[Piece]],
        cancellation: Cancellation | None = None,
        *,
        name: str = "",
        fault: CkptoolError | None = None,
    ) -> None:
        self.shape = shape or (1,)
        self.dtype = dtype
        self.cancellation = cancellation
        self.name = name
        self.nbytes = prod(shape) * dtype.itemsize
        self.fault = fault
        """The error that is raised on each read, if the tensor cannot be read as a whole; else None."""
        self.sums: PartChecksums | None = None
        self._given = pieces
        self._pieces: tuple[Piece, ...] | None = None
        self._boxes: BoxIndex | None = None
        self.steps = row_major(self.shape)
        """Strides of the whole tensor, in elements."""
        self._infos: dict[int, TensorInfo] | None = None
        self.is_compared = False
        """Whether all bytes were copied, and compared with their checksums."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces that have elements, ordered by their offsets. Made on first use, as there may be very many."""
        if self._pieces is not None:
            return self._pieces
        if self.fault is not None:
            raise self.fault
        given = self._given() if callable(self._given) else self._given
        found = [one if one.sizes else one._replace(offsets=(0,), sizes=(1,)) for one in given]
        self._pieces = tuple(sorted((one for one in found if one.numel), key=lambda one: one.offsets))
        return self._pieces

    def _index(self) -> BoxIndex:
        if self._boxes is None:
            self._boxes = BoxIndex([one[:2] for one in self.pieces])
        return self._boxes

    @property
    def band_nbytes(self) -> int:
        """The best size of a read, at a multiple of it: complete rows, if they are not too large."""
        rows = (step * self.dtype.itemsize for step in self.steps)
        row = next((nbytes for nbytes in rows if nbytes <= _BAND_NBYTES), self.dtype.itemsize)
        return _BAND_NBYTES // row * row

    def info(self, index: int) -> TensorInfo:
        """
        Return the facts of a piece, as a tensor of its own.

        Raises:
            MalformedFile: Its shape or dtype is not the expected one.
            LimitExceeded: It is far larger than its storage.
            CkptoolError: It cannot be read.
        """
        infos = self._known()
        if index in infos:
            return infos[index]
        piece = self.pieces[index]
        found = piece.open()
        if len(piece.sizes) == 1 and found.numel == piece.numel and found.is_contiguous:
            found = found._replace(shape=piece.sizes, stride=(1,))
        if found.shape != piece.sizes:
            raise self._contradiction(piece, f"has shape {list(found.shape)}, not {list(piece.sizes)}")
        if found.dtype != self.dtype:
            raise self._contradiction(piece, f"is of {found.dtype}, not {self.dtype}")
        if found.storage is None or found.layout != "strided" or found.dtype.packed > 1:
            raise self._contradiction(piece, "is not a plain tensor")
        allowed = DEFAULT_LIMITS.expanded(found.storage.nbytes)
        if found.nbytes > allowed:
            what = f"{self._place(piece)} repeats {found.storage.nbytes:,} bytes into {found.nbytes:,}"
            raise LimitExceeded(what, needed=found.nbytes, actual=allowed)
        return infos.setdefault(index, found)

    def _known(self) -> dict[int, TensorInfo]:
        """Return the dict of opened pieces, which is made on first use: most tensors never need one."""
        if self._infos is None:
            self._infos = {}
        return self._infos

    def _contradiction(self, piece: Piece, what: str) -> MalformedFile:
        hint = "Get the folder again, from one save."
        return MalformedFile(f"the piece of {self._place(piece)} {what}", kind="piece", hint=hint)

    def _place(self, piece: Piece) -> str:
        return f"{self.name!r} at {list(piece.offsets)} in {piece.file!r}"

    def extents(self) -> list[Extent] | None:
        """Return the ranges of files that are the bytes, in order; None unless each piece is one range, unchanged."""
        if not all(self._is_run(piece.sizes) for piece in self.pieces):
            return None
        found = []
        for index, piece in enumerate(self.pieces):
            info = self.info(index)
            under = file_of(info)
            if under is None:
                return None
            found.append(Extent(*under, info.nbytes, info.known_crc32, self._place(piece)))
        return found

    def within(self, box: Box) -> list[Piece]:
        """Return the pieces of what is in a box: what each has of it."""
        found = []
        for index, (at, sizes) in self._index().meeting(box):
            own = self.pieces[index]
            inside = list(map(sub, at, own.offsets))
            opening = partial(lambda index, *box: part_of(self.info(index), *box), index, inside, sizes)
            found.append(Piece(tuple(map(sub, at, box[0])), sizes, own.file, opening))
        return found

    def _is_run(self, sizes: tuple[int, ...]) -> bool:
        """Return whether the elements of a box of these sizes are consecutive in the whole tensor."""
        axis = next((at for at, size in enumerate(sizes) if size != 1), len(sizes))
        return sizes[axis + 1 :] == self.shape[axis + 1 :]

    def read(self, offset: int, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from ``offset``. Only the pieces that have them are read."""
        itemsize = self.dtype.itemsize
        while buffer.nbytes:
            first, skipped = divmod(offset, itemsize)
            count = 0 if skipped else buffer.nbytes // itemsize
            if count:
                done = count * itemsize
                self._fill(first, count, buffer[:done])
            else:  # a part of an element
                element = bytearray(itemsize)
                self._fill(first, 1, memoryview(element))
                done = min(itemsize - skipped, buffer.nbytes)
                buffer[:done] = element[skipped : skipped + done]
            offset, buffer = offset + done, buffer[done:]

    def _fill(self, first: int, count: int, buffer: memoryview) -> None:
        """Fill a buffer with ``count`` elements from element ``first`` on."""
        for box in boxes_of(self.shape, first, first + count):
            for index, common in self._index().meeting(box):
                as_it_is = file_of(self.info(index)) is not None
                for part in cut_up(*common, (PIECE_NBYTES if as_it_is else _BAND_NBYTES) // self.dtype.itemsize):
                    check_cancelled(self.cancellation)
                    self._copy(index, part, buffer, first)

    def _copy(self, index: int, box: Box, buffer: memoryview, first: int) -> None:
        """Copy a box from a piece to its place in a buffer, which begins with element ``first`` of the tensor."""
        info, piece, itemsize = self.info(index), self.pieces[index], self.dtype.itemsize
        inside = list(map(sub, box[0], piece.offsets))
        part = part_of(info, inside, box[1])
        begin = sum(map(mul, box[0], self.steps)) - first
        under = file_of(part)
        if under is not None and self._is_run(box[1]):
            data = buffer[begin * itemsize :][: part.nbytes]
            under[0].read_into(under[1], data)
        elif self.sums is None and part.is_plain and part.storage is not None and not part.storage.source.is_compressed:
            gather(part, self.steps, buffer, begin)
            return
        else:
            if under is None:
                data = memoryview(LazyTensor(self.name, part).read())
            else:  # a checksum is computed of the bytes as they are stored, so these are read before they are spread
                ((_, data),) = parts_of_file(under[0], under[1], under[1] + part.nbytes)
            copy_box(data, buffer, begin, list(zip(box[1], row_major(box[1]), self.steps, strict=True)), itemsize)
        if self.sums is not None and info.known_crc32:
            self.sums.add(index, sum(map(mul, inside, row_major(piece.sizes))) * itemsize, data)

    def chunks(self) -> Iterator[bytes | bytearray]:
        """
        Yield all bytes in order, and compare pieces with the checksums in their files, as ``compare`` does.

        Raises:
            DamagedFile: At the end, if a piece does not match its checksum.
        """
        checked = self.checked()
        for start in range(0, self.nbytes, self.band_nbytes):
            band = bytearray(min(self.band_nbytes, self.nbytes - start))
            checked.read_into(start, memoryview(band))
            yield band
        checked.compare()
        self.release()

    def checked(self) -> Self:
        """Return a copy that records checksums while each byte is read once, for ``compare``."""
        self._known()  # made now, so that both share it
        found = copy.copy(self)
        found.sums = PartChecksums()
        return found

    def compare(self, done: set[Place] | None = None) -> None:
        """
        Compare each piece that was read, and that is a complete storage, with the checksum in its file.

        Their storages are added to ``done``. Pieces of which not every byte was read once are left to ``check``.

        Raises:
            DamagedFile: A piece does not match its checksum.
        """
        sums = self.sums or PartChecksums()
        for index in sums.noted():
            info = self.info(index)
            found = sums.of(index, info.nbytes)
            if found is not None and info.storage is not None:
                _compare(found, info.storage.crc32, self._place(self.pieces[index]))
                if done is not None:
                    done.add(place_of(info.storage))

    def release(self) -> None:
        """
        Drop what is known of the pieces, after all bytes were copied and compared.

        It is kept if a piece is on a part of a storage, whose checksum must still be compared.
        """
        known = self._known().values()
        if all(info.storage is None or not info.storage.crc32 or info.known_crc32 for info in known):
            self.is_compared = True
            self._infos = self._pieces = self._boxes = None

    def copied_whole(self) -> set[Place]:
        """Return the opened storages whose checksums are compared when all bytes are copied in order."""
        infos = self._known().values()
        return {place_of(info.storage) for info in infos if info.storage is not None and info.known_crc32}

    def check(self, done: set[Place] | None = None) -> None:
        """
        Compare the storage of every piece with the checksum in its file, each once: all its bytes are read.

        ``done`` has the storages that were compared before; those compared here are added.

        Raises:
            DamagedFile: A storage does not match its checksum.
        """
        done = set() if done is None else done
        for index in range(0 if self.is_compared else len(self.pieces)):
            check_cancelled(self.cancellation)
            storage = self.info(index).storage
            if storage is not None and storage.crc32 and place_of(storage) not in done:
                done.add(place_of(storage))
                found = checksum_of_range(storage.source, storage.offset, storage.offset + storage.nbytes)
                _compare(found, storage.crc32, self._place(self.pieces[index]))


def _compare(found: int, saved: int, what: str) -> None:
    if found != saved:
        raise DamagedFile(
            f"the piece of {what} is damaged: its CRC-32 is {found:08x}, not {saved:08x}",
            hint="Get the file again.",
        )


def file_of(info: TensorInfo) -> tuple[FileSource, int] | None:
    """Return the file that has the elements as they are, consecutively, and their offset in it; None if none has."""
    storage = info.storage
    if storage is None or not info.is_as_stored:
        return None
    return file_under(storage.source, storage.offset + info.storage_offset * info.dtype.itemsize)


def place_of(storage: StorageRef) -> Place:
    """Return a key of a storage's place: equal for two storages if they begin at the same byte of the same file."""
    under = file_under(storage.source, storage.offset)
    return (id(storage.source), storage.offset) if under is None else (under[0].place, under[1])


def in_pieces(name: str, shape: tuple[int, ...], dtype: DType, source: PiecesSource, location: str) -> TensorInfo:
    """Return the facts of the whole tensor: packed, in row-major order, with ``source`` as its storage."""
    storage = StorageRef(name, location, source.nbytes, source, 0)
    stride = source.steps if shape == source.shape else row_major(shape)
    return TensorInfo(dtype, shape, stride, 0, storage, location)


def joined(
    name: str,
    shape: tuple[int, ...],
    dtype: DType,
    pieces: Sequence[Piece] | Callable[[], Sequence[Piece]],
    cancellation: Cancellation | None,
    *,
    is_flat: bool = False,
    fault: CkptoolError | None = None,
) -> TensorInfo:
    """Return the facts of a tensor made of pieces; if it ``is_flat``, these are ranges of its elements in a row."""
    stored = (prod(shape),) if is_flat else shape
    source = PiecesSource(stored, dtype, pieces, cancellation, name=name, fault=fault)
    return in_pieces(name, shape, dtype, source, "cpu")


def packed(info: TensorInfo, name: str = "") -> PiecesSource:
    """Return a source of a tensor's elements, packed in row-major order whatever its strides."""
    source = info.storage.source if info.storage is not None else None
    pieces: Sequence[Piece] | Callable[[], Sequence[Piece]] = [
        Piece((0,) * len(info.shape), info.shape, "", lambda: info)
    ]
    if isinstance(source, PiecesSource) and info.stride == source.steps:
        begin = (info.storage_offset // step % size for step, size in zip(source.steps, source.shape, strict=True))
        pieces = partial(source.within, (tuple(begin), info.shape))
    cancellation = source.cancellation if source is not None else None
    return PiecesSource(info.shape, info.dtype, pieces, cancellation, name=name)


class PartChecksums:
    """CRC-32 checksums of parts of pieces, which threads may read in any order."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[int, int, int]]] = {}
        self._lock = threading.Lock()

    def add(self, index: int, start: int, data: memoryview) -> None:
        """Record bytes of a piece, from the offset ``start`` in it."""
        with self._lock:
            parts = self._parts.setdefault(index, [])
            goes_on = bool(parts) and parts[-1][0] + parts[-1][1] == start
            begin, nbytes, found = parts.pop() if goes_on else (start, 0, 0)
        found = crc32(data, found)
        with self._lock:
            parts.append((begin, nbytes + data.nbytes, found))

    def noted(self) -> list[int]:
        """Return the indices of the pieces with recorded bytes."""
        with self._lock:
            return sorted(self._parts)

    def of(self, index: int, nbytes: int) -> int | None:
        """Return the checksum of a piece of ``nbytes`` bytes; None unless each byte was recorded once."""
        found = end = 0
        for start, part_nbytes, of_part in sorted(self._parts.get(index, ())):
            if start != end:
                return None
            found = joined_crc32(found, of_part, part_nbytes)
            end += part_nbytes
        return found if end == nbytes else None


class Cut(NamedTuple):
    """How a tensor is cut into pieces."""

    pieces: Sequence[Piece]
    along: int | None
    """The dimension that it is cut along, if it is exactly one; None for one piece, and for boxes."""
    is_flat: bool
    """Whether it was flattened before it was cut: offsets and sizes count its elements in a row."""
    files: tuple[str, ...]
    """Names of the files of the pieces, in the order of the pieces."""

    def __str__(self) -> str:
        count = len(self.pieces)
        if count < 2:
            return str(count)
        if self.along is None:
            return f"{count:,} {'runs' if self.is_flat else 'boxes'}"
        return f"{count:,} along {self.along}"


def cut_of(info: TensorInfo) -> Cut | None:
    """Return how a tensor is cut; None if it is not in pieces, or they cannot be joined."""
    source = info.storage.source if info.storage is not None else None
    if not isinstance(source, PiecesSource):
        return None
    try:
        pieces = source.pieces
    except Failure:  # reading the tensor raises it
        return None
    is_flat = len(source.shape) == 1 < len(info.shape)
    axes = [axis for axis, whole in enumerate(source.shape) if any(piece.sizes[axis] != whole for piece in pieces)]
    along = axes[0] if len(axes) == 1 and not is_flat else None
    return Cut(pieces, along, is_flat, tuple(dict.fromkeys(piece.file for piece in pieces)))
