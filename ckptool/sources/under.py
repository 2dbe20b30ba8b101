"""What a source is made of: the file that it is a slice of, and the object that fills buffers with its bytes."""

from __future__ import annotations

import os
from typing import cast

from ckptool.cancellation import STEP_NBYTES
from ckptool.sources.files import FileSource
from ckptool.sources.source import FillsBuffers, SliceSource, Source


def file_under(source: Source, offset: int) -> tuple[FileSource, int] | None:
    """Return the file that ``source`` is a slice of, and where in it ``offset`` lies; None for anything else."""
    position = source.file_offset(offset)
    while isinstance(source, SliceSource):
        source = source.whole
    return (source, position) if isinstance(source, FileSource) and position is not None else None


class _Copying:
    """Fills buffers from a source that only returns bytes, a little at a time."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def read_into(self, offset: int, buffer: memoryview) -> None:
        for start in range(0, buffer.nbytes, STEP_NBYTES):
            count = min(STEP_NBYTES, buffer.nbytes - start)
            buffer[start : start + count] = self._source.read(offset + start, count)


def filler_under(source: Source, offset: int) -> tuple[FillsBuffers, int] | None:
    """
    Return what fills buffers with the bytes of a source, a file where it is one, and where in it ``offset`` lies.

    None for what inflates its whole content at each read.
    """
    under = file_under(source, offset) if hasattr(os, "preadv") else None
    if under is not None or source.is_compressed:
        return under
    own = hasattr(source, "read_into") and not isinstance(source, FileSource)
    return cast("FillsBuffers", source) if own else _Copying(source), offset
