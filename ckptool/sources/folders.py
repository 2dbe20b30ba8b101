"""Open the folder under a path or an address, whichever it is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptool.cancellation import Cancellation
from ckptool.sources.naming import is_far

if TYPE_CHECKING:
    from ckptool.sources.folder import FolderSource


def is_folder(path: str) -> bool:
    """Say whether a path leads to a folder, or an address is that of one."""
    return path.endswith("/") if is_far(path) else os.path.isdir(path)


def open_folder_source(path: str, cancellation: Cancellation | None = None) -> FolderSource:
    """
    Return a folder as a source.

    Raises:
        FileUnavailable: It is none, or cannot be read.
    """
    if not is_far(path):
        from ckptool.sources.folder import FolderSource  # most are files

        return FolderSource(path, cancellation)
    from ckptool.sources.far_folder import open_prefix  # few folders are far away

    return open_prefix(path, cancellation)
