"""
What in a file could run: finds its pickles and programs, reads them as data, and grades them.

Here is what a search finds: what they do, the names that they refer to, what was not inspected.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, get_args

from ckptool.pickles.alarms import Grade, How, package_of


def place(record: str, name: str) -> str:
    """Return the place of what has this name in a record, as text."""
    return "::".join(filter(None, (record, name)))


class Act(NamedTuple):
    """One thing that unpickling does beyond making data. The text may hold any characters of the file."""

    grade: Grade
    how: How
    name: str
    """What is called, built, changed or referred to, under its name in Python 3."""
    text: str
    """The call with its arguments, cut to a line."""
    why: str | None
    record: str
    """The archive member; empty for the file itself."""
    offset: int
    """Offset of the opcode that does it first, from the start of the record, or of the pickle inside it."""
    nested_at: int | None = None
    """Offset in the record of the string that contains the pickle, if it is inside another one."""
    times: int = 1

    @property
    def package(self) -> str:
        """The package whose code runs."""
        return package_of(self.name)


def of_kind(name: str, record: str) -> Act:
    """Return the act of a program of this kind, whatever it does."""
    return Act("program", "runs", name, name, None, record, 0)


def of_program(name: str, text: str, why: str, record: str, offset: int) -> Act:
    """Return the act of a program in a file that reaches the system."""
    return Act("system", "runs", name, text, why, record, offset)


class Name(NamedTuple):
    """A name that a pickle refers to."""

    module: str
    name: str
    record: str
    offset: int
    nested_at: int | None


class Survey(NamedTuple):
    """What was found in all pickles of a file."""

    acts: tuple[Act, ...] = ()
    """In the order of the file; what is done repeatedly is listed once."""
    names: tuple[Name, ...] = ()
    """The names that pickles refer to, those that were followed, and those that no format had read."""
    unseen: tuple[str, ...] = ()
    """What could not be inspected, and why."""

    def of(self, grade: Grade, *, called: bool = True) -> list[Act]:
        """Return the acts of one grade: those that do something, or only the references."""
        return [act for act in self.acts if act.grade == grade and (act.how != "refers") == called]


def reached(acts: Iterable[Act], *, is_whole: bool = True) -> Grade:
    """Return the highest grade of acts; what was not inspected, unless ``is_whole``, may be code."""
    # A name that is only referred to runs its module.
    grades = {"code" if one.how == "refers" and one.grade == "system" else one.grade for one in acts}
    found: Grade = max(grades, key=get_args(Grade).index, default="data")
    return found if is_whole or found == "system" else "code"
