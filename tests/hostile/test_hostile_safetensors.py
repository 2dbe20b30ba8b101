"""
Headers that lie or that readers could understand differently: what we accept, the reference library reads the same.

F1 to F8 are rows of the project's list of hostile input.
"""

from __future__ import annotations

import random
from itertools import permutations

import pytest
import safetensors

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
from ckptool.tensors.dtypes import BY_SAFETENSORS
from tests.each import each
from tests.formats.said import refused
from tests.hostile.cases.headers import ACCEPTED, DATA, NO_TEXT, REFUSED, SEEDS, SNIPPETS, entry, file, mutated, text
from tests.scale import times


def reference(data: bytes) -> dict[str, tuple[str, list[int], bytes]] | None:
    """Return what the reference library finds, or None if it refuses."""
    try:
        found = safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return None
    return {name: (view["dtype"], list(view["shape"]), bytes(view["data"])) for name, view in found}


def ours(data: bytes) -> Checkpoint | None:
    try:
        return open_checkpoint(data)
    except CkptoolError:
        return None


def assert_no_more_than_the_reference(data: bytes) -> bool:
    """
    Fail if we accept what it refuses, or find something else in it. Return whether we accept without an error.

    Metadata that is not text is such an error.
    """
    found = ours(data)
    if found is None or found.format != "safetensors":
        return False
    expected = reference(data)
    if any(remark.code == "CK118" for remark in found.remarks):
        assert expected is None
        return False
    assert expected is not None, data[:400]
    assert found.tensors.keys() == expected.keys(), data[:400]
    for name, tensor in found.tensors.items():
        code, shape, content = expected[name]
        if code == "F4":  # counted in values there, in pairs of them here
            shape = [*shape[:-1], shape[-1] // 2]
        assert (tensor.info.dtype, list(tensor.info.shape)) == (BY_SAFETENSORS[code], shape), data[:400]
        assert tensor.read() == content, data[:400]
    return True


@each("name", ACCEPTED)
def test_what_is_odd_but_has_one_reading_is_read_as_the_reference_reads_it(name: str) -> None:
    assert assert_no_more_than_the_reference(file(ACCEPTED[name]))


@each("name", NO_TEXT)
def test_metadata_that_is_no_text_is_an_error_and_keeps_nobody_from_the_tensors(name: str) -> None:
    data = file(text(__metadata__=NO_TEXT[name], x=entry()))
    found = open_checkpoint(data)

    assert reference(data) is None
    assert [remark.code for remark in found.remarks] == ["CK118"]
    assert {one.read() for one in found.tensors.values()} == {DATA[:8]}
    assert all(isinstance(value, str) for value in found.metadata.values())


@pytest.mark.parametrize(
    ("name", "offset"),
    [("a hole", 8), ("a hole in front", 4), ("the same bytes twice", 0), ("bytes behind the last tensor", 8)],
)
def test_ambiguities_say_where_they_are(name: str, offset: int) -> None:
    assert refused(REFUSED[name], AmbiguousFile).offset == 8 + int.from_bytes(REFUSED[name][:8], "little") + offset


def test_a_range_that_does_not_fit_says_both_sizes() -> None:
    with pytest.raises(MalformedFile) as caught:
        open_checkpoint(file(text(x=entry(shape=(3,), offsets=(0, 8)))))
    assert (caught.value.needed, caught.value.actual) == (12, 8)


@pytest.mark.parametrize("lead", [" ", "\n\t\r ", " " * 5_000, "\n" * 200_000])
def test_white_space_before_the_header_is_read_and_told_of(lead: str) -> None:
    data = file(lead + text(x=entry()))

    assert assert_no_more_than_the_reference(data)
    assert [f"{len(lead):,} bytes" in note or "1 byte " in note for note in open_checkpoint(data).notes] == [True]
    assert open_checkpoint(file(text(x=entry()))).notes == ()
    for length in (9, 10, len(lead) // 2 + 9, len(data) - 1):
        refused(data[:length])


@pytest.mark.parametrize(
    "fields",
    [
        '"x":1', '"x":null,"y":true', '"x":{"a":[1,2.5e3,"\\u00e9"]}', '"x":1e999', '"x":-0', '"x":NaN', '"x":01',
        f'"x":{"[" * 125}{"]" * 125}', f'"x":{"[" * 126}{"]" * 126}', '"":{}', '"x":"\\ud800"', '"x":',
    ],
)  # fmt: skip
def test_fields_that_nobody_knows_are_read_as_the_reference_reads_them(fields: str) -> None:
    data = file('{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],' + fields + "}}")

    assert assert_no_more_than_the_reference(data) == (reference(data) is not None)
    found = ours(data)
    assert found is None or any("nobody knows" in note for note in found.notes)


@pytest.mark.parametrize(
    "header",
    ['{"w":["F32",[2],[0,8]]}', '{"w":["F32",[2]]}', '{"w":{"dtype":{"F32":null},"shape":[2],"data_offsets":[0,8]}}',
     '{"w":{"dtype":{"F32":1},"shape":[2],"data_offsets":[0,8]}}',
     '{"w":{"dtype":{},"shape":[2],"data_offsets":[0,8]}}',
     '{"__metadata__":{"dtype":{"F32":null}},"w":["F32",[2],[0,8]]}', '{"w":[[],[2],[0,8]]}', '{"w":null}', '{"w":[]}'],
)  # fmt: skip
def test_other_spellings_of_an_entry_are_read_as_the_reference_reads_them(header: str) -> None:
    assert assert_no_more_than_the_reference(file(header)) == (reference(file(header)) is not None)


def is_refused_on_purpose(data: bytes) -> bool:
    """Say whether we refuse what the reference library takes: two readings, and what torch has no room or type for."""
    try:
        open_checkpoint(data)
    except AmbiguousFile as error:
        return "twice" in error.message
    except UnsupportedFeature as error:
        return error.kind == "dtype"
    except CkptoolError as error:
        return "no valid dtype and shape" in error.message and any(
            len(shape) > 64 or max(shape, default=0) >= 1 << 63 for _, shape, _ in (reference(data) or {}).values()
        )
    return False


def test_whatever_is_changed_we_accept_what_the_reference_accepts() -> None:
    source = random.Random(7)
    for _ in range(times(3_000, 15_000)):
        data = mutated(source, source.choice(SEEDS))
        if reference(data) is not None and ours(data) is None:
            assert is_refused_on_purpose(data), data[:400]


def test_a_header_as_long_as_the_limit_and_a_rank_as_high_as_torchs_are_read() -> None:
    data = file(text(x=entry(shape=(1,) * 63 + (2,))))

    assert open_checkpoint(data, limits=Limits(header_nbytes=len(data) - 16)).tensors["x"].info.shape[-2:] == (1, 2)


def test_a_header_longer_than_the_limit_is_refused_before_it_is_read() -> None:
    assert refused(file(text(x=entry())), LimitExceeded, limits=Limits(header_nbytes=20)).actual == 20
    with pytest.raises(LimitExceeded):  # the reference library's own limit
        open_checkpoint(file(text(x=entry()), length=100_000_001))


def test_more_tensors_and_longer_names_than_the_limits_are_refused() -> None:
    header = text(**{f"{n}": entry(shape=(0,), offsets=(0, 0)) for n in range(11)})
    assert len(open_checkpoint(file(header, b""), limits=Limits(tensors=11, name_nbytes=2)).tensors) == 11

    refused(file(header, b""), LimitExceeded, limits=Limits(tensors=10))
    refused(file(text(**{"x" * 70_000: entry()})), LimitExceeded)


def test_cut_anywhere_it_is_truncated_and_says_how_much_is_missing() -> None:
    data = file(text(x=entry("U8", (64,), (0, 64))), DATA)

    for length in range(9, len(data)):
        caught = refused(data[:length], TruncatedFile)
        assert caught.actual == length
        assert caught.needed is not None
        assert caught.needed > length


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_names_keep_the_headers_order_and_get_their_own_bytes(order: tuple[int, ...]) -> None:
    entries = {f"t{n}": entry("U8", (4,), (4 * n, 4 * n + 4)) for n in order}

    found = open_checkpoint(file(text(**entries), DATA[:12]))
    assert list(found.tensors) == list(entries)
    assert all(tensor.read() == DATA[4 * int(name[1]) :][:4] for name, tensor in found.tensors.items())


SNIPPETS += [b" ", b"\n", b"\0", b"\xff", b"\xc3", b"F32", b"I8", b"shape", b"dtype", b"__metadata__", b"1e5", b"0.5"]


def test_whatever_is_changed_we_accept_no_more_than_the_reference_and_find_the_same() -> None:
    source, count = random.Random(20_240_607), times(6_000, 15_000)
    accepted = sum(assert_no_more_than_the_reference(mutated(source, source.choice(SEEDS))) for _ in range(count))

    assert accepted > count // 60  # else the mutants would be too wild to prove anything
