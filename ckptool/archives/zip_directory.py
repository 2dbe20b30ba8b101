"""
The central directory of a zip: found from the end of the file, or reported as cut off, and read entry by entry.

    central directory                     one entry for each member
    [zip64 end record, locator]
    end record                            22 bytes and a comment

Readers of zips differ in which of these they trust; a file in which they disagree is refused, and so is one with a
second directory.

Layout: PKWARE APPNOTE 6.3.10.

The records of a zip, as they are written in the file.

Source: PKWARE APPNOTE 6.3.10, https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT; numbers are its sections.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from ckptool.archives.archive import Compression
from ckptool.cancellation import each
from ckptool.errors import AmbiguousFile, MalformedFile, TruncatedFile, UnsupportedFeature
from ckptool.sources.source import Source

LOCAL_MAGIC: Final = b"PK\x03\x04"
LOCAL: Final = Struct("<4s5H3L2H")
"""4.3.7 Local file header: magic, version needed, flags, method, time, date, CRC-32, packed size, size, and the lengths
of name and extra fields, which follow."""

DESCRIPTOR_MAGIC: Final = b"PK\x07\x08"
DESCRIPTOR: Final = Struct("<3L")
"""4.3.9 Data descriptor, after its magic, which is optional: CRC-32, packed size, size."""
DESCRIPTOR64: Final = Struct("<LQQ")
"""4.3.9.2 The same of a zip64 member."""

ENTRY_MAGIC: Final = b"PK\x01\x02"
ENTRY: Final = Struct("<4s6H3L5H2L")
"""4.3.12 Central directory header: magic, made by, then as LOCAL from the version needed to the length of the extra
fields; length of the comment, disk, internal and external attributes, offset of the local header."""

END64_MAGIC: Final = b"PK\x06\x06"
END64: Final = Struct("<4sQ2H2L4Q")
"""4.3.14 Zip64 end of central directory record."""
LOCATOR_MAGIC: Final = b"PK\x06\x07"
LOCATOR: Final = Struct("<4sLQL")
"""4.3.15 Zip64 end of central directory locator."""
END_MAGIC: Final = b"PK\x05\x06"
END: Final = Struct("<4s4H2LH")
"""4.3.16 End of central directory record; a comment of at most 65,535 bytes follows."""

FULL16: Final = 0xFFFF
FULL32: Final = 0xFFFFFFFF
"""4.4.1.4 A count, a size or an offset that is in a zip64 record or field instead."""

FLAG_DESCRIPTOR: Final = 0x0008
FLAG_PATCHED: Final = 0x0020
FLAG_UTF8: Final = 0x0800
FLAGS_ENCRYPTED: Final = 0x0001 | 0x0040 | 0x2000
"""4.4.4 General purpose bit flag: bit 3, 5, 11; 0, 6 and 13."""

FIELD: Final = Struct("<HH")
"""4.5.1 Extra field: tag and length; its data follows."""
ZIP64_TAG: Final = 0x0001
"""4.5.3"""
UNICODE_PATH_TAG: Final = 0x7075
"""4.6.9"""


END_SEARCH = END.size + 0xFFFF
"""Bytes at the end of a file in which the end record has to be."""

SEVERAL = "several-zips"
METHODS: dict[int, Compression] = {0: "stored", 8: "deflate"}


class Directory(NamedTuple):
    """Offset and size of the central directory, in bytes, and how many members it lists."""

    offset: int
    nbytes: int
    members: int
    end: int
    """Offset of what follows the central directory: the zip64 end record, or the end record."""
    stop: int
    """Offset of what follows the archive, which is mostly nothing."""


class Entry(NamedTuple):
    """One entry of the central directory. Sizes and offsets are in bytes."""

    name: bytes
    flags: int
    method: int
    crc32: int
    stored_nbytes: int
    nbytes: int
    header: int
    """Offset of the local header."""


def find_directory(source: Source) -> Directory:
    """
    Return the one directory that every reader finds.

    Raises what ``read_zip`` raises about it. Neither the entries nor the members are looked at.
    """
    # The end record is found by its magic from the end of the file, because a comment of any length up to 65,535 bytes
    # may follow it. Readers search differently where there are several: the last one is taken, and an earlier one that
    # could have a directory of its own is refused below.
    tail_start = max(0, source.nbytes - END_SEARCH)
    tail = source.read(tail_start, source.nbytes - tail_start)
    at = tail.rfind(END_MAGIC)
    if at < 0 or len(tail) - at < END.size:
        fact = f"no zip central directory in the last {len(tail):,} bytes"
        raise TruncatedFile.early(fact, "zip", source.nbytes)
    end = tail_start + at
    _, disk, start_disk, disk_count, count, nbytes, offset, comment = END.unpack_from(tail, at)
    if disk not in (0, FULL16) or disk != start_disk or disk_count != count:
        raise UnsupportedFeature("a zip in several volumes", kind="split-zip")
    _refuse_several(source, end, nbytes, offset)
    stop = end + END.size + comment
    directory = _zip64_directory(source, end, count, nbytes, offset) or Directory(offset, nbytes, count, end, end)
    directory = directory._replace(stop=stop)
    # Some readers find the directory by its offset, others by its size counted back from the end record: where the two
    # differ, they would read different directories.
    gap = directory.end - directory.offset - directory.nbytes
    if gap:
        raise ambiguous(
            f"the central directory ends {abs(gap):,} bytes {'before' if gap > 0 else 'after'} its end record",
            end,
        )
    if stop > source.nbytes:
        raise ambiguous(f"the archive's comment of {comment:,} bytes is cut short", end)
    previous = tail.rfind(END_MAGIC, 0, at)
    if previous >= 0 and tail_start + previous >= directory.offset:
        raise ambiguous("a second end of archive", tail_start + previous)
    return directory


def _refuse_several(source: Source, end: int, nbytes: int, offset: int) -> None:
    """Raise UnsupportedFeature where the last of several zips, one after the other, has this end record."""
    at = end - LOCATOR.size
    locator = source.read(at, LOCATOR.size) if at >= END64.size else b""
    is_64 = locator.startswith(LOCATOR_MAGIC)
    start = at - END64.size - LOCATOR.unpack(locator)[2] if is_64 else end - nbytes - offset
    if start > 0 and source.read(start, 4) == source.read(0, 4) == LOCAL_MAGIC:
        raise UnsupportedFeature(
            f"several zips one after the other: the last begins at byte {start:,}", kind=SEVERAL, offset=start
        )


def _zip64_directory(source: Source, end: int, count: int, nbytes: int, offset: int) -> Directory | None:
    at = end - LOCATOR.size
    locator = source.read(at, LOCATOR.size) if at >= 0 else b""
    if not locator.startswith(LOCATOR_MAGIC):
        if FULL32 in (nbytes, offset):
            raise MalformedFile("the zip announces a zip64 directory and has none", kind="malformed-zip", offset=end)
        return None
    _, _, record_at, disks = LOCATOR.unpack(locator)
    if record_at + END64.size > at:
        raise MalformedFile("the zip64 end record lies outside the file", kind="malformed-zip", offset=at)
    fields = END64.unpack(source.read(record_at, END64.size))
    magic, size, _, _, disk, start_disk, disk_count64, count64, nbytes64, offset64 = fields
    if magic != END64_MAGIC or record_at + 12 + size != at or disk_count64 != count64:
        raise MalformedFile("the zip64 end record is damaged", kind="malformed-zip", offset=record_at)
    if (disk, start_disk, disks) != (0, 0, 1):
        raise UnsupportedFeature("a zip in several volumes", kind="split-zip", offset=record_at)
    if record_at + END64.size != at:  # zipfile takes what stands just before the locator for that record
        raise ambiguous("more data in the zip64 end record", record_at)
    # A field that is full says "see zip64"; any other must be the same in both records, else it depends on the reader.
    pairs = ((count, FULL16, count64), (nbytes, FULL32, nbytes64), (offset, FULL32, offset64))
    if any(short not in (full, long) for short, full, long in pairs):
        raise ambiguous("the zip and zip64 end records disagree", end)
    return Directory(offset64, nbytes64, count64, record_at, at)


def read_entries(source: Source, directory: Directory) -> list[Entry]:
    """
    Return the entries of the central directory, in its order.

    Raises:
        AmbiguousFile: It does not begin, or end, where the end record says.
        MalformedFile: It contradicts the format.
        UnsupportedFeature: A member is encrypted, or packed with something else than deflate.
    """
    if directory.nbytes < ENTRY.size * directory.members:
        fact = f"a central directory of {directory.nbytes:,} bytes for {directory.members:,} members"
        raise MalformedFile(fact, kind="malformed-zip", offset=directory.offset)
    data = source.read(directory.offset, directory.nbytes)
    entries = []
    position = 0
    for _ in each(range(directory.members), source.cancellation):
        at = directory.offset + position
        if position + ENTRY.size > len(data) or not data.startswith(ENTRY_MAGIC, position):
            raise ambiguous("the central directory is not where the end record says", at)
        fields = ENTRY.unpack_from(data, position)
        _, made_by, _, flags, method, _, _, crc, stored, nbytes, name_n, extra_n, comment_n = fields[:13]
        disk, _, attributes, header = fields[13:]
        name_at = position + ENTRY.size
        extra_at = name_at + name_n
        position = extra_at + extra_n + comment_n
        if position > len(data):
            raise ambiguous("an entry reaches over the end of the central directory", at)
        name = data[name_at:extra_at]
        if extra_n or FULL32 in (nbytes, stored, header):
            extra = data[extra_at : extra_at + extra_n]
            nbytes, stored, header = widen(extra, name, (nbytes, stored, header), at)
        entry = Entry(name, flags, method, crc, stored, nbytes, header)
        if method or disk or attributes or stored != nbytes or flags & (FLAGS_ENCRYPTED | FLAG_PATCHED):
            _check_entry(entry, made_by, attributes, disk, at)
        entries.append(entry)
    if position != len(data):
        raise ambiguous("the central directory holds more than its members", directory.offset + position)
    return entries


def widen(extra: bytes, name: bytes, values: tuple[int, int, int], at: int) -> tuple[int, int, int]:
    """Return the values with those that say "see zip64" taken from the extra field, which must hold just these."""
    wanted = [value == FULL32 for value in values]
    field = zip64_field(extra, name, at)
    if field is None:
        if any(wanted):
            raise MalformedFile("a member without its zip64 sizes", kind="malformed-zip", offset=at)
        return values
    if len(field) < 8 * sum(wanted):
        raise MalformedFile("a zip64 field that is too short", kind="malformed-zip", offset=at)
    wide = [int.from_bytes(field[i : i + 8], "little") for i in range(0, len(field) - 7, 8)]
    if len(wide) != sum(wanted):
        raise ambiguous("a zip64 field with values that nothing asks for", at)
    taken = iter(wide)
    nbytes, stored, header = (next(taken) if want else value for want, value in zip(wanted, values, strict=True))
    return nbytes, stored, header


def zip64_field(extra: bytes, name: bytes, at: int) -> bytes | None:
    """Return the zip64 field among a member's extra fields, all of which must be sound."""
    found: bytes | None = None
    position = 0
    while position + 4 <= len(extra):
        tag, nbytes = FIELD.unpack_from(extra, position)
        begin = position + 4
        position = begin + nbytes
        if position > len(extra):
            raise MalformedFile("an extra field reaches over its end", kind="malformed-zip", offset=at)
        if tag == ZIP64_TAG:
            if found is not None:
                raise ambiguous("two zip64 fields in one member", at)
            found = extra[begin:position]
        elif tag == UNICODE_PATH_TAG and extra[begin + 5 : position] != name:  # after a version and a checksum
            raise ambiguous(f"member {show_member(name)} has another name among its extra fields", at)
    if extra[position:].strip(b"\0"):  # aligners pad with zeros
        raise MalformedFile("an extra field that is cut short", kind="malformed-zip", offset=at)
    return found


def _check_entry(entry: Entry, made_by: int, attributes: int, disk: int, at: int) -> None:
    if entry.flags & (FLAGS_ENCRYPTED | FLAG_PATCHED):
        raise UnsupportedFeature(f"member {show_member(entry.name)} is encrypted", kind="encrypted-zip", offset=at)
    if entry.method not in METHODS:
        fact = f"member {show_member(entry.name)} is packed with method {entry.method}; 0 and 8 are known"
        raise UnsupportedFeature(fact, kind="zip-method", offset=at)
    if disk not in (0, FULL16):
        raise UnsupportedFeature("a zip in several volumes", kind="split-zip", offset=at)
    if entry.method == 0 and entry.stored_nbytes != entry.nbytes:
        raise ambiguous(f"member {show_member(entry.name)} is stored, but with two sizes", at)
    is_link = made_by >> 8 == 3 and attributes >> 28 not in (0, 4, 8)
    is_folder = attributes & 0x10 or (made_by >> 8 == 3 and attributes >> 28 == 4)
    if is_link or (is_folder and (entry.nbytes or not entry.name.endswith(b"/"))):
        raise ambiguous(f"member {show_member(entry.name)} is marked as a folder, link or device", at)


def show_member(name: bytes) -> str:
    text = ascii(str(name[:80], "utf-8", "replace"))
    return text if len(name) <= 80 else f"{text[:-1]}…'"


def ambiguous(what: str, offset: int) -> AmbiguousFile:
    return AmbiguousFile(
        f"ambiguous zip at byte {offset:,}: {what}",
        kind="ambiguous-zip",
        hint="Save it again with the program that wrote it: readers would disagree about what is in it.",
        offset=offset,
    )
