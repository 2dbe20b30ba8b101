"""
Payloads: the bytes of a storage or tensor, copied in chunks with their checksum.

A payload is read in bounded pieces and never as a whole, so that memory does not grow with its size. Also sources whose
bytes are computed while they are read in order, for example those of a cast tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Final

from ckptool.cancellation import steps
from ckptool.errors import DamagedFile, OutputFailed
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.sources.checksums import checksum_of_range
from ckptool.sources.files import file_under
from ckptool.sources.source import Source
from ckptool.tensors.dtypes import DType
from ckptool.tensors.pieces import Extent, PiecesSource, Place, file_of, place_of
from ckptool.tensors.reading import LazyTensor, in_memory, swapped
from ckptool.tensors.tensor import StorageRef, TensorInfo, row_major, storages_of


def check_storages(tensors: Iterable[LazyTensor], copied: Iterable[Payload]) -> None:
    """
    Compare the storages of ``tensors`` with the file's checksums, each once, except those compared with ``copied``.

    These are storages that were read in part or rearranged.

    Raises:
        DamagedFile: The bytes of a storage do not match its checksum.
    """
    done: set[Place] = set()
    in_pieces: list[PiecesSource] = []
    for payload in copied:
        pieces = payload.pieces()
        if pieces is not None:
            in_pieces.append(pieces)
            done |= pieces.copied_whole()
        elif isinstance(payload, StoragePayload):
            done.add(place_of(payload.storage))
    for storage in storages_of(tensor.info for tensor in tensors):
        if isinstance(storage.source, PiecesSource):
            in_pieces.append(storage.source)
        elif storage.crc32 and place_of(storage) not in done:
            done.add(place_of(storage))
            held = in_memory(storage)
            found = checksum_of_range(held.source, held.offset, held.offset + held.nbytes)
            StoragePayload(storage, 1).check(found)
    for pieces in in_pieces:
        pieces.check(done)


CHUNK_NBYTES: Final = 1 << 20
"""Bytes of a chunk: few enough to stay in a core's cache until their checksum is computed and they are written."""


class Payload:
    """``nbytes`` bytes to be copied once, in order; ``known_crc32`` is their checksum by the source, or 0."""

    __slots__ = ()
    nbytes: int
    known_crc32 = 0

    def chunks(self) -> Iterator[bytes | bytearray]:
        """Yield the bytes in order."""
        raise NotImplementedError

    def extents(self) -> Sequence[Extent] | None:
        """Return the ranges of files that have these bytes as they are, in order; None if they must be computed."""
        return None

    def pieces(self) -> PiecesSource | None:
        """Return the source in pieces whose bytes these are, all of them; None if they are something else."""
        return None

    def check(self, crc32: int) -> None:
        """Raise DamagedFile if the source has a checksum of these bytes that differs from ``crc32``."""


class StoragePayload(Payload):
    """
    A complete storage, in little-endian order, compared with the file's checksum if there is one.

    ``unit`` is the size in bytes of the numbers to swap if the source is big-endian. For a tensor in pieces, each piece
    is compared with its own checksum.
    """

    __slots__ = ("_unit", "known_crc32", "nbytes", "storage")

    def __init__(self, storage: StorageRef, unit: int) -> None:
        self.storage = storage
        self._unit = unit if storage.big_endian else 1
        self.nbytes = storage.nbytes
        self.known_crc32 = 0 if self._unit > 1 else storage.crc32

    def chunks(self) -> Iterator[bytes | bytearray]:
        """
        Yield the bytes in chunks.

        Raises:
            DamagedFile: They are swapped, or joined from pieces, and do not match their checksum.
        """
        if isinstance(self.storage.source, PiecesSource):
            yield from self.storage.source.chunks()
            return
        storage = in_memory(self.storage)
        if self._unit > 1 and storage.crc32:
            self._compare(checksum_of_range(storage.source, storage.offset, storage.offset + storage.nbytes))
        for start in range(0, storage.nbytes, CHUNK_NBYTES):
            data = storage.source.read(storage.offset + start, min(CHUNK_NBYTES, storage.nbytes - start))
            yield data if self._unit == 1 else swapped(data, self._unit)

    def extents(self) -> Sequence[Extent] | None:
        if isinstance(self.storage.source, PiecesSource):
            return self.storage.source.extents()
        under = file_under(self.storage.source, self.storage.offset) if self._unit == 1 else None
        return None if under is None else (Extent(*under, self.nbytes),)

    def pieces(self) -> PiecesSource | None:
        return self.storage.source if isinstance(self.storage.source, PiecesSource) else None

    def check(self, crc32: int) -> None:
        if self._unit == 1:
            self._compare(crc32)

    def _compare(self, checksum: int) -> None:
        storage = self.storage
        if storage.crc32 and checksum != storage.crc32:
            raise DamagedFile(
                f"storage {storage.key!r} is damaged: its CRC-32 is {checksum:08x}, not {storage.crc32:08x}",
                hint="Download the file again.",
            )


class TensorPayload(Payload):
    """One tensor's elements, packed in row-major order."""

    __slots__ = ("_tensor", "nbytes")

    def __init__(self, tensor: LazyTensor) -> None:
        self._tensor = tensor
        self.nbytes = tensor.info.nbytes

    def chunks(self) -> Iterator[bytes]:
        return self._tensor.chunks(CHUNK_NBYTES)

    def extents(self) -> Sequence[Extent] | None:
        info = self._tensor.info
        under = file_of(info) if info.dtype.packed == 1 and info.nbytes else None
        return None if under is None else (Extent(*under, self.nbytes),)


def payload_of(tensor: LazyTensor) -> Payload:
    """Return the payload for a tensor: its storage if it covers that from end to end, else its elements."""
    info = tensor.info
    storage = info.storage
    covers = storage is not None and info.is_contiguous and info.storage_offset == 0 and info.nbytes == storage.nbytes
    if covers and storage is not None and not (info.conj or info.neg):
        return StoragePayload(storage, info.dtype.swap_nbytes)
    return TensorPayload(tensor)


def have_same_bytes(one: TensorInfo, other: TensorInfo, limits: Limits = DEFAULT_LIMITS) -> bool:
    """Return whether two tensors have the same bytes in row-major order; both must have a storage."""
    sides = (LazyTensor("", info).chunks(CHUNK_NBYTES, limits=limits) for info in (one, other))
    return all(a == b for a, b in zip_longest(*sides))


class ComputedSource(Source):
    """``nbytes`` bytes that are computed in pieces, in order, anew each time that it is read from offset 0."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self.name = name
        self._pieces: Iterator[bytes] = iter(())
        self._ahead = b""
        self._position = 0

    def made(self) -> Iterator[bytes]:
        """Yield all bytes in pieces, computed anew."""
        raise NotImplementedError

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes. The offset must be 0, to begin again, or the end of the last read."""
        if offset == 0:
            self._pieces, self._ahead, self._position = self.made(), b"", 0
        if offset != self._position:
            raise OutputFailed(f"tensor {self.name!r} was not read in order", kind="output-failed")
        found = [self._ahead]
        missing = nbytes - len(self._ahead)
        while missing > 0:
            found.append(next(self._pieces))
            missing -= len(found[-1])
        last = found.pop()
        end = len(last) + missing
        self._ahead = last[end:]
        self._position += nbytes
        if self._position >= self.nbytes:
            self._pieces = iter(())  # frees the memory of their inputs
        return b"".join((*found, last[:end]))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer, in pieces of at most 4 MiB."""
        for part in steps(buffer, self.cancellation):
            part[:] = self.read(offset, part.nbytes)
            offset += part.nbytes

    @property
    def was_read(self) -> bool:
        """Whether any of it was read."""
        return self._position > 0

    def tensor(self, like: TensorInfo, dtype: DType, shape: tuple[int, ...] | None = None) -> TensorInfo:
        """Return the facts of a tensor with these bytes and this dtype, and by default the shape; else as ``like``."""
        location = like.storage.location if like.storage is not None else like.location
        storage, size = StorageRef(self.name, location, self.nbytes, self, 0), like.shape if shape is None else shape
        made = like._replace(dtype=dtype, shape=size, stride=row_major(size), storage_offset=0, storage=storage)
        return made._replace(conj=False, neg=False, parts=())


class ComputedWeight(ComputedSource):
    """The bytes of a weight that is computed from others."""

    def __init__(self, name: str, nbytes: int, said: str, parts: Sequence[LazyTensor]) -> None:
        super().__init__(name, nbytes)
        self.said = said
        """How it is made, as text for people; many weights have the same."""
        self.parts = parts
        """The tensors that it is made from, besides the one that had its name."""
