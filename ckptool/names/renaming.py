"""
Changes of names: functions from the names of a state dict to new ones.

A rule maps a list of names to a list of the same length, with None for an entry that is removed with its wrapper;
``rename`` applies rules in order and refuses changes that would lose a tensor. Prefixes are complete dotted components:
``module.`` is not in ``submodule.x``, and a prefix is only removed from a name that begins with it.

Also ``Filter``, globs to include and to exclude names. A glob is compared with the names of a state dict, or with full
paths, which begin with the key of the state dict. The existing names decide which is meant; if both are possible, the
glob is refused.

Also messages about a missing name, with the existing one that was probably meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from time import thread_time
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from ckptool.cancellation import Cancellation, check_cancelled
from ckptool.errors import LimitExceeded, MigrationRefused
from ckptool.messages import quoted, some
from ckptool.names.wrappers import ANYWHERE, BY_HEAD, DATA_PARALLEL, HEADS, Wrapper

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it since Python 3.11

Rule = Callable[[Sequence[str]], Sequence[str | None]]

_ANYWHERE = re.compile("|".join(ANYWHERE))
# The first "=" that is not part of a lookahead or lookbehind, nor after a backslash.
_EQUALS = re.compile(r"(?<!\\)(?<!\(\?)(?<!\(\?<)=")
T = TypeVar("T")
LONGEST: Final = 512
"""Characters of the longest name that patterns are tried on, or that is compared letter by letter."""
_SHORT: Final = 64
SECONDS: Final = 5.0
"""Processor time for all trials of one call."""


def strip_module(names: Sequence[str], most: int | None = None) -> Sequence[str | None]:
    """
    Return the names without the ``module`` components at their start, all of them or at most ``most``.

    Counters of an averaging wrapper are removed, too.

    Raises:
        MigrationRefused: Only some names have one.
    """
    return _strip_heads(names, (DATA_PARALLEL.component,), most)


def strip_wrappers(names: Sequence[str], most: int | None = None) -> Sequence[str | None]:
    """
    Return the names without the components that training wrappers added, however they are nested.

    Of components that models may use themselves, at most ``most`` are removed. If there are averaged weights, those
    that are not averaged are removed.

    Raises:
        MigrationRefused: Only some names have a ``module`` or ``_module`` at their start.
    """
    if _ANYWHERE.search("\n".join(names)) is None:
        return _strip_heads(names, HEADS, most)
    wrapped = all(name.partition(".")[0] in ANYWHERE for name in names)
    return _strip_heads([without_marked(name) for name in names], HEADS, most, wrapped=wrapped)


WRAPPER_RULES = (strip_module, strip_wrappers)


def with_heads(rules: Sequence[Rule], most: int | None) -> tuple[Rule, ...]:
    """Return the rules; those that strip wrappers remove at most ``most`` components that models may use themselves."""
    if most is None:
        return tuple(rules)
    return tuple(partial(rule, most=most) if rule in WRAPPER_RULES else rule for rule in rules)


def strip_prefix(prefix: str) -> Rule:
    """Return the rule that removes a prefix of complete components, and is refused unless every name has it."""
    return partial(_without_head, prefix.rstrip(".") + ".")


def _without_head(head: str, names: Sequence[str]) -> list[str]:
    if not any(name.startswith(head) for name in names):
        begins = by_likeness(head.rstrip("."), dict.fromkeys(name.partition(".")[0] for name in names if "." in name))
        raise MigrationRefused(
            f"no name begins with {head!r}; the first is {names[0]!r}" if names else "there are no names",
            kind="no-such-prefix",
            hint=f"They begin with {some(list(map(repr, begins)))}." if begins else None,
        )
    bare = next((name for name in names if not name.startswith(head) or name == head), None)
    if bare is not None:
        raise _mixed(next(name for name in names if name.startswith(head)), bare, head)
    return [name[len(head) :] for name in names]


def add_prefix(prefix: str) -> Rule:
    """Return the rule that prepends ``prefix`` and a dot to every name; raise MigrationRefused if it is empty."""
    if not prefix.strip("."):
        raise MigrationRefused(f"not a prefix: {prefix!r}", kind="bad-pattern")
    return partial(_with_head, prefix.rstrip(".") + ".")


def _with_head(head: str, names: Sequence[str]) -> list[str]:
    return [head + name for name in names]


class Substitution:
    """The rule that replaces every match of a regular expression; like ``sed``, no empty match just after another."""

    def __init__(self, pattern: re.Pattern[str], replacement: str) -> None:
        self.pattern = pattern
        self.replacement = replacement
        self._may_be_empty = pattern.search("") is not None

    def __call__(self, names: Sequence[str]) -> list[str]:
        return [self.renamed(name) for name in names]

    def renamed(self, name: str) -> str:
        """Return the new name; raise MigrationRefused if the pattern matches in several places and may be empty."""
        if not self._may_be_empty:
            return self.pattern.sub(self.replacement, name)
        end, places = -1, 0

        def replaced(match: re.Match[str]) -> str:
            nonlocal end, places
            is_behind, end = match.span() == (end, end), match.end()
            places += not is_behind
            return "" if is_behind else match.expand(self.replacement)

        renamed = self.pattern.sub(replaced, name)
        if places > 1:
            fact = f"{self.pattern.pattern!r} may match nothing, and does so in {places} places of {name!r}"
            raise MigrationRefused(fact, kind="bad-pattern", hint="Begin it with '^', or write '+' for '*'.")
        return renamed

    def __str__(self) -> str:
        return f"{self.pattern.pattern}={self.replacement}"


def substitute(pattern: str, replacement: str) -> Substitution:
    """Return the rule that replaces matches as ``re.sub`` does; raise MigrationRefused if the pattern is invalid."""
    if not pattern:
        hint = "To put something before each name, write `rename='^=REPL'`."
        raise MigrationRefused("an empty pattern is everywhere in a name", kind="bad-pattern", hint=hint)
    try:
        compiled = re.compile(pattern)
        compiled.sub(replacement, "")
    except (re.error, IndexError) as error:
        raise MigrationRefused(f"not a regular expression: {pattern!r}: {error}", kind="bad-pattern") from error
    if group := re.search(r"\$(\d)", replacement):
        fact = f"{group[0]!r} is not a group, but a text: {pattern}={replacement}"
        raise MigrationRefused(fact, kind="bad-pattern", hint=f"Write a group as '\\{group[1]}'.")
    return Substitution(compiled, replacement)


def substitution(text: str) -> Substitution:
    """Return the rule for a text of the form ``RE=REPL``; raise MigrationRefused if it has another form."""
    pattern, *replacement = _EQUALS.split(text, 1)
    if not replacement:
        hint = "Write `rename='RE=REPL'`; or a list of pairs, each of a pattern and what replaces it."
        raise MigrationRefused(f"not of the form RE=REPL: {text!r}", kind="bad-pattern", hint=hint)
    if replacement[0].startswith((">", "=")):
        raise MigrationRefused(f"RE=REPL has one '=', and no '=>' or '==': {text!r}", kind="bad-pattern")
    return substitute(pattern, replacement[0])


def rename(names: Sequence[str], rules: Sequence[Rule]) -> list[str | None]:
    """Return the new name of each name, None for a wrapper's own; raise MigrationRefused for equal or empty ones."""
    renamed: list[str | None] = list(names)
    for rule in rules:
        left = [(index, name) for index, name in enumerate(renamed) if name is not None]
        for (index, _), new in zip(left, rule([name for _, name in left]) if left else (), strict=True):
            renamed[index] = new
    if renamed == list(names):
        return renamed
    seen: dict[str, str] = {}
    for old, new in zip(names, renamed, strict=True):
        if new is None:
            continue
        if not new and old:
            raise MigrationRefused(f"{old!r} would have no name left", kind="empty-name")
        if ".." in f".{new}." and ".." not in f".{old}.":
            fact = f"{old!r} would be called {new!r}, with nothing before or behind a dot"
            raise MigrationRefused(
                fact, kind="empty-name", hint="A pattern takes a module with its dot: '^module\\.='."
            )
        twin = seen.setdefault(new, old)
        if twin is not old:
            raise MigrationRefused(f"{twin!r} and {old!r} would both be called {new!r}", kind="name-collision")
    return renamed


def rename_metadata(keys: Sequence[str], rules: Sequence[Rule], names: Sequence[str]) -> list[str | None]:
    """
    Return the new key of each entry of a state dict's ``_metadata``, whose keys are the paths of modules.

    A key follows its module: it is renamed as a name inside the module would be, among the ``names`` of the state dict,
    or it goes where all names directly in the module go. None means that the module is gone, as a stripped wrapper is.
    """
    if not keys:
        return []
    marker = "\0"  # a name inside the module that no checkpoint has
    inside = [f"{key}.{marker}" if key else marker for key in keys]
    current, first = list(names), list(names)
    for rule in rules:
        # A prefix of the first and the last name in alphabetical order is a prefix of all.
        ends = sorted({min(current), max(current)}) if current else []
        inside = [_with_others(rule, ends, name) for name in inside]
        left = [
            (old, name) for old, name in zip(first, rule(current) if current else (), strict=True) if name is not None
        ]
        first, current = [old for old, _ in left], [name for _, name in left]
    end = f".{marker}"
    renamed = [name[: -len(end)] if name.endswith(end) else "" if name == marker else None for name in inside]
    homes: dict[str, set[str]] = {}
    for old, name in zip(first, current, strict=True):
        homes.setdefault(old.rpartition(".")[0], set()).add(name.rpartition(".")[0])
    for index, key in enumerate(keys):
        moved = homes.get(key, {key})
        if renamed[index] == key and key not in moved and len(moved) == 1:
            (home,) = moved
            renamed[index] = home if home not in renamed else None
    # The entries of a wrapper and of its module now have the same key: the module's is the later one.
    last = {key: index for index, key in enumerate(renamed)}
    return [key if last[key] == index else None for index, key in enumerate(renamed)]


def _with_others(rule: Rule, others: Sequence[str], name: str) -> str:
    """Return the new name of one among others; the name itself if the rule refuses them or removes it."""
    try:
        renamed = rule([*others, name])[-1]
    except MigrationRefused:
        return name
    return name if renamed is None else renamed


def _strip_heads(
    names: Sequence[str], heads: Sequence[str], most: int | None = None, *, wrapped: bool = False
) -> list[str | None]:
    """Remove heads that all names have. Once ``wrapped``, a head of only some names is the model's own module."""
    stripped: list[str | None] = list(names)
    left = inf if most is None else most
    while left and (headed := _headed(stripped, heads)) is not None:
        wrapper = BY_HEAD[headed.partition(".")[0]]
        head, length = f"{wrapper.component}.", len(wrapper.component) + 1
        others = [name for name in stripped if name is not None and not (name.startswith(head) and name[length:])]
        bare = next((name for name in others if not _goes(name, wrapper)), None)
        if bare is not None and wrapped:
            return stripped
        if bare is not None:
            raise _mixed(headed, bare, head)
        gone = set(others)
        stripped = [None if name is None or name in gone else name[length:] for name in stripped]
        wrapped = True
        left -= 1
    return stripped


def _mixed(headed: str, bare: str, head: str) -> MigrationRefused:
    """Return the error for a prefix that only some names have."""
    hint = (
        f"Take those that have it alone, `include='{head}*'`; or remove it from them, `rename='^{re.escape(head)}='`."
    )
    return MigrationRefused(f"{headed!r} has the prefix and {bare!r} has not", kind="mixed-prefix", hint=hint)


def _goes(name: str, wrapper: Wrapper) -> bool:
    """Return whether a name belongs to a wrapper itself: a counter, or its other copy of the model."""
    head, _, rest = name.partition(".")
    return name in wrapper.companions or (bool(rest) and head == wrapper.twin)


def _headed(names: Sequence[str | None], heads: Sequence[str]) -> str | None:
    """Return the first name that begins with one of the heads and goes on after it."""
    there = [name for name in names if name is not None]
    text = "\n".join(["", *there])  # most names have no such head, and one search is faster than thousands
    if not any(f"\n{head}." in text for head in heads):
        return None
    parts = ((name, *name.partition(".")) for name in there)
    return next((name for name, head, _, rest in parts if head in heads and rest), None)


def without_marked(name: str) -> str:
    """Return a name without the components that only wrappers use, wherever they are."""
    return ".".join([part for part in name.split(".") if part not in ANYWHERE])


class Trials:
    """
    The time that the patterns of one call take. ``on`` tries one of them on one name.

    A name can be made so that an ordinary pattern takes hours: the time of ``(.*)\\.(.*)\\.weight`` grows with the cube
    of its length, and Python's ``re`` cannot be stopped in the middle of a name. So patterns are tried on short names
    only, and the time is checked between them. A pattern that takes hours on one name of 512 characters is not stopped.
    """

    def __init__(self, cancellation: Cancellation | None = None) -> None:
        self._cancellation = cancellation
        self._seconds = SECONDS

    def on(self, name: str, apply: Callable[[str], T]) -> T:
        """
        Return ``apply(name)``.

        Raises:
            Cancelled: It was cancelled.
            LimitExceeded: The name is too long, or all trials together have taken too long.
        """
        check_cancelled(self._cancellation)
        if len(name) > LONGEST:
            raise LimitExceeded(
                f"a name has {len(name):,} characters; patterns are tried on {LONGEST:,} at most: {name[:_SHORT]!r}…",
                kind="name-too-long",
                hint="Leave it out with `exclude=`.",
                needed=len(name),
                actual=LONGEST,
            )
        started = thread_time()
        result = apply(name)
        self._seconds -= thread_time() - started
        if self._seconds < 0:
            raise LimitExceeded(
                f"patterns took more than {SECONDS:.0f} seconds on its names; the last was {name[:_SHORT]!r}…",
                kind="pattern-too-slow",
                hint="Write the pattern without '.*', or leave out the long names with `exclude=`.",
            )
        return result


class Filter(NamedTuple):
    """Globs for names, case-sensitive; ``*`` also matches dots."""

    include: tuple[str, ...] = ()
    """If there are any, a name must match one of them."""
    exclude: tuple[str, ...] = ()

    @property
    def takes_all(self) -> bool:
        """Whether every name is wanted."""
        return not (self.include or self.exclude)

    def takes(self, name: str, key: str = "") -> bool:
        """Return whether a name of the state dict under ``key`` is wanted."""
        if self.include and not any(matches(glob, name, key) for glob in self.include):
            return False
        return not any(matches(glob, name, key) for glob in self.exclude)

    def read(self, names: Mapping[str, Collection[str]], *, prefers_full: bool = False) -> Filter:
        """
        Return these globs with a dot before those that mean full paths; ``names`` are the names under each key.

        A glob that matches names of a state dict means these, unless full paths are preferred.

        Raises:
            MigrationRefused: A glob begins with a key, and matches different names in both readings.
        """
        if self.takes_all or set(names) <= {""}:
            return self
        read = [tuple(_read(glob, names, prefers_full) for glob in globs) for globs in self]
        return Filter(*read)


def matches(glob: str, name: str, key: str = "") -> bool:
    """Return whether a glob matches a name; one that begins with a dot is also tried on a dot and the full path."""
    from fnmatch import fnmatchcase  # most calls have no globs

    is_full = glob.startswith(".") and fnmatchcase(f".{key}.{name}" if key else f".{name}", glob)
    return is_full or fnmatchcase(name, glob)


def matched(glob: str, names: Mapping[str, Collection[str]]) -> list[str]:
    """Return the full paths of the names that a glob matches."""
    return [f"{key}.{name}" if key else name for key, own in names.items() for name in own if matches(glob, name, key)]


def _read(glob: str, names: Mapping[str, Collection[str]], prefers_full: bool) -> str:
    if glob.startswith("."):
        return glob
    full, relative = matched(f".{glob}", names), matched(glob, names)
    if not full or full == relative:
        return glob
    if relative and any(key and glob.startswith(f"{key}.") for key in names):
        raise two_readings(glob, full, relative)
    return f".{glob}" if prefers_full or not relative else glob


def two_readings(text: str, full: Iterable[str], relative: Iterable[str]) -> MigrationRefused:
    """Return the error for a name or glob that means different names as a full path and inside a state dict."""
    one, other = some(list(map(repr, full))), some(list(map(repr, relative)))
    return MigrationRefused(
        f"{text!r} means {one} as a full path, and {other} as a name inside its state dict",
        kind="two-readings",
        hint=f"Write '.{text}' for the full path; or the other one with the key of its state dict in front.",
    )


_COMPARED: Final = 64
"""How many names are compared letter by letter: those that share most components with the missing one."""


class Missing(str):
    """
    A missing name: a string equal to that name, whose ``repr`` is the whole message.

    Programs may look up many missing names and show few, so the nearest name is searched only for the ``repr``.
    """

    __slots__ = ("_names",)
    _names: Collection[str]

    def __new__(cls, name: str, names: Collection[str]) -> Self:
        made = super().__new__(cls, name)
        made._names = names
        return made

    def __repr__(self) -> str:
        return not_there(str(self), self._names)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # only the name is pickled, not the names of the file


def not_there(name: str, names: Collection[str]) -> str:
    """Return the message for a missing name, with the name that was probably meant and a prefix that differs."""
    fact = f"{quoted(name, 200)} is not there"
    longer = min((other for other in names if other.endswith(f".{name}")), key=len, default=None)
    shorter = max((other for other in names if other and name.endswith(f".{other}")), key=len, default=None)
    meant = longer or shorter or next(iter(_alike(name, names, 1)), None)
    if meant is None:
        return fact
    prefix = longer[: -len(name)] if longer else name[: -len(shorter)] if shorter else ""
    begin = [other.startswith(prefix) for other in names]
    why = "every name begins" if longer and all(begin) else "no name begins" if shorter and not any(begin) else ""
    return f"{fact}; {quoted(meant, 200)} is{f': {why} with {quoted(prefix, 200)}' if why else ''}"


def by_likeness(name: str, names: Collection[str]) -> list[str]:
    """Return the names, those most similar to ``name`` first, and then the others in their order."""
    return list(dict.fromkeys((*_alike(name, names, _COMPARED), *names)))


def _alike(name: str, names: Iterable[str], most: int) -> list[str]:
    from difflib import get_close_matches
    from heapq import nlargest

    if len(name) > LONGEST:  # the time grows with the square of the length
        return []
    components = set(name.split("."))
    short = (other for other in names if len(other) <= LONGEST)
    compared = nlargest(_COMPARED, short, key=lambda other: len(components.intersection(other.split("."))))
    return get_close_matches(name, compared, most)
