"""The worker processes of ``migrate``, which share the files of one folder; if one dies, its file is written again."""

from __future__ import annotations

import json
import selectors
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Final

from ckptool.checking.asked import ENDED
from ckptool.cli.worker_process import WorkerProcess, are_enough, refuse_starts, started
from ckptool.errors import CkptoolError
from ckptool.migration.file_jobs import Job, Tell, Written

_MOST_DEATHS: Final = 2
"""At one file."""


class _Worker(WorkerProcess):
    """One process, and the job that it is at."""

    def __init__(self, job: Job, among: int) -> None:
        super().__init__(started("files", among), job.order._asdict())
        self.job: Job | None = None
        self.give(job)

    def give(self, job: Job) -> None:
        self.job = job
        self.send(job[1:])


class FileWriters:
    """What has the files of a folder written by so many processes of this machine."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __call__(self, jobs: Sequence[Job], tell: Tell) -> Generator[Written, None, None]:
        """
        Yield what was written, in the order in which it is done.

        Raises:
            CkptoolError: Two workers died at one job, workers cannot start, or what the first job that fails raises.
        """
        crew = _Crew(jobs, tell, min(self._count, len(jobs)))
        try:
            yield from crew.work()
        finally:
            crew.end()


class _Crew:
    def __init__(self, jobs: Sequence[Job], tell: Tell, count: int) -> None:
        self._count = count
        self._todo = list(reversed(jobs))
        self._tell = tell
        self._deaths = dict.fromkeys((job.number for job in jobs), 0)
        self._failed_starts = 0
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()

    def work(self) -> Generator[Written, None, None]:
        while True:
            while self._todo and sum(one.job is not None for one in self._workers) < self._count:
                self._start(self._todo.pop())
            if all(one.job is None for one in self._workers):
                return
            for key, _ in self._selector.select():
                worker: _Worker = key.data
                lines = worker.receive()
                if lines is None:
                    self._lost(worker)
                for line in lines or ():
                    self._failed_starts = 0
                    yield from self._answer(worker, json.loads(line))

    def _start(self, job: Job) -> None:
        idle = next((one for one in self._workers if one.job is None), None)
        if idle is not None:
            idle.give(job)
            return
        try:
            worker = _Worker(job, self._count)
        except OSError as error:
            self._count = are_enough(len(self._workers), error)
            self._todo.append(job)
            return
        self._workers.append(worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)

    def _answer(self, worker: _Worker, answer: dict[str, object]) -> Generator[Written, None, None]:
        match answer:
            case {"done": [int(number), int(written), int(read)]}:
                self._tell(number, written, read)
            case {"written": list(fields)}:
                done, worker.job = Written(*fields), None
                self._tell(done.number, done.nbytes, 0)
                yield done
            case {"error": dict(error)}:
                raise CkptoolError.from_plain(error)

    def _lost(self, worker: _Worker) -> None:
        """Have the job written again on which a worker died, unless two did."""
        self._selector.unregister(worker.output)
        self._workers.remove(worker)
        how, job = worker.end(), worker.job
        if not worker.is_ready:
            self._failed_starts += 1
            refuse_starts(self._failed_starts, how)
        elif job is not None:
            self._deaths[job.number] += 1
            if self._deaths[job.number] == _MOST_DEATHS:
                fact = f"{job.name!r} was not written: the process that wrote it {how}, as the one before it had ended"
                raise CkptoolError(fact, kind=ENDED, path=job.order.folder)
        if job is not None:
            self._todo.append(job)

    def end(self) -> None:
        """End all processes at once."""
        for worker in self._workers:
            with suppress(OSError):
                worker.kill()
        self._selector.close()
