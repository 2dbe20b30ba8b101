"""
Open local files, and read them at a position; small files of text and TOML that people write. ``descriptors`` opens
files by names that another file gives.

Readers do not map files: a mapping that is truncated kills the process, a short read is an error that can be caught.
``FileSource.map`` is for callers that pass memory on to users.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeAlias

import ckptool.system as system
from ckptool.arguments import as_utf8
from ckptool.cancellation import STEP_NBYTES, Cancellation, check_cancelled
from ckptool.errors import FileUnavailable, MalformedFile, MissingPackage, about, is_not_permitted, reason_of
from ckptool.sources import descriptors
from ckptool.sources.descriptors import Descriptor, refuse_many_mappings
from ckptool.sources.journal import refuse_edited
from ckptool.sources.paths import is_likely, is_remote, near_to
from ckptool.sources.source import (
    CLOSED,
    BytesSource,
    SliceSource,
    Source,
    SourceInFolder,
    StepwiseSource,
    StreamSource,
    changed,
)
from ckptool.sources.versions import check_names, check_same, identity_of

if TYPE_CHECKING:
    import mmap

Origin: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO


_ADDRESS: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class FileSource(StepwiseSource, SourceInFolder):
    """A regular file, read at positions; ``held`` is its descriptor, if it was opened already."""

    def __init__(self, path: str, cancellation: Cancellation | None = None, held: Descriptor | None = None) -> None:
        super().__init__()
        self.cancellation = cancellation
        self._held = Descriptor(partial(open_regular, path)) if held is None else held
        self.path = path
        self.nbytes = self._held.status.st_size
        self.version = identity_of(self._held.status)[2:4]
        """Its size in bytes and its time of modification."""

    def _read(self, offset: int, nbytes: int) -> bytes:
        with self._held as fd:
            try:
                data = system.read_at(fd, nbytes, offset)
                while len(data) < nbytes:  # one call returns at most 2 GiB
                    more = system.read_at(fd, nbytes - len(data), offset + len(data))
                    if not more:
                        raise changed(offset, nbytes, len(data), self.path)
                    data += more
            except OSError as error:
                raise unreadable(error, offset, self.path) from error
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        filled = 0
        step = buffer.nbytes if self.cancellation is None else STEP_NBYTES
        while filled < buffer.nbytes:
            check_cancelled(self.cancellation)
            with self._held as fd:
                try:
                    count = system.read_into_at(fd, buffer[filled : filled + step], offset + filled)
                except OSError as error:
                    raise unreadable(error, offset + filled, self.path) from error
            if not count:
                raise changed(offset, buffer.nbytes, filled, self.path)
            filled += count

    def map(self) -> mmap.mmap:
        """
        Map the whole file privately: processes share its pages until one writes to them, and the file never changes.

        Raises:
            SourceChanged: It shrank since it was opened. If it shrinks later, touching lost pages kills the process.
            OSError: The system cannot map it, or mappings have taken so many descriptors that few are left.
        """
        with self._held as fd:
            if self._held.is_pooled:
                refuse_many_mappings(fd)
            try:
                return system.map_private(fd, self.nbytes)
            except ValueError as error:
                raise changed(0, self.nbytes, status_of(fd).st_size, self.path) from error

    def is_on_network(self) -> bool:
        """Return whether it is on a network file system."""
        with self._held as fd:
            return system.is_network(fd)

    def fileno(self) -> int:
        """Return the open file's descriptor; raise ValueError if the source is closed."""
        with self._held as fd:
            return fd

    def open_sibling(self, name: str) -> SourceInFolder:
        found = super().open_sibling(name)
        if self._held.is_closed:
            found.close()
            raise ValueError(CLOSED)
        return found

    def _open_beside(self, name: str) -> FileSource:
        path = os.path.join(os.path.dirname(self.path), name)
        return pooled(path, self.cancellation, partial(descriptors.open_sibling, self.path, self.place, name))

    @property
    def place(self) -> tuple[int, int]:
        """The device and the inode, which together identify a file."""
        return self._held.place

    def check_unchanged(self) -> None:
        with self._held as fd:
            check_same(self.path, self._held.status, status_of(fd))
        super().check_unchanged()
        check_names(self._siblings)

    def close(self) -> None:
        self._held.close()
        super().close()


def pooled(path: str, cancellation: Cancellation | None, opening: Callable[[], int]) -> FileSource:
    """Return a file with a pooled descriptor; ``opening`` opens the path and returns a new descriptor each time."""
    return FileSource(path, cancellation, Descriptor(opening, partial(check_same, path)))


def open_source(origin: Origin, cancellation: Cancellation | None = None) -> tuple[Source, str]:
    """
    Return the source for a path, an address, bytes, or a binary file object, and the name to show for it.

    A file object is read from its beginning, whatever its position; one that cannot seek is read into memory.

    Raises:
        FileUnavailable: The path is missing, not permitted, or not a regular file; a pipe is never waited for.
            Its ``kind`` is ``directory`` if the path is a folder.
        TypeError: It is something else.
        Cancelled: It is cancelled already; nothing was opened.
    """
    check_cancelled(cancellation)
    if isinstance(origin, bytes | bytearray | memoryview):
        return BytesSource(origin, cancellation, is_file=True), "<bytes>"
    if isinstance(origin, str | os.PathLike):
        path = os.fspath(origin)
        if is_remote(path):
            from ckptool.sources.remote.opening import open_remote  # few files are remote

            return open_remote(path, cancellation)
        return FileSource(path, cancellation), path
    given: object = origin
    if not hasattr(given, "seekable") or isinstance(given, io.TextIOBase):
        kind = type(given).__name__
        raise TypeError(f"a checkpoint is a path, bytes, or a file object that was opened with 'rb', not {kind}")
    name = getattr(origin, "name", None)
    shown = name if isinstance(name, str) else "<stream>"
    if hasattr(given, "fs"):
        from ckptool.sources.remote.opening import open_file_object  # few objects are of remote files

        found = open_file_object(given, cancellation)
        if found is not None:
            return found, shown if shown != "<stream>" else found.path
    if origin.seekable():
        return StreamSource(origin, cancellation), shown
    return BytesSource(origin.read(), cancellation, is_file=True), shown


def open_regular(path: str) -> int:
    """
    Return a descriptor of a regular file; never wait for a pipe.

    Raises:
        FileUnavailable: It is missing, not permitted, or something else.
        UnfinishedEdit: An edit in place is unfinished: the file is neither the old one nor the new one.
    """
    try:
        fd = system.open_reading(path)
    except OSError as error:
        raise unavailable(path, error) from error
    except ValueError as error:  # a NUL in the path
        raise FileUnavailable("not a path", kind="missing") from error
    try:
        mode = status_of(fd).st_mode
        if stat.S_ISREG(mode):
            refuse_edited(path, "torn", fd=fd)
            return fd
    except BaseException:
        os.close(fd)
        raise
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
    """Return the error for a directory instead of a file."""
    return FileUnavailable("a directory, not a file", kind="directory")


def status_of(fd: int) -> os.stat_result:
    """Return the status of an open file; raise FileUnavailable if the system reports none."""
    try:
        return os.fstat(fd)
    except OSError as error:
        raise unreadable(error) from error


def unreadable(error: OSError, offset: int | None = None, path: str | None = None) -> FileUnavailable:
    """Return the error for a failed read, of a bad disk or a lost network."""
    where = "" if offset is None else f" at byte {offset:,}"
    return FileUnavailable(f"cannot be read{where}: {reason_of(error)}", kind="io", offset=offset, path=path)


def unavailable(path: str, error: OSError) -> FileUnavailable:
    """Return the error for a path that the system refuses to open."""
    if (address := _ADDRESS.fullmatch(path)) is not None:
        alone = f"Give the path alone: {system.quoted(address[2])}"
        hint = alone if address[1].lower() == "file" else "Download the file first, and give its path."
        return FileUnavailable("an address, and addresses are not read", kind="address", hint=hint)
    if is_not_permitted(error):
        return folder_instead() if os.path.isdir(path) else not_permitted(path)
    if error.errno != errno.ENOENT:
        return FileUnavailable(f"cannot be opened: {reason_of(error)}", kind="unavailable")
    if path == "-":
        return not_a_file("standard input is a pipe")
    hint = "Check the path."
    is_local = is_likely(path) or path.endswith((".toml", ".json", ".yaml"))
    if (near := near_to(path)) is not None:
        hint = f"Did you mean {near!r}?"
    elif _HUB_NAME.fullmatch(path) and not is_local and not os.path.isdir(path.partition("/")[0]):
        hint = f"Check the path. If it is a name on the Hugging Face hub, download it first: hf download {path}"
    return FileUnavailable("no such file", kind="missing", hint=hint)


def not_permitted(path: str) -> FileUnavailable:
    """Return the error for a path without permission: of the file, the folder, or a folder above that is closed."""
    closed = next((one for one in _folders(path) if not os.access(one, os.X_OK)), None)
    if closed is not None and closed != path:
        fact, what = f"permission denied: you may not enter the folder {closed!r}", "that folder"
    elif os.path.isdir(path):
        closed, fact, what = path, "a folder that you may not list: permission denied", "the folder"
    else:
        command = system.command_for("read", path)
        return FileUnavailable("permission denied", kind="permission", hint="Make it readable.", command=command)
    command = system.command_for("enter", closed)
    return FileUnavailable(
        fact, kind="permission", hint=f"Make {what} one that you may list and enter.", command=command
    )


def _folders(path: str) -> Iterator[str]:
    """Yield the folders above a path from the top, and the path itself if it is one, as far as they can be seen."""
    folders = [path]
    while os.path.dirname(folders[-1]) not in ("", folders[-1]):
        folders.append(os.path.dirname(folders[-1]))
    yield from filter(os.path.isdir, reversed(folders))


def not_a_file(what: str) -> FileUnavailable:
    """Return the error for a pipe or a device."""
    return FileUnavailable(f"{what}, not a file", kind="not-a-file", hint="Save the stream to a file first.")


def file_under(source: Source, offset: int) -> tuple[FileSource, int] | None:
    """Return the file that ``source`` is or is a slice of, and the file's offset for ``offset``; None for others."""
    position = source.file_offset(offset)
    while isinstance(source, SliceSource):
        source = source.whole
    return (source, position) if isinstance(source, FileSource) and position is not None else None


def packaged(path: str | os.PathLike[str]) -> str:
    """Return the text of a file of this package."""
    with closing(FileSource(os.fspath(path))) as source:
        return bytes(source.read(0, source.nbytes)).decode()


def read_text(path: str) -> bytes:
    """
    Return the content of a small file as UTF-8; a byte order mark may say that it is UTF-16.

    Raises:
        FileUnavailable: It cannot be read.
    """
    with about(path):
        source, _ = open_source(path)
    with about(path), closing(source):
        return as_utf8(source.read(0, source.nbytes))


def read_toml(path: str, kind: str, hint: str) -> dict[str, Any]:
    """
    Return the table in a file of TOML; ``kind`` and ``hint`` are for the error if it is malformed.

    Raises:
        MalformedFile: It is not TOML, or nested too deep.
        FileUnavailable: It cannot be read.
        MissingPackage: This Python cannot read TOML, and tomli is not installed.
    """
    try:
        import tomllib  # Python 3.10, whose support ended in 2026, has none
    except ImportError:
        try:
            import tomli as tomllib  # type: ignore[no-redef]
        except ImportError as error:
            raise MissingPackage.named("tomli", "pip install tomli") from error
    try:
        return tomllib.loads(str(read_text(path), "utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MalformedFile(f"no TOML: {error}", kind=kind, path=path, hint=hint) from error
    except RecursionError:
        raise MalformedFile("nested too deep", kind=kind, path=path, hint=hint) from None
