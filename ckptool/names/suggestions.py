"""
What a person might have meant where names do not match: the nearest name, and renames that would pair more of them.

Guesses, all of it: they are shown with the command that would carry them out, and nothing acts on them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ckptool.names.matching import KeyMatch, Rename, Renames, Shape, Shapes, in_order, renamed

_PLAIN = re.compile(r"[\w.-]+")
_COMPARED = 64
_AROUND = 8
_TRIED = 16
_MOST_GUESSES = 8


def nearest(missing: Iterable[str], expected: Shapes, unexpected: Iterable[str], found: Shapes) -> dict[str, str]:
    """Return, for each missing name that has one, the unexpected name of its shape that is most like it."""
    by_shape: dict[tuple[Shape, str], list[str]] = {}
    for name in unexpected:
        by_shape.setdefault((found[name], name.rpartition(".")[2]), []).append(name)
    near: dict[str, str] = {}
    ranks: Counter[tuple[Shape, str]] = Counter()
    for name in missing:
        key = expected[name], name.rpartition(".")[2]
        candidates = by_shape.get(key, [])
        if len(candidates) > _COMPARED:  # both are in the order of their models: look near the same position
            at = ranks[key]
            candidates = candidates[max(0, at - _AROUND) : at + _AROUND]
        ranks[key] += 1
        if candidates:
            near[name] = max(candidates, key=lambda other: _likeness(name, other))
    return near


def guess_renames(matched: KeyMatch, expected: Shapes, found: Shapes) -> Renames:
    """
    Return the changes of a match and renames of components that would pair more names. Guesses: for people to read.

    Each rename turns every name that it changes into one that is missing, of the same shape, and touches no other.
    """
    names = renamed(list(found), matched.changes) or []
    unexpected = set(matched.unexpected)
    left = {name: old for name, old in zip(names, found, strict=True) if old in unexpected}
    missing = {name: expected[name] for name in matched.missing}
    paired = [name for name in names if name not in left]
    near = nearest(missing, expected, left, {name: found[old] for name, old in left.items()})
    runs = Counter(run for new, old in near.items() for run in _differences(old, new))
    if len(missing) > _COMPARED:  # a rename of one layer of many explains nothing
        runs = Counter({run: count for run, count in runs.items() if not _numbers(run[0])})
    guesses: list[Rename] = []
    for (old, new), _ in runs.most_common(_TRIED):
        change = Rename("rename", f"(^|\\.){re.escape(old)}\\.=\\g<1>{new}.")
        becomes = dict(zip(left, map(str, change.rule(list(left))), strict=True))
        changed = {before: after for before, after in becomes.items() if before != after}
        held = all(missing.get(after) == found[left[before]] for before, after in changed.items())
        if not changed or not held or len(set(changed.values())) != len(changed) or change.rule(paired) != paired:
            continue
        guesses.append(change)
        for before, after in changed.items():
            del left[before], missing[after]
        if len(guesses) == _MOST_GUESSES:
            break
    return in_order(matched.changes, guesses) if guesses else matched.changes


def _likeness(name: str, other: str) -> tuple[bool, int, int]:
    """Return whether two names have the same numbers, how many components they share, how many letters of the rest."""
    mine, theirs = name.split("."), other.split(".")
    head, tail = _shared(mine, theirs)
    letters, _ = _shared(".".join(mine[head:]), ".".join(theirs[head:]))
    return _numbers(name) == _numbers(other), head + tail, letters


def _differences(old: str, new: str) -> Iterator[tuple[str, str]]:
    """Yield the run of components in which two names differ, in each, alone and with the component in front of it."""
    mine, theirs = old.split("."), new.split(".")
    head, tail = _shared(mine, theirs)
    for begin in (head, head - 1):
        first, second = (".".join(parts[begin : len(parts) - tail]) for parts in (mine, theirs))
        if begin >= 0 and tail and first != second and _PLAIN.fullmatch(first) and _PLAIN.fullmatch(second):
            yield first, second


def _shared(one: Sequence[str], other: Sequence[str]) -> tuple[int, int]:
    """Return how many items two sequences share at their heads, and at their tails after that."""
    most = min(len(one), len(other))
    head = 0
    while head < most and one[head] == other[head]:
        head += 1
    tail = 0
    while tail < most - head and one[-1 - tail] == other[-1 - tail]:
        tail += 1
    return head, tail


def _numbers(name: str) -> list[str]:
    return [component for component in name.split(".") if component.isdigit()]
