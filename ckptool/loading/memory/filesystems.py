"""Whether a file lies on a file system that answers over a network, where reading beats mapping."""

from __future__ import annotations

import os
from typing import Final

from ckptool.sources import files

_MOUNTS: Final = "/proc/self/mountinfo"

# fmt: off
_NETWORK: Final = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3",
    "smbfs", "vboxsf", "virtiofs", "wekafs",
))
# fmt: on


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
    for line in files.system_text(_MOUNTS).splitlines():
        mount, _, rest = line.partition(" - ")
        fields = mount.split()
        if len(fields) > 2 and rest:
            found[fields[2]] = rest.split()[0]
    return found
