"""Boxes: the last that fits, the first that does not, and how few they are."""

from __future__ import annotations

import numpy as np
import pytest

from ckptool import MalformedFile
from ckptool.tensors.pieces import Box, BoxIndex, check_tiling, intersection
from ckptool.tensors.reading import copy_box
from ckptool.tensors.tensor import MAX_RANK, row_major
from tests.each import each

PLACE = "ckptool.tensors.pieces"


def refused(shape: tuple[int, ...], boxes: list[Box]) -> MalformedFile:
    with pytest.raises(MalformedFile) as caught:
        check_tiling("w", shape, boxes)
    return caught.value


# Tilings


def test_a_shape_may_have_64_dimensions_and_not_one_more() -> None:
    check_tiling("w", (1,) * MAX_RANK, [((0,) * MAX_RANK, (1,) * MAX_RANK)])
    assert refused((1,) * (MAX_RANK + 1), []).kind == "bad-piece"


@each("box", [((0,), (4, 1)), ((0, 0), (4,)), ((0, 0, 0), (4, 1)), ((0, 0), (4, 1, 1))])
def test_a_box_has_the_dimensions_of_its_tensor(box: Box) -> None:
    assert "dimensions" in refused((4, 1), [box]).message


@each("box", [((-1,), (2,)), ((0,), (-1,)), ((2,), (-1,)), ((0,), (-2,)), ((3,), (2,)), ((4,), (1,)), ((0,), (5,))])
def test_a_box_lies_inside_to_both_ends(box: Box) -> None:
    assert "is not inside" in refused((4,), [box]).message


def test_a_box_may_reach_to_both_ends_and_be_empty_there() -> None:
    check_tiling("w", (4,), [((0,), (4,)), ((4,), (0,)), ((0,), (0,))])
    check_tiling("w", (4,), [((0,), (1,)), ((1,), (3,))])


def test_a_hole_is_told_from_an_overlap() -> None:
    hole = refused((4,), [((0,), (1,)), ((2,), (2,))])
    assert (hole.kind, hole.needed, hole.actual) == ("missing-piece", 4, 3)
    assert refused((4,), [((0,), (2,)), ((1,), (2,))]).message.endswith("two pieces overlap")
    assert refused((), [((), ()), ((), ())]).message.endswith("two pieces overlap")


# Boxes in boxes


def test_an_index_finds_what_meets_a_box_in_order() -> None:
    boxes = [((row, column), (1, 2)) for row in range(30) for column in range(0, 20, 2)]
    for box in [((0, 0), (1, 1)), ((3, 5), (7, 9)), ((0, 0), (30, 20)), ((29, 19), (1, 1))]:
        expected = [(at, common) for at, one in enumerate(boxes) if (common := intersection(one, box)) is not None]
        assert list(BoxIndex(boxes).meeting(box)) == expected


# Elements to their places


@each("itemsize", [1, 2, 4, 8, 16])
@each(
    ("shape", "box"),
    [
        ((4,), ((1,), (3,))),
        ((3, 700), ((1, 0), (2, 700))),
        ((3, 700), ((0, 1), (3, 600))),
        ((2100, 5), ((0, 1), (2100, 3))),
        ((1024, 3), ((0, 1), (1024, 1))),
        ((1025, 3), ((0, 1), (1025, 1))),
        ((2, 1100, 3, 2), ((0, 3, 1, 0), (2, 1090, 1, 2))),
        ((5, 1, 4), ((1, 0, 1), (3, 1, 2))),
        ((), ((), ())),
    ],
)
def test_a_box_is_put_where_numpy_puts_it(shape: tuple[int, ...], box: Box, itemsize: int) -> None:
    offsets, sizes = box
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (*sizes, itemsize), dtype=np.uint8)
    expected = np.zeros((*shape, itemsize), np.uint8)
    expected[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] = values
    steps = row_major(shape)
    begin = sum(at * step for at, step in zip(offsets, steps, strict=True))

    buffer = bytearray(expected.nbytes)
    dims = list(zip(sizes, row_major(sizes), steps, strict=True))
    copy_box(memoryview(values.tobytes()), 0, memoryview(buffer), begin, dims, itemsize)
    assert bytes(buffer) == expected.tobytes()
