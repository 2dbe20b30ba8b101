"""
Quantised weights: which tensors are codes, and which are their scales and other companions.

1. Dtypes, shapes, values and places decide. Codes are 8-bit floats, torch's quantised dtypes, and matrices of integers
   that are not masks, positions or tables of indices.
2. Scales are below the name of the weight, in its module, in another dict under its name, directly in a module around
   it, or in a file beside.
3. If a model may have such tensors without being quantised, the names of the others decide.
4. ``quantized_layouts`` recognises the layouts of known libraries.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import takewhile
from typing import Final, NamedTuple, TypeAlias

from ckptool.checkpoints.parsed import PartOf
from ckptool.checkpoints.quantized_layouts import (
    ALONE,
    FLOATS,
    FP8,
    INTEGERS,
    KINDS,
    OF_TORCH,
    POWERS,
    RULES,
    TYPES,
    Settings,
    Tensors,
    Weight,
    by_rules,
    grain,
)
from ckptool.errors import Failure
from ckptool.messages import counted, show, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.pickles.numpy_values import array_of, numpy_scalar
from ckptool.tensors.dtypes import BY_NAME
from ckptool.tensors.reading import LazyTensor, cut_up, part_of
from ckptool.tensors.tensor import TensorInfo

CASTABLE: Final = FLOATS | FP8
_LONGEST: Final = 256
"""Limit of tensors directly in a layer, and of characters in a name that is split."""
_MOST: Final = 32
"""Limit of weights for the name of a scale elsewhere, of kinds whose values are read, and of characters of a number."""
_MOST_DICTS: Final = 1 << 16
_MOST_PAIRS: Final = 1 << 20
_LONGEST_PATH: Final = 1 << 10
_NUMBER: Final = TensorInfo(BY_NAME["float64"], (), (), 0, None, "cpu")
_DEPTH: Final = 3
"""Limit of nested lists of numbers, and of components before a name in another dict."""
_HEAD_NBYTES: Final = 1 << 12
_BULK: Final = 4
"""A model with a code book has at least this many times as many codes as other values."""
_FEW: Final = 32
"""Distinct 8-bit values that a kernel, a table of kinds or a matrix of similarities may have."""
_LIBRARIES: Final = ("torchao.", "optimum.quanto.", "bitsandbytes.")
_SCALE: Final = re.compile(r"scal(?!ar|ed)|amax|absmax|quant|zero|SCB")
_BOOK: Final = re.compile(
    r"code_?book|code_?word|centroid|cent(er|re)s|palette|lut|lookup|levels|(?<!shift_)(?<!bias_)table"
)
"""Matches in names of scales, and of code books."""
_TRAINING: Final = re.compile(
    r"(?<!scale_)bias\Z|(logit|layer|res|loss|grad|lr|image|conf|arg)_?scale|scale_(shift_table|lr|grad|loss)|scaler"
    r"|norm[^.]*\.scale\Z"
)
"""Matches in names like those, but of a model or its training."""
_OF_NET: Final = re.compile(
    r"bias(\Z|_[ih]h)|norm|gamma|beta|token|embed|pos|_g\Z|original|\AD\Z|dt_|temperature|mean|std|var\Z"
)
"""Matches in names of a model's own floats, which are not scales even if they are in the module of a weight."""
_INDEX: Final = re.compile(
    r"(^|_)(i[dx]s?|idxs?|index|indices|masks?|positions?|perm|offsets?|labels?|counts?|types?|tokens?|targets?|images?"
    r"|pixels?|observations?|obs|faces|edges?)\Z|rng|random|seed|state",
    re.IGNORECASE,
)
"""Matches names of integers that are not codes, unless there is a code book."""
_TOP_BITS: Final = {1: 7, 2: 8, 4: 16, 8: 48}
"""Bits of the largest numbers in tables of indices, by the bytes of their dtype."""
_LARGE: Final = {"float8_e4m3fn": 0x50, "float8_e5m2": 0x48, "float8_e4m3fnuz": 0x58, "float8_e5m2fnuz": 0x4C}
"""The encoding of 8.0. A matrix of unscaled weights has few values as large; a scaled one has mostly such."""
_LOOSE: Final = "integers without scales"
_NAMED: Final = "with scales under other names"
"""Names of schemes that no loader knows."""
BY_TORCHAO: Final = "tensor_names"
"""The key in safetensors' metadata under which torchao lists its tensors; each tensor also has a text of its name."""
_KEEP: Final = (
    "Keep values and scales together, as they are (`keep_dtype=`), or make them dense (`dequantize=True`); "
    "if this is meant, say so with `break_quantized=True`."
)
_Names: TypeAlias = Mapping[str, str]
_Near: TypeAlias = Mapping[str, list[str]]
"""The names of tensors that may belong to each weight, in file order."""


def keep(part: PartOf | None) -> str:
    """Return the hint for quantised weights in a file that may be ``part`` of several."""
    return f"{_KEEP} The rest of them may be in other files: give {show(part.path)}." if part else _KEEP


class Scheme(NamedTuple):
    """The weights of a checkpoint that are quantised in one way."""

    name: str
    """The layout, and which elements share a scale: ``FP8 (e4m3) in blocks of 128×128``."""
    weights: tuple[str, ...]
    """The names of the tensors with the values."""
    unscaled: tuple[str, ...]
    """The weights without a scale."""

    def __str__(self) -> str:
        every, scaled = len(self.weights), len(self.weights) - len(self.unscaled)
        weights, have = counted(every, "weight"), "has" if every == 1 else "have"
        known = f"{scaled:,} of {weights} {have} a scale" if scaled else f"{weights} without a scale that is known"
        return f"{self.name}, {known}" if every else self.name


class Quantization(NamedTuple):
    """What is quantised in a checkpoint."""

    schemes: tuple[Scheme, ...]
    settings: Settings | None
    belongs: _Near
    """For each weight, its scales and everything else that it needs."""
    bound: tuple[tuple[Weight, tuple[str, ...]], ...]
    """The weights, each with companions that are its own by place or name, and must move with it."""
    types: _Names
    """The dtypes of all of these, by name."""
    loose: tuple[str, ...]
    """Weights of integers whose scales are probably not in the file."""

    def __str__(self) -> str:
        said = "; ".join(map(str, self.schemes))
        return f"{said}; {show(self.settings.where)} says {show(self.settings.method)}" if self.settings else said

    @property
    def short(self) -> str:
        """The schemes alone."""
        return "; ".join(scheme.name for scheme in self.schemes)

    @property
    def numbers(self) -> set[str]:
        """The paths of scales that are not tensors but plain numbers."""
        return {one for others in self.belongs.values() for one in others} - self.types.keys()

    def within(self, entries: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield the path of each weight and companion that is one of ``entries`` or below one, with that entry."""
        return within({*self.types, *self.numbers}, entries)

    def damage(self, left: _Names, *, is_cast: bool) -> str | None:
        """
        Return what is wrong with a result; ``left`` has the dtypes of its tensors, by old name. None if nothing is.

        ``is_cast`` says that there is a cast, of any tensors: a cast cannot turn integers into weights.
        """
        cast = [name for name, dtype in self.types.items() if left.get(name, dtype) != dtype]
        if cast:
            many = f"{len(cast):,} of the {counted(len(self.types), 'tensor')} that they consist of"
            return f"a cast breaks quantised weights, {self.short}: it changes {many}: {some(cast)}"
        loose = [name for name in self.loose if is_cast and name in left]
        if loose:
            what = f"their scales are not in the file, as it seems, and it leaves {counted(len(loose), 'tensor')}"
            return f"a cast breaks quantised weights, {self.short}: {what} of integers: {some(loose)}"
        kept = [(name, [one for one in others if one not in left]) for name, others in self.belongs.items()]
        lost = [f"{name} without {gone[0]}" for name, gone in kept if gone and name in left]
        loses = "loses what scales it" if len(lost) == 1 else "lose what scales them"
        return f"{counted(len(lost), 'quantised weight')} ({self.short}) {loses}: {some(lost)}" if lost else None

    def apart(self, new: _Names) -> str | None:
        """
        Return what is wrong with new names; ``new`` has them by the old names of remaining tensors. None if nothing is.

        Each weight must keep the end of its name, and its companions their places relative to it.
        """
        left = ((one, others) for one, others in self.bound if one.name in new)
        apart = ((one, [other for other in of if not _goes_along(one, other, new)]) for one, of in left)
        said = [f"{_both(one.name, new)} from {_both(others[0], new)}" for one, others in apart if others]
        them = "it" if len(said) == 1 else "them"
        what = f"{counted(len(said), 'quantised weight')} ({self.short}) from what scales {them}"
        return f"new names part {what}: {some(said)}" if said else None

    def cut_apart(self, wholes: Mapping[str, tuple[int, ...]], parts: Mapping[str, tuple[int, ...]]) -> str | None:
        """Return how shapes of ``parts``, by name, cut a weight but not its scales, or vice versa; None if none do."""
        for one, others in self.bound:
            for other in (other for other in others if one.name in parts and other in parts):
                (size, scale), (cut, share) = ((of[one.name], of[other]) for of in (wholes, parts))
                for dim, along in enumerate(scale if len(scale) == len(size) else scale[:1]):
                    if along > 1 and (size[dim] == cut[dim]) != (along == share[dim]):
                        shapes = f"{list(size)} to {list(cut)}, and {other!r} from {list(scale)} to {list(share)}"
                        return f"{one.name!r} ({one.scheme}) is not cut as what scales it: from {shapes}"
        return None


def _goes_along(weight: Weight, other: str, new: _Names) -> bool:
    """Return whether a weight and one of its scales, if still there, keep their relative places under new names."""
    if other not in new:
        return True
    head = os.path.commonprefix((weight.stem.removesuffix("weight"), other))  # noqa: RUF071 - up_proj, up_proj_scale
    end, rest = weight.name[len(head) :], other[len(head) :]
    new_name, new_head = new[weight.name], new[other].removesuffix(rest)
    is_around = "." in end and "." not in rest
    keeps = new_name.startswith(new_head) if is_around else new_name == new_head + end
    return keeps and new[other] == new_head + rest


def _both(name: str, new: _Names) -> str:
    return name if new[name] == name else f"{name} (now {new[name]})"


def within(names: Iterable[str], entries: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each of ``names`` that is one of ``entries`` or below one, with that entry."""
    for name in names:
        ends = (*(at for at, one in enumerate(name) if one == "."), len(name))
        entry = next((name[:end] for end in ends if name[:end] in entries), None)
        if entry is not None:
            yield name, entry


def numbers_in(extras: Iterable[tuple[str, Inert]]) -> dict[str, TensorInfo]:
    """Return numbers, and lists of them, in values that are no tensors, as tensors without bytes: possible scales."""
    found: dict[str, TensorInfo] = {}
    seen: set[int] = set()
    todo = list(extras)
    while todo and len(seen) < _MOST_DICTS:
        path, node = todo.pop()
        number = _as_tensor(node)
        if number is not None:
            found[path] = number
        elif id(node) not in seen and len(path) < _LONGEST_PATH:
            seen.add(id(node))
            pairs = node.items() if isinstance(node, dict) else nodes.mapping_pairs(node) or nodes.attribute_pairs(node)
            todo += [(f"{path}.{key}".lstrip("."), one) for key, one in pairs if isinstance(key, str | int)]
    return found


def _as_tensor(node: Inert, depth: int = _DEPTH) -> TensorInfo | None:
    if isinstance(node, list | tuple):
        first = _as_tensor(node[0], depth - 1) if node and depth else None
        return first._replace(shape=(len(node), *first.shape)) if first is not None else None
    array = array_of(node, lambda _: None)
    if array is not None:
        return _NUMBER._replace(dtype=BY_NAME[array.dtype], shape=array.shape) if array.dtype in BY_NAME else None
    value = (numpy_scalar(node) or ("", node))[1]
    if isinstance(value, str) and len(value) < _MOST:  # in the metadata of a safetensors file
        with suppress(ValueError):
            value = float(value)
    kind = {float: "float64", int: "int64"}.get(type(value))
    return _NUMBER._replace(dtype=BY_NAME[kind]) if kind else None


def find(
    tensors: Tensors,
    numbers: Tensors,
    homes: _Names,
    settings: Callable[[], Settings | None],
    beside: Callable[[], Mapping[str, Tensors]],
    classes: _Names,
    own: Collection[str],
    readable: Collection[str],
    *,
    is_part: bool,
) -> Quantization | None:
    """
    Return the quantised weights among tensors, or None.

    ``numbers`` are from ``numbers_in``. ``homes`` has the key of each tensor's state dict, ``classes`` the class of its
    module in a whole model. ``settings`` is only called if some dtypes are of quantised values, ``beside``, for the
    tensors of files beside this one, only if such a tensor has no scale. ``is_part`` says that other files may have
    scales. Integers of no known layout count only if they are the weights' ``own``. Values are read only of
    ``readable`` tensors; others that only values could prove do not count.
    """
    small = {name: info for name, info in tensors.items() if info.dtype.name in TYPES and info.shape and info.numel > 1}
    values = [name for name in small if not _INDEX.search(name.rpartition(".")[2])]
    said = settings() if values else None
    known = ((name, info.subclass or (classes.get(name) if name in small else None)) for name, info in tensors.items())
    found = {name: Weight(name, name, cls, _of(cls)) for name, cls in known if cls and cls.startswith(_LIBRARIES)}
    everything = {**numbers, **tensors} if small else tensors
    found |= {one.name: one for one in by_rules(everything, small, said)}
    flat = {name for name, one in small.items() if one.dtype.itemsize == 1 and not name.endswith("bias")}
    rest = {name: one for name, one in small.items() if len(one.shape) > 1 or one.dtype.is_quantised or name in flat}
    found |= {one.name: one for one in _alike(rest, found, said)}
    taken = {one for others in _own(everything, found).values() for one in others} | found.keys()
    rest = {name: info for name, info in rest.items() if name not in taken}
    near = _own(everything, found | {name: Weight(name, name, "", "") for name in rest})
    for name, others in _elsewhere(everything, rest, homes).items():
        near[name] = [*near.get(name, ()), *others]
    scales = [name for name, info in tensors.items() if (found or rest) and _is_scale(name, info)]
    found |= {one.name: one for one in _eight_bits(everything, rest, near, scales, is_part=is_part)}
    found |= {one.name: one for one in _integers(everything, rest, near, own, readable)}
    lack = {name: info for name, info in rest.items() if info.dtype.name in FP8 and name not in found}
    lack |= {name: rest[name] for name, one in found.items() if one.rule == _LOOSE}
    found |= {one.name: one for one in _scaled_beside(lack, beside() if lack else {})}
    ours = {name: info for name, info in rest.items() if name in own and name in readable and name not in found}
    found |= {one.name: one for one in _far_from_weights(ours)}
    if said and not found:
        values = [name for name in values if not _SCALE.search(name.rpartition(".")[2])]
        found = {name: Weight(name, name, _LOOSE, said.method, is_scaled=False) for name in values}
        near = _own(everything, found)
    belongs = {name: [one for one in near.get(name, ()) if one not in found] for name in found}
    bound = tuple((found[name], tuple(others)) for name, others in belongs.items())
    owned = {one for _, others in bound for one in others}
    left = [one for one in scales if one not in owned][:_MOST]
    by_home: dict[str | None, list[str]] = {}
    for one in found.values():
        home = homes.get(one.name)
        if one.rule == _NAMED:
            belongs[one.name] += left
        elif one.rule == _LOOSE and not belongs[one.name]:  # floats in other dicts may be its scales
            if home not in by_home:
                floats = (name for name, info in tensors.items() if info.dtype.name in FLOATS)
                by_home[home] = [name for name in floats if homes.get(name) != home and not _OF_NET.search(name)]
            belongs[one.name] = by_home[home][:_MOST]
    alone = sorted(one for one in tensors if is_part and one not in owned and one.endswith(ALONE))
    alone = [one for one in alone if f"{one.rpartition('.')[0]}.weight".lstrip(".") not in tensors]
    schemes = list(_schemes(list(found.values())))
    schemes += [Scheme("scales of weights in another file", (), ())] if alone else []
    kept = (*found, *(one for others in belongs.values() for one in others), *(scales if found else ()), *alone)
    types = {name: tensors[name].dtype.name for name in kept if name in tensors}
    loose = tuple(one.name for one in found.values() if one.rule == _LOOSE)
    return Quantization(tuple(schemes), said, belongs, bound, types, loose) if schemes else None


def _is_scale(name: str, info: TensorInfo) -> bool:
    """Return whether a tensor is a scale, by its dtype and name."""
    is_float = info.dtype.name in FLOATS | POWERS
    return is_float and _SCALE.search(name) is not None and not _TRAINING.search(name)


def _is_said(text: str) -> bool:
    return _SCALE.search(text) is not None or _BOOK.search(text) is not None


def _alike(rest: Tensors, weights: Mapping[str, Weight], settings: Settings | None) -> Iterator[Weight]:
    """Yield weights named like those that have a scale, and 8-bit floats if settings or others show that they exist."""
    ends = {name.rpartition(".")[2]: one.rule for name, one in weights.items()}
    types = {(rule.name, dtype) for rule in RULES for dtype in rule.types}
    for name, dtype in ((name, info.dtype.name) for name, info in rest.items() if name not in weights):
        last = name.rpartition(".")[2]
        rule, scheme = ends.get(last), ""
        if dtype in FP8 and len(rest[name].shape) > 1 and (settings or "FP8" in ends.values()):
            rule, scheme = "FP8", f"FP8{KINDS[dtype]}"
        if rule is not None and (scheme or (rule, dtype) in types) and not _SCALE.search(last):
            yield Weight(name, name.removesuffix("weight"), rule, scheme, is_scaled=False)


def _own(tensors: Tensors, weights: Mapping[str, Weight]) -> dict[str, list[str]]:
    """
    Return what belongs to each weight, by its place.

    That is everything below its name, and everything directly in its module except a model's own parameters, if the
    module is a single layer; deeper in the module only what is named like a scale. If a module has several weights, a
    name belongs to those with the longest common prefix.
    """
    there: dict[str, list[Weight]] = {}
    for one in weights.values():
        for place in one.places:
            there.setdefault(place, []).append(one)
    direct = Counter(name.rpartition(".")[0] for name in tensors if there)
    found: dict[str, list[str]] = {}
    for name in (name for name in tensors if there and name not in weights):
        head = inside = name.rpartition(".")[0]
        while head and head not in there and inside.count(".") - head.count(".") < _DEPTH:
            head = head.rpartition(".")[0]
        is_near = head == inside or _is_said(name[len(head) :])
        owners = there.get(head, ()) if is_near and (head in weights or direct[head] <= _LONGEST) else ()
        owners = owners if len(owners) <= _LONGEST else ()
        alike = [sum(takewhile(bool, map(str.__eq__, one.name, name))) for one in owners]
        for one in (one for one, many in zip(owners, alike, strict=True) if many == max(alike)):
            if not _is_parameter(name, tensors[name], tensors[one.name]):
                found.setdefault(one.name, []).append(name)
    return found


def _is_parameter(name: str, info: TensorInfo, weight: TensorInfo) -> bool:
    """Return whether a tensor in the module of a weight is probably the model's own parameter, and not a scale."""
    if info.dtype.name not in FLOATS or _is_said(name):
        return _TRAINING.search(name) is not None
    fits = weight.dtype.name not in FP8 or (info.numel < weight.numel and grain(weight.shape, info.shape))
    return not fits or _OF_NET.search(name.rpartition(".")[2]) is not None


def _elsewhere(tensors: Tensors, rest: Tensors, homes: _Names) -> dict[str, list[str]]:
    """
    Return possible scales of weights in other places.

    1. A scale has the name of the weight, or of its module, in another dict: in another state dict, or below a
       component that is named like a scale.
    2. Or it is directly in a module around the weight; it must be named like a scale then if it is a plain number, or
       the weight is of 8-bit floats.
    """
    owners: dict[str, list[tuple[str, bool]]] = {}
    around: dict[str, list[str]] = {}
    for name in rest:
        parts = name.removeprefix(f"{homes.get(name, '')}.").split(".")
        for start in range(min(max(len(parts) - 1, 1), _DEPTH)):
            for text in filter(None, (".".join(parts[start:]), ".".join(parts[start:-1]))):
                owners.setdefault(text, []).append((name, start == 0))
        heads = name.split(".")[:-1]
        for end in range(len(heads)):
            around.setdefault(".".join(heads[:end]), []).append(name)
    direct = Counter(name.rpartition(".")[0] for name in tensors if owners)
    found: dict[str, list[str]] = {}
    for name, info in tensors.items() if owners else ():
        if name in rest or len(name) > _LONGEST_PATH or info.dtype.name not in FLOATS | {"int64"}:
            continue
        of = {
            one
            for text, is_told in _tails(name)
            for one, is_whole in owners.get(text, ())[:_MOST]
            if (is_told or (is_whole and homes.get(one) != homes.get(name))) and info.numel < rest[one].numel
        }
        head, last = name.rpartition(".")[::2]
        is_said = _is_scale(last, info) or _BOOK.search(last) is not None
        if is_said or not (info.storage is None or _OF_NET.search(last)):
            inside = around.get(head, ()) if direct[head] * len(around.get(head, ())) <= _MOST_PAIRS else ()
            of |= {one for one in inside if is_said or rest[one].dtype.name not in FP8}
        for one in of:
            found.setdefault(one, []).append(name)
    return found


def _tails(name: str) -> Iterator[tuple[str, bool]]:
    """Yield possible names of a weight in the name of a scale, and whether the rest of it is named like a scale."""
    parts = name.split(".")
    for start in range(min(len(parts), _DEPTH + 1)):
        tail, is_told = ".".join(parts[start:]), any(map(_is_said, parts[:start]))
        yield tail, is_told
        cuts = [at for at, one in enumerate(tail) if one in "._"] if len(tail) < _LONGEST else []
        yield from ((tail[:cut], is_told) for cut in cuts if is_told or _is_said(tail[cut:]))
        stem, mark, end = tail.rpartition("_")
        if not start and mark and len(end) <= _DEPTH and "." not in end:
            yield stem, True  # fc_s beside fc.weight


def _eight_bits(tensors: Tensors, rest: Tensors, near: _Near, scales: list[str], *, is_part: bool) -> Iterator[Weight]:
    """Yield 8-bit floats, and torch's quantised dtypes, if there are scales: a plain model of 8-bit floats has none."""
    floats = {name: _floats(tensors, near, name) for name, info in rest.items() if info.dtype.name in FP8}
    # In a model of 8-bit floats without scales, a few matrices may have a parameter beside them that fits as one.
    is_usual = 2 * sum(map(bool, floats.values())) >= len(floats)
    for name, dtype in ((name, info.dtype.name) for name, info in rest.items()):
        if dtype in FP8 and len(rest[name].shape) == 1 and not any(map(_SCALE.search, floats[name])):
            continue  # a bias or another vector
        if dtype in OF_TORCH and scales:
            yield Weight(name, name, _NAMED, f"torch ({dtype})")
        elif dtype in FP8 and (scales or is_part or (is_usual and floats[name])):
            where = _NAMED if scales or floats[name] else "with scales in another file"
            yield Weight(name, name, _NAMED, f"FP8{KINDS[dtype]}, {where}", is_scaled=False)


def _far_from_weights(tensors: Tensors) -> Iterator[Weight]:
    """Yield matrices of 8-bit floats most of whose values are too large for weights: they were divided by a scale."""
    for name, info in tensors.items():
        least = _LARGE.get(info.dtype.name)
        first = [one & 127 for one in _first(name, info)] if least is not None and len(info.shape) > 1 else []
        if least is not None and 2 * sum(one >= least for one in first) > len(first):
            yield Weight(name, name, _NAMED, f"FP8{KINDS[info.dtype.name]}, with scales elsewhere", is_scaled=False)


def _floats(tensors: Tensors, near: _Near, name: str) -> list[str]:
    return [one for one in near.get(name, ()) if tensors[one].dtype.name in FLOATS | POWERS]


def _integers(
    tensors: Tensors, rest: Tensors, near: _Near, own: Collection[str], readable: Collection[str]
) -> Iterator[Weight]:
    """
    Yield integers that are codes.

    1. Codes are in the place of a weight, and a scale fits, or there is a bias, or they have many distinct values; or
       they are the majority of the weights.
    2. A model of floats may have integers of any kind, also beside a scale. Masks, positions and tables of indices are
       recognised by their values: one or two distinct ones, consecutive ones, or small ones. These are codes only if a
       tensor is named like a scale, or they are indices into a code book.
    """
    ints = {name: info for name, info in rest.items() if info.dtype.name in INTEGERS and name in own}
    ints = {name: info for name, info in ints.items() if not _SCALE.search(name.rpartition(".")[2])}
    around = ((info, one) for name, info in ints.items() for one in _floats(tensors, near, name))
    scaling = {one for info, one in around if _is_said(one) or _fits(info, tensors[one])}
    every = {name: one for name, one in tensors.items() if name in own and one.dtype.name in CASTABLE}
    floats = [one for name, one in every.items() if name not in scaling and len(one.shape) > 1]
    many, others = (sum(one.numel for one in of) for of in (ints.values(), floats))
    is_most, looked = len(ints) > len(floats), dict[tuple[str, str, bool], bool]()
    for name, info in ints.items():
        last, dtype, beside = name.rpartition(".")[2], info.dtype.name, _floats(tensors, near, name)
        books = [one for one in beside if _BOOK.search(one) and _is_power(max(tensors[one].shape, default=0))]
        books = [one for one in books if is_most and many >= _BULK * (others + tensors[one].numel)]
        if books and name in readable and _are_places(name, info, tensors[books[0]]):
            yield Weight(name, name, "codes", f"codes with a code book ({dtype})")
            continue
        said, bias = (
            [one for one in beside if _SCALE.search(one)],
            tensors.get(f"{name.rpartition('.')[0]}.bias".lstrip(".")),
        )
        has_bias = bias is not None and len(info.shape) > 1 and bias.shape in {info.shape[:1], info.shape[1:2]}
        is_weight = has_bias or name.endswith("weight")
        is_scaled = is_weight and any(_fits(info, tensors[one]) for one in said)
        is_layer = name.endswith("weight") and (has_bias or (name in readable and _is_spread(name, info)))
        is_bulk = is_layer or (is_most and (many >= others or is_weight))
        if not (is_bulk or is_scaled) or (_INDEX.search(last) and not books):
            continue
        if not said and (len(info.shape) == 1 or name not in readable or not (is_weight or every)):
            continue
        if name in readable and not is_scaled:
            is_said = has_bias or any(info.dtype.itemsize == 1 or tensors[one].numel > 1 for one in said)
            key = (last, dtype, is_said)
            if key not in looked and len(looked) < _MOST:
                looked[key] = _is_table(name, info, is_said=is_said, has_bias=has_bias)
            is_image = dtype == "uint8" and len(info.shape) > 2 and not (is_weight or scaling.intersection(beside))
            if looked.get(key) or is_image:
                continue
        kind = f"integers with scales ({dtype})" if beside else f"{_LOOSE} ({dtype})"
        yield Weight(name, name, kind if beside else _LOOSE, kind, is_scaled=bool(beside))


def _fits(info: TensorInfo, scale: TensorInfo) -> bool:
    """Return whether a float may be a scale of a tensor, or a code book for it, by their shapes."""
    is_book = len(scale.shape) == 1 and _is_power(scale.numel)
    return 2 * scale.numel <= info.numel and (is_book or grain(info.shape, scale.shape) is not None)


def _is_power(size: int) -> bool:
    return size & (size - 1) == 0


def _is_spread(name: str, info: TensorInfo) -> bool:
    """Return whether a matrix of 8-bit integers has many distinct values, as codes have."""
    return info.dtype.itemsize == 1 and len(info.shape) > 1 and len({*_first(name, info)}) > _FEW


def _scaled_beside(lack: Tensors, beside: Mapping[str, Tensors]) -> Iterator[Weight]:
    """Yield weights whose scales are probably in another file of the folder that has no such weights itself."""
    for file, tensors in beside.items():
        if any(one.dtype == lack[name].dtype for name, one in tensors.items() if name in lack):
            continue  # another model
        named = {f"{file}.{name}": info._replace(storage=None) for name, info in tensors.items()}
        there = {name: info for name, info in named.items() if _is_said(name) and not _TRAINING.search(name)}
        for name in _elsewhere({**lack, **there}, lack, dict.fromkeys(there, file)):
            dtype = lack[name].dtype.name
            kind, rule = (f"FP8{KINDS[dtype]}", _NAMED) if dtype in FP8 else (f"{_LOOSE} ({dtype})", _LOOSE)
            yield Weight(name, name, rule, f"{kind}, which {show(file)} may have", is_scaled=False)


def _first(name: str, info: TensorInfo) -> list[int]:
    """Return the first values of a tensor of integers; empty if they cannot be read."""
    data, size, is_signed = b"", info.dtype.itemsize, not info.dtype.name.startswith("u")
    first = next(cut_up((0,) * len(info.shape), info.shape, _HEAD_NBYTES // size))
    with suppress(Failure):  # reported elsewhere
        data = LazyTensor(name, part_of(info, *first)).read() if info.storage is not None else b""
    return [int.from_bytes(data[at : at + size], "little", signed=is_signed) for at in range(0, len(data), size)]


def _is_table(name: str, info: TensorInfo, *, is_said: bool = False, has_bias: bool = False) -> bool:
    """
    Return whether the first values are those of masks, positions or indices, rather than codes, which use all bits.

    If a tensor is named like a scale (``is_said``), codes may be small; with a bias, they may be signs.
    """
    first, size = _first(name, info), info.dtype.itemsize
    least, are_few = min(first, default=-1), 0 < len({*first}) < (2 if has_bias else 3)
    is_small = size > 1 and not is_said and max(map(abs, first), default=1 << 64) < 1 << _TOP_BITS[size]
    return is_small or are_few or (bool(first) and first == list(range(least, least + len(first))))


def _are_places(name: str, info: TensorInfo, book: TensorInfo) -> bool:
    """Return whether integers, perhaps packed 4-bit ones, are indices into a code book of numbers or rows."""
    first, size = _first(name, info) if len(book.shape) == 1 or len(info.shape) > 1 else [], max(book.shape, default=0)
    is_packed = size == 16 and info.dtype.name == "uint8" and not _is_table(name, info)
    return bool(first) and min(first) >= 0 and (max(first) < size or is_packed)


def _of(cls: str) -> str:
    """Return the library and the name of a class, as text."""
    return f"{cls.split('.')[cls.startswith('optimum.')]} {cls.rpartition('.')[2]}"


def _schemes(weights: list[Weight]) -> Iterator[Scheme]:
    for rule in dict.fromkeys(one.rule if one.rule not in (_NAMED, _LOOSE) else one.scheme for one in weights):
        same = [one for one in weights if rule in (one.rule, one.scheme)]
        said = Counter(one.scheme for one in same if one.is_scaled) or Counter(one.scheme for one in same)
        name = f"{'mostly ' * (len(said) > 1)}{said.most_common(1)[0][0]}"
        yield Scheme(show(name), tuple(one.name for one in same), tuple(one.name for one in same if not one.is_scaled))
