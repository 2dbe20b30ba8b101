"""
Whether two tensors hold the same values: byte for byte in bounded pieces, and by how much where they do not.

Equal bytes need no arithmetic and no numpy. Elements that are stored as they are, or strided alike, are compared where
they are stored, in two buffers that are used again and again; others are gathered piece by piece. Only what differs
goes through ``torch_ops.differences``; where numpy is not installed, elements that differ are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

from ckptool.errors import LimitExceeded, MissingPackage, SourceChanged, about
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.sources.files import filler_under
from ckptool.sources.source import SILENT, Meter
from ckptool.tensors.dtypes import DType
from ckptool.tensors.pieces import PiecesSource
from ckptool.tensors.reading import LazyTensor, in_memory
from ckptool.tensors.tensor import StorageRef, TensorInfo, identity, row_major
from ckptool.torch_ops import differences
from ckptool.torch_ops.differences import BlockDiff, Likeness, Number, Products, Tolerance

PIECE_NBYTES: Final = 1 << 20
"""Two such pieces stay in a processor's cache between being read and being compared."""
_MOSTLY_WANTED: Final = 4

Buffer: TypeAlias = bytes | bytearray | memoryview


class ValueDiff(NamedTuple):
    """
    How the values of one tensor differ.

    Differences are computed in float64, those of integers exactly. They are None where the elements are no numbers
    that can be computed with (packed bits), or numpy is not installed. NaN counts for neither of the two.
    """

    name: str
    numel: int
    differing: int
    """Elements whose bits differ; with a tolerance, those that lie outside it; of two types, whose values differ."""
    nan: int
    """Those among them that are NaN on one side alone."""
    max_abs: float | None
    at: tuple[int, ...]
    """Where ``max_abs`` is; the first differing element where that is 0 or None."""
    a: Number | None
    """The two values there."""
    b: Number | None
    max_rel: float | None
    """The largest ``|a - b| / |b|``: infinite where b is 0."""
    rel_at: tuple[int, ...]


class ValueComparer:
    """
    Compares tensors of equal shapes, pair by pair; a pair that is tied to an earlier one is not read again.

    ``file_nbytes`` is the size of both files together. Tensors may be any number of views of the same bytes: all of
    them together may be as much larger as one may be than its storage.
    """

    def __init__(
        self,
        file_nbytes: int,
        tolerance: Tolerance | None = None,
        limits: Limits = DEFAULT_LIMITS,
        paths: tuple[str, str] = ("", ""),
        meter: Meter = SILENT,
    ) -> None:
        self._left = self._allowed = limits.expanded(file_nbytes)
        self._tolerance = tolerance
        self._paths = paths
        self._limits = limits
        self._meter = meter
        # With the tensors: what identifies them is where their sources are in memory, for as long as they are there.
        self._known: dict[tuple[object, ...], tuple[ValueDiff | None, TensorInfo, TensorInfo]] = {}
        self._buffers: tuple[bytearray, bytearray] | None = None
        self.numpy_missing: MissingPackage | None = None
        """Why nothing says by how much values differ; None as long as that was not needed."""

    def difference(self, name: str, a: TensorInfo, b: TensorInfo) -> ValueDiff | None:
        """
        Return how two tensors with bytes of their own differ, or None if every element is the same.

        Values of one type are the same if their bits are, those of two types if they are the same number; NaN is
        NaN. Within a tolerance, nothing is ``differing`` though a difference is returned.

        Raises:
            UnsupportedFeature: There are no plain bytes to compare.
            LimitExceeded: A tensor is far larger than its storage, or all so far than the files.
            MissingPackage: Two types or a tolerance need arithmetic, and numpy is not installed.
        """
        key = (identity(a), identity(b))
        if key not in self._known:
            self._known[key] = self._difference(name, a, b), a, b
        found, _, _ = self._known[key]
        return None if found is None else found._replace(name=name)

    def likeness(self, name: str, a: TensorInfo, b: TensorInfo) -> Likeness:
        """
        Return how alike two tensors are as vectors. Both are read whole.

        Raises:
            UnsupportedFeature: A type is not known.
            MissingPackage: numpy is not installed.
        """
        products = Products()
        numel = max(1, PIECE_NBYTES // max(a.dtype.itemsize, b.dtype.itemsize))
        for left, right in zip(
            self._chunks(name, a, numel, self._paths[0]), self._chunks(name, b, numel, self._paths[1]), strict=True
        ):
            products.add(left, a.dtype.name, right, b.dtype.name)
        return products.likeness(name)

    def same_bytes(self, a: StorageRef, b: StorageRef) -> bool:
        """Say whether two storages of equal size hold the same bytes."""
        return next(self._unequal(a, 0, b, 0, a.nbytes), None) is None

    def _difference(self, name: str, a: TensorInfo, b: TensorInfo) -> ValueDiff | None:
        if a.dtype != b.dtype and not differences.comparable(a.dtype.name, b.dtype.name):
            nowhere = (0,) * len(a.shape)
            return ValueDiff(name, a.numel, a.numel, 0, None, nowhere, None, None, None, nowhere) if a.numel else None
        tally = _Tally(name, a)
        for start, left, right in self._unequal_pieces(name, a, b):
            self._count(tally, start, left, a, right, b)
        return tally.result()

    def _unequal_pieces(self, name: str, a: TensorInfo, b: TensorInfo) -> Iterator[tuple[int, Buffer, Buffer]]:
        """Yield the first element and the bytes of each piece that may hold differing elements, in order."""
        if not a.numel:
            return
        if _alike(a, b) and a.storage and b.storage:
            size = a.dtype.itemsize
            places = a.storage_offset * size, b.storage, b.storage_offset * size
            unequal = self._unequal(a.storage, *places, _span_nbytes(a))
            self._spend(_span_nbytes(a))
            if a.is_contiguous and _as_it_is(a) and _as_it_is(b):
                yield from ((offset // size, left, right) for offset, left, right in unequal)
                return
            if next(unequal, None) is None:
                return
        self._spend(a.nbytes)
        # Both are cut at the same elements: where depends on shape and size alone.
        numel = max(1, PIECE_NBYTES // max(a.dtype.itemsize, b.dtype.itemsize))
        start = 0
        for left, right in zip(
            self._chunks(name, a, numel, self._paths[0]),
            self._chunks(name, b, numel, self._paths[1]),
            strict=True,
        ):
            if a.dtype != b.dtype or left != right:
                yield start, left, right
            start += len(left) // a.dtype.itemsize
            self._meter.read(len(left))

    def _spend(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            needed = self._allowed - self._left
            raise LimitExceeded(
                f"the tensors repeat the files' bytes into at least {needed:,}; {self._allowed:,} are allowed",
                needed=needed,
                actual=self._allowed,
            )

    def _chunks(self, name: str, info: TensorInfo, numel: int, path: str) -> Iterator[bytes]:
        with about(path):
            yield from LazyTensor(name, info).chunks(numel * info.dtype.itemsize, limits=self._limits)

    def _unequal(
        self, a: StorageRef, a_start: int, b: StorageRef, b_start: int, nbytes: int
    ) -> Iterator[tuple[int, Buffer, Buffer]]:
        """Yield offset and bytes of the pieces of two ranges that are not equal; valid until the next one is asked."""
        one, other = _Range(a, a_start, self._paths[0]), _Range(b, b_start, self._paths[1])
        position, step = 0, max(one.step_nbytes, other.step_nbytes)
        if nbytes >= step:
            if self._buffers is None or len(self._buffers[0]) != step:
                self._buffers = bytearray(step), bytearray(step)
            left, right = self._buffers
            while position + step <= nbytes:
                one.read_into(position, left)
                other.read_into(position, right)
                if left != right:
                    yield position, left, right
                position += step
                self._meter.read(step)
        if position < nbytes:
            rest = one.read(position, nbytes - position), other.read(position, nbytes - position)
            if rest[0] != rest[1]:
                yield position, *rest
            self._meter.read(nbytes - position)

    def _count(self, tally: _Tally, start: int, a: Buffer, info_a: TensorInfo, b: Buffer, info_b: TensorInfo) -> None:
        one, other = (data if isinstance(data, bytearray) else bytearray(data) for data in (a, b))
        if len(one) * info_b.dtype.itemsize != len(other) * info_a.dtype.itemsize:
            raise SourceChanged("a file was changed while it was being read", hint="Read it again once it is complete.")
        for block in self._compare(one, info_a.dtype, other, info_b.dtype):
            tally.add(start, block)

    def _compare(self, a: bytearray, a_type: DType, b: bytearray, b_type: DType) -> list[BlockDiff]:
        """Return by how much elements differ or, where numpy is missing, which: all that bits of one type can tell."""
        if self.numpy_missing is None:
            try:
                return differences.compare(a, a_type.name, b, b_type.name, self._tolerance)
            except MissingPackage as error:
                self.numpy_missing = error  # to import it for every block would take long
        if a_type != b_type or self._tolerance is not None:
            raise self.numpy_missing
        return [differences.compare_bits(a, b, a_type.itemsize)]


class _Range:
    """Bytes of a storage from some place on."""

    def __init__(self, storage: StorageRef, start: int, path: str) -> None:
        self._path = path
        with about(path):
            storage = in_memory(storage)
        self._source, self._offset = storage.source, storage.offset + start
        self._filler = filler_under(self._source, self._offset)

    @property
    def step_nbytes(self) -> int:
        """What is best read at a time: of a tensor in many pieces, a band has little of each."""
        return self._source.band_nbytes if isinstance(self._source, PiecesSource) else PIECE_NBYTES

    def read(self, offset: int, nbytes: int) -> bytes:
        with about(self._path):
            return self._source.read(self._offset + offset, nbytes)

    def read_into(self, offset: int, buffer: bytearray) -> None:
        if self._filler is None:
            buffer[:] = self.read(offset, len(buffer))
            return
        source, position = self._filler
        with about(self._path):
            source.read_into(position + offset, memoryview(buffer))


class _Tally:
    """What the blocks of one tensor come to."""

    def __init__(self, name: str, info: TensorInfo) -> None:
        self._name = name
        self._info = info
        self._found: ValueDiff | None = None

    def add(self, start: int, block: BlockDiff) -> None:
        """Count a part of a piece, whose first element is the tensor's ``start``-th."""
        if block.first is None:
            return
        new = ValueDiff(
            self._name,
            self._info.numel,
            block.differing,
            block.nan,
            block.max_abs,
            self._index(start + block.at),
            block.a,
            block.b,
            block.max_rel,
            self._index(start + block.rel_at),
        )
        old = self._found
        if old is None:
            self._found = new
            return
        larger = new if (new.max_abs or 0) > (old.max_abs or 0) else old
        steeper = new if (new.max_rel or 0) > (old.max_rel or 0) else old
        self._found = larger._replace(
            differing=old.differing + new.differing,
            nan=old.nan + new.nan,
            max_rel=steeper.max_rel,
            rel_at=steeper.rel_at,
        )

    def result(self) -> ValueDiff | None:
        return self._found

    def _index(self, element: int) -> tuple[int, ...]:
        shape, packed = self._info.shape, self._info.dtype.packed
        if packed > 1 and shape:  # bytes were counted: name the first element of one
            shape = (*shape[:-1], -(-shape[-1] // packed))
        found = tuple(element // step % size for size, step in zip(shape, row_major(shape), strict=True))
        return (*found[:-1], found[-1] * packed) if found else ()


def _alike(a: TensorInfo, b: TensorInfo) -> bool:
    """Say whether two tensors hold the same elements if their memory, from the first to the last, is the same."""
    if a.dtype != b.dtype or (a.conj, a.neg) != (b.conj, b.neg) or a.storage is None or b.storage is None:
        return False
    if a.storage.big_endian != b.storage.big_endian and a.dtype.swap_nbytes > 1:
        return False
    if a.is_contiguous and b.is_contiguous:
        return a.dtype.packed == 1 or a.storage_offset == b.storage_offset == 0
    strided_alike = a.stride == b.stride and a.dtype.packed == 1
    return strided_alike and _span_nbytes(a) <= _MOSTLY_WANTED * max(a.nbytes, PIECE_NBYTES)


def _as_it_is(info: TensorInfo) -> bool:
    """Say whether the bytes in the file are those that ``LazyTensor.read`` would give."""
    swapped = info.storage is not None and info.storage.big_endian and info.dtype.swap_nbytes > 1
    return not (swapped or info.conj or info.neg)


def _span_nbytes(info: TensorInfo) -> int:
    if info.is_contiguous:
        return info.nbytes
    steps = sum((size - 1) * step for size, step in zip(info.shape, info.stride, strict=True))
    return (steps + 1) * info.dtype.itemsize
