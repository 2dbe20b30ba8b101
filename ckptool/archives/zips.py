"""
The member table of a zip, accepted only where it has one reading.

    local header, payload, [descriptor]   for each member
    central directory                     one entry for each member
    [zip64 end record, locator]
    end record                            22 bytes and a comment

Strategy: find the one end record, take the central directory from there, then compare every local header and descriptor
with it.

Rules, because readers of zips differ in which of these records they trust:
1. Directory, local headers and descriptors agree, or the file is refused: each reader would see other members.
2. Members do not overlap, and there is one directory: readers from the start and from the end see the same.
3. No two members have one name, with upper and lower case taken for the same: readers would keep one or the other.
4. Bytes that belong to no member, or follow the end, are noted; they are refused only if they look like members.

Layout: PKWARE APPNOTE 6.3.10. What torch writes: caffe2/serialize/inline_container.cc.

``placed`` says where payloads lie, as far as the directory alone tells, for files that are slow to read: it has the
offset of each local header, and not how long that is. Two ways lead to the payload, and where they agree nothing is
left to know: back from the next header over the descriptor and the payload, and forward over the header as torch and
zipfile write it. torch pads the name with extra fields to the next multiple of 64 (``getPadding``); zipfile adds none.

Of several zips one after the other, where each begins and ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Final, NamedTuple

from ckptool.archives.archive import NUMPY, Archive, Record
from ckptool.archives.zip_directory import (
    DESCRIPTOR,
    DESCRIPTOR64,
    DESCRIPTOR_MAGIC,
    END,
    END64,
    END64_MAGIC,
    END_MAGIC,
    END_SEARCH,
    ENTRY_MAGIC,
    FIELD,
    FLAG_DESCRIPTOR,
    FLAG_UTF8,
    FULL32,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR,
    LOCATOR_MAGIC,
    METHODS,
    SEVERAL,
    Entry,
    ambiguous,
    find_directory,
    read_entries,
    show_member,
    widen,
    zip64_field,
)
from ckptool.errors import AmbiguousFile, Failure, LimitExceeded, MalformedFile, TruncatedFile
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.sources.source import ReadAhead, SliceSource, Source, far_under

_DESCRIPTORS = [(magic, layout) for magic in (DESCRIPTOR_MAGIC, b"") for layout in (DESCRIPTOR, DESCRIPTOR64)]
_USUAL_EXTRA = 68 + len(NUMPY)
"""Bytes of extra fields that writers use to align payloads, at most, and as many of the payload as tell an array."""
_UNREAD = "the local headers of {count} members were not read, which is done together with what they hold"
# Patterns that most files do not need are compiled when they are needed: it takes as long as a module.
_NAME: Final = r"[^\x00-\x1f\\/][^\x00-\x1f\\]*"
"""No control characters or backslashes, not absolute."""
_USUAL_NAMES = re.compile(rb"\w[\w./-]*(?:\n\w[\w./-]*)*")
_WAY_UP: Final = r"(?:.*/)?\.\.(?:/.*)?"
_ALIGNMENT: Final = 64
_SIGNATURE: Final = 4
_BARE: Final = (0,)
_DESCRIPTOR_SIZES: Final = (_SIGNATURE + DESCRIPTOR.size, _SIGNATURE + DESCRIPTOR64.size)
_HEADER_NBYTES: Final = 160
"""What is fetched of a local header beyond its name."""


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
    names = _names(entries)
    places = _places(source, entries, names, directory.offset)
    for entry, name, place in zip(entries, names, places, strict=True):
        if entry.header < position:
            raise ambiguous(f"member {show_member(entry.name)} begins inside another", entry.header)
        if entry.header > position:
            gaps.append(range(position, entry.header))
        if place is None:
            record, position = _read_member(ahead, entry, name, directory.offset)
        else:
            sizes, position = (entry.nbytes, entry.stored_nbytes), place.end
            record = Record(name, place.offset, *sizes, METHODS[entry.method], entry.crc32)
        if name in records:
            raise ambiguous(f"two members are called {name!r} once decoded", entry.header)
        if name[-1] != "/":
            records[name] = record
        elif record.nbytes:  # a folder for some, a file for others
            raise ambiguous(f"member {show_member(entry.name)} is called like a folder, and has content", entry.header)
    if position > directory.offset:
        raise ambiguous("the last member reaches into the central directory", directory.offset)
    gaps += filter(None, [range(position, directory.offset)])
    notes = [_note_gap(source, gap.start, gap.stop) for gap in gaps]
    if after := range(directory.stop, source.nbytes):
        gaps.append(after)
        notes.insert(0, f"{len(after):,} bytes after the end of the archive")
    return Archive(source, records, limits, tuple(notes), tuple(gaps))


def _places(source: Source, entries: list[Entry], names: list[str], limit: int) -> Iterable[Place | None]:
    """
    Return where payloads lie of which the local header is read later: in a file far away, with the payload.

    All other local headers of such a file are asked for at once.
    """
    under = far_under(source)
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

    later = [(entries[number].header + shift, place.end + shift) for number in left if (place := places[number])]
    far.compare_later(later, compare, _UNREAD)
    return places


def _note_gap(source: Source, start: int, stop: int) -> str:
    """Return a note on bytes that belong to no member; refuse those that some reader could take for members."""
    nbytes = stop - start
    head = source.read(start, min(len(LOCAL_MAGIC), nbytes))
    tail = source.read(max(start, stop - END_SEARCH), min(END_SEARCH, nbytes))
    if head == LOCAL_MAGIC or END_MAGIC in tail:
        raise ambiguous(f"{nbytes:,} bytes that belong to no member look like members", start)
    return f"{nbytes:,} bytes at {start:,} belong to no member"


def _refuse_twins(entries: list[Entry]) -> None:
    if len({entry.name.lower() for entry in entries}) == len(entries):
        return
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
    # Python from 3.14 on, appending to a zip, takes the mark of UTF-8 from names of ASCII, but in the directory alone.
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
        # The writer did not know them yet: zeros here, the values in a descriptor after the payload.
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
    """Return the length of the descriptor that repeats ``sizes``, or 0: its signature and its width are optional."""
    for magic, layout in _DESCRIPTORS:
        if layout is DESCRIPTOR and max(sizes) > FULL32:
            continue
        whole = magic + layout.pack(*sizes)
        if block.startswith(whole, at) and len(whole) <= room:
            return len(whole)
    return 0


def _names(entries: list[Entry]) -> list[str]:
    """Return the names of the members, decoded: all at once where none is unusual."""
    joined = b"\n".join([entry.name for entry in entries])
    if _USUAL_NAMES.fullmatch(joined) and b".." not in joined and joined.count(b"\n") == len(entries) - 1:
        return joined.decode("ascii").split("\n")
    return [_name(entry) for entry in entries]


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


class Place(NamedTuple):
    """Offset of a payload, and of what follows the member."""

    offset: int
    end: int


def placed(entries: Sequence[Entry], limit: int) -> tuple[list[Place | None], list[tuple[int, int]]]:
    """
    Return for each entry, in the order of the headers, where its payload lies, or None where that is not certain; and
    what has to be read of the latter: their headers, and the descriptors behind them.
    """
    places: list[Place | None] = []
    ranges = []
    following = [*(entry.header for entry in entries[1:]), limit]
    for entry, end in zip(entries, following, strict=True):
        descriptors = _DESCRIPTOR_SIZES if entry.flags & FLAG_DESCRIPTOR else _BARE
        agreed = {end - nbytes - entry.stored_nbytes for nbytes in descriptors} & _forward(entry)
        places.append(Place(agreed.pop(), end) if len(agreed) == 1 else None)
        if places[-1] is None:
            ranges.append((entry.header, min(end, entry.header + len(entry.name) + _HEADER_NBYTES)))
            if entry.flags & FLAG_DESCRIPTOR:
                ranges.append((max(entry.header, end - _DESCRIPTOR_SIZES[-1]), end))
    return places, ranges


def _forward(entry: Entry) -> set[int]:
    bare = entry.header + LOCAL.size + len(entry.name)
    padded = bare + FIELD.size
    if entry.stored_nbytes >= FULL32 or entry.header >= FULL32:
        padded += FIELD.size + (16 if entry.stored_nbytes >= FULL32 else 0) + (8 if entry.header >= FULL32 else 0)
    return {bare, padded + -padded % _ALIGNMENT}


_MOST_ZIPS: Final = 10_000


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


def in_front(source: Source) -> int | None:
    """
    Return how many bytes stand in front of the zip that ends a source, as zipfile counts them.

    Fewer than none if its directory says that it is further behind than it is; None if zipfile finds no directory.
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
