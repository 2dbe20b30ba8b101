"""Addresses of files: which are read, how one is reached, and how it is shown without what is secret in it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

from ckptool.arguments import check_arguments

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
"""Of a user and a password in which a slash or a question mark was not escaped, what stands in front of that."""
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
        check_arguments(Remote.__new__, locals())
        made = super().__new__(cls, address)
        made.endpoint, made.region, made.anonymous = endpoint, region, anonymous
        made.connections, made.download = max(1, connections), download
        return made

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
