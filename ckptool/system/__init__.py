"""
The calls of the system that are not the same everywhere: files and folders, and memory.

Nobody else makes them. ``posix`` and ``nt`` have the same functions; what each promises is said in ``posix``. Files and
folders are descriptors on every system, and errors are OSErrors with the usual codes.
"""

import sys

if sys.platform == "win32":
    from ckptool.system.nt import *  # noqa: F403 - a function is named once in each of them
else:
    from ckptool.system.posix import *  # noqa: F403
