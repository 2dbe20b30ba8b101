"""Which version of a file is under a path, or an address, now."""

from __future__ import annotations

import os

from ckptool.sources.paths import file_identity


def version_under(path: str | os.PathLike[str]) -> tuple[object, ...] | None:
    """
    Return a key that changes when what is under a path or an address is replaced or written to; None if nothing is.

    Of a path it is ``file_identity``; of an address, what its server says of the version, which takes a request.
    """
    text = os.fspath(path)
    if "://" in text:
        from ckptool.sources.remote.address import is_address

        if is_address(text):
            from ckptool.sources.remote.opening import remote_version  # few files are far away

            return remote_version(text)
    return file_identity(path)
