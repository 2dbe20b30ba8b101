"""
Inert nodes to plain Python values: numbers, text, bytes, lists, tuples, dicts and sets.

Callers can pass functions that make other values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

from ckptool.cancellation import Cancellation, each
from ckptool.errors import LimitExceeded, UnsupportedFeature
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Inert
from ckptool.pickles.numpy_values import array_of, numpy_scalar, raw_bytes

_MAX_DEPTH: Final = 64
_MAX_NODES: Final = 10_000_000


def _of_python(node: Inert, value: Callable[[Inert], Any]) -> Any:
    """Return bytes, a bytearray, a complex number or a set that is written as a call; None for other nodes."""
    members = nodes.members(node)
    if members is not None:
        made = frozenset if nodes.class_name(node).endswith("frozenset") else set
        return made(_key(value(item)) for item in members)
    raw = raw_bytes(node)
    if raw is not None or not isinstance(node, Call) or not isinstance(node.args, tuple):
        return raw
    func = nodes.global_of(node.func)
    name = func.name if func is not None and func.module in ("builtins", "__builtin__") else ""
    if name == "complex" and len(node.args) == 2 and all(type(one) in (float, int) for one in node.args):
        return complex(*node.args)
    if name == "bytearray" and len(node.args) <= 1:
        raw = raw_bytes(node.args[0]) if node.args else b""
        return None if raw is None else bytearray(raw)
    return None


def plain_value(
    node: Inert,
    leaf: Callable[[Inert], Any] | None = None,
    cancellation: Cancellation | None = None,
    other: Callable[[Inert, Callable[[Inert], Any]], Any] | None = None,
) -> Any:
    """
    Return the Python value of a node; ordered and default dicts become dicts.

    ``leaf`` is called first with each node, and returns its value, or None to go on. ``other`` is called with a node
    that is not a plain value, and a function that makes values of the nodes inside.

    Raises:
        UnsupportedFeature: It contains something that only code could make; the message names it.
        LimitExceeded: It is nested too deep, or has too many values.
        Cancelled: It was cancelled.
    """
    left = _MAX_NODES

    def value(node: Inert, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or depth > _MAX_DEPTH:
            raise LimitExceeded(f"values nested more than {_MAX_DEPTH} deep, or more than {_MAX_NODES:,} of them")
        made = leaf(node) if leaf is not None else None
        if made is not None:
            return made
        if node is None or isinstance(node, bool | int | float | str | bytes):
            return node
        made = _of_python(node, lambda item: value(item, depth + 1))
        if made is not None:
            return made
        if isinstance(node, list | tuple):
            return type(node)(value(item, depth + 1) for item in each(node, cancellation))
        scalar = numpy_scalar(node)
        if scalar is not None and isinstance(scalar[1], bool | int | float | str):
            return scalar[1]
        pairs = nodes.mapping_pairs(node)
        if pairs is None:
            return no_plain_value(node) if other is None else other(node, lambda inner: value(inner, depth + 1))
        return {_key(key): value(item, depth + 1) for key, item in each(pairs, cancellation)}

    return value(node, 0)


def no_plain_value(node: Inert) -> NoReturn:
    """Raise UnsupportedFeature for a node whose value only code could make."""
    array = array_of(node)
    what = f"numpy.ndarray, {array}" if array is not None else nodes.class_name(node)
    raise UnsupportedFeature(f"a value of type {what}", kind="no-plain-value")


def _key(key: Inert) -> str | int | float | bool | bytes | None:
    if key is None or isinstance(key, str | int | float):
        return key
    raw = raw_bytes(key)
    if raw is not None:
        return raw
    raise UnsupportedFeature(f"a key of type {nodes.class_name(key)}", kind="no-plain-value")
