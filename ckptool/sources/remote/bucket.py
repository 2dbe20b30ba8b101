"""
Buckets of stores (Amazon's S3 and compatible ones, Google's, Azure's), opened with ``obstore``, and ranges of objects.

Keys come from the environment, from the machine, or from the profiles of AWS if boto3 is installed to read them. The
texts of the library's errors are not passed on: they may contain an address with a signature.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

from ckptool.cancellation import Cancellation, check_cancelled, in_time
from ckptool.errors import CkptoolError, FileUnavailable, MissingPackage
from ckptool.sources.address import Remote
from ckptool.sources.remote.parts import Tail, Transport, changed_remote, memory_of, missing_remote

_STATUS: Final = re.compile(r"status code: (\d{3})")
_RETRIES: Final = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}
_CONNECTING: Final = timedelta(seconds=10)
_ANSWERING: Final = timedelta(seconds=120)
"""The timeout of one answer, of 8 MiB at most."""
_COPYING: Final = timedelta(seconds=900)
"""The timeout of one answer while the store may copy an object, of 5 GiB at most."""
_COMMAND: Final = 'pip install "ckptool[remote]"'
_KEYS: Final = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Hints how to provide keys, by scheme."""


class Bucket:
    """An open bucket. ``key`` is the rest of the address: the name of an object, or a prefix."""

    def __init__(self, remote: Remote, *, writes: bool = False) -> None:
        self.remote = remote
        self.scheme = remote.scheme
        self.library = _library()
        self.name, mark, self.key = remote.partition("://")[2].partition("/")
        if not self.name or not mark:
            hint = f"Give all of it: {self.scheme}://BUCKET/NAME"
            raise FileUnavailable("an address without the name of a file", kind="address", hint=hint)
        self._writes = writes
        known = None if writes else remote.stores
        place = self.scheme, self.name
        self.store = known[place] if known is not None and place in known else self._reached()
        if known is not None:
            known[place] = self.store

    def find(self, key: str | None = None) -> tuple[str | None, int] | None:
        """
        Return the tag and the size of an object, by default the one of the address; None if there is no such object.

        Raises:
            CkptoolError: The store cannot be asked.
        """
        key = self.key if key is None else key
        with self.explaining(), suppress(self.library.exceptions.NotFoundError, FileNotFoundError):
            meta = self.library.head(self.store, key) if key and not key.endswith("/") else None
            return meta and (meta["e_tag"], meta["size"])
        return None

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn errors of the library into ours."""
        try:
            yield
        except Exception as error:
            raise self.explained(error) from error

    def explained(self, error: Exception) -> CkptoolError:
        """Return our error for one of the library, by its class and by known words in its text."""
        if isinstance(error, CkptoolError):
            return error
        known, text = self.library.exceptions, str(error)
        found = _STATUS.search(text)
        status = int(found[1]) if found is not None else 0
        if isinstance(error, known.PreconditionError):
            return changed_remote()
        if isinstance(error, known.NotFoundError | FileNotFoundError):
            return missing_remote("Check the address; that of a folder ends with a slash.")
        if isinstance(error, known.UnauthenticatedError) or status == 401:
            return FileUnavailable("the store does not accept the keys (401)", kind="credentials", hint=self._keys())
        if isinstance(error, known.PermissionDeniedError) or status == 403:
            public = "" if self._writes else "; a public bucket is read with `anonymous=True`"
            hint = f"Check the address and the rights of the keys{public}."
            return FileUnavailable("the store refuses access (403)", kind="permission", hint=hint)
        if status == 301 or "redirect" in text:
            return FileUnavailable("the bucket is in another region", kind="region", hint="Name it with `region=`.")
        if status == 416 or isinstance(error, known.NotSupportedError):
            return FileUnavailable("the store gives no ranges", kind="no-ranges", hint="Download the file first.")
        if not status and any(word in text for word in ("credential", "169.254.169.254", "metadata")):
            return self._without_keys()
        what = f"the store answers {status}" if status else "the store cannot be reached"
        return FileUnavailable(what, kind="network", hint="Check the address, `endpoint=` and the network.")

    def _keys(self) -> str:
        if self._writes:
            return f"{_KEYS[self.scheme]}."
        public = "a public bucket" if self.scheme != "az" else "what is public"
        return f"{_KEYS[self.scheme]}, or read {public} with `anonymous=True`."

    def _without_keys(self) -> FileUnavailable:
        return FileUnavailable("no keys for the store were found", kind="credentials", hint=self._keys())

    def _reached(self) -> Any:
        """Return the library's store object for the bucket, made with the options of the address."""
        stores, remote = self.library.store, self.remote
        answering = _COPYING if self._writes else _ANSWERING
        client: dict[str, Any] = {"connect_timeout": _CONNECTING, "timeout": answering}
        if (remote.endpoint or "").startswith("http://"):
            client["allow_http"] = True
        options: dict[str, Any] = {"client_options": client, "retry_config": _RETRIES}
        if remote.anonymous:
            options["skip_signature"] = True
        kind, endpoint = {
            "s3": (stores.S3Store, "endpoint"),
            "gs": (stores.GCSStore, "base_url"),
            "az": (stores.AzureStore, "endpoint"),
        }[self.scheme]
        if remote.endpoint is not None:
            options[endpoint] = remote.endpoint
        if self.scheme == "s3":
            options |= self._amazon()
        try:
            return kind(self.name, **options)
        except self.library.exceptions.BaseError as error:
            hint = self._keys()
            raise FileUnavailable("the store cannot be set up", kind="credentials", hint=hint) from error

    def _amazon(self) -> dict[str, Any]:
        """Return options for S3: the region, and boto3's credentials unless the environment, or nobody, gives keys."""
        options = {} if self.remote.region is None else {"region": self.remote.region}
        if self._writes:
            options["copy_if_not_exists"] = "multipart"  # a copy is completed only if its name is free
        if self.remote.anonymous or os.environ.get("AWS_ACCESS_KEY_ID"):
            return options
        try:
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError:
            return options
        try:
            provider = Boto3CredentialProvider()
        except Exception as error:  # it found no keys, or profiles that it cannot read
            raise self._without_keys() from error
        return {**options, "credential_provider": provider}


def _library() -> Any:
    """Return the module ``obstore``; raise MissingPackage if it is not installed."""
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise MissingPackage.named("obstore", _COMMAND) from error
    return obstore


_PIECE_NBYTES: Final = 256 << 10


class StoredFile(Transport):
    """Fetches ranges of an object of a store."""

    def __init__(
        self,
        remote: Remote,
        cancellation: Cancellation | None = None,
        *,
        bucket: Bucket | None = None,
        listed: tuple[str | None, int] | None = None,
    ) -> None:
        """Prepare to read an object; ``bucket`` is its bucket if that is open, ``listed`` its tag and size if known."""
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
        Return the last ``nbytes`` bytes, and the size of the object.

        Raises:
            FileUnavailable: The object cannot be read; the message says why.
        """
        if self._listed is not None:
            return self._end(nbytes, self._listed[1])
        if self._bucket.scheme == "az":  # Azure has no ranges counted from the end
            return self._tail_by_size(nbytes)
        try:
            found = self._get({"range": {"suffix": nbytes}})
        except FileUnavailable as error:
            if error.kind != "no-ranges":  # the answer for an empty object, too
                raise
            return self._tail_by_size(nbytes)
        return Tail(found, self._nbytes)

    def fetch(self, start: int, stop: int) -> memoryview:
        options: dict[str, Any] = {"range": (start, stop)}
        return self._get({**options, "if_match": self._tag} if self._tag else options)

    @property
    def version(self) -> tuple[object, ...]:
        return self._nbytes, self._tag

    def _tail_by_size(self, nbytes: int) -> Tail:
        with self._bucket.explaining():
            meta = in_time(lambda: self._bucket.library.head(self._bucket.store, self._key), self._cancellation)
        self._tag, self._nbytes = meta["e_tag"], meta["size"]
        return self._end(nbytes, self._nbytes)

    def _end(self, nbytes: int, size: int) -> Tail:
        return Tail(self.fetch(max(0, size - nbytes), size) if size else b"", size)

    def _get(self, options: dict[str, Any]) -> memoryview:
        with self._bucket.explaining():
            data, meta = in_time(lambda: self._answer(options), self._cancellation)
        if not self._nbytes:
            self._tag, self._nbytes = meta["e_tag"], meta["size"]
            tag, nbytes = self._listed or (self._tag, self._nbytes)
            if (_bare(tag), nbytes) != (_bare(self._tag), self._nbytes):
                raise changed_remote("the object was changed since its folder was listed")
        if (meta["e_tag"], meta["size"]) != (self._tag, self._nbytes):
            raise changed_remote()
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
    """Return a tag without quotes and the prefix of a weak one, which listings have or leave out."""
    return tag.removeprefix("W/").strip('"') if tag is not None else None
