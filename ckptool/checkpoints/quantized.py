"""
Quantised weights: which tensors hold their values, and which their scales, code books and whatever else they need.

Names alone prove nothing: a net of one's own may have a ``weight_scale``. So a layout is a name with the type of what
holds the values, and the name of a scale that has to be beside it, of a type and shape that fit: see ``RULES``.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Final, NamedTuple, TypeAlias

from ckptool.checkpoints.companions import PartOf
from ckptool.errors import Failure
from ckptool.messages import counted, show, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.pickles.numpy_values import numpy_array, numpy_scalar
from ckptool.tensors.dtypes import BY_NAME
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo

FLOATS: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
_FP8: Final = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})
CASTABLE: Final = FLOATS | _FP8
_POWERS: Final = frozenset({"float8_e8m0fnu", "uint8"})
"""Types of scales that are powers of two."""
_OF_TORCH: Final = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})
_WORDS: Final = frozenset({"int16", "int32", "uint16", "uint32", "int64", "uint64"})
"""Types that indices have, too."""
TYPES: Final = _FP8 | _OF_TORCH | _WORDS | {"int8", "uint8", "float4_e2m1fn_x2"}
"""The types of quantised values: a file without any of them has none, unless its tensors are of classes for them."""
_BESIDE: Final = re.compile(
    r".*(scal|amax|absmax|zero|shift|quant|g_idx|smooth|codebook).*|SCB|biases|perm|zp|weight_(shape|format)", re.DOTALL
)
"""The last component of the names of what a quantised weight needs."""
_KINDS: Final = {name: f" ({name.removeprefix('float8_').removesuffix('fn')})" for name in TYPES}
_LONGEST: Final = 256
"""Of what the names of several weights of one module differ by."""
_MOST: Final = 32
"""Weights that a scale elsewhere is said to be of, and characters of a number in a text."""
_MOST_DICTS: Final = 1 << 16
_LONGEST_PATH: Final = 1 << 10
_NUMBER: Final = TensorInfo(BY_NAME["float64"], (), (), 0, None, "cpu")
_DEPTH: Final = 3
"""Of lists of numbers, and of what names in another dict have in front."""
_HEAD_NBYTES: Final = 1 << 12
_LIBRARIES: Final = ("torchao.", "optimum.quanto.", "bitsandbytes.")
_WEIGHT: Final = re.compile(
    r"(?!.*(mask|orig|sample|class|edge|loss)).*(weight|packed|W_q|qvalue|qdata|_q$).*|[qwW]\w?", re.DOTALL
)
"""Names of what holds values where no layout is known, and a float that is no bias is beside it."""
_VALUES: Final = re.compile(r"kernel|values|table|.*(codes|blocks)", re.DOTALL)
"""The same where what is beside has the name of a scale, or fits."""
_CODES: Final = re.compile(r"(labels?|codes?|ind(ex|ices)|idxs?|assign(ment)?s?|clusters?)\Z")
_BOOK: Final = re.compile(r"codebooks?|code_?words?|centroids?|cent(er|re)s|palette|lut|lookup|levels")
"""Names of places in a code book, and of the book."""
_INDEX: Final = re.compile(
    r"(^|_)(i[dx]s?|idxs?|index|indices|masks?|positions?|perm|offsets?|labels?|counts?)\Z", re.IGNORECASE
)
_SCALE: Final = re.compile(r"scal(?!ar)|amax|quant")
"""In names of scales of layouts that are not known."""
_PARAMETER: Final = re.compile(r"(?<!scale_)bias\Z|(logit|layer|res)_?scale|scale_shift_table|norm[^.]*\.scale\Z")
"""The same in names of what a net has itself."""
_OF_ALL: Final = re.compile(
    r"(code_?books?|centroids?)|(?!.*(scaler|loss|grad|logit|image|lr|arg|conf|param|opt))(\w+\.)?([a-z]+_)*scales?"
)
"""Names of one scale, or code book, for a whole net."""
_TOLD: Final = re.compile(rf"{_SCALE.pattern}|zero|{_BOOK.pattern}")
"""In names of dicts of scales and code books."""
_OF_NAME: Final = re.compile(
    r"(_(w|q|s|inv|de|zero|point|zp|amax|min|max|bits|step|delta|factor|scal[a-z]*|quant[a-z]*))+\Z"
)
"""What names of scales have behind that of their weight."""
_NO_VALUES: Final = re.compile(r"mask|sample|class|edge|loss|type|token|target|label|index|indices|count")
_TOP_BITS: Final = {1: 7, 2: 8, 4: 16, 8: 48}
"""Bits of the numbers in tables, by the bytes that they have."""
_OF_NET: Final = re.compile(r"norm|gamma|beta|token|embed|pos|_g\Z|original|(^|\.)D\Z|dt_|temperature|mean|std|var\Z")
"""In names of floats that are no scales of the matrix that they fit."""
_NO_SCALE: Final = re.compile(r"(?<!scale_)bias\Z|norm\Z")
_KEEP: Final = (
    "Keep values and scales together, as they are (`keep_dtype=`), or dequantise them with what quantised them; "
    "if this is meant, say so with `break_quantized=True`."
)


def keep(part: PartOf | None) -> str:
    """Return what to do about quantised weights in a file that may be ``part`` of several."""
    return f"{_KEEP} The rest of them may be in other files: give {show(part.path)}." if part else _KEEP


class Settings(NamedTuple):
    """What a file beside the weights says about their quantisation."""

    method: str
    where: str
    """The name of that file."""
    bits: int | None = None


class Scheme(NamedTuple):
    """The weights of a checkpoint that are quantised in one way."""

    name: str
    """With what shares a scale: ``FP8 (e4m3) in blocks of 128×128``."""
    weights: tuple[str, ...]
    """The names of what holds the values."""
    unscaled: tuple[str, ...]
    """Those of them that have no scale."""

    def __str__(self) -> str:
        every, scaled = len(self.weights), len(self.weights) - len(self.unscaled)
        weights, have = counted(every, "weight"), "has" if every == 1 else "have"
        known = f"{scaled:,} of {weights} {have} a scale" if scaled else f"{weights} without a scale that is known"
        return f"{self.name}, {known}" if every else self.name


class Quantization(NamedTuple):
    """What is quantised in a checkpoint."""

    schemes: tuple[Scheme, ...]
    settings: Settings | None
    belongs: Mapping[str, list[str]]
    """For what holds the values of a weight, its scales and whatever else they mean nothing without."""
    types: Mapping[str, str]
    """The types of all of these."""

    def __str__(self) -> str:
        said = "; ".join(map(str, self.schemes))
        return f"{said}; {show(self.settings.where)} says {show(self.settings.method)}" if self.settings else said

    @property
    def short(self) -> str:
        """The schemes alone."""
        return "; ".join(scheme.name for scheme in self.schemes)

    @property
    def numbers(self) -> set[str]:
        """The paths of scales that are no tensors."""
        return {one for others in self.belongs.values() for one in others} - self.types.keys()

    def within(self, entries: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield all of it that is in some entries, or in what they hold: its path, and that of the entry."""
        for name in {*self.types, *self.numbers}:
            ends = (*(at for at, one in enumerate(name) if one == "."), len(name))
            entry = next((name[:end] for end in ends if name[:end] in entries), None)
            if entry is not None:
                yield name, entry

    def damage(self, left: Mapping[str, str]) -> str | None:
        """Return what is wrong with a result, of which ``left`` has the tensors by name, and their types."""
        cast = [name for name, dtype in self.types.items() if left.get(name, dtype) != dtype]
        if cast:
            many = f"{len(cast):,} of the {counted(len(self.types), 'tensor')} that they consist of"
            return f"a cast breaks quantised weights, {self.short}: it changes {many}: {some(cast)}"
        kept = [(name, [one for one in others if one not in left]) for name, others in self.belongs.items()]
        lost = [f"{name} without {gone[0]}" for name, gone in kept if gone and name in left]
        loses = "loses what scales it" if len(lost) == 1 else "lose what scales them"
        return f"{counted(len(lost), 'quantised weight')} ({self.short}) {loses}: {some(lost)}" if lost else None

    def apart(self, after: Quantization | None, names: Mapping[str, str]) -> set[str]:
        """Return the scales that are not those of their weights in what is found ``after``, by ``names``, new ones."""
        found = {name: set(others) for name, others in after.belongs.items()} if after is not None else {}
        both = (self.schemes, after.schemes if after is not None else ())
        loose, now = ({name for one in by if "with scales" in one.name for name in one.weights} for by in both)
        found |= {new: set() for name, new in names.items() if new in now and name not in loose}  # no loader finds them
        kept = [(found.get(names[name], set()), others) for name, others in self.belongs.items() if name in names]
        return {one for of, others in kept for one in others if names.get(one) not in of}


class _Rule(NamedTuple):
    """One layout: a name with types, and the name of its scale, both without the stem that they begin with."""

    name: str
    end: str
    types: frozenset[str]
    scales: tuple[str, ...]
    read: _Read
    """
    Returns what is to be said after the name, and the sizes of the values, unpacked, and of the scale; none, if they
    say nothing. None where types or shapes contradict each other.
    """
    values: str | None = None
    """The end of the name of what holds the values, if it is another."""


class _Weight(NamedTuple):
    """What holds the values of one weight."""

    name: str
    stem: str
    """What the names of its scales begin with."""
    rule: str
    scheme: str
    is_scaled: bool = True
    needs: tuple[str, ...] = ()
    """Names of what belongs to it that do not tell."""

    @property
    def module(self) -> str:
        return self.stem[:-1] if self.stem.endswith(".") else self.stem.rpartition(".")[0]


def numbers_in(extras: Iterable[tuple[str, Inert]]) -> dict[str, TensorInfo]:
    """Return the numbers, and lists of them, among what is no tensor, as tensors without bytes: some may be scales."""
    found: dict[str, TensorInfo] = {}
    seen: set[int] = set()
    todo = list(extras)
    while todo and len(seen) < _MOST_DICTS:
        path, node = todo.pop()
        number = _number(node)
        if number is not None:
            found[path] = number
        elif id(node) not in seen and len(path) < _LONGEST_PATH:
            seen.add(id(node))
            pairs = node.items() if isinstance(node, dict) else nodes.mapping_pairs(node) or nodes.attribute_pairs(node)
            todo += [(f"{path}.{key}".lstrip("."), one) for key, one in pairs if isinstance(key, str | int)]
    return found


def _number(node: Inert, depth: int = _DEPTH) -> TensorInfo | None:
    if isinstance(node, list | tuple):
        first = _number(node[0], depth - 1) if node and depth else None
        return first._replace(shape=(len(node), *first.shape)) if first is not None else None
    array = numpy_array(node, lambda _: None)
    if array is not None:
        return _NUMBER._replace(dtype=BY_NAME[array.dtype], shape=array.shape) if array.dtype in BY_NAME else None
    value = (numpy_scalar(node) or ("", node))[1]
    if isinstance(value, str) and len(value) < _MOST:  # in the metadata of a safetensors file
        with suppress(ValueError):
            value = float(value)
    kind = {float: "float64", int: "int64"}.get(type(value))
    return _NUMBER._replace(dtype=BY_NAME[kind]) if kind else None


def find(
    tensors: _Tensors,
    numbers: _Tensors,
    homes: _Names,
    settings: Callable[[], Settings | None],
    classes: _Names,
    *,
    is_part: bool,
) -> Quantization | None:
    """
    Return what is quantised among tensors; ``settings`` are asked for where some have the types of such values.

    ``numbers`` are those that are no tensors, and may be scales. ``homes`` are the keys of the state dicts of the
    tensors, ``classes`` those of the modules of a whole model. If ``is_part``, other files may have what is not here.
    """
    own = tensors.keys()
    small = {name: info for name, info in tensors.items() if info.dtype.name in TYPES and info.shape}
    tensors = {**numbers, **tensors} if small else tensors
    known = ((name, info.subclass or (classes.get(name) if name in small else None)) for name, info in tensors.items())
    of_class = [_Weight(name, name, cls, _of(cls)) for name, cls in known if cls and cls.startswith(_LIBRARIES)]
    said = settings() if any(_may_be_values(name, info) for name, info in small.items()) else None
    below: dict[str, list[str]] = {}
    for name in tensors if small else ():
        below.setdefault(name.rpartition(".")[0], []).append(name)
    found = {one.name: one for one in _by_rules(tensors, small, said, below)}
    rest = {name: info for name, info in small.items() if name not in found}
    found |= {one.name: one for one in _without_scale(rest, list(found.values()), said)}
    floats = {name for name, info in tensors.items() if rest and info.dtype.name in FLOATS | _POWERS}
    scales = [name for name in tensors if name in floats and _SCALE.search(name) and not _PARAMETER.search(name)]
    scales = [name for name in scales if name in own or _OF_ALL.fullmatch(name)]
    rest = {name: info for name, info in rest.items() if name not in found}
    apart = _apart(rest, [name for name in tensors if rest and (name in floats or name in numbers)], homes)
    others = _of_other_names(tensors, rest, scales, below, apart, bool(found), is_part=is_part)
    unknown = {one.name: one for one in others}
    if said and not found and not unknown:
        found = {one.name: one for one in _of_settings(rest, said, floats, below)}
    found |= unknown
    found |= {one.name: one for one in _unexplained(rest, floats & own, homes) if one.name not in found}
    belongs, beside = _beside(tensors, {one.name: one for one in of_class} | found)
    if unknown and scales:
        scales += [name for name in tensors if "zero_point" in name.rpartition(".")[2]]
        beside += _nearest(sorted({*scales} - {*beside, *found}), belongs)
    schemes = list(_schemes([*found.values(), *of_class]))
    alone = sorted(one for one in own - beside if one.endswith(_ALONE)) if is_part else []
    alone = [one for one in alone if f"{one.rpartition('.')[0]}.weight".lstrip(".") not in tensors]
    schemes += [Scheme("scales of weights in another file", (), ())] if alone else []
    types = {name: tensors[name].dtype.name for name in (*found, *beside, *alone) if name in own}
    return Quantization(tuple(schemes), said, belongs, types) if schemes else None


def _may_be_values(name: str, info: TensorInfo) -> bool:
    return info.numel > 1 and not _INDEX.search(name.rpartition(".")[2])


def _by_rules(tensors: _Tensors, small: _Tensors, settings: Settings | None, below: _Below) -> Iterator[_Weight]:
    for name, info in small.items():
        for rule in (one for one in RULES if info.dtype.name in one.types and name.endswith(one.end)):
            stem = name[: len(name) - len(rule.end)]
            values = name if rule.values is None else stem + rule.values
            there = [stem + one for one in rule.scales if stem + one in tensors]
            if not there or values not in tensors:
                continue
            read = rule.read(tensors[values], tensors[there[0]], (tensors, stem, settings))
            grain = _grain(*read[1:]) if read is not None else None
            if read is not None and grain is not None:
                needs = (*there, *_near(values, below)) if rule.read is _named else there
                yield _Weight(values, stem, rule.name, f"{rule.name}{read[0]}{grain}", needs=tuple(needs))
                break


def _near(name: str, below: _Below) -> list[str]:
    """Return the names of what is in one module with a tensor, and is no bias; none if that is more than a layer."""
    inside, there = below.get(name, []), below[name.rpartition(".")[0]]
    is_layer = len(inside) + len(there) <= _LONGEST
    return [one for one in (*inside, *there) if one != name and not _NO_SCALE.search(one)] if is_layer else []


def _beside(tensors: _Tensors, weights: Mapping[str, _Weight]) -> tuple[dict[str, list[str]], list[str]]:
    """Return what belongs to each of the weights, and the names of all that belongs to any."""
    by_stem = {one.stem: one for one in weights.values()}
    by_stem |= {
        name.rpartition(".")[0]: one for one in weights.values() for name in one.needs if "." in name[len(one.stem) :]
    }
    alone: dict[str, _Weight | None] = {}
    for one in weights.values():
        alone[one.module] = None if one.module in alone else one
    belongs = {name: [need for need in one.needs if need not in weights] for name, one in weights.items()}
    needed = dict.fromkeys(name for needs in belongs.values() for name in needs)
    found = list(needed)
    for name in (name for name in tensors if weights and name not in weights and name not in needed):
        head, _, last = name.rpartition(".")
        owner = (by_stem.get(head) or by_stem.get(head.rpartition(".")[0])) if head else None
        is_of_module = owner is None and head in alone and _BESIDE.fullmatch(last) is not None
        if is_of_module:
            ends = range(min(len(name), len(head) + _LONGEST), len(head), -1)
            owner = alone[head] or next((by_stem[name[:end]] for end in ends if name[:end] in by_stem), None)
        if owner is not None or is_of_module or last in ("k_scale", "v_scale", "q_scale", "kv_scale"):
            found.append(name)
        if owner is not None:
            belongs[owner.name].append(name)
    return belongs, found


def _apart(rest: _Tensors, names: Iterable[str], homes: _Names) -> dict[str, list[str]]:
    """
    Return the numbers of other dicts that have the name of a weight, or of its module, with more behind it perhaps.

    Another dict has another key; or the name of scales, where keys are parts of the names of all tensors.
    """
    owners: dict[tuple[str, bool], list[str]] = {}
    for name in rest:
        parts = name.split(".")
        ends = [".".join(parts[start:]) for start in range(_DEPTH if len(parts) > _DEPTH else 2)]
        for is_told, texts in ((False, [name.removeprefix(f"{homes.get(name, '')}.")]), (True, ends)):
            for text in {*texts, *(one.rpartition(".")[0] for one in texts)}:
                owners.setdefault((text, is_told), []).append(name)
    found: dict[str, list[str]] = {}
    at_home, of_all = {homes.get(name) for name in rest}, 0
    for name in names if owners else ():
        *heads, last = parts = name.split(".")
        home, is_book = homes.get(name), _BOOK.search(name) is not None
        if len(name) > _LONGEST_PATH or (at_home == {home} and heads and not _TOLD.search(name)):
            continue
        of: set[str] = set()
        if _OF_ALL.fullmatch(name) and (of_all := of_all + 1) <= _MOST:
            apart = (one for one in rest if not heads or homes.get(one) != home)
            of |= {one for one in apart if (_CODES.search(one) if is_book else rest[one].dtype.name not in _WORDS)}
        is_behind = _SCALE.search(last) or _OF_NAME.fullmatch(f"_{last}")
        for start in range(1, min(len(parts), _DEPTH + 1)):
            is_told = any(map(_TOLD.search, heads[:start]))
            whole = {".".join(parts[start:]), *([".".join(heads[start:])] if is_behind else [])}
            for text in (whole | {_OF_NAME.sub("", one) for one in whole}) - {""}:
                of |= {*owners.get((text, True), ())[:_MOST]} if is_told else set()
                of |= {one for one in owners.get((text, False), ())[:_MOST] if homes.get(one) != home}
        for one in of:
            found.setdefault(one, []).append(name)
    return found


def _of_other_names(
    tensors: _Tensors,
    rest: _Tensors,
    scales: list[str],
    below: _Below,
    apart: _Below,
    is_some: bool,
    *,
    is_part: bool,
) -> Iterator[_Weight]:
    """Yield weights of no known layout: of 8 bits or of torch's types beside any scale, integers beside their own."""
    heads = {head for head, _, last in (name.rpartition(".") for name in scales) if _SCALE.search(last)}
    heads |= {head for head, _, last in (name.rpartition(".") for name in heads) if _SCALE.search(last)}
    fitting = {name: _fitting(name, tensors, below, apart) for name, info in rest.items() if len(info.shape) > 1}
    fp8 = [bool(fitting[name]) for name in fitting if rest[name].dtype.name in _FP8]
    for name, info in rest.items():
        (head, _, last), dtype, is_flat = name.rpartition("."), info.dtype.name, len(info.shape) < 2
        near = [one for one in _near(name, below) if tensors[one].dtype.name in FLOATS | _POWERS]
        books = [one for one in near if _CODES.search(last) and _BOOK.search(one.rpartition(".")[2])]
        books += [one for one in apart.get(name, ()) if _BOOK.search(one)]
        if books and dtype not in _FP8 and _are_places(name, info, tensors[books[0]]):
            kind = f"codes with a code book ({dtype})"
            yield _Weight(name, name, kind, kind, needs=tuple(books))
            continue
        if _BESIDE.fullmatch(last) or (dtype in _WORDS and (is_flat or _INDEX.search(last))):
            continue
        fits = fitting.get(name, [])
        if dtype in _FP8 | _OF_TORCH:
            where = "under other names" if scales or fits else "in another file"
            kind = f"torch ({dtype})" if dtype in _OF_TORCH else f"FP8{_KINDS[dtype]}, with scales {where}"
            is_near = bool(scales) or (is_part and dtype in _FP8)
            # In a net of 8 bits without scales, a few of the matrices may have a parameter beside them that fits.
            if (is_near and not (is_flat and is_some)) or (fits and dtype in _FP8 and 2 * sum(fp8) >= len(fp8)):
                yield _Weight(name, name, kind, kind, dtype not in _FP8, tuple(fits))
            continue
        is_weight = _WEIGHT.fullmatch(last) is not None
        there = _near(name, below) if is_weight else fits
        numels = [tensors[one].numel for one in (near if is_weight else fits)]
        is_values = is_weight or _VALUES.fullmatch(last) or (dtype == "int8" and not _NO_VALUES.search(last))
        if is_values and (numels or fits or {head, name} & heads):
            is_told = last.startswith("q") or any("zero" in one or one.startswith(f"{name}_") for one in there)
            may_be_table = not is_told and (numels == [1] or dtype == "int64" or not is_weight)
            if not (may_be_table and _is_table(_first(name, info), info)):
                kind = f"integers with scales ({dtype})"
                yield _Weight(name, name, kind, kind, needs=(*there, *apart.get(name, ())))


def _fitting(name: str, tensors: _Tensors, below: _Below, apart: _Below) -> list[str]:
    """Return the floats in the module of a matrix that are one for it all, for a row, a column or a block."""
    info, more = tensors[name], apart.get(name, [])
    types = FLOATS | _POWERS if info.dtype.name in _FP8 else CASTABLE
    near = [one for one in _near(name, below) if not (_OF_NET.search(one.rpartition(".")[2]) or _PARAMETER.search(one))]
    found = [one for one in (*near, *more) if tensors[one].dtype.name in types and tensors[one].numel < info.numel]
    is_number = {
        one for one in more if tensors[one].storage is None or (_OF_ALL.fullmatch(one) and not _BOOK.search(one))
    }
    return [one for one in found if one in is_number or _grain(info.shape, tensors[one].shape)]


def _first(name: str, info: TensorInfo) -> list[int]:
    """Return the first values of a tensor of integers; none if they cannot be read."""
    data, size, is_signed = b"", info.dtype.itemsize, not info.dtype.name.startswith("u")
    with suppress(Failure):  # others say so
        data = next(LazyTensor(name, info).chunks(_HEAD_NBYTES), b"") if info.storage is not None else b""
    return [int.from_bytes(data[at : at + size], "little", signed=is_signed) for at in range(0, len(data), size)]


def _is_table(first: list[int], info: TensorInfo) -> bool:
    """Say whether the first values are small numbers, as indices are, and values of four bits, packed, are not."""
    size = info.dtype.itemsize
    return bool(first) and min(first) >= 0 and max(first) < 1 << _TOP_BITS[size] and len({*first}) > 2


def _are_places(name: str, info: TensorInfo, book: TensorInfo) -> bool:
    """Say whether integers, perhaps of 4 bits, are places in a code book: of numbers, or of rows for a matrix."""
    first, size = _first(name, info) if len(book.shape) == 1 or len(info.shape) > 1 else [], max(book.shape, default=0)
    is_packed = size == 16 and info.dtype.name == "uint8" and not _is_table(first, info)
    return bool(first) and min(first) >= 0 and (max(first) < size or is_packed)


def _of_settings(rest: _Tensors, said: Settings, floats: set[str], below: _Below) -> Iterator[_Weight]:
    """Yield whatever may be values, as settings say that some are, with all that is in its module, or beside that."""
    above: dict[str, list[str]] = {}
    for head, names in below.items():
        above.setdefault(head.rpartition(".")[0], []).extend(names)
    for name, info in rest.items():
        if _may_be_values(name, info):
            near = _near(name, below)
            if floats.isdisjoint(near):
                near = above[name.rpartition(".")[0].rpartition(".")[0]][:_LONGEST]
            if not floats.isdisjoint(near) or _WEIGHT.fullmatch(name.rpartition(".")[2]):
                yield _Weight(name, name, said.method, said.method, False, tuple(near))


def _nearest(scales: list[str], belongs: Mapping[str, list[str]]) -> list[str]:
    """Add scales to the weights whose names begin most like theirs, or to all; return them."""
    weights = sorted(belongs)
    for scale in scales:
        at = bisect(weights, scale)
        alike, near = max((_alike(one, scale), one) for one in weights[max(at - 1, 0) : at + 1])
        for one in [near] if alike else weights[:_MOST]:
            belongs[one].append(scale)
    return scales


def _alike(one: str, other: str) -> int:
    """Return how many characters two names have in common at their beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _without_scale(rest: _Tensors, weights: list[_Weight], settings: Settings | None) -> Iterator[_Weight]:
    """Yield weights that are like those that have a scale, and those of 8 bits, if settings say that there are some."""
    ends = {one.name.rpartition(".")[2]: one.rule for one in weights}
    types = {(rule.name, dtype) for rule in RULES for dtype in rule.types}
    for name, dtype in ((name, info.dtype.name) for name, info in rest.items() if len(info.shape) > 1):
        last = name.rpartition(".")[2]
        rule, scheme = ends.get(last), ""
        if dtype in _FP8 and (settings or "FP8" in ends.values()):
            rule, scheme = "FP8", f"FP8{_KINDS[dtype]}"
        if rule is not None and (scheme or (rule, dtype) in types) and not _BESIDE.fullmatch(last):
            yield _Weight(name, name.removesuffix("weight"), rule, scheme, is_scaled=False)


def _unexplained(rest: _Tensors, floats: set[str], homes: _Names) -> Iterator[_Weight]:
    """
    Yield weights of 8-bit integers that have floats outside of their state dict.

    Few nets have such weights of their own: the floats may be what scales them, or a code book.
    """
    for name, info in rest.items():
        if info.dtype.name in ("int8", "uint8") and len(info.shape) > 1 and name.rpartition(".")[2] == "weight":
            elsewhere = sorted(one for one in floats if homes.get(one) != homes.get(name))[:_MOST]
            kind = f"integers without scales ({info.dtype.name})"
            if elsewhere:
                yield _Weight(name, name, kind, kind, is_scaled=False, needs=tuple(elsewhere))


def _of(cls: str) -> str:
    """Return the library and the name of a class."""
    return f"{cls.split('.')[cls.startswith('optimum.')]} {cls.rpartition('.')[2]}"


def _schemes(weights: list[_Weight]) -> Iterator[Scheme]:
    for rule in dict.fromkeys(one.rule for one in weights):
        same = [one for one in weights if one.rule == rule]
        said = Counter(one.scheme for one in same if one.is_scaled) or Counter(one.scheme for one in same)
        name = f"{'mostly ' * (len(said) > 1)}{said.most_common(1)[0][0]}"
        yield Scheme(show(name), tuple(one.name for one in same), tuple(one.name for one in same if not one.is_scaled))


_Names: TypeAlias = Mapping[str, str]
_Tensors: TypeAlias = Mapping[str, TensorInfo]
_Below: TypeAlias = Mapping[str, list[str]]
"""Names of tensors, by what they are directly under."""
_Around: TypeAlias = "tuple[_Tensors, str, Settings | None]"
"""All tensors, the stem of the names of what belongs together, and what settings say."""
_Sizes: TypeAlias = tuple[int, ...]
_Said: TypeAlias = "tuple[str, _Sizes, _Sizes] | None"
_Read: TypeAlias = "Callable[[TensorInfo, TensorInfo, _Around], _Said]"


def _grain(sizes: _Sizes, scales: _Sizes) -> str | None:
    """Return what shares a scale, by shapes; None if they cannot belong together. Without scales, nothing is said."""
    if not sizes:
        return ""
    if prod(scales) == 1 or scales[-2:] == (1, 1):
        return " per tensor"
    if len(scales) == 1 < len(sizes):
        return " per row" if scales[0] in (sizes[0], *sizes[-2:]) else None
    if len(scales) != len(sizes) or not all(scales):
        return None
    if scales[-2:] == (*sizes[-2:-1], 1):
        return " per row"
    rows, columns = _block(prod(sizes[-2:-1]), prod(scales[-2:-1])), _block(sizes[-1], scales[-1])
    return f" in {'groups of ' if rows == 1 else f'blocks of {rows}×'}{columns}" if rows and columns else None


def _block(size: int, count: int) -> int:
    """Return how long blocks are, the last perhaps cut short: a power of two if that fits, 0 if nothing does."""
    least = -(-size // count)
    fitting = (one for one in (1 << max(least - 1, 0).bit_length(), least or 1) if -(-size // one) == count)
    return size if count == 1 else next(fitting, 0)


def _plain(values: TensorInfo, scale: TensorInfo, _: _Around) -> _Said:
    fits = scale.dtype.name in FLOATS or (scale.dtype.name in _POWERS and values.dtype.name in _FP8)
    return (_KINDS[values.dtype.name], values.shape, scale.shape) if fits else None


def _named(*_: object) -> _Said:
    """The names alone say it."""
    return "", (), ()


def _packed_anyhow(values: TensorInfo, scale: TensorInfo, around: _Around) -> _Said:
    """Values may be packed, and scales swizzled: then shapes say nothing."""
    is_plain = scale.dtype.name in FLOATS and values.dtype.name not in ("uint8", "int32")
    return _plain(values, scale, around) if is_plain else ("", (), ())


def _four_bits(values: TensorInfo, scale: TensorInfo, _: _Around) -> _Said:
    length = _block(2 * values.nbytes, scale.numel) if scale.numel else 0
    return (f" in blocks of {length}", (), ()) if length else None


def _gptq(values: TensorInfo, scale: TensorInfo, around: _Around) -> _Said:
    """Packed along the inputs; a group of inputs has a row of scales."""
    if len(values.shape) != 2 or len(scale.shape) != 2 or values.shape[1] != scale.shape[1] or not values.numel:
        return None
    (rows, outputs), (tensors, stem, _) = values.shape, around
    order, zeros = tensors.get(f"{stem}g_idx"), tensors.get(f"{stem}qzeros")
    bits = 32 * rows // order.numel if order is not None and order.numel else 0
    bits = bits or (32 * zeros.shape[-1] // outputs if zeros is not None and zeros.shape else 0)
    return (f", {bits} bits,", (outputs, 32 * rows // bits), scale.shape[::-1]) if bits else ("", (), ())


def _awq(values: TensorInfo, scale: TensorInfo, _: _Around) -> _Said:
    """Packed along the outputs."""
    if len(values.shape) != 2 or len(scale.shape) != 2 or not scale.shape[1]:
        return None
    bits = 32 * values.shape[1] // scale.shape[1]
    return (f", {bits} bits,", (scale.shape[1], values.shape[0]), scale.shape[::-1]) if bits in (2, 4, 8) else None


def _packed(values: TensorInfo, scale: TensorInfo, around: _Around) -> _Said:
    """Packed along the columns; how many bits they have is in the settings, or follows from zeros, packed as well."""
    if not values.numel or not (scale.numel == 1 or (scale.numel > 0 and values.shape[:-1] == scale.shape[:-1])):
        return None
    rows, columns, (tensors, stem, settings) = values.shape[:-1], values.shape[-1], around
    if values.dtype.name in ("uint8", "float4_e2m1fn_x2"):
        if scale.dtype.name in _FP8:
            return " NVFP4", (*rows, 2 * columns), scale.shape
        is_mx = scale.dtype.name in _POWERS
        return (f" MXFP{columns // (4 * prod(scale.shape[-1:]))} in groups of 32", (), ()) if is_mx else None
    zeros, bits = tensors.get(f"{stem}weight_zero_point"), settings.bits if settings else None
    if bits is None and zeros is not None and zeros.dtype.name == "int32" and zeros.shape:
        bits = -(-32 * zeros.shape[0] // values.shape[0])
    return (f", {bits} bits,", (*rows, 32 * columns // bits), scale.shape) if bits else ("", (), ())


def _mxfp4(values: TensorInfo, scale: TensorInfo, _: _Around) -> _Said:
    is_one = scale.dtype.name == "uint8" and values.shape[:-1] == scale.shape
    return (f" in groups of {2 * values.shape[-1]}", (), ()) if is_one else None


def _rows(values: TensorInfo, scale: TensorInfo, _: _Around) -> _Said:
    """Packed along the rows, each of which is a group."""
    bits = 8 * values.shape[0] // max(scale.numel, 1)
    return (f", {bits} bits, in groups of {values.shape[-1]}", (), ()) if scale.dtype.name in FLOATS else None


_WEIGHT_SCALES: Final = ("weight_scale_inv", "weight_scale", "scale_weight", "qscale_weight", "weight_scales", "scale")
_NAMES: Final = ("int8", "uint8", "int16", "int32", "uint32", "float4_e2m1fn_x2")
_I8, _U8, _I16, _I32, _U32, _F4 = (frozenset({name}) for name in _NAMES)
_ANY: Final = TYPES - _FP8 - _OF_TORCH
RULES: Final = (
    _Rule("bitsandbytes NF4", ".quant_state.bitsandbytes__nf4", _U8, (".absmax",), _four_bits, ""),
    _Rule("bitsandbytes FP4", ".quant_state.bitsandbytes__fp4", _U8, (".absmax",), _four_bits, ""),
    _Rule("bitsandbytes", "weight", _I8, ("SCB", "weight.SCB"), _plain),
    _Rule("AQLM", "codes", _ANY, ("codebooks",), _named),
    _Rule("Marlin", "B", _I32, ("s", "s_channel"), _named),
    _Rule("Marlin", "B_24", _I32, ("s",), _named),
    _Rule("EXL2", "q_weight", _I32, ("q_scale_max",), _named),
    _Rule("EXL3", "trellis", _I16, ("suh", "svh", "su", "sv"), _named),
    _Rule("QTIP", "trellis", _ANY, ("SU", "SV"), _named),
    _Rule("QuIP#", "Qidxs", _ANY, ("SU", "SV", "Wscale", "Qscales"), _named),
    _Rule("HIGGS", "weight", _I16, ("tables",), _named),
    _Rule("VPTQ", "indices", _ANY, ("centroids.weight", "res_centroids.weight", "outlier_centroids.weight"), _named),
    _Rule("VPTQ", "indices", _ANY - {"int64"}, ("centroids",), _named),
    _Rule("product quantisation", "assignments", _ANY, ("centroids", "codebook", "centroids.weight"), _named),
    _Rule("SpQR", "dense_weights", _ANY, ("row_offsets",), _named),
    _Rule("SVDQuant", "qweight", _I8 | _I32, ("wscales",), _named),
    _Rule("GPTQ", "qweight", _I32, ("scales",), _gptq),
    _Rule("AWQ", "qweight", _I32, ("scales",), _awq),
    _Rule("compressed-tensors", "weight_packed", _I32 | _U8, ("weight_scale",), _packed),
    _Rule("MXFP4", "_blocks", _U8, ("_scales",), _mxfp4),
    _Rule("torchao", "_qdata", TYPES, ("_scale",), _packed_anyhow),
    _Rule("quanto", "._data._data", _U8, ("._scale",), _rows),
    _Rule("TransformerEngine", "._data", _U8, ("._scale_inv",), _plain),
    _Rule("quanto", "._data", _I8 | _FP8, ("._scale",), _plain),
    _Rule("HQQ", "W_q", TYPES, ("scale", "meta.scale", "scale_q", "meta.scale_q"), _named),
    _Rule("MLX", "weight", _U32, ("scales",), _packed),
    _Rule("integers", "int8_weight", _I8, ("scale", "weight_scale", "int8_scale"), _plain),
    _Rule("integers", "weight", _I8 | _U8, _WEIGHT_SCALES, _plain),
    _Rule("ModelOpt", "weight", _U8 | _F4, ("weight_scale",), _packed),
    _Rule("FP8", "weight", _FP8, _WEIGHT_SCALES, _plain),
    _Rule("FP8 with scales in _extra_state", "weight", _FP8, ("_extra_state",), _named),
    _Rule("FP8", "", _FP8, ("_scale_inv", "_scale", "_scales"), _plain),
    _Rule("packed", "", _U8 | _F4, ("_scale_inv", "_scale", "_scales"), _packed),
    _Rule("integers", "", _ANY, ("_scale_inv", "_scale", "_scales"), _plain),
)
"""The layouts, those first whose names say most. FP8 and integers are those of several libraries."""
_ALONE: Final = (
    *("proj_scale", ".suh", ".svh", ".q_scale_max", ".wscales", ".Wscale", ".centroids.weight"),
    *{end for rule in RULES if rule.read is not _named for end in rule.scales} - {"scale", "_scale"},
)
"""Ends of names of scales whose weights may be in another file: those that say what they are."""
