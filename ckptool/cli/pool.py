"""
Pools of processes for ``scan`` and ``migrate``: starts them, and gives each the next batch when it is idle.

``Processes`` are new Pythons of this machine; ``on_ray`` has those of Ray. If a process dies, its items are tried
again; one is lost only if several died at it. Processes exchange pickles; no checkpoint has a part in that.

``FileWriters`` and ``migrations`` migrate by a pool, with the same guarantees, results and reports as in one process:
if one migration writes a folder, each file is an item; if there are many migrations, each of them is.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import ckptool.system as system
from ckptool.checking.scan import ENDED
from ckptool.errors import CkptoolError, as_ours, reason_of
from ckptool.sources.checksums import processors
from ckptool.sources.paths import is_relative, shown_path
from ckptool.sources.source import Closing, Progress

if TYPE_CHECKING:
    from ckptool.migration.file_jobs import Job, Opened, Written
    from ckptool.migration.file_jobs import Tell as TellFile
    from ckptool.migration.report import MigrationReport

T = TypeVar("T")
Outcome: TypeAlias = "MigrationReport | CkptoolError"

MOST_ITEMS: Final = 32
"""Most items of a batch."""
_ROUNDS: Final = 4
"""Batches begin small, so that all processes get work: one item, and one more for each round of so many per process."""
_MOST_STARTS: Final = 4
"""Failed starts in a row, after which no other is tried."""


class Lost(NamedTuple):
    """Stands for the answer about an item if processes ended while they worked on it alone."""

    kind: str
    message: str


class Tell(Protocol):
    """Called with an answer about the item of this number in a batch; with ``more``, it is not the last one."""

    def __call__(self, number: int, answer: Any, *, more: bool = False) -> None: ...


Work: TypeAlias = Callable[[Sequence[T], Tell], None]
"""Called with a batch, and with a function to call with a last answer about each item; it can be pickled."""


class Batch(NamedTuple):
    """Items given to one process together."""

    left: dict[int, Any]
    """The items that still lack their last answer, by number."""
    deaths: int = 0
    """How many processes ended while this was their only item."""


class Event(NamedTuple):
    """An event of a batch: an answer about one of its items, that it is done, or that its process ended."""

    handle: Any
    number: int = -1
    answer: Any = None
    more: bool = False


class Pool(Closing):
    """The processes that do the work; used in a ``with`` block."""

    @property
    def workers(self) -> int:
        """How many batches are done at once."""
        raise NotImplementedError

    @property
    def room(self) -> int:
        """How many batches may be given at once."""
        return self.workers

    def begin(self, work: Work[T], batch: Batch, *, starts_here: bool) -> Any:
        """Give a batch to a process, and return a handle of it; None if no process is available now."""
        raise NotImplementedError

    def events(self, handles: Sequence[Any]) -> Iterable[Event]:
        """Wait for an event of one of these batches, and return all events that there are by then."""
        raise NotImplementedError

    def stop(self, handles: Sequence[Any]) -> None:
        """End the processes of these batches, whose answers nobody waits for any more."""
        raise NotImplementedError

    def answers(
        self,
        work: Work[T],
        next_item: Callable[[], T | None],
        *,
        least: Callable[[T], int] = lambda _: 1,
        most: int = 1,
        starts_here: Callable[[T], bool] = lambda _: True,
        tries: int = 2,
    ) -> Generator[list[tuple[T, Any]], None, None]:
        """
        Yield lists of items with answers about them, in the order in which they come.

        Batches begin small and have up to ``most`` items, but at least as many as ``least`` returns for their first
        item. ``next_item`` is called when there is room for an item; if it returns None, it is called again after
        answers have been yielded. ``starts_here`` returns whether an item has paths relative to the folder of this
        process. Items whose process ended are tried again, each alone; an item is ``Lost`` if that happens in so many
        ``tries``.

        Raises:
            CkptoolError: Processes cannot work, or the work raised it.
        """
        running: dict[Any, Batch] = {}
        again: list[Batch] = []
        given = 0
        try:
            while True:
                while len(running) < self.room:
                    if not again:
                        found: list[T] = []
                        room = min(most, 1 + given // (self.workers * _ROUNDS))
                        while len(found) < room and (item := next_item()) is not None:
                            room = room if found else max(room, least(item))
                            found.append(item)
                        if not found:
                            break
                        given += len(found)
                        again.append(Batch(dict(enumerate(found))))
                    batch = again.pop()
                    handle = self.begin(work, batch, starts_here=any(map(starts_here, batch.left.values())))
                    if handle is None:
                        again.append(batch)
                        break
                    running[handle] = batch
                if not running:
                    return
                answers: list[tuple[T, Any]] = []
                for handle, number, answer, more in self.events(list(running)):
                    batch = running[handle]
                    if number in batch.left:
                        answers.append((batch.left[number] if more else batch.left.pop(number), answer))
                        continue
                    del running[handle]
                    if answer is None or not batch.left:
                        continue
                    deaths = batch.deaths + (len(batch.left) == 1)
                    if answer.kind == _NOT_BEGUN:
                        again.append(batch)
                    elif deaths < tries:
                        again += [Batch({0: item}, deaths) for item in batch.left.values()]
                    else:
                        answers += [(item, answer) for item in batch.left.values()]
                yield answers
        finally:
            self.stop(list(running))


_NOT_BEGUN: Final = "not-begun"
_NEW: Final = multiprocessing.get_context("spawn")


class _Process:
    """One process, and this process's end of the pipe to it."""

    def __init__(self, threads: int) -> None:
        self.pipe, theirs = _NEW.Pipe()
        self.has_begun = False
        self._work: Work[Any] | None = None
        self._process = _NEW.Process(target=_serve, args=(threads, theirs), daemon=True)
        if hasattr(signal, "pthread_sigmask"):
            resource_tracker.ensure_running()  # if it starts with the process, it lets an interrupt through
        with system.no_interrupt():  # this process gets it, and ends the others
            self._process.start()
        theirs.close()

    def give(self, work: Work[Any], items: Sequence[object]) -> None:
        """Start a batch. The work itself is sent only once, as it may keep state between batches."""
        with suppress(OSError):  # it has ended: the pipe says so next
            self.pipe.send((None if work is self._work else work, items))
        self._work = work

    def end(self) -> str:
        """End the process, and return how it ended, in words that follow "the process"."""
        self.pipe.close()
        self._process.join()
        code = self._process.exitcode or 0
        return (
            f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}, {signal.strsignal(-code)}"
        )

    def kill(self) -> None:
        """Kill the process: only the batch that it works on is lost."""
        self._process.kill()
        self.end()


class Processes(Pool):
    """New processes on this machine, up to a number, each started when there is work for it."""

    def __init__(self, count: int) -> None:
        self._count = min(count, system.MOST_PROCESSES)
        self._threads = max(1, processors() // count)
        self._idle: list[_Process] = []
        self._busy: list[_Process] = []
        self._failed_starts = 0

    @property
    def workers(self) -> int:
        """How many batches are done at once."""
        return self._count

    def begin(self, work: Work[T], batch: Batch, *, starts_here: bool) -> _Process | None:  # noqa: ARG002 - all do
        """Give a batch to a process; to a new one, if none is idle."""
        try:
            process = self._idle.pop() if self._idle else _Process(self._threads)
        except OSError as error:
            if not self._busy:
                raise CkptoolError(f"worker processes do not start: {reason_of(error)}", kind=ENDED) from error
            self._count = len(self._busy)
            return None
        self._busy.append(process)
        process.give(work, [*batch.left.values()])
        return process

    def events(self, handles: Sequence[_Process]) -> Iterator[Event]:
        """Yield the events of batches; raise what their work raised."""
        ready = wait([one.pipe for one in handles])
        for process in handles:
            while process.pipe in ready:
                try:
                    said = process.pipe.recv()
                except (EOFError, OSError):
                    yield Event(process, answer=self._ended(process))
                    break
                if isinstance(said, CkptoolError):
                    raise said
                if said == _BEGUN:
                    process.has_begun, self._failed_starts = True, 0
                elif said is None:
                    self._busy.remove(process)
                    self._idle.append(process)
                    yield Event(process)
                    break
                else:
                    yield Event(process, *said)
                if not process.pipe.poll():
                    break

    def _ended(self, process: _Process) -> Lost:
        self._busy.remove(process)
        how = process.end()
        if process.has_begun:
            return Lost(ENDED, f"the process that worked at it {how}")
        self._failed_starts += 1
        if self._failed_starts == _MOST_STARTS:
            raise CkptoolError(f"worker processes do not start: the last one {how}", kind=ENDED)
        return Lost(_NOT_BEGUN, how)

    def stop(self, handles: Sequence[_Process]) -> None:
        """End the processes of these batches."""
        for one in handles:
            if one in self._busy:
                self._busy.remove(one)
            one.kill()

    def close(self) -> None:
        """End all processes."""
        for one in (*self._idle, *self._busy):
            one.kill()
        self._idle, self._busy = [], []


_BEGUN: Final = "begun"


def _serve(threads: int, pipe: Connection) -> None:
    """Do batches until the parent closes its end of the pipe, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(1_000_000)  # as in ``ckptool.__main__``
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # torch's threads wait for each other by spinning
    lock = Lock()
    work: Any = None

    def tell(number: int, answer: Any, *, more: bool = False) -> None:
        with lock:
            try:
                pipe.send((number, answer, more))
            except OSError:  # nobody reads any more
                raise SystemExit from None

    with suppress(EOFError, OSError):
        pipe.send(_BEGUN)
        while True:
            other, items = pipe.recv()
            work = other or work
            try:
                work(items, tell)
                error = None
            except Exception as raised:  # noqa: BLE001 - the parent reports it
                error = as_ours(raised)
            pipe.send(error)


_SECONDS: Final = 0.1
"""Time between two answers about the progress of a file."""


class FileWriters:
    """Has the files of a folder written by a pool."""

    def __init__(self, pool: Pool, tries: int) -> None:
        self._pool = pool
        self._tries = tries
        """How often one file is tried."""

    def __call__(self, jobs: Sequence[Job], tell: TellFile) -> Generator[Written, None, None]:
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
                if isinstance(answer, _HowFar):
                    tell(job.number, *answer)
                else:
                    tell(job.number, job.nbytes, job.nbytes if job.verifies else 0)
                    yield answer


class _HowFar(NamedTuple):
    """How many bytes of a file were written, and read back."""

    written: int
    read_back: int


class _Writing:
    """The work of a process. It keeps its source open between jobs: reading a large index again may take seconds."""

    _number: str | None = None
    _opened: Opened | None = None

    def __call__(self, jobs: Sequence[Job], tell: Tell) -> None:
        """Do each job, and tell its progress."""
        from ckptool.migration.file_jobs import Opened

        for number, job in enumerate(jobs):
            try:
                if self._number != job.order or self._opened is None:
                    self._let_go()
                    _Writing._opened, _Writing._number = Opened(job), job.order
                assert self._opened is not None
                tell(number, self._opened.write(job, *_how_far(partial(tell, number, more=True))))
            except BaseException:
                self._let_go()
                raise

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
            tell(_HowFar(*done))

    return partial(say, 0), partial(say, 1)


def migrations(pool: Pool, work: Sequence[tuple[str, str | None]], arguments: dict[str, Any]) -> Iterator[Outcome]:
    """
    Yield the report of each migration, or the error, in the order of the sources.

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
            yield done.pop(said)
            said += 1


def _migrated(arguments: dict[str, Any], items: Sequence[tuple[int, str, str | None]], tell: Tell) -> None:
    from ckptool.migration.migrate import migrate

    for number, (_, source, target) in enumerate(items):
        try:
            tell(number, migrate(source, target, **arguments))
        except CkptoolError as error:
            tell(number, error)
