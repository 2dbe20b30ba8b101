"""
Makes of Linux a macOS, as far as ckptool can see it: put this folder first in ``PYTHONPATH``.

What only Linux has is gone, one read or write has at most INT_MAX bytes, and ``sys.platform`` is darwin.
"""

import builtins
import errno
import fcntl
import io
import mmap
import os
import sys
import sysconfig
from functools import wraps
from importlib import import_module

# Modules of Python that ask when they are imported which system this is, and then want to call it.
for _name in (
    *("asyncio", "concurrent.futures.process", "ctypes.util", "multiprocessing.popen_spawn_posix", "selectors"),
    *("shutil", "socket", "subprocess", "tempfile", "tracemalloc", "urllib.request", "uuid", "webbrowser"),
):
    import_module(_name)

sys.modules["tempfile"]._O_TMPFILE_WORKS = False
sys.modules["shutil"]._copyxattr = lambda *_, **__: None
sysconfig.get_config_vars()  # from a module that is named for the system

INT_MAX = 2**31 - 1
LINUX = {
    os: """O_TMPFILE O_PATH O_DIRECT O_NOATIME copy_file_range posix_fadvise posix_fallocate sched_getaffinity
        sched_setaffinity memfd_create splice eventfd pidfd_open fdatasync getxattr setxattr listxattr removexattr
        process_cpu_count POSIX_FADV_SEQUENTIAL POSIX_FADV_WILLNEED POSIX_FADV_DONTNEED""",
    fcntl: "F_OFD_SETLK F_OFD_GETLK F_OFD_SETLKW F_SETPIPE_SZ F_GETPIPE_SZ F_ADD_SEALS FICLONE FICLONERANGE",
    mmap: "MAP_POPULATE MAP_STACK MAP_NORESERVE MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTFORK MADV_POPULATE_WRITE",
}
for _module, _names in LINUX.items():
    for _name in _names.split():
        if hasattr(_module, _name):
            delattr(_module, _name)


def _at_most(name, size):
    function = getattr(os, name)

    @wraps(function)
    def call(descriptor, what, *rest):
        if size(what) > INT_MAX:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return function(descriptor, what, *rest)

    setattr(os, name, call)


def _total(buffers):
    return sum(memoryview(one).nbytes for one in buffers)


_at_most("read", int)
_at_most("pread", int)
_at_most("preadv", _total)
_at_most("write", len)
_at_most("pwrite", lambda data: memoryview(data).nbytes)

FULL_SYNCS = []
"""The descriptors whose file a program has asked the disk itself to keep."""
fcntl.F_FULLFSYNC = 51
_fcntl = fcntl.fcntl


def _full_sync(descriptor, command, argument=0):
    if command != fcntl.F_FULLFSYNC:
        return _fcntl(descriptor, command, argument)
    FULL_SYNCS.append(descriptor)
    return os.fsync(descriptor)


fcntl.fcntl = _full_sync


def _hidden(path):
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    return text in ("/proc", "/sys") or text.startswith(("/proc/", "/sys/"))


def _hiding(function):
    @wraps(function)
    def call(path=".", *rest, **options):
        if _hidden(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return function(path, *rest, **options)

    return call


for _name in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "access"):
    _function = getattr(os, _name)
    setattr(os, _name, _hiding(_function))
    for _supporting in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if _function in _supporting:
            _supporting.add(getattr(os, _name))
builtins.open = io.open = _hiding(open)
sys.platform = "darwin"
