"""
Quantised weights as plain ones: which can be made dense, and from which tensors.

Shapes and types are compared here, from the index alone. What does not fit is refused by name, before a value is read.
Scales, and all that has no meaning without them, are left out. Everything else stays as it is.

- FP8, integers of 8 bits: https://github.com/huggingface/transformers; src/transformers/integrations/finegrained_fp8.py
- MXFP4: the same; src/transformers/integrations/mxfp4.py
- bitsandbytes: https://github.com/bitsandbytes-foundation/bitsandbytes; bitsandbytes/functional.py
- GPTQ: https://github.com/ModelCloud/GPTQModel; gptqmodel/nn_modules/qlinear
- AWQ: https://github.com/casper-hansen/AutoAWQ; awq/utils/packing_utils.py
- compressed-tensors: https://github.com/vllm-project/compressed-tensors; src/compressed_tensors/compressors
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.quantized import BY_TORCHAO
from ckptool.checkpoints.quantized_layouts import FLOATS, FP8, INTEGERS, POWERS, Settings, Weight, scale_of
from ckptool.checkpoints.weights import Weights
from ckptool.errors import Failure, MigrationRefused
from ckptool.formats.json_beside import object_beside, quantization_of
from ckptool.formats.strict_json import parse_object
from ckptool.messages import some
from ckptool.tensors import dtypes
from ckptool.tensors.payloads import ComputedWeight
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity

_NUMBERS: Final = ("table", "inner_scale", "inner_table", "divisor", "factor")
"""Parts of a weight, other than scales, that are floats."""
_HALF: Final = ("bfloat16", "float16")
_MOST_NBYTES: Final = 1 << 16
_MOST_DIMS: Final = 64
_FEWEST_ROWS: Final = 16
"""Fewest rows of a block in any library, except single rows."""
_OF_ACTIVATIONS: Final = re.compile(
    r"((^|[._])(input|output|act|activation|k|v|q|kv|prob)_?(global_)?(scale|zero_point|amax)(_inv|_ub)?|\.scale_input)\Z"
)
"""Ends of the names of scales of activations and caches, of which a dense model has none."""
_READ_ELSEWHERE: Final = re.compile(
    r"(^|[._])(weight_format|weight_shape|weight_g_idx|g_idx|quant_map|absmax|nested_absmax|nested_quant_map|perm"
    r"|comfy_quant)\Z"
    r"|\.quant_state\."
)
_ZERO_OFFSETS: Final = {"gptq": 1, "gptq_v2": 0, "auto_round": 0, "auto_round:gptqmodel": 0, "auto_round:auto_gptq": 1}
"""What is added to zeros, by the name of the layout in settings: of GPTQModel and AutoGPTQ, or of AutoRound."""
_PLAIN_OF_COMFY: Final = "float8_"
"""Prefix of the names of ComfyUI's layouts in which scales are in the order of rows."""
_OTHERWISE: Final = "Leave it out with `exclude=`, or dequantise it with what quantised it."
_OTHER_ENDS: Final = {
    "._data": ("._data", ""),
    "int8_weight": ("int8_weight", "weight"),
    "_qdata": ("._weight_qdata", ".weight"),
}
"""Ends of the names of plain values, and of dense weights, in layouts where these differ."""


class Dense(NamedTuple):
    """One weight that can be made dense."""

    end: str
    """The end of its name."""
    new_end: str
    """The end of the name of the dense weight."""
    shape: tuple[int, ...]
    dtype: str
    """Its type if none is requested."""
    how: str
    """The function of ``torch_ops.dequantize`` that gets ``parts`` and ``facts``."""
    parts: Mapping[str, LazyTensor]
    facts: Mapping[str, float]
    is_turned: bool = False
    """Whether the dense weight is transposed: ``shape`` is [inputs, outputs]."""


class Found(NamedTuple):
    """One quantised weight in a checkpoint."""

    weight: Weight
    end: str
    values: LazyTensor
    scale: LazyTensor
    tensors: Mapping[str, LazyTensor]
    settings: Settings | None
    usual: str
    """The usual type of the weights that are not quantised."""

    @property
    def says(self) -> Mapping[str, Any]:
        """The settings beside the weights; empty if there are none."""
        return self.settings.says if self.settings is not None else {}

    def beside(self, end: str) -> LazyTensor | None:
        """Return the tensor whose name is the stem with this end; None if there is none."""
        return self.tensors.get(self.weight.stem + end)

    def dense(
        self,
        how: str,
        shape: tuple[int, ...],
        facts: Mapping[str, float],
        *,
        dtype: str = "",
        new_end: str = "weight",
        **more: LazyTensor | None,
    ) -> Dense:
        """Return how it becomes dense, from its values, its scale, and what of ``more`` is there."""
        parts = {"values": self.values, "scale": self.scale, **more}
        there = {key: part for key, part in parts.items() if part is not None}
        of_scale = self.scale.dtype if self.scale.dtype in _HALF else self.usual
        return Dense(self.end, new_end, shape, dtype or of_scale, how, there, facts)

    def refused(self, fact: str) -> MigrationRefused:
        """Return the error for a weight that is not what its names say."""
        return _not_dense(self.weight.name, fact)

    def unlike(self, shape: Sequence[int], scale: Sequence[int]) -> MigrationRefused:
        """Return the error for a shape that does not fit that of its scale."""
        return self.refused(f"its shape is {list(shape)}, and that of its scale {list(scale)}")


def _not_dense(weight: str, fact: str, hint: str = _OTHERWISE) -> MigrationRefused:
    """Return the error for a weight that cannot be made dense."""
    return MigrationRefused(f"{weight!r} cannot be made dense: {fact}", kind="not-dense", hint=hint)


def dense_of(
    weight: Weight, tensors: Mapping[str, LazyTensor], settings: Settings | None, usual: str = "bfloat16"
) -> Dense:
    """
    Return how a quantised weight becomes dense, with the ``usual`` type if nothing records its own.

    Raises:
        MigrationRefused: It has no scale, its layout is not known, or its parts do not fit each other.
    """
    named, kind = scale_of(weight, tensors), _KINDS.get(weight.rule)
    if "." in weight.rule:  # the name of a class
        hint = "Save it with its library in plain tensors, as to safetensors, or leave it out with `exclude=`."
        raise _not_dense(weight.name, f"it is an object of a class in a pickle, {weight.scheme}", hint)
    if kind is None or named is None or not weight.is_scaled:
        has_scale = kind is None and weight.is_scaled
        what = f"{weight.scheme or weight.rule}{'' if has_scale else ', without a scale'}"
        raise _not_dense(weight.name, what, f"What can: {', '.join(sorted(_KINDS))}. Leave it out with `exclude=`.")
    end, scale = named
    found = Found(weight, end, tensors[weight.name], tensors[scale], tensors, settings, usual)
    if (text := found.beside("comfy_quant")) is not None:
        form = str(_object(found, text).get("format"))
        if not form.startswith(_PLAIN_OF_COMFY):
            raise found.refused(f"its layout is {form[:40]!r}, of ComfyUI")
    dense = kind(found)
    if odd := [key for key, part in dense.parts.items() if key in _NUMBERS and part.dtype not in FLOATS]:
        raise found.refused(f"its {odd[0]} is of type {dense.parts[odd[0]].dtype}")
    if bare := [part.name for part in dense.parts.values() if part.info.storage is None]:
        raise found.refused(f"{bare[0]!r} has no values, as it is on the meta device")
    return dense


def _refuse_unknown(weight: str, others: Sequence[str]) -> None:
    """
    Refuse tensors that belong to a weight and are not used for it, unless they are known not to affect its values.

    Raises:
        MigrationRefused: There are such tensors: zeros, or a second scale, with names that the layout does not have.
    """
    unknown = [one for one in others if not (_OF_ACTIVATIONS.search(one) or _READ_ELSEWHERE.search(one))]
    if unknown:
        raise _not_dense(weight, f"what {some(unknown)} does to it is not known")


def _grid(found: Found, shape: tuple[int, ...], scale: tuple[int, ...], blocks: Sequence[Any] = ()) -> dict[str, int]:
    """Return the rows and columns of the blocks that share a scale; refuse shapes that are unclear or contradictory."""
    rows, columns = (*(1, 1), *shape)[-2:]
    if len(shape) < 2 and prod(scale) != 1:
        raise found.unlike(shape, scale)
    if prod(scale) == 1:
        every = max(prod(shape[:-1]), 1)
        return {"rows": every, "scale_rows": 1, "row_block": every, "column_block": columns}
    if len(shape) > 3 and scale in (shape[:1], (shape[0], *(1 for _ in shape[1:]))):  # of what a convolution makes
        every = prod(shape[1:-1])
        return {"rows": shape[0] * every, "scale_rows": shape[0], "row_block": every, "column_block": columns}
    if len(scale) == 1 < len(shape) < 4 and scale == shape[:1] and (len(shape) == 2 or scale[0] != rows):
        scale = (*scale, *(1 for _ in shape[1:]))  # of rows, or of whole matrices
    if len(scale) != len(shape) or scale[:-2] != shape[:-2] or not all(shape):
        raise found.unlike(shape, scale)
    high, wide = scale[-2:] if len(scale) > 1 else (1, scale[0])
    said = blocks or [*_said(found, "block_structure"), *([1, one] for one in _said(found, "group_size"))]
    fitting = {tuple(one) for one in said if _fits(one, (rows, columns), (high, wide))}
    if blocks and not fitting:
        raise found.unlike(shape, scale)
    sizes = fitting.pop() if len(fitting) == 1 else (_length(found, rows, high), _length(found, columns, wide))
    if not _fits(sizes, (rows, columns), (high, wide)) or (1 < sizes[0] < min(_FEWEST_ROWS, rows) and not said):
        raise found.unlike(shape, scale)
    return {"rows": rows, "scale_rows": high, "row_block": sizes[0], "column_block": sizes[1]}


def _fits(lengths: object, sizes: Sequence[int], counts: Sequence[int]) -> bool:
    """Return whether blocks of these lengths give these numbers of blocks of rows and of columns."""
    if not isinstance(lengths, list | tuple) or len(lengths) != 2 or not all(type(one) is int for one in lengths):
        return False
    every = zip(sizes, lengths, counts, strict=True)
    return all(length > 0 and -(-size // length) == count for size, length, count in every)


def _length(found: Found, size: int, count: int) -> int:
    """Return the length of equal blocks, or a power of two if the last block is shorter; 0 if neither fits."""
    if count == 1:
        return size
    least = -(-size // max(count, 1))
    power = 1 << max(least - 1, 0).bit_length()
    fitting = {one for one in (least if least * count == size else 0, power) if one and -(-size // one) == count}
    if len(fitting) > 1:
        raise found.refused(f"its blocks are {' or '.join(map(str, sorted(fitting)))} long, and nothing says which")
    return fitting.pop() if fitting else 0


def _plain(found: Found) -> Dense:
    values, scale = found.values, found.scale
    zero = found.beside("_zero_point" if found.end == "_qdata" else "weight_zero_point")
    if values.dtype not in (*FP8, "int8") and (values.dtype != "uint8" or zero is None or found.end != "weight"):
        raise found.refused(f"its values are {values.dtype}, perhaps several in one")
    if scale.dtype in POWERS and values.dtype not in FP8:
        raise found.refused(f"its scale is of type {scale.dtype}")
    if scale.dtype in POWERS and found.end == "_qdata" and scale.shape[:-1] != values.shape[:-1]:
        raise found.refused("its scales are in the order of a kernel")
    facts = _grid(found, values.shape, scale.shape, _said(found, "weight_block_size"))
    if scale.dtype == "uint8" and (facts["row_block"], facts["column_block"]) != (1, 32):
        raise found.refused("its scale is of type uint8, and not of 32 columns each")
    _refuse_without_zeros(found, zero)
    if zero is not None and (
        zero.shape != scale.shape or zero.dtype not in INTEGERS or {zero.dtype, values.dtype} == {"int8", "uint8"}
    ):
        raise found.refused(f"its zero points are of shape {list(zero.shape)}, its scales of {list(scale.shape)}")
    end, new_end = _OTHER_ENDS.get(found.end, (found.end, found.end))
    return found.dense("plain", values.shape, facts, new_end=new_end, zero=zero)._replace(end=end)


def _refuse_other_scales(found: Found) -> None:
    if found.scale.dtype not in FLOATS:
        raise found.refused(f"its scales are of type {found.scale.dtype}")


def _refuse_without_zeros(found: Found, zero: LazyTensor | None) -> None:
    said = _said(found, "symmetric")
    if zero is None and said and not any(said):
        raise found.refused("it has no zero points, and its settings say that it is not symmetric")


def _packed(found: Found) -> Dense:
    """compressed-tensors: integers in words of 32 bits, or floats of 4 or 6 bits in bytes."""
    values, scale = found.values, found.scale
    if values.dtype == "uint8":
        return _packed_floats(found)
    _refuse_other_scales(found)
    zero = found.beside("weight_zero_point")
    shape = found.beside("weight_shape")
    if shape is None or shape.numel != 2 or len(values.shape) != 2:
        raise found.refused("nothing says which shape it had ('weight_shape')")
    size, data = shape.info.dtype.itemsize, shape.read()
    rows, columns = (int.from_bytes(data[at : at + size], "little", signed=True) for at in (0, size))
    others = [one for one in _said(found, "num_bits") if type(one) is int and 1 < one < 9]
    said = {_bits(found, "weights.num_bits or bits"), *others}
    fitting = [bits for bits in said if (rows, -(-columns * bits // 32)) == values.shape]
    if len(fitting) != 1:
        many = " or ".join(map(str, sorted(said)))
        raise found.refused(f"{rows:,} × {columns:,} values of {many} bits do not fit {list(values.shape)} words")
    bits = fitting[0]
    facts = _grid(found, (rows, columns), scale.shape) | {"bits": bits, "columns": columns}
    _refuse_without_zeros(found, zero)
    if zero is not None and (zero.shape != (-(-rows * bits // 32), scale.shape[-1]) or zero.dtype != "int32"):
        raise found.refused(f"its zero points are of shape {list(zero.shape)}")
    order = found.beside("weight_g_idx")
    if order is not None and (order.shape != (columns,) or order.dtype not in INTEGERS):
        raise found.refused(f"its order of columns is of shape {list(order.shape)} and type {order.dtype}")
    return found.dense("packed_columns", (rows, columns), facts, zero=zero, groups=order)


def _packed_floats(found: Found) -> Dense:
    values, scale = found.values, found.scale
    is_short = scale.dtype in FP8 or 32 * scale.numel == 2 * values.numel
    bits = 4 if is_short else 6  # of MXFP4 and MXFP6, 32 have a scale
    shape = (*values.shape[:-1], 8 * values.shape[-1] // bits)
    facts = _grid(found, shape, scale.shape) | {"bits": bits}
    divisor, factor = found.beside("weight_global_scale"), found.beside("weight_scale_2")
    if scale.dtype in FP8:  # NVFP4
        if 16 * scale.numel != prod(shape):
            raise found.unlike(shape, scale.shape)
        if (divisor is None) == (factor is None) or (divisor or factor or scale).numel != 1:
            raise found.refused("it has no 'weight_global_scale', or more than one number for all of it")
        return found.dense("packed_floats", shape, facts, dtype=found.usual, divisor=divisor, factor=factor)
    if scale.dtype not in POWERS:
        raise found.refused(f"its scale is of type {scale.dtype}")
    if scale.shape[:-1] != values.shape[:-1] or 32 * scale.numel != prod(shape):
        raise found.unlike(shape, scale.shape)
    return found.dense("packed_floats", shape, facts, dtype=found.usual)


def _mxfp4(found: Found) -> Dense:
    """gpt-oss: [experts, rows, groups, 16] bytes become [experts, columns, rows]."""
    values, scale = found.values, found.scale
    if len(values.shape) != 4 or values.shape[:-1] != scale.shape or values.shape[-1] != 16:
        raise found.unlike(values.shape, scale.shape)
    count, rows, groups, half = values.shape
    shape = (count, groups * half * 2, rows)
    facts = {"rows": shape[1], "scale_rows": groups, "row_block": 2 * half, "column_block": 1}
    return found.dense("experts", shape, facts, dtype=found.usual, new_end="")


def _four_bits(found: Found) -> Dense:
    """bitsandbytes: a JSON object beside the values describes them."""
    name, values = found.weight.name, found.values
    text = found.beside(f".quant_state.bitsandbytes__{found.weight.rule[-3:].lower()}")
    table = found.tensors.get(f"{name}.quant_map")
    if text is None or table is None or table.numel != 16:
        raise found.refused("its 'quant_state' or its 'quant_map' is not there")
    says = _object(found, text)
    shape, block, dtype = says.get("shape"), says.get("blocksize"), says.get("dtype")
    if not isinstance(shape, list) or not all(type(one) is int and one >= 0 for one in shape) or not shape:
        raise found.refused("its 'quant_state' has no shape")
    if len(shape) > _MOST_DIMS or prod(shape) > 2 * values.nbytes:
        raise found.refused("the shape in its 'quant_state' does not fit its values")
    if type(block) is not int or block < 2 or block & (block - 1) or dtype not in (*_HALF, "float32"):
        raise found.refused(f"its 'quant_state' says blocks of {block!r}, and the type {dtype!r}")
    count = prod(shape)
    if values.nbytes != -(-count // 2) or found.scale.numel != -(-count // block):
        raise found.refused(f"{count:,} values of 4 bits do not fit {values.nbytes:,} bytes in blocks of {block}")
    facts: dict[str, float] = {"count": count, "block": block}
    inner, inner_table = (found.tensors.get(f"{name}.nested_{one}") for one in ("absmax", "quant_map"))
    if found.scale.dtype != ("float32" if inner is None else "uint8"):
        raise found.refused(f"its scales are of type {found.scale.dtype}")
    if inner is not None:
        size, offset = says.get("nested_blocksize"), says.get("nested_offset")
        is_size = type(size) is int and 0 < size < 1 << 40
        if inner_table is None or type(size) is not int or not is_size or not isinstance(offset, float | int):
            raise found.refused("its scales are quantised, and nothing says how")
        if inner.numel != -(-found.scale.numel // size) or inner_table.numel != 256:
            raise found.refused("what scales its scales does not fit them")
        facts |= {"inner_block": size, "offset": float(offset)}
    inner_table = inner_table if inner is not None else None
    more = {"table": table, "inner_scale": inner, "inner_table": inner_table}
    return found.dense("four_bits", tuple(shape), facts, dtype=str(dtype), new_end="", **more)._replace(end="")


def _eight_bits(found: Found) -> Dense:
    values, scale = found.values, found.scale
    if len(values.shape) != 2 or scale.numel != values.shape[0]:
        raise found.unlike(values.shape, scale.shape)
    form = found.tensors.get(f"{found.weight.name}_format")
    if form is not None and (form.nbytes > 8 or any(form.read())):
        raise found.refused("its values are not in the order of rows ('weight_format')")
    return found.dense("eight_bits", values.shape, {}, dtype=found.usual, new_end=found.end)


def _gptq(found: Found) -> Dense:
    values, scale, zero, order = found.values, found.scale, found.beside("qzeros"), found.beside("g_idx")
    if len(values.shape) != 2 or len(scale.shape) != 2 or zero is None or len(zero.shape) != 2:
        raise found.refused("it is not a matrix of words with a matrix of scales and one of zeros")
    _refuse_other_scales(found)
    (rows, outputs), groups = values.shape, scale.shape[0]
    by_words = 32 * zero.shape[1] / outputs if outputs and not outputs % 32 else 0
    bits = 32 * rows // order.numel if order is not None and order.numel else int(by_words) or _bits(found, "bits")
    columns = 32 * rows // max(bits, 1)
    fits = scale.shape[1] == outputs and zero.shape == (groups, -(-outputs * bits // 32)) and groups
    says = found.says
    is_mixed = bool(says.get("extra_config") or says.get("dynamic"))  # bits that differ for some
    only = bits if is_mixed or found.settings is None else found.settings.bits or bits
    if order is None and (says.get("desc_act") is True or bits != only):
        raise found.refused(f"its order of columns is not there ('g_idx'), or it has not {bits} bits as it seems")
    layout = says.get("checkpoint_format") or says.get("packing_format") or says.get("backend") or "gptq"
    if layout not in _ZERO_OFFSETS:
        raise found.refused(f"its layout is {str(layout)[:40]!r}")
    known = range(2, 9) if str(layout).startswith("auto_round") else (2, 3, 4, 8)
    if bits not in known or not fits or (order is not None and order.shape != (columns,)):
        raise found.refused(f"{list(values.shape)} words, {list(scale.shape)} scales, {list(zero.shape)} zeros")
    if order is not None and order.dtype not in INTEGERS:
        raise found.refused(f"its order of columns is of type {order.dtype}")
    said = [one for one in _said(found, "group_size") if _fits((1, one), (1, columns), (1, groups))]
    length = 1 if order is not None else min(said[0], columns) if said else _length(found, columns, groups)
    if order is None and not length:
        raise found.refused(f"{columns:,} columns in {groups:,} groups, and nothing says which has how many")
    facts = {"bits": bits, "columns": columns, "zero_offset": _ZERO_OFFSETS[str(layout)]}
    facts |= {"rows": outputs, "scale_rows": outputs, "row_block": 1, "column_block": length}
    return found.dense("along_inputs", (outputs, columns), facts, zero=zero, groups=order)


def _awq(found: Found) -> Dense:
    values, scale, zero = found.values, found.scale, found.beside("qzeros")
    if len(values.shape) != 2 or len(scale.shape) != 2 or zero is None:
        raise found.refused("it is not a matrix of words with a matrix of scales and one of zeros")
    (inputs, words), (groups, outputs) = values.shape, scale.shape
    bits = 32 * words // max(outputs, 1)
    _refuse_other_scales(found)
    lengths = [one for one in _said(found, "group_size") if type(one) is int and one > 0]
    if lengths and not any(_fits((1, one), (1, inputs), (1, groups)) for one in lengths):
        raise found.refused(f"{inputs:,} inputs in {groups:,} groups, and its settings say groups of {lengths[0]:,}")
    is_whole = bits in (4, 8) and bits * outputs == 32 * words
    if not is_whole or zero.shape != (groups, words) or not groups or inputs % groups:
        raise found.refused(f"{list(values.shape)} words, {list(scale.shape)} scales, {list(zero.shape)} zeros")
    version = found.says.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise found.refused(f"its layout is {str(version)[:40]!r}")
    facts = {"bits": bits, "rows": outputs, "scale_rows": outputs, "row_block": 1, "column_block": inputs // groups}
    return found.dense("along_outputs", (outputs, inputs), facts, zero=zero)


def _bits(found: Found, keys: str) -> int:
    """Return the bits of a value in the settings; refuse a weight without them."""
    bits = found.settings.bits if found.settings is not None else None
    if bits is None or not 1 < bits < 9:
        raise found.refused(f"nothing says how many bits it has ({keys})")
    return bits


def _object(found: Found, text: LazyTensor) -> Mapping[str, object]:
    """Return the JSON object whose text is in a tensor."""
    if text.nbytes > _MOST_NBYTES or text.info.storage is None:
        raise found.refused(f"{text.name!r} is not a short text")
    try:
        return parse_object(text.read(), text.name, "json")
    except Failure as error:
        raise found.refused(error.message) from error


def _said(found: Found, key: str) -> list[Any]:
    """Return the values of a key in the settings: for all weights, or for some (compressed-tensors)."""
    groups = found.says.get("config_groups")
    parts = [one.get("weights") for one in groups.values() if isinstance(one, dict)] if isinstance(groups, dict) else []
    return [one[key] for one in (found.says, *parts) if isinstance(one, Mapping) and one.get(key) is not None]


_KINDS: Final[Mapping[str, Callable[[Found], Dense]]] = {
    "FP8": _plain,
    "integers": _plain,
    "quanto": _plain,
    "torchao": _plain,
    "bitsandbytes": _eight_bits,
    "bitsandbytes NF4": _four_bits,
    "bitsandbytes FP4": _four_bits,
    "GPTQ": _gptq,
    "AWQ": _awq,
    "compressed-tensors": _packed,
    "ModelOpt": _packed_floats,
    "MXFP4": _mxfp4,
}
"""By the names of the layouts in ``quantized_layouts``."""


_OF_QUANTO: Final = ("input_scale", "output_scale")
_OF_CONV1D: Final = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder")
"""Types of models of transformers that keep the weights of these layers (``_CONV1D``) as [inputs, outputs]."""
_UNKNOWN_MODEL: Final = ", [outputs, inputs]; GPT-2 wants [inputs, outputs], and no config.json says which model it is"
_CONV1D: Final = re.compile(r"\.(?:c_attn|q_attn|c_proj|c_fc)\.[^.]+\Z")


class DenseSource(ComputedWeight):
    """The bytes of a dense weight, computed while they are read from the first to the last."""

    def __init__(self, name: str, dense: Dense, scheme: str, dtype: str, *, saturate: bool) -> None:
        nbytes, said = prod(dense.shape) * dtypes.BY_NAME[dtype].itemsize, f"{scheme} before, dense now, in {dtype}"
        super().__init__(name, nbytes, said, list(dense.parts.values()))
        self.dense = dense
        self._dtype = dtype
        self._saturate = saturate

    def made(self) -> Iterator[bytes]:
        from ckptool.torch_ops.dequantize import HOW, packed, transposed  # no other migration needs torch

        dense = self.dense
        parts = {name: tensor.torch() for name, tensor in dense.parts.items()}
        values = HOW[dense.how](parts, dense.facts)
        values = transposed(values, dense.shape[0]) if dense.is_turned else values
        return packed(values, self._dtype, self.name, saturate=self._saturate)


def _is_of_activations(path: str, tensors: Mapping[str, LazyTensor], around: Collection[str]) -> bool:
    """
    Return whether a number scales activations or caches, or marks a file.

    It is in a module ``around`` quantised weights; or is one of the two that quanto gives a norm without such weights.
    """
    tensor, (module, _, name) = tensors[path], path.rpartition(".")
    is_marker = name == "scaled_fp8" and tensor.dtype in FP8
    is_scale = tensor.numel == 1 and _OF_ACTIVATIONS.search(path) is not None
    is_pair = name in _OF_QUANTO and all(f"{module}.{one}" in tensors for one in _OF_QUANTO)
    return is_marker or (is_scale and (module in around or is_pair))


def _refuse_comfy(checkpoint: Checkpoint) -> None:
    """Refuse a file whose header says that scales are in an order that only kernels use."""
    forms = re.findall(r'"format"\s*:\s*"(\w{1,40})"', checkpoint.metadata.get("_quantization_metadata", ""))
    if other := next((one for one in forms if not one.startswith(_PLAIN_OF_COMFY)), None):
        raise MigrationRefused(f"it cannot be made dense: its layout is {other!r}, of ComfyUI", kind="not-dense")


def _are_same(one: Dense, other: Dense) -> bool:
    """Return whether two names of the same values are one weight: their scales may be copies."""
    from ckptool.torch_ops.differences import differ  # few are tied

    if one._replace(parts={}) != other._replace(parts={}) or one.parts.keys() != other.parts.keys():
        return False
    pairs = [(part, other.parts[key]) for key, part in one.parts.items()]
    return all(a.shape == b.shape and a.dtype == b.dtype and not differ(a, b) for a, b in pairs)


def _usual_type(plain: Sequence[LazyTensor]) -> str:
    """Return the 16-bit type that most plain elements have; if none has, float32 if any is, else bfloat16."""
    usual = Counter[str]()
    for tensor in plain:
        usual[tensor.dtype] += tensor.numel
    found = [dtype for dtype, _ in usual.most_common() if dtype in _HALF]
    return found[0] if found else "float32" if usual["float32"] else _HALF[0]


def make_dense(
    checkpoint: Checkpoint, weights: Weights, dtype: str | None = None, *, saturate: bool = False, at_once: bool = False
) -> tuple[Weights, list[DenseSource]]:
    """
    Return weights in which the quantised ones are dense, and the sources that compute these.

    ``dtype`` is the type of the dense weights; by default that of their scales if it has 16 bits, or what the layout
    says, or bfloat16. Changes of names are kept. The bytes of a dense weight are computed each time that they are read:
    in order, or ``at_once`` for readers that take pieces in any order.

    Raises:
        MigrationRefused: Nothing is quantised; or a weight has no scale, a layout that cannot be made dense, parts that
            do not fit, or a name that does not show any more what it is.
    """
    found = quantization_of(checkpoint)
    if found is None or not found.bound:
        raise MigrationRefused(
            "nothing in it is quantised, as far as is known", kind="not-quantised", hint="Leave out `dequantize=`."
        )
    _refuse_comfy(checkpoint)
    head = weights.state_dict.head
    new = {head + old: name for name, old in weights.old_names.items() if name in weights.tensors}
    there = {**checkpoint.tensors, **{path: weights.tensors[name] for path, name in new.items()}}  # with what is tied
    chosen = {one.name: (one, others) for one, others in found.bound if one.name in new}
    made: dict[str, tuple[str, LazyTensor]] = {}
    sources: list[DenseSource] = []
    tied: dict[object, DenseSource] = {}
    gone = {other for _, others in chosen.values() for other in others} - chosen.keys()
    around = {path[:end] for path in chosen for end, char in enumerate(path) if char == "."}
    gone |= {path for path in new if _is_of_activations(path, there, around)}
    plain = _usual_type([there[path] for path in new if path not in gone and path not in chosen])
    model = object_beside(checkpoint.path, checkpoint.source, "config.json").get("model_type")
    for path, (weight, others) in chosen.items():
        dense = dense_of(weight, there, found.settings, plain)
        may_turn = _CONV1D.search(path) is not None and len(dense.shape) == 2
        if may_turn and model in _OF_CONV1D:
            dense = dense._replace(shape=dense.shape[::-1], is_turned=True)
        used = {id(part) for part in dense.parts.values()}
        _refuse_unknown(path, [one for one in others if id(there.get(one)) not in used])
        name = new[path]
        if not name.endswith(dense.end):
            hint = "Make it dense first, and change names afterwards."
            raise MigrationRefused(
                f"{path!r} is called {name!r} now: what it is cannot be known", kind="not-dense", hint=hint
            )
        name = name[: len(name) - len(dense.end)] + dense.new_end
        own = dtype or dense.dtype
        memory = identity(dense.parts["values"].info)
        source = tied.get(memory)
        if source is None or not _are_same(source.dense, dense):
            source = tied[memory] = DenseSource(name, dense, weight.scheme, own, saturate=saturate)
            source.is_compressed = at_once
            source.said += _UNKNOWN_MODEL if may_turn and model is None else ""
            sources.append(source)
        info = source.tensor(there[path].info, dtypes.BY_NAME[own], dense.shape)
        made[path] = name, LazyTensor(name, info)
    tensors: dict[str, LazyTensor] = {}
    old_names = dict(weights.old_names)
    for name, tensor in weights.tensors.items():
        path = head + weights.old_names[name]
        if path in gone:
            del old_names[name]
            continue
        dense_name, one = made.get(path, (name, tensor))
        if path not in made and tensor.dtype in FP8:
            raise MigrationRefused(f"{path!r} is of type {tensor.dtype}, and has no scale", kind="not-dense")
        if dense_name in tensors or (dense_name != name and dense_name in weights.old_names):
            raise MigrationRefused(f"two tensors would be called {dense_name!r}", kind="not-dense")
        tensors[dense_name] = one
        old_names[dense_name] = old_names.pop(name)
    left = tuple(old for name, old in weights.old_names.items() if head + old in gone)
    texts = weights.texts
    if BY_TORCHAO in checkpoint.metadata:
        texts = tuple((key, text) for key, text in texts if key != BY_TORCHAO and not text.startswith('{"_type"'))
    made_of = weights._replace(tensors=tensors, old_names=old_names, dropped=(*weights.dropped, *left), texts=texts)
    return made_of, sources
