"""
Opens files and folders for writing; each gets its name only when it is complete. Nothing else writes.

1. The output is written to a file without a name, where the system has such files, else to a temporary file in the
   same folder.
2. It gets its name by one link or rename, so nobody ever sees half a file. An old file keeps the name until then.
3. It takes over the old file's mode and, where the system allows, its owner and extended attributes. A new one allows
   nobody more than each file of its source does (``mode_of``).
4. A killed process leaves nothing, or one ``.<name>.ckptool-<pid>-….part`` that the next run removes; on Windows
   it may be an old file that was moved aside, ``….old``, which gets its name back. The writer locks its part: the id of
   a process on another host or in another container means nothing here.
5. Another name of the old file, a hard link, keeps the old file; ``notes`` counts them.

Folders get their name only when they are complete:

1. Files are written into a temporary folder beside, ``.<name>.ckptool-<pid>-….part``, each as ``Output`` does it.
2. The folder gets its name by one rename. What had the name is moved aside by another just before,
   to ``.<name>.ckptool-<pid>-….old``, and is removed when the new one has the name and is on the disk.
3. It takes over the old folder's mode and, where the system allows, its owner and extended attributes.
4. A killed process leaves such folders, which the next run removes; one that was moved aside gets its name back if
   nothing has it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import ckptool.system as system
from ckptool.errors import OutputExists, OutputFailed, reason_of
from ckptool.messages import counted, some
from ckptool.sources.journal import refuse_edited
from ckptool.sources.paths import is_remote
from ckptool.sources.source import Closing, Source

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ckptool.migration.output.remote import RemoteFolderOutput, RemoteObject, RemoteOutput

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SPACE = "Free some space, or write to another disk."
_WAITING_NBYTES = 1 << 20


class Output(Closing):
    """
    One file being written. Used in a ``with`` block; without ``publish`` it leaves nothing.

    An error of the system raises OutputFailed; an existing file that is not to be replaced, OutputExists.
    """

    takes_any_order = True
    replaced = ()

    def __init__(
        self,
        path: str,
        *,
        force: bool = False,
        progress: Callable[[int, int], None] | None = None,
        shown: str | None = None,
        mode: int = 0o666,
    ) -> None:
        self._fd = -1
        self._temporary: str | None = None
        self._syncing: Future[None] | None = None
        self.path = real_path(path)
        self._shown = shown or self.path
        self._force = force
        self._progress = progress
        self._expected: int | None = None
        self.position = 0
        """Bytes appended so far, with those that still wait in memory."""
        self._waiting = bytearray()
        self._gap_end: int | None = None
        """Position to go on at after a gap, once it is filled: on Windows, writing elsewhere moves the file's own."""
        self._written = 0
        self.notes: tuple[str, ...] = ()
        self._folder = os.path.dirname(self.path)
        if (there := mode_there(self.path, self._shown)) is not None:
            if not stat.S_ISREG(there):
                raise OutputFailed("not a file that could be replaced", kind="not-a-file", path=self._shown)
            refuse_edited(self.path, "whole", "torn")
            if not force:
                raise self._exists()
        remove_orphans(self._folder, os.path.basename(self.path))
        try:
            nameless = system.open_nameless(self._folder, mode)
            if nameless is None:
                self._temporary = new_name(self.path)  # known before it exists: an interrupt leaves nothing
                self._fd = system.open_new(self._temporary, mode)
            else:
                self._fd = nameless
            system.lock(self._fd)
        except OSError as error:
            self._temporary = None
            raise self._failed(error) from error

    def file(self, name: str) -> Output:  # noqa: ARG002 - it has one file
        """Return itself: it has one file."""
        return self

    def narrow(self, mode: int) -> None:
        """Remove permissions that ``mode`` lacks, for callers that learn the mode of a source once this is open."""
        system.narrow(self._fd, mode)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """
        Append bytes.

        Raises:
            OutputFailed: The disk is full, or cannot be written to.
        """
        self.position += len(data)
        if len(self._waiting) + len(data) > _WAITING_NBYTES:
            self.flush()
        if len(data) > _WAITING_NBYTES:
            self._write_out(memoryview(data))
        else:
            self._waiting += data

    def flush(self) -> None:
        """Hand the bytes that wait to the system; only then is the file complete."""
        waiting, self._waiting = self._waiting, bytearray()
        self._write_out(memoryview(waiting))

    def _write_out(self, view: memoryview) -> None:
        try:
            if self._gap_end is not None and view:
                os.lseek(self._fd, self._gap_end, os.SEEK_SET)
                self._gap_end = None
            while view:
                count = os.write(self._fd, view)
                self._written += count
                view = view[count:]
        except OSError as error:
            raise self._failed(error) from error
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._written, self._expected or 0)

    def leave(self, nbytes: int) -> int:
        """Leave a gap of ``nbytes`` bytes that ``fill`` will write, in any order, and return its offset."""
        self.flush()
        start, self.position = self.position, self.position + nbytes
        self._gap_end = self.position
        return start

    def fill(self, position: int, view: memoryview) -> None:
        """Write bytes into a gap. Threads may call this at once."""
        try:
            system.write_at(self._fd, view, position)
        except OSError as error:
            raise self._failed(error) from error

    def filled(self, nbytes: int) -> None:
        """Count bytes that ``fill`` has written."""
        self._written += nbytes
        self._tell()

    def reserve(self, nbytes: int) -> None:
        """Raise OutputFailed unless ``nbytes`` more bytes will fit."""
        self._expected = nbytes
        refuse_full(self._fd, nbytes, self._shown)

    @property
    def nbytes(self) -> int:
        """Size of the file so far in bytes, whoever wrote to it."""
        self.flush()
        try:
            return os.fstat(self._fd).st_size
        except OSError as error:
            raise self._failed(error) from error

    def clone(self, fd: int) -> None:
        """Take the content of an open file, on a file system where ``clones_to`` reports that files can share bytes."""
        try:
            system.clone(self._fd, fd, self._temporary)
            system.lock(self._fd)  # macOS makes another file of it
        except OSError as error:
            raise self._failed(error) from error

    def reading_path(self, name: str = "") -> str:  # noqa: ARG002 - it has one file
        """Return a path at which the flushed bytes can be read while the file has no name yet."""
        return self._temporary or system.path_of(self._fd)

    def sync(self) -> None:
        """
        Begin to put what was written on the disk; ``publish`` waits for it.

        After that, the name never leads to an incomplete file, even if the power fails. Reading back meanwhile
        hides nearly all of the time that it takes.
        """
        from concurrent.futures import ThreadPoolExecutor  # slow to import, and a plan needs none

        pool = ThreadPoolExecutor(1)
        self._syncing = pool.submit(system.sync, self._fd)
        pool.shutdown(wait=False)

    def publish(self) -> None:
        """Give the file its name, in one step. Before it replaces an old file, it is on the disk, ``sync`` or not."""
        self.flush()
        try:
            if self._syncing is not None:
                self._syncing.result()
            if not (self._force and os.path.lexists(self.path)):
                try:
                    system.give_name(self._fd, self._temporary, self.path)
                except FileExistsError as error:
                    if not self._force:
                        raise self._exists() from error
                else:
                    return
            if others := copy_attributes(self._fd, self.path):
                many = f"{counted(others, 'other name')} (a hard link)"
                self.notes = (f"the file that was replaced has {many}, which still leads to what it was",)
            system.sync(self._fd)  # the old file goes: the new one must be on the disk first
            if self._temporary is None:
                # A file without a name can only get one that is free: over an old file it goes in two steps.
                self._temporary = new_name(self.path)
                system.give_name(self._fd, None, self._temporary)
            system.replace(self._fd, self._temporary, self.path, new_name(self.path, OLD_END))
            sync_folder(self._folder)
        except OSError as error:
            raise self._failed(error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError as failure:  # some network drives report errors only now
            if error is None:
                raise self._failed(failure) from failure

    def close(self) -> None:
        """Close the file, and remove it if it has no name yet."""
        if self._syncing is not None:
            self._syncing.exception()  # waits for it: it uses the descriptor
        fd, self._fd = self._fd, -1
        temporary, self._temporary = self._temporary, None
        try:
            if fd >= 0:
                os.close(fd)
        finally:
            if temporary is not None:
                with suppress(OSError):  # it may have its name now
                    os.unlink(temporary)

    def __del__(self) -> None:
        with suppress(OSError):  # an interrupt may come before the block is entered
            self.close()

    def _exists(self) -> OutputExists:
        return OutputExists(
            "exists already", path=self._shown, hint="Choose another name, or overwrite it with `force=True`."
        )

    def _failed(self, error: OSError) -> OutputFailed:
        return failed(error, self._shown, self._written, self._expected)


def real_path(path: str) -> str:
    """Return the path of what is written: a link stays a link, and what it points to is replaced."""
    if "\0" in path:
        raise OutputFailed("not a path", kind="not-a-path")
    if system.is_no_file(path):
        fact = "cannot be written: Windows takes the name for a device, or for a stream of another file"
        raise OutputFailed(fact, kind="not-a-path", path=path, hint="Choose another name.")
    return os.path.realpath(path)


def mode_there(path: str, shown: str) -> int | None:
    """Return the mode of what is at a path, or None if nothing is; errors name ``shown``."""
    folder = os.path.dirname(path)
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        if not os.path.isdir(folder):
            raise OutputFailed("no such folder", kind="no-folder", path=folder, hint="Make it first.") from None
        return None
    except OSError as error:
        raise failed(error, shown) from error


def refuse_full(fd: int, nbytes: int, path: str) -> None:
    """
    Raise OutputFailed if the file system of an open file or folder has less than ``nbytes`` bytes free.

    The error names ``path``.
    """
    try:
        free = system.free_room(fd)
    except OSError:  # writing will tell
        return
    if free < nbytes:
        raise OutputFailed(
            f"not enough space: {nbytes:,} bytes are needed, {free:,} are free",
            kind="disk-full",
            path=path,
            hint=_SPACE,
            needed=nbytes,
            actual=free,
        )


def copy_attributes(fd: int, path: str) -> int:
    """
    Give an open file or folder the mode of what is at a path, and its owner and attributes as far as permitted.

    Return how many other names (hard links) that has.
    """
    try:
        old = os.stat(path)
    except FileNotFoundError:  # it was removed in the meantime
        return 0
    system.copy_attributes(fd, path, old)
    return old.st_nlink - 1


def failed(error: OSError, path: str, written: int = 0, expected: int | None = None) -> OutputFailed:
    """Return the exception for an error of the system after ``written`` bytes, of ``expected`` in all."""
    what = f"cannot be written: {reason_of(error)}"
    if error.errno not in _FULL:
        return OutputFailed(what, kind="output-failed", path=path)
    return OutputFailed(
        f"{what} after {written:,}{f' of {expected:,}' if expected else ''} bytes",
        kind="disk-full",
        path=path,
        hint=_SPACE,
        needed=expected,
        actual=written,
    )


def sync_folder(folder: str) -> None:
    """Put names in a folder on the disk, where the file system can. The names are there even if this fails."""
    with suppress(OSError):
        system.sync_folder(folder)


_MARK = ".ckptool-"
_END = ".part"
OLD_END = ".old"
"""Suffix of what was moved aside for a new version: folders, and files that the system cannot replace while open."""
_NAME_CHARACTERS = 48
"""Characters of the output's name in the temporary one, which must not become too long if the name is not."""
_MOST_TRIES = 10
_PID = re.compile(r"[0-9]{1,9}")
_ABANDONED_SECONDS = 86_400
"""On file systems without locks, a part that was not written to for so long is abandoned."""


class Place(NamedTuple):
    """The temporary place of a file of a folder: plain data, for any process."""

    path: str
    """A path, or an address with how it is reached."""
    shown: str
    """The path to show in errors."""


def new_name(path: str, end: str = _END) -> str:
    """Return a temporary path for an output, in its folder."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{_head(name)}{os.getpid()}-{os.urandom(4).hex()}{end}")


def remove_orphans(folder: str, name: str) -> None:
    """
    Remove what killed processes left of this output: parts whose process has ended and that nobody holds a lock on.

    What was moved aside gets its name back, if that is free.
    """
    head = _head(name)
    try:
        found = [entry for entry in os.listdir(folder) if entry.startswith(head) and entry.endswith((_END, OLD_END))]
    except OSError:
        return
    for entry in found:
        pid = entry[len(head) :].partition("-")[0]
        if _PID.fullmatch(pid) and not system.is_alive(int(pid)):
            with suppress(OSError):  # not ours to remove
                _remove_unheld(os.path.join(folder, entry), os.path.join(folder, name))


def remove_folder(path: str) -> None:
    """
    Remove a folder and the files in it; folders in it are not ours, and stay.

    It tries again if files have appeared meanwhile: another process may not know yet that the work is over.
    """
    for _ in range(_MOST_TRIES):
        with os.scandir(path) as entries:
            remove_others(path, [one.name for one in entries if one.is_dir(follow_symlinks=False)])
        with suppress(OSError):
            os.rmdir(path)
            return
    os.rmdir(path)


def remove_others(folder: str, names: Collection[str]) -> None:
    """Remove the files of a folder that are not in ``names``."""
    with os.scandir(folder) as entries:
        others = [one.path for one in entries if one.name not in names]
    for one in others:
        with suppress(FileNotFoundError):
            os.unlink(one)


def _head(name: str) -> str:
    return f".{name[:_NAME_CHARACTERS]}{_MARK}"


def _remove_unheld(path: str, output: str) -> None:
    """Remove a part that nobody holds; what was moved aside gets its name back if that is free and known."""
    fd = system.open_at(None, path) if stat.S_ISDIR(os.lstat(path).st_mode) else system.open_writing(path)
    try:
        status, is_ours = os.fstat(fd), system.lock(fd)
        is_file, is_folder = stat.S_ISREG(status.st_mode), stat.S_ISDIR(status.st_mode)
        is_held = is_ours is False or (is_ours is None and time.time() - status.st_mtime < _ABANDONED_SECONDS)
        is_unknown = path.endswith(OLD_END) and len(os.path.basename(output)) > _NAME_CHARACTERS
        if is_held or is_unknown or not (is_file or is_folder):
            return
        if path.endswith(OLD_END) and not os.path.lexists(output):
            system.rename(path, output)
        else:
            (os.unlink if is_file else remove_folder)(path)
    finally:
        os.close(fd)


SinkFile: TypeAlias = "Output | RemoteObject"
"""A file that is being written."""
SinkFolder: TypeAlias = "OutputFolder | RemoteFolderOutput"
"""A folder that is being written: its files here, or by other processes."""
Sink: TypeAlias = "Output | RemoteOutput | OutputFolder | RemoteFolderOutput"
"""An output: a single file, or a folder."""
_IN_THE_WAY: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


def open_sink(
    target: str, *, is_folder: bool, force: bool, progress: Callable[[int, int], None] | None, mode: int
) -> Sink:
    """
    Return the output for a file or a folder.

    Raises:
        OutputExists: Something is there, and is not to be replaced; remote folders are never replaced.
        OutputFailed: It cannot be written to.
    """
    if not is_remote(target):
        if is_folder:
            return OutputFolder(target, force=force, progress=progress, mode=mode)
        return Output(target, force=force, progress=progress, mode=mode)
    from ckptool.migration.output.remote import RemoteFolderOutput, RemoteOutput  # few targets are remote
    from ckptool.sources.address import as_remote

    if is_folder:
        return RemoteFolderOutput(as_remote(target), progress=progress)
    return RemoteOutput(as_remote(target), force=force, progress=progress)


def open_place(place: Place, progress: Callable[[int, int], None] | None, mode: int) -> SinkFile:
    """Return the output for a file of another process's folder. Others may write the same file."""
    if not is_remote(place.path):
        return Output(place.path, force=True, progress=progress, shown=place.shown, mode=mode)
    from ckptool.migration.output.remote import RemoteObject
    from ckptool.sources.address import as_remote
    from ckptool.sources.remote.bucket import Stored

    stored = Stored(as_remote(place.path))
    return RemoteObject(stored, place.shown, stored.key, progress)


def mode_of(source: Source) -> int:
    """Return the mode of files made from a source, which allows nobody more than each of its files does."""
    mode = 0o666
    for path, _ in source.versions():
        with suppress(OSError, ValueError):  # remote
            mode &= os.stat(path).st_mode
    return mode | stat.S_IRUSR  # to be read back


class OutputFolder(Closing):
    """One folder being written. Used in a ``with`` block as ``Output`` is, with its errors."""

    def __init__(
        self, path: str, *, force: bool = False, progress: Callable[[int, int], None] | None = None, mode: int = 0o666
    ) -> None:
        self._fd = -1
        self._temporary: str | None = None
        self.path = real_path(path)
        self._force = force
        self._progress = progress
        self._mode_of_files = mode
        self._expected = 0
        self._written = 0
        self._names: set[str] = set()
        self._beside = os.path.dirname(self.path)
        remove_orphans(self._beside, os.path.basename(self.path))
        self.replaced = self._refuse_what_is_there()
        """Names of the files in the folder that is to be replaced."""
        self._temporary = new_name(self.path)  # known before it exists: an interrupt leaves nothing
        try:
            os.mkdir(self._temporary)
            self._fd = system.open_at(None, self._temporary)
            system.lock(self._fd)
        except OSError as error:
            raise failed(error, self.path) from error

    def reserve(self, nbytes: int) -> None:
        """Raise OutputFailed unless ``nbytes`` bytes will fit."""
        self._expected = nbytes
        refuse_full(self._fd, nbytes, self.path)

    def file(self, name: str) -> Output:
        """Return a file to be written; it is in the folder once it is published."""
        before = self._written

        def progress(written: int, _: int) -> None:
            if before + written <= self._written:  # a file before this one, which gets its name
                return
            self._written = before + written
            if self._progress is not None:
                self._progress(self._written, self._expected)

        self._names.add(name)
        return Output(
            self.reading_path(name), progress=progress, shown=os.path.join(self.path, name), mode=self._mode_of_files
        )

    def elsewhere(self, name: str, nbytes: int) -> Place:
        """Return where another process writes a file of ``nbytes`` bytes; they count as written from now on."""
        self._names.add(name)
        self._written += nbytes
        return Place(self.reading_path(name), os.path.join(self.path, name))

    @property
    def notes(self) -> tuple[str, ...]:
        """A note on the files of the replaced folder that are gone."""
        gone = [name for name in self.replaced if name not in self._names]
        text = f"the folder that was replaced had {counted(len(gone), 'other file')}, now removed: {some(gone)}"
        return (text,) if gone else ()

    def reading_path(self, name: str = "") -> str:
        """Return the path of the folder, or of a file in it, while it is written, for reading back."""
        return os.path.join(self._temporary or self.path, name)

    def publish(self) -> None:
        """Give the folder its name."""
        assert self._temporary is not None  # it has no other name yet
        if os.path.isdir(self.path):
            copy_attributes(self._fd, self.path)
        try:
            remove_others(self._temporary, self._names)  # left by processes that were killed as they wrote
            sync_folder(self._temporary)
            aside = self._take_name(self._temporary)
        except OSError as error:
            raise failed(error, self.path) from error
        self._temporary = None
        sync_folder(self._beside)
        for path in aside:
            with suppress(OSError):  # what cannot be removed has a name that says whose it is
                remove_folder(path)

    def close(self) -> None:
        """Remove the folder if it has no name yet."""
        fd, self._fd = self._fd, -1
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            with suppress(OSError):
                remove_folder(temporary)
        if fd >= 0:
            os.close(fd)  # it held the folder until now

    def __del__(self) -> None:
        with suppress(OSError):  # an interrupt may come before the block is entered
            self.close()

    def _refuse_what_is_there(self) -> list[str]:
        """Return the names of the files in a folder that may be replaced; empty if there is no folder."""
        mode = mode_there(self.path, self.path)
        if mode is None:
            return []
        if not stat.S_ISDIR(mode):
            what = "not a folder, and a folder is to be written"
            raise OutputFailed(what, kind="not-a-folder", path=self.path, hint="Choose another name.")
        try:
            with os.scandir(self.path) as entries:
                found = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
            is_current = os.path.samefile(self.path, os.curdir)
        except OSError as error:
            raise failed(error, self.path) from error
        if found and not self._force:
            raise self._exists()
        folders = sorted(name for name, is_folder in found.items() if is_folder)
        if folders or is_current or os.path.ismount(self.path):
            what = "it is the current folder" if is_current else "it is a file system of its own"
            what = f"it has {counted(len(folders), 'folder')} in it: {some(folders)}" if folders else what
            hint = "Write to a folder that is not there yet."
            what = f"a folder that is not replaced: {what}"
            raise OutputFailed(what, kind="not-replaced", path=self.path, hint=hint)
        return sorted(found)

    def _take_name(self, temporary: str) -> list[str]:
        """Give the folder its name, and return where its predecessors were moved: others may take it meanwhile."""
        aside: list[str] = []
        try:
            while not self._is_renamed(temporary):
                with suppress(FileNotFoundError):  # others may take the name, or give it up, meanwhile
                    if not (self._force and stat.S_ISDIR(os.lstat(self.path).st_mode)):
                        raise self._exists()
                    place = new_name(self.path, OLD_END)
                    system.rename(self.path, place)
                    aside.append(place)
        except BaseException:
            if aside:
                with suppress(OSError):
                    system.rename(aside[-1], self.path)
            raise
        return aside

    def _is_renamed(self, temporary: str) -> bool:
        try:
            system.rename(temporary, self.path)  # in the place of an empty folder too
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
            return False
        return True

    def _exists(self) -> OutputExists:
        return OutputExists(
            "exists already, and is not empty",
            path=self.path,
            hint="Choose another name, or replace the folder and all that is in it with `force=True`.",
        )
