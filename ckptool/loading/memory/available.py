"""
How much memory this process can still get: what is free, within the limits of its control groups.

A control group is one folder for each version of the mechanism, below the folders of the groups that it is in, whose
limits hold for it too; see cgroups(7).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Final, NamedTuple

import torch

from ckptool.errors import OutOfMemory
from ckptool.sources import paths

_MEMORY: Final = "/proc/meminfo"
_GROUPS: Final = "/proc/self/cgroup"


class _Version(NamedTuple):
    """Where groups are, and what the files in them are called."""

    root: str
    limit: str
    used: str
    pages: tuple[str, ...]
    """Rows of ``memory.stat``: what is cached of files. "file" would count shared memory too."""


_V2: Final = _Version("/sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))
_V1: Final = _Version(
    "/sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def free_memory() -> int | None:
    """
    Return the bytes that can still be allocated without pushing anything out, or None where the system does not say.

    On Linux: ``MemAvailable`` and free swap, or what is left of the limit of a control group that this process is in,
    if that is less; pages of files count as free, for the system drops them on demand.
    """
    kibibytes = {}
    for line in paths.system_text(_MEMORY).splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdigit():
            kibibytes[name] = int(number[0])
    if "MemAvailable" not in kibibytes:
        return None
    left = 1024 * (kibibytes["MemAvailable"] + kibibytes.get("SwapFree", 0))
    for folder, version in _groups():
        limit = paths.system_text(f"{folder}/{version.limit}").strip()
        used = paths.system_text(f"{folder}/{version.used}").strip()
        if limit.isdigit() and used.isdigit() and int(limit) < int(used) + left:
            left = min(left, max(0, int(limit) - int(used)) + _pages(folder, version))
    return left


def _groups() -> Iterator[tuple[str, _Version]]:
    """Yield the folders of all groups that this process is in, innermost first."""
    found = {_V2: "", _V1: ""}
    for line in paths.system_text(_GROUPS).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found[_V2] = path
        elif "memory" in controllers.split(","):
            found[_V1] = path
    for version, path in found.items():
        # A container may see only its own group, as the root, and still get the path that the group has outside.
        parts = [part for part in path.split("/") if part]
        inside = [] if ".." in parts else parts
        yield from (("/".join((version.root, *inside[:depth])), version) for depth in range(len(inside), -1, -1))


def _pages(folder: str, version: _Version) -> int:
    found = 0
    for line in paths.system_text(f"{folder}/memory.stat").splitlines():
        name, _, nbytes = line.partition(" ")
        if name in version.pages and nbytes.isdigit():
            found += int(nbytes)
    return found


_SAID: Final = ("out of memory", "can't allocate memory", "not enough memory", "invalid buffer size")
"""By the driver of CUDA (when it loads a kernel, say), by torch of the CPU, there and on Windows, by Metal."""


class translate_out_of_memory:  # noqa: N801 - it is used like a function
    """
    Raise OutOfMemory for a block that runs out of memory on a device.

    No generator: the error would keep its frame alive, and with it the error and the block's memory on the device.

    Raises:
        OutOfMemory: They are not there. Any other error comes out as it is.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.device = device

    def __enter__(self) -> None:
        """Do nothing yet."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_full = isinstance(error, torch.cuda.OutOfMemoryError)
        if is_full or (isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _SAID)):
            raise OutOfMemory(
                f"no {self.nbytes:,} bytes are free on {self.device}",
                hint="Choose another device, or a smaller dtype=.",
                needed=self.nbytes,
            ) from error
