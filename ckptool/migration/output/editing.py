"""
Writes an edit in place behind a journal, and writes the old bytes back: ``recover``.

1. What is overwritten, and with what, is in a journal beside the file, on the disk, before the first byte changes.
2. Poison: the guard, a few bytes without which no reader accepts the file, is overwritten. Otherwise a pickle that is
   only partly new could be loaded, and be wrong.
3. The edit, all but the new guard. 4. The new guard.
5. The new file is read back; if it is not as planned, the edit is rolled back. 6. The journal is removed: this is the
   commit.

Each step is on the disk before the next begins. So even after a power failure, all that may have changed is in the
journal, and the file is poisoned unless it is complete.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import BinaryIO, Final, NamedTuple

import ckptool.system as system
from ckptool.arguments import checked
from ckptool.errors import CkptoolError, DamagedFile, FileUnavailable, MigrationRefused, OutputFailed
from ckptool.messages import as_path
from ckptool.migration.output import failed
from ckptool.sources.descriptors import Descriptor
from ckptool.sources.files import FileSource, unavailable
from ckptool.sources.journal import (
    Change,
    Found,
    Journal,
    Run,
    has,
    journal_path,
    look,
    poison_like,
    poisoned_at,
    told,
    unfinished,
)

_COPY: Final = "Write a copy instead."
_NEW: Final = ".new"
"""Suffix of a journal that is not complete: nothing was changed yet."""


class FileEdit(NamedTuple):
    """The changes to a file."""

    nbytes: int
    """Size of the new file; it is never shorter than the old one."""
    runs: tuple[Run, ...]
    """New bytes, in order, without overlap."""
    guard: Run
    """The bytes without which no reader accepts the old file; all or part of them are poisoned during the edit."""
    new_guard: Run
    """The same number of bytes, without which no reader accepts the new file."""

    @property
    def written_nbytes(self) -> int:
        """Number of bytes of the file that are written."""
        return sum(len(run.data) for run in self.runs)


def not_in_place(fact: str) -> MigrationRefused:
    """Return the error for an edit that would move a tensor, or whose result some readers would not accept."""
    return MigrationRefused(fact, kind="not-in-place", hint=_COPY)


def edit_in_place(path: str, fd: int, edit: FileEdit, verify: Callable[[], None]) -> int:
    """
    Carry out an edit of a file that ``open_for_editing`` opened, and return how many bytes were written for it.

    ``verify`` reads the new file back, and raises if it is not as planned.

    Raises:
        OutputFailed: The system refused, or what is there is not what was written. The file is what it was before.
        UnfinishedEdit: It could not be made what it was before; the journal is still there.
    """
    journal_nbytes = _begin_journal(path, fd, edit)
    try:
        system.write_at(fd, poison_like(edit.guard), edit.guard.offset)
        system.sync(fd)
        for run in edit.runs:
            system.write_at(fd, poisoned_at(edit.new_guard, run), run.offset)
        system.sync(fd)
        system.write_at(fd, edit.new_guard.data, edit.new_guard.offset)
        system.sync(fd)
        if look(path, fd).state != "whole":
            raise OutputFailed("it does not hold what was written", kind="verification-failed")
        verify()
    except BaseException as error:
        _roll_back_after(error, path, fd)
        if isinstance(error, OSError):
            raise failed(error, path) from error
        raise
    try:
        remove_journal(path)
    except OSError as error:
        raise unfinished(path) from error
    return edit.written_nbytes + journal_nbytes


def _begin_journal(path: str, fd: int, edit: FileEdit) -> int:
    """Write the journal of an edit, and return its size. It may be as large as the index, so it is not kept."""
    with closing(FileSource(path, held=Descriptor(partial(os.dup, fd)))) as source:
        encoded, inode = _journal_of(source, edit).encoded(), source.place[1]
    if os.lstat(path).st_ino != inode:
        raise OutputFailed("another file has its name by now", kind="moved", path=path, hint="Try again.")
    nbytes = len(encoded)
    try:
        write_journal(path, encoded)
        del encoded
        found = look(path, fd)
        if found.state != "whole":
            remove_journal(path)
            raise not_in_place(f"its journal would not count here: {found.why or 'it reads otherwise'}")
    except OSError as error:
        raise failed(error, path) from error
    return nbytes


@checked()
def recover(path: str | os.PathLike[str]) -> int:
    """
    Undo a ``migrate(path, in_place=True)`` that was cut off, from the journal beside the file.

    Return how many bytes were written back: 0 where the edit had not begun, or all of it was written. If ``recover`` is
    cut off, call it again.

    Raises:
        FileUnavailable: There is no such file, or no journal of it (``no-journal``), or it may not be read.
        MigrationRefused: It is being edited now; or the journal is another file's, or the file was saved over since
            (``another-file``); or what has the journal's name does not count (``foreign-journal``).
        DamagedFile: The journal is not what was written. The file was not changed.
        OutputFailed: The system refused; the journal is still there.
    """
    path = os.fspath(path)
    with open_for_editing(path, recovering=True) as fd:
        try:
            return _undo(path, fd)
        except OSError as error:
            raise failed(error, path) from error


def _undo(path: str, fd: int) -> int:
    found = look(path, fd)
    if found.state == "none":
        if remove_incomplete(path):
            return 0
        raise _no_journal(path)
    if found.journal is None or found.state == "stale":
        raise _refused_journal(path, found)
    written = _roll_back(fd, found.journal) if found.state == "torn" else 0
    remove_journal(path)
    return written


def _no_journal(path: str) -> FileUnavailable:
    return FileUnavailable("it has no journal: no edit in place of it was cut off", kind="no-journal", path=path)


def _refused_journal(path: str, found: Found) -> CkptoolError:
    """Return the error for a journal that cannot be used."""
    there, hint = journal_path(path), "The file was not changed now. Get it again, then remove the journal."
    if found.state == "damaged":
        what = f"the journal of an edit in place is damaged: {found.why}"
        return DamagedFile(what, kind="damaged-journal", path=path, hint=hint)
    if found.state == "unread":
        return FileUnavailable(found.why, kind="permission", path=there)
    what, hint = told(path)
    command = system.command_for("remove", there) if found.state == "stale" else None
    kind = "another-file" if found.state == "stale" else "foreign-journal"
    return MigrationRefused(what, kind=kind, path=path, hint=hint, command=command)


@contextmanager
def open_for_editing(path: str, *, recovering: bool = False) -> Iterator[int]:
    """
    Open a file for writing, locked, and yield its descriptor.

    Raises:
        MigrationRefused: It has other names, is a link, read-only, or another process holds it.
        MigrationRefused, UnfinishedEdit: A file has the name of its journal; not if ``recovering``.
        OutputFailed: The system does not open it.
    """
    _refuse_kind(path)
    if not system.CAN_EDIT:
        if recovering and not os.path.lexists(journal_path(path)):
            raise _no_journal(path)
        hint = "Recover it on Linux or macOS, where it was edited." if recovering else _COPY
        raise MigrationRefused("files are not edited in place on Windows", kind="not-in-place", path=path, hint=hint)
    try:
        fd = system.open_writing(path)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise _read_only(path) from error
        raise failed(error, path) from error
    try:
        if system.lock(fd) is False or system.lock_records(fd) is False:
            raise MigrationRefused(
                "another process holds a lock on it: it is being read or edited",
                kind="locked",
                path=path,
                hint="Try again when that is done, or write a copy instead.",
            )
        status = os.fstat(fd)
        if status.st_nlink > 1 and not recovering:
            raise MigrationRefused(
                f"it has {status.st_nlink:,} names (hard links), and would change under all of them",
                kind="hard-links",
                path=path,
                hint=_COPY,
            )
        if not recovering:
            if not stat.S_IMODE(status.st_mode) & 0o222:
                raise _read_only(path)
            found = look(path, fd)
            if found.state in ("foreign", "stale"):
                raise _refused_journal(path, found)
            if found.state != "none":
                raise unfinished(path)
        yield fd
    finally:
        os.close(fd)


def reader_of(fd: int) -> BinaryIO:
    """Return a file object of an open file that can be read in spite of the journal beside it."""
    return os.fdopen(os.dup(fd), "rb")


def _refuse_kind(path: str) -> None:
    """Raise the error for a path that is not that of a regular file."""
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError) as error:
        raise unavailable(path, error if isinstance(error, OSError) else FileNotFoundError(errno.ENOENT, "")) from error
    if stat.S_ISLNK(mode):
        raise MigrationRefused(
            f"it is a link to {as_path(os.path.realpath(path))}",
            kind="link",
            path=path,
            hint="Name the file itself, if it is yours to change: caches name files by what is in them.",
        )
    if not stat.S_ISREG(mode):
        raise MigrationRefused("it is not a regular file", kind="not-a-file", path=path, hint=_COPY)


def _read_only(path: str) -> MigrationRefused:
    hint, command = "Make it writable, or write a copy instead.", system.command_for("write", path)
    return MigrationRefused("it is read-only", kind="read-only", path=path, hint=hint, command=command)


def _journal_of(source: FileSource, edit: FileEdit) -> Journal:
    guards = [one for one in dict.fromkeys((edit.guard, edit.new_guard)) if not any(map(one.is_in, edit.runs))]
    changes = []
    for run in (*edit.runs, *guards):
        old = source.read(run.offset, max(0, min(run.end, source.nbytes) - run.offset))
        changes.append(Change(run.offset, old, run.data))
    return Journal(source.place[1], source.nbytes, edit.nbytes, edit.guard, edit.new_guard, tuple(changes))


def _roll_back(fd: int, journal: Journal) -> int:
    """Write the old bytes back, and return how many. In between nobody can read the file, which may be a mixture."""
    guard = journal.guard
    for one in (guard, journal.new_guard):
        if has(fd, one):  # where it is not, nobody can read it now
            system.write_at(fd, poison_like(one), one.offset)
            system.sync(fd)
    for offset, old, _ in journal.changes:
        system.write_at(fd, poisoned_at(guard, Run(offset, bytes(old))), offset)
    os.ftruncate(fd, journal.nbytes)
    system.sync(fd)
    system.write_at(fd, guard.data, guard.offset)
    system.sync(fd)
    return sum(len(one.old) for one in journal.changes)


def _roll_back_after(error: BaseException, path: str, fd: int) -> None:
    """Restore the file; raise UnfinishedEdit if that fails as well."""
    journal = look(path, fd).journal  # it may be as large as the index, so it is not kept
    try:
        if journal is None or journal.inode != os.fstat(fd).st_ino:
            raise unfinished(path)
        _roll_back(fd, journal)
        remove_journal(path)
    except (CkptoolError, OSError):
        raise unfinished(path) from error


def write_journal(path: str, encoded: bytes) -> None:
    """Put the journal of a file on the disk, then give it its name. Where that fails, nothing of it is left."""
    there = journal_path(path)
    new = there + _NEW
    remove_incomplete(path)
    fd = system.open_new(new, 0o600)  # nobody else may read it: it holds bytes of another file
    try:
        system.write_at(fd, encoded, 0)
        system.sync(fd)
        system.rename(new, there)
    except OSError:
        os.unlink(new)
        raise
    finally:
        os.close(fd)
    try:
        system.sync_folder(os.path.dirname(path))
    except OSError:
        os.unlink(there)
        raise


def remove_journal(path: str) -> None:
    """Remove the journal of a file that is complete, which may be read from now on."""
    os.unlink(journal_path(path))
    with suppress(OSError):  # it is gone; should it come back with the power, it is undone, which is as good
        system.sync_folder(os.path.dirname(path))


def remove_incomplete(path: str) -> bool:
    """Remove a journal that was never complete, and return whether there was one. The file was not changed."""
    new = journal_path(path) + _NEW
    if not os.path.lexists(new):
        return False
    os.unlink(new)
    return True
