"""
Nodes to the Python and torch values that ``load_state_dict`` wants beside weights (extra state, packed parameters).

They are numbers, text, bytes, lists, tuples, dicts, sets, tensors, torch's own constants, and weights that torch keeps
packed.

Weights of torch's quantised layers are objects of C++. They pickle as tensors and numbers, and the name of their class.
For the classes in ``_PACKERS`` alone, these are packed again by the functions of ``torch.ops.quantized`` that layers
pack with. See torch/csrc/jit/runtime/register_prim_ops.cpp, aten/src/ATen/native/quantized/cpu/fbgemm_utils.cpp and
aten/src/ATen/native/RNN.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from ckptool.errors import UnsupportedFeature, first_line
from ckptool.loading.memory.assembly import Assembly
from ckptool.pickles import nodes as inert
from ckptool.pickles.nodes import Call, Global, Inert
from ckptool.pickles.values import no_plain_value, plain_value
from ckptool.tensors import dtypes
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.rebuild import Rebuilder

_QSCHEMES: Final = {
    "per_tensor_affine",
    "per_tensor_symmetric",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
}
_CLASSES: Final = "__torch__.torch.classes."


def values_with_tensors(nodes: Mapping[str, Inert], rebuilder: Rebuilder | None, assembly: Assembly) -> dict[str, Any]:
    """
    Return the Python and torch values of nodes, by name. If a node holds something that only code could make, its
    value is an ``UnsupportedFeature`` error, which is not raised.
    """
    # Two passes over the nodes: the first notes which tensors they hold, so that these are read together.
    wanted: dict[str, LazyTensor] = {}

    def note(name: str, inner: Inert) -> Inert:
        info = rebuilder.tensor(inner) if rebuilder is not None else None
        if info is None:
            return _torch_constant(inner)
        wanted[str(id(inner))] = LazyTensor(name, info)
        return inner

    def leaf(inner: Inert) -> Any:
        tensor = made.get(str(id(inner)))
        return _torch_constant(inner) if tensor is None else tensor

    def tried(name: str, leaf: Callable[[Inert], Any], packed: Callable[[str, Any], Any]) -> Any:
        try:
            return plain_value(nodes[name], leaf, assembly.cancellation, partial(_of_packed, packed))
        except UnsupportedFeature as error:
            return error

    found = {name: tried(name, partial(note, name), lambda _, content: content) for name in nodes}
    made = assembly.tensors(wanted)
    errors = {name: value for name, value in found.items() if isinstance(value, UnsupportedFeature)}
    return {name: errors.get(name) or tried(name, leaf, pack) for name in nodes}


def _torch_constant(node: Inert) -> Any:
    """Return the type, quantisation scheme, device, size or layout of torch that a node stands for; None for others."""
    if isinstance(node, Call) and isinstance(node.func, Global) and isinstance(node.args, tuple):
        made = _TORCH_CALLS.get(str(node.func))
        try:
            return made(*node.args) if made is not None and all(map(_is_constant, node.args)) else None
        except (RuntimeError, TypeError, ValueError):  # arguments that torch does not write
            return None
    if isinstance(node, Global) and node.module == "torch":
        name = dtypes.BY_NAME[node.name].name if node.name in dtypes.BY_NAME else node.name
        found = getattr(torch, name, None) if node.name in dtypes.BY_NAME or node.name in _QSCHEMES else None
        return found if isinstance(found, torch.dtype | torch.qscheme) else None
    return None


def _is_constant(argument: Inert) -> bool:
    is_sizes = isinstance(argument, tuple) and all(type(one) is int for one in argument)
    return is_sizes or type(argument) in (int, str)


_LAYOUTS: Final = {str(one): one for one in (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)}
_TORCH_CALLS: Final[dict[str, Callable[..., Any]]] = {
    "torch.device": torch.device,
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": _LAYOUTS.get,
}
"""Functions that make such constants from numbers and text, by their names in pickles."""


def _of_packed(made: Callable[[str, Any], Any], node: Inert, value: Callable[[Inert], Any]) -> Any:
    """
    Return what is ``made`` of a packed object: of its class and the state that it was pickled with; what
    ``no_plain_value`` returns for other nodes.
    """
    found = packed_content(node)
    return no_plain_value(node) if found is None else made(found[0], value(found[1]))


def packed_content(node: Inert) -> tuple[str, Inert] | None:
    """Return the class of a packed object and the node of its state; None for other nodes and unknown classes."""
    func = inert.global_of(node.func) if isinstance(node, Call) else None
    if func is None or (func.module, func.name) not in (("torch", "ScriptObject"), ("torch._C", "ScriptObject")):
        return None
    state = node.state if isinstance(node, Call) else None
    if not (isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], str)):
        return None
    name = state[1].removeprefix(_CLASSES)
    return (name, state[0]) if name in _PACKERS and state[1] != name else None


def pack(name: str, content: Any) -> Any:
    """
    Return a packed object of the class ``name``, one of ``_PACKERS``. ``content`` is the state it was pickled with.

    Raises:
        UnsupportedFeature: The state is not one of this class, or this build of torch cannot pack it.
    """
    try:
        return _PACKERS[name](content)
    except Exception as error:  # torch's code may raise anything
        raise UnsupportedFeature(
            f"packed weights of {name}: {first_line(error)[:200]}", kind="packed-weights"
        ) from error


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
    return torch.ops.quantized.linear_prepack_fp16(weight, bias)  # packed float16 weights pickle as float32


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
