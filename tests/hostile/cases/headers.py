"""Headers of safetensors files: odd ones with one reading, and those that lie or have two."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import build
from tests.hostile.cases import Case

DATA = bytes(range(64))


def file(header: str | bytes, data: bytes = DATA[:8], *, length: int | None = None) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def text(**entries: Any) -> str:
    return json.dumps(entries)


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


NO_TEXT = {
    "a number": {"epoch": 3, "format": "pt"},
    "null": {"a": None},
    "nested": {"a": [1, {"b": True}], "c": "d"},
    "an entry of a tensor": {"dtype": {"F32": None}},
    "a list": [],
    "text": "pt",
}
"""Metadata that is not a mapping of text to text: the reference library refuses the file, whose tensors are whole."""


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
    # F4
    "more dimensions than torch has": file(text(x=entry(shape=(1,) * 65, offsets=(0, 4))), DATA[:4]),
    "very many dimensions": file(text(x=entry(shape=(1,) * 100_000, offsets=(0, 4))), DATA[:4]),
    "a header of half an object": file(text(x=entry())[:-1]),
}


SEEDS = [file(header, DATA[:8]) for header in ACCEPTED.values()] + [
    build.safetensors({"weight": build.floats(), "bias": build.floats(2)}),
    file(text(a=entry("BF16", (2, 2), (0, 8)), b=entry("U8", (0, 4), (8, 8)), __metadata__={"a": "ü"})),
]


SNIPPETS = [b"0", b"1", b"-", b"9" * 20, b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\u0000", b"null", b"true"]


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


LENGTH_LIES = (0, 1, 7, 1 << 31, 1 << 32, 1 << 39, 1 << 40, 1 << 63, (1 << 64) - 1)
LEADS = (" ", "\n", "\t", "x", "[", "\0", "\ufeff", "\x0b", "\xa0", "\0 ")
ROWS = {
    **dict.fromkeys(["more dimensions than torch has", "very many dimensions"], "F4"),
    **{name: "F2" for name in REFUSED if "twice" in name and "bytes" not in name},
}


def _cases() -> Iterator[Case]:
    for name, header in ACCEPTED.items():
        yield Case("F3", name, file(header), "read")
    for name, data in REFUSED.items():
        row = ROWS.get(name, "F1")
        yield Case(row, name, data, "ambiguous-safetensors" if row == "F2" else "refused")
    for length in LENGTH_LIES:
        yield Case("F1", f"a header of {length:,} bytes", file(text(x=entry()), length=length), "refused")
    for lead in LEADS:
        yield Case(
            "F3",
            f"{lead!r} in front of the header",
            file(lead + text(x=entry())),
            "refused" if lead.strip(" \n\t") else "read",
        )
    yield Case("F1", "a header beyond the limit", file(text(x=entry()), length=100_000_001), "refused")
    empty = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    many = ",".join(f'"{n}":{empty}' for n in range(20_000))
    yield Case("F5", "20,000 empty tensors", file("{" + many + "}", b""), "read")
    yield Case("F5", "20,000 names and one twice", file(f'{{{many},"1":{empty}}}', b""), "refused")
    yield Case("F5", "a header of spaces", file(text(x=entry()) + " " * 20_000_000), "read", {"x": DATA[:8]})
    misaligned = text(b=entry("BOOL", (1,), (0, 1)), x=entry("I16", (3,), (1, 7)))
    yield Case("F6", "numbers at odd places", file(misaligned, DATA[:7]), "read", {"b": DATA[:1], "x": DATA[1:7]})
    bools = file(text(x=entry("BOOL", (4,), (0, 4))), b"\0\1\2\xff")
    yield Case("F6", "bools that are none", bools, "read", {"x": b"\0\1\2\xff"})
    for name, data in build.one_of_each().items():
        for suffix in ("safetensors", "pth", "zip", "tar", "json", "png", "PT", ""):
            yield Case("F8", f"{name} called model.{suffix}", named_file(f"model.{suffix}", data), "read", True)


def named_file(name: str, data: bytes) -> Callable[[Path], str]:
    """Return what writes a file of that name."""

    def make(folder: Path) -> str:
        (folder / name).write_bytes(data)
        return str(folder / name)

    return make


CASES = tuple(_cases())
