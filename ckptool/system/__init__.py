"""
System calls that differ between systems: files and folders, memory, processes, shells.

No other package makes them. ``posix`` and ``nt`` have the same functions, documented in ``posix``. Files and folders
are descriptors on every system, and errors are OSErrors with the usual codes.
"""

import sys

if sys.platform == "win32":
    from ckptool.system.nt import *  # noqa: F403 - both modules define the same names
    from ckptool.system.nt import quoted
else:
    from ckptool.system.posix import *  # noqa: F403
    from ckptool.system.posix import quoted


def command_line(*words: str) -> str:
    """Return words as a line for the shell, quoted where needed."""
    return " ".join(map(quoted, words))
