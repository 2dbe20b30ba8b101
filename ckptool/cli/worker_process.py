"""
A process that works for this one: a copy of it, or this Python with this package, started by its own command line.

It shares no locks and no open files with the parent, is told what to do and answers in lines of JSON, and ends by
itself when the parent is gone.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, Final, Literal, NoReturn, TypeAlias

from ckptool.checking.asked import ENDED
from ckptool.errors import CkptoolError, reason_of
from ckptool.sources.checksums import processors
from ckptool.sources.pool import POOL

Work: TypeAlias = Literal["rows", "files"]
"""Rows of ``scan``, or files of a folder that ``migrate`` writes."""
Main: TypeAlias = Callable[[BinaryIO, BinaryIO], None]
"""Does work: reads lines, and writes answers, until there are no more."""

MOST_STARTS: Final = 4
"""That fail, one after the other."""
_CODE: Final = (
    "import sys; sys.path = sys.argv[1:]; from ckptool.{} import main; main(sys.stdin.buffer, sys.stdout.buffer)"
)
_START: Final[dict[Work, str]] = {
    "rows": _CODE.format("checking.row_worker"),
    "files": _CODE.format("migration.file_worker"),
}
"""Nothing is imported from the folder that the user is in."""
_AT_ONCE: Final = 1 << 16


def started(work: Work, among: int = 1) -> subprocess.Popen[bytes]:
    """Start a new Python, one of so many that share the processors where arithmetic is done by several threads."""
    threads = {"OMP_NUM_THREADS": str(max(1, processors() // among))}  # torch's wait for each other by spinning
    # In a session of its own: an interrupt from the terminal is the parent's, which then ends it.
    return subprocess.Popen(  # noqa: S603 - our own words
        [sys.executable, "-c", _START[work], *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        env={**threads, **os.environ} if among > 1 else None,
    )


def can_copy() -> bool:
    """
    Say whether a copy of this process works for sure: this is Linux, and it has one thread, and no file in the pool.

    A copy has one thread, and the locks that others hold. The pool would close files that are the copy's by then.
    """
    try:
        return len(os.listdir("/proc/self/task")) == 1 and POOL.is_empty
    except OSError:
        return False


class Copy:
    """A copy of this process, with what ``subprocess.Popen`` has: it is at work in a moment, as all is imported."""

    def __init__(self, main: Main) -> None:
        self._code: int | None = None
        lines, self.stdin = _pipe()  # files, which close themselves where there is no other process
        self.stdout, answers = _pipe()
        others = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # an interrupt is the parent's
        try:
            self._pid = os.fork()
            if not self._pid:
                _be_copy(main, lines.fileno(), answers.fileno(), others)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, others)
        lines.close()
        answers.close()

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code

    def kill(self) -> None:
        if self._code is None:
            os.kill(self._pid, signal.SIGKILL)


def _pipe() -> tuple[BinaryIO, BinaryIO]:
    end, begin = os.pipe()
    return os.fdopen(end, "rb", 0), os.fdopen(begin, "wb", 0)


def _be_copy(main: Main, lines: int, answers: int, mask: set[int | signal.Signals]) -> NoReturn:
    """Work, and end. What the parent had open is closed, and its objects stay as they are."""
    code = 1
    try:
        gc.freeze()  # an object that is let go would close what has its number by then
        os.setsid()  # as of those that are started
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # which drops one that came since
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.dup2(lines, 0)
        os.dup2(answers, 1)
        for number in {lines, answers} - {0, 1, 2}:  # the list takes one, and there may be no more
            os.close(number)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2:
                with suppress(OSError):  # of the list itself
                    os.close(number)
        main(os.fdopen(0, "rb"), os.fdopen(1, "wb"))
        code = 0
    except BaseException:  # noqa: BLE001 - it is no error of the parent's
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


class WorkerProcess:
    """One process for one kind of work, and what all that it will be given has in common."""

    def __init__(self, process: subprocess.Popen[bytes] | Copy, common: object) -> None:
        self._process = process
        assert self._process.stdin is not None  # a pipe was asked for
        assert self._process.stdout is not None
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
        """Wait for one that has said its last, and say how it ended: words that follow "the process"."""
        self._input.close()
        self.output.close()
        code = self._process.wait()
        return (
            f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}, {signal.strsignal(-code)}"
        )

    def kill(self) -> None:
        """End it at once: nothing is lost but what it was at."""
        self._process.kill()
        self.end()


def refuse_starts(failed: int, how: str) -> None:
    """Raise CkptoolError if so many processes in a row ended before they began; ``how`` is what the last one did."""
    if failed == MOST_STARTS:
        raise _no_workers(f"the last one {how}")


def are_enough(started: int, error: OSError) -> int:
    """Return how many were started, where the system starts no more; raise CkptoolError if there are none."""
    if not started:
        raise _no_workers(reason_of(error)) from error
    return started


def _no_workers(why: str) -> CkptoolError:
    return CkptoolError(f"worker processes do not start: {why}", kind=ENDED)
