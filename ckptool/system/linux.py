"""
Facts from Linux's files in /proc and /sys: whether a file system is a network's, and how much memory is free.

A control group is a folder, in each of the two versions of the mechanism, inside the folders of its parent groups,
whose limits hold for it, too; see cgroups(7).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Final, NamedTuple

assert sys.platform != "win32"  # for mypy

_MOUNTS: Final = "/proc/self/mountinfo"
_MEMORY: Final = "/proc/meminfo"
_GROUPS: Final = "/proc/self/cgroup"

# fmt: off
_NETWORK: Final = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3",
    "smbfs", "vboxsf", "virtiofs", "wekafs",
))
# fmt: on


class _Version(NamedTuple):
    """The folder of the groups in one version of the mechanism, and the names of their files."""

    root: str
    limit: str
    used: str
    pages: tuple[str, ...]
    """Rows of ``memory.stat`` for cached pages of files. The row "file" would count shared memory, too."""


_V2: Final = _Version("/sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))
_V1: Final = _Version(
    "/sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def text_of(path: str) -> str:
    """Return the text of one of the system's own files; an empty string if there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def is_network(fd: int) -> bool:
    """Return whether a file is on a network, or served by a process (FUSE), by the type of its mount, if known."""
    device = os.fstat(fd).st_dev
    kind = _mount_types().get(f"{os.major(device)}:{os.minor(device)}", "")
    return kind in _NETWORK or kind.startswith("fuse.")


def _mount_types() -> dict[str, str]:
    """Return the type of each mounted file system, by its device number; see proc(5), mountinfo."""
    found = {}
    for line in text_of(_MOUNTS).splitlines():
        mount, _, rest = line.partition(" - ")
        fields = mount.split()
        if len(fields) > 2 and rest:
            found[fields[2]] = rest.split()[0]
    return found


def free_memory() -> int | None:
    """Return the bytes of ``MemAvailable`` and free swap, or less by limits of control groups; None without /proc."""
    kibibytes = {}
    for line in text_of(_MEMORY).splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdigit():
            kibibytes[name] = int(number[0])
    if "MemAvailable" not in kibibytes:
        return None
    left = 1024 * (kibibytes["MemAvailable"] + kibibytes.get("SwapFree", 0))
    for folder, version in _groups():
        limit = text_of(f"{folder}/{version.limit}").strip()
        used = text_of(f"{folder}/{version.used}").strip()
        if limit.isdigit() and used.isdigit() and int(limit) < int(used) + left:
            left = min(left, max(0, int(limit) - int(used)) + _pages(folder, version))
    return left


def _groups() -> Iterator[tuple[str, _Version]]:
    """Yield the folders of all groups that this process is in, innermost first."""
    found = {_V2: "", _V1: ""}
    for line in text_of(_GROUPS).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found[_V2] = path
        elif "memory" in controllers.split(","):
            found[_V1] = path
    for version, path in found.items():
        # A container may see only its own group, as the root, although the path is the group's path outside.
        parts = [part for part in path.split("/") if part]
        inside = [] if ".." in parts else parts
        yield from (("/".join((version.root, *inside[:depth])), version) for depth in range(len(inside), -1, -1))


def _pages(folder: str, version: _Version) -> int:
    found = 0
    for line in text_of(f"{folder}/memory.stat").splitlines():
        name, _, nbytes = line.partition(" ")
        if name in version.pages and nbytes.isdigit():
            found += int(nbytes)
    return found
