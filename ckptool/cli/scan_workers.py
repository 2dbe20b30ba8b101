"""The worker processes of ``scan``, here or on Ray: one that dies costs the row of the file that it is at."""

from __future__ import annotations

import json
import selectors
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ckptool.checking.asked import ENDED, TENSORS, Asked, lost_row
from ckptool.checking.row_worker import answer_all
from ckptool.cli.on_ray import MOST_ITEMS, Lost, OnRay
from ckptool.cli.targets import Target
from ckptool.cli.worker_process import Copy, WorkerProcess, are_enough, can_copy, refuse_starts, started
from ckptool.closing import Closing
from ckptool.sources.naming import is_far
from ckptool.sources.paths import file_nbytes
from ckptool.sources.stamps import stamp_of

if TYPE_CHECKING:
    from subprocess import Popen


HEAD_OF_TENSOR: Final = f'{{"schema": "{TENSORS}", '.encode()
_ROOM_NBYTES: Final = 3 << 14
"""Of what a worker has waiting: a pipe has room for it, so that nobody waits to write while nobody reads."""
_OF_ONE_FILE: Final = 4
"""Parts of one file far away that are fetched at once: many files are."""
_MANY: Final = 64
"""Small files that one worker has waiting, so that their rows are taken several at a time; of one alone, any files."""
_SMALL_NBYTES: Final = 8 << 20
_AT_ONCE: Final = 8
"""Tasks that a worker is told of together: it has others meanwhile, unless it takes long to find the next."""
_ENOUGH: Final = 32
"""Of files that each worker has left, so that answers need not be taken at once,"""
_PAUSE: Final = 0.05
"""but after so many seconds, or fewer where workers have few left by then."""
_SHORTEST: Final = 0.001
_FEW: Final = 16


class Task:
    """One checkpoint to look at."""

    __slots__ = ("is_far", "known", "nbytes", "target")

    def __init__(self, target: Target, known: str | None = None) -> None:
        self.target = target
        self.known = known
        """The version of which there is a row, where only its server knows whether that is the one that is there."""
        self.is_far = is_far(target.path)
        self.nbytes = _told_nbytes(self)
        """How much a worker is told of it at most."""

    @property
    def is_small(self) -> bool:
        """Whether it is a file here that is looked at in a moment."""
        nbytes = file_nbytes(self.target.path)
        return nbytes is not None and nbytes <= _SMALL_NBYTES


def _told_nbytes(task: Task) -> int:
    """Return the bytes of what a worker is told of a task: in JSON, a letter takes two bytes, or twelve."""
    path = task.target.path
    if task.is_far:
        return len(json.dumps(message_of(task, 0)))
    return len(path) * (2 if path.isascii() and path.isprintable() else 12)


Answer: TypeAlias = tuple[Task, bytes]
"""A task, and a line about it."""


class Worker(WorkerProcess):
    """One process, and the tasks that it was given: of files here, it is at the first of them."""

    def __init__(self, asked: Asked, threads: int) -> None:
        super().__init__(_process(), {"asked": asked._asdict(), "threads": threads})
        self.tasks: dict[int, Task] = {}
        self.nbytes = 0
        """Of what it was told of these."""
        self._given = 0
        self._untold: list[object] = []

    def give(self, task: Task) -> None:
        """Give it a task: it waits for one, or the pipe has room for it. It is told of several together."""
        is_idle = not self.tasks
        self._given += 1
        self.tasks[self._given] = task
        self.nbytes += task.nbytes
        self._untold.append(message_of(task, self._given) if task.is_far else str(task.target.path))
        if is_idle or task.is_far or len(self._untold) >= _AT_ONCE:
            self.tell()

    def tell(self) -> None:
        """Tell it all that it was given."""
        if self._untold:
            self.send(*self._untold)
            self._untold = []

    @property
    def has_enough(self) -> bool:
        """Whether it has work for a while; files far away are many at once, and each that is done leaves a thread."""
        return len(self.tasks) > _ENOUGH and not next(iter(self.tasks.values())).is_far

    def suspects(self) -> list[Task]:
        """Return the tasks at one of which it may have died: the first, and all that threads were at."""
        tasks = list(self.tasks.values())
        return tasks[:1] + [one for one in tasks[1:] if one.is_far]

    def answers(self, lines: Iterable[bytes]) -> list[Answer]:
        """Return answers, each with its task: the rows of tensors, and last the one with which the task is done."""
        found: list[Answer] = []
        for line in lines:
            number, _, answer = line.partition(b" ")
            task = self.tasks[int(number)]
            if not answer.startswith(HEAD_OF_TENSOR):
                self.nbytes -= self.tasks.pop(int(number)).nbytes
            found.append((task, answer))
        return found


def _process() -> Popen[bytes] | Copy:
    """Start a process that makes rows: copies of this one have what they need in memory."""
    if not can_copy():
        return started("rows")
    from ckptool.checking.row_worker import main  # nothing else here looks into a file

    return Copy(main)


class Crew(Closing):
    """So many workers at most, started when there is work for them; used in a ``with`` block."""

    def __init__(self, asked: Asked, jobs: int, connections: int) -> None:
        self._asked = asked
        self._jobs = jobs
        self._threads = -(-connections // jobs)
        """Of each worker, for files far away."""
        # What takes long is given one by one, so that none waits behind it while another worker is free.
        reads_all = asked.deep or asked.digest
        self._is_alone = jobs == 1
        self._ahead = 1 if reads_all else 2
        self._ahead_of_small = self._ahead if reads_all else _MANY
        self._workers: list[Worker] = []
        self._again: list[Task] = []
        """What was waiting behind a file on which a worker died, and this file, once."""
        self._tried: set[str] = set()
        self._failed_starts = 0
        self._pause = _PAUSE
        self._selector = selectors.DefaultSelector()

    def rows(self, next_task: Callable[[], Task | None]) -> Iterator[list[Answer]]:
        """
        Yield tasks with their rows, as lines, in the order in which they are done; before, the rows of their tensors.

        A task is asked for when there is room for it; if there is none, once more when rows have been taken.

        Raises:
            CkptoolError: Workers cannot start.
        """
        task: Task | None = None
        while True:
            if task is None:
                task = self._again.pop() if self._again else next_task()
            worker = self._free(task) if task is not None else None
            if task is not None and worker is not None:
                worker.give(task)
                task = None
            elif any(one.tasks for one in self._workers):
                yield from self._answers()
            else:
                return

    def _free(self, task: Task) -> Worker | None:
        """Return the worker to give a task to, a new one if there may be more; None if all are busy."""
        least = min(self._workers, key=lambda one: len(one.tasks), default=None)
        if least is not None and not least.tasks:
            return least
        if len(self._workers) < self._jobs:
            try:
                worker = Worker(self._asked, self._threads)
            except OSError as error:
                self._jobs = are_enough(len(self._workers), error)
                return self._free(task)
            self._workers.append(worker)
            self._selector.register(worker.output, selectors.EVENT_READ, worker)
            return worker
        return least if least is not None and self._has_room(least, task) else None

    def _has_room(self, worker: Worker, task: Task) -> bool:
        """Say whether a worker that is at something may be given more; on what was tried before, it may die."""
        if self._tried and any(one.target.path in self._tried for one in (task, *worker.tasks.values())):
            return False
        if worker.nbytes + task.nbytes > _ROOM_NBYTES:
            return False
        count = len(worker.tasks)
        if count < self._ahead or task.is_far:
            return count < (self._threads if task.is_far else self._ahead)
        return count < self._ahead_of_small and (self._is_alone or task.is_small)

    def _answers(self) -> Iterator[list[Answer]]:
        """Wait for answers, and yield them."""
        for one in self._workers:
            one.tell()
        if len(self._workers) == self._jobs and all(one.has_enough for one in self._workers):
            sleep(self._pause)  # each time that this process wakes up takes longer than to take an answer
        for key, _ in self._selector.select():
            worker: Worker = key.data
            lines = worker.receive()
            if lines is None:
                yield self._lost(worker)
                continue
            self._failed_starts = 0 if lines else self._failed_starts
            found = worker.answers(lines)
            self._pause = max(_SHORTEST, min(_PAUSE, self._pause * (0.5 if len(worker.tasks) < _FEW else 1.5)))
            yield found

    def _lost(self, worker: Worker) -> list[Answer]:
        """Try what a worker died at once more, alone, as something else may have killed it; then return its row."""
        self._selector.unregister(worker.output)
        self._workers.remove(worker)
        how = worker.end()
        if not worker.is_ready:
            self._again += worker.tasks.values()
            self._failed_starts += 1
            refuse_starts(self._failed_starts, how)
            return []
        found: list[Answer] = []
        suspects = worker.suspects()
        self._again += (one for one in worker.tasks.values() if one not in suspects)
        for one in suspects:
            path = one.target.path
            if path not in self._tried:
                self._tried.add(path)
                self._again.append(one)
            else:
                row = lost_row(path, self._asked, ENDED, f"the process that looked at it {how}")
                found.append((one, json.dumps(row).encode()))
        return found

    def close(self) -> None:
        """End all workers at once."""
        for worker in self._workers:
            worker.kill()
        self._selector.close()


def message_of(task: Task, number: int) -> dict[str, object]:
    """Return what a worker is told of a task."""
    return {"number": number, "path": str(task.target.path), "far": _far(task) if task.is_far else None}


def _far(task: Task) -> dict[str, object]:
    """Return how a worker is to reach a file far away, and what is known of it."""
    from ckptool.sources.remote.address import as_remote

    address = as_remote(task.target.path)
    reached = {"endpoint": address.endpoint, "region": address.region, "anonymous": address.anonymous}
    return {"reached": {**reached, "connections": _OF_ONE_FILE}, "listed": address.listed, "known": task.known}


class Fleet:
    """What ``Crew`` is, on Ray."""

    def __init__(self, asked: Asked, ray: OnRay, connections: int) -> None:
        self._asked = asked
        self._ray = ray
        self._connections = connections

    def rows(self, next_task: Callable[[], Task | None]) -> Iterator[list[tuple[Task, bytes]]]:
        """
        Yield tasks with their rows, as ``Crew`` does.

        Raises:
            CkptoolError: Workers cannot run this package.
        """
        given: dict[int, Task] = {}
        count = 0

        def next_message() -> dict[str, Any] | None:
            nonlocal count
            task = next_task()
            if task is None:
                return None
            count += 1
            given[count] = task
            return message_of(task, count)

        def nbytes(message: dict[str, Any]) -> int:
            stamp = stamp_of(given[message["number"]].target.path)
            return stamp.nbytes if stamp else 0

        threads = -(-self._connections // self._ray.workers)
        work = partial(answer_all, self._asked, threads)
        for message, found in self._ray.batches(
            work, next_message, nbytes, most=max(MOST_ITEMS, threads), folder=_starts_here
        ):
            task = given.pop(message["number"])
            lines = [self._lost(task, found)] if isinstance(found, Lost) else found
            yield [(task, line) for line in lines]

    def _lost(self, task: Task, why: Lost) -> bytes:
        return json.dumps(lost_row(task.target.path, self._asked, why.kind, why.message)).encode()


def _starts_here(message: dict[str, Any]) -> bool:
    return not (is_far(message["path"]) or Path(message["path"]).is_absolute())
