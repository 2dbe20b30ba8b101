"""
Boxes inside a shape: whether they tile it, where two of them overlap, which boxes make up a run of elements.

A box is a pair ``(offsets, sizes)``, in elements. Nothing here reads bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isqrt, prod
from typing import Final, TypeAlias

from ckptool.errors import LimitExceeded, MalformedFile
from ckptool.tensors.tensor import MAX_RANK, is_countable, row_major

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""

_MOST_CORNERS: Final = 1 << 22
_MOST_AXES: Final = 3
"""Boxes that are cut along so many dimensions may be any number: known writers cut along two at most."""
_MOST_PLACES: Final = 1 << 66
"""Far fewer numbers below this have one hash than it takes to slow a dict down."""
_MOST_LOOKED_AT: Final = 1 << 17
"""Pairs of boxes that are compared to name two that overlap."""


def check_tiling(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """
    Raise MalformedFile unless boxes fill a shape, each element once, however they are arranged.

    Takes time in proportion to their number.

    Raises:
        LimitExceeded: They are cut along so many dimensions that it would take long.
    """
    if len(shape) > MAX_RANK or not is_countable(shape):
        raise _bad(name, f"a tensor of {len(shape)} dimensions, and more elements than torch can count")
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise _bad(name, f"a piece of {len(sizes)} dimensions, in a tensor of {len(shape)}")
        for offset, size, whole in zip(offsets, sizes, shape, strict=True):
            if offset < 0 or size < 0 or offset + size > whole:
                raise _bad(name, f"the piece at {list(offsets)} of {list(sizes)} is not inside {list(shape)}")
    total = prod(shape)
    inside = [box for box in boxes if 0 not in box[1]]
    held = sum(prod(sizes) for _, sizes in inside)
    if held == total and (len(inside) <= 1 or _is_tiled(name, shape, inside)):
        return
    overlapping = _overlap(inside, len(shape))
    if overlapping is None and held < total:
        raise MalformedFile(
            f"{name!r} has a hole: its pieces hold {held:,} of {total:,} elements",
            kind="missing-piece",
            hint="A file of the set is missing, or was not written.",
            needed=total,
            actual=held,
        )
    raise _bad(name, "two pieces overlap" + ("" if overlapping is None else f" at {list(overlapping)}"))


def _is_tiled(name: str, shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """
    Say whether boxes inside a shape cover each of its elements once.

    How many boxes cover an element, as a function of its place, is known when its jumps are: those at the corners of
    each box, with a sign. It is one everywhere if the jumps of all boxes add up to those of the whole.
    """
    axes = [axis for axis, whole in enumerate(shape) if any(sizes[axis] != whole for _, sizes in boxes)]
    grid = [shape[axis] + 1 for axis in axes]
    if len(axes) > _MOST_AXES and (len(boxes) << len(axes) > _MOST_CORNERS or prod(grid) > _MOST_PLACES):
        what = f"{name!r}: {len(boxes):,} pieces, which are cut along {len(axes)} dimensions"
        raise LimitExceeded(what, hint="Get the folder again, from one save.", actual=len(boxes))
    steps = row_major(grid)
    jumps: dict[int, int] = {}
    whole = ((0,) * len(shape), shape)
    for sign, (offsets, sizes) in ((1, whole), *((-1, box) for box in boxes)):
        corners = [(0, sign)]
        for axis, step in zip(axes, steps, strict=True):
            begin, end = offsets[axis] * step, (offsets[axis] + sizes[axis]) * step
            corners = [(at + begin, jump) for at, jump in corners] + [(at + end, -jump) for at, jump in corners]
        for at, jump in corners:
            left = jumps.pop(at, 0) + jump
            if left:
                jumps[at] = left
    return not jumps


def _overlap(boxes: list[Box], rank: int) -> tuple[int, ...] | None:
    """Return the offsets of a box that has elements in common with another; None if none is found in some time."""
    if not rank:
        return () if len(boxes) > 1 else None
    axis = max(range(rank), key=lambda axis: len({offsets[axis] for offsets, _ in boxes}))
    active: list[Box] = []
    looked_at = 0
    for box in sorted(boxes, key=lambda box: box[0][axis]):
        active = [one for one in active if one[0][axis] + one[1][axis] > box[0][axis]]
        looked_at += len(active) + 1
        if any(intersection(one, box) is not None for one in active):
            return box[0]
        if looked_at > _MOST_LOOKED_AT:
            return None
        active.append(box)
    return None


def _bad(name: str, what: str) -> MalformedFile:
    return MalformedFile(f"{name!r}: {what}", kind="bad-piece", hint="Get the folder again, from one save.")


def intersection(one: Box, other: Box) -> Box | None:
    """Return the box that two have in common; None if they have no element in common."""
    low = tuple(map(max, one[0], other[0]))
    sizes = []
    for begin, a, a_size, b, b_size in zip(low, *one, *other, strict=True):
        size = min(a + a_size, b + b_size) - begin
        if size <= 0:
            return None
        sizes.append(size)
    return low, tuple(sizes)


class BoxIndex:
    """Finds which of many boxes meet another: those are few, in boxes that do not overlap and are sorted."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        size = max(8, isqrt(len(boxes)))
        groups = [(start, boxes[start : start + size]) for start in range(0, len(boxes), size)]
        self._groups = [(start, start + len(group), _hull(group)) for start, group in groups]

    def meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the numbers of those that meet a box, in order, and what they have in common with it."""
        for start, stop, hull in self._groups:
            if len(self._groups) > 1 and intersection(hull, box) is None:
                continue
            for index in range(start, stop):
                found = intersection(self._boxes[index], box)
                if found is not None:
                    yield index, found


def _hull(boxes: Sequence[Box]) -> Box:
    low = tuple(map(min, zip(*(offsets for offsets, _ in boxes), strict=True)))
    ends = (map(sum, zip(offsets, sizes, strict=True)) for offsets, sizes in boxes)
    high = map(max, zip(*ends, strict=True))
    return low, tuple(end - begin for begin, end in zip(low, high, strict=True))


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that the elements from ``start`` to ``stop`` are, in row-major order: few, each as it can be."""
    steps = row_major(shape)
    while start < stop:
        axis = next(at for at, step in enumerate(steps) if not start % step and start + step <= stop)
        place = tuple(start // step % size for step, size in zip(steps, shape, strict=True))
        count = min((stop - start) // steps[axis], shape[axis] - place[axis])
        yield place, (*((1,) * axis), count, *shape[axis + 1 :])
        start += count * steps[axis]


def cut_up(box: Box, numel: int) -> Iterator[Box]:
    """Yield a box in parts of at most so many elements, in row-major order."""
    offsets, sizes = box
    if prod(sizes) <= numel:
        yield box
        return
    axis = next(at for at, size in enumerate(sizes) if size > 1)
    rows = max(1, numel // prod(sizes[axis + 1 :]))
    for start in range(0, sizes[axis], rows):
        own = (*offsets[:axis], offsets[axis] + start, *offsets[axis + 1 :])
        part = own, (*sizes[:axis], min(rows, sizes[axis] - start), *sizes[axis + 1 :])
        yield from cut_up(part, numel) if rows == 1 else (part,)
