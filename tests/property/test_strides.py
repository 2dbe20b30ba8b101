"""Any view of any storage reads as torch reads it."""

from __future__ import annotations

import io
from math import prod
from typing import NamedTuple
from unittest import mock

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptool import LazyTensor, StorageRef, TensorInfo, open_checkpoint
from ckptool.sources.source import BytesSource
from ckptool.tensors import reading
from ckptool.tensors.dtypes import BY_NAME
from tests.against_torch import oracle
from tests.scale import examples

ITEMSIZES = {1: "uint8", 2: "int16", 4: "float32", 8: "int64", 16: "complex128"}


class View(NamedTuple):
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    slack: int
    """Elements of the storage behind the last one of the view."""

    @property
    def last(self) -> int:
        """Index of the last element that the view reaches."""
        steps = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.offset + steps

    def storage(self) -> torch.Tensor:
        count = (self.last + 1 if 0 not in self.shape else self.offset) + self.slack
        pattern = torch.arange(count * self.itemsize, dtype=torch.int64) * 0x9E3779B1
        # Small floats and integers of all values alike: no NaN among them, whose bits an addition could change.
        return (pattern >> 7).to(torch.uint8).view(getattr(torch, ITEMSIZES[self.itemsize]))


def shapes() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 5), max_size=5).filter(lambda shape: prod(shape) <= 600)


@st.composite
def views(draw: st.DrawFn) -> View:
    shape = draw(shapes())
    steps = st.integers(0, 12) | st.integers(0, 200)
    stride = draw(st.lists(steps, min_size=len(shape), max_size=len(shape)))
    if draw(st.booleans()):  # a plain tensor, its dimensions perhaps in another order
        order = draw(st.permutations(range(len(shape))))
        step = 1
        for axis in order:
            stride[axis] = step
            step *= max(1, shape[axis])
    return View(
        draw(st.sampled_from(sorted(ITEMSIZES))),
        tuple(shape),
        tuple(stride),
        draw(st.integers(0, 20)),
        draw(st.integers(0, 3)),
    )


def lazy(view: View, storage: torch.Tensor) -> LazyTensor:
    data = oracle.tensor_bytes(storage)
    ref = StorageRef("0", "cpu", len(data), BytesSource(data), 0)
    return LazyTensor(
        "x", TensorInfo(BY_NAME[ITEMSIZES[view.itemsize]], view.shape, view.stride, view.offset, ref, "cpu")
    )


@settings(max_examples=examples(400))
@given(views())
@example(View(16, (2, 3), (1, 2), 1, 0))
@example(View(4, (1, 1, 1), (7, 9, 11), 3, 0))
@example(View(8, (3, 0, 2), (5, 5, 5), 0, 0))
@example(View(2, (5, 5), (0, 0), 4, 1))
@example(View(1, (), (), 0, 0))
def test_any_view_of_any_storage_reads_as_torch_reads_it(view: View) -> None:
    storage = view.storage()

    assert lazy(view, storage).read() == oracle.tensor_bytes(storage.as_strided(view.shape, view.stride, view.offset))


@settings(max_examples=examples(400))
@given(views(), st.sampled_from([0, 1, 16, 100]))
def test_slice_by_slice_it_reads_the_same(view: View, span: int) -> None:
    storage = view.storage()
    expected = oracle.tensor_bytes(storage.as_strided(view.shape, view.stride, view.offset))

    with mock.patch.object(reading, "_SPAN_NBYTES", span):
        assert lazy(view, storage).read() == expected


@settings(max_examples=examples(200))
@given(views(), st.booleans())
def test_saved_and_opened_it_reads_the_same(view: View, legacy: bool) -> None:
    stream = io.BytesIO()
    saved = view.storage().as_strided(view.shape, view.stride, view.offset)
    torch.save({"x": saved}, stream, _use_new_zipfile_serialization=not legacy)

    oracle.assert_same(open_checkpoint(stream), {"x": saved})
