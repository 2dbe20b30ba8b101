"""What unpickling a file would call is said, graded and placed, whatever hides it and whatever it is packed in."""

from __future__ import annotations

import argparse
import bz2
import collections
import datetime as dt
import decimal
import enum
import fractions
import functools
import gzip
import io
import itertools
import logging
import lzma
import os
import pathlib
import pickle
import random
import sys
import types
import uuid
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from struct import pack
from time import process_time
from typing import Any

import numpy as np
import pytest
import torch

from ckptool import CheckReport, check
from ckptool.fleet import row
from ckptool.reference.nets import LeNet
from tests.against_torch.test_joblib_files import dumped, wrapped
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
    zip_file,
)
from tests.checking.test_containers import PACKED, Nested, streamed, zipped
from tests.each import each
from tests.program import invoke
from tests.scale import in_turn

OS = named("os", "system")
NAMESPACE = named("argparse", "Namespace")


def dotted(module: str, name: str) -> bytes:
    """Return STACK_GLOBAL: since protocol 4 a name may have dots."""
    return ops(module) + ops(name) + b"\x93"


# Each calls os.system("true"), or what is as bad.
FUNCTION = call(named("types", "FunctionType"), call(named("types", "CodeType"), 0, 0, 0, 0, 0, 0, raw(b"\0"), ()), {})
MADE = call(named("cloudpickle.cloudpickle", "_make_function"), 1, {}, None, None, None)


def having(attribute: str, function: bytes = OS) -> bytes:
    """Return an object with a function of the system in the place of a method."""
    return call(NAMESPACE) + ops({attribute: function}) + b"b"


PAYLOADS: dict[str, bytes] = {
    "REDUCE": call(OS, "true"),
    "INST": b"(" + ops("true") + b"ios\nsystem\n",
    "OBJ": b"(" + OS + ops("true") + b"o",
    "eval": call(named("__builtin__", "eval"), "1"),
    "posix": call(dotted("posix", "system"), "true"),
    "dotted": call(dotted("torch", "serialization.os.system"), "true"),
    "getattr": call(call(named("builtins", "getattr"), named("os", "path.os"), "system"), "true"),
    "getattr of a module": call(
        call(named("builtins", "getattr"), call(named("importlib", "import_module"), "os"), "system"), "true"
    ),
    "getitem": call(
        call(named("builtins", "getattr"), call(named("operator", "getitem"), named("sys", "modules"), "os"), "system"),
        "true",
    ),
    "sys.modules.get": call(call(call(named("builtins", "getattr"), named("sys", "modules"), "get"), "os")),
    "DataFrame.query": call(
        call(named("builtins", "getattr"), call(named("pandas.core.frame", "DataFrame")), "query"), "@__import__('os')"
    ),
    "partial": call(call(named("functools", "partial"), OS, "true")),
    "partial by its state": call(named("functools", "partial"), named("builtins", "int"))
    + ops((OS, ops(("true",)), {}, None))
    + b"b",
    "attrgetter": call(call(call(named("operator", "attrgetter"), "system"), named("shutil", "os")), "true"),
    "map": call(named("builtins", "list"), call(named("builtins", "map"), OS, ["true"])),
    "__setstate__ of an instance": call(NAMESPACE) + ops({"__setstate__": OS}) + b"b" + ops("true") + b"b",
    "extend of an instance": call(NAMESPACE) + ops({"extend": OS}) + b"b(" + ops("true") + b"e",
    "_reconstructor": call(
        named("copy_reg", "_reconstructor"), named("subprocess", "Popen"), named("subprocess", "Popen"), "true"
    ),
    "_rebuild_from_type_v2": call(
        named("torch._tensor", "_rebuild_from_type_v2"), OS, named("torch", "Tensor"), ("true",), {}
    ),
    "popped": call(OS, "true") + b"0N",
    "a pickle in bytes": raw(pickled(call(OS, "true"))),
    "a pickle in text": ops(pickled(call(OS, "true")).decode("latin-1")),
    "a zip in bytes": raw(torch_zip(call(OS, "true"))),
    "_load_from_bytes": call(named("torch.storage", "_load_from_bytes"), raw(legacy(call(OS, "true")))),
    "pickle.loads": call(named("pickle", "loads"), raw(b"I1\n.")),
    "sys.modules": named("sys", "modules") + ops("os") + ops(1) + b"s",
    "sys.path": named("sys", "path") + b"(" + ops("/tmp") + b"e",
    "attributes of a class": named("collections", "OrderedDict") + ops({"pop": 1}) + b"b",
    "a name that is computed": call(call(named("builtins", "str"), raw(b"os")) + ops("system") + b"\x93", "true"),
    "numpy": call(named("numpy.testing._private.utils", "runstring"), "1", {}),
    "torch.load": call(named("torch.serialization", "load"), "x"),
    "codecs": call(named("codecs", "decode"), "x", "rot13"),
    "a function of a library that nobody knows": call(named("this_library.tools", "check_output"), "true"),
    "bound method": call(
        call(named("builtins", "getattr"), call(named("pathlib", "Path"), "/x"), "write_text"), "text"
    ),
    "a method of text": call(call(named("builtins", "getattr"), ops("{0}"), "format"), 1),
    "a name from far out in the memo": call(OS + b"p%d\n0g%d\n" % (1 << 64, 1 << 64), "true"),
    "a function that is made": FUNCTION,
    "a made function that list() calls": call(named("builtins", "list"), call(named("builtins", "iter"), MADE, 0)),
    "behind three hundred values": call(named("functools", "partial"), OS, *range(300)),
    "a generator's constructor": call(named("numpy.random._pickle", "__generator_ctor"), "true", OS),
    "_rebuild_from_type": call(
        named("torch._tensor", "_rebuild_from_type"), call(named("mypkg", "get")), named("torch", "Tensor"), ("x",), {}
    ),
    "another class, by slots": call(NAMESPACE) + ops((None, {"__class__": named("mypkg", "Other")})) + b"b",
    "a state that got more since": call(NAMESPACE)
    + b"}\x94"
    + ops("__setstate__")
    + OS
    + b"sbg0\n"
    + ops("__setstate__")
    + named("collections", "OrderedDict")
    + b"s0"
    + ops("true")
    + b"b",
    "a state that is not a dict": call(NAMESPACE)
    + call(named("collections", "OrderedDict"))
    + ops("__setstate__")
    + OS
    + b"sb"
    + ops("true")
    + b"b",
    "an attribute that was set": call(
        call(named("builtins", "getattr"), named("mypkg", "Net") + b")\x81" + ops({"a": OS}) + b"b", "a"), "true"
    ),
    "__setstate__ of a storage": storage() + ops({"__setstate__": OS}) + b"b" + ops("true") + b"b",
    "a method of a location": storage(location=having("startswith")),
    "dill's getattr": call(
        named("builtins", "list"),
        call(
            named("builtins", "iter"),
            call(named("dill._dill", "_get_attr"), call(named("dill._dill", "_import_module"), "os"), "getcwd"),
            0,
        ),
    ),
    "dill's setattr": call(named("dill._dill", "_setattr"), named("collections", "OrderedDict"), "pop", 1),
    "the state of a class": call(
        named("cloudpickle.cloudpickle", "_class_setstate"), named("collections", "OrderedDict"), ({"pop": 1}, {})
    ),
    "a library that loads pickles": call(named("ultralytics", "YOLO"), "x.pt"),
    "a class that accumulate calls": call(
        named("builtins", "list"), call(named("itertools", "accumulate"), ["x", "w"], named("logging", "FileHandler"))
    ),
    "GraphModule under another name": call(named("torch.ao.quantization.quantize_fx", "GraphModule"), {}, {}),
    "a zip of packages under another name": call(named("torch.jit._script", "PackageImporter"), "x"),
    "text that torch compiles": call(named("torch", "CompilationUnit"), "def f(): return"),
    "a class that is made": call(named("builtins", "type"), "X", (), {"__setstate__": OS}) + b")\x81",
}
ARRAY = wrapped(alignment=16, elements=b"\x03\xff\xff\xff" + floats())
REFUSED = {
    "sys.path", "sys.modules", "attributes of a class", "__setstate__ of an instance", "a name that is computed",
    "a name from far out in the memo", "a state that got more since", "a state that is not a dict",
    "__setstate__ of a storage", "a method of a location",
}  # fmt: skip
"""What cannot be given as a tree: the file is not opened, and what it calls is said all the same."""
UNTOLD = {"a method of text", "_rebuild_from_type", "a made function that list() calls", "another class, by slots"}
"""What no name tells of: they are code."""
CONTAINERS: dict[str, Callable[[bytes], bytes]] = (
    PACKED
    | {
        "pickle": lambda value: pickled({"x": value}),
        "behind another pickle": lambda value: pickled([1]) + pickled(value),
        "another member": lambda value: torch_zip(
            {"w": tensor(storage())}, {"0": floats()}, members={"a/x": pickled(value)}
        ),
        "behind a legacy stream": lambda value: streamed(ops(None)) + pickled(value),
        "before an array of joblib": lambda value: pickled([value, ARRAY]),
        "after an array of joblib": lambda value: pickled([ARRAY, value]),
        "gz of joblib": lambda value: gzip.compress(pickled({"a": ARRAY, "x": value})),
        "zlib of joblib": lambda value: zlib.compress(pickled({"a": ARRAY, "x": value})),
        "an array of objects of joblib": lambda value: pickled([ARRAY, wrapped(code="O8", elements=pickled([value]))]),
        "after an array of objects": lambda value: pickled([wrapped(code="O8", elements=pickled([])), value]),
        "joblib in a zip": lambda value: zip_file({"a.pth": zipped(ops(None)), "b": pickled([ARRAY, value])}),
        "joblib in bytes": lambda value: zipped(raw(pickled([ARRAY, value]))),
        "joblib with a large array": lambda value: pickled([wrapped((99_999,), elements=bytes(399_996)), value]),
        "the tree of 0.1": lambda value: torch_tar([value]),
    }
    | {
        f"the {name} of 0.1": functools.partial(lambda name, value: torch_tar(**{name: value}), name)
        for name in ("storages", "storage", "views", "tensors", "tensor")
    }
)


def system(report: CheckReport) -> list[str]:
    return [act.text for act in report.acts if act.grade == "system" and act.how != "refers"]


@each(
    ("compress", "nested"),
    [(0, False), (0, True), *((one, True) for one in [("zlib", 3), ("gzip", 3), ("bz2", 3), ("lzma", 3), ("xz", 3)])],
)
def test_what_joblib_writes_is_followed_past_its_arrays(compress: Any, nested: bool, tmp_path: Path) -> None:
    array = np.arange(9)
    late = np.array([Nested(), None], dtype=object) if nested else Nested()
    path = tmp_path / "x.joblib"
    path.write_bytes(dumped({"a": array, "o": np.array([None, "a"], dtype=object), "b": array, "x": late}, compress))

    assert any(text.startswith("posix.system(") for text in system(check(path)))
    assert invoke(["check", str(path)]).exit_code == 1
    path.write_bytes(dumped({"a": array, "o": np.array([None, {"a": 1}], dtype=object), "b": array}, compress))
    assert system(check(path)) == []


@pytest.mark.parametrize("first", [b"\x8a\0", b"\x8b\0\0\0\0", b"\x8f", b"\x82\1", b"N", b"]", b"\x88", b"P1\n"])
def test_a_pickle_in_a_member_may_begin_with_any_value(first: bytes) -> None:
    data = torch_zip({"w": tensor(storage())}, {"0": floats()}, members={"a/x": first + call(OS, "true") + b"."})
    assert system(check(data)) == ["os.system('true')"]


def test_an_archive_behind_a_pickle_that_cannot_be_opened_is_looked_into() -> None:
    report = check(pickled({"w": tensor(storage())}) + zipped(call(OS, "true")))
    assert report.error is not None
    assert system(report) == ["os.system('true')"]


class _Runs:
    def __init__(self, what: Callable[..., Any], *args: Any) -> None:
        self.call = what, args

    def __reduce__(self) -> Any:
        return self.call


def _arrays(save: Callable[..., None], noise: int = 0) -> bytes:
    """Return what numpy saves of an array of objects that call something, a plain array and bytes behind it."""
    kept = np.array([_Runs(os.system, "true"), _Runs(print, "a"), random.Random(1).randbytes(noise)], dtype=object)
    stream = io.BytesIO()
    if save is np.save:
        np.save(stream, kept, allow_pickle=True)
    else:
        save(stream, plain=np.arange(50.0), kept=kept)
    return stream.getvalue()


_OBJECTS = pickle.dumps([_Runs(print, "a"), _Runs(os.system, "true"), random.Random(1).randbytes(250_000)], 2)
_PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "bzip2": functools.partial(bz2.compress, compresslevel=1),
    "xz": lzma.compress,
    "lzma": functools.partial(lzma.compress, format=lzma.FORMAT_ALONE),
}
_REFUSED_WITH_CALLS = {
    **{f"{name}, cut": packer(_OBJECTS)[:-9000] for name, packer in _PACKERS.items()},
    "npy": _arrays(np.save),
    "npy, cut": _arrays(np.save, 9000)[:-5000],
    "npz": _arrays(np.savez),
}


@pytest.mark.parametrize("name", _REFUSED_WITH_CALLS)
def test_what_a_refused_file_calls_before_reading_ends_is_said_and_graded(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(_REFUSED_WITH_CALLS[name])
    report = check(path)

    assert report.error is not None
    assert system(report) == ["posix.system('true')"]
    found = {one.code: one for one in report.findings}
    assert (found.pop("CK209", None) is not None) == (name == "npy, cut")  # another array could stand behind it
    assert {code: one.severity for code, one in found.items()} == {
        "CK201": "info",
        "CK205": "error",
        "CK206": "warning",
    }
    assert "posix.system" in found["CK201"].message
    assert "builtins" in found["CK206"].message
    assert {use.name.rpartition(".")[2] for use in report.globals} >= {"system", "print"}


def test_a_refused_zip_of_many_bombs_is_left_after_a_while() -> None:
    bomb = zlib.compress(bytes(60_000_000))[2:-4]
    header = b"PK\3\4" + pack("<5H3L2H", 20, 0, 8, 0, 0, 0, len(bomb), 60_000_000, 1, 0) + b"x"
    start = process_time()
    report = check((header + bomb) * 150)
    assert report.error is not None
    assert process_time() - start < 4


def test_what_joblib_skips_is_run_by_pickle() -> None:
    elements = b"0" + call(OS, "true") + b"."
    data = pickled([wrapped((len(elements),), code="u1", elements=elements)])
    assert system(check(data)) == ["os.system('true')"]


@pytest.mark.parametrize("start", range(0, 256, 16))
def test_elements_that_only_look_like_opcodes_call_nothing(start: int) -> None:
    for first in range(start, start + 16):
        elements = bytes([first, 0x52, 0x81, 0x62, 0x6F, 0x2E]) + bytes(250)
        assert system(check(pickled({"x": wrapped((256,), code="u1", elements=elements)}))) == []


def saved_by_numpy(value: bytes, *, members: int = 0, packed: bool = False) -> bytes:
    """Return what numpy writes of an array of objects, or of so many arrays, with a pickle in the place of its own."""
    buffer, empty = io.BytesIO(), np.array([None, None], dtype=object)
    if members:
        save = np.savez_compressed if packed else np.savez
        save(buffer, **{f"a{number}": empty if number else np.arange(3) for number in range(members)})  # type: ignore[arg-type]
        with zipfile.ZipFile(buffer) as found:
            content = {name: found.read(name) for name in found.namelist()}
        last = f"a{members - 1}.npy"
        content[last] = content[last][: content[last].index(b"\x80")] + pickled(value)
        return zip_file(content, deflated=list(content) if packed else ())
    np.save(buffer, empty, allow_pickle=True)
    data = buffer.getvalue()
    return data[: data.index(b"\x80")] + pickled(value)


def cut(compress: Callable[[bytes], bytes], value: bytes, *, damaged: bool) -> bytes:
    """Return a compressed pickle without its end, or with another checksum."""
    data = compress(pickled([value, random.Random(1).randbytes(999).hex()]))
    return data[:-4] + b"\0\1\2\3" if damaged else data[:-60]


PIECES: dict[str, Callable[[bytes], bytes]] = {
    "npy": saved_by_numpy,
    "npz": lambda value: saved_by_numpy(value, members=3),
    "npz, deflated": lambda value: saved_by_numpy(value, members=2, packed=True),
    "npy in bytes": lambda value: pickled({"x": raw(saved_by_numpy(value))}),
    "npy in a zip": lambda value: zip_file({"a.pth": zipped(ops(None)), "b.npy": saved_by_numpy(value)}),
    "npy of version 2": lambda value: b"\x93NUMPY\2\0" + pack("<I", 7) + b"'|O8'  " + pickled(value),
    **{
        f"{compress.__module__} {'damaged' if damaged else 'cut'}": functools.partial(cut, compress, damaged=damaged)
        for compress in (gzip.compress, zlib.compress, bz2.compress, lzma.compress)
        for damaged in (False, True)
        if damaged or compress is not bz2.compress  # a block of bzip2 is whole, or nothing
    },
    "gz with a bomb behind": lambda value: gzip.compress(pickled(value) + bytes(65 << 20)),
    "bytes, in protocol 0": lambda value: pickled({"x": raw(named("m", "f") + b"0" + value + b".")}),
    "text, in protocol 0": lambda value: pickled(
        {"x": ops((b"(" + named("m", "f") + b"0" + value + b".").decode("latin-1"))}
    ),
    "zlib in bytes": lambda value: pickled({"x": raw(zlib.compress(pickled(value)))}),
    "bz2 in text": lambda value: pickled({"x": ops(bz2.compress(pickled(value)).decode("latin-1"))}),
    "gz in text": lambda value: pickled({"x": ops(gzip.compress(pickled(value)).decode("latin-1"))}),
}
"""Where only other programs than torch would meet a pickle."""


@each(
    ("container", "payload"),
    [*((one, "REDUCE") for one in (*CONTAINERS, *PIECES)), *zip(itertools.cycle(CONTAINERS), PAYLOADS)],
)
def test_each_call_is_an_error_in_each_container(container: str, payload: str, tmp_path: Path) -> None:
    path, packed = tmp_path / "x", {**CONTAINERS, **PIECES}[container]
    path.write_bytes(packed(PAYLOADS[payload]))
    report = check(path)
    assert report.grade == ("code" if payload in UNTOLD else "system")
    assert bool(system(report)) == (payload not in UNTOLD)
    assert container not in PIECES or system(report) == ["os.system('true')"]
    codes = {one.code: one.severity for one in report.findings}
    assert codes["CK206" if payload in UNTOLD else "CK205"] in ("warning", "error")
    assert report.error is None or payload in REFUSED or container in PIECES, report.error
    path.write_bytes(packed(ops(None)))
    assert system(check(path)) == []


TEXT_PICKLE = b"cos\nsystem\n(S'true'\ntR."


def safetensors_that_unpickle(payload: bytes) -> bytes:
    """
    Return a file of safetensors that is a pickle, too.

    The length of its header begins with X, which begins a text; so do strings in its metadata, up to the tensors.
    """
    skipped, begin = 0x20, b'{"__metadata__":{"a":"'
    nbytes = ord("X") | skipped << 8
    end = b'"},"w":{"dtype":"U8","shape":[256],"data_offsets":[0,256]}}'
    head = begin.ljust(skipped + 5 - 8, b"x")
    while nbytes - len(head) > 128 + 2:
        head += b"U\x7e".ljust(128, b"y") if nbytes - len(head) > 300 else b"K "
    left = nbytes - len(head) - 2
    head += b"U" + bytes([left]) + end.rjust(left, b"z")
    return pack("<Q", nbytes) + head + payload.ljust(256, b"\0")


def nested_loads(depth: int) -> bytes:
    data = legacy(call(OS, "true"))
    for _ in range(depth):
        data = legacy(call(named("torch.storage", "_load_from_bytes"), raw(data)))
    return data


TWO_THINGS: dict[str, bytes] = {
    "a tar that is a pickle": tar_file({TEXT_PICKLE.decode(): b"", "w.pth": zipped(ops(None))}),
    "a tar in a zip that is a pickle": zip_file(
        {"a.pth": zipped(ops(None)), "b": tar_file({TEXT_PICKLE.decode(): b""})}
    ),
    "tensors that are a pickle": safetensors_that_unpickle(b"0" + TEXT_PICKLE),
    "a folder that is called like that of storages": torch_zip(
        {"w": tensor(storage())}, {"0": floats()}, members={"archive/more_data/0": pickled(call(OS, "true"))}
    ),
    "what is loaded nine deep": nested_loads(9),
    "what is loaded after more strings than can be looked into": pickled(
        ops([raw(b"\x80\x02N.")] * 100_050) + call(named("torch.storage", "_load_from_bytes"), raw(nested_loads(0)))
    ),
}


@pytest.mark.parametrize("which", TWO_THINGS)
def test_what_loaders_meet_that_take_a_file_for_something_else_is_an_error(which: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(TWO_THINGS[which])
    report = check(path)
    assert "CK205" in {one.code for one in report.findings if one.severity == "error"}
    assert system(report)[0].partition("(")[0] in ("os.system", "torch.storage._load_from_bytes")


OTHERWISE = {
    b"\x28\xb5\x2f\xfd": "packed with Zstandard or LZ4",
    b"\x04\x22\x4d\x18": "packed with Zstandard or LZ4",
    b"\x50\x2a\x4d\x18": "packed with Zstandard or LZ4",
    b"7z\xbc\xaf\x27\x1c": "an archive of 7-Zip",
    b"Rar!\x1a\x07": "an archive of RAR",
    b"\x1f\x9d": "packed by compress",
}


@pytest.mark.parametrize("magic", OTHERWISE)
def test_what_is_not_unpacked_is_said(magic: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    report = check(zip_file({"a.pth": zipped(ops(None)), "b.joblib": magic + bytes(50)}))
    assert [one.message for one in report.findings if one.code == "CK209"] == [
        f"not looked at: b.joblib: {OTHERWISE[magic]}"
    ]
    (tmp_path / "a.pth").write_bytes(zipped(ops(None)))
    (tmp_path / "b.of any name").write_bytes(magic + bytes(50))
    assert [one.message for one in check(tmp_path).findings if one.code == "CK209"] == [
        f"'b.of any name' in the folder: not looked at: {OTHERWISE[magic]}"
    ]


BEHIND: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "lzma with a small dictionary": functools.partial(
        lzma.compress, format=lzma.FORMAT_ALONE, filters=[{"id": lzma.FILTER_LZMA1, "dict_size": 4096}]
    ),
    "zip": lambda data: zip_file({"a.pkl": data}),
    "tar": lambda data: tar_file({"a.pkl": data}),
    "gzip in a zip": lambda data: zip_file({"a.pkl": gzip.compress(data)}),
}


@pytest.mark.parametrize(("packing", "first"), in_turn(BEHIND, [pickled([]), legacy({"w": ops(1)})]))
def test_what_lies_behind_the_pickle_of_a_packed_file_is_looked_at(packing: str, first: bytes) -> None:
    report = check(BEHIND[packing](first + pickled(call(OS, "true"))))
    assert report.error is None
    assert system(report) == ["os.system('true')"]
    assert "CK209" in {one.code for one in report.findings}


def test_tensors_that_are_a_pickle_are_tensors_and_a_pickle(tmp_path: Path) -> None:
    from safetensors.numpy import load

    mark = tmp_path / "mark"
    data = safetensors_that_unpickle(b"0cos\nmkdir\n(S'%b'\ntR." % str(mark).encode())
    assert list(load(data)) == ["w"]
    assert not mark.exists()
    pickle.loads(data)
    assert mark.exists()
    report = check(data)
    assert system(report)
    assert report.loading[-1].startswith("pickle.load() of a part of it calls os.mkdir(")


@each(
    "text",
    ["class Net:\n    def run(self):", "(see\nbelow).", "c\n", "BZhave", "x\x9c", "\x93NUMPY"],
)
def test_text_that_only_begins_like_a_pickle_is_text(text: str) -> None:
    report = check(torch_zip({"a": text, "b": raw(text.encode("latin-1"))}))
    assert report.acts == ()
    assert "CK209" not in {one.code for one in report.findings}


def test_the_command_says_so_and_fails(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(zipped(call(OS, "rm -rf \x1b[2J" + "x" * 999)))
    result = invoke(["check", str(path)])

    assert result.exit_code == 1
    assert "CK205 unpickling calls os.system('rm -rf \\x1b[2Jxxx" in result.output
    assert "which runs commands or programs (data.pkl, byte " in result.output
    assert result.output.count("torch.load() refuses it") == 1
    assert result.output.count("calls os.system(") == 1
    assert len(max(result.output.splitlines(), key=len)) < 500


def test_the_place_is_that_of_the_opcode() -> None:
    data = pickled({"x": call(OS, "true"), "y": raw(pickled([call(NAMESPACE)]))})
    calls = {act.name: act for act in check(data).acts if act.how == "calls"}

    assert data[calls["os.system"].offset :].startswith(b"R")
    inside = calls["argparse.Namespace"]
    assert inside.nested_at is not None
    assert data[inside.nested_at :].startswith(b"\x80\x02](")
    assert data[inside.nested_at + inside.offset :].startswith(b"R")


def test_calls_are_listed_in_order_and_repeats_are_counted() -> None:
    report = check(pickled([call(OS, "a"), call(NAMESPACE), call(OS, "b"), call(NAMESPACE)]))
    done = [(act.grade, act.text, act.times) for act in report.acts if act.how != "refers"]

    assert done == [
        ("system", "os.system('a')", 1),
        ("code", "argparse.Namespace()", 2),
        ("system", "os.system('b')", 1),
    ]


class Colour(enum.Enum):
    RED = 1


class Flags(enum.Flag):
    A = 1
    B = 2


DATA: dict[str, Any] = {
    "arrays": [np.arange(3), np.float64(1.5), np.dtype("f4"), np.zeros(2, "U3"), np.zeros(2, [("a", "f4")]),
               np.asfortranarray(np.ones((2, 3))), np.ones(2, ">i4"), np.ones((2, 3)).T],
    "dates": [dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc), dt.timedelta(1), dt.date(2026, 1, 2), dt.time(1)],
    "numbers": [decimal.Decimal("1.5"), fractions.Fraction(1, 3), 1j, range(3), slice(1)],
    "paths": [pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("a")],
    "collections": [collections.OrderedDict(a=1), collections.Counter("aab"), collections.deque([1], 3),
                    collections.defaultdict(int, a=1), {(1, "a"): 1}, {np.float32: 1}],
    "bytes": [b"\xff", b"", bytearray(b"x"), frozenset([1]), {1, 2}],
    "namespaces": [argparse.Namespace(a=1, b=[argparse.Namespace()]), types.SimpleNamespace(a=1)],
    "random state": [np.random.RandomState(0).get_state(), torch.get_rng_state(), random.getstate()],
    "tensors": [torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.device("cpu"), torch.float32, torch.Size([1]),
                torch.eye(2).to_sparse(), torch.ones(2).to("meta")],
    "optimizer": torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict(),
    "layers": torch.nn.Linear(2, 2).state_dict(),
}  # fmt: skip


@each("protocol", range(6))
def test_plain_data_is_data(protocol: int) -> None:
    for name, value in DATA.items():
        report = check(pickle.dumps(value, protocol))
        assert (report.acts, report.grade) == ((), "data"), name
    buffer = io.BytesIO()
    torch.save(DATA, buffer, pickle_protocol=protocol or 2)
    for data in (buffer.getvalue(), gzip.compress(buffer.getvalue()), zip_file({"a.pth": buffer.getvalue()})):
        report = check(data)
        assert (report.acts, report.grade) == ((), "data")
        assert "only makes data" in report.loading[-1]


class Honest:
    def method(self) -> None: ...


def _made(*arguments: Any, build: Any) -> Honest:
    return Honest()


class MadeByPartial(Honest):
    """Pickled as tensors of some libraries are."""

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(_made, build=dict), ([("a", 1)],)


@each("protocol", range(6))
def test_what_honest_programs_pickle_never_reaches_the_system(protocol: int) -> None:
    honest: dict[str, Any] = {
        "methods of built-in classes": [str.split, np.random.uniform, np.ndarray.mean, dt.datetime.now, "{}".format],
        "more of Python's own": [int | None, decimal.Context(prec=5), map(len, ["a"]), np.ma.masked],
        "logger": logging.getLogger("x"),
        "partial": functools.partial(torch.nn.LayerNorm, eps=1e-6),
        "own class": Honest(),
        "made by a partial": MadeByPartial(),
        "bound method": Honest().method,
        "enum": [Colour.RED, Flags.A | Flags.B, logging.INFO, uuid.SafeUUID.safe],
        "function": [Honest, print, len, torch.relu, np.sin],
        "a module's method": torch.nn.Linear(1, 1).forward,
    }
    for name, value in honest.items():
        if name == "more of Python's own" and protocol < 2:
            continue  # Python does not write them
        report = check(pickle.dumps(value, protocol))
        assert [act for act in report.acts if act.grade == "system"] == [], name


def test_packages_whose_code_runs_are_named_in_a_warning() -> None:
    report = check(torch_zip({"a": call(NAMESPACE), "b": call(named("ultralytics.nn.tasks", "Model"))}))
    (found,) = [one for one in report.findings if one.code == "CK206"]

    assert found.severity == "warning"
    assert "runs code of argparse, ultralytics: it calls argparse.Namespace() (data.pkl, byte " in found.message
    assert "torch.load(weights_only=False) runs code of argparse, ultralytics" in report.loading


def test_what_a_partial_calls_is_named() -> None:
    made = call(named("functools", "partial"), named("mypkg", "run"), 1)
    report = check(pickled(call(made, 2)))
    assert [(act.grade, act.text) for act in report.acts if act.name == "mypkg.run"][-1] == ("code", "mypkg.run(2)")


def test_a_name_alone_is_a_warning_and_never_an_error() -> None:
    method = call(named("builtins", "getattr"), named("pathlib", "Path"), "open")  # as Python pickles one
    report = check(torch_zip({"a": OS, "b": [named("builtins", "eval"), method]}))
    assert [act.name for act in report.acts if act.how == "refers" and act.grade == "system"] == [
        "os.system", "builtins.eval", "pathlib.Path.open",
    ]  # fmt: skip

    assert {one.code: one.severity for one in report.findings if one.code in ("CK205", "CK207")} == {"CK207": "warning"}
    assert system(report) == []


def test_names_that_honest_files_have_are_not_of_the_third_grade() -> None:
    nothing = call(named("builtins", "type"), None)
    hint = call(named("_operator", "getitem"), named("typing", "Union"), (named("torch", "Tensor"), nothing))
    honest = [
        call(named("_operator", "getitem"), named("typing", "Tuple"), (hint, named("logging", "Handler"))),
        call(call(named("dill._dill", "_load_type"), "set"), []),
        call(named("itertools", "accumulate"), [1, 2]),
        call(named("builtins", "set"), call(named("collections", "OrderedDict"))),
        call(named("builtins", "tuple"), call(named("mypkg", "Loader"))),
        call(named("json.decoder", "JSONDecodeError"), "x", "y", 1),
        call(named("builtins", "FileNotFoundError"), 2, "x"),
    ]
    for one in honest:
        report = check(torch_zip({"x": one}))
        assert (report.error, system(report)) == (None, []), one


LOGS = [
    "Seed set to 1\nGPU available: False, used: False\nTPU available: no\n",
    "INFO: 2026\nGPU available: True\nb\n",
    "F1 of 0.9\nLoss: 1\nGot all: bb\n",
    "Finished\nGPU 0: 17 % used, b\n",
    "Loading…\nG12345678a\n",
    *("Visit us.\n", "S\n.", "I am.\n", "Vtext\n.", "Nothing."),
]


@each("log", LOGS)
def test_what_people_write_is_no_pickle(log: str) -> None:
    report = check(log.encode())
    assert report.acts == ()
    assert report.grade == "code"  # it is not opened, and so not known to be data


def test_a_file_that_breaks_off_behind_a_name_alone_says_it() -> None:
    def codes(data: bytes) -> set[str]:
        return {one.code for one in check(data).findings}

    broken = b"(X\x3e\nprint(1)tR."  # the length of the text is taken from the text
    assert "CK207" in codes(b"cbuiltins\nexec\n" + broken)
    assert "CK207" in codes(zip_file({"a.pkl": b"cos\nsystem\n" + broken}))
    assert "CK207" not in codes(b"collections\nof all kinds\n")


def test_pickles_behind_the_first_are_a_warning_with_their_names() -> None:
    data = pickled([1]) + pickled({"a": 1}) + pickled(call(NAMESPACE))
    report = check(data)

    (message,) = [one.message for one in report.findings if one.code == "CK209"]
    assert f"{len(data) - len(pickled([1])):,} bytes at {len(pickled([1])):,} with no part in its format" in message
    (found,) = [one for one in report.globals if one.name == "argparse.Namespace"]
    assert data[found.offset :].startswith(b"cargparse\n")


def test_a_file_without_pickles_says_that_nothing_can_run(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.ones(2)}, tmp_path / "x.safetensors")
    said = "safetensors.torch.load_file() opens it and runs nothing: it holds no pickle"
    assert check(tmp_path / "x.safetensors").loading == (said,)
    data = (tmp_path / "x.safetensors").read_bytes()
    for packed, what in (
        (gzip.compress(data), "the file in it"),
        (zip_file({"x.safetensors": data}), "the file in it"),
        (zip_file({"x.safetensors": data, "y.safetensors": data}), "each file of it"),
    ):
        assert check(packed).loading == (said.replace(" it and", f" {what} and"),)


@each(
    "name",
    [
        "os.system", "mypkg.Popen", "mypkg.cloudpickle.loads", "mypkg.import_string", "six.exec_",
        "sklearn.utils._joblib.load", "transformers.AutoModel.from_pretrained", "keras.models.load_model",
        "torch.nn.parallel.subprocess.Popen", "torch.ao.quantization.fx.graph_module.FusedGraphModule",
        "torch.fx.graph_module.reduce_graph_module", "torch._inductor.utils.run_and_get_code", "pytest.main",
        "sympy.core.sympify.sympify", "yaml.unsafe_load_all", "pandas.read_csv", "pandas.io.pickle.read_pickle",
        "dill.session.load_module", "hydra.utils.instantiate", "numpy.lib.npyio.NpzFile", "numpy._core.memmap.memmap",
        "torch.distributed.TCPStore", "torch.jit.load", "numpy.load",
        "http.client.HTTPConnection", "types.FunctionType", "typing_extensions.get_type_hints", "mpmath.identify",
        "fsspec.implementations.local.LocalFileSystem.touch",
    ],
)  # fmt: skip
def test_a_call_of_a_known_name_is_an_alarm(name: str) -> None:
    module, _, last = name.rpartition(".")
    assert check(pickled(call(dotted(module, last)), protocol=4)).grade == "system"


@each(
    "name",
    [
        "argparse.Namespace", "mypkg.Net", "mypkg.run", "sympy.core.symbol.Symbol", "pandas.core.frame.DataFrame",
        "pandas._libs.internals._unpickle_block", "dill._dill._create_type", "http.HTTPStatus", "torch.relu",
        "builtins.str.split", "datetime.datetime.now", "numpy.ndarray.mean", "torch.nn.modules.linear.Linear",
        "numpy.ndarray", "numpy.float64", "builtins.bytearray",
    ],
)  # fmt: skip
def test_a_call_of_another_name_is_code(name: str) -> None:
    module, _, last = name.rpartition(".")
    assert check(pickled(call(dotted(module, last), 1 << 40), protocol=4)).grade == "code"


@pytest.mark.parametrize(
    "data",
    [
        named("antigravity", "fly"),
        named("lib2to3.__main__", "main"),
        named("test.mp_fork_bomb", "foo"),
        call(named("numpy._core", "_ufunc_reconstruct"), "antigravity", "fly"),
        call(named("dill._dill", "_import_module"), "antigravity"),
        call(named("cloudpickle.cloudpickle", "subimport"), "idlelib.idle"),
    ],
)
def test_a_module_that_acts_when_it_is_imported_reaches_the_system(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(b"\x80\x02" + data + b".")

    acts = check(tmp_path / "x.pkl").acts

    assert "acts as soon as it is imported" in {one.why for one in acts if one.grade == "system" and one.how == "calls"}
    assert row(str(tmp_path / "x.pkl"))["grade"] == "system"


def test_a_name_of_the_script_is_none_of_a_module_that_acts(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(b"\x80\x02" + named("__main__", "Net") + b".")

    assert "system" not in {one.grade for one in check(tmp_path / "x.pkl").acts}


def test_the_text_says_each_fact_once_and_the_report_keeps_all(tmp_path: Path) -> None:
    torch.save([LeNet(), LeNet()], tmp_path / "models.pth")
    report = check(tmp_path / "models.pth")
    text = str(report)

    assert {"CK201", "CK202", "CK206"} <= {one.code for one in report.findings}
    assert text.count("torch.load() refuses it") == 1
    assert text.count("runs code of") == 1
    assert "CK201" not in text
    lines = [line.strip() for line in text.splitlines() if line.startswith(" " * 15)]
    assert len(set(lines)) == len(lines)
    assert [line.partition(" ")[2] for line in report.loading] == ["refuses it", "runs code of ckptool, torch"]

    torch.save({"w": torch.ones(1), "args": argparse.Namespace(lr=1)}, tmp_path / "data.pth")
    text = str(check(tmp_path / "data.pth"))
    assert text.count("refuses it") == 1
    assert "loading      torch.load(weights_only=False) only makes data" in text
