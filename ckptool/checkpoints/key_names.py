"""
Keys of mappings to components of dotted names.

Text is used as it is. A key with a short plain value is named by that, whatever its class: a numpy scalar, an enum
member, bytes, a namedtuple, a device. Parameters that are keys of an optimizer's state get the number that its
state_dict() would give them. All other keys are numbered in the order of the mapping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Final

from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Global, Inert, Pairs
from ckptool.pickles.numpy_values import numpy_scalar, raw_bytes

_MOST_PARTS: Final = 16
_MOST_TEXT: Final = 256
_DEEPEST: Final = 3
_MOST_BITS: Final = 128


class KeyNames:
    """Names the keys of the mappings of one tree, which must live as long as this object."""

    def __init__(self, root: Inert) -> None:
        self._root = root
        self._texts: dict[int, str | None] = {}
        """The text of each visited node, by its id: many keys may share their parts."""
        self._own: dict[int, dict[int, int]] = {}
        """The numbers of the parameters, by the id of each optimizer's state."""
        self._of_groups: dict[int, dict[int, int]] = {}
        self._all: dict[int, int] | None = None
        """The numbers of the parameters of all optimizers, once a mapping beside an optimizer needs them."""

    def number_parameters(self, pairs: Pairs) -> None:
        """Record the numbers of an optimizer's parameters, if these pairs are an optimizer's."""
        groups = nodes.lookup(pairs, "param_groups")
        if not isinstance(groups, list):
            return
        if id(groups) not in self._of_groups:
            self._of_groups[id(groups)] = parameter_numbers(groups)
        self._own[id(nodes.lookup(pairs, "state"))] = self._of_groups[id(groups)]

    def components(self, mapping: Inert, keys: Sequence[Inert]) -> list[str]:
        """Return the component for each key of a mapping."""
        own = self._own.get(id(mapping), {})
        texts = [str(own[id(key)]) if id(key) in own else self._text(key) for key in keys]
        if None not in texts:
            return [text for text in texts if text is not None]
        taken = set(texts)
        free = (text for text in map(str, count()) if text not in taken)
        # A wrapper of an optimizer has a state by parameter, too, but no groups.
        wrapped = self._wrapped(keys, texts) if not own else {}
        return [
            wrapped.get(id(key)) or next(free) if text is None else text for key, text in zip(keys, texts, strict=True)
        ]

    def _wrapped(self, keys: Sequence[Inert], texts: Sequence[str | None]) -> Mapping[int, str]:
        """Return the numbers of keys that are parameters of other optimizers; empty unless all get distinct ones."""
        if self._all is None:
            self._all = _numbers_everywhere(self._root)
        everywhere = self._all
        unnamed = [id(key) for key, text in zip(keys, texts, strict=True) if text is None]
        found = {key: str(everywhere[key]) for key in unnamed if key in everywhere}
        is_clear = len(found) == len(unnamed) == len({*found.values()} - {*texts})
        return found if is_clear else {}

    def _text(self, key: Inert, depth: int = 0) -> str | None:
        """Return the value of a key as text, or None if it is not plain and short."""
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
        if (members := nodes.members(key)) is not None:
            return self._joined("{{{}}}", members, depth)
        if not isinstance(key, Call):
            return None
        scalar, raw = numpy_scalar(key), raw_bytes(key)
        if scalar is not None:
            return None if scalar[1] is None else _plain_text(scalar[1])
        if raw is not None:
            return _plain_text(raw)
        return self._call_text(key, depth)

    def _call_text(self, key: Call, depth: int) -> str | None:
        """Return the text of an object that is made from plain values only, else None."""
        if not (key.state is key.items is key.pairs is key.kwargs is None):
            return None
        args, name = key.args, nodes.class_name(key)
        if not isinstance(args, tuple) or not args:
            return None
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


def groups_of(groups: Inert) -> list[tuple[Pairs, list[Inert]]]:
    """Return the pairs of each optimizer group, and its parameters; empty if the node is not a list of groups."""
    found = [nodes.mapping_pairs(one) or [] for one in groups] if isinstance(groups, list) else []
    listed = [nodes.lookup(pairs, "params") for pairs in found]
    return [(pairs, one if isinstance(one, list) else []) for pairs, one in zip(found, listed, strict=True)]


def parameter_numbers(groups: Inert) -> dict[int, int]:
    """
    Return the number of each parameter of an optimizer's groups in its state_dict(), by the identity of its node.

    It is the position among the parameters of all groups; one that is twice in a group has the later position.
    See torch/optim/optimizer.py, Optimizer.state_dict.
    """
    found: dict[int, int] = {}
    seen: set[int] = set()
    start = 0
    for _, parameters in groups_of(groups):
        if id(parameters) not in seen:
            seen.add(id(parameters))
            places = {id(one): start + place for place, one in enumerate(parameters) if isinstance(one, Call)}
            for parameter, place in places.items():
                found.setdefault(parameter, place)
        start += len(parameters)
    return found


def _numbers_everywhere(root: Inert) -> dict[int, int]:
    """Return the numbers of the parameters of all optimizers in a tree, except those with different numbers."""
    found: dict[int, int] = {}
    several: set[int] = set()
    seen = {id(root)}
    todo = [root]
    while todo:
        node = todo.pop()
        groups = nodes.item(node, "param_groups")
        if isinstance(groups, list) and id(groups) not in seen:
            for parameter, number in parameter_numbers(groups).items():
                if found.setdefault(parameter, number) != number:
                    several.add(parameter)
        below = {id(child): child for child in nodes.held(node) if nodes.is_container(child)}
        todo += [child for key, child in below.items() if key not in seen]
        seen.update(below)
    return {parameter: number for parameter, number in found.items() if parameter not in several}
