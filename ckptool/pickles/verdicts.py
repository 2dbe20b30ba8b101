"""What an effect of a pickle comes to, and how it is shown; what calls of a name alone come to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple

from ckptool.messages import cut
from ckptool.pickles import dangerous_names as table
from ckptool.pickles.describe import describe
from ckptool.pickles.effects import How
from ckptool.pickles.grades import Grade, grade_of
from ckptool.pickles.nodes import Inert
from ckptool.pickles.reaching import is_value

_LONGEST: Final = 120


class Verdict(NamedTuple):
    """What one effect comes to."""

    grade: Grade
    name: str
    """What is called, built, changed or referred to."""
    how: How
    why: str | None
    shown: Callable[[], str]
    """Returns the call with its arguments, as far as they fit on a line. May hold any characters of the file."""


def is_system(name: str, qualified: str) -> bool:
    return grade_of(name, qualified, "calls")[0] == "system" and not is_value(name)


def cut_text(value: Inert) -> str:
    return cut(describe(value), _LONGEST)


def call_text(name: str, args: Inert) -> str:
    return f"{cut(name, _LONGEST)}{arguments_text(args)}"


def arguments_text(args: Inert) -> str:
    shown = describe(args if isinstance(args, tuple) else (args,))
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…"


def imported(module: str) -> Iterator[Verdict]:
    """Yield what it comes to that a module is imported, if that does more than define names."""
    if re.fullmatch(table.ACTING, module):
        yield Verdict("system", module, "calls", table.IMPORTED, partial(cut, module, _LONGEST))
