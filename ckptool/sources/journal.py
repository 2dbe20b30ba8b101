"""
The journal of an edit in place: what it overwrites and what it writes, in a file beside the one that is edited.

    magic                     16 bytes
    head                      which file, its size before and after, what is poisoned, how many runs
    offset, size              of each run, twice 64 bits
    the bytes of each run     as they were, as far as the file went, and as they are to be
    CRC-32                    of all of the above

It is complete and on the disk when it gets its name. It is written in little-endian order.

1. It counts only if it is a regular file with one name, of root, of the owner of the checkpoint or of this user, that
   no other user may write: whoever may only add files to a folder changes no file by it, and blocks nobody.
2. It is stale unless the edit can have left what is in the file: the old bytes, the new ones, or a mixture without a
   whole guard, in which each byte is old, new or poison. A file that was saved over since is never written to.
"""

from __future__ import annotations

import os
import stat
from itertools import pairwise
from struct import Struct
from typing import Final, Literal, NamedTuple
from zlib import crc32

from ckptool.errors import reason_of
from ckptool.sources.unfinished import is_there, journal_path

_MAGIC: Final = b"ckptool undo 2\n\0"
_HEAD: Final = Struct("<16s7Q")
"""Magic; inode, size before, size after, where the guard was and is to be, its size, number of runs."""
_RUN: Final = Struct("<2Q")
_SUM_NBYTES: Final = 4
_MOST_NBYTES: Final = 1 << 30
_PIECE: Final = 1 << 16
_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)

_RECOVER: Final = "If nothing edits it, `ckptool recover` removes the journal."
_REMOVE: Final = "If the file is the one that you want, remove what has that name."

State = Literal["none", "foreign", "unread", "damaged", "stale", "old", "new", "torn"]
"""What has a journal's name does not count, cannot be read, is not what was written, or is of what the file was before
it was saved over; else what is in the file."""


class Run(NamedTuple):
    """Bytes of a file from an offset on."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """Offset of what follows."""
        return self.offset + len(self.data)


class Change(NamedTuple):
    """Bytes of a file before and after an edit. The old ones are fewer where the file ended."""

    offset: int
    old: bytes
    new: bytes


class Journal(NamedTuple):
    """What an edit makes of a file, and what undoes it."""

    inode: int
    """The file's number: another file that has its name by now is none of this journal's."""
    nbytes: int
    new_nbytes: int
    guard: int
    """Offset of the bytes without which no reader takes the file."""
    new_guard: int
    """Where they are in the new file."""
    guard_nbytes: int
    changes: tuple[Change, ...]
    """In order; those of the guards are among them."""

    def encoded(self) -> bytes:
        """Return the bytes of the journal."""
        parts = [_HEAD.pack(_MAGIC, *self[:-1], len(self.changes))]
        parts += [_RUN.pack(one.offset, len(one.new)) for one in self.changes]
        for one in self.changes:
            parts += one.old, one.new
        checksum = 0
        for part in parts:
            checksum = crc32(part, checksum)
        return b"".join((*parts, checksum.to_bytes(_SUM_NBYTES, "little")))

    @property
    def guards(self) -> tuple[Run, Run]:
        """What the guard of the old file is, and that of the new one."""
        found = []
        for at, which in ((self.guard, 1), (self.new_guard, 2)):
            change = next(one for one in self.changes if one.offset <= at < one.offset + len(one.new))
            data = change[which]
            assert isinstance(data, bytes)
            found.append(Run(at, data[at - change.offset :][: self.guard_nbytes]))
        return found[0], found[1]

    def state(self, fd: int) -> State:
        """Return what an open file is: ``old``, ``new``, ``torn`` between the two, or ``stale``: none of these."""
        status = os.fstat(fd)
        if status.st_ino != self.inode or not self.nbytes <= status.st_size <= self.new_nbytes:
            return "stale"
        is_old, is_new = status.st_size == self.nbytes, status.st_size == self.new_nbytes
        for offset, old, new in self.changes:
            poison = poison_like(self.guards[0].data)
            poisoned = masked(Run(offset, masked(Run(offset, new), self.guard, poison)), self.new_guard, poison)
            old = old.ljust(len(new), b"\0")
            for at in range(0, len(new), _PIECE):
                was, will, meanwhile = (one[at : at + _PIECE] for one in (old, new, poisoned))
                now = os.pread(fd, len(was), offset + at).ljust(len(was), b"\0")
                is_old, is_new = is_old and now == was, is_new and now == will
                if now not in (was, will) and not _is_made_of(now, was, will, meanwhile):
                    return "stale"
        if is_old or is_new:
            return "old" if is_old else "new"
        return "stale" if any(has(fd, guard) for guard in self.guards) else "torn"


class Found(NamedTuple):
    """What has the name of a journal."""

    state: State
    why: str = ""
    journal: Journal | None = None


def look(path: str, fd: int | None = None, folder: int | None = None) -> Found:
    """
    Return what has the name of the journal of a file, and what it says of the file, which may be open.

    ``path`` is a name where ``folder`` is a descriptor.
    """
    there = journal_path(path)
    if not is_there(there, folder):
        return Found("none")
    opened = -1
    try:
        opened = os.open(path, _FLAGS, dir_fd=folder) if fd is None else fd
        why = _foreign(os.lstat(there, dir_fd=folder), os.fstat(opened))
        return Found("foreign", why) if why else _read(there, opened, folder)
    except OSError as error:
        return Found("unread", f"it cannot be read: {reason_of(error)}")
    finally:
        if fd is None and opened >= 0:
            os.close(opened)


def told(path: str) -> tuple[str, str]:
    """Return what is to be said of what has the name of the journal of a file that was read, and a hint."""
    state, why, _ = look(path)
    name = repr(os.path.basename(journal_path(path)))
    if state in ("old", "new", "none"):
        return f"{name} is of an edit in place that goes on or was cut off, and the file is whole", _RECOVER
    if state == "stale":
        return f"{name} is stale: the file was saved over since that edit in place was cut off", _REMOVE
    return f"{name} has the name of a journal of an edit in place, and does not count: {why}", _REMOVE


def _foreign(journal: os.stat_result, file: os.stat_result) -> str:
    """Return why a file is nobody's journal that counts; nothing if it may be one."""
    if not stat.S_ISREG(journal.st_mode):
        return "it is no regular file"
    if journal.st_nlink > 1:
        return f"it has {journal.st_nlink:,} names"
    if hasattr(os, "geteuid") and journal.st_uid not in (0, file.st_uid, os.geteuid()):
        return f"it is of user {journal.st_uid}, who does not own the checkpoint"
    return "others may write to it" if journal.st_mode & 0o022 else ""


def _read(there: str, file: int, folder: int | None) -> Found:
    fd = os.open(there, _FLAGS | getattr(os, "O_NOFOLLOW", 0), dir_fd=folder)
    try:
        status = os.fstat(fd)
        why = _foreign(status, os.fstat(file))
        data = os.pread(fd, min(status.st_size, _MOST_NBYTES), 0)
    finally:
        os.close(fd)
    if why or not data.startswith(_MAGIC):
        return Found("foreign", why or "its first bytes are no journal's")
    journal = _decoded(data)
    return Found(journal.state(file), journal=journal) if isinstance(journal, Journal) else Found("damaged", journal)


def _decoded(data: bytes) -> Journal | str:
    """Return a journal from its bytes, or why they are not what was written."""
    content, checksum = data[:-_SUM_NBYTES], data[-_SUM_NBYTES:]
    if len(content) < _HEAD.size or crc32(content).to_bytes(_SUM_NBYTES, "little") != checksum:
        return "its checksum does not match"
    _, inode, nbytes, new_nbytes, guard, new_guard, guard_nbytes, count = _HEAD.unpack_from(content)
    at = _HEAD.size + count * _RUN.size
    if at > len(content):
        return "it is too short"
    changes = []
    for offset, size in _RUN.iter_unpack(content[_HEAD.size : at]):
        middle = at + max(0, min(size, nbytes - offset))
        changes.append(Change(offset, content[at:middle], content[middle : middle + size]))
        at = middle + size
    found = Journal(inode, nbytes, new_nbytes, guard, new_guard, guard_nbytes, tuple(changes))
    return found if at == len(content) and _is_sound(found) else "it contradicts itself"


def _is_sound(journal: Journal) -> bool:
    """Say whether the changes are in order and inside the new file, and have the guards in them."""
    ranges = [(one.offset, one.offset + len(one.new), one.offset + len(one.old)) for one in journal.changes]
    inside = all(stop <= journal.new_nbytes for _, stop, _ in ranges)
    ordered = all(one[1] <= other[0] for one, other in pairwise(ranges))
    n = journal.guard_nbytes
    guarded = n > 0 and any(start <= journal.guard and journal.guard + n <= end for start, _, end in ranges)
    new_guarded = any(start <= journal.new_guard and journal.new_guard + n <= stop for start, stop, _ in ranges)
    return inside and ordered and guarded and new_guarded and journal.nbytes <= journal.new_nbytes


def has(fd: int, run: Run) -> bool:
    """Say whether an open file has these bytes."""
    return os.pread(fd, len(run.data), run.offset) == run.data


def poison_like(guard: bytes) -> bytes:
    """Return what no reader takes in place of a guard: a byte that no magic, opcode or sensible length has."""
    return b"\xff" * len(guard)


def masked(run: Run, guard: int, poison: bytes) -> bytes:
    """Return the bytes of a run, with poison where the guard is, or what of it is in the run."""
    at = guard - run.offset
    begin = max(at, 0)
    stop = max(begin, min(at + len(poison), len(run.data)))
    return run.data[:begin] + poison[begin - at : stop - at] + run.data[stop:]


def _is_made_of(data: bytes, *others: bytes) -> bool:
    """Say whether each byte is the one that some of the others have in its place; all are of one length."""
    value, left = int.from_bytes(data, "little"), int.from_bytes(b"\1" * len(data), "little")
    for other in others:
        unlike = value ^ int.from_bytes(other, "little")
        for shift in (4, 2, 1):  # then the lowest bit of each byte says whether it has any
            unlike |= unlike >> shift
        left &= unlike
    return not left
