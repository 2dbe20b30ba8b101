"""
Migrations by a pool of processes, with the guarantees, the results and the reports that they have in one.

Of one migration that writes a folder, each file is a job; of many, each is. A job whose process died is done again.
"""

from __future__ import annotations

import filecmp
import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final, NamedTuple, TypeAlias

from ckptool.cli import pool as pools
from ckptool.cli.pool import Lost, Pool
from ckptool.errors import CkptoolError, OutputExists
from ckptool.migration.file_jobs import Job, Opened, Tell, Written
from ckptool.migration.migrate import migrate
from ckptool.migration.report import MigrationReport
from ckptool.sources.naming import is_far, is_relative, shown_path

Outcome: TypeAlias = MigrationReport | CkptoolError

_SECONDS: Final = 0.1
"""Between two answers about how far a file is."""


class FileWriters:
    """What has the files of a folder written by a pool."""

    def __init__(self, pool: Pool, tries: int) -> None:
        self._pool = pool
        self._tries = tries
        """Of one file."""

    def __call__(self, jobs: Sequence[Job], tell: Tell) -> Generator[Written, None, None]:
        """
        Yield what was written, in the order in which it is done.

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
    """What a process does; it keeps open what it has read of a folder: to read a large index again may take seconds."""

    _number: str | None = None
    _opened: Opened | None = None

    def __call__(self, jobs: Sequence[Job], tell: pools.Tell) -> None:
        """Do each job, and tell how far it is."""
        for number, job in enumerate(jobs):
            far = _HowFar(partial(tell, number, more=True))
            try:
                tell(number, self._source_of(job).write(job, far.progress, far.read_back))
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


class _HowFar:
    """Tells how many bytes of a job were written, and read back."""

    def __init__(self, tell: partial[None]) -> None:
        self._tell = tell
        self._done = [0, 0]
        self._last = monotonic()

    def progress(self, done: int, _: int) -> None:
        self._say(0, done)

    def read_back(self, done: int, _: int) -> None:
        self._say(1, done)

    def _say(self, which: int, done: int) -> None:
        self._done[which] = done
        now = monotonic()
        if now - self._last >= _SECONDS:
            self._last = now
            self._tell(tuple(self._done))


class _Item(NamedTuple):
    """One migration, with its place among all."""

    number: int
    source: str
    target: str | None


def outcomes(
    pool: Pool, work: Sequence[tuple[str, str | None]], arguments: dict[str, Any]
) -> Iterator[tuple[str, Outcome]]:
    """
    Yield each source with the report of its migration, or the error, in the order of the sources.

    A migration whose worker ended is done once more, after all others.

    Raises:
        CkptoolError: Workers cannot run this package.
    """
    items = [_Item(number, *pair) for number, pair in enumerate(work)]
    done: dict[int, Outcome] = {}
    said = 0
    for number, outcome in _each(pool, items, arguments):
        done[number] = outcome
        while said in done:
            yield work[said][0], done.pop(said)
            said += 1


def _each(pool: Pool, items: Sequence[_Item], arguments: dict[str, Any]) -> Iterator[tuple[int, Outcome]]:
    """Yield the outcomes as they come, each with the number of its item."""
    starts_here = partial(_starts_here, has_model=arguments["changes"].model is not None)
    again: list[_Item] = []
    for tried, todo in ((_first, items), (_second, again)):
        left = iter(todo)
        for answers in pool.answers(
            partial(_all, tried, arguments), partial(next, left, None), starts_here=starts_here, tries=1
        ):
            for item, outcome in answers:
                if not isinstance(outcome, Lost):
                    yield item.number, outcome
                elif tried is _first:
                    again.append(item)
                else:
                    yield item.number, CkptoolError(outcome.message, kind=outcome.kind, path=shown_path(item.source))


def _all(
    migrated: Callable[[dict[str, Any], _Item], Outcome],
    arguments: dict[str, Any],
    items: Sequence[_Item],
    tell: pools.Tell,
) -> None:
    for number, item in enumerate(items):
        tell(number, migrated(arguments, item))


def _starts_here(item: _Item, *, has_model: bool) -> bool:
    return has_model or any(map(is_relative, (item.source, item.target or item.source)))


def _first(arguments: dict[str, Any], item: _Item) -> Outcome:
    try:
        return migrate(item.source, item.target, **arguments)
    except CkptoolError as error:
        return error


def _second(arguments: dict[str, Any], item: _Item) -> Outcome:
    """Migrate once more: the first worker may have ended between giving a file its name and saying so."""
    outcome = _first(arguments, item)
    if not isinstance(outcome, OutputExists) or outcome.path is None or is_far(outcome.path):
        return outcome
    with tempfile.TemporaryDirectory(dir=os.path.dirname(outcome.path) or ".", prefix=".ckptool-") as folder:
        written = _first(arguments, item._replace(target=os.path.join(folder, os.path.basename(outcome.path))))
        if isinstance(written, MigrationReport) and _is_same(Path(written.target), Path(outcome.path)):
            return written._replace(target=outcome.path)
    return outcome


def _is_same(one: Path, other: Path) -> bool:
    """Say whether two files, or all that is in two folders, are the same byte for byte."""
    if not one.is_dir():
        return other.is_file() and filecmp.cmp(one, other, shallow=False)
    names = [sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) for root in (one, other)]
    return names[0] == names[1] and not any(filecmp.cmpfiles(one, other, names[0], shallow=False)[1:])
