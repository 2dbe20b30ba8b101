"""Pieces of tensors: what they may be, which of them a file holds as they are, and which have a checksum."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from ckptool import LimitExceeded, Limits, MalformedFile, Source, StorageRef, TensorInfo
from ckptool.sources.files import FileSource
from ckptool.sources.source import BytesSource
from ckptool.tensors.dtypes import BY_NAME
from ckptool.tensors.pieces import Box, Piece, PiecesSource
from ckptool.tensors.tensor import row_major
from tests.each import each

DATA = bytes(range(96))


def described(
    shape: tuple[int, ...], dtype: str = "uint8", source: Source | None = None, offset: int = 0
) -> TensorInfo:
    """Return the facts of a tensor on a storage of just its size."""
    nbytes = prod(shape) * BY_NAME[dtype].itemsize
    storage = StorageRef("0", "cpu", nbytes, source or BytesSource(DATA), offset)
    return TensorInfo(BY_NAME[dtype], shape, row_major(shape), 0, storage, "cpu")


def one_piece(sizes: tuple[int, ...], found: TensorInfo, limits: Limits | None = None) -> PiecesSource:
    piece = Piece((0,) * len(sizes), sizes, "file", lambda: found)
    return PiecesSource(sizes, found.dtype, [piece], name="w", limits=limits or Limits())


def test_a_run_of_elements_may_have_any_shape_in_its_file() -> None:
    for shape in [(4,), (2, 2), (1, 4), (4, 1, 1)]:
        assert one_piece((4,), described(shape)).read(0, 4) == DATA[:4]


@each(("sizes", "found"), [((4,), (3,)), ((4,), (5,)), ((2, 3), (3, 2)), ((2, 3), (2, 2)), ((2, 3), (6,)), ((4,), ())])
def test_a_piece_has_the_elements_that_were_said(sizes: tuple[int, ...], found: tuple[int, ...]) -> None:
    with pytest.raises(MalformedFile, match="has shape") as caught:
        one_piece(sizes, described(found)).read(0, 1)
    assert caught.value.kind == "piece"


@each("dtype", ["quint4x2", "quint2x4"])
def test_elements_that_share_a_byte_are_no_piece(dtype: str) -> None:
    with pytest.raises(MalformedFile, match="is no plain tensor"):
        one_piece((4,), described((4,), dtype)).read(0, 1)


def test_a_piece_may_repeat_its_bytes_as_often_as_allowed() -> None:
    limits = Limits(expansion_ratio=2, expanded_nbytes=0)
    repeated = described((4,))._replace(shape=(2, 4), stride=(0, 1))
    assert one_piece((2, 4), repeated, limits).read(0, 8) == 2 * DATA[:4]
    with pytest.raises(LimitExceeded) as caught:
        one_piece((3, 4), repeated._replace(shape=(3, 4)), limits).read(0, 1)
    assert (caught.value.needed, caught.value.actual) == (12, 8)


# As they are in the file


def on_disk(
    path: Path, shape: tuple[int, ...], boxes: list[Box], dtype: str = "uint8", **storage: object
) -> PiecesSource:
    """Return pieces that lie in a file one behind the other."""
    path.write_bytes(DATA)
    file, pieces, at = FileSource(str(path)), [], 0
    for offsets, sizes in boxes:
        found = described(sizes, dtype, file, at)
        assert found.storage is not None
        found = found._replace(storage=found.storage._replace(**storage))  # type: ignore[arg-type]
        pieces.append(Piece(offsets, sizes, "file", lambda found=found: found))  # type: ignore[misc]
        at += found.storage.nbytes if found.storage is not None else 0
    return PiecesSource(shape, BY_NAME[dtype], pieces, name="w")


@each(
    ("boxes", "runs"),
    [
        ([((0, 0), (4, 6))], [24]),
        ([((0, 0), (2, 6)), ((2, 0), (2, 6))], [12, 12]),
        ([((row, 0), (1, 6)) for row in range(4)], [6] * 4),
        ([((row, at), (1, 3)) for row in range(4) for at in (0, 3)], [3] * 8),
        ([((row, at), (1, 1)) for row in range(4) for at in range(6)], [1] * 24),
        ([((0, at), (4, 3)) for at in (0, 3)], None),
        ([((row, at), (2, 3)) for row in (0, 2) for at in (0, 3)], None),
        ([((0, 0), (4, 1)), ((0, 1), (4, 5))], None),
    ],
)
def test_rows_are_runs_of_the_file_and_columns_are_not(
    boxes: list[Box], runs: list[int] | None, tmp_path: Path
) -> None:
    extents = on_disk(tmp_path / "file", (4, 6), boxes).extents()
    assert (None if extents is None else [one.nbytes for one in extents]) == runs
    if extents is not None:
        assert b"".join(one.file.read(one.offset, one.nbytes) for one in extents) == DATA[:24]


@each(
    ("dtype", "as_it_is"), [("uint8", True), ("bool", True), ("int16", False), ("float32", False), ("complex64", False)]
)
def test_bytes_of_another_order_are_a_run_where_there_is_no_order(dtype: str, as_it_is: bool, tmp_path: Path) -> None:
    source = on_disk(tmp_path / "file", (4,), [((0,), (4,))], dtype, big_endian=True)
    assert (source.extents() is not None) == as_it_is
    assert (source.read(0, source.nbytes) == DATA[: source.nbytes]) == as_it_is


def test_a_checksum_is_known_of_a_piece_that_is_a_whole_storage(tmp_path: Path) -> None:
    whole = on_disk(tmp_path / "file", (8,), [((0,), (8,))], crc32=7)
    part = on_disk(tmp_path / "file", (8,), [((0,), (8,))], crc32=7, nbytes=9)
    for source, known in ((whole, 1), (part, 0)):
        source.read(0, 8)
        assert len(source.copied_whole()) == known
        (extent,) = source.extents() or ()
        assert bool(extent.crc32) == bool(known)
