"""Questions about paths: what is there, and what it is called."""

from __future__ import annotations

import os
from typing import Final

TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".th", ".pkl")
"""File suffixes of torch checkpoints."""

_SUFFIXES = (*TORCH_SUFFIXES, ".safetensors", ".t7", ".tar")

_MOUNTS: Final = "/proc/self/mountinfo"

# fmt: off
_NETWORK: Final = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3",
    "smbfs", "vboxsf", "virtiofs", "wekafs",
))
# fmt: on


def is_likely(name: str) -> bool:
    """Say whether a file of this name is probably a checkpoint."""
    return name.lower().endswith(_SUFFIXES)


def directory_entries(path: str, *, folders: bool = False) -> list[str]:
    """Return the names of the regular files in a directory, or of its folders, sorted; none if it cannot be listed."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if (entry.is_dir() if folders else entry.is_file()))
    except OSError:
        return []


def system_text(path: str) -> str:
    """Return the text of one of the system's own files, as in ``/proc``; an empty string where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:  # noqa: PTH123 - no path of a user's
            return stream.read()
    except OSError:
        return ""


def file_identity(path: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """Return a key that changes when the file under a path is replaced or written to; None if there is no file."""
    try:
        return identity_of(os.stat(path))  # noqa: PTH116 - a system call, like the others here
    except (OSError, ValueError):
        return None


def exists(path: str) -> bool:
    """Say whether anything has this path."""
    return os.path.lexists(path)


def is_same_file(one: str, other: str) -> bool:
    """Say whether two paths lead to one file that is there."""
    try:
        return os.path.samefile(one, other)  # noqa: PTH121 - a system call, like the others here
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
