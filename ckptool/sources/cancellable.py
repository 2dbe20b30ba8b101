"""
Sources whose every read can be cancelled: in steps, with a check before each.

A source carries the cancellation to whatever works on it, so that nobody has to hand it on.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ckptool.cancellation import STEP_NBYTES, Cancellation
from ckptool.sources import files
from ckptool.sources.files import FileSource, Origin
from ckptool.sources.source import SliceSource, Source


class CancellableFile(FileSource):
    """A regular file. A read of more than one step takes twice its memory for a moment."""

    def __init__(self, path: str, cancellation: Cancellation, fd: int | None = None) -> None:
        self.cancellation = cancellation
        super().__init__(path, fd)

    def _of_its_kind(self, path: str, fd: int) -> FileSource:
        return CancellableFile(path, self.cancellation, fd)

    def read(self, offset: int, nbytes: int) -> bytes:
        return _read(super().read, offset, nbytes, self.cancellation)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        for start in range(0, buffer.nbytes, STEP_NBYTES):
            self.cancellation.check()
            super().read_into(offset + start, buffer[start : start + STEP_NBYTES])


class CancellableSource(SliceSource):
    """Any other source: bytes in memory, a file object."""

    def __init__(self, whole: Source, cancellation: Cancellation) -> None:
        super().__init__(whole, 0, whole.nbytes)
        self.cancellation = cancellation

    def read(self, offset: int, nbytes: int) -> bytes:
        return _read(super().read, offset, nbytes, self.cancellation)


def open_source(origin: Origin, cancellation: Cancellation | None) -> tuple[Source, str]:
    """
    Do what ``files.open_source`` does, for a source that can be cancelled.

    Raises:
        Cancelled: It is already; nothing was opened.
    """
    if cancellation is None:
        return files.open_source(origin)
    cancellation.check()
    if isinstance(origin, str | os.PathLike) and hasattr(os, "pread"):
        path = os.fspath(origin)
        return CancellableFile(path, cancellation), path
    source, shown = files.open_source(origin)
    return CancellableSource(source, cancellation), shown


def cancellable(source: Source, cancellation: Cancellation | None) -> Source:
    """Return a source made of another, to be cancelled as that one is."""
    return source if cancellation is None else CancellableSource(source, cancellation)


def cancellation_of(source: Source) -> Cancellation | None:
    """Return what cancels the reads of a source; None if nothing does."""
    while not isinstance(source, CancellableFile | CancellableSource):
        if not isinstance(source, SliceSource):
            return None
        source = source.whole
    return source.cancellation


def check_cancelled(source: Source) -> None:
    """Go on with what a source is read for, if that is still wanted; raise Cancelled if not."""
    cancellation = cancellation_of(source)
    if cancellation is not None:
        cancellation.check()


def _read(read: Callable[[int, int], bytes], offset: int, nbytes: int, cancellation: Cancellation) -> bytes:
    cancellation.check()
    if nbytes <= STEP_NBYTES:
        return read(offset, nbytes)
    pieces = []
    for start in range(0, nbytes, STEP_NBYTES):
        cancellation.check()
        pieces.append(read(offset + start, min(STEP_NBYTES, nbytes - start)))
    return b"".join(pieces)
