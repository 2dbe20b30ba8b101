"""What to call a file: in messages, where nothing secret is shown, and in this folder."""

from __future__ import annotations

import os


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return what to call a file in messages: its path; of an address, what is not secret in it."""
    text = os.fspath(path)
    if "://" not in text:
        return text
    from ckptool.sources.remote.address import as_remote, is_address

    return as_remote(text).shown if is_address(text) else text


def local_name(path: str) -> str:
    """Return what a copy of a file would be called here: its path; of an address, the name at its end."""
    shown = shown_path(path)
    return shown.rpartition("/")[2] if "://" in shown else path
