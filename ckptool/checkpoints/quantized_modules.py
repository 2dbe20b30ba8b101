"""
What quantised modules of ``torch.ao`` add to their ``state_dict()`` in code, taken from what they pickle.

They keep their weights packed, in objects of C++ that pickle as what was packed, and numbers as plain attributes.
``_save_to_state_dict`` unpacks the one and makes tensors of the other; so does this, with nodes instead of values.

See torch/ao/nn/quantized: modules/linear.py, conv.py, embedding_ops.py, functional_modules.py, dynamic/modules/rnn.py,
reference/modules/utils.py. Before PyTorch 1.13 the package was torch/nn/quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Global, Inert, Pairs

_HOMES: Final = ("torch.ao.nn.", "torch.nn.quantized.", "torch.nn.intrinsic.quantized.")
_TENSOR: Final = Global("torch", "tensor")

Rule: TypeAlias = Callable[[Call], "Pairs | None"]


def is_quantized(class_name: str) -> bool:
    """Say whether a class is one of torch's quantised modules."""
    return class_name.startswith(_HOMES) and ".quantized." in class_name


def added_entries(class_name: str, module: Call) -> Pairs | None:
    """
    Return the entries that a quantised module adds to its ``state_dict()`` in code, in order.

    None if they are not known: it pickled something else than its class does today.
    """
    rule = _rule(class_name)
    return [] if rule is None else rule(module)


def is_conv(class_name: str) -> bool:
    """Say whether a class pickles as a tuple, which holds none of what other modules are known by."""
    return is_quantized(class_name) and _rule(class_name) is _conv


def version_of(class_name: str) -> int | None:
    """Return the ``_version`` of a class of quantised modules; None if it is the one that most classes have."""
    name = class_name.rpartition(".")[2]
    if not is_quantized(class_name) or ".sparse." in class_name or ".reference." in class_name:
        return None
    if name.startswith("Linear"):
        return 4 if ".dynamic." in class_name else 3
    return 2 if ".dynamic." in class_name and name in ("LSTM", "GRU") else None


def _rule(class_name: str) -> Rule | None:
    """Return how a class saves itself; None if it does as every module."""
    name = class_name.rpartition(".")[2]
    if ".sparse." in class_name:
        return _unknown
    if ".reference." in class_name:
        return _reference if name.startswith(("Linear", "Conv", "Embedding")) else None
    exact = _BY_NAME.get(name)
    if exact is not None:
        return exact if name not in _CELLS or ".dynamic." in class_name else None
    if name.startswith("Conv"):
        return _conv
    return _linear if name.startswith("Linear") else None


def _unknown(_: Call) -> None:
    return None


def _linear(module: Call) -> Pairs | None:
    """``scale`` and ``zero_point``; the weight is that of the child ``_packed_params``."""
    attributes = nodes.attribute_pairs(module) or []
    return _output(nodes.lookup(attributes, "scale"), nodes.lookup(attributes, "zero_point"))


def _packed_linear(module: Call) -> Pairs | None:
    attributes = nodes.attribute_pairs(module) or []
    packed = _unpacked(nodes.lookup(attributes, "_packed_params"))
    dtype = nodes.lookup(attributes, "dtype")
    if not (isinstance(packed, tuple) and len(packed) == 2 and isinstance(dtype, Global)):
        return None
    return [("dtype", dtype), ("_packed_params", packed)]


def _packed_embedding(module: Call) -> Pairs | None:
    attributes = nodes.attribute_pairs(module) or []
    packed = _unpacked(nodes.lookup(attributes, "_packed_weight"))
    dtype = nodes.lookup(attributes, "dtype")
    if not (isinstance(packed, tuple) and len(packed) > 1 and isinstance(packed[1], list) and len(packed[1]) == 1):
        return None
    return [("dtype", dtype), ("_packed_weight", packed[1][0])] if isinstance(dtype, Global) else None


def _conv(module: Call) -> Pairs | None:
    """The state is a tuple of 15: ten numbers of the layer, weight, bias, scale, zero point, ``training``."""
    state = module.state
    if not (isinstance(state, tuple) and len(state) == 15):
        return None
    output = _output(state[12], state[13])
    return None if output is None else [("weight", state[10]), ("bias", state[11]), *output]


def _packed_parameter(module: Call) -> Pairs | None:
    packed = nodes.lookup(nodes.attribute_pairs(module) or [], "param")
    return None if _unpacked(packed) is None else [("param", packed)]


def _cell(module: Call) -> Pairs | None:
    attributes = nodes.attribute_pairs(module) or []
    packed = [(name, nodes.lookup(attributes, name)) for name in ("_packed_weight_ih", "_packed_weight_hh")]
    return None if any(_unpacked(node) is None for _, node in packed) else packed


def _reference(module: Call) -> Pairs | None:
    """What is said of the weight; its scales and zero points are buffers."""
    attributes = nodes.attribute_pairs(module) or []
    found = [(name, nodes.lookup(attributes, name)) for name in ("weight_qscheme", "weight_dtype")]
    return found if all(isinstance(node, Global) for _, node in found) else None


def _output(scale: Inert, zero_point: Inert) -> Pairs | None:
    """Return the tensors that code makes of the two numbers which say how a layer's output is quantised."""
    if type(scale) is not float or type(zero_point) is not int:
        return None
    return [("scale", Call(_TENSOR, (scale,))), ("zero_point", Call(_TENSOR, (zero_point,)))]


def _unpacked(node: Inert) -> Inert:
    """Return what an object of C++ pickles, for which its state is ``(what was packed, its class)``."""
    func = nodes.global_of(node.func) if isinstance(node, Call) else None
    is_object = func is not None and func.module in ("torch", "torch._C") and func.name == "ScriptObject"
    return node.state[0] if is_object and isinstance(node.state, tuple) and len(node.state) == 2 else None


_CELLS: Final = ("RNNCell", "LSTMCell", "GRUCell")
_BY_NAME: Final[dict[str, Rule]] = {
    "LinearPackedParams": _packed_linear,
    "EmbeddingPackedParams": _packed_embedding,
    "PackedParameter": _packed_parameter,
    "QFunctional": _linear,
    **dict.fromkeys(_CELLS, _cell),
}
