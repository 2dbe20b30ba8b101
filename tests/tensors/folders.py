"""Folders of torch.distributed.checkpoint, cut as a test wants, written with the classes of torch itself."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptool.tensors.tiling import Box


def save(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    cuts: Mapping[str, Sequence[Box]] | None = None,
    *,
    files: int = 2,
    lay: str = "plain",
) -> Path:
    """Write tensors in as many files; ``lay`` is ``transposed`` for pieces whose memory is column by column."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [io.BytesIO() for _ in range(files)]
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    count = 0
    for name, tensor in tensors.items():
        chunks = []
        boxes = (cuts or {}).get(name) or [((0,) * tensor.dim(), tuple(tensor.shape))]
        for offsets, sizes in boxes:
            piece = tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].clone()
            if lay == "transposed" and piece.dim() == 2:
                piece = piece.T.contiguous().T
            number, count = count % files, count + 1
            start = written[number].tell()
            torch.save(piece, written[number])
            written[number].seek(0, io.SEEK_END)
            length = written[number].tell() - start
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            index = MetadataIndex(name, torch.Size(offsets))
            places[index] = _StorageInfo(f"__{number}_0.distcp", start, length)
        properties = TensorProperties(dtype=tensor.dtype)
        entries[name] = TensorStorageMetadata(properties, tensor.shape, chunks)
    for number, one in enumerate(written):
        (folder / f"__{number}_0.distcp").write_bytes(one.getvalue())
    planner_data = {name: tuple(name.split(".", 1)) for name in tensors}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, planner_data, places)))
    return folder


def rows(shape: Sequence[int], count: int) -> list[Box]:
    """Return a shape cut across, along its first dimension."""
    return cut(shape, count, 0)


def columns(shape: Sequence[int], count: int) -> list[Box]:
    """Return a shape cut along its last dimension."""
    return cut(shape, count, len(shape) - 1)


def cut(shape: Sequence[int], count: int, axis: int) -> list[Box]:
    """Return a shape cut along a dimension, as torch.chunk cuts."""
    size = -(-shape[axis] // count)
    found: list[Box] = []
    for start in range(0, shape[axis], size):
        offsets = tuple(start if at == axis else 0 for at in range(len(shape)))
        sizes = tuple(min(size, whole - start) if at == axis else whole for at, whole in enumerate(shape))
        found.append((offsets, sizes))
    return found
