"""The effects of all pickles of a file, judged one after the other: what comes again is looked at so often, no more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Final

from ckptool.pickles import dangerous_names as table
from ckptool.pickles import grading, nodes
from ckptool.pickles.effects import Effect
from ckptool.pickles.nodes import Call, Dict, Global, Inert
from ckptool.pickles.reaching import FLAT_BITS, TOO_MUCH, Looks, canonical, is_flat, is_pickler
from ckptool.pickles.verdicts import Verdict, cut_text

SHORT: Final = 64
"""Elements that are looked at for each call, shared or not."""
_MOST_REPEATED: Final = 1 << 18
"""Elements of what is longer and given again, all together: picklers write that for one object alone."""
_MOST_KEPT: Final = 1000
"""Judgements of what is given constants alone."""


class Repeats:
    """Counts the elements of what is long and given again, over all pickles of a file."""

    def __init__(self, most: int) -> None:
        self._given: dict[int, Inert] = {}
        """Long containers by their ids, which are their own as long as they are kept."""
        self._left = most

    def are_too_many(self, given: Inert) -> bool:
        """Take what a call or a state is given; say whether it is long, came before, and too much did already."""
        again = 0
        for one in (given, *given) if type(given) is tuple and len(given) <= SHORT else (given,):
            for part in _parts(one):
                if id(part) in self._given:
                    if self._left < 0:
                        return True
                    again += len(part) >> (FLAT_BITS if is_flat(part) else 0)
                self._given[id(part)] = part
        self._left -= again
        return again > 0 and self._left < 0


def _parts(one: Inert) -> Iterator[Sequence[Inert]]:
    """Yield what is long in what a call or a state is given: also what a module has under one of its names."""
    kind = type(one)
    if kind is tuple or kind is list:
        if len(one) > SHORT:
            yield one
        return
    if kind is not Dict and kind is not Call:
        return
    for held in (one.pairs, one.items if kind is Call else None):
        if held is not None and len(held) > SHORT:
            yield held
    if kind is Dict and len(one.pairs) <= SHORT:
        for _, value in one.pairs:
            if (type(value) is Dict or type(value) is Call) and value.pairs and len(value.pairs) > SHORT:
                yield value.pairs


class Judge:
    """Judges effects: what they are given matters from the first name on that harmless calls might be given to call."""

    def __init__(self) -> None:
        self.is_wary = False
        """Whether such a name was met."""
        self._looks = Looks()
        self._plain: dict[tuple[object, ...], list[Verdict]] = {}
        self._repeats = Repeats(_MOST_REPEATED)

    def wary(self, effect: Effect) -> Iterable[Verdict]:
        """Return what an effect comes to, going by all that it is given."""
        return self._judged(effect, self._looks)

    def verdicts(self, effect: Effect) -> Iterable[Verdict]:
        """Return what an effect comes to; what is given nothing but constants is judged, and put in words, once."""
        key = grading.plain_key(effect)
        known = self._plain.get(key) if key is not None else None
        if known is None:
            found = self._judged(effect, self._looks if self.is_wary else None)
            if key is None or len(self._plain) >= _MOST_KEPT:
                return found
            known = self._plain[key] = [one._replace(shown=cache(one.shown)) for one in found]
        return known

    def _judged(self, effect: Effect, looks: Looks | None) -> Iterable[Verdict]:
        if not ((looks is not None or looks_at_given(effect)) and self._repeats.are_too_many(effect.arguments)):
            return grading.judge(effect, looks)
        named = nodes.global_of(effect.target)
        name = cut_text(effect.target) if named is None else canonical(named.module, named.name)
        return (Verdict("system", name, effect.how, f"{table.PASSED}: {TOO_MUCH}", partial(str, name)),)


def looks_at_given(effect: Effect) -> bool:
    """Say whether ``grading.judge`` looks at what a call is given even without ``looks``."""
    named = effect.target
    name = canonical(named.module, named.name) if isinstance(named, Global) else ""
    return not name or name in grading.GIVEN_MORE or is_pickler(name)
