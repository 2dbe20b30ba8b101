"""
Bytes from payloads to an output, at the speed at which the system copies them, and their checksums beside that.

Where the bytes stand in a file as they are, the system copies them from file to file while a second thread reads them
for their checksum; everything else comes through memory in pieces. Large reads go into one buffer, used again and
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Final
from zlib import crc32

from ckptool.files import FileSource, ReadAhead, Source, file_under
from ckptool.outputs import Output
from ckptool.payloads import Payload, StoragePayload
from ckptool.tensors import LazyTensor, StorageRef

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from typing_extensions import Self

_BUFFER_NBYTES: Final = 1 << 20
_WORTH_A_THREAD: Final = 1 << 20
_THREADS: Final = 2


class Transfer:
    """
    One output being filled. Used in a ``with`` block.

    Without ``checksums``, bytes that the system can copy are not read at all, and what ``send`` returns is the
    source's own checksum, 0 if it has none.
    """

    def __init__(self, output: Output, *, checksums: bool = True) -> None:
        self._output = output
        self._checksums = checksums
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: tuple[FileSource, ReadAhead] | None = None

    def send(self, payload: Payload, *, checksum: bool = False) -> int:
        """
        Append a payload, and return the CRC-32 of what was read for it; ``checksum`` insists on one.

        Raises:
            DamagedFile: The source has a checksum of these bytes, and it is another.
        """
        extent = payload.extent()
        if extent is None:
            found = 0
            for chunk in payload.chunks():
                found = crc32(chunk, found)
                self._output.write(chunk)
        elif payload.nbytes < _WORTH_A_THREAD:
            data = self._read_ahead(*extent, payload.nbytes)
            found = crc32(data)
            self._output.write(data)
        else:
            file, offset = extent
            if not self._checksums and (payload.known_crc32 or not checksum):
                self._output.copy(file, offset, payload.nbytes)
                return payload.known_crc32
            if self._pool is None:
                self._pool = _threads(1)
            reading = self._pool.submit(checksum_of_range, file, offset, offset + payload.nbytes)
            self._output.copy(file, offset, payload.nbytes)
            found = reading.result()
        payload.check(found)
        return found

    def _read_ahead(self, file: FileSource, offset: int, nbytes: int) -> bytes:
        """Return a small range of a file: its neighbours are likely to be asked for next."""
        if self._ahead is None or self._ahead[0] is not file:
            self._ahead = file, ReadAhead(file)
        return self._ahead[1].read(offset, nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def checksum_of(payload: Payload) -> int:
    """Return the CRC-32 of a payload."""
    found = 0
    for chunk in payload.chunks():
        found = crc32(chunk, found)
    return found


def checksum_of_range(source: Source, start: int, stop: int, before: int = 0) -> int:
    """Return the CRC-32 of a range of bytes, going on from that of what stood before."""
    under = file_under(source, start)
    if under is None or not hasattr(FileSource, "read_into"):
        for position in range(start, stop, _BUFFER_NBYTES):
            before = crc32(source.read(position, min(_BUFFER_NBYTES, stop - position)), before)
        return before
    file, position = under
    end = position + stop - start
    buffer = memoryview(bytearray(min(_BUFFER_NBYTES, max(0, stop - start))))
    while position < end:
        piece = buffer[: min(len(buffer), end - position)]
        file.read_into(position, piece)
        before = crc32(piece, before)
        position += len(piece)
    return before


def checksums_of_file(source: Source, ranges: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """
    Return the CRC-32 of each range, and that of everything outside them joined together.

    The ranges must be in order and disjoint. Every byte of the source is read once: large ranges by two threads, the
    rest in one sweep.
    """
    large = [bounds for bounds in ranges if bounds[1] - bounds[0] >= _WORTH_A_THREAD]
    with _threads(_THREADS) if large else nullcontext() as pool:
        computed = pool.map(lambda bounds: checksum_of_range(source, *bounds), large) if pool else iter(())
        ahead = ReadAhead(source)
        found: list[int] = []
        outside = position = 0
        for start, stop in ranges:
            outside = _checksum_ahead(ahead, position, start, outside)
            is_large = stop - start >= _WORTH_A_THREAD
            found.append(next(computed) if is_large else _checksum_ahead(ahead, start, stop, 0))
            position = stop
    return found, _checksum_ahead(ahead, position, source.nbytes, outside)


def _threads(count: int) -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # a file of small tensors needs none

    return ThreadPoolExecutor(count)


def _checksum_ahead(ahead: ReadAhead, start: int, stop: int, before: int) -> int:
    if stop - start <= ReadAhead.BLOCK:
        return crc32(ahead.read(start, stop - start), before)
    for position in range(start, stop, ReadAhead.BLOCK):
        before = crc32(ahead.read(position, min(ReadAhead.BLOCK, stop - position)), before)
    return before


def check_others(tensors: Iterable[LazyTensor], copied: Iterable[Payload]) -> None:
    """
    Hold against the file's checksums the storages that were read in part or rearranged, each once.

    Raises:
        DamagedFile: One of them is not what was saved.
    """
    done = {_place(payload.storage) for payload in copied if isinstance(payload, StoragePayload)}
    todo = [tensor.info for tensor in tensors]
    while todo:
        info = todo.pop()
        todo.extend(part for _, part in info.parts)
        storage = info.storage
        if storage is None or not storage.crc32 or _place(storage) in done:
            continue
        done.add(_place(storage))
        payload = StoragePayload(storage, 1)
        payload.check(checksum_of(payload))


def _place(storage: StorageRef) -> tuple[int, int]:
    return id(storage.source), storage.offset
