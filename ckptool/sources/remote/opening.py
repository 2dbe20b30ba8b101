"""Open a file far away by its address."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from ckptool.cancellation import Cancellation, check_cancelled
from ckptool.errors import FileUnavailable
from ckptool.sources.remote.address import HUB, WEB, Remote, as_remote
from ckptool.sources.remote.source import TAIL_NBYTES, RemoteSource
from ckptool.sources.remote.transport import Transport
from ckptool.sources.source import BytesSource, Source, StreamSource

if TYPE_CHECKING:
    from ckptool.sources.remote.web import WebFile


_WHOLE_NBYTES: Final = 8 << 20
"""A file of this size is fetched as a whole: that takes less time than asking for parts of it."""


def open_remote(address: str, cancellation: Cancellation | None = None) -> tuple[Source, str]:
    """
    Return the source for an address, and the name to show for it.

    Raises:
        FileUnavailable: The file cannot be read; the message says why, in one line.
        MissingPackage: What its scheme needs is not installed.
    """
    remote = as_remote(address)
    if remote.scheme in (*WEB, HUB):
        from ckptool.sources.remote.web import WebFile

        web = WebFile(*_on_the_web(remote), shown=remote.shown, cancellation=cancellation)
        if remote.download:
            return _downloaded(web, cancellation), remote.shown
        return _opened(web, remote, cancellation), remote.shown
    from ckptool.sources.remote.store import StoredFile

    return _opened(StoredFile(remote, cancellation), remote, cancellation), remote.shown


def _on_the_web(remote: Remote) -> tuple[Remote, Mapping[str, str]]:
    if remote.scheme in WEB:
        return remote, {}
    from ckptool.sources.remote.hub import resolve

    return resolve(remote)


def _opened(transport: Transport, remote: Remote, cancellation: Cancellation | None) -> Source:
    check_cancelled(cancellation)
    try:
        tail = transport.tail(TAIL_NBYTES)
        if tail.nbytes > _WHOLE_NBYTES:
            return RemoteSource(transport, tail, remote.connections, cancellation)
        before = tail.nbytes - len(tail.data)
        data = b"".join((transport.fetch(0, before), tail.data)) if before else tail.data
    except BaseException:
        transport.close()
        raise
    transport.close()
    return BytesSource(data, cancellation, is_file=True)


def _downloaded(web: WebFile, cancellation: Cancellation | None) -> StreamSource:
    """Return a copy of the whole file, which has no name and is gone when it is closed."""
    try:
        stream = tempfile.TemporaryFile()  # noqa: SIM115 - the source closes it
        try:
            web.download(stream)
            return StreamSource(stream, cancellation, owned=True)
        except BaseException:
            stream.close()
            raise
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        hint = f"Make room below {tempfile.gettempdir()}, or set TMPDIR to a folder that has it."
        raise FileUnavailable(f"cannot be downloaded: {reason}", kind="download", hint=hint) from error
    finally:
        web.close()
