"""Tensors in pieces read as the whole tensor that numpy cut; what does not tile it is refused by the right name."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool import StorageRef, TensorInfo
from ckptool.errors import DamagedFile, LimitExceeded, MalformedFile
from ckptool.sources.source import BytesSource
from ckptool.tensors import pieces as pieces_module
from ckptool.tensors.dtypes import BY_NAME
from ckptool.tensors.pieces import Box, Piece, PiecesSource, boxes_of, check_tiling
from tests.scale import examples
from tests.tensors.tilings import TYPES, array, in_pieces, pinwheel, replaced, tiling

SHAPES = st.lists(st.integers(1, 7), max_size=4).map(tuple)
SEEDS = st.integers(0, 2**32)
WAYS = ("plain", "plain", "transposed", "strided", "big-endian")


@settings(max_examples=examples(400), deadline=None)
@given(shape=SHAPES, dtype=st.sampled_from(sorted(TYPES)), seed=SEEDS, on_disk=st.booleans(), small=st.booleans())
def test_pieces_read_as_the_whole(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], dtype: str, seed: int, on_disk: bool, small: bool
) -> None:
    rng = random.Random(seed)
    whole = array(shape, dtype, rng)
    boxes = tiling(shape, rng)
    check_tiling("w", shape, boxes)
    path = tmp_path_factory.getbasetemp() / "pieces" if on_disk else None
    with pytest.MonkeyPatch.context() as patch:
        if small:  # rows larger than what is put together at a time
            patch.setattr(pieces_module, "_BAND_NBYTES", 64)
            patch.setattr(pieces_module, "PIECE_NBYTES", 64)
        source = in_pieces(whole, dtype, boxes, rng, path, WAYS)
        expected = whole.tobytes()
        assert source.nbytes == len(expected)
        assert b"".join(source.chunks()) == expected
        source.check()
        for _ in range(5):
            start = rng.randint(0, len(expected))
            count = rng.randint(0, len(expected) - start)
            assert source.read(start, count) == expected[start : start + count]
        extents = source.extents()
        if extents is not None:
            found = b"".join(extent.file.read(extent.offset, extent.nbytes) for extent in extents)
            assert found == expected


@settings(max_examples=examples(400), deadline=None)
@given(shape=SHAPES, seed=SEEDS)
def test_tilings_with_a_hole_or_an_overlap_are_refused(shape: tuple[int, ...], seed: int) -> None:
    rng = random.Random(seed)
    boxes = tiling(shape, rng)
    left = boxes[1:]
    with pytest.raises(MalformedFile) as error:
        check_tiling("w", shape, left)
    assert error.value.kind == "missing-piece"
    with pytest.raises(MalformedFile) as error:
        check_tiling("w", shape, [*boxes, rng.choice(boxes)])
    assert error.value.kind == "bad-piece"
    assert "overlap" in error.value.message
    counts = np.zeros(shape, int)
    moved = [_moved(box, shape, rng) for box in boxes]
    for offsets, sizes in moved:
        counts[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] += 1
    if (counts == 1).all():
        check_tiling("w", shape, moved)
        return
    with pytest.raises(MalformedFile) as error:
        check_tiling("w", shape, moved)
    assert error.value.kind == ("missing-piece" if counts.sum() < counts.size else "bad-piece")


def _moved(box: Box, shape: tuple[int, ...], rng: random.Random) -> Box:
    """Return a box that may be elsewhere, or of another size."""
    if not shape or rng.random() < 0.7:
        return box
    axis = rng.randrange(len(shape))
    size = rng.randint(1, shape[axis])
    return replaced(box[0], axis, rng.randint(0, shape[axis] - size)), replaced(box[1], axis, size)


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((4,), ((-1,), (2,))),
        ((4,), ((0,), (-1,))),
        ((4,), ((3,), (2,))),
        ((4,), ((2**63 - 1,), (2,))),
        ((4,), ((0, 0), (4, 1))),
        ((2**62, 4), ((0, 0), (2**62, 4))),
        ((1,) * 65, ((0,) * 65, (1,) * 65)),
    ],
    ids=str,
)
def test_boxes_that_are_not_inside_are_refused(shape: tuple[int, ...], box: Box) -> None:
    with pytest.raises(MalformedFile) as error:
        check_tiling("w", shape, [box])
    assert error.value.kind == "bad-piece"


def test_sizes_near_the_largest_are_exact() -> None:
    largest = 2**63 - 1
    check_tiling("w", (largest,), [((0,), (largest - 1,)), ((largest - 1,), (1,))])
    with pytest.raises(MalformedFile, match="hole"):
        check_tiling("w", (largest,), [((0,), (largest - 1,))])
    with pytest.raises(MalformedFile, match="overlap"):
        check_tiling("w", (largest,), [((0,), (largest - 1,)), ((largest - 2,), (1,))])


@pytest.mark.parametrize("kind", ["rows", "grid", "bricks", "pinwheels", "random"])
def test_tilings_of_many_boxes_are_judged_quickly(kind: str) -> None:
    count, shape, rng = 2_500, (1 << 20, 1 << 20), random.Random(5)
    boxes: list[Box]
    if kind == "rows":
        boxes = [((at * 208, 0), (208, 1 << 20)) for at in range(count)]
        shape = (208 * count, 1 << 20)
    elif kind == "grid":
        boxes = [((row, column), (1, 1)) for row in range(50) for column in range(50)]
        shape = (50, 50)
    elif kind == "bricks":
        boxes = [((row, at), (1, 2)) for row in range(50) for at in range(row % 2, 199, 2)]
        boxes += [((row, at), (1, 1)) for row in range(1, 50, 2) for at in (0, 199)]
        shape = (50, 200)
    elif kind == "pinwheels":
        boxes, inner = [], ((0, 0), (count // 2, count // 2))
        while len(boxes) < count:
            *outer, inner = pinwheel(inner, 0, 1)
            boxes += outer
        boxes.append(inner)
        shape = (count // 2, count // 2)
    else:  # boxes of as many elements in all, anywhere
        side = (1 << 20) // 100
        boxes = [((rng.randrange(side * 49), rng.randrange(side * 49)), (side, side)) for _ in range(2_500)]
        shape = (side * 50, side * 50)
    rng.shuffle(boxes)
    started = time.process_time()
    if kind == "random":
        with pytest.raises(MalformedFile, match="overlap"):
            check_tiling("w", shape, boxes)
    else:
        check_tiling("w", shape, boxes)
        with pytest.raises(MalformedFile, match="overlap"):
            check_tiling("w", shape, [*boxes, boxes[0]])
        with pytest.raises(MalformedFile, match="hole"):
            check_tiling("w", shape, boxes[1:])
    assert time.process_time() - started < 3  # each compared with each: ten


def test_boxes_cut_along_very_many_dimensions_are_refused() -> None:
    rank = 40
    boxes: list[Box] = [
        ((1,) * axis + (0,) * (rank - axis), (1,) * (axis + 1) + (2,) * (rank - axis - 1)) for axis in range(rank)
    ]
    boxes.append(((1,) * rank, (1,) * rank))
    with pytest.raises(LimitExceeded, match="41 pieces, which are cut along 40 dimensions"):
        check_tiling("w", (2,) * rank, boxes)


@settings(max_examples=examples(400), deadline=None)
@given(shape=SHAPES, seed=SEEDS)
def test_runs_of_elements_as_boxes(shape: tuple[int, ...], seed: int) -> None:
    rng, shape = random.Random(seed), shape or (1,)
    numbers = np.arange(np.prod(shape)).reshape(shape)
    start = rng.randint(0, numbers.size)
    stop = rng.randint(start, numbers.size)
    boxes = list(boxes_of(shape, start, stop))
    found = [
        numbers[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].ravel()
        for offsets, sizes in boxes
    ]
    assert np.concatenate([[], *found]).tolist() == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) + 1


def test_a_band_looks_at_few_of_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 20_000
    infos = TensorInfo(
        BY_NAME["uint8"], (1, 8), (8, 1), 0, StorageRef("0", "cpu", 8, BytesSource(b"abcdefgh"), 0), "cpu"
    )
    pieces = [Piece((at, 0), (1, 8), "file", lambda: infos) for at in range(count)]
    source = PiecesSource((count, 8), BY_NAME["uint8"], pieces)
    looked_at = 0
    real = pieces_module.intersection

    def counted(one: Box, other: Box) -> Box | None:
        nonlocal looked_at
        looked_at += 1
        return real(one, other)

    monkeypatch.setattr(pieces_module, "intersection", counted)
    assert source.read(10_000 * 8 + 3, 16) == b"defghabcdefghabc"
    assert looked_at < 2_500


def test_a_damaged_piece_is_named(tmp_path: Path) -> None:
    rng = random.Random(7)
    whole = array((600, 500), "float32", rng)
    for boxes in ([((0, 0), (600, 200)), ((0, 200), (600, 300))], [((0, 0), (100, 500)), ((100, 0), (500, 500))]):
        for way in ("plain", "transposed", "big-endian"):
            path = tmp_path / f"{way}{len(boxes[0])}"
            source = in_pieces(whole, "float32", boxes, rng, path, (way,))
            infos = [source.info(index) for index in range(2)]
            info = infos[1]._replace(storage=infos[1].storage and infos[1].storage._replace(crc32=1))
            source._infos[1] = info
            if way == "plain":
                with pytest.raises(DamagedFile, match="'file'"):
                    list(source.chunks())
            with pytest.raises(DamagedFile, match="'file'"):
                source.check()


def test_a_piece_that_repeats_few_bytes_is_refused() -> None:
    storage = StorageRef("0", "cpu", 4, BytesSource(b"abcd"), 0)
    info = TensorInfo(BY_NAME["uint8"], (1 << 20, 1 << 20), (0, 0), 0, storage, "cpu")
    source = PiecesSource(info.shape, info.dtype, [Piece((0, 0), info.shape, "file", lambda: info)], name="w")
    with pytest.raises(LimitExceeded, match="repeats 4 bytes"):
        source.read(0, 10)


@pytest.mark.parametrize("change", [{"shape": (3, 2)}, {"dtype": BY_NAME["int32"]}, {"layout": "sparse_coo"}])
def test_pieces_that_contradict_what_was_said_are_refused(change: dict[str, object]) -> None:
    storage = StorageRef("0", "cpu", 24, BytesSource(bytes(24)), 0)
    info = TensorInfo(BY_NAME["float32"], (2, 3), (3, 1), 0, storage, "cpu")._replace(**change)  # type: ignore[arg-type]
    source = PiecesSource((2, 3), BY_NAME["float32"], [Piece((0, 0), (2, 3), "file", lambda: info)], name="w")
    with pytest.raises(MalformedFile, match="the piece of 'w'"):
        source.read(0, 24)
