"""Pickles that give objects of known classes something to call: a method of the object calls it while it is loaded."""

from __future__ import annotations

import ast
import asyncio
import configparser
import email
import functools
import logging
import operator
import os
import pickle
import platform
import subprocess
import urllib.parse
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import OptState

from ckptool import check
from tests.build import call, legacy, named, ops, pickled, raw, torch_tar, torch_zip, zip_file
from tests.missing import on_windows

pytestmark = on_windows("it has no os.mknod")

MKNOD = named("os", "mknod")
MODULE = named("torch.nn.modules.module", "Module")


def new(kind: bytes, *args: object) -> bytes:
    """An object that is made without a call of its class."""
    return kind + b"(" + b"".join(map(ops, args)) + b"t\x81"


def given(obj: bytes, **state: object) -> bytes:
    """An object with a state."""
    return obj + ops(state) + b"b"


def holder(**attributes: object) -> bytes:
    return given(new(named("argparse", "Namespace")), **attributes)


def modules(**inside: object) -> bytes:
    """A module of torch, which looks its attributes up in a dict."""
    return given(new(MODULE), _modules=inside)


def added(obj: bytes, item: object) -> bytes:
    return obj + ops(item) + b"a"


def item(obj: bytes, key: object, value: object) -> bytes:
    return obj + ops(key) + ops(value) + b"s"


def dropped(obj: bytes) -> bytes:
    """An object that ends while the pickle goes on."""
    return obj + b"0N"


PARTIAL = call(named("functools", "partial"), MKNOD, "made")
RUN = {
    "an alias hands it on": added(call(named("types", "GenericAlias"), holder(append=MKNOD), ()), "made"),
    "a typed alias": added(call(named("typing", "_GenericAlias"), holder(append=MKNOD), ()), "made"),
    "an environment": item(given(new(named("os", "_Environ")), encodekey=MKNOD, _data={}), "made", "x"),
    "the end of a reader": dropped(
        given(new(named("wave", "Wave_read")), _file=None, _i_opened_the_file=holder(close=PARTIAL))
    ),
    "a message": item(
        given(new(named("email.message", "Message")), policy=holder(header_max_count=MKNOD)), "made", "x"
    ),
    "a module": added(modules(append=MKNOD), "made"),
    "a dict of modules": item(
        given(new(named("torch.nn.modules.container", "ModuleDict")), _modules={}, add_module=MKNOD), "made", 0o600
    ),
    "a module whose state is an ordered dict": added(
        new(MODULE)
        + item(
            call(named("collections", "OrderedDict")),
            "_modules",
            item(call(named("collections", "OrderedDict")), "append", MKNOD),
        )
        + b"b",
        "made",
    ),
    "an optimizer": given(
        new(named("torch.optim.adam", "Adam")), param_groups=[modules(setdefault=MKNOD)], state={}, defaults={}
    ),
    "a class of its own": call(
        call(named("builtins", "getattr"), call(named("builtins", "type"), "X", (), {"XError": MKNOD}), "XError"),
        "made",
    ),
    "attributes as an argument": added(
        call(
            named("torch._utils", "_rebuild_parameter_with_state"),
            call(named("torch", "Tensor")),
            False,
            call(named("collections", "OrderedDict")),
            {"append": MKNOD},
        ),
        "made",
    ),
    "the begin of a subclass": call(
        named("builtins", "type"), "X", (call(named("builtins", "type"), "B", (), {"__init_subclass__": PARTIAL}),), {}
    ),
    "two states": added(given(holder(append=MKNOD), x=1), "made"),
}
CHANGE = {
    "the names of a module": item(
        given(new(named("collections", "UserDict")), data=named("collections", "__dict__")), "x", MKNOD
    ),
    "where modules are looked for": added(
        given(new(named("collections", "UserList")), data=named("sys", "path")), "/x"
    ),
    "a class, by its type": call(
        named("torch._tensor", "_rebuild_from_type_v2"),
        named("builtins", "type"),
        named("builtins", "type"),
        (call(named("pathlib", "PurePath"), "x"),),
        {"x": 1},
    ),
    "the modules, by dill": call(named("dill._dill", "_setitems"), named("sys", "modules"), {"x": 1}),
    "a key of another package": call(named("sortedcontainers", "SortedKeyList"), ["made"], MKNOD),
    "statistics of a file": new(named("pstats", "Stats")) + b"(" + ops("x") + b"\x90",
}


def of_cloudpickle(name: str, *args: Any) -> bytes:
    return call(named("cloudpickle.cloudpickle", name), *args)


def of_dill(name: str, *args: Any) -> bytes:
    return call(named("dill._dill", name), *args)


def made(*bases: bytes, **attributes: object) -> bytes:
    """A class that dill makes."""
    return of_dill("_create_type", named("builtins", "type"), "K", bases or (named("builtins", "object"),), attributes)


FUNCTION = of_cloudpickle("_make_function", None, {}, "f", (), ())
CLASS = of_cloudpickle("_make_skeleton_class", named("builtins", "type"), "K", (), {}, "1", None)
FILLED = of_cloudpickle("_class_setstate", CLASS, ({"f": FUNCTION}, {})) + b"0" + CLASS
BYTE_CODE = {
    "the state of an object": of_cloudpickle("_class_setstate", CLASS, ({"__setstate__": FUNCTION}, {})),
    "a metaclass": of_cloudpickle("_make_skeleton_class", FILLED, "K", (), {}, "1", None),
    "an object that is iterated": call(named("builtins", "list"), new(FILLED)),
    "the end of a file": made(named("io", "IOBase"), close=FUNCTION),
    "what is told of an end": of_dill("_create_weakref", new(FILLED), FUNCTION),
}


WITHOUT_A_RUN = {
    "a class with methods": given(new(FILLED), x=1),
    "one without a hash": of_cloudpickle(
        "_class_setstate", CLASS, ({"__eq__": FUNCTION, "__hash__": None, "__init__": FUNCTION}, {})
    ),
    "a member": call(of_cloudpickle("_make_skeleton_enum", (named("enum", "Enum"),), "K", "K", {"a": 1}, "m"), 1),
    "a range": of_dill("_eval_repr", "range(0, 30, -2)"),
    "a number of C": call(named("_ctypes", "_unpickle"), named("ctypes", "c_int"), ({}, raw(b"\1\0\0\0"))),
    "a method of a class in small letters": given(new(named("pkg", "interpolator")), f=named("pkg", "interpolator._f")),
    "such a method, by its name": call(named("builtins", "getattr"), named("pkg", "interpolator"), "_f"),
    "a view of a dict": call(
        of_dill("_getattr", named("builtins", "dict"), "keys", "<method 'keys' of 'dict' objects>"), {}
    ),
    "a class that gets its name": call(named("builtins", "setattr"), made(f=FUNCTION), "__qualname__", "K"),
    "slots": given(new(FILLED), x=1) + b"0" + new(made(f=FUNCTION)) + ops((None, {"x": 1})) + b"b",
    "items of a dict": given(new(made(named("builtins", "dict"), f=FUNCTION)), x=[new(FILLED)]),
    "a default": FUNCTION + ops((None, {"__kwdefaults__": {"x": 1}})) + b"b",
    "what an enumeration does with others": call(named("enum", "FlagBoundary"), "strict"),
    "a getter, as dill names it": of_dill("_load_type", "AttrGetterType"),
    "the module of a script": given(new(named("_frozen_importlib", "ModuleSpec")), name="x"),
}
THAT_REACH = {
    "a class that makes a member": of_cloudpickle(
        "_make_skeleton_enum",
        (named("logging", "FileHandler"), named("enum", "Enum")),
        "K",
        "K",
        {"a": ("made",)},
        "m",
        "1",
        None,
    ),
    "a copy of cloudpickle": call(named("joblib.externals.cloudpickle.cloudpickle", "instance"), named("pkg", "K")),
    "a pointer of C": call(named("_ctypes", "_unpickle"), named("ctypes", "c_char_p"), ({}, raw(bytes(8)))),
    "what is in a module": call(named("builtins", "getattr"), named("pkg.a", "os"), "system"),
}


ALL = {"byte code": BYTE_CODE, "looks like it": THAT_REACH, "changes": CHANGE, "runs": RUN}


@pytest.mark.parametrize("kind", ALL)
def test_what_may_run_is_never_data(kind: str) -> None:
    grades = {name: check(b"\x80\4" + value + b".").grade for name, value in ALL[kind].items()}
    assert {name for name, grade in grades.items() if grade not in ("code", "system")} == set()


def test_classes_and_values_that_run_nothing_are_not_called_dangerous() -> None:
    grades = {name: check(b"\x80\4" + value + b".").grade for name, value in WITHOUT_A_RUN.items()}
    assert {name for name, grade in grades.items() if grade == "system"} == set()


@pytest.mark.parametrize("name", RUN)
def test_what_an_object_calls_while_it_is_loaded_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"\x80\x04" + RUN[name] + b"."
    monkeypatch.chdir(tmp_path)
    with suppress(Exception):
        pickle.loads(data)
    made = list(tmp_path.iterdir())
    assert made
    for one in made:
        one.unlink()

    (tmp_path / "x.pkl").write_bytes(data)
    assert check(tmp_path / "x.pkl").grade in ("code", "system")


HONEST = {
    "an address": urllib.parse.urlparse("https://example.org/x?y"),
    "a size": os.terminal_size((80, 24)),
    "a system": platform.uname(),
    "a process that ended": subprocess.CompletedProcess(["true"], 0),
    "one that failed": subprocess.CalledProcessError(1, "false"),
    "what was cancelled": asyncio.CancelledError(),
    "a member of a zip": zipfile.ZipInfo("x"),
    "a method by its name": operator.methodcaller("lower"),
    "a tree of code": ast.parse("a = 1"),
    "a message": email.message_from_string("Subject: x\n\ny"),
    "settings": configparser.ConfigParser({"a": "1"}),
    "a style": logging.Formatter("%(message)s"),
    "the least of two": functools.partial(min, 1.0),
    "a largest value": torch.ones(2, 2).max(0),
    "a state of a scaler": OptState.READY,
}


@pytest.mark.parametrize("name", HONEST)
def test_what_honest_programs_write_is_not_called_dangerous(name: str, tmp_path: Path) -> None:
    torch.save(HONEST[name], tmp_path / "x.pt")
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(HONEST[name]))

    assert check(tmp_path / "x.pt").grade != "system"
    assert check(tmp_path / "x.pkl").grade != "system"


def test_what_a_refused_file_would_call_is_safe_to_print(tmp_path: Path) -> None:
    strange = named("os", "system.\x1b[31m\x07\u202e")
    (tmp_path / "x.pkl").write_bytes(b"\x80\x04" + call(strange, "a") + named("x\x1b\u2028.y", "z") + b")R\xff")

    report = check(tmp_path / "x.pkl")
    assert report.error is not None
    assert report.grade == "system"
    assert report.verdict.isprintable()


LINEAR = named("torch.nn.modules.linear", "Linear")
SOURCED = {
    "a class": call(
        named("builtins", "type"),
        "made",
        (LINEAR,),
        {"dump_patches": True, "__module__": "torch.nn.modules.linear", "__qualname__": "Linear"},
    ),
    "an object": given(call(named("types", "SimpleNamespace")), __wrapped__=LINEAR, dump_patches=True, __name__="made"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", SOURCED)
def test_what_stands_for_a_class_whose_source_is_compared_is_seen(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, made = tmp_path / "x.pth", tmp_path / "made.patch"
    for data in (
        legacy(ops(("module", SOURCED[which], "x.py", "text")) + b"Q"),
        torch_tar(ops((SOURCED[which], "x.py", "text")) + b"Q"),
    ):
        path.write_bytes(data)
        with suppress(Exception):
            torch.load(path, weights_only=False)
        assert made.exists() == (which == "a class")  # the object, in some releases of Python
        made.unlink(missing_ok=True)
        assert check(path).grade == "system"
    path.write_bytes(legacy(ops(("module", LINEAR, "x.py", "text")) + b"Q"))
    assert check(path).grade == "code"


def test_a_call_under_a_name_that_only_torch_load_knows_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, tensor = tmp_path / "x.pt", named("torch", "Tensor")
    opens = named("torch.serialization", "_open_zipfile_writer_file")
    path.write_bytes(torch_zip(call(named("torch.tensor", "_rebuild_from_type_v2"), opens, tensor, ("made",), {})))
    with suppress(Exception):
        torch.load(path, weights_only=False)
    assert (tmp_path / "made").exists()
    assert check(path).grade == "system"


@pytest.mark.parametrize("more", [(), (0,)])
def test_what_the_importer_of_a_package_calls_is_seen(
    more: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.package import PackageImporter

    monkeypatch.chdir(tmp_path)
    path, made = tmp_path / "x.pt", tmp_path / "made"
    maildir = call(named("functools", "partial"), named("mailbox", "Maildir"), "made")
    data = pickled(ops(("reduce_package", *more, maildir, ())) + b"Q")
    members = {"a/.data/extern_modules": b"mailbox\nfunctools\n", "a/.data/version": b"6\n", "a/version": b"6\n"}
    path.write_bytes(zip_file({**members, "a/model/model.pkl": data}))
    PackageImporter(str(path)).load_pickle("model", "model.pkl")
    assert made.exists()
    assert check(path).grade == "system"
    script = ops(("reduce_package", 0, named("torch.jit._script", "unpackage_script_module"), ("0",))) + b"Q"
    path.write_bytes(zip_file({**members, "a/model/model.pkl": pickled(script)}))
    assert check(path).grade == "code"
    path.write_bytes(torch_zip(ops(("reduce_package", 0, named("mailbox", "Maildir"), ("made",))) + b"Q"))
    assert check(path).grade == "system"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("gap", [b"", b" "])
def test_the_oldest_packed_files_of_joblib_are_unpacked(
    gap: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import joblib

    monkeypatch.chdir(tmp_path)
    path, data = tmp_path / "x.Z", pickled(call(MKNOD, "made"))
    path.write_bytes(b"ZF" + hex(len(data)).encode().ljust(19) + gap + zlib.compress(data))
    with suppress(Exception):
        joblib.load(path)
    assert (tmp_path / "made").exists()
    assert check(path).grade == "system"
