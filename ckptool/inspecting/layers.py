"""
Layers of torch.nn: which attributes of a pickled one are which arguments of its class, and which entries come of these.

A line of the table is about classes. ``name`` is an argument that stands first, ``name=default`` one that need not be
said. Behind these, ``<path`` is an attribute of a module below that has the value; ``?entry`` asks whether there is
such an entry. Other attributes are no arguments, whoever has put them there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, TypeAlias

from ckptool.pickles import nodes
from ckptool.pickles.describe import scalar_of
from ckptool.pickles.nodes import Global, Inert

_TABLE: Final = r"""
Linear: in_features out_features bias=True?bias
Bilinear: in1_features in2_features out_features bias=True?bias
Conv(Transpose)?[123]d: in_channels out_channels kernel_size stride=1 padding=0 output_padding=0 dilation=1 groups=1
  bias=True?bias padding_mode='zeros'
(Sync)?BatchNorm([123]d)?: num_features eps=1e-05 momentum=0.1 affine=True?weight track_running_stats=True?running_mean
InstanceNorm[123]d: num_features eps=1e-05 momentum=0.1 affine=False?weight track_running_stats=False?running_mean
GroupNorm: num_groups num_channels eps=1e-05 affine=True?weight
LayerNorm: normalized_shape eps=1e-05 elementwise_affine=True?weight bias=True?bias
RMSNorm: normalized_shape eps=None elementwise_affine=True?weight
LocalResponseNorm: size alpha=0.0001 beta=0.75 k=1.0
Embedding(Bag)?: num_embeddings embedding_dim padding_idx=None max_norm=None norm_type=2.0 scale_grad_by_freq=False
  sparse=False mode='mean' include_last_offset=False
(RNN|LSTM|GRU)(Cell)?: input_size hidden_size num_layers=1 bias=True batch_first=False dropout=0.0 bidirectional=False
  proj_size=0 nonlinearity='tanh'
MultiheadAttention: embed_dim num_heads dropout=0.0 bias=True?in_proj_bias add_bias_kv=False?bias_k add_zero_attn=False
  batch_first=False
Transformer(En|De)coderLayer: d_model<self_attn.embed_dim nhead<self_attn.num_heads
  dim_feedforward=2048<linear1.out_features dropout=0.1<dropout.p activation='relu' layer_norm_eps=1e-05<norm1.eps
  batch_first=False<self_attn.batch_first norm_first=False bias=True?linear1.bias
PReLU: num_parameters=1
(ReLU6?|SiLU|SELU|Mish|Hardswish|Hardsigmoid): inplace=False
C?ELU: alpha=1.0 inplace=False
LeakyReLU: negative_slope=0.01 inplace=False
Hardtanh: min_val=-1.0 max_val=1.0 inplace=False
GELU: approximate='none'
(Sigmoid|Tanh|LogSigmoid|Softsign|Tanhshrink|Softmax2d|Identity):
((Log)?Softmax|Softmin|GLU): dim
(Feature)?(Alpha)?Dropout[123]?d?: p inplace=False
(Max|Avg)Pool[123]d: kernel_size stride=None padding=0 dilation=1 return_indices=False ceil_mode=False
  count_include_pad=True divisor_override=None
Adaptive(Max|Avg)Pool[123]d: output_size return_indices=False
(Zero|Reflection|Replication|Circular)Pad[123]d: padding
ConstantPad[123]d: padding value
Flatten: start_dim=1 end_dim=-1
Unflatten: dim unflattened_size
Upsample: size=None scale_factor=None mode='nearest' align_corners=None recompute_scale_factor=None
PixelShuffle: upscale_factor
(MSE|L1|BCE|BCEWithLogits)Loss: reduction='mean'
CrossEntropyLoss: ignore_index=-100 reduction='mean' label_smoothing=0.0
"""
_ARGUMENT: Final = re.compile(r"(\w+)(?:=([^<?\s]+))?(?:<(\S+)|\?(\S+))?")
_SIZES: Final = ("kernel_size", "stride", "padding", "dilation", "output_padding")
"""Arguments for which one number stands for the same in all dimensions."""
_GATES: Final = {"RNN": 1, "GRU": 3, "LSTM": 4}
_LONGEST: Final = 80
_MOST_ITEMS: Final = 16

Shapes: TypeAlias = "Mapping[str, tuple[int, ...] | None]"
"""The shapes of entries; None where it is not known."""
Known: TypeAlias = "tuple[str, Any, str | None]"
"""An argument: its name, its value, and the default as code; None of those that stand first."""


ABSENT: Final = object()
"""What stands for a value that is not there, or that is not plain."""


def arguments_of(name: str, module: Inert, shapes: Shapes) -> list[Known] | None:
    """
    Return with which arguments a class of torch.nn makes a layer of these entries, first those without a keyword.

    None if the class is not known, if a value is not plain, or if other entries would come of it.
    """
    if (row := _row(name)) is None:
        return None
    modules = [key for key, _ in nodes.mapping_pairs(nodes.lookup(nodes.attribute_pairs(module), "_modules")) or ()]
    found: dict[str, Known] = {}
    for argument, default, path, entry in _ARGUMENT.findall(row):
        value = (entry in shapes) if entry else _attribute(module, (path or argument).split("."))
        if value is not ABSENT or not default or argument in modules:  # an older torch has fewer attributes
            found[argument] = argument, value, default or None
    values = {argument: value for argument, value, _ in found.values()}
    for argument in _SIZES:
        if isinstance(size := values.get(argument), tuple) and len(set(size)) == 1 and "output_size" not in values:
            found[argument] = argument, size[0], found[argument][2]
    return list(found.values()) if ABSENT not in values.values() and _has_just(name, values, shapes) else None


@lru_cache(maxsize=128)
def _row(name: str) -> str | None:
    rows = (line.partition(":") for line in _TABLE.replace("\n  ", " ").strip().split("\n"))
    return next((row for kinds, _, row in rows if re.fullmatch(kinds, name)), None)


def _attribute(module: Inert, path: list[str]) -> Any:
    for one in path[:-1]:
        below = nodes.mapping_pairs(nodes.lookup(nodes.attribute_pairs(module), "_modules"))
        module = nodes.lookup(below or (), one)
    found = [value for key, value in nodes.attribute_pairs(module) if isinstance(key, str) and key == path[-1]]
    if found and path == ["activation"] and isinstance(found[-1], Global):
        return found[-1].name if found[-1].name in ("relu", "gelu") else ABSENT
    return plain(found[-1]) if found else ABSENT


def plain(node: Inert, depth: int = 0) -> Any:
    """Return a number, a truth value, None, a short text, or a short tuple or list of such; else ABSENT."""
    if isinstance(node, list | tuple):
        items = [plain(one, depth + 1) for one in node] if depth < 2 and len(node) <= _MOST_ITEMS else [ABSENT]
        return ABSENT if ABSENT in items else type(node)(items)
    if node is None or type(node) is float:
        return node
    value = scalar_of(node)
    return ABSENT if value is None or (isinstance(value, str) and len(value) > _LONGEST) else value


def literal(value: Any) -> str:
    """Return a plain value as Python code, in ASCII."""
    if isinstance(value, float):
        return repr(value) if value - value == 0 else f"float('{value}')"
    if isinstance(value, list | tuple):
        items = ", ".join(map(literal, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
    return ascii(value)


def _has_just(name: str, values: Mapping[str, Any], shapes: Shapes) -> bool:
    """Say whether a layer of these arguments has just these parameters and persistent buffers."""
    left = dict(shapes)
    try:
        for key, *shape in _entries(name, values):
            if key not in left and key == "num_batches_tracked":  # which torch has since 0.4.1
                continue
            if left.pop(key, None) != tuple(shape):
                return False
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # the class does not take such arguments
        return False
    return not left


def _entries(name: str, values: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the name and the sizes of each parameter and persistent buffer of a layer."""
    has_bias = bool(values.get("bias"))
    if name in ("Linear", "Bilinear"):
        inputs = [values[one] for one in ("in_features", "in1_features", "in2_features") if one in values]
        yield "weight", values["out_features"], *inputs
        yield from [("bias", values["out_features"])] * has_bias
    elif name.startswith("Conv"):
        size, into, out = values["kernel_size"], values["in_channels"], values["out_channels"]
        first, second = (into, out) if "Transpose" in name else (out, into)
        yield (
            "weight",
            first,
            second // values["groups"],
            *(size if isinstance(size, tuple) else [size] * int(name[-2])),
        )
        yield from [("bias", out)] * has_bias
    elif "Norm" in name and name != "LocalResponseNorm":
        size = values[next(one for one in ("num_features", "num_channels", "normalized_shape") if one in values)]
        sizes = size if isinstance(size, list | tuple) else [size]
        is_affine = values.get("affine", values.get("elementwise_affine"))
        yield from [("weight", *sizes)] * is_affine
        yield from [("bias", *sizes)] * (is_affine and values.get("bias", name != "RMSNorm"))
        if values.get("track_running_stats"):
            yield from (("running_mean", size), ("running_var", size), ("num_batches_tracked",))
    elif name.startswith("Embedding"):
        yield "weight", values["num_embeddings"], values["embedding_dim"]
    elif name == "PReLU":
        yield "weight", values["num_parameters"]
    elif "hidden_size" in values:
        yield from _of_rnn(name, values)
    elif name == "MultiheadAttention":
        yield from _of_attention(values)
    elif "nhead" in values:
        yield from _of_transformer(name, values)


def _of_rnn(name: str, values: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    hidden, gates = values["hidden_size"], _GATES[name.removesuffix("Cell")] * values["hidden_size"]
    out = values.get("proj_size") or hidden
    ways = ("", "_reverse") if values.get("bidirectional") else ("",)
    for layer in range(values.get("num_layers", 1)):  # of which the caller takes no more than there are
        for way in ways:
            end = "" if name.endswith("Cell") else f"_l{layer}{way}"
            yield f"weight_ih{end}", gates, len(ways) * out if layer else values["input_size"]
            yield f"weight_hh{end}", gates, out
            yield from ((f"{one}{end}", gates) for one in ("bias_ih", "bias_hh") if values["bias"])
            yield from [(f"weight_hr{end}", out, hidden)] * (out != hidden)


def _of_attention(values: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    width = values["embed_dim"]  # that of keys and values, too, or there are other entries
    yield from (("in_proj_weight", 3 * width, width), ("out_proj.weight", width, width))
    yield from [("in_proj_bias", 3 * width), ("out_proj.bias", width)] * bool(values["bias"])
    yield from [("bias_k", 1, 1, width), ("bias_v", 1, 1, width)] * bool(values.get("add_bias_kv"))


def _of_transformer(name: str, values: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    width, wide, bias = values["d_model"], values["dim_feedforward"], bool(values["bias"])
    two = name == "TransformerDecoderLayer"
    for one in ("self_attn", "multihead_attn")[: 1 + two]:
        yield from ((f"{one}.{key}", *shape) for key, *shape in _of_attention({"embed_dim": width, "bias": bias}))
    norms = [(f"norm{number}", width) for number in range(1, 3 + two)]
    for one, *shape in (("linear1", wide, width), ("linear2", width, wide), *norms):
        yield f"{one}.weight", *shape
        yield from [(f"{one}.bias", shape[0])] * bias
