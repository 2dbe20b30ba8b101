"""
Processes that write files of a folder, and kill themselves at one call of the system.

The first one that reaches the call makes the file ``marker``, and dies; those after it find the file, and live.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ckptool import system

CALLS = (
    *("open", "write", "pwrite", "statvfs", "link", "replace", "rename", "fsync", "close", "unlink", "lseek"),
    *("pread", "preadv", "fstat", "lstat"),
)
OWN_CALLS = (
    ()
    if sys.platform != "win32"
    else (
        *("open_reading", "open_folder", "open_at", "open_new", "open_writing", "read_at", "read_into_at", "write_at"),
        *("give_name", "replace", "rename", "sync", "free_room"),
    )
)
"""What Windows is not asked through ``os``."""


def code(at: int, marker: Path, *, after: bool, always: bool = False) -> str:
    """Return what a process does first that is to die at a call, or ``after`` it."""
    return f"from tests.migration.dying import watch; watch({at}, {str(marker)!r}, {after}, {always})"


def watch(at: int, marker: str, after: bool, always: bool) -> None:
    """Let this process die, once it is given work."""
    from ckptool.cli import pool

    write, make = pool._Writing.__call__, os.open

    def die() -> None:
        try:
            os.close(make(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            if not always:
                return
        kill_me()

    def call(*arguments: Any) -> None:
        die_at(at, CALLS, after=after, die=die)
        setattr(pool._Writing, "__call__", write)  # noqa: B010
        write(*arguments)

    setattr(pool._Writing, "__call__", call)  # noqa: B010


def kill_me() -> None:
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows ends it at once, whatever the signal


def die_at(at: int, calls: Sequence[str], *, after: bool, die: Callable[[], None] = kill_me) -> Iterator[int]:
    """Let this process die at a call of the system, or ``after`` it; return what yields the number of the next one."""
    numbers = itertools.count(1)

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            mine = next(numbers)  # of all threads
            if mine == at and not after:
                die()
            try:
                return real(*args, **named)
            finally:  # after a call that failed, too
                if mine == at and after:
                    die()

        return call

    for name in filter(partial(hasattr, os), calls):
        setattr(os, name, watched(getattr(os, name)))
    for name in OWN_CALLS:
        setattr(system, name, watched(getattr(system, name)))
    return numbers
