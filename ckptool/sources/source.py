"""
``Source``, the base class, and sources in memory; ``Meter``, which reports progress.

A source has no current position, so threads can share it. Reads are exact: every caller compares its range with
``nbytes`` first, so fewer bytes than requested mean that the file changed meanwhile.

A source carries the cancellation of the call that it was opened for to whatever works on it. Its reads are then made
in steps, with a check before each; a read of more than one step takes twice its memory for a moment.
"""

from __future__ import annotations

import io
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Final, TypeAlias

import ckptool.system as system
from ckptool.cancellation import STEP_NBYTES, Cancellation
from ckptool.errors import OutOfMemory, SourceChanged

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it since Python 3.11

CLOSED = "the checkpoint is closed"
_LARGE_NBYTES: Final = 1 << 20

Compare: TypeAlias = "Callable[[int], None]"


class Closing:
    """A context manager that calls its ``close`` at the end of the ``with`` block, also after an error."""

    __slots__ = ()

    def close(self) -> None:
        """Close it; a second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Source:
    """
    ``nbytes`` bytes that can be read at any position.

    The defaults of the methods are for sources in memory: no file holds their bytes as they are, and there is nothing
    to release.
    """

    __slots__ = ()
    nbytes: int
    """Size in bytes."""
    cancellation: Cancellation | None = None
    """Stops reads and the work that they are part of; None if nothing does."""
    is_compressed = False
    """Whether each read inflates the whole content anew: callers that read more than once should keep it in memory."""
    is_folder = False

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return exactly ``nbytes`` bytes from ``offset``. The range must be inside the source."""
        raise NotImplementedError

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from ``offset``, as ``read``, but in steps without memory for all of them."""
        step = buffer.nbytes if self.is_compressed else STEP_NBYTES
        for start in range(0, buffer.nbytes, step or 1):
            count = min(step, buffer.nbytes - start)
            buffer[start : start + count] = self.read(offset + start, count)

    def file_offset(self, offset: int) -> int | None:  # noqa: ARG002 - the default of sources in memory
        """Return the offset of a byte in the file itself; None if the file does not hold these bytes as they are."""
        return None

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce the ranges that will be read next, in the order of the file; only remote sources make use of it."""

    def versions(self) -> Iterator[tuple[str, tuple[object, ...]]]:
        """Yield the path of each file that was opened so far, and what identifies its version."""
        return iter(())

    def check_unchanged(self) -> None:
        """Raise SourceChanged if a file is known to have changed since it was opened."""

    def close(self) -> None:
        """Release files and memory. Reading afterwards is an error."""


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
    """A file that can open others in the same folder, which are closed with it."""

    path: str
    """Its name in messages."""
    version: tuple[object, ...] = ()
    """Identifies this version of the file by size, time or tag; empty if nothing is known."""

    def __init__(self) -> None:
        self._siblings: list[SourceInFolder] = []

    @property
    def place(self) -> tuple[int, int]:
        """Identifies the file: no two open files have the same, and two paths of one file do if that is known."""
        raise NotImplementedError

    def open_sibling(self, name: str) -> SourceInFolder:
        """
        Return the file in the same folder whose name this file contains.

        Raises:
            CkptoolError: It is missing, or its name or a link could lead out of the folder.
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


class _Postponed:
    """Comparisons that are postponed until bytes of their ranges are read."""

    def __init__(self, ranges: Sequence[tuple[int, int]], compare: Compare, what: str) -> None:
        self._starts = [start for start, _ in ranges]
        self._stops = [stop for _, stop in ranges]
        self._compare_one = compare
        self.what = what
        self.undone = set(range(len(ranges)))

    def compare(self, start: int, stop: int) -> None:
        for number in range(bisect_right(self._stops, start), bisect_left(self._starts, stop)):
            if number in self.undone:
                self._compare_one(number)
                self.undone.discard(number)


class RemoteSource(Source):
    """A remote source: a read may take a while, and several at once take no longer than one."""

    unchecked: Source
    """The same bytes, without the comparisons of ``compare_later``."""
    _postponed: list[_Postponed]

    def compare_later(self, ranges: Sequence[tuple[int, int]], compare: Compare, what: str) -> None:
        """Call ``compare`` with the index of a range when bytes of it are first read; ``ranges`` are in order."""
        self._postponed.append(_Postponed(ranges, compare, what))

    def notes(self) -> Iterator[str]:
        """Yield the texts ``what``, with counts, of ``compare_later`` for comparisons that were not made yet."""
        for one in self._postponed:
            if one.undone:
                yield one.what.format(count=f"{len(one.undone):,}")


def remote_under(source: Source) -> tuple[RemoteSource, int] | None:
    """Return the remote source that a source is a slice of, and the slice's offset in it; None for local ones."""
    start = 0
    while isinstance(source, SliceSource):
        start += source.start
        source = source.whole
    return (source, start) if isinstance(source, RemoteSource) else None


class StreamSource(StepwiseSource):
    """A file object that can seek. Reads take turns, and move its position to their end."""

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
        """Size of the compressed file that they come from; None if they come from none."""
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


def memory_of(nbytes: int) -> memoryview:
    """Return memory for a range; large memory is mapped, so that all of it goes back to the system when it is freed."""
    if nbytes < _LARGE_NBYTES:
        return memoryview(bytearray(nbytes))
    try:
        return memoryview(system.new_memory(nbytes))
    except OSError as error:
        raise OutOfMemory(f"no {nbytes:,} bytes of memory are free", needed=nbytes) from error


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
    Serves many small reads in rising order with few calls, and without reading much more than they need.

    Reads close together share a block, and blocks grow as such reads go on. A read far from the last one fetches little
    more than it needs, so that walking the headers of a large file does not read the data between them.
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
        """Return the block that contains what ``read`` would return, and the offset of that in the block."""
        begin = offset - self._start
        if begin < 0 or begin + nbytes > len(self._block):
            near = 0 <= begin <= len(self._block) + self.SINGLE
            self._span = min(self.BLOCK, 8 * self._span) if near else self.SINGLE
            span = max(nbytes, self._span)
            self._block = self._source.read(offset, max(0, min(span, self._source.nbytes - offset)))
            self._start, begin = offset, 0
        return self._block, begin


Progress: TypeAlias = Callable[[int, int], None]
"""Called with how many bytes were read so far, and about how many are to be read in all."""


class Meter:
    """Counts the bytes that one thread reads, and reports progress after each piece."""

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
