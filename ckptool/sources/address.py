"""
Addresses of remote files: schemes, options, and how they are shown without secrets.

Also where a redirect on the web may lead: not from https to http, and not into this machine or its network. Otherwise
a foreign server could make us ask what only this machine may: its own services, or those that a cloud offers at a
link-local address. The IP address of the connection counts, not the host's name.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from ckptool.arguments import checked
from ckptool.errors import FileUnavailable
from ckptool.sources import WEB

if TYPE_CHECKING:
    from typing_extensions import Self


_MEMBER_MARK: Final = "::"
_SIGNED: Final = re.compile(r"\?.*?(sig|token|secret|credential|password|key)[\w-]*=", re.IGNORECASE)
"""A query with a signature or a token. It is not part of a store's key, although keys may have any character."""
_CUT_PASSWORD: Final = re.compile(r"[^\[:]*:(?!\d*$)")
"""Not a host and port, but a user and the beginning of a password that has a slash or question mark unescaped."""
CONNECTIONS: Final = 16


class Remote(str):
    """
    The address of a remote file, with options, to be given in place of a path. A plain address will do, too.

    ``endpoint`` is the address of a store that is not the provider's own, ``region`` where its buckets are;
    ``anonymous`` uses no keys. ``connections`` parts of 6 MiB are fetched at once. With ``download``, the whole file is
    fetched into a temporary file, for servers that give no ranges. Keys come from the environment or from the
    provider's own tools, never from here.
    """

    endpoint: str | None
    region: str | None
    anonymous: bool
    connections: int
    download: bool
    listed: tuple[str | None, int] | None = None
    """Its tag and its size in bytes, if they are known from a listing: then a small file takes one request."""
    takes_end: bool = False
    """Whether the first request asks for the last 8 MiB, which is the whole of a small file."""
    stores: dict[tuple[str, str], Any] | None = None
    """Stores by scheme and bucket, and connections by scheme and server, that addresses share; None if they do not."""

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
        """Return another address with the same options."""
        found = Remote(address)
        found.__dict__.update(self.__dict__)
        found.listed = None
        return found

    def as_listed(self, tag: str | None, nbytes: int) -> Remote:
        """Return the address with its tag and size from a listing."""
        found = self.elsewhere(self)
        found.listed = tag, nbytes
        return found

    def split_member(self) -> tuple[Remote, str | None]:
        """Return the address of the file, and the member named after ``::`` or None. A host may contain ``::``, too."""
        scheme, mark, rest = self.partition("://")
        host, slash, path = rest.partition("/")
        path, found, member = path.partition(_MEMBER_MARK)
        return (self.elsewhere(f"{scheme}{mark}{host}{slash}{path}"), member) if found else (self, None)

    def beside(self, name: str) -> Remote:
        """Return the address of a file in the same folder; on the web, its name is percent-encoded."""
        if self.scheme not in WEB:
            return self.elsewhere(f"{self.rpartition('/')[0]}/{name}")
        parts = urlsplit(self)
        path = f"{parts.path.rpartition('/')[0]}/{quote(name, errors='surrogatepass')}"
        return self.elsewhere(urlunsplit(parts._replace(path=path)))

    @property
    def reached(self) -> dict[str, Any]:
        """Its options as plain data: ``Remote(address, **reached)`` makes an equal one."""
        names = ("endpoint", "region", "anonymous", "connections", "download")
        return {name: self.__dict__[name] for name in names}

    @property
    def scheme(self) -> str:
        return self.partition("://")[0].lower()

    @property
    def shown(self) -> str:
        """The address without what may be secret: a user and password, and a query that may contain a signature."""
        query = re.search(r"[?#]" if self.scheme in WEB else _SIGNED, self)
        scheme, mark, rest = self[: query.start() if query else None].partition("://")
        host, slash, path = rest.partition("/")
        host = host.rpartition("@")[2]
        if self.scheme in WEB and _CUT_PASSWORD.match(host):
            return f"{scheme}{mark}…"  # such an address is refused; the end of its password is not known
        return f"{scheme}{mark}{host}{slash}{path}"


def as_remote(path: str) -> Remote:
    """Return an address as a Remote; a plain text gets the default options."""
    return path if isinstance(path, Remote) else Remote(path)


_PORTS: Final = {"https": 443, "http": 80}
_NO_HOST: Final = re.compile(r"[\x00-\x20\x7f]")
_INNER: Final = tuple(
    map(ip_network, ("0.0.0.0/8", "192.0.0.0/24", "100.100.100.200/32", "2002::/16", "64:ff9b:1::/48", "fec0::/10"))
)
"""Networks inside a machine or a cloud, or that lead there, which some versions of Python classify otherwise."""
_MACHINE: Final = "this machine"
_WORLD: Final = "the world"
_SHARED: Final = ip_network("100.64.0.0/10")
_NAT64: Final = ip_network("64:ff9b::/96")
_KEPT: Final = "/%:=&?~+!$,;'@()*[]-._"


class Place(NamedTuple):
    """A server, and the path and query to request from it."""

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
    """Return the place of a web address; raise FileUnavailable if it has no valid host or port."""
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode()
        target = quote(parts.path or "/", safe=_KEPT) + (f"?{quote(parts.query, safe=_KEPT)}" if parts.query else "")
    except ValueError as error:  # its text may contain a part of a password
        raise FileUnavailable("no address of the web", kind="address", hint="Check the address.") from error
    if not host or _NO_HOST.search(host):
        raise FileUnavailable("an address without a host", kind="address", hint="Check the address.")
    return Place(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, target)


def follow(place: Place, location: str) -> Place:
    """Return where a redirect leads; raise FileUnavailable if it is from https to http, or to another scheme."""
    try:
        url = urljoin(place.url, location)
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise _refused("the server redirects to what is not an address") from error
    if scheme not in _PORTS or (place.scheme == "https" and scheme == "http"):
        raise _refused(f"the server redirects to {scheme or 'no'}://, which is not followed")
    return place_of(url)


def check_peer(peer: str, home: str | None, *, is_first: bool = False) -> None:
    """
    Check the IP address of a server that a redirect led to; ``home`` is the address of the server asked first.

    ``is_first`` says that the server has the same name as the first one, whose address may have changed since.

    Raises:
        FileUnavailable: It is this machine, or in a private network that the first server is not in.
    """
    address = _address(peer)
    reach = _reach(address)
    if reach == _WORLD or (home is not None and reach == _reach(_address(home)) and (is_first or reach != _MACHINE)):
        return
    raise _refused(f"the server redirects into {reach} ({address}), which is not followed")


def _reach(address: IPv4Address | IPv6Address) -> str:
    """Return from where an address can be reached: ``_MACHINE`` for any that a redirect must never lead to."""
    if any(address in network for network in _INNER) or address.is_loopback or address.is_link_local:
        return _MACHINE
    if address.is_unspecified or address.is_multicast or address.is_reserved:
        return _MACHINE
    if address.is_private:
        return "a private network"
    return "the network of a provider" if address in _SHARED else _WORLD


def _address(peer: str) -> IPv4Address | IPv6Address:
    """Return a peer's address; of an IPv6 address that stands for an IPv4 one, the IPv4 address."""
    found = ip_address(peer.partition("%")[0])
    if found in _NAT64:
        return IPv4Address(int(found) & 0xFFFFFFFF)
    return (found.ipv4_mapped if isinstance(found, IPv6Address) else None) or found


def _refused(what: str) -> FileUnavailable:
    return FileUnavailable(what, kind="redirect", hint="If you trust that address, give it instead.")
