"""Formats: the last size that is right, and the first that is wrong."""

from __future__ import annotations

import json
from struct import pack
from typing import Any

import pytest

from ckptool import (
    AmbiguousFile,
    Checkpoint,
    CkptoolError,
    LimitExceeded,
    Limits,
    MalformedFile,
    TruncatedFile,
    UnsupportedFeature,
    open_checkpoint,
)
from tests import build
from tests.each import each
from tests.formats.test_torch_tar import packed, reference, storage, tensor

MOST = (1 << 63) - 1


def opened(data: bytes, **limits: int) -> Checkpoint:
    return open_checkpoint(data, limits=Limits(**limits))


def refused(data: bytes, cls: type[CkptoolError] = MalformedFile, **limits: int) -> CkptoolError:
    with pytest.raises(cls) as caught:
        opened(data, **limits)
    assert type(caught.value) is cls
    return caught.value


# safetensors


def described(header: Any, data: bytes = b"", *, more: int = 0) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return pack("<Q", len(text) + more) + text + data


def one(shape: list[Any], offsets: list[Any], dtype: str = "F32", **fields: Any) -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets} | fields}


SOUND = described(one([2], [0, 8]), bytes(8))


def test_a_header_may_reach_to_the_end_and_be_as_long_as_is_allowed_and_no_longer() -> None:
    empty = described("{}")
    assert len(opened(empty).tensors) == 0
    error = refused(described("{}", more=1), TruncatedFile)
    assert (error.needed, error.actual) == (11, 10)
    assert "its header ends" in str(error)
    length = len(SOUND) - 16
    assert list(opened(SOUND, header_nbytes=length).tensors) == ["w"]
    error = refused(SOUND, LimitExceeded, header_nbytes=length - 1)
    assert (error.needed, error.actual) == (length, length - 1)


def test_what_announces_a_header_beyond_all_measure_is_no_safetensors_file() -> None:
    assert refused(pack("<Q", (1 << 40) - 1) + b"{", LimitExceeded).needed == (1 << 40) - 1
    with pytest.raises(CkptoolError) as caught:
        opened(pack("<Q", 1 << 40) + b"{")
    assert not isinstance(caught.value, LimitExceeded)
    assert refused(pack("<Q", 5) + b"{", TruncatedFile).actual == 9


def test_as_many_tensors_and_as_long_names_as_allowed_are_read() -> None:
    assert len(opened(SOUND, tensors=1, name_nbytes=1).tensors) == 1
    assert refused(SOUND, LimitExceeded, tensors=0).actual == 0
    assert refused(SOUND, LimitExceeded, name_nbytes=0).needed == 1
    data = zipped({"abc": TREE})
    assert list(opened(data, name_nbytes=5, tensors=1).tensors) == ["abc.w"]
    assert refused(data, LimitExceeded, name_nbytes=4).needed == 5
    refused(data, LimitExceeded, tensors=0)


def test_tensors_reach_just_to_the_end_one_behind_the_other() -> None:
    error = refused(SOUND[:-1], TruncatedFile)
    assert (error.needed, error.actual) == (len(SOUND), len(SOUND) - 1)
    assert refused(SOUND + b"x", AmbiguousFile).offset == len(SOUND)
    for second, words in ((7, "overlaps"), (9, "leaves 1 bytes")):
        header = one([2], [0, 8]) | {"v": {"dtype": "U8", "shape": [4], "data_offsets": [second, second + 4]}}
        assert words in str(refused(described(header, bytes(20)), AmbiguousFile))


@each("offsets", [[0], [0, 8, 8], [-1, 7], [0, MOST + 1], [MOST + 1, MOST + 9], [MOST + 1, 0], [0, -1], [True, 8]])
def test_a_range_is_two_sizes_and_just_as_large_as_its_tensor(offsets: list[Any]) -> None:
    assert "data_offsets" in str(refused(described(one([2], offsets), bytes(8))))
    for others in ([0, 7], [0, 9], [8, 0], [0, 4]):
        refused(described(one([2], others), bytes(20)))


@each(("depth", "read"), [(0, True), (1, True), (125, True), (126, False), (127, False)])
def test_fields_that_nobody_knows_may_be_nested_to_a_depth(depth: int, read: bool) -> None:
    data = described(one([2], [0, 8], more=json.loads("[" * depth + "1" + "]" * depth)), bytes(8))
    if read:
        assert list(opened(data).tensors) == ["w"]
    else:
        refused(data)


def test_fields_that_nobody_knows_are_told_of() -> None:
    assert opened(SOUND).notes == ()
    assert "more" in opened(described(one([2], [0, 8], more=1), bytes(8))).notes[0]
    assert opened(described({"__metadata__": {"a": "b", "c": "d"}})).notes == ()


def test_an_entry_may_be_a_list_of_three() -> None:
    entry = ["F32", [2], [0, 8]]
    assert list(opened(described({"w": entry}, bytes(8))).tensors) == ["w"]
    for wrong in (entry[:2], [*entry, 1]):
        refused(described({"w": wrong}, bytes(8)))
    twice = described('{{"a": {0}, "b": {0}, "b": {0}}}'.format(json.dumps(one([2], [0, 8])["w"])), bytes(8))
    assert "'b' twice" in str(refused(twice, AmbiguousFile))


@pytest.mark.parametrize("last", [1, 3])
def test_halves_of_a_byte_come_in_pairs(last: int) -> None:
    assert opened(described(one([2, 2], [0, 2], "F4"), bytes(2))).tensors["w"].info.shape == (2, 1)
    refused(described(one([2, last], [0, last], "F4"), bytes(last)))
    refused(described(one([], [0, 1], "F4"), bytes(1)))


# Tars of 0.1.x


@each(("ndim", "read"), [(0, True), (1, True), (64, True), (65, False), (-1, False)])
def test_a_tensor_of_a_tar_has_up_to_64_dimensions(ndim: int, read: bool) -> None:
    row = tensor(10, 1, *([1] * max(ndim, 0) * 2), 0, ndim=ndim)
    data = packed([storage()], [row], {"w": reference(10)})
    if read:
        assert len(opened(data).tensors["w"].info.shape) == ndim
    else:
        assert refused(data).kind == "malformed-tar"


def test_a_table_of_a_tar_may_be_empty_and_has_no_more_than_it_counts() -> None:
    assert len(opened(packed([], [], {})).tensors) == 0
    for counts in ((-1, 0), (0, -1)):
        assert "count" in str(refused(packed([], [], {}, counts=counts)))


def test_a_count_may_be_as_large_as_its_table() -> None:
    table = build.pickled([])
    for count, words in (
        (len(build.pickled(0)) + len(table), "entry"),
        (len(build.pickled(0)) + len(table) + 1, "count"),
    ):
        data = packed([], [], {}, counts=(count, 0))
        with pytest.raises(CkptoolError) as caught:
            opened(data)
        assert words in str(caught.value)


def test_numbers_of_a_tar_may_end_with_their_member_and_no_later() -> None:
    whole = {
        "storages": build.pickled(1) + storage() + build.pickled([]),
        "tensors": build.pickled(1) + tensor(10, 1, 6, 1, 0),
        "pickle": build.pickled({"w": reference(10)}),
    }
    assert opened(build.tar_file(whole)).tensors["w"].read() == build.floats(6)

    for cut in ({"tensors": whole["tensors"][:-1]}, {"storages": build.pickled(1) + storage()[:-1]}):
        error = refused(build.tar_file(whole | cut), TruncatedFile)
        assert error.needed == error.actual + 1
    alone = {"tensors": build.pickled(0), "pickle": build.pickled({}), "storages": build.pickled(1) + storage()}
    assert refused(build.tar_file(alone), TruncatedFile).kind == "truncated-pickle"  # the list of views is missing


def test_a_tar_of_a_table_lacks_the_others_and_one_of_a_pickle_alone_is_none() -> None:
    tables = {name: build.pickled(0) for name in ("pickle", "storages", "tensors")}
    for left_out in tables:
        few = {name: data for name, data in tables.items() if name != left_out}
        assert refused(build.tar_file(few)).kind == "missing-member"
        alone = build.tar_file({left_out: tables[left_out]})
        if left_out == "pickle":
            assert opened(alone).format != "torch_tar"
        else:
            assert refused(alone).kind == "missing-member"  # torch.load() opens it as far as it goes


def test_what_lies_between_the_pickles_of_a_table_is_told_of() -> None:
    data = packed([storage()], [tensor(10, 1, 6, 1, 0), tensor(11, 1, 6, 1, 0)], {"w": reference(10)})
    blocks = [[len(block) for block in stream.blocks] for stream in opened(data).streams]

    assert blocks == [[], [8 + len(build.floats(6))], [8 + 3 * 8]]


# Legacy streams


LEGACY = build.legacy({"w": build.tensor(build.storage(rest=(None,)))}, [("0", 4, build.floats())])


def test_a_stream_may_end_with_its_last_storage_and_no_earlier() -> None:
    assert opened(LEGACY).tensors["w"].read() == build.floats()
    error = refused(LEGACY[:-1], TruncatedFile)
    assert (error.needed, error.actual) == (len(LEGACY), len(LEGACY) - 1)
    assert "0 of 1 storages are whole" in str(error)


@pytest.mark.parametrize("numel", [1, 127, 128, 255, 256, 32_768])
def test_any_size_from_a_big_endian_machine_is_read(numel: int) -> None:
    tree = {"w": build.tensor(build.storage(numel=numel, rest=(None,)), (numel,))}
    data = build.legacy(tree, [("0", numel, build.floats(numel))], little_endian=False)

    assert opened(data).tensors["w"].read() == build.floats(numel)


def test_whole_storages_of_a_stream_that_was_cut_are_counted() -> None:
    tree = {str(key): build.tensor(build.storage(str(key), rest=(None,))) for key in range(3)}
    data = build.legacy(tree, [(str(key), 4, build.floats()) for key in range(3)])

    for missing, whole in ((1, 2), (24, 2), (25, 1), (48, 1), (49, 0)):
        assert f"{whole} of 3 storages are whole" in str(refused(data[:-missing], TruncatedFile))


def test_streams_stand_inside_streams_up_to_a_depth() -> None:
    def nested(levels: int) -> bytes:
        stream = build.legacy(build.storage(rest=(None,)), [("0", 4, build.floats())])
        for _ in range(levels - 1):
            stream = build.legacy(build.call(build.named("torch.storage", "_load_from_bytes"), build.raw(stream)))
        return stream

    assert list(opened(build.pickled({"w": build.inline_tensor(nested(4))})).tensors) == ["w"]
    assert refused(build.pickled({"w": build.inline_tensor(nested(5))}), UnsupportedFeature).kind == "nested-stream"


# Zips of torch


@pytest.mark.parametrize(("version", "read"), [(b"3\n", True), (b"10", True), (b"11", False)])
def test_versions_are_read_up_to_the_newest_that_is_known(version: bytes, read: bool) -> None:
    data = build.torch_zip({}, members={"archive/version": version})
    if read:
        assert opened(data).format == "torch_zip"
    else:
        assert refused(data, UnsupportedFeature).needed == 11


@pytest.mark.parametrize("cut", [0, 1, 4, 29, 30, 31, 60])
def test_a_zip_without_its_end_says_what_its_pickle_announces(cut: int) -> None:
    tree = {"w": build.tensor(build.storage(numel=1 << 20))}
    data = build.zip_file({"a/data.pkl": build.pickled(tree), "a/data/0": bytes(500)})
    head = data[: data.index(b"PK\1\2")]

    error = refused(head, TruncatedFile)
    assert (error.needed, error.actual) == (4 << 20, len(head))
    assert refused(head[: len(head) - 500 - cut] if cut else head[:29], TruncatedFile).actual is not None


def test_a_zip_without_its_end_that_holds_all_that_is_announced_says_nothing_of_it() -> None:
    tree = {"w": build.tensor(build.storage(numel=4))}
    data = build.zip_file({"a/data.pkl": build.pickled(tree), "a/data/0": bytes(16)})
    head = data[: data.index(b"PK\1\2")]
    few = {"w": build.tensor(build.storage(numel=(len(head)) // 4))}

    assert "announces" not in str(refused(head, TruncatedFile))
    more = build.zip_file({"a/data.pkl": build.pickled(few), "a/data/0": b""})
    whole = more[: more.index(b"PK\1\2")]
    announced = len(head) // 4 * 4
    assert "announces" not in str(refused(whole.ljust(announced, b"\0"), TruncatedFile))
    assert "announces" in str(refused(whole.ljust(announced, b"\0")[: announced - 1], TruncatedFile))


# Plain pickles


def test_what_a_pickle_leaves_begins_where_it_ends_and_a_magic_number_that_is_called_stands_before_a_version() -> None:
    marked, called = build.pickled({"w": 1}), build.pickled(build.call(build.named("a", "b")))

    assert opened(marked).streams[0].rest is None
    assert opened(marked + b"x").streams[0].rest == len(marked)
    assert opened(called).format == "pickle"
    assert opened(called + b"x").streams[0].rest == len(called)
    assert opened(called + build.pickled(1000)).streams[0].rest == len(called)
    refused(called + build.pickled(1001), TruncatedFile)  # of what follows it in a stream of torch.save


TREE = {"w": build.tensor(build.storage())}


def zipped(tree: Any) -> bytes:
    return build.torch_zip(tree, {"0": build.floats()})


@pytest.mark.parametrize(
    ("tree", "roles"),
    [
        ({"w": TREE["w"], "x": 1, "y": 2}, ["model"]),
        ({"w": TREE["w"], "deep": TREE}, ["model", "model"]),
        ({"w": TREE["w"], "v": TREE["w"], "deep": TREE, "n": 1}, ["model", "model"]),
        ({"w": TREE["w"], "deep": TREE, "n": 1}, ["other", "model"]),
        ({"w": TREE["w"], 5: TREE["w"]}, ["other"]),
    ],
)
def test_a_mapping_is_a_state_dict_if_at_least_half_of_it_are_tensors(tree: dict[Any, Any], roles: list[str]) -> None:
    assert [found.role for found in opened(zipped(tree)).state_dicts] == roles
