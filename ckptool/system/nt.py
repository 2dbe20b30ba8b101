"""
Windows. Open files are handles in a descriptor each; what is opened below a folder is opened by its handle.

Every handle shares reading, writing and deletion: whoever saves a checkpoint again can do so while it is open here.
See CreateFileW, ReadFile and NtCreateFile in Microsoft's documentation.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import msvcrt
import os
import sys
from ctypes import wintypes
from typing import Any, Final

assert sys.platform == "win32"  # for mypy

_MOST_NBYTES: Final = 1 << 30
_READ: Final = 0x8010_0000  # GENERIC_READ, SYNCHRONIZE
_SHARED: Final = 7  # FILE_SHARE_READ, _WRITE, _DELETE
_OPEN_EXISTING: Final = 3
_FOLDERS_TOO: Final = 0x0200_0000  # FILE_FLAG_BACKUP_SEMANTICS
_WAIT: Final = 0x20  # FILE_SYNCHRONOUS_IO_NONALERT
_LINK_ITSELF: Final = 0x20_0000  # FILE_OPEN_REPARSE_POINT
_IS_REPARSED: Final = 0x400  # FILE_ATTRIBUTE_REPARSE_POINT
_LEADS_ELSEWHERE: Final = 0x2000_0000  # of a tag: links and junctions, but no files that are compressed, or in a cloud
_TAG_INFORMATION: Final = 9  # FileAttributeTagInfo
_NO_CASE: Final = 0x40  # OBJ_CASE_INSENSITIVE
_AT_THE_END: Final = 38  # ERROR_HANDLE_EOF
_LONGEST_PATH: Final = 1 << 15

_KERNEL: Final = ctypes.WinDLL("kernel32", use_last_error=True)
_NT: Final = ctypes.WinDLL("ntdll")
_KERNEL.CreateFileW.restype = wintypes.HANDLE
_NT.NtCreateFile.restype = ctypes.c_uint32


class _Text(ctypes.Structure):
    _fields_ = (("nbytes", wintypes.USHORT), ("room", wintypes.USHORT), ("text", wintypes.LPWSTR))


class _Place(ctypes.Structure):
    _fields_ = (
        ("nbytes", wintypes.ULONG),
        ("folder", wintypes.HANDLE),
        ("name", ctypes.POINTER(_Text)),
        ("how", wintypes.ULONG),
        ("security", wintypes.LPVOID),
        ("quality", wintypes.LPVOID),
    )


class _Overlapped(ctypes.Structure):
    _fields_ = (("unused", ctypes.c_void_p * 2), ("offset", ctypes.c_uint64), ("event", wintypes.HANDLE))


class _Tag(ctypes.Structure):
    _fields_ = (("attributes", wintypes.DWORD), ("tag", wintypes.DWORD))


# Opening for reading


def open_reading(path: str) -> int:
    return _descriptor(_opened(None, path, 0))


def open_folder(path: str) -> int:
    return _folder(open_reading(path))


def open_at(folder: int | None, name: str) -> int:
    fd = _descriptor(_opened(folder, name, _LINK_ITSELF))
    try:
        tag = _Tag()
        handle = wintypes.HANDLE(msvcrt.get_osfhandle(fd))
        _checked(_KERNEL.GetFileInformationByHandleEx(handle, _TAG_INFORMATION, ctypes.byref(tag), ctypes.sizeof(tag)))
        if not tag.attributes & _IS_REPARSED:
            return fd
        if not tag.tag & _LEADS_ELSEWHERE:  # what opened it so would see what a filter of the system makes a file of
            whole = _descriptor(_opened(folder, name, 0))
            if os.path.sameopenfile(fd, whole):
                os.close(fd)
                return whole
            os.close(whole)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
    except BaseException:
        os.close(fd)
        raise


def open_folder_at(folder: int, name: str) -> int:
    if name == os.pardir:
        return open_folder(os.path.dirname(_path_of(folder)))
    return _folder(open_at(folder, name))


def link_at(folder: int, name: str) -> str:
    return os.readlink(_path_below(folder, name)).replace("\\", "/")


def stat_at(folder: int | None, name: str, *, follow: bool = True) -> os.stat_result:
    return os.stat(name if folder is None else _path_below(folder, name), follow_symlinks=follow)


def _path_below(folder: int, name: str) -> str:
    return os.path.join(_path_of(folder), *name.split("/"))


def _path_of(fd: int) -> str:
    """Return the path that an open file or folder has now."""
    text = ctypes.create_unicode_buffer(_LONGEST_PATH)
    _checked(_KERNEL.GetFinalPathNameByHandleW(wintypes.HANDLE(msvcrt.get_osfhandle(fd)), text, len(text), 0))
    return text.value


def _opened(folder: int | None, name: str, how: int) -> int:
    """Return a handle of a path, or of a name in an open folder, of which no part can lead out of there."""
    if "\0" in name:
        raise ValueError("embedded null character")
    if folder is None:
        handle = _KERNEL.CreateFileW(
            name, wintypes.DWORD(_READ), _SHARED, None, _OPEN_EXISTING, _FOLDERS_TOO | how, None
        )
        if handle in (None, wintypes.HANDLE(-1).value):
            raise ctypes.WinError(ctypes.get_last_error())
        return int(handle)
    if ":" in name:  # a stream of a file has no name of its own
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    nbytes = len(name.encode("utf-16-le", "surrogatepass"))
    text = _Text(nbytes, nbytes, name)
    place = _Place(ctypes.sizeof(_Place), msvcrt.get_osfhandle(folder), ctypes.pointer(text), _NO_CASE, None, None)
    handle, status = wintypes.HANDLE(), (ctypes.c_void_p * 2)()
    fail = _NT.NtCreateFile(
        *(ctypes.byref(handle), wintypes.DWORD(_READ), ctypes.byref(place), status, None, 0, _SHARED),
        *(1, _WAIT | how, None, 0),  # FILE_OPEN
    )
    if fail:
        raise ctypes.WinError(_NT.RtlNtStatusToDosError(wintypes.DWORD(fail)))
    assert handle.value is not None
    return handle.value


def _descriptor(handle: int) -> int:
    try:
        return msvcrt.open_osfhandle(handle, os.O_RDONLY | os.O_NOINHERIT)  # of bytes: O_TEXT is not in it
    except OSError:
        _KERNEL.CloseHandle(wintypes.HANDLE(handle))
        raise


def _folder(fd: int) -> int:
    import stat

    if stat.S_ISDIR(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def _checked(result: int) -> None:
    if not result:
        raise ctypes.WinError(ctypes.get_last_error())


# Bytes


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    data = ctypes.create_string_buffer(min(nbytes, _MOST_NBYTES))
    return ctypes.string_at(data, _moved(_KERNEL.ReadFile, fd, data, offset))


def read_into_at(fd: int, buffer: memoryview, offset: int) -> int:
    nbytes = min(buffer.nbytes, _MOST_NBYTES)
    return _moved(_KERNEL.ReadFile, fd, (ctypes.c_char * nbytes).from_buffer(buffer), offset)


def _moved(call: Any, fd: int, data: ctypes.Array[ctypes.c_char], offset: int) -> int:
    """Return how many bytes a call reads or writes at a position."""
    at, count = _Overlapped(offset=offset), wintypes.DWORD()
    handle = wintypes.HANDLE(msvcrt.get_osfhandle(fd))
    if not call(handle, data, wintypes.DWORD(len(data)), ctypes.byref(count), ctypes.byref(at)):
        error = ctypes.get_last_error()
        if error != _AT_THE_END:
            raise ctypes.WinError(error)
    return count.value


def map_private(fd: int, nbytes: int) -> mmap.mmap:  # noqa: ARG001 - a file that is mapped cannot be saved over
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


# Facts


def most_descriptors() -> int | None:
    return None


def is_network(fd: int) -> bool:  # noqa: ARG001
    return False


def free_room(place: str | int) -> int:
    room = ctypes.c_uint64()
    path = _path_of(place) if isinstance(place, int) else place
    _checked(_KERNEL.GetDiskFreeSpaceExW(path, ctypes.byref(room), None, None))
    return room.value


# Memory


def free_memory() -> int | None:
    return _memory()[4]


def physical_memory() -> tuple[int | None, int | None]:
    found = _memory()
    return found[2], found[1]


def new_memory(nbytes: int, *, in_large_pages: bool = False) -> mmap.mmap:  # noqa: ARG001
    return mmap.mmap(-1, nbytes)


def populate(address: int, nbytes: int) -> None:
    pass


def _memory() -> ctypes.Array[ctypes.c_uint64]:
    """Return a MEMORYSTATUSEX: of physical memory the total and what is free, and of what can be committed."""
    found = (ctypes.c_uint64 * 8)(64)
    _checked(_KERNEL.GlobalMemoryStatusEx(ctypes.byref(found)))
    return found
