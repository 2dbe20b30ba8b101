"""
The members of a zip, accepted only if all readers agree on them. Also the ranges of several zips in one file.

    local header, payload, [descriptor]   for each member
    central directory                     one entry for each member
    [zip64 end record, locator]
    end record                            22 bytes and a comment

Strategy: find the end record, read the central directory that it points to, then compare every local header and
descriptor with it.

Rules, because readers of zips differ in which of these records they trust:
1. Directory, local headers and descriptors must agree; otherwise readers would see different members.
2. Members do not overlap, and there is one directory: readers from the start and from the end see the same.
3. No two members have the same name, ignoring case: readers would keep one or the other.
4. Bytes that belong to no member, or follow the end, are noted; they are refused only if they look like members.

Layout: PKWARE APPNOTE 6.3.10. What torch writes: caffe2/serialize/inline_container.cc.

``placed`` computes the offsets of payloads from the directory alone, for files that are slow to read. The directory
has the offset of each local header, but not its length. There are two computations: backward from the next header over
the descriptor and the payload, and forward over a header as torch or zipfile writes it (torch pads the name with extra
fields to the next multiple of 64, ``getPadding``; zipfile adds none). If both agree, the offset is certain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from struct import Struct
from typing import Final, NamedTuple

from ckptool.archives.archive import NUMPY, Archive, Compression, Record
from ckptool.cancellation import each
from ckptool.errors import AmbiguousFile, Failure, LimitExceeded, MalformedFile, TruncatedFile, UnsupportedFeature
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.sources.source import ReadAhead, SliceSource, Source, remote_under

# Who reads what, so that a file may not show each something else:
# 1. zipfile and miniz (which PyTorch uses) find the end record from the end of the file, and believe the directory;
#    programs that read a stream, and those that repair zips, believe the local headers, from the start.
# 2. zipfile takes the bytes right before the locator for the zip64 record, and counts the directory back from the end
#    record; others use the offsets in these records. So both have to lead to the same bytes.
# 3. Sizes may be left out of a local header (bit 3 of its flags), and follow the payload, with or without a magic, in 4
#    or 8 bytes. Whatever is there has to agree with the directory.
# 4. A name is compared as bytes and decoded as zipfile does it. Names that differ only in case are one file on Windows
#    and macOS; absolute ones and those with ".." lead out of the folder to which a member is unpacked.
# 5. Writers align payloads with extra fields (torch to 64 bytes), or pad with zeros, so that these may have any tag;
#    but the two that change sizes or names have to say what the entry says.

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
"""4.4.1.4 The value of a count, size or offset that is stored in a zip64 record or field instead."""

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
"""Bytes at the end of a file that must contain the end record."""

SEVERAL = "several-zips"
METHODS: dict[int, Compression] = {0: "stored", 8: "deflate"}
_DESCRIPTORS = [(magic, layout) for magic in (DESCRIPTOR_MAGIC, b"") for layout in (DESCRIPTOR, DESCRIPTOR64)]
_USUAL_EXTRA = 68 + len(NUMPY)
"""Bytes after the name that are read with a header: extra fields for alignment, and numpy's magic in the payload."""
_UNREAD = "the local headers of {count} members were not read, which is done together with what they hold"
# Patterns that most files do not need are compiled on use: compiling them takes as long as importing a module.
_NAME: Final = r"[^\x00-\x1f\\/][^\x00-\x1f\\]*"
"""No control characters or backslashes, not absolute."""
_WAY_UP: Final = r"(?:.*/)?\.\.(?:/.*)?"
_ALIGNMENT: Final = 64
_SIGNATURE: Final = 4
_DESCRIPTOR_SIZES: Final = (_SIGNATURE + DESCRIPTOR.size, _SIGNATURE + DESCRIPTOR64.size)
_HEADER_NBYTES: Final = 160
"""Bytes of a local header, without its name, that are fetched from a remote file."""


def read_zip(source: Source, limits: Limits = DEFAULT_LIMITS) -> Archive:
    """
    Return the members of a zip, in the order of their bytes in the file.

    It reads the directory and every local header, but no payload.

    Raises:
        TruncatedFile: There is no central directory at the end.
        AmbiguousFile: Readers could disagree about what is in it.
        MalformedFile: It contradicts the format.
        UnsupportedFeature: It is encrypted, or compressed with another method than deflate.
        LimitExceeded: It has too many members.
    """
    directory = find_directory(source)
    if directory.members > limits.entries:
        fact = f"the zip has {directory.members:,} members; {limits.entries:,} are allowed"
        raise LimitExceeded(fact, needed=directory.members, actual=limits.entries)
    source.prefetch([(directory.offset, directory.end)])
    entries = read_entries(source, directory)
    _refuse_twins(entries)
    records: dict[str, Record] = {}
    position = 0
    gaps: list[range] = []
    ahead = ReadAhead(source)
    entries.sort(key=attrgetter("header"))
    names = list(map(_name, entries))
    places = _places(source, entries, names, directory.offset)
    for entry, name, place in zip(entries, names, places, strict=True):
        if entry.header < position:
            raise ambiguous(f"member {show_member(entry.name)} begins inside another", entry.header)
        if entry.header > position:
            gaps.append(range(position, entry.header))
        if place is None:
            record, position = _read_member(ahead, entry, name, directory.offset)
        else:
            offset, position = place
            record = Record(name, offset, entry.nbytes, entry.stored_nbytes, METHODS[entry.method], entry.crc32)
        if name in records:
            raise ambiguous(f"two members are called {name!r} once decoded", entry.header)
        if name[-1] != "/":
            records[name] = record
        elif record.nbytes:  # a folder for some readers, a file for others
            raise ambiguous(f"member {show_member(entry.name)} is called like a folder, and has content", entry.header)
    if position > directory.offset:
        raise ambiguous("the last member reaches into the central directory", directory.offset)
    gaps += filter(None, [range(position, directory.offset)])
    notes = [_note_gap(source, gap.start, gap.stop) for gap in gaps]
    if after := range(directory.stop, source.nbytes):
        gaps.append(after)
        notes.insert(0, f"{len(after):,} bytes after the end of the archive")
    return Archive(source, records, limits, tuple(notes), tuple(gaps))


def placed(entries: Sequence[Entry], limit: int) -> tuple[list[tuple[int, int] | None], list[tuple[int, int]]]:
    """
    Return the offset of the payload of each entry, and of the next member, or None if they are not certain; and the
    ranges to read for those that are not: of local headers and descriptors.

    The entries must be in the order of their headers; ``limit`` is the end of the last member.
    """
    places: list[tuple[int, int] | None] = []
    ranges = []
    following = [*(entry.header for entry in entries[1:]), limit]
    for entry, end in zip(entries, following, strict=True):
        bare = entry.header + LOCAL.size + len(entry.name)
        padded = bare + FIELD.size
        if entry.stored_nbytes >= FULL32 or entry.header >= FULL32:
            padded += FIELD.size + (16 if entry.stored_nbytes >= FULL32 else 0) + (8 if entry.header >= FULL32 else 0)
        descriptors = _DESCRIPTOR_SIZES if entry.flags & FLAG_DESCRIPTOR else (0,)
        backward = {end - nbytes - entry.stored_nbytes for nbytes in descriptors}
        agreed = backward & {bare, padded + -padded % _ALIGNMENT}
        places.append((agreed.pop(), end) if len(agreed) == 1 else None)
        if places[-1] is None:
            ranges.append((entry.header, min(end, entry.header + len(entry.name) + _HEADER_NBYTES)))
            if entry.flags & FLAG_DESCRIPTOR:
                ranges.append((max(entry.header, end - _DESCRIPTOR_SIZES[-1]), end))
    return places, ranges


def _places(source: Source, entries: list[Entry], names: list[str], limit: int) -> Iterable[tuple[int, int] | None]:
    """
    Return the place of each member whose local header can be compared later, with its payload; None for the others.

    This is only done for remote files. Local headers of the other members are announced, to be fetched together.
    """
    under = remote_under(source)
    if under is None:
        return repeat(None, len(entries))
    far, shift = under
    places, ranges = placed(entries, limit)
    source.prefetch(ranges)
    left = [number for number, place in enumerate(places) if place is not None]

    def compare(which: int) -> None:
        entry, name, place = entries[left[which]], names[left[which]], places[left[which]]
        ahead = ReadAhead(SliceSource(far.unchecked, shift, source.nbytes))
        record, end = _read_member(ahead, entry, name, limit)
        if (record.offset, end) != place:
            raise _disagree(entry)

    later = [(entries[number].header + shift, place[1] + shift) for number in left if (place := places[number])]
    far.compare_later(later, compare, _UNREAD)
    return places


def _note_gap(source: Source, start: int, stop: int) -> str:
    """Return a note on bytes that belong to no member; raise AmbiguousFile if they could be taken for members."""
    nbytes = stop - start
    head = source.read(start, min(len(LOCAL_MAGIC), nbytes))
    tail = source.read(max(start, stop - END_SEARCH), min(END_SEARCH, nbytes))
    if head == LOCAL_MAGIC or END_MAGIC in tail:
        raise ambiguous(f"{nbytes:,} bytes that belong to no member look like members", start)
    return f"{nbytes:,} bytes at {start:,} belong to no member"


def _refuse_twins(entries: list[Entry]) -> None:
    seen: dict[bytes, bytes] = {}
    for entry in entries:
        twin = seen.setdefault(entry.name.lower(), entry.name)
        if twin is not entry.name:
            what = "twice" if twin == entry.name else f"also as {show_member(twin)}"
            raise ambiguous(f"member {show_member(entry.name)} is there {what}", entry.header)


def _read_member(ahead: ReadAhead, entry: Entry, decoded: str, limit: int) -> tuple[Record, int]:
    """Return the record of a member whose local header agrees with its entry, and the offset of the next header."""
    name, flags, method, crc32, stored_nbytes, nbytes, header = entry
    block, at = ahead.window(header, LOCAL.size + len(name) + _USUAL_EXTRA)
    if header + LOCAL.size > limit or not block.startswith(LOCAL_MAGIC, at):
        raise ambiguous(f"member {show_member(name)} has no local header where the directory says", header)
    local = LOCAL.unpack_from(block, at)
    _, _, local_flags, local_method, _, _, local_crc, local_stored, local_nbytes, name_n, extra_n = local
    offset = header + LOCAL.size + name_n + extra_n
    end = offset + stored_nbytes
    if end > limit:
        fact = f"record {show_member(name)} ends at byte {end:,}, the members end at {limit:,}"
        raise TruncatedFile.early(fact, "zip", limit, end, offset)
    if at + offset - header + len(NUMPY) > len(block):
        block, at = ahead.window(header, offset - header + min(len(NUMPY), stored_nbytes))
    at += LOCAL.size
    # Python 3.14 and later, when appending to a zip, clears the UTF-8 flag of ASCII names, in the directory alone.
    unlike = local_flags ^ flags
    if name_n != len(name) or not block.startswith(name, at) or local_method != method:
        raise _disagree(entry)
    if unlike and unlike & ~(FLAG_UTF8 if name.isascii() else 0):
        raise _disagree(entry)
    at += name_n
    extra = block[at : at + extra_n]
    if local_stored == FULL32 or local_nbytes == FULL32:
        if flags & FLAG_DESCRIPTOR and zip64_field(extra, name, header) is None:
            local_nbytes, local_stored = nbytes, stored_nbytes
        else:
            local_nbytes, local_stored, _ = widen(extra, name, (local_nbytes, local_stored, 0), header)
    elif extra:
        zip64_field(extra, name, header)
    is_array = block.startswith(NUMPY, at + extra_n) and stored_nbytes >= len(NUMPY)
    sizes = (crc32, stored_nbytes, nbytes)
    found = (local_crc, local_stored, local_nbytes)
    next_header = end
    if flags & FLAG_DESCRIPTOR:
        # The writer did not know the sizes yet: zeros here, the values in a descriptor after the payload.
        agree = found == (0, 0, 0) or all(one in (0, value) for one, value in zip(found, sizes, strict=True))
        block, at = ahead.window(end, min(24, limit - end))
        next_header += _descriptor_nbytes(block, at, limit - end, sizes)
        agree = agree and next_header > end
    else:
        agree = found == sizes
    if not agree:
        raise _disagree(entry)
    return Record(decoded, offset, nbytes, stored_nbytes, METHODS[method], crc32, is_array), next_header


def _disagree(entry: Entry) -> AmbiguousFile:
    return ambiguous(f"member {show_member(entry.name)}: its local header and the directory disagree", entry.header)


def _descriptor_nbytes(block: bytes, at: int, room: int, sizes: tuple[int, int, int]) -> int:
    """Return the length of the descriptor that repeats ``sizes``; 0 if there is none. It has four possible forms."""
    for magic, layout in _DESCRIPTORS:
        if layout is DESCRIPTOR and max(sizes) > FULL32:
            continue
        whole = magic + layout.pack(*sizes)
        if block.startswith(whole, at) and len(whole) <= room:
            return len(whole)
    return 0


def _name(entry: Entry) -> str:
    try:
        name = str(entry.name, "utf-8" if entry.flags & FLAG_UTF8 or entry.name.isascii() else "cp437")
    except UnicodeDecodeError as error:
        raise MalformedFile(
            f"member {show_member(entry.name)} has a name that is not UTF-8", kind="malformed-zip"
        ) from error
    if not re.fullmatch(_NAME, name) or (".." in name and re.fullmatch(_WAY_UP, name)):
        raise MalformedFile(f"member {show_member(entry.name)} has a name that no path may have", kind="malformed-zip")
    return name


_MOST_ZIPS: Final = 10_000


def zips(source: Source) -> list[range]:
    """Return the range of each zip if a source is several zips, else nothing; above 10,000, the first has the rest."""
    found: list[range] = []
    end = source.nbytes
    while len(found) < _MOST_ZIPS:
        try:
            find_directory(SliceSource(source, 0, end))
        except Failure as error:
            if error.kind == SEVERAL and error.offset:
                found.insert(0, range(error.offset, end))
                end = error.offset
                continue
        break
    return [range(end), *found] if found else []


def nbytes_before(source: Source) -> int | None:
    """
    Return how many bytes precede the zip at the end of a source, as zipfile counts them.

    Negative if the directory is before the offset that the end record has; None if zipfile finds no directory.
    """
    begin = max(0, source.nbytes - END_SEARCH)
    last = source.read(begin, source.nbytes - begin)
    bare = len(last) - END.size
    at = bare if bare >= 0 and last.startswith(END_MAGIC, bare) and last.endswith(bytes(2)) else last.rfind(END_MAGIC)
    if at < 0 or at > bare:
        return None
    end = begin + at
    nbytes: int
    offset: int
    nbytes, offset, _ = END.unpack_from(last, at)[-3:]
    record_at = end - LOCATOR.size - END64.size
    if record_at >= 0 and source.read(end - LOCATOR.size, len(LOCATOR_MAGIC)) == LOCATOR_MAGIC:
        record = source.read(record_at, END64.size)
        if record.startswith(END64_MAGIC):
            end, (nbytes, offset) = record_at, END64.unpack(record)[-2:]
    start = end - nbytes
    if start < 0 or source.read(start, len(ENTRY_MAGIC)) != ENTRY_MAGIC:
        return None
    return start - offset


# The central directory: found from the end of the file, and read entry by entry


class Directory(NamedTuple):
    """Offset and size of the central directory, in bytes, and how many members it lists."""

    offset: int
    nbytes: int
    members: int
    end: int
    """Offset of the next record: the zip64 end record, or the end record."""
    stop: int
    """Offset of the end of the archive, usually of the file."""


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

    It raises the errors of ``read_zip``. Neither the entries nor the members are read.
    """
    # The end record is searched by its magic from the end of the file, because a comment of up to 65,535 bytes may
    # follow it. Readers differ in which of several they find: the last one is taken, and an earlier one that could
    # have a directory of its own is refused below.
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
    stop = end + END.size + comment
    directory = Directory(offset, nbytes, count, end, stop)
    at_locator = end - LOCATOR.size
    locator = source.read(at_locator, LOCATOR.size) if at_locator >= 0 else b""
    is_64 = locator.startswith(LOCATOR_MAGIC)
    # The last of several zips, one after the other, counts its offsets from its own start.
    start = at_locator - END64.size - LOCATOR.unpack(locator)[2] if is_64 else end - nbytes - offset
    if start > 0 and source.read(start, 4) == source.read(0, 4) == LOCAL_MAGIC:
        raise UnsupportedFeature(
            f"several zips one after the other: the last begins at byte {start:,}", kind=SEVERAL, offset=start
        )
    if is_64:
        directory = _zip64_directory(source, at_locator, locator, directory)
    elif FULL32 in (nbytes, offset):
        raise MalformedFile("the zip announces a zip64 directory and has none", kind="malformed-zip", offset=end)
    # Some readers find the directory by its offset, others by its size counted back from the end record: if the two
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


def _zip64_directory(source: Source, at: int, locator: bytes, short: Directory) -> Directory:
    """Return the directory that the zip64 end record has, to which the locator at ``at`` leads."""
    _, _, record_at, disks = LOCATOR.unpack(locator)
    if record_at + END64.size > at:
        raise MalformedFile("the zip64 end record lies outside the file", kind="malformed-zip", offset=at)
    fields = END64.unpack(source.read(record_at, END64.size))
    magic, size, _, _, disk, start_disk, disk_count64, count64, nbytes64, offset64 = fields
    if magic != END64_MAGIC or record_at + 12 + size != at or disk_count64 != count64:
        raise MalformedFile("the zip64 end record is damaged", kind="malformed-zip", offset=record_at)
    if (disk, start_disk, disks) != (0, 0, 1):
        raise UnsupportedFeature("a zip in several volumes", kind="split-zip", offset=record_at)
    if record_at + END64.size != at:  # zipfile takes the bytes just before the locator for that record
        raise ambiguous("more data in the zip64 end record", record_at)
    # A field that is full says "see zip64"; any other must be the same in both records, else it depends on the reader.
    pairs = ((short.members, FULL16, count64), (short.nbytes, FULL32, nbytes64), (short.offset, FULL32, offset64))
    if any(value not in (full, long) for value, full, long in pairs):
        raise ambiguous("the zip and zip64 end records disagree", short.end)
    return Directory(offset64, nbytes64, count64, record_at, short.stop)


def read_entries(source: Source, directory: Directory) -> list[Entry]:
    """
    Return the entries of the central directory, in its order.

    Raises:
        AmbiguousFile: It does not begin, or end, where the end record says.
        MalformedFile: It contradicts the format.
        UnsupportedFeature: A member is encrypted, or compressed with another method than deflate.
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
    """Return the values, with those that say "see zip64" from the extra field, which must have exactly these."""
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
    """Return the zip64 field of a member's extra fields, or None; raise an error if any field is malformed."""
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
