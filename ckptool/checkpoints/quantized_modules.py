"""
What quantised modules of ``torch.ao`` add to their ``state_dict()`` in code, taken from what they pickle.

They keep their weights packed, in objects of C++ that pickle as what was packed, and numbers as plain attributes.
``_save_to_state_dict`` unpacks the one and makes tensors of the other; so does this, with nodes instead of values.

See torch/ao/nn/quantized: modules/linear.py, conv.py, embedding_ops.py, functional_modules.py, dynamic/modules/rnn.py,
reference/modules/utils.py. Before PyTorch 1.13 the package was torch/nn/quantized.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TypeAlias

from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Global, Inert, Pairs

_ABSENT: Final = Global("", "")
"""What is not as its class pickles it today."""


def added_entries(class_name: str, module: Call) -> Pairs | None:
    """
    Return the entries that a quantised module adds to its ``state_dict()`` in code, in order.

    None if they are not known: it pickled something else than its class does today.
    """
    fields = _fields(class_name)
    held = nodes.attribute_pairs(module) or []
    if fields is _CONV:
        state = module.state
        held = (
            [(str(place), one) for place, one in enumerate(state)]
            if isinstance(state, tuple) and len(state) == _CONV_LENGTH
            else []
        )
    found = [(name, read(nodes.lookup(held, place))) for name, place, read in fields]
    return None if any(value is _ABSENT for _, value in found) or (fields is _CONV and not held) else found


def is_conv(class_name: str) -> bool:
    """Say whether a quantised class pickles as a tuple, which holds none of what other modules are known by."""
    return _fields(class_name) is _CONV


def version_of(class_name: str) -> int | None:
    """Return the ``_version`` of a class of quantised modules; None if it is the one that most classes have."""
    name = class_name.rpartition(".")[2]
    if ".sparse." in class_name or ".reference." in class_name:
        return None
    if name.startswith("Linear"):
        return 4 if ".dynamic." in class_name else 3
    return 2 if ".dynamic." in class_name and name in ("LSTM", "GRU") else None


def _fields(class_name: str) -> _Fields:
    """Return how a class saves itself; nothing if it does as every module."""
    return next((fields for pattern, fields in _CLASSES if pattern.search(class_name)), ())


def _as_is(node: Inert) -> Inert:
    return node


def _number(kind: type) -> _Reader:
    """Return what makes a tensor, as code does, of one of the numbers that say how a layer's output is quantised."""
    return lambda node: Call(Global("torch", "tensor"), (node,)) if type(node) is kind else _ABSENT


def _global(node: Inert) -> Inert:
    return node if isinstance(node, Global) else _ABSENT


def _object(node: Inert) -> Inert:
    """Return an object of C++, for which its state is ``(what was packed, its class)``."""
    return node if _unpacked(node) is not None else _ABSENT


def _weight_and_bias(node: Inert) -> Inert:
    packed = _unpacked(node)
    return packed if isinstance(packed, tuple) and len(packed) == 2 else _ABSENT


def _one_weight(node: Inert) -> Inert:
    packed = _unpacked(node)
    weights = packed[1] if isinstance(packed, tuple) and len(packed) > 1 else None
    return weights[0] if isinstance(weights, list) and len(weights) == 1 else _ABSENT


def _unpacked(node: Inert) -> Inert:
    func = nodes.global_of(node.func) if isinstance(node, Call) else None
    is_object = func is not None and func.module in ("torch", "torch._C") and func.name == "ScriptObject"
    return node.state[0] if is_object and isinstance(node.state, tuple) and len(node.state) == 2 else None


_Reader: TypeAlias = Callable[[Inert], Inert]
_Fields: TypeAlias = "tuple[tuple[str, str, _Reader], ...]"
_CONV_LENGTH: Final = 15
_CONV: Final[_Fields] = (
    ("weight", "10", _as_is),
    ("bias", "11", _as_is),
    ("scale", "12", _number(float)),
    ("zero_point", "13", _number(int)),
)
"""What a layer of convolutions has where in its state."""
_OUTPUT: Final[_Fields] = (("scale", "scale", _number(float)), ("zero_point", "zero_point", _number(int)))
_DTYPE: Final = ("dtype", "dtype", _global)
_CLASSES: Final[tuple[tuple[re.Pattern[str], _Fields], ...]] = tuple(
    (re.compile(pattern), fields)
    for pattern, fields in (
        (r"\.sparse\.", (("", "", lambda _: _ABSENT),)),
        (
            r"\.reference\..*\.(Linear|Conv|Embedding)\w*$",
            tuple((f"weight_{one}",) * 2 + (_global,) for one in ("qscheme", "dtype")),
        ),
        (r"\.reference\.", ()),
        (r"\.LinearPackedParams$", (_DTYPE, ("_packed_params", "_packed_params", _weight_and_bias))),
        (r"\.EmbeddingPackedParams$", (_DTYPE, ("_packed_weight", "_packed_weight", _one_weight))),
        (r"\.PackedParameter$", (("param", "param", _object),)),
        (
            r"\.dynamic\..*\.(RNN|LSTM|GRU)Cell$",
            tuple((f"_packed_weight_{one}",) * 2 + (_object,) for one in ("ih", "hh")),
        ),
        (r"\.Conv\w*$", _CONV),
        (r"\.(Linear\w*|QFunctional)$", _OUTPUT),
    )
)
"""How classes save themselves, the first that fits: what they add under which name, from where, and made how."""
