"""
Write output files; each gets its name only when it is complete. Nothing else writes.

1. The output is written to a file without a name, where the system has such files, else to a temporary file in the
   same folder.
2. It gets its name by one link or rename, so nobody ever sees half a file. An old file keeps the name until then.
3. It takes over the old file's mode and, where the system allows, its owner and extended attributes. A new one allows
   nobody more than each file of its source does (``mode_of``).
4. A killed process leaves nothing, or one ``.<name>.ckptool-<pid>-….part`` that the next run removes; on Windows
   it may be an old file that was moved aside, ``….old``, which gets its name back. The writer locks its part: the id of
   a process on another host or in another container means nothing here.
5. Another name of the old file, a hard link, keeps the old file; ``other_names`` counts them.
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
from typing import TYPE_CHECKING, NamedTuple

import ckptool.system as system
from ckptool.closing import Closing
from ckptool.errors import OutputExists, OutputFailed, reason_of
from ckptool.messages import counted
from ckptool.sources.journal import refuse_edited

if TYPE_CHECKING:
    from concurrent.futures import Future

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
        self._mode = mode
        self._expected: int | None = None
        self.position = 0
        """Bytes appended so far, with those that still wait in memory."""
        self._waiting = bytearray()
        self._gap_end: int | None = None
        """Position to go on at after a gap, once it is filled: on Windows, writing elsewhere moves the file's own."""
        self._written = 0
        self.other_names = 0
        """How many other names (hard links) the replaced file has; they still lead to its old content."""
        self._folder = os.path.dirname(self.path)
        self._refuse_what_is_there()
        remove_orphans(self._folder, os.path.basename(self.path))
        self._open()

    def file(self, name: str) -> Output:  # noqa: ARG002 - it has one file
        """Return itself: it has one file."""
        return self

    @property
    def notes(self) -> tuple[str, ...]:
        """A note on other names of the replaced file, which still lead to its old content."""
        many = counted(self.other_names, "other name")
        text = f"the file that was replaced has {many} (a hard link), which still leads to what it was"
        return (text,) if self.other_names else ()

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
            self._replace()
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

    def _refuse_what_is_there(self) -> None:
        mode = mode_there(self.path, self._shown)
        if mode is None:
            return
        if not stat.S_ISREG(mode):
            raise OutputFailed("not a file that could be replaced", kind="not-a-file", path=self._shown)
        refuse_edited(self.path, "whole", "torn")
        if not self._force:
            raise self._exists()

    def _open(self) -> None:
        try:
            nameless = system.open_nameless(self._folder, self._mode)
            if nameless is None:
                self._temporary = new_name(self.path)  # known before it exists: an interrupt leaves nothing
                self._fd = system.open_new(self._temporary, self._mode)
            else:
                self._fd = nameless
            system.lock(self._fd)
        except OSError as error:
            self._temporary = None
            raise self._failed(error) from error

    def _replace(self) -> None:
        self.other_names = copy_attributes(self._fd, self.path)
        system.sync(self._fd)  # the old file goes: the new one must be on the disk first
        if self._temporary is None:
            # A file without a name can only get one that is free: over an old file it goes in two steps.
            self._temporary = new_name(self.path)
            system.give_name(self._fd, None, self._temporary)
        system.replace(self._fd, self._temporary, self.path, new_name(self.path, OLD_END))
        sync_folder(self._folder)

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
    fd = system.open_at(None, path) if stat.S_ISDIR(os.lstat(path).st_mode) else system.open_writing(path)
    try:
        status = os.fstat(fd)
        is_ours = system.lock(fd)
        if is_ours is False or (is_ours is None and time.time() - status.st_mtime < _ABANDONED_SECONDS):
            return
        if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
            _remove_or_restore(path, output, os.unlink if stat.S_ISREG(status.st_mode) else remove_folder)
    finally:
        os.close(fd)


def _remove_or_restore(path: str, output: str, remove: Callable[[str], None]) -> None:
    """Remove a part; what was moved aside gets its name back if that is free, or stays if it is not known."""
    if not path.endswith(OLD_END):
        remove(path)
    elif len(os.path.basename(output)) <= _NAME_CHARACTERS:
        if os.path.lexists(output):
            remove(path)
        else:
            system.rename(path, output)
