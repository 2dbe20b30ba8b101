"""Packed elements of a box → their places in a buffer, whose dimensions have larger steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, product
from typing import Final

from ckptool.tensors.tensor import row_major

_WIDE: Final = 256
"""Rows of fewer bytes are copied by columns: one call for each column, instead of one for each row."""
_CODES: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}
_BLOCK_ROWS: Final = 1 << 10
"""Rows that are copied at a time by columns: what they are on stays in a core's cache."""


def is_run(sizes: Sequence[int], steps: Sequence[int]) -> bool:
    """Say whether a packed box is consecutive in a buffer, too, whose dimensions have these steps."""
    return not _run(sizes, steps)[1]


def scatter(
    data: memoryview, sizes: Sequence[int], buffer: memoryview, steps: Sequence[int], begin: int, itemsize: int
) -> None:
    """Copy a packed box of elements to its place in a buffer."""
    run, inner = _run(sizes, steps)
    width = run * itemsize
    nbytes = [step * itemsize for step in steps[:inner]]
    if width < _WIDE and run < max(sizes[:inner], default=0):
        _by_columns(data, sizes[:inner], buffer, nbytes, begin * itemsize, width)
        return
    source = 0
    for target in _places(sizes[:inner], nbytes, begin * itemsize):
        buffer[target : target + width] = data[source : source + width]
        source += width


def _run(sizes: Sequence[int], steps: Sequence[int]) -> tuple[int, int]:
    """Return how many elements of a box are consecutive in the buffer, and how many dimensions are left outside."""
    run, inner = 1, len(sizes)
    while inner and (sizes[inner - 1] == 1 or steps[inner - 1] == run):
        run *= sizes[inner - 1]
        inner -= 1
    return run, inner


def _places(sizes: Sequence[int], steps: Sequence[int], begin: int) -> Iterable[int]:
    """Return the place of each position of some dimensions, in row-major order."""
    if not sizes:
        return (begin,)
    *outer, last = (range(0, size * step, step) for size, step in zip(sizes, steps, strict=True))
    starts = (begin + sum(places) for places in product(*outer))
    return chain.from_iterable(range(start, start + last.stop, last.step) for start in starts)


def _by_columns(
    data: memoryview, sizes: Sequence[int], buffer: memoryview, steps: Sequence[int], begin: int, width: int
) -> None:
    """Copy a box of short rows: of all rows along the longest dimension, a column at once. Steps are in bytes."""
    unit = next(unit for unit in (8, 4, 2, 1) if not any(at % unit for at in (width, begin, buffer.nbytes, *steps)))
    target, source = buffer.cast(_CODES[unit]), data.cast(_CODES[unit])  # type: ignore[call-overload]
    own_steps = [step * width for step in row_major(sizes)]
    longest = max(range(len(sizes)), key=lambda axis: sizes[axis])
    rows, step, own_step = sizes[longest], steps[longest] // unit, own_steps[longest] // unit
    others = [axis for axis in range(len(sizes)) if axis != longest]
    places, own_places = (
        _places([sizes[axis] for axis in others], [some[axis] for axis in others], at)
        for some, at in ((steps, begin), (own_steps, 0))
    )
    for place, at in zip(places, own_places, strict=True):
        for first in range(0, rows, _BLOCK_ROWS):
            last = min(rows, first + _BLOCK_ROWS) - 1
            to, source_at = place // unit, at // unit
            for column in range(width // unit):
                target[to + column + first * step : to + column + last * step + 1 : step] = source[
                    source_at + column + first * own_step : source_at + column + last * own_step + 1 : own_step
                ]
