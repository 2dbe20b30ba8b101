"""Tensors whose parts are tensors of several files, joined: each part once, however many ranks have it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from ckptool.checkpoints.companions import Remark
from ckptool.errors import CkptoolError, Failure, MalformedFile
from ckptool.sources.folder import FolderSource
from ckptool.tensors.pieces import Piece, PiecesSource, in_pieces
from ckptool.tensors.tensor import TensorInfo
from ckptool.tensors.tiling import Box, check_tiling

AGAIN: Final = "Copy the folder again, with the files of all ranks."


class Part(NamedTuple):
    """A box of a whole tensor, and the tensor that fills it."""

    box: Box
    file: str
    info: TensorInfo


def whole(
    folder: FolderSource, name: str, shape: tuple[int, ...], parts: Sequence[Part], remarks: list[Remark]
) -> TensorInfo:
    """
    Return the tensor that parts are; if they do not fill it, ``remarks`` gets the reason, and reading it raises.

    Raises:
        MalformedFile: They are of several types.
    """
    dtype = parts[0].info.dtype
    if any(one.info.dtype != dtype for one in parts):
        raise MalformedFile(f"the pieces of {name!r} differ in type", kind="piece", hint=AGAIN)
    found: dict[Box, Part] = {}
    for part in parts:
        found.setdefault(part.box, part)
    boxes = sorted(found)
    fault: CkptoolError | None = None
    try:
        check_tiling(name, shape, boxes)
    except Failure as error:
        fault = error
        remarks.append(Remark("CK141", error.message, AGAIN))
    pieces = [Piece(*box, found[box].file, partial(_given, found[box].info)) for box in boxes]
    source = PiecesSource(shape, dtype, pieces, folder.cancellation, name=name, fault=fault)
    return in_pieces(name, shape, dtype, source, "cpu")


def _given(info: TensorInfo) -> TensorInfo:
    return info
