"""What is graded ``data`` is made by the table of constructions, in just these forms; whatever else is not."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import lzma
import os
import pickle
import shutil
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckptool import check, load
from ckptool.fleet import row
from tests import zip_bytes
from tests.build import (
    call,
    floats,
    legacy,
    named,
    ops,
    pickled,
    raw,
    storage,
    tar_file,
    tensor,
    torch_tar,
    torch_zip,
    torchscript,
    zip_file,
)
from tests.each import each
from tests.formats import dcp_folder
from tests.program import invoke
from tests.scale import in_turn, scale


def built(made: bytes, state: Any) -> bytes:
    return made + ops(state) + b"b"


def dtype(code: str, *state: Any) -> bytes:
    made = call(named("numpy", "dtype"), code, False, True)
    return built(made, state or (3, "<", None, None, None, -1, -1, 0))


def array(shape: tuple[int, ...], kind: bytes, data: bytes) -> bytes:
    empty = call(named("numpy.core.multiarray", "_reconstruct"), named("numpy", "ndarray"), (0,), raw(b"b"))
    return built(empty, (1, shape, kind, False, raw(data)))


def nested(count: int, *kinds: str) -> bytes:
    """Containers in each other, so many of each kind."""
    made, closing = b"", b""
    for kind in kinds * count:
        is_dict = kind == "defaultdict"
        made += call(named("collections", kind)) + (ops("a") if is_dict else b"")
        closing = (b"s" if is_dict else b"a") + closing
    return made + b"N" + closing


def in_each_other(count: int) -> bytes:
    """A type of numpy in another, so often; each is of the class that the memo has at 1."""
    fields = call(b"h\1", "V8", False, True) + b"(" + ops(3) + ops(">") + b"N" + ops(("a",)) + b"}" + ops("a") + b"("
    return fields * count + call(b"h\1", "i1", False, True) + (b"K\0ts" + ops(8) + ops(1) + ops(16) + b"tb") * count


def indexed(fqn: str, index: int) -> bytes:
    made = named("torch.distributed.checkpoint.metadata", "MetadataIndex") + b")\x81"
    return built(made, {"fqn": fqn, "offset": call(named("torch", "Size"), (0,)), "index": index})


def offsets_of_one_hash(count: int) -> list[tuple[int, int]]:
    """Return pairs of numbers whose hash in Python is one: that of a pair, solved for the second."""
    size, turn = 1 << 64, (11400714785074694791, 14029467366897019727, 2870177450012600261)
    first, second, last = turn
    sought = (12345 - (2 ^ last ^ 3527539)) * pow(first, -1, size) % size
    sought = sought >> 31 | sought << 33 & size - 1
    found: list[tuple[int, int]] = []
    for one in itertools.count(1):
        lane = (last + one * second) % size
        lane = (lane << 31 & size - 1 | lane >> 33) * first % size
        other = (sought - lane) * pow(second, -1, size) % size
        if other < 1 << 60:
            assert hash((one, other)) == 12345
            found.append((one, other))
        if len(found) == count:
            return found
    raise AssertionError


def indexes_of_one_hash(count: int) -> bytes:
    parts = named("torch.distributed.checkpoint.metadata", "MetadataIndex") + b"q\0" + named("torch", "Size") + b"q\1"
    index = b"h\0)\x81}(" + ops("fqn") + ops("w") + ops("offset") + b"h\1"
    return parts + b"}(" + b"".join(index + ops(one) + b"\x85RubN" for one in offsets_of_one_hash(count)) + b"u"


def in_a_split_frame(hidden: bytes) -> bytes:
    """A stream of a storage: who takes frames as they say reads other opcodes, in the middle of a text."""
    stream = legacy(storage(rest=(None,)), [("0", 4, floats())], protocol=4)
    head, tree, rest = stream.partition(pickled(storage(rest=(None,)), protocol=4))
    text = b"X" + pack("<I", 6)
    hiding = b"aaa" + b"0C" + bytes([len(hidden)]) + hidden
    return head + tree[:2] + b"\x95" + pack("<Q", 8) + text + b"aaa" + hiding + b"0" + tree[2:] + rest


ORDERED = call(named("collections", "OrderedDict"))
POINTER = {"__array_interface__": {"data": (0x41414141, False), "shape": (1,), "typestr": "<f8", "version": 3}}
FLOAT64 = dtype("f8")
ONE = array((1,), FLOAT64, bytes(8))
VIEW = (storage(), 0, (4,), (1,), False, ORDERED)
REBUILD = named("torch._utils", "_rebuild_tensor_v2")
SCALES = call(REBUILD, *VIEW)


def quantised(scales: bytes, axis: int) -> bytes:
    quantizer = (named("torch", "per_channel_affine"), scales, SCALES, axis)
    rebuild = named("torch._utils", "_rebuild_qtensor")
    return call(rebuild, storage(dtype="QInt8Storage", key="1"), 0, (4,), (1,), quantizer, False, ORDERED)


NO_DATA = {
    "an address for a number": call(named("numpy", "float64"), built(ORDERED, POINTER)),
    "an address for an array": call(
        named("numpy", "ndarray"), (1,), "<f8", built(call(named("argparse", "Namespace")), POINTER)
    ),
    "attributes of a dict": built(ORDERED, {"items": 1}),
    "a namespace with a method": built(named("argparse", "Namespace") + b")\x81", {"__setstate__": 1}),
    "attributes of a name": built(named("collections", "OrderedDict"), {"pop": 1}),
    "defaults of a function": built(REBUILD, (None, {"__defaults__": (None, 7)})),
    "a second state": built(ONE + b"q\1" + b"0h\1", (1, (1,), FLOAT64, False, raw(bytes(8)))),
    "an array that gets its state in a list": b"](" + ONE[:-1] + b"be" + b"0" + ONE + b"q\1b",
    "a type of the process": call(named("numpy", "dtype"), "f8", False, False),
    "fields beyond a type": dtype(
        "V8", 3, "|", None, ("a",), {"a": (FLOAT64, 1)}, 8, 1, 16
    ),
    "a type that lies about objects": dtype(
        "V8", 3, "|", None, ("a",), {"a": (dtype("O8", 3, "|", None, None, None, -1, -1, 63), 0)}, 8, 1, 16
    ),
    "fields whose bytes are swapped": dtype("V8", 3, ">", None, ("a",), {"a": (FLOAT64, 0)}, 8, 1, 16),
    "flags that are not those of the fields": dtype("V8", 3, "|", None, ("a",), {"a": (FLOAT64, 0)}, 8, 1, 27),
    "too few elements": array((2,), FLOAT64, bytes(8)),
    "an array that is allocated": call(
        named("numpy.core.multiarray", "_reconstruct"), named("numpy", "ndarray"), (1 << 32,), raw(b"b")
    ),
    "another codec": call(named("_codecs", "encode"), "x", "cp037"),
    "a codec of a bytearray": call(named("builtins", "bytearray"), "x", "rot13"),
    "many bytes": call(named("builtins", "bytearray"), 1 << 44),
    "many bytes of a number that is long": call(
        named("builtins", "bytearray"), b"\x8b" + pack("<i", 2000) + (1 << 44).to_bytes(2000, "little")
    ),
    "types in each other": named("numpy", "dtype") + b"q\1" + array((1,), in_each_other(2000), bytes(8)),
    "a number that takes long": call(named("fractions", "Fraction"), "1e400000000"),
    "a view beyond its storage": call(REBUILD, storage(), 2, (4,), (1,), False, ORDERED),
    "a quantised type without scales": call(REBUILD, storage(dtype="QInt8Storage"), 0, (4,), (1,), False, ORDERED),
    "the same, by its name": call(
        named("torch._utils", "_rebuild_tensor_v3"), *VIEW, named("torch", "qint8")
    ),
    "a view backwards": call(REBUILD, storage(), 3, (4,), (-1,), False, ORDERED),
    "a size of a size": call(
        REBUILD, storage(), 0, call(named("torch", "Size"), call(named("torch", "Size"), (4,))), (1,), False, ORDERED
    ),
    "hooks": call(REBUILD, *VIEW[:5], ORDERED + ops(0) + ops(1) + b"s"),
    "flags of another kind": call(REBUILD, *VIEW, {"data": True}),
    "a tensor's setter": call(
        named("torch._tensor", "_rebuild_from_type_v2"), REBUILD, named("torch", "Tensor"), VIEW, {"data": 1}
    ),
    "another function for a tensor": call(
        named("torch._tensor", "_rebuild_from_type_v2"), named("torch._utils", "_rebuild_nested_tensor"),
        named("torch", "Tensor"), VIEW, {},
    ),
    "axes that are a size": call(
        named("numpy._core.numeric", "_frombuffer"), raw(bytes(8)), FLOAT64, (1,), "K",
        call(named("torch", "Size"), (0,)),
    ),
    "scales that are not a tensor": quantised(call(named("torch._utils", "_rebuild_parameter")), 0),
    "an axis that is not there": quantised(SCALES, 1),
    "fewer scales than the axis is long": quantised(call(REBUILD, storage(), 0, (3,), (1,), False, ORDERED), 0),
    "a class": named("mypkg", "Net"),
    "a name of Python 2 under protocol 4": b"\x80\4" + call(named("__builtin__", "set"), []),
    "a deep key": b"}" + b")" + b"\x85" * 100 + b"Ns",
    "keys of one hash": ops({index * ((1 << 61) - 1): 0 for index in range(1 << 11)}),
    "numbers whose places are taken": ops({index << 20: 0 for index in range(1, 1 << 15)}),
    "fractions whose places are taken": ops({float(index): 0 for index in range(1 << 15)}),
    "an index of a large number": ops({indexed("w", 1 << 61): 0}),
    "an index without a name": ops({indexed("", 1): 0}),
    "shared keys": b"}(" + b"K\1" * 64 + b"tq\1" + (b"0(" + b"h\1" * 64 + b"tq\1") * 4 + b"Ns",
    "copies of a list": ops(list(range(3000))) + b"q\1" + (b"0" + call(named("builtins", "set"), b"h\1")) * 999,
    "an index of the memo far out": b"K\1r\xff\xff\xff\x0f",
    "the id of a class with its source": ops(("module", named("torch.nn", "Linear"), "x.py", "")) + b"Q",
    "bytes that are not a storage": call(named("torch.storage", "_load_from_bytes"), raw(pickled({"a": 1}))),
    "bytes with another pickle behind": call(
        named("torch.storage", "_load_from_bytes"),
        raw(legacy(storage(rest=(None,)), [("0", 4, floats())]) + pickled(1)),
    ),
    "bytes with a split frame in them": call(
        named("torch.storage", "_load_from_bytes"),
        raw(in_a_split_frame(b"0" + call(named("os", "system"), "true") + b".")),
    ),
    "a stream whose storage had another type first": call(
        named("torch.storage", "_load_from_bytes"),
        raw(legacy(storage(dtype="QInt32Storage", rest=(None,)) + b"0" + storage(rest=(None,)), [("0", 4, floats())])),
    ),
    "a stream of a storage that calls something": call(
        named("torch.storage", "_load_from_bytes"),
        raw(legacy(call(named("collections", "OrderedDict")) + b"0" + storage(rest=(None,)), [("0", 4, floats())])),
    ),
    "a storage without bytes that is read at each use": (storage("1", 1, location="meta") + b"0") * 2 + b"N",
    "indexes of one hash": indexes_of_one_hash(2000),
    "tensors from what is there already": b"](" + REBUILD + b"q\0" + ops(VIEW) + b"q\1" + b"h\0h\1R" * 5000 + b"e",
    "sizes from what is there already": b"](" + named("torch", "Size") + b"q\0" + ops(((1,) * 64,)) + b"q\1"
    + b"h\0h\1R" * 5000 + b"e",
    "defaultdicts in each other": nested(2000, "defaultdict"),
    "deques in each other": nested(2000, "deque"),
    "deques and defaultdicts in each other": nested(1000, "deque", "defaultdict"),
    "one type of many fields, again and again": FLOAT64 + b"q\0" + ops(
        (3, "|", None, tuple(map(str, range(5000))), {str(index): (b"h\0", 0) for index in range(5000)}, 8, 1, 16)
    ) + b"q\1" + (call(named("numpy", "dtype"), "V8", False, True) + b"h\1b0") * 200,
    "flags with one key again and again": call(REBUILD, *VIEW, b"}(" + (ops("conj") + b"\x88") * 3 + b"u"),
    "an index with one key again and again": named("torch.distributed.checkpoint.metadata", "MetadataIndex")
    + b")\x81}(" + ops("fqn") * 8 + b"ub",
    "partials of partials": named("functools", "partial") + b"q\0" + ops("x") + b"q\1"
    + b"h\0(h\1tRq\2(h\1)}Ntbq\1" * 40,
    "an object of torch": named("torch.nn.modules.linear", "Linear") + b")\x81",
    "TorchScript's classes": named("__torch__", "Net") + b")\x81",
    "a class to be called later": call(named("collections", "defaultdict"), named("mypkg", "Net")),
}  # fmt: skip


@each(("name", "zipped"), in_turn(NO_DATA, [False, True]))
def test_what_is_of_no_row_is_not_data(name: str, zipped: bool, tmp_path: Path) -> None:
    tree = {"w": tensor(storage()), "x": NO_DATA[name]}
    data = torch_zip(tree, {"0": floats(), "1": bytes(4)}) if zipped else pickled({"x": NO_DATA[name]})
    (tmp_path / "x").write_bytes(data)
    assert check(tmp_path / "x").grade != "data"
    assert row(str(tmp_path / "x"))["grade"] != "data"


def test_a_tensor_is_data_in_these_forms_alone() -> None:
    fits: dict[int, list[Any]] = {
        0: [((4,), (1,)), ((2, 2), (2, 1)), ((2, 2), (1, 2)), ((0,), (9,)), ((4,), (0,))],
        1: [((0,), (9,)), ((4,), (0,))],
    }
    sound = torch_zip({"w": tensor(storage())}, {"0": floats()})
    no_views: list[Any] = [((2,), (-1,)), ((4,), (1, 1)), ((True,), (1,)), ([4], (1,)), ((1 << 62,), (1 << 62,))]
    hooks_of_others = (None, ORDERED, {}, built(ORDERED, {"_metadata": {}}))
    for at, view, grad, hooks in (
        *((at, view, False, None) for at, view in itertools.product((0, 1, -1, 1 << 40), [*fits[0], *no_views])),
        *((0, fits[0][0], grad, hooks) for grad, hooks in itertools.product((False, True, 0), hooks_of_others)),
    ):
        is_data = view in fits.get(at, ()) and isinstance(grad, bool) and hooks in (None, ORDERED)
        made = torch_zip({"w": call(REBUILD, storage(), at, *view, grad, hooks)}, {"0": floats()})
        held = zip_file({"a.pth": sound, "b.pth": made})  # alone, some of these would be refused, and so be no data
        assert (check(held).grade == "data") == is_data, (at, view, grad, hooks)


def test_what_these_are_made_of_is_data() -> None:
    fields = dtype("V16", 3, "|", None, ("a", "b"), {"a": (FLOAT64, 0), "b": (dtype("i4"), 8)}, 16, 1, 16)
    known = [
        ONE, array((1,), fields, bytes(16)), built(ORDERED, {"_metadata": {}}), call(named("__builtin__", "set"), [1]),
        built(named("argparse", "Namespace") + b")\x81", {"a": 1}), call(named("collections", "defaultdict")),
        call(named("_codecs", "encode"), "\xff", "latin1"), call(named("fractions", "Fraction"), "-1/3"),
        nested(400, "deque", "defaultdict"), ops({indexed("w", 1): 0}), ops(dict.fromkeys(range(1 << 15), 0)),
        ops({-index << 20: 0 for index in range(1 << 13)}),
    ]  # fmt: skip
    for one in known:
        assert check(pickled({"x": one})).grade == "data", one
    for one in (SCALES, quantised(SCALES, 0)):
        assert check(torch_zip({"x": one}, {"0": floats(), "1": bytes(4)})).grade == "data"


def test_what_numpy_and_torch_write_for_these_is_data() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tags, parameter.shape_of_old = ["a", 1], (2, None)
    times = np.array(["2026-01-01", "NaT"], "M8[25s]")
    for value in (times, times[0], times - times, np.timedelta64(1), np.str_(""), np.bytes_(b""), [np.floating]):
        for protocol in (2, 4, 5):
            data = pickle.dumps(value, protocol)
            assert check(data).grade == "data", (value, protocol)
    assert check(pickle.dumps(torch.channels_last, 4)).grade == "data"
    assert check(pickle.dumps(parameter, 4)).grade == "data"


def test_numbers_that_lie_about_a_time_are_not_data() -> None:
    for nothing in (None, {}):  # with numpy 2, and before
        honest = dtype("M8", 4, "<", None, None, None, -1, -1, 0, (nothing, (raw(b"ns"), 1, 1, 1)))
        assert check(pickled({"x": array((1,), honest, bytes(8))})).grade == "data"
    for unit in (
        ({"a": 1}, (raw(b"ns"), 1, 1, 1)),
        (None, (raw(b"xs"), 1, 1, 1)),
        (None, (raw(b"ns"), 0, 1, 1)),
        (None, (raw(b"ns"), 1, 2, 1)),
        (None, ()),
    ):
        kind = dtype("M8", 4, "<", None, None, None, -1, -1, 0, unit)
        assert check(pickled({"x": array((1,), kind, bytes(8))})).grade == "code"
    assert check(pickled({"x": array((1,), dtype("M8"), bytes(8))})).grade == "code"
    nothing = dtype("U0", 3, "<", None, None, None, 0, 4, 8)
    assert check(pickled({"x": array((1 << 61,), nothing, b"")})).grade == "code"


BESIDE = ("fractions.py", "numbers.py", "torch/__init__.py", "fractions/__init__.pyc", "sympy/__init__.abi3.so")


@each("module", BESIDE)
def test_a_module_beside_the_file_may_be_imported(module: str, tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(pickled({"x": call(named("fractions", "Fraction"), "1/2")}))
    assert check(tmp_path / "x.pkl").grade == "data"
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / module).write_text("raise SystemExit")
    report = check(tmp_path / "x.pkl")
    assert report.grade == "code"
    assert row(str(tmp_path / "x.pkl"))["grade"] == "code"


@pytest.mark.parametrize("other", [("0", 4, "QInt32Storage"), ("0", 1 << 20, "FloatStorage")])
def test_all_ids_of_a_storage_are_of_one_type_and_size(other: tuple[str, int, str]) -> None:
    """torch takes those of the first that it meets, of a value that is dropped, too."""
    first = storage(*other, rest=(None,)) + b"0"
    tree = ops({"w": tensor(storage(rest=(None,)))})
    assert check(legacy(tree, [("0", 4, floats())])).grade == "data"
    assert check(legacy(first + tree, [("0", 4, floats())])).grade == "code"
    view = storage(rest=(("0", 0, 4),))  # of itself, as the first that has this key
    assert check(legacy(view + b"0" + tree, [("0", 4, floats())])).grade == "code"


def test_a_state_of_pairs_in_pairs_takes_no_time() -> None:
    for pairs in (b"2\x86" * 60, b"N\x86" * 20_000):
        data = b"\x80\x02]N" + pairs + b"b."
        with pytest.raises((AttributeError, pickle.UnpicklingError)):
            pickle.loads(data)
        assert check(data).grade == "code"


def test_each_storage_is_as_long_as_its_record() -> None:
    more = storage(numel=1 << 22) + b"0"
    report = check(torch_zip(more + ops({"w": tensor(storage())}), {"0": floats()}))
    assert report.error is not None
    assert report.error.kind == "storage-size"


RUNS = call(named("os", "system"), "true")
GOES_ON = {
    "an item of a bytearray": b"\x80\5\x96" + pack("<Q", 1) + b"aK\0K\0s",
    "items of a bytearray": b"\x80\5\x96" + pack("<Q", 1) + b"a(K\0K\0u",
    "an index that is put and ends with a zero byte": b"Np1\0x\n",
    "an index that is got and ends with a zero byte": b"Nq\1" + b"g1\0x\n",
    "an index of minus nothing": b"Nq\0" + b"g-00\n",
}


@each("name", GOES_ON)
def test_what_python_goes_on_with_hides_nothing_behind_it(name: str, tmp_path: Path) -> None:
    data = GOES_ON[name] + RUNS + b"."
    assert pickle.loads(GOES_ON[name] + b"K\7.") == 7
    (tmp_path / "model.pth").write_bytes(torch_zip({"w": tensor(storage())}, {"0": floats()}))
    (tmp_path / "optimizer.pkl").write_bytes(data)
    assert check(tmp_path).grade == "system"
    assert check(zip_file({"optimizer.pkl": data})).grade == "system"


CHECKSUMS = {
    "as GNU writes it": lambda header: b"%06o\0 " % sum(header, 256),
    "in binary": lambda header: b"\x80" + sum(header, 256).to_bytes(7, "big"),
    "of signed bytes": lambda header: b"%06o\0 " % sum(memoryview(header).cast("b"), 256),
    "as Python writes octal numbers": lambda header: b"0o%06o" % sum(header, 256),
    "with a low line": lambda header: b"0_%06o" % sum(header, 256),
    "between other blanks": lambda header: b"\t%06o\n" % sum(header, 256),
    "between blanks alone": lambda header: b"%07o " % sum(header, 256),
    "with more behind it": lambda header: b"%06o\0z" % sum(header, 256),
}


def as_tar(begin: bytes, checksum: str, nbytes: int = 0) -> bytes:
    """Bytes in whose first block is the header of a member of so many bytes."""
    head = bytearray(begin.ljust(512, b"a")[:512])
    head[100:148] = (b"0000000 " * 3 + b"%011o " % nbytes + b"0" * 12)[:48]
    head[156:157], head[257:265], head[329:345] = b"0", b"ustar 00", b"0" * 16
    head[148:156] = CHECKSUMS[checksum](bytes(head[:148] + head[156:]))
    return bytes(head) + begin[512:]


@each("checksum", CHECKSUMS)
def test_what_some_reader_takes_for_a_tar_is_looked_at_as_one(checksum: str, tmp_path: Path) -> None:
    """torch.load() asks whether a file is a tar before anything else."""
    inner = torch_tar(storages=RUNS)
    (tmp_path / "x").write_bytes(as_tar(b"\x80\2B" + pack("<I", 505 + len(inner)), checksum) + inner + b"0N.")
    with tarfile.open(tmp_path / "x") as found:
        assert "storages" in found.getnames()
    assert check(tmp_path / "x").grade == "system"


@pytest.mark.parametrize("length", [1528, 1536])
def test_safetensors_that_are_a_tar_as_well_are_looked_at_as_one(length: int, tmp_path: Path) -> None:
    inner = bytes(-(8 + length) % 512) + torch_tar(storages=RUNS)
    end = f'"}},"w":{{"dtype":"U8","shape":[{len(inner)}],"data_offsets":[0,{len(inner)}]}}}}'.encode()
    header = b'{"__metadata__":{"a":"'.ljust(length - len(end), b"x") + end
    nbytes = (length + 7) // 512 * 512
    data = as_tar(pack("<Q", length) + header, "between blanks alone", nbytes) + inner
    (tmp_path / "x.safetensors").write_bytes(data)
    with tarfile.open(tmp_path / "x.safetensors") as found:
        assert "storages" in found.getnames()
    report = check(tmp_path / "x.safetensors")
    assert (report.format, report.error) == ("safetensors", None)
    for grade in (report.grade, check(zip_file({"in.safetensors": data})).grade):
        assert grade in (("system",) if length == 1528 else ("system", "code")), grade  # or a folder with a size


@pytest.mark.parametrize("name", ["storages", "tensors"])
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_a_link_in_place_of_a_member_of_a_tar_may_lead_anywhere(name: str, kind: bytes, tmp_path: Path) -> None:
    """torch.load() unpacks these two, and reads what a link leads to, which is not part of the file."""
    parts = {"storages": pickled(0) + pickled([]), "tensors": pickled(0), "pickle": pickled({"a": 1})}
    link = tarfile.TarInfo(name)
    link.type, link.linkname = kind, str(tmp_path / "other.pkl")
    for is_last in (False, True):
        sound, head = tar_file(parts), link.tobuf()
        (tmp_path / "x.tar").write_bytes(sound[:-1024] + head + bytes(1024) if is_last else head + sound)
        report = check(tmp_path / "x.tar")
        assert (report.grade, report.error and report.error.kind) == ("code", "ambiguous-tar")
    assert check(tar_file(parts)).grade == "data"


def tar_member(name: str, data: bytes, kind: bytes = b"0", **fields: Any) -> bytes:
    """A header that says that there are so many bytes, whatever the kind, and these."""
    info = tarfile.TarInfo(name)
    info.size, info.type = fields.get("size", len(data)), kind
    info.linkname = fields.get("linkname", "")
    header = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    for at, value in fields.get("put", {}).items():
        header[at : at + len(value)] = value
    header[124:136] = b"%011o\0" % info.size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data + bytes(-len(data) % 512)


def stored(count: bytes, *entry: Any) -> bytes:
    """A table of storages, with a call behind the bytes of the first."""
    return (
        count
        + pickled(entry[0] if entry else (1, "cpu", named("torch", "FloatStorage")))
        + (pack("<q", 4) + floats() + pickled(RUNS))
    )


HIDDEN = tar_member("storages", stored(pickled(1)))
FLOAT = named("torch", "FloatStorage")
SOUND_TAR = tar_file({"storages": pickled(0) + pickled([]), "tensors": pickled(0), "pickle": pickled({"a": 1})})
NO_SOUND_TARS = {
    "a table alone": HIDDEN,
    "a table beside a model": tar_member("m.pt", torch_zip({"w": tensor(storage())}, {"0": floats()})) + HIDDEN,
    "a count that is a truth": tar_member("storages", stored(b"\x80\2\x88.")),
    "a key that is a tuple": tar_member("storages", stored(pickled(1), ((1,), "cpu", FLOAT))),
    "an entry that is a list": tar_member("storages", stored(pickled(1), [1, "cpu", FLOAT])),
    "a folder with a size": SOUND_TAR[:-1024] + tar_member("d", HIDDEN, b"5"),
    "a link with a size": SOUND_TAR[:-1024] + tar_member("d", HIDDEN, b"2", linkname="y"),
    "a folder by its name": SOUND_TAR[:-1024] + tar_member("d/", HIDDEN, b"\0"),
    "a folder with an extended size": (
        SOUND_TAR[:-1024] + tar_member("p", b"13 size=%d\n" % len(HIDDEN), b"x") + tar_member("d", HIDDEN, b"5", size=0)
    ),
    "an extended name with a slash": tar_member("p", b"18 path=storages/\n", b"x")
    + tar_member("f", stored(pickled(1))),
    "an extended header whose first line is of no key": (
        tar_member("m.pt", torch_zip({"w": tensor(storage())}, {"0": floats()}))
        + tar_member("p", b"5 =x\n10 path=m\n", b"x")
        + tar_member("storages", b"K\1.(K\1Vcpu\n" + FLOAT + b"t." + pack("<q", 4) + floats() + RUNS + b".")
    ),
    "a table for those who take no name for none": (
        tar_member("m.pt", torch_zip({"w": tensor(storage())}, {"0": floats()}))
        + tar_member("l", b"\0", b"L")
        + tar_member("storages", pickled(0) + pickled([]))
    ),
    "a header of Solaris": tar_member("p", b"17 path=storages\n", b"X") + tar_member("foo", stored(pickled(1))),
    "a link to a table": tar_member("foo", stored(pickled(1))) + tar_member("storages", b"", b"1", linkname="foo"),
    "a sparse file with a long list": SOUND_TAR[:-1024] + tar_member("s", bytes(512), b"S", put={482: b"\1"}),
    "names of two kinds": (
        tar_member("l", b"storages\0", b"L") + tar_member("l", b"y\0", b"K") + tar_member("f", stored(pickled(1)))
    ),
}


@each("name", NO_SOUND_TARS)
def test_what_tars_hide_from_some_of_their_readers_is_not_data(name: str, tmp_path: Path) -> None:
    """torch.load() reads the tables of a tar by the tarfile of Python, before it misses another member."""
    file = tmp_path / "x.pt"
    file.write_bytes(NO_SOUND_TARS[name] + bytes(1024))
    assert check(file).grade not in ("data", None)
    assert invoke(["check", "--fail-on", "code", str(file)]).exit_code != 0
    (tmp_path / "model.pth").write_bytes(torch_zip({"w": tensor(storage())}, {"0": floats()}))
    file.rename(tmp_path / "x.dat")
    assert check(tmp_path).grade != "data"


def test_a_storage_that_is_an_array_of_objects_is_looked_into(tmp_path: Path) -> None:
    """numpy.load() opens any zip, and takes a member for an array by its first bytes."""
    for kind, grade in (("|O", "system"), ("|u1", "data")):
        head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': (1,), }}".encode().ljust(117) + b"\n"
        array = b"\x93NUMPY\1\0\x76\0" + head + (pickled(call(named("os", "getpid"))) if kind == "|O" else b"\7")
        stored = tensor(storage(dtype="ByteStorage", numel=len(array)), (len(array),))
        members = {"archive/data.pkl": pickled({"w": stored}), "archive/data/0": array, "archive/version": b"3\n"}
        for deflated in ((), ("archive/data/0",)):
            (tmp_path / "x.pt").write_bytes(zip_file(members, deflated=deflated))
            with np.load(tmp_path / "x.pt", allow_pickle=True) as found:
                assert found["archive/data/0"] == (os.getpid() if kind == "|O" else 7)
            assert check(tmp_path / "x.pt").grade == grade
            assert check(zip_file({"in.pt": (tmp_path / "x.pt").read_bytes()})).grade == grade


def test_a_protocol_that_changes_changes_names() -> None:
    name = call(named("__builtin__", "set"), [])
    assert check(b"\x80\2" + name + b".").grade == "data"
    for data in (b"\x80\4\x80\2" + name + b".", b"\x80\2\x80\4" + name + b".", b"\x80\4" + name + b"."):
        assert check(data).grade == "code"


@pytest.mark.parametrize("place", ["folder", "zip"])
@pytest.mark.parametrize(
    "refused",
    [b"\x80\x02N\xff.", tar_file({"tensors": pickled(0), "pickle": pickled({"a": 1})})],
    ids=["no opcode", "a tar without storages"],
)
def test_what_could_not_be_opened_beside_a_model_is_not_called_data(refused: bytes, place: str, tmp_path: Path) -> None:
    whole = torch_zip({"w": tensor(storage())}, {"0": floats()})
    files = {"model.pth": whole, "optimizer.pt": refused}
    if place == "folder":
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        path = tmp_path
    else:
        path = tmp_path / "x.zip"
        path.write_bytes(zip_file(files))

    assert check(path).grade == "code"
    assert invoke(["check", "--fail-on", "code", str(path)]).exit_code == 1


RUN_BEHIND = b"\x80\4B" + pack("<I", 0x2007) + b"a" * 0x2007 + b"0" + call(named("os", "getpid")) + b"."


def of_ascii(data: bytes) -> bytes:
    """Return zlib of data in the fixed code, which keeps so much of it in ASCII as the data allows."""
    bits = [1, 1, 0]
    for one in data:
        code, count = (0x30 + one, 8) if one < 144 else (0x190 + one - 144, 9)
        bits += [code >> at & 1 for at in reversed(range(count))]
    bits += [0] * (7 + -(len(bits) + 7) % 8)
    packed = bytes(sum(bit << at for at, bit in enumerate(bits[begin : begin + 8])) for begin in range(0, len(bits), 8))
    return b"x^" + packed + pack(">I", zlib.adler32(data))


def zip_at_end(behind: int) -> bytes:
    """Return a pickle of one string, in which a zip stands with so many bytes behind it."""
    inner = b"z" * 9 + zip_file({"x/data.pkl": RUN_BEHIND, "x/version": b"3\n"}) + b"q" * behind
    return b"\x80\2B" + pack("<I", len(inner)) + inner + b"0N."


def long_dictionary(data: bytes) -> bytes:
    packed = bytearray(lzma.compress(data, lzma.FORMAT_ALONE))
    packed[1:5] = pack("<I", 1 << 30)
    return bytes(packed)


def array_behind_padding() -> bytes:
    """Return what torch.load() reads, with a storage that is an array of objects, behind the longest padding."""
    array = array_of("|O", pickled(call(named("os", "getpid"))))
    stored = tensor(storage("k" * 220, numel=len(array), dtype="ByteStorage"), (len(array),))
    tree = {"a": tensor(storage("1", numel=2048), (2048,)), "w": stored}
    data = zip_file({"archive/data.pkl": pickled(tree), "archive/version": b"3\n", "archive/data/1": floats(2048)})
    name, extra = b"archive/data/" + b"k" * 220, b"FB" + pack("<H", 66) + bytes(66)
    begin = data.index(b"PK\1\2")
    common = pack("<4H3LH", 0, 0, 0, 0, zlib.crc32(array), len(array), len(array), len(name))
    member = b"PK\3\4\0\0" + common + pack("<H", len(extra)) + name + extra + array
    entry = b"PK\1\2\0\0\0\0" + common + bytes(2) + pack("<3H2L", 0, 0, 0, 0, begin) + name
    entries = data[begin : data.rindex(b"PK\5\6")] + entry
    end = pack("<4s4H2LH", b"PK\5\6", 0, 0, 4, 4, len(entries), begin + len(member), 0)
    return data[:begin] + member + entries + end


def array_of(code: str, content: bytes) -> bytes:
    head = f"{{'descr': '{code}', 'fortran_order': False, 'shape': (1,), }}".encode()
    return b"\x93NUMPY\1\0\x76\0" + head.ljust(117) + b"\n" + content


NUMBERS, OBJECTS = array_of("<f4", bytes(4)), array_of("|O", RUN_BEHIND)


def of_properties(**options: int) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA1, "dict_size": 1 << 16, **options}]
    return lzma.compress(RUN_BEHIND, lzma.FORMAT_ALONE, filters=filters)


def stored_for_some() -> bytes:
    """Return a zip behind something else, whose member is packed for its directory and stored for its header."""
    packed = zip_file({"a": RUN_BEHIND}, deflated=["a"])
    assert packed[8] == 8
    return b"something else" + packed[:8] + b"\0" + packed[9:]


def two_directories() -> bytes:
    """Return a zip in whose zip64 end record stands another one, with another directory, where zipfile looks for it."""
    one, two = zip_bytes.stored("a.npy", NUMBERS), zip_bytes.stored("b.npy", OBJECTS)
    first = zip_bytes.local_header(one) + NUMBERS + b"\0"
    body = first + zip_bytes.local_header(two) + OBJECTS
    directory, other = zip_bytes.entry(one, 0), zip_bytes.entry(two, len(first))
    at = len(body) + len(directory)
    record = zip_bytes.end64(1, len(directory), len(body), at, size=44 + len(other) + 56)[:56]
    last = zip_bytes.end64(1, len(other), at + 56, at) + zip_bytes.end(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
    return body + directory + record + other + last


def flatbuffer_in_a_pickle() -> bytes:
    """Return a pickle of bytes that is a flatbuffer, too, whose first offset is the opcode and the length of a text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        script = torch.jit.script(torch.nn.Linear(2, 3))
        found = script._save_to_buffer_for_lite_interpreter(_use_flatbuffer=True)
    moved = (0x408C - int.from_bytes(found[:4], "little")) // 8 * 8
    text = b"\0\0PTMF".ljust(0x40, b"\0")
    data = bytes(moved + 8 - len(text) - 2 - 2 - 5) + found[8:]
    return b"\x8c\x40" + text + b"0(B" + pack("<I", len(data)) + data + b"l."


def pickle_in_safetensors(before: bytes) -> bytes:
    """Return safetensors whose first byte begins a pickle: its header is two texts, and the tensor goes on with it."""
    data = b"\n" + before + RUN_BEHIND
    text = b'{"__metadata__":{"a":"%s"},"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}'
    return pack("<Q", 0x2858) + (text % (b"V" * 40, len(data), len(data))).ljust(0x2858) + data


XZ, ALONE = (partial(lzma.compress, format=kind) for kind in (lzma.FORMAT_XZ, lzma.FORMAT_ALONE))
RUN_BY_SOME = {
    "zlib of ascii": lambda: of_ascii(RUN_BEHIND),
    "a dictionary of a gibibyte": lambda: long_dictionary(RUN_BEHIND),
    "lzma behind nothing of xz": lambda: XZ(b"") + ALONE(RUN_BEHIND),
    "xz behind nothing of lzma": lambda: ALONE(b"") + XZ(RUN_BEHIND),
    "lzma behind xz": lambda: XZ(RUN_BEHIND[:2]) + ALONE(RUN_BEHIND[2:]),
    "lzma behind an empty one of zeros": lambda: XZ(RUN_BEHIND[:2]) + bytes(18) + ALONE(RUN_BEHIND[2:]),
    "a zip 66,500 bytes before the end": lambda: zip_at_end(66_500),
    "a zip 69,400 bytes before the end": lambda: zip_at_end(69_400),
    "a zip further than another end": lambda: zip_at_end(69_400)[:-3] + b"PK\5\6" + b"0N.",
    "a zip somewhat behind a pickle": lambda: pickled({"a": 1}) + bytes(3) + zip_file({"a": RUN_BEHIND}),
    "a zip whose headers say that it is stored": stored_for_some,
    "a zip behind many headers": lambda: (
        bytes(9) + (b"PK\3\4" + bytes(14) + b"\1\0\0\0" * 2 + bytes(5)) * 10_001 + zip_file({"a": RUN_BEHIND})
    ),
    "a zip of two directories": two_directories,
    "lzma of other properties": lambda: of_properties(pb=0, lc=0),
    "lzma of a short dictionary": lambda: of_properties()[:1] + pack("<I", 128) + of_properties()[5:],
    "a name in a tar": lambda: tar_file({"cmypkg\nrun\n(Vx\ntR.": pickled({"a": 1})}),
    "an imported name in a tar": lambda: tar_file({"cmypkg\nrun\n.": pickled({"a": 1})}),
    "a name of a later protocol in a tar": lambda: tar_file({"\udc80\x04cmypkg\nrun\n(Vx\ntR.": pickled({"a": 1})}),
    "a name in a frame in a tar": lambda: tar_file(
        {"\udc80\x04\udc95\x05" + "\0" * 7 + "cmypkg\nrun\n(Vx\ntR.": pickled({"a": 1})}
    ),
    "an array that imports": lambda: array_of("|O", b"cmypkg\nrun\n\xff"),
    "an array by another name": lambda: array_of("object", b"cmypkg\nrun\n\xff"),
    "an array of a number and an object": lambda: array_of("f4,O", b"cmypkg\nrun\n\xff"),
    "an array by an escape": lambda: array_of(r"\x4f", b"cmypkg\nrun\n\xff"),
    "a member called like a folder": lambda: zip_file({"a.npy": NUMBERS, "b/": OBJECTS}),
    "an array behind padding": array_behind_padding,
    "a pickle behind zlib": lambda: zlib.compress(pickled({"a": 1})) + RUN_BEHIND,
    "a pickle behind bzip2": lambda: bz2.compress(pickled({"a": 1})) + RUN_BEHIND,
    "zlib behind zlib, which joblib reads without end": lambda: zlib.compress(pickled({"a": 1})) + zlib.compress(b""),
    "zeros behind gzip, which joblib reads without end": lambda: gzip.compress(pickled({"a": 1})) + bytes(9),
    "a number that is long in safetensors": lambda: pickle_in_safetensors(b"\x8b" + pack("<i", 2000) + bytes(2000)),
    "a number of many digits in safetensors": lambda: pickle_in_safetensors(b"L" + b"1" * 2000 + b"L\n"),
    "marks in safetensors": lambda: pickle_in_safetensors(b"(" * 1_000_000),
    "native code of a model without a name": lambda: torch_zip(
        {"a": 1}, members={"archive/data/aotinductor//x.wrapper.so": b"\x7fELF"}
    ),
    "native code in a zip of torch": lambda: torch_zip(
        {"a": 1}, members={"archive/data/aotinductor/model/x.wrapper.so": b"\x7fELF"}
    ),
}


@each(("kind", "name"), (itertools.product if scale else in_turn)(RUN_BY_SOME, ["x.pkl", "x.joblib"]))
def test_what_only_some_loader_unpacks_or_finds_is_not_called_data(kind: str, name: str, tmp_path: Path) -> None:
    made, good = RUN_BY_SOME[kind](), torch_zip({"w": tensor(storage())}, {"0": floats()})
    (tmp_path / name).write_bytes(made)
    (tmp_path / "both.zip").write_bytes(zip_file({name: made, "good.pt": good}))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.pth").write_bytes(good)
    (tmp_path / "folder" / "x.dat").write_bytes(made)
    for path in (tmp_path / name, tmp_path / "both.zip", tmp_path / "folder"):
        assert check(path).grade != "data"
        assert invoke(["check", "--fail-on", "code", str(path)]).exit_code != 0


def test_the_bytes_of_what_only_some_loader_unpacks_are_what_that_loader_reads(tmp_path: Path) -> None:
    assert of_ascii(RUN_BEHIND)[:4096].isascii()
    assert zlib.decompress(of_ascii(RUN_BEHIND)) == RUN_BEHIND
    for kind in (one for one in RUN_BY_SOME if one.endswith("in safetensors")):
        assert pickle.loads(RUN_BY_SOME[kind]()) == os.getpid()
    for kind in (one for one in RUN_BY_SOME if one.startswith(("lzma behind xz", "lzma behind nothing", "lzma of"))):
        with lzma.open(io.BytesIO(RUN_BY_SOME[kind]())) as found:
            assert found.read() == RUN_BEHIND
    assert bz2.BZ2File(io.BytesIO(RUN_BY_SOME["a pickle behind bzip2"]())).read() == pickled({"a": 1})
    (tmp_path / "x.pt").write_bytes(array_behind_padding())
    with np.load(tmp_path / "x.pt", allow_pickle=True) as found:
        assert found["archive/data/" + "k" * 220] == os.getpid()
    for kind, name in (("a zip of two directories", "b"), ("a member called like a folder", "b/")):
        with np.load(io.BytesIO(RUN_BY_SOME[kind]()), allow_pickle=True) as found:
            assert found[name] == os.getpid()
    for kind in ("a zip whose headers say that it is stored", "a zip behind many headers"):
        with zipfile.ZipFile(io.BytesIO(RUN_BY_SOME[kind]())) as opened:
            assert opened.read("a") == RUN_BEHIND


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, zlib.compress])
def test_bytes_behind_a_compressed_file_keep_nobody_from_reading_it(
    compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    plain = save({"w": torch.arange(500.0)})
    zeros = () if compress is bz2.compress else ((plain, bytes(512)),)  # joblib never ends there
    for data, behind in (*zeros, (torch_zip({"a": 1}), b"ab"), (plain, b"ab"), (plain, RUN_BEHIND)):
        (tmp_path / "x").write_bytes(compress(data) + behind)
        report = check(tmp_path / "x")
        assert report.grade not in ("data", None)
        assert f"{len(behind):,} bytes at {len(compress(data)):,}, which not every loader unpacks" in str(report)
    assert torch.equal(load(tmp_path / "x")["w"], torch.arange(500.0))
    if not zeros:
        (tmp_path / "x").write_bytes(compress(plain) + bytes(512))
        assert check(tmp_path / "x").grade == "data"


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_a_program_in_what_another_loader_reads_as_data_is_said(tmp_path: Path) -> None:
    twofold = flatbuffer_in_a_pickle()
    (tmp_path / "x.pt").write_bytes(twofold)
    assert torch.jit.load(tmp_path / "x.pt")(torch.ones(2)).shape == (3,)
    assert len(pickle.loads(twofold)) == 1
    exported = torch_zip({"a": 1}, members={"serialized_exported_program.json": b"{}"})
    for data in (twofold, zip_file({"x": twofold}), exported):
        assert check(data).grade not in ("data", "system")


def test_texts_that_begin_like_zlib_are_passed_over(tmp_path: Path) -> None:
    for text in ("x^2 + y^2 = r^2 is a circle\n" * 40, "x^n + 1 has n roots", "x ~ N(0, 1)", "x} and {y"):
        (tmp_path / "x.txt").write_text(text)
        found = invoke(["check", "--fail-on", "code", str(tmp_path / "x.txt")])
        assert found.exit_code == 0, text


def test_zeros_behind_xz_are_padding() -> None:
    for pack_up in (XZ, ALONE):
        assert check(pack_up(pickled({"a": 1})) + bytes(512)).grade == "data"


HONEST = {
    "a zip of torch": torch_zip({"w": tensor(storage())}, {"0": floats()}),
    "a legacy stream": legacy({"w": tensor(storage(rest=(None,)))}, [("0", 4, floats())]),
    "a pickle": pickled({"a": 1}),
    "a tar of a zip": tar_file({"w.pth": torch_zip({"w": tensor(storage())}, {"0": floats()})}),
}


@pytest.mark.parametrize("name", HONEST)
def test_a_file_with_bytes_that_have_no_part_in_its_format_is_no_data(name: str, tmp_path: Path) -> None:
    sound = HONEST[name]
    for behind, is_data in ((b"", True), (bytes(4096), True), (bytes(9) + b"x", False)):
        path = tmp_path / f"{len(behind)}.bin"
        path.write_bytes(sound + behind)
        report = check(path)
        assert (report.grade == "data") == is_data, behind
        assert ("CK209" in [one.code for one in report.findings]) != is_data
        assert invoke(["check", "-q", "--fail-on", "system", str(path)]).exit_code == (not is_data)


@each("name", ["__0_0.distcp", ".metadata"])
def test_bytes_behind_the_parts_of_a_folder_are_no_data(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    shutil.copytree("fixtures/folders/dcp", folder)
    assert check(folder).grade == "data"
    with (folder / name).open("ab") as file:
        file.write(b"x")
    assert check(folder).grade == "code"


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.getpid, ()


LOST: dict[str, Callable[[bytes, _StorageInfo], tuple[bytes, _StorageInfo]]] = {
    "as it is": lambda data, place: (data, place),
    "one byte too long": lambda data, place: (data, replace(place, length=place.length + 1)),
    "a zip whose headers differ": lambda data, place: (data[:14] + b"diff" + data[18:], place),
}


def test_a_value_that_is_a_program_is_no_data(tmp_path: Path) -> None:
    """torch.load() gives it to torch.jit.load()."""
    writer = dcp_folder.Writer(tmp_path / "dcp")
    writer.value("x", 1)
    index, place = next(iter(writer.metadata.storage_data.items()))
    (writer.folder / "__0_0.distcp").write_bytes(torchscript())
    writer.metadata.storage_data[index] = replace(place, length=len(torchscript()))
    assert check(writer.close()).grade == "code"


@each("change", LOST)
def test_a_value_that_its_loader_reads_and_ckptool_cannot_is_no_data(change: str, tmp_path: Path) -> None:
    writer = dcp_folder.Writer(tmp_path / "dcp")
    writer.tensor("w", torch.ones(2))
    writer.value("x", Runs(), "values.distcp")
    (index,) = (one for one in writer.metadata.storage_data if one.fqn == "x")
    file = writer.folder / "values.distcp"
    data, place = LOST[change](file.read_bytes(), writer.metadata.storage_data[index])
    file.write_bytes(data)
    writer.metadata.storage_data[index] = place
    dcp_to_torch_save(writer.close(), tmp_path / "loaded.pt")
    assert torch.load(tmp_path / "loaded.pt")["x"] == os.getpid()
    assert check(writer.folder).grade != "data"
    assert row(str(writer.folder))["grade"] != "data"


def test_a_piece_of_a_tensor_that_runs_something_is_no_data(tmp_path: Path) -> None:
    """torch.distributed.checkpoint.load() opens each by torch.load()."""
    writer = dcp_folder.Writer(tmp_path / "dcp")
    writer.tensor("w", torch.ones(4))
    (index,) = writer.metadata.storage_data
    piece = tensor(storage())
    for grade, data in (
        ("data", torch_zip(piece, {"0": floats()})),
        ("system", torch_zip(RUNS + b"0" + piece, {"0": floats()})),
        ("code", torchscript()),
        ("code", b"no file of torch.save"),
    ):
        (writer.folder / "__0_0.distcp").write_bytes(data)
        writer.metadata.storage_data[index] = replace(writer.metadata.storage_data[index], length=len(data))
        report = check(writer.close())
        assert (report.grade, report.known_grade) == (grade, row(str(writer.folder))["grade"])
        assert (invoke(["check", "--fail-on", "code", str(writer.folder)]).exit_code == 0) == (grade == "data")


@each("name", ["__5_0.distcp", "__0.metadata", "common.pt", "latest", ".metadata.tmp", "a/b"])
def test_a_file_that_belongs_to_a_layout_and_is_not_read_is_looked_at(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    shutil.copytree("fixtures/folders/dcp", folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(pickled(RUNS))
    assert check(folder).grade == "system"


@each("first", [pickled({"a": 1}), legacy({"a": 1}), *HONEST.values()])
def test_bytes_behind_a_neighbour_are_no_data(first: bytes, tmp_path: Path) -> None:
    write = tmp_path / "model.pth", tmp_path / "x.bin"
    write[0].write_bytes(HONEST["a zip of torch"])
    for behind, grade in ((b"", "data"), (bytes(99), "data"), (b"\xff" * 9 + RUN_BEHIND, "code")):
        write[1].write_bytes(first + behind)
        assert check(tmp_path).grade == grade
