"""Names of tensors that some reader, writer, terminal or table would stumble over."""

from __future__ import annotations

from collections.abc import Iterator

from tests.build import call, floats, named, ops, storage, tensor, torch_zip
from tests.hostile.cases import Case
from tests.hostile.cases.headers import entry, file, text

T = tensor(storage())
FLOATS = {"0": floats()}

HARMLESS = {
    "a space": " ",
    "an empty name": "",
    "a dot": ".",
    "dots alone": "...",
    "a slash": "/etc/passwd",
    "a way up": "../../x",
    "a formula": "=cmd|'/c calc'!A0",
    "a plus": "+1",
    "an at sign": "@SUM(1)",
    "a minus": "-rf",
    "a pipe": "a|b",
    "markup": "<script>alert(1)</script>",
    "quotes": "\"'`",
    "a percent sign": "%s%n{0}",
    "a dollar": "$(true)",
    "a number": "12345678901234567890",
    "a name of Python": "__class__",
    "the name of safetensors' text": "__metadata__",
    "an emoji": "\U0001f600",
    "a letter of two code points": "e\u0301",
    "right to left letters": "\u05d0\u05d1",
}
TERMINAL = {
    "an escape": "\x1b[2J\x1b[31mred",
    "a title": "\x1b]0;title\x07",
    "a bell": "\x07",
    "a backspace": "ab\b\bcd",
    "a carriage return": "good\rbad",
    "a line feed": "a\nb",
    "a tabulator": "a\tb",
    "a NUL": "a\0b",
    "a delete": "a\x7fb",
    "C1": "a\x9b31mb",
    "bidi": "a\u202eb\u202d\u2066\u2069",
    "zero width": "a\u200bb\u200d\ufeff",
    "a line separator": "a\u2028b\u2029",
    "a tag": "a\U000e0041",
}
"""None of it may reach a terminal as it is."""


def _cases() -> Iterator[Case]:
    for row, table in (("P15", HARMLESS), ("I4", TERMINAL)):
        for name, key in table.items():
            yield Case(row, f"{name} as a key", torch_zip({"weight": T, key: T}, FLOATS), "read")
            yield Case(
                row, f"{name} as a header's name", file(text(**{key: entry(), "w": entry("U8", (0,), (8, 8))})), "any"
            )
    for name, key in TERMINAL.items():
        members = {"archive/data.pkl": b"\x80\x02}.", f"archive/{key}": b"", "archive/version": b"3"}
        yield Case("I4", f"{name} as a member", torch_zip({}, members=members), "any")
        module = f"a{key}".replace("\n", "")
        tree = {"weight": T, "x": ops(module) + ops(key) + b"\x93", "y": call(ops(key) + ops(key) + b"\x93")}
        yield Case("I4", f"{name} as a class", torch_zip(tree, FLOATS), "read", {"weight": floats()})
        tagged = torch_zip({"weight": tensor(storage(location=f"cuda{key}"))}, FLOATS)
        yield Case("I4", f"{name} as a device", tagged, "any")
        refused = torch_zip({"weight": tensor(storage(dtype=f"{key}Storage".replace("\n", " ")))}, FLOATS)
        yield Case("I4", f"{name} in an error", refused, "storage-class")
        yield Case("I4", f"{name} as text beside", torch_zip({"weight": T, "note": key}, FLOATS), "read")
        metadata = file(text(__metadata__={key: key}, x=entry()))
        yield Case("I4", f"{name} as metadata", metadata, "read")
    surrogate = {"weight": T, "\ud83d": T}
    yield Case("P15", "half a surrogate pair", torch_zip(surrogate, FLOATS), "any")
    yield Case("P15", "a name of 20 MB", torch_zip({"a" * 20_000_000: T}, FLOATS), "name-too-long")
    pairs = {
        "a name twice": ops("w") + T + ops("w") + T,
        "a dot and a level": ops("a.b") + T + ops("a") + ops({"b": T}),
        "a number and its text": ops(1) + T + ops("1") + T,
        "True and 1": ops(True) + T + ops(1) + T,
        "None and its text": ops(None) + T + ops("None") + T,
        "a tensor as a key": T + T + ops("w") + T,
        "a tuple as a key": ops(("a", 1)) + T,
        "a float as a key": ops(float("nan")) + T + ops(float("nan")) + T,
        "bytes as a key": b"C\1a" + T,
        "a class as a key": named("a", "B") + T,
        "a number of 10,000 bits as a key": ops(1 << 10_000) + T,
    }
    for name, program in pairs.items():
        yield Case("P15", name, torch_zip(b"}(" + program + b"u", FLOATS), "any")


CASES = tuple(_cases())
