"""
Files that appear under their name only whole: the one place where anything is written.

An output is written without a name where the system can do that, else beside its place under a name of its own, and
gets its name by one rename or link. Whatever stood there before stands there until then. A killed process leaves
nothing, or one ``.<name>.ckptool-<pid>-….part`` that the next run removes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from ckptool.errors import OutputExists, OutputFailed
from ckptool.files import FileSource

if TYPE_CHECKING:
    from typing_extensions import Self

_MARK = ".ckptool-"
_END = ".part"


class Output:
    """One file being written. Used in a ``with`` block; without ``publish`` it leaves nothing behind."""

    def __init__(self, path: str, *, force: bool = False, progress: Callable[[int, int], None] | None = None) -> None:
        # A link stays a link: what it points to is replaced.
        self.path = os.path.realpath(path)
        self._force = force
        self._progress = progress
        self._expected = 0
        self._folder = os.path.dirname(self.path)
        self._refuse_what_is_there()
        _remove_orphans(self._folder, os.path.basename(self.path))
        self._temporary: str | None = None
        self._fd = -1
        self._open()
        self.position = 0
        """Bytes written so far."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """
        Append bytes.

        Raises:
            OutputFailed: The disk is full, or cannot be written to.
        """
        view = memoryview(data)
        try:
            while view:
                written = os.write(self._fd, view)
                self.position += written
                view = view[written:]
        except OSError as error:
            raise self._failed(error) from error
        if self._progress is not None:
            self._progress(self.position, self._expected)

    def reserve(self, nbytes: int) -> None:
        """
        Make sure that ``nbytes`` more will fit.

        Raises:
            OutputFailed: The file system has less free space, or allows no file of that size.
        """
        self._expected = nbytes
        if not hasattr(os, "fstatvfs"):
            return
        status = os.fstatvfs(self._fd)
        free = status.f_bavail * status.f_frsize
        if free < nbytes:
            raise OutputFailed(
                f"not enough space: {nbytes:,} bytes are needed, {free:,} are free",
                kind="disk-full",
                path=self.path,
                hint="Free some space, or write to another disk.",
                needed=nbytes,
                actual=free,
            )

    @property
    def nbytes(self) -> int:
        """Size of the file so far, whoever wrote to it."""
        return os.fstat(self._fd).st_size

    def reading_path(self) -> str:
        """Return a path that leads to what was written, before it has its name."""
        return self._temporary or f"/proc/self/fd/{self._fd}"

    def source(self) -> FileSource:
        """Return what was written, for reading back."""
        return FileSource(self.reading_path())

    def publish(self) -> None:
        """
        Give the file its name, in one step.

        Raises:
            OutputExists: Something took the name in the meantime.
            OutputFailed: The system did not let us.
        """
        try:
            replaced = os.path.lexists(self.path)
            if replaced and self._force:
                os.fchmod(self._fd, stat.S_IMODE(os.stat(self.path).st_mode))
                os.fsync(self._fd)  # the old file goes: the new one must be on the disk first
            self._link(replaced=replaced)
            if replaced and self._force:
                _sync_folder(self._folder)
        except FileExistsError as error:
            raise self._exists() from error
        except OSError as error:
            raise self._failed(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._temporary is not None:
            with suppress(FileNotFoundError):  # it may have its name now
                os.unlink(self._temporary)

    def _refuse_what_is_there(self) -> None:
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            if not os.path.isdir(self._folder):
                raise OutputFailed(
                    "no such folder", kind="no-folder", path=self._folder, hint="Make it first."
                ) from None
            return
        except OSError as error:
            raise self._failed(error) from error
        if not stat.S_ISREG(mode):
            raise OutputFailed("not a file that could be replaced", kind="not-a-file", path=self.path)
        if not self._force:
            raise self._exists()

    def _open(self) -> None:
        flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        try:
            self._fd = self._open_nameless(flags)
            if self._fd < 0:
                part = self._part_name()
                self._fd = os.open(part, flags | os.O_CREAT | os.O_EXCL, 0o666)
                self._temporary = part
        except OSError as error:
            raise self._failed(error) from error

    def _open_nameless(self, flags: int) -> int:
        """Return a file without a name, or -1 where the system or the file system has none."""
        if not hasattr(os, "O_TMPFILE") or not os.path.exists("/proc/self/fd"):
            return -1
        try:
            return os.open(self._folder, flags | os.O_TMPFILE, 0o666)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                return -1
            raise

    def _link(self, *, replaced: bool) -> None:
        if self._temporary is None:
            # A file without a name can only get one that is free: over an old file it goes in two steps.
            target = self._part_name() if replaced and self._force else self.path
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                # Only with a folder does Python ask the system to follow the link, which leads to the open file.
                os.link(f"/proc/self/fd/{self._fd}", target, src_dir_fd=folder, follow_symlinks=True)
            finally:
                os.close(folder)
            if target != self.path:
                self._temporary = target
                os.replace(target, self.path)
        elif self._force:
            os.replace(self._temporary, self.path)
        else:
            os.link(self._temporary, self.path)

    def _part_name(self) -> str:
        name = os.path.basename(self.path)
        return os.path.join(self._folder, f".{name}{_MARK}{os.getpid()}-{os.urandom(4).hex()}{_END}")

    def _exists(self) -> OutputExists:
        return OutputExists("exists already", path=self.path, hint="Choose another name, or overwrite it with --force.")

    def _failed(self, error: OSError) -> OutputFailed:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        kind = "disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "output-failed"
        return OutputFailed(f"cannot be written: {reason}", kind=kind, path=self.path)


def _remove_orphans(folder: str, name: str) -> None:
    """Remove what killed processes left of this output: parts whose process is gone."""
    head = f".{name}{_MARK}"
    try:
        found = [entry for entry in os.listdir(folder) if entry.startswith(head) and entry.endswith(_END)]
    except OSError:
        return
    for entry in found:
        pid = entry[len(head) :].partition("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            with suppress(OSError):  # not ours to remove
                os.unlink(os.path.join(folder, entry))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    else:
        return True


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
