"""
Keys of mappings → components of dotted names.

Text is itself. What has a short plain value is named by it, whatever class holds the value: a numpy scalar, an enum
member, bytes, a namedtuple, a device. Parameters that are keys of an optimizer's state have the number that its
state_dict() gives them. Everything else is numbered in the order of the mapping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Final

from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Global, Inert, Pairs, Set
from ckptool.pickles.numpy_values import numpy_scalar, raw_bytes

_MOST_PARTS: Final = 16
_MOST_TEXT: Final = 256
_DEEPEST: Final = 3
_MOST_BITS: Final = 128
_SETS: Final = frozenset(("builtins.set", "builtins.frozenset", "__builtin__.set", "__builtin__.frozenset"))


class KeyNames:
    """Names the keys of the mappings of one tree, which has to live as long as this does."""

    def __init__(self) -> None:
        self._texts: dict[int, str | None] = {}
        """The text of each node that was looked at: many keys may share their parts."""
        self._numbers: dict[int, dict[int, int]] = {}
        """For each optimizer's state, the numbers of the parameters."""

    def number_parameters(self, optimizer: Pairs) -> None:
        """
        Note the place of each parameter among those of all groups: its number in ``Optimizer.state_dict()``.

        See torch/optim/optimizer.py. ``optimizer`` are the pairs with the keys ``state`` and ``param_groups``.
        """
        found: dict[int, int] = {}
        groups = nodes.lookup(optimizer, "param_groups")
        for group in groups if isinstance(groups, list) else ():
            parameters = nodes.lookup(nodes.mapping_pairs(group) or [], "params")
            for parameter in parameters if isinstance(parameters, list) else ():
                if isinstance(parameter, Call):
                    found.setdefault(id(parameter), len(found))
        self._numbers[id(nodes.lookup(optimizer, "state"))] = found

    def components(self, mapping: Inert, keys: Sequence[Inert]) -> list[str]:
        """Return the component for each key of a mapping."""
        known: Mapping[int, int] = self._numbers.get(id(mapping), {})
        texts = [str(known[id(key)]) if id(key) in known else self._text(key) for key in keys]
        taken = set(texts)
        free = (text for text in map(str, count()) if text not in taken)
        return [next(free) if text is None else text for text in texts]

    def _text(self, key: Inert, depth: int = 0) -> str | None:
        """Return the value of a key as text, or None where it has none that is plain and short."""
        if isinstance(key, str) and not depth:
            return key
        if not nodes.is_container(key):
            return _plain_text(key)
        if id(key) not in self._texts:
            self._texts[id(key)] = None  # a container may hold itself
            self._texts[id(key)] = self._container_text(key, depth) if depth < _DEEPEST else None
        return self._texts[id(key)]

    def _container_text(self, key: Inert, depth: int) -> str | None:
        if isinstance(key, tuple):
            return self._joined("({})", key, depth)
        if isinstance(key, Set):
            return self._joined("{{{}}}", key.items, depth)
        if not isinstance(key, Call):
            return None
        scalar, raw = numpy_scalar(key), raw_bytes(key)
        if scalar is not None:
            return None if scalar[1] is None else _plain_text(scalar[1])
        if raw is not None:
            return _plain_text(raw)
        return self._call_text(key, depth)

    def _call_text(self, key: Call, depth: int) -> str | None:
        """Return the value of what is made from plain values alone."""
        if not (key.state is key.items is key.pairs is key.kwargs is None):
            return None
        args, name = key.args, nodes.class_name(key)
        if not isinstance(args, tuple) or not args:
            return None
        if name in _SETS:
            return self._joined("{{{}}}", args[0], depth) if isinstance(args[0], list) else None
        if name == "torch.device":
            return self._joined("{}", args, depth, ":")
        return self._joined("({})" if len(args) > 1 else "{}", args, depth)

    def _joined(self, pattern: str, parts: Sequence[Inert], depth: int, separator: str = ", ") -> str | None:
        if len(parts) > _MOST_PARTS:
            return None
        texts = [text for part in parts if (text := self._text(part, depth + 1)) is not None]
        whole = pattern.format(separator.join(texts))
        return whole if len(texts) == len(parts) and len(whole) < _MOST_TEXT else None


def _plain_text(value: Inert) -> str | None:
    if isinstance(value, str):
        return value if len(value) < _MOST_TEXT else None
    if isinstance(value, Global):
        return _plain_text(str(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value) if value.bit_length() < _MOST_BITS else None
    if value is None or isinstance(value, bool | float):
        return str(value)
    if not isinstance(value, bytes | bytearray) or len(value) >= _MOST_TEXT:
        return None
    return str(value, "utf-8", "replace")
