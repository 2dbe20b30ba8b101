"""
What a pickle does, judged by the calls in the tree that was read from it.

That is enough for nearly all files: they call what is known by its name, and change no more than what they have made.
Where there is more to it than that, ``tracer`` has to follow the pickle.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from ckptool.pickles import changing, grading, nodes, results
from ckptool.pickles.dangerous_names import INSIDE
from ckptool.pickles.effects import Effect
from ckptool.pickles.nodes import Call, Dict, Global
from ckptool.pickles.scanner import may_hold_pickles
from ckptool.pickles.verdicts import Verdict

_SPECIAL: Final = INSIDE | grading.LOOKED_UP
_NEVER_CALLED: Final = frozenset((bool, int, float, str, type(None)))
"""Types of values that do nothing as a method of what has them."""


class Told(NamedTuple):
    """What calls of one name come to."""

    offset: int
    """Of the first."""
    verdict: Verdict
    times: int


def told(names: Iterable[Global], calls: Iterable[tuple[Call, int]]) -> list[Told] | None:
    """
    Return what a pickle comes to, in order; None where it has to be followed.

    ``names`` and ``calls`` are all that it asks for, and all that it calls, each with its offset.
    """
    found: dict[tuple[str, str], Told] = {}
    done = {id(name) for name in names if grading.is_done(name.module, name.name)}

    def note(offset: int, verdicts: Iterable[Verdict]) -> bool:
        for one in verdicts:
            if grading.is_wary(one):
                return False  # what it is given, and what becomes of the result, decides
            known = found.get((one.how, one.name)) or Told(offset, one, 0)
            found[one.how, one.name] = known._replace(times=known.times + 1)
        return True

    for name in names:
        if not note(name.offset, grading.judge(Effect("refers", name, None, name.offset), None)):
            return None
    known: dict[tuple[int, str], list[Verdict]] = {}
    plain_states: set[int] = set()
    for call, offset in calls:
        if not _is_plain(call, plain_states):
            return None
        if id(call.func) in done:
            continue
        key = (id(call.func), call.how)
        its = known.get(key) if call.args == () and call.kwargs is None else None
        if its is None:
            its = _of_call(call, offset)
            if its is None:
                return None
            if call.args == () and call.kwargs is None:
                known[key] = its
        if not note(offset, its):
            return None
    return sorted(found.values(), key=lambda one: one.offset)


def _of_call(call: Call, offset: int) -> list[Verdict] | None:
    """Return what a call comes to; None where what it gives is to be followed, or is called."""
    func = nodes.global_of(call.func)
    if func is None:
        return None
    effect = _effect(call, offset)
    known = results.result(effect)
    if known is not None:
        return [] if type(known) is bytes else None
    if type(call.args) is tuple and len(call.args) == 1 and type(call.args[0]) is Call:
        inner = results.result(_effect(call.args[0], offset))
        effect = effect if type(inner) is not bytes else effect._replace(arguments=(inner,))
    if grading.loads_bytes(effect):  # what is in them is looked at itself
        return [] if may_hold_pickles(effect.arguments[0]) else None
    if call.state is not None and changing.keeps_calls(func):
        return None
    return list(grading.judge(effect, None))


def _effect(call: Call, offset: int) -> Effect:
    return Effect("calls" if call.how == "reduce" else "builds", call.func, call.args, offset, call.kwargs)


def _is_plain(call: Call, known: set[int]) -> bool:
    """
    Say whether a state sets attributes whose names are text and mean nothing to Python, and items are of a container.

    ``known`` gets the states that were looked at.
    """
    if (call.items or call.pairs) and not changing.takes(call, "adds"):
        return False
    state = call.state
    if state is None or id(state) in known:
        return True
    known.add(id(state))
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    return all(
        type(key) is str and (key not in _SPECIAL or (key in grading.LOOKED_UP and type(value) in _NEVER_CALLED))
        for part in parts
        if type(part) is Dict or type(part) is Call
        for key, value in part.pairs or ()
    )
