"""Pickles as trees, where these show all that following the opcodes would: then they need not be followed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ckptool.checkpoints.parsed import Stream
from ckptool.errors import Failure
from ckptool.formats.probe import Trees
from ckptool.pickles.asked_ids import is_asking
from ckptool.pickles.reader import Pickle, read_pickle
from ckptool.pickles.scanner import LINES_OF_TEXT, Scan, holds_none, scan_around
from ckptool.sources.source import SliceSource, Source

_MOST_NBYTES: Final = 1 << 16
"""Of opcodes that are read as a tree, which takes many times as much memory; following them takes little."""
_PROTO: Final = b"\x80"
_NAMES: Final = (b"c", b"\x93")
_HEAD_NBYTES: Final = 1 << 12
"""In which the first name is asked for, by either of these opcodes."""
_WRAPPER: Final = "NumpyArrayWrapper"
"""Of joblib, which reads the elements of an array behind each."""


def scanned(stream: Stream, pickles: Sequence[Pickle]) -> Scan:
    """Walk the pickles of a stream, unless it is known that there would be nothing to keep."""
    if pickles and not stream.blocks and not any(one.has_lines for one in pickles):
        rare = pickles[0].rare.union(*(one.rare for one in pickles[1:]))
        if holds_none(stream.source, stream.start, stream.end, rare):
            return Scan({})
    return scan_around(stream.source, stream.start, stream.end, stream.blocks)


def is_telling(stream: Stream, pickles: Sequence[Pickle], scan: Scan) -> bool:
    """Say whether the trees of all pickles of a stream are there, and every loader reads the same ones."""
    is_odd = stream.blocks or scan.split_frame is not None or not LINES_OF_TEXT.isdisjoint(scan.opcodes)
    return bool(pickles) and not is_odd


def tree(source: Source, start: int, record: str, known: Trees) -> tuple[Stream, Pickle] | None:
    """
    Return a short pickle of a file that was refused, if it is whole, and nothing in it depends on its loader.

    ``known`` are those that have been read.
    """
    head = source.read(start, min(_HEAD_NBYTES, source.nbytes - start))
    if not head.startswith(_PROTO) or not any(map(head.__contains__, _NAMES)):
        return None  # without names, to follow it takes little
    at = source.file_offset(start)
    found = known.get(at) if at is not None else None
    if found is None or found.start != start:
        try:
            found = read_pickle(SliceSource(source, 0, min(source.nbytes, start + _MOST_NBYTES)), start)
        except Failure:
            return None
    asks = any(is_asking(one.pid) for one in found.persistent_ids)
    if asks or any(one.name.endswith(_WRAPPER) for one in found.globals):
        return None
    return Stream(record, source, start, found.end, found.globals), found
