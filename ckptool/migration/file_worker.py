"""What a worker process of ``migrate`` does: it reads a job from each line, and answers with what became of it."""

from __future__ import annotations

import gc
import json
from contextlib import ExitStack, suppress
from time import monotonic
from typing import Any, BinaryIO, Final

from ckptool.errors import CkptoolError, let_go
from ckptool.migration.file_jobs import Job, Opened, Order
from ckptool.migration.output.sink import Place

READY: Final = b"ready"
_SECONDS: Final = 0.1
"""Between two lines about how far it is; one that nobody reads any more ends the process."""


def main(lines: BinaryIO, written: BinaryIO) -> None:
    """Do the jobs of one order, until there are no more lines, or nobody reads the answers."""
    gc.set_threshold(1_000_000)  # as in ``ckptool.__main__``
    order = Order(**json.loads(lines.readline()))
    with suppress(BrokenPipeError, KeyboardInterrupt), ExitStack() as stack:
        _say(written, READY)
        opened: Opened | None = None
        for line in lines:
            number, name, nbytes, place = json.loads(line)
            try:
                opened = opened or stack.enter_context(Opened(order))
                job = Job(order, number, name, nbytes, Place(*place))
                far = _HowFar(written, number)
                answer: dict[str, Any] = {"written": opened.write(job, far.progress, far.read_back)}
            except BrokenPipeError:
                raise
            except CkptoolError as error:
                answer = {"error": error.as_plain()}
            except MemoryError as error:
                let_go(error)
                answer = {"error": CkptoolError("there is not enough memory", kind="out-of-memory").as_plain()}
            except Exception as error:  # noqa: BLE001 - somebody waits for an answer
                answer = {"error": CkptoolError(f"{type(error).__name__}: {error}", kind="unforeseen").as_plain()}
            _say(written, json.dumps(answer).encode())


class _HowFar:
    """Says how many bytes of a job were written, and read back."""

    def __init__(self, written: BinaryIO, number: int) -> None:
        self._stream = written
        self._done = [number, 0, 0]
        self._last = 0.0

    def progress(self, done: int, _: int) -> None:
        self._tell(1, done)

    def read_back(self, done: int, _: int) -> None:
        self._tell(2, done)

    def _tell(self, which: int, done: int) -> None:
        self._done[which] = done
        now = monotonic()
        if now - self._last >= _SECONDS:
            self._last = now
            _say(self._stream, json.dumps({"done": self._done}).encode())


def _say(written: BinaryIO, line: bytes) -> None:
    written.write(line + b"\n")
    written.flush()
