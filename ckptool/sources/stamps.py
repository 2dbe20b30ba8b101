"""What a path leads to, by sizes and times: a text that is another one when a file is written or replaced."""

from __future__ import annotations

import os
import stat
from typing import Final, NamedTuple

from ckptool.cancellation import Cancellation
from ckptool.sources.naming import is_far
from ckptool.sources.paths import INDEX, file_identity

_DEEPEST: Final = 4
_MOST_FILES: Final = 100_000
_SPREAD: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: no likely difference in time makes up for a difference in size times this."""


class Stamp(NamedTuple):
    """Size and time of a file; of a folder, of all its files together, and the latest. Far away, size and tag."""

    nbytes: int
    mtime_ns: int | None
    version: str
    """Of a file made of both; of a folder, of the names, sizes and times of all files in it and four levels below."""
    etag: str | None = None


def stamp_of(path: str) -> Stamp | None:
    """
    Return the stamp of what is under a path; None if nothing is.

    Unlike ``file_identity`` it is that of a copy, too, and the same after a restart. An index of shards has that of
    its folder: the shards are in it.
    """
    if is_far(path):
        return _of_far(path)
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        file, inside, _ = path.partition("::")
        return stamp_of(file) if inside else None
    if stat.S_ISDIR(status.st_mode):
        return _of_folder(path)
    if path.endswith(INDEX):
        return _of_folder(os.path.dirname(path) or ".")
    nbytes, mtime_ns = status.st_size, status.st_mtime_ns
    return Stamp(nbytes, mtime_ns, f"{(mtime_ns + nbytes * _SPREAD) % (1 << 64):016x}")


def _of_far(path: str) -> Stamp | None:
    """Return the stamp of what is far away, as it was listed; None where it was not."""
    from ckptool.sources.remote.address import as_remote

    listed = as_remote(path).listed
    return None if listed is None else stamp_of_version((listed[1], listed[0]))


def stamp_of_version(version: tuple[object, ...]) -> Stamp | None:
    """Return the stamp of a file far away by what its server says of the version: size, tag, date; None of nothing."""
    nbytes, tag = (*version[:2], None, None)[:2]
    if not isinstance(nbytes, int):
        return None
    return Stamp(nbytes, None, _hashed(version), tag if isinstance(tag, str) else None)


def _of_folder(path: str) -> Stamp:
    found: list[tuple[str, int, int]] = []
    for place, folders, names in os.walk(path):
        if place.count(os.sep) - path.rstrip(os.sep).count(os.sep) >= _DEEPEST:
            folders.clear()
        folders.sort()
        for name in sorted(names)[: _MOST_FILES - len(found)]:
            try:
                one = os.stat(os.path.join(place, name))
            except OSError:  # it was there a moment ago
                continue
            found.append((os.path.relpath(os.path.join(place, name), path), one.st_size, one.st_mtime_ns))
    return Stamp(sum(one[1] for one in found), max((one[2] for one in found), default=0), _hashed(found))


def _hashed(facts: object) -> str:
    from hashlib import sha256  # it takes a while, and one file here needs none

    return sha256(repr(facts).encode(errors="surrogatepass")).hexdigest()[:16]


def version_under(path: str | os.PathLike[str], cancellation: Cancellation | None = None) -> tuple[object, ...] | None:
    """
    Return a key that changes when what is under a path or an address is replaced or written to; None if nothing is.

    Of a path it is ``file_identity``; of an address, what its server says of the version, which takes a request.
    """
    text = os.fspath(path)
    if "://" in text:
        from ckptool.sources.remote.address import is_address

        if is_address(text):
            from ckptool.sources.remote.opening import remote_version  # few files are far away

            return remote_version(text, cancellation)
    return file_identity(path)
