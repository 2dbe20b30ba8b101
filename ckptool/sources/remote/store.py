"""
Ranges of an object in a store (Amazon's S3 and what speaks like it, Google's, Azure's), through ``obstore``.

Keys come from the environment, from the machine, or from the profiles of AWS where boto3 is there to read them. What
the library says in its errors is not passed on: it may have an address with a signature in it.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from typing import Any, Final

from ckptool.cancellation import Cancellation, check_cancelled
from ckptool.errors import CkptoolError, FileUnavailable, MissingPackage
from ckptool.sources.remote.address import Remote
from ckptool.sources.remote.transport import Tail, changed_far, missing_far

_STATUS: Final = re.compile(r"status code: (\d{3})")
_RETRIES: Final = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}
_CONNECTING: Final = timedelta(seconds=10)
_ANSWERING: Final = timedelta(seconds=120)
"""For one answer, of 8 MiB at most."""
_COMMAND: Final = "pip install 'ckptool[remote]'"
_KEYS: Final = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or read a public bucket with `anonymous=True`.",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS, or read a public bucket with `anonymous=True`.",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or read what is public with `anonymous=True`.",
}
"""Where keys are looked for, by scheme."""


class StoredFile:
    """An object of a store."""

    def __init__(self, remote: Remote, cancellation: Cancellation | None = None) -> None:
        self.shown = remote.shown
        self._scheme = remote.scheme
        self._cancellation = cancellation
        self._library = library()
        bucket, _, self._key = remote.partition("://")[2].partition("/")
        if not bucket or not self._key or self._key.endswith("/"):
            raise FileUnavailable(
                "an address without the name of a file",
                kind="address",
                hint=f"Give all of it: {self._scheme}://BUCKET/NAME",
            )
        self._store = _store(self._library, remote, bucket)
        self._tag: str | None = None
        self._nbytes = 0

    def tail(self, nbytes: int) -> Tail:
        """
        Return the last bytes.

        Raises:
            FileUnavailable: The object cannot be read; the message says why.
        """
        if self._scheme == "az":  # which has no ranges from the end
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
            meta = self._library.head(self._store, self._key)
        except Exception as error:
            raise self._explained(error) from error
        self._tag, self._nbytes = meta["e_tag"], meta["size"]
        start = max(0, self._nbytes - nbytes)
        return Tail(self.fetch(start, self._nbytes) if self._nbytes else b"", self._nbytes)

    def _get(self, options: dict[str, Any]) -> memoryview:
        check_cancelled(self._cancellation)
        try:
            answer = self._library.get(self._store, self._key, options=options)
            data = memoryview(answer.bytes())
            meta = answer.meta
        except Exception as error:
            raise self._explained(error) from error
        if not self._nbytes:
            self._tag, self._nbytes = meta["e_tag"], meta["size"]
        if (meta["e_tag"], meta["size"]) != (self._tag, self._nbytes):
            raise changed_far()
        return data

    def _explained(self, error: Exception) -> CkptoolError:
        """Return the error for one of the library's, by its class and the words that are known to be in it."""
        if isinstance(error, CkptoolError):
            return error
        known, text = self._library.exceptions, str(error)
        found = _STATUS.search(text)
        status = int(found[1]) if found is not None else 0
        keys = _KEYS[self._scheme]
        if isinstance(error, known.PreconditionError):
            return changed_far()
        if isinstance(error, known.NotFoundError | FileNotFoundError):
            return missing_far()
        if isinstance(error, known.UnauthenticatedError) or status == 401:
            return FileUnavailable("the store does not accept the keys (401)", kind="credentials", hint=keys)
        if isinstance(error, known.PermissionDeniedError) or status == 403:
            hint = "Check the address and the rights of the keys; a public bucket is read with `anonymous=True`."
            return FileUnavailable("the store refuses access (403)", kind="permission", hint=hint)
        if status == 301 or "redirect" in text:
            return FileUnavailable("the bucket is in another region", kind="region", hint="Name it with `region=`.")
        if status == 416 or isinstance(error, known.NotSupportedError):
            return FileUnavailable("the store gives no ranges", kind="no-ranges", hint="Download the file first.")
        if not status and any(word in text for word in ("credential", "169.254.169.254", "metadata")):
            return FileUnavailable("no keys for the store were found", kind="credentials", hint=keys)
        what = f"the store answers {status}" if status else "the store cannot be reached"
        return FileUnavailable(what, kind="network", hint="Check the address, `endpoint=` and the network.")


def library() -> Any:
    """
    Return the module ``obstore``.

    Raises:
        MissingPackage: It is not installed.
    """
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise MissingPackage.named("obstore", _COMMAND) from error
    return obstore


def _store(library: Any, remote: Remote, bucket: str) -> Any:
    """Return what the library calls a store: a bucket, and how it is reached."""
    stores = library.store
    client: dict[str, Any] = {"connect_timeout": _CONNECTING, "timeout": _ANSWERING}
    if (remote.endpoint or "").startswith("http://"):
        client["allow_http"] = True
    options: dict[str, Any] = {"client_options": client, "retry_config": _RETRIES}
    if remote.anonymous:
        options["skip_signature"] = True
    kind, endpoint = {
        "s3": (stores.S3Store, "endpoint"),
        "gs": (stores.GCSStore, "base_url"),
        "az": (stores.AzureStore, "endpoint"),
    }[remote.scheme]
    if remote.endpoint is not None:
        options[endpoint] = remote.endpoint
    if remote.scheme == "s3":
        options |= _amazon(remote)
    try:
        return kind(bucket, **options)
    except library.exceptions.BaseError as error:
        hint = _KEYS[remote.scheme]
        raise FileUnavailable("the store cannot be set up", kind="credentials", hint=hint) from error


def _amazon(remote: Remote) -> dict[str, Any]:
    """Return where a bucket is, and who signs: the library reads the environment, and boto3 everything else."""
    options = {} if remote.region is None else {"region": remote.region}
    if remote.anonymous or os.environ.get("AWS_ACCESS_KEY_ID"):
        return options
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return options
    try:
        provider = Boto3CredentialProvider()
    except Exception as error:  # it found no keys, or profiles that it cannot read
        raise FileUnavailable("no keys for the store were found", kind="credentials", hint=_KEYS["s3"]) from error
    return {**options, "credential_provider": provider}
