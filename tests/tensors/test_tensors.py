"""What is said of a tensor is checked before a byte is read, and reading gives just the bytes of its elements."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool import LazyTensor, LimitExceeded, Limits, MalformedFile, StorageRef, TensorInfo, UnsupportedFeature
from ckptool.sources.source import BytesSource
from ckptool.tensors import tensor
from ckptool.tensors.dtypes import BY_NAME
from ckptool.tensors.tensor import identity
from tests.each import each
from tests.scale import examples

DATA = bytes(range(240))


def info(
    shape: Any, stride: Any, offset: Any = 0, *, dtype: str = "float32", data: bytes = DATA, **more: Any
) -> TensorInfo:
    storage = StorageRef("0", "cpu", len(data), BytesSource(data), 0)
    return TensorInfo(BY_NAME[dtype], shape, stride, offset, storage, "cpu", **more)


def read(found: TensorInfo, **limits: int) -> bytes:
    return LazyTensor("x", found).read(limits=Limits(**limits))


# Extents: offset + 1 + Σ (size - 1) · stride elements


@each(
    ("shape", "stride", "offset"),
    [
        ((), (), 59),
        ((60,), (1,), 0),
        ((4, 15), (15, 1), 0),
        ((15, 4), (1, 15), 0),
        ((2, 2), (58, 1), 0),
        ((1, 1), (1000, 1000), 59),
        ((60,), (0,), 59),
        ((0,), (1,), 60),
        ((0, 5), (10**9, 10**9), 10**12),
        ((10**9, 0), (1, 1), 0),
        ((1,) * 64, (1,) * 64, 0),
    ],
)
def test_a_tensor_inside_its_storage_is_accepted(shape: Any, stride: Any, offset: int) -> None:
    tensor.check_extent(info(shape, stride, offset))


@pytest.mark.parametrize(
    ("shape", "stride", "offset", "needed"),
    [
        ((), (), 60, 61),
        ((61,), (1,), 0, 61),
        ((60,), (1,), 1, 61),
        ((2, 2), (59, 1), 0, 61),
        ((2,), (2**62,), 0, 2**62 + 1),
        ((2**62, 2**62), (2**62, 2**62), 2**62, 2 * (2**62 - 1) * 2**62 + 2**62 + 1),
    ],
)
def test_a_tensor_that_reaches_over_its_storage_is_refused_with_its_numbers(
    shape: Any, stride: Any, offset: int, needed: int
) -> None:
    with pytest.raises(MalformedFile) as caught:
        tensor.check_extent(info(shape, stride, offset))
    assert (caught.value.kind, caught.value.needed, caught.value.actual) == ("malformed-tensor", needed, 60)


NO_SIZES: list[Any] = [-1, 2**63, 2**200, True, 1.0, "1", None, b"1", (1,)]


@each("bad", NO_SIZES)
@each("place", ["shape", "stride", "offset"])
def test_what_is_no_size_is_refused(place: str, bad: Any) -> None:
    fields = {"shape": (1, 1), "stride": (1, 1), "offset": 0} | {place: bad if place == "offset" else (bad, 1)}

    with pytest.raises(MalformedFile):
        tensor.check_extent(info(**fields))


def test_extents_agree_with_counting_one_by_one() -> None:
    for shape in itertools.product(range(4), repeat=2):
        for stride in itertools.product(range(5), repeat=2):
            for offset in range(4):
                places = [offset + i * stride[0] + j * stride[1] for i in range(shape[0]) for j in range(shape[1])]
                needed = max(places, default=-1) + 1
                tensor.check_extent(info(shape, stride, offset, data=bytes(4 * needed)))
                if needed:
                    with pytest.raises(MalformedFile):
                        tensor.check_extent(info(shape, stride, offset, data=bytes(4 * needed - 1)))


# What can be asked of it


@settings(max_examples=examples(500))
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=4))
def test_contiguous_means_what_torch_means(dims: list[tuple[int, int]]) -> None:
    shape, stride = tuple(size for size, _ in dims), tuple(step for _, step in dims)

    assert info(shape, stride).is_contiguous == torch.empty(200).as_strided(shape, stride).is_contiguous()


@each(
    ("dtype", "shape", "nbytes"),
    [
        ("float32", (2, 3), 24),
        ("bool", (), 1),
        ("complex128", (3,), 48),
        ("int64", (0, 9), 0),
        ("quint4x2", (5,), 3),
        ("quint2x4", (5,), 2),
        ("quint2x4", (4,), 1),
        ("float4_e2m1fn_x2", (5,), 5),
        ("quint4x2", (), 1),
        ("quint4x2", (2, 7), 8),
        ("quint2x4", (3, 2, 5), 12),
    ],
)
def test_sizes_are_of_the_elements_packed_together(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    found = info(shape, tensors_strides(shape), dtype=dtype)

    assert (found.nbytes, len(read(found))) == (nbytes, nbytes)


def test_parts_count_where_all_is_counted() -> None:
    part = info((3,), (1,))
    whole = TensorInfo(
        part.dtype, (3, 3), (), 0, None, "cpu", layout="sparse_coo", parts=(("values", part), ("more", part))
    )

    assert (whole.nbytes, whole.total_nbytes, whole.numel) == (0, 24, 9)
    assert info((3,), (1,), parts=(("scale", part),)).total_nbytes == 24


def test_numbers_in_a_file_cannot_be_chosen_to_have_one_hash() -> None:
    # Integers that differ by this have one hash, and a step over a single element may be any number.
    one = info((1, 1), (1, 1))
    hashes = {hash(identity(one._replace(stride=(1 + step * sys.hash_info.modulus, 1)))) for step in range(4)}

    assert len(hashes) == 4


def test_a_lazy_tensor_shows_what_it_is() -> None:
    assert repr(LazyTensor("a.b", info((2, 3), (3, 1)))) == "<LazyTensor 'a.b' float32 [2, 3] cpu>"


# What is not read


def test_a_tensor_without_bytes_says_so_and_points_to_its_parts() -> None:
    part = info((3,), (1,))
    bare = TensorInfo(part.dtype, (3, 3), (3, 1), 0, None, "meta")

    for found, has_hint in ((bare, False), (bare._replace(layout="sparse_coo", parts=(("values", part),)), True)):
        with pytest.raises(UnsupportedFeature) as caught:
            read(found)
        assert caught.value.kind == "no-plain-bytes"
        assert (caught.value.hint is not None) == has_hint


@pytest.mark.parametrize("size", [2**31, 2**40, 2**62])
def test_a_huge_tensor_of_one_element_is_refused_before_it_is_made(size: int) -> None:
    with pytest.raises(LimitExceeded):
        read(info((size,), (0,)))
    with pytest.raises(LimitExceeded):
        read(info((2,) * 60, (0,) * 60))


def test_views_of_types_of_less_than_a_byte_are_refused_by_name() -> None:
    for found in (info((4,), (1,), 1, dtype="quint4x2"), info((2, 2), (1, 2), dtype="quint4x2")):
        with pytest.raises(UnsupportedFeature) as caught:
            read(found)
        assert caught.value.kind == "no-plain-bytes"


def test_only_the_bytes_of_a_view_are_read() -> None:
    class Counting(BytesSource):
        taken = 0

        def read(self, offset: int, nbytes: int) -> bytes:
            Counting.taken += nbytes
            return super().read(offset, nbytes)

    source = Counting(bytes(1 << 20))
    storage = StorageRef("0", "cpu", 1 << 20, source, 0)
    row = TensorInfo(BY_NAME["float32"], (64,), (1,), 4096, storage, "cpu")
    LazyTensor("row", row).read()
    assert Counting.taken == 256
    LazyTensor("empty", row._replace(shape=(0,), stride=(1,))).read()
    assert Counting.taken == 256


def tensors_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape).stride()
