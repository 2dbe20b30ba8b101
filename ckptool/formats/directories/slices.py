"""
Slices of tensor parallelism: files with the same names of tensors, each of which holds a part of most of them.

    consolidated.00.pth, consolidated.01.pth                    Meta's models
    reshard-model_part-0.pt, reshard-model_part-1.pt            metaseq
    model-rank-0-part-0.safetensors                             vLLM's sharded state
    rank0.safetensors, model.tp1.pt, tp_rank_00_pp_rank_00.pt   and whatever else numbers its ranks
    mp_rank_00/model_weights.ckpt, gpu0/model.pt                in folders, too

Which tensors are cut, and along which dimension, is in the model alone: nothing is put together. What looks like a
slice and is none are copies of one file, and files of one training at different times: the numbers of these are not
those of ranks, or they differ in what ranks have copies of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from ckptool.checkpoints.companions import PartOf, Remark
from ckptool.checkpoints.parsed import Parsed
from ckptool.errors import Failure
from ckptool.messages import counted, some
from ckptool.tensors.reading import LazyTensor

_KNOWN: Final = re.compile(
    r"consolidated\.(\d{2,3})\.(?:pth|pt|safetensors)|.*-model_part-(\d{1,4})(?:-shard\d+)?\.pt|"
    r"model-rank-(\d{1,4})-part-\d{1,5}\.safetensors|mp_rank_(\d{2,4})_model_states\.pt"
)
"""Names that only slices have, or what there is one of."""
_NUMBER: Final = re.compile(
    r"(?:^|(?<=[\W_\d]))(?:tp|mp|pp|rank|shard|part|partition|slice|gpu|device|(?:tensor|model)[._-]?parallel)"
    r"(?:[._-]?rank)?[._-]?(\d{1,5})(?=[\W_]|$)",
    re.IGNORECASE,
)
"""A number in a name that may be that of a rank."""
_LAYER: Final = re.compile(r"\b\d+(?=\.)")
_LEARNT: Final = ("weight", "bias", "scale", "gamma", "beta")
"""How the names end of what training changes: masks and positions are equal in all files of a model."""
_SMALL_NBYTES: Final = 1 << 16
_HEAD_NBYTES: Final = 1 << 12
"""What is compared of a tensor that is not small."""
_MOST: Final = 12
"""Tensors of a kind that are compared."""
_MOST_SIBLINGS: Final = 4096
_WHAT: Final = "files that each hold a slice of most tensors, as tensor parallelism saves them"


def _numbers(name: str) -> tuple[str, tuple[int, ...]]:
    """Return a name without the numbers of ranks in it, and these."""
    known = _KNOWN.fullmatch(name)
    spans = [known.span(known.lastindex or 0)] if known is not None else [one.span(1) for one in _NUMBER.finditer(name)]
    pattern = name
    for start, end in reversed(spans):
        pattern = f"{pattern[:start]}#{pattern[end:]}"
    return pattern, tuple(int(name[start:end]) for start, end in spans)


def siblings(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that differ from one in numbers of ranks alone, in order, and it; none if most are not there."""
    pattern, own = _numbers(name)
    alike = [one for one in names if own and one.startswith(pattern.partition("#")[0])]
    if len(alike) > _MOST_SIBLINGS:
        return []
    found = {one: numbers for one in alike for other, numbers in [_numbers(one)] if other == pattern}
    for place in zip(*found.values(), strict=False):
        there = sorted(set(place))
        if _KNOWN.fullmatch(name) is None and (there[0] > 1 or there[-1] - there[0] >= 2 * len(there)):
            return []
    return sorted(found, key=found.__getitem__)


def gap_among(files: Iterable[str]) -> str:
    """Return which of the numbers of some files are not there, between the first and the last; nothing if all are."""
    places = [sorted(set(place)) for place in zip(*(_numbers(one)[1] for one in files), strict=False)]
    missing = [str(one) for there in places for one in sorted({*range(there[0], there[-1])}.difference(there))]
    return f" ({'number' if len(missing) == 1 else 'numbers'} {some(missing)} not there)" if missing else ""


def part_of(
    name: str, place: str, names: Iterable[str], parsed: Parsed, opening: Callable[[str], Parsed]
) -> PartOf | None:
    """Return the slices that a file is one of, going by its name and by what is in the others; None if it is none."""
    files, own = siblings(name, names), parsed.contents.tensors
    others = [one for one in files if one != name] if own else []
    gap = gap_among(files)
    what = PartOf(f"one of {len(files):,} {_WHAT}{gap}", place, is_slice=True)
    if others and _KNOWN.fullmatch(name):
        return what
    found = None
    for other in _nearest(name, others):
        with suppress(Failure):
            there = opening(other)
            if _are_slices(parsed, there):
                return what
            names_there = there.contents.tensors.keys()
            goes_on = own.keys().isdisjoint(names_there) and not _kin(own).isdisjoint(_kin(names_there))
            if parsed.form == there.form == "state_dict" and not gap and goes_on:
                found = PartOf(f"one of {len(files):,} files, by their names, with other tensors each", place)
    return found


def _nearest(name: str, others: Sequence[str]) -> list[str]:
    """Return a file for each of the numbers in a name that differs in this one alone."""
    own = _numbers(name)[1]
    found: dict[int, str] = {}
    for other in others:
        places = [place for place, pair in enumerate(zip(own, _numbers(other)[1], strict=False)) if pair[0] != pair[1]]
        if len(places) == 1:
            found.setdefault(places[0], other)
    return list(found.values())


def with_alone(parsed: Parsed, name: str, place: str, names: Sequence[str]) -> Parsed:
    """Return what was read of a file with what its name says, where it is that of a slice, and no other is there."""
    if _KNOWN.fullmatch(name) is None or len(siblings(name, names)) > 1 or not parsed.contents.tensors:
        return parsed
    number = _numbers(name)[1][0]
    if number:
        what = f"number {number} of {_WHAT}, going by its name"
        return parsed._replace(part_of=PartOf(what, place, is_slice=True))
    if name.startswith("mp_rank"):  # most runs of DeepSpeed have this one alone
        return parsed
    what = f"going by its name, the first or the only one of {_WHAT}: nothing says how many there were"
    return parsed._replace(remarks=(*parsed.remarks, Remark("CK145", what)))


def together(found: Mapping[str, Parsed]) -> str | None:
    """Return why files of a folder are no checkpoints but parts of one; None if none of them are."""
    for name, parsed in found.items():
        part = part_of(name, "", found, parsed, found.__getitem__)
        if part is not None:
            files = siblings(name, found)
            kind = f"{'slices' if part.is_slice else 'parts'} of one model{gap_among(files)}"
            what = f"{counted(len(files), 'file')} are {kind}"
            why = ". Which tensors are cut, and along which dimension, is not in them" if part.is_slice else ""
            return f"{what}: {some(list(map(repr, files)))}{why}"
    return None


def _are_slices(one: Parsed, other: Parsed) -> bool:
    """
    Say whether two files hold slices of one model, as far as a few small tensors, and the first bytes of others, tell.

    Ranks have copies of what is not cut, such as norms, and most of the matrices differ.
    """
    first, second = one.contents.tensors, other.contents.tensors
    if first.keys() != second.keys() or any(first[name].shape != second[name].shape for name in first):
        return False
    small = {name for name, info in first.items() if 1 < info.nbytes <= _SMALL_NBYTES and name.endswith(_LEARNT)}
    vectors, matrices = (
        [test(LazyTensor(name, first[name]), LazyTensor(name, second[name])) for name in names[:_MOST]]
        for test, names in (
            (_tells, [name for name in first if name in small and len(first[name].shape) == 1]),
            (_are_equal, [name for name in first if len(first[name].shape) > 1]),
        )
    )
    return any(vectors) and 2 * sum(matrices) < len(matrices)


def _kin(names: Iterable[str]) -> set[str]:
    """Return names without the numbers of layers, and modules: names that go on elsewhere have some in common."""
    return {kin for name in names for kin in (_LAYER.sub("#", name), name.rpartition(".")[0]) if "." in kin}


def _tells(one: LazyTensor, other: LazyTensor) -> bool:
    """Say whether vectors are equal as copies are: what training has not changed is all zeros, or ones, everywhere."""
    if one.info.storage is None or not _are_equal(one, other):
        return False
    data = next(one.chunks(_SMALL_NBYTES), b"")
    return data != data[: len(data) // one.info.numel] * one.info.numel


def _are_equal(one: LazyTensor, other: LazyTensor) -> bool:
    """Say whether tensors of the same shape are equal, as far as they are compared."""
    if one.info.dtype != other.info.dtype or one.info.storage is None or other.info.storage is None:
        return one.info.dtype == other.info.dtype
    nbytes = _SMALL_NBYTES if one.info.nbytes <= _SMALL_NBYTES else _HEAD_NBYTES
    return next(one.chunks(nbytes), b"") == next(other.chunks(nbytes), b"")
