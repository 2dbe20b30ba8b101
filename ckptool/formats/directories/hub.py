"""
A repository in the cache of Hugging Face's hub: the snapshot that its main branch is at.

    models--org--name/refs/main                    text: the commit
    models--org--name/snapshots/<commit>/…         links to ../../blobs/<digest>

https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import re
from typing import Final

from ckptool.errors import Failure
from ckptool.sources.folder import FolderSource

_COMMIT: Final = re.compile(rb"[0-9a-f]{40}")
_MAIN: Final = "refs/main"
_MAIN_NBYTES: Final = 4096
_SNAPSHOTS: Final = "snapshots"


def snapshot(folder: FolderSource) -> str | None:
    """Return the folder below a repository that is the snapshot of its main branch; None if it is no such thing."""
    if _SNAPSHOTS not in folder.folders or not folder.has(_MAIN):
        return None
    try:
        commit = folder.content(_MAIN, _MAIN_NBYTES).strip()
    except Failure:
        return None
    name = commit.decode("ascii", "replace")
    known = _COMMIT.fullmatch(commit) and name in folder.names(_SNAPSHOTS)[1]
    return f"{_SNAPSHOTS}/{name}" if known else None
