"""
Headers that lie or that readers could understand differently: what we accept, the reference library reads the same.

F1 to F8 are rows of the project's list of hostile input.
"""

from __future__ import annotations

import json
import random
import time
from itertools import permutations
from typing import Any

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
    open_checkpoint,
)
from ckptool.dtypes import BY_SAFETENSORS
from tests import build

DATA = bytes(range(64))


def file(header: str | bytes, data: bytes = DATA[:8], *, length: int | None = None) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def text(**entries: Any) -> str:
    return json.dumps(entries)


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
    """Fail if we accept what it refuses, or find something else in it. Return whether we accept."""
    found = ours(data)
    if found is None or found.format != "safetensors":
        return False
    expected = reference(data)
    assert expected is not None, data[:400]
    assert found.tensors.keys() == expected.keys(), data[:400]
    for name, tensor in found.tensors.items():
        code, shape, content = expected[name]
        if code == "F4":  # counted in values there, in pairs of them here
            shape = [*shape[:-1], shape[-1] // 2]
        assert (tensor.info.dtype, list(tensor.info.shape)) == (BY_SAFETENSORS[code], shape), data[:400]
        assert tensor.read() == content, data[:400]
    return True


ACCEPTED = {
    "one tensor": text(x=entry()),
    "two tensors": text(x=entry(shape=(1,), offsets=(0, 4)), y=entry("I8", (2, 2), (4, 8))),
    "in another order than the bytes": text(y=entry("I8", (4,), (4, 8)), x=entry(shape=(1,), offsets=(0, 4))),
    "metadata": text(__metadata__={"format": "pt"}, x=entry()),
    "metadata that is null": text(__metadata__=None, x=entry()),
    "no dimension": text(x=entry("F64", ())),
    "an empty tensor": text(e=entry(shape=(0, 3), offsets=(0, 0)), x=entry(), f=entry(shape=(0,), offsets=(8, 8))),
    "an empty tensor of absurd size": text(e=entry(shape=(2**62, 0), offsets=(0, 0)), x=entry()),
    "spaces behind": text(x=entry()) + "     ",
    "other white space behind": text(x=entry()) + "\n\t\r ",
    "spaces inside": '{ "x" : { "dtype" : "F32" , "shape" : [ 2 ] , "data_offsets" : [ 0 , 8 ] } }',
    "an escaped name": r'{"\u0078\n\"":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "a pair of surrogates": r'{"\ud83d\ude00":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "a field that nobody knows": text(x=entry(note="hello", version=1, more=[1.5, {"a": None}])),
    "a negative number that nobody knows": text(x=entry(note=-5)),
    "a name with a minus and a zero in it": text(**{"layer-0.weight": entry()}),
    "a name of many digits": text(**{"9" * 30: entry()}),
    "pairs in a byte": text(x=entry("F4", (2, 8))),
    "misaligned": text(b=entry("BOOL", (1,), (0, 1)), x=entry("U8", (7,), (1, 8))),
    "a name with a zero in it": text(**{"x\0y": entry()}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_odd_but_has_one_reading_is_read_as_the_reference_reads_it(name: str) -> None:
    assert assert_no_more_than_the_reference(file(ACCEPTED[name]))


INTEGERS, FLOATS = json.dumps(entry("I32")), json.dumps(entry())

REFUSED: dict[str, bytes] = {
    # F1
    "tensors that overlap": file(text(x=entry(), y=entry(shape=(1,), offsets=(4, 8)))),
    "the same bytes twice": file(text(x=entry(), y=entry())),
    "a hole": file(text(x=entry(shape=(1,), offsets=(0, 4)), y=entry(shape=(1,), offsets=(8, 12))), DATA[:12]),
    "a hole in front": file(text(x=entry(offsets=(4, 12))), DATA[:12]),
    "bytes behind the last tensor": file(text(x=entry()), DATA[:9]),
    "bytes behind no tensor": file("{}", b"x"),
    "begin behind end": file(text(x=entry(offsets=(8, 0)))),
    "a range that does not fit the shape": file(text(x=entry(shape=(3,)))),
    "a shape whose product overflows": file(text(x=entry(shape=(2**32, 2**32, 2**32)))),
    "a shape that overflows before it is empty": file(
        text(e=entry(shape=(2**62, 8, 0), offsets=(0, 0)), x=entry()),
    ),
    "offsets beyond 64 bits": file(text(x=entry(offsets=(0, 2**64 + 8)))),
    "a size beyond 64 bits": file(text(x=entry(shape=(2**64, 0), offsets=(0, 0)), y=entry())),
    "a byte order mark": file(b"\xef\xbb\xbf" + text(x=entry()).encode()),
    "not UTF-8": file(b'{"\xff":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "UTF-8 too long": file(b'{"\xc0\xae":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "half a surrogate pair": file(r'{"\ud83d":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "half a surrogate pair in capitals": file(r'{"\uD83D":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "half a surrogate pair in the metadata": file(text(__metadata__={"a": "\ud83d"}, x=entry())),
    "half a surrogate pair where nobody looks": file(text(x=entry(note=["\udc00"]))),
    "NaN": file(text(x=entry(note=float("nan")))),
    "infinity": file(text(x=entry(note=float("-inf")))),
    "a float out of range": file('{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"z":1e999}}'),
    "an integer out of range": file('{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"z":' + "9" * 400 + "}}"),
    "an integer of very many digits": file('{"x":{"dtype":"F32","shape":[' + "9" * 9000 + '],"data_offsets":[0,8]}}'),
    "floats for sizes": file(text(x=entry(shape=(2.0,)))),
    "an exponent": file('{"x":{"dtype":"F32","shape":[2e0],"data_offsets":[0,8]}}'),
    "minus zero": file('{"x":{"dtype":"F32","shape":[2],"data_offsets":[-0,8]}}'),
    "negative sizes": file(text(x=entry(shape=(-2,)))),
    "negative offsets": file(text(x=entry(offsets=(-8, 0)))),
    "booleans for sizes": file(text(x=entry(shape=(True, 2)))),
    "text for sizes": file(text(x=entry(shape=("2",)))),
    "null for a shape": file('{"x":{"dtype":"F32","shape":null,"data_offsets":[0,8]}}'),
    "three offsets": file(text(x=entry(offsets=(0, 8, 8)))),
    "one offset": file(text(x=entry(offsets=(8,)))),
    "a leading zero": file('{"x":{"dtype":"F32","shape":[02],"data_offsets":[0,8]}}'),
    "nesting without end": file(
        '{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"z":' + "[" * 200 + "]" * 200 + "}}"
    ),
    "nesting beyond any stack": file('{"x":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "objects without end": file(
        '{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]' + ',"z":{"a":[{"b":1' * 80 + "}]}" * 80 + "}}"
    ),
    "no dtype": file('{"x":{"shape":[2],"data_offsets":[0,8]}}'),
    "no shape": file('{"x":{"dtype":"F32","data_offsets":[0,8]}}'),
    "no offsets": file('{"x":{"dtype":"F32","shape":[2]}}'),
    "no object": file('{"x":5}'),
    "an unknown dtype": file(text(x=entry("F31"))),
    "a dtype in small letters": file(text(x=entry("f32"))),
    "a dtype that is a number": file('{"x":{"dtype":7,"shape":[2],"data_offsets":[0,8]}}'),
    "half a pair in a byte": file(text(x=entry("F4", (2, 1, 3), (0, 3))), DATA[:3]),
    "two objects": file(text(x=entry()) + "{}"),
    "a comma too many": file(text(x=entry())[:-1] + ",}"),
    "a comment": file("{/**/" + text(x=entry())[1:]),
    "a control character in a name": file('{"x\n":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    "zeros behind": file(text(x=entry()) + "\0\0"),
    "a form feed": file("{\x0c" + text(x=entry())[1:]),
    "single quotes": file("{'x':{'dtype':'F32','shape':[2],'data_offsets':[0,8]}}"),
    # F2
    "a name twice": file(f'{{"x":{INTEGERS},"x":{FLOATS}}}'),
    "a name twice, once escaped": file(f'{{"x":{INTEGERS},"\\u0078":{FLOATS}}}'),
    "a field twice": file('{"x":{"dtype":"I32","shape":[2],"data_offsets":[0,8],"dtype":"F32"}}'),
    "metadata twice": file(f'{{"__metadata__":{{}},"__metadata__":{{}},"x":{FLOATS}}}'),
    "a key of the metadata twice": file(f'{{"__metadata__":{{"a":"1","a":"2"}},"x":{FLOATS}}}'),
    "metadata that is no text": file(text(__metadata__={"a": 1}, x=entry())),
    "metadata that is a list": file(text(__metadata__=[], x=entry())),
    # F4
    "more dimensions than torch has": file(text(x=entry(shape=(1,) * 65, offsets=(0, 4))), DATA[:4]),
    "very many dimensions": file(text(x=entry(shape=(1,) * 100_000, offsets=(0, 4))), DATA[:4]),
    "a header of half an object": file(text(x=entry())[:-1]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_lies_or_has_two_readings_is_refused(name: str) -> None:
    with pytest.raises((MalformedFile, AmbiguousFile, CkptoolError)) as caught:
        open_checkpoint(REFUSED[name])

    assert caught.value.path == "<bytes>"


@pytest.mark.parametrize(
    "name", ["a name twice", "a name twice, once escaped", "metadata twice", "the same bytes twice"]
)
def test_two_readings_are_called_ambiguous(name: str) -> None:
    with pytest.raises(AmbiguousFile) as caught:
        open_checkpoint(REFUSED[name])
    assert caught.value.kind == "ambiguous-safetensors"


@pytest.mark.parametrize(
    ("name", "offset"),
    [("a hole", 8), ("a hole in front", 4), ("the same bytes twice", 0), ("bytes behind the last tensor", 8)],
)
def test_ambiguities_say_where_they_are(name: str, offset: int) -> None:
    with pytest.raises(AmbiguousFile) as caught:
        open_checkpoint(REFUSED[name])
    assert caught.value.offset == 8 + int.from_bytes(REFUSED[name][:8], "little") + offset


def test_a_range_that_does_not_fit_says_both_sizes() -> None:
    with pytest.raises(MalformedFile) as caught:
        open_checkpoint(file(text(x=entry(shape=(3,), offsets=(0, 8)))))
    assert (caught.value.needed, caught.value.actual) == (12, 8)


@pytest.mark.parametrize("length", [0, 1, 7, 2**31, 2**32, 2**39])
def test_a_header_length_that_lies_is_refused(length: int) -> None:
    data = file(text(x=entry()), length=length)

    assert reference(data) is None
    assert not assert_no_more_than_the_reference(data)


@pytest.mark.parametrize("length", [2**40, 2**63, 2**64 - 1])
def test_a_length_beyond_reason_is_no_safetensors_file(length: int) -> None:
    with pytest.raises(CkptoolError):
        open_checkpoint(file(text(x=entry()), length=length))


@pytest.mark.parametrize("lead", [" ", "\n", "\t", "x", "[", "\0", "\ufeff"])
def test_a_header_that_does_not_begin_with_its_brace_is_refused(lead: str) -> None:
    with pytest.raises(CkptoolError):
        open_checkpoint(file(lead + text(x=entry())))


def test_a_header_as_long_as_the_limit_and_a_rank_as_high_as_torchs_are_read() -> None:
    data = file(text(x=entry(shape=(1,) * 63 + (2,))))

    assert open_checkpoint(data, limits=Limits(header_nbytes=len(data) - 16)).tensors["x"].info.shape[-2:] == (1, 2)


def test_a_header_longer_than_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(LimitExceeded) as caught:
        open_checkpoint(file(text(x=entry())), limits=Limits(header_nbytes=20))
    assert caught.value.actual == 20
    with pytest.raises(LimitExceeded):  # the reference library's own limit
        open_checkpoint(file(text(x=entry()), length=100_000_001))


def test_more_tensors_and_longer_names_than_the_limits_are_refused() -> None:
    header = text(**{f"{n}": entry(shape=(0,), offsets=(0, 0)) for n in range(11)})
    assert len(open_checkpoint(file(header, b""), limits=Limits(tensors=11, name_nbytes=2)).tensors) == 11

    with pytest.raises(LimitExceeded):
        open_checkpoint(file(header, b""), limits=Limits(tensors=10))
    with pytest.raises(LimitExceeded):
        open_checkpoint(file(text(**{"x" * 70_000: entry()})))


def test_many_names_and_one_of_them_twice_cost_no_more_than_their_length() -> None:
    empty = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = "{" + ",".join(f'"{n}":{empty}' for n in range(60_000)) + f',"59999":{empty}' + "}"
    start = time.perf_counter()

    with pytest.raises(AmbiguousFile):
        open_checkpoint(file(header, b""))
    assert time.perf_counter() - start < 5


def test_a_header_of_spaces_is_read_in_time() -> None:
    start = time.perf_counter()

    assert open_checkpoint(file(text(x=entry()) + " " * 20_000_000)).tensors
    assert time.perf_counter() - start < 5


def test_cut_anywhere_it_is_truncated_and_says_how_much_is_missing() -> None:
    data = file(text(x=entry("U8", (64,), (0, 64))), DATA)

    for length in range(9, len(data)):
        with pytest.raises(TruncatedFile) as caught:
            open_checkpoint(data[:length])
        assert caught.value.actual == length
        assert caught.value.needed is not None
        assert caught.value.needed > length


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_names_keep_the_headers_order_and_get_their_own_bytes(order: tuple[int, ...]) -> None:
    entries = {f"t{n}": entry("U8", (4,), (4 * n, 4 * n + 4)) for n in order}

    found = open_checkpoint(file(text(**entries), DATA[:12]))
    assert list(found.tensors) == list(entries)
    assert all(tensor.read() == DATA[4 * int(name[1]) :][:4] for name, tensor in found.tensors.items())


def test_values_that_a_bool_cannot_have_are_given_as_they_are() -> None:
    data = file(text(x=entry("BOOL", (4,), (0, 4))), b"\0\1\2\xff")

    assert open_checkpoint(data).tensors["x"].read() == b"\0\1\2\xff"


SEEDS = [file(header, DATA[:8]) for header in ACCEPTED.values()] + [
    build.safetensors({"weight": build.floats(), "bias": build.floats(2)}),
    file(text(a=entry("BF16", (2, 2), (0, 8)), b=entry("U8", (0, 4), (8, 8)), __metadata__={"a": "ü"})),
]
SNIPPETS = [b"0", b"1", b"-", b"9" * 20, b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\u0000", b"null", b"true"]
SNIPPETS += [b" ", b"\n", b"\0", b"\xff", b"\xc3", b"F32", b"I8", b"shape", b"dtype", b"__metadata__", b"1e5", b"0.5"]


def mutated(random: random.Random, data: bytes) -> bytes:
    """Change a few bytes; keep the length of the header right most of the time, so that the rest is looked at."""
    length = int.from_bytes(data[:8], "little")
    header, rest = bytearray(data[8 : 8 + length]), data[8 + length :]
    for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
        at = random.randrange(len(header) + 1)
        what = random.randrange(6)
        if what == 0:
            header[at:at] = random.choice(SNIPPETS)
        elif what == 1:
            del header[at : at + random.choice((1, 1, 2, 8))]
        elif what == 2 and at < len(header):
            header[at] ^= 1 << random.randrange(8)
        elif what == 3 and at < len(header):
            header[at : at + 1] = random.choice(SNIPPETS)
        elif what == 4:
            stop = random.randrange(len(header) + 1)
            header[at:at] = header[min(at, stop) : max(at, stop)]
        else:
            rest = rest[: random.randrange(len(rest) + 1)] + bytes(random.randrange(9))
    claimed = len(header) + (random.randrange(-9, 9) if random.random() < 0.1 else 0)
    return max(0, claimed).to_bytes(8, "little") + bytes(header) + rest


def test_whatever_is_changed_we_accept_no_more_than_the_reference_and_find_the_same() -> None:
    source = random.Random(20_240_607)
    accepted = sum(assert_no_more_than_the_reference(mutated(source, source.choice(SEEDS))) for _ in range(30_000))

    assert accepted > 500  # else the mutants would be too wild to prove anything
