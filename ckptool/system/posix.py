"""Linux and macOS. What a docstring says holds on Windows too, unless it says something else."""

from __future__ import annotations

import errno
import os
import resource
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from struct import pack
from typing import TYPE_CHECKING

assert sys.platform != "win32"  # for mypy

if TYPE_CHECKING:
    import mmap

_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CLOEXEC
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
"""Of file systems that have no hard links."""
# linux/fs.h; a file system that does not know these numbers refuses them
_FICLONE = 0x40049409
_FICLONERANGE = 0x4020940D
_PROBE_NBYTES = 1 << 16
"""What is cloned to see whether it can be: whole blocks."""
_MOST_NBYTES = 0x7FFFF000
"""What one call transfers at most on Linux; on macOS more than 2 GiB are an error."""
_FLAGS = 16
"""Where f_flags is in the struct statfs of macOS, in words of four bytes; see statfs(2)."""
_MNT_LOCAL = 0x1000
_IN_NO_FOLDER = -2
"""AT_FDCWD of macOS."""
_NO_DESCRIPTOR: dict[str, bool] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
"""Before, a mapping kept a descriptor of its file for itself."""


BLOCKS_NAMES = False
"""Whether most programs cannot rename a file over one that is open, as on Windows."""


# Opening for reading


def open_reading(path: str) -> int:
    """
    Return a descriptor of what has a path, whatever it is: a pipe never blocks. No process that is started has it.

    It is in nobody's way: the file can be written to, renamed, removed and replaced meanwhile; on Windows it can be
    replaced by those who rename with POSIX semantics, or write into it.
    """
    return os.open(path, _FILE)


def open_folder(path: str) -> int:
    """Return a descriptor of a folder, to open what is in it. On Linux it may be one that can be entered alone."""
    return os.open(path, _FOLDER)


def open_at(folder: int | None, name: str) -> int:
    """
    Return what ``open_reading`` does of a name in an open folder; of a path, where ``folder`` is None.

    A link at the end is not followed, and is an error.
    """
    return os.open(name, _FILE | os.O_NOFOLLOW, dir_fd=folder)


def open_folder_at(folder: int, name: str) -> int:
    """Return a descriptor of a folder in an open one, or of the one that is above: ``..``. No link is followed."""
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def link_at(folder: int, name: str) -> str:
    """Return the target of a link in an open folder, with slashes; raise OSError if the name is not one of a link."""
    return os.readlink(name, dir_fd=folder)


def stat_at(folder: int | None, name: str, *, follow: bool = True) -> os.stat_result:
    """Return the status of a name in an open folder; of a path, where ``folder`` is None."""
    return os.stat(name, dir_fd=folder, follow_symlinks=follow)


# Bytes


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Return bytes from a position, wherever other threads read: at least one, and fewer than asked for at the end."""
    return os.pread(fd, min(nbytes, _MOST_NBYTES), offset)


def read_into_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer with the bytes from a position, or its beginning, and return how many they are: 0 at the end."""
    return os.preadv(fd, [buffer[:_MOST_NBYTES]], offset)


def map_private(fd: int, nbytes: int) -> mmap.mmap:
    """
    Return a private mapping of a file, that may be written to: processes share its pages until one does.

    On Windows, where nobody can save over a file that is mapped, it is an OSError.

    Raises:
        ValueError: The file is shorter.
        OSError: The system has no room for it.
    """
    import mmap  # what only reads needs none

    if sys.platform == "linux":  # more is read at once where a page is touched that is not in memory
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    # Not ACCESS_COPY, which asks for no room to write in on some systems and then kills the writer.
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=protection, **_NO_DESCRIPTOR)


# Facts


def is_no_file(path: str) -> bool:  # noqa: ARG001 - Windows has such names
    return False


def listed_path(line: bytes) -> str:
    """Return the path that a line of a list is."""
    return os.fsdecode(line)


def most_descriptors() -> int | None:
    """Return how many descriptors the process may have; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def is_network(fd: int) -> bool:
    """
    Say whether an open file answers over a network, or through a process (FUSE), one small page fault at a time.

    False wherever that is not known, and on Windows, where nothing is mapped.
    """
    if sys.platform == "darwin":
        import ctypes  # few files are mapped

        system, status = ctypes.CDLL(None), (ctypes.c_uint32 * 1024)()
        call = system["fstatfs$INODE64"] if os.uname().machine == "x86_64" else system.fstatfs
        is_far: bool = call(fd, status) == 0 and not status[_FLAGS] & _MNT_LOCAL
    else:
        from ckptool.system import linux

        is_far = linux.is_network(fd)
    return is_far


def free_room(place: str | int) -> int:
    """Return the bytes that can still be written in a folder, or beside an open file."""
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


# Memory


def free_memory() -> int | None:
    """
    Return the bytes that can still be allocated without pushing anything out, or None where the system does not say.

    On Linux, within the limits of control groups; pages of files count as free, for the system drops them on demand.
    On Windows, what this process may still commit.
    """
    from ckptool.system import linux  # few ask

    return linux.free_memory()


def physical_memory() -> tuple[int | None, int | None]:
    """Return the bytes of memory that nobody uses, and those that are there in all; None for what is not known."""
    return _pages("SC_AVPHYS_PAGES"), _pages("SC_PHYS_PAGES")


def _pages(name: str) -> int | None:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # macOS knows the total but not what is free
        return None


def new_memory(nbytes: int) -> mmap.mmap:
    """
    Return memory that goes back to the system, all of it, when it is given up; raise OSError if there is not so much.

    It is in large pages where the system has such: they take far less time to fill.
    """
    import mmap

    found = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            found.madvise(mmap.MADV_HUGEPAGE)
    return found


# Writing


def open_new(path: str, mode: int) -> int:
    """Return a descriptor of a new file, to be written and read; raise FileExistsError if anything has its name."""
    return os.open(path, _NEW | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)


def open_nameless(folder: str, mode: int) -> int | None:
    """Return a descriptor of a new file that has no name yet, in a folder; None where there are no such files."""
    if hasattr(os, "O_TMPFILE") and os.path.exists("/proc/self/fd"):
        try:
            return os.open(folder, _NEW | os.O_TMPFILE, mode)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    return None


def open_appending(path: str) -> int:
    """Return a descriptor of a file, a new one if there is none, to be read and appended to."""
    return os.open(path, _NEW | os.O_CREAT | os.O_APPEND, 0o666)


def open_writing(path: str) -> int:
    """Return a descriptor of a file that is there, to be read and written; a link at the end is an error."""
    return os.open(path, _NEW | os.O_NOFOLLOW | os.O_NONBLOCK)


def path_of(fd: int) -> str:
    """Return a path that leads to an open file. On Linux it may have no name."""
    return f"/proc/self/fd/{fd}"


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes at a position, wherever other threads write."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        offset, view = offset + count, view[count:]


def give_name(fd: int, old: str | None, path: str) -> None:
    """
    Give a new file a name in one step; raise FileExistsError if anything has it.

    ``old`` is the name that it has; None if it is one without a name. It may keep the old one.
    """
    if old is None:
        # Only with a descriptor does Python ask the system to follow the link, which leads to the open file.
        os.link(path_of(fd), path, src_dir_fd=fd, follow_symlinks=True)
        return
    try:
        os.link(old, path)
    except OSError as error:
        if error.errno not in _NO_LINKS or os.path.lexists(path):
            raise
        os.rename(old, path)  # a file system without hard links, as on most USB sticks


def replace(fd: int, old: str, path: str, aside: str) -> None:  # noqa: ARG001 - Windows needs them
    """
    Give an open file the name of another in one step.

    Some file systems on Windows cannot replace a file that somebody has open: it is renamed to ``aside`` just before,
    and removed. It fails where those who have it open do not share deletion.
    """
    os.replace(old, path)


def rename(old: str, path: str) -> None:
    """Give a file or a folder another name, that of an empty folder too; raise OSError if anything else has it."""
    os.rename(old, path)


def sync(fd: int) -> None:
    """Wait until what was written to an open file is on the disk, and not in the disk's own memory."""
    if sys.platform == "darwin":
        import fcntl

        with suppress(OSError):  # a network has no such call
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)


def sync_folder(path: str) -> None:
    """Wait until the names in a folder are on the disk, where the file system can do that; Windows does it alone."""
    fd = os.open(path or os.curdir, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.EOPNOTSUPP,
            errno.EACCES,
            errno.ENOTSUP,
        ):
            raise
    finally:
        os.close(fd)


def narrow(fd: int, mode: int) -> None:
    """Take from an open file all that ``mode`` does not allow; nothing on Windows, which has no modes."""
    with suppress(PermissionError):  # a file system without modes
        os.fchmod(fd, os.fstat(fd).st_mode & mode & 0o777)


def take_after(fd: int, path: str, status: os.stat_result) -> None:
    """
    Give what is open the mode of what has a path, and its owner and attributes as far as we may.

    On Windows it has the access control list of its folder.
    """
    for owner, group in (
        (-1, status.st_gid),
        (status.st_uid, -1),
    ):  # only root may be allowed to
        with suppress(OSError):
            os.fchown(fd, owner, group)
    if sys.platform == "linux":
        with suppress(OSError):
            for name in os.listxattr(path):
                with suppress(OSError):
                    os.setxattr(fd, name, os.getxattr(path, name))
    with suppress(PermissionError):  # a file system without modes
        os.fchmod(fd, stat.S_IMODE(status.st_mode))


def clone(fd: int, source: int, path: str | None) -> None:
    """
    Give a new file the content of another, where ``clones_to`` says that files share it; it loses its locks.

    ``path`` is the name that it has; None if it is one without a name.
    """
    if sys.platform == "darwin":  # which clones to a name that is free alone
        assert path is not None
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        os.unlink(path)
        _clone_as(path, source)
        os.chmod(path, 0o600)
        new = os.open(path, _NEW | os.O_NOFOLLOW)
        os.fchmod(new, mode)
        os.dup2(new, fd, inheritable=False)
        os.close(new)
    else:
        import fcntl  # who only reads needs none of it

        fcntl.ioctl(fd, _FICLONE, source)


def _clone_as(path: str, source: int) -> None:
    """Make of an open file one of another name on macOS; see clonefile(2)."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).fclonefileat(source, _IN_NO_FOLDER, os.fsencode(path), 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)


def clones_to(source: int, folder: str) -> bool:
    """Say whether an open file of some size can be cloned to a new one in a folder."""
    with suppress(OSError):  # there may be no folder, or a file system without files of this kind
        if sys.platform == "darwin":
            path = os.path.join(folder, f".ckptool-{os.getpid()}-{os.urandom(8).hex()}")
            _clone_as(path, source)
            os.unlink(path)
            return True
        else:  # noqa: RET505 - it is never reached on macOS
            import fcntl

            fd = open_nameless(folder, 0o600)
            if fd is not None:
                try:
                    fcntl.ioctl(fd, _FICLONERANGE, pack("=q3Q", source, 0, _PROBE_NBYTES, 0))
                finally:
                    os.close(fd)
                return True
    return False


# Processes


CAN_EDIT = True
"""Whether files can be edited in place: what is said of who owns a journal, and when it is on the disk, holds."""


def lock(fd: int) -> bool | None:
    """Lock an open file or folder until it is closed; return False if it is locked, None where there are no locks."""
    import fcntl

    return _locked(fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock_records(fd: int) -> bool | None:
    """
    Lock an open file as ``lockf`` does, whose lock ends as soon as this process closes any descriptor of the file.

    Linux has locks that the open file owns: they end with it alone, and keep out the same processes.
    """
    import fcntl

    if sys.platform == "linux":
        record = pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        return _locked(fcntl.fcntl, fd, fcntl.F_OFD_SETLK, record)
    else:  # noqa: RET505 - it is never reached on Linux
        return _locked(fcntl.lockf, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _locked(call: Callable[..., object], *arguments: object) -> bool | None:
    try:
        call(*arguments)
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EACCES) else None
    return True


def is_alive(pid: int) -> bool:
    """Say whether this machine has a process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


MOST_PROCESSES = 1024
"""How many can be waited for at once."""


def is_unread(error: OSError) -> bool:
    """Say whether an error of writing says that nobody reads any more what is written."""
    return isinstance(error, BrokenPipeError)


@contextmanager
def no_interrupt() -> Iterator[None]:
    """Keep Ctrl-C from reaching the processes that are started meanwhile."""
    import signal

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# Commands of people, and for them


SHELLS_EXPAND = True
"""Whether a pattern of paths that is not quoted is looked up before a program sees it."""


def quoted(word: str) -> str:
    """Return a word as the shell takes it: on Windows as both cmd.exe and PowerShell do, as far as they agree."""
    from shlex import quote  # few files need advice

    return quote(word)


def command_line(*words: str) -> str:
    """Return words as a line for the shell."""
    return " ".join(map(quoted, words))


def command_for(what: str, path: str) -> str | None:
    """Return the command to "read", "enter", "write" or "remove" a path: that allows it, or does; None if unknown."""
    words = {
        "read": "chmod u+r",
        "enter": "chmod u+rx",
        "write": "chmod u+w",
        "remove": "rm",
    }
    return f"{words[what]} -- {quoted(path)}"


COPY_LINKED = "cp -rL FOLDER COPY"
"""The command that copies a folder with what its links lead to."""
MORE_DESCRIPTORS = "Allow more open files: ulimit -n 4096"
"""What to do where there are too few descriptors."""
