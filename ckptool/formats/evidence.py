"""
Whether two files hold parts of one model, as far as names, shapes, and the first bytes of a few tensors tell.

Slices of tensor parallelism and FSDP have the same names. Ranks have copies of what is not cut, such as norms, and most
of the matrices are as different as those of two models are: the copies are what two trainings do not have. Stages of
pipelines and groups of experts have names that go on in the next file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from ckptool.formats.numbering import Numbered
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo

Tensors: TypeAlias = Mapping[str, TensorInfo]

_LAYER: Final = re.compile(r"\b\d+(?=\.)")
_LEARNT: Final = ("weight", "bias", "scale", "gamma", "beta")
"""How the names end of what training changes: masks and positions are equal in all files of a model."""
_OF_MODULE: Final = re.compile(r"[._]?(?:lora_?(?:[AB]|down|up)\b.*|weight|bias)\Z", re.DOTALL)
"""What follows the name of a module whose output is cut, or whose input."""
_ADDED: Final = re.compile(r"lora|lokr|hada|ia3|adapter|prompt", re.IGNORECASE)
"""What is added to some layers of a model, which keep their numbers."""
_ENDS: Final = (re.compile(r"emb|wte|stem"), re.compile(r"head|output|final"))
"""What the first stage of a pipeline has in its names, and the last."""
_SMALL_NBYTES: Final = 1 << 16
_HEAD_NBYTES: Final = 1 << 12
"""What is compared of a tensor that is not small."""
_MOST: Final = 12
"""Tensors of a kind that are compared."""
_LEAST: Final = 4
"""Matrices of layers that are enough to tell that others are not there."""


def are_slices(one: Tensors, other: Tensors, found: Numbered, *, are_ends: bool) -> bool:
    """
    Say whether two files of a set hold slices of one model; ``one`` is the first of them.

    Where names do not say that they are of ranks, most norms have to be copies. Ranks of FSDP, which cuts everything
    along the first dimension, and stages that number their layers from 0 have no copies: there, names tell that they
    are of one model, of the files or of what the first and the last stage have (``are_ends``), or the shapes do. Whole
    models are those whose layers fit each other, with what is before or after them.
    """
    names = [name for name in one if name in other and _could_be_cut(one[name], other[name])]
    learnt = [name for name in names if name.endswith(_LEARNT)]
    if 3 * len(names) >= 2 * max(len(one), len(other)) and _are_halved(one, other, names):
        return True
    small = [name for name in learnt if 1 < one[name].nbytes <= _SMALL_NBYTES and len(one[name].shape) == 1]
    large = [name for name in learnt or names if len(one[name].shape) > 1]
    vectors = [_tells(LazyTensor(name, one[name]), LazyTensor(name, other[name])) for name in small[:_MOST]]
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
                are_ends or says_one or _is_cut(one, found.total),
                2 * len(names) >= min(len(one), len(other)),
                all(one[name].shape[1:] == other[name].shape[1:] for name in names),
                any(name in learnt or "." in name for name in names),
            )
        )
        large = large or small
    if not is_certain:
        return False
    same = [_are_alike(LazyTensor(name, one[name]), LazyTensor(name, other[name])) for name in large[:_MOST]]
    return len(same) > (not found.says_rank) and 2 * sum(same) <= len(same) - (found.says_rank and not found.says_cut)


def _could_be_cut(one: TensorInfo, other: TensorInfo) -> bool:
    """Say whether tensors differ in one dimension at most, in which the first ranks have as much as others, or more."""
    sizes = [*zip(one.shape, other.shape, strict=False)]
    is_like = one.dtype == other.dtype and len(one.shape) == len(other.shape)
    return is_like and sum(a != b for a, b in sizes) <= 1 and all(a >= b for a, b in sizes)


def _are_halved(one: Tensors, other: Tensors, names: Iterable[str]) -> bool:
    """
    Say whether the input of some modules is cut, and the output of others, as tensor parallelism does in turns.

    Of the first, what follows the cut is a copy: the bias, or the second factor of LoRA. Of two trainings, it is none
    where the matrix before it differs.
    """
    modules: dict[str, list[str]] = {}
    for name in filter(_OF_MODULE.search, names):
        modules.setdefault(_OF_MODULE.sub("", name), []).append(name)
    pairs = [sorted(found, key=lambda name: (name.endswith("bias"), name)) for found in modules.values()]
    pairs = [found for found in pairs if len(found) == 2 and len(one[found[0]].shape) > 1][:_MOST]
    lazy = [[(LazyTensor(name, one[name]), LazyTensor(name, other[name])) for name in pair] for pair in pairs]
    told = [(_are_alike(*matrix), _tells(*behind)) for matrix, behind in lazy]
    return (False, True) in told and any(copy is False for _, copy in told) and (True, True) not in told


def _is_cut(tensors: Tensors, count: int) -> bool:
    """
    Say whether all tensors are cut along their first dimension, by a number of files that divides ``count``.

    What a layer gives is then less than what the next one takes, and a norm has fewer elements than any layer takes.
    """
    # Layers side by side, on one body, seem to be cut; but not in two ways.
    return any(len(cut) > 1 and (not whole or len({*cut}) > max(1, len(whole))) for cut, whole in _cuts(tensors, count))


def _is_whole(one: Tensors, other: Tensors, count: int) -> bool:
    """
    Say whether two files hold the same model, few of whose layers seem to be cut, with matrices outside its layers.

    Where all have numbers, it is none that could go on where it begins: the last layer gives not what the first takes.
    Layers that take what two others give, as those of a U-Net do, seem to be cut.
    """
    matrices = [(_LAYER.sub("#", name), info.shape) for name, info in one.items() if len(info.shape) > 1]
    are_varied = len({*matrices}) > len({kin for kin, _ in matrices}) and matrices[0][1][1] != matrices[-1][1][0]
    has_ends = are_varied or any("#" not in kin for kin, _ in matrices)
    are_same = has_ends and one.keys() == other.keys() and have_shapes_of(one, other)
    return are_same and all(len(whole) > len({*cut}) for cut, whole in _cuts(one, count))


def have_shapes_of(one: Tensors, other: Tensors) -> bool:
    """Say whether all tensors that are in both have the same shapes."""
    return all(one[name].shape == other[name].shape for name in one.keys() & other.keys())


def _cuts(tensors: Tensors, count: int) -> Iterator[tuple[list[tuple[int, int]], set[int]]]:
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


def are_ends(files: Sequence[Tensors]) -> bool:
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


def go_on(one: Tensors, other: Tensors, *, says_rank: bool) -> bool:
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


def _layers(names: Iterable[str], tensors: Tensors) -> dict[str, dict[int, tuple[int, ...]]]:
    """Return the numbers and the shapes of layers, by the rest of their names."""
    found: dict[str, dict[int, tuple[int, ...]]] = {}
    for name in names:
        for kin, number in _numbered(name):
            found.setdefault(kin, {})[number] = tensors[name].shape
    return found


def later_layers(tensors: Tensors) -> str:
    """
    Return which layers of a stack are most of what is there, if it is not its first ones; nothing if they are.

    Layers of a stack have the same matrices, one behind the other. A stack may begin with 1.
    """
    learnt = {name: info.shape for name, info in tensors.items() if name.endswith(_LEARNT)}
    matrices = [name for name, shape in learnt.items() if len(shape) > 1 and 1 not in shape[:2]]
    stacks: dict[str, dict[int, list[tuple[str, tuple[int, ...]]]]] = {}
    for name in matrices:
        for one in _LAYER.finditer(name):
            stack, inside = (_LAYER.sub("#", part) for part in (name[: one.start()], name[one.end() :]))
            stacks.setdefault(stack, {}).setdefault(int(one[0]), []).append((inside, tensors[name].shape))
    for stack, layers in stacks.items():
        first, last, held = min(layers), max(layers), sum(map(len, layers.values()))
        are_like = 1 < len(layers) == last - first + 1 and all(one == layers[first] for one in layers.values())
        if first > 1 and are_like and held >= max(_LEAST, len(matrices) / 2) and not any(map(_ADDED.search, matrices)):
            return f"the layers {first} to {last} of {stack.rstrip('.')!r}, without those before"
    return ""


def _tells(one: LazyTensor, other: LazyTensor) -> bool | None:
    """Say whether tensors are equal as copies are; None of what training has not changed: all zeros, or all ones."""
    data = next(one.chunks(_SMALL_NBYTES), b"") if one.info.storage is not None else b""
    is_new = data == data[: one.info.dtype.itemsize] * (len(data) // one.info.dtype.itemsize)
    same = one.shape == other.shape and are_equal(one, other)
    return None if is_new and same else same


def are_equal(one: LazyTensor, other: LazyTensor) -> bool:
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
