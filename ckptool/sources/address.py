"""
Addresses of files: which are read, how one is reached, and how it is shown without what is secret in it.

Where on the web a file is, and where a redirect may lead: not to plain http, and not into the machine or its network.

A server that nobody controls could otherwise make us ask what only this machine may: its own services, or those that
a cloud offers at a link-local address. The address that a connection was made to is what counts, not its name.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from ckptool.arguments import checked
from ckptool.errors import FileUnavailable

if TYPE_CHECKING:
    from typing_extensions import Self


WEB: Final = ("https", "http")
STORES: Final = ("s3", "gs", "az")
HUB: Final = "hf"

_ADDRESS: Final = re.compile(rf"({'|'.join((*WEB, *STORES, HUB))})://", re.IGNORECASE)
_MEMBER_MARK: Final = "::"
_SIGNED: Final = re.compile(r"\?.*?(sig|token|secret|credential|password|key)[\w-]*=", re.IGNORECASE)
"""What is no part of a key, though a key may have any character in it."""
_CUT_PASSWORD: Final = re.compile(r"[^\[:]*:(?!\d*$)")
"""The part before a slash or question mark that was not escaped in a user and password."""
CONNECTIONS: Final = 16


class Remote(str):
    """
    The address of a file, and how it is reached, to be given in place of a path. A plain address will do, too.

    ``endpoint`` is the address of a store that is not the provider's own, ``region`` where its buckets are;
    ``anonymous`` uses no keys. ``connections`` parts of 6 MiB are fetched at once. With ``download``, a file that its
    server gives only as a whole is fetched into a temporary file. Keys come from the environment or from the provider's
    own tools, never from here.
    """

    endpoint: str | None
    region: str | None
    anonymous: bool
    connections: int
    download: bool
    listed: tuple[str | None, int] | None = None
    """Its tag and its size, where a list had them: then a small file takes one request."""
    takes_end: bool = False
    """Whether to begin with the last 8 MiB: of a small file that is all of it, in one request."""
    stores: dict[tuple[str, str], Any] | None = None
    """Stores that were reached already, by scheme and bucket, for all addresses that are read in the same way."""

    @checked()
    def __new__(
        cls,
        address: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        anonymous: bool = False,
        connections: int = CONNECTIONS,
        download: bool = False,
    ) -> Self:
        made = super().__new__(cls, address)
        made.endpoint, made.region, made.anonymous = endpoint, region, anonymous
        made.connections, made.download = max(1, connections), download
        return made

    def __dir__(self) -> list[str]:
        return [*self.reached, "scheme"]

    def elsewhere(self, address: str) -> Remote:
        """Return another address, reached in the same way."""
        found = Remote(address)
        found.__dict__.update(self.__dict__)
        found.listed = None
        return found

    def as_listed(self, tag: str | None, nbytes: int) -> Remote:
        """Return the address with what a list says of it."""
        found = self.elsewhere(self)
        found.listed = tag, nbytes
        return found

    def split_member(self) -> tuple[Remote, str | None]:
        """Return the address of the file, and the member of it that ``::`` picks. A host may have ``::`` in it."""
        scheme, mark, rest = self.partition("://")
        host, slash, path = rest.partition("/")
        path, found, member = path.partition(_MEMBER_MARK)
        return (self.elsewhere(f"{scheme}{mark}{host}{slash}{path}"), member) if found else (self, None)

    def beside(self, name: str) -> Remote:
        """Return the address of a file in the same folder. A store takes any character of a name as it is."""
        if self.scheme not in WEB:
            return self.elsewhere(f"{self.rpartition('/')[0]}/{name}")
        parts = urlsplit(self)
        path = f"{parts.path.rpartition('/')[0]}/{quote(name, errors='surrogatepass')}"
        return self.elsewhere(urlunsplit(parts._replace(path=path)))

    @property
    def reached(self) -> dict[str, Any]:
        """How it is reached, as plain data: the keywords with which the same is made of its text."""
        names = ("endpoint", "region", "anonymous", "connections", "download")
        return {name: self.__dict__[name] for name in names}

    @property
    def scheme(self) -> str:
        return self.partition("://")[0].lower()

    @property
    def shown(self) -> str:
        """The address without what may be secret: a password, and what a signature adds behind a question mark."""
        query = re.search(r"[?#]" if self.scheme in WEB else _SIGNED, self)
        scheme, mark, rest = self[: query.start() if query else None].partition("://")
        host, slash, path = rest.partition("/")
        host = host.rpartition("@")[2]
        if self.scheme in WEB and _CUT_PASSWORD.match(host):
            return f"{scheme}{mark}…"  # it is refused, and where its password ends is not known
        return f"{scheme}{mark}{host}{slash}{path}"


def is_address(path: str) -> bool:
    """Say whether this is the address of a file that can be read from far away."""
    return _ADDRESS.match(path) is not None


def as_remote(path: str) -> Remote:
    """Return an address that was given as plain text, or with how it is reached."""
    return path if isinstance(path, Remote) else Remote(path)


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
    """Return where a redirect leads; raise FileUnavailable if from https to http, or to what is no web server."""
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
    """Return who can reach an address: ``_MACHINE`` for all that a redirect must never lead to."""
    if any(address in network for network in _INNER) or address.is_loopback or address.is_link_local:
        return _MACHINE
    if address.is_unspecified or address.is_multicast or address.is_reserved:
        return _MACHINE
    if address.is_private:
        return "a private network"
    return "the network of a provider" if address in _SHARED else _WORLD


def _address(peer: str) -> IPv4Address | IPv6Address:
    """Return an address; for an IPv6 address that maps an IPv4 one, the latter."""
    found = ip_address(peer.partition("%")[0])
    if found in _NAT64:
        return IPv4Address(int(found) & 0xFFFFFFFF)
    return (found.ipv4_mapped if isinstance(found, IPv6Address) else None) or found


def _refused(what: str) -> FileUnavailable:
    return FileUnavailable(what, kind="redirect", hint="If you trust that address, give it instead.")
