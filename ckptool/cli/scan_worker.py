"""
What a worker process of ``scan`` does: it reads a task from each line, and answers with its number and a row.

Files here are looked at one after the other, those far away in threads, which mostly wait.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ckptool.checking.row import Asked, row
from ckptool.sources.stamps import stamp_of_version

READY = b"ready"
SAME = b"same"
"""The answer about a file far away whose version is the one that is known."""


def main() -> None:
    """Answer until there are no more lines, or nobody reads the answers."""
    gc.set_threshold(1_000_000)  # as in ``ckptool.__main__``
    lines, answers = sys.stdin.buffer, _Answers()
    begun = json.loads(lines.readline())
    work = _Work(Asked(**begun["asked"]))
    pool = ThreadPoolExecutor(begun["threads"])
    try:
        answers.write(READY)
        for line in lines:
            task = json.loads(line)
            if task["far"] is None:
                answers.give(task, work.row(task["path"], partial(answers.give, task)))
            else:
                pool.submit(lambda one: answers.give(one, work.far_row(one, partial(answers.give, one))), task)
        pool.shutdown()
    except (BrokenPipeError, KeyboardInterrupt):
        pool.shutdown(wait=False, cancel_futures=True)


class _Answers:
    """What the parent reads, a line at a time, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def write(self, line: bytes) -> None:
        with self._lock:
            sys.stdout.buffer.write(line + b"\n")
            sys.stdout.buffer.flush()

    def give(self, task: dict[str, Any], answer: bytes) -> None:
        self.write(b"%d %b" % (task["number"], answer))


class _Work:
    """What is asked, and the stores that were reached for it."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._stores: dict[tuple[str, str], Any] = {}

    def row(self, path: str, tell: Callable[[bytes], None]) -> bytes:
        """Return a row; tell of each tensor before, if they are asked for."""
        told = (lambda one: tell(_line(one))) if self._asked.tensors else None
        return _line(row(path, self._asked, tell=told) if told else row(path, self._asked))

    def far_row(self, task: dict[str, Any], tell: Callable[[bytes], None]) -> bytes:
        from ckptool.sources.remote.address import Remote
        from ckptool.sources.remote.opening import remote_version

        how = task["far"]
        address = Remote(task["path"], **how["reached"])
        address.stores = self._stores
        address.listed = None if how["listed"] is None else tuple(how["listed"])
        address.takes_end = True
        if how["known"] is not None:
            stamp = stamp_of_version((remote_version(address) or ())[2:])
            if stamp is not None and stamp.version == how["known"]:
                return SAME
        return self.row(address, tell)


def _line(found: dict[str, object]) -> bytes:
    return json.dumps(found, allow_nan=False).encode()
