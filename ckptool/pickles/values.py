"""
Nodes to plain Python values (numbers, text, lists), names of their types, and lines of text for people.

Callers of ``plain_value`` can pass functions that make other values. The line of ``describe`` is bounded in width and
depth whatever the file nests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

from ckptool.cancellation import Cancellation, each
from ckptool.errors import LimitExceeded, UnsupportedFeature
from ckptool.messages import cut
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Block, Call, Global, Inert, PersistentId, Set
from ckptool.pickles.numpy_values import array_of, numpy_scalar, raw_bytes

_MAX_DEPTH: Final = 64
_MAX_NODES: Final = 10_000_000
_MAX_SHOWN: Final = 6
_MAX_SHOWN_DEPTH: Final = 3
_MAX_TEXT: Final = 60


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
    leaf: Callable[[Inert], Any],
    cancellation: Cancellation | None,
    other: Callable[[Inert, Callable[[Inert], Any]], Any],
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
        made = leaf(node)
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
            return other(node, lambda inner: value(inner, depth + 1))
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


def kind_of(node: Inert) -> str:
    """Return the name of the type that a value would have after unpickling."""
    array = array_of(node)
    if array is not None:
        return "numpy.ndarray"
    scalar = numpy_scalar(node)
    if scalar is not None:
        return f"numpy.{scalar[0]}"
    if isinstance(node, PersistentId) and isinstance(node.pid, tuple) and node.pid and node.pid[0] == "storage":
        return "torch.Storage"
    if isinstance(node, Global):
        return "global"
    return nodes.class_name(node)


def scalar_of(node: Inert) -> bool | int | float | str | None:
    """Return a number, bool or text, cut if it is long, as JSON can hold it; None for any other value."""
    numpy_value = numpy_scalar(node)
    value = numpy_value[1] if numpy_value is not None else node
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return None
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, str):
        return cut(value)
    return value if isinstance(value, bool | int | float) else None


def describe(node: Inert, depth: int = 0) -> str:
    """
    Return one line about a value, in the style of ``repr``, cut if it is long or deeply nested.

    The text may contain any characters of the file: escape it before printing.
    """
    if isinstance(node, str):
        return _clip(repr(node[: _MAX_TEXT + 1]))
    if isinstance(node, bytes | bytearray):
        return f"{len(node):,} bytes"
    if isinstance(node, Block):
        return f"{node.nbytes:,} bytes"
    if isinstance(node, bool | float | Global) or node is None:
        return str(node)
    if isinstance(node, int):
        return str(node) if node.bit_length() <= 256 else f"an integer of {node.bit_length():,} bits"
    array = array_of(node) if isinstance(node, Call) else None
    if array is not None:
        return str(array)
    scalar = numpy_scalar(node)
    if scalar is not None:
        return str(scalar[1]) if scalar[1] is not None else kind_of(node)
    return _describe_container(node, depth)


def _describe_container(node: Inert, depth: int) -> str:
    def each(values: Inert) -> list[str]:
        return [describe(one, depth + 1) for one in _few(values, depth)]

    pairs = nodes.mapping_pairs(node)
    if pairs is not None:
        parts = [f"{describe(key, depth + 1)}: {describe(value, depth + 1)}" for key, value in _few(pairs, depth)]
        return _bracket("{", parts, len(pairs), "}")
    if isinstance(node, list | tuple | Set):
        items = node.items if isinstance(node, Set) else node
        opening, closing = ("[", "]") if isinstance(node, list) else ("(", ")") if items is node else ("{", "}")
        return _bracket(opening, each(items), len(items), closing)
    if not isinstance(node, Call):
        return kind_of(node)
    name = f"{nodes.class_name(node).rpartition('.')[2]}("
    attributes = nodes.attribute_pairs(node)
    if attributes:
        keys = (_clip(key) if isinstance(key, str) else describe(key, depth + 1) for key, _ in _few(attributes, depth))
        values = each([value for _, value in attributes])
        return _bracket(name, list(map("{}={}".format, keys, values)), len(attributes), ")")
    args = node.args if isinstance(node.args, tuple) else ()
    return _bracket(name, each(args), len(args), ")")


def _few(items: Inert, depth: int) -> Inert:
    return items[:_MAX_SHOWN] if depth < _MAX_SHOWN_DEPTH else ()


def _bracket(opening: str, parts: list[str], count: int, closing: str) -> str:
    more = ["…"] if count > len(parts) else []
    text = f"{opening}{', '.join(parts + more)}{closing}"
    return text if len(text) <= 4 * _MAX_TEXT else text[: 4 * _MAX_TEXT - 1] + "…"


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
