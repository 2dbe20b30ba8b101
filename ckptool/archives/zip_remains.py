"""
The contents of a zip that has no single reading: the members of its local headers, which some readers use.

Of several zips one after the other, where each begins and ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ckptool.archives.compressed import RAW, decompress_as_far
from ckptool.archives.zip_directory import SEVERAL, find_directory
from ckptool.archives.zip_layout import ENTRY, ENTRY_MAGIC, LOCAL, LOCAL_MAGIC
from ckptool.errors import Cancelled, CkptoolError, MalformedFile, MissingPackage
from ckptool.limits import Limits
from ckptool.sources.source import BytesSource, SliceSource, Source

SEARCHED: Final = 1 << 26
"""Bytes from the start in which each local header is found; of others, those that the directory names."""
_DIRECTORY: Final = 1 << 22
"""Bytes before the end in which the entries of the directory are found."""
_BLOCK: Final = 1 << 20
_MOST: Final = 10_000
_MOST_ZIPS: Final = 10_000
_ZSTANDARD: Final = 93


class Remnant(NamedTuple):
    """A member that some reader may find."""

    name: str
    source: Source
    """Its content, as far as it can be unpacked."""


def members(source: Source, limits: Limits) -> Iterator[Remnant]:
    """
    Yield the members that local headers begin.

    Together they are unpacked to no more than ``limits`` allow for the zip.
    """
    listed = dict(_listed(source))
    left = limits.inflated(source.nbytes)
    for at in sorted({*_headers(source), *listed})[:_MOST]:
        if at + LOCAL.size > source.nbytes:
            continue
        magic, _, _, method, _, _, _, packed, _, name_nbytes, extra_nbytes = LOCAL.unpack(source.read(at, LOCAL.size))
        begin = at + LOCAL.size + name_nbytes + extra_nbytes
        if magic != LOCAL_MAGIC or begin >= source.nbytes:
            continue
        name = str(source.read(at + LOCAL.size, name_nbytes), "utf-8", "replace")
        nbytes = max(packed, listed.get(at, 0))
        rest = source.nbytes - begin
        content: Source = SliceSource(source, begin, nbytes if 0 < nbytes <= rest else rest)
        unpacked = _unpacked(content, method, limits)
        if unpacked is not None:
            left -= len(unpacked)
            content = BytesSource(unpacked, source.cancellation, packed_nbytes=content.nbytes)
        if content.nbytes:
            yield Remnant(name, content)
        if left < 0:
            return


def zips(source: Source) -> list[range]:
    """Return where each of several zips lies that fill a source; nothing if it is one. The first may be several."""
    found: list[range] = []
    end = source.nbytes
    while len(found) < _MOST_ZIPS:
        start = _last(SliceSource(source, 0, end))
        if not start:
            break
        found.append(range(start, end))
        end = start
    return [range(end), *reversed(found)] if found else []


def _last(source: Source) -> int:
    """Return where the last of several zips begins; 0 if there is one."""
    try:
        find_directory(source)
    except Cancelled:
        raise
    except CkptoolError as error:
        return error.offset or 0 if error.kind == SEVERAL else 0
    return 0


def _unpacked(content: Source, method: int, limits: Limits) -> bytes | bytearray | None:
    """Return what can be unpacked of a member; None if it is not packed, or in a way that is not known."""
    if method in RAW:
        return decompress_as_far(content, RAW[method], limits)[0]
    if method != _ZSTANDARD or content.nbytes > limits.inflated_nbytes:
        return None
    from ckptool.archives.zstandard import unpack

    try:
        return unpack(content.read(0, content.nbytes), limits)
    except (MalformedFile, MissingPackage):
        return None


def _headers(source: Source) -> Iterator[int]:
    """Yield where local headers are, going by their first bytes."""
    end = min(source.nbytes, SEARCHED)
    for begin in range(0, end, _BLOCK):
        block = source.read(begin, min(_BLOCK + len(LOCAL_MAGIC) - 1, source.nbytes - begin))
        at = block.find(LOCAL_MAGIC)
        while at >= 0:
            yield begin + at
            at = block.find(LOCAL_MAGIC, at + 1)


def _listed(source: Source) -> Iterator[tuple[int, int]]:
    """Yield where the directory says that local headers are, and how many bytes follow each."""
    begin = max(0, source.nbytes - _DIRECTORY)
    tail = source.read(begin, source.nbytes - begin)
    at = tail.find(ENTRY_MAGIC)
    while 0 <= at <= len(tail) - ENTRY.size:
        entry = ENTRY.unpack_from(tail, at)
        if entry[-1] < source.nbytes:
            yield entry[-1], entry[8]
        at = tail.find(ENTRY_MAGIC, at + 1)
