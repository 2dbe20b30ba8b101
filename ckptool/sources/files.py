"""
Positioned reads from one source of bytes; the module that opens files, but for those that files name.

A source never has a current position, so threads can share it. Reads are exact: fewer bytes than asked for means
that the file changed under us, because every caller has compared its claim with ``nbytes`` first. Readers map
nothing: a truncated mapping kills the process, a short read is an error that can be caught. ``FileSource.map`` is for
those who hand memory out.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import stat
import threading
from contextlib import suppress
from typing import BinaryIO, Protocol, TypeAlias

from ckptool.errors import FileUnavailable, SourceChanged

Origin: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO

_CLOSED = "the checkpoint is closed"
_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".th", ".pkl", ".safetensors", ".t7", ".tar")


class Source(Protocol):
    """``nbytes`` bytes that can be read from anywhere."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return exactly ``nbytes`` bytes from ``offset``. Both must lie inside the source."""
        ...

    def file_offset(self, offset: int) -> int | None:
        """Return where ``offset`` lies in the file itself, or None where the bytes stand in no file as they are."""
        ...

    def close(self) -> None:
        """Release what the source holds. Reading afterwards is an error."""
        ...


class FileSource:
    """A regular file, read with ``pread``; ``fd`` is the one under ``path``, where it was opened already."""

    _fd = -1  # closed: another file may have its number by now, so whatever uses the number looks here once more after

    def __init__(self, path: str, fd: int | None = None) -> None:
        self._beside: list[FileSource] = []
        self._fd = _open_regular(path) if fd is None else fd
        self.path = path
        status = _status(self._fd)
        self._identity = _identity(status)
        self.nbytes = status.st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        fd = self._fd
        try:
            data = os.pread(fd, nbytes, offset)
            while len(data) < nbytes:  # one call returns at most 2 GiB on Linux
                more = os.pread(fd, nbytes - len(data), offset + len(data))
                if not more:
                    raise _changed(offset, nbytes, len(data), self.path)
                data += more
        except OSError as error:
            raise _unreadable(error, offset, self.path) from error
        finally:
            if self._fd < 0:
                raise ValueError(_CLOSED)
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from ``offset``: what ``read`` does, without new memory for each piece."""
        filled = 0
        while filled < buffer.nbytes:
            try:
                count = os.preadv(self._fd, [buffer[filled:]], offset + filled)
            except OSError as error:
                raise _unreadable(error, offset + filled, self.path) from error
            finally:
                self.fileno()
            if not count:
                raise _changed(offset, buffer.nbytes, filled, self.path)
            filled += count

    def map(self) -> mmap.mmap:
        """
        Map the whole file privately: processes share its pages until one writes to them, and the file never changes.

        Raises:
            SourceChanged: It shrank since it was opened. If it shrinks later, touching what is gone kills the process.
            OSError: The system has no room for it.
        """
        # Not ACCESS_COPY, which asks for no room to write in on some systems and then kills the writer.
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        try:
            return mmap.mmap(self.fileno(), self.nbytes, flags=mmap.MAP_PRIVATE, prot=protection)
        except ValueError as error:
            raise _changed(0, self.nbytes, self._status().st_size, self.path) from error
        finally:
            self.fileno()

    def fileno(self) -> int:
        """Return the open file's descriptor; raise ValueError if the source is closed."""
        if self._fd < 0:
            raise ValueError(_CLOSED)
        return self._fd

    def file_offset(self, offset: int) -> int | None:
        return offset

    def beside(self, name: str) -> FileSource:
        """
        Return a file that this one names: see ``open_beside``. It is part of this one, and ends with it.

        Raises:
            CkptoolError: It is missing, or not to be opened by what a file says.
        """
        from ckptool.sources.siblings import open_beside

        fd = open_beside(self.path, self.place, name)
        found = self._of_its_kind(os.path.join(os.path.dirname(self.path), name), fd)  # noqa: PTH118, PTH120 - a name
        self._beside.append(found)
        if self._fd < 0:
            found.close()
            raise ValueError(_CLOSED)
        return found

    def _of_its_kind(self, path: str, fd: int) -> FileSource:
        return FileSource(path, fd)

    @property
    def place(self) -> tuple[int, int]:
        """The device and the inode that it has, which no two files have in common."""
        return self._identity[0], self._identity[1]

    def _status(self) -> os.stat_result:
        try:
            return _status(self.fileno())
        finally:
            self.fileno()

    def check_unchanged(self) -> None:
        """Raise SourceChanged if the file, or one beside it that belongs to it, was written to since it was opened."""
        if _identity(self._status()) != self._identity:
            hint = "Read it again once it is complete."
            raise SourceChanged("the file was changed while it was being read", hint=hint, path=self.path)
        for one in self._beside:
            one.check_unchanged()

    def close(self) -> None:
        fd = self._fd
        with suppress(AttributeError, OSError):  # closed already, by another thread too; nothing was written to it
            del self._fd
            os.close(fd)
        for one in self._beside:
            one.close()

    def __del__(self) -> None:
        if self._fd >= 0:
            self._beside.clear()  # tensors may still read from them
            self.close()


class StreamSource:
    """A file object that can seek. Reads take turns, and leave its position where they ended."""

    def __init__(self, stream: BinaryIO, *, owned: bool = False) -> None:
        self._stream = stream
        self._owned = owned
        self._closed = False
        self._lock = threading.Lock()
        self.nbytes = stream.seek(0, io.SEEK_END)

    def read(self, offset: int, nbytes: int) -> bytes:
        if self._closed:
            raise ValueError(_CLOSED)
        with self._lock:
            self._stream.seek(offset)
            chunks: list[bytes] = []
            missing = nbytes
            while missing:
                chunk = self._stream.read(missing)
                if not chunk:
                    raise _changed(offset, nbytes, nbytes - missing)
                chunks.append(chunk)
                missing -= len(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def file_offset(self, offset: int) -> int | None:
        return offset

    def close(self) -> None:
        self._closed = True
        if self._owned:
            self._stream.close()


class BytesSource:
    """Bytes in memory. ``is_file`` says that they are the whole file, not something decoded from it."""

    def __init__(
        self, data: bytes | bytearray | memoryview, *, is_file: bool = False, packed_nbytes: int | None = None
    ) -> None:
        self.packed_nbytes = packed_nbytes
        """Size of the file that they were inflated from; None if they were not."""
        self._data = memoryview(data).cast("B")
        self._is_file = is_file
        self._closed = False
        self.nbytes = self._data.nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        if self._closed:
            raise ValueError(_CLOSED)
        return bytes(self._data[offset : offset + nbytes])

    def file_offset(self, offset: int) -> int | None:
        return offset if self._is_file else None

    def close(self) -> None:
        """Let go of the bytes: a bytearray can be resized again."""
        self._closed = True
        self._data.release()


class SliceSource:
    """``nbytes`` bytes of another source, from ``start``."""

    def __init__(self, whole: Source, start: int, nbytes: int) -> None:
        self.whole = whole
        self._start = start
        self.nbytes = nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.whole.read(self._start + offset, nbytes)

    def file_offset(self, offset: int) -> int | None:
        return self.whole.file_offset(self._start + offset)

    def close(self) -> None:
        self.whole.close()


def file_under(source: Source, offset: int) -> tuple[FileSource, int] | None:
    """Return the file that ``source`` is a slice of, and where in it ``offset`` lies; None for anything else."""
    position = source.file_offset(offset)
    while isinstance(source, SliceSource):
        source = source.whole
    return (source, position) if isinstance(source, FileSource) and position is not None else None


def open_source(origin: Origin) -> tuple[Source, str]:
    """
    Return the source for a path, for bytes, or for a binary file object, and the name to show for it.

    A file object is read from its beginning, wherever it stands; one that cannot seek, into memory.

    Raises:
        FileUnavailable: The path is missing, not permitted, or not a regular file. A pipe never blocks.
        TypeError: It is none of the three.
    """
    if isinstance(origin, bytes | bytearray | memoryview):
        return BytesSource(origin, is_file=True), "<bytes>"
    if isinstance(origin, str | os.PathLike):
        path = os.fspath(origin)
        if hasattr(os, "pread"):
            return FileSource(path), path
        fd = _open_regular(path)  # Windows has no pread
        return StreamSource(os.fdopen(fd, "rb"), owned=True), path
    given: object = origin
    if not hasattr(given, "seekable") or isinstance(given, io.TextIOBase):
        kind = type(given).__name__
        raise TypeError(f"a checkpoint is a path, bytes, or a file object that was opened with 'rb', not {kind}")
    name = getattr(origin, "name", None)
    shown = name if isinstance(name, str) else "<stream>"
    if origin.seekable():
        return StreamSource(origin), shown
    return BytesSource(origin.read(), is_file=True), shown


def is_likely(name: str) -> bool:
    """Say whether files of this name mostly are checkpoints."""
    return name.lower().endswith(_SUFFIXES)


def directory_entries(path: str) -> list[str]:
    """Return the names of the regular files in a directory, sorted; an empty list if it cannot be listed."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_file())
    except OSError:
        return []


def system_text(path: str) -> str:
    """Return what the system says in a file of its own, under ``/proc`` say; nothing where it has no such file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:  # noqa: PTH123 - no path of a user's
            return stream.read()
    except OSError:
        return ""


def file_identity(path: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """Return what tells one state of a file under a path from another, or None if there is none."""
    try:
        return _identity(os.stat(path))  # noqa: PTH116 - a system call, like the others here
    except (OSError, ValueError):
        return None


def exists(path: str) -> bool:
    """Say whether anything has this path."""
    return os.path.lexists(path)


def _open_regular(path: str) -> int:
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise _unavailable(path, error) from error
    except ValueError as error:  # a NUL in the path
        raise FileUnavailable("not a path", kind="missing") from error
    try:
        mode = _status(fd).st_mode
    except BaseException:
        os.close(fd)
        raise
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise _directory(path)
    kinds = (
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    )
    what = next((name for test, name in kinds if test(mode)), "not a regular file")
    raise FileUnavailable(f"{what}, not a file", kind="not-a-file", hint="Save the stream to a file first.")


def _unavailable(path: str, error: OSError) -> FileUnavailable:
    if error.errno == errno.ENOENT:
        return FileUnavailable("no such file", kind="missing", hint="Check the path.")
    if error.errno in (errno.EACCES, errno.EPERM):
        if os.path.isdir(path):  # noqa: PTH112 - Windows refuses to open a directory with this errno
            return _directory(path)
        return FileUnavailable("permission denied", kind="permission", hint=f"Make it readable: chmod u+r {path}")
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    return FileUnavailable(f"cannot be opened: {reason}", kind="unavailable")


def _directory(path: str) -> FileUnavailable:
    names = sorted(directory_entries(path), key=lambda name: (not name.endswith(".index.json"), not is_likely(name)))
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4:,} more" if len(names) > 4 else "")
    many = "one file" if len(names) == 1 else f"{len(names):,} files"
    fact = f"a directory with {many}" if names else "a directory without files"
    hint = f"Name a file in it: {shown}" if names else None
    return FileUnavailable(fact, kind="directory", hint=hint)


def _status(fd: int) -> os.stat_result:
    try:
        return os.fstat(fd)
    except OSError as error:
        raise _unreadable(error) from error


def _unreadable(error: OSError, offset: int | None = None, path: str | None = None) -> FileUnavailable:
    """Return the error for a bad disk, or a network that is gone."""
    reason = os.strerror(error.errno).lower() if error.errno else str(error)
    where = "" if offset is None else f" at byte {offset:,}"
    return FileUnavailable(f"cannot be read{where}: {reason}", kind="io", offset=offset, path=path)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _changed(offset: int, needed: int, actual: int, path: str | None = None) -> SourceChanged:
    return SourceChanged(
        f"the file shrank while it was being read: {needed:,} bytes wanted at {offset:,}, {actual:,} left",
        hint="Read it again once it is complete.",
        offset=offset,
        needed=needed,
        actual=actual,
        path=path,
    )
