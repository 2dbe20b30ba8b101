"""
Ray as what runs a function over many items: on the cores of this machine, or on those of a cluster.

Ray is an extra, imported when it is asked for. Its workers are processes with this package. What they are sent and what
they answer are pickles, from one of these processes to another: no checkpoint has a part in that. A Ray that is started
here takes orders from this process alone, and ends with it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from ckptool import __version__
from ckptool.checking.asked import ENDED
from ckptool.cli.options import LOCAL
from ckptool.closing import Closing
from ckptool.errors import CkptoolError, MissingPackage
from ckptool.sources.checksums import processors

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
R = TypeVar("R")

_COMMAND: Final = "pip install 'ckptool[ray]'"
_UNAVAILABLE: Final = "ray-unavailable"
MOST_ITEMS: Final = 32
_MOST_NBYTES: Final = 64 << 20
"""Of a batch: what is larger by itself is alone in one."""
_ROUNDS: Final = 4
"""Batches of a worker by which all that was given so far would be done: they begin small, so that all have work."""
_AHEAD: Final = 2
"""Batches of a worker that are given to Ray at once: one that it is at, and one that waits."""
_SECONDS: Final = 10
"""To wait for an answer; and after which the workers of a cluster, which may grow, are counted again."""
_PORT: Final = 10001
"""Of Ray's clients, for addresses that have none."""
_STORE_NBYTES: Final = 256 << 20
"""For answers on their way. By default, Ray takes a third of the memory."""


def _always(_item: object) -> bool:
    return True


def _nothing(_item: object) -> int:
    return 0


class Lost(NamedTuple):
    """In the place of a result: workers ended while they had this item, and no other."""

    kind: str
    message: str


class OnRay(Closing):
    """
    A Ray that runs functions; used in a ``with`` block.

    At an address it is a cluster that others use, too. ``jobs`` is how many tasks there are at once, by default as many
    as there are cores.

    Raises:
        MissingPackage: Ray is not installed.
        CkptoolError: There is no Ray at the address, or it does not start.
    """

    def __init__(self, address: str, jobs: int | None = None) -> None:
        self._address = address
        self._jobs = jobs
        self._counted = (0, -float(_SECONDS))
        if address == LOCAL:
            # Its ports are open to the network, and whoever may use them may run anything. Read when it is imported.
            import secrets

            for name, value in (("MODE", "token"), ("TOKEN", secrets.token_hex(32))):
                os.environ.setdefault(f"RAY_AUTH_{name}", value)
            os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # of half a minute each
        self._ray = _need_ray()

    def __enter__(self) -> Self:
        settings: dict[str, Any] = {"address": self._address}
        if self._address == LOCAL:
            settings |= {"num_cpus": self._jobs or processors(), "object_store_memory": _STORE_NBYTES}
            settings |= {"include_dashboard": False}
        elif self._address != "auto":
            self._refuse_silence()
        here = Path.cwd()
        os.chdir(os.sep)  # its workers import what lies in the folder in which it is started
        try:
            self._ray.init(**settings, log_to_driver=False, logging_level="CRITICAL")
        except (self._ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
            self._ray.shutdown()
            where = "does not start" if self._address == LOCAL else f"cannot be used at {self._address}"
            raise CkptoolError(f"Ray {where}: {_first_line(error)}", kind=_UNAVAILABLE) from error
        finally:
            os.chdir(here)
        # What it says of workers that ended goes to standard output, where results are.
        self._ray._private.worker._worker_logs_enabled = False  # noqa: SLF001
        return self

    def _refuse_silence(self) -> None:
        """Refuse an address at which nothing answers: Ray would try for minutes."""
        from ckptool.sources.remote.connections import is_answered

        if not is_answered(self._address.removeprefix("ray://"), _PORT, _SECONDS):
            hint = "Give the address that 'ray start' printed."
            raise CkptoolError(f"nothing answers at {self._address}", kind=_UNAVAILABLE, hint=hint)

    def close(self) -> None:
        """Leave the cluster."""
        self._ray.shutdown()

    @property
    def workers(self) -> int:
        """How many tasks are done at once."""
        count, counted = self._counted
        if monotonic() - counted >= _SECONDS:
            count = int(self._ray.cluster_resources().get("CPU", 1))
            self._counted = count, monotonic()
        return max(1, count if self._jobs is None else min(count, self._jobs))

    @property
    def _room(self) -> int:
        """How many tasks Ray is given: a cluster may do all at once, so no more than were asked for."""
        is_asked = self._jobs is not None and self._address != LOCAL
        return self.workers if is_asked else self.workers * _AHEAD

    def map(
        self,
        function: Callable[[T], R],
        items: Iterable[T],
        *,
        nbytes: Callable[[T], int] | None = None,
        folder: Callable[[T], bool] = _always,
        tries: int = 2,
    ) -> Iterator[tuple[T, R | Lost]]:
        """
        Yield each item with what the function returns for it, in the order in which they are done.

        Both must be picklable. Each item is a task by itself, unless ``nbytes`` says how much work it is: then small
        ones share one. ``folder`` says whether an item has paths that start from the folder that this process is in:
        then the worker is there, too. An item whose worker ended is tried again, without others; it is ``Lost`` when
        that has happened so many ``tries``.

        Raises:
            CkptoolError: A worker cannot run the function, or it raised.
        """
        most = MOST_ITEMS if nbytes is not None else 1
        pull, one = partial(next, iter(items), None), partial(_each, function)
        return self.batches(one, pull, nbytes or _nothing, most=most, folder=folder, tries=tries)

    def batches(
        self,
        function: Callable[[Sequence[T]], Sequence[R]],
        next_item: Callable[[], T | None],
        nbytes: Callable[[T], int],
        *,
        most: int = MOST_ITEMS,
        folder: Callable[[T], bool] = _always,
        tries: int = 2,
    ) -> Iterator[tuple[T, R | Lost]]:
        """
        Do what ``map`` does with a function of up to ``most`` items.

        An item is asked for when there is room for it; if there is none, once more when results have been taken.
        """
        ray, here = self._ray, str(Path.cwd())
        task = ray.remote(max_retries=0)(_run)  # which would try the whole batch again and again
        given = ray.put(function)
        running: dict[Any, _Batch] = {}
        again: list[_Batch] = []
        items = _Items(next_item, nbytes)
        try:
            while True:
                while len(running) < self._room:
                    if not again:
                        found = items.batch(min(most, 1 + items.count // (self.workers * _ROUNDS)))
                        if not found:
                            break
                        again.append(_Batch(found, 0))
                    batch = again.pop()
                    start = here if any(map(folder, batch.items)) else None
                    running[task.remote(__version__, start, given, batch.items)] = batch
                if not running:
                    return
                (done,), _ = ray.wait(list(running))
                batch = running.pop(done)
                answer = self._answer(done)
                if not isinstance(answer, Lost):
                    yield from zip(batch.items, answer, strict=True)
                elif len(batch.items) > 1:
                    again += (_Batch([one], 0) for one in batch.items)
                elif batch.deaths + 1 < tries:
                    again.append(_Batch(batch.items, batch.deaths + 1))
                else:
                    yield batch.items[0], answer
        finally:
            if running and ray.is_initialized():  # else it has ended with all that it did
                for one in running:
                    ray.cancel(one, force=True)
                ray.wait(list(running), num_returns=len(running), timeout=_SECONDS)  # none writes any more

    def _answer(self, done: Any) -> Any:
        """Return what a task returned; Lost if its worker ended."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(done)
        except errors.OutOfMemoryError:
            return Lost("out-of-memory", "its node had not enough memory, and Ray ended the process that worked at it")
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError):
            return Lost(ENDED, "the process on Ray that worked at it ended")
        except errors.RayTaskError as error:
            if isinstance(error.cause, CkptoolError):
                raise error.cause from error
            fact = f"Ray's workers cannot do this: {_first_line(error.cause)}"
            hint = "All nodes need this version of ckptool, with the packages that this takes."
            raise CkptoolError(fact, kind="ray-failed", hint=hint) from error
        except errors.RayError as error:
            raise CkptoolError(f"Ray cannot do this: {_first_line(error)}", kind="ray-failed") from error


class _Batch(NamedTuple):
    """Items of one task."""

    items: Sequence[Any]
    deaths: int
    """How many workers ended while they had the only one."""


class _Items(Generic[T]):
    """The items that are still to be given, in batches."""

    def __init__(self, next_item: Callable[[], T | None], nbytes: Callable[[T], int]) -> None:
        self._next = next_item
        self._nbytes = nbytes
        self._held: T | None = None
        """The first of the next batch, for which this one had no room."""
        self.count = 0

    def batch(self, most: int) -> list[T]:
        """Return the next items, at most so many; none if there are none now."""
        found: list[T] = []
        left = _MOST_NBYTES
        while len(found) < most and (item := self._next() if self._held is None else self._held) is not None:
            left -= self._nbytes(item)
            self._held = item if found and left < 0 else None
            if self._held is not None:
                break
            found.append(item)
        self.count += len(found)
        return found


def _run(version: str, folder: str | None, function: Callable[[Sequence[T]], Sequence[R]], items: Sequence[T]) -> Any:
    """Do what a worker does."""
    if version != __version__:
        fact = f"a node of the cluster has ckptool {__version__}, and here is {version}"
        raise CkptoolError(fact, kind="other-version", hint="Install the same on all of them.")
    gc.set_threshold(1_000_000)  # as in ``ckptool.__main__``
    if folder is not None:
        try:
            os.chdir(folder)
        except OSError as error:
            fact = "a node of the cluster does not have this folder, from which paths start"
            raise CkptoolError(
                fact, kind="no-folder", path=folder, hint="Give whole paths, of files that all have."
            ) from error
    return function(items)


def _each(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    return [function(item) for item in items]


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _need_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingPackage.named("ray", _COMMAND) from error
    return ray
