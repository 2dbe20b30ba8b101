"""What is said of a tensor is checked before a byte is read, and reading gives just the bytes of its elements."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool import LazyTensor, Limits, MalformedFile, StorageRef, TensorInfo, UnsupportedFeature
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


def test_numbers_in_a_file_cannot_be_chosen_to_have_one_hash() -> None:
    # Integers that differ by this have one hash, and a step over a single element may be any number.
    one = info((1, 1), (1, 1))
    hashes = {hash(identity(one._replace(stride=(1 + step * sys.hash_info.modulus, 1)))) for step in range(4)}

    assert len(hashes) == 4


# What is not read


def test_a_tensor_without_bytes_says_so_and_points_to_its_parts() -> None:
    part = info((3,), (1,))
    bare = TensorInfo(part.dtype, (3, 3), (3, 1), 0, None, "meta")

    for found, has_hint in ((bare, False), (bare._replace(layout="sparse_coo", parts=(("values", part),)), True)):
        with pytest.raises(UnsupportedFeature) as caught:
            read(found)
        assert caught.value.kind == "no-plain-bytes"
        assert (caught.value.hint is not None) == has_hint


def test_views_of_types_of_less_than_a_byte_are_refused_by_name() -> None:
    for found in (info((4,), (1,), 1, dtype="quint4x2"), info((2, 2), (1, 2), dtype="quint4x2")):
        with pytest.raises(UnsupportedFeature) as caught:
            read(found)
        assert caught.value.kind == "no-plain-bytes"


def tensors_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape).stride()
