"""Clone files: on file systems where files can share bytes, as XFS and Btrfs, a copy of any size takes no time."""

from __future__ import annotations

import os
from struct import pack
from typing import Final

# linux/fs.h; a system that does not know these numbers refuses them
_FICLONE: Final = 0x40049409
_FICLONERANGE: Final = 0x4020940D
_PROBE_NBYTES: Final = 1 << 16
"""What is cloned to see whether it can be: whole blocks."""


def clones_to(fd: int, path: str) -> bool:
    """Say whether a file of some size, which is open, can be cloned to a new one in the folder of a path."""
    folder = os.path.dirname(os.path.realpath(path))
    if not hasattr(os, "O_TMPFILE"):
        return False
    import fcntl  # Linux has it

    try:
        new = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError:  # no folder, or a file system without such files
        return False
    try:
        fcntl.ioctl(new, _FICLONERANGE, pack("<q3Q", fd, 0, _PROBE_NBYTES, 0))
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(new)


def clone(fd: int, new: int) -> None:
    """
    Make a file that is open have the content of another, which it shares.

    Raises:
        OSError: The file system cannot do it.
    """
    import fcntl

    fcntl.ioctl(new, _FICLONE, fd)
