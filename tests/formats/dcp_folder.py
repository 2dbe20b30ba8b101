"""Folders as ``torch.distributed.checkpoint`` writes them, of any boxes, without processes: with its own classes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
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
Box = tuple[tuple[int, ...], tuple[int, ...]]


Item = tuple[tuple[int, ...], tuple[int, ...], str, int, int]
"""A piece: offsets, sizes, and the file, the offset and the length of what torch.save wrote of it."""
Described = tuple[torch.dtype, tuple[int, ...], Sequence[Item]]


def saved_bytes(value: Any) -> bytes:
    """Return what torch.save writes of a value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


class Writer:
    """Writes items into files, one a rank, or so many files by turns, and knows where they are."""

    def __init__(self, folder: Path, files: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.files, self.count = files, 0
        self.metadata = Metadata({}, planner_data={}, storage_data={})

    def item(self, file: str, index: MetadataIndex, value: Any, *, changed: Any = None) -> None:
        data = changed(saved_bytes(value)) if changed is not None else saved_bytes(value)
        path = self.folder / file
        offset = path.stat().st_size if path.exists() else 0
        with path.open("ab") as target:
            target.write(data)
        descriptors = {"transform_descriptors": ["stream.zstd/1"]} if changed is not None else {}
        self.metadata.storage_data[index] = _StorageInfo(file, offset, len(data), **descriptors)

    def tensor(
        self,
        name: str,
        tensor: torch.Tensor,
        boxes: Boxes | None = None,
        lay: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
        **options: Any,
    ) -> None:
        """Write a tensor, piece by piece, the first to rank 0's file, the next to rank 1's…"""
        whole = [((0,) * tensor.dim(), tuple(tensor.shape))]
        chunks = []
        for rank, (offsets, sizes) in enumerate(boxes if boxes is not None else whole):
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            chunks.append(chunk)
            part = tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
            index = MetadataIndex(name, chunk.offsets, rank)
            number, self.count = rank if self.files is None else self.count % self.files, self.count + 1
            self.item(f"__{number}_0.distcp", index, lay(part), **options)
        self.describe(name, tensor.dtype, tensor.shape, chunks)

    def describe(self, name: str, dtype: torch.dtype, shape: Sequence[int], chunks: list[ChunkStorageMetadata]) -> None:
        properties = TensorProperties(dtype=dtype)
        self.metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
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


def save(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    cuts: Mapping[str, Boxes] | None = None,
    *,
    files: int = 2,
    lay: str = "plain",
) -> Path:
    """Write tensors in as many files; ``lay`` is ``transposed`` for pieces whose memory is column by column."""
    for old in folder.glob("*.distcp"):
        old.unlink()
    writer = Writer(folder, files)
    for name, tensor in tensors.items():
        writer.tensor(name, tensor, (cuts or {}).get(name) or None, transposed if lay == "transposed" else torch.clone)
    return writer.close()


def write(folder: Path, tensors: Mapping[str, Described], files: Mapping[str, bytes]) -> Path:
    """Write files, and an index that says of tensors what it is given, whatever the files hold."""
    writer = Writer(folder)
    for name, (dtype, shape, items) in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, *_ in items]
        writer.describe(name, dtype, shape, chunks)
        for offsets, _, file, start, length in items:
            writer.metadata.storage_data[MetadataIndex(name, torch.Size(offsets))] = _StorageInfo(file, start, length)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return writer.close()


def transposed(piece: torch.Tensor) -> torch.Tensor:
    return piece.T.contiguous().T if piece.dim() == 2 else piece.clone()


def columns(shape: Sequence[int], count: int) -> list[Box]:
    """Return a shape cut along its last dimension."""
    return rows(shape, count, len(shape) - 1)


def rows(shape: Sequence[int], count: int, axis: int = 0) -> list[Box]:
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


def grid(shape: tuple[int, int], down: int, across: int) -> list[Box]:
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
