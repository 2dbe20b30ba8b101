"""What was found in the pickles and programs of a file: what they do, the names they ask for, what was not seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, get_args

from ckptool.pickles.alarms import Grade, How, package_of


def place(record: str, name: str) -> str:
    """Return the place of what has this name in a record."""
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
    """Of the opcode that does it first, from the start of the record, or of the pickle inside it."""
    nested_at: int | None = None
    """Where in the record the string begins that holds the pickle, if it is inside another one."""
    times: int = 1

    @property
    def package(self) -> str:
        """The package whose code runs."""
        return package_of(self.name)


def of_kind(name: str, record: str) -> Act:
    """Return what it comes to that a file holds a program of a kind, whatever that does."""
    return Act("program", "runs", name, name, None, record, 0)


def of_program(name: str, text: str, why: str, record: str, offset: int) -> Act:
    """Return what a program in a file does that reaches the system."""
    return Act("system", "runs", name, text, why, record, offset)


class Name(NamedTuple):
    """A name that a pickle asks for."""

    module: str
    name: str
    record: str
    offset: int
    nested_at: int | None


class Survey(NamedTuple):
    """What was found in all pickles of a file."""

    acts: tuple[Act, ...] = ()
    """In the order of the file; what is done again and again stands there once."""
    names: tuple[Name, ...] = ()
    """What the pickles that were followed ask for, and those that no format had read."""
    unseen: tuple[str, ...] = ()
    """What could not be looked at, and why."""

    def of(self, grade: Grade, *, called: bool = True) -> list[Act]:
        """Return the acts of one grade: those that do something, or references alone."""
        return [act for act in self.acts if act.grade == grade and (act.how != "refers") == called]


def reached(acts: Iterable[Act], *, is_whole: bool = True) -> Grade:
    """Return how far acts reach together. What was not looked at, where they are not the ``whole``, may be code."""
    # A name that is only asked for runs its module.
    grades = {"code" if one.how == "refers" and one.grade == "system" else one.grade for one in acts}
    found: Grade = max(grades, key=get_args(Grade).index, default="data")
    return found if is_whole or found == "system" else "code"
