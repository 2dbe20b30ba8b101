"""Tensors and storages that contradict themselves, each other, or the bytes that are there."""

from __future__ import annotations

from itertools import product
from struct import pack, unpack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptool import CkptoolError, LimitExceeded, open_checkpoint
from ckptool.tensors.dtypes import BY_STORAGE_CLASS
from tests.build import call, floats, legacy, pickled, raw, storage, tensor, torch_zip, zip_file
from tests.each import each
from tests.hostile.cases.tensors import (
    COO,
    FLOATS,
    INDICES,
    INLINE,
    LOAD,
    MALFORMED_SPARSE,
    NO_SIZES,
    NUMPY,
    OTHERS,
    ROOT_ONLY,
    SHARED_PARTS,
    STREAM_KEYS,
    WITH_INDICES,
    WRONG_NUMEL,
    T,
    sparse,
    streamed,
    subclassed,
    wrapped,
    zipped,
)
from tests.hostile.conftest import MIB, Opened
from tests.scale import examples, exhaustive


def refused(data: bytes) -> str:
    """Return the kind of the error that opening the file ends in."""
    with pytest.raises(CkptoolError) as caught:
        open_checkpoint(data)
    return caught.value.kind


@each("numel", WRONG_NUMEL)
def test_a_storage_is_exactly_as_large_as_its_record(numel: Any) -> None:
    kinds = {"storage-size", "malformed-storage"}

    assert refused(zipped(tensor(storage(numel=numel), (1,)))) in kinds
    assert refused(streamed(numel)) in kinds | {"truncated-legacy"}
    assert open_checkpoint(zipped(T)).tensors["w"].read() == floats()
    assert open_checkpoint(streamed(4)).tensors["w"].read() == floats(1)


@pytest.mark.parametrize("stored", [-(1 << 63), -1, 0, 3, 5, 1 << 34, (1 << 63) - 1])
def test_a_legacy_storage_is_as_large_as_the_tree_says(stored: int) -> None:
    assert refused(streamed(4, stored)) == "storage-size"


@pytest.mark.parametrize("numel", [1 << 34, (1 << 62) - 1])
def test_a_legacy_stream_that_promises_gigabytes_is_truncated(numel: int, opened: Opened) -> None:
    found = opened(streamed(numel, numel), nbytes=16 * MIB)

    assert found["error"] == ["TruncatedFile", "truncated-legacy"]


@each("name", STREAM_KEYS)
def test_every_storage_of_a_stream_is_filled_exactly_once(name: str) -> None:
    tree = {"a": tensor(storage("0", 4, rest=ROOT_ONLY)), "b": tensor(storage("1", 2, rest=ROOT_ONLY), (2,))}
    storages = [("0", 4, floats()), ("1", 2, floats(2))]

    assert len(open_checkpoint(legacy(tree, storages)).tensors) == 2
    assert refused(legacy(tree, storages, keys=STREAM_KEYS[name])) in {"malformed-legacy", "storage-size"}


def test_storages_of_a_stream_may_stand_in_any_order() -> None:
    tree = {"a": tensor(storage("0", 4, rest=ROOT_ONLY)), "b": tensor(storage("1", 2, rest=ROOT_ONLY), (2,))}
    found = open_checkpoint(legacy(tree, [("1", 2, b"bbbbbbbb"), ("0", 4, floats())])).tensors

    assert (found["a"].read(), found["b"].read()) == (floats(), b"bbbbbbbb")


@each(("offset", "numel"), [(0, 5), (4, 1), (1, 4), (-1, 2), (0, -1), (1 << 62, 1), (True, 1), (0, 1.0)])
def test_a_view_of_a_storage_lies_inside_it(offset: Any, numel: Any) -> None:
    view = storage(rest=(("5", offset, numel),))

    assert refused(legacy({"w": tensor(view, (1,))}, [("0", 4, floats())])) in {"storage-size", "malformed-storage"}


@pytest.mark.parametrize("first", sorted(BY_STORAGE_CLASS))
def test_one_storage_has_one_type(first: str) -> None:
    for second in set(BY_STORAGE_CLASS) - {first}:
        numel = 16 // BY_STORAGE_CLASS[first].itemsize, 16 // BY_STORAGE_CLASS[second].itemsize
        for rest in ((), ROOT_ONLY):
            tree = [
                tensor(storage(numel=count, dtype=dtype, rest=rest), (1,))
                for dtype, count in zip((first, second), numel, strict=True)
            ]
            data = legacy(tree, [("0", numel[0], floats())]) if rest else torch_zip(tree, FLOATS)
            assert refused(data) == "ambiguous-storage"


def test_one_storage_is_on_one_device_and_has_one_size() -> None:
    for again in ({"location": "cuda:0"}, {"numel": 8, "dtype": "HalfStorage", "location": "cuda:0"}, {"numel": 2}):
        one, other = (tensor(storage(rest=ROOT_ONLY, **more), (1,)) for more in ({}, again))  # type: ignore[arg-type]
        assert refused(legacy([one, other], [("0", 4, floats())])) == "ambiguous-storage"
        if again != {"numel": 2}:
            assert refused(torch_zip([T, tensor(storage(**again), (1,))], FLOATS)) == "ambiguous-storage"  # type: ignore[arg-type]


@each("key", ["1", "", "../0", "0/", "O", 1, None, True, 0.0, ("0",)])
def test_a_storage_has_its_own_record(key: Any) -> None:
    assert refused(zipped(tensor(storage(key)))) in {"missing-storage", "malformed-storage"}


@pytest.mark.parametrize("dtype", ["NoStorage", "floatstorage", "FloatStorage.x", ""])
def test_a_storage_of_no_known_class_is_refused(dtype: str) -> None:
    assert refused(zipped(tensor(storage(dtype=dtype)))) == "storage-class"


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
        assert refused(data) == "malformed-tensor"
        return
    found = open_checkpoint(data).tensors[""]
    positions = product(*map(range, size))
    expected = [offset + sum(i * step for i, step in zip(at, stride, strict=True)) for at in positions]

    assert list(unpack(f"<{len(expected)}f", found.read())) == expected


@each("number", NO_SIZES)
def test_sizes_strides_and_offsets_are_plain_numbers(number: Any) -> None:
    assert refused(zipped(tensor(storage(), (number,)))) == "malformed-tensor"
    assert refused(zipped(tensor(storage(), (1,), (number,)))) == "malformed-tensor"
    assert refused(zipped(tensor(storage(), (0,), (number,)))) == "malformed-tensor"
    assert refused(zipped(tensor(storage(), (1,), (1,), number))) == "malformed-tensor"


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((5,), (1,), 0),
        ((4,), (1,), 1),
        ((1,), (1,), 4),
        ((2, 2), (3, 1), 0),
        ((2,), (1 << 62,), 0),
        (((1 << 62) + 1,), (4,), 0),
        ((1 << 62, 1 << 62), (0, 1), 0),
        ((), (), 4),
        ((4,), (), 0),
        ((), (1,), 0),
        ((2, 2), (1,), 0),
        ((1,) * 65, (1,) * 65, 0),
        ((1,) * 100_000, (1,) * 100_000, 0),
        (None, (1,), 0),
        ((4,), None, 0),
        (4, 1, 0),
        ("4", "1", 0),
        ({4: 4}, (1,), 0),
    ],
)
def test_a_tensor_outside_its_storage_is_refused(size: Any, stride: Any, offset: Any) -> None:
    assert refused(zipped(tensor(storage(), size, stride, offset))) == "malformed-tensor"


def test_a_tensor_may_have_64_dimensions_and_sizes_in_a_list() -> None:
    assert open_checkpoint(zipped(tensor(storage(), (1,) * 64, (1,) * 64))).tensors["w"].read() == floats(1)
    assert open_checkpoint(zipped(tensor(storage(), [4], [1]))).tensors["w"].read() == floats()


def test_an_empty_tensor_may_begin_anywhere() -> None:
    assert open_checkpoint(zipped(tensor(storage(), (0, 1 << 40), (9, 9), 99))).tensors["w"].read() == b""


@pytest.mark.parametrize("size", [(1 << 34,), (1 << 17, 1 << 17), (1 << 20, 4, 1 << 12)])
def test_a_tensor_that_repeats_little_into_much_is_listed_and_not_read(size: tuple[int, ...], opened: Opened) -> None:
    data = zipped(tensor(storage(), size, (0,) * len(size)))

    assert open_checkpoint(data).tensors["w"].info.shape == size
    with pytest.raises(LimitExceeded):
        open_checkpoint(data).tensors["w"].read()
    assert opened(data, nbytes=16 * MIB)["error"] == ["LimitExceeded", "limit-exceeded"]


def test_many_short_dimensions_are_read_quickly(opened: Opened) -> None:
    data = torch_zip(tensor(storage("0", 64, "ByteStorage"), (2,) * 21, (1,) * 21), {"0": bytes(64)})

    assert opened(data)["read"] == 1


def test_a_view_of_a_deflated_storage_inflates_it_once(opened: Opened) -> None:
    nbytes = 20 << 20
    view = tensor(storage("0", nbytes, "ByteStorage"), (40,), (nbytes // 40,))
    members = {"archive/data.pkl": pickled({"w": view}), "archive/data/0": bytes(nbytes), "archive/version": b"3"}
    found = opened(zip_file(members, deflated=["archive/data/0"]), nbytes=160 * MIB)

    assert found["read"] == 1


@each("name", MALFORMED_SPARSE)
def test_a_sparse_tensor_without_sound_parts_is_refused(name: str) -> None:
    assert refused(sparse(*MALFORMED_SPARSE[name])) == "malformed-tensor"
    assert open_checkpoint(sparse(COO, (INDICES, T, (4,)))).tensors["w"].info.total_nbytes == 32


@each("name", OTHERS)
def test_a_tensor_that_contradicts_itself_is_refused(name: str) -> None:
    assert refused(torch_zip({"w": OTHERS[name]}, WITH_INDICES)) == "malformed-tensor"


def test_tensors_may_stand_inside_tensors() -> None:
    assert open_checkpoint(zipped(wrapped(8))).tensors["w"].read() == floats()
    assert open_checkpoint(zipped(subclassed(8))).tensors["w"].read() == floats()


@pytest.mark.parametrize("make", [wrapped, subclassed])
@pytest.mark.parametrize("times", [50, 1000, pytest.param(100_000, marks=exhaustive)])
def test_tensors_too_deep_inside_tensors_are_refused(make: Any, times: int) -> None:
    assert refused(zipped(make(times))) == "malformed-tensor"


@pytest.mark.parametrize("name", SHARED_PARTS)
def test_parts_that_tensors_share_cost_little(name: str, opened: Opened) -> None:
    tree, is_refused = SHARED_PARTS[name]
    found = opened(zipped(tree), nbytes=128 * MIB)

    assert found["error"] == (["LimitExceeded", "limit-exceeded"] if is_refused else None)


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


@each("name", INLINE)
def test_a_plain_pickle_holds_nothing_but_whole_storages(name: str) -> None:
    with pytest.raises(CkptoolError):
        open_checkpoint(pickled({"w": tensor(call(LOAD, INLINE[name]))}))


@pytest.mark.parametrize("order", [True, False])
def test_the_word_of_the_machine_changes_no_bytes(order: bool) -> None:
    tree = {"w": tensor(storage(rest=ROOT_ONLY))}
    data = legacy(tree, [("0", 4, floats())], little_endian=order)

    assert open_checkpoint(data).tensors["w"].read() == floats()


def test_the_numbers_of_a_storage_are_those_of_its_record_whatever_the_protocol() -> None:
    for protocol in range(2, 6):
        found = open_checkpoint(torch_zip({"w": T}, FLOATS, protocol=protocol)).tensors["w"]
        assert (found.read(), found.info.storage.nbytes) == (floats(), len(pack("<4f", 0, 1, 2, 3)))
