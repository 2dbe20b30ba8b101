"""Classes and functions that a file makes itself, as dill and cloudpickle write those of scripts, and what they get."""

from __future__ import annotations

from typing import Final

from ckptool.pickles import nodes
from ckptool.pickles import plain_names as plain
from ckptool.pickles.changing import KNOWN
from ckptool.pickles.grades import is_class
from ckptool.pickles.nodes import Call, Dict, Global, Inert, Pairs
from ckptool.pickles.reaching import Looks, canonical, package_of, passed
from ckptool.pickles.verdicts import is_system

BYTE_CODE: Final = "byte code that the file brings"
_NAMES: Final = plain.METHODS | plain.RUN_BY_LOADING
_OF_CLASSES: Final = ("builtins.property", "builtins.classmethod", "builtins.staticmethod")


def but_globals(qualified: str, given: tuple[Inert, ...]) -> tuple[Inert, ...]:
    """Leave out the names of the main program where a function is made, which keeps them: dill writes them so."""
    if qualified.rpartition(".")[2] not in plain.MAKE_NEW:
        return given
    return tuple(one for one in given if not (isinstance(one, Global) and str(one) == "__main__.__dict__"))


def class_gets(maker: Global, given: tuple[Inert, ...], looks: Looks) -> str | None:
    """Return what reaches the system that a class which the file makes is made by, or gets for a method."""
    last = maker.name.rpartition(".")[2]
    is_type = canonical(maker.module, maker.name) == "builtins.type"
    if not is_type and last not in plain.MAKE_NEW | plain.CHANGER_NAMES | plain.MAKE_CLASSES:
        return None
    if (used := _made_by(last, given)) is not None:
        return used
    parts = [one for part in given for one in (part if isinstance(part, tuple) else (part,))]
    pairs = [pair for one in parts if isinstance(one, Dict) for pair in one.pairs]
    pairs += [given[1:3]] if last in plain.CHANGER_NAMES and len(given) == 3 else []
    methods = [(key, value) for key, value in pairs if isinstance(key, str) and key in _NAMES]
    run = next((key for key, value in methods if _is_run(key, pairs) and _is_own_method(value)), None)
    if run is not None:
        return f"{run}(), {BYTE_CODE}"
    return passed(tuple(one for _, one in methods if is_type or not _is_own_method(one)), looks, is_system)


def _made_by(last: str, given: tuple[Inert, ...]) -> str | None:
    """Return what reaches the system that makes a class: its metaclass, or the class of which members are made."""
    if last == plain.MAKE_ENUMERATIONS and given and isinstance(given[0], tuple) and any(map(is_class_made, given[0])):
        return f"an enumeration, {BYTE_CODE}"
    if last not in plain.MAKE_CLASSES or not given:
        return None
    if is_class_made(given[0]):
        return f"a metaclass, {BYTE_CODE}"
    kind = nodes.global_of(given[0])
    name = canonical(kind.module, kind.name) if kind is not None else ""
    is_known = kind is None or name in plain.METACLASSES or is_class(name)
    return name if kind is not None and not is_known and is_system(name, kind.name) else None


def is_class_made(one: Inert) -> bool:
    """Say whether this is a class that the file makes."""
    maker = nodes.global_of(one.func) if type(one) is Call else None
    return maker is not None and maker.name.rpartition(".")[2] in (*plain.MAKE_CLASSES, plain.MAKE_ENUMERATIONS)


def is_object_made(one: Inert) -> bool:
    """Say whether this is an object of a class that the file makes: methods of it are byte code of the file."""
    return type(one) is Call and is_class_made(one.func)


def holds_object_made(values: tuple[Inert, ...], looks: Looks) -> bool:
    """Say whether there is such an object among values, or in what they hold; or more than can be looked at."""
    todo: list[Inert] = [values]
    seen: set[int] = set()
    for one in todo:
        looks.left -= 1
        if is_object_made(one) or looks.left <= 0:
            return True
        if (type(one) is tuple or type(one) is list) and id(one) not in seen:
            seen.add(id(one))
            todo += one[: looks.left]
    return False


def _is_run(method: str, pairs: Pairs) -> bool:
    """Say whether loading may call a method of a class with these attributes."""
    if method == "__eq__" and any(isinstance(key, str) and key == "__hash__" and one is None for key, one in pairs):
        return False  # its objects are no keys
    return method in plain.RUN_BY_LOADING


def _is_own_method(one: Inert) -> bool:
    """Say whether this is a function that the file has made, also as a property, or for the class itself."""
    if is_new(one) or not isinstance(one, Call):
        return isinstance(one, Call)
    maker = nodes.global_of(one.func)
    is_wrapped = maker is not None and canonical(maker.module, maker.name) in _OF_CLASSES and one.state is None
    return is_wrapped and isinstance(one.args, tuple) and all(part is None or is_new(part) for part in one.args)


def is_changer(name: str, qualified: str) -> bool:
    """Say whether a call of this name sets attributes of its first argument."""
    return name == "builtins.setattr" or qualified.rpartition(".")[2] in plain.CHANGER_NAMES


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


def names_itself(given: tuple[Inert, ...]) -> bool:
    """Say whether a class of no known package gets a name to be shown by, as dill writes it."""
    if len(given) != 3 or not isinstance(given[0], Global) or package_of(given[0].module) in KNOWN:
        return False
    return isinstance(given[1], str) and given[1] == "__qualname__" and isinstance(given[2], str)
