"""Describe any inert value in one short line, bounded in width and depth whatever the file nests."""

from __future__ import annotations

from ckptool.messages import cut
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Block, Call, Global, Inert, PersistentId, Set
from ckptool.pickles.numpy_values import array_of, numpy_scalar

_MAX_ITEMS = 6
_MAX_DEPTH = 3
_MAX_TEXT = 60


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
    if isinstance(node, bool | float) or node is None:
        return str(node)
    if isinstance(node, int):
        return str(node) if node.bit_length() <= 256 else f"an integer of {node.bit_length():,} bits"
    if isinstance(node, Global):
        return str(node)
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
    return items[:_MAX_ITEMS] if depth < _MAX_DEPTH else ()


def _bracket(opening: str, parts: list[str], count: int, closing: str) -> str:
    more = ["…"] if count > len(parts) else []
    text = f"{opening}{', '.join(parts + more)}{closing}"
    return text if len(text) <= 4 * _MAX_TEXT else text[: 4 * _MAX_TEXT - 1] + "…"


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
