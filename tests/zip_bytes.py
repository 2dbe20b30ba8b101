"""Zips, field by field, so that each field can lie."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from struct import pack
from typing import Any

from ckptool import Limits, Source
from ckptool.archives.archive import Archive
from ckptool.archives.zips import read_zip
from ckptool.sources.source import BytesSource

Fields = Mapping[str, Any]

FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF
_COMMON = ("version", "flags", "method", "time", "date", "crc32", "stored", "nbytes")
"""Fields that both headers of a member have, in order."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A member as it stands in the file; ``local`` and ``central`` change fields of one header only."""

    name: bytes
    payload: bytes = b""
    nbytes: int = 0
    crc32: int = 0
    method: int = 0
    flags: int = 0
    extra: bytes = b""
    descriptor: bytes = b""
    local: Fields = field(default_factory=dict)
    central: Fields = field(default_factory=dict)

    def fields(self, changes: Fields) -> dict[str, Any]:
        """Return the fields that both headers have."""
        common = {
            "name": self.name,
            "version": 20,
            "flags": self.flags,
            "method": self.method,
            "time": 0,
            "date": 0,
            "crc32": self.crc32,
            "stored": len(self.payload),
            "nbytes": self.nbytes,
            "extra": self.extra,
        }
        return common | dict(changes)


def stored(name: str, data: bytes = b"", **changes: Any) -> Member:
    """Return a member that is not compressed."""
    member = Member(name=name.encode(), payload=data, nbytes=len(data), crc32=zlib.crc32(data))
    return replace(member, **changes)


def deflated(name: str, data: bytes, **changes: Any) -> Member:
    """Return a member compressed with method 8."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    payload = packer.compress(data) + packer.flush()
    return replace(stored(name, data), payload=payload, method=8, **changes)


def streamed(member: Member, *, magic: bool = True, width: int = 4) -> Member:
    """Return a member as writers leave it that could not seek: zeros in front, the sizes behind."""
    sizes = len(member.payload).to_bytes(width, "little") + member.nbytes.to_bytes(width, "little")
    descriptor = (b"PK\x07\x08" if magic else b"") + pack("<L", member.crc32) + sizes
    local = {"crc32": 0, "stored": 0, "nbytes": 0}
    return replace(member, flags=member.flags | 8, descriptor=descriptor, local=local)


def zip64_field(*values: int) -> bytes:
    """Return the extra field that holds sizes and offsets of eight bytes."""
    return pack("<2H", 1, 8 * len(values)) + pack(f"<{len(values)}Q", *values)


def local_header(member: Member) -> bytes:
    """Return what stands in front of a member's payload."""
    f = member.fields(member.local)
    numbers = (*map(f.__getitem__, _COMMON), len(f["name"]), len(f["extra"]))
    return pack("<4s5H3L2H", b"PK\x03\x04", *numbers) + f["name"] + f["extra"]


def entry(member: Member, header: int) -> bytes:
    """Return a member's entry in the central directory; ``header`` is where its local header stands."""
    defaults = {"made_by": 0, "comment": b"", "disk": 0, "attributes": 0, "header": header}
    f = defaults | member.fields(member.central)
    texts = (f["name"], f["extra"], f["comment"])
    numbers = (*map(f.__getitem__, ("made_by", *_COMMON)), *map(len, texts))
    tail = (f["disk"], 0, f["attributes"], f["header"])
    return pack("<4s6H3L5H2L", b"PK\x01\x02", *numbers, *tail) + b"".join(texts)


def end(count: int, nbytes: int, offset: int, /, **changes: Any) -> bytes:
    """Return the end record of a directory of ``nbytes`` bytes at ``offset``."""
    f = {"disk": 0, "start": 0, "here": count, "count": count, "nbytes": nbytes, "offset": offset, "comment": b""}
    f |= {"comment_n": len(changes.get("comment", b""))} | changes
    numbers = (f["disk"], f["start"], f["here"], f["count"], f["nbytes"], f["offset"], f["comment_n"])
    return pack("<4s4H2LH", b"PK\x05\x06", *numbers) + f["comment"]


def end64(count: int, nbytes: int, offset: int, at: int, /, **changes: Any) -> bytes:
    """Return the zip64 end record, which stands at ``at``, and its locator."""
    f = {"size": 44, "here": count, "count": count, "nbytes": nbytes, "offset": offset, "record": at} | changes
    record = pack("<4sQ2H2L4Q", b"PK\x06\x06", f["size"], 45, 45, 0, 0, f["here"], f["count"], f["nbytes"], f["offset"])
    return record + pack("<4sLQL", b"PK\x06\x07", 0, f["record"], 1)


def whole(
    members: Sequence[Member],
    *,
    prefix: bytes = b"",
    gap: bytes = b"",
    suffix: bytes = b"",
    listed: Sequence[Member] | None = None,
    zip64: bool = False,
    last: Fields | None = None,
    last64: Fields | None = None,
) -> bytes:
    """
    Return a zip of ``members``.

    ``gap`` stands behind each of them, ``listed`` are those that the directory knows, ``last`` and ``last64`` change
    the end records.
    """
    body, headers = prefix, {}
    for member in members:
        headers[id(member)] = len(body)
        body += local_header(member) + member.payload + member.descriptor + gap
    known = members if listed is None else listed
    directory = b"".join(entry(member, headers.get(id(member), 0)) for member in known)
    place = (len(known), len(directory), len(body))
    tail = end64(*place, len(body) + len(directory), **(last64 or {})) if zip64 else b""
    return body + directory + tail + end(*place, **(last or {})) + suffix


def read(data: bytes | Source, **limits: int) -> Archive:
    """Return the members that the reader finds."""
    return read_zip(BytesSource(data, is_file=True) if isinstance(data, bytes) else data, Limits(**limits))
