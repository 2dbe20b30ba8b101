"""Questions about paths: what is there, and what it is called."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".th", ".pkl")
"""File suffixes of torch checkpoints."""

_SUFFIXES = (*TORCH_SUFFIXES, ".safetensors", ".t7", ".tar")

INDEX: Final = ".index.json"
_COMMITTING: Final = ".metadata"
_POINTERS: Final = ("latest", "latest_checkpointed_iteration.txt")
"""What writers of several files write last: the index, and the name of the folder below that has the save."""
_DEEPEST: Final = 4
_MOST_WATCHED: Final = 10_000

_LASTS: Final = 2.0
"""Seconds that a listing is good for: by then a change shows in the time of the directory, however coarse that is."""
_MOUNTS: Final = "/proc/self/mountinfo"

# fmt: off
_NETWORK: Final = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3",
    "smbfs", "vboxsf", "virtiofs", "wekafs",
))
# fmt: on


# fmt: off
UNTOLD: Final = frozenset((
    ".git", ".hg", ".svn", ".bzr", ".venv", ".tox", ".nox", ".npm", ".cargo", ".conda", ".mypy_cache", ".pytest_cache",
    ".ruff_cache",
))
# fmt: on
"""Folders of version control, and of tools that keep programs of theirs: checkpoints are not looked for in them."""
_PACKED: Final = (".gz", ".bz2", ".xz", ".lzma", ".z", ".zst")


def is_likely(name: str) -> bool:
    """Say whether a file of this name is probably a checkpoint."""
    return name.lower().endswith(_SUFFIXES)


def is_likely_packed(name: str) -> bool:
    """Say whether a file of this name is probably a checkpoint, or one that was compressed."""
    stem, suffix = os.path.splitext(name)
    return is_likely(stem if suffix.lower() in _PACKED else name)


def is_below(root: str, path: str) -> bool:
    """Say whether what a path leads to lies in a folder, and in none there that is left out."""
    inside = os.path.relpath(os.path.realpath(path), os.path.realpath(root)).split(os.sep)
    return os.pardir not in inside and UNTOLD.isdisjoint(inside)


def directory_entries(path: str, *, folders: bool = False) -> Sequence[str]:
    """
    Return the names of the regular files in a directory, or of its folders, sorted; none if it cannot be listed.

    Of thousands of files that are opened one after the other, each asks: what was listed lasts for two seconds, unless
    the directory has changed since, or a moment before.
    """
    try:
        status, now = os.stat(path), time.time()
        listed = _listed if now - status.st_mtime > _LASTS else _listed.__wrapped__
        return listed(os.path.abspath(path), folders, status.st_ino, status.st_mtime_ns, now // _LASTS)
    except OSError:
        return ()


@lru_cache(maxsize=4)
def _listed(path: str, folders: bool, *_identity: float) -> tuple[str, ...]:
    with os.scandir(path) as entries:
        return tuple(sorted(entry.name for entry in entries if (entry.is_dir() if folders else entry.is_file())))


def system_text(path: str) -> str:
    """Return the text of one of the system's own files, as in ``/proc``; an empty string where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def first_bytes(path: str, most_nbytes: int) -> bytes:
    """Return what a file begins with; no bytes where it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as stream:
            return stream.read(most_nbytes)
    except OSError:
        return b""


def file_identity(path: str | os.PathLike[str]) -> tuple[object, ...] | None:
    """
    Return a key that changes when the file under a path is replaced or written to; None if there is nothing.

    That of a folder changes when a file in it does, or below if it holds none itself that may be a checkpoint; it
    begins with device and inode, as that of a file.
    """
    try:
        status = os.stat(path)
        return _folder_identity(os.fspath(path), status) if stat.S_ISDIR(status.st_mode) else identity_of(status)
    except (OSError, ValueError):
        return None


def is_committed(found: tuple[object, ...], loaded: tuple[object, ...] | None) -> bool:
    """
    Say whether what is under a path now can be another save than the one that was loaded, by their identities.

    Writers of several files replace the index last: as long as it is the old one, the save is not finished.
    """
    marks = _marks(found)
    return not marks or loaded is None or marks != _marks(loaded)


def _marks(identity: tuple[object, ...]) -> object:
    return identity[2] if isinstance(identity[2], tuple) else ()


def _folder_identity(path: str, status: os.stat_result) -> tuple[object, ...]:
    """Return device, inode, the identities of indexes, and those of all files, of a folder and those below it."""
    marks: list[object] = []
    files: list[object] = []
    for place, folders, names in os.walk(path):
        if place.count(os.sep) - path.count(os.sep) >= _DEEPEST:
            folders.clear()
        folders.sort()
        is_here = place == path and any(is_likely(name) or name.endswith(INDEX) for name in names)
        for name in sorted(names):
            if len(files) >= _MOST_WATCHED:
                return status.st_dev, status.st_ino, tuple(marks), tuple(files)
            try:
                found = (place, name, *identity_of(os.stat(os.path.join(place, name))))
            except OSError:  # it was there a moment ago
                continue
            files.append(found)
            if name.endswith(INDEX) or name == _COMMITTING or (name in _POINTERS and not is_here):
                marks.append(found)
        if is_here:
            break  # what is meant is here, whatever is below
    return status.st_dev, status.st_ino, tuple(marks), tuple(files)


def exists(path: str) -> bool:
    """Say whether anything has this path."""
    return os.path.lexists(path)


def is_same_file(one: str, other: str) -> bool:
    """Say whether two paths lead to one file that is there."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def identity_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def is_network(fd: int) -> bool:
    """
    Say whether an open file answers over a network, or through a process (FUSE), one small page fault at a time.

    Goes by the type of the mount, on Linux; False wherever that is not known.
    """
    device = os.fstat(fd).st_dev
    kind = _mount_types().get(f"{os.major(device)}:{os.minor(device)}", "")
    return kind in _NETWORK or kind.startswith("fuse.")


def _mount_types() -> dict[str, str]:
    """Return the type of each mounted file system, by its device number; see proc(5), mountinfo."""
    found = {}
    for line in system_text(_MOUNTS).splitlines():
        mount, _, rest = line.partition(" - ")
        fields = mount.split()
        if len(fields) > 2 and rest:
            found[fields[2]] = rest.split()[0]
    return found
