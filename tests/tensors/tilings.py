"""Tensors cut into boxes in every way, and their pieces in files as writers store them, for tests."""

from __future__ import annotations

import itertools
import os
import random
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ckptool import DType, Source, StorageRef, TensorInfo
from ckptool.sources.files import FileSource
from ckptool.sources.source import BytesSource
from ckptool.tensors.dtypes import BY_NAME
from ckptool.tensors.pieces import Box, Piece, PiecesSource

Array = NDArray[np.generic]
TYPES = {"float32": "<f4", "int64": "<i8", "bool": "?", "uint8": "u1", "complex128": "<c16", "complex64": "<c8"}
"""Element types that numpy has, by torch's name; bfloat16 is any two bytes."""
TYPES |= {"bfloat16": "<u2", "float16": "<f2", "float8_e4m3fn": "u1"}


def array(shape: tuple[int, ...], dtype: str, rng: random.Random) -> Array:
    """Return an array of random bits; booleans are 0 or 1."""
    count = int(np.prod(shape, dtype=int))
    if dtype == "bool":
        return np.array([rng.random() < 0.5 for _ in range(count)], "?").reshape(shape)
    return np.frombuffer(rng.randbytes(count * np.dtype(TYPES[dtype]).itemsize), TYPES[dtype]).reshape(shape).copy()


def tiling(shape: tuple[int, ...], rng: random.Random, depth: int = 3) -> list[Box]:
    """Return boxes that fill a shape: cut across at random, and at times turned round one in the middle."""
    found: list[Box] = []
    todo: list[tuple[Box, int]] = [(((0,) * len(shape), shape), depth)]
    while todo:
        box, left = todo.pop()
        parts = _cut(box, rng) if left and rng.random() < 0.9 else [box]
        if len(parts) == 1:
            found.append(box)
        else:
            todo += [(part, left - 1) for part in parts]
    rng.shuffle(found)
    return found


def _cut(box: Box, rng: random.Random) -> list[Box]:
    offsets, sizes = box
    long = [axis for axis, size in enumerate(sizes) if size >= 3]
    if len(long) >= 2 and rng.random() < 0.4:
        return pinwheel(box, *rng.sample(long, 2))
    axes = [axis for axis, size in enumerate(sizes) if size >= 2]
    if not axes:
        return [box]
    axis = rng.choice(axes)
    places = sorted(rng.sample(range(1, sizes[axis]), rng.randint(1, min(3, sizes[axis] - 1))))
    edges = [0, *places, sizes[axis]]
    return [
        (replaced(offsets, axis, offsets[axis] + begin), replaced(sizes, axis, end - begin))
        for begin, end in itertools.pairwise(edges)
    ]


def pinwheel(box: Box, one: int, other: int) -> list[Box]:
    """Return five boxes, four of them round the fifth: no straight cut goes through."""
    offsets, sizes = box
    a, b = sizes[one], sizes[other]
    places = [(0, 0, 1, b - 1), (0, b - 1, a - 1, 1), (a - 1, 1, 1, b - 1), (1, 0, a - 1, 1), (1, 1, a - 2, b - 2)]
    return [
        (
            replaced(replaced(offsets, one, offsets[one] + i), other, offsets[other] + j),
            replaced(replaced(sizes, one, m), other, n),
        )
        for i, j, m, n in places
    ]


def replaced(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


class Store:
    """A file, or memory, to which pieces are appended."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._data = bytearray()

    def add(self, data: bytes, rng: random.Random) -> int:
        self._data += os.urandom(rng.randrange(9))
        self._data += data
        return len(self._data) - len(data)

    def source(self) -> Source:
        if self._path is None:
            return BytesSource(bytes(self._data))
        self._path.write_bytes(self._data)
        return FileSource(str(self._path))


def stored(part: Array, dtype: DType, store: Store, rng: random.Random, way: str) -> TensorInfo:
    """Return a piece as a writer may store it; its source is filled in by ``sourced``."""
    order = list(range(part.ndim))
    if way == "transposed":
        rng.shuffle(order)
    laid = np.ascontiguousarray(part.transpose(order))
    gap = 2 if way == "strided" else 1
    spread = np.repeat(laid.reshape(-1), gap)
    first = 3 if way == "strided" else 0
    data = bytes(first * dtype.itemsize) + spread.tobytes()
    if way == "big-endian" and dtype.swap_nbytes > 1:
        data = np.frombuffer(data, f"<u{dtype.swap_nbytes}").astype(f">u{dtype.swap_nbytes}").tobytes()
    steps, step = {}, gap
    for axis in reversed(range(part.ndim)):
        steps[order[axis]] = step
        step *= laid.shape[axis]
    crc = zlib.crc32(data) if rng.random() < 0.8 else 0
    offset = store.add(data, rng)
    placeholder = StorageRef("0", "cpu", len(data), BytesSource(b""), offset, way == "big-endian", crc)
    stride = tuple(steps[axis] for axis in range(part.ndim))
    return TensorInfo(dtype, part.shape, stride, first, placeholder, "cpu")


def in_pieces(
    whole: Array,
    dtype: str,
    boxes: list[Box],
    rng: random.Random,
    path: Path | None = None,
    ways: tuple[str, ...] = ("plain",),
) -> PiecesSource:
    """Return a source of an array that is stored as these boxes."""
    store = Store(path)
    infos = []
    for offsets, sizes in boxes:
        part = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        infos.append(stored(np.asarray(part), BY_NAME[dtype], store, rng, rng.choice(ways)))
    source = store.source()
    pieces = []
    for (offsets, sizes), info in zip(boxes, infos, strict=True):
        assert info.storage is not None
        own = info._replace(storage=info.storage._replace(source=source))
        pieces.append(Piece(offsets, sizes, "file", lambda own=own: own))  # type: ignore[misc]
    return PiecesSource(whole.shape, BY_NAME[dtype], pieces, name="w")
