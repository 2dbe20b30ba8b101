"""What putting tensors in pieces together needs of memory, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scale import exhaustive, scale

PROGRAM = """
import sys
from ckptool.migration.writing import Transfer
from ckptool.sources.files import FileSource
from ckptool.tensors.dtypes import BY_NAME
from ckptool.tensors.payloads import StoragePayload
from ckptool.tensors.pieces import Piece, PiecesSource, in_pieces
from ckptool.tensors.tensor import StorageRef, TensorInfo
from tests.process import peak_nbytes

class Sink:
    position = nbytes = 0
    takes_any_order = True
    def leave(self, nbytes): self.position += nbytes; return self.position - nbytes
    def fill(self, position, view): self.nbytes += 0
    def filled(self, nbytes): self.nbytes += nbytes
    def write(self, data): self.position += len(data); self.nbytes += len(data)

path, way, pieces, rows, width = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
file, float32 = FileSource(path), BY_NAME["float32"]
stride = (1, rows) if way == "transposed" else (width, 1)
info = TensorInfo(float32, (rows, width), stride, 0, StorageRef("0", "cpu", rows * width * 4, file, 0), "cpu")
at = (lambda number: (number * rows, 0)) if way == "rows" else (lambda number: (0, number * width))
shape = (pieces * rows, width) if way == "rows" else (rows, pieces * width)
source = PiecesSource(shape, float32, [Piece(at(n), (rows, width), "file", lambda: info) for n in range(pieces)])
whole = in_pieces("w", shape, float32, source, "cpu")

before, sink = peak_nbytes(), Sink()
with Transfer(sink) as transfer:
    transfer.send(StoragePayload(whole.storage, 1))
assert sink.nbytes == source.nbytes
print(source.nbytes >> 20, peak_nbytes() - before >> 20)
"""


@pytest.mark.parametrize(
    "way", ["columns", *(pytest.param(way, marks=exhaustive) for way in ("rows", "one row", "transposed"))]
)
def test_memory_does_not_grow_with_the_tensor(tmp_path: Path, way: str) -> None:
    """The pieces share the bytes of one file of 16 MiB; in a full run, they come to 2 GiB."""
    rows, width = (1, 1 << 22) if way == "one row" else (1 << 11, 1 << 11)
    pieces = 2 if way == "transposed" else 128 if scale else 8
    path = tmp_path / "file"
    with path.open("wb") as stream:
        stream.truncate(rows * width * 4)
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, path, way, *map(str, (pieces, rows, width))],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    size, grown = map(int, found.stdout.split())

    assert size == pieces * 16
    assert grown <= 64
