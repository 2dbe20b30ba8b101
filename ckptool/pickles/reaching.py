"""Which names reach the system when they are called, and which of them are among the arguments of a call."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import lru_cache
from itertools import chain
from typing import Any, Final

from ckptool.pickles import dangerous_names as table
from ckptool.pickles import nodes
from ckptool.pickles import plain_names as plain
from ckptool.pickles.effects import Unfollowed
from ckptool.pickles.nodes import Call, Dict, Global, Inert, Set

_MOST_LOOKED_AT: Final = 1 << 21
_MOST_PARTS: Final = 32
"""Of a name, between its dots: with more it is none of an import."""
_LONGEST_LISTED: Final = max(name.count(".") + 1 for name in table.DANGEROUS)
_HOLDERS: Final = frozenset((tuple, list, Set, Dict))
_CONSTANTS: Final = frozenset((bool, int, float, str, bytes, type(None)))
FLAT_BITS: Final = 3
"""So many binary digits less count the elements of what has constants alone."""
_IMPORTERS: Final = ("torch", "numpy", "joblib")
_PASSING: Final = ("builtins", "operator", "itertools", "functools", "collections")
"""Modules with functions that give what they were given: ``next``, ``getitem``, ``dict.get``."""
TOO_MUCH: Final = "more than can be looked at"
_MODULES: Final = {"_operator": "operator", "torch.tensor": "torch._tensor"}
"""Modules under other names: in C; as ``torch.load`` finds them in zips."""


class Looks:
    """How much may still be looked at in the arguments of calls, of all pickles together: they may be shared."""

    __slots__ = ("constructing", "has_classes", "left", "met", "methods")

    def __init__(self, *, has_classes: bool = True) -> None:
        self.left = _MOST_LOOKED_AT
        self.has_classes = has_classes
        """Whether the pickles may make classes."""
        self.met: set[str] = set()
        """What classes that the file makes have, and what only later opcodes may call: hooks, and setters."""
        self.constructing: set[int] = set()
        """Classes that the file makes, and that got a way to make their objects after they were made."""
        self.methods: dict[int, Inert] = {}
        """The names of methods that calls give, which are in a tree as calls."""


@lru_cache(maxsize=1 << 12)
def canonical(module: str, name: str) -> str:
    """Return the full name in Python 3, in no module in C: unpicklers still understand the names of Python 2."""
    import _compat_pickle as compat  # two tables: what pickle itself uses for this

    module, name = compat.NAME_MAPPING.get((module, name), (module, name))
    module = _MODULES.get(module) or compat.IMPORT_MAPPING.get(module, module)
    return f"{module}.{name}" if name else module


def package_of(name: str) -> str:
    """Return the package that a name is of."""
    return name.partition(".")[0]


@lru_cache(maxsize=1 << 12)
def reaching(name: str, qualified: str) -> str | None:
    """Return in which way what has this name reaches the system, if it is known for that or hides what it is."""
    if name in plain.HARMLESS or name in plain.PLAIN or is_value(name):
        return None
    reason = listed(name)
    if reason:
        return reason
    parts = qualified.split(".", _MOST_PARTS)
    if len(parts) > _MOST_PARTS:
        return table.THROUGH
    for index in range(len(parts)):
        if index and (reason := listed(".".join(parts[index - 1 :]))):
            return reason
    if not table.INSIDE.isdisjoint(parts):
        return table.THROUGH
    if len(parts) > 1 and not (name.startswith("builtins.") and re.fullmatch(plain.HARMLESS_PATTERN, name)):
        for part in parts[:-1]:
            first = part.lstrip("_")[:1]
            if not first.isupper():
                return table.THROUGH
    if parts[-1] in table.TELLING or (package_of(name) in _IMPORTERS and not table.TELLING_CLASSES.isdisjoint(parts)):
        return table.TELLING_NAME
    return None


@lru_cache(maxsize=1 << 12)
def is_unknown(name: str, _qualified: str = "") -> bool:
    """Say whether this is a function or a class of Python's library that is not known to reach nothing."""
    if package_of(name) not in table.STDLIB or name in plain.PLAIN or name in plain.HARMLESS:
        return False
    return not (re.fullmatch(plain.HARMLESS_PATTERN, name) or is_value(name))


@lru_cache(maxsize=1 << 12)
def is_pickler(name: str) -> bool:
    """Say whether a name is of dill, of cloudpickle, or of a copy of that."""
    return re.match(r"(?:\w+\.)*(?:cloudpickle(?:_fast)?|dill)\.", name) is not None


def is_value(name: str) -> bool:
    """Say whether a pickle may name this as it does a number, whatever a call of it does."""
    return re.fullmatch(plain.VALUES, name) is not None


def listed(name: str) -> str | None:
    """Return in which way a name reaches the system, or what it is a part of, if that stands in the table."""
    parts = name.split(".", _LONGEST_LISTED)[:_LONGEST_LISTED]
    for count in range(len(parts), 0, -1):
        reason = table.DANGEROUS.get(".".join(parts[:count]))
        if reason:
            return reason
    return None


def passed(values: tuple[Inert, ...], looks: Looks, called: Callable[[str, str], bool] | None = None) -> str | None:
    """
    Return the first name among arguments that reaches the system when it is called, or what cannot be followed.

    With ``called``, who gets them may call them: also a name of which it says so, given that and what of it is below
    its module, and the call that gives a function made of what the file holds. What objects have got as attributes and
    items counts: a call of their methods may call it.
    """
    if looks.left <= 0:
        return TOO_MUCH
    todo: list[Inert] = list(values)
    seen: set[int] = set()
    for met in todo:  # which grows: what is called mostly stands first, and not deep
        looks.left -= 1
        one: Any = looks.methods.get(id(met), met)
        kind = type(one)
        if kind is Global:
            name = canonical(one.module, one.name)
            if one.name and (reaching(name, one.name) or (called is not None and called(name, one.name))):
                return name
        elif kind is Call:
            maker = _maker(one) if called is not None else None
            name = canonical(maker.module, maker.name) if maker is not None else ""
            if is_maker(name):
                return name
            if id(one) not in seen:
                seen.add(id(one))
                todo += (held for held in (one.state, one.items, one.pairs) if held is not None)
                if name in plain.KEEPERS or package_of(name) in _PASSING:
                    todo += (one.args, one.kwargs)
        elif kind is Unfollowed:
            return str(one.why)
        elif kind in _HOLDERS and id(one) not in seen:
            seen.add(id(one))
            held = _held(one)
            if is_flat(held):
                looks.left -= len(held) >> FLAT_BITS
                continue
            if len(held) > looks.left:
                looks.left = 0
                return TOO_MUCH
            todo.extend(held)
    return None


def is_flat(held: Collection[Inert]) -> bool:
    """Say whether there are only constants in a container, which call nothing: to look at each takes far longer."""
    return _CONSTANTS.issuperset(map(type, held))


def is_maker(name: str) -> bool:
    """Say whether calls of this name give something to call."""
    return name in plain.MAKERS or name.rpartition(".")[2] in plain.MAKER_NAMES


def _maker(one: Call) -> Global | None:
    """Return what was called; what gave that, if it was given by a call: of a class of functions, it may be."""
    func = one.func.func if isinstance(one.func, Call) else one.func
    return nodes.global_of(func)


def _held(holder: Inert) -> Collection[Inert]:
    if type(holder) is Dict:
        return list(chain.from_iterable(holder.pairs))
    return holder.items if type(holder) is Set else holder
