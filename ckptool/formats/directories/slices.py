"""
Slices of tensor parallelism: files with the same names of tensors, each of which holds a part of most of them.

    consolidated.00.pth, consolidated.01.pth                    Meta's models
    reshard-model_part-0.pt, reshard-model_part-1.pt            metaseq
    model-rank-0-part-0.safetensors                             vLLM's sharded state
    rank0.safetensors, model.tp1.pt, tp_rank_00_pp_rank_00.pt   and whatever else numbers its ranks

Which tensors are cut, and along which dimension, is in the model alone: nothing is put together. What looks like a
slice and is none are copies of one file, and files of one training at different times: the numbers of these are not
those of ranks, or they differ in what ranks have copies of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from ckptool.checkpoints.companions import PartOf, Remark
from ckptool.checkpoints.parsed import Parsed
from ckptool.errors import Failure
from ckptool.messages import counted, some
from ckptool.tensors.reading import LazyTensor

_KNOWN: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"consolidated\.(\d{2,3})\.(?:pth|pt|safetensors)",
        r".*-model_part-(\d{1,4})(?:-shard\d+)?\.pt",
        r"model-rank-(\d{1,4})-part-\d{1,5}\.safetensors",
        r"mp_rank_(\d{2,4})_model_states\.pt",
    )
)
"""Names that only slices have, or what there is one of."""
_NUMBER: Final = re.compile(
    r"(?:^|(?<=[\W_\d]))(?:tp|mp|pp|rank|shard|part|slice|tensor_?parallel|model_?parallel)(?:[._-]?rank)?[._-]?"
    r"(\d{1,4})(?=[\W_])",
    re.IGNORECASE,
)
"""A number in a name that may be that of a rank."""
_SMALL_NBYTES: Final = 1 << 16
_HEAD_NBYTES: Final = 1 << 12
"""What is compared of a tensor that is not small."""
_MOST: Final = 12
"""Tensors of a kind that are compared; and files, with one."""


class Numbered(NamedTuple):
    """The name of a file, taken apart."""

    pattern: str
    """The name without its numbers: files with the same one differ in these alone."""
    numbers: tuple[int, ...]
    is_known: bool
    """Whether only slices have such names."""


def numbered(name: str) -> Numbered | None:
    """Return what the name of a file says; None if there is no number of a rank in it."""
    known = next((match for one in _KNOWN if (match := one.fullmatch(name))), None)
    found = [known] if known is not None else list(_NUMBER.finditer(name))
    if not found:
        return None
    pattern = name
    for match in reversed(found):
        pattern = f"{pattern[: match.start(1)]}#{pattern[match.end(1) :]}"
    return Numbered(pattern, tuple(int(match[1]) for match in found), known is not None)


def siblings_of(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that differ from one in their numbers alone, in order, and it; none if it has no number."""
    own = numbered(name)
    found = {one: its for one in names if own and (its := numbered(one)) and its.pattern == own.pattern}
    if own is None or not (own.is_known or _are_without_gaps([its.numbers for its in found.values()])):
        return []
    return sorted(found, key=lambda one: found[one].numbers)


def _are_without_gaps(numbers: Sequence[tuple[int, ...]]) -> bool:
    places = [sorted(set(place)) for place in zip(*numbers, strict=True)]
    return all(place == list(range(place[0], place[0] + len(place))) and place[0] in (0, 1) for place in places)


def part_of(
    name: str, place: str, names: Iterable[str], parsed: Parsed, opening: Callable[[str], Parsed]
) -> PartOf | None:
    """Return the slices that a file is one of, going by its name and by what is in the others; None if it is none."""
    files = siblings_of(name, names)
    others = [one for one in files if one != name]
    own = numbered(name)
    if own is None or not parsed.contents.tensors:
        return None
    what = PartOf(f"one of {len(files):,} {_WHAT}", place, is_slice=True)
    if others and own.is_known:
        return what
    for other in others[:_MOST]:
        with suppress(Failure):
            found = opening(other)
            if _are_slices(parsed, found):
                return what
            if parsed.form == found.form == "state_dict" and found.contents.tensors.keys().isdisjoint(
                parsed.contents.tensors
            ):
                return PartOf(f"one of {len(files):,} files, by their names, with other tensors each", place)
    return None


def with_alone(parsed: Parsed, name: str, place: str, names: Sequence[str]) -> Parsed:
    """Return what was read of a file with what its name says, where it is that of a slice, and no other is there."""
    own = numbered(name)
    if own is None or not own.is_known or len(siblings_of(name, names)) > 1 or not parsed.contents.tensors:
        return parsed
    if own.numbers[0]:
        what = f"number {own.numbers[0]} of {_WHAT}, going by its name"
        return parsed._replace(part_of=PartOf(what, place, is_slice=True))
    what = f"going by its name, the first or the only one of {_WHAT}: nothing says how many there were"
    return parsed._replace(remarks=(*parsed.remarks, Remark("CK145", what)))


def together(found: Mapping[str, Parsed]) -> str | None:
    """Return why files of a folder are no checkpoints but slices of one; None if none of them are."""
    for name, parsed in found.items():
        files = siblings_of(name, found)
        part = part_of(name, "", files, parsed, found.__getitem__)
        if part is not None:
            what = f"{counted(len(files), 'file')} are {'slices' if part.is_slice else 'parts'} of one model"
            why = f". {_WHY}" if part.is_slice else ": each has other tensors"
            return f"{what}, {some(list(map(repr, files)))}{why}"
    return None


_WHAT: Final = "files that each hold a slice of most tensors, as tensor parallelism saves them"
_WHY: Final = "Which tensors are cut, and along which dimension, is not in them"


def _are_slices(one: Parsed, other: Parsed) -> bool:
    """
    Say whether two files hold slices of one model, as far as a few small tensors, and the first bytes of others, tell.

    Ranks have copies of what is not cut, such as norms, and most of the matrices differ.
    """
    first, second = one.contents.tensors, other.contents.tensors
    if first.keys() != second.keys() or any(first[name].shape != second[name].shape for name in first):
        return False
    flat = [
        name
        for name, info in first.items()
        if len(info.shape) == 1 and 1 < info.nbytes <= _SMALL_NBYTES and name.endswith(_LEARNT)
    ]
    matrices = [name for name, info in first.items() if len(info.shape) > 1]
    equal_flat, equal_matrices = (
        [_are_equal(LazyTensor(name, first[name]), LazyTensor(name, second[name])) for name in names[:_MOST]]
        for names in (flat, matrices)
    )
    return any(equal_flat) and 2 * sum(equal_matrices) < len(equal_matrices)


_LEARNT: Final = ("weight", "bias", "scale", "gamma", "beta")
"""How the names end of what training changes: masks and positions are equal in all files of a model."""


def _are_equal(one: LazyTensor, other: LazyTensor) -> bool:
    """Say whether tensors of the same shape are equal, as far as they are compared."""
    if one.info.dtype != other.info.dtype or one.info.storage is None or other.info.storage is None:
        return one.info.dtype == other.info.dtype
    nbytes = _SMALL_NBYTES if one.info.nbytes <= _SMALL_NBYTES else _HEAD_NBYTES
    return next(one.chunks(nbytes), b"") == next(other.chunks(nbytes), b"")
