"""
Migrations by a pool of processes, with the same guarantees, results and reports as in one process.

If one migration writes a folder, each file is a job; if there are many migrations, each of them is. A job whose process
died is done again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from time import monotonic
from typing import Any, Final, TypeAlias

from ckptool.cli import pool as pools
from ckptool.cli.pool import Lost, Pool
from ckptool.errors import CkptoolError
from ckptool.migration.file_jobs import Job, Opened, Tell, Written
from ckptool.migration.migrate import migrate
from ckptool.migration.report import MigrationReport
from ckptool.sources.paths import is_relative, shown_path
from ckptool.sources.source import Progress

Outcome: TypeAlias = MigrationReport | CkptoolError

_SECONDS: Final = 0.1
"""Time between two answers about the progress of a file."""


class FileWriters:
    """Has the files of a folder written by a pool."""

    def __init__(self, pool: Pool, tries: int) -> None:
        self._pool = pool
        self._tries = tries
        """How often one file is tried."""

    def __call__(self, jobs: Sequence[Job], tell: Tell) -> Generator[Written, None, None]:
        """
        Yield what was written, in the order in which files are done.

        Raises:
            CkptoolError: Processes ended at one job again and again, cannot work, or what a job raises.
        """
        next_job = partial(next, iter(jobs), None)
        found = self._pool.answers(
            _Writing(), next_job, starts_here=lambda job: is_relative(job.source), tries=self._tries
        )
        with closing(found):
            for job, answer in (one for answers in found for one in answers):
                if isinstance(answer, Lost):
                    fact = f"{job.name!r} was not written: {self._tries} times, {answer.message}"
                    raise CkptoolError(fact, kind=answer.kind, path=job.folder)
                if isinstance(answer, Written):
                    tell(job.number, answer.nbytes, answer.nbytes if job.verifies else 0)
                    yield answer
                else:
                    tell(job.number, *answer)


class _Writing:
    """The work of a process. It keeps its source open between jobs: reading a large index again may take seconds."""

    _number: str | None = None
    _opened: Opened | None = None

    def __call__(self, jobs: Sequence[Job], tell: pools.Tell) -> None:
        """Do each job, and tell its progress."""
        for number, job in enumerate(jobs):
            try:
                tell(number, self._source_of(job).write(job, *_how_far(partial(tell, number, more=True))))
            except BaseException:
                self._let_go()
                raise

    def _source_of(self, job: Job) -> Opened:
        if self._number != job.order or self._opened is None:
            self._let_go()
            _Writing._opened, _Writing._number = Opened(job), job.order
        assert self._opened is not None
        return self._opened

    def _let_go(self) -> None:
        opened, _Writing._opened = self._opened, None
        if opened is not None:
            opened.close()


def _how_far(tell: partial[None]) -> tuple[Progress, Progress]:
    """Return two callbacks that tell, now and then, how many bytes of a job were written, and read back."""
    done, last = [0, 0], [monotonic()]

    def say(which: int, nbytes: int, _: int) -> None:
        done[which] = nbytes
        now = monotonic()
        if now - last[0] >= _SECONDS:
            last[0] = now
            tell(tuple(done))

    return partial(say, 0), partial(say, 1)


def outcomes(
    pool: Pool, work: Sequence[tuple[str, str | None]], arguments: dict[str, Any]
) -> Iterator[tuple[str, Outcome]]:
    """
    Yield each source with the report of its migration, or the error, in the order of the sources.

    A migration whose worker ended is done once more.

    Raises:
        CkptoolError: Workers cannot run this package.
    """
    has_model = arguments["changes"].model is not None
    items = iter([(number, *pair) for number, pair in enumerate(work)])
    done: dict[int, Outcome] = {}
    said = 0
    for answers in pool.answers(
        partial(_migrated, arguments),
        partial(next, items, None),
        starts_here=lambda item: has_model or any(map(is_relative, filter(None, item[1:]))),
    ):
        for (number, source, _), answer in answers:
            lost = isinstance(answer, Lost)
            done[number] = CkptoolError(answer.message, kind=answer.kind, path=shown_path(source)) if lost else answer
        while said in done:
            yield work[said][0], done.pop(said)
            said += 1


def _migrated(arguments: dict[str, Any], items: Sequence[tuple[int, str, str | None]], tell: pools.Tell) -> None:
    for number, (_, source, target) in enumerate(items):
        try:
            tell(number, migrate(source, target, **arguments))
        except CkptoolError as error:
            tell(number, error)
