"""
Parts of models: slices of tensor parallelism and FSDP, and stages of pipelines. None is taken for a whole one.

    consolidated.00.pth, consolidated.01.pth                    Meta's models
    reshard-model_part-0.pt, reshard-model_part-1.pt            metaseq
    model-rank-0-part-0.safetensors                             vLLM's sharded state
    rank0.safetensors, model.tp1.pt, tp_rank_00_pp_rank_00.pt   and whatever else counts its files

Names decide which files to compare (``numbering``), content decides whether they are parts (``evidence``): copies of
one file look like slices, and so do files of one training at different times. Which tensors are cut, and along which
dimension, is in the model alone: nothing is joined, unless rules describe it (``recipes.slices``).

Files of other sets (a shard, what one process wrote, what is kept beside the pieces of tensors) are recognised by their
names, and by those in their folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from math import prod
from typing import Final

import ckptool.system as system
from ckptool.checkpoints.parsed import Parsed, PartOf, Remark
from ckptool.errors import CkptoolError, Failure, UnsupportedFeature
from ckptool.formats import filenames
from ckptool.formats.filenames import ADAPTER
from ckptool.formats.probe import Probe
from ckptool.formats.safetensors import OF_PIECES, begins_at_zero
from ckptool.formats.slices import evidence, numbering
from ckptool.formats.slices.numbering import numbers, set_of
from ckptool.messages import counted, show, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.sources.files import FileSource
from ckptool.sources.paths import directory_entries, first_bytes
from ckptool.tensors.tensor import is_size

_OF_MODEL_PARALLEL: Final = re.compile(r"model_(?:optim_)?rng\.pt|mp_rank_\d+_model_states\.pt")
_OF_RANKS: Final = (("mp_world_size", "module"), ("args", "iteration", "model"), ("args", "iteration", "model0"))
_FLAT: Final = re.compile(r"(?:.*\.)?_?flat_params?(?:[._]\d+)?", re.DOTALL)
"""The parameters of a unit of FSDP, one after another, or one process's part of them."""
_OF_FSDP: Final = "flat parameters of FSDP, or a part of them: only the model knows their names and shapes"
_MOST_SIBLINGS: Final = 4096
_FEW: Final = 64
_DEEPEST: Final = 2
"""Most folders above a file that may be those of ranks."""
_WHAT: Final = "files that each hold a slice of most tensors, as tensor parallelism and FSDP save them"
SIZES: Final = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
"""The arguments of a training with Megatron that give the sizes of its groups."""


def part_of(
    name: str, place: str, names: Iterable[str], parsed: Parsed, opening: Callable[[str], Parsed]
) -> PartOf | None:
    """Return the set of slices that a file belongs to, by its name and the others' content; None if there is none."""
    if (shard := _shard(place, name, names)) is not None:
        return shard
    own = parsed.contents.tensors
    if any(map(_FLAT.fullmatch, own)):
        return PartOf(_OF_FSDP, place, is_slice=True)
    found = set_of(name, names)
    if not found.nearest or not own:
        return None
    files, gap = found.files, found.gap
    slices = PartOf(f"one of {len(files):,} {_WHAT}{gap}", place, True, numbering.how_to_join(name, place))
    if numbering.is_known(name):
        return slices
    others = ""
    for other in found.nearest:
        try:
            read = {name: own, other: opening(other).contents.tensors}
            first, second = (read[one] for one in files if one in read)
            if files[0] in read and found.has_bare and not evidence.have_shapes_of(first, second):
                continue  # the file without a number may be what those with one are slices of
            ends = [files[0], *files[1:-1][:1], files[-1]] if first.keys() != second.keys() else []
            held = [read.get(one) or opening(one).contents.tensors for one in ends]
            if evidence.are_slices(first, second, found, are_ends=bool(ends) and evidence.are_ends(held)):
                return slices
            if evidence.go_on(first, second, says_rank=found.says_rank):
                others = "with other tensors each"
        except Failure:
            others = others or (f"of which {other!r} cannot be read" if found.says_one else "")
    return PartOf(f"one of {len(files):,} files, by their names, {others}{gap}", place, True) if others else None


def as_part(parsed: Parsed, name: str, place: str, names: Iterable[str], opening: Callable[[str], Parsed]) -> Parsed:
    """Return the content of a file of a folder or an archive, with the set that the file belongs to."""
    part = parsed.part_of or part_of(name, place, names, parsed, opening)
    if part is not None:
        return parsed._replace(part_of=part)
    folder, _, own = name.rpartition("/")
    beside = [one for above, _, one in (other.rpartition("/") for other in names) if above == folder]
    return marked_if_incomplete(parsed, own, place, beside)


def _shard(place: str, name: str, names: Iterable[str]) -> PartOf | None:
    shard = filenames.shard_of(name)
    if shard is None or shard[2] <= 1:
        return None
    index = next((one for one in names if filenames.belongs_to(one, name)), "")
    whole = os.path.join(place, index) if index and place else place
    remedy = f"Give {show(whole)}, with all of them." if whole else "Unpack the archive, and give the folder."
    return PartOf(f"shard {shard[1]:,} of {shard[2]:,}", whole, True, remedy)


def marked_if_incomplete(parsed: Parsed, name: str, place: str, names: Sequence[str]) -> Parsed:
    """Return the content of a file, marked as a part if its name or content shows that others are missing."""
    own, what, remedy = parsed.contents.tensors, "", ""
    if parsed.shards:
        unnamed = filenames.unnamed([one.name for one in parsed.shards], names)
        what = f"an index that does not name {some(unnamed)} of the same set" if unnamed else ""
        remedy = "Get the index again, or remove what is left from another save."
    elif (text := parsed.metadata.get(OF_PIECES)) and (name.startswith("shard-") or not begins_at_zero(text)):
        what, remedy = "pieces of tensors, as one rank wrote them", f"Give {show(place)}, the folder with all of them."
    elif any(map(_FLAT.fullmatch, own)):
        what = _OF_FSDP
    elif what := evidence.later_layers(own):
        pass
    elif set_of(name, names).nearest or not own:
        return parsed
    elif (_OF_MODEL_PARALLEL.fullmatch(name) or _is_of_rank(parsed.root)) and (count := ranks_said(parsed.root)) > 1:
        what = f"one of {count:,} ranks of model parallelism, as it says itself"
    elif numbering.is_known(name):
        number = int(*numbers(name)[1])
        what = f"number {number} of {_WHAT}, going by its name" if number else ""
        if not number and not name.startswith("mp_rank"):  # of which most runs of DeepSpeed have the first alone
            first = f"going by its name, the first or the only one of {_WHAT}: nothing says how many there were"
            return parsed._replace(remarks=(*parsed.remarks, Remark("CK145", first)))
    elif any("lora" in one.lower() for one in own):
        return parsed
    elif numbering.is_one_of_several(name):
        what = "one of several files, going by its name, the others of which are not there"
    return parsed._replace(part_of=PartOf(what, place, True, remedy)) if what else parsed


def _is_of_rank(root: Inert) -> bool:
    """Return whether the root is what a rank of Megatron or DeepSpeed saves, whatever the name of the file."""
    pairs = nodes.mapping_pairs(root) or []
    return any(all(nodes.lookup(pairs, key) is not None for key in keys) for keys in _OF_RANKS)


def ranks_said(root: Inert) -> int:
    """Return how many ranks of model parallelism saved a file each, as a file of Megatron or DeepSpeed records it."""
    world = nodes.item(root, "mp_world_size")
    return world if is_size(world) and world else prod(arguments(root).get(size, 1) for size in SIZES[:2])


def arguments(root: Inert) -> dict[str, int]:
    """Return the sizes of the parallel groups, by the names of the arguments of the training."""
    found = nodes.item(root, "args")
    args = nodes.mapping_pairs(found) or nodes.attribute_pairs(found)
    sizes = {name: nodes.lookup(args, name) for name in SIZES}
    return {name: size for name, size in sizes.items() if is_size(size) and 0 < size < 1 << 20}


WHICH: Final = ". Which tensors are cut, and along which dimension, is not in them"


def together(found: Mapping[str, Parsed]) -> str | None:
    """Return why files of a folder are not checkpoints but parts of one; None if they are not parts."""
    inside = {name: one for name, one in found.items() if not one.inside}
    inside |= {f"{name}/{below}": one for name, listed in found.items() for below, one in listed.inside.items()}
    for name, parsed in {numbers(name)[0]: (name, parsed) for name, parsed in reversed([*inside.items()])}.values():
        part = part_of(name, "", inside, parsed, inside.__getitem__)
        if part is None:
            continue
        files, _, gap, *_ = set_of(name, inside)
        if name not in found and len({one.partition("/")[0] for one in files}) == 1:
            continue  # the entry of that folder reports it
        are_slices = _WHAT in part.what
        what = f"{counted(len(files), 'file')} are {'slices' if are_slices else 'parts'} of one model{gap}"
        why = WHICH if are_slices else ""
        return f"{what}: {some(list(map(repr, files)))}{why}"
    return None


INDEX: Final = "metadata.pkl"
OF_RANK: Final = re.compile(r"(?P<item>.+)_(?P<rank>\d{1,6})\.pt")
"""The index of ``torch_checkpointing``, and its other files."""
HEAD_NBYTES: Final = 1 << 16
MARKS: Final = (b"sharding_metadata", b"world_size")
"""What that index begins with, and no other file of its name."""
_DISTCP: Final = ".distcp"
_RANK: Final = re.compile(r"mp_rank_[0-9_]+")


def with_file_set(path: str, parsed: Parsed, probe: Probe) -> Parsed:
    """Return the content of a file with the set that the file belongs to, unless it is complete, or the only one."""
    place, name = os.path.split(path)
    names = directory_entries(place or ".")
    if name.startswith("adapter_model.") and ADAPTER in names:
        from ckptool.formats.json_beside import missing_adapter_parts, object_beside  # which few files need

        settings = object_beside(path, probe.source, ADAPTER)
        return parsed._replace(remarks=(*parsed.remarks, *missing_adapter_parts(settings, parsed)))
    found = _named(place or ".", name, names)
    if filenames.role_of(name):
        return parsed._replace(part_of=found)
    slice_of = _slice_of(place or ".", name, names, parsed, probe)
    if found is not None and slice_of is not None:
        found = found._replace(what=f"{found.what}{set_of(name, names).gap}", is_slice=slice_of.is_slice)
    if found is not None and _OF_MODEL_PARALLEL.fullmatch(name) and not found.is_slice:
        # An engine of DeepSpeed has the float32 weights in the files of its optimizer.
        are_narrow = any(info.dtype.name in ("float16", "bfloat16") for info in parsed.contents.tensors.values())
        if are_narrow and any(one.endswith("_optim_states.pt") for one in names):
            found = found._replace(what=f"{found.what}, with rounded weights", is_slice=True)
    elif filenames.named(name).of == filenames.OF_PROCESSES and _is_copy(place or ".", name, names, parsed, probe):
        found = None
    found = found or slice_of or of_ranks(path, parsed, probe)
    return marked_if_incomplete(parsed, name, place or ".", names) if found is None else parsed._replace(part_of=found)


def of_ranks(path: str, parsed: Parsed, probe: Probe) -> PartOf | None:
    """Return the set of slices that a file in or below the folder of a rank belongs to; None if there is none."""
    above, name = os.path.split(os.path.abspath(path))
    folders: list[str] = []
    for _ in range(_DEEPEST):
        above, own = os.path.split(above)
        folders.insert(0, own)
        if not numbers(own)[1]:
            continue
        found = [""]
        for one in folders:
            found = [f"{at}{there}/" for at in found for there in _like(os.path.join(above, at), one)][:_MOST_SIBLINGS]
        inside, own_name = [f"{one}{name}" for one in found], "/".join((*folders, name))
        # With thousands of folders, every file asks: so the nearest one first, and all only if that is of the same
        # model.
        part, nearest = None, set_of(own_name, inside).nearest
        if all(os.path.isfile(os.path.join(above, one)) for one in nearest):
            part = _slice_of(above, own_name, inside, parsed, probe)
        if part is not None or len(nearest) > 1 or len(inside) <= _FEW:
            names = [one for one in inside if os.path.isfile(os.path.join(above, one))]
            part = _slice_of(above, own_name, names, parsed, probe) if len(names) > 1 else None
        if part is not None:
            return part._replace(path=os.path.relpath(above) if not os.path.isabs(path) else above)
    return None


def of_hosts(parsed: Parsed, probe: Probe) -> Parsed:
    """Return a listing of several checkpoints, marked as parts if the adjacent folders show that."""
    first = next(iter(parsed.inside.values()), None)
    path = getattr(first and first.source, "path", None)
    part = of_ranks(path, first, probe) if first and path and parsed.unmerged is None else None
    return parsed if part is None else parsed._replace(unmerged=f"each is {part.what}", part_of=part)


def _like(place: str, folder: str) -> Sequence[str]:
    """Return the folders whose names differ from one in numbers alone."""
    pattern, found = numbers(folder)
    alike = (one for one in directory_entries(place, folders=True) if numbers(one)[0] == pattern)
    return list(alike) if found else [folder]


def _slice_of(place: str, name: str, names: Sequence[str], parsed: Parsed, probe: Probe) -> PartOf | None:
    with opening_of(partial(_detached, place, probe), probe) as opening:
        return part_of(name, place, names, parsed, opening)


def _is_copy(place: str, name: str, names: Sequence[str], parsed: Parsed, probe: Probe) -> bool:
    """Return whether the next file of a set has the same tensors, as far as they are compared."""
    own = parsed.contents.tensors
    try:
        with opening_of(partial(_detached, place, probe), probe) as opening:
            there = opening(set_of(name, names).nearest[0]).contents.tensors
            are_there = bool(own) and all(info.storage is not None for info in own.values())
            are_alike = are_there and own.keys() == there.keys() and evidence.have_shapes_of(own, there)
            return are_alike and all(evidence.are_equal(one, own, there) for one in own)
    except (Failure, IndexError):
        return False


def _detached(place: str, probe: Probe, name: str) -> FileSource:
    return FileSource(os.path.join(place, name), probe.limits.cancellation)


@contextmanager
def opening_of(detached: Callable[[str], FileSource], probe: Probe) -> Iterator[Callable[[str], Parsed]]:
    """Yield a function that reads the other files of a set by name; they are closed after the block."""
    with ExitStack() as stack:
        yield lambda other: probe.beside(stack.enter_context(closing(detached(other)))).read()


def _named(place: str, name: str, names: Sequence[str]) -> PartOf | None:
    """Return the set that a file belongs to, by the names in its folder."""
    if (shard := _shard(place, name, names)) is not None:
        return shard
    if name.startswith("model_") and (found := rank_of_megatron(place)) is not None:
        return found
    if (what := filenames.set_of(name, names)) or _is_of_item(place, name, names):
        is_slice = not what or name.startswith("layer_")
        return PartOf(what or "one of the files of torch_checkpointing", place, is_slice=is_slice)
    return None


def _is_of_item(place: str, name: str, names: Sequence[str]) -> bool:
    """Return whether a file is the index of ``torch_checkpointing``, or one of several files of an item beside it."""
    match = OF_RANK.fullmatch(name)
    of_item = [one for one in map(OF_RANK.fullmatch, names) if one and match and one["item"] == match["item"]]
    if INDEX not in names or (name != INDEX and len(of_item) < 2):
        return False
    head = first_bytes(os.path.join(place, INDEX), HEAD_NBYTES)
    return any(mark in head for mark in MARKS)


def rank_of_megatron(path: str) -> PartOf | None:
    """Return the ranks of Megatron-LM that a folder belongs to, by the names beside it."""
    above, name = os.path.split(os.path.abspath(path))
    if _RANK.fullmatch(name) is None:
        return None
    ranks = [one for one in directory_entries(above, folders=True) if _RANK.fullmatch(one)]
    what = f"{f'one of {len(ranks)} ranks' if len(ranks) > 1 else f'{name} without the other ranks'} of Megatron-LM"
    is_part, place = len(ranks) > 1 or re.search("[1-9]", name), os.path.normpath(os.path.join(path, os.pardir))
    return PartOf(what, place, True, numbering.how_to_join(f"{name}/", place)) if is_part else None


def explained(error: CkptoolError, path: str) -> CkptoolError:
    """Return the error for a file of a set that cannot be read alone; any other error unchanged."""
    from ckptool.formats.sharded import lacks_all

    place, name = os.path.split(path)
    names = directory_entries(place or ".")
    command = system.command_line("ckptool", "inspect", place or ".")
    there = filenames.other_set(name, names) if lacks_all(error) else None
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
