"""Ranges of bytes, from the first to the one after the last; ranges that lie close together are fetched as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]


def merged(ranges: Iterable[Range], near: int = 0) -> list[Range]:
    """Return ranges in order, with those in one that overlap, or have no more than ``near`` bytes between them."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if stop <= start:
            continue
        if found and start - found[-1][1] <= near:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def without(ranges: Iterable[Range], taken: Sequence[Range]) -> Iterator[Range]:
    """Yield what ranges have that none of ``taken`` has. Both are in order, and none of them overlaps another."""
    at = 0
    for start, stop in ranges:
        while at < len(taken) and taken[at][1] <= start:
            at += 1
        after = at
        while after < len(taken) and taken[after][0] < stop:
            if start < taken[after][0]:
                yield start, taken[after][0]
            start = taken[after][1]
            after += 1
        if start < stop:
            yield start, stop
