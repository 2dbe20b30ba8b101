"""
Open files, and read them at a position. Files that another file names are opened in ``siblings``.

A source never has a current position, so threads can share it. Reads are exact: fewer bytes than asked for means
that the file changed under us, because every caller has compared its claim with ``nbytes`` first. Readers map
nothing: a truncated mapping kills the process, a short read is an error that can be caught. ``FileSource.map`` is for
callers that hand memory out.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from shlex import join, quote
from typing import TYPE_CHECKING, BinaryIO, Final, TypeAlias, cast

from ckptool.cancellation import STEP_NBYTES, Cancellation, check_cancelled
from ckptool.errors import FileUnavailable, SourceChanged, reason_of
from ckptool.sources.journal import refuse_edited
from ckptool.sources.paths import identity_of, is_likely, is_network
from ckptool.sources.source import (
    CLOSED,
    BytesSource,
    FillsBuffers,
    SliceSource,
    Source,
    StreamSource,
    changed,
    read_in_steps,
)

if TYPE_CHECKING:
    import mmap

    from ckptool.sources.pool import Pool


Origin: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO


_NO_DESCRIPTOR: dict[str, bool] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""Before, a mapping kept a descriptor of its file for itself."""
_ADDRESS: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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


def open_regular(path: str) -> int:
    """
    Return a descriptor of a regular file. A pipe never blocks.

    Raises:
        FileUnavailable: It is missing, not permitted, or something else.
        UnfinishedEdit: An edit in place left it neither old nor new, so far.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if os.name == "nt" and os.path.isdir(path):
            raise folder_instead() from error  # it is not permitted to open one there
        raise unavailable(path, error) from error
    except ValueError as error:  # a NUL in the path
        raise FileUnavailable("not a path", kind="missing") from error
    try:
        mode = status_of(fd).st_mode
    except BaseException:
        os.close(fd)
        raise
    if stat.S_ISREG(mode):
        try:
            refuse_edited(path, "torn", fd=fd)
        except BaseException:
            os.close(fd)
            raise
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise folder_instead()
    kinds = (
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    )
    what = next((name for test, name in kinds if test(mode)), "not a regular file")
    raise not_a_file(what)


def folder_instead() -> FileUnavailable:
    """Return the error for a directory where a file was asked for."""
    return FileUnavailable("a directory, not a file", kind="directory")


def status_of(fd: int) -> os.stat_result:
    """Return the status of an open file; raise FileUnavailable if there is none."""
    try:
        return os.fstat(fd)
    except OSError as error:
        raise unreadable(error) from error


def unreadable(error: OSError, offset: int | None = None, path: str | None = None) -> FileUnavailable:
    """Return the error for a bad disk, or a network that is gone."""
    where = "" if offset is None else f" at byte {offset:,}"
    return FileUnavailable(f"cannot be read{where}: {reason_of(error)}", kind="io", offset=offset, path=path)


def unavailable(path: str, error: OSError) -> FileUnavailable:
    """Return the error for a path that the system does not open."""
    if error.errno == errno.ENOENT or _ADDRESS.fullmatch(path):
        return _missing(path)
    if error.errno in (errno.EACCES, errno.EPERM):
        if os.path.isdir(path):
            return folder_instead()
        return not_permitted(path)
    return FileUnavailable(f"cannot be opened: {reason_of(error)}", kind="unavailable")


def not_permitted(path: str) -> FileUnavailable:
    """Return the error for a path that may not be read: a file, a folder, or what is in one that may not be entered."""
    closed = next((one for one in _folders(path) if not os.access(one, os.X_OK)), None)
    if closed is not None and closed != path:
        fact, what = f"permission denied: you may not enter the folder {closed!r}", "that folder"
    elif os.path.isdir(path):
        closed, fact, what = path, "a folder that you may not list: permission denied", "the folder"
    else:
        command = join(("chmod", "u+r", "--", path))
        return FileUnavailable("permission denied", kind="permission", hint="Make it readable.", command=command)
    command = join(("chmod", "u+rx", "--", closed))
    return FileUnavailable(
        fact, kind="permission", hint=f"Make {what} one that you may list and enter.", command=command
    )


def _folders(path: str) -> Iterator[str]:
    """Yield the folders on the way to a path, and itself if it is one, as far as the system says of them."""
    folders = [path]
    while os.path.dirname(folders[-1]) not in ("", folders[-1]):
        folders.append(os.path.dirname(folders[-1]))
    yield from filter(os.path.isdir, reversed(folders))


def _missing(path: str) -> FileUnavailable:
    if path == "-":
        return not_a_file("standard input is a pipe")
    address = _ADDRESS.fullmatch(path)
    if address is not None:
        local = address[1].lower() == "file"
        hint = f"Give the path alone: {quote(address[2])}" if local else "Download the file first, and give its path."
        return FileUnavailable("an address, and addresses are not read", kind="address", hint=hint)
    hint = "Check the path."
    if _HUB_NAME.fullmatch(path) and not is_likely(path) and not os.path.isdir(path.partition("/")[0]):
        hint = f"Check the path. If it is a name on the Hugging Face hub, download it first: hf download {path}"
    return FileUnavailable("no such file", kind="missing", hint=hint)


def not_a_file(what: str) -> FileUnavailable:
    """Return the error for a pipe or a device."""
    return FileUnavailable(f"{what}, not a file", kind="not-a-file", hint="Save the stream to a file first.")


def file_under(source: Source, offset: int) -> tuple[FileSource, int] | None:
    """Return the file that ``source`` is a slice of, and where in it ``offset`` lies; None for anything else."""
    position = source.file_offset(offset)
    while isinstance(source, SliceSource):
        source = source.whole
    return (source, position) if isinstance(source, FileSource) and position is not None else None


class _Copying:
    """Fills buffers from a source that only returns bytes, a little at a time."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def read_into(self, offset: int, buffer: memoryview) -> None:
        for start in range(0, buffer.nbytes, STEP_NBYTES):
            count = min(STEP_NBYTES, buffer.nbytes - start)
            buffer[start : start + count] = self._source.read(offset + start, count)


def filler_under(source: Source, offset: int) -> tuple[FillsBuffers, int] | None:
    """
    Return what fills buffers with the bytes of a source, a file where it is one, and where in it ``offset`` lies.

    None for what inflates its whole content at each read.
    """
    under = file_under(source, offset) if hasattr(os, "preadv") else None
    if under is not None or source.is_compressed:
        return under
    own = hasattr(source, "read_into") and not isinstance(source, FileSource)
    return cast("FillsBuffers", source) if own else _Copying(source), offset
