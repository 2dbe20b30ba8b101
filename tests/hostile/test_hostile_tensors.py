"""Tensors and storages that contradict themselves, each other, or the bytes that are there."""

from __future__ import annotations

from itertools import product
from struct import pack, unpack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool import open_checkpoint
from tests.build import call, floats, legacy, pickled, raw, storage, tensor, torch_zip, zip_file
from tests.formats.said import refused
from tests.hostile.cases.tensors import (
    FLOATS,
    LOAD,
    NUMPY,
    ROOT_ONLY,
    T,
    zipped,
)
from tests.hostile.conftest import MIB, Opened
from tests.scale import examples


def fits(count: int, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> bool:
    """Say whether every element lies among ``count``, by looking at each."""
    return all(
        0 <= offset + sum(index * step for index, step in zip(position, stride, strict=True)) < count
        for position in product(*map(range, size))
    )


@settings(max_examples=examples(1000))
@given(
    st.integers(0, 12),
    st.integers(0, 3).flatmap(lambda n: st.tuples(*[st.tuples(*[st.integers(0, high)] * n) for high in (4, 6)])),
    st.integers(0, 8),
)
def test_a_tensor_is_accepted_just_if_all_its_elements_are_there(
    count: int, dims: tuple[tuple[int, ...], tuple[int, ...]], offset: int
) -> None:
    size, stride = dims
    data = torch_zip(tensor(storage(numel=count), size, stride, offset), {"0": floats(count)})
    if not fits(count, size, stride, offset):
        assert refused(data).kind == "malformed-tensor"
        return
    found = open_checkpoint(data).tensors[""]
    positions = product(*map(range, size))
    expected = [offset + sum(i * step for i, step in zip(at, stride, strict=True)) for at in positions]

    assert list(unpack(f"<{len(expected)}f", found.read())) == expected


@pytest.mark.parametrize("size", [(1 << 34,), (1 << 17, 1 << 17), (1 << 20, 4, 1 << 12)])
def test_a_tensor_that_repeats_little_into_much_is_listed_and_not_read(size: tuple[int, ...], opened: Opened) -> None:
    data = zipped(tensor(storage(), size, (0,) * len(size)))

    assert open_checkpoint(data).tensors["w"].info.shape == size
    assert opened(data, nbytes=16 * MIB)["unread"] == "limit-exceeded"


def test_many_short_dimensions_are_read_quickly(opened: Opened) -> None:
    data = torch_zip(tensor(storage("0", 64, "ByteStorage"), (2,) * 21, (1,) * 21), {"0": bytes(64)})

    assert len(opened(data)["digests"]) == 1


def test_a_view_of_a_deflated_storage_inflates_it_once(opened: Opened) -> None:
    nbytes = 20 << 20
    view = tensor(storage("0", nbytes, "ByteStorage"), (40,), (nbytes // 40,))
    members = {"archive/data.pkl": pickled({"w": view}), "archive/data/0": bytes(nbytes), "archive/version": b"3"}
    found = opened(zip_file(members, deflated=["archive/data/0"]), nbytes=160 * MIB)

    assert len(found["digests"]) == 1


@pytest.mark.parametrize("name", NUMPY)
def test_arrays_that_stand_for_tensors_cost_little(name: str, opened: Opened) -> None:
    tree, tensors = NUMPY[name]
    found = opened(zipped(tree), nbytes=160 * MIB)

    assert (found["error"], found["tensors"]) == (None, tensors)


def test_one_inline_stream_for_many_tensors_is_read_once(opened: Opened) -> None:
    tree = storage(rest=ROOT_ONLY) + b"q\1" + b"0(" + b"N" * 200_000 + b"1h\1"
    stream = raw(legacy(tree, [("0", 4, floats())])) + b"q\1"
    tensors = b"".join(tensor(call(LOAD, b"h\1")) for _ in range(2_000))
    found = opened(pickled(b"(" + LOAD + stream + b"1](" + tensors + b"e"))

    assert (found["error"], found["tensors"]) == (None, 2_000)


def test_streams_inside_streams_are_refused(opened: Opened) -> None:
    stream = legacy(storage(rest=ROOT_ONLY), [("0", 4, floats())])
    for _ in range(400):
        stream = legacy(call(LOAD, raw(stream)))
    found = opened(pickled({"w": tensor(call(LOAD, raw(stream)))}))

    assert found["error"] is not None


def test_the_numbers_of_a_storage_are_those_of_its_record_whatever_the_protocol() -> None:
    for protocol in range(2, 6):
        found = open_checkpoint(torch_zip({"w": T}, FLOATS, protocol=protocol)).tensors["w"]
        assert (found.read(), found.info.storage.nbytes) == (floats(), len(pack("<4f", 0, 1, 2, 3)))
