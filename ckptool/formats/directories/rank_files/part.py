"""What one rank holds of a distributed tensor, whatever class it is of."""

from __future__ import annotations

from typing import NamedTuple

from ckptool.errors import MalformedFile
from ckptool.tensors.dtypes import DType
from ckptool.tensors.tensor import TensorInfo
from ckptool.tensors.tiling import Box


class Part(NamedTuple):
    """What one rank holds of a distributed tensor."""

    shape: tuple[int, ...]
    """Of the whole."""
    dtype: DType
    boxes: tuple[tuple[Box, TensorInfo], ...]
    """Those that are in this file, as tensors of their own."""
    all_boxes: tuple[Box, ...] | None
    """Those of all ranks, where the file lists them."""
    rank: int | None
    """That of the process which wrote it, where the file says so."""
    world: int | None
    """How many processes there were, where the file says so."""
    why_not: str | None = None
    """Why it cannot be put together; None where it can."""


def malformed(what: str) -> MalformedFile:
    """Return the error for a distributed tensor that contradicts itself."""
    return MalformedFile(f"a distributed tensor {what}", kind="malformed-tensor", hint="Get the file again.")
