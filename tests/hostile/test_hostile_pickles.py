"""
Pickles that would cost a careless reader its memory or its evening: each is opened in a process of its own.

The process may use so much address space more than it has when the file is opened, and so much processor time. What
these files ask for is gigabytes and hours.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from struct import pack
from typing import Any

import pytest

from ckptool import AmbiguousFile, TruncatedFile, UnsafePickle, open_checkpoint
from tests.build import call, floats, integer, legacy, named, ops, pickled, raw, storage, tensor, torch_zip

pytest.importorskip("resource", reason="limits on memory are POSIX's")

ROOT = Path(__file__).parents[2]
# The slowest takes a little more than one; what these files ask of a careless reader is minutes, or no end.
SECONDS = 4
MIB = 1 << 20

OPEN = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[1])
data, nbytes = open(sys.argv[2], "rb").read(), int(sys.argv[3])
import json, zlib, ckptool.foreign
from ckptool import CkptoolError, open_checkpoint
open_checkpoint(b"\\x80\\x02}.").close()

pages = int(open("/proc/self/statm").read().split()[0]) if sys.platform == "linux" else 0
limit = pages * resource.getpagesize() + nbytes
if pages:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
start, error = time.process_time(), None
tensors = read = 0
try:
    with open_checkpoint(data) as found:
        tensors = len(found.tensors)
        found.weights
        for tensor in list(found.tensors.values())[:100]:
            tensor.info.total_nbytes
            tensor.read()
            read += 1
except CkptoolError as caught:
    error = [type(caught).__name__, caught.kind]
seconds = time.process_time() - start
json.dump({"error": error, "tensors": tensors, "read": read, "seconds": seconds}, sys.stdout)
"""


def opened(data: bytes, tmp_path: Path, *, nbytes: int = 64 * MIB) -> dict[str, Any]:
    """Open a file, read its first tensors, and return the error, in a process that may allocate ``nbytes`` more."""
    path = tmp_path / "hostile"
    path.write_bytes(data)
    command = [sys.executable, "-I", "-c", OPEN, str(ROOT), str(path), str(nbytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["seconds"] < SECONDS
    return found


def zipped(tree: Any) -> bytes:
    return torch_zip(tree, {"0": floats()})


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


@pytest.mark.parametrize("name", LENGTHS)
def test_a_length_that_lies_is_found_out_before_anything_is_read(name: str, tmp_path: Path) -> None:
    found = opened(b"\x80\x04" + LENGTHS[name] + b"1" * 60, tmp_path, nbytes=16 * MIB)

    assert found["error"] == ["TruncatedFile", "truncated-pickle"]


@pytest.mark.parametrize("name", ["LONG4", "BINSTRING"])
def test_a_negative_length_is_refused(name: str, tmp_path: Path) -> None:
    found = opened(b"\x80\x04" + LENGTHS[name][:1] + b"\xff\xff\xff\xff" + b"." * 60, tmp_path, nbytes=16 * MIB)

    assert found["error"] == ["MalformedFile", "malformed-pickle"]


@pytest.mark.parametrize("name", [name for name in LENGTHS if name.startswith(("BIN", "SHORT", "BYTE", "LONG"))])
def test_a_length_may_reach_to_the_end_and_not_beyond(name: str) -> None:
    code, width = LENGTHS[name][:1], len(LENGTHS[name]) - 1
    head = b"\x80\x04" + code + (40).to_bytes(width, "little")

    open_checkpoint(head + b"." * 41).close()
    with pytest.raises(TruncatedFile):
        open_checkpoint(head + b"." * 39)


@pytest.mark.parametrize("index", [1 << 8, 1 << 16, 1 << 31, (1 << 32) - 1])
def test_a_large_memo_index_costs_nothing(index: int, tmp_path: Path) -> None:
    data = b"\x80\x02N" + b"r" + pack("<I", index) + b"0j" + pack("<I", index) + b"."

    assert opened(data, tmp_path, nbytes=16 * MIB)["error"] is None


def tied_levels(levels: int, leaf: bytes, width: int = 2) -> bytes:
    """Return lists in which each level holds the one below several times."""
    level = b"0](" + b"h\2" * width + b"eq\2"
    return b"](" + leaf + b"eq\2" + level * levels


def module(parameters: bytes, children: bytes) -> bytes:
    """Return a module whose dicts are pairs of opcodes."""
    dicts = ops("_parameters") + b"}(" + parameters + b"u" + ops("_buffers") + b"}" + ops("_modules") + b"}(" + children
    return named("m", "M") + b")\x81}(" + dicts + b"uub"


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
    "tuples, 1,000,000 deep": (zipped(b")" + b"\x85" * 1_000_000), 512, None),
    "tuples round a tensor, 500,000 deep": (zipped(T + b"\x85" * 500_000), 512, "LimitExceeded"),
    "lists, 300,000 deep": (zipped(b"]" * 300_000 + b"a" * 299_999), 192, None),
    "dicts, 300,000 deep": (zipped(b"}N" * 300_000 + b"}" + b"s" * 300_000), 192, None),
    "sets, 300,000 deep": (zipped(b"\x8f(" * 300_000 + b"N" + b"\x90" * 300_000), 192, None),
    "persistent ids, 300,000 deep": (zipped(b")" + b"\x85Q" * 300_000), 192, None),
    "calls, 200,000 deep": (zipped(named("a", "B") + b"2" * 199_999 + b")" + b"\x85R" * 200_000), 256, None),
    "states, 200,000 deep": (zipped((named("a", "B") + b")R") * 200_000 + b"N" + b"b" * 200_000), 256, None),
    "marks, 3,000,000 deep": (zipped(b"(" * 3_000_000), 512, "MalformedFile"),
    "closed marks, 500,000 deep": (zipped(b"(" * 500_000 + b"t" * 500_000), 512, None),
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
    "a number of 1,000,000 digits": (zipped(b"I" + b"7" * 1_000_000 + b"\n"), 32, None),
    "a long number of 1,000,000 digits": (zipped(b"L" + b"7" * 1_000_000 + b"L\n"), 32, None),
    "a number of 1,000,000 bytes": (zipped(b"\x8b" + pack("<i", 1_000_000) + b"\x7f" * 1_000_000), 32, None),
    "a float of 1,000,000 digits": (zipped(b"F" + b"7" * 1_000_000 + b"\n"), 32, None),
    "a line of 8 MB": (zipped(b"V" + b"a" * 8_000_000 + b"\n"), 128, None),
    "a line of 8 MB without an end": (b"\x80\x02V" + b"a" * 8_000_000, 64, "TruncatedFile"),
    "100,000 lines without an end": (b"\x80\x02" + b"Va\n0" * 100_000 + b"V", 16, "TruncatedFile"),
    "a string of 8 MB of escapes": (zipped(b"S'" + b"\\x41" * 2_000_000 + b"'\n"), 256, None),
    "no stop": (b"\x80\x02" + b"N0" * 100_000, 16, "TruncatedFile"),
    "junk on the stack": (zipped(b"N" * 1_000_000), 64, "MalformedFile"),
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


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_costs_little(name: str, tmp_path: Path) -> None:
    data, mib, error = BOMBS[name]
    found = opened(data, tmp_path, nbytes=mib * MIB)

    assert (found["error"] or [None])[0] == error


@pytest.mark.parametrize("more", [b".", b"\0", pickled(1), b"N", b"\n"])
def test_bytes_behind_the_pickle_in_a_zip_are_refused(more: bytes) -> None:
    members = {"archive/data.pkl": pickled({"w": T}) + more}
    with pytest.raises(AmbiguousFile) as caught:
        open_checkpoint(torch_zip({"w": T}, {"0": floats()}, members=members))

    assert caught.value.kind == "ambiguous-pickle"


EXTENSIONS = [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"]


@pytest.mark.parametrize("opcode", [*EXTENSIONS, b"\x97"])
@pytest.mark.parametrize("wrap", [zipped, legacy, pickled])
def test_what_the_file_does_not_hold_is_refused(opcode: bytes, wrap: Callable[[Any], bytes]) -> None:
    with pytest.raises(UnsafePickle):
        open_checkpoint(wrap({"a": opcode}))


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


@pytest.mark.parametrize("name", RECURSIVE)
def test_what_holds_itself_is_walked_once(name: str, tmp_path: Path) -> None:
    assert opened(zipped({"w": T, "x": RECURSIVE[name]}), tmp_path, nbytes=16 * MIB)["error"] is None
