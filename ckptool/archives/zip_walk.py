"""The records of a zip whose directory is not there, or not to be trusted: by the headers in front of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ckptool.archives.zip_layout import (
    DESCRIPTOR_MAGIC,
    FIELD,
    FLAG_DESCRIPTOR,
    FULL32,
    LOCAL,
    LOCAL_MAGIC,
    ZIP64_TAG,
)
from ckptool.sources.read_ahead import ReadAhead
from ckptool.sources.source import Source

_SEARCHED: Final = 1 << 16
_MOST_SEARCHES: Final = 1000


class LocalRecord(NamedTuple):
    """A record as its local header has it."""

    name: str
    method: int
    offset: int
    """Of its payload, in the source."""
    stored_nbytes: int | None
    """None where the writer did not know it yet."""


class LocalHeaders:
    """
    The local headers of a zip, one after the other.

    Where a header does not say how long its record is, ``go_on`` says where the payload ends, or the next header is
    looked for close by.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._ahead = ReadAhead(source)
        self._next = 0
        self._searches = 0

    def go_on(self, end: int) -> None:
        """Look for the next header from ``end``."""
        self._next = end

    def __iter__(self) -> Iterator[LocalRecord]:
        position = 0
        while position + LOCAL.size <= self._source.nbytes:
            header = self._ahead.read(position, LOCAL.size)
            if not header.startswith(LOCAL_MAGIC):
                return
            _, _, flags, method, _, _, _, stored, _, name_n, extra_n = LOCAL.unpack(header)
            extra = position + LOCAL.size + name_n
            payload = extra + extra_n
            if payload > self._source.nbytes:
                return
            if stored == FULL32:
                stored = _zip64_stored(self._ahead.read(extra, extra_n))
            known = None if flags & FLAG_DESCRIPTOR and not stored else stored
            self._next = payload + (known or 0)
            yield LocalRecord(
                str(self._ahead.read(position + LOCAL.size, name_n), "utf-8", "replace"), method, payload, known
            )
            found = self._find(self._next)
            if found is None:
                return
            position = found

    def _find(self, start: int) -> int | None:
        """Return where the next header begins: after a descriptor, if there is one."""
        if start >= self._source.nbytes:
            return None
        near = self._source.read(start, min(4 + 24, self._source.nbytes - start))
        for behind in (0, 16, 24):
            if near.startswith(LOCAL_MAGIC, behind) and (not behind or near.startswith(DESCRIPTOR_MAGIC)):
                return start + behind
        self._searches += 1
        if self._searches > _MOST_SEARCHES:  # a file of ours has five records whose size nothing tells
            return None
        window = self._source.read(start, min(_SEARCHED, self._source.nbytes - start))
        at = window.find(LOCAL_MAGIC)
        return None if at < 0 else start + at


def _zip64_stored(extra: bytes) -> int:
    """Return the packed size in the extra fields of a local header: the second number of the zip64 field."""
    at = 0
    while at + FIELD.size <= len(extra):
        tag, nbytes = FIELD.unpack_from(extra, at)
        at += FIELD.size
        if tag == ZIP64_TAG and nbytes >= 16:
            return int.from_bytes(extra[at + 8 : at + 16], "little")
        at += nbytes
    return 0
