"""
Packed weights of torch's quantised layers: objects of C++, packed anew from what they pickled.

They pickle as tensors and numbers, and the name of their class. The functions of ``torch.ops.quantized`` that layers
pack with are called with these, for the classes in a table here and no others. See torch/csrc/jit/runtime/
register_prim_ops.cpp, aten/src/ATen/native/quantized/cpu/fbgemm_utils.cpp and aten/src/ATen/native/RNN.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from ckptool.errors import UnsupportedFeature
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Inert

_CLASSES: Final = "__torch__.torch.classes."


def packed_content(node: Inert) -> tuple[str, Inert] | None:
    """Return the class of a packed object and what it pickled; None for what is none of those that are known."""
    func = nodes.global_of(node.func) if isinstance(node, Call) else None
    if func is None or (func.module, func.name) not in (("torch", "ScriptObject"), ("torch._C", "ScriptObject")):
        return None
    state = node.state if isinstance(node, Call) else None
    if not (isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], str)):
        return None
    name = state[1].removeprefix(_CLASSES)
    return (name, state[0]) if name in _PACKERS and state[1] != name else None


def pack(name: str, content: Any) -> Any:
    """
    Return the object of a class that is known, from what it pickled.

    Raises:
        UnsupportedFeature: It is not what objects of this class pickle, or this build of torch cannot pack it.
    """
    try:
        return _PACKERS[name](content)
    except Exception as error:  # whatever torch's code raises
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise UnsupportedFeature(f"packed weights of {name}: {reason}", kind="packed-weights") from error


def _linear(content: Any) -> Any:
    weight, bias = content
    if weight.dim() != 2 or (bias is not None and tuple(bias.shape) != (weight.shape[0],)):
        raise ValueError(
            f"a weight of {list(weight.shape)} with a bias of {list(bias.shape) if bias is not None else 0}"
        )
    if not weight.is_contiguous():
        raise ValueError("a weight that is a view, which may be far larger than its memory")
    if weight.is_quantized:
        return torch.ops.quantized.linear_prepack(weight, bias)
    return torch.ops.quantized.linear_prepack_fp16(weight, bias)  # they pickle as float32


def _cell(content: Any) -> Any:
    kind, tensors, _, numbers, packed = content
    input_weight, hidden_weight = packed
    if kind == "quantized_fp16":
        return torch.ops.quantized.make_quantized_cell_params_fp16(input_weight, hidden_weight)
    if kind != "quantized_dynamic":
        raise ValueError(f"cells of the kind {kind!r} are not known")
    input_bias, hidden_bias = tensors
    (reduces,) = numbers
    return torch.ops.quantized.make_quantized_cell_params_dynamic(
        input_weight, hidden_weight, input_bias, hidden_bias, bool(reduces)
    )


_PACKERS: Final[dict[str, Callable[[Any], Any]]] = {
    "quantized.LinearPackedParamsBase": _linear,
    "rnn.CellParamsBase": _cell,
}
