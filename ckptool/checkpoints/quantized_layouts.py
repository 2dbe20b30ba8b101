"""
Table of how libraries store quantised weights: names, bits, and which elements share a scale.

A layout is the name and dtype of the tensor with the values, and the name of a scale that must exist, too, with a dtype
and shape that fit: see ``RULES``. Names alone prove nothing: any model may have a ``weight_scale``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from math import prod
from typing import Final, NamedTuple, TypeAlias

from ckptool.tensors.tensor import TensorInfo

FLOATS: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
FP8: Final = frozenset({"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})
POWERS: Final = frozenset({"float8_e8m0fnu", "uint8"})
"""Dtypes of scales that are powers of two."""
OF_TORCH: Final = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})
INTEGERS: Final = frozenset({"int8", "uint8", "int16", "int32", "uint16", "uint32", "int64", "uint64"})
TYPES: Final = FP8 | OF_TORCH | INTEGERS | {"float4_e2m1fn_x2"}
"""The dtypes of quantised values: a file without them is not quantised, unless its tensors are of special classes."""
KINDS: Final = {name: f" ({name.removeprefix('float8_').removesuffix('fn')})" for name in TYPES}

Tensors: TypeAlias = Mapping[str, TensorInfo]


class Settings(NamedTuple):
    """The quantisation of weights by a file beside them."""

    method: str
    where: str
    """The name of that file."""
    bits: int | None = None
    says: Mapping[str, object] = {}
    """All of its settings, as JSON."""


class Weight(NamedTuple):
    """The tensor with the values of one quantised weight."""

    name: str
    stem: str
    """The prefix of the names of its scales."""
    rule: str
    scheme: str
    is_scaled: bool = True

    @property
    def places(self) -> set[str]:
        """The paths that its scales are directly below: its name, its stem, its module."""
        module = self.stem[:-1] if self.stem.endswith(".") else self.stem.rpartition(".")[0]
        return {self.name, self.stem.removesuffix("."), module}


class _Rule(NamedTuple):
    """One layout. Names are without the stem that the tensors of a weight have in common."""

    name: str
    end: str
    types: frozenset[str]
    scales: tuple[str, ...]
    read: _Read
    """
    Returns a text for after the name, and the shapes of the unpacked values and of the scale; the shapes are empty if
    they are not known. None if dtypes or shapes contradict each other.
    """
    values: str | None = None
    """The end of the name of the tensor with the values, if it is not ``end``."""


def by_rules(tensors: Tensors, small: Tensors, settings: Settings | None) -> Iterator[Weight]:
    """Yield the weights with a known layout among ``small``, the tensors with dtypes of quantised values."""
    for name, info in small.items():
        for rule in (one for one in RULES if info.dtype.name in one.types and name.endswith(one.end)):
            stem = name[: len(name) - len(rule.end)]
            values = name if rule.values is None else stem + rule.values
            there = next((stem + one for one in rule.scales if stem + one in tensors), None)
            if there is None or values not in tensors:
                continue
            read = rule.read(tensors[values], tensors[there], (tensors, stem, settings))
            shares = grain(*read[1:]) if read is not None else None
            if read is not None and shares is not None:
                yield Weight(values, stem, rule.name, f"{rule.name}{read[0]}{shares}")
                break


def scale_of(weight: Weight, tensors: Collection[str]) -> tuple[str, str] | None:
    """Return the end of a weight's name in its layout, and the name of its scale; None if it has no such scale."""
    for rule in (one for one in RULES if one.name == weight.rule):
        end = rule.end if rule.values is None else rule.values
        scale = next((weight.stem + one for one in rule.scales if weight.stem + one in tensors), None)
        if weight.name == weight.stem + end and scale is not None:
            return end, scale
    return None


_Around: TypeAlias = "tuple[Tensors, str, Settings | None]"
"""All tensors, the stem of a weight, and the settings."""
_Sizes: TypeAlias = tuple[int, ...]
_Said: TypeAlias = "tuple[str, _Sizes, _Sizes] | None"
_Read: TypeAlias = "Callable[[TensorInfo, TensorInfo, _Around], _Said]"


def grain(sizes: _Sizes, scales: _Sizes) -> str | None:
    """Return which elements share a scale, as text; empty without ``sizes``; None if the shapes do not fit."""
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
    """Return the length of ``count`` blocks, of which the last may be shorter: a power of two if possible, or 0."""
    least = -(-size // count)
    fitting = (one for one in (1 << max(least - 1, 0).bit_length(), least or 1) if -(-size // one) == count)
    return size if count == 1 else next(fitting, 0)


def _plain(values: TensorInfo, scale: TensorInfo, _: _Around) -> _Said:
    fits = scale.dtype.name in FLOATS or (scale.dtype.name in POWERS and values.dtype.name in FP8)
    return (KINDS[values.dtype.name], values.shape, scale.shape) if fits else None


def _named(*_: object) -> _Said:
    """Accept any shapes: the names alone prove the layout."""
    return "", (), ()


def _packed_anyhow(values: TensorInfo, scale: TensorInfo, around: _Around) -> _Said:
    """Check shapes only if values are not packed and scales are floats, which are not swizzled."""
    is_plain = scale.dtype.name in FLOATS and values.dtype.name not in ("uint8", "int32")
    return _plain(values, scale, around) if is_plain else ("", (), ())


def _four_bits(values: TensorInfo, scale: TensorInfo, _: _Around) -> _Said:
    length = _block(2 * values.nbytes, scale.numel) if scale.numel else 0
    return (f" in blocks of {length}", (), ()) if length else None


def _gptq(values: TensorInfo, scale: TensorInfo, around: _Around) -> _Said:
    """Values are packed along the inputs; each group of inputs has a row of scales."""
    if len(values.shape) != 2 or len(scale.shape) != 2 or values.shape[1] != scale.shape[1] or not values.numel:
        return None
    (rows, outputs), (tensors, stem, _) = values.shape, around
    order, zeros = tensors.get(f"{stem}g_idx"), tensors.get(f"{stem}qzeros")
    bits = 32 * rows // order.numel if order is not None and order.numel else 0
    bits = bits or (32 * zeros.shape[-1] // outputs if zeros is not None and zeros.shape else 0)
    return (f", {bits} bits,", (outputs, 32 * rows // bits), scale.shape[::-1]) if bits else ("", (), ())


def _awq(values: TensorInfo, scale: TensorInfo, _: _Around) -> _Said:
    """Values are packed along the outputs."""
    if len(values.shape) != 2 or len(scale.shape) != 2 or not scale.shape[1]:
        return None
    bits = 32 * values.shape[1] // scale.shape[1]
    return (f", {bits} bits,", (scale.shape[1], values.shape[0]), scale.shape[::-1]) if bits in (2, 4, 8) else None


def _packed(values: TensorInfo, scale: TensorInfo, around: _Around) -> _Said:
    """Values are packed along the columns; their bits are in the settings, or follow from packed zero points."""
    if not values.numel or not (scale.numel == 1 or (scale.numel > 0 and values.shape[:-1] == scale.shape[:-1])):
        return None
    rows, columns, (tensors, stem, settings) = values.shape[:-1], values.shape[-1], around
    if values.dtype.name in ("uint8", "float4_e2m1fn_x2"):
        if scale.dtype.name in FP8:
            return " NVFP4", (*rows, 2 * columns), scale.shape
        is_mx = scale.dtype.name in POWERS
        return (f" MXFP{columns // (4 * prod(scale.shape[-1:]))} in groups of 32", (), ()) if is_mx else None
    zeros, bits = tensors.get(f"{stem}weight_zero_point"), settings.bits if settings else None
    if bits is None and zeros is not None and zeros.dtype.name == "int32" and zeros.shape:
        bits = -(-32 * zeros.shape[0] // values.shape[0])
    return (f", {bits} bits,", (*rows, 32 * columns // bits), scale.shape) if bits else ("", (), ())


def _mxfp4(values: TensorInfo, scale: TensorInfo, _: _Around) -> _Said:
    is_one = scale.dtype.name == "uint8" and values.shape[:-1] == scale.shape
    return (f" in groups of {2 * values.shape[-1]}", (), ()) if is_one else None


def _rows(values: TensorInfo, scale: TensorInfo, _: _Around) -> _Said:
    """Values are packed along the rows; each row is a group."""
    bits = 8 * values.shape[0] // max(scale.numel, 1)
    return (f", {bits} bits, in groups of {values.shape[-1]}", (), ()) if scale.dtype.name in FLOATS else None


_WEIGHT_SCALES: Final = ("weight_scale_inv", "weight_scale", "scale_weight", "qscale_weight", "weight_scales", "scale")
_NAMES: Final = ("int8", "uint8", "int16", "int32", "uint32", "float4_e2m1fn_x2")
_I8, _U8, _I16, _I32, _U32, _F4 = (frozenset({name}) for name in _NAMES)
_ANY: Final = TYPES - FP8 - OF_TORCH
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
    _Rule("quanto", "._data", _I8 | FP8, ("._scale",), _plain),
    _Rule("HQQ", "W_q", TYPES, ("scale", "meta.scale", "scale_q", "meta.scale_q"), _named),
    _Rule("MLX", "weight", _U32, ("scales",), _packed),
    _Rule("integers", "int8_weight", _I8, ("scale", "weight_scale", "int8_scale"), _plain),
    _Rule("integers", "weight", _I8 | _U8, _WEIGHT_SCALES, _plain),
    _Rule("integers", "weight", _I8, ("alpha",), _plain),
    _Rule("packed", "packed", _U8, ("mn", "mx"), _named),
    _Rule("ModelOpt", "weight", _U8 | _F4, ("weight_scale",), _packed),
    _Rule("FP8", "weight", FP8, _WEIGHT_SCALES, _plain),
    _Rule("FP8 with scales in _extra_state", "weight", FP8, ("_extra_state",), _named),
    _Rule("FP8", "", FP8, ("_scale_inv", "_scale", "_scales"), _plain),
    _Rule("packed", "", _U8 | _F4, ("_scale_inv", "_scale", "_scales"), _packed),
    _Rule("integers", "", _ANY, ("_scale_inv", "_scale", "_scales"), _plain),
)
"""The layouts, those with the most specific names first. FP8 and integers are written by several libraries."""
ALONE: Final = (
    *("proj_scale", ".suh", ".svh", ".q_scale_max", ".wscales", ".Wscale", ".centroids.weight"),
    *{end for rule in RULES if rule.read is not _named for end in rule.scales} - {"scale", "_scale", "alpha"},
)
"""Specific ends of names of scales, by which scales are recognised whose weights are in another file."""
