"""
Files that are a part of a model: a slice of tensor parallelism or FSDP, or a stage of a pipeline. None is taken for a
whole one.

    consolidated.00.pth, consolidated.01.pth                    Meta's models
    reshard-model_part-0.pt, reshard-model_part-1.pt            metaseq
    model-rank-0-part-0.safetensors                             vLLM's sharded state
    rank0.safetensors, model.tp1.pt, tp_rank_00_pp_rank_00.pt   and whatever else counts its files

Names decide which files to compare (``numbering``), content decides whether they are parts: copies of one file look
like slices, and so do files of one training at different times. Which tensors are cut, and along which dimension, is in
the model alone: nothing is joined, unless rules describe it (``recipes.slices``).

What is compared are names, shapes, and the first bytes of a few tensors. Slices of tensor parallelism and FSDP have the
same names. Most of their matrices differ as much as those of two models do, but ranks have equal copies of what is not
cut, such as norms, which two trainings do not have. Stages of pipelines and groups of experts have names that continue
in the next file.

Files of other sets (a shard, what one process wrote, what is kept beside the pieces of tensors) are recognised by their
names, and by those in their folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import islice
from math import prod
from typing import Final, TypeAlias

import ckptool.system as system
from ckptool.checkpoints.parsed import Parsed, PartOf, Remark
from ckptool.errors import CkptoolError, Failure, UnsupportedFeature
from ckptool.formats import filenames
from ckptool.formats.filenames import ADAPTER
from ckptool.formats.probe import Probe
from ckptool.formats.safetensors import OF_PIECES, begins_at_zero
from ckptool.formats.slices import numbering
from ckptool.formats.slices.numbering import Numbered, numbers, set_of
from ckptool.messages import counted, show, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.sources.files import FileSource
from ckptool.sources.paths import directory_entries, first_bytes
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, is_size

Tensors: TypeAlias = Mapping[str, TensorInfo]

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
_LAYER: Final = re.compile(r"\b\d{1,18}(?=\.)")
_FIRST: Final = re.compile(r"\b0*[01](?=\.)")
"""The number of the first layer of a stack; some count from 1."""
_LEARNT: Final = ("weight", "bias", "scale", "gamma", "beta")
"""Ends of the names of tensors that training changes; masks and positions are equal in all files of a model."""
_OF_MODULE: Final = re.compile(r"[._]?(?:lora_?(?:[AB]|down|up)\b.*|weight|bias)\Z", re.DOTALL)
"""What follows the name of a module in the names of its tensors."""
_ADDED: Final = re.compile(r"lora|lokr|hada|ia3|adapter|prompt|probe", re.IGNORECASE)
"""What is added to some layers of a model, which keep their numbers."""
_ENDS: Final = (re.compile(r"emb|wte|stem"), re.compile(r"head|output|final"))
"""What the names of the first stage of a pipeline contain, and those of the last."""
_SMALL_NBYTES: Final = 1 << 16
_HEAD_NBYTES: Final = 1 << 12
"""Bytes that are compared of a tensor that is not small."""
_MOST: Final = 12
"""Tensors of a kind that are compared."""
_LEAST: Final = 6
"""Fewest matrices of layers that show that the layers before them are missing."""
_SAMPLE: Final = 64
"""Matrices, spread over all, that are tried first: if the stack of each has its first layer, so have all."""
_NESTED: Final = 8
"""Most numbers in a name that may be those of layers."""


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
    slice_of = PartOf(f"one of {len(files):,} {_WHAT}{gap}", place, True, numbering.how_to_join(name, place))
    if numbering.is_known(name):
        return slice_of
    others = ""
    for other in found.nearest:
        try:
            read = {name: own, other: opening(other).contents.tensors}
            first, second = (read[one] for one in files if one in read)
            if files[0] in read and found.has_bare and not have_shapes_of(first, second):
                continue  # the file without a number may be what those with one are slices of
            ends = [files[0], *files[1:-1][:1], files[-1]] if first.keys() != second.keys() else []
            held = [read.get(one) or opening(one).contents.tensors for one in ends]
            if are_slices(first, second, found, are_ends=bool(ends) and are_ends(held)):
                return slice_of
            if go_on(first, second, says_rank=found.says_rank):
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


def _with_all(place: str) -> str:
    return f"Give {show(place)}, the folder with all of them."


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
        what, remedy = "pieces of tensors, as one rank wrote them", _with_all(place)
    elif what := later_layers(own):
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
_UNIVERSAL: Final = "a universal checkpoint of DeepSpeed"
_ZERO: Final = "zero"
_OF_PARAMETERS: Final = (
    ("nanotron", re.compile(r"model_.+\.safetensors"), "model", "checkpoint_metadata.json"),
    (_UNIVERSAL, re.compile(r"(?:fp32|exp_avg|exp_avg_sq|step)\.pt"), _ZERO, "zero/optimizer_state.pt"),
)
"""Layouts with a file for each parameter: the names of these files, a folder above them, and a file beside that."""


def with_file_set(path: str, parsed: Parsed, probe: Probe) -> Parsed:
    """Return the content of a file with the set that the file belongs to, unless it is complete, or the only one."""
    place, name = os.path.dirname(path) or ".", os.path.basename(path)
    names = directory_entries(place)
    if name.startswith("adapter_model.") and ADAPTER in names:
        from ckptool.formats.json_beside import missing_adapter_parts, object_beside  # which few files need

        settings = object_beside(path, probe.source, ADAPTER)
        return parsed._replace(remarks=(*parsed.remarks, *missing_adapter_parts(settings, parsed)))
    found = _named(place, name, names)
    if filenames.role_of(name):
        return parsed._replace(part_of=found)
    slice_of = _slice_of(place, name, names, parsed, probe)
    if found is not None and slice_of is not None:
        found = found._replace(what=f"{found.what}{set_of(name, names).gap}", is_slice=slice_of.is_slice)
    if found is not None and _OF_MODEL_PARALLEL.fullmatch(name) and not found.is_slice:
        # An engine of DeepSpeed has the float32 weights in the files of its optimizer.
        are_narrow = any(info.dtype.name in ("float16", "bfloat16") for info in parsed.contents.tensors.values())
        if are_narrow and (_is_universal(place) or any(one.endswith("_optim_states.pt") for one in names)):
            found = found._replace(what=f"{found.what}, with rounded weights", is_slice=True)
    elif filenames.named(name).of == filenames.OF_PROCESSES and _is_copy(place, name, names, parsed, probe):
        found = None
    found = found or slice_of or of_ranks(path, parsed, probe)
    return marked_if_incomplete(parsed, name, place, names) if found is None else parsed._replace(part_of=found)


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
    with suppress(Failure, IndexError), opening_of(partial(_detached, place, probe), probe) as opening:
        there = opening(set_of(name, names).nearest[0]).contents.tensors
        are_there = bool(own) and all(info.storage is not None for info in own.values())
        are_alike = are_there and own.keys() == there.keys() and have_shapes_of(own, there)
        return are_alike and all(are_equal(one, own, there) for one in own)
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
        is_slice = not what or filenames.named(name).is_slice
        return PartOf(what or "one of the files of torch_checkpointing", place, is_slice=is_slice)
    if name.endswith("_model_states.pt") and _is_universal(place):
        return PartOf(f"one of the files of {_UNIVERSAL}", place)
    return _of_parameter(place, name)


def _is_universal(place: str) -> bool:
    return os.path.isdir(os.path.join(place, _ZERO))


def _of_parameter(place: str, name: str) -> PartOf | None:
    """Return the checkpoint with a file for each parameter, some folders above, that a file belongs to."""
    for whose, pattern, top, mark in _OF_PARAMETERS:
        above = os.path.abspath(place) if pattern.fullmatch(name) else ""
        while os.path.basename(above):
            above, folder = os.path.split(above)
            if folder == top and os.path.exists(os.path.join(above, mark)):
                whole = above if os.path.isabs(place) else os.path.relpath(above)
                what = f"one of the files of {whose}, each a parameter or a part of one"
                return PartOf(what, whole, True, _with_all(whole))
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

    place, name = os.path.dirname(path) or ".", os.path.basename(path)
    names = directory_entries(place)
    command = system.command_line("ckptool", "inspect", place)
    there = filenames.other_set(name, names) if lacks_all(error) else None
    if there is not None:
        error.message += f"; the complete set of {there.total:,} shards that is there is of another save"
        error.hint, error.command = "Give the folder, or remove the index.", command
    found = _named(place, name, names) if name.endswith(_DISTCP) else None
    if found is None:
        return error
    return UnsupportedFeature(
        f"{found.what}: tensors one behind the other, whose names are in the index of the folder",
        kind="distributed-checkpoint",
        hint="Give the folder.",
        command=command,
        offset=error.offset,
    )


def are_slices(one: Tensors, other: Tensors, found: Numbered, *, are_ends: bool) -> bool:
    """
    Return whether two files of a set hold slices of one model; ``one`` is the first of them.

    Where names do not mark the files as ranks, most norms have to be copies. Ranks of FSDP, which cuts everything along
    the first dimension, and stages that number their layers from 0 have no copies: there, words in the names of the
    files, tensors of a first and a last stage (``are_ends``), or the shapes must show that they are of one model. Files
    whose layers fit each other, with tensors before or after them, are whole models.
    """
    names = [name for name in one if name in other and _could_be_cut(one[name], other[name])]
    learnt = [name for name in names if name.endswith(_LEARNT)]
    if 3 * len(names) >= 2 * max(len(one), len(other)) and _are_halved(one, other, names):
        return True
    small = [name for name in learnt if 1 < one[name].nbytes <= _SMALL_NBYTES and len(one[name].shape) == 1]
    large = [name for name in learnt or names if len(one[name].shape) > 1]
    vectors = [_tells(name, one, other) for name in small[:_MOST]]
    copies = [name for name, is_copy in zip(small, vectors, strict=False) if is_copy]
    if copies:
        are_most = len(copies) >= vectors.count(False) and (copies[1:] or "norm" in "".join(copies))
        is_certain = (found.says_rank or are_most) and 3 * len(names) >= 2 * max(len(one), len(other))
    else:
        says_one = found.says_one and (False in vectors or not small)
        says_one = says_one and (found.says_cut or not _is_whole(one, other, found.total))
        is_certain = all(
            (
                # Most shapes seem cut, and more than one: so do parallel layers.
                are_ends or says_one or any(cut > max(1, whole) for cut, whole in _cuts(one, found.total)),
                2 * len(names) >= min(len(one), len(other)),
                all(one[name].shape[1:] == other[name].shape[1:] for name in names),
                any(name in learnt or "." in name for name in names),
            )
        )
        large = large or small
    if not is_certain:
        return False
    same = [_are_alike(name, one, other) for name in large[:_MOST]]
    return len(same) > (not found.says_rank) and 2 * sum(same) <= len(same) - (found.says_rank and not found.says_cut)


def _could_be_cut(one: TensorInfo, other: TensorInfo) -> bool:
    """Return whether tensors differ in one dimension at most, in which those of the first rank are not smaller."""
    sizes = [*zip(one.shape, other.shape, strict=False)]
    is_like = one.dtype == other.dtype and len(one.shape) == len(other.shape)
    return is_like and sum(a != b for a, b in sizes) <= 1 and all(a >= b for a, b in sizes)


def _are_halved(one: Tensors, other: Tensors, names: Iterable[str]) -> bool:
    """
    Return whether the input of some modules is cut, and the output of others, as tensor parallelism does in turns.

    Where the input is cut, the next tensor is a copy: the bias, or the second factor of LoRA. Of two trainings, it is
    not a copy where the matrix before it differs.
    """
    modules: dict[str, list[str]] = {}
    for name in filter(_OF_MODULE.search, names):
        modules.setdefault(_OF_MODULE.sub("", name), []).append(name)
    pairs = [sorted(found, key=lambda name: (name.endswith("bias"), name)) for found in modules.values()]
    pairs = [found for found in pairs if len(found) == 2 and len(one[found[0]].shape) > 1][:_MOST]
    told = [(_are_alike(matrix, one, other), _tells(behind, one, other)) for matrix, behind in pairs]
    return (False, True) in told and any(copy is False for _, copy in told) and (True, True) not in told


def _is_whole(one: Tensors, other: Tensors, count: int) -> bool:
    """
    Return whether two files hold the same model, few of whose layers seem cut, with matrices outside its layers.

    Where all matrices are in layers, the last one's output must not fit the first one's input, as it does in stages.
    """
    matrices = [(_LAYER.sub("#", name), info.shape) for name, info in one.items() if len(info.shape) > 1]
    are_varied = len({*matrices}) > len({kin for kin, _ in matrices}) and matrices[0][1][1] != matrices[-1][1][0]
    has_ends = are_varied or any("#" not in kin for kin, _ in matrices)
    are_same = has_ends and one.keys() == other.keys() and have_shapes_of(one, other)
    return are_same and all(whole > cut for cut, whole in _cuts(one, count))


def have_shapes_of(one: Tensors, other: Tensors) -> bool:
    """Return whether all tensors that are in both have the same shapes."""
    return all(one[name].shape == other[name].shape for name in one.keys() & other.keys())


def _cuts(tensors: Tensors, count: int) -> Iterator[tuple[int, int]]:
    """
    Yield how many shapes seem cut along the first dimension, and how many do not, for each number that divides
    ``count``.

    The size of a cut output, or of a cut norm, is not an input size of any layer, but that part of one.
    """
    shapes = {info.shape for name, info in tensors.items() if name.endswith(_LEARNT) and info.numel > 1}
    taken = {shape[1] for shape in shapes if len(shape) > 1}
    for world in (one for one in range(2, count + 1) if count % one == 0):
        parts = {part for width in taken for part in (width // world, -(-width // world)) if part > 1} - taken
        yield sum(shape[0] in parts for shape in shapes), sum(shape[0] in taken for shape in shapes)


def are_ends(files: Sequence[Tensors]) -> bool:
    """
    Return whether only the first file has tensors before the layers of a model, and only the last has some after them.

    For two files, names or the order in them must show it; of files between, it is enough that they have neither.
    """
    kin = [[_LAYER.sub("#", name) for name in names] for names in files]
    shared = {*kin[0]} & {*kin[-1]}
    if any("#" in one for one in shared) and not any({*one} - shared for one in kin[1:-1]):
        before, after = ([one for one in own if one not in shared] for own in (kin[0], kin[-1]))
        told = [tuple(any(map(end.search, own)) for end in _ENDS) for own in (before, after)]
        in_order = kin[0][: len(before)] == before and kin[-1][-len(after) :] == after
        return bool(before and after) and (len(files) > 2 or in_order or {*told} == {(True, False), (False, True)})
    return False


def go_on(one: Tensors, other: Tensors, *, says_rank: bool) -> bool:
    """
    Return whether names continue in the next file: no name is in both, or layers that are in one file alone continue.

    Where no word marks the files as parts, these are most of the names, and most have the shapes of those before.
    """
    first, second = one.keys() - other.keys(), other.keys() - one.keys()
    kin = [{of for name in names for of in (_LAYER.sub("#", name), name.rpartition(".")[0])} for names in (one, other)]
    if says_rank and one.keys().isdisjoint(other.keys()) and any("." in of for of in kin[0] & kin[1]):
        return True
    layers = [_layers(names, own) for names, own in ((first, one), (second, other))]
    both = {kin: (layers[0][kin], layers[1][kin]) for kin in layers[0].keys() & layers[1].keys()}
    are_several = any(len(a) > 1 and len(b) > 1 for a, b in both.values())
    if says_rank:
        return are_several and all(max(a) < min(b) or max(b) < min(a) for a, b in both.values())
    alike = {kin for kin, (a, b) in both.items() if not {*a.values()}.isdisjoint(b.values())}
    going_on = sum(any(kin in alike for kin, _ in _numbered(name)) for name in first)
    are_most = are_several or min(len(first), len(second)) > len(one.keys() & other.keys())
    return are_most and all(max(a) < min(b) for a, b in both.values()) and 2 * going_on >= max(len(first), 1)


def _numbered(name: str) -> Iterator[tuple[str, int]]:
    """Yield each number of a layer in a name, after the rest of the name; of layers and experts, both."""
    for one in islice(_LAYER.finditer(name), _NESTED):
        yield f"{name[: one.start()]}#{name[one.end() :]}", int(one[0])


def _layers(names: Iterable[str], tensors: Tensors) -> dict[str, dict[int, tuple[int, ...]]]:
    """Return the shapes of layers, by the rest of their names and by their numbers."""
    found: dict[str, dict[int, tuple[int, ...]]] = {}
    for name in names:
        for kin, number in _numbered(name):
            found.setdefault(kin, {})[number] = tensors[name].shape
    return found


def later_layers(tensors: Tensors) -> str:
    """
    Return which layers are most of the file, if the first ones of their stack are missing; an empty text otherwise.

    The layers of a stack have the same matrices, and consecutive numbers.
    """
    matrices = [name for name, info in tensors.items() if len(info.shape) > 1 and name.endswith(_LEARNT)]
    if all(_is_begun(name, tensors) for name in matrices[:: len(matrices) // _SAMPLE + 1]):
        return ""  # so it is in whole models; what follows takes longer
    begun = {name[: one.start()] for name in tensors for one in islice(_FIRST.finditer(name), _NESTED)}
    later = {
        kin: own
        for kin, own in _layers(matrices, tensors).items()
        if kin.partition("#")[0] not in begun
        if len({*own.values()}) == 1 < len(own) == max(own) - min(own) + 1
        if 1 not in own[min(own)][:2]
    }
    if sum(map(len, later.values())) < max(_LEAST, len(matrices) / 2) or any(map(_ADDED.search, matrices)):
        return ""
    kin, own = next(iter(later.items()))
    return f"the layers {min(own)} to {max(own)} of {kin!r}, without those before"


def _is_begun(name: str, tensors: Tensors) -> bool:
    """Return whether layer 0 or layer 1 exists for each number in a name."""
    numbers = islice(_LAYER.finditer(name), _NESTED)
    return all(any(f"{name[: one.start()]}{first}{name[one.end() :]}" in tensors for first in "01") for one in numbers)


def _tells(name: str, one: Tensors, other: Tensors) -> bool | None:
    """Return whether tensors are equal copies; None if they are equal and untrained: all zeros, or all ones."""
    data, size = _heads(name, one, other)[0], one[name].dtype.itemsize
    is_new = data == data[:size] * (len(data) // size)
    same = one[name].shape == other[name].shape and are_equal(name, one, other)
    return None if is_new and same else same


def are_equal(name: str, one: Tensors, other: Tensors) -> bool:
    """Return whether tensors are equal in the bytes that are compared."""
    return len({*_heads(name, one, other)}) == 1


def _are_alike(name: str, one: Tensors, other: Tensors) -> bool:
    """Return whether tensors are of one training at two times: many elements have the same sign and exponent."""
    size = one[name].dtype.itemsize
    first, second = _heads(name, one, other)
    count = min(len(first), len(second)) // size
    mask = 0xF0 if size > 4 else 0  # of float64, in whose first byte there is no more than half of the exponent
    ends = range(size - 1, count * size, size)
    same = sum(first[end] == second[end] and not (first[end - 1] ^ second[end - 1]) & mask for end in ends)
    # Training changes few signs and exponents. Unrelated weights agree in half of the signs, so in fewer of both.
    return 5 * same >= 2 * count


def _heads(name: str, *files: Tensors) -> list[bytes]:
    """Return the first bytes of two tensors, as many as are compared; empty if one has no storage."""
    nbytes = _SMALL_NBYTES if files[0][name].nbytes <= _SMALL_NBYTES else _HEAD_NBYTES
    are_there = all(one[name].storage is not None for one in files)
    return [next(LazyTensor(name, one[name]).chunks(nbytes), b"") if are_there else b"" for one in files]
