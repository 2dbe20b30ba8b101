"""
Ranges of a file that a web server gives, over HTTP/1.1 (RFC 9110, sections 13 and 14).

Strategy: ask each time for the version that the first answer had (``If-Match``), and compare what each answer says with
what was asked for, since a server may ignore every header. What may pass is tried again.
"""

from __future__ import annotations

import os
import re
import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException, HTTPResponse
from typing import BinaryIO, Final, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from ckptool.cancellation import Cancellation, in_time
from ckptool.errors import FileUnavailable
from ckptool.sources.remote.address import Place, Remote, follow, place_of
from ckptool.sources.remote.connections import Connections, Passing, Tail, changed_far, memory_of, missing_far, retried
from ckptool.sources.source import CLOSED

T = TypeVar("T")

_SMALL_NBYTES: Final = 8 << 20
"""What a server without ranges may give as a whole."""
_MOST_UNSIZED_NBYTES: Final = 16 << 30
"""Downloaded at most where the server does not say how much there is."""
_LEFT_FREE: Final = 16
"""One part in so many of what is free on the disk is left."""
_MOST_REDIRECTS: Final = 5
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_PASSING: Final = (408, 425, 429, 500, 502, 503, 504)
_EXPIRED: Final = (401, 403, 404, 410)
_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})")
_READ_NBYTES: Final = 1 << 20
_HEAD_NBYTES: Final = 512


class _Version(NamedTuple):
    """What an answer says about the version that it is of."""

    nbytes: int
    etag: str | None
    modified: str | None

    def differs(self, found: _Version) -> bool:
        pairs = (self.etag, found.etag), (self.modified, found.modified)
        return self.nbytes != found.nbytes or any(one and other and one != other for one, other in pairs)

    @property
    def conditions(self) -> dict[str, str]:
        """What makes a server refuse to give another version, if it can. A weak tag matches nothing."""
        if self.etag is not None:
            return {} if self.etag.startswith("W/") else {"If-Match": self.etag}
        return {"If-Unmodified-Since": self.modified} if self.modified else {}


class WebFile:
    """A file under an address of http or https; ``headers`` are for the server of that address alone."""

    def __init__(
        self, remote: Remote, headers: Mapping[str, str], *, shown: str, cancellation: Cancellation | None = None
    ) -> None:
        self.shown = shown
        self._cancellation = cancellation
        self._first = self._place = place_of(remote)
        self._own = {**_signed_in(remote), **headers}
        self._connections, self._shares = _connections(remote, self._first)
        self._version: _Version | None = None
        self._is_html = self._closed = False

    def tail(self, nbytes: int) -> Tail:
        """
        Return the last bytes; all of them where the server gives files only as a whole, and this one is small.

        Raises:
            FileUnavailable: The file cannot be read; the message says why. ``no-ranges`` where it could be as a whole.
        """
        found = self._ask(f"bytes=-{nbytes}", lambda answer: self._body(answer, nbytes))
        assert self._version is not None  # _ask saw it
        whole = self._version.nbytes
        if self._is_html:
            head = found if len(found) == whole else self.fetch(0, min(whole, _HEAD_NBYTES))
            if bytes(head[:_HEAD_NBYTES]).lstrip().startswith(b"<"):
                raise _web_page()
        return Tail(found, whole)

    def fetch(self, start: int, stop: int) -> memoryview:
        """Return the bytes of a range."""
        return self._ask(f"bytes={start}-{stop - 1}", lambda answer: self._body(answer, (start, stop)))

    @property
    def version(self) -> tuple[object, ...]:
        """What tells the version that this is bound to from others."""
        return tuple(self._version or ())

    def download(self, stream: BinaryIO) -> None:
        """Write the whole file to a stream, as the server gives it when it is asked for no range."""

        def take(answer: HTTPResponse) -> None:
            _refuse(answer)
            nbytes = answer.length
            stream.seek(0)
            stream.truncate()
            most = _downloadable(nbytes)
            for piece in self._pieces(answer):
                if stream.tell() + len(piece) > most:
                    raise _too_large("the server does not say how many bytes it sends", most)
                stream.write(piece)
            if nbytes is not None and stream.tell() != nbytes:
                raise Passing("the answer was cut short")

        self._ask(None, take)
        stream.flush()

    def close(self) -> None:
        """End every connection."""
        self._closed = True
        if not self._shares:
            self._connections.close()

    def _ask(self, ranged: str | None, take: Callable[[HTTPResponse], T]) -> T:
        """Ask for a range, or for everything, and return what ``take`` makes of the answer."""

        def attempt() -> T:
            return in_time(lambda: self._ask_once(ranged, take), self._cancellation)

        return retried(attempt, self._cancellation)

    def _ask_once(self, ranged: str | None, take: Callable[[HTTPResponse], T]) -> T:
        headers = {"Accept-Encoding": "identity", "User-Agent": "ckptool"}
        headers |= {"Range": ranged} if ranged else {}
        headers |= self._version.conditions if self._version is not None else {}
        place = self._place
        for _ in range(_MOST_REDIRECTS + 2):
            own = self._own if place.server == self._first.server else {}
            connection, answer = self._connections.ask(place, {**headers, **own}, self._cancellation)
            if answer.status in _REDIRECTS:
                self._connections.drop(connection)
                place = follow(place, answer.getheader("Location", ""))
            elif answer.status in _EXPIRED and self._place is not self._first:
                self._connections.drop(connection)  # where it redirects to may be good for some time alone
                place = self._place = self._first
            else:
                try:
                    found = take(answer)
                except BaseException:
                    answer.close()
                    self._connections.drop(connection)
                    raise
                self._place = place
                self._connections.done(place, connection)
                return found
        raise FileUnavailable(f"more than {_MOST_REDIRECTS} redirects", kind="redirect", hint="Check the address.")

    def _body(self, answer: HTTPResponse, wanted: tuple[int, int] | int) -> memoryview:
        """Return the bytes of an answer, compared with the range, or the size of a tail, that was asked for."""
        _refuse(answer)
        self._is_html = answer.getheader("Content-Type", "").startswith("text/html")
        if answer.status == 206:
            start, stop, nbytes = _content_range(answer)
        elif answer.status == 416:  # there is no last byte of an empty file
            start, stop, nbytes = 0, 0, _content_range(answer)[2]
        else:
            start, stop = 0, self._small(answer)
            nbytes = stop
        version = _Version(nbytes, answer.getheader("ETag"), answer.getheader("Last-Modified"))
        if self._version is not None and self._version.differs(version):
            raise changed_far()
        if isinstance(wanted, int):
            is_right = stop == nbytes and 0 <= stop - start <= max(wanted, _SMALL_NBYTES)
        else:
            is_right = (start, stop) == wanted and stop <= nbytes
        if not is_right or (answer.status == 206 and answer.length not in (None, stop - start)):
            raise _no_ranges("the server gives another range than it was asked for")
        data = self._read(answer, stop - start)
        self._version = self._version or version
        return data

    def _small(self, answer: HTTPResponse) -> int:
        """Return the size of a whole file, which is the answer of a server without ranges; refuse a large one."""
        nbytes = answer.length
        if self._is_html and (nbytes is None or nbytes > _SMALL_NBYTES):
            raise _web_page()
        if nbytes is None:
            raise _no_ranges("the server gives files only as a whole, and does not say how large this one is")
        if nbytes > _SMALL_NBYTES:
            raise _no_ranges(f"the server gives files only as a whole, and this one has {nbytes:,} bytes", nbytes)
        return nbytes

    def _read(self, answer: HTTPResponse, nbytes: int) -> memoryview:
        """Return a body of exactly so many bytes."""
        data = memory_of(nbytes)
        filled = 0
        for piece in self._pieces(answer):
            if filled + len(piece) > nbytes:
                raise Passing("the answer has more bytes than it announces")
            data[filled : filled + len(piece)] = piece
            filled += len(piece)
        if filled < nbytes:
            raise Passing("the answer was cut short")
        return data

    def _pieces(self, answer: HTTPResponse) -> Iterator[bytes]:
        try:
            while piece := answer.read(_READ_NBYTES):
                yield piece
        except (OSError, HTTPException, ValueError, AttributeError) as error:  # the last two where it was closed
            if self._closed:
                raise ValueError(CLOSED) from error
            raise Passing("the answer was cut short") from error


def _downloadable(nbytes: int | None) -> int:
    """Return how many bytes of a file may be taken, which has ``nbytes`` or does not say; refuse a larger one."""
    free = _free_nbytes()
    room = free - free // _LEFT_FREE
    if nbytes is None:
        return min(room, _MOST_UNSIZED_NBYTES)
    if nbytes > room:
        raise _too_large(f"it has {nbytes:,} bytes", room)
    return nbytes


def _free_nbytes() -> int:
    status = os.statvfs(tempfile.gettempdir())
    return status.f_bavail * status.f_frsize


def _too_large(what: str, most: int) -> FileUnavailable:
    hint = f"Download it by other means, or set TMPDIR to a folder with more room than {tempfile.gettempdir()}."
    return FileUnavailable(f"cannot be downloaded: {what}; at most {most:,} are taken", kind="download", hint=hint)


def _connections(remote: Remote, place: Place) -> tuple[Connections, bool]:
    """Return the connections for a file, and whether they are those of all files of its server, which stay open."""
    if remote.stores is None:
        return Connections(), False
    scheme, *server = place.server
    found: Connections = remote.stores.setdefault((scheme, repr(server)), Connections())
    return found, True


def _refuse(answer: HTTPResponse) -> None:
    """Raise an error unless an answer has bytes of the file, or says that a range is behind its end."""
    status = answer.status
    if status in _PASSING:
        wait = answer.getheader("Retry-After", "")
        raise Passing(f"the server answers {status}", float(wait) if wait.isdecimal() else 0.0)
    if status == 412:
        raise changed_far()
    if status in (404, 410):
        raise missing_far()
    if status == 401:
        hint = "Give a signed address, or one with a user and a password: https://USER:PASSWORD@…"
        raise FileUnavailable("the server wants to know who asks (401)", kind="credentials", hint=hint)
    if status == 403:
        hint = "Check the address; one that is signed may have expired."
        raise FileUnavailable("the server refuses access (403)", kind="permission", hint=hint)
    if status not in (200, 206, 416):
        raise FileUnavailable(f"the server answers {status}", kind="network", hint="Check the address.")
    if answer.getheader("Content-Encoding", "identity") != "identity":
        raise _no_ranges("the server compresses what it sends")


def _content_range(answer: HTTPResponse) -> tuple[int, int, int]:
    """Return the range that an answer has, and the size of the whole file."""
    found = _CONTENT_RANGE.fullmatch(answer.getheader("Content-Range", ""))
    if found is None:
        raise _no_ranges("the server does not say which range it gives")
    start, last, nbytes = found.groups()
    return (0, 0, int(nbytes)) if start is None else (int(start), int(last) + 1, int(nbytes))


def _signed_in(remote: Remote) -> dict[str, str]:
    """Return the header for the user and the password in an address."""
    parts = urlsplit(remote)
    if parts.username is None or remote.anonymous:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {b64encode(pair.encode()).decode()}"}


def _no_ranges(what: str, nbytes: int | None = None) -> FileUnavailable:
    hint = "Take it as a whole, into a temporary file, with `download=True`."
    return FileUnavailable(what, kind="no-ranges", hint=hint, actual=nbytes)


def _web_page() -> FileUnavailable:
    hint = "Give the address of the file itself; it may be behind a page to sign in at."
    return FileUnavailable("a web page, not a checkpoint", kind="web-page", hint=hint)
