"""
Processes that write files of a folder, and kill themselves at one call of the system.

The first one that reaches the call makes the file ``marker``, and dies; those after it find the file, and live.
"""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

CALLS = (
    *("open", "write", "pwrite", "fstatvfs", "link", "replace", "rename", "fsync", "close", "unlink", "lseek"),
    *("pread", "preadv", "fstat", "lstat"),
)


def code(at: int, marker: Path, *, after: bool, always: bool = False) -> str:
    """Return what a process does first that is to die at a call, or ``after`` it."""
    return f"from tests.migration.dying import watch; watch({at}, {str(marker)!r}, {after}, {always})"


def watch(at: int, marker: str, after: bool, always: bool) -> None:
    """Let this process die, once it is given work."""
    from ckptool.cli import migrate_pool

    write = migrate_pool._Writing.__call__

    def call(*arguments: Any) -> None:
        _watch(at, marker, after, always)
        setattr(migrate_pool._Writing, "__call__", write)  # noqa: B010
        write(*arguments)

    setattr(migrate_pool._Writing, "__call__", call)  # noqa: B010


def _watch(at: int, marker: str, after: bool, always: bool) -> None:
    numbers = itertools.count(1)
    make = os.open

    def die() -> None:
        try:
            os.close(make(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            if not always:
                return
        os.kill(os.getpid(), signal.SIGKILL)

    def watched(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **named: Any) -> Any:
            mine = next(numbers)  # of all threads
            if mine == at and not after:
                die()
            try:
                return real(*args, **named)
            finally:
                if mine == at and after:
                    die()

        setattr(os, name, call)

    for name in CALLS:
        watched(name)
