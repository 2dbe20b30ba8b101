"""What was found in the pickles of a file: what unpickling does, the names that it asks for, what was not seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from ckptool.messages import cut
from ckptool.pickles.alarms import package_of
from ckptool.pickles.judge import worst
from ckptool.pickles.verdicts import Grade, How, Verdict

_MOST_LISTED: Final = 1000
_MOST_UNSEEN: Final = 100
_MOST_NAMES: Final = 100_000
_LONGEST: Final = 4096
"""A name is shown up to there: it may be as long as the file."""


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
    behind: tuple[str, ...] = ()
    """Where pickles lie that stand behind the one that is loaded."""
    unseen: tuple[str, ...] = ()
    """What could not be looked at, and why."""

    def of(self, grade: Grade, *, called: bool = True) -> list[Act]:
        """Return the acts of one grade: those that do something, or references alone."""
        return [act for act in self.acts if act.grade == grade and (act.how != "refers") == called]


def reached(acts: Iterable[Act], *, is_whole: bool = True) -> Grade:
    """Return how far acts reach together. What was not looked at, where they are not the ``whole``, may be code."""
    found = worst(acts)
    return found if is_whole or found == "system" else "code"


def with_short_names(found: Survey) -> Survey:
    """Return what was found with the beginnings of names and texts that are longer than any module's."""
    acts = (one._replace(name=cut(one.name, _LONGEST), text=cut(one.text, _LONGEST)) for one in found.acts)
    names = (one._replace(module=cut(one.module, _LONGEST), name=cut(one.name, _LONGEST)) for one in found.names)
    return found._replace(acts=tuple(acts), names=tuple(names))


class Found:
    """What was found so far."""

    def __init__(self) -> None:
        self.acts: dict[tuple[object, ...], Act] = {}
        self.names: dict[Name, None] = {}
        self.further: list[str] = []
        self.unseen: list[str] = []
        self.called = 0
        """How often something was done beyond making data."""

    def survey(self) -> Survey:
        found = Survey(tuple(self.acts.values()), tuple(self.names), tuple(self.further), tuple(self.unseen))
        return with_short_names(found)

    def miss(self, what: str) -> None:
        """Note what could not be looked at, unless so much was not that no one reads more of it."""
        if len(self.unseen) < _MOST_UNSEEN:
            self.unseen.append(what)

    def keep(self, act: Act) -> None:
        """Keep what something beside the pickles does."""
        self.acts.setdefault((act.grade, act.name, act.record, act.text), act)

    def foreign(self, record: str, found: Iterable[tuple[str, str, str | None]]) -> None:
        """Keep what loaders of other kinds run in the files of a record, and why; without that, it is not looked at."""
        for name, what, why in found:
            where = "::".join(filter(None, (record, name)))
            unseen = f"{where}: {what}" if where else what
            self.keep(Act("code", "runs", what, what, why, where, 0)) if why else self.miss(unseen)

    def name(self, module: str, name: str, record: str, offset: int, nested_at: int | None) -> None:
        if len(self.names) < _MOST_NAMES:
            self.names[Name(module, name, record, offset, nested_at)] = None

    def note(self, verdict: Verdict, record: str, offset: int, nested_at: int | None) -> None:
        self.called += verdict.how not in ("refers", "odd")
        if len(self.acts) >= 2 * _MOST_LISTED:
            return
        repeats = verdict.grade != "system" or verdict.how == "refers"
        shown = None if repeats else verdict.shown()
        key = (verdict.grade, verdict.how, verdict.name, record, shown)
        known = self.acts.get(key)
        if known is not None:
            self.acts[key] = known._replace(times=known.times + 1)
        elif len(self.acts) < _MOST_LISTED or verdict.grade == "system":
            shown = verdict.shown() if shown is None else shown
            self.acts[key] = Act(
                verdict.grade, verdict.how, verdict.name, shown, verdict.why, record, offset, nested_at
            )
