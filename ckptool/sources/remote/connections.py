"""
Connections to web servers: kept while they are good, through a proxy where the system names one.

What fetches ranges of one file: the protocol, and the errors that all of them have.
"""

from __future__ import annotations

import random
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from io import BufferedReader, RawIOBase
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ckptool.cancellation import LOOK_SECONDS, Cancellation, check_cancelled
from ckptool.errors import FileUnavailable, OutOfMemory, SourceChanged
from ckptool.sources.remote.address import Place, check_peer
from ckptool.sources.source import CLOSED

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


_SECONDS: Final = 30
_LEAST_NBYTES: Final = 30 << 10
"""What has to come in that time, of headers or of a body."""
_STEP_SECONDS: Final = 0.5
"""How long to wait for bytes before asking again whether anybody still wants them."""
T = TypeVar("T")
_MOST_TRIES: Final = 6
_FIRST_SECONDS: Final = 0.1
_LONGEST_SECONDS: Final = 20.0


class Connections:
    """
    Connections to the servers that files of one server are read from, where it redirects to others.

    Threads share them; each answer is read by one.
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

    def ask(
        self, place: Place, headers: dict[str, str], cancellation: Cancellation | None = None
    ) -> tuple[HTTPConnection, HTTPResponse]:
        """
        Send a GET, and return its answer. Its body is still to be read; then call ``done`` or ``drop``.

        Raises:
            Passing: The connection was cut, or too little came for some time.
            FileUnavailable: There is no such server, or it is not to be asked.
            Cancelled: It was cancelled while the answer came; its body, too, is read only until then.
        """
        while True:
            kept = self._kept(place)
            connection = kept or self._connect(place)
            connection.response_class = partial(_Answer, cancellation=cancellation)  # type: ignore[assignment]
            try:
                connection.request("GET", self._target(place), headers=headers)
                return connection, connection.getresponse()
            except BaseException as error:
                self.drop(connection)
                self._refuse_closed()
                if not isinstance(error, (OSError, HTTPException)):
                    raise
                if kept is None:  # else the server had closed it meanwhile, and there may be another
                    raise Passing(f"the server ended the connection ({_reason(error)})") from error

    def done(self, place: Place, connection: HTTPConnection) -> None:
        """Keep a connection of which the answer was read to its end."""
        with self._lock:
            if not self._closed and connection.sock is not None:
                self._idle.setdefault(place.server, []).append(connection)
                return
        self.drop(connection)

    def drop(self, connection: HTTPConnection) -> None:
        """Close a connection."""
        with self._lock:
            self._all.discard(connection)
        connection.close()

    def close(self) -> None:
        """Close all of them; whoever waits for an answer gets an error."""
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

    def _kept(self, place: Place) -> HTTPConnection | None:
        with self._lock:
            self._refuse_closed()
            idle = self._idle.get(place.server)
            return idle.pop() if idle else None

    def _connect(self, place: Place) -> HTTPConnection:
        proxy = self._proxy(place)
        host, port = proxy or (place.host, place.port)
        connection = self._new(place.scheme, host, port)
        if proxy is not None and place.scheme == "https":
            connection.set_tunnel(place.host, place.port)
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
            raise Passing(f"{place.host} cannot be reached ({_reason(error)})") from error
        self._check(place, connection, is_proxied=proxy is not None)
        with self._lock:
            self._all.add(connection)
        if self._closed:
            self.drop(connection)
            self._refuse_closed()
        return connection

    def _target(self, place: Place) -> str:
        return place.url if place.scheme == "http" and self._proxy(place) else place.target

    def _proxy(self, place: Place) -> tuple[str, int] | None:
        if place.server not in self._proxies:  # to ask the system takes a while
            self._proxies[place.server] = _proxy(place)
        return self._proxies[place.server]

    def _new(self, scheme: str, host: str, port: int) -> HTTPConnection:
        if scheme == "http":
            return HTTPConnection(host, port, timeout=_SECONDS)
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return HTTPSConnection(host, port, timeout=_SECONDS, context=self._tls)

    def _check(self, place: Place, connection: HTTPConnection, *, is_proxied: bool) -> None:
        """Refuse a server that a redirect led to, and that must not be asked."""
        assert connection.sock is not None  # it is connected
        peer = str(connection.sock.getpeername()[0])
        if self._first is None:
            self._first, self._home = place.server, peer
        elif not is_proxied:
            try:
                check_peer(peer, self._home, is_first=place.server == self._first)
            except FileUnavailable:
                connection.close()
                raise


class _Answer(HTTPResponse):
    """An answer of which every byte comes through ``_Incoming``."""

    def __init__(self, sock: socket.socket, *, cancellation: Cancellation | None = None, **how: Any) -> None:
        super().__init__(sock, **how)
        self.fp = BufferedReader(_Incoming(sock, self.fp, cancellation))


class _Incoming(RawIOBase):
    """What a server sends: no more waited for when it was cancelled, or when too little came for some time."""

    def __init__(self, sock: socket.socket, held: BufferedReader, cancellation: Cancellation | None) -> None:
        self._sock = sock
        self._held = held  # as long as it is open, so is the socket
        self._cancellation = cancellation
        self._nbytes = 0
        self._seconds = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        usual = self._sock.gettimeout()
        self._sock.settimeout(_STEP_SECONDS)
        found = None
        try:
            while found is None:
                check_cancelled(self._cancellation)
                begun = monotonic()
                with suppress(TimeoutError):
                    found = self._sock.recv_into(buffer)
                self._count(found or 0, monotonic() - begun)
        finally:
            self._sock.settimeout(usual)
        return found

    def _count(self, nbytes: int, seconds: float) -> None:
        self._nbytes += nbytes
        self._seconds += seconds
        if self._seconds > _SECONDS:
            if self._nbytes < _LEAST_NBYTES:
                raise Passing(f"only {self._nbytes:,} bytes came in {_SECONDS} seconds")
            self._nbytes, self._seconds = 0, 0.0

    def close(self) -> None:
        self._held.close()
        super().close()


def _proxy(place: Place) -> tuple[str, int] | None:
    named = getproxies().get(place.scheme)
    if not named or proxy_bypass(place.host):
        return None
    parts = urlsplit(named if "://" in named else f"http://{named}")
    return (parts.hostname, parts.port or 80) if parts.hostname else None


def _reason(error: Exception) -> str:
    """Return what went wrong in a few words; texts of errors have no address in them here."""
    if isinstance(error, TimeoutError):
        return f"nothing came for {_SECONDS} seconds"
    if isinstance(error, socket.gaierror):
        return "no such host"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return type(error).__name__


def is_answered(address: str, port: int, seconds: float) -> bool:
    """Say whether anything takes connections at ``HOST:PORT``, within so many seconds; ``port`` is for HOST alone."""
    try:
        parts = urlsplit(f"//{address}")
        socket.create_connection((parts.hostname or "", parts.port or port), seconds).close()
    except (OSError, ValueError):
        return False
    return True


class Passing(Exception):
    """What may pass; ``seconds`` is how long a server asks to be left alone."""

    def __init__(self, what: str, seconds: float = 0.0) -> None:
        super().__init__(what)
        self.what = what
        self.seconds = seconds


def retried(attempt: Callable[[], T], cancellation: Cancellation | None) -> T:
    """
    Return what an attempt returns, and wait longer after each one that failed in passing.

    Raises:
        FileUnavailable: The last one failed, too.
        Cancelled: It was cancelled while it waited.
    """
    for tries in range(_MOST_TRIES):
        try:
            return attempt()
        except Passing as error:
            if tries == _MOST_TRIES - 1:
                what = f"{error.what}, {_MOST_TRIES} times"
                raise FileUnavailable(what, kind="network", hint="Try again later.") from error
            # Threads that were turned away together do not come back together.
            pause = _FIRST_SECONDS * 2**tries * (1 + random.random())  # noqa: S311 - nothing secret
            _wait(min(max(pause, error.seconds), _LONGEST_SECONDS), cancellation)
    raise AssertionError


def _wait(seconds: float, cancellation: Cancellation | None) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if cancellation is not None:
            cancellation.check()
        time.sleep(left if cancellation is None else min(left, LOOK_SECONDS))


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
