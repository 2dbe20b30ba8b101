"""
How much the tests do: each promise once, on a small scale; with ``--full``, all that they can do.

``tests/conftest.py`` sets the scale before it collects any test; processes that tests start have the small one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

scale = 0
"""0: small. 1: full. Above: so many times as much of what is done again and again."""

exhaustive = pytest.mark.exhaustive
scaled = pytest.mark.scaled


def times(small: int, full: int) -> int:
    """Return how often to do what is done again and again."""
    return full * scale if scale else small


def step(small: int, full: int = 1) -> int:
    """Return which of many places to try: every so manyth, in a full run another number, above that every one."""
    return small if not scale else full if scale == 1 else 1


def some(cases: Iterable[Any], small: int) -> list[Any]:
    """Return every so manyth case of a parametrization; in a full run all, the others marked exhaustive."""
    numbered = list(enumerate(cases))
    if not scale:
        return [case for number, case in numbered if number % small == 0]
    # A tuple is one value for each of several parameters.
    values = [(number, case if isinstance(case, tuple) else (case,)) for number, case in numbered]
    return [pytest.param(*case, marks=() if number % small == 0 else exhaustive) for number, case in values]


def in_turn(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """
    Return a case for each value of the longest axis, with the values of the others by turns.

    For facts that have little to do with each other: each value is met, but not each with each.
    """
    values = [list(axis) for axis in axes]
    longest = max(map(len, values))
    cases = []
    for number in range(longest):
        case, slower = list[Any](), 1
        for axis in values:
            is_slow = len(axis) < longest and slower * len(axis) <= longest
            value = axis[number // (slower if is_slow else 1) % len(axis)]
            slower *= len(axis) if is_slow else 1
            case.append(value)
        cases.append(tuple(case))
    return cases


def one_of_twins(files: Iterable[Any], small: int = 1) -> list[Any]:
    """
    Return one of each two files that differ in nothing but zip and legacy, by turns.

    By default, of every so manyth two: that two are equal is a promise of its own.
    """
    kinds: dict[str, list[Any]] = {}
    for file in files:
        kinds.setdefault(str(file).replace("-legacy", "-zip"), []).append(file)
    return some([kind[number // small % len(kind)] for number, kind in enumerate(kinds.values())], small)


def examples(full: int) -> int:
    """Return how many examples Hypothesis makes, where it makes so many in a full run: its profile says which share."""
    return max(1, full * settings.default.max_examples // 100)
