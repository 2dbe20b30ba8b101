"""
Calls that are known to reach the system, by their names: an alarm, never a proof that other calls do not.

Calls that only look a name up (``getattr(os, "system")``) are resolved to that name, and names among the arguments of
a call count, too. Also ``Verdict``, the result of judging a call, and how calls are shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain, islice
from typing import Final, Literal, NamedTuple, TypeAlias

from ckptool.messages import cut
from ckptool.pickles import dangerous_names as table
from ckptool.pickles import nodes
from ckptool.pickles.describe import describe
from ckptool.pickles.nodes import Call, Dict, Global, Inert, Set, Unknown

Grade: TypeAlias = Literal["data", "program", "code", "system"]
"""
data: it only makes data; program: a program that only its own loader runs; code: it runs code of a package, or may;
system: it is known to run commands or text, open files or connections, import modules, or change the interpreter.
"""
How: TypeAlias = Literal["refers", "calls", "builds", "sets", "adds", "asks", "runs", "odd"]
"""
refers: a name is looked up, and its module imported; calls: REDUCE, INST, OBJ; builds: NEWOBJ, NEWOBJ_EX;
sets: BUILD, which calls ``__setstate__`` or sets attributes; adds: items, by ``append``, ``extend``, ``add`` or
``__setitem__`` of an object that is not a plain container; asks: a persistent id, which the loader looks up; runs: a
program beside the pickles does it when its loader runs it; odd: its effect is not known.
"""
_LONGEST: Final = 120


class Verdict(NamedTuple):
    """What one call or name of a pickle may do."""

    grade: Grade
    name: str
    """The full name that is called, built, changed or referred to."""
    how: How
    why: str | None
    shown: Callable[[], str]
    """Returns the call with its arguments, cut to one line. The text may contain any characters of the file."""


def cut_text(value: Inert) -> str:
    return cut(describe(value), _LONGEST)


def call_text(name: str, args: Inert) -> str:
    shown = describe(args if isinstance(args, tuple) else (args,))
    return f"{cut(name, _LONGEST)}{shown if len(shown) <= _LONGEST else f'{shown[:_LONGEST]}…'}"


_MOST_PARTS: Final = 32
"""Components of a dotted name; no import has more."""
_DEEPEST: Final = 12
"""Nesting of calls that look names up: each may look up two more, so time doubles with each level."""
_LONGEST_LISTED: Final = max(name.count(".") + 1 for name in table.DANGEROUS)
_MOST_LOOKED_AT: Final = 1 << 12
"""Values inside the arguments of one call that are inspected."""
_MOST_PAIRS: Final = 1000
_MODULES: Final = {"_operator": "operator", "torch.tensor": "torch._tensor"}
"""Other names of modules: of a C module, and of one that ``torch.load`` renames in zips."""
_GET: Final = ("builtins.getattr", "dill._dill._get_attr", "dill._dill._getattribute", "dill._dill._getattr")
_IMPORT: Final = (
    "importlib.import_module",
    "builtins.__import__",
    "cloudpickle.cloudpickle.subimport",
    "dill._dill._import_module",
)
_UFUNCS: Final = ("numpy.core._ufunc_reconstruct", "numpy._core._ufunc_reconstruct")
_TYPES: Final = ("cloudpickle.cloudpickle._builtin_type", "dill._dill._load_type")
_FINDERS: Final = frozenset((*_GET, *_IMPORT, *_UFUNCS, *_TYPES, "operator.attrgetter", "pkgutil.resolve_name"))


@lru_cache(maxsize=1 << 12)
def canonical(module: str, name: str) -> str:
    """Return the full name in Python 3 for a name of Python 2 or 3, and of the Python module for one in C."""
    import _compat_pickle as compat  # the tables that pickle itself uses

    module, name = compat.NAME_MAPPING.get((module, name), (module, name))
    module = _MODULES.get(module) or compat.IMPORT_MAPPING.get(module, module)
    return f"{module}.{name}" if name else module


def package_of(name: str) -> str:
    """Return the top-level package of a full name."""
    return name.partition(".")[0]


@lru_cache(maxsize=1 << 12)
def reaching(name: str, qualified: str) -> str | None:
    """
    Return how the object of this full name reaches the system, if it is known to, else None.

    ``qualified`` is the part after its module, which may lead through other modules that this one imported.
    """
    if name in table.HARMLESS or re.fullmatch(table.VALUES, name):
        return None
    if reason := listed(name):
        return reason
    parts = qualified.split(".", _MOST_PARTS)
    if len(parts) > _MOST_PARTS:
        return table.THROUGH
    for index in range(1, len(parts)):
        if reason := listed(".".join(parts[index - 1 :])):
            return reason
    if not table.INSIDE.isdisjoint(parts) or not table.MODULES.isdisjoint(parts[:-1]):
        return table.THROUGH
    is_telling = package_of(name) in ("torch", "numpy", "joblib") and not table.TELLING_CLASSES.isdisjoint(parts)
    is_method = len(parts) > 1 and package_of(name) == "builtins"
    return table.TELLING_NAME if is_telling or (parts[-1] in table.TELLING and not is_method) else None


def reach(named: Global) -> str | None:
    """Return how a name reaches the system, if it is known to, else None."""
    return reaching(canonical(named.module, named.name), named.name)


def listed(name: str) -> str | None:
    """Return how a name, or a module or class that it is a part of, reaches the system by the table, else None."""
    parts = name.split(".", _LONGEST_LISTED)[:_LONGEST_LISTED]
    for count in range(len(parts), 0, -1):
        if reason := table.DANGEROUS.get(".".join(parts[:count])):
            return reason
    return None


def is_known(name: str) -> bool:
    """Return whether a name is of Python's standard library, or known to reach the system."""
    return package_of(name) in table.STDLIB or listed(name) is not None


def is_maker(name: str) -> bool:
    """Return whether calls of this name make a function from byte code, mostly of the file."""
    return name in table.MAKERS or name.rpartition(".")[2] in table.MAKER_NAMES


def found(node: Inert, depth: int = 0) -> Global | None:
    """Return the name that a node stands for, also if a call looks it up or wraps it; None if there is none."""
    named = nodes.global_of(node)
    if named is not None or type(node) is not Call or depth > _DEEPEST:
        return named
    if type(node.args) is not tuple or not node.args:
        return None
    func = found(node.func, depth + 1)
    if func is None:
        return None
    name, args = canonical(func.module, func.name), node.args
    first, second = args[0], args[1] if len(args) > 1 else None
    if name in _GET and type(second) is str:
        return _attribute(first, second, depth)
    if name == "operator.getitem" and type(second) is str:
        holder = found(first, depth + 1)
        is_modules = holder is not None and canonical(holder.module, holder.name) == "sys.modules"
        return Global(second, "") if is_modules else _attribute(first, second, depth)
    if name in _IMPORT and type(first) is str:
        return Global(first, "")
    if name == "pkgutil.resolve_name" and type(first) is str:
        module, _, rest = first.partition(":") if ":" in first else first.rpartition(".")
        return Global(module, rest)
    if name in _UFUNCS and type(first) is str and type(second) is str:
        return Global(first, second)
    if name in _TYPES and type(first) is str:
        return Global("types", first)
    if name == "functools.partial":
        return found(node.state[0] if type(node.state) is tuple and node.state else first, depth + 1)
    return None


def _attribute(holder: Inert, attribute: str, depth: int) -> Global | None:
    """Return the name of an attribute of a named object, of an instance of a class, or of a plain value, else None."""
    named = found(holder, depth + 1) or nodes.class_of(holder)
    if named is not None:
        return Global(named.module, f"{named.name}.{attribute}" if named.name else attribute)
    if type(holder) is Call:
        return None
    kind = "dict" if type(holder) is Dict else "set" if type(holder) is Set else type(holder).__name__
    return Global("builtins", f"{kind}.{attribute}")


def passed(values: Iterable[Inert]) -> str | None:
    """Return the first name inside some values that reaches the system, or a text for an unknown value; else None."""
    todo: list[Inert] = list(values)
    seen: set[int] = set()
    for one in todo:  # which grows
        if len(todo) > _MOST_LOOKED_AT:
            return None
        kind = type(one)
        if kind is Unknown:
            return str(one.why)
        if kind is Global or kind is Call:
            named = found(one)
            if named is not None and named.name and reach(named):
                return canonical(named.module, named.name)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if kind is tuple or kind is list:
            todo += one[:_MOST_LOOKED_AT]
        elif kind is Set:
            todo += one.items[:_MOST_LOOKED_AT]
        elif kind is Dict:
            todo += chain.from_iterable(one.pairs[:_MOST_LOOKED_AT])
        elif kind is Call:
            todo += [held for held in (one.state, one.items, one.kwargs, one.args) if held is not None]
            todo += [value for _, value in (one.pairs or ())[:_MOST_LOOKED_AT]]
    return None


def as_method(state: Inert) -> str | None:
    """Return the first name in a state that reaches the system and is set in place of a method, else None."""
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    pairs = list(chain.from_iterable(part.pairs or () for part in parts if type(part) in (Dict, Call)))
    inner = (value.pairs or () for _, value in pairs[:_MOST_PAIRS] if type(value) in (Dict, Call))
    every = islice(chain(pairs, chain.from_iterable(inner)), _MOST_PAIRS)
    return passed([value for key, value in every if type(key) is not str or key in table.METHODS])


def is_wary(named: Global) -> bool:
    """Return whether, in a pickle that refers to this name, the arguments of all calls must be inspected."""
    name = canonical(named.module, named.name)
    return name in _FINDERS or reach(named) is not None or is_maker(name)


def asked(call: Call) -> Global | None:
    """Return the name that a ``getattr`` call looks up, if that reaches the system, else None."""
    func = nodes.global_of(call.func)
    one = found(call) if func is not None and canonical(func.module, func.name) in _GET else None
    return one if one is not None and reach(one) else None


def of_call(named: Global, how: How, call: Call, *, is_wary: bool) -> str | None:
    """Return how a call of a name reaches the system, by the name or its arguments; None if it is not known to."""
    args = call.args if type(call.args) is tuple and call.args else (call.args,)
    name = canonical(named.module, named.name)
    one = found(call) if name in (*_IMPORT, *_UFUNCS) else None
    if one is not None and re.fullmatch(table.ACTING, one.module):
        return table.IMPORTED
    if name in _GET and len(args) > 1 and type(args[1]) is not str:
        return table.UNFOLLOWED
    if name in _GET and type(args[0]) is Call and nodes.global_of(args[0].func) == named:
        return None  # an attribute of an attribute: the inner call was judged by itself
    if name == "dill._dill._eval_repr" and type(args[0]) is str and re.fullmatch(table.LITERALS, args[0]):
        return None
    if why := reach(named):
        return why
    if how == "calls" and name in table.CALLED_CLASSES:
        return table.LOADS
    if named.name.rpartition(".")[2] in table.CHANGER_NAMES and type(args[0]) is Global:
        return table.CHANGED if args[0].module != "__main__" else None
    if not is_wary:
        return None
    given = passed((*args, call.kwargs))
    return f"{table.PASSED}: {given}" if given else None
