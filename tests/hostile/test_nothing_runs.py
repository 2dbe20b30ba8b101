"""
Nothing in a file runs: Python's own audit hook watches while files are opened and every tensor is read.

The hook cannot be removed again, so it lives in a fresh interpreter. It knows what reading a file needs, which is to
open that file for reading; whatever else happens (an import, a compilation, a process, a socket, a file written) is
reported. The canaries would touch a marker file. They are never given to an unpickler that executes.
"""

from __future__ import annotations

import json
import pickletools
import subprocess
import sys
from os import getpid
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest

from tests import build
from tests.build import call, floats, inline_tensor, legacy, named, ops, pickled, raw, storage, tensor, torch_zip

ROOT = Path(__file__).parents[2]
CORPUS = ROOT.parent / "shared" / "corpus" / "files"
MARKER = str(Path(gettempdir()) / f"ckptool-canary-{getpid()}")

WATCH = """
import importlib, json, os, pkgutil, sys, zlib
import encodings.cp437, encodings.raw_unicode_escape, encodings.utf_8_sig
sys.path[:0] = sys.argv[1:3]
import ckptool
from ckptool import CkptoolError, open_checkpoint

for module in pkgutil.walk_packages(ckptool.__path__, "ckptool."):
    if not module.name.startswith(("ckptool.reference", "ckptool.cli", "ckptool.__main__", "ckptool.torch_bridge")):
        importlib.import_module(module.name)

asked = json.load(sys.stdin)
happened, opened, armed = [], 0, False
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

def watch(event, args):
    if not armed or event in ("builtins.id", "array.__new__"):
        return
    if event == "open" and args[0] in asked["watched"] and not args[2] & WRITING:
        return
    happened.append([event, repr(args)[:200]])

def use(path):
    global opened
    try:
        with open_checkpoint(path) as found:
            opened += 1
            found.weights, found.extras, found.globals
            for tensor in [*found.tensors.values(), *found.attributes.values()]:
                try:
                    tensor.read()
                except CkptoolError:
                    pass
            for member in found.members:
                use(f"{path}::{member.name}")
    except CkptoolError:
        pass

for path in asked["harmless"]:
    use(path)
sys.addaudithook(watch)
before = set(sys.modules)
armed, opened = True, 0
for path in asked["watched"]:
    use(path)
if asked["alarm"]:
    import canary
    exec("1")
    os.system("true")
    open(os.devnull, "w").close()
armed = False
loaded = sorted(set(sys.modules) - before | {"torch", "numpy", "pickle", "canary"} & set(sys.modules))
json.dump({"happened": happened, "opened": opened, "loaded": loaded}, sys.stdout)
"""


COMMAND = f"touch {MARKER}"
CANARY = call(named("canary", "Canary"))
SHELL = call(named("os", "system"), COMMAND)

CANARIES = {
    "GLOBAL": named("canary", "Canary"),
    "STACK_GLOBAL": ops("canary") + ops("Canary") + b"\x93",
    "REDUCE": SHELL,
    "REDUCE of a STACK_GLOBAL": ops("os") + ops("system") + b"\x93" + ops((COMMAND,)) + b"R",
    "INST": b"(" + ops(COMMAND) + b"ios\nsystem\n",
    "OBJ": b"(" + named("os", "system") + ops(COMMAND) + b"o",
    "NEWOBJ": named("subprocess", "Popen") + ops((["touch", MARKER],)) + b"\x81",
    "NEWOBJ_EX": named("subprocess", "Popen") + b")" + ops({"args": ["touch", MARKER]}) + b"\x92",
    "BUILD": CANARY + ops({"touched": True}) + b"b",
    "BUILD of slots": CANARY + ops((None, {"touched": True})) + b"b",
    "APPEND": CANARY + ops(1) + b"a",
    "APPENDS": CANARY + b"(K\1e",
    "SETITEM": CANARY + ops("a") + ops(1) + b"s",
    "SETITEMS": CANARY + b"(K\1K\2u",
    "ADDITEMS": CANARY + b"(K\1\x90",
    "FROZENSET": b"(" + CANARY + b"\x91",
    "DICT": b"(" + CANARY + b"Nd",
    "EXT1": b"\x82\1",
    "EXT2": b"\x83\1\0",
    "EXT4": b"\x84\1\0\0\0",
    "PERSID": b"Pcanary.Canary\n",
    "BINPERSID": CANARY + b"Q",
    "BINPERSID of a class": ops(("storage", SHELL, "0", "cpu", 4)) + b"Q",
    "NEXT_BUFFER": b"\x97",
    "getattr": call(
        call(named("builtins", "getattr"), call(named("importlib", "import_module"), "os"), "system"), COMMAND
    ),
    "getattr of Python 2": call(call(named("__builtin__", "getattr"), named("canary", "Canary"), "touch")),
    "a dotted name": ops("torch") + ops("serialization.os.system") + b"\x93" + ops((COMMAND,)) + b"R",
    "resolve_name": call(call(named("pkgutil", "resolve_name"), "os:system"), COMMAND),
    "eval": call(named("builtins", "eval"), f"__import__('os').system({COMMAND!r})"),
    "exec": call(named("builtins", "exec"), "import canary"),
    "compile": call(named("builtins", "compile"), "import canary", "x", "exec"),
    "open": call(named("builtins", "open"), MARKER, "w"),
    "__main__": call(named("__main__", "use"), MARKER),
    "socket": call(named("socket", "create_connection"), ("127.0.0.1", 9)),
    "ctypes": call(named("ctypes", "CDLL"), "libc.so.6"),
    "rmtree": call(named("shutil", "rmtree"), MARKER),
    "marshal": call(named("marshal", "loads"), raw(b"N")),
    "torch.load": call(named("torch", "load"), MARKER),
    "hub": call(named("torch.hub", "load"), "canary/canary", "canary"),
    "a pickle in bytes": call(named("pickle", "loads"), raw(pickled(SHELL))),
    "a pickle in a string": call(named("_pickle", "loads"), pickled(SHELL, protocol=0).decode("latin-1")),
    "a numpy object": call(
        named("numpy.core.multiarray", "scalar"), call(named("numpy", "dtype"), "O8", 0, 1), raw(pickled(SHELL))
    ),
    "joblib": call(named("joblib.numpy_pickle", "NumpyArrayWrapper")) + ops({"subclass": SHELL, "order": "C"}) + b"b",
    "a stream in bytes": call(named("torch.storage", "_load_from_bytes"), raw(legacy(SHELL))),
    "a tensor of it": tensor(call(named("torch.storage", "_load_from_bytes"), raw(legacy(tensor(SHELL))))),
    "a subclass": call(
        named("torch._tensor", "_rebuild_from_type_v2"),
        named("os", "system"),
        named("canary", "Canary"),
        (COMMAND,),
        {"a": SHELL},
    ),
    "hooks": call(named("torch._utils", "_rebuild_parameter"), SHELL, True, SHELL),
    "a quantiser": call(named("torch._utils", "_rebuild_qtensor"), SHELL, 0, (4,), (1,), (SHELL, 1.0, 0), False, SHELL),
    "a layout": call(named("torch._utils", "_rebuild_sparse_tensor"), SHELL, (SHELL, SHELL, (4,))),
    "a module": named("canary", "Canary")
    + b")\x81"
    + ops({"_parameters": {"a": SHELL}, "_buffers": {}, "_modules": {}})
    + b"b",
    "a class with its source": ops(("module", named("canary", "Canary"), "canary.py", "import canary")) + b"Q)\x81",
    "a graph module": call(
        named("torch.fx.graph_module", "reduce_graph_module"), {"_code": "import canary"}, "import canary"
    ),
    "a script": call(named("torch.jit", "_unpickle"), "import canary"),
}


def wrapped(canary: bytes) -> dict[str, bytes]:
    """Return files of each kind that have the canary in their pickle, beside a sound tensor."""
    script = {"archive/code/__torch__.py": b"import canary\n", "archive/constants.pkl": pickled((canary,))}
    return {
        "pickle": pickled({"canary": canary, "weight": inline_tensor()}),
        "text pickle": pickled({"canary": canary}, protocol=0),
        "zip": torch_zip({"canary": canary, "weight": tensor(storage())}, {"0": floats()}),
        "script": torch_zip({"canary": canary, "weight": tensor(storage())}, {"0": floats()}, members=script),
        "legacy": legacy({"canary": canary, "weight": tensor(storage(rest=(None,)))}, [("0", 4, floats())]),
        "tar": build.torch_tar({"canary": canary, "weight": ops("2") + b"Q"}),
    }


def watched(files: list[Path], tmp_path: Path, *, alarm: bool = False) -> dict[str, Any]:
    """Open the files in a fresh interpreter and return what its audit hook saw."""
    harmless = []
    for name, data in build.one_of_each().items():
        harmless.append(tmp_path / f"harmless-{name}")
        harmless[-1].write_bytes(data)
    (tmp_path / "canary.py").write_text(f"import pathlib\npathlib.Path({MARKER!r}).touch()\nclass Canary: pass\n")
    asked = {"harmless": [str(path) for path in harmless], "watched": [str(path) for path in files], "alarm": alarm}
    command = [sys.executable, "-I", "-c", WATCH, str(ROOT), str(tmp_path)]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False)

    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(autouse=True)
def _no_marker() -> Any:
    marker = Path(MARKER)
    marker.unlink(missing_ok=True)
    yield
    marker.unlink(missing_ok=True)


def test_the_alarm_goes_off_when_something_runs(tmp_path: Path) -> None:
    found = watched([], tmp_path, alarm=True)

    assert {"import", "exec", "os.system", "open"} <= {event for event, _ in found["happened"]}
    assert "canary" in found["loaded"]
    assert Path(MARKER).exists()


@pytest.mark.parametrize("name", CANARIES)
def test_a_canary_is_a_pickle_that_would_sing(name: str) -> None:
    data = pickled({"canary": CANARIES[name]})
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(data)}

    assert name not in {opcode.name for opcode in pickletools.opcodes} or name in opcodes


def test_no_canary_sings(tmp_path: Path) -> None:
    files = []
    for number, canary in enumerate(CANARIES.values()):
        for kind, data in wrapped(canary).items():
            files.append(tmp_path / f"{number}-{kind}")
            files[-1].write_bytes(data)
    found = watched(files, tmp_path)

    assert found["happened"] == []
    assert found["loaded"] == []
    assert found["opened"] > len(files) // 2
    assert not Path(MARKER).exists()


@pytest.mark.corpus
def test_no_file_of_strangers_runs(tmp_path: Path) -> None:
    if not CORPUS.is_dir():
        pytest.skip(f"the corpus is not at {CORPUS}")
    files = sorted(path for path in CORPUS.rglob("*") if path.is_file())
    found = watched(files, tmp_path)

    assert found["happened"] == []
    assert found["loaded"] == []
    assert found["opened"] > len(files) // 2
