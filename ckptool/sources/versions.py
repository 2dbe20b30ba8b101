"""
Whether a file has changed: while it is open, under its path, and between runs.

1. An open file is compared with its status when it was opened: ``check_same``, and ``check_names`` for several files.
2. ``version_under`` is for watching a path: it differs after each write, and after each replacement.
3. ``stamp_of`` depends on sizes and times alone: a copy with the same time has the same stamp, also in a later run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from ckptool.cancellation import Cancellation
from ckptool.errors import SourceChanged
from ckptool.sources.paths import INDEX, POINTERS, is_likely, is_remote
from ckptool.sources.source import SourceInFolder

_COMMITTING: Final = ".metadata"
"""The index, which writers of several files write last, as they do the ``POINTERS``."""
_DEEPEST: Final = 4
_MOST_WATCHED: Final = 10_000
_MOST_FILES: Final = 100_000
_SPREAD: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: a likely difference in time cannot cancel a difference in size times this."""
AGAIN: Final = "Read it again once it is complete."


def identity_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def check_same(path: str, before: os.stat_result, now: os.stat_result) -> None:
    """
    Raise SourceChanged if an open file was written to since ``before``, or is another one.

    A file that was removed, or that another was renamed over, stays complete while it is open: that is no change.
    """
    *facts, changed_at = identity_of(before)
    *facts_now, changed_now = identity_of(now)
    # A file that loses its name, to another one that is renamed over it, gets a new time of change, but no new content.
    is_unnamed = now.st_nlink < before.st_nlink
    if facts != facts_now or (changed_at != changed_now and not is_unnamed):
        raise SourceChanged("the file was changed while it was being read", hint=AGAIN, path=path)


def check_names(files: Collection[SourceInFolder]) -> None:
    """
    Raise SourceChanged if some, but not all, of the files were replaced: the open ones may be of two saves.

    If all were replaced or removed, the whole folder was, and the open files are all of the one before.
    """
    replaced = [one for one in files if (file_identity(one.path) or ())[:2] != one.place]
    if 0 < len(replaced) < len(files):
        raise SourceChanged("replaced while files beside it were being read", hint=AGAIN, path=replaced[0].path)


def version_under(path: str | os.PathLike[str], cancellation: Cancellation | None = None) -> tuple[object, ...] | None:
    """
    Return a key that changes when the file or folder at a path or address is replaced or written to; None if none is.

    For a path it is ``file_identity``; for an address, what its server reports of the version, in one request.
    """
    text = os.fspath(path)
    if not is_remote(text):
        return file_identity(path)
    from ckptool.sources.remote.opening import remote_version  # few files are remote

    return remote_version(text, cancellation)


def file_identity(path: str | os.PathLike[str]) -> tuple[object, ...] | None:
    """
    Return a key that changes when the file at a path is replaced or written to; None if there is nothing.

    The key of a folder changes when a file in it does, or one in its subfolders unless it has checkpoints itself. Every
    key begins with device and inode.
    """
    try:
        status = os.stat(path)
        return _folder_identity(os.fspath(path), status) if stat.S_ISDIR(status.st_mode) else identity_of(status)
    except (OSError, ValueError):
        return None


def is_committed(found: tuple[object, ...], loaded: tuple[object, ...] | None) -> bool:
    """
    Return whether what is at a path now can be a complete new save, from its ``file_identity`` and the loaded one's.

    Writers of several files replace the index last: as long as it is the old one, the save is not finished.
    """
    marks = _marks(found)
    return not marks or loaded is None or marks != _marks(loaded)


def _marks(identity: tuple[object, ...]) -> object:
    return identity[2] if isinstance(identity[2], tuple) else ()


def _folder_identity(path: str, status: os.stat_result) -> tuple[object, ...]:
    """Return device and inode of a folder, the identities of its indexes, and those of all its files."""
    marks: list[object] = []
    files: list[object] = []
    for place, inside in _walked(path, _MOST_WATCHED):
        is_here = place == path and any(is_likely(name) or name.endswith(INDEX) for name, _ in inside)
        for name, one in inside:
            files.append(found := (place, name, *identity_of(one)))
            if name.endswith(INDEX) or name == _COMMITTING or (name in POINTERS and not is_here):
                marks.append(found)
        if is_here:
            break  # the checkpoint is here, whatever the subfolders hold
    return status.st_dev, status.st_ino, tuple(marks), tuple(files)


def _walked(path: str, most: int) -> Iterator[tuple[str, list[tuple[str, os.stat_result]]]]:
    """Yield a folder and its subfolders in order, each with its files and their status: ``most`` files in all."""
    for place, folders, names in os.walk(path):
        if place.count(os.sep) - path.rstrip(os.sep).count(os.sep) >= _DEEPEST:
            folders.clear()
        folders.sort()
        found = []
        for name in sorted(names)[:most]:
            with suppress(OSError):  # it may have been removed since the listing
                found.append((name, os.stat(os.path.join(place, name))))
        most -= len(found)
        yield place, found


class Stamp(NamedTuple):
    """Size and time of a file; of a folder, the total size and the latest time; of a remote file, size and tag."""

    nbytes: int
    mtime_ns: int | None
    version: str
    """A digest of both; for a folder, of the names, sizes and times of all files in it and four levels below."""
    etag: str | None = None


def stamp_of(path: str) -> Stamp | None:
    """
    Return the stamp of a path; None if nothing is there. That of an address comes from its listing; None without one.

    An index of shards has the stamp of its folder, which has the shards.
    """
    if is_remote(path):
        from ckptool.sources.address import as_remote

        listed = as_remote(path).listed
        return None if listed is None else stamp_of_version((listed[1], listed[0]))
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        file, inside, _ = path.partition("::")
        return stamp_of(file) if inside else None
    if stat.S_ISDIR(status.st_mode):
        return _of_folder(path)
    if path.endswith(INDEX):
        return _of_folder(os.path.dirname(path) or ".")
    nbytes, mtime_ns = status.st_size, status.st_mtime_ns
    return Stamp(nbytes, mtime_ns, f"{(mtime_ns + nbytes * _SPREAD) % (1 << 64):016x}")


def stamp_of_version(version: tuple[object, ...]) -> Stamp | None:
    """Return the stamp of a remote file from its version (size, tag, date); None if the size is not known."""
    nbytes, tag = (*version[:2], None, None)[:2]
    if not isinstance(nbytes, int):
        return None
    return Stamp(nbytes, None, _hashed(version), tag if isinstance(tag, str) else None)


def _of_folder(path: str) -> Stamp:
    found = [
        (os.path.relpath(os.path.join(place, name), path), one.st_size, one.st_mtime_ns)
        for place, inside in _walked(path, _MOST_FILES)
        for name, one in inside
    ]
    return Stamp(sum(one[1] for one in found), max((one[2] for one in found), default=0), _hashed(found))


def _hashed(facts: object) -> str:
    from hashlib import sha256  # slow to import, and a single local file does not need it

    return sha256(repr(facts).encode(errors="surrogatepass")).hexdigest()[:16]
