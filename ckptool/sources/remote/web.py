"""
Ranges of a file on a web server, over HTTP/1.1.

Each request asks for the version of the first answer (``If-Match``), and each answer is compared with the request,
since a server may ignore every header. Temporary failures are tried again.

Connections are kept open, and go through a proxy if the system names one. A redirect is judged by the IP address that
the connection was made to; HTTP libraries follow redirects themselves, so none is used.
"""

from __future__ import annotations

import random
import re
import socket
import ssl
import tempfile
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from io import BufferedReader, RawIOBase
from time import monotonic
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import ckptool.system as system
from ckptool.cancellation import Cancellation, check_cancelled, in_time
from ckptool.errors import FileUnavailable
from ckptool.limits import UNSIZED_NBYTES
from ckptool.sources.address import Place, Remote, check_peer, follow, place_of
from ckptool.sources.remote.parts import Tail, Transport, changed_remote, missing_remote
from ckptool.sources.source import CLOSED, memory_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

T = TypeVar("T")

_SMALL_NBYTES: Final = 8 << 20
"""Bytes of the largest file that a server without ranges may send as a whole."""
_LEFT_FREE: Final = 16
"""A download leaves one in this many of the free bytes on the disk."""
_MOST_REDIRECTS: Final = 5
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_PASSING: Final = (408, 425, 429, 500, 502, 503, 504)
_EXPIRED: Final = (401, 403, 404, 410)
_CONTENT_RANGE: Final = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18})")
_READ_NBYTES: Final = 1 << 20
_HEAD_NBYTES: Final = 512
_SECONDS: Final = 30
_LEAST_NBYTES: Final = 30 << 10
"""Bytes, of headers or of a body, that have to arrive in ``_SECONDS``."""
_MOST_TRIES: Final = 6
_FIRST_SECONDS: Final = 0.1
_LONGEST_SECONDS: Final = 20.0


class _Version(NamedTuple):
    """The version of the file by the headers of an answer."""

    nbytes: int
    etag: str | None
    modified: str | None

    def differs(self, found: _Version) -> bool:
        pairs = (self.etag, found.etag), (self.modified, found.modified)
        return self.nbytes != found.nbytes or any(one and other and one != other for one, other in pairs)

    @property
    def conditions(self) -> dict[str, str]:
        """Headers that ask a server to refuse if the version differs. A weak tag cannot be used for this."""
        if self.etag is not None:
            return {} if self.etag.startswith("W/") else {"If-Match": self.etag}
        return {"If-Unmodified-Since": self.modified} if self.modified else {}


class WebFile(Transport):
    """A file at an address of http or https; ``headers`` are sent only to the server of that address."""

    def __init__(
        self, remote: Remote, headers: Mapping[str, str], *, shown: str, cancellation: Cancellation | None = None
    ) -> None:
        self.shown = shown
        self._cancellation = cancellation
        self._first = self._place = place_of(remote)
        self._own, parts = dict(headers), urlsplit(remote)
        if parts.username is not None and not remote.anonymous:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self._own = {"Authorization": f"Basic {b64encode(pair.encode()).decode()}", **headers}
        self._shares = remote.stores is not None  # connections, with all files of its server: then they stay open
        stores: dict[tuple[str, str], Any] = {} if remote.stores is None else remote.stores
        scheme, *server = self._first.server
        self._connections: Connections = stores.setdefault((scheme, repr(server)), Connections())
        self._version: _Version | None = None
        self._is_html = self._closed = False

    def tail(self, nbytes: int) -> Tail:
        """
        Return the last bytes; all of them if the server sends files only as a whole, and this one is small.

        Raises:
            FileUnavailable: The file cannot be read; the message says why. ``no-ranges``: only as a whole.
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
        return self._ask(f"bytes={start}-{stop - 1}", lambda answer: self._body(answer, (start, stop)))

    @property
    def version(self) -> tuple[object, ...]:
        return tuple(self._version or ())

    def download(self, stream: BinaryIO) -> None:
        """Write the whole file to a stream, in one request without a range."""

        def take(answer: HTTPResponse) -> None:
            _refuse(answer)
            nbytes = answer.length
            stream.seek(0)
            stream.truncate()
            free = system.free_room(tempfile.gettempdir())
            room = free - free // _LEFT_FREE
            most = min(room, UNSIZED_NBYTES) if nbytes is None else nbytes
            if most > room:
                raise _too_large(f"it has {nbytes:,} bytes", room)
            for piece in self._pieces(answer):
                if stream.tell() + len(piece) > most:
                    raise _too_large("the server does not say how many bytes it sends", most)
                stream.write(piece)
            if nbytes is not None and stream.tell() != nbytes:
                raise TemporaryFailure("the answer was cut short")

        self._ask(None, take)
        stream.flush()

    def close(self) -> None:
        self._closed = True
        if not self._shares:
            self._connections.close()

    def _ask(self, ranged: str | None, take: Callable[[HTTPResponse], T]) -> T:
        """
        Request a range, or the whole file, and return what ``take`` returns for the answer; retry temporary failures.

        Raises:
            FileUnavailable: The file is missing or refused, or the last try failed, too.
            Cancelled: It was cancelled while it waited.
        """
        return in_time(lambda: self._tried(ranged, take), self._cancellation)

    def _tried(self, ranged: str | None, take: Callable[[HTTPResponse], T]) -> T:
        for tries in range(1, _MOST_TRIES + 1):
            check_cancelled(self._cancellation)  # the caller has stopped waiting for this thread
            try:
                return self._ask_once(ranged, take)
            except TemporaryFailure as error:
                if tries == _MOST_TRIES:
                    what = f"{error.what}, {_MOST_TRIES} times"
                    raise FileUnavailable(what, kind="network", hint="Try again later.") from error
                # A random pause: threads that failed together should not retry together.
                pause = _FIRST_SECONDS * 2**tries * (0.5 + random.random() / 2)  # noqa: S311 - nothing secret
                time.sleep(min(max(pause, error.seconds), _LONGEST_SECONDS))
        raise AssertionError

    def _ask_once(self, ranged: str | None, take: Callable[[HTTPResponse], T]) -> T:
        headers = {"Accept-Encoding": "identity", "User-Agent": "ckptool"}
        headers |= {"Range": ranged} if ranged else {}
        headers |= self._version.conditions if self._version is not None else {}
        place = self._place

        def taken(answer: HTTPResponse) -> T | Place:
            if answer.status in _REDIRECTS:
                return follow(place, answer.getheader("Location", ""))
            if answer.status in _EXPIRED and self._place is not self._first:
                self._place = self._first  # the target of a redirect may have expired: ask for a new one
                return self._first
            return take(answer)

        for _ in range(_MOST_REDIRECTS + 2):
            own = self._own if place.server == self._first.server else {}
            found = self._connections.ask(place, {**headers, **own}, taken)
            if not isinstance(found, Place):
                self._place = place
                return found
            place = found
        raise FileUnavailable(f"more than {_MOST_REDIRECTS} redirects", kind="redirect", hint="Check the address.")

    def _body(self, answer: HTTPResponse, wanted: tuple[int, int] | int) -> memoryview:
        """Return the bytes of an answer; ``wanted`` is the requested range, or the size of a tail, which it must be."""
        _refuse(answer)
        self._is_html = answer.getheader("Content-Type", "").startswith("text/html")
        if answer.status == 206:
            start, stop, nbytes = _content_range(answer)
        elif answer.status == 416:  # there is no last byte of an empty file
            start, stop, nbytes = 0, 0, _content_range(answer)[2]
        elif self._is_html and (answer.length is None or answer.length > _SMALL_NBYTES):
            raise _web_page()
        elif answer.length is None:
            raise _no_ranges("the server gives files only as a whole, and does not say how large this one is")
        elif answer.length > _SMALL_NBYTES:
            what = f"the server gives files only as a whole, and this one has {answer.length:,} bytes"
            raise _no_ranges(what, answer.length)
        else:
            start, stop, nbytes = 0, answer.length, answer.length
        version = _Version(nbytes, answer.getheader("ETag"), answer.getheader("Last-Modified"))
        if self._version is not None and self._version.differs(version):
            raise changed_remote()
        if isinstance(wanted, int):
            is_right = stop == nbytes and 0 <= stop - start <= max(wanted, _SMALL_NBYTES)
        else:
            is_right = (start, stop) == wanted and stop <= nbytes
        if not is_right or (answer.status == 206 and answer.length not in (None, stop - start)):
            raise _no_ranges("the server gives another range than it was asked for")
        data, filled = memory_of(stop - start), 0
        for piece in self._pieces(answer):
            if filled + len(piece) > len(data):
                raise TemporaryFailure("the answer has more bytes than it announces")
            data[filled : filled + len(piece)] = piece
            filled += len(piece)
        if filled < len(data):
            raise TemporaryFailure("the answer was cut short")
        self._version = self._version or version
        return data

    def _pieces(self, answer: HTTPResponse) -> Iterator[bytes]:
        try:
            while piece := answer.read(_READ_NBYTES):
                check_cancelled(self._cancellation)
                yield piece
        except (OSError, HTTPException, ValueError, AttributeError) as error:  # the last two where it was closed
            if self._closed:
                raise ValueError(CLOSED) from error
            raise TemporaryFailure("the answer was cut short") from error


def _too_large(what: str, most: int) -> FileUnavailable:
    hint = f"Download it by other means, or set TMPDIR to a folder with more room than {tempfile.gettempdir()}."
    return FileUnavailable(f"cannot be downloaded: {what}; at most {most:,} are taken", kind="download", hint=hint)


def _refuse(answer: HTTPResponse) -> None:
    """Raise an error unless an answer has bytes of the file, or reports that the range begins after its end (416)."""
    status = answer.status
    if status in _PASSING:
        wait = answer.getheader("Retry-After", "")
        raise TemporaryFailure(f"the server answers {status}", float(wait) if wait.isdecimal() else 0.0)
    if status == 412:
        raise changed_remote()
    if status in (404, 410):
        raise missing_remote()
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
    """Return the start and the stop of an answer's range, and the size of the whole file."""
    found = _CONTENT_RANGE.fullmatch(answer.getheader("Content-Range", ""))
    if found is None:
        raise _no_ranges("the server does not say which range it gives")
    start, last, nbytes = found.groups()
    return (0, 0, int(nbytes)) if start is None else (int(start), int(last) + 1, int(nbytes))


def _no_ranges(what: str, nbytes: int | None = None) -> FileUnavailable:
    hint = "Take it as a whole, into a temporary file, with `download=True`."
    return FileUnavailable(what, kind="no-ranges", hint=hint, actual=nbytes)


def _web_page() -> FileUnavailable:
    hint = "Give the address of the file itself; it may be behind a page to sign in at."
    return FileUnavailable("a web page, not a checkpoint", kind="web-page", hint=hint)


class Connections:
    """
    Connections to the server of some files, and to the servers that it redirects to.

    Threads share them; each answer is read by one thread.
    """

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str, int], list[HTTPConnection]] = {}
        self._all: set[HTTPConnection] = set()
        self._lock = threading.Lock()
        self._proxies: dict[tuple[str, str, int], tuple[str, int] | None] = {}
        self._first: tuple[str, str, int] | None = None
        self._home: str | None = None
        self._tls: ssl.SSLContext | None = None
        self._closed = False

    def ask(self, place: Place, headers: dict[str, str], take: Callable[[HTTPResponse], T]) -> T:
        """
        Send a GET, and return what ``take`` returns for the answer. The connection is kept if all of it was read.

        Raises:
            Passing: The connection was cut, or too few bytes arrived in time.
            FileUnavailable: There is no such server, or a redirect must not lead to it.
        """
        while True:
            with self._lock:
                self._refuse_closed()
                idle = self._idle.get(place.server)
                kept = idle.pop() if idle else None
            connection = kept or self._connect(place)
            target = place.url if place.scheme == "http" and self._proxy(place) else place.target
            try:
                connection.request("GET", target, headers=headers)
                answer = connection.getresponse()
            except BaseException as error:
                self._drop(connection)
                self._refuse_closed()
                if not isinstance(error, (OSError, HTTPException)):
                    raise
                if kept is None:  # a kept one may have been closed by the server: try the next
                    raise TemporaryFailure(f"the server ended the connection ({_reason(error)})") from error
                continue
            try:
                return take(answer)
            finally:
                with self._lock:
                    is_kept = answer.isclosed() and connection.sock is not None and not self._closed
                    if is_kept:
                        self._idle.setdefault(place.server, []).append(connection)
                if not is_kept:
                    answer.close()
                    self._drop(connection)

    def _drop(self, connection: HTTPConnection) -> None:
        with self._lock:
            self._all.discard(connection)
        connection.close()

    def close(self) -> None:
        """Close all connections; threads that wait for an answer get an error."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            every, self._all = self._all, set()
        for connection in every:
            with suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ValueError(CLOSED)

    def _connect(self, place: Place) -> HTTPConnection:
        proxy = self._proxy(place)
        host, port = proxy or (place.host, place.port)
        connection = HTTPConnection(host, port, timeout=_SECONDS)
        if place.scheme == "https":
            self._tls = self._tls or ssl.create_default_context()
            connection = HTTPSConnection(host, port, timeout=_SECONDS, context=self._tls)
            if proxy is not None:
                connection.set_tunnel(place.host, place.port)
        connection.response_class = _Answer
        is_first = self._first is None
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            hint = "If its certificate is your own, name the file of its authority in SSL_CERT_FILE."
            what = f"the server's certificate is not trusted: {error.verify_message}"
            raise FileUnavailable(what, kind="certificate", hint=hint) from error
        except (OSError, HTTPException) as error:
            if is_first:
                hint = "Check the address, and the network."
                what = f"{place.host} cannot be reached: {_reason(error)}"
                raise FileUnavailable(what, kind="network", hint=hint) from error
            raise TemporaryFailure(f"{place.host} cannot be reached ({_reason(error)})") from error
        assert connection.sock is not None  # it is connected
        peer = str(connection.sock.getpeername()[0])
        if self._first is None:
            self._first, self._home = place.server, peer
        elif proxy is None:
            try:
                check_peer(peer, self._home, is_first=place.server == self._first)
            except FileUnavailable:
                connection.close()
                raise
        with self._lock:
            self._all.add(connection)
        if self._closed:
            self._drop(connection)
            self._refuse_closed()
        return connection

    def _proxy(self, place: Place) -> tuple[str, int] | None:
        """Return the host and the port of the proxy that the system names for a server; None without one."""
        if place.server not in self._proxies:  # asking the system takes a while
            named = getproxies().get(place.scheme, "")
            parts = urlsplit(named if "://" in named else f"http://{named}")
            is_used = parts.hostname is not None and not proxy_bypass(place.host)
            self._proxies[place.server] = (str(parts.hostname), parts.port or 80) if is_used else None
        return self._proxies[place.server]


class _Answer(HTTPResponse):
    """An answer whose bytes all come through ``_Incoming``."""

    def __init__(self, sock: socket.socket, **how: Any) -> None:
        super().__init__(sock, **how)
        self.fp = BufferedReader(_Incoming(sock, self.fp))


class _Incoming(RawIOBase):
    """The bytes that a server sends; reading raises TemporaryFailure below 30 KiB in 30 seconds of waiting."""

    def __init__(self, sock: socket.socket, held: BufferedReader) -> None:
        self._sock = sock
        self._held = held  # keeps the socket open
        self._nbytes = 0
        self._seconds = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        begun, found = monotonic(), -1
        with suppress(TimeoutError):
            found = self._sock.recv_into(buffer)
        self._nbytes += max(0, found)
        self._seconds += monotonic() - begun
        if found < 0 or self._seconds > _SECONDS:
            if found < 0 or self._nbytes < _LEAST_NBYTES:
                raise TemporaryFailure(f"only {self._nbytes:,} bytes came in {_SECONDS} seconds")
            self._nbytes, self._seconds = 0, 0.0
        return found

    def close(self) -> None:
        self._held.close()
        super().close()


def _reason(error: Exception) -> str:
    """Return what went wrong in a few words that contain no address."""
    if isinstance(error, TimeoutError):
        return f"nothing came for {_SECONDS} seconds"
    if isinstance(error, socket.gaierror):
        return "no such host"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return type(error).__name__


def is_answered(address: str, port: int, seconds: float) -> bool:
    """Return whether ``HOST:PORT`` accepts a connection within ``seconds``; ``port`` is the default for HOST alone."""
    try:
        parts = urlsplit(f"//{address}")
        socket.create_connection((parts.hostname or "", parts.port or port), seconds).close()
    except (OSError, ValueError):
        return False
    return True


class TemporaryFailure(Exception):
    """A temporary failure; ``seconds`` is how long the server asks to wait before the next try."""

    def __init__(self, what: str, seconds: float = 0.0) -> None:
        super().__init__(what)
        self.what = what
        self.seconds = seconds
