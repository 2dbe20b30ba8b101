"""
Decide whether two files hold parts of one model, by names, shapes, and the first bytes of a few tensors.

Slices of tensor parallelism and FSDP have the same names. Most of their matrices differ as much as those of two models
do, but ranks have equal copies of what is not cut, such as norms, which two trainings do not have. Stages of pipelines
and groups of experts have names that continue in the next file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, TypeAlias

from ckptool.formats.slices.numbering import Numbered
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo

Tensors: TypeAlias = Mapping[str, TensorInfo]

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
        is_certain = found.says_rank or (
            len(copies) >= vectors.count(False) and (copies[1:] or "norm" in "".join(copies))
        )
        is_certain = is_certain and 3 * len(names) >= 2 * max(len(one), len(other))
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
    return 5 * same >= 2 * count


def _heads(name: str, *files: Tensors) -> list[bytes]:
    """Return the first bytes of two tensors, as many as are compared; empty if one has no storage."""
    nbytes = _SMALL_NBYTES if files[0][name].nbytes <= _SMALL_NBYTES else _HEAD_NBYTES
    are_there = all(one[name].storage is not None for one in files)
    return [next(LazyTensor(name, one[name]).chunks(nbytes), b"") if are_there else b"" for one in files]
