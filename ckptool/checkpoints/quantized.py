"""
Quantised weights: which tensors hold their values, and which their scales, code books and whatever else they need.

Names alone prove nothing: a net of one's own may have a ``weight_scale``. So a layout is a name with the type of what
holds the values, and the name of a scale that has to be beside it, of a type and shape that fit: see ``RULES``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Final, NamedTuple

from ckptool.messages import counted, show, some
from ckptool.tensors.tensor import TensorInfo

_FP8: Final = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})
FLOATS: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
_POWERS: Final = frozenset({"float8_e8m0fnu", "uint8"})
"""Types of scales that are powers of two."""
TYPES: Final = frozenset({*_FP8, "int8", "uint8", "int32", "uint32", "float4_e2m1fn_x2"})
"""The types of quantised values: a file without any of them has none, unless its tensors are of classes for them."""
_BESIDE: Final = re.compile(
    r".*(scale|absmax|zero|shift|quant|g_idx|smooth|codebook).*|SCB|biases|perm|weight_(shape|format)", re.DOTALL
)
"""The last component of the names of what a quantised weight needs."""
_OF_CACHES: Final = ("k_scale", "v_scale", "q_scale", "kv_scale")
_LIBRARIES: Final = ("torchao.", "optimum.quanto.", "bitsandbytes.")
_VALUES: Final = re.compile(r".*(weight|codes|packed|blocks|_data|W_q)", re.DOTALL)
"""Names of what holds values where settings beside the file say that they are quantised, and no layout is known."""


KEEP: Final = (
    "Keep values and scales together, as they are (`keep_dtype=`), or dequantise them with what quantised them; "
    "if this is meant, say so with `break_quantized=True`."
)


class Settings(NamedTuple):
    """What a file beside the weights says about their quantisation."""

    method: str
    where: str
    """The name of that file."""
    bits: int | None = None
    group: int | None = None


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
        return f"{self.name}, {scaled:,} of {counted(every, 'weight')} {'has' if every == 1 else 'have'} a scale"


class Quantization(NamedTuple):
    """What is quantised in a checkpoint."""

    schemes: tuple[Scheme, ...]
    settings: Settings | None
    belongs: Mapping[str, tuple[str, ...]]
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

    def damage(self, left: Mapping[str, str]) -> str | None:
        """Return what is wrong with a result, of which ``left`` has the tensors by name, and their types."""
        cast = [name for name, dtype in self.types.items() if left.get(name, dtype) != dtype]
        if cast:
            of = counted(len(self.types), "tensor")
            fact = f"a cast breaks quantised weights, {self.short}"
            return f"{fact}: it changes {len(cast):,} of the {of} that they consist of: {some(cast)}"
        kept = [(name, [one for one in others if one not in left]) for name, others in self.belongs.items()]
        lost = [f"{name} without {gone[0]}" for name, gone in kept if gone and name in left]
        if not lost:
            return None
        are = "is" if len(lost) == 1 else "are"
        return (
            f"{counted(len(lost), 'quantised weight')}, {self.short}, {are} left without what scales them: {some(lost)}"
        )


class _Set(NamedTuple):
    """What belongs together by its names."""

    values: TensorInfo
    scale: TensorInfo
    get: Callable[[str], TensorInfo | None]
    """Returns another tensor, by the end of its name."""
    settings: Settings | None


class _Rule(NamedTuple):
    """One layout: a name with types, and the name of its scale, both without the stem that they begin with."""

    name: str
    end: str
    types: frozenset[str]
    scales: tuple[str, ...]
    read: Callable[[_Set], str | None]
    """Returns what is to be said after the name; None where types or shapes contradict each other."""
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

    @property
    def module(self) -> str:
        return self.stem[:-1] if self.stem.endswith(".") else self.stem.rpartition(".")[0]


def find(
    tensors: Mapping[str, TensorInfo], settings: Callable[[], Settings | None], classes: Mapping[str, str]
) -> Quantization | None:
    """
    Return what is quantised among tensors; ``settings`` are asked for where some have the types of such values.

    ``classes`` are those of the modules that have the weights, in a whole model.
    """
    small = {name: info for name, info in tensors.items() if info.dtype.name in TYPES and info.shape}
    known = ((name, info.subclass or (classes.get(name) if name in small else None)) for name, info in tensors.items())
    of_class = [_of_class(name, cls) for name, cls in known if cls is not None and cls.startswith(_LIBRARIES)]
    said = settings() if any(len(info.shape) > 1 for info in small.values()) else None
    found = {one.name: one for one in _by_rules(tensors, small, said)}
    taken = {*found, *_beside(tensors, found)}
    rest = {name: info.dtype.name for name, info in small.items() if name not in taken and len(info.shape) > 1}
    found |= {one.name: one for one in _without_scale(rest, list(found.values()), said)}
    weights = [*found.values(), *of_class]
    beside = _beside(tensors, found)
    types = {name: tensors[name].dtype.name for name in (*found, *beside)}
    return Quantization(tuple(_schemes(weights)), said, _belongs(found, beside), types) if weights else None


def _by_rules(
    tensors: Mapping[str, TensorInfo], small: Mapping[str, TensorInfo], settings: Settings | None
) -> Iterator[_Weight]:
    for name, info in small.items():
        for rule in RULES:
            if info.dtype.name not in rule.types or not name.endswith(rule.end):
                continue
            stem = name[: len(name) - len(rule.end)]
            values = name if rule.values is None else stem + rule.values
            scale = next((tensors[stem + one] for one in rule.scales if stem + one in tensors), None)
            if scale is None or values not in tensors:
                continue
            found = _Set(tensors[values], scale, lambda end, stem=stem: tensors.get(stem + end), settings)  # type: ignore[misc]
            said = rule.read(found)
            if said is not None:
                yield _Weight(values, stem, rule.name, f"{rule.name}{said}")
                break


def _beside(tensors: Mapping[str, TensorInfo], weights: Mapping[str, _Weight]) -> dict[str, str]:
    """Return what quantised weights need to be read, each with the module that it is of."""
    modules = {one.module for one in weights.values()}
    stems = {one.stem: one.module for one in weights.values() if not one.stem.endswith(".")}
    found = {}
    for name in tensors if weights else ():
        head, _, last = name.rpartition(".")
        of_weight = head if head in stems else head.rpartition(".")[0]
        if name in weights:
            continue
        if of_weight and of_weight in stems:
            found[name] = stems[of_weight]
        elif last in _OF_CACHES or (head in modules and _BESIDE.fullmatch(last)):
            found[name] = head
    return found


def _belongs(weights: Mapping[str, _Weight], beside: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    of_module: dict[str, list[str]] = {}
    for name, module in beside.items():
        of_module.setdefault(module, []).append(name)
    count = Counter(one.module for one in weights.values())
    return {
        one.name: tuple(
            name for name in of_module.get(one.module, ()) if count[one.module] == 1 or name.startswith(one.stem)
        )
        for one in weights.values()
        if one.is_scaled
    }


def _without_scale(rest: Mapping[str, str], weights: list[_Weight], settings: Settings | None) -> Iterator[_Weight]:
    """Yield weights that are like those that have a scale, or of which the settings say that they are quantised."""
    ends = {one.name.rpartition(".")[2]: one.rule for one in weights}
    names = {one.rule for one in weights}
    types = {name: frozenset[str]().union(*(rule.types for rule in RULES if rule.name == name)) for name in names}
    for name, dtype in rest.items():
        last = name.rpartition(".")[2]
        rule, scheme = ends.get(last), ""
        if dtype in _FP8 and ("FP8" in names or settings):
            rule, scheme = "FP8", f"FP8{_kind(dtype)}"
        elif rule is None and settings and not weights and _VALUES.fullmatch(last):
            rule = scheme = settings.method
        if rule is not None and (scheme or dtype in types[rule]):
            yield _Weight(name, name.removesuffix("weight"), rule, scheme, is_scaled=False)


def _of_class(name: str, cls: str) -> _Weight:
    """Return a weight that is of a class of a library which quantises."""
    library = cls.split(".")[cls.startswith("optimum.")]
    return _Weight(name, name, cls, f"{library} {cls.rpartition('.')[2]}")


def _schemes(weights: list[_Weight]) -> Iterator[Scheme]:
    for rule in dict.fromkeys(one.rule for one in weights):
        same = [one for one in weights if one.rule == rule]
        said = Counter(one.scheme for one in same if one.is_scaled) or Counter(one.scheme for one in same)
        name = f"{'mostly ' * (len(said) > 1)}{said.most_common(1)[0][0]}"
        unscaled = tuple(one.name for one in same if not one.is_scaled)
        yield Scheme(show(name), tuple(one.name for one in same), unscaled)


def _grain(sizes: tuple[int, ...], scales: tuple[int, ...]) -> str | None:
    """Return what shares a scale, by the shapes; None if they cannot belong together."""
    if prod(scales) == 1 or scales[-2:] == (1, 1):
        return " per tensor"
    if len(scales) == 1:
        return " per row" if scales[0] in sizes[-2:] or scales[0] in sizes[:1] else None
    if len(scales) != len(sizes) or not all(scales) or any(map(int.__gt__, scales, sizes)):
        return None
    if scales[-2] == sizes[-2]:
        return _groups(sizes[-1], scales[-1])
    return f" in blocks of {_block(sizes[-2], scales[-2])}×{_block(sizes[-1], scales[-1])}"


def _groups(size: int, count: int) -> str:
    return " per row" if count < 2 else f" in groups of {_block(size, count)}"


def _block(size: int, count: int) -> int:
    """Return how long each of ``count`` blocks is, of which the last may be cut short: a power of two if that fits."""
    power = 1 << (-(-size // count) - 1).bit_length()
    return size if count == 1 else power if -(-size // power) == count else -(-size // count)


def _kind(dtype: str) -> str:
    return f" ({dtype.removeprefix('float8_').removesuffix('fn')})"


def _any(found: _Set) -> str | None:
    return "" if found.scale.dtype.name in FLOATS else None


def _fp8(found: _Set) -> str | None:
    grain = _grain(found.values.shape, found.scale.shape)
    if grain is None or found.scale.dtype.name not in FLOATS | _POWERS:
        return None
    return f"{_kind(found.values.dtype.name)}{grain}"


def _integers(found: _Set) -> str | None:
    return _grain(found.values.shape, found.scale.shape) if found.scale.dtype.name in FLOATS else None


def _bitsandbytes(found: _Set) -> str | None:
    many, scales = 2 * found.values.nbytes, found.scale.numel
    return f" in blocks of {_block(many, scales)}" if 0 < scales <= many else None


def _gptq(found: _Set) -> str | None:
    """Weights are packed along the inputs; there is a row of scales for each group of inputs."""
    values, scales, zeros, order = found.values.shape, found.scale.shape, found.get("qzeros"), found.get("g_idx")
    if len(values) != 2 or len(scales) != 2 or values[1] != scales[1] or not all((*values, *scales)):
        return None
    inputs = order.numel if order is not None else 0
    bits = 32 * values[0] // inputs if inputs else 32 * zeros.shape[-1] // scales[1] if zeros and zeros.shape else 0
    return f", {bits} bits,{_groups(32 * values[0] // bits, scales[0])}" if bits else ""


def _awq(found: _Set) -> str | None:
    """Weights are packed along the outputs."""
    values, scales = found.values.shape, found.scale.shape
    if len(values) != 2 or len(scales) != 2 or not all((*values, *scales)):
        return None
    bits = 32 * values[1] // scales[1]
    return f", {bits} bits,{_groups(values[0], scales[0])}" if bits in (2, 4, 8) else None


def _compressed(found: _Set) -> str | None:
    values, scales, zeros = found.values, found.scale, found.get("weight_zero_point")
    if len(values.shape) < 2 or len(scales.shape) < 2 or not all((*values.shape, *scales.shape)):
        return None
    if scales.dtype.name in _FP8:
        return f" NVFP4{_groups(2 * values.shape[-1], scales.shape[-1])}"
    if scales.dtype.name in _POWERS:
        return f" MXFP{8 * values.shape[-1] // (32 * scales.shape[-1])} in groups of 32"
    bits = found.settings.bits if found.settings else None
    if bits is None and zeros is not None and zeros.dtype.name == "int32" and zeros.shape:
        bits = -(-32 * zeros.shape[0] // values.shape[0])
    alone = " per row" if scales.shape[-1] == 1 else ""
    return f", {bits} bits,{_groups(32 * values.shape[-1] // bits, scales.shape[-1])}" if bits else alone


def _nvfp4(found: _Set) -> str | None:
    values = found.values.shape
    return _grain((*values[:-1], 2 * values[-1]), found.scale.shape) if found.scale.dtype.name in _FP8 else None


def _mxfp4(found: _Set) -> str | None:
    values, scales = found.values.shape, found.scale
    return f" in groups of {2 * values[-1]}" if scales.dtype.name == "uint8" and values[:-1] == scales.shape else None


def _torchao(found: _Set) -> str | None:
    """Values may be packed, and scales swizzled: their shapes then say nothing."""
    is_plain = found.scale.dtype.name in FLOATS and found.values.dtype.name in {*_FP8, "int8"}
    return f" {found.values.dtype.name}{_grain(found.values.shape, found.scale.shape) or ''}" if is_plain else ""


def _quanto(found: _Set) -> str | None:
    values, scales = found.values.shape, found.scale.shape
    if found.scale.dtype.name not in FLOATS:
        return None
    if found.get("._data") is None:  # of fewer bits, packed along the rows
        return f", {8 * values[0] // scales[0]} bits, in groups of {values[-1]}" if scales and scales[0] else None
    grain = _grain(values, scales)
    return None if grain is None else f" {found.values.dtype.name}{grain}"


def _mlx(found: _Set) -> str | None:
    if found.values.shape[:-1] != found.scale.shape[:-1] or found.scale.dtype.name not in FLOATS | _POWERS:
        return None
    said = found.settings
    return f", {said.bits} bits, in groups of {said.group}" if said and said.bits and said.group else ""


_WEIGHT_SCALES: Final = ("weight_scale_inv", "weight_scale", "scale_weight", "qscale_weight", "weight_scales", "scale")
_I8, _U8, _I32, _U32 = (frozenset({name}) for name in ("int8", "uint8", "int32", "uint32"))
RULES: Final = (
    _Rule("bitsandbytes NF4", ".quant_state.bitsandbytes__nf4", _U8, (".absmax",), _bitsandbytes, ""),
    _Rule("bitsandbytes FP4", ".quant_state.bitsandbytes__fp4", _U8, (".absmax",), _bitsandbytes, ""),
    _Rule("bitsandbytes int8", "weight", _I8, ("SCB", "weight.SCB"), _integers),
    _Rule("GPTQ", "qweight", _I32, ("scales",), _gptq),
    _Rule("AWQ", "qweight", _I32, ("scales",), _awq),
    _Rule("SVDQuant", "qweight", _I8, ("wscales",), _any),
    _Rule("compressed-tensors", "weight_packed", _I32 | _U8, ("weight_scale",), _compressed),
    _Rule("MXFP4", "_blocks", _U8, ("_scales",), _mxfp4),
    _Rule("torchao", "_qdata", TYPES, ("_scale",), _torchao),
    _Rule("quanto", "._data._data", _U8, ("._scale",), _quanto),
    _Rule("quanto", "._data", _I8 | _FP8, ("._scale",), _quanto),
    _Rule("HQQ", "W_q", TYPES, ("scale",), _any),
    _Rule("int8", "int8_weight", _I8, ("scale", "weight_scale", "int8_scale"), _any),
    _Rule("MLX", "weight", _U32, ("scales",), _mlx),
    _Rule("NVFP4", "weight", _U8 | {"float4_e2m1fn_x2"}, ("weight_scale",), _nvfp4),
    _Rule("int8", "weight", _I8 | _U8, _WEIGHT_SCALES, _integers),
    _Rule("FP8", "weight", _FP8, _WEIGHT_SCALES, _fp8),
    _Rule("FP8", "", _FP8, ("_scale_inv", "_scale", "_scales"), _fp8),
)
"""The layouts, those first whose names say most. FP8 and whole numbers are those of several libraries."""
