"""Classes and functions that a file makes itself, as dill and cloudpickle write those of scripts, and what they get."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from ckptool.pickles import nodes
from ckptool.pickles import plain_names as plain
from ckptool.pickles.changing import KNOWN
from ckptool.pickles.grades import is_class, is_plain
from ckptool.pickles.made_objects import (
    BYTE_CODE,
    SETTER,
    bases_given,
    bases_of,
    is_class_made,
    is_object_made,
    known_bases,
    maker_name,
)
from ckptool.pickles.nodes import Call, Dict, Global, Inert, Pairs, PersistentId
from ckptool.pickles.reaching import Looks, canonical, package_of, passed
from ckptool.pickles.verdicts import is_system

_NAMES: Final = plain.METHODS | plain.RUN_BY_LOADING
_HOOK: Final = "__subclasshook__"
"""What a class is asked when another is registered with it."""
_TAKING_OBJECTS: Final = ("_create_cell", "_make_cell", "_create_weakref", "_create_weakproxy")
"""Calls that keep whatever object they are given."""
_TOLD_OF_ENDS: Final = ("_create_weakref", "_create_weakproxy")
"""Those that may be given a function as well, for the end of the object."""
_SETS_GLOBALS: Final = ("_function_setstate", "_fill_function")
"""Those that also give items to the names that a function knows."""
_OF_TYPE: Final = 2
"""Which argument of ``type`` the attributes are."""
_TAKEN_APART: Final = ("__closure__", "_cloudpickle_submodules")
"""Parts of the state of a function whose items are asked for something."""
_UNFOLLOWED: Final = "cannot be followed"
_MOST_BASES: Final = 1000
_OF_CLASSES: Final = ("builtins.property", "builtins.classmethod", "builtins.staticmethod")


def but_globals(qualified: str, given: tuple[Inert, ...]) -> tuple[Inert, ...]:
    """Leave out the names of a module where a function is made, which keeps them: dill writes them so."""
    if qualified.rpartition(".")[2] not in plain.MAKE_NEW:
        return given
    return tuple(one for one in given if not (isinstance(one, Global) and one.name == "__dict__"))


def is_of_picklers(name: str, qualified: str) -> bool:
    """Say whether a call of this name makes or changes classes and functions."""
    last = qualified.rpartition(".")[2]
    return name == "builtins.type" or last in plain.WRITTEN_BY_PICKLERS


def class_gets(maker: Global, given: tuple[Inert, ...], looks: Looks) -> str | None:
    """Return what reaches the system that a class which the file makes is made by, or gets for a method."""
    last = maker.name.rpartition(".")[2]
    is_type = canonical(maker.module, maker.name) == "builtins.type"
    if not is_of_picklers(canonical(maker.module, maker.name), maker.name):
        return None
    bases = bases_given(given if is_type else given[1:]) if last not in plain.CHANGER_NAMES else bases_of(given[:1])
    if (used := _made_by(last, given, bases)) is not None:
        return used
    if (is_type or last in plain.MAKE_CLASSES) and not _are_bases(given[1:2] if is_type else given[2:3]):
        return f"bases that {_UNFOLLOWED}"
    index = _OF_TYPE if is_type else plain.ATTRIBUTES_AT.get(last)
    if index is not None and not all(map(_is_shown, _parts(given[index : index + 1]))):
        return f"attributes that {_UNFOLLOWED}"
    pairs = [pair for one in _parts(given) if isinstance(one, Dict) for pair in one.pairs]
    if last in plain.SET_ONE:
        if len(given) < 2 or not isinstance(given[1], str):
            return f"an attribute that {_UNFOLLOWED}"
        pairs.append((given[1], given[2] if len(given) > 2 else None))
    looks.met.update(key for key, _ in pairs if isinstance(key, str) and key == _HOOK)
    if any(isinstance(key, str) and key in plain.CONSTRUCTORS for key, _ in pairs):
        looks.constructing.add(id(_changed(given[0])))
    parts = [
        part for key, value in pairs if isinstance(key, str) and key in _TAKEN_APART for part in (value, *_items(value))
    ]
    if any(map(is_object_made, parts)):
        return f"an object, {BYTE_CODE}"
    if any(_is_setter(value) for _, value in pairs):
        looks.met.add(SETTER)
    if _HOOK in looks.met and any(isinstance(key, str) and key == "_abc_impl" and value for key, value in pairs):
        return f"{_HOOK}(), {BYTE_CODE}"
    methods = [(key, value) for key, value in pairs if isinstance(key, str) and key in _NAMES]
    run = next((key for key, value in pairs if _is_run(key, value, pairs, last, bases)), None)
    if run is not None:
        return f"{run}(), {BYTE_CODE}"
    return passed(tuple(one for _, one in methods if is_type or not _is_own_method(one)), looks, is_system)


def constructs(made: Inert, known: Collection[int]) -> bool:
    """
    Say whether the call of a class that the file makes may run byte code: its own way to make objects, or others.

    ``known`` are classes that got one after they were made.
    """
    todo = [made]
    for one in todo:
        if isinstance(one, Global):
            name = canonical(one.module, one.name)
            if package_of(name) in KNOWN and name not in plain.KEEPING_BASES:
                return True
            continue
        cls = _changed(one)
        if not is_class_made(cls) or id(cls) in known or len(todo) > _MOST_BASES:
            return True
        parts = cls.args if isinstance(cls.args, tuple) else ()
        kind = nodes.global_of(parts[0]) if parts else None
        given = [key for part in parts if isinstance(part, Dict) for key, _ in part.pairs]
        if kind is None or canonical(kind.module, kind.name) not in plain.METACLASSES:
            return True
        if any(isinstance(key, str) and key in plain.CONSTRUCTORS for key in given):
            return True
        todo += bases_given(parts[1:])
    return False


def _parts(given: tuple[Inert, ...]) -> list[Inert]:
    return [one for part in given for one in (part if isinstance(part, tuple) else (part,))]


def _is_shown(attributes: Inert) -> bool:
    """Say whether this is a dict whose keys are text, as picklers write attributes, or there are none."""
    if not isinstance(attributes, Dict):
        return attributes is None
    return all(isinstance(key, str) for key, _ in attributes.pairs)


def _changed(one: Inert) -> Inert:
    """Return the class that was given to calls which change it and give it back."""
    while maker_name(one) in plain.CHANGER_NAMES and isinstance(one.args, tuple) and one.args:
        one = one.args[0]
    return one


def _made_by(last: str, given: tuple[Inert, ...], bases: tuple[Inert, ...]) -> str | None:
    """Return what reaches the system that makes a class: its metaclass, or the class of which members are made."""
    if last in _TAKING_OBJECTS:
        is_told = last in _TOLD_OF_ENDS and any(type(one) is Call for one in given[1:])
        return f"what is told of an end, {BYTE_CODE}" if is_told else None
    parts = given[1] if last in plain.CHANGER_NAMES and len(given) == 2 and isinstance(given[1], tuple) else ()
    if any(map(is_object_made, (*given[: 2 if last in plain.CHANGER_NAMES else None], *parts))):
        return f"an object, {BYTE_CODE}"
    if any(map(is_object_made, bases)):
        return f"a metaclass, {BYTE_CODE}"
    if last == plain.MAKE_ENUMERATIONS and given and isinstance(given[0], tuple):
        return _made_of_members(given)
    if last not in plain.MAKE_CLASSES or not given:
        return None
    if is_class_made(given[0]):
        return f"a metaclass, {BYTE_CODE}"
    kind = nodes.global_of(given[0])
    if kind is None:
        return f"a metaclass that {_UNFOLLOWED}"
    name = canonical(kind.module, kind.name)
    is_known = name in plain.METACLASSES or (is_class(name) and name.endswith("Meta"))
    return name if not is_known and is_system(name, kind.name) else None


def _are_bases(given: tuple[Inert, ...]) -> bool:
    """Say whether these are bases as picklers write them, if there are any: names, classes of the file, type hints."""
    bases = given[0] if given else ()
    return isinstance(bases, tuple) and all(map(_is_base, bases))


def _is_base(one: Inert) -> bool:
    if isinstance(one, Global):  # not what an object of a known class has
        inner, _, last = one.name.rpartition(".")
        return not inner or package_of(canonical(one.module, one.name)) not in KNOWN or not last[:1].islower()
    if type(one) is not Call or is_class_made(one):
        return type(one) is Call
    maker = nodes.global_of(one.func)
    named = one.args[0] if isinstance(one.args, tuple) and one.args else None
    return maker is not None and isinstance(named, Global) and "typing" in (maker.module, named.module)


def _items(value: Inert) -> Inert:
    return value if isinstance(value, list | tuple) else ()


def _made_of_members(given: tuple[Inert, ...]) -> str | None:
    """Return what reaches the system that an enumeration calls for its members: a class, or methods of their values."""
    kinds, values = given[0], [value for part in given if isinstance(part, Dict) for _, value in part.pairs]
    if any(map(is_class_made, kinds)) or (len(kinds) > 1 and any(map(is_object_made, values))):
        return f"an enumeration, {BYTE_CODE}"
    named = [one for one in map(nodes.global_of, kinds) if one is not None]
    return next((str(one) for one in named if is_system(canonical(one.module, one.name), one.name)), None)


def _is_setter(value: Inert) -> bool:
    """Say whether setting an attribute of this value calls a function."""
    func = nodes.global_of(value.func) if type(value) is Call else None
    if func is None or canonical(func.module, func.name) != "builtins.property" or not isinstance(value.args, tuple):
        return type(value) is Call and _is_hidden(value)
    return any(part is not None for part in value.args[1:3])


def _is_run(method: Inert, value: Inert, pairs: Pairs, maker: str, bases: tuple[Inert, ...]) -> bool:
    """Say whether loading may call what a class has got under a name, and that is byte code of the file."""
    if not isinstance(method, str) or type(value) is not Call:
        return False
    if method == "__eq__" and any(isinstance(key, str) and key == "__hash__" and one is None for key, one in pairs):
        return False  # its objects are no keys
    if method in plain.RUN_BY_LOADING:
        return True
    if method == "__slots__":
        return is_object_made(value)
    if maker == plain.MAKE_ENUMERATIONS and method in plain.RUN_BY_ENUMERATIONS:
        return True
    known = known_bases(bases)
    if _is_setter(value) and any(name.endswith(("Error", "Exception", "Warning")) for name in known):
        return True  # their state is set attribute by attribute
    return any(_asks_for(base, method) for base in known) and (_is_method(value) or is_object_made(value))


def _is_own_method(one: Inert) -> bool:
    """Say whether this is a function that the file has made, also as a property, or for the class itself."""
    if is_new(one) or not isinstance(one, Call):
        return isinstance(one, Call)
    maker = nodes.global_of(one.func)
    is_wrapped = maker is not None and canonical(maker.module, maker.name) in _OF_CLASSES and one.state is None
    return is_wrapped and isinstance(one.args, tuple) and all(part is None or is_new(part) for part in one.args)


def _asks_for(base: str, method: str) -> bool:
    """Say whether a class may ask objects of its subclasses for this, while they are loaded."""
    if package_of(base) in KNOWN and not re.fullmatch(plain.PLAIN_BASES, base):
        return True
    return any(method in names for pattern, names in plain.RUN_FOR_BASES if re.fullmatch(pattern, base))


def _is_method(one: Call) -> bool:
    """Say whether this may be a function that the file has made, also as a property, or for the class itself."""
    maker = nodes.global_of(one.func)
    if maker is not None and canonical(maker.module, maker.name) in _OF_CLASSES:
        return one.state is not None or not isinstance(one.args, tuple) or any(type(part) is Call for part in one.args)
    return _is_own_method(one) or _is_hidden(one)


def _is_hidden(one: Call) -> bool:
    """Say whether this is what a function of a known package gives, which may have been given to that."""
    maker = nodes.global_of(one.func)
    if maker is None:
        return not is_object_made(one)
    is_function = maker.name.rpartition(".")[2].lstrip("_")[:1].islower() and not is_plain(maker.module, maker.name)
    return is_function and package_of(canonical(maker.module, maker.name)) in KNOWN


def changes_other(name: str, qualified: str, given: tuple[Inert, ...]) -> bool:
    """Say whether a call sets attributes or items of its first argument, and that is nothing that the file has made."""
    if not given:
        return False
    one, last = given[0], qualified.rpartition(".")[2]
    if last == plain.SETS_ITEMS:
        if isinstance(one, Global):
            return one.name.endswith("__dict__") or package_of(canonical(one.module, one.name)) in KNOWN
        return not isinstance(one, Dict | Call)
    if last in _SETS_GLOBALS and is_new(one) and not _has_own_globals(one):
        return True
    return (name == "builtins.setattr" or last in plain.CHANGER_NAMES) and not (is_new(one) or _names_itself(given))


def _has_own_globals(function: Inert) -> bool:
    """Say whether the names that a function of the file knows are the file's own, not those of a module."""
    args = function.args if isinstance(function, Call) and isinstance(function.args, tuple) else ()
    return not any(isinstance(one, Global | Call | PersistentId) for one in args[1:])


def is_new(one: Inert) -> bool:
    """Say whether this is a class, a function or a cell that the file has made, which no other code has."""
    maker = nodes.global_of(one.func) if isinstance(one, Call) else None
    if maker is None or not isinstance(one, Call):
        return False
    last = maker.name.rpartition(".")[2]
    if last != "_create_type" or not isinstance(one.args, tuple) or len(one.args) < 4:
        return last in plain.MAKE_NEW
    kind = nodes.global_of(one.args[0])
    name = canonical(kind.module, kind.name) if kind is not None else "builtins"
    return name in plain.METACLASSES or package_of(name) not in KNOWN


def _names_itself(given: tuple[Inert, ...]) -> bool:
    """Say whether a class of no known package gets a name to be shown by, as dill writes it."""
    if len(given) != 3 or not isinstance(given[0], Global) or package_of(given[0].module) in KNOWN:
        return False
    return isinstance(given[1], str) and given[1] == "__qualname__" and isinstance(given[2], str)
