"""
Edit a file in place, or undo an edit that was cut off: who reads it meets the old file, the new one or an error.

1. What will be overwritten is in a journal beside the file, on the disk, before the first byte changes.
2. Poison: the guard, a few bytes without which no reader takes the file, is overwritten with others. Were it not, a
   pickle of which a part is new could be loaded, and be wrong.
3. The edit, all but the new guard. 4. The new guard.
5. The new file is read back; what is not as planned is rolled back. 6. The journal goes: this is the commit.

Each step is on the disk before the next begins, so after a power failure too, all that may have changed is in the
journal, and what is there is poisoned unless it is whole.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from struct import pack
from typing import BinaryIO, Final, NamedTuple

from ckptool.errors import CkptoolError, FileUnavailable, MigrationRefused, OutputFailed, reason_of
from ckptool.migration.output import failed
from ckptool.migration.output.journal import (
    Journal,
    Run,
    old_runs,
    read_journal,
    remove_incomplete,
    remove_journal,
    write_journal,
)
from ckptool.migration.output.operations import OPERATIONS, Operations
from ckptool.sources.files import FileSource
from ckptool.sources.unfinished import journal_path, refuse_unfinished, unfinished

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PIECE: Final = 1 << 16
_LOCKED: Final = (errno.EAGAIN, errno.EACCES)
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OPEN: Final = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class FileEdit(NamedTuple):
    """What is to be different in a file."""

    nbytes: int
    """Size of the new file; it is never shorter than the old one."""
    runs: tuple[Run, ...]
    """New bytes, in order, none of them twice."""
    guard: int
    """Offset of bytes without which no reader takes the old file."""
    new_guard: Run
    """Those without which none takes the new file."""
    poison: bytes
    """What is there meanwhile: no reader takes a file with any part of it."""

    @property
    def written_nbytes(self) -> int:
        """How many bytes of the file are written."""
        return sum(len(run.data) for run in self.runs)


def edit_in_place(
    path: str,
    fd: int,
    edit: FileEdit,
    verify: Callable[[], None],
    operations: Operations = OPERATIONS,
) -> int:
    """
    Carry out an edit of a file that ``open_for_editing`` opened, and return how many bytes were written for it.

    ``verify`` reads the new file back, and raises what keeps it from being taken.

    Raises:
        OutputFailed: The system refused, or what is there is not what was written. The file is what it was before.
        UnfinishedEdit: It could not be made what it was before; the journal is still there.
    """
    journal_nbytes = _begin_journal(path, fd, edit, operations)
    try:
        _apply(fd, edit, operations)
        _compare(fd, edit)
        verify()
    except BaseException as error:
        _roll_back_after(error, path, fd, operations)
        if isinstance(error, OSError):
            raise _failed(error, path) from error
        raise
    try:
        remove_journal(path, operations)
    except OSError as error:
        raise unfinished(path) from error
    return edit.written_nbytes + journal_nbytes


def _begin_journal(path: str, fd: int, edit: FileEdit, operations: Operations) -> int:
    """Write the journal of an edit, and return its size. It may be as large as the index, so it is not kept here."""
    source = FileSource(path, fd=os.dup(fd))
    try:
        journal = _journal_of(source, edit)
    finally:
        source.close()
    if os.lstat(path).st_ino != journal.inode:
        raise OutputFailed("another file has its name by now", kind="moved", path=path, hint="Try again.")
    try:
        write_journal(path, journal, operations)
    except OSError as error:
        raise _failed(error, path) from error
    return journal.encoded_nbytes


def roll_back(path: str, operations: Operations = OPERATIONS) -> int:
    """
    Make a file what it was before an edit in place that did not end; return the size of what was written back.

    It is 0 where the edit had not begun.

    Raises:
        FileUnavailable: There is no such file, or no journal of it.
        MigrationRefused: It is being edited now, or the journal is another file's.
        DamagedFile: The journal is not what was written.
        OutputFailed: The system refused; the journal is still there.
    """
    with open_for_editing(path, recovering=True) as fd:
        if not os.path.lexists(journal_path(path)):
            if remove_incomplete(path, operations):
                return 0
            raise FileUnavailable("it has no journal: no edit in place of it was cut off", kind="no-journal", path=path)
        journal = read_journal(path)
        status = os.fstat(fd)
        if status.st_ino != journal.inode or not journal.nbytes <= status.st_size <= journal.new_nbytes:
            raise MigrationRefused(
                "the journal beside it is of another file, which had this name before, or of what this one was",
                kind="another-file",
                path=path,
                hint="If this file is the one that you want, remove the journal.",
            )
        try:
            _roll_back(fd, journal, operations)
            remove_journal(path, operations)
        except OSError as error:
            raise _failed(error, path) from error
        return sum(len(run.data) for run in journal.runs)


@contextmanager
def open_for_editing(path: str, *, recovering: bool = False) -> Iterator[int]:
    """
    Open a file for writing, locked, and yield its descriptor.

    Raises:
        MigrationRefused: It has other names, is a link, read-only, or another process holds it.
        UnfinishedEdit: It has a journal, unless it is the one for ``recovering``.
        OutputFailed: The system does not open it.
    """
    if not hasattr(os, "pwrite"):
        raise MigrationRefused(
            "this system cannot edit files in place", kind="not-in-place", hint="Write a copy instead."
        )
    _refuse_kind(path)
    try:
        fd = os.open(path, _OPEN)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise _read_only(path) from error
        raise failed(error, path) from error
    try:
        _lock(fd, path)
        status = os.fstat(fd)
        if status.st_nlink > 1 and not recovering:
            raise MigrationRefused(
                f"it has {status.st_nlink:,} names (hard links), and would change under all of them",
                kind="hard-links",
                path=path,
                hint="Write a copy instead.",
            )
        if not recovering:
            if not stat.S_IMODE(status.st_mode) & 0o222:
                raise _read_only(path)
            refuse_unfinished(path)
        yield fd
    finally:
        os.close(fd)


def reader_of(fd: int) -> BinaryIO:
    """Return an open file as an object for readers, which the journal beside it does not keep from reading."""
    return os.fdopen(os.dup(fd), "rb")


def _refuse_kind(path: str) -> None:
    """Raise what is wrong with a path that is none of a regular file."""
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError) as error:
        from ckptool.sources.unavailable import unavailable

        raise unavailable(path, error if isinstance(error, OSError) else FileNotFoundError(errno.ENOENT, "")) from error
    if stat.S_ISLNK(mode):
        raise MigrationRefused(
            f"it is a link to {os.path.realpath(path)!r}",
            kind="link",
            path=path,
            hint="Name the file itself, if it is yours to change: caches name files by what is in them.",
        )
    if not stat.S_ISREG(mode):
        raise MigrationRefused("it is no regular file", kind="not-a-file", path=path, hint="Write a copy instead.")


def _read_only(path: str) -> MigrationRefused:
    from shlex import join

    hint, command = "Make it writable, or write a copy instead.", join(("chmod", "u+w", "--", path))
    return MigrationRefused("it is read-only", kind="read-only", path=path, hint=hint, command=command)


def _lock(fd: int, path: str) -> None:
    """Lock a file against others that ask for a lock, of either kind, until its descriptors are closed."""
    if fcntl is not None:
        for lock in (fcntl.flock, _lock_records):
            try:
                lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _LOCKED:
                    continue  # a file system without locks
                raise MigrationRefused(
                    "another process holds a lock on it: it is being read or edited",
                    kind="locked",
                    path=path,
                    hint="Try again when that is done, or write a copy instead.",
                ) from error


def _lock_records(fd: int, how: int) -> None:
    """
    Lock a file as ``lockf`` does, whose lock ends as soon as this process closes any descriptor of the file.

    Linux has locks that the open file owns: they end with it alone, and keep out the same processes.
    """
    if sys.platform != "linux":
        fcntl.lockf(fd, how)
        return
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))


def _journal_of(source: FileSource, edit: FileEdit) -> Journal:
    guard_nbytes = len(edit.poison)
    ranges = [(run.offset, run.end) for run in edit.runs]
    ranges.append((edit.guard, edit.guard + guard_nbytes))
    inode = source.place[1]
    runs = old_runs(source, ranges)
    return Journal(inode, source.nbytes, edit.nbytes, edit.guard, edit.new_guard.offset, guard_nbytes, runs)


def _apply(fd: int, edit: FileEdit, operations: Operations) -> None:
    operations.write(fd, edit.guard, edit.poison)
    operations.sync(fd)
    for run in edit.runs:
        operations.write(fd, run.offset, masked(run, edit.new_guard.offset, edit.poison))
    operations.sync(fd)
    operations.write(fd, edit.new_guard.offset, edit.new_guard.data)
    operations.sync(fd)


def _roll_back(fd: int, journal: Journal, operations: Operations) -> None:
    """Write back what was there. In between nobody can read it, for what is whole now may be a mixture then."""
    nbytes = os.fstat(fd).st_size
    poison = poison_like(_guard_of(journal))
    for guard in dict.fromkeys((journal.new_guard, journal.guard)):
        if guard + len(poison) <= nbytes:
            operations.write(fd, guard, poison)
    operations.sync(fd)
    for run in journal.runs:
        operations.write(fd, run.offset, masked(run, journal.guard, poison))
    operations.truncate(fd, journal.nbytes)
    operations.sync(fd)
    operations.write(fd, journal.guard, _guard_of(journal))
    operations.sync(fd)


def _guard_of(journal: Journal) -> bytes:
    """Return the guard of the old file."""
    start, stop = journal.guard, journal.guard + journal.guard_nbytes
    run = next(run for run in journal.runs if run.offset <= start and stop <= run.end)
    return run.data[start - run.offset : stop - run.offset]


def poison_like(guard: bytes) -> bytes:
    """Return what no reader takes in place of a guard: a byte that no magic, opcode or sensible length has."""
    return b"\xff" * len(guard)


def masked(run: Run, guard: int, poison: bytes) -> bytes:
    """Return the bytes of a run, with poison where the guard is, or what of it is in the run."""
    at = guard - run.offset
    begin = max(at, 0)
    stop = max(begin, min(at + len(poison), len(run.data)))
    return run.data[:begin] + poison[begin - at : stop - at] + run.data[stop:]


def _compare(fd: int, edit: FileEdit) -> None:
    """Raise OutputFailed if what was written cannot be read back."""
    for run in (*edit.runs, edit.new_guard):
        for start in range(0, len(run.data), _PIECE):
            piece = run.data[start : start + _PIECE]
            if os.pread(fd, len(piece), run.offset + start) != piece:
                raise OutputFailed("it does not hold what was written", kind="verification-failed")


def _roll_back_after(error: BaseException, path: str, fd: int, operations: Operations) -> None:
    """Make the file what it was; raise UnfinishedEdit where that fails as well."""
    try:
        _roll_back(fd, read_journal(path), operations)
        remove_journal(path, operations)
    except (CkptoolError, OSError):
        raise unfinished(path) from error


def _failed(error: OSError, path: str) -> OutputFailed:
    if error.errno not in _FULL:
        return failed(error, path)
    fact = f"cannot be edited: {reason_of(error)}; it is what it was before"
    return OutputFailed(fact, kind="disk-full", path=path, hint="Free some space.")
