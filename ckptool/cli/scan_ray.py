"""The rows of ``scan`` from workers on Ray: the same tasks and the same lines as those of processes of this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ckptool.checking.asked import Asked, lost_row
from ckptool.checking.row_worker import answer_all
from ckptool.cli.on_ray import MOST_ITEMS, Lost, OnRay
from ckptool.cli.scan_workers import Task, message_of
from ckptool.sources.naming import is_far
from ckptool.sources.stamps import stamp_of


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
