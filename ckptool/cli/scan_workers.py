"""
The worker processes of ``scan``: each is given one path at a time, so that one that dies costs one row.

They are this Python with this package, started by their own command line: they share no memory, no locks and no open
files with the parent, answer in lines of JSON, and end by themselves when the parent is gone.
"""

from __future__ import annotations

import json
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import Final

from ckptool.checking.row import Asked, lost_row
from ckptool.cli.scan_worker import READY
from ckptool.errors import CkptoolError

_START: Final = "import sys; sys.path = sys.argv[1:]; from ckptool.cli.scan_worker import main; main()"
"""Nothing is imported from the folder that the user is in."""
_AT_ONCE: Final = 1 << 16
_PATIENCE: Final = 10
"""Seconds that a process may take to end."""
ENDED: Final = "worker-ended"
"""The kind of the error of a file whose worker process died."""


class Worker:
    """One process, and the path that it is at."""

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
        self.path: str | None = None
        self._send(asked._asdict())

    def begin(self, path: str) -> None:
        """Give it a path; only when it has none."""
        self.path = path
        self._send(path)

    def _send(self, what: object) -> None:
        with suppress(BrokenPipeError):  # it has ended: its output says so next
            self._input.write(json.dumps(what).encode() + b"\n")

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


def rows(next_path: Callable[[], str | None], asked: Asked, jobs: int) -> Generator[bytes]:
    """
    Yield a row for each path, as a line, in the order in which they are done.

    A path is asked for when a worker is free for it; if there is none, once more when a row has been taken.

    Raises:
        CkptoolError: Workers cannot start.
    """
    crew: list[Worker] = []
    with selectors.DefaultSelector() as selector:
        try:
            while True:
                path = next_path()
                if path is None and all(one.path is None for one in crew):
                    return
                if path is None:
                    yield from _answers(crew, asked, selector)
                    continue
                while (worker := _free(crew, asked, jobs, selector)) is None:
                    yield from _answers(crew, asked, selector)
                worker.begin(path)
        finally:
            for worker in crew:
                worker.kill()


def _free(crew: list[Worker], asked: Asked, jobs: int, selector: selectors.BaseSelector) -> Worker | None:
    """Return a worker that has no path, a new one if there are not so many yet; None if all are at work."""
    free = next((one for one in crew if one.path is None), None)
    if free is None and len(crew) < jobs:
        free = Worker(asked)
        crew.append(free)
        selector.register(free.output, selectors.EVENT_READ, free)
    return free


def _answers(crew: list[Worker], asked: Asked, selector: selectors.BaseSelector) -> Iterator[bytes]:
    """Wait for answers, and yield them. In place of one that died, another will begin."""
    for key, _ in selector.select():
        worker: Worker = key.data
        lines = worker.receive()
        if lines is None:
            selector.unregister(worker.output)
            crew.remove(worker)
            code = worker.end()
            if not worker.is_ready:
                raise CkptoolError(f"a worker process did not start: it {_ended(code)}", kind=ENDED)
            if worker.path is not None:
                fact = f"the process that looked at it {_ended(code)}"
                yield json.dumps(lost_row(worker.path, asked, ENDED, fact)).encode()
            continue
        for line in lines:
            worker.path = None
            yield line


def _ended(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}, {signal.strsignal(-code)}"
