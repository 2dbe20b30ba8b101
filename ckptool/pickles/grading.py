"""
How far each effect of a pickle reaches: it makes data, runs code of a package, or reaches the system.

A name alone is never more than a reference; what is called with which arguments decides. Some calls only find what
another call is to use: ``getattr(os, "system")`` is followed. What cannot be followed is not data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache, partial
from typing import Final

from ckptool.pickles import asked_ids, graphs, made_objects, nodes, results
from ckptool.pickles import dangerous_names as table
from ckptool.pickles import plain_names as plain
from ckptool.pickles.changing import KNOWN, OF_LOADER, as_method, change
from ckptool.pickles.effects import SPLIT_FRAME, Effect, How, Unfollowed
from ckptool.pickles.grades import Grade, grade_of, is_class, is_known, is_plain
from ckptool.pickles.made_classes import but_globals, changes_other, class_gets, constructs, is_of_picklers
from ckptool.pickles.nodes import Call, Dict, Global, Inert
from ckptool.pickles.reaching import Looks, canonical, is_maker, is_unknown, package_of, passed, reaching
from ckptool.pickles.verdicts import Verdict, arguments_text, call_text, cut_text, imported, is_system

_RANK: Final[dict[Grade, int]] = {"data": 0, "code": 1, "system": 2}
_WITH_MAKERS: Final = {
    "torch._tensor._rebuild_from_type": (0, 2),
    "torch._tensor._rebuild_from_type_v2": (0, 2),
    "numpy.random._pickle.__bit_generator_ctor": (0, None),
    "numpy.random._pickle.__generator_ctor": (1, 0),
    "numpy.random._pickle.__randomstate_ctor": (1, 0),
    "dill._dill._create_array": (0, 1),
    "dill._dill._create_ftype": (0, None),
}
"""Calls that make data, by what they are given to call: which argument that is, and which one it gets."""
_CALL_ONE: Final = {"builtins.iter": (0, 2), "itertools.accumulate": (1, 2)}
"""Calls that call one of their arguments, once or later: which, and how many they have then at least."""
_MAKE_OBJECTS: Final = ("copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__")
GIVEN_MORE: Final = frozenset((*_WITH_MAKERS, *_CALL_ONE, *_MAKE_OBJECTS, *plain.ITERATING, "_codecs.encode"))
"""Calls that make data and are given a name that they call, or give what others are to follow."""
_MAKE_ARRAYS: Final = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
"""They give their first argument, a subclass of ndarray, to ``ndarray.__new__``, and do not call it."""
_EVALUATES_METHODS: Final = "dill._dill._getattr"
_LOADS_BYTES: Final = "torch.storage._load_from_bytes"
_PLAIN_BASES: Final = ("builtins.object", "builtins.dict", "builtins.list", "builtins.tuple", "builtins.set")
LOOKED_UP: Final = frozenset(("__setstate__", "extend", "append", "add"))
"""Attributes that Python's unpickler looks up on an object, its own ones among them, and calls."""


@lru_cache(maxsize=1 << 12)
def is_done(module: str, name: str) -> bool:
    """Say whether a call of this name makes data, calls nothing that it is given, and gives nothing to follow."""
    return is_plain(module, name) and canonical(module, name) not in GIVEN_MORE


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
        yield from change(effect, looks)
    elif effect.how == "asks":
        yield from _asking(effect, looks)


def is_wary(verdict: Verdict) -> bool:
    """Say whether from now on it matters what harmless calls are given: there is something that they might call."""
    name = verdict.name
    return verdict.why is not None or is_maker(name) or is_unknown(name) or _is_function(name)


def loads_bytes(effect: Effect) -> bool:
    """Say whether a call unpickles the bytes that it is given: how plain pickles carry tensors."""
    named, args = effect.target, effect.arguments
    if effect.how != "calls" or not isinstance(named, Global) or not isinstance(args, tuple) or len(args) != 1:
        return False
    return f"{named.module}.{named.name}" == _LOADS_BYTES and isinstance(args[0], bytes | bytearray | str)


def unfollowed(effect: Effect) -> Verdict:
    """Return what a call comes to that unpickles bytes which are not looked at."""
    return Verdict("system", _LOADS_BYTES, "calls", table.UNFOLLOWED, lambda: call_text(_LOADS_BYTES, effect.arguments))


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
    yield from imported(target.module)
    name = canonical(target.module, target.name)
    if name == _LOADS_BYTES or is_plain(target.module, target.name):
        return
    reason = _reason(name, target.name)
    yield Verdict("system" if reason else "code", name, "refers", reason, lambda: name)


def _reason(name: str, qualified: str) -> str | None:
    """
    Return why a name is told of that is only looked up.

    In a package that is not known, a name in small letters may be that of a class. What is called or kept is told.
    """
    reason = reaching(name, qualified)
    may_be_class = reason == table.THROUGH and qualified.count(".") == 1 and package_of(name) not in KNOWN
    return None if may_be_class and table.INSIDE.isdisjoint(qualified.split(".")) else reason


def _is_literal(name: str, given: tuple[Inert, ...]) -> bool:
    """Say whether a call gives a value that its arguments show: a number of C, or what dill writes as text."""
    if name == "_ctypes._unpickle" and len(given) == 2 and isinstance(given[0], Global):
        state = given[1] if isinstance(given[1], tuple) else ()
        is_bytes = len(state) == 2 and isinstance(state[0], Dict) and isinstance(state[1], bytes)
        return is_bytes and not state[0].pairs and str(given[0]) in plain.NUMBERS_OF_C
    if name != "dill._dill._eval_repr" or len(given) != 1 or not isinstance(given[0], str):
        return False
    return re.fullmatch(plain.LITERALS, given[0]) is not None


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
    elif name == _EVALUATES_METHODS and not isinstance(results.result(effect), Global):
        yield Verdict("system", name, how, table.EVALUATES, lambda: call_text(name, given))
        return
    elif changes_other(name, named.name, given):
        yield Verdict("system", name, how, table.CHANGED, lambda: call_text(name, given))
        return
    elif loads_bytes(effect):
        return  # what is in the bytes is looked at itself
    elif name == graphs.MAKES_GRAPH and (called := graphs.functions_called(effect, looks)) is not None:
        yield Verdict("code", name, how, None, lambda: call_text(name, given))
        yield from (Verdict("code", one, how, None, partial(str, one)) for one in sorted(called))
        return
    yield from _named(effect, looks, named, how, given)


def _named(effect: Effect, looks: Looks | None, named: Global, how: How, given: tuple[Inert, ...]) -> Iterator[Verdict]:
    """Yield what the call of a name comes to, by the name and by what it is given."""
    name = canonical(named.module, named.name)
    if name in results.IMPORTING and given and isinstance(given[0], str):
        yield from imported(given[0])
    grade, why = _graded(name, named.name, how, given)
    if (how == "builds" and name in plain.ONLY_BUILT and not given) or (how == "calls" and _is_literal(name, given)):
        grade, why = "code", None
    grade, why = ("code", None) if name == "builtins.setattr" else (grade, why)  # of what the file has made
    if how == "calls" and not isinstance(effect.arguments, tuple) and is_of_picklers(name, named.name):
        grade, why = "system", table.UNFOLLOWED
    handed = given[1:] if name in _MAKE_ARRAYS else but_globals(named.name, given)
    found = None
    if grade != "system" and looks is not None:
        called = _judge_of_handed(name, handed) if how == "calls" else None
        found = passed((handed, effect.keywords), looks, called)
        if found is None and looks.has_classes and _runs_made(name, how, handed, looks, is_calling=called is not None):
            found = f"an object, {made_objects.BYTE_CODE}"
        found = found or as_method(nodes.state_pairs(effect.keywords), looks) or class_gets(named, given, looks)
    if found:
        grade, why = "system", f"{table.PASSED}: {found}"
    if grade != "data":
        yield Verdict(grade, name, how, why, lambda: call_text(name, given))


def _runs_made(name: str, how: How, given: tuple[Inert, ...], looks: Looks, *, is_calling: bool) -> bool:
    """Say whether a call of a known package may call methods of objects that are of classes made by the file."""
    is_built = how == "builds" and package_of(name) in KNOWN and name not in plain.KEEPERS
    if name in _WITH_MAKERS or name == "builtins.setattr":  # which may be given classes that the file makes
        return any(map(made_objects.is_object_made, given))
    if (is_calling or is_built) and name not in made_objects.HOLDING and name not in plain.KEEPING_ERRORS:
        is_deep = name.startswith(("builtins.", "operator.")) or name not in plain.HARMLESS
        return made_objects.holds_made(given, looks, is_deep=is_deep)
    return made_objects.takes_made(name, given, is_built=how == "builds" and package_of(name) in KNOWN)


def _call_of_result(effect: Effect, looks: Looks | None) -> Iterator[Verdict]:
    inner = _of_partial(effect)
    if inner is not None:
        yield from _call(inner, looks)
    else:
        yield _unnamed(effect, looks.constructing if looks is not None else ())


def _graded(name: str, qualified: str, how: How, given: tuple[Inert, ...]) -> tuple[Grade, str | None]:
    if how == "calls" and name in plain.ITERATING:
        used = next(filter(None, map(_class_with_code, given)), None)
        if used is not None:
            return "system", f"uses an object of {used}, which {table.UNFOLLOWED}"
    return grade_of(name, qualified, how)


@lru_cache(maxsize=1 << 12)
def _is_function(name: str) -> bool:
    """Say whether this is a function of torch or numpy that is not known to only make data."""
    if name.startswith(("torch.nn.init.", "torch.nn.functional.")):
        return False  # they reckon, and are attributes of many models
    return package_of(name) in ("torch", "numpy") and is_system(name, name.rpartition(".")[2])


def _class_with_code(one: Inert) -> str | None:
    """Return the class of torch, numpy or Python that an object is of, if its methods may do more than make data."""
    if made_objects.is_object_made(one):
        return "a class that the file makes"
    made = nodes.class_of(one) if isinstance(one, Call) else None
    name = canonical(made.module, made.name) if made is not None else ""
    if package_of(name) not in KNOWN or name in plain.HARMLESS or name in plain.KEEPERS:
        return None
    return name if made is not None and grade_of(name, made.name, "builds")[0] == "code" else None


def _judge_of_handed(name: str, given: tuple[Inert, ...]) -> Callable[[str, str], bool] | None:
    """
    Return what says whether a name must not be given to a call; None where nothing is called that it is given.

    Code of other packages may do what it likes; what is known to make data must not be given what it would call.
    """
    package = package_of(name)
    is_hint = name == "operator.getitem" and given and isinstance(given[0], Global) and given[0].module == "typing"
    if package not in KNOWN or name in plain.KEEPERS or name in _CALL_ONE or is_hint:
        return None
    # Torch's own objects get its functions for attributes; Python's have no use for these, nor have calls of classes.
    return is_system if package in table.STDLIB or (is_class(name) and name not in plain.HARMLESS) else is_unknown


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
    made = nodes.global_of(given[which])
    is_one_more = made is not None and canonical(made.module, made.name) in _WITH_MAKERS  # no pickler writes that
    if is_one_more or made_objects.is_class_made(given[which]):  # of its objects, methods are called at once
        yield _unnamed(inner)
        return
    yield from _call(inner, looks)
    if made is not None and canonical(made.module, made.name) in plain.STATELESS:
        name = canonical(made.module, made.name)
        yield Verdict("system", name, effect.how, table.CHANGED, lambda: call_text(name, args))


def _looking(effect: Effect, given: tuple[Inert, ...]) -> Iterator[Verdict]:
    """A call of getattr: what it finds decides."""
    found = results.result(effect)

    def shown() -> str:
        return call_text("builtins.getattr", given)

    if not isinstance(found, Global):
        # Of what cannot be followed; or under a name that is computed.
        harmless = isinstance(given[1] if len(given) > 1 else None, str) and isinstance(found, Unfollowed | None)
        harmless = harmless and given[1] not in table.INSIDE and not made_objects.is_object_made(given[0])
        grade: Grade = "code" if harmless else "system"
        yield Verdict(grade, "builtins.getattr", "calls", table.UNFOLLOWED, shown)
        return
    name = canonical(found.module, found.name)
    last = found.name.rpartition(".")[2]
    reason = table.THROUGH if last in table.INSIDE else _reason(name, found.name)
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


def _unnamed(effect: Effect, constructing: Collection[int] | None = None) -> Verdict:
    """
    Return what it means to call or build what is no name. ``constructing`` are the classes of the file that got a way
    to make their objects later; None if it does not matter whether these run byte code.
    """
    target = effect.target
    maker = nodes.global_of(target.func) if isinstance(target, Call) else None
    if maker is not None:
        name = canonical(maker.module, maker.name)

        def shown() -> str:
            return f"{call_text(name, target.args)}{arguments_text(effect.arguments)}"

        if (
            name == "functools.lru_cache"
            and isinstance(target.args, tuple)
            and all(isinstance(one, int | None) for one in target.args[:1])
        ):
            return Verdict("code", name, effect.how, None, shown)  # what is given is kept, and not called
        # To call a class runs how it makes objects: byte code, maybe, but for enumerations, which look a member up.
        may_run = effect.how == "calls" and maker.name.rpartition(".")[2] != plain.MAKE_ENUMERATIONS
        may_run = may_run and (constructing is None or constructs(target, constructing))
        grade = "system" if may_run or package_of(name) in table.STDLIB else grade_of(name, maker.name, "calls")[0]
        given = effect.arguments if isinstance(effect.arguments, tuple) else ()
        if grade == "code" and not any(map(made_objects.is_object_made, given)):
            return Verdict("code", name, effect.how, "is a class that the file brings", shown)
        return Verdict("system", name, effect.how, f"calls the result of a call, which {table.UNFOLLOWED}", shown)
    what = target.why if isinstance(target, Unfollowed) else cut_text(target)
    return Verdict("system", what, effect.how, table.UNFOLLOWED, lambda: f"{what}{arguments_text(effect.arguments)}")


def _asking(effect: Effect, looks: Looks | None) -> Iterator[Verdict]:
    """
    Yield what it comes to that the loader is asked for what has an id: it calls methods of what the id holds.

    For the id of a class with its source, that of torch may write where the two differ, which the class itself says;
    that of packages calls what the id holds.
    """
    pid = effect.target.pid
    if asked_ids.is_call(pid):
        args = pid[-1] if isinstance(pid[-1], tuple) else (Unfollowed("what an id holds"),)
        yield from _call(effect._replace(how="calls", target=pid[-2], arguments=(None, *args)), looks)
    elif asked_ids.is_sourced_object(pid):
        yield Verdict("system", OF_LOADER, "asks", table.FILES, lambda: cut_text(pid))
    found = passed((pid,), looks) if looks is not None else None
    if found is not None:
        yield Verdict("system", OF_LOADER, "asks", f"{table.PASSED}: {found}", lambda: OF_LOADER)
