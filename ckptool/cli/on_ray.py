"""
``--ray``: a pool of Ray's processes, on this machine or on a cluster.

Ray is an extra, imported only if it is requested. Its workers are processes with this package. Their work and their
answers are pickles, from one of these processes to another: no checkpoint has a part in that. A Ray that is started
here obeys only this process, and ends with it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from ckptool import __version__
from ckptool.checking.scan import ENDED
from ckptool.cli.options import LOCAL
from ckptool.cli.pool import Batch, Event, Lost, Pool, Work
from ckptool.errors import CkptoolError, first_line
from ckptool.sources.checksums import processors
from ckptool.torch_ops import needed

if TYPE_CHECKING:
    from typing_extensions import Self

_REQUIREMENT: Final = '"ckptool[ray]"'
_UNAVAILABLE: Final = "ray-unavailable"
_AHEAD: Final = 2
"""Batches of each worker that are given to Ray at once: one that runs, and one that waits."""
_SECONDS: Final = 10
"""Longest wait for an answer; also the time after which the workers of a cluster, which may grow, are counted again."""
_PORT: Final = 10001
"""The port of Ray's clients, for addresses that have none."""
_STORE_NBYTES: Final = 256 << 20
"""Memory for answers that were not fetched yet. By default, Ray takes a third of the memory."""


class OnRay(Pool):
    """
    Processes of Ray; used in a ``with`` block.

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
        self._given: tuple[Any, Any] = (None, None)
        if address == LOCAL:
            # Its ports are open to the network, and whoever may use them may run anything: so a token is required.
            import secrets

            for name, value in (("MODE", "token"), ("TOKEN", secrets.token_hex(32))):
                os.environ.setdefault(f"RAY_AUTH_{name}", value)
            os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # each takes half a minute
        needed("ray.exceptions", "ray", _REQUIREMENT)
        self._ray = needed("ray", "ray", _REQUIREMENT)

    def __enter__(self) -> Self:
        settings: dict[str, Any] = {"address": self._address}
        if self._address == LOCAL:
            settings |= {"num_cpus": self._jobs or processors(), "object_store_memory": _STORE_NBYTES}
            settings |= {"include_dashboard": False}
        elif self._address != "auto":
            from ckptool.sources.remote.web import is_answered

            # Ray itself would keep trying for minutes.
            if not is_answered(self._address.removeprefix("ray://"), _PORT, _SECONDS):
                hint = "Give the address that 'ray start' printed."
                raise CkptoolError(f"nothing answers at {self._address}", kind=_UNAVAILABLE, hint=hint)
        here = Path.cwd()
        os.chdir(os.sep)  # its workers import modules from the folder in which it is started
        try:
            self._ray.init(**settings, log_to_driver=False, logging_level="CRITICAL")
        except (self._ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
            self._ray.shutdown()
            where = "does not start" if self._address == LOCAL else f"cannot be used at {self._address}"
            raise CkptoolError(f"Ray {where}: {first_line(error)}", kind=_UNAVAILABLE) from error
        finally:
            os.chdir(here)
        # Its messages about workers that ended would go to standard output, where results are.
        self._ray._private.worker._worker_logs_enabled = False  # noqa: SLF001
        return self

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
    def room(self) -> int:
        """How many tasks Ray is given at once: a cluster may do all of them, so no more than were requested."""
        is_asked = self._jobs is not None and self._address != LOCAL
        return self.workers if is_asked else self.workers * _AHEAD

    def begin(self, work: Work[Any], batch: Batch, *, starts_here: bool) -> Any:
        """Give a batch to Ray."""
        if self._given[0] is not work:
            self._given = (work, self._ray.put(work))
        task = self._ray.remote(max_retries=0)(_run)  # else Ray would try the whole batch again and again
        folder = str(Path.cwd()) if starts_here else None
        return task.remote(__version__, folder, self._given[1], [*batch.left.values()])

    def events(self, handles: Sequence[Any]) -> Iterable[Event]:
        """Wait for one batch, and return its answers."""
        (done,), _ = self._ray.wait(list(handles))
        errors = self._ray.exceptions
        try:
            return [*(Event(done, *one) for one in self._ray.get(done)), Event(done)]
        except errors.OutOfMemoryError:
            fact = "its node had not enough memory, and Ray ended the process that worked at it"
            return [Event(done, answer=Lost("out-of-memory", fact))]
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError):
            return [Event(done, answer=Lost(ENDED, "the process on Ray that worked at it ended"))]
        except errors.RayTaskError as error:
            if isinstance(error.cause, CkptoolError):
                raise error.cause from error
            fact = f"Ray's workers cannot do this: {first_line(error.cause)}"
            hint = "All nodes need this version of ckptool, with the packages that this takes."
            raise CkptoolError(fact, kind="ray-failed", hint=hint) from error
        except errors.RayError as error:
            raise CkptoolError(f"Ray cannot do this: {first_line(error)}", kind="ray-failed") from error

    def stop(self, handles: Sequence[Any]) -> None:
        """End these batches."""
        if handles and self._ray.is_initialized():  # else it has ended with all that it did
            for one in handles:
                self._ray.cancel(one, force=True)
            self._ray.wait(list(handles), num_returns=len(handles), timeout=_SECONDS)


def _run(version: str, folder: str | None, work: Work[Any], items: Sequence[Any]) -> list[tuple[int, Any, bool]]:
    """Do a batch on a node, and return the answers."""
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
    answers: list[tuple[int, Any, bool]] = []
    work(items, lambda number, answer, *, more=False: answers.append((number, answer, more)))
    return answers
