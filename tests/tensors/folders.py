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

Box = tuple[tuple[int, ...], tuple[int, ...]]


def save(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    cuts: Mapping[str, Sequence[Box]] | None = None,
    *,
    files: int = 2,
    lay: str = "plain",
) -> Path:
    """Write tensors in as many files; ``lay`` is ``transposed`` for pieces whose memory is column by column."""
    written = [io.BytesIO() for _ in range(files)]
    described: dict[str, Described] = {}
    count = 0
    for name, tensor in tensors.items():
        items: list[Item] = []
        for offsets, sizes in (cuts or {}).get(name) or [((0,) * tensor.dim(), tuple(tensor.shape))]:
            piece = tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].clone()
            if lay == "transposed" and piece.dim() == 2:
                piece = piece.T.contiguous().T
            number, count = count % files, count + 1
            data = item(piece)
            items.append((offsets, sizes, f"__{number}_0.distcp", written[number].tell(), len(data)))
            written[number].write(data)
        described[name] = tensor.dtype, tuple(tensor.shape), items
    contents = {f"__{number}_0.distcp": one.getvalue() for number, one in enumerate(written)}
    return write(folder, described, contents)


Item = tuple[tuple[int, ...], tuple[int, ...], str, int, int]
"""A piece: offsets, sizes, and the file, the offset and the length of what torch.save wrote of it."""
Described = tuple[torch.dtype, tuple[int, ...], Sequence[Item]]


def write(folder: Path, tensors: Mapping[str, Described], files: Mapping[str, bytes]) -> Path:
    """Write files, and an index that says of tensors what it is given, whatever the files hold."""
    folder.mkdir(parents=True, exist_ok=True)
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, (dtype, shape, items) in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, *_ in items]
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
        for offsets, _, file, start, length in items:
            places[MetadataIndex(name, torch.Size(offsets))] = _StorageInfo(file, start, length)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    planner_data = {name: tuple(name.split(".", 1)) for name in tensors}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, planner_data, places)))
    return folder


def item(tensor: torch.Tensor) -> bytes:
    """Return what torch.save writes of a piece."""
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


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
