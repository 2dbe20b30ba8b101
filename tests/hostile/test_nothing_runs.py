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
from pathlib import Path
from typing import Any

import pytest

from tests import build
from tests.build import pickled
from tests.hostile.cases.canaries import CANARIES, MARKER, wrapped

ROOT = Path(__file__).parents[2]
CORPUS = ROOT.parent / "shared" / "corpus" / "files"

WATCH = """
import importlib, json, os, pkgutil, shlex, sys, zlib
if os.name == "posix":
    import resource
import encodings.cp437, encodings.raw_unicode_escape, encodings.utf_16_le, encodings.utf_8_sig
sys.path[:0] = sys.argv[1:3]
import ckptool
from ckptool import CkptoolError, open_checkpoint

other_systems = ("posix", "linux", "macos") if sys.platform == "win32" else ("nt", "macos")
made_of_others = ("ckptool.reference", "ckptool.cli", "ckptool.__main__", "ckptool.loading", "ckptool.torch_ops")
for module in pkgutil.walk_packages(ckptool.__path__, "ckptool."):
    if not module.name.startswith((*made_of_others, *(f"ckptool.system.{name}" for name in other_systems))):
        importlib.import_module(module.name)

asked = json.load(sys.stdin)
happened, opened, armed = [], 0, False
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

def watch(event, args):
    if not armed or event in ("builtins.id", "array.__new__", "os.scandir"):  # what is beside a part is looked for
        return
    if os.name == "nt" and event.startswith(("ctypes.", "msvcrt.")):  # by which files are opened there
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
    os.system("exit 0")
    open(os.devnull, "w").close()
armed = False
loaded = sorted(set(sys.modules) - before | {"torch", "numpy", "pickle", "canary"} & set(sys.modules))
json.dump({"happened": happened, "opened": opened, "loaded": loaded}, sys.stdout)
"""


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


def beside_index(path: Path) -> list[str]:
    """Return how the arguments begin with which the folder of an index, it and the files that it names are opened."""
    shards = set(json.loads(path.read_text())["weight_map"].values())
    return [f"({str(path.parent)!r}, None,", *(f"({name!r}, None," for name in (path.name, *shards))]


@pytest.mark.corpus
def test_no_file_of_strangers_runs(tmp_path: Path) -> None:
    if not CORPUS.is_dir():
        pytest.skip(f"the corpus is not at {CORPUS}")
    files = sorted(path for path in CORPUS.rglob("*") if path.is_file())
    found = watched(files, tmp_path)

    beside = tuple(place for path in files if path.name.endswith(".index.json") for place in beside_index(path))
    # A file may be one of a set, which its folder and those beside it tell: they are listed.
    folders = {f"({str(folder)!r},)" for path in files for folder in path.parents}
    other = [one for one in found["happened"] if one[0] != "os.scandir" or one[1] not in folders]
    assert [one for one in other if one[0] != "open" or not one[1].startswith(beside)] == []
    assert found["loaded"] == []
    assert found["opened"] > len(files) // 2
