"""
Few descriptors for many files and folders: those that were used longest ago are closed, and opened again when needed.

A checkpoint may be more files than a process may have open, and so may several together: one pool has all of them.
What is opened again is compared with what was there before.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar

from ckptool.errors import CkptoolError, SourceChanged
from ckptool.sources.siblings import NO_DESCRIPTOR, open_folder

if sys.platform != "win32":
    import resource

_T = TypeVar("_T")

_MOST_OPEN: Final = 128
_FEWEST_OPEN: Final = 4
_SHARE: Final = 4
"""Of the descriptors that the process may have, one in so many is for the pool."""


def most_open() -> int:
    """Return how many files and folders the pool may have open."""
    allowed = _allowed()
    return _MOST_OPEN if allowed is None else max(_FEWEST_OPEN, min(_MOST_OPEN, allowed // _SHARE))


def _allowed() -> int | None:
    """Return how many descriptors the process may have; None if as many as it likes."""
    if sys.platform == "win32":
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


class Pooled(Protocol):
    """What the pool closes and opens again; ``users`` are those that need it open now."""

    users: int

    @property
    def is_resting(self) -> bool:
        """Whether it has no descriptor now."""
        ...

    def reopen(self) -> int:
        """Return a new descriptor of what has its name now."""
        ...

    def open_again(self, fd: int) -> None:
        """Take a new descriptor, or close it and raise SourceChanged: it is of something else."""
        ...

    def rest(self) -> None:
        """Give the descriptor up until the next use."""
        ...


class Pool:
    """Counts who uses what: nothing is closed while somebody does. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: OrderedDict[int, weakref.ref[Pooled]] = OrderedDict()
        """By identity; what was used last is at the end. Whoever forgets to close a checkpoint leaves nothing open."""

    def add(self, one: Pooled) -> None:
        """From now on something that is open may be closed."""
        with self._lock:
            self._open[id(one)] = weakref.ref(one)
            self._make_room(most_open())

    def drop(self, one: Pooled) -> None:
        """Forget what is closed for good."""
        with self._lock:
            self._open.pop(id(one), None)

    @contextmanager
    def using(self, one: Pooled) -> Iterator[None]:
        """Keep something open for a block."""
        with self._lock:
            is_new = one.is_resting
            if is_new:
                one.open_again(self._reopened(one))
                self._open[id(one)] = weakref.ref(one)
            elif id(one) in self._open:
                self._open.move_to_end(id(one))
            one.users += 1
            if is_new:
                self._make_room(most_open())
        try:
            yield
        finally:
            with self._lock:
                one.users -= 1

    def opened(self, opening: Callable[[], _T]) -> _T:
        """Return what ``opening`` opens. If no descriptor is left for it, what nobody uses gives up its own."""
        try:
            return opening()
        except CkptoolError as error:
            if error.kind != NO_DESCRIPTOR:
                raise
        with self._lock:
            self._make_room(0)
        return opening()

    def _reopened(self, one: Pooled) -> int:
        try:
            return self.opened(one.reopen)
        except CkptoolError as error:
            if error.kind == NO_DESCRIPTOR:
                raise
            hint = "Read it again once it is complete."
            raise SourceChanged(f"it was there, and is not any more: {error.message}", hint=hint) from error

    def _make_room(self, most: int) -> None:
        """Close what was used longest ago and is not used now, until no more than so many are open."""
        for key, known in list(self._open.items()) if len(self._open) > most else ():
            if len(self._open) <= most:
                return
            one = known()
            if one is None or not one.users:
                self._open.pop(key, None)
                if one is not None:
                    one.rest()

    def after_fork(self) -> None:
        """Forget the lock, which a thread of the parent may hold."""
        self._lock = threading.RLock()


POOL: Final = Pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=POOL.after_fork)


def refuse_many_mappings(fd: int) -> None:
    """Raise OSError if half of all descriptors are taken: each mapping has one of its own, until Python 3.13."""
    allowed = _allowed()
    if allowed is not None:
        lowest = os.dup(fd)
        os.close(lowest)
        if lowest > allowed // 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class PooledFolder:
    """An open directory, which names can be opened below, and which is the same one when it is opened again."""

    _fd = -1

    def __init__(self, path: str, opening: Callable[[], int]) -> None:
        self.users = 0
        self._path = path
        self._fd = POOL.opened(opening)
        self._place = _place(self._fd)
        POOL.add(self)

    @property
    def is_resting(self) -> bool:
        """Whether it has no descriptor now."""
        return self._fd < 0

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """
        Keep the folder open for a block, and give its descriptor.

        Raises:
            SourceChanged: Another folder has its path by now.
        """
        with POOL.using(self):
            yield self._fd

    def reopen(self) -> int:
        """Return a new descriptor of what has its path now."""
        return open_folder(self._path)

    def open_again(self, fd: int) -> None:
        """Take a new descriptor; called by the pool alone."""
        if _place(fd) != self._place:
            os.close(fd)
            hint = "Read it again once it is complete."
            raise SourceChanged("another folder has its name by now", hint=hint, path=self._path)
        self._fd = fd

    def rest(self) -> None:
        """Give the descriptor up until the next use."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """Give the descriptor up; a file that was opened in it, and does not end with it, may need it again."""
        POOL.drop(self)
        self.rest()

    def __del__(self) -> None:
        if not self.is_resting:
            self.close()


def _place(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
