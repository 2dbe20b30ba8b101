"""Honest values of every kind that pickles hold as data, pickled by Python's and torch's own picklers, as trees."""

from __future__ import annotations

import array
import collections
import datetime as dt
import decimal
import enum
import fractions
import io
import pathlib
import pickle
import pickletools
import re
import types
import uuid
import warnings
import zipfile
import zoneinfo
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ckptool.pickles import constructions, forms
from tests.build import call, floats, legacy, named, ops, pickled, raw, storage, tensor
from tests.fuzz.trees import Node, read, walk


class Seed(NamedTuple):
    """A tree, and the bytes of the storages that it refers to."""

    root: Node
    storages: dict[str, bytes]
    is_legacy: bool = False


def values() -> Iterator[Any]:
    """Yield what checkpoints hold beside and as weights."""
    yield {"a": 1, "b": [None, True, 2.5, "text", b"bytes", 1 << 70, -3], "c": ((), (1,), {1, 2}, frozenset({3}))}
    yield collections.OrderedDict(a=1, b=collections.OrderedDict())
    with_metadata: Any = collections.OrderedDict(w=1)
    with_metadata._metadata = collections.OrderedDict([("", {"version": 1})])
    yield with_metadata
    yield collections.defaultdict(list, a=[1])
    yield collections.defaultdict(dict, a={}), collections.defaultdict(torch.Tensor)
    yield collections.defaultdict(int), collections.defaultdict(float), collections.defaultdict(None)
    yield collections.Counter("abca"), collections.deque([1, 2], 3), collections.deque([1])
    yield bytearray(b"abc"), complex(1, 2), range(1, 9, 2), slice(1, None, 2), Ellipsis, NotImplemented
    yield set(), frozenset(), [1, 2].__class__, type(None), object()
    yield dt.datetime(2020, 1, 2, 3, 4, 5, 6)  # noqa: DTZ001
    yield dt.date(2020, 1, 2), dt.time(1, 2, 3), dt.timedelta(1, 2, 3)
    yield dt.datetime(2020, 1, 2, tzinfo=dt.timezone.utc), dt.timezone(dt.timedelta(hours=1), "X")
    yield dt.datetime(2020, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC"), fold=1)
    yield decimal.Decimal("1.5"), fractions.Fraction(1, 3), uuid.UUID(int=5)
    yield pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("a/b"), pathlib.Path("x")
    yield types.SimpleNamespace(a=1), array.array("d", [1.0, 2.0]), array.array("u", "ab")
    yield re.compile("a+", re.IGNORECASE), enum.auto()
    yield from arrays()
    yield from tensors()


CODES = "? b B h H i I l L q Q e f d g F D G S3 U3 V5 M8[s] m8[D] >f4 >i8 O"


def arrays() -> Iterator[Any]:
    for code in CODES.split():
        yield np.zeros(3, code), np.dtype(code)
        yield np.zeros(1, code)[0]
    yield np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.zeros((0, 3)), np.array(5)
    fields = np.dtype([("a", "f4"), ("b", "i8", (2,))])
    yield np.zeros(2, fields), fields, np.zeros(1, fields)[0]
    yield np.dtype([("a", "f4"), ("b", "O")], align=True), np.dtype({"names": ["a"], "formats": ["f4"], "offsets": [8]})
    yield np.dtype((np.int32, (2, 2))), np.dtype("f8", metadata={"a": 1}), np.dtypes.StringDType()
    yield np.array(["a", "bc"], dtype=np.dtypes.StringDType()), np.array(["x", None, 1], dtype=object)
    yield np.ma.masked_array([1, 2], [True, False]), np.matrix([[1, 2]]), np.rec.array([(1.0,)], dtype=[("a", "f4")])
    yield np.random.RandomState(1), np.random.RandomState(1).get_state(), np.random.default_rng(1)
    yield np.random.PCG64(1), np.random.Philox(1), np.random.SFC64(1), np.random.MT19937(1), np.random.SeedSequence(1)
    yield np.float64, np.int64, np.dtype("f8").type, np.add, np.bool_(True)


def tensors() -> Iterator[Any]:
    yield {"w": torch.arange(4.0), "b": torch.zeros(2, 3)[:, 1:], "s": torch.tensor(1), "e": torch.zeros(0)}
    for kind in (torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float64):
        yield torch.zeros(3, dtype=kind)
    for name in ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64", "float8_e8m0fnu", "float4_e2m1fn_x2"):
        if hasattr(torch, name):
            yield (
                torch.zeros(4, dtype=torch.uint8).view(getattr(torch, name))
                if "float" in name
                else torch.zeros(3, dtype=getattr(torch, name))
            )
    shared = torch.arange(8.0)
    yield [shared[:4], shared[4:], shared.view(2, 4).t(), shared.expand(2, 8)]
    parameter = torch.nn.Parameter(torch.ones(2))
    yield parameter, torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.nn.Buffer(torch.ones(1))
    attributed: Any = torch.nn.Parameter(torch.ones(2))
    attributed.tag = "x"
    yield attributed
    also: Any = torch.ones(2)
    also.tag = {"a": 1}
    yield also
    yield torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse_csc()
    yield torch.eye(4).to_sparse_bsr((2, 2)), torch.eye(4).to_sparse_bsc((2, 2))
    yield torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8)
    yield torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.quint8)
    yield torch.ones(3, device="meta"), torch.ones(2, dtype=torch.complex64).conj()
    yield torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with suppress(Exception):
        yield torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    yield torch.Size([1, 2]), torch.float32, torch.strided, torch.device("cpu"), torch.device("cuda", 1)
    yield torch.contiguous_format, torch.per_tensor_affine, torch.finfo(torch.float32)
    yield torch.ones(2).untyped_storage(), torch.ones(2).storage()
    model = torch.nn.Linear(2, 3)
    yield model.state_dict(), torch.optim.Adam(model.parameters()).state_dict()
    yield torch.return_types.max((torch.ones(1), torch.zeros(1))), torch.get_rng_state()
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    yield packed, torch.Generator().get_state()


DEVICE_TENSOR = "_rebuild_device_tensor_from_"


def by_hand() -> Iterator[bytes]:
    """Yield pickles of what few picklers write, or none on this machine."""
    stream = legacy(storage(rest=(None,)), [("0", 4, floats())])
    tensor_of = tensor(call(named("torch.storage", "_load_from_bytes"), raw(stream)))
    dtype = call(named("numpy", "dtype"), "f4", False, True)
    array_of = call(named("numpy._core.numeric", "_frombuffer"), raw(floats()), dtype, (4,), "C")
    hooks = call(named("collections", "OrderedDict"))
    for name, held in (("numpy", array_of), ("cpu_tensor", tensor_of)):
        yield pickled(call(named("torch._utils", DEVICE_TENSOR + name), held, named("torch", "float32"), "cpu", False))
    for name in ("build_intlist", "build_tensorlist", "build_doublelist", "build_boollist"):
        yield pickled(call(named("torch.jit._pickle", name), [1, 2]))
    stored = call(named("torch.storage", "_load_from_bytes"), raw(stream))
    yield pickled(call(named("torch._utils", "_rebuild_tensor"), stored, 0, (4,), (1,)))
    yield pickled(call(named("torch.jit._pickle", "restore_type_tag"), [1], "List[int]"))
    yield pickled(call(named("torch._utils", "_rebuild_parameter_with_state"), tensor_of, True, hooks, {"tag": 1}))
    yield pickled(
        call(named("copyreg", "_reconstructor"), named("argparse", "Namespace"), named("builtins", "object"), None)
        + ops({"lr": 0.1})
        + b"b",
        protocol=4,
    )
    for member in ("_MEM_FORMAT_ENCODING", "WriteItemType"):
        module = "metadata" if member.startswith("_") else "planner"
        yield pickled(call(named(f"torch.distributed.checkpoint.{module}", member), 1))
    for name in ("planner.SavePlan", "planner.WriteItem", "planner.TensorWriteData", "planner.BytesIOWriteData"):
        module, _, last = name.partition(".")
        yield pickled(named(f"torch.distributed.checkpoint.{module}", last) + b")\x81" + ops({"items": [1]}) + b"b")
    index = named("torch.distributed.checkpoint.metadata", "MetadataIndex") + b")\x81"
    yield pickled(index + ops({"fqn": "w", "offset": call(named("torch", "Size"), (0, 0)), "index": 0}) + b"b")
    properties = named("torch.distributed.checkpoint.metadata", "TensorProperties") + b")\x81"
    layout = call(named("torch.serialization", "_get_layout"), "torch.strided")
    kept = call(named("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"), 0)
    yield pickled(properties + ops((named("torch", "float32"), layout, False, kept, False)) + b"b")
    for path in sorted(FOLDERS.rglob(".metadata")):
        yield path.read_bytes()


FOLDERS = Path(__file__).parents[2] / "fixtures" / "folders"
FIXTURES = Path(__file__).parents[2] / "fixtures" / "valid"
WIDTHS = {
    "DoubleStorage": 8, "LongStorage": 8, "ComplexFloatStorage": 8, "ComplexDoubleStorage": 16, "IntStorage": 4,
    "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2, "ShortStorage": 2, "QInt32Storage": 4,
}  # fmt: skip
"""Bytes of an element; of all others, 1."""


@cache
def seeds() -> list[Seed]:
    """Return the trees of all values: of plain pickles at some protocols, and of torch's, zip and legacy."""
    found: list[Seed] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, value in enumerate(_each()):
            for protocol in (2, 4) if number % 4 else (0, 1, 2, 3, 4, 5):
                with suppress(Exception):
                    found.append(Seed(read(pickle.dumps(value, protocol)), {}))
            with suppress(Exception):
                found.append(of_zip(saved(value, is_zip=True), f"{number}"))
                found.append(of_legacy(saved(value, is_zip=False), f"{number}"))
    found += (Seed(read(data), {}) for data in by_hand())
    for path in sorted(FIXTURES.glob("*.pth")):
        with suppress(Exception):
            found.append((of_zip if "-zip" in path.name else of_legacy)(path.read_bytes(), path.stem))
    return found


def _each() -> Iterator[Any]:
    for value in values():
        yield value
        if type(value) is tuple:
            yield from value


def saved(value: Any, *, is_zip: bool) -> bytes:
    stream = io.BytesIO()
    torch.save({"x": value}, stream, _use_new_zipfile_serialization=is_zip)
    return stream.getvalue()


def of_zip(data: bytes, prefix: str) -> Seed:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    root = read(members["data.pkl"])
    _renamed(root, prefix)
    return Seed(root, {f"{prefix}_{name[5:]}": data for name, data in members.items() if name.startswith("data/")})


def of_legacy(data: bytes, prefix: str) -> Seed:
    stream = io.BytesIO(data)
    for _ in range(3):
        pickle.load(stream)
    start = stream.tell()
    for _ in pickletools.genops(stream):
        pass
    root = read(data[start : stream.tell()])
    sizes = {one.nodes[0].nodes[2].said: one.nodes[0].nodes[1].said for one in walk(root) if one.kind == "pid"}
    storages = {}
    for key in pickle.load(stream):
        numel = int.from_bytes(stream.read(8), "little")
        storages[f"{prefix}_{key}"] = stream.read(numel * WIDTHS.get(sizes[key][1], 1))
    _renamed(root, prefix)
    return Seed(root, storages, is_legacy=True)


def _renamed(root: Node, prefix: str) -> None:
    """Give the keys of storages the name of their file, so that trees can be mixed."""
    done = set()
    for node in walk(root):
        if node.kind == "pid":
            key = node.nodes[0].nodes[2]
            if id(key) not in done:
                key.said = f"{prefix}_{key.said}"
                done.add(id(key))


def names() -> list[tuple[str, str]]:
    """Return the names that data may ask for, those that the trees ask for, and some that no data asks for."""
    listed = {*constructions.BY_NAME, *constructions.VALUES, *constructions.STORAGES, *forms.NBYTES}
    split = {tuple(name.rsplit(".", 1)) for name in listed}
    found = {node.said for seed in seeds() for node in walk(seed.root) if node.kind == "name"}
    return sorted(found | split | set(OTHERS))


OTHERS = [
    (module, name)
    for module, held in {
        "builtins": "getattr list dict tuple str int float bytes bool object type iter map property memoryview reversed"
        " enumerate zip Exception frozenset",
        "__builtin__": "list set long unicode xrange bytes",
        "argparse": "Namespace",
        "collections": "ChainMap UserDict UserList",
        "functools": "partial",
        "operator": "itemgetter",
        "types": "MappingProxyType MethodType",
        "torch": "Tensor Size FloatStorage",
        "torch.storage": "_load_from_bytes",
        "torch._tensor": "_rebuild_from_type_v2",
        "numpy": "ndarray dtype matrix recarray float64 str_ bytes_ void datetime64 object_",
        "numpy.core.multiarray": "scalar",
        "torch.nn.modules.module": "Module",
        "torch.nn.modules.linear": "Linear",
        "torch.optim.adam": "Adam",
        "torch.utils.data": "dataset",
        "torch.cuda": "FloatTensor",
        "torch.nn.parameter": "UninitializedParameter",
        "copyreg": "_reconstructor __newobj__",
        "copy_reg": "_reconstructor",
        "os": "path",
        "mypkg": "Net",
        "typing": "ForwardRef",
        "string": "Template",
        "numpy._core.numeric": "_frombuffer",
        "numpy.core.numeric": "_frombuffer",
        "numpy._core.multiarray": "_reconstruct",
    }.items()
    for name in held.split()
]
