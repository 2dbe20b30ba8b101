"""
The worker processes of ``scan``: one that dies costs the row of the file that it is at.

They are this Python with this package, started by their own command line: they share no memory, no locks and no open
files with the parent, answer in lines of JSON, and end by themselves when the parent is gone.
"""

from __future__ import annotations

import json
import selectors
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final

from ckptool.checking.row import Asked, lost_row
from ckptool.cli.scan_worker import READY
from ckptool.errors import CkptoolError

if TYPE_CHECKING:
    from typing_extensions import Self

_START: Final = "import sys; sys.path = sys.argv[1:]; from ckptool.cli.scan_worker import main; main()"
"""Nothing is imported from the folder that the user is in."""
_AT_ONCE: Final = 1 << 16
_LONGEST: Final = 4096
"""Of a path that waits in a pipe, which has room for two of them; no file has a longer one."""
_MOST_STARTS: Final = 4
"""That fail, one after the other."""
_PATIENCE: Final = 10
"""Seconds that a process may take to end."""
ENDED: Final = "worker-ended"
"""The kind of the error of a file whose worker process died."""


class Worker:
    """One process, and the paths that it was given: it is at the first of them."""

    def __init__(self, asked: Asked) -> None:
        # In a session of its own: an interrupt from the terminal is the parent's, which then ends it.
        self._process = subprocess.Popen(  # noqa: S603 - our own words
            [sys.executable, "-c", _START, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None  # noqa: S101 - a pipe was asked for
        assert self._process.stdout is not None  # noqa: S101
        self._input = self._process.stdin
        self.output = self._process.stdout
        self._received = bytearray()
        self.is_ready = False
        self.paths: deque[str] = deque()
        self._send(asked._asdict())

    def give(self, path: str) -> None:
        """Give it a path: it waits for one, or the pipe has room for it."""
        self.paths.append(path)
        self._send(path)

    def _send(self, what: object) -> None:
        line = memoryview(json.dumps(what).encode() + b"\n")
        with suppress(BrokenPipeError):  # it has ended: its output says so next
            while line:
                line = line[self._input.write(line) or 0 :]

    def receive(self) -> list[bytes] | None:
        """Return the lines that it has written, without what it says first; None if it has ended."""
        data = self.output.read(_AT_ONCE)
        if not data:
            return None
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        if lines and not self.is_ready:
            self.is_ready = lines.pop(0) == READY
        return [bytes(line) for line in lines]

    def end(self) -> int:
        """Wait until it has ended, and return its exit code."""
        self._input.close()
        self.output.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_PATIENCE)
        self._process.kill()
        return self._process.wait()

    def kill(self) -> None:
        """End it at once: nothing is lost but the answer that it was at."""
        self._process.kill()
        self.end()


class Crew:
    """So many workers at most, started when there is work for them; used in a ``with`` block."""

    def __init__(self, asked: Asked, jobs: int) -> None:
        self._asked = asked
        self._jobs = jobs
        # What takes long is given one by one, so that none waits behind it while another worker is free.
        self._ahead = 1 if asked.deep or asked.digest else 2
        self._workers: list[Worker] = []
        self._again: list[str] = []
        """What was waiting behind a file on which a worker died, and this file, once."""
        self._tried: set[str] = set()
        self._failed_starts = 0
        self._selector = selectors.DefaultSelector()

    def rows(self, next_path: Callable[[], str | None]) -> Iterator[bytes]:
        """
        Yield a row for each path, as a line, in the order in which they are done.

        A path is asked for when there is room for it; if there is none, once more when a row has been taken.

        Raises:
            CkptoolError: Workers cannot start.
        """
        path: str | None = None
        while True:
            if path is None:
                path = self._again.pop() if self._again else next_path()
            worker = self._free(path) if path is not None else None
            if path is not None and worker is not None:
                worker.give(path)
                path = None
            elif any(one.paths for one in self._workers):
                yield from self._answers()
            else:
                return

    def _free(self, path: str) -> Worker | None:
        """Return the worker to give a path to, a new one if there may be more; None if all are busy."""
        least = min(self._workers, key=lambda one: len(one.paths), default=None)
        if least is not None and not least.paths:
            return least
        if len(self._workers) < self._jobs:
            worker = Worker(self._asked)
            self._workers.append(worker)
            self._selector.register(worker.output, selectors.EVENT_READ, worker)
            return worker
        has_room = least is not None and len(least.paths) < self._ahead and len(path) <= _LONGEST
        return least if has_room else None

    def _answers(self) -> Iterator[bytes]:
        """Wait for answers, and yield them."""
        for key, _ in self._selector.select():
            worker: Worker = key.data
            lines = worker.receive()
            if lines is None:
                yield from self._lost(worker)
                continue
            for line in lines:
                self._failed_starts = 0
                worker.paths.popleft()
                yield line

    def _lost(self, worker: Worker) -> Iterator[bytes]:
        """Try the path at which a worker died once more, as something else may have killed it; then yield its row."""
        self._selector.unregister(worker.output)
        self._workers.remove(worker)
        code = worker.end()
        how = f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}, {signal.strsignal(-code)}"
        if not worker.is_ready:
            self._again += worker.paths
            self._failed_starts += 1
            if self._failed_starts == _MOST_STARTS:
                raise CkptoolError(f"worker processes do not start: the last one {how}", kind=ENDED)
        elif worker.paths:
            path, *others = worker.paths
            self._again += others
            if path not in self._tried:
                self._tried.add(path)
                self._again.append(path)
                return
            yield json.dumps(lost_row(path, self._asked, ENDED, f"the process that looked at it {how}")).encode()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.kill()
        self._selector.close()
