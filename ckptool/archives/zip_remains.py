"""
The contents of a zip that has no single reading: the members of its local headers, which some readers use.

Of several zips one after the other, where each begins and ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from ckptool.archives.compressed import RAW, decompress_as_far
from ckptool.archives.zip_directory import SEVERAL, find_directory
from ckptool.archives.zip_layout import END, END_MAGIC, ENTRY, ENTRY_MAGIC, FULL16, LOCAL, LOCAL_MAGIC
from ckptool.errors import Failure, LimitExceeded, MalformedFile, MissingPackage
from ckptool.limits import Limits
from ckptool.sources.source import BytesSource, SliceSource, Source

SEARCHED: Final = 1 << 26
"""Bytes from the start in which each local header is found; of others, those that the directory names."""
_DIRECTORY: Final = 1 << 22
"""Bytes before the end in which the entries of the directory are found."""
_BLOCK: Final = 1 << 20
_MAGIC: Final = re.compile(re.escape(LOCAL_MAGIC) + b"|" + re.escape(ENTRY_MAGIC)).finditer
"""Four times as fast as to look for each by itself."""
_USUAL: Final = 256
"""Bytes of a local header and the name behind it, mostly."""
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
    headers, listed = _places(source)
    left = limits.inflated(source.nbytes)
    for at in sorted({*headers, *listed})[:_MOST]:
        head = source.read(at, min(_USUAL, source.nbytes - at))
        if len(head) < LOCAL.size:
            continue
        magic, _, _, method, _, _, _, packed, _, name_nbytes, extra_nbytes = LOCAL.unpack_from(head)
        begin = at + LOCAL.size + name_nbytes + extra_nbytes
        if magic != LOCAL_MAGIC or begin >= source.nbytes:
            continue
        name = head[LOCAL.size : LOCAL.size + name_nbytes]
        if len(name) < name_nbytes:
            name = source.read(at + LOCAL.size, name_nbytes)
        nbytes = max(packed, listed.get(at, 0))
        rest = source.nbytes - begin
        content: Source = SliceSource(source, begin, nbytes if 0 < nbytes <= rest else rest)
        unpacked = _unpacked(content, method, limits)
        if unpacked is not None:
            left -= len(unpacked)
            content = BytesSource(unpacked, source.cancellation, packed_nbytes=content.nbytes)
        if content.nbytes:
            yield Remnant(str(name, "utf-8", "replace"), content)
        if left < 0:
            raise LimitExceeded("members that unpack to more than such a zip may")


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
    except Failure as error:
        return error.offset or 0 if error.kind == SEVERAL else 0
    return 0


def _unpacked(content: Source, method: int, limits: Limits) -> bytes | bytearray | None:
    """Return what can be unpacked of a member; None if it is not packed, or in a way that is not known."""
    if method in RAW:
        return decompress_as_far(content, RAW[method], limits)[0]
    if method != _ZSTANDARD or content.nbytes > limits.inflated_nbytes:
        return None
    from ckptool.archives.compressed import unpack

    try:
        return unpack(content.read(0, content.nbytes), limits)
    except (MalformedFile, MissingPackage):
        return None


def _places(source: Source) -> tuple[list[int], dict[int, int]]:
    """Return where local headers are, going by their first bytes; and where the directory says, with their sizes."""
    headers: list[int] = []
    listed: dict[int, int] = {}
    tail = source.nbytes - _DIRECTORY
    first = _in_front(source)
    for begin in range(0, source.nbytes, _BLOCK):
        if begin >= SEARCHED and begin + _BLOCK <= tail:
            continue
        block = source.read(begin, min(_BLOCK + ENTRY.size - 1, source.nbytes - begin))
        for found in _MAGIC(block):
            at = found.start()
            if at >= _BLOCK:
                break
            if found[0] == LOCAL_MAGIC:
                if begin + at < SEARCHED and len(headers) < _MOST:
                    headers.append(begin + at)
            elif begin + at >= tail and at + ENTRY.size <= len(block):
                entry = ENTRY.unpack_from(block, at)
                listed.update((at, entry[8]) for at in {entry[-1], entry[-1] + first} if at < source.nbytes)
    return headers, listed


def _in_front(source: Source) -> int:
    """Return how many bytes stand in front of a zip, by where its directory is and where it says that it is."""
    begin = max(0, source.nbytes - END.size - FULL16)
    last = source.read(begin, source.nbytes - begin)
    at = last.rfind(END_MAGIC)
    if at < 0 or at + END.size > len(last):
        return 0
    found: tuple[int, ...] = END.unpack_from(last, at)[1:]
    return max(0, begin + at - found[4] - found[5])
