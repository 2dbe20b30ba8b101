"""What an edit in place asks of the system, one method each: a test records them, stops them, replays them."""

from __future__ import annotations

import errno
import os
from typing import Final

_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
_NO_FOLDERS: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES, errno.ENOTSUP)
"""The error codes of file systems that cannot put a folder on the disk."""


class Operations:
    """The operations that change a file, a journal or a folder. Each is done when it returns, or raises OSError."""

    def create(self, path: str) -> int:
        """Return the descriptor of a new file, that nobody else may read: it holds bytes of another."""
        return os.open(path, _NEW, 0o600)

    def write(self, fd: int, offset: int, data: bytes) -> None:
        """Write bytes at an offset."""
        view = memoryview(data)
        while view:
            count = os.pwrite(fd, view, offset)
            offset += count
            view = view[count:]

    def truncate(self, fd: int, nbytes: int) -> None:
        """Set the size of a file."""
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        """Wait until what was written is on the disk."""
        os.fsync(fd)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name in its folder."""
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def sync_folder(self, path: str) -> None:
        """Wait until the names in a folder are on the disk, where the file system can do that."""
        fd = os.open(path or os.curdir, os.O_RDONLY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_FOLDERS:
                raise
        finally:
            os.close(fd)


OPERATIONS: Final = Operations()
