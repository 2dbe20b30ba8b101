"""What fetches ranges of one file: the protocol, and the errors that all of them have."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

from ckptool.errors import FileUnavailable, OutOfMemory, SourceChanged

_LARGE_NBYTES: Final = 1 << 20


class Tail(NamedTuple):
    """The last bytes of a file, and its size. ``data`` may be more than was asked for, up to the whole file."""

    data: bytes | memoryview
    nbytes: int


class Transport(Protocol):
    """
    Fetches ranges of one version of one file, from any thread.

    The first answer binds it to the version that is there then: later ones are of the same version, or an error.
    """

    @property
    def shown(self) -> str:
        """What to call the file."""
        ...

    def tail(self, nbytes: int) -> Tail:
        """Return the last ``nbytes`` bytes, or the whole file if it is shorter."""
        ...

    def fetch(self, start: int, stop: int) -> bytes | memoryview:
        """Return exactly the bytes of a range, which is not empty."""
        ...

    def close(self) -> None:
        """End every connection. A fetch that is under way fails."""
        ...


def memory_of(nbytes: int) -> memoryview:
    """Return memory for a range; that of a large one goes back to the system when it is given up, all of it."""
    if nbytes < _LARGE_NBYTES:
        return memoryview(bytearray(nbytes))
    import mmap  # an index needs none

    if sys.platform == "win32":
        return memoryview(mmap.mmap(-1, nbytes))
    try:
        found = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OutOfMemory(f"no {nbytes:,} bytes of memory are free", needed=nbytes) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # the system gives it in large pieces then, which takes far less time
        with suppress(OSError):
            found.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(found)


def changed_far(what: str = "the file was changed while it was being read") -> SourceChanged:
    return SourceChanged(what, hint="Read it again once it is complete.")


def missing_far(hint: str = "Check the address.") -> FileUnavailable:
    return FileUnavailable("no such file (404)", kind="missing", hint=hint)
