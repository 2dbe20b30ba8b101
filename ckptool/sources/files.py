"""
Open files, and read them at a position. Files that another file names are opened in ``siblings``.

A source never has a current position, so threads can share it. Reads are exact: fewer bytes than asked for means
that the file changed under us, because every caller has compared its claim with ``nbytes`` first. Readers map
nothing: a truncated mapping kills the process, a short read is an error that can be caught. ``FileSource.map`` is for
callers that hand memory out.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from ckptool.cancellation import STEP_NBYTES, Cancellation, check_cancelled
from ckptool.errors import SourceChanged
from ckptool.sources.paths import identity_of, is_network
from ckptool.sources.regular import open_regular, status_of, unreadable
from ckptool.sources.source import CLOSED, BytesSource, Source, StreamSource, changed, read_in_steps

if TYPE_CHECKING:
    import mmap

    from ckptool.sources.pool import Pool

Origin: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO


_NO_DESCRIPTOR: dict[str, bool] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""Before, a mapping kept a descriptor of its file for itself."""


class FileSource:
    """A regular file, read with ``pread``; ``fd`` is the one under ``path``, where it was opened already."""

    is_compressed = False
    _fd = -1  # closed: another file may have its number by now, so whatever uses the number looks here once more after

    def __init__(self, path: str, cancellation: Cancellation | None = None, *, fd: int | None = None) -> None:
        self.cancellation = cancellation
        self._siblings: list[FileSource] = []
        self._fd = open_regular(path) if fd is None else fd
        self.path = path
        status = status_of(self._fd)
        self._identity = identity_of(status)
        self._links = status.st_nlink
        self.nbytes = status.st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        if self.cancellation is not None:
            self.cancellation.check()
            if nbytes > STEP_NBYTES:
                return read_in_steps(self.read, offset, nbytes)
        fd = self._fd
        try:
            data = os.pread(fd, nbytes, offset)
            while len(data) < nbytes:  # one call returns at most 2 GiB on Linux
                more = os.pread(fd, nbytes - len(data), offset + len(data))
                if not more:
                    raise changed(offset, nbytes, len(data), self.path)
                data += more
        except OSError as error:
            raise unreadable(error, offset, self.path) from error
        finally:
            if self._fd < 0:
                raise ValueError(CLOSED)
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from ``offset``: what ``read`` does, without new memory for each piece."""
        filled = 0
        step = buffer.nbytes if self.cancellation is None else STEP_NBYTES
        while filled < buffer.nbytes:
            check_cancelled(self.cancellation)
            try:
                count = os.preadv(self._fd, [buffer[filled : filled + step]], offset + filled)
            except OSError as error:
                raise unreadable(error, offset + filled, self.path) from error
            finally:
                self.fileno()
            if not count:
                raise changed(offset, buffer.nbytes, filled, self.path)
            filled += count

    def map(self) -> mmap.mmap:
        """
        Map the whole file privately: processes share its pages until one writes to them, and the file never changes.

        Raises:
            SourceChanged: It shrank since it was opened. If it shrinks later, touching what is gone kills the process.
            OSError: The system has no room for it.
        """
        import mmap  # what only reads needs none

        # Not ACCESS_COPY, which asks for no room to write in on some systems and then kills the writer.
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        try:
            if hasattr(os, "posix_fadvise"):  # more is read at once where a page is touched that is not in memory
                with suppress(OSError):
                    os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            return mmap.mmap(self.fileno(), self.nbytes, flags=mmap.MAP_PRIVATE, prot=protection, **_NO_DESCRIPTOR)
        except ValueError as error:
            raise changed(0, self.nbytes, self._status().st_size, self.path) from error
        finally:
            self.fileno()

    def is_remote(self) -> bool:
        """Say whether it is read over a network."""
        return is_network(self.fileno())

    def fileno(self) -> int:
        """Return the open file's descriptor; raise ValueError if the source is closed."""
        if self._fd < 0:
            raise ValueError(CLOSED)
        return self._fd

    def file_offset(self, offset: int) -> int | None:
        return offset

    def open_sibling(self, name: str) -> FileSource:
        """
        Return a file that this one names: see ``siblings.open_sibling``. It is part of this one, and ends with it.

        Raises:
            CkptoolError: It is missing, or not to be opened by what a file says.
        """
        from ckptool.sources import siblings
        from ckptool.sources.pool import POOL

        path = os.path.join(os.path.dirname(self.path), name)
        found = PooledFile(path, self.cancellation, POOL, partial(siblings.open_sibling, self.path, self.place, name))
        self._siblings.append(found)
        if self.is_closed:
            found.close()
            raise ValueError(CLOSED)
        return found

    @property
    def is_closed(self) -> bool:
        """Whether it was closed for good."""
        return self._fd < 0

    @property
    def place(self) -> tuple[int, int]:
        """The device and the inode that it has, which no two files have in common."""
        return self._identity[0], self._identity[1]

    def versions(self) -> Iterator[tuple[str, tuple[object, ...]]]:
        """Yield the path of the file, and of those beside it that belong to it, each with its size and its time."""
        yield self.path, self._identity[2:4]
        for one in self._siblings:
            yield from one.versions()

    def _status(self) -> os.stat_result:
        try:
            return status_of(self.fileno())
        finally:
            self.fileno()

    def check_unchanged(self) -> None:
        """
        Raise SourceChanged if the file, or one beside it that belongs to it, was written to since it was opened.

        A file that was removed, or that another was renamed over, is whole as long as it is open: that is no change.
        """
        status = self._status()
        *facts, changed_at = identity_of(status)
        # Another file that is renamed over this one takes its name away, which counts as a change of its status.
        is_unnamed = status.st_nlink < self._links
        if facts != list(self._identity[:-1]) or (changed_at != self._identity[-1] and not is_unnamed):
            hint = "Read it again once it is complete."
            raise SourceChanged("the file was changed while it was being read", hint=hint, path=self.path)
        for one in self._siblings:
            one.check_unchanged()
        if self._siblings:
            check_names(self._siblings)

    def close(self) -> None:
        self._close_descriptor()
        for one in self._siblings:
            one.close()

    def _close_descriptor(self) -> None:
        fd = self._fd
        try:  # not suppress(), which is gone where Python ends
            del self._fd
            os.close(fd)
        except (AttributeError, OSError):  # closed already, by another thread too; nothing was written to it
            pass

    def __del__(self) -> None:
        if self._fd >= 0:
            self._siblings.clear()  # tensors may still read from them
            self.close()


class PooledFile(FileSource):
    """A file of a checkpoint that may be many. ``reopen`` returns a new descriptor of what has its name now."""

    def __init__(self, path: str, cancellation: Cancellation | None, pool: Pool, reopen: Callable[[], int]) -> None:
        self.users = 0
        self._pool = pool
        self._reopen = reopen
        super().__init__(path, cancellation, fd=pool.opened(reopen))
        pool.add(self)

    @property
    def is_resting(self) -> bool:
        """Whether it has no descriptor now."""
        return self._fd < 0

    @property
    def is_closed(self) -> bool:
        """Whether it was closed for good."""
        return self._reopen is _closed

    def reopen(self) -> int:
        """Return a new descriptor of what has its name now."""
        return self._reopen()

    def open_again(self, fd: int) -> None:
        """Take a new descriptor; called by the pool alone."""
        self._fd = fd
        try:
            super().check_unchanged()
        except BaseException:
            self.rest()
            raise

    def rest(self) -> None:
        """Give the descriptor up until the next read."""
        self._close_descriptor()

    def read(self, offset: int, nbytes: int) -> bytes:
        with self._pool.using(self):
            return super().read(offset, nbytes)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from ``offset``."""
        with self._pool.using(self):
            super().read_into(offset, buffer)

    def map(self) -> mmap.mmap:
        """
        Map the whole file; the mapping stays when the file is closed.

        Raises:
            OSError: Mappings of other files have so many descriptors that few are left.
        """
        from ckptool.sources.pool import refuse_many_mappings

        with self._pool.using(self):
            refuse_many_mappings(self.fileno())
            return super().map()

    def is_remote(self) -> bool:
        """Say whether it is read over a network."""
        with self._pool.using(self):
            return super().is_remote()

    def check_unchanged(self) -> None:
        """Raise SourceChanged if the file was written to since it was opened."""
        with self._pool.using(self):
            super().check_unchanged()

    def close(self) -> None:
        """Close it for good."""
        self._reopen = _closed  # it may keep a folder
        self._pool.drop(self)
        super().close()


def _closed() -> int:
    raise ValueError(CLOSED)


def check_names(files: Collection[FileSource]) -> None:
    """
    Raise SourceChanged if some names of several files lead to others by now: what was opened may be of two saves.

    If all of them do, or are gone, the whole folder was replaced, and what was opened is of the one before.
    """
    replaced: list[FileSource] = []
    for one in files:
        try:
            is_same = one.place == identity_of(os.stat(one.path))[:2]
        except OSError:
            is_same = False
        if not is_same:
            replaced.append(one)
    if 0 < len(replaced) < len(files):
        hint = "Read it again once it is complete."
        raise SourceChanged("replaced while files beside it were being read", hint=hint, path=replaced[0].path)


def open_source(origin: Origin, cancellation: Cancellation | None = None) -> tuple[Source, str]:
    """
    Return the source for a path, for bytes, or for a binary file object, and the name to show for it.

    A file object is read from its beginning, whatever its position; one that cannot seek is read into memory.

    Raises:
        FileUnavailable: The path is missing, not permitted, or not a regular file. A pipe never blocks.
            Its ``kind`` is ``directory`` where a ``FolderSource`` is for it.
        TypeError: It is something else.
        Cancelled: It is cancelled already; nothing was opened.
    """
    check_cancelled(cancellation)
    if isinstance(origin, bytes | bytearray | memoryview):
        return BytesSource(origin, cancellation, is_file=True), "<bytes>"
    if isinstance(origin, str | os.PathLike):
        path = os.fspath(origin)
        if "://" in path:
            from ckptool.sources.remote.address import is_address

            if is_address(path):
                from ckptool.sources.remote.opening import open_remote  # few files are far away

                return open_remote(path, cancellation)
        if hasattr(os, "pread"):
            return FileSource(path, cancellation), path
        fd = open_regular(path)  # Windows has no pread
        return StreamSource(os.fdopen(fd, "rb"), cancellation, owned=True), path
    given: object = origin
    if not hasattr(given, "seekable") or isinstance(given, io.TextIOBase):
        kind = type(given).__name__
        raise TypeError(f"a checkpoint is a path, bytes, or a file object that was opened with 'rb', not {kind}")
    name = getattr(origin, "name", None)
    shown = name if isinstance(name, str) else "<stream>"
    if hasattr(given, "fs"):
        from ckptool.sources.remote.opening import open_file_object  # few objects are of files far away

        found = open_file_object(given, cancellation)
        if found is not None:
            return found, shown if shown != "<stream>" else found.path
    if origin.seekable():
        return StreamSource(origin, cancellation), shown
    return BytesSource(origin.read(), cancellation, is_file=True), shown
