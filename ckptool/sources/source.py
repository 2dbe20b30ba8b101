"""
Sources of bytes: what all have in common, and those that need no file system.

A source never has a current position, so threads can share it. Reads are exact: fewer bytes than asked for means
that the file changed meanwhile, because every caller has compared its claim with ``nbytes`` first.

A source carries the cancellation of the call that it was opened for to whatever works on it. Its own reads are made in
steps then, with a check before each; a read of more than one step takes twice its memory for a moment.

How far the reading of a file has come, for whoever wants to show it.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, TypeAlias

from ckptool.cancellation import STEP_NBYTES, Cancellation
from ckptool.errors import SourceChanged

CLOSED = "the checkpoint is closed"

Compare: TypeAlias = "Callable[[int], None]"


class Source:
    """
    ``nbytes`` bytes that can be read at any position.

    Most sources are near and plain: no file holds their bytes as they are, and there is nothing to release.
    """

    __slots__ = ()
    nbytes: int
    """Size in bytes."""
    cancellation: Cancellation | None = None
    """What stops reads, and what they are made for; None if nothing does."""
    is_compressed = False
    """Whether each read inflates the whole content anew: who reads it more than once keeps it in memory."""
    is_folder = False

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return exactly ``nbytes`` bytes from ``offset``. Both must lie inside the source."""
        raise NotImplementedError

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from ``offset``: what ``read`` does, without new memory for each piece."""
        step = buffer.nbytes if self.is_compressed else STEP_NBYTES
        for start in range(0, buffer.nbytes, step or 1):
            count = min(step, buffer.nbytes - start)
            buffer[start : start + count] = self.read(offset + start, count)

    def file_offset(self, offset: int) -> int | None:  # noqa: ARG002 - of most, no file has the bytes
        """Return the offset in the file itself; None where the file does not hold these bytes as they are."""
        return None

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Say what will be read next, in the order of the file; only where it is far away that makes a difference."""

    def versions(self) -> Iterator[tuple[str, tuple[object, ...]]]:
        """Yield the path of each file that was opened so far, and what identifies its version."""
        return iter(())

    def check_unchanged(self) -> None:
        """Raise SourceChanged if a file is known to have changed since it was opened."""

    def close(self) -> None:
        """Release what the source holds. Reading afterwards is an error."""


class StepwiseSource(Source):
    """A source whose reads can be cancelled: long ones are made in steps."""

    def read(self, offset: int, nbytes: int) -> bytes:
        if self.cancellation is not None:
            self.cancellation.check()
            if nbytes > STEP_NBYTES:
                starts = range(0, nbytes, STEP_NBYTES)
                return b"".join(self.read(offset + start, min(STEP_NBYTES, nbytes - start)) for start in starts)
        return self._read(offset, nbytes)

    def _read(self, offset: int, nbytes: int) -> bytes:
        raise NotImplementedError


class SourceInFolder(Source):
    """A file that can open files of the same folder; these belong to it, and are closed with it."""

    path: str
    """Its name in messages."""
    version: tuple[object, ...] = ()
    """What identifies this version of the file: sizes, times, tags; empty where nothing is known."""

    def __init__(self) -> None:
        self._siblings: list[SourceInFolder] = []

    @property
    def place(self) -> tuple[int, int]:
        """What identifies the file: no two files have the same."""
        raise NotImplementedError

    def open_sibling(self, name: str) -> SourceInFolder:
        """
        Return a file that this one names.

        Raises:
            CkptoolError: It is missing, or not to be opened by what a file says.
        """
        found = self._open_beside(name)
        self._siblings.append(found)
        return found

    def _open_beside(self, name: str) -> SourceInFolder:
        raise NotImplementedError

    def file_offset(self, offset: int) -> int | None:
        return offset

    def versions(self) -> Iterator[tuple[str, tuple[object, ...]]]:
        yield self.path, self.version
        for one in self._siblings:
            yield from one.versions()

    def check_unchanged(self) -> None:
        for one in self._siblings:
            one.check_unchanged()

    def close(self) -> None:
        for one in self._siblings:
            one.close()


class FarSource(Source):
    """A source far away: each read may take a while, and many at once take no longer than one."""

    unchecked: Source
    """The same bytes, of which nothing is compared with anything."""

    def compare_later(self, ranges: Sequence[tuple[int, int]], compare: Compare, what: str) -> None:
        """Call ``compare`` with the number of each range, which are in order, when bytes of it are first read."""
        raise NotImplementedError

    def notes(self) -> Iterator[str]:
        """Yield what was left unread of the index, and was not compared since."""
        raise NotImplementedError


def far_under(source: Source) -> tuple[FarSource, int] | None:
    """Return the far source that a source is a slice of, and where in it that begins; None for all that is near."""
    start = 0
    while isinstance(source, SliceSource):
        start += source.start
        source = source.whole
    return (source, start) if isinstance(source, FarSource) else None


class StreamSource(StepwiseSource):
    """A file object that can seek. Reads take turns, and leave its position where they ended."""

    def __init__(self, stream: BinaryIO, cancellation: Cancellation | None = None, *, owned: bool = False) -> None:
        self.cancellation = cancellation
        self._stream = stream
        self._owned = owned
        self._closed = False
        self._lock = threading.Lock()
        self.nbytes = stream.seek(0, io.SEEK_END)

    def _read(self, offset: int, nbytes: int) -> bytes:
        if self._closed:
            raise ValueError(CLOSED)
        with self._lock:
            self._stream.seek(offset)
            chunks: list[bytes] = []
            missing = nbytes
            while missing:
                chunk = self._stream.read(missing)
                if not chunk:
                    raise changed(offset, nbytes, nbytes - missing)
                chunks.append(chunk)
                missing -= len(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def file_offset(self, offset: int) -> int | None:
        return offset

    def close(self) -> None:
        self._closed = True
        if self._owned:
            self._stream.close()


class BytesSource(StepwiseSource):
    """Bytes in memory. ``is_file`` says that they are the whole file, not something decoded from it."""

    def __init__(
        self,
        data: bytes | bytearray | memoryview,
        cancellation: Cancellation | None = None,
        *,
        is_file: bool = False,
        packed_nbytes: int | None = None,
    ) -> None:
        self.cancellation = cancellation
        self.packed_nbytes = packed_nbytes
        """Size of the file that they were inflated from; None if they were not."""
        self._data = memoryview(data).cast("B")
        self._is_file = is_file
        self._closed = False
        self.nbytes = self._data.nbytes

    def _read(self, offset: int, nbytes: int) -> bytes:
        if self._closed:
            raise ValueError(CLOSED)
        return bytes(self._data[offset : offset + nbytes])

    def file_offset(self, offset: int) -> int | None:
        return offset if self._is_file else None

    def close(self) -> None:
        """Release the bytes: a bytearray can be resized again."""
        self._closed = True
        self._data.release()


class SliceSource(Source):
    """``nbytes`` bytes of another source, from ``start``."""

    def __init__(self, whole: Source, start: int, nbytes: int) -> None:
        self.whole = whole
        self.cancellation = whole.cancellation
        self.is_compressed = whole.is_compressed
        self.start = start
        self.nbytes = nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.whole.read(self.start + offset, nbytes)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.whole.read_into(self.start + offset, buffer)

    def file_offset(self, offset: int) -> int | None:
        return self.whole.file_offset(self.start + offset)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        self.whole.prefetch((start + self.start, stop + self.start) for start, stop in ranges)

    def close(self) -> None:
        self.whole.close()


def changed(offset: int, needed: int, actual: int, path: str | None = None) -> SourceChanged:
    return SourceChanged(
        f"the file shrank while it was being read: {needed:,} bytes wanted at {offset:,}, {actual:,} left",
        hint="Read it again once it is complete.",
        offset=offset,
        needed=needed,
        actual=actual,
        path=path,
    )


class ReadAhead:
    """
    Many small reads in rising order, with few calls and few bytes.

    Reads that lie close together share blocks, larger the more of them there are; a read far from the last one
    fetches little more than it needs, so that walking the headers of a large file does not read the data between them.
    """

    BLOCK = 65_536
    SINGLE = 256

    def __init__(self, source: Source) -> None:
        self._source = source
        self._start = 0
        self._block = b""
        self._span = self.SINGLE

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return up to ``nbytes`` bytes from ``offset``: fewer only at the end of the source."""
        block, begin = self.window(offset, nbytes)
        return block[begin : begin + nbytes]

    def window(self, offset: int, nbytes: int) -> tuple[bytes, int]:
        """Return the block that holds what ``read`` would return, and where in the block that begins."""
        begin = offset - self._start
        if begin < 0 or begin + nbytes > len(self._block):
            near = 0 <= begin <= len(self._block) + self.SINGLE
            self._span = min(self.BLOCK, 8 * self._span) if near else self.SINGLE
            span = max(nbytes, self._span)
            self._block = self._source.read(offset, max(0, min(span, self._source.nbytes - offset)))
            self._start, begin = offset, 0
        return self._block, begin


Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that were read so far, and those to be read in all, about as many."""


class Meter:
    """Counts what is read, and says so after each piece. Of one thread."""

    __slots__ = ("_progress", "done", "total")

    def __init__(self, progress: Progress | None = None, total: int = 0) -> None:
        self._progress = progress
        self.done = 0
        self.total = total

    def read(self, nbytes: int) -> None:
        """Count a piece that was read."""
        self.done += nbytes
        if self._progress is not None:
            self._progress(min(self.done, self.total), self.total)


SILENT = Meter()
