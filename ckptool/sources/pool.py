"""
Few open files of many: those that were used longest ago are closed, and opened again when they are read.

A folder may hold more files than a process may have open. What is opened again is compared with what was there before.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from ckptool.cancellation import Cancellation
from ckptool.errors import CkptoolError, SourceChanged
from ckptool.sources.files import FileSource
from ckptool.sources.source import CLOSED

_MOST_OPEN: Final = 128


class Pool:
    """Counts who reads which file: a file is not closed while somebody does. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users: OrderedDict[PooledFile, int] = OrderedDict()
        """For each open file, how many reads of it are on their way; the one used last is at the end."""

    @contextmanager
    def using(self, file: PooledFile) -> Iterator[None]:
        """Keep a file open for a block."""
        with self._lock:
            if file not in self._users:
                file.open_again()
            self._users[file] = self._users.get(file, 0) + 1
            self._users.move_to_end(file)
            if len(self._users) > _MOST_OPEN:
                self._close_idle()
        try:
            yield
        finally:
            with self._lock:
                if file in self._users:
                    self._users[file] -= 1

    def drop(self, file: PooledFile) -> None:
        """Forget a file that is closed for good."""
        with self._lock:
            self._users.pop(file, None)

    def _close_idle(self) -> None:
        idle = [file for file, users in self._users.items() if not users]
        for file in idle[: len(self._users) - _MOST_OPEN]:
            del self._users[file]
            file.rest()


class PooledFile(FileSource):
    """A file of a folder. ``reopen`` returns a new descriptor of what has its name now."""

    def __init__(
        self, path: str, cancellation: Cancellation | None, *, fd: int, pool: Pool, reopen: Callable[[], int]
    ) -> None:
        self._pool = pool
        self._reopen = reopen
        self._is_closed = False
        super().__init__(path, cancellation, fd=fd)
        with pool.using(self):
            pass  # from now on it may be closed

    def open_again(self) -> None:
        """Get a descriptor, if there is none; called by the pool alone."""
        if self._is_closed:
            raise ValueError(CLOSED)
        if self._fd >= 0:
            return
        try:
            fd = self._reopen()
        except CkptoolError as error:
            raise SourceChanged(f"it was there, and is not any more: {error.message}", path=self.path) from error
        self._fd = fd
        try:
            super().check_unchanged()
        except BaseException:
            self.rest()
            raise

    def rest(self) -> None:
        """Give the descriptor up until the next read."""
        super().close()

    def read(self, offset: int, nbytes: int) -> bytes:
        with self._pool.using(self):
            return super().read(offset, nbytes)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from ``offset``."""
        with self._pool.using(self):
            super().read_into(offset, buffer)

    def read_rows(self, offset: int, rows: Sequence[memoryview]) -> None:
        """Fill several buffers from ``offset``, one after the other."""
        with self._pool.using(self):
            super().read_rows(offset, rows)

    def map(self) -> mmap.mmap:
        """Map the whole file; the mapping stays when the file is closed."""
        with self._pool.using(self):
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
        self._is_closed = True
        self._pool.drop(self)
        super().close()
