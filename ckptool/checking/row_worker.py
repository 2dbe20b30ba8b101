"""
What a worker process of ``scan`` does: it reads a task from each line, and answers with the line's number and a row.

The task of a file here is its path, that of a file far away is a dict, which says how it is reached.

Files here are looked at one after the other, those far away in threads, which mostly wait. Workers that others start
call ``answer_all`` with a list of tasks.
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from ckptool.checking.asked import READY, SAME, Asked, lost_row
from ckptool.checking.row import row
from ckptool.errors import Failure, let_go
from ckptool.sources.stamps import stamp_of_version

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor


def main(lines: BinaryIO, written: BinaryIO) -> None:
    """Answer until there are no more lines, or nobody reads the answers."""
    gc.set_threshold(1_000_000)  # as in ``ckptool.__main__``
    answers = _Answers(written)
    begun = json.loads(lines.readline())
    work = _Work(Asked(**begun["asked"]))
    pool: ThreadPoolExecutor | None = None
    try:
        answers.write(READY)
        for number, line in enumerate(lines, 1):
            task = json.loads(line)
            give = partial(answers.give, number)
            if isinstance(task, str):
                give(work.row(task, give))
            else:
                pool = pool or _threads(begun["threads"])
                pool.submit(_do, work, task, give)
        if pool is not None:
            pool.shutdown()
    except (BrokenPipeError, KeyboardInterrupt):
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def answer_all(asked: Asked, threads: int, tasks: Sequence[dict[str, Any]]) -> list[list[bytes]]:
    """Return what ``main`` would write about each task, the rows of tensors first."""
    work = _Work(asked)
    found: list[list[bytes]] = [[] for _ in tasks]
    far = sum(task["far"] is not None for task in tasks)
    with _threads(min(threads, far)) if far else nullcontext() as pool:
        for task, lines in zip(tasks, found, strict=True):
            if pool is not None and task["far"] is not None:
                pool.submit(_do, work, task, lines.append)
        for task, lines in zip(tasks, found, strict=True):
            if task["far"] is None:
                lines.append(work.row(task["path"], lines.append))
    return found


def _threads(count: int) -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # files here need none

    return ThreadPoolExecutor(count)


def _do(work: _Work, task: dict[str, Any], give: Callable[[bytes], None]) -> None:
    """Answer a task in a thread: whatever goes wrong, there is an answer, which somebody waits for."""
    try:
        answer = work.far_row(task, give)
    except Exception as error:  # noqa: BLE001 - nobody would see it
        let_go(error)
        answer = _line(lost_row(task["path"], Asked(), "unforeseen", f"{type(error).__name__}: {error}"))
    give(answer)


class _Answers:
    """What the parent reads, a line at a time, from any thread."""

    def __init__(self, written: BinaryIO) -> None:
        self._written = written
        self._lock = threading.Lock()

    def write(self, line: bytes) -> None:
        with self._lock:
            self._written.write(line + b"\n")
            self._written.flush()

    def give(self, number: int, answer: bytes) -> None:
        self.write(b"%d %b" % (number, answer))


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
            with suppress(Failure):  # which opening says again
                stamp = stamp_of_version((remote_version(address) or ())[2:])
                if stamp is not None and stamp.version == how["known"]:
                    return SAME
        return self.row(address, tell)


_TEXT_OF: Final = json.JSONEncoder(allow_nan=False, check_circular=False).encode


def _line(found: dict[str, object]) -> bytes:
    return _TEXT_OF(found).encode()
