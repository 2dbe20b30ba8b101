"""
Whether two tensors hold the same values: byte for byte in bounded pieces, and by how much where they do not.

Equal bytes need no arithmetic and no numpy. Only pieces that differ go through ``torch_ops.differences``; where numpy
is not installed, elements that differ are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ckptool.errors import LimitExceeded, MissingPackage, about
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.sources.source import SILENT, Meter
from ckptool.tensors.pieces import PiecesSource
from ckptool.tensors.reading import LazyTensor, in_memory
from ckptool.tensors.tensor import StorageRef, TensorInfo, identity, row_major
from ckptool.torch_ops import differences
from ckptool.torch_ops.differences import Difference, Likeness, Number, Tolerance

PIECE_NBYTES: Final = 1 << 20
"""Bytes that are read at a time: two such pieces stay in a processor's cache until they are compared."""
_MOSTLY_WANTED: Final = 4


class ValueDiff(NamedTuple):
    """
    How the values of one tensor differ.

    Differences are computed in float64, those of integers exactly. They are None if the elements are not numbers that
    can be computed with (packed bits), or numpy is not installed. ``max_abs`` and ``max_rel`` ignore NaN.
    """

    name: str
    numel: int
    differing: int
    """Elements whose bits differ; with a tolerance, those outside of it; of two types, those whose values differ."""
    nan: int
    """How many of these are NaN on one side only."""
    max_abs: float | None
    at: tuple[int, ...]
    """The index of ``max_abs``; of the first differing element if that is 0 or None."""
    a: Number | None
    """The two values there."""
    b: Number | None
    max_rel: float | None
    """The largest ``|a - b| / |b|``: infinite where b is 0."""
    rel_at: tuple[int, ...]


class ValueComparer:
    """
    Compares tensors of equal shapes, pair by pair; a pair that is tied to an earlier one is not read again.

    ``file_nbytes`` is the size of both files together. Tensors may be any number of views of the same bytes, so their
    total size is limited: by the factor by which one tensor may be larger than its storage.
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
        # The infos are kept, because their identities contain ids of sources, which are unique only while these live.
        self._known: dict[tuple[object, ...], tuple[ValueDiff | None, TensorInfo, TensorInfo]] = {}
        self.numpy_missing: MissingPackage | None = None
        """Why it is not known by how much values differ; None if numpy is there, or was not needed yet."""

    def difference(self, name: str, a: TensorInfo, b: TensorInfo) -> ValueDiff | None:
        """
        Return how two tensors with bytes of their own differ, or None if every element is the same.

        Values of one type are the same if their bits are, those of two types if they are the same number; NaN equals
        NaN. Within a tolerance, a difference is returned, and its ``differing`` is 0.

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
        pieces = ((left, right) for _, left, right in self._pieces(name, a, b))
        return differences.likeness(name, pieces, a.dtype.name, b.dtype.name)

    def _difference(self, name: str, a: TensorInfo, b: TensorInfo) -> ValueDiff | None:
        if a.dtype != b.dtype and not differences.comparable(a.dtype.name, b.dtype.name):
            nowhere = (0,) * len(a.shape)
            return ValueDiff(name, a.numel, a.numel, 0, None, nowhere, None, None, None, nowhere) if a.numel else None
        if not a.numel:
            return None
        span = _span_nbytes(a)
        if _alike(a, b) and a.storage and b.storage:
            self._spend(span)
            starts = (a.storage_offset * a.dtype.itemsize, b.storage_offset * b.dtype.itemsize)
            if self.same_bytes((a.storage, b.storage), starts, span):
                self._meter.read(a.nbytes)
                return None
        self._spend(a.nbytes)
        found: Difference | None = None
        for start, left, right in self._pieces(name, a, b):
            block = self._compare(left, a, right, b) if a.dtype != b.dtype or left != right else None
            if block is not None:
                found = block._replace(at=start + block.at, rel_at=start + block.rel_at).joined(found)
            self._meter.read(len(left))
        if found is None:
            return None
        places = {"at": _index(a, found.at), "rel_at": _index(a, found.rel_at)}
        return ValueDiff(name, a.numel, **(found._asdict() | places))

    def _spend(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            needed = self._allowed - self._left
            raise LimitExceeded(
                f"the tensors repeat the files' bytes into at least {needed:,}; {self._allowed:,} are allowed",
                needed=needed,
                actual=self._allowed,
            )

    def _pieces(self, name: str, a: TensorInfo, b: TensorInfo) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield the elements of both in pieces, each with the index of its first element."""
        nbytes = max(_piece_nbytes(a.storage), _piece_nbytes(b.storage))
        numel = max(1, nbytes // max(a.dtype.itemsize, b.dtype.itemsize))
        start = 0
        # Both are cut at the same elements: the cuts depend only on the shape and ``numel``.
        for left, right in zip(
            self._chunks(name, a, numel, self._paths[0]), self._chunks(name, b, numel, self._paths[1]), strict=True
        ):
            yield start, left, right
            start += len(left) // a.dtype.itemsize

    def same_bytes(self, storages: tuple[StorageRef, StorageRef], starts: tuple[int, int], nbytes: int) -> bool:
        """Return whether two ranges of storages, ``nbytes`` from ``starts`` on, hold the same bytes."""
        ranges = []
        for storage, start, path in zip(storages, starts, self._paths, strict=True):
            with about(path):
                held = in_memory(storage)
            ranges.append((held.source, held.offset + start, path))
        size = min(nbytes, max(map(_piece_nbytes, storages)))
        buffers = bytearray(size), bytearray(size)
        for position in range(0, nbytes, size or 1):
            for (source, offset, path), buffer in zip(ranges, buffers, strict=True):
                with about(path):
                    source.read_into(offset + position, memoryview(buffer)[: nbytes - position])
            if buffers[0] != buffers[1]:  # after a shorter last piece, both still have equal bytes
                return False
        return True

    def _chunks(self, name: str, info: TensorInfo, numel: int, path: str) -> Iterator[bytes]:
        with about(path):
            yield from LazyTensor(name, info).chunks(numel * info.dtype.itemsize, limits=self._limits)

    def _compare(self, left: bytes, a: TensorInfo, right: bytes, b: TensorInfo) -> Difference | None:
        """Return by how much elements differ; without numpy, only which do, and only if they are of one type."""
        if self.numpy_missing is None:
            try:
                return differences.compare(left, a.dtype.name, right, b.dtype.name, self._tolerance)
            except MissingPackage as error:
                self.numpy_missing = error  # trying the import for every block would take long
        if a.dtype != b.dtype or self._tolerance is not None:
            raise self.numpy_missing
        return differences.compare_bits(left, right, a.dtype.itemsize)


def _piece_nbytes(storage: StorageRef | None) -> int:
    """Return how many bytes are best read at a time; for a tensor in pieces, complete rows of them."""
    source = storage.source if storage is not None else None
    return source.band_nbytes if isinstance(source, PiecesSource) else PIECE_NBYTES


def _alike(a: TensorInfo, b: TensorInfo) -> bool:
    """Return whether equal bytes, from the first to the last element, mean that two tensors have equal elements."""
    if a.dtype != b.dtype or (a.conj, a.neg) != (b.conj, b.neg) or a.storage is None or b.storage is None:
        return False
    if a.storage.big_endian != b.storage.big_endian and a.dtype.swap_nbytes > 1:
        return False
    if a.is_contiguous and b.is_contiguous:
        return a.dtype.packed == 1 or a.storage_offset == b.storage_offset == 0
    strided_alike = a.stride == b.stride and a.dtype.packed == 1
    return strided_alike and _span_nbytes(a) <= _MOSTLY_WANTED * max(a.nbytes, PIECE_NBYTES)


def _span_nbytes(info: TensorInfo) -> int:
    if info.is_contiguous:
        return info.nbytes
    steps = sum((size - 1) * step for size, step in zip(info.shape, info.stride, strict=True))
    return (steps + 1) * info.dtype.itemsize


def _index(info: TensorInfo, element: int) -> tuple[int, ...]:
    shape, packed = info.shape, info.dtype.packed
    if packed > 1 and shape:  # ``element`` counts bytes: return the first element of one
        shape = (*shape[:-1], -(-shape[-1] // packed))
    found = tuple(element // step % size for size, step in zip(shape, row_major(shape), strict=True))
    return (*found[:-1], found[-1] * packed) if found else ()
