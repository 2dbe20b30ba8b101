"""Ranges of an object in a store (Amazon's S3 and what speaks like it, Google's, Azure's)."""

from __future__ import annotations

from typing import Any, Final

from ckptool.cancellation import Cancellation, check_cancelled, in_time
from ckptool.errors import FileUnavailable
from ckptool.sources.remote.address import Remote
from ckptool.sources.remote.bucket import Bucket
from ckptool.sources.remote.transport import Tail, changed_far, memory_of

_PIECE_NBYTES: Final = 256 << 10


class StoredFile:
    """An object of a store."""

    def __init__(
        self,
        remote: Remote,
        cancellation: Cancellation | None = None,
        *,
        bucket: Bucket | None = None,
        listed: tuple[str | None, int] | None = None,
    ) -> None:
        """Take an object by its address; ``bucket`` is another way to its store, ``listed`` its tag and size there."""
        self.shown = remote.shown
        self._cancellation = cancellation
        self._bucket = Bucket(remote) if bucket is None else bucket
        self._key = self._bucket.key if bucket is None else remote.partition("://")[2].partition("/")[2]
        self._listed = listed
        if not self._key or self._key.endswith("/"):
            raise FileUnavailable("the address of a folder", kind="directory", hint="Name a file in it.")
        self._tag: str | None = None
        self._nbytes = 0

    def tail(self, nbytes: int) -> Tail:
        """
        Return the last bytes.

        Raises:
            FileUnavailable: The object cannot be read; the message says why.
        """
        if self._bucket.scheme == "az":  # which has no ranges from the end
            return self._tail_by_size(nbytes)
        try:
            found = self._get({"range": {"suffix": nbytes}})
        except FileUnavailable as error:
            if error.kind != "no-ranges":  # that of an empty object, perhaps
                raise
            return self._tail_by_size(nbytes)
        return Tail(found, self._nbytes)

    def fetch(self, start: int, stop: int) -> memoryview:
        """Return the bytes of a range."""
        options: dict[str, Any] = {"range": (start, stop)}
        return self._get({**options, "if_match": self._tag} if self._tag else options)

    @property
    def version(self) -> tuple[object, ...]:
        """What tells the version that this is bound to from others."""
        return self._nbytes, self._tag

    def close(self) -> None:
        """The library keeps no file open."""

    def _tail_by_size(self, nbytes: int) -> Tail:
        try:
            meta = in_time(lambda: self._bucket.library.head(self._bucket.store, self._key), self._cancellation)
        except Exception as error:
            raise self._bucket.explained(error) from error
        self._tag, self._nbytes = meta["e_tag"], meta["size"]
        start = max(0, self._nbytes - nbytes)
        return Tail(self.fetch(start, self._nbytes) if self._nbytes else b"", self._nbytes)

    def _get(self, options: dict[str, Any]) -> memoryview:
        try:
            data, meta = in_time(lambda: self._answer(options), self._cancellation)
        except Exception as error:
            raise self._bucket.explained(error) from error
        if not self._nbytes:
            self._tag, self._nbytes = meta["e_tag"], meta["size"]
            tag, nbytes = self._listed or (self._tag, self._nbytes)
            if (_bare(tag), nbytes) != (_bare(self._tag), self._nbytes):
                raise changed_far("the object was changed since its folder was listed")
        if (meta["e_tag"], meta["size"]) != (self._tag, self._nbytes):
            raise changed_far()
        return data

    def _answer(self, options: dict[str, Any]) -> tuple[memoryview, Any]:
        answer = self._bucket.library.get(self._bucket.store, self._key, options=options)
        start, stop = answer.range
        data = memory_of(stop - start)
        filled = 0
        for piece in answer.stream(min_chunk_size=_PIECE_NBYTES):
            check_cancelled(self._cancellation)
            data[filled : filled + len(piece)] = memoryview(piece)
            filled += len(piece)
        if filled != stop - start:
            raise FileUnavailable("the answer was cut short", kind="network", hint="Try again later.")
        return data, answer.meta


def _bare(tag: str | None) -> str | None:
    """Return a tag as lists may have it, which quote some and not others."""
    return tag.removeprefix("W/").strip('"') if tag is not None else None
