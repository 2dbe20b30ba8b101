"""Pickles that would run something: each would touch a marker file, were it ever unpickled."""

from __future__ import annotations

from collections.abc import Iterator
from os import getpid
from pathlib import Path
from tempfile import gettempdir

from tests import build
from tests.build import call, floats, inline_tensor, legacy, named, ops, pickled, raw, storage, tensor, torch_zip
from tests.hostile.cases import Case

MARKER = str(Path(gettempdir()) / f"ckptool-canary-{getpid()}")


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


OURS = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER"}
"""What asks this process for something, and not the file: refused and not only recorded."""


def _cases() -> Iterator[Case]:
    for name, canary in CANARIES.items():
        for kind, data in wrapped(canary).items():
            yield Case("P4" if name in OURS else "P1", f"{name} in a {kind}", data, "any")


CASES = tuple(_cases())
