"""
A process that works for this one: this Python with this package, started by its own command line.

It shares no memory, no locks and no open files with the parent, is told what to do and answers in lines of JSON, and
ends by itself when the parent is gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Final, Literal, TypeAlias

from ckptool.errors import CkptoolError
from ckptool.sources.checksums import processors

Work: TypeAlias = Literal["rows", "files"]
"""Rows of ``scan``, or files of a folder that ``migrate`` writes."""

MOST_STARTS: Final = 4
"""That fail, one after the other."""
_START: Final[dict[Work, str]] = {
    "rows": "import sys; sys.path = sys.argv[1:]; from ckptool.checking.row_worker import main;"
    " main(sys.stdin.buffer, sys.stdout.buffer)",
    "files": "import sys; sys.path = sys.argv[1:]; from ckptool.migration.file_worker import main;"
    " main(sys.stdin.buffer, sys.stdout.buffer)",
}
"""Nothing is imported from the folder that the user is in."""
_AT_ONCE: Final = 1 << 16
_PATIENCE: Final = 10
"""Seconds that a process may take to end."""


class WorkerProcess:
    """
    One process for one kind of work, and what all that it will be given has in common.

    It is one of so many that share the processors where arithmetic is done by several threads.
    """

    def __init__(self, work: Work, common: object, among: int = 1) -> None:
        threads = {"OMP_NUM_THREADS": str(max(1, processors() // among))}  # torch's wait for each other by spinning
        # In a session of its own: an interrupt from the terminal is the parent's, which then ends it.
        self._process = subprocess.Popen(  # noqa: S603 - our own words
            [sys.executable, "-c", _START[work], *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**threads, **os.environ} if among > 1 else None,
        )
        assert self._process.stdin is not None  # noqa: S101 - a pipe was asked for
        assert self._process.stdout is not None  # noqa: S101
        self._input = self._process.stdin
        self.output = self._process.stdout
        self._received = bytearray()
        self.is_ready = False
        """Whether it has said anything."""
        self.send(common)

    def send(self, *what: object) -> None:
        """Tell it something, each a line: it waits for that, or the pipe has room."""
        lines = memoryview("".join(f"{json.dumps(one)}\n" for one in what).encode())
        with suppress(BrokenPipeError):  # it has ended: its output says so next
            while lines:
                lines = lines[self._input.write(lines) or 0 :]

    def receive(self) -> list[bytes] | None:
        """Return the lines that it has written, without what it says first; None if it has ended."""
        data = self.output.read(_AT_ONCE)
        if not data:
            return None
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        if lines and not self.is_ready:
            self.is_ready = True
            del lines[0]
        return [bytes(line) for line in lines]

    def end(self) -> str:
        """Wait until it has ended, and say how: words that follow "the process"."""
        self._input.close()
        self.output.close()
        try:
            code = self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return (
            f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}, {signal.strsignal(-code)}"
        )

    def kill(self) -> None:
        """End it at once: nothing is lost but what it was at."""
        self._process.kill()
        self.end()


def refuse_starts(failed: int, how: str, kind: str) -> None:
    """Raise CkptoolError if so many processes in a row ended before they began; ``how`` is what the last one did."""
    if failed == MOST_STARTS:
        raise CkptoolError(f"worker processes do not start: the last one {how}", kind=kind)
