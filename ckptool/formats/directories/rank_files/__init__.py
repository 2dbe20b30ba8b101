"""
Files that processes wrote with ``torch.save``, one each: state dicts with their parts of distributed tensors.

    model_rank3.pt, model_world_size_8_rank_3.pt, pytorch_model_fsdp_rank3.bin

Where the parts say which boxes they are, the whole is put together of them. A flat parameter of FSDP does not: names
and shapes of what is in it are in the model alone.
"""

from __future__ import annotations

from typing import Final

from ckptool.checkpoints.parsed import Parsed
from ckptool.errors import AmbiguousFile
from ckptool.formats.directories.rank_files.sets import NAME, TRAITS, Set, sets_in
from ckptool.formats.probe import Probe
from ckptool.messages import counted, some
from ckptool.sources.folder import FolderSource

__all__ = ["NAME", "TRAITS", "read", "sniff"]

_ACTOR: Final = "actor"
"""The folder in which verl keeps the model that is trained."""
_HEAD_NBYTES: Final = 1 << 20
_MARKS: Final = (b"ShardedTensor", b"DTensor")


def sniff(folder: FolderSource) -> bool:
    """Say whether there are files of ranks in the folder whose tensors are distributed."""
    return _place(folder) is not None


def _place(folder: FolderSource) -> str | None:
    """Return where in a folder the files of ranks are: in itself, or where verl has them."""
    for inside in ("", _ACTOR) if _ACTOR in folder.folders else ("",):
        if any(_is_distributed(folder, one) for one in sets_in(folder, inside)):
            return inside
    return None


def _is_distributed(folder: FolderSource, one: Set) -> bool:
    head = folder.head(one.files[min(one.files)], _HEAD_NBYTES)
    return any(mark in head for mark in _MARKS)


def read(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the files of all ranks, and put together what they have parts of; no tensor is read.

    Raises:
        FileUnavailable: Files of ranks are missing.
        MalformedFile: The files are of different saves.
        AmbiguousFile: There are files of several runs.
    """
    from ckptool.formats.directories.rank_files.merged import read_sets

    found = sets_in(folder, _place(folder) or "")
    stems = [one.stem for one in found]
    twice = [one for one in found if stems.count(one.stem) > 1]
    if twice:
        listed = [f"{one.stem} of {one.world or len(one.files):,}" for one in twice]
        raise AmbiguousFile(
            f"{counted(len(twice), 'set')} of files of ranks: {some(listed)}",
            kind="several-sets",
            hint="They are of different runs: move those of all but one away.",
        )
    return read_sets(folder, probe, found)
