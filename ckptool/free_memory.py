"""How much memory the system would still give this process: what is free, and what a container may have of it."""

from __future__ import annotations

from typing import Final

from ckptool import files

_MEMORY: Final = "/proc/meminfo"
_GROUP: Final = "/sys/fs/cgroup/memory."


def free_memory() -> int | None:
    """
    Return the bytes that can still be allocated without pushing anything out, or None where the system does not say.

    On Linux: ``MemAvailable`` and free swap, or what is left of the control group's limit if that is less; pages of
    files count as free, for the system drops them on demand.
    """
    kibibytes = {}
    for line in files.system_text(_MEMORY).splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        if number and number[0].isdigit():
            kibibytes[name] = int(number[0])
    if "MemAvailable" not in kibibytes:
        return None
    machine = 1024 * (kibibytes["MemAvailable"] + kibibytes.get("SwapFree", 0))
    limit = files.system_text(_GROUP + "max").strip()
    used = files.system_text(_GROUP + "current").strip()
    if not limit.isdigit() or not used.isdigit():
        return machine
    pages = 0
    for line in files.system_text(_GROUP + "stat").splitlines():
        name, _, nbytes = line.partition(" ")
        if name in ("inactive_file", "active_file") and nbytes.isdigit():  # "file" would count shared memory too
            pages += int(nbytes)
    return min(machine, max(0, int(limit) - int(used)) + pages)
