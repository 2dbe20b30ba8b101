"""Folders as ``torch.distributed.checkpoint`` writes them, of any boxes, without processes: with its own classes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

Boxes = Sequence[tuple[Sequence[int], Sequence[int]]]


class Writer:
    """Writes items into files, one a rank, and knows where they are."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.metadata = Metadata({}, planner_data={}, storage_data={})

    def item(self, file: str, index: MetadataIndex, value: Any, *, changed: Any = None) -> None:
        stream = io.BytesIO()
        torch.save(value, stream)
        data = changed(stream.getvalue()) if changed is not None else stream.getvalue()
        path = self.folder / file
        offset = path.stat().st_size if path.exists() else 0
        with path.open("ab") as target:
            target.write(data)
        descriptors = {"transform_descriptors": ["stream.zstd/1"]} if changed is not None else {}
        self.metadata.storage_data[index] = _StorageInfo(file, offset, len(data), **descriptors)

    def tensor(self, name: str, tensor: torch.Tensor, boxes: Boxes | None = None, **options: Any) -> None:
        """Write a tensor, piece by piece, the first to rank 0's file, the next to rank 1's…"""
        whole = [((0,) * tensor.dim(), tuple(tensor.shape))]
        chunks = []
        for rank, (offsets, sizes) in enumerate(boxes if boxes is not None else whole):
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            chunks.append(chunk)
            part = tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
            index = MetadataIndex(name, chunk.offsets, rank)
            self.item(f"__{rank}_0.distcp", index, part.clone(), **options)
        properties = TensorProperties(dtype=tensor.dtype)
        self.metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, tensor.shape, chunks)
        self._path(name)

    def value(self, name: str, value: Any, file: str = "__0_0.distcp") -> None:
        self.item(file, MetadataIndex(name), value)
        self.metadata.state_dict_metadata[name] = BytesStorageMetadata()
        self._path(name)

    def _path(self, name: str) -> None:
        if self.metadata.planner_data is not None:
            head, _, rest = name.partition(".")
            self.metadata.planner_data[name] = (head, rest) if rest else (name,)

    def close(self, name: str = ".metadata") -> Path:
        (self.folder / name).write_bytes(pickle.dumps(self.metadata, protocol=4))
        return self.folder


def rows(shape: Sequence[int], count: int, axis: int = 0) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return boxes as ``torch.chunk`` cuts them; those of the last ranks may be empty."""
    size = -(-shape[axis] // count)
    found = []
    for rank in range(count):
        begin = min(rank * size, shape[axis])
        end = min(begin + size, shape[axis])
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[axis], sizes[axis] = begin, end - begin
        found.append((tuple(offsets), tuple(sizes)))
    return found


def grid(shape: tuple[int, int], down: int, across: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the boxes of a mesh of two dimensions."""
    return [
        ((top[0][0], left[0][1]), (top[1][0], left[1][1]))
        for top in rows(shape, down, 0)
        for left in rows(shape, across, 1)
    ]


def tensors() -> dict[str, torch.Tensor]:
    """Return tensors of several shapes and types, with values of their own."""
    torch.manual_seed(3)
    return {
        "model.weight": torch.randn(23, 10),
        "model.wide": torch.randn(5, 14).to(torch.bfloat16),
        "model.bias": torch.randn(14, dtype=torch.float64),
        "model.cube": torch.randn(4, 6, 5).to(torch.float16),
        "model.flags": torch.arange(11) % 3 == 0,
        "model.steps": torch.tensor(7),
    }


def sharded(folder: Path, ranks: int = 4) -> tuple[Path, Mapping[str, torch.Tensor]]:
    """Write tensors cut in several ways, and some values; return the folder and what is in it."""
    found = tensors()
    writer = Writer(folder)
    writer.value("epoch", 3)
    writer.value("note", "words")
    writer.tensor("model.weight", found["model.weight"], rows((23, 10), ranks))
    writer.tensor("model.wide", found["model.wide"], rows((5, 14), ranks, 1))
    writer.tensor("model.bias", found["model.bias"], rows((14,), ranks))
    writer.tensor("model.cube", found["model.cube"], rows((4, 6, 5), 3, 1))
    writer.tensor("model.flags", found["model.flags"])
    writer.tensor("model.steps", found["model.steps"])
    return writer.close(), found
