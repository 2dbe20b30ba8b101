"""
A file of a set that is given alone (a shard, or what one process wrote): the set that it belongs to, by its name and
its folder.
"""

from __future__ import annotations

import os
import re
from shlex import join
from typing import Final

from ckptool.checkpoints.companions import PartOf
from ckptool.errors import CkptoolError, UnsupportedFeature
from ckptool.formats.directories import choosing
from ckptool.messages import counted
from ckptool.sources.paths import directory_entries

_DISTCP: Final = ".distcp"
_SETS: Final = (
    (re.compile(r".*\.distcp"), "of a torch.distributed.checkpoint"),
    (re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_[0-9]+_mp_rank_[0-9_]+_(?:optim|model)_states\.pt"), "of DeepSpeed"),
    (re.compile(r"mp_rank_[0-9_]+_model_states\.pt"), "of DeepSpeed"),
    (re.compile(r"layer_[0-9]+[\w-]*[-_]model_states\.pt"), "of DeepSpeed"),
    (re.compile(r"(?:.*_)?rank_?[0-9]+(?:\.\w+)?\.(?:bin|pt|pth|ckpt)"), "that processes wrote, one each"),
)
"""Names of files of which there is one for each process, and what they are."""


def part_of(path: str) -> PartOf | None:
    """Return the set that a file is one of; None if its name is that of no such file, or it is there alone."""
    place, name = os.path.split(path)
    shard = choosing.shard_of(name)
    if shard is not None and shard[2] > 1:
        index = next((one for one in directory_entries(place or ".") if choosing.belongs_to(one, name)), "")
        whole = os.path.join(place, index) if index else place or "."
        return PartOf(f"shard {shard[1]:,} of {shard[2]:,}", whole)
    for pattern, what in _SETS:
        if pattern.fullmatch(name) and not choosing.role_of(name):
            count = sum(pattern.fullmatch(one) is not None for one in directory_entries(place or "."))
            if count > 1 or name.endswith(_DISTCP):
                return PartOf(f"one of {counted(count, 'file')} {what}", place or ".")
    return None


def explained(error: CkptoolError, path: str) -> CkptoolError:
    """Return the error for a file of a torch.distributed.checkpoint, which is none alone; any other error as it is."""
    found = part_of(path) if path.endswith(_DISTCP) else None
    if found is None:
        return error
    return UnsupportedFeature(
        f"{found.what}: tensors one behind the other, whose names are in the index of the folder",
        kind="distributed-checkpoint",
        hint="Give the folder.",
        command=join(("ckptool", "inspect", found.path)),
        offset=error.offset,
    )
