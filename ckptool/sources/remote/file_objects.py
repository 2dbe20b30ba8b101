"""
File objects of fsspec (s3fs, gcsfs, adlfs, huggingface_hub and others) that fetch ranges.

Their own ``read`` keeps blocks around what is read, of megabytes each: to look at an index costs as much as the file
then. The file system that an object belongs to gives ranges as they are asked for.
"""

from __future__ import annotations

from typing import Any

from ckptool.cancellation import Cancellation, in_time
from ckptool.errors import CkptoolError, FileUnavailable
from ckptool.sources.remote.transport import Tail, changed_far


def is_ranged(origin: object) -> bool:
    """Say whether a file object fetches what is read of it from far away, by ranges."""
    found = getattr(origin, "fs", None)
    size = getattr(origin, "size", None)
    return (
        hasattr(origin, "cache")
        and isinstance(getattr(origin, "path", None), str)
        and callable(getattr(found, "cat_file", None))
        and isinstance(size, int)
        and "r" in str(getattr(origin, "mode", ""))
    )


class FileObject:
    """An open file of fsspec, which stays as it is: nothing is read through it, and it is not closed."""

    def __init__(self, origin: Any, cancellation: Cancellation | None = None) -> None:
        self._cancellation = cancellation
        self.shown: str = origin.path
        self._files = origin.fs
        self._path: str = origin.path
        self._nbytes: int = origin.size
        self._version = self._seen(getattr(origin, "details", None))

    def tail(self, nbytes: int) -> Tail:
        """Return the last bytes."""
        start = max(0, self._nbytes - nbytes)
        return Tail(self.fetch(start, self._nbytes) if self._nbytes else b"", self._nbytes)

    def fetch(self, start: int, stop: int) -> bytes:
        """Return the bytes of a range."""
        try:
            found = in_time(lambda: self._files.cat_file(self._path, start=start, end=stop), self._cancellation)
        except CkptoolError:
            raise
        except Exception as error:
            raise _unreadable(error) from error
        if not isinstance(found, bytes) or len(found) != stop - start:
            if isinstance(found, bytes) and len(found) > stop - start:
                hint = "Download the file first."
                raise FileUnavailable("what is behind the file object gives no ranges", kind="no-ranges", hint=hint)
            raise changed_far()
        return found

    def check_unchanged(self) -> None:
        """Raise SourceChanged if another file has its name by now; ranges do not tell."""

        def look() -> object:
            self._files.invalidate_cache()
            return self._files.info(self._path)

        try:
            now = self._seen(in_time(look, self._cancellation))
        except CkptoolError:
            raise
        except Exception as error:
            raise _unreadable(error) from error
        if self._version is not None and now != self._version:
            raise changed_far()

    def close(self) -> None:
        """The object belongs to who opened it."""

    def _seen(self, details: object) -> tuple[object, ...] | None:
        """Return what tells one version from another, as far as the file system says."""
        if not isinstance(details, dict):
            return None
        return tuple(str(details.get(key)) for key in ("size", "ETag", "etag", "LastModified", "mtime", "last_commit"))


def _unreadable(error: Exception) -> FileUnavailable:
    if isinstance(error, FileNotFoundError):
        return FileUnavailable("no such file", kind="missing", hint="Open it again.")
    if isinstance(error, PermissionError):
        return FileUnavailable("the store refuses access", kind="permission", hint="Check the rights of the keys.")
    return FileUnavailable(f"cannot be read ({type(error).__name__})", kind="io", hint="Open it again.")
