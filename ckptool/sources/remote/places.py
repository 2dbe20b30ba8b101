"""
Where on the web a file is, and where a redirect may lead: not to plain http, and not into the machine or its network.

A server that nobody controls could otherwise make us ask what only this machine may: its own services, or those that
a cloud offers at a link-local address. The address that a connection was made to is what counts, not its name.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from ckptool.errors import FileUnavailable

_PORTS: Final = {"https": 443, "http": 80}
_NO_HOST: Final = re.compile(r"[\x00-\x20\x7f]")
_INNER: Final = tuple(
    map(ip_network, ("0.0.0.0/8", "192.0.0.0/24", "100.100.100.200/32", "2002::/16", "64:ff9b:1::/48", "fec0::/10"))
)
"""Inside a machine or the network of a cloud, or leading there; some versions of Python take them for others."""
_MACHINE: Final = "this machine"
_WORLD: Final = "the world"
_SHARED: Final = ip_network("100.64.0.0/10")
_NAT64: Final = ip_network("64:ff9b::/96")
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
        host = (parts.hostname or "").encode("idna").decode()
        target = quote(parts.path or "/", safe=_KEPT) + (f"?{quote(parts.query, safe=_KEPT)}" if parts.query else "")
    except ValueError as error:  # its text may have a part of a password in it
        raise FileUnavailable("no address of the web", kind="address", hint="Check the address.") from error
    if not host or _NO_HOST.search(host):
        raise FileUnavailable("an address without a host", kind="address", hint="Check the address.")
    return Place(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, target)


def follow(place: Place, location: str) -> Place:
    """
    Return the place that a redirect leads to.

    Raises:
        FileUnavailable: It leads from https to http, or to what is no web server.
    """
    try:
        url = urljoin(place.url, location)
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise _refused("the server redirects to what is no address") from error
    if scheme not in _PORTS or (place.scheme == "https" and scheme == "http"):
        raise _refused(f"the server redirects to {scheme or 'no'}://, which is not followed")
    return place_of(url)


def check_peer(peer: str, home: str | None, *, is_first: bool = False) -> None:
    """
    Refuse a server that a redirect led to, by its address; ``home`` is that of the server which was asked first.

    ``is_first`` says that it has the name of that server, which may have another address by now.

    Raises:
        FileUnavailable: It is this machine, or a private network that the first server was no part of.
    """
    address = _address(peer)
    reach = _reach(address)
    if reach == _WORLD or (home is not None and reach == _reach(_address(home)) and (is_first or reach != _MACHINE)):
        return
    raise _refused(f"the server redirects into {reach} ({address}), which is not followed")


def _reach(address: IPv4Address | IPv6Address) -> str:
    """Return who can reach an address; this machine stands for all that is never redirected to."""
    if any(address in network for network in _INNER) or address.is_loopback or address.is_link_local:
        return _MACHINE
    if address.is_unspecified or address.is_multicast or address.is_reserved:
        return _MACHINE
    if address.is_private:
        return "a private network"
    return "the network of a provider" if address in _SHARED else _WORLD


def _address(peer: str) -> IPv4Address | IPv6Address:
    """Return an address; of one of IPv6 that stands for one of IPv4, that one."""
    found = ip_address(peer.partition("%")[0])
    if found in _NAT64:
        return IPv4Address(int(found) & 0xFFFFFFFF)
    return (found.ipv4_mapped if isinstance(found, IPv6Address) else None) or found


def _refused(what: str) -> FileUnavailable:
    return FileUnavailable(what, kind="redirect", hint="If you trust that address, give it instead.")
