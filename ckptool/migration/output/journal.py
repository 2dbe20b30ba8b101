"""
The journal of an edit in place: the bytes that it overwrites, beside the file, before the first of them changes.

    magic                     16 bytes
    head                      which file, its size before and after, how many runs, what is poisoned
    offset, size              of each run, twice 64 bits
    the bytes of the runs     one after the other
    SHA-256                   of all of the above

It is complete and on the disk when it gets its name. It is written in little-endian order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptool.errors import DamagedFile
from ckptool.migration.output.operations import Operations
from ckptool.sources.files import FileSource
from ckptool.sources.unfinished import journal_path

if TYPE_CHECKING:
    import hashlib

_MAGIC: Final = b"ckptool undo 1\n\0"
_HEAD: Final = Struct("<16s7Q")
"""Magic; inode, size before, size after, where the guard was and is to be, its size, number of runs."""
_RUN: Final = Struct("<2Q")
_SUM_NBYTES: Final = 32
_NEW: Final = ".new"
"""What the name of a journal ends in before it is complete: nothing was changed yet."""


class Run(NamedTuple):
    """Bytes of a file from an offset on."""

    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """Offset of what follows."""
        return self.offset + len(self.data)


class Journal(NamedTuple):
    """What makes a file what it was."""

    inode: int
    """The file's number: another file that has its name by now is none of this journal's."""
    nbytes: int
    new_nbytes: int
    guard: int
    """Offset of the bytes without which no reader takes the file."""
    new_guard: int
    """Where they are in the new file."""
    guard_nbytes: int
    runs: tuple[Run, ...]
    """The bytes that change, as they were, in order; those of the guard are among them."""

    def encoded(self) -> bytes:
        """Return the bytes of the journal."""
        head = _HEAD.pack(_MAGIC, *self[:-1], len(self.runs))
        table = b"".join(_RUN.pack(run.offset, len(run.data)) for run in self.runs)
        parts = (head, table, *(run.data for run in self.runs))
        return b"".join((*parts, _checksum(*parts)))

    @property
    def encoded_nbytes(self) -> int:
        """How many bytes ``encoded`` has."""
        return _HEAD.size + sum(_RUN.size + len(run.data) for run in self.runs) + _SUM_NBYTES


def decoded(data: bytes) -> Journal:
    """
    Return a journal from its bytes.

    Raises:
        DamagedFile: They are not those that were written.
    """
    content, checksum = data[:-_SUM_NBYTES], data[-_SUM_NBYTES:]
    if len(content) < _HEAD.size or not content.startswith(_MAGIC) or _checksum(content) != checksum:
        raise _damaged("its checksum does not match")
    _, inode, nbytes, new_nbytes, guard, new_guard, guard_nbytes, count = _HEAD.unpack_from(content)
    at = _HEAD.size + count * _RUN.size
    if at > len(content):
        raise _damaged("it is too short")
    runs = []
    for offset, size in _RUN.iter_unpack(content[_HEAD.size : at]):
        runs.append(Run(offset, content[at : at + size]))
        at += size
    found = Journal(inode, nbytes, new_nbytes, guard, new_guard, guard_nbytes, tuple(runs))
    if at != len(content) or not _is_sound(found):
        raise _damaged("it contradicts itself")
    return found


def _checksum(*parts: bytes) -> bytes:
    found = _new_sha256()
    for part in parts:
        found.update(part)
    return found.digest()


def _new_sha256() -> hashlib._Hash:
    """Return Python's own SHA-256 where it is there: ``hashlib`` would load OpenSSL, 4 MB, for it."""
    try:
        from _sha2 import sha256  # type: ignore[import-not-found]  # since Python 3.12
    except ImportError:
        try:
            from _sha256 import sha256  # type: ignore[import-not-found]
        except ImportError:
            from hashlib import sha256
    found: hashlib._Hash = sha256()
    return found


def _is_sound(journal: Journal) -> bool:
    """Say whether the runs are in order and inside the file, and have the guard in one of them."""
    runs = journal.runs
    inside = all(run.end <= journal.nbytes for run in runs)
    ordered = all(one.end <= other.offset for one, other in pairwise(runs))
    end = journal.guard + journal.guard_nbytes
    guarded = any(run.offset <= journal.guard and end <= run.end for run in runs)
    return inside and ordered and guarded and journal.new_guard + journal.guard_nbytes <= journal.new_nbytes


def _damaged(why: str) -> DamagedFile:
    return DamagedFile(
        f"the journal of an edit in place is damaged: {why}",
        kind="damaged-journal",
        hint="The file was not changed now. Get it again, then remove the journal.",
    )


def write_journal(path: str, journal: Journal, operations: Operations) -> None:
    """Put the journal of a file on the disk, then give it its name. Where that fails, nothing of it is left."""
    there = journal_path(path)
    new = there + _NEW
    remove_incomplete(path, operations)
    fd = operations.create(new)
    try:
        operations.write(fd, 0, journal.encoded())
        operations.sync(fd)
        operations.rename(new, there)
    except OSError:
        operations.unlink(new)
        raise
    finally:
        os.close(fd)
    try:
        operations.sync_folder(os.path.dirname(path))
    except OSError:
        operations.unlink(there)
        raise


def remove_journal(path: str, operations: Operations) -> None:
    """Remove the journal of a file that is whole: from now on it may be read."""
    operations.unlink(journal_path(path))
    with suppress(OSError):  # it is gone; should it come back with the power, it is undone, which is as good
        operations.sync_folder(os.path.dirname(path))


def remove_incomplete(path: str, operations: Operations) -> bool:
    """Remove a journal that was never complete, and say whether there was one: the file was not changed."""
    new = journal_path(path) + _NEW
    if not os.path.lexists(new):
        return False
    operations.unlink(new)
    return True


def read_journal(path: str) -> Journal:
    """
    Return the journal of a file.

    Raises:
        FileUnavailable: There is none, or it cannot be read.
        DamagedFile: It is not what was written.
    """
    source = FileSource(journal_path(path))
    try:
        return decoded(source.read(0, source.nbytes))
    finally:
        source.close()


def old_runs(source: FileSource, ranges: Sequence[tuple[int, int]]) -> tuple[Run, ...]:
    """Return what a file holds in ranges, as far as they are inside it; ranges that meet become one."""
    merged: list[list[int]] = []
    for start, stop in sorted((start, min(stop, source.nbytes)) for start, stop in ranges):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], stop)
        else:
            merged.append([start, stop])
    return tuple(Run(start, source.read(start, stop - start)) for start, stop in merged)
