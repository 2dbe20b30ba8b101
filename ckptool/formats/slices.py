"""
Slices of tensor parallelism and FSDP, and stages of pipelines: files that each hold a part of the tensors of one model.

    consolidated.00.pth, consolidated.01.pth                    Meta's models
    reshard-model_part-0.pt, reshard-model_part-1.pt            metaseq
    model-rank-0-part-0.safetensors                             vLLM's sharded state
    rank0.safetensors, model.tp1.pt, tp_rank_00_pp_rank_00.pt   and whatever else numbers its ranks
    stage_0.pt, model_1_of_2.pt, worker1.pt, 0.pt               or says less
    model-0-2.pt, layers_0-3.pt                                 or counts, or has ranges of layers
    mp_rank_00/model_weights.ckpt, host0/dev1/model.pt          in folders, too

Which tensors are cut, and along which dimension, is in the model alone: nothing is put together. What looks like a
slice and is none are copies of one file, and files of one training at different times: the numbers of these are not
those of ranks, or they differ in what ranks have copies of.

What is one of a set otherwise (a shard, what one process wrote, what is kept beside the pieces of tensors) is known by
its name, and by those in its folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import pairwise
from math import prod
from shlex import join
from typing import Final, NamedTuple

from ckptool.checkpoints.parsed import Parsed, PartOf, Remark
from ckptool.errors import CkptoolError, Failure, UnsupportedFeature
from ckptool.formats import filenames, sharded
from ckptool.formats.filenames import ADAPTER
from ckptool.formats.probe import Probe
from ckptool.formats.safetensors import OF_PIECES
from ckptool.formats.settings import hollow_adapter, settings_beside
from ckptool.formats.sharded import begins_at_zero
from ckptool.messages import counted, show, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.sources.files import FileSource
from ckptool.sources.paths import directory_entries, first_bytes
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, is_size

_KNOWN: Final = re.compile(
    r"(?:.*/)?consolidated\.(\d{2,3})\.(?:pth|pt|safetensors)|.*-model_part-(\d{1,4})(?:-shard\d+)?\.pt|"
    r"(?:.*/)?model-rank-(\d{1,4})-part-\d{1,5}\.safetensors|(?:.*/)?mp_rank_(\d{2,4})_model_states\.pt"
)
"""Names that only slices have, or what there is one of."""
_OF_MODEL_PARALLEL: Final = re.compile(r"model_(?:optim_)?rng\.pt|mp_rank_\d+_model_states\.pt")
_RANKED: Final = re.compile(
    r"(?:^|(?<=[\W_\d]))(?:tp|mp|pp|rank|shard|part|partition|slice|stage|chunk|piece|fsdp|gpu|device|(?:tensor|model)[._-]?parallel)"
    r"(?:[._-]?rank)?[._-]?(\d{1,18})(?=[\W_]|$)|(?<!\d)(\d{1,18})(?=[._-]?of[._-]?\d)",
    re.IGNORECASE,
)
"""A number in a name that is that of a rank, as a word says."""
_OF_ONE: Final = re.compile(
    r"tp|mp|pp|rank|shard|slice|fsdp|partition|parallel|(?:part|stage)[._-]?0+(?!\d)", re.IGNORECASE
)
"""Words of files that are of one model, however much they differ; the last two where they begin at 0."""
_NUMBER: Final = re.compile(r"(?<!\d)\d{1,18}(?!\d)")
_LAST: Final = re.compile(r"[ ._-]?(?:(?<!\d)\d{1,4}|\(\d{1,4}\))(?=\.\w+\Z)")
"""The number of what was saved beside a file without one."""
_NO_RANK: Final = re.compile(r"(?:epochs?|steps?|iter(?:ation)?s?|folds?|seeds?|version|lora)[\W_]*\Z", re.IGNORECASE)
"""Words in front of numbers that are none of ranks."""
_ALONE: Final = re.compile(
    r"(?:^|(?<=[\W_\d]))(?:(?:tp|mp(?![34])|pp|rank|shard|partition|slice)(?:[._-]?rank)?[._-]?0*[1-9]\d{0,2}|"
    r"(?:world[._-]?size[._-]?|\d[._-]?of[._-]?)0*(?:[2-9]|[1-9]\d))(?=[\W_]|$)",
    re.IGNORECASE,
)
"""Names of files that there are several of."""
_FLAT: Final = re.compile(r"(?:.*\.)?_?flat_params?(?:[._]\d+)?", re.DOTALL)
"""The parameters of a unit of FSDP, one behind the other, or what one process has of them."""
_LAYER: Final = re.compile(r"\b\d+(?=\.)")
_LEARNT: Final = ("weight", "bias", "scale", "gamma", "beta")
"""How the names end of what training changes: masks and positions are equal in all files of a model."""
_ENDS: Final = (re.compile(r"emb|wte|stem"), re.compile(r"head|output|final"))
"""What the first stage of a pipeline has in its names, and the last."""
_SMALL_NBYTES: Final = 1 << 16
_HEAD_NBYTES: Final = 1 << 12
"""What is compared of a tensor that is not small."""
_MOST: Final = 12
"""Tensors of a kind that are compared."""
_OF_FSDP: Final = "flat parameters of FSDP, or a part of them: only the model knows their names and shapes"
_MOST_SIBLINGS: Final = 4096
_FEW: Final = 64
_DEEPEST: Final = 2
"""Folders above a file that may be those of ranks."""
_WHAT: Final = "files that each hold a slice of most tensors, as tensor parallelism and FSDP save them"
SIZES: Final = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
"""What the arguments of a training with Megatron call the sizes of its groups."""


class _Set(NamedTuple):
    """The files whose names differ from that of one file in numbers alone."""

    files: Sequence[str]
    """In the order of their numbers, that one among them; before 1 or 2 that without a number, if there is one."""
    places: Sequence[int]
    """Which of the numbers differ."""
    nearest: Sequence[str]
    """The others to compare it with: one for each of these numbers."""
    gap: str
    """Which numbers between the first and the last are not there, in words; nothing if all are."""
    total: int = 1
    """How many files there are, with those that are not there."""


@lru_cache(maxsize=1 << 14)  # each of thousands of files is compared with all others
def _spans(name: str) -> tuple[tuple[int, int], ...]:
    """Return where the numbers in a name are that may be those of ranks."""
    if (known := _KNOWN.fullmatch(name)) is not None:
        return (known.span(known.lastindex or 0),)
    ranked = {one.start(one.lastindex or 0) for one in _RANKED.finditer(name)}
    found = _NUMBER.finditer(name)
    return tuple(one.span() for one in found if one.start() in ranked or not _NO_RANK.search(name[: one.start()]))


@lru_cache(maxsize=1 << 14)
def _numbers(name: str) -> tuple[str, tuple[int, ...]]:
    """Return a name without the numbers of ranks in it, and these."""
    pattern = name
    for start, end in reversed(_spans(name)):
        pattern = f"{pattern[:start]}#{pattern[end:]}"
    return pattern, tuple(int(name[start:end]) for start, end in _spans(name))


def _set_of(name: str, names: Iterable[str]) -> _Set:
    """
    Return the set that a file may be one of, going by names: numbers from 0 or 1 of which most are there, or ranges.

    ``layers_0-3.pt`` and ``layers_4-7.pt`` are ranges.
    """
    bare = _LAST.sub("", name)
    beside = min((one for one in names if one != bare == _LAST.sub("", one)), default=name) if name == bare else name
    pattern, own = _numbers(beside)
    found = {one: _numbers(one) for one in names if own and one.startswith(pattern.partition("#")[0])}
    alike = {one: numbers for one, (other, numbers) in found.items() if other == pattern} | {beside: own}
    lowest = min(alike.values())
    if len(own) == len(_numbers(bare)[1]) + 1 and lowest[-1] in (1, 2) and (name == bare or bare in names):
        alike[bare] = (*lowest[:-1], lowest[-1] - 1)
    own = alike.get(name, ())
    if not own or len(alike) > _MOST_SIBLINGS:
        return _Set((name,), (), (), "")
    is_known = _KNOWN.fullmatch(name) is not None
    rows: dict[int, dict[int, str]] = {}
    for place in range(len(own)):
        rest = own[:place], own[place + 1 :]
        row = {of[place]: one for one, of in alike.items() if (of[:place], of[place + 1 :]) == rest}
        if len(row) > 1 and (is_known or _are_ranks(row)):
            rows[place] = row
    if rows:
        files = [one for one, of in alike.items() if all(of[at] == own[at] for at in range(len(own)) if at not in rows)]
        count = prod(max(row) - min(row) + 1 for row in rows.values())
        nearest = [
            min((one == bare, number, one) for number, one in row.items() if one != name)[2] for row in rows.values()
        ]
        missing = [one for row in rows.values() for one in range(min(row), max(row)) if one not in row]
        return _Set(sorted(files, key=alike.__getitem__), [*rows], nearest, _gap(missing), count)
    files = sorted(alike, key=alike.__getitem__)
    places = [place for place, column in enumerate(zip(*alike.values(), strict=True)) if len({*column}) > 1]
    missing = []
    if _are_ranges([alike[one] for one in files], places):
        first, last = places
        missing = [at for a, b in pairwise(files) for at in range(alike[a][last] + 1, alike[b][first])]
    elif not _are_diagonal(alike.values(), places):
        return _Set((name,), (), (), "")
    at = files.index(name)
    return _Set(files, places, files[at + 1 : at + 2] or files[at - 1 : at], _gap(missing), len(files))


def _gap(missing: Sequence[int]) -> str:
    shown = some([str(one) for one in missing])
    return f" ({'number' if len(missing) == 1 else 'numbers'} {shown} not there)" if missing else ""


def _are_ranks(numbers: Iterable[int]) -> bool:
    there = sorted(numbers)
    return there[0] <= 1 and there[-1] - there[0] < 2 * len(there)


def _are_diagonal(numbers: Iterable[tuple[int, ...]], places: Sequence[int]) -> bool:
    """Say whether all numbers that differ count the files: ``node0/gpu0.pt``, ``node1/gpu1.pt``."""
    columns = [*zip(*numbers, strict=True)]
    return bool(places) and all(len({*columns[at]}) == len(columns[at]) and _are_ranks(columns[at]) for at in places)


def _are_ranges(numbers: Sequence[tuple[int, ...]], places: Sequence[int]) -> bool:
    """Say whether two numbers in each name are a range that ends before that in the next name begins."""
    ranges = [tuple(one[at] for at in places) for one in numbers]
    return len(places) == 2 and ranges[0][0] <= 1 and all(a <= b <= c for (a, b), (c, _) in pairwise(ranges))


def part_of(
    name: str, place: str, names: Iterable[str], parsed: Parsed, opening: Callable[[str], Parsed]
) -> PartOf | None:
    """Return the slices that a file is one of, going by its name and by what is in the others; None if it is none."""
    if (shard := _shard(place, name, names)) is not None:
        return shard
    own = parsed.contents.tensors
    if any(map(_FLAT.fullmatch, own)):
        return PartOf(_OF_FSDP, place, is_slice=True)
    files, places, nearest, gap, count = _set_of(name, names)
    if not nearest or not own:
        return None
    what = PartOf(f"one of {len(files):,} {_WHAT}{gap}", place, is_slice=True)
    if _KNOWN.fullmatch(name):
        return what
    differ = [_spans(files[-1])[at][0] for at in places]
    ranked = [one for one in _RANKED.finditer(files[-1]) if one.start(one.lastindex or 0) in differ]
    says_one = bool(ranked) and any(_OF_ONE.search(one[0]) for one in _RANKED.finditer(files[0]))
    says = _Says(bool(ranked), says_one, count)
    found: str | bool = False
    for other in nearest:
        try:
            there = opening(other)
            has_bare = files[0] in (name, other) and len(_spans(files[0])) < len(_spans(files[-1]))
            if has_bare and not _have_shapes_of(own, there.contents.tensors):
                continue  # the file without a number may be what those with one are slices of
            read = {name: parsed, other: there}
            ends = [files[0], *files[1:-1][:1], files[-1]]
            are_ends = own.keys() != there.contents.tensors.keys() and _are_ends(
                [(read.get(one) or opening(one)).contents.tensors for one in ends]
            )
            if _are_slices(parsed, there, says, are_ends=are_ends):
                return what
            before, after = (parsed, there) if files.index(name) < files.index(other) else (there, parsed)
            if _go_on(before.contents.tensors, after.contents.tensors, says_rank=says.rank):
                found = "with other tensors each"
        except Failure:
            found = found or (says.one and f"of which {other!r} cannot be read")
    return PartOf(f"one of {len(files):,} files, by their names, {found}{gap}", place, is_slice=True) if found else None


class _Says(NamedTuple):
    """What names say of the files of a set."""

    rank: bool
    """The numbers are those of ranks."""
    one: bool
    """They are of one model."""
    files: int


def _shard(place: str, name: str, names: Iterable[str]) -> PartOf | None:
    shard = filenames.shard_of(name)
    if shard is None or shard[2] <= 1:
        return None
    index = next((one for one in names if filenames.belongs_to(one, name)), "")
    whole = os.path.join(place, index) if index and place else place
    remedy = f"Give {show(whole)}, with all of them." if whole else "Unpack the archive, and give the folder."
    return PartOf(f"shard {shard[1]:,} of {shard[2]:,}", whole, True, remedy)


def with_alone(parsed: Parsed, name: str, place: str, names: Sequence[str]) -> Parsed:
    """Return what was read of a file with what its name says, or what it holds, where no other is there."""
    own, what, remedy = parsed.contents.tensors, "", ""
    if parsed.shards:
        unnamed = filenames.unnamed([one.name for one in parsed.shards], names)
        what = f"an index that does not name {some(unnamed)} of the same set" if unnamed else ""
        remedy = "Get the index again, or remove what is left from another save."
    elif (text := parsed.metadata.get(OF_PIECES)) and (name.startswith("shard-") or not begins_at_zero(text)):
        what, remedy = "pieces of tensors, as one rank wrote them", f"Give {show(place)}, the folder with all of them."
    elif any(map(_FLAT.fullmatch, own)):
        what = _OF_FSDP
    elif _set_of(name, names).nearest or not own:
        return parsed
    elif _OF_MODEL_PARALLEL.fullmatch(name) and (count := ranks_said(parsed.root)) > 1:
        what = f"one of {count:,} ranks of model parallelism, as it says itself"
    elif _KNOWN.fullmatch(name):
        (number,) = _numbers(name)[1]
        what = f"number {number} of {_WHAT}, going by its name" if number else ""
        if not number and not name.startswith("mp_rank"):  # of which most runs of DeepSpeed have the first alone
            first = f"going by its name, the first or the only one of {_WHAT}: nothing says how many there were"
            return parsed._replace(remarks=(*parsed.remarks, Remark("CK145", first)))
    elif any("lora" in one.lower() for one in own):
        return parsed
    elif (one := _ALONE.search(name)) and not _NO_RANK.search(name[: one.start()]):
        what = "one of several files, going by its name, the others of which are not there"
    return parsed._replace(part_of=PartOf(what, place, True, remedy)) if what else parsed


def ranks_said(root: Inert) -> int:
    """Return how many ranks of model parallelism saved a file each, as one of them says: Megatron's, or DeepSpeed's."""
    world = nodes.lookup(nodes.mapping_pairs(root) or [], "mp_world_size")
    return world if is_size(world) and world else prod(arguments(root).get(size, 1) for size in SIZES[:2])


def arguments(root: Inert) -> dict[str, int]:
    """Return the sizes of the parallel groups, as the arguments of the training have them."""
    found = nodes.lookup(nodes.mapping_pairs(root) or [], "args")
    args = nodes.mapping_pairs(found) or nodes.attribute_pairs(found)
    sizes = {name: nodes.lookup(args, name) for name in SIZES}
    return {name: size for name, size in sizes.items() if is_size(size) and 0 < size < 1 << 20}


def together(found: Mapping[str, Parsed]) -> str | None:
    """Return why files of a folder are no checkpoints but parts of one; None if none of them are."""
    inside = {name: one for name, one in found.items() if not one.inside}
    inside |= {f"{name}/{below}": one for name, listed in found.items() for below, one in listed.inside.items()}
    for name, parsed in {_numbers(name)[0]: (name, parsed) for name, parsed in reversed([*inside.items()])}.values():
        part = part_of(name, "", inside, parsed, inside.__getitem__)
        if part is None:
            continue
        files, gap = _set_of(name, inside).files, _set_of(name, inside).gap
        if name not in found and len({one.partition("/")[0] for one in files}) == 1:
            continue  # the listed folder that they are in says so itself
        are_slices = _WHAT in part.what
        what = f"{counted(len(files), 'file')} are {'slices' if are_slices else 'parts'} of one model{gap}"
        why = ". Which tensors are cut, and along which dimension, is not in them" if are_slices else ""
        return f"{what}: {some(list(map(repr, files)))}{why}"
    return None


def _are_slices(one: Parsed, other: Parsed, says: _Says, *, are_ends: bool) -> bool:
    """
    Say whether two files hold slices of one model, as far as a few small tensors, and the first bytes of others, tell.

    Ranks have copies of what is not cut, such as norms, and most of the matrices are as different as those of two
    models are. Where names do not say that they are of ranks, most norms have to be copies. Ranks of FSDP, which cuts
    everything along the first dimension, and stages that number their layers from 0 have no copies: there, names
    tell that they are of one model, of the files or of what the first and the last stage have (``are_ends``), or the
    shapes do. Whole models are those whose layers fit each other, with what is before or after them.
    """
    first, second = one.contents.tensors, other.contents.tensors
    names = [name for name in first if name in second and _could_be_cut(first[name], second[name])]
    learnt = [name for name in names if name.endswith(_LEARNT)]
    small = [name for name in learnt if 1 < first[name].nbytes <= _SMALL_NBYTES and len(first[name].shape) == 1]
    large = [name for name in learnt or names if len(first[name].shape) > 1]
    vectors = [_tells(LazyTensor(name, first[name]), LazyTensor(name, second[name])) for name in small[:_MOST]]
    copies = [name for name, is_copy in zip(small, vectors, strict=False) if is_copy]
    if copies:
        is_certain = says.rank or (len(copies) >= vectors.count(False) and (copies[1:] or "norm" in "".join(copies)))
        is_certain = is_certain and 3 * len(names) >= 2 * max(len(first), len(second))
    else:
        says_one = says.one and (False in vectors or not small) and not _is_whole(first, second, says.files)
        is_certain = all(
            (
                are_ends or says_one or _is_cut(first, says.files),
                2 * len(names) >= min(len(first), len(second)),
                all(first[name].shape[1:] == second[name].shape[1:] for name in names),
                any(name in learnt or "." in name for name in names),
            )
        )
        large = large or small
    if not is_certain:
        return False
    same = [_are_alike(LazyTensor(name, first[name]), LazyTensor(name, second[name])) for name in large[:_MOST]]
    return len(same) > (not says.rank) and 2 * sum(same) <= len(same) - says.rank


def _is_cut(tensors: Mapping[str, TensorInfo], count: int) -> bool:
    """
    Say whether all tensors are cut along their first dimension, by a number of files that divides ``count``.

    What a layer gives is then less than what the next one takes, and a norm has fewer elements than any layer takes.
    """
    # Layers side by side, on one body, seem to be cut; but not in two ways.
    return any(len(cut) > 1 and (not whole or len({*cut}) > max(1, len(whole))) for cut, whole in _cuts(tensors, count))


def _is_whole(one: Mapping[str, TensorInfo], other: Mapping[str, TensorInfo], count: int) -> bool:
    """
    Say whether two files hold the same model, none of whose layers is cut, with matrices outside its layers.

    Where all have numbers, it is none that could go on where it begins: the last layer gives not what the first takes.
    """
    matrices = [(_LAYER.sub("#", name), info.shape) for name, info in one.items() if len(info.shape) > 1]
    are_varied = len({*matrices}) > len({kin for kin, _ in matrices}) and matrices[0][1][1] != matrices[-1][1][0]
    has_ends = are_varied or any("#" not in kin for kin, _ in matrices)
    are_same = has_ends and one.keys() == other.keys() and _have_shapes_of(one, other)
    return are_same and all(whole and not cut for cut, whole in _cuts(one, count))


def _have_shapes_of(one: Mapping[str, TensorInfo], other: Mapping[str, TensorInfo]) -> bool:
    return all(one[name].shape == other[name].shape for name in one.keys() & other.keys())


def _cuts(tensors: Mapping[str, TensorInfo], count: int) -> Iterator[tuple[list[tuple[int, int]], set[int]]]:
    """Yield what is cut for each number of files that divides ``count``, and what is not: what layers give and take."""
    learnt = [(name, info.shape) for name, info in tensors.items() if name.endswith(_LEARNT) and info.numel > 1]
    taken = {shape[1] for _, shape in learnt if len(shape) > 1}
    for world in (one for one in range(2, count + 1) if count % one == 0):
        cut, whole, given = list[tuple[int, int]](), set[int](), 0
        for name, shape in learnt:
            if len(shape) > 1 and shape[1] == given:
                whole.add(given)
            elif len(shape) > 1 and _is_part(given, shape[1], world):
                cut.append((given, shape[1]))
            elif name.endswith("bias"):
                continue
            elif len(shape) == 1 and shape[0] not in taken and any(_is_part(shape[0], one, world) for one in taken):
                cut.append((shape[0], 0))
            given = shape[0]
        yield cut, whole


def _is_part(given: int, taken: int, world: int) -> bool:
    return 1 < given != taken and given in (-(-taken // world), taken // world)


def _could_be_cut(one: TensorInfo, other: TensorInfo) -> bool:
    is_like = one.dtype == other.dtype and len(one.shape) == len(other.shape)
    return is_like and sum(a != b for a, b in zip(one.shape, other.shape, strict=True)) <= 1


def _are_ends(files: Sequence[Mapping[str, TensorInfo]]) -> bool:
    """
    Say whether the first of some files alone has what is before the layers of a model, and the last what is after them.

    Names tell of two files, or the order in them; where others are between them, it is enough that these have neither.
    """
    kin = [[_LAYER.sub("#", name) for name in names] for names in files]
    shared = {*kin[0]} & {*kin[-1]}
    if any("#" in one for one in shared) and not any({*one} - shared for one in kin[1:-1]):
        before, after = ([one for one in own if one not in shared] for own in (kin[0], kin[-1]))
        told = [tuple(any(map(end.search, own)) for end in _ENDS) for own in (before, after)]
        in_order = kin[0][: len(before)] == before and kin[-1][-len(after) :] == after
        return bool(before and after) and (len(files) > 2 or in_order or {*told} == {(True, False), (False, True)})
    return False


def _go_on(one: Mapping[str, TensorInfo], other: Mapping[str, TensorInfo], *, says_rank: bool) -> bool:
    """
    Say whether names go on in the next file: no name is in both, or layers that are in one alone do.

    Where no word says that they are parts, these are most of what is there, and most have the shapes of those before.
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
    """Yield each number of a layer in a name, behind the rest of it; of two numbers, of layers and experts, both."""
    for one in _LAYER.finditer(name):
        yield f"{name[: one.start()]}#{name[one.end() :]}", int(one[0])


def _layers(names: Iterable[str], tensors: Mapping[str, TensorInfo]) -> dict[str, dict[int, tuple[int, ...]]]:
    """Return the numbers and the shapes of layers, by the rest of their names."""
    found: dict[str, dict[int, tuple[int, ...]]] = {}
    for name in names:
        for kin, number in _numbered(name):
            found.setdefault(kin, {})[number] = tensors[name].shape
    return found


def _tells(one: LazyTensor, other: LazyTensor) -> bool | None:
    """Say whether vectors are equal as copies are; None of what training has not changed: all zeros, or all ones."""
    data = next(one.chunks(_SMALL_NBYTES), b"") if one.info.storage is not None else b""
    is_new = data == data[: len(data) // one.info.numel] * one.info.numel
    are_equal = one.shape == other.shape and _are_equal(one, other)
    return None if is_new and are_equal else are_equal


def _are_equal(one: LazyTensor, other: LazyTensor) -> bool:
    """Say whether tensors are equal, as far as they are compared."""
    return len({*_heads(one, other)}) == 1


def _are_alike(one: LazyTensor, other: LazyTensor) -> bool:
    """Say whether tensors are of two times of one training: many elements have the same sign and exponent."""
    size = one.info.dtype.itemsize
    first, second = _heads(one, other)
    count = min(len(first), len(second)) // size
    mask = 0xF0 if size > 4 else 0  # of float64, in whose first byte there is no more than half of the exponent
    ends = range(size - 1, count * size, size)
    same = sum(first[end] == second[end] and not (first[end - 1] ^ second[end - 1]) & mask for end in ends)
    return 5 * same >= 2 * count


def _heads(one: LazyTensor, other: LazyTensor) -> list[bytes]:
    """Return the first bytes of two tensors, as many as are compared; none of those without any."""
    nbytes = _SMALL_NBYTES if one.info.nbytes <= _SMALL_NBYTES else _HEAD_NBYTES
    are_there = one.info.storage is not None and other.info.storage is not None
    return [next(of.chunks(nbytes), b"") if are_there else b"" for of in (one, other)]


INDEX: Final = "metadata.pkl"
OF_RANK: Final = re.compile(r"(?P<item>.+)_(?P<rank>\d{1,6})\.pt")
"""The index of ``torch_checkpointing``, and its other files."""
HEAD_NBYTES: Final = 1 << 16
MARKS: Final = (b"sharding_metadata", b"world_size")
"""What is at the beginning of that index, and of no other file of its name."""
_DISTCP: Final = ".distcp"
_RANK: Final = re.compile(r"mp_rank_[0-9_]+")


def with_set(path: str, parsed: Parsed, probe: Probe) -> Parsed:
    """Return what was read of a file with the set that it is one of, unless it is whole, or there alone."""
    place, name = os.path.split(path)
    names = directory_entries(place or ".")
    if name.startswith("adapter_model.") and ADAPTER in names:
        return parsed._replace(remarks=(*parsed.remarks, *hollow_adapter(settings_beside(path, probe.source), parsed)))
    found = _named(place or ".", name, names)
    if filenames.role_of(name):
        return parsed._replace(part_of=found)
    slice_of = _slice_of(place or ".", name, names, parsed, probe)
    if found is not None and slice_of is not None:
        found = found._replace(what=f"{found.what}{_set_of(name, names).gap}", is_slice=slice_of.is_slice)
    if found is not None and _OF_MODEL_PARALLEL.fullmatch(name) and not found.is_slice and _is_rounded(parsed, names):
        found = found._replace(what=f"{found.what}, with rounded weights", is_slice=True)
    elif filenames.named(name).of == filenames.OF_PROCESSES and _is_copy(place or ".", name, names, parsed, probe):
        found = None
    found = found or slice_of or of_ranks(path, parsed, probe)
    return with_alone(parsed, name, place or ".", names) if found is None else parsed._replace(part_of=found)


def _is_rounded(parsed: Parsed, names: Sequence[str]) -> bool:
    """Say whether the weights of an engine of DeepSpeed are of 16 bits, where those of its optimizer are beside it."""
    are_narrow = any(info.dtype.name in ("float16", "bfloat16") for info in parsed.contents.tensors.values())
    return are_narrow and any(one.endswith("_optim_states.pt") for one in names)


def of_ranks(path: str, parsed: Parsed, probe: Probe) -> PartOf | None:
    """Return the slices that a file is one of where each lies in or below the folder of a rank; None if it is none."""
    above, name = os.path.split(os.path.abspath(path))
    folders: list[str] = []
    for _ in range(_DEEPEST):
        above, own = os.path.split(above)
        folders.insert(0, own)
        if not _spans(own):
            continue
        found = [""]
        for one in folders:
            found = [f"{at}{there}/" for at in found for there in _like(os.path.join(above, at), one)][:_MOST_SIBLINGS]
        inside, own_name = [f"{one}{name}" for one in found], "/".join((*folders, name))
        # Of thousands of folders, each file in one asks: the nearest first, and all only if that is of the same model.
        part, nearest = None, _set_of(own_name, inside).nearest
        if all(os.path.isfile(os.path.join(above, one)) for one in nearest):
            part = _slice_of(above, own_name, inside, parsed, probe)
        if part is not None or len(nearest) > 1 or len(inside) <= _FEW:
            names = [one for one in inside if os.path.isfile(os.path.join(above, one))]
            part = _slice_of(above, own_name, names, parsed, probe) if len(names) > 1 else None
        if part is not None:
            return part._replace(path=os.path.relpath(above) if not os.path.isabs(path) else above)
    return None


def of_hosts(parsed: Parsed, probe: Probe) -> Parsed:
    """Return what was read of a folder of several checkpoints: parts, if those in the folders beside it say so."""
    first = next(iter(parsed.inside.values()), None)
    path = getattr(first and first.source, "path", None)
    part = of_ranks(path, first, probe) if first and path and parsed.unmerged is None else None
    return parsed if part is None else parsed._replace(unmerged=f"each is {part.what}", part_of=part)


def _like(place: str, folder: str) -> Sequence[str]:
    """Return the folders that are called like one, up to numbers."""
    pattern, numbers = _numbers(folder)
    return (
        [one for one in directory_entries(place, folders=True) if _numbers(one)[0] == pattern] if numbers else [folder]
    )


def _slice_of(place: str, name: str, names: Sequence[str], parsed: Parsed, probe: Probe) -> PartOf | None:
    with _opening(place, probe) as opening:
        return part_of(name, place, names, parsed, opening)


def _is_copy(place: str, name: str, names: Sequence[str], parsed: Parsed, probe: Probe) -> bool:
    """Say whether the next file of a set holds the same tensors, as far as they are compared."""
    own = parsed.contents.tensors
    try:
        with _opening(place, probe) as opening:
            there = opening(_set_of(name, names).nearest[0]).contents.tensors
            are_there = bool(own) and all(info.storage is not None for info in own.values())
            are_alike = are_there and own.keys() == there.keys() and _have_shapes_of(own, there)
            return are_alike and all(_are_equal(LazyTensor(one, own[one]), LazyTensor(one, there[one])) for one in own)
    except (Failure, IndexError):
        return False


@contextmanager
def _opening(place: str, probe: Probe) -> Iterator[Callable[[str], Parsed]]:
    with ExitStack() as stack:

        def opening(other: str) -> Parsed:
            source = FileSource(os.path.join(place, other), probe.limits.cancellation)
            stack.callback(source.close)
            return probe.beside(source).read()

        yield opening


def _named(place: str, name: str, names: Sequence[str]) -> PartOf | None:
    """Return the set that a file is one of, going by the names in its folder."""
    if (shard := _shard(place, name, names)) is not None:
        return shard
    if name.startswith("model_") and (found := rank_of_megatron(place)) is not None:
        return found
    if (what := filenames.set_of(name, names)) or _is_of_item(place, name, names):
        is_slice = not what or name.startswith("layer_")
        return PartOf(what or "one of the files of torch_checkpointing", place, is_slice=is_slice)
    return None


def _is_of_item(place: str, name: str, names: Sequence[str]) -> bool:
    """Say whether a file is the index of ``torch_checkpointing``, or one of several files of an item beside it."""
    match = OF_RANK.fullmatch(name)
    of_item = [one for one in map(OF_RANK.fullmatch, names) if one and match and one["item"] == match["item"]]
    if INDEX not in names or not (name == INDEX or len(of_item) > 1):
        return False
    head = first_bytes(os.path.join(place, INDEX), HEAD_NBYTES)
    return any(mark in head for mark in MARKS)


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
    there = filenames.other_set(name, names) if sharded.lacks_all(error) else None
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
