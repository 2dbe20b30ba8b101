"""
The layouts of checkpoints that are directories, a module each, and ``read``, which finds the one that a folder has.

What is there decides: names of files are hints where to look, and what is in the files is proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ckptool.checkpoints.parsed import Parsed
from ckptool.formats.probe import Probe
from ckptool.sources.folder import FolderSource
from ckptool.sources.unavailable import directory

_INDEX = ".index.json"


class Layout(Protocol):
    """What the module of a layout has."""

    NAME: str

    def sniff(self, folder: FolderSource) -> bool:
        """Say whether the folder has this layout, going by what is there."""
        ...

    def read(self, folder: FolderSource, probe: Probe) -> Parsed:
        """Read the indexes in a folder that ``sniff`` recognised; no tensor is read."""
        ...


def layouts_in_order() -> Iterator[Layout]:
    """Yield the layouts, in the order in which they look at a folder."""
    from ckptool.formats.directories import dcp, deepspeed

    yield dcp
    yield deepspeed


def main_file(folder: FolderSource) -> str | None:
    """Return the name of the one file that is the checkpoint, or the index of its files; None if there is none."""
    indexes = [name for name in folder.files if name.endswith(_INDEX)]
    return indexes[0] if len(indexes) == 1 else None


def read(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the checkpoint that a folder is.

    Raises:
        FileUnavailable: It is none that is known; the message says what is there.
        CkptoolError: It is one, and cannot be read.
    """
    for one in layouts_in_order():
        if one.sniff(folder):
            return one.read(folder, probe)
    raise directory(folder.path)
