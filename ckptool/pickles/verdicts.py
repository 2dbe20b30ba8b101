"""What a call of a pickle comes to, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeAlias

from ckptool.messages import cut
from ckptool.pickles.describe import describe
from ckptool.pickles.nodes import Inert

Grade: TypeAlias = Literal["data", "program", "code", "system"]
"""
It makes data; holds a program that its own loader runs, and no other; runs code of a package, or may; is known to run
commands or text, to open files or connections, to import what it names, or to change the interpreter.
"""
How: TypeAlias = Literal["refers", "calls", "builds", "sets", "adds", "asks", "runs", "odd"]
"""
refers: a name is looked up, and its module imported; calls: REDUCE, INST, OBJ; builds: NEWOBJ, NEWOBJ_EX;
sets: BUILD, which calls ``__setstate__`` or sets attributes; adds: items, by ``append``, ``extend``, ``add`` or
``__setitem__`` of what is no plain container; asks: a persistent id, which the loader looks up; runs: a program beside
the pickles does it, once its loader runs it; odd: it is not known to do anything, nor not to.
"""
_LONGEST: Final = 120


class Verdict(NamedTuple):
    """What one call or name comes to."""

    grade: Grade
    name: str
    """What is called, built, changed or referred to."""
    how: How
    why: str | None
    shown: Callable[[], str]
    """Returns the call with its arguments, as far as they fit on a line. May hold any characters of the file."""


def cut_text(value: Inert) -> str:
    return cut(describe(value), _LONGEST)


def call_text(name: str, args: Inert) -> str:
    shown = describe(args if isinstance(args, tuple) else (args,))
    return f"{cut(name, _LONGEST)}{shown if len(shown) <= _LONGEST else f'{shown[:_LONGEST]}…'}"
