"""
Patterns of names with variables in braces, as recipes have them: what a name binds them to, and back.

``{i}`` is one component, or a part of one: some characters without a dot. ``{x:weight|bias}`` is one of these texts.
``{r+}`` is one or more whole components, and ``{p}`` is, too, or none where it stands first. ``{e*}`` takes the numbers
of a list of modules, all that there are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from math import comb, prod
from types import MappingProxyType
from typing import Final

from ckptool.errors import LimitExceeded
from ckptool.names.renaming import LONGEST

_VARIABLE: Final = re.compile(r"\{([a-z][a-z0-9_]*)(\*|\+|:[^{}]+)?\}")
PREFIX: Final = "p"
"""The variable that is any number of components."""
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_MOST_WAYS: Final = 100_000
_SHORT: Final = 64
_ADJACENT: Final = re.compile(r"\}\{")


class Pattern:
    """
    A name with variables in braces; ``known`` says what those are that other names of the rule say it of.

    Raises:
        ValueError: It is empty, has a brace that begins no variable, two variables without anything between them, or
            more than one that takes a list.
    """

    def __init__(self, text: str, known: Mapping[str, str] = _NOTHING) -> None:
        if not text or _ADJACENT.search(text):
            raise ValueError(f"{text!r} is no pattern: {'two variables touch' if text else 'it is empty'}")
        if ".." in f".{text}.":
            raise ValueError(f"{text!r} is no pattern: there is nothing before or behind a dot")
        parts, variables, end = list[str](), dict[str, str](), 0
        between = list[str]()
        for found in _VARIABLE.finditer(text):
            between.append(text[end : found.start()])
            parts.append(re.escape(_plain(text, between[-1])))
            name = found.group(1)
            what = found.group(2) or known.get(name, "")
            end = found.end()
            if name in variables:
                parts.append(f"(?P={name})")
                continue
            variables[name] = what
            if name == PREFIX and not found.start() and text[end : end + 1] == ".":
                parts.append(rf"(?:(?P<{name}>{_of(name, what)})\.)?")
                end += 1
            else:
                parts.append(f"(?P<{name}>{_of(name, what)})")
        parts.append(re.escape(_plain(text, text[end:])))
        many = [name for name, what in variables.items() if what == "*"]
        if len(many) > 1:
            raise ValueError(f"{text!r} is no pattern: {len(many)} variables take lists")
        self.text = text
        self.many = many[0] if many else None
        """The variable that takes the numbers of a list."""
        self.variables = frozenset(variables)
        self._begin, self._end = text.partition("{")[0], text[end:]
        self._between = Counter(between[1:])
        """Texts between variables, each with how often it is there."""
        self._expression = "".join(parts)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(self._expression, re.DOTALL)  # of thousands of patterns, a name needs few

    def match(self, name: str) -> dict[str, str] | None:
        """
        Return what a name binds the variables to; None if it is another name, or longer than names are.

        Raises:
            LimitExceeded: There are too many ways to try.
        """
        if not self.variables:
            return {} if name == self.text else None
        if len(name) > LONGEST or not (name.startswith(self._begin) and name.endswith(self._end)):
            return None
        places = {text: name.count(text) if text else name.count(".") + 1 for text in self._between}
        ways = prod(comb(places[text], times) for text, times in self._between.items())
        if ways > _MOST_WAYS:  # nothing can stop Python's re in the middle of a name
            fact = f"{self.text[:_SHORT]!r} can stand for {name[:_SHORT]!r} in more than {_MOST_WAYS:,} ways"
            hint = "Write the pattern with fewer variables, or leave the name out with `exclude=`."
            raise LimitExceeded(fact, kind="pattern-too-slow", hint=hint)
        found = self._pattern.fullmatch(name) if ways else None
        return None if found is None else {key: text or "" for key, text in found.groupdict().items()}

    def name(self, bound: Mapping[str, str]) -> str:
        """Return the name in which variables have these values."""
        text = self.text
        if not bound.get(PREFIX) and text.startswith(f"{{{PREFIX}}}."):
            text = text[len(PREFIX) + 3 :]
        return _VARIABLE.sub(lambda found: bound[found.group(1)], text)

    def __str__(self) -> str:
        return self.text


def said_in(texts: Iterable[str]) -> dict[str, str]:
    """Return what names say of their variables: that it is one of some texts, or several components."""
    found = [(name, what) for text in texts for name, what in _VARIABLE.findall(text)]
    return {name: what for name, what in found if what not in ("", "*")}


def _plain(text: str, part: str) -> str:
    if "{" in part or "}" in part:
        raise ValueError(f"{text!r} is no pattern: variables are written {{i}}, {{x:weight|bias}} or {{e*}}")
    return part


def _of(name: str, what: str) -> str:
    """Return the regular expression of what a variable may be."""
    if what.startswith(":"):
        return "|".join(map(re.escape, what[1:].split("|")))
    if what == "*":
        return "0|[1-9][0-9]{0,5}"
    return r"[^.]+(?:\.[^.]+)*" if what == "+" or name == PREFIX else "[^.]+"
