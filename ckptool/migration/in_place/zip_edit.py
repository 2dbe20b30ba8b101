"""
The edit of a torch zip: a new ``data.pkl``, in the place of the old one or in front of the directory.

In its place, where it is no longer: a pickle can be padded to any length. The headers stay, but for the checksums.

Else it is a new member where the directory began, with a new directory behind it, and the old one stays a member under
a name that says so: what belongs to no member, or has a name twice, would make readers disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import ascii_lowercase, digits
from typing import Final
from zlib import crc32

from ckptool.archives.archive import Archive, Record
from ckptool.archives.zip_directory import END_SEARCH, Directory, find_directory
from ckptool.archives.zip_layout import (
    DESCRIPTOR_MAGIC,
    END,
    END_MAGIC,
    ENTRY,
    FLAG_DESCRIPTOR,
    FULL16,
    LOCAL,
)
from ckptool.migration.output.editing import FileEdit, not_in_place
from ckptool.migration.zip_writer import Frame, end_records
from ckptool.sources.journal import Run, poisoned_at
from ckptool.sources.source import ReadAhead, Source

_UNUSED: Final = ".unused"
_PIECE: Final = 1 << 16
_BITS: Final = bytes(1 << END_MAGIC.index(byte) if byte in END_MAGIC else 0 for byte in range(256))
_END_IN: Final = re.compile(b"".join(b"[%s]" % bytes(n for n in range(16) if n >> place & 1) for place in range(4)))
"""Finds where each byte of the magic is in its place, of either text."""
_MARKS: Final = digits + ascii_lowercase
"""What the names of old pickles end in: with one of these, a name is as long as that of data.pkl."""


def plan_zip(archive: Archive, name: str, pickled: bytes) -> FileEdit:
    """
    Return the edit that gives a zip another pickle under a name.

    Raises:
        MigrationRefused: It has been edited too often, or something in it looks like the end of a zip.
    """
    source = archive.source
    directory, _ = find_directory(source)
    record = archive[name]
    in_slot = len(pickled) == record.nbytes
    end = _end_of(source)
    planned = _in_slot(source, directory, record, pickled) if in_slot else _in_tail(archive, directory, name, pickled)
    runs = tuple(sorted(planned))
    nbytes = max(source.nbytes, runs[-1].end)
    new_end = end if in_slot else nbytes - _comment(source, end) - END.size
    edit = FileEdit(nbytes, runs, Run(end, END_MAGIC), Run(new_end, END_MAGIC))
    _refuse_other_ends(source, edit)
    return edit


def _in_slot(source: Source, directory: Directory, record: Record, pickled: bytes) -> Iterator[Run]:
    """
    Yield the pickle, and its checksum where there is one: in the header, behind the pickle, in the directory.

    The directory is written whole: by its other checksums, the journal tells the file from one that was saved over it.
    """
    checksum = crc32(pickled).to_bytes(4, "little")
    yield Run(record.offset, pickled)
    at = _entry(source, directory, record.name) + 16
    entries = source.read(directory.offset, directory.nbytes)
    yield Run(directory.offset, entries[:at] + checksum + entries[at + 4 :])
    header = _name_at(source, record) - LOCAL.size
    local = source.read(header, LOCAL.size)
    if int.from_bytes(local[6:8], "little") & FLAG_DESCRIPTOR:
        behind = record.offset + record.nbytes
        has_magic = source.read(behind, 4) == DESCRIPTOR_MAGIC
        yield Run(behind + 4 * has_magic, checksum)
    if any(local[14:18]):
        yield Run(header + 14, checksum)


def _in_tail(archive: Archive, directory: Directory, name: str, pickled: bytes) -> Iterator[Run]:
    """Yield the new name of the old pickle, and all that comes where the directory began."""
    source = archive.source
    at = _entry(source, directory, name)
    old = name.encode()
    unused = _free_name(archive, name).encode()
    yield Run(_name_at(source, archive[name]), unused)
    entries = bytearray(source.read(directory.offset, directory.nbytes))
    entries[at + ENTRY.size : at + ENTRY.size + len(old)] = unused
    frame = Frame(old, len(pickled), directory.offset)
    checksum = crc32(pickled)
    member = frame.local() + pickled + frame.descriptor(checksum)
    entries += frame.entry(checksum)
    end = _end_of(source)
    comment = source.read(end + END.size, _comment(source, end))
    start = directory.offset + len(member)
    yield Run(
        directory.offset, b"".join((member, entries, end_records(start, len(entries), directory.members + 1, comment)))
    )


def _name_at(source: Source, record: Record) -> int:
    """Return where the name in the local header of a member begins: only extra fields follow it there."""
    name = record.name.encode()
    start = max(0, record.offset - FULL16 - LOCAL.size - len(name))
    before = source.read(start, record.offset - start)
    at = len(before)
    while (at := before.rfind(name, 0, at)) >= LOCAL.size:
        _, _, _, _, _, _, _, _, _, name_n, extra_n = LOCAL.unpack_from(before, at - LOCAL.size)
        if name_n == len(name) and at + name_n + extra_n == len(before):
            return start + at
    raise not_in_place("its data.pkl has an unusual local header")


def _entry(source: Source, directory: Directory, name: str) -> int:
    """Return where in the directory the entry of a member begins."""
    ahead = ReadAhead(source)
    wanted = name.encode()
    position = directory.offset
    while position < directory.end:
        data, begin = ahead.window(position, ENTRY.size + len(wanted))
        name_n, extra_n, comment_n = ENTRY.unpack_from(data, begin)[10:13]
        begin += ENTRY.size
        if name_n == len(wanted) and data.startswith(wanted, begin):
            return position - directory.offset
        position += ENTRY.size + name_n + extra_n + comment_n
    raise not_in_place("its data.pkl has another name in the directory")


def _free_name(archive: Archive, name: str) -> str:
    """Return a name for the old pickle that is as long as its own, so that nothing else of its header changes."""
    folder = name[: -len("data.pkl")]
    taken = {one.lower() for one in archive}
    for mark in _MARKS:
        if f"{folder}{_UNUSED}{mark}".lower() not in taken:
            return f"{folder}{_UNUSED}{mark}"
    raise not_in_place(f"it holds {len(_MARKS)} old pickles by now")


def _end_of(source: Source) -> int:
    """Return where the end record begins, which ``find_directory`` found."""
    start = max(0, source.nbytes - END_SEARCH)
    return start + source.read(start, source.nbytes - start).rfind(END_MAGIC)


def _comment(source: Source, end: int) -> int:
    """Return the size of the comment behind the end record."""
    return int.from_bytes(source.read(end + 20, 2), "little")


def _refuse_other_ends(source: Source, edit: FileEdit) -> None:
    """
    Raise MigrationRefused where a reader could find another end record while the guard is poisoned.

    One of a zip inside the zip, in the last bytes of the old or the new file; or one that is made of old bytes and new
    ones, where a write is torn.
    """
    start = max(0, edit.guard.offset - END_SEARCH)
    found = END_MAGIC in poisoned_at(edit.guard, Run(start, source.read(start, source.nbytes - start)))
    if found or any(_END_IN.search(either) for either in _pieces(source, edit)):
        raise not_in_place("something in it looks like the end of a zip, which readers would find meanwhile")


def _pieces(source: Source, edit: FileEdit) -> Iterator[bytes]:
    """
    Yield, where something is written, which bytes of the magic the old bytes or the new ones are: a bit for each.

    With as much around it as a magic reaches.
    """
    for run in edit.runs:
        data = poisoned_at(edit.new_guard, run)
        for start in range(run.offset - 3, run.end, _PIECE):  # a local header stands in front of all that is edited
            stop = min(start + _PIECE, run.end) + 3
            around = source.read(start, max(0, min(stop, source.nbytes) - start))
            begin = start - run.offset
            new = around[: max(0, -begin)] + data[max(0, begin) : stop - run.offset]
            new += around[len(new) :]
            old = poisoned_at(edit.guard, Run(start, around)).translate(_BITS)
            either = int.from_bytes(old, "little") | int.from_bytes(new.translate(_BITS), "little")
            yield either.to_bytes(max(len(old), len(new)), "little")
