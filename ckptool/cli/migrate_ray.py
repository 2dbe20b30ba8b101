"""
Migrations on Ray, with the guarantees, the results and the reports that they have on this machine.

Of many migrations, each is one task on one worker; of one that writes a folder, each file is.
"""

from __future__ import annotations

import filecmp
import os
import tempfile
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from ckptool.cli.on_ray import Lost, OnRay
from ckptool.errors import CkptoolError, OutputExists
from ckptool.migration.file_jobs import Job, Opened, Tell, Written
from ckptool.migration.migrate import migrate
from ckptool.migration.report import MigrationReport
from ckptool.sources.naming import is_far, shown_path

Outcome: TypeAlias = MigrationReport | CkptoolError


_TRIES: Final = 4
"""Of one file of a folder: machines that others may take away are lost more often than processes."""


class FileWriters:
    """What has the files of a folder written on Ray, as ``migrate_workers.FileWriters`` has by processes."""

    def __init__(self, ray: OnRay) -> None:
        self._ray = ray

    def __call__(self, jobs: Sequence[Job], tell: Tell) -> Generator[Written, None, None]:
        """
        Yield what was written, in the order in which it is done.

        Raises:
            CkptoolError: Workers ended at one job again and again, cannot run this package, or what a job raises.
        """
        found = self._ray.map(_write, jobs, folder=lambda job: _is_relative(job.order.source), tries=_TRIES)
        for job, written in found:
            if isinstance(written, Lost):
                fact = f"{job.name!r} was not written: {_TRIES} times, {written.message}"
                raise CkptoolError(fact, kind=written.kind, path=job.order.folder)
            tell(job.number, written.nbytes, written.nbytes if job.order.verifies else 0)
            yield written


class _Held:
    """What a worker has open between two files of one folder: to read a large index again may take seconds."""

    number: str | None = None
    opened: Opened | None = None


def _write(job: Job) -> Written:
    if _Held.number != job.order.number or _Held.opened is None:
        _let_go()
        _Held.opened = Opened(job.order)
        _Held.number = job.order.number
    try:
        return _Held.opened.write(job)
    except BaseException:
        _let_go()
        raise


def _let_go() -> None:
    opened, _Held.opened = _Held.opened, None
    if opened is not None:
        opened.__exit__(None, None, None)


class _Item(NamedTuple):
    """One migration, with its place among all."""

    number: int
    source: str
    target: str | None


def outcomes(
    ray: OnRay, work: Sequence[tuple[str, str | None]], arguments: dict[str, Any]
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
    for number, outcome in _each(ray, items, arguments):
        done[number] = outcome
        while said in done:
            yield work[said][0], done.pop(said)
            said += 1


def _each(ray: OnRay, items: Sequence[_Item], arguments: dict[str, Any]) -> Iterator[tuple[int, Outcome]]:
    """Yield the outcomes as they come, each with the number of its item."""
    starts_here = partial(_starts_here, has_model=arguments["changes"].model is not None)
    again: list[_Item] = []
    for item, outcome in ray.map(partial(_first, arguments), items, folder=starts_here, tries=1):
        if isinstance(outcome, Lost):
            again.append(item)
        else:
            yield item.number, outcome
    for item, outcome in ray.map(partial(_second, arguments), again, folder=starts_here, tries=1):
        if isinstance(outcome, Lost):
            outcome = CkptoolError(outcome.message, kind=outcome.kind, path=shown_path(item.source))
        yield item.number, outcome


def _starts_here(item: _Item, *, has_model: bool) -> bool:
    return has_model or any(map(_is_relative, (item.source, item.target or item.source)))


def _is_relative(path: str) -> bool:
    return not (is_far(path) or Path(path).is_absolute())


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
