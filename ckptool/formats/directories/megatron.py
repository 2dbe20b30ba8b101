"""
Megatron-LM's checkpoints from before ``torch_dist``: a file for each rank.

    latest_checkpointed_iteration.txt               text: a number, or "release"
    iter_0000100/mp_rank_00/model_optim_rng.pt      tensor parallelism alone
    iter_0000100/mp_rank_00_001/…                   and pipeline parallelism; a third number for experts

The files do not record which tensors are split along which dimension: joining them takes rules by architecture. So
several ranks are listed side by side; a single one is complete.

Megatron-core's checkpoints in the format zarr have a folder of blocks for each tensor (``NAME/.zarray``, ``NAME/0.0``),
and ``common.pt`` beside them. They are recognised and refused: ``common.pt`` alone would pass for a checkpoint without
weights.
"""

from __future__ import annotations

import re
from math import prod
from typing import Final

from ckptool.checkpoints.parsed import Parsed, Traits
from ckptool.errors import FileUnavailable, UnsupportedFeature
from ckptool.formats.directories.beside import named_by, place
from ckptool.formats.directories.side_by_side import FolderTree
from ckptool.formats.json_beside import json_object
from ckptool.formats.probe import Probe
from ckptool.formats.slices import SIZES, arguments
from ckptool.formats.slices.numbering import how_to_join
from ckptool.messages import counted, some
from ckptool.sources.folder import FolderSource
from ckptool.sources.paths import MEGATRON

NAME: Final = "megatron"
TRAITS: Final = Traits(has_tree=True, loader="megatron.training.checkpointing.load_checkpoint")
_RANK: Final = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?")
_METADATA: Final = "metadata.json"
_COMMON: Final = "common.pt"
_ARRAY: Final = ".zarray"
_MOST_LOOKED_AT: Final = 16
_FILES: Final = ("model_optim_rng.pt", "model_rng.pt", "distrib_optim.pt")


def sniff(folder: FolderSource) -> bool:
    """Return whether the folder has files of ranks of Megatron-LM or arrays of zarr, or names a folder of ranks."""
    if _ranks(folder, "") or _saves(folder):
        return True
    if _METADATA in folder.files and json_object(folder, _METADATA).get("sharded_backend") == "zarr":
        return True
    return _COMMON in folder.files and any(folder.has(f"{name}/{_ARRAY}") for name in folder.folders[:_MOST_LOOKED_AT])


def _saves(folder: FolderSource) -> list[str]:
    """Return the folders of ranks that a pointer is about; none if it names a folder of another of its formats."""
    if MEGATRON not in folder.files:
        return []
    saves, named = [name for name in folder.folders if _ranks(folder, name)], named_by(folder, MEGATRON)
    return saves if named in saves or named not in folder.folders else []


def _ranks(folder: FolderSource, inside: str) -> dict[str, list[str]]:
    head = f"{inside}/" if inside else ""
    found = {}
    for name in folder.names(inside)[1]:
        if _RANK.fullmatch(name):
            there = folder.names(head + name)[0]
            files = [f"{head}{name}/{one}" for one in _FILES if one in there]
            if files:
                found[name] = files
    return found


def read(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the files of all ranks; no tensor is read.

    Raises:
        FileUnavailable: Files of ranks are missing, or the folder that is named.
        MalformedFile: The pointer names no folder.
        UnsupportedFeature: It has arrays of zarr, which are not read.
    """
    saves = _saves(folder)
    inside = "" if _ranks(folder, "") or not saves else place(folder, MEGATRON, saves)
    found = _ranks(folder, inside)
    if not found:
        count = sum(folder.has(f"{name}/{_ARRAY}") for name in folder.folders)
        fact = f"a checkpoint of Megatron-core in the format zarr, of {counted(count, 'array')}, which is not read"
        raise UnsupportedFeature(
            fact, kind="zarr", hint="Load it in Megatron-LM, and save it in its format torch_dist."
        )
    tree = FolderTree(folder, probe, NAME, TRAITS)
    files = {
        rank if path.endswith(_FILES[:2]) else f"{rank}_optimizer": path
        for rank, paths in found.items()
        for path in paths
    }
    roots = [tree.open(path).root for path in files.values()]
    sizes = next((one for one in map(arguments, roots) if one), {})
    numbers = [[*map(int, re.findall(r"\d+", name))] for name in found]
    said = prod(sizes.get(size, 1) for size in SIZES[: max(map(len, numbers))])
    count = max(said, prod(max(one) + 1 for one in zip(*numbers, strict=False)))
    if len(found) < count:
        fact = f"{count - len(found):,} of {count:,} ranks not there: there are {some(sorted(found))}"
        raise FileUnavailable.of_set(fact, "Get the folders of the other ranks.", count, len(found))
    why = None
    if len(found) > 1:
        why = (
            f"{counted(len(found), 'rank')} of model parallelism, listed rank by rank: which tensors are split, and "
            "along which dimension, is not in the files"
        )
    elif len(files) == 1:
        return tree.parsed(tree.root_of(*files.values()))
    remedy = how_to_join(f"{next(iter(found))}/", folder.path) if why else ""
    return tree.side_by_side(files, why)._replace(unmerged_remedy=remedy)
