"""
A worker process that writes files of a folder, and kills itself at one call of the system.

It is started in the place of a real one: ``START`` is what Python runs, with ``place(AT, after, marker)`` in front. The
first process that reaches the call makes the file ``marker``, and dies; those after it find the file, and live.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

from ckptool.migration.file_worker import main

ROOT = Path(__file__).parents[2]
CALLS = (
    *("open", "write", "pwrite", "fstatvfs", "link", "replace", "rename", "fsync", "close", "unlink", "lseek"),
    *("pread", "preadv", "fstat", "lstat"),
)


def start(at: int, marker: Path, *, after: bool, always: bool = False) -> str:
    """Return what Python runs in the place of a worker that dies at a call, or ``after`` it."""
    return (
        f"import sys; sys.path = sys.argv[1:] + [{str(ROOT)!r}]; from tests.migration.dying import run;"
        f" run({at}, {str(marker)!r}, {after}, {always})"
    )


def run(at: int, marker: str, after: bool, always: bool) -> None:
    numbers = itertools.count(1)
    lines, written = sys.stdin.buffer, sys.stdout.buffer
    make = os.open

    def die() -> None:
        try:
            os.close(make(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            if not always:
                return
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(name: str) -> None:
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
        watch(name)
    main(lines, written)
