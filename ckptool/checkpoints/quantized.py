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
from typing import Final, NamedTuple, TypeAlias

from ckptool.messages import counted, show, some
from ckptool.tensors.tensor import TensorInfo

FLOATS: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
_FP8: Final = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})
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
        weights, have = counted(every, "weight"), "has" if every == 1 else "have"
        known = f"{scaled:,} of {weights} {have} a scale" if scaled else f"{weights} without a scale that is known"
        return f"{self.name}, {known}"


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

    def damage(self, left: Mapping[str, str]) -> str | None:
        """Return what is wrong with a result, of which ``left`` has the tensors by name, and their types."""
        cast = [name for name, dtype in self.types.items() if left.get(name, dtype) != dtype]
        if cast:
            many = f"{len(cast):,} of the {counted(len(self.types), 'tensor')} that they consist of"
            return f"a cast breaks quantised weights, {self.short}: it changes {many}: {some(cast)}"
        kept = [(name, [one for one in others if one not in left]) for name, others in self.belongs.items()]
        lost = [f"{name} without {gone[0]}" for name, gone in kept if gone and name in left]
        fact = f"{counted(len(lost), 'quantised weight')} ({self.short})"
        return (
            f"{fact} {'loses what scales it' if len(lost) == 1 else 'lose what scales them'}: {some(lost)}"
            if lost
            else None
        )


class _Rule(NamedTuple):
    """One layout: a name with types, and the name of its scale, both without the stem that they begin with."""

    name: str
    end: str
    types: frozenset[str]
    scales: tuple[str, ...]
    read: _Read
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
    said = settings() if any(info.shape[1:] or ".quant_state." in name for name, info in small.items()) else None
    found = {one.name: one for one in _by_rules(tensors, small, said)}
    rest = {name: info.dtype.name for name, info in small.items() if name not in found and len(info.shape) > 1}
    found |= {one.name: one for one in _without_scale(rest, list(found.values()), said)}
    weights = [*found.values(), *of_class]
    belongs, beside = _beside(tensors, found)
    types = {name: tensors[name].dtype.name for name in (*found, *beside)}
    return Quantization(tuple(_schemes(weights)), said, belongs, types) if weights else None


def _by_rules(
    tensors: Mapping[str, TensorInfo], small: Mapping[str, TensorInfo], settings: Settings | None
) -> Iterator[_Weight]:
    for name, info in small.items():
        for rule in (one for one in RULES if info.dtype.name in one.types and name.endswith(one.end)):
            stem = name[: len(name) - len(rule.end)]
            values = name if rule.values is None else stem + rule.values
            scale = next((tensors[stem + one] for one in rule.scales if stem + one in tensors), None)
            if scale is None or values not in tensors:
                continue
            said = rule.read(tensors[values], scale, (tensors, stem, settings))
            if said is not None:
                yield _Weight(values, stem, rule.name, f"{rule.name}{said}")
                break


def _beside(
    tensors: Mapping[str, TensorInfo], weights: Mapping[str, _Weight]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return what belongs to each of the weights that have scales, and the names of all that belongs to any."""
    of_module: dict[str, list[_Weight]] = {}
    for one in weights.values():
        of_module.setdefault(one.module, []).append(one)
    stems = {one.stem: one for one in weights.values() if not one.stem.endswith(".")}
    belongs: dict[str, list[str]] = {one.name: [] for one in weights.values() if one.is_scaled}
    found = []
    for name in (name for name in tensors if weights and name not in weights):
        head, _, last = name.rpartition(".")
        owner = stems.get(head) or stems.get(head.rpartition(".")[0] or head)
        owners = [owner] if owner else of_module.get(head, []) if _BESIDE.fullmatch(last) else []
        if owners or last in _OF_CACHES:
            found.append(name)
        for one in owners:
            if one.is_scaled and (len(owners) == 1 or name.startswith(one.stem)):
                belongs[one.name].append(name)
    return belongs, found


def _without_scale(rest: Mapping[str, str], weights: list[_Weight], settings: Settings | None) -> Iterator[_Weight]:
    """Yield weights that are like those that have a scale, or of which the settings say that they are quantised."""
    ends = {one.name.rpartition(".")[2]: one.rule for one in weights}
    types = {(rule.name, dtype) for rule in RULES for dtype in rule.types}
    for name, dtype in rest.items():
        last = name.rpartition(".")[2]
        rule, scheme = ends.get(last), ""
        if dtype in _FP8 and (settings or "FP8" in ends.values()):
            rule, scheme = "FP8", f"FP8{_kind(dtype)}"
        elif rule is None and settings and not weights and _VALUES.fullmatch(last):
            rule = scheme = settings.method
        if rule is not None and (scheme or (rule, dtype) in types) and not _BESIDE.fullmatch(last):
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
        yield Scheme(show(name), tuple(one.name for one in same), tuple(one.name for one in same if not one.is_scaled))


_Around: TypeAlias = "tuple[Mapping[str, TensorInfo], str, Settings | None]"
"""All tensors, the stem of the names of what belongs together, and what settings say."""
_Read: TypeAlias = "Callable[[TensorInfo, TensorInfo, _Around], str | None]"


def _grain(sizes: tuple[int, ...], scales: tuple[int, ...]) -> str | None:
    """Return what shares a scale, by the shapes; None if they cannot belong together."""
    if prod(scales) == 1 or scales[-2:] == (1, 1):
        return " per tensor"
    if len(scales) == 1:
        return " per row" if scales[0] in sizes[-2:] or scales[0] in sizes[:1] else None
    if len(scales) != len(sizes) or not all(scales) or any(map(int.__gt__, scales, sizes)):
        return None
    if scales[-2:] == (sizes[-2], 1):
        return " per row"
    rows, columns = _block(sizes[-2], scales[-2]), _block(sizes[-1], scales[-1])
    return f" in {'groups of ' if rows == 1 else f'blocks of {rows}×'}{columns}" if rows and columns else None


def _groups(size: int, count: int) -> str:
    return " per row" if count < 2 else f" in groups of {_block(size, count)}"


def _block(size: int, count: int) -> int:
    """Return how long blocks are, the last perhaps cut short: a power of two if that fits, 0 if nothing does."""
    least = -(-size // count)
    fitting = (one for one in (1 << (least - 1).bit_length(), least) if -(-size // one) == count)
    return size if count == 1 else next(fitting, 0)


def _kind(dtype: str) -> str:
    return f" ({dtype.removeprefix('float8_').removesuffix('fn')})"


def _scaled(values: TensorInfo, scale: TensorInfo, _: _Around) -> str | None:
    grain = _grain(values.shape, scale.shape)
    fits = scale.dtype.name in FLOATS or (scale.dtype.name in _POWERS and values.dtype.name in _FP8)
    return f"{_kind(values.dtype.name)}{grain}" if fits and grain else None


def _torchao(values: TensorInfo, scale: TensorInfo, around: _Around) -> str:
    """Values may be packed, and scales swizzled: then shapes say nothing."""
    is_plain = scale.dtype.name in FLOATS and values.dtype.name not in ("uint8", "int32")
    return (is_plain and _scaled(values, scale, around)) or ""


def _gptq(values: TensorInfo, scale: TensorInfo, around: _Around) -> str | None:
    """Packed along the inputs; a group of inputs has a row of scales."""
    if len(values.shape) != 2 or len(scale.shape) != 2 or values.shape[1] != scale.shape[1] or not values.numel:
        return None
    (rows, outputs), groups, (tensors, stem, _) = values.shape, scale.shape[0], around
    order, zeros = tensors.get(f"{stem}g_idx"), tensors.get(f"{stem}qzeros")
    bits = 32 * rows // order.numel if order is not None and order.numel else 0
    bits = bits or (32 * zeros.shape[-1] // outputs if zeros is not None and zeros.shape else 0)
    return f", {bits} bits,{_groups(32 * rows // bits, groups)}" if bits else ""


def _awq(values: TensorInfo, scale: TensorInfo, _: _Around) -> str | None:
    """Packed along the outputs."""
    if len(values.shape) != 2 or len(scale.shape) != 2 or not scale.shape[1]:
        return None
    bits = 32 * values.shape[1] // scale.shape[1]
    return f", {bits} bits,{_groups(values.shape[0], scale.shape[0])}" if bits in (2, 4, 8) else None


def _compressed(values: TensorInfo, scale: TensorInfo, around: _Around) -> str | None:
    tensors, stem, settings = around
    if len(values.shape) < 2 or len(scale.shape) < 2 or not all((*values.shape, *scale.shape)):
        return None
    columns, groups, zeros = values.shape[-1], scale.shape[-1], tensors.get(f"{stem}weight_zero_point")
    if scale.dtype.name in _FP8:
        return f" NVFP4{_groups(2 * columns, groups)}"
    if scale.dtype.name in _POWERS:
        return f" MXFP{columns // (4 * groups)} in groups of 32"
    bits = settings.bits if settings else None
    if bits is None and zeros is not None and zeros.dtype.name == "int32" and zeros.shape:
        bits = -(-32 * zeros.shape[0] // values.shape[0])
    return f", {bits} bits,{_groups(32 * columns // bits, groups)}" if bits else " per row" * (groups == 1)


_WEIGHT_SCALES: Final = ("weight_scale_inv", "weight_scale", "scale_weight", "qscale_weight", "weight_scales", "scale")
_I8, _U8, _I32, _U32 = (frozenset({name}) for name in ("int8", "uint8", "int32", "uint32"))


def _rules() -> Iterator[_Rule]:
    """Yield the layouts, those first whose names say most. FP8 and integers are those of several libraries."""

    def four_bits(values: TensorInfo, scale: TensorInfo, _: _Around) -> str | None:
        many = 2 * values.nbytes
        return f" in blocks of {_block(many, scale.numel)}" if 0 < scale.numel <= many else None

    def nvfp4(values: TensorInfo, scale: TensorInfo, _: _Around) -> str | None:
        sizes = (*values.shape[:-1], 2 * values.shape[-1])
        return _grain(sizes, scale.shape) if scale.dtype.name in _FP8 else None

    def mxfp4(values: TensorInfo, scale: TensorInfo, _: _Around) -> str | None:
        is_one = scale.dtype.name == "uint8" and values.shape[:-1] == scale.shape
        return f" in groups of {2 * values.shape[-1]}" if is_one else None

    def packed_rows(values: TensorInfo, scale: TensorInfo, _: _Around) -> str | None:
        bits = 8 * values.shape[0] // max(scale.numel, 1)
        return f", {bits} bits, in groups of {values.shape[-1]}" if scale.dtype.name in FLOATS else None

    def mlx(values: TensorInfo, scale: TensorInfo, around: _Around) -> str | None:
        said, fits = around[2], values.shape[:-1] == scale.shape[:-1] and scale.dtype.name in FLOATS | _POWERS
        return (f", {said.bits} bits, in groups of {said.group}" if said and said.group else "") if fits else None

    for kind in ("nf4", "fp4"):
        end = f".quant_state.bitsandbytes__{kind}"
        yield _Rule(f"bitsandbytes {kind.upper()}", end, _U8, (".absmax",), four_bits, "")
    yield _Rule("bitsandbytes", "weight", _I8, ("SCB", "weight.SCB"), _scaled)
    yield _Rule("GPTQ", "qweight", _I32, ("scales",), _gptq)
    yield _Rule("AWQ", "qweight", _I32, ("scales",), _awq)
    yield _Rule("compressed-tensors", "weight_packed", _I32 | _U8, ("weight_scale",), _compressed)
    yield _Rule("MXFP4", "_blocks", _U8, ("_scales",), mxfp4)
    yield _Rule("torchao", "_qdata", TYPES, ("_scale",), _torchao)
    yield _Rule("quanto", "._data._data", _U8, ("._scale",), packed_rows)
    yield _Rule("quanto", "._data", _I8 | _FP8, ("._scale",), _scaled)
    yield _Rule("HQQ", "W_q", TYPES, ("scale",), lambda *found: "" if found[1].dtype.name in FLOATS else None)
    yield _Rule("integers", "int8_weight", _I8, ("scale", "weight_scale", "int8_scale"), _scaled)
    yield _Rule("MLX", "weight", _U32, ("scales",), mlx)
    yield _Rule("NVFP4", "weight", _U8 | {"float4_e2m1fn_x2"}, ("weight_scale",), nvfp4)
    yield _Rule("integers", "weight", _I8 | _U8, _WEIGHT_SCALES, _scaled)
    yield _Rule("FP8", "weight", _FP8, _WEIGHT_SCALES, _scaled)
    yield _Rule("FP8", "", _FP8, ("_scale_inv", "_scale", "_scales"), _scaled)


RULES: Final = tuple(_rules())
