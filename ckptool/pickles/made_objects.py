"""What nodes stand for classes, functions and objects of classes that the file makes itself, from byte code in it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Final

from ckptool.pickles import dangerous_names as table
from ckptool.pickles import nodes
from ckptool.pickles import plain_names as plain
from ckptool.pickles.nodes import Call, Dict, Global, Inert, Set
from ckptool.pickles.reaching import Looks, canonical, package_of

BYTE_CODE: Final = "byte code that the file brings"
SETTER: Final = "a setter"
_OBJECTS: Final = ("copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__")
HOLDING: Final = ("collections.Counter", "collections.deque", "types.MappingProxyType")
"""Calls that take what they are given apart, and keep what is in that."""
_DICTS: Final = ("builtins.dict", "collections.OrderedDict", "collections.defaultdict")
_MAKERS: Final = plain.MAKE_CLASSES | plain.CHANGER_NAMES | {plain.MAKE_ENUMERATIONS}
_PROXY: Final = "_create_weakproxy"
_MOST_BASES: Final = 1000
_MOST_PARTS: Final = 1 << 16
"""Of a state, in tuples: those of Python's own generators have 628."""
_TAKING_APART: Final = frozenset(
    (
        *_DICTS,
        *(f"builtins.{kind}" for kind in ("list", "tuple", "set", "frozenset", "bytes", "bytearray", "str", "type")),
        *(f"builtins.{kind}" for kind in ("int", "float", "complex")),
        *HOLDING,
        "typing.NewType",
        "types.CodeType",
    )
)
"""They, and keepers that ask what they are given for items, or for a value."""


def maker_name(one: Inert) -> str:
    """Return the last part of the name of what a call calls."""
    maker = nodes.global_of(one.func) if type(one) is Call else None
    return maker.name.rpartition(".")[2] if maker is not None else ""


def is_class_made(one: Inert) -> bool:
    """Say whether this is a class that the file makes, or what gives such a class back, having changed it."""
    return maker_name(one) in _MAKERS


def makes_classes(name: Global) -> bool:
    """Say whether a call of this name gives such a class."""
    return name.name.rpartition(".")[2] in _MAKERS


def is_object_made(one: Inert) -> bool:
    """Say whether this is an object of a class that the file makes: methods of it are byte code of the file."""
    if type(one) is not Call:
        return False
    func = nodes.global_of(one.func)
    given = one.args[:1] if isinstance(one.args, tuple) else ()
    if func is not None and canonical(func.module, func.name) in _OBJECTS:
        return any(map(is_class_made, given))
    if maker_name(one) == _PROXY:  # which passes on what is asked of it
        return any(map(is_object_made, given))
    return is_class_made(one.func)


def holds_made(values: Inert, looks: Looks, *, is_deep: bool = False) -> bool:
    """
    Say whether there is such an object or class in containers, or more than can be looked at.

    With ``is_deep``, also in objects of Python's own classes: to show these shows what they hold.
    """
    todo: list[Inert] = [values]
    seen: set[int] = set()
    for one in todo:
        looks.left -= 1
        if looks.left <= 0 or is_object_made(one) or is_class_made(one):
            return True
        if type(one) in nodes.CONTAINERS and id(one) not in seen:
            seen.add(id(one))
            todo.extend(_held(one, looks.left, is_deep=is_deep))
    return False


def _held(one: Inert, most: int, *, is_deep: bool) -> Iterator[Inert]:
    kind = type(one)
    if kind is tuple or kind is list:
        yield from one[:most]
    elif kind is Dict:
        yield from chain.from_iterable(one.pairs[:most])
    elif kind is Set:
        yield from one.items[:most]
    elif kind is Call and is_deep:
        func = nodes.global_of(one.func)
        if func is None or package_of(canonical(func.module, func.name)) not in table.STDLIB:
            return
        yield from (one.args, one.state)
        yield from (one.items or ())[:most]
        yield from chain.from_iterable((one.pairs or ())[:most])


def is_state_made(state: Inert) -> bool:
    """Say whether a state is such an object, or holds one where tuples have numbers, texts or a dict."""
    todo = [state]
    for one in todo:
        if is_object_made(one) or len(todo) > _MOST_PARTS:
            return True
        todo += one if type(one) is tuple else ()
    return False


def takes_made(name: str, given: tuple[Inert, ...], *, is_built: bool) -> bool:
    """Say whether a call takes such objects apart that are its arguments, or the pairs that a dict is made of."""
    if not is_built and name not in _TAKING_APART:
        return False
    pairs = chain.from_iterable(one for one in given if name in _DICTS and isinstance(one, list | tuple))
    return any(map(is_object_made, chain(given, pairs)))


def bases_given(given: tuple[Inert, ...]) -> tuple[Inert, ...]:
    """Return the bases of a class that is made with a name, bases and attributes."""
    return given[1] if len(given) > 1 and isinstance(given[1], tuple) else ()


def bases_of(classes: tuple[Inert, ...]) -> tuple[Inert, ...]:
    """Return the bases of classes that the file makes."""
    todo, found = list(classes), list[Inert]()
    for one in todo:
        if type(one) is Call and isinstance(one.args, tuple):
            bases = bases_given(one.args[1:])
            found += bases
            todo += one.args[:1] if not bases else ()  # what changes a class gives it back
    return tuple(found)


def known_bases(bases: tuple[Inert, ...]) -> list[str]:
    """Return the names of the bases of a class, and of those of its bases that the file makes as well."""
    todo, found = list(bases), []
    for one in todo:
        if (named := nodes.global_of(one)) is not None:
            found.append(canonical(named.module, named.name))
        elif len(todo) < _MOST_BASES:
            todo += bases_of((one,))
    return found
