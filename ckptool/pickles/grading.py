"""
How far each effect of a pickle reaches: it makes data, runs code of a package, or reaches the system.

A name alone is never more than a reference; what is called with which arguments decides. Some calls only find what
another call is to use: ``getattr(os, "system")`` is followed. What cannot be followed is not data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from ckptool.messages import cut
from ckptool.pickles import dangerous_names as table
from ckptool.pickles import nodes, results
from ckptool.pickles.describe import describe
from ckptool.pickles.effects import SPLIT_FRAME, Effect, How, Unfollowed
from ckptool.pickles.grades import Grade, grade_of, is_known, is_plain
from ckptool.pickles.nodes import Call, Dict, Global, Inert, Pairs, PersistentId
from ckptool.pickles.reaching import Looks, canonical, is_unknown, package_of, passed, reaching

_RANK: Final[dict[Grade, int]] = {"data": 0, "code": 1, "system": 2}
_LONGEST: Final = 120
_KNOWN: Final = table.STDLIB | {"torch", "numpy"}
_SKELETONS: Final = ("_make_skeleton_class", "_make_skeleton_enum", "_make_skel_func")
_WITH_MAKERS: Final = {
    "torch._tensor._rebuild_from_type": (0, 2),
    "torch._tensor._rebuild_from_type_v2": (0, 2),
    "numpy.random._pickle.__bit_generator_ctor": (0, None),
    "numpy.random._pickle.__generator_ctor": (1, 0),
    "numpy.random._pickle.__randomstate_ctor": (1, 0),
}
"""Calls that make data, by what they are given to call: which argument that is, and which one it gets."""
_CALL_ONE: Final = {"builtins.iter": (0, 2), "itertools.accumulate": (1, 2)}
"""Calls that call one of their arguments, once or later: which, and how many they have then at least."""
_MAKE_OBJECTS: Final = ("copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__")
_GIVEN_MORE: Final = frozenset(
    (
        *_WITH_MAKERS,
        *_CALL_ONE,
        *_MAKE_OBJECTS,
        *table.ITERATING,
        "_codecs.encode",
    )
)
"""Calls that make data and are given a name that they call, or give what others are to follow."""
_MAKE_ARRAYS: Final = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
"""They give their first argument, a subclass of ndarray, to ``ndarray.__new__``, and do not call it."""
_LOADS_BYTES: Final = "torch.storage._load_from_bytes"
_PLAIN_BASES: Final = ("builtins.object", "builtins.dict", "builtins.list", "builtins.tuple", "builtins.set")
_OF_LOADER: Final = "what the loader has for an id"
_OF_MODULES: Final = ("_modules", "_parameters", "_buffers")
"""What modules of torch look their attributes up in."""
LOOKED_UP: Final = frozenset(("__setstate__", "extend", "append", "add"))
"""Attributes that Python's unpickler looks up on an object, its own ones among them, and calls."""


class Verdict(NamedTuple):
    """What one effect comes to."""

    grade: Grade
    name: str
    """What is called, built, changed or referred to."""
    how: How
    why: str | None
    shown: Callable[[], str]
    """Returns the call with its arguments, as far as they fit on a line. May hold any characters of the file."""


@lru_cache(maxsize=1 << 12)
def is_done(module: str, name: str) -> bool:
    """Say whether a call of this name makes data, calls nothing that it is given, and gives nothing to follow."""
    return is_plain(module, name) and canonical(module, name) not in _GIVEN_MORE


def plain_key(effect: Effect) -> tuple[object, ...] | None:
    """Return what is equal for two effects that come to the same, for those of names and constants alone; or None."""
    if effect.keywords is not None:
        return None
    parts: list[object] = [effect.how]
    for one in (effect.target, effect.arguments):
        kind = type(one)
        if kind is Global:
            parts.append((one.module, one.name))
        elif one is None or one == () or kind is int or kind is bool:
            parts.append((kind, one))
        else:
            return None
    return tuple(parts)


def judge(effect: Effect, looks: Looks | None) -> Iterator[Verdict]:
    """
    Yield what an effect comes to: nothing for most that only make data.

    Without ``looks``, arguments are not looked at: where the pickles have asked for nothing that reaches the system.
    """
    if effect.how == "refers":
        yield from _reference(effect)
    elif effect.how in ("calls", "builds"):
        yield from _call(effect, looks)
    elif effect.how in ("sets", "adds"):
        yield from _change(effect, looks)
    elif effect.how == "asks":
        yield from _asking(effect, looks)


def is_wary(verdict: Verdict) -> bool:
    """Say whether from now on it matters what harmless calls are given: there is something that they might call."""
    name = verdict.name
    return verdict.why is not None or name in table.MAKERS or is_unknown(name) or _is_function(name)


def keeps_calls(func: Global) -> bool:
    """Say whether the state of an object of this class is what it calls."""
    return canonical(func.module, func.name).startswith("functools.")


def loads_bytes(effect: Effect) -> bool:
    """Say whether a call unpickles the bytes that it is given: how plain pickles carry tensors."""
    named, args = effect.target, effect.arguments
    if effect.how != "calls" or not isinstance(named, Global) or not isinstance(args, tuple) or len(args) != 1:
        return False
    return f"{named.module}.{named.name}" == _LOADS_BYTES and isinstance(args[0], bytes | bytearray | str)


def unfollowed(effect: Effect) -> Verdict:
    """Return what a call comes to that unpickles bytes which are not looked at."""
    return Verdict("system", _LOADS_BYTES, "calls", table.UNFOLLOWED, lambda: _shown(_LOADS_BYTES, effect.arguments))


def is_sure(effect: Effect, verdict: Verdict) -> bool:
    """Say whether an effect can hardly be a chance of bytes that are no opcodes: a known name is called."""
    name = nodes.global_of(effect.target)
    if verdict.grade != "system" or effect.how == "refers" or name is None:
        return False
    return is_known(canonical(name.module, name.name))


def _reference(effect: Effect) -> Iterator[Verdict]:
    target = effect.target
    if not isinstance(target, Global):
        if target.why == SPLIT_FRAME:
            yield Verdict("system", "a split frame", "calls", table.UNFOLLOWED, lambda: target.why)
        else:
            yield Verdict("code", target.why, "refers", table.UNFOLLOWED, lambda: target.why)
        return
    name = canonical(target.module, target.name)
    if name == _LOADS_BYTES or is_plain(target.module, target.name):
        return
    reason = reaching(name, target.name)
    yield Verdict("system" if reason else "code", name, "refers", reason, lambda: name)


def _call(effect: Effect, looks: Looks | None) -> Iterator[Verdict]:
    target, args = effect.target, effect.arguments
    given = args if isinstance(args, tuple) else (args,)
    named = nodes.global_of(target)
    if named is None:
        yield from _call_of_result(effect, looks)
        return
    name = canonical(named.module, named.name)
    how = effect.how
    made = nodes.global_of(given[0]) if name in _MAKE_OBJECTS and given else named
    if made is None:
        yield _unnamed(effect._replace(target=given[0], arguments=given[1:], how="builds"))
        return
    if name.startswith("copyreg.__newobj") and given:
        how, given, named = "builds", given[1:], made
    elif name == "copyreg._reconstructor" and given:
        base = given[1] if len(given) > 1 else None
        if not (isinstance(base, Global) and canonical(base.module, base.name) in _PLAIN_BASES):
            yield from _call(effect._replace(target=base, arguments=given[2:], how="calls"), looks)
        how, given, named = "builds", given[2:], made
    elif name in _WITH_MAKERS:
        yield from _made_with(effect, looks, given, *_WITH_MAKERS[name])
    elif name in _CALL_ONE:
        yield from _handed(effect, looks, given, *_CALL_ONE[name])
    elif name == "builtins.getattr":
        yield from _looking(effect, given)
        return
    elif name in table.CHANGERS and given and isinstance(given[0], Global | Unfollowed):
        yield Verdict("system", name, how, table.CHANGED, lambda: _shown(name, given))
        return
    elif loads_bytes(effect):
        return  # what is in the bytes is looked at itself
    name = canonical(named.module, named.name)
    grade, why = _graded(name, named.name, how, given)
    handed = given[1:] if name in _MAKE_ARRAYS else given
    found = None
    if grade != "system" and looks is not None:
        found = passed((handed, effect.keywords), looks, _judge_of_handed(name, handed) if how == "calls" else None)
        found = found or _as_method(nodes.state_pairs(effect.keywords), looks)
    if found:
        grade, why = "system", f"{table.PASSED}: {found}"
    if grade != "data":
        yield Verdict(grade, name, how, why, lambda: _shown(name, given))


def _call_of_result(effect: Effect, looks: Looks | None) -> Iterator[Verdict]:
    inner = _of_partial(effect)
    if inner is not None:
        yield from _call(inner, looks)
    else:
        yield _unnamed(effect)


def _graded(name: str, qualified: str, how: How, given: tuple[Inert, ...]) -> tuple[Grade, str | None]:
    if how == "calls" and name in table.ITERATING:
        used = next(filter(None, map(_class_with_code, given)), None)
        if used is not None:
            return "system", f"uses an object of {used}, which {table.UNFOLLOWED}"
    grade, why = grade_of(name, qualified, how)
    if how == "calls" and grade == "code" and name not in table.HARMLESS and _is_class(name) and not _is_value(given):
        return "system", table.UNKNOWN_TORCH if package_of(name) == "torch" else table.UNKNOWN_NUMPY
    return grade, why


def _is_value(given: tuple[Inert, ...]) -> bool:
    """Say whether this is the number that a member of an enumeration has, in a tuple or not."""
    if len(given) == 1 and isinstance(given[0], tuple):
        given = given[0]
    return len(given) == 1 and isinstance(given[0], int | None)


@lru_cache(maxsize=1 << 12)
def _is_function(name: str) -> bool:
    """Say whether this is a function of torch or numpy that is not known to only make data."""
    return package_of(name) in ("torch", "numpy") and _is_system(name, name.rpartition(".")[2])


@lru_cache(maxsize=1 << 12)
def _is_class(name: str) -> bool:
    return re.fullmatch(table.CLASSES, name) is not None and not name.endswith(("Error", "Warning", "Exception"))


def _class_with_code(one: Inert) -> str | None:
    """Return the class of torch, numpy or Python that an object is of, if its methods may do more than make data."""
    made = nodes.class_of(one) if isinstance(one, Call) else None
    name = canonical(made.module, made.name) if made is not None else ""
    if package_of(name) not in _KNOWN or name in table.HARMLESS or name in table.KEEPERS:
        return None
    return name if made is not None and grade_of(name, made.name, "builds")[0] == "code" else None


def _judge_of_handed(name: str, given: tuple[Inert, ...]) -> Callable[[str, str], bool] | None:
    """
    Return what says whether a name must not be given to a call; None where nothing is called that it is given.

    Code of other packages may do what it likes; what is known to make data must not be given what it would call.
    """
    package = package_of(name)
    is_hint = name == "operator.getitem" and given and isinstance(given[0], Global) and given[0].module == "typing"
    if package not in _KNOWN or name in table.KEEPERS or name in _CALL_ONE or is_hint:
        return None
    # Torch's own objects get its functions for attributes; Python's have no use for these, nor have calls of classes.
    return _is_system if package in table.STDLIB or _is_class(name) else is_unknown


def _is_system(name: str, qualified: str) -> bool:
    return grade_of(name, qualified, "calls")[0] == "system" and not re.fullmatch(table.VALUES, name)


def _handed(effect: Effect, looks: Looks | None, given: tuple[Inert, ...], which: int, least: int) -> Iterator[Verdict]:
    """Yield what it comes to that a call calls one of its arguments with what may be anything, if that reaches far."""
    one = given[which] if len(given) >= least else None
    if one is not None:
        inner = _call(effect._replace(target=one, arguments=(), keywords=None), looks)
        yield from (verdict for verdict in inner if verdict.grade == "system")


def _made_with(
    effect: Effect, looks: Looks | None, given: tuple[Inert, ...], which: int, gets: int | None
) -> Iterator[Verdict]:
    """Yield what it comes to that a call calls one of its arguments."""
    if which >= len(given) or isinstance(given[which], str):
        return  # a generator that numpy knows by its name
    args = () if gets is None else given[gets] if gets < len(given) else ()
    inner = effect._replace(target=given[which], arguments=args if isinstance(args, tuple) else (args,))
    yield from _call(inner, looks)
    made = nodes.global_of(given[which])
    if made is not None and canonical(made.module, made.name) in table.STATELESS:
        name = canonical(made.module, made.name)
        yield Verdict("system", name, effect.how, table.CHANGED, lambda: _shown(name, args))


def _looking(effect: Effect, given: tuple[Inert, ...]) -> Iterator[Verdict]:
    """A call of getattr: what it finds decides."""
    found = results.result(effect)

    def shown() -> str:
        return _shown("builtins.getattr", given)

    if not isinstance(found, Global):
        # Of what cannot be followed; or under a name that is computed.
        harmless = isinstance(given[1] if len(given) > 1 else None, str) and isinstance(found, Unfollowed | None)
        grade: Grade = "code" if harmless and given[1] not in table.INSIDE else "system"
        yield Verdict(grade, "builtins.getattr", "calls", table.UNFOLLOWED, shown)
        return
    name = canonical(found.module, found.name)
    last = found.name.rpartition(".")[2]
    reason = table.THROUGH if last in table.INSIDE else reaching(name, found.name)
    if reason or not is_plain(found.module, found.name.rpartition(".")[0]):
        yield Verdict("system" if reason else "code", name, "calls", reason, shown)


def _of_partial(effect: Effect) -> Effect | None:
    """Return the call that calling a ``functools.partial`` comes to; None where that is not certain, or it is none."""
    partial, args = effect.target, effect.arguments
    func = nodes.partial_of(partial)
    if func is None or effect.how != "calls" or not (isinstance(partial, Call) and isinstance(partial.args, tuple)):
        return None
    state = partial.state if partial.state is not None else (func, partial.args[1:], None, None)
    if not (isinstance(state, tuple) and len(state) == 4 and isinstance(state[1], tuple) and isinstance(args, tuple)):
        return None
    kept = nodes.global_of(state[0])
    if kept is None or (kept.module, kept.name) != (func.module, func.name):
        return None  # its state is of another function
    return effect._replace(
        target=func, arguments=(*state[1], *args), keywords=(state[2], partial.kwargs, effect.keywords)
    )


def _unnamed(effect: Effect) -> Verdict:
    """Return what it means to call or build what is no name: the result of another call, say."""
    target = effect.target
    maker = nodes.global_of(target.func) if isinstance(target, Call) else None
    if maker is not None:
        name = canonical(maker.module, maker.name)

        def shown() -> str:
            return f"{_shown(name, target.args)}{_arguments(effect.arguments)}"

        is_class = name.rpartition(".")[2] in _SKELETONS or effect.how == "builds"
        if is_class and grade_of(name, maker.name, "calls")[0] == "code" and package_of(name) not in table.STDLIB:
            return Verdict("code", name, effect.how, "is a class that the file brings", shown)
        return Verdict("system", name, effect.how, f"calls the result of a call, which {table.UNFOLLOWED}", shown)
    what = target.why if isinstance(target, Unfollowed) else _cut(target)
    return Verdict("system", what, effect.how, table.UNFOLLOWED, lambda: f"{what}{_arguments(effect.arguments)}")


def _change(effect: Effect, looks: Looks | None) -> Iterator[Verdict]:
    """Yield what BUILD and the adding of items come to: they call methods of objects, or change what is named."""
    target, given = effect.target, effect.arguments
    named = nodes.global_of(target)
    if named is not None or isinstance(target, Unfollowed):
        name = target.why if named is None else canonical(named.module, named.name)
        yield Verdict("system", name, effect.how, table.CHANGED, lambda: f"{name} gets {_cut(given)}")
        return
    if isinstance(target, PersistentId):
        yield Verdict("system", _OF_LOADER, effect.how, table.UNFOLLOWED, lambda: f"{_OF_LOADER} gets {_cut(given)}")
        return
    if not isinstance(target, Call):
        return  # what has no attributes, and no methods that are not known
    name = nodes.class_name(target)
    if target.state is not None or not takes(target, effect.how):
        # As no pickler writes it: their objects get items before the state, if they are of a class that has some.
        yield Verdict("system", name, effect.how, table.UNFOLLOWED, lambda: f"{name} gets {_cut(given)}")
        return
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Dict):  # slots are set as attributes
        inside = next((key for key, _ in given[1].pairs if isinstance(key, str) and key in table.INSIDE), None)
        if inside is not None:
            yield Verdict("system", name, effect.how, table.THROUGH, lambda: f"{name} gets {inside}")
    if looks is None or effect.how != "sets":
        return
    func = nodes.global_of(target.func)
    found = _as_method(nodes.state_pairs(given), looks)
    if found is None and func is not None and _uses_state(func):
        name = canonical(func.module, func.name)
        found = passed((given,), looks, None if keeps_calls(func) else _is_system)
    if found is not None:
        yield Verdict("system", name, effect.how, f"{table.PASSED}: {found}", lambda: f"{name} gets {_cut(given)}")


def _as_method(pairs: Pairs, looks: Looks) -> str | None:
    """Return what an object has got instead of a method that containers and tensors have: who uses it calls that."""
    parts = [pairs, *(value.pairs for key, value in pairs if key in _OF_MODULES and isinstance(value, Dict))]
    given = [value for part in parts for key, value in part if isinstance(key, str) and key in table.METHODS]
    return passed(tuple(given), looks, _is_system) if given else None


def takes(target: Call, how: How) -> bool:
    """Say whether picklers give objects of this class a state, or items: some look for methods in what they hold."""
    made = nodes.class_of(target)
    name = canonical(made.module, made.name) if made is not None else ""
    if how == "sets":
        return name not in table.STATELESS
    return package_of(name) not in _KNOWN or name in table.CONTAINERS


def _uses_state(func: Global) -> bool:
    """Say whether objects of this class may use what is in their state, at their end at the latest."""
    name = canonical(func.module, func.name)
    return keeps_calls(func) or (package_of(name) in table.STDLIB - {"argparse"} and name not in table.KEEPERS)


def _asking(effect: Effect, looks: Looks | None) -> Iterator[Verdict]:
    """Yield what it comes to that the loader is asked for what has an id: it calls methods of what the id holds."""
    found = passed((effect.target.pid,), looks) if looks is not None else None
    if found is not None:
        yield Verdict("system", _OF_LOADER, "asks", f"{table.PASSED}: {found}", lambda: _OF_LOADER)


def _cut(value: Inert) -> str:
    return cut(describe(value), _LONGEST)


def _shown(name: str, args: Inert) -> str:
    return f"{cut(name, _LONGEST)}{_arguments(args)}"


def _arguments(args: Inert) -> str:
    shown = describe(args if isinstance(args, tuple) else (args,))
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"
