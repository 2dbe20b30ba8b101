"""
Files that processes wrote with ``torch.save``, one each: state dicts with their parts of distributed tensors.

    model_rank3.pt, model_world_size_8_rank_3.pt, pytorch_model_fsdp_rank3.bin

Where the parts say which boxes they are, the whole is put together of them. A flat parameter of FSDP does not: names
and shapes of what is in it are in the model alone.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from ckptool.checkpoints.parsed import Parsed, Traits
from ckptool.errors import AmbiguousFile
from ckptool.formats.probe import Probe
from ckptool.messages import counted, some
from ckptool.sources.folder import FolderSource

NAME: Final = "rank_files"
TRAITS: Final = Traits(has_tree=True, loader="torch.load() in as many processes as there are files")
_NAME: Final = re.compile(
    r"(?P<stem>.{0,200}?)(?:_?world_size_(?P<world>\d{1,6}))?_?rank[_-]?(?P<rank>\d{1,6})\.(?P<suffix>pt|pth|bin|ckpt)"
)


_ACTOR: Final = "actor"
"""The folder in which verl keeps the model that is trained."""
_HEAD_NBYTES: Final = 1 << 20
_MARKS: Final = (b"ShardedTensor", b"DTensor")


class Set(NamedTuple):
    """Files that differ in the rank of their name alone."""

    stem: str
    """What their names begin with: ``model``, ``optim``."""
    world: int | None
    """How many there are, by their names."""
    files: dict[int, str]
    """By rank."""


def sets_in(folder: FolderSource, inside: str) -> list[Set]:
    """Return the sets of files of ranks in a folder, those of models first."""
    found: dict[tuple[str, str, str], Set] = {}
    for name in folder.names(inside)[0]:
        match = _NAME.fullmatch(name)
        if match is not None:
            world = int(match["world"]) if match["world"] else None
            one = found.setdefault(
                (match["stem"], match["world"] or "", match["suffix"]), Set(match["stem"], world, {})
            )
            one.files.setdefault(int(match["rank"]), f"{inside}/{name}" if inside else name)
    return sorted(found.values(), key=lambda one: ("model" not in one.stem, one.stem))


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
    from ckptool.formats.directories.rank_files.parts import read_sets

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
