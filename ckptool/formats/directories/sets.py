"""
A file of a set that is given alone (a shard, what one process wrote, or what is kept beside the pieces of tensors): the
set that it belongs to, by its name, its folder, and what is in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from shlex import join
from typing import Final

from ckptool.checkpoints.companions import PartOf
from ckptool.checkpoints.parsed import Parsed
from ckptool.errors import CkptoolError, UnsupportedFeature
from ckptool.formats import sharded
from ckptool.formats.directories import choosing, slices, torch_checkpointing
from ckptool.formats.directories.bare import OF_ADAPTER, VALUES, hollow_adapter
from ckptool.formats.directories.beside import settings_beside
from ckptool.formats.probe import Probe
from ckptool.messages import counted, show
from ckptool.sources.files import FileSource
from ckptool.sources.paths import directory_entries

_DISTCP: Final = ".distcp"
_RANK: Final = re.compile(r"mp_rank_[0-9_]+")
_SETS: Final = (
    (re.compile(r".*\.distcp"), "of a torch.distributed.checkpoint"),
    (re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_[0-9]+_mp_rank_[0-9_]+_(?:optim|model)_states\.pt"), "of DeepSpeed"),
    (re.compile(r"mp_rank_[0-9_]+_model_states\.pt"), "of DeepSpeed"),
    (re.compile(r"layer_[0-9]+[\w-]*[-_]model_states\.pt"), "of DeepSpeed"),
    (re.compile(r"model-rank-[0-9]+-part-[0-9]+\.safetensors"), "of vLLM's sharded state"),
    (re.compile(r"(?:.*_)?rank_?[0-9]+(?:\.\w+)?\.(?:bin|pt|pth|ckpt)"), "that processes wrote, one each"),
)
"""Names of files of which there is one for each process, and what they are."""


def with_set(path: str, parsed: Parsed, probe: Probe) -> Parsed:
    """Return what was read of a file with the set that it is one of, unless it is whole, or there alone."""
    place, name = os.path.split(path)
    names = directory_entries(place or ".")
    if name.startswith("adapter_model.") and OF_ADAPTER in names:
        return parsed._replace(remarks=(*parsed.remarks, *hollow_adapter(settings_beside(path, probe.source), parsed)))
    found = _named(place or ".", name, names)
    if choosing.role_of(name):
        return parsed._replace(part_of=found)
    slice_of = _slice_of(place or ".", name, names, parsed, probe)
    if found is not None and slice_of is not None:
        gap = slices.gap_among(slices.siblings(name, names))
        found = found._replace(what=f"{found.what}{gap}", is_slice=slice_of.is_slice)
    found = found or slice_of or of_ranks(path, parsed, probe)
    return slices.with_alone(parsed, name, place or ".", names) if found is None else parsed._replace(part_of=found)


def of_ranks(path: str, parsed: Parsed, probe: Probe, below: str = "") -> PartOf | None:
    """Return the slices that a file is one of where each lies in or below the folder of a rank; None if it is none."""
    place, name = os.path.split(path)
    above, own = os.path.split(os.path.abspath(place))
    inside = f"{name}{below}"
    folders = slices.siblings(own, directory_entries(above, folders=True)) if slices.numbers(own)[1] else []
    names = [f"{one}/{inside}" for one in folders if os.path.isfile(os.path.join(above, one, inside))]
    part = _slice_of(above, f"{own}/{inside}", names, parsed, probe) if len(names) > 1 else None
    of_rank = os.path.basename(above)
    if part is None and not below and (slices.RANKED.search(of_rank) or of_rank.isdigit()):
        return of_ranks(place if own in place else os.path.abspath(place), parsed, probe, f"/{name}")
    return part and part._replace(path=os.path.normpath(os.path.join(place, os.pardir)))


def _slice_of(place: str, name: str, names: Sequence[str], parsed: Parsed, probe: Probe) -> PartOf | None:
    with ExitStack() as stack:

        def opening(other: str) -> Parsed:
            source = FileSource(os.path.join(place, other), probe.limits.cancellation)
            stack.callback(source.close)
            return probe.beside(source).read()

        return slices.part_of(name, place, names, parsed, opening)


def _named(place: str, name: str, names: Sequence[str]) -> PartOf | None:
    """Return the set that a file is one of, going by the names in its folder."""
    shard = choosing.shard_of(name)
    if shard is not None and shard[2] > 1:
        index = next((one for one in names if choosing.belongs_to(one, name)), "")
        whole = os.path.join(place, index) if index else place
        return PartOf(f"shard {shard[1]:,} of {shard[2]:,}", whole, True, f"Give {show(whole)}, with all of them.")
    if name in VALUES and ".metadata" in names:
        return PartOf(VALUES[name][1], place)
    if torch_checkpointing.has_part(place, name, names):
        return PartOf("one of the files of torch_checkpointing", place, is_slice=True)
    if name.startswith("model_") and (found := rank_of_megatron(place)) is not None:
        return found
    for pattern, what in _SETS:
        if pattern.fullmatch(name) and not choosing.role_of(name):
            count = sum(pattern.fullmatch(one) is not None for one in names)
            if count > 1 or name.endswith(_DISTCP):
                return PartOf(f"one of {counted(count, 'file')} {what}", place, is_slice=name.startswith("layer_"))
    return None


def rank_of_megatron(path: str) -> PartOf | None:
    """Return the ranks of Megatron-LM that a folder is one of, going by the names beside it."""
    above, name = os.path.split(os.path.abspath(path))
    if _RANK.fullmatch(name) is None:
        return None
    ranks = [one for one in directory_entries(above, folders=True) if _RANK.fullmatch(one)]
    what = f"{f'one of {len(ranks)} ranks' if len(ranks) > 1 else f'{name} without the other ranks'} of Megatron-LM"
    is_part = len(ranks) > 1 or re.search("[1-9]", name)
    return PartOf(what, os.path.normpath(os.path.join(path, os.pardir)), is_slice=True) if is_part else None


def explained(error: CkptoolError, path: str) -> CkptoolError:
    """Return the error for a file of a set that cannot be read alone; any other error as it is."""
    place, name = os.path.split(path)
    names = directory_entries(place or ".")
    command = join(("ckptool", "inspect", place or "."))
    there = choosing.other_set(name, names) if sharded.lacks_all(error) else None
    if there is not None:
        error.message += f"; the complete set of {there.total:,} shards that is there is of another save"
        error.hint, error.command = "Give the folder, or remove the index.", command
    found = _named(place or ".", name, names) if name.endswith(_DISTCP) else None
    if found is None:
        return error
    return UnsupportedFeature(
        f"{found.what}: tensors one behind the other, whose names are in the index of the folder",
        kind="distributed-checkpoint",
        hint="Give the folder.",
        command=command,
        offset=error.offset,
    )
