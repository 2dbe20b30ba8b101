"""Tensors and their storages: the last size that is right, the first that is wrong, and how much is read for them."""

from __future__ import annotations

from array import array
from itertools import product
from typing import Any

import pytest

from ckptool import LazyTensor, LimitExceeded, Limits, MalformedFile, StorageRef, TensorInfo
from ckptool.tensors import reading, tensor
from ckptool.tensors.dtypes import BY_NAME
from tests.bounds.sources import Asked
from tests.each import each

DATA = bytes(range(240))
MOST = (1 << 63) - 1


def info(shape: Any, stride: Any, offset: Any = 0, *, dtype: str = "float32", data: bytes = DATA) -> TensorInfo:
    return TensorInfo(BY_NAME[dtype], shape, stride, offset, StorageRef("0", "cpu", len(data), Asked(data), 0), "cpu")


def bare(shape: Any, stride: Any, offset: Any = 0) -> TensorInfo:
    return info(shape, stride, offset)._replace(storage=None)


# What is a size


def test_sizes_strides_and_offsets_fit_into_63_bits() -> None:
    tensor.check_extent(bare((MOST,), (MOST,), MOST))
    tensor.check_extent(bare((0,), (0,), 0))
    for wrong in (MOST + 1, -1):
        for shape, stride, offset in (((wrong,), (1,), 0), ((1,), (wrong,), 0), ((1,), (1,), wrong)):
            with pytest.raises(MalformedFile):
                tensor.check_extent(bare(shape, stride, offset))
    for shape, stride in (((0,), (MOST + 1,)), ((MOST + 1,), (0,))):
        with pytest.raises(MalformedFile):
            tensor.check_extent(bare(shape, stride))


@pytest.mark.parametrize("rank", range(1, 9))
def test_elements_are_counted_below_2_63_in_any_number_of_dimensions(rank: int) -> None:
    size = int(MOST ** (1 / rank)) + 2
    steps = (0,) * rank
    fitting = tuple(size - 4 if rank > 1 else MOST for _ in range(rank))
    tensor.check_extent(bare(fitting, steps))
    assert size**rank > MOST
    with pytest.raises(MalformedFile):
        tensor.check_extent(bare((size,) * rank, steps))


@pytest.mark.parametrize(("sizes", "steps"), [(1, 2), (2, 1), (0, 1), (65, 65)])
def test_there_are_as_many_strides_as_sizes_and_at_most_64(sizes: int, steps: int) -> None:
    tensor.check_extent(bare((1,) * 64, (1,) * 64))
    with pytest.raises(MalformedFile):
        tensor.check_extent(bare((1,) * sizes, (1,) * steps))


def test_packed_elements_fill_their_storage_and_no_more() -> None:
    tensor.check_extent(info((2, 4), (4, 1), dtype="quint4x2", data=bytes(4)))
    tensor.check_extent(info((2, 3), (3, 1), dtype="quint4x2", data=bytes(4)))
    for data in (bytes(3), bytes(2)):
        with pytest.raises(MalformedFile):
            tensor.check_extent(info((2, 3), (3, 1), dtype="quint4x2", data=data))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64", "complex64", "complex128"])
def test_elements_of_every_size_are_turned_round(dtype: str) -> None:
    unit = BY_NAME[dtype].swap_nbytes
    found = info((240 // BY_NAME[dtype].itemsize,), (1,), dtype=dtype)
    assert found.storage is not None
    turned = found._replace(storage=found.storage._replace(big_endian=True))

    assert LazyTensor("x", turned).read() == b"".join(DATA[at : at + unit][::-1] for at in range(0, 240, unit))


# Reading in pieces


@each(
    ("nbytes", "pieces"),
    [
        (1000, [240]),
        (240, [240]),
        (239, [216, 24]),
        (72, [72, 72, 72, 24]),
        (48, [48] * 5),
        (47, [24] * 10),
        (24, [24] * 10),
        (23, [20, 4] * 10),
        (4, [4] * 60),
        (1, [4] * 60),
    ],
)
def test_pieces_are_as_large_as_they_may_be(nbytes: int, pieces: list[int]) -> None:
    found = list(LazyTensor("x", info((10, 6), (6, 1))).chunks(nbytes))

    assert [len(piece) for piece in found] == pieces
    assert b"".join(found) == DATA


def test_pieces_of_a_turned_tensor_are_those_of_its_own_rows() -> None:
    turned = LazyTensor("x", info((6, 10), (1, 6)))

    for nbytes in (1, 4, 12, 40, 79, 80, 120, 239, 240):
        found = list(turned.chunks(nbytes))
        assert b"".join(found) == turned.read()
        assert max(len(piece) for piece in found) <= max(nbytes, 4)


def test_what_has_no_rows_or_packs_them_comes_in_one_piece() -> None:
    assert list(LazyTensor("x", info((), ())).chunks(1)) == [DATA[:4]]
    assert list(LazyTensor("x", info((4, 6), (6, 1), dtype="quint4x2")).chunks(5)) == [DATA[:12]]


# Strided reading


def flat(shape: tuple[int, ...], stride: tuple[int, ...], offset: int, data: bytes) -> bytes:
    """Return the elements one by one."""
    numbers = array("f", data)
    places = (
        offset + sum(index * step for index, step in zip(at, stride, strict=True))
        for at in product(*(range(size) for size in shape))
    )
    return array("f", [numbers[place] for place in places]).tobytes()


@each("most", [0, 1 << 26])
@each("span", [0, 16, 60, 64, 1 << 24])
@each("long", [1, 4, 256])
def test_every_way_to_gather_elements_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, span: int, long: int, most: int
) -> None:
    monkeypatch.setattr(reading, "_SPAN_NBYTES", span)
    monkeypatch.setattr(reading, "_MOST_NBYTES", most)
    monkeypatch.setattr(reading, "_LONG", long)
    data = array("f", range(60)).tobytes()

    for shape, stride, offset in (
        ((4, 5), (1, 4), 0),
        ((5, 4), (12, 2), 3),
        ((2, 3, 2), (0, 20, 7), 1),
        ((1, 5, 1), (9, 11, 2), 2),
        ((15,), (4,), 3),
        ((2, 2, 2, 2), (1, 2, 4, 40), 5),
        ((3, 2, 2), (1, 0, 40), 5),
        ((2, 3), (0, 29), 1),
        ((2, 3, 3), (25, 1, 11), 0),
        ((2, 3, 2), (29, 1, 10), 0),
        ((5, 3, 2), (1, 5, 15), 0),
    ):
        assert LazyTensor("x", info(shape, stride, offset, data=data)).read() == flat(shape, stride, offset, data)


def test_a_span_is_read_whole_while_it_is_small_or_mostly_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SPAN_NBYTES", 100)
    monkeypatch.setattr(reading, "_PER_READ_NBYTES", 16)
    reads = {}
    for count, step in ((5, 6), (5, 5), (4, 8), (12, 4), (12, 5)):
        found = info((count,), (step,))
        LazyTensor("x", found).read()
        assert found.storage is not None
        assert isinstance(found.storage.source, Asked)
        reads[count, step] = found.storage.source.sizes

    assert reads[5, 6] == [100]  # 4 · (1 + 4 · 6): as much as is small
    assert reads[4, 8] == [100]
    assert reads[5, 5] == [84]
    assert reads[12, 4] == [180]  # 4 · (1 + 11 · 4), of which 48 are wanted
    assert reads[12, 5] == [4] * 12  # 224, more than four times 48, and more than 16 for each read


def test_scattered_elements_are_read_in_as_few_pieces_as_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SPAN_NBYTES", 40)
    monkeypatch.setattr(reading, "_PER_READ_NBYTES", 16)

    def reads(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
        found = info(shape, stride)
        LazyTensor("x", found).read()
        assert found.storage is not None
        assert isinstance(found.storage.source, Asked)
        return found.storage.source.sizes

    assert reads((3, 2), (0, 50)) == [4, 4]  # what a step of 0 repeats, once
    assert reads((4, 2), (1, 50)) == [16, 16]  # two runs, and not four pairs
    assert reads((5, 5), (5, 6)) == [180]  # 25 reads would be more work


def test_a_tensor_may_be_as_large_as_is_allowed_and_no_larger() -> None:
    repeated = LazyTensor("x", info((8, 60), (0, 1)))
    assert len(repeated.read(limits=Limits(expanded_nbytes=0, expansion_ratio=8))) == 8 * 240
    assert len(repeated.read(limits=Limits(expanded_nbytes=8 * 240, expansion_ratio=0))) == 8 * 240
    for limits in (
        Limits(expanded_nbytes=0, expansion_ratio=7),
        Limits(expanded_nbytes=8 * 240 - 1, expansion_ratio=0),
    ):
        with pytest.raises(LimitExceeded):
            repeated.read(limits=limits)
