"""What macOS alone is asked for."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

assert sys.platform == "darwin"  # for mypy

_LOCAL: Final = 0x1000  # MNT_LOCAL


def is_network(fd: int) -> bool:
    """Say whether an open file is on no file system of this machine: by f_flags, see statfs(2)."""
    system, status = ctypes.CDLL(None), (ctypes.c_uint32 * 1024)()
    call = system["fstatfs$INODE64"] if os.uname().machine == "x86_64" else system.fstatfs
    return call(fd, status) == 0 and not status[16] & _LOCAL
