"""What it comes to that a pickle changes an object: that it sets its state (BUILD), or adds items to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from ckptool.pickles import dangerous_names as table
from ckptool.pickles import nodes
from ckptool.pickles import plain_names as plain
from ckptool.pickles.effects import Effect, How, Unfollowed
from ckptool.pickles.made_objects import (
    BYTE_CODE,
    SETTER,
    bases_of,
    holds_made,
    is_object_made,
    is_state_made,
    known_bases,
    maker_name,
)
from ckptool.pickles.nodes import Call, Dict, Global, Inert, Pairs, PersistentId
from ckptool.pickles.reaching import Looks, canonical, package_of, passed
from ckptool.pickles.verdicts import Verdict, cut_text, is_system

OF_LOADER: Final = "what the loader has for an id"
KNOWN: Final = table.STDLIB | {"torch", "numpy"}
"""Packages of which all that reaches the system is taken to be known, or unknown."""
_OF_MODULES: Final = frozenset(("_modules", "_parameters", "_buffers"))
"""What modules of torch look their attributes up in."""
_USING: Final = table.STDLIB - {"argparse"}
_ASKING: Final = KNOWN - {"typing", "abc"}


def change(effect: Effect, looks: Looks | None) -> Iterator[Verdict]:
    """Yield what BUILD and the adding of items come to: they call methods of objects, or change what is named."""
    target, given = effect.target, effect.arguments
    named = nodes.global_of(target)
    if named is not None or isinstance(target, Unfollowed):
        name = target.why if named is None else canonical(named.module, named.name)
        yield Verdict("system", name, effect.how, table.CHANGED, lambda: f"{name} gets {cut_text(given)}")
        return
    if isinstance(target, PersistentId):
        yield Verdict("system", OF_LOADER, effect.how, table.UNFOLLOWED, lambda: f"{OF_LOADER} gets {cut_text(given)}")
        return
    if not isinstance(target, Call):
        return  # what has no attributes, and no methods that are not known
    if target.state is not None or not takes(target, effect.how):
        # As no pickler writes it: their objects get items before the state, if they are of a class that has some.
        yield _unfollowed(target, effect.how, given)
    elif effect.how == "sets":
        yield from state_given(target, given, looks)


def _unfollowed(target: Call, how: How, given: Inert) -> Verdict:
    name = nodes.class_name(target)
    return Verdict("system", name, how, table.UNFOLLOWED, lambda: f"{name} gets {cut_text(given)}")


class _Kind(NamedTuple):
    """What is known of the objects of a class, or of what a function gives, by its name."""

    name: str
    takes_state: bool
    used: frozenset[str]
    """The parts of their state that they do more with than to keep them."""
    is_looked_into: bool
    """Whether what is made by the file matters anywhere in their state."""
    uses_state: bool
    """Whether they may use what is in their state, at their end at the latest."""


_UNKNOWN: Final = _Kind("", takes_state=True, used=frozenset(), is_looked_into=False, uses_state=False)


@lru_cache(maxsize=1 << 12)
def _kind(module: str, name: str) -> _Kind:
    full = canonical(module, name)
    is_keeper = full in plain.KEEPERS
    return _Kind(
        full,
        takes_state=full not in plain.STATELESS,
        used=frozenset().union(*(used for pattern, used in plain.USED_OF_STATES if re.fullmatch(pattern, full))),
        is_looked_into=package_of(full) in KNOWN and not is_keeper,
        uses_state=_is_calling(full) or (package_of(full) in _USING and not is_keeper and full not in plain.PLAIN),
    )


def state_given(target: Call, state: Inert, looks: Looks | None) -> Iterator[Verdict]:
    """Yield what it comes to that an object, which has no state yet, gets one."""
    made = nodes.class_of(target)
    kind = _kind(made.module, made.name) if made is not None else _UNKNOWN
    if not kind.takes_state:
        yield _unfollowed(target, "sets", state)
        return
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], Dict):  # slots are set as attributes
        # Defaults of a function that the file makes are kept, until something calls it.
        kept = ("__defaults__", "__kwdefaults__") if maker_name(target) in plain.MAKE_NEW else ()
        keys = (key for key, _ in state[1].pairs if isinstance(key, str) and key not in kept)
        inside = next((key for key in keys if key in table.INSIDE), None)
        if inside is not None:
            name = nodes.class_name(target)
            yield Verdict("system", name, "sets", table.THROUGH, lambda: f"{name} gets {inside}")
    if looks is None:
        return
    if looks.has_classes and (
        (SETTER in looks.met and sets_slots(target, state)) or _uses_made(target, state, looks, kind)
    ):
        name = nodes.class_name(target)
        yield Verdict("system", name, "sets", BYTE_CODE, lambda: f"{name} gets {cut_text(state)}")
        return
    found = as_method(_pairs_of(state), looks)
    name = nodes.class_name(target) if found is not None else ""
    func = nodes.global_of(target.func) if found is None else None
    if func is not None and _kind(func.module, func.name).uses_state:
        name = canonical(func.module, func.name)
        found = passed((state,), looks)
    if found is not None:
        yield Verdict("system", name, "sets", f"{table.PASSED}: {found}", lambda: f"{name} gets {cut_text(state)}")


def sets_slots(target: Call, state: Inert) -> bool:
    """Say whether attributes of an object are set one by one, and its class is one that the file makes."""
    is_pair = isinstance(state, tuple) and len(state) == 2
    return is_pair and not (isinstance(state[1], Dict) and not state[1].pairs) and is_object_made(target)


def _uses_made(target: Call, state: Inert, looks: Looks, kind: _Kind) -> bool:
    """Say whether a class that is known to use parts of its state finds an object there of a class of the file."""
    if is_object_made(state) or (kind.is_looked_into and is_state_made(state)):
        return True
    used = kind.used
    if not kind.name:
        bases = known_bases(bases_of((target.func,)))
        used = used.union(*(_kind(base, "").used for base in bases))
    found = (value for key, value in _pairs_of(state) if isinstance(key, str) and key in used) if used else ()
    return any(holds_made(value, looks) for value in found)


def _pairs_of(state: Inert) -> Pairs:
    """Return the pairs of a state: of a dict of any class, or of one and slots."""
    if type(state) is Dict:
        return state.pairs
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    return [pair for part in parts if isinstance(part, Dict | Call) for pair in part.pairs or ()]


def as_method(pairs: Pairs, looks: Looks) -> str | None:
    """Return what an object has got instead of a method that containers and tensors have: who uses it calls that."""
    given = _as_methods(pairs)
    for key, value in pairs:
        if type(key) is str and key in _OF_MODULES and isinstance(value, Dict | Call) and value.pairs:
            given += _as_methods(value.pairs)
    return passed(tuple(given), looks, is_system) if given else None


def _as_methods(pairs: Pairs) -> list[Inert]:
    """Return the values under names of methods, and under names that a call gives, which may be any."""
    methods = plain.METHODS
    return [value for key, value in pairs if (key in methods if type(key) is str else type(key) is Call)]


def takes(target: Call, how: How) -> bool:
    """Say whether picklers give objects of this class a state, or items: some look for methods in what they hold."""
    made = nodes.class_of(target)
    name = canonical(made.module, made.name) if made is not None else ""
    if how == "sets":
        return name not in plain.STATELESS
    if is_object_made(target):
        return all(_takes_items(base) for base in known_bases(bases_of((target.func,))))
    return package_of(name) not in KNOWN or name in plain.CONTAINERS


def _takes_items(base: str) -> bool:
    """Say whether subclasses of a class may get items: those of other known ones are asked where to put them."""
    return package_of(base) not in _ASKING or base in plain.CONTAINERS or base == "builtins.object"


def keeps_calls(func: Global) -> bool:
    """Say whether the state of an object of this class is what it calls."""
    return _is_calling(canonical(func.module, func.name))


def _is_calling(name: str) -> bool:
    return name.startswith(("functools.", "types.PartialType"))
