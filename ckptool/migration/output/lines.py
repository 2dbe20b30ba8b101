"""A file of lines, appended to as results come: what a killed process had begun to write, the next one takes back."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from typing import Final

from ckptool.closing import Closing
from ckptool.errors import OutputFailed
from ckptool.migration.output import failed

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_AT_ONCE: Final = 1 << 20


class Lines(Closing):
    """
    A file of lines, each of which begins with ``head``; used in a ``with`` block.

    Nothing is changed in a file of anything else.

    Raises:
        OutputFailed: It holds something else, another process writes it, or the system refuses.
    """

    def __init__(self, path: str, head: bytes) -> None:
        self._path = path
        self._head = head
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        try:
            self._fd = os.open(path, flags, 0o666)
        except (OSError, ValueError) as error:
            raise failed(error if isinstance(error, OSError) else OSError(str(error)), path) from error
        try:
            self._check()
        except BaseException:
            os.close(self._fd)
            raise

    def _check(self) -> None:
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise OutputFailed("not a file that could be appended to", kind="not-a-file", path=self._path)
        if fcntl is not None:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise OutputFailed("another process writes to it", kind="in-use", path=self._path) from error
            except OSError:  # a file system without locks
                pass
        begin = os.pread(self._fd, len(self._head), 0)
        if begin != self._head[: len(begin)]:
            raise self._foreign(1)

    def __iter__(self) -> Iterator[bytes]:
        """Yield the lines that are complete, without their ends; then take back what was cut off in the middle."""
        position, number, rest = 0, 0, b""
        while data := os.pread(self._fd, _AT_ONCE, position):
            position += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                number += 1
                if not line.startswith(self._head):
                    raise self._foreign(number)
                yield line
        if rest[: len(self._head)] != self._head[: len(rest)]:
            raise self._foreign(number + 1)
        if rest:
            os.ftruncate(self._fd, position - len(rest))

    def _foreign(self, number: int) -> OutputFailed:
        fact = f"line {number:,} is none of those that would be appended"
        return OutputFailed(fact, kind="foreign-lines", path=self._path, hint="Choose another file.")

    def append(self, lines: Iterable[bytes]) -> None:
        """
        Hand lines to the system, in one piece.

        Raises:
            OutputFailed: The disk is full, or cannot be written to.
        """
        view = memoryview(b"".join(b"%b\n" % line for line in lines))
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise failed(error, self._path) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
