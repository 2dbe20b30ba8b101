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
