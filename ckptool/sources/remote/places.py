"""
Where on the web a file is, and where a redirect may lead: not to plain http, and not into the machine or its network.

A server that nobody controls could otherwise make us ask what only this machine may: its own services, or those that
a cloud offers at a link-local address. The address that a connection was made to is what counts, not its name.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from ckptool.errors import FileUnavailable

_PORTS: Final = {"https": 443, "http": 80}
_KEPT: Final = "/%:=&?~+!$,;'@()*[]-._"


class Place(NamedTuple):
    """Where a server is, and what to ask it for."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def server(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.target}"


def place_of(url: str) -> Place:
    """Return the place that an address names; raise FileUnavailable if it names none."""
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna" if not (parts.hostname or "").isascii() else "ascii").decode()
    except ValueError as error:
        raise FileUnavailable(f"no address: {error}", kind="address", hint="Check the address.") from error
    if not host:
        raise FileUnavailable("an address without a host", kind="address", hint="Check the address.")
    target = quote(parts.path or "/", safe=_KEPT) + (f"?{quote(parts.query, safe=_KEPT)}" if parts.query else "")
    return Place(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, target)


def follow(place: Place, location: str) -> Place:
    """
    Return the place that a redirect leads to.

    Raises:
        FileUnavailable: It leads from https to http, or to what is no web server.
    """
    url = urljoin(place.url, location)
    scheme = urlsplit(url).scheme
    if scheme not in _PORTS or (place.scheme == "https" and scheme == "http"):
        raise _refused(f"the server redirects to {scheme or 'no'}://, which is not followed")
    return place_of(url)


def check_peer(peer: str, home: str | None) -> None:
    """
    Refuse a server that a redirect led to, by its address; ``home`` is that of the server which was asked first.

    Raises:
        FileUnavailable: It is this machine, or a private network that the first server was no part of.
    """
    address = _address(peer)
    if address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast:
        raise _refused(f"the server redirects to an address inside this machine ({address}), which is not followed")
    if address.is_private and (home is None or not _address(home).is_private):
        raise _refused(f"the server redirects into a private network ({address}), which is not followed")


def _address(peer: str) -> IPv4Address | IPv6Address:
    found = ip_address(peer.partition("%")[0])
    inside = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return found if inside is None else inside


def _refused(what: str) -> FileUnavailable:
    return FileUnavailable(what, kind="redirect", hint="If you trust that address, give it instead.")
