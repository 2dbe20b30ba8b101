"""Pickles that lie about lengths, cost a careless reader its memory, or say what no one file can."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from struct import pack
from typing import Any

from tests.build import call, floats, integer, legacy, named, ops, pickled, raw, storage, tensor, torch_zip
from tests.hostile.cases import Case


def zipped(tree: Any, protocol: int = 2) -> bytes:
    return torch_zip(tree, {"0": floats()}, protocol=protocol)


T = tensor(storage())


CALL = call(named("a", "B"))


LENGTHS = {
    "BINSTRING": b"T" + pack("<i", (1 << 31) - 1),
    "BINUNICODE": b"X" + pack("<I", (1 << 32) - 1),
    "BINUNICODE8": b"\x8d" + pack("<Q", 1 << 63),
    "BINUNICODE8 of everything": b"\x8d" + pack("<Q", (1 << 64) - 1),
    "SHORT_BINUNICODE": b"\x8c\xff",
    "BINBYTES": b"B" + pack("<I", (1 << 32) - 1),
    "BINBYTES8": b"\x8e" + pack("<Q", 1 << 63),
    "SHORT_BINBYTES": b"C\xff",
    "SHORT_BINSTRING": b"U\xff",
    "BYTEARRAY8": b"\x96" + pack("<Q", 1 << 63),
    "LONG1": b"\x8a\xff",
    "LONG4": b"\x8b" + pack("<i", (1 << 31) - 1),
    "FRAME": b"\x95" + pack("<Q", 1 << 60),
    "UNICODE": b"V",
    "STRING": b"S'",
    "GLOBAL": b"c",
    "INST": b"(i",
    "INT": b"I",
    "FLOAT": b"F",
    "PERSID": b"P",
}


def tied_levels(levels: int, leaf: bytes, width: int = 2) -> bytes:
    """Return lists in which each level holds the one below several times."""
    level = b"0](" + b"h\2" * width + b"eq\2"
    return b"](" + leaf + b"eq\2" + level * levels


def module(parameters: bytes, children: bytes) -> bytes:
    """Return a module whose dicts are pairs of opcodes."""
    dicts = ops("_parameters") + b"}(" + parameters + b"u" + ops("_buffers") + b"}" + ops("_modules") + b"}(" + children
    return named("m", "M") + b")\x81}(" + dicts + b"uub"


NESTS: dict[str, tuple[Callable[[int], bytes], int]] = {
    # things in each other; how many fit into each other: some come with a tuple each, and nothing is empty
    "tuples": (lambda count: b")" + b"\x85" * count, 49_999),
    "lists": (lambda count: b"]" * count + b"a" * (count - 1), 50_000),
    "dicts": (lambda count: b"}N" * count + b"}" + b"s" * count, 49_999),
    "sets": (lambda count: b"\x8f(" * count + b"N" + b"\x90" * count, 50_000),
    "persistent ids": (lambda count: b")" + b"\x85Q" * count, 24_999),
    "calls": (lambda count: named("a", "B") + b"2" * (count - 1) + b")" + b"\x85R" * count, 24_999),
    "states": (lambda count: (named("a", "B") + b")R") * count + b"N" + b"b" * count, 50_000),
}


BOMBS: dict[str, tuple[bytes, int, Any]] = {
    # name: file, MiB that it may cost, error
    "lists, 60 levels": (zipped(tied_levels(60, b"N")), 16, None),
    "lists, 10,000 levels": (zipped(tied_levels(10_000, b"N")), 32, None),
    "lists round a tensor, 20 levels": (zipped(tied_levels(20, T)), 192, "LimitExceeded"),
    "lists round a tensor, 60 levels": (zipped(tied_levels(60, T)), 192, "LimitExceeded"),
    "lists round a tensor, 10,000 levels": (zipped(tied_levels(10_000, T)), 192, "LimitExceeded"),
    "lists round a tensor, 8 levels of 100": (zipped(tied_levels(8, T, 100)), 192, "LimitExceeded"),
    "tuples round nothing": (zipped(b")q\2" + b"0h\2h\2\x86q\2" * 10_000), 32, None),
    "calls": (zipped(named("a", "B") + b"q\0000)q\2" + b"0h\0(h\2h\2tRq\2" * 10_000), 64, None),
    "lists whose only tensor is in the root": (
        zipped(b"]q\1(" + T + b"](h\1eq\2" + b"0](h\2h\2eq\2" * 60 + b"e"),
        192,
        "LimitExceeded",
    ),
    "models round a tensor, 60 levels": (
        zipped(
            module(ops("a") + T, b"") + b"q\2"
            + (b"0" + module(b"", ops("a") + b"h\2" + ops("b") + b"h\2") + b"q\2") * 60
        ),
        512,
        "LimitExceeded",
    ),
    "a long module name and many parameters": (
        zipped(
            T + b"q\0010"
            + module(b"", ops("a" * 60_000) + module(b"".join(ops(str(i)) + b"h\1" for i in range(60_000)), b""))
        ),
        64,
        "LimitExceeded",
    ),
    "many modules of one state": (
        zipped(
            T + b"q\0010}(" + ops("_parameters") + b"}" + ops("_buffers") + b"}" + ops("_modules") + b"}"
            + ops("x") + b"h\1" + b"NN" * 100_000 + b"uq\0020" + named("m", "M") + b"q\0030"
            + module(b"", b"".join(ops(str(i)) + b"h\3)\x81h\2b" for i in range(2_000)))
        ),
        128,
        "LimitExceeded",
    ),
    "a long name and many tensors": (
        zipped(b"}" + ops("a" * 65_000) + b"](" + T + b"q\1" + b"h\1" * 100_000 + b"es"),
        64,
        "LimitExceeded",
    ),
    "a long name and many other things": (
        zipped(b"}" + ops("a" * 65_000) + b"](" + T + b"N" * 1_000_000 + b"es"),
        512,
        "LimitExceeded",
    ),
    "one model many times": (
        zipped(
            b"](" + named("m", "M") + b")\x81"
            + ops({"_parameters": {}, "_buffers": {}, "_modules": dict.fromkeys(map(str, range(2000)), CALL), "x": T})
            + b"bq\1" + b"h\1" * 100_000 + b"e"
        ),
        192,
        None,
    ),
    "tuples, 1,000,000 deep": (zipped(b")" + b"\x85" * 1_000_000), 512, "LimitExceeded"),
    "tuples round a tensor, 500,000 deep": (zipped(T + b"\x85" * 500_000), 512, "LimitExceeded"),
    **{f"{name}, 300,000 deep": (zipped(make(300_000)), 256, "LimitExceeded") for name, (make, _) in NESTS.items()},
    **{f"{name}, {most:,} deep": (zipped(make(most)), 64, None) for name, (make, most) in NESTS.items()},
    **{f"{name}, too deep": (zipped(make(most + 1)), 64, "LimitExceeded") for name, (make, most) in NESTS.items()},
    "marks, 3,000,000 deep": (zipped(b"(" * 3_000_000), 512, "LimitExceeded"),
    "closed marks, 500,000 deep": (zipped(b"(" * 500_000 + b"t" * 500_000), 512, "LimitExceeded"),
    "a key 100,000 tuples deep": (zipped(b"})" + b"\x85" * 100_000 + b"Ns"), 64, None),
    "a key 26 tuples deep, shared": (zipped(b"})q\2" + b"0h\2h\2\x86q\2" * 26 + b"Ns"), 16, None),
    "keys with one hash": (
        zipped(b"}(" + b"".join(integer(k * ((1 << 61) - 1)) + b"N" for k in range(1, 100_000)) + b"u"),
        64,
        None,
    ),
    "memo entries with one hash": (
        zipped(b"N" + b"".join(b"p%d\n" % (k * ((1 << 61) - 1)) for k in range(1, 60_000))),
        32,
        "MalformedFile",
    ),
    "set members with one hash": (
        zipped(b"\x8f(" + b"".join(integer(k * ((1 << 61) - 1)) for k in range(1, 100_000)) + b"\x90"),
        64,
        None,
    ),
    "hex of hex": (
        zipped(
            ops("latin1") + b"0" + raw(b"a" * 64)
            + b"".join(b"q\1" + b"0" + named("_codecs", "encode") + b"(h\1" + ops("hex") + b"tR" for _ in range(32))
        ),
        16,
        None,
    ),
    "hex of a numpy array": (
        zipped(
            call(named("torch._utils", "_rebuild_device_tensor_from_numpy"),
                 call(named("_codecs", "encode"), "a" * 64, "hex"), named("torch", "float32"), "xla:0", False)
        ),
        16,
        None,
    ),
    "a bytearray of 16 GiB": (zipped(call(named("builtins", "bytearray"), 1 << 34)), 16, None),
    "bytes of 16 GiB": (zipped(call(named("builtins", "bytes"), 1 << 34)), 16, None),
    "a tensor of 16 GiB": (zipped(call(named("torch", "FloatTensor"), 1 << 20, 1 << 14)), 16, None),
    "a storage of 16 GiB": (zipped(call(named("torch", "FloatStorage"), 1 << 34)), 16, None),
    "a list times a million": (zipped(call(named("operator", "mul"), [1], 1 << 40)), 16, None),
    "a range": (zipped(call(named("builtins", "list"), call(named("builtins", "range"), 1 << 40))), 16, None),
    "a number of 1,000,000 digits": (zipped(b"I" + b"7" * 1_000_000 + b"\n"), 32, "LimitExceeded"),
    "a long number of 1,000,000 digits": (zipped(b"L" + b"7" * 1_000_000 + b"L\n"), 32, "LimitExceeded"),
    "a number of 1,000,000 bytes": (zipped(b"\x8b" + pack("<i", 1_000_000) + b"\x7f" * 1_000_000), 32, "LimitExceeded"),
    "a float of 1,000,000 digits": (zipped(b"F" + b"7" * 1_000_000 + b"\n"), 32, None),
    "a line of 8 MB": (zipped(b"V" + b"a" * 8_000_000 + b"\n"), 128, None),
    "a line of 8 MB without an end": (b"\x80\x02V" + b"a" * 8_000_000, 64, "TruncatedFile"),
    "100,000 lines without an end": (b"\x80\x02" + b"Va\n0" * 100_000 + b"V", 16, "TruncatedFile"),
    "a string of 8 MB of escapes": (zipped(b"S'" + b"\\x41" * 2_000_000 + b"'\n"), 256, None),
    "no stop": (b"\x80\x02" + b"N0" * 100_000, 16, "TruncatedFile"),
    "junk on the stack": (torch_zip(b"N" * 1_000_000 + ops({})), 64, None),
    "a million names": (zipped(b"".join(b"ca\nb%d\n0" % i for i in range(100_000)) + b"N"), 128, None),
    "a million persistent ids": (zipped(b"Pa\n0" * 300_000 + b"N"), 64, None),
    "many calls of one list of arguments": (
        zipped(named("a", "B") + b"q\0010(" + b"N" * 300_000 + b"tq\0020](" + b"h\1h\2R" * 100_000 + b"e"),
        128,
        None,
    ),
    "many objects of one state": (
        zipped(b"}(" + b"NN" * 200_000 + b"uq\0020](" + (named("a", "B") + b")Rh\2b") * 50_000 + b"e"),
        128,
        None,
    ),
    "many mappings of one list of pairs": (
        zipped(
            b"](" + b"NN\x86" * 100_000 + b"e\x85q\0020" + named("collections", "OrderedDict") + b"q\0010]("
            + b"h\1h\2R" * 50_000 + b"e"
        ),
        128,
        None,
    ),
}  # fmt: skip


EXTENSIONS = [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"]


RECURSIVE = {
    "a list": b"]q\1h\1a",
    "a dict": b"}q\1Nh\1s",
    "a dict as its own key": b"}q\1h\1Ns",
    "a set": b"\x8fq\1(h\1\x90",
    "a tuple in its list": b"]q\1h\1\x85a",
    "an object in its state": named("a", "B") + b")Rq\1}" + ops("me") + b"h\1sb",
    "a state that is its object": named("a", "B") + b")Rq\1h\1b",
    "an object in its items": named("a", "B") + b")Rq\1h\1a",
    "an object in its pairs": named("a", "B") + b")Rq\1Nh\1s",
    "a call of a list of itself": b"]q\1(" + named("a", "B") + b"h\1Re",
    "a mapping in its pairs": call(named("collections", "OrderedDict")) + b"q\1" + ops("a") + b"h\1s",
    "a persistent id of itself": b"]q\1(h\1Qe",
    "two lists": b"]q\1]q\2h\1ah\2a0",
    "a parameter of itself": named("torch.nn.parameter", "Parameter") + b")\x81q\1(h\1N}\x88\x89tb",
    "a subclass in its state": b"]q\1(" + named("torch._tensor", "_rebuild_from_type_v2") + b"("
    + named("torch._utils", "_rebuild_tensor_v2") + named("a", "B") + b"(" + storage() + b"K\0K\4\x85K\1\x85\x89Nt}"
    + ops("me") + b"h\1stRe",
}  # fmt: skip


def _cases() -> Iterator[Case]:
    for name, lie in LENGTHS.items():
        kind = "limit-exceeded" if name == "LONG4" else "truncated-pickle"
        yield Case("P7", f"the length of {name}", b"\x80\x04" + lie + b"1" * 60, kind, nbytes=16 << 20)
    for name in ("LONG4", "BINSTRING"):
        data = b"\x80\x04" + LENGTHS[name][:1] + b"\xff\xff\xff\xff" + b"." * 60
        yield Case("P7", f"a negative length of {name}", data, "malformed-pickle", nbytes=16 << 20)
    for name, (data, mib, error) in BOMBS.items():
        row, kind = ROWS.get(name, "P8"), "limit-exceeded" if error == "LimitExceeded" else "any"
        if row == "P11" and error == "LimitExceeded":
            kind = "pickle-bomb" if name.startswith("marks") else "too-deep"
        yield Case(row, name, data, kind, nbytes=mib << 20)
    for opcode in (*EXTENSIONS, b"\x97"):
        kind = "unsafe-buffer" if opcode == b"\x97" else "unsafe-extension"
        for wrap in (zipped, legacy, pickled):
            yield Case("P4", f"opcode 0x{opcode[0]:02x} in {wrap.__name__}", wrap({"a": opcode}), kind)
    for name, tree in RECURSIVE.items():
        yield Case("P8", f"itself: {name}", zipped({"w": T, "x": tree}), "read", nbytes=16 << 20)
    for index in (1 << 8, 1 << 16, 1 << 31, (1 << 32) - 1):
        tree = {"w": T, "x": b"N" + b"r" + pack("<I", index) + b"0j" + pack("<I", index)}
        yield Case("P6", f"memo entry {index:,}", zipped(tree), "read", {"w": floats()}, nbytes=16 << 20)
    for name, tree in MEMO.items():
        yield Case("P6", name, zipped({"w": T, "x": tree}), "malformed-pickle")
    yield Case("P6", "an entry put twice", zipped({"x": b"K\1q\5K\2q\0050h\5", "w": T}), "any")
    for more in (b".", b"\0", pickled(1), b"N", b"\n"):
        members = {"archive/data.pkl": pickled({"w": T}) + more}
        data = torch_zip({"w": T}, {"0": floats()}, members=members)
        yield Case("P5", f"{more!r} behind the pickle of a zip", data, "ambiguous-pickle")
    sound = legacy({"w": tensor(storage(rest=(None,)))}, [("0", 4, floats())])
    for more in (b".", b"\0" * 8, sound, b"PK\3\4", pickled(1)):
        yield Case("P5", f"{more[:8]!r} behind a legacy stream", sound + more, "any")
    for name, program in STACKS.items():
        yield Case("P5", name, torch_zip(program, {"0": floats()}), "refused")
    for name, below in (("two things on the stack", b"N"), ("a mark on the stack", b"(")):
        yield Case("P5", name, torch_zip(below + ops({"w": T}), {"0": floats()}), "read", {"w": floats()})
    for protocol in range(6):
        weights = {"w": floats()}
        for wrap_name, wrap in (("zip", zipped), ("legacy", streamed)):
            yield Case("P14", f"protocol {protocol} in a {wrap_name}", wrap({"w": T}, protocol), "read", weights)
    for name, program in AGAIN.items():
        yield Case("P16", name, b"\x80\x04" + program + b".", "any")
    yield Case("P16", "gzip in gzip, of many pickles", packed(b"\x80\x04N." * 100_000, 12), "any")
    for name, tree in NESTED.items():
        yield Case("P13", name, zipped({"w": T, "x": tree}), "read", {"w": floats()})


def streamed(tree: Any, protocol: int = 2) -> bytes:
    return legacy({"w": tensor(storage(rest=(None,)))}, [("0", 4, floats())], protocol=protocol)


def looked_up(count: int) -> bytes:
    """Attributes of attributes, so many deep."""
    return named("builtins", "getattr") * count + named("m", "n") + (ops("abcdefgh") + b"\x86R") * count


def packed(data: bytes, times: int) -> bytes:
    for _ in range(times):
        data = gzip.compress(data, mtime=0)
    return data


OBJECT = named("m", "K") + b")\x81"
LARGE = ops({f"k{number}": 1 for number in range(1_500)})
AGAIN = {
    "a name of many parts": named("m", "A." * 20_000 + "x"),
    "many names of many parts": b"(" + b"".join(named("m", "A." * 200 + f"x{n}") for n in range(300)) + b"t",
    "attributes of attributes": looked_up(1_500),
    "slots again and again": LARGE + b"q\0" + b"0" + OBJECT + b"Nh\0\x86b" * 1_500,
    "items behind a large state": named("os", "getcwd") + b"0" + OBJECT + LARGE + b"b" + b"Na" * 10_000,
    "strings that pack many pickles": b"(" + raw(zlib.compress(b"N." * 20_000)) * 300 + b"t",
    "strings that pack much": b"(" + raw(gzip.compress(bytes(3_000_000), mtime=0)) * 100 + b"t",
}
"""What is small, and would be looked at again and again."""

MEMO = {
    "an entry that was never put": b"h\7",
    "an entry from before": b"g99\n",
    "an entry below zero": b"g-1\n",
    "an entry that is not a number": b"gx\n",
    "a long entry that was never put": b"j" + pack("<I", 1 << 31),
    "put below zero": b"Np-1\n",
}
STACKS = {
    "nothing on the stack": b"",
    "more taken than there is": b"N00",
    "a mark that is not there": b"Nt",
    "no opcode": b"N\xff",
    "a second state": named("a", "B") + b")R}b}b",
    "items for a number": b"K\1K\2a",
    "a dict of three": b"(NNNd",
}
SHELL = pickled(call(named("os", "system"), "true"))
NESTED = {
    "a pickle in bytes": raw(SHELL),
    "a pickle in text": ops(SHELL.decode("latin-1")),
    "a pickle in a bytearray": b"\x96" + pack("<Q", len(SHELL)) + SHELL,
    "a zip in bytes": raw(torch_zip({"w": T}, {"0": floats()})),
}
ROWS = {
    **dict.fromkeys(["hex of hex", "hex of a numpy array", "a bytearray of 16 GiB", "bytes of 16 GiB"], "P10"),
    **dict.fromkeys(["a tensor of 16 GiB", "a storage of 16 GiB", "a list times a million", "a range"], "P10"),
    **dict.fromkeys(["a key 100,000 tuples deep", "a key 26 tuples deep, shared"], "P9"),
    **dict.fromkeys(["keys with one hash", "memo entries with one hash", "set members with one hash"], "P12"),
    **{name: "P11" for name in BOMBS if "deep" in name and "key" not in name},
    **{name: "P7" for name in BOMBS if "digits" in name or "MB" in name or "1,000,000 bytes" in name},
    **dict.fromkeys(["no stop", "junk on the stack"], "P5"),
}

CASES = tuple(_cases())
