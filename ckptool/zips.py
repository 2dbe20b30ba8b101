"""
The member table of a zip, accepted only where it has one reading.

    local header, payload, [descriptor]   for each member
    central directory                     one entry for each member
    [zip64 end record, locator]
    end record                            22 bytes and a comment

Strategy: find the one end record, believe the central directory, then hold every local header and descriptor against
it. Readers of zips differ in which of these they trust; a file in which they disagree is refused, and so is one with
a second directory, overlapping members, or two names for one file. A gap or bytes behind the end mislead nobody:
they are noted.

Layout: PKWARE APPNOTE 6.3.10. What torch writes: caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import re
from operator import attrgetter
from struct import Struct
from typing import NamedTuple

from ckptool.archive import Archive, Compression, Record
from ckptool.errors import AmbiguousFile, LimitExceeded, MalformedFile, TruncatedFile, UnsupportedFeature
from ckptool.files import ReadAhead, Source
from ckptool.limits import DEFAULT_LIMITS, Limits

MAGIC = b"PK\x03\x04"

_END = Struct("<4s4H2LH")
_END_MAGIC = b"PK\x05\x06"
_END_SEARCH = 22 + 0xFFFF
_LOCATOR = Struct("<4sLQL")
_LOCATOR_MAGIC = b"PK\x06\x07"
_END64 = Struct("<4sQ2H2L4Q")
_END64_MAGIC = b"PK\x06\x06"
_ENTRY = Struct("<4s6H3L5H2L")
_ENTRY_MAGIC = b"PK\x01\x02"
_LOCAL = Struct("<4s5H3L2H")
_NARROW, _WIDE = Struct("<3L"), Struct("<LQQ")
_DESCRIPTORS = ((b"PK\x07\x08", _NARROW), (b"PK\x07\x08", _WIDE), (b"", _NARROW), (b"", _WIDE))
_FIELD = Struct("<HH")
_USUAL_EXTRA = 68
"""Bytes of extra fields that writers use to align payloads, at most."""

_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED = 0x0001 | 0x0040 | 0x2000
_PATCHED = 0x0020
_DESCRIPTOR = 0x0008
_NAME = re.compile(r"(?!/)(?!(?:[^/]*/)*\.\.(?:/|\Z))[^\x00-\x1f\\]+")
"""No control characters or backslashes, not absolute, no way up."""
_ZIP64, _UNICODE_PATH = 0x0001, 0x7075
_METHODS: dict[int, Compression] = {0: "stored", 8: "deflate"}


class Directory(NamedTuple):
    """Where the central directory stands, in bytes, and how many members it lists."""

    offset: int
    nbytes: int
    members: int
    end: int
    """Where what follows the central directory begins."""


class _Entry(NamedTuple):
    name: bytes
    flags: int
    method: int
    crc32: int
    stored_nbytes: int
    nbytes: int
    header: int
    """Offset of the local header."""


def read_zip(source: Source, limits: Limits = DEFAULT_LIMITS) -> Archive:
    """
    Return the members of a zip, in the order of their bytes in the file.

    Reads the directory and every local header, no payload.

    Raises:
        TruncatedFile: There is no central directory at the end.
        AmbiguousFile: Readers could disagree about what is in it.
        MalformedFile: It contradicts the format.
        UnsupportedFeature: It is encrypted, or packed with something else than deflate.
    """
    directory, notes = find_directory(source)
    if directory.members > limits.entries:
        raise LimitExceeded(
            f"the zip has {directory.members:,} members; {limits.entries:,} are allowed",
            needed=directory.members,
            actual=limits.entries,
        )
    entries = _read_entries(source, directory)
    _refuse_twins(entries)
    records: dict[str, Record] = {}
    position = 0
    ahead = ReadAhead(source)
    for entry in sorted(entries, key=attrgetter("header")):
        if entry.header < position:
            raise _ambiguous(f"member {_show(entry.name)} begins inside another", entry.header)
        if entry.header > position:
            notes.append(_note_gap(source, position, entry.header))
        record, position = _read_member(ahead, entry, directory.offset)
        if record.name in records:
            raise _ambiguous(f"two members are called {record.name!r} once decoded", entry.header)
        if not record.name.endswith("/"):
            records[record.name] = record
    if position > directory.offset:
        raise _ambiguous("the last member reaches into the central directory", directory.offset)
    if position < directory.offset:
        notes.append(_note_gap(source, position, directory.offset))
    return Archive(source, records, limits, tuple(notes))


def _note_gap(source: Source, start: int, stop: int) -> str:
    """Return a note on bytes that belong to no member, unless they could be members to somebody."""
    nbytes = stop - start
    head = source.read(start, min(len(MAGIC), nbytes))
    tail = source.read(max(start, stop - _END_SEARCH), min(_END_SEARCH, nbytes))
    if head == MAGIC or _END_MAGIC in tail:
        raise _ambiguous(f"{nbytes:,} bytes that belong to no member look like members", start)
    return f"{nbytes:,} bytes at {start:,} belong to no member"


def find_directory(source: Source) -> tuple[Directory, list[str]]:
    """
    Return where the one directory stands that every reader finds, and what is odd about the end of the file.

    Raises what ``read_zip`` raises about it. Neither the entries nor the members are looked at.
    """
    tail_start = max(0, source.nbytes - _END_SEARCH)
    tail = source.read(tail_start, source.nbytes - tail_start)
    at = tail.rfind(_END_MAGIC)
    if at < 0 or len(tail) - at < _END.size:
        raise TruncatedFile(
            f"truncated: no zip central directory in the last {len(tail):,} bytes",
            kind="truncated-zip",
            hint="Download the file again.",
            actual=source.nbytes,
        )
    end = tail_start + at
    _, disk, start_disk, disk_count, count, nbytes, offset, comment = _END.unpack_from(tail, at)
    if disk not in (0, _FULL16) or disk != start_disk or disk_count != count:
        raise UnsupportedFeature("a zip in several volumes", kind="split-zip")
    directory = _zip64_directory(source, end, count, nbytes, offset) or Directory(offset, nbytes, count, end)
    gap = directory.end - directory.offset - directory.nbytes
    if gap:
        raise _ambiguous(
            f"the central directory ends {abs(gap):,} bytes {'before' if gap > 0 else 'behind'} its end record",
            end,
        )
    notes = []
    behind = source.nbytes - end - _END.size - comment
    if behind < 0:
        raise _ambiguous(f"the archive's comment of {comment:,} bytes is cut short", end)
    if behind:
        notes.append(f"{behind:,} bytes behind the end of the archive")
    previous = tail.rfind(_END_MAGIC, 0, at)
    if previous >= 0 and tail_start + previous >= directory.offset:
        raise _ambiguous("a second end of archive", tail_start + previous)
    return directory, notes


def _zip64_directory(source: Source, end: int, count: int, nbytes: int, offset: int) -> Directory | None:
    at = end - _LOCATOR.size
    locator = source.read(at, _LOCATOR.size) if at >= 0 else b""
    if not locator.startswith(_LOCATOR_MAGIC):
        if _FULL32 in (nbytes, offset):
            raise MalformedFile("the zip announces a zip64 directory and has none", kind="malformed-zip", offset=end)
        return None
    _, _, record_at, _ = _LOCATOR.unpack(locator)
    if record_at + _END64.size > at:
        raise MalformedFile("the zip64 end record lies outside the file", kind="malformed-zip", offset=at)
    fields = _END64.unpack(source.read(record_at, _END64.size))
    magic, size, _, _, _, _, disk_count64, count64, nbytes64, offset64 = fields
    if magic != _END64_MAGIC or record_at + 12 + size != at or disk_count64 != count64:
        raise MalformedFile("the zip64 end record is damaged", kind="malformed-zip", offset=record_at)
    pairs = ((count, _FULL16, count64), (nbytes, _FULL32, nbytes64), (offset, _FULL32, offset64))
    if any(short not in (full, long) for short, full, long in pairs):
        raise _ambiguous("the zip and zip64 end records disagree", end)
    return Directory(offset64, nbytes64, count64, record_at)


def _read_entries(source: Source, directory: Directory) -> list[_Entry]:
    if directory.offset < 0 or directory.nbytes < _ENTRY.size * directory.members:
        raise MalformedFile(
            f"a central directory of {directory.nbytes:,} bytes for {directory.members:,} members",
            kind="malformed-zip",
            offset=directory.offset,
        )
    data = source.read(directory.offset, directory.nbytes)
    entries = []
    position = 0
    for _ in range(directory.members):
        at = directory.offset + position
        if position + _ENTRY.size > len(data) or not data.startswith(_ENTRY_MAGIC, position):
            raise _ambiguous("the central directory does not stand where the end record says", at)
        fields = _ENTRY.unpack_from(data, position)
        (
            _,
            made_by,
            _,
            flags,
            method,
            _,
            _,
            crc,
            stored,
            nbytes,
            name_n,
            extra_n,
            comment_n,
            disk,
            _,
            attributes,
            header,
        ) = fields
        name_at = position + _ENTRY.size
        extra_at = name_at + name_n
        position = extra_at + extra_n + comment_n
        if position > len(data):
            raise _ambiguous("an entry reaches over the end of the central directory", at)
        name = data[name_at:extra_at]
        if extra_n or _FULL32 in (nbytes, stored, header):
            extra = data[extra_at : extra_at + extra_n]
            nbytes, stored, header = _widen(extra, name, (nbytes, stored, header), at)
        entry = _Entry(name, flags, method, crc, stored, nbytes, header)
        _check_entry(entry, made_by, attributes, disk, at)
        entries.append(entry)
    if position != len(data):
        raise _ambiguous("the central directory holds more than its members", directory.offset + position)
    return entries


def _widen(extra: bytes, name: bytes, values: tuple[int, int, int], at: int) -> tuple[int, int, int]:
    """Return the values with those that say "see zip64" taken from the extra field, which must hold just these."""
    wanted = [value == _FULL32 for value in values]
    field = _zip64_field(extra, name, at)
    if field is None:
        if any(wanted):
            raise MalformedFile("a member without its zip64 sizes", kind="malformed-zip", offset=at)
        return values
    if len(field) < 8 * sum(wanted):
        raise MalformedFile("a zip64 field that is too short", kind="malformed-zip", offset=at)
    wide = [int.from_bytes(field[i : i + 8], "little") for i in range(0, len(field) - 7, 8)]
    if len(wide) != sum(wanted):
        raise _ambiguous("a zip64 field with values that nothing asks for", at)
    taken = iter(wide)
    nbytes, stored, header = (next(taken) if want else value for want, value in zip(wanted, values, strict=True))
    return nbytes, stored, header


def _zip64_field(extra: bytes, name: bytes, at: int) -> bytes | None:
    """Return the zip64 field among a member's extra fields, all of which must be sound."""
    found: bytes | None = None
    position = 0
    while position + 4 <= len(extra):
        tag, nbytes = _FIELD.unpack_from(extra, position)
        begin = position + 4
        position = begin + nbytes
        if position > len(extra):
            raise MalformedFile("an extra field reaches over its end", kind="malformed-zip", offset=at)
        if tag == _ZIP64:
            if found is not None:
                raise _ambiguous("two zip64 fields in one member", at)
            found = extra[begin:position]
        elif tag == _UNICODE_PATH and extra[begin + 5 : position] != name:  # behind a version and a checksum
            raise _ambiguous(f"member {_show(name)} has another name among its extra fields", at)
    if position < len(extra) and extra[position:].strip(b"\0"):  # aligners pad with zeros
        raise MalformedFile("an extra field that is cut short", kind="malformed-zip", offset=at)
    return found


def _check_entry(entry: _Entry, made_by: int, attributes: int, disk: int, at: int) -> None:
    if entry.flags & (_ENCRYPTED | _PATCHED):
        raise UnsupportedFeature(f"member {_show(entry.name)} is encrypted", kind="encrypted-zip", offset=at)
    if entry.method not in _METHODS:
        raise UnsupportedFeature(
            f"member {_show(entry.name)} is packed with method {entry.method}; 0 (stored) and 8 (deflate) are known",
            kind="zip-method",
            offset=at,
        )
    if disk not in (0, _FULL16):
        raise UnsupportedFeature("a zip in several volumes", kind="split-zip", offset=at)
    if entry.method == 0 and entry.stored_nbytes != entry.nbytes:
        raise _ambiguous(f"member {_show(entry.name)} is stored, but with two sizes", at)
    is_link = made_by >> 8 == 3 and attributes >> 28 not in (0, 4, 8)
    is_folder = attributes & 0x10 or (made_by >> 8 == 3 and attributes >> 28 == 4)
    if is_link or (is_folder and (entry.nbytes or not entry.name.endswith(b"/"))):
        raise _ambiguous(f"member {_show(entry.name)} is marked as a folder, link or device", at)


def _refuse_twins(entries: list[_Entry]) -> None:
    seen: dict[bytes, bytes] = {}
    for entry in entries:
        twin = seen.setdefault(entry.name.lower(), entry.name)
        if twin is not entry.name:
            what = "twice" if twin == entry.name else f"also as {_show(twin)}"
            raise _ambiguous(f"member {_show(entry.name)} is there {what}", entry.header)


def _read_member(ahead: ReadAhead, entry: _Entry, limit: int) -> tuple[Record, int]:
    """Return the record behind a local header that agrees with its entry, and the offset of the next header."""
    name, flags, method, crc32, stored_nbytes, nbytes, header = entry
    block, at = ahead.window(header, _LOCAL.size + len(name) + _USUAL_EXTRA)
    if header + _LOCAL.size > limit or not block.startswith(MAGIC, at):
        raise _ambiguous(f"member {_show(name)} has no local header where the directory says", header)
    local = _LOCAL.unpack_from(block, at)
    _, _, local_flags, local_method, _, _, local_crc, local_stored, local_nbytes, name_n, extra_n = local
    block, at = ahead.window(header, _LOCAL.size + name_n + extra_n)
    at += _LOCAL.size
    offset = header + _LOCAL.size + name_n + extra_n
    end = offset + stored_nbytes
    if end > limit:
        raise TruncatedFile(
            f"truncated: record {_show(name)} ends at byte {end:,}, the members end at {limit:,}",
            kind="truncated-zip",
            hint="Download the file again.",
            offset=offset,
            needed=end,
            actual=limit,
        )
    same_name = name_n == len(name) and block.startswith(name, at)
    if not same_name or local_flags != flags or local_method != method:
        raise _ambiguous(f"member {_show(name)}: its local header and the directory disagree", header)
    extra = block[at + name_n : at + name_n + extra_n]
    if _FULL32 in (local_stored, local_nbytes):
        if flags & _DESCRIPTOR and _zip64_field(extra, name, header) is None:
            local_nbytes, local_stored = nbytes, stored_nbytes
        else:
            local_nbytes, local_stored, _ = _widen(extra, name, (local_nbytes, local_stored, 0), header)
    elif extra:
        _zip64_field(extra, name, header)
    sizes = (crc32, stored_nbytes, nbytes)
    found = (local_crc, local_stored, local_nbytes)
    next_header = end
    if flags & _DESCRIPTOR:
        # The writer did not know them yet: zeros here, the values in a descriptor behind the payload.
        agree = found == (0, 0, 0) or all(one in (0, value) for one, value in zip(found, sizes, strict=True))
        next_header += _descriptor_nbytes(*ahead.window(end, min(24, limit - end)), limit - end, sizes)
        agree = agree and next_header > end
    else:
        agree = found == sizes
    if not agree:
        raise _ambiguous(f"member {_show(name)}: its local header and the directory disagree", header)
    return Record(_name(entry), offset, nbytes, stored_nbytes, _METHODS[method], crc32), next_header


def _descriptor_nbytes(block: bytes, at: int, room: int, sizes: tuple[int, int, int]) -> int:
    """Return the length of the descriptor that repeats ``sizes``, or 0: its signature and its width are optional."""
    for magic, layout in _DESCRIPTORS:
        if layout is _NARROW and max(sizes) > _FULL32:
            continue
        whole = magic + layout.pack(*sizes)
        if block.startswith(whole, at) and len(whole) <= room:
            return len(whole)
    return 0


def _name(entry: _Entry) -> str:
    try:
        name = str(entry.name, "utf-8" if entry.flags & 0x800 or entry.name.isascii() else "cp437")
    except UnicodeDecodeError as error:
        raise MalformedFile(f"member {_show(entry.name)} has a name that is not UTF-8", kind="malformed-zip") from error
    if not _NAME.fullmatch(name):
        raise MalformedFile(f"member {_show(entry.name)} has a name that no path may have", kind="malformed-zip")
    return name


def _show(name: bytes) -> str:
    text = ascii(str(name[:80], "utf-8", "replace"))
    return text if len(name) <= 80 else f"{text[:-1]}…'"


def _ambiguous(what: str, offset: int) -> AmbiguousFile:
    return AmbiguousFile(
        f"ambiguous zip at byte {offset:,}: {what}",
        kind="ambiguous-zip",
        hint="Save it again with the program that wrote it: readers would disagree about what is in it.",
        offset=offset,
    )
