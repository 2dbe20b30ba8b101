"""
The journal of an edit in place: its bytes, and whether it counts.

    magic                     16 bytes
    head                      which file, its size before and after, the guards, how many changes
    offset, size              of each change, twice 64 bits
    the bytes of each change  the old ones, up to the old end of the file, and then the new ones
    CRC-32                    of all of the above

It is complete and on the disk when it gets its name. It is written in little-endian order.

1. It counts only if it is a regular file with one name that belongs to root, the owner of the checkpoint or this user,
   and that no other user may write. So whoever may only add files to a folder can neither change nor block a file.
2. It is stale unless the file's content can come from the edit: the old bytes, the new ones, or a mixture without a
   complete guard, in which each byte is old, new or poison. A file that was saved over since is never written to.
"""

from __future__ import annotations

import os
import stat
from struct import Struct
from typing import Final, Literal, NamedTuple
from zlib import crc32

import ckptool.system as system
from ckptool.errors import UnfinishedEdit, reason_of

_MAGIC: Final = b"ckptool undo 2\n\0"
_HEAD: Final = Struct("<16s3qq8sq8s2q")
"""Magic; inode, size before, size after; offset and bytes of the two guards, and their size; number of changes."""
_RANGE: Final = Struct("<2q")
_SUM_NBYTES: Final = 4
_MOST_NBYTES: Final = 1 << 28
_PIECE: Final = 1 << 16
_END: Final = ".ckptool-undo"
_LONGEST: Final = 255 - len(".new")
"""Bytes that the name of a journal may have: what file systems allow, less the suffix while it is being written."""
_REMOVE: Final = "If the file is the one that you want, remove what has that name."

State = Literal["none", "foreign", "unread", "damaged", "stale", "whole", "torn"]
"""There is no journal; or it does not count (``foreign``), cannot be read, fails its checksum, or does not fit the
content of the file (``stale``). Else the file is the old or the new one (``whole``), or neither (``torn``)."""


def journal_path(path: str) -> str:
    """Return the path of the journal that a file has while it is edited in place, in the same folder."""
    folder, name = os.path.split(path)
    found = f".{name}{_END}"
    if len(found) > _LONGEST // 4 and len(os.fsencode(found)) > _LONGEST:  # a character has at most four bytes
        from hashlib import sha256  # few names are so long

        found = f".{sha256(os.fsencode(name)).hexdigest()}{_END}"
    return os.path.join(folder, found)


def refuse_edited(path: str, *states: str, fd: int | None = None, folder: int | None = None) -> None:
    """
    Raise UnfinishedEdit if the journal of a file has one of the given states, of ``State``.

    ``fd`` is a descriptor of the file, if it is open; with ``folder``, a descriptor, ``path`` is a name in that folder.
    Without a journal this takes one system call: files are opened by the thousand.
    """
    if look(path, fd, folder).state in states:
        raise unfinished(path)


def unfinished(path: str) -> UnfinishedEdit:
    """Return the error for a file that has a journal."""
    return UnfinishedEdit(
        "it is being edited in place, or was when the process ended: it may be neither the old file nor the new one",
        path=path,
        hint="Wait if it is being edited; if nothing edits it any more, make it what it was before.",
        command=system.command_line("ckptool", "recover", *(("--",) if path.startswith("-") else ()), path),
    )


class Run(NamedTuple):
    """Bytes at an offset of a file."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """Offset of the byte after the last."""
        return self.offset + len(self.data)

    def is_in(self, other: Run) -> bool:
        """Return whether it begins inside another."""
        return other.offset <= self.offset < other.end


class Change(NamedTuple):
    """Bytes of a file before and after an edit. The old ones are fewer where the file ended."""

    offset: int
    old: bytes | memoryview
    new: bytes | memoryview


class Journal(NamedTuple):
    """The changes of an edit, with the old bytes that undo them."""

    inode: int
    """The inode of the file: the journal does not count for another file that has its name by now."""
    nbytes: int
    new_nbytes: int
    guard: Run
    """Bytes, eight at most, without which no reader accepts the old file."""
    new_guard: Run
    """As many bytes without which no reader accepts the new file."""
    changes: tuple[Change, ...]
    """They do not overlap, and include the guards."""

    def encoded(self) -> bytes:
        """Return the bytes of the journal."""
        sizes = len(self.guard.data), len(self.changes)
        parts: list[bytes | memoryview] = [_HEAD.pack(_MAGIC, *self[:3], *self.guard, *self.new_guard, *sizes)]
        parts += [_RANGE.pack(one.offset, len(one.new)) for one in self.changes]
        for one in self.changes:
            parts += one.old, one.new
        checksum = 0
        for part in parts:
            checksum = crc32(part, checksum)
        return b"".join((*parts, checksum.to_bytes(_SUM_NBYTES, "little")))

    def state(self, fd: int) -> State:
        """Return whether an open file is ``whole``, ``torn``, or not of this edit (``stale``)."""
        status = os.fstat(fd)
        if status.st_ino != self.inode or not self.nbytes <= status.st_size <= self.new_nbytes:
            return "stale"
        is_old, is_new = status.st_size == self.nbytes, status.st_size == self.new_nbytes
        for offset, old, new in self.changes:
            for at in range(0, len(new), _PIECE):
                will = Run(offset + at, bytes(new[at : at + _PIECE]))
                was = bytes(old[at : at + _PIECE]).ljust(len(will.data), b"\0")
                now = system.read_at(fd, len(was), will.offset).ljust(len(was), b"\0")
                is_old, is_new = is_old and now == was, is_new and now == will.data
                if now not in (was, will.data):
                    poisoned = poisoned_at(self.new_guard, Run(will.offset, poisoned_at(self.guard, will)))
                    if any(byte not in known for byte, *known in zip(now, was, will.data, poisoned, strict=True)):
                        return "stale"
        if is_old or is_new:
            return "whole"
        return "stale" if has(fd, self.guard) or has(fd, self.new_guard) else "torn"


class Found(NamedTuple):
    """The state of a file's journal, why it does not count, and the journal itself if it can be read."""

    state: State
    why: str = ""
    journal: Journal | None = None


def look(path: str, fd: int | None = None, folder: int | None = None) -> Found:
    """
    Return the journal of a file, if there is one, and the state of the file by it.

    ``fd`` is a descriptor of the file, if it is open; with ``folder``, a descriptor, ``path`` is a name in that folder.
    """
    there = journal_path(path)
    try:
        status = system.stat_at(folder, there, follow=False)
    except OSError:
        return Found("none")
    opened = []
    try:
        if fd is None:
            opened.append(fd := system.open_reading(path))
        why = _foreign(status, os.fstat(fd))
        if not why:
            opened.append(journal := system.open_at(folder, there))
            why = _foreign(os.fstat(journal), os.fstat(fd))
            data = b"" if why else system.read_at(journal, _MOST_NBYTES + 1, 0)
            if data.startswith(_MAGIC):
                return _judged(data, fd)
        return Found("foreign", why or "its first bytes are not a journal's")
    except OSError as error:
        return Found("unread", f"it cannot be read: {reason_of(error)}")
    finally:
        for one in opened:
            os.close(one)


def told(path: str) -> tuple[str, str]:
    """Return the text of a remark about the journal beside a file that was read, and a hint."""
    state, why, _ = look(path)
    name = repr(os.path.basename(journal_path(path)))
    if state in ("whole", "torn", "none"):
        what = f"{name} is of an edit in place that goes on or was cut off; what was read is whole"
        return what, "If nothing edits it, `ckptool recover` removes the journal."
    if state == "stale":
        return f"{name} is stale: the file was saved over since that edit in place was cut off", _REMOVE
    return f"{name} has the name of a journal of an edit in place, and does not count: {why}", _REMOVE


def _foreign(journal: os.stat_result, file: os.stat_result) -> str:
    """Return why a journal with this status does not count for a file; an empty text if it may count."""
    if not stat.S_ISREG(journal.st_mode):
        return "it is not a regular file"
    if journal.st_nlink > 1:
        return f"it has {journal.st_nlink:,} names"
    if hasattr(os, "geteuid") and journal.st_uid not in (0, file.st_uid, os.geteuid()):
        return f"it is of user {journal.st_uid}, who does not own the checkpoint"
    if journal.st_size > _MOST_NBYTES:
        return f"it has {journal.st_size:,} bytes; {_MOST_NBYTES:,} are allowed"
    return "others may write to it" if journal.st_mode & 0o022 else ""


def _judged(data: bytes, fd: int) -> Found:
    """Return the journal in ``data`` and the state of the open file by it."""
    content, checksum = memoryview(data)[:-_SUM_NBYTES], data[-_SUM_NBYTES:]
    if len(content) < _HEAD.size or crc32(content).to_bytes(_SUM_NBYTES, "little") != checksum:
        return Found("damaged", "its checksum does not match")
    _, inode, nbytes, new_nbytes, guard, old, new_guard, new, size, count = _HEAD.unpack_from(content)
    at = _HEAD.size + count * _RANGE.size
    changes = []
    for offset, length in _RANGE.iter_unpack(content[_HEAD.size : at]) if at <= len(content) else ():
        middle = at + max(0, min(length, nbytes - offset))
        changes.append(Change(offset, content[at:middle], content[middle : middle + length]))
        at = middle + length
    if at != len(content) or any(one.offset + len(one.new) > new_nbytes for one in changes):
        return Found("damaged", "it contradicts itself")
    guards = Run(guard, old[:size]), Run(new_guard, new[:size])
    journal = Journal(inode, nbytes, new_nbytes, *guards, tuple(changes))
    return Found(journal.state(fd), journal=journal)


def has(fd: int, run: Run) -> bool:
    """Return whether an open file has these bytes at their offset."""
    return system.read_at(fd, len(run.data), run.offset) == run.data


def poison_like(guard: Run) -> bytes:
    """Return bytes that no reader accepts in place of a guard: 0xFF is in no magic, opcode or sensible length."""
    return b"\xff" * len(guard.data)


def poisoned_at(guard: Run, run: Run) -> bytes:
    """Return the bytes of a run, with poison where it overlaps a guard."""
    at, data = guard.offset - run.offset, run.data
    begin = max(at, 0)
    stop = max(begin, min(at + len(guard.data), len(data)))
    return data[:begin] + poison_like(guard)[: stop - begin] + data[stop:]
