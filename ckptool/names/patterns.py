"""
Patterns of names with variables in braces, for recipes.

``{i}`` is one component or a part of one, without dots. ``{x:weight|bias}`` is one of these texts. ``{r+}`` is one or
more complete components; so is ``{p}``, which may also be none at the beginning. ``{e*}`` is each number of a list of
modules, all of which belong together.
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
"""The variable for any number of components."""
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_MOST_WAYS: Final = 100_000
_SHORT: Final = 64


class Pattern:
    """
    A name with variables in braces; ``known`` has the kinds of variables that other names of the rule define.

    Raises:
        ValueError: It is empty, or has an empty component, a brace that begins no variable, two adjacent variables, or
            more than one variable for a list.
    """

    def __init__(self, text: str, known: Mapping[str, str] = _NOTHING) -> None:
        if not text or "}{" in text:
            raise ValueError(f"{text!r} is not a pattern: {'two variables touch' if text else 'it is empty'}")
        if ".." in f".{text}.":
            raise ValueError(f"{text!r} is not a pattern: there is nothing before or behind a dot")
        between, names, kinds = (_VARIABLE.split(text)[at::3] for at in range(3))
        if any("{" in part or "}" in part for part in between):
            raise ValueError(f"{text!r} is not a pattern: variables are written {{i}}, {{x:weight|bias}} or {{e*}}")
        variables = dict.fromkeys(names, "")
        variables |= {name: what or known.get(name, "") for name, what in reversed([*zip(names, kinds, strict=True)])}
        many = [name for name, what in variables.items() if what == "*"]
        if len(many) > 1:
            raise ValueError(f"{text!r} is not a pattern: {len(many)} variables take lists")
        may_lack = names[:1] == [PREFIX] and not between[0] and between[1].startswith(".")
        if may_lack:
            between[1] = between[1][1:]  # a name without the prefix has no dot there
        expression, seen = re.escape(between[0]), set[str]()
        for name, after in zip(names, between[1:], strict=True):
            part = f"(?P={name})" if name in seen else f"(?P<{name}>{_of(name, variables[name])})"
            expression += (rf"(?:{part}\.)?" if may_lack and not seen else part) + re.escape(after)
            seen.add(name)
        self.text = text
        self.many = many[0] if many else None
        """The variable for the numbers of a list, or None."""
        self.variables = frozenset(variables)
        self._begin, self._end = between[0], between[-1]
        self._between = Counter(between[1:-1])
        """Texts between variables, with the count of each."""
        self._expression = expression

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(self._expression, re.DOTALL)  # on use: of thousands of patterns, few are needed

    def match(self, name: str) -> dict[str, str] | None:
        """
        Return the values of the variables in a name; None if it does not match, or is too long.

        Raises:
            LimitExceeded: The pattern may match in too many ways to try them.
        """
        if not self.variables:
            return {} if name == self.text else None
        if len(name) > LONGEST or not (name.startswith(self._begin) and name.endswith(self._end)):
            return None
        places = {text: name.count(text) if text else name.count(".") + 1 for text in self._between}
        ways = prod(comb(places[text], times) for text, times in self._between.items())
        if ways > _MOST_WAYS:  # Python's re cannot be stopped in the middle of a name
            fact = f"{self.text[:_SHORT]!r} can stand for {name[:_SHORT]!r} in more than {_MOST_WAYS:,} ways"
            hint = "Write the pattern with fewer variables, or leave the name out with `exclude=`."
            raise LimitExceeded(fact, kind="pattern-too-slow", hint=hint)
        found = self._pattern.fullmatch(name) if ways else None
        return None if found is None else {key: text or "" for key, text in found.groupdict().items()}

    def name(self, bound: Mapping[str, str]) -> str:
        """Return the name for values of the variables."""
        text = self.text
        if not bound.get(PREFIX) and text.startswith(f"{{{PREFIX}}}."):
            text = text[len(PREFIX) + 3 :]
        return _VARIABLE.sub(lambda found: bound[found.group(1)], text)

    def __str__(self) -> str:
        return self.text


def said_in(texts: Iterable[str]) -> dict[str, str]:
    """Return the kinds of variables that some patterns define: ``+``, or the allowed texts."""
    found = [(name, what) for text in texts for name, what in _VARIABLE.findall(text)]
    return {name: what for name, what in found if what not in ("", "*")}


def _of(name: str, what: str) -> str:
    """Return the regular expression for a variable, by its name and kind."""
    if what.startswith(":"):
        return "|".join(map(re.escape, what[1:].split("|")))
    if what == "*":
        return "0|[1-9][0-9]{0,5}"
    return r"[^.]+(?:\.[^.]+)*" if what == "+" or name == PREFIX else "[^.]+"
