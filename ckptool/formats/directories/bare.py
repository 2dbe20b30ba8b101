"""Folders that have what is put beside weights, and no weights: what is opened in their place is said to be another."""

from __future__ import annotations

from typing import Final

from ckptool.checkpoints.parsed import Remark
from ckptool.formats.directories import choosing
from ckptool.messages import counted, some
from ckptool.sources.folder import FolderSource

_OF_ADAPTER: Final = "adapter_config.json"
_OF_TRAINER: Final = "trainer_state.json"
"""What a Trainer writes into each folder that it saves into, after the weights."""


def without_weights(folder: FolderSource) -> tuple[Remark, ...]:
    """Return which of a folder's checkpoints have no weights; asked where it leads to a folder in it."""
    found = []
    if _OF_ADAPTER in folder.files and not choosing.has_weights(folder.files):
        found.append(f"the adapter of {_OF_ADAPTER!r}")
    found += [repr(name) for name in folder.folders if not name.startswith(".") and _is_bare(folder, name)]
    if not found:
        return ()
    what = f"{counted(len(found), 'checkpoint')} of the folder without weights: {some(found)}"
    return (Remark("CK165", what, "Get its files again, or delete it if saving was not finished."),)


def _is_bare(folder: FolderSource, name: str) -> bool:
    files, folders = folder.names(name)
    return _OF_TRAINER in files and not folders and not choosing.choose(files).candidates
