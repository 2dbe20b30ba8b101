"""
Tensors of Megatron-core that were flattened before they were cut: states that its distributed optimizer shares out.

A tensor ``[X, Y]`` of which each model-parallel rank has ``[x, y]`` stands in the index as one of ``[X/x, Y/y, x·y]``,
whose last dimension is cut anywhere. The shape of the whole is beside it in the index, in ``mcore_data``.
See megatron/core/dist_checkpointing/strategies/torch.py of megatron-core 0.7 to 0.14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import prod
from typing import Final

from ckptool.errors import CkptoolError, Failure, MalformedFile
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.tensors.pieces import Box, Piece, boxes_of
from ckptool.tensors.rebuild import as_sizes
from ckptool.tensors.tensor import TensorInfo, row_major

_FIELD: Final = "nd_reformulated_orig_global_shape"

Shape = tuple[int, ...]


def whole_shapes(node: Inert) -> dict[str, Shape]:
    """Return the shapes of the tensors that were flattened, by name; an empty one where there is none to read."""
    found: dict[str, Shape] = {}
    for name, facts in nodes.mapping_pairs(node) or ():
        pairs = nodes.mapping_pairs(facts) or ()
        given = [value for key, value in pairs if key == _FIELD] if type(name) is str else []
        if type(name) is str and given:
            try:
                found[name] = as_sizes(given[-1])
            except Failure:
                found[name] = ()
    return found


def fault(name: str, whole: Shape, shape: Shape, boxes: Sequence[Box]) -> CkptoolError | None:
    """Return why a tensor of this shape cannot be the one of ``shape`` in the index; None if it can."""
    is_grid = len(shape) == len(whole) + 1 > 1 and all(
        count and not size % count for size, count in zip(whole, shape, strict=False)
    )
    in_runs = all(set(sizes[:-1]) <= {1} for _, sizes in boxes if 0 not in sizes)
    if is_grid and in_runs and prod(whole) == prod(shape):
        return None
    return MalformedFile(
        f"{name!r} was flattened, and the index contradicts itself: of {list(whole)}, it stands there as {list(shape)}",
        kind="malformed-index",
        hint="Load it in Megatron-LM, and save it without flattening.",
    )


def pieces(whole: Shape, shape: Shape, items: Sequence[tuple[Box, str, Callable[[], TensorInfo]]]) -> Iterator[Piece]:
    """Yield the boxes of the whole tensor that the items are: each is a run of elements, and several boxes of it."""
    part = tuple(size // count for size, count in zip(whole, shape, strict=False))
    for (offsets, sizes), file, read in items:
        if 0 in sizes:
            continue
        corner = [at * size for at, size in zip(offsets, part, strict=False)]
        once = cache(read)
        done = 0
        for inside, size in boxes_of(part, offsets[-1], offsets[-1] + sizes[-1]):
            place = tuple(map(sum, zip(corner, inside, strict=True)))
            yield Piece(place, size, file, partial(_cut, once, sizes, done, size))
            done += prod(size)


def _cut(read: Callable[[], TensorInfo], sizes: Shape, start: int, shape: Shape) -> TensorInfo:
    """Return a part of the run of elements that an item is; another tensor as it is, which whoever asked refuses."""
    info = read()
    if info.shape != sizes or not info.is_contiguous:
        return info
    return info._replace(shape=shape, stride=row_major(shape), storage_offset=info.storage_offset + start)
