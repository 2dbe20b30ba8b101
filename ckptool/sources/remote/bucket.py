"""
Objects of stores (S3, Google, Azure) with ``obstore``: read by ranges, and written.

Keys come from the environment, from the machine, or from the profiles of AWS if boto3 is installed to read them. The
texts of the library's errors are not passed on: they may contain an address with a signature.

Objects are written in parts, under a temporary name, from which the store copies them to their final name.

1. Parts of 8 MiB, or larger ones if there would be too many, go to ``.<name>.ckptool-….part``, several at a time. The
   object appears when all parts are there; an upload that fails or is given up before is aborted and leaves nothing.
2. It can be read back there. Then one request copies it inside the store, so the final name has all of it or nothing.
   Unless it may replace an object, the store itself refuses the copy if the name was taken meanwhile.
3. A killed process may leave the temporary object, or parts without an object, but never part of a result.

S3 copies up to 5 GiB in one request. A larger object is written to its final name directly, after a check just before
the end that the name is free, and is deleted again unless it is what was to be written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

from ckptool.cancellation import Cancellation, check_cancelled, in_time
from ckptool.errors import CkptoolError, FileUnavailable, MissingPackage, OutputExists, OutputFailed
from ckptool.sources.address import Remote
from ckptool.sources.remote.parts import Tail, Transport, changed_remote, missing_remote
from ckptool.sources.source import memory_of

_STATUS: Final = re.compile(r"status code: (\d{3})")
_RETRIES: Final = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}
_CONNECTING: Final = timedelta(seconds=10)
_ANSWERING: Final = timedelta(seconds=120)
"""The timeout of one answer, of 8 MiB at most."""
_COPYING: Final = timedelta(seconds=900)
"""The timeout of one answer while the store may copy an object, of 5 GiB at most."""
_PART_NBYTES: Final = 8 << 20
_MOST_PARTS: Final = 9_000
"""Stores accept 10,000."""
_MOST_AT_ONCE: Final = 8
_MOST_COPIED: Final = 5 << 30
"""What S3 copies in one request."""
_KEYS: Final = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Hints how to provide keys, by scheme."""


class Bucket:
    """An open bucket. ``key`` is the rest of the address: the name of an object, or a prefix."""

    writes = False

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.scheme = remote.scheme
        try:
            import obstore
            import obstore.exceptions
            import obstore.store
        except ImportError as error:
            raise MissingPackage.named("obstore", 'pip install "ckptool[remote]"') from error
        self.library: Any = obstore
        self.name, mark, self.key = remote.partition("://")[2].partition("/")
        if not self.name or not mark:
            hint = f"Give all of it: {self.scheme}://BUCKET/NAME"
            raise FileUnavailable("an address without the name of a file", kind="address", hint=hint)
        known = None if self.writes else remote.stores
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
            return self._without_keys("the store does not accept the keys (401)")
        if isinstance(error, known.PermissionDeniedError) or status == 403:
            public = "" if self.writes else "; a public bucket is read with `anonymous=True`"
            hint = f"Check the address and the rights of the keys{public}."
            return FileUnavailable("the store refuses access (403)", kind="permission", hint=hint)
        if status == 301 or "redirect" in text:
            return FileUnavailable("the bucket is in another region", kind="region", hint="Name it with `region=`.")
        if status == 416 or isinstance(error, known.NotSupportedError):
            return FileUnavailable("the store gives no ranges", kind="no-ranges", hint="Download the file first.")
        if not status and any(word in text for word in ("credential", "169.254.169.254", "metadata")):
            return self._without_keys("no keys for the store were found")
        what = f"the store answers {status}" if status else "the store cannot be reached"
        return FileUnavailable(what, kind="network", hint="Check the address, `endpoint=` and the network.")

    def _without_keys(self, what: str) -> FileUnavailable:
        public = "a public bucket" if self.scheme != "az" else "what is public"
        or_else = "" if self.writes else f", or read {public} with `anonymous=True`"
        return FileUnavailable(what, kind="credentials", hint=f"{_KEYS[self.scheme]}{or_else}.")

    def _reached(self) -> Any:
        """Return the library's store object for the bucket, made with the options of the address."""
        stores, remote = self.library.store, self.remote
        answering = _COPYING if self.writes else _ANSWERING
        client: dict[str, Any] = {"connect_timeout": _CONNECTING, "timeout": answering}
        client |= {"allow_http": True} if (remote.endpoint or "").startswith("http://") else {}
        options: dict[str, Any] = {"client_options": client, "retry_config": _RETRIES}
        options |= {"skip_signature": True} if remote.anonymous else {}
        kind, endpoint = {
            "s3": (stores.S3Store, "endpoint"),
            "gs": (stores.GCSStore, "base_url"),
            "az": (stores.AzureStore, "endpoint"),
        }[self.scheme]
        if remote.endpoint is not None:
            options[endpoint] = remote.endpoint
        if self.scheme == "s3":
            options |= {} if remote.region is None else {"region": remote.region}
            # A copy is completed only if its name is free.
            options |= {"copy_if_not_exists": "multipart"} if self.writes else {}
            if not (remote.anonymous or os.environ.get("AWS_ACCESS_KEY_ID")):
                options |= self._of_boto3()
        try:
            return kind(self.name, **options)
        except self.library.exceptions.BaseError as error:
            raise self._without_keys("the store cannot be set up") from error

    def _of_boto3(self) -> dict[str, Any]:
        """Return the option for the keys that boto3 finds; none if boto3 is not installed."""
        try:
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError:
            return {}
        try:
            return {"credential_provider": Boto3CredentialProvider()}
        except Exception as error:  # it found no keys, or profiles that it cannot read
            raise self._without_keys("no keys for the store were found") from error


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


class Stored(Bucket):
    """A bucket to write to, and the requests for that."""

    writes = True

    def copies(self, nbytes: int) -> bool:
        """Return whether the store copies an object of this size in one request."""
        return self.scheme != "s3" or nbytes <= _MOST_COPIED

    def address_of(self, key: str) -> Remote:
        """Return the address of an object in this bucket."""
        return self.remote.elsewhere(f"{self.scheme}://{self.name}/{key}")

    def writer(self, key: str, nbytes: int) -> Any:
        """Return the library's writer for an object of ``nbytes`` bytes, which appears when the writer is closed."""
        step = -(-nbytes // _MOST_PARTS)
        part = max(_PART_NBYTES, -(-step // _PART_NBYTES) * _PART_NBYTES)
        at_once = min(_MOST_AT_ONCE, self.remote.connections)
        return self.library.open_writer(self.store, key, buffer_size=part, max_concurrency=at_once)

    def has(self, key: str) -> bool:
        """Return whether there is an object of this name."""
        with self.failing():
            return self.find(key) is not None

    def is_empty(self, prefix: str) -> bool:
        """Return whether no object's name begins with ``prefix``, which ends with a slash."""
        with self.failing():
            return not any(map(len, self.library.list(self.store, prefix)))

    def copy(self, source: str, key: str, *, force: bool) -> None:
        """
        Copy the object ``source`` to the name ``key``, in one request.

        Raises:
            OutputExists: There is an object of that name, and ``force`` is false.
            OutputFailed: The store refused.
        """
        known = self.library.exceptions
        with self.failing():
            try:
                self.library.copy(self.store, source, key, overwrite=force)
            except (known.AlreadyExistsError, known.PreconditionError) as error:
                raise exists(self.address_of(key).shown) from error

    def delete(self, *keys: str) -> None:
        """Delete those of the objects that exist; raise OutputFailed if the store refuses."""
        with self.failing():
            self.library.delete(self.store, list(keys))

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Turn errors of the library into OutputFailed."""
        try:
            yield
        except OutputFailed:
            raise
        except Exception as error:
            found = self.explained(error)
            what, shown = "no such bucket (404)" if found.kind == "missing" else found.message, self.remote.shown
            raise OutputFailed(f"cannot be written: {what}", kind=found.kind, path=shown, hint=found.hint) from error


class Upload:
    """An object that is being written, from its first byte to its last."""

    def __init__(self, stored: Stored, key: str, nbytes: int) -> None:
        self._stored = stored
        self._key = key
        self._nbytes = nbytes
        self._writer: Any = None
        self.is_there = False
        """Whether all of it is in the store."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; raise OutputFailed if the store does not accept them."""
        with self._stored.failing():
            if self._writer is None:
                self._writer = self._stored.writer(self._key, self._nbytes)
            self._writer.write(bytes(data))  # a copy: it keeps what it gets, and the memory of a view is reused

    def end(self) -> None:
        """Complete the object, which appears now; raise OutputFailed if the store does not have all of its parts."""
        self.write(b"")  # an object of no bytes has no writer yet
        with self._stored.failing():
            self._writer.close()
        self.is_there = True

    def give_up(self) -> None:
        """Abort the upload, or delete the object if it is complete; never raise."""
        with suppress(Exception):
            if self.is_there:
                self._stored.delete(self._key)
            elif self._writer is not None:
                stopped = CkptoolError("given up")
                self._writer.__exit__(type(stopped), stopped, None)
        self._writer, self.is_there = None, False


def temporary(name: str) -> str:
    """Return a random temporary name, or key, in the same folder."""
    folder, slash, own = name.rpartition("/")
    return f"{folder}{slash}.{own[:64]}.ckptool-{os.urandom(8).hex()}.part"


def exists(shown: str) -> OutputExists:
    return OutputExists("exists already", path=shown, hint="Choose another name, or overwrite it with `force=True`.")
