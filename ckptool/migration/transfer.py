"""
Copy payloads to an output, and compute their checksums on the way.

Where a file holds the bytes of a large payload as they are, threads copy it: each takes a run of bytes, reads it,
computes its CRC-32 and writes it to its position. Everything else goes in order through one thread.

Calls that copy in the system (``copy_file_range``, ``sendfile``) were measured, and are no faster than such pieces; and
the bytes are read for their checksums in any case.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar
from zlib import crc32

from ckptool.closing import Closing
from ckptool.sources.checksums import WORTH_A_THREAD, joined_crc32, pieces, runs, threads
from ckptool.sources.files import FileSource
from ckptool.sources.source import ReadAhead
from ckptool.tensors.payloads import Payload
from ckptool.tensors.pieces import Extent, PiecesSource

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from ckptool.migration.output.opening import SinkFile


T = TypeVar("T")


class Transfer(Closing):
    """
    One output being filled. Used in a ``with`` block.

    Without ``checksums``, none is computed for large payloads: ``send`` returns the checksum that the source has, or 0.
    """

    def __init__(self, output: SinkFile, *, checksums: bool = True) -> None:
        self._output = output
        self._checksums = checksums
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: tuple[FileSource, ReadAhead] | None = None

    def send(self, payload: Payload, *, checksum: bool = False) -> int:
        """Append a payload, and return the CRC-32 of what was read for it; ``checksum`` insists on one."""
        extents, pieces = payload.extents(), payload.pieces()
        found = 0
        if extents is None and pieces is not None and payload.nbytes >= WORTH_A_THREAD:
            found = self._put_together(pieces, checksum=checksum or self._checksums)
        elif extents is None:
            for chunk in payload.chunks():
                found = crc32(chunk, found)
                self._output.write(chunk)
        elif len(extents) == 1 and not self._checksums and (payload.known_crc32 or not checksum):
            (extent,) = extents
            if extent.nbytes >= WORTH_A_THREAD:
                self._copy(extent, checksum=False)
                return payload.known_crc32
            found = self._send_extent(extent)
        else:
            for extent in extents:
                of_extent = self._send_extent(extent)
                extent.check(of_extent)
                found = joined_crc32(found, of_extent, extent.nbytes)
            if pieces is not None:
                pieces.release()
        payload.check(found)
        return found

    def _send_extent(self, extent: Extent) -> int:
        """Append a run of bytes, and return their CRC-32."""
        if extent.nbytes >= WORTH_A_THREAD:
            return self._copy(extent, checksum=True)
        data = self._read_ahead(extent.file, extent.offset, extent.nbytes)
        self._output.write(data)
        return crc32(data)

    def _copy(self, extent: Extent, *, checksum: bool) -> int:
        """Append bytes of a file, and return their CRC-32, or 0."""
        file, offset, nbytes, *_ = extent
        output = self._output
        shift = output.leave(nbytes) - offset

        def copy(run: tuple[int, int]) -> int:
            found = 0
            for position, piece in pieces(file, *run):
                if checksum:
                    found = crc32(piece, found)
                output.fill(position + shift, piece)
            return found

        work = runs(offset, offset + nbytes)
        found = 0
        for (start, stop), of_run in zip(work, self._each(copy, work), strict=True):
            output.filled(stop - start)
            if checksum:
                found = joined_crc32(found, of_run, stop - start)
        return found

    def _put_together(self, source: PiecesSource, *, checksum: bool) -> int:
        """Append a tensor in pieces, band by band, and return the CRC-32 of its bytes, or 0."""
        output, checked, band = self._output, source.checked(), source.band_nbytes
        shift = output.leave(source.nbytes)
        memory = threading.local()

        def fill(start: int) -> int:
            if not hasattr(memory, "view"):
                memory.view = memoryview(bytearray(band))
            view = memory.view[: source.nbytes - start]
            checked.read_into(start, view)
            output.fill(start + shift, view)
            return crc32(view) if checksum else 0

        found = 0
        starts = range(0, source.nbytes, band)
        for start, of_band in zip(starts, self._each(fill, starts), strict=True):
            nbytes = min(band, source.nbytes - start)
            output.filled(nbytes)
            found = joined_crc32(found, of_band, nbytes)
        checked.compare()
        source.release()
        return found if checksum else 0

    def _each(self, do: Callable[[T], int], work: Iterable[T]) -> Iterator[int]:
        """Call a function for each piece of work, by several threads where the output takes what they do."""
        if not self._output.takes_any_order:
            return map(do, work)
        if self._pool is None:
            self._pool = threads()
        return self._pool.map(do, work)

    def _read_ahead(self, file: FileSource, offset: int, nbytes: int) -> bytes:
        """Return a small range of a file: its neighbours are likely to be asked for next."""
        if self._ahead is None or self._ahead[0] is not file:
            self._ahead = file, ReadAhead(file)
        return self._ahead[1].read(offset, nbytes)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
