"""How a tensor is cut into pieces, in words and numbers: facts for reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckptool.errors import Failure
from ckptool.tensors.pieces import Piece, PiecesSource
from ckptool.tensors.tensor import TensorInfo


class Cut(NamedTuple):
    """The pieces of a tensor that have elements, and where they are."""

    pieces: Sequence[Piece]
    along: int | None
    """The dimension that they are cut along, if it is one alone; None for one piece, and for boxes."""
    is_flat: bool
    """Whether it was flattened before it was cut: offsets and sizes are of its elements in a row."""
    files: tuple[str, ...]
    """Names of the files that hold them, in their order."""

    def __str__(self) -> str:
        count = len(self.pieces)
        if count < 2:
            return str(count)
        if self.along is None:
            return f"{count:,} {'runs' if self.is_flat else 'boxes'}"
        return f"{count:,} along {self.along}"


def cut_of(info: TensorInfo) -> Cut | None:
    """Return how a tensor is cut; None where its file has it as a whole, or does not say all of it."""
    source = info.storage.source if info.storage is not None else None
    if not isinstance(source, PiecesSource):
        return None
    try:
        pieces = source.pieces
    except Failure:  # reading it tells what is wrong
        return None
    is_flat = len(source.shape) == 1 < len(info.shape)
    axes = [axis for axis, whole in enumerate(source.shape) if any(piece.sizes[axis] != whole for piece in pieces)]
    along = axes[0] if len(axes) == 1 and not is_flat else None
    return Cut(pieces, along, is_flat, tuple(dict.fromkeys(piece.file for piece in pieces)))
