"""
TorchScript as PyTorch 1.0 wrote it: a zip with an index in JSON. Today's PyTorch does not open it.

    <root>/version, <root>/code/…py    the program, which is not inspected
    <root>/model.json                  {"mainModule": MODULE, "tensors": [TENSOR, …]}
    <root>/tensors/N                   a storage, raw; tensors that share one name the same record

    MODULE  {"name", "parameters": [{"name", "tensorId", "isBuffer"}, …], "submodules": [MODULE, …]}
    TENSOR  {"dims", "strides", "offset", "dataType", "device", "requiresGrad", "data": {"key"}}

Numbers are text, as protobuf writes 64 bits in JSON, and what is zero or empty may be left out. Tensors that no module
has are constants of the code. See caffe2/proto/torch.proto, and torch/csrc/jit/import.cpp of 1.0.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from ckptool.archives.archive import Archive
from ckptool.cancellation import check_cancelled
from ckptool.checkpoints.contents import Contents, Group
from ckptool.checkpoints.parsed import Parsed, Traits, under
from ckptool.errors import AmbiguousFile, LimitExceeded, MalformedFile
from ckptool.formats.probe import Probe
from ckptool.formats.pt2 import stored
from ckptool.formats.strict_json import parse_member
from ckptool.limits import Limits
from ckptool.tensors.dtypes import BY_NAME
from ckptool.tensors.tensor import Kind, StorageRef, TensorInfo, check_extent

NAME = "torchscript_json"
TRAITS = Traits(program="the code of a TorchScript model", loader="torch.jit.load")

_INDEX: Final = "model.json"
_LONGEST_NUMBER: Final = 20
_TYPES: Final = {
    "FLOAT": "float32",
    "DOUBLE": "float64",
    "FLOAT16": "float16",
    "INT64": "int64",
    "INT32": "int32",
    "INT16": "int16",
    "INT8": "int8",
    "UINT8": "uint8",
    "BOOL": "bool",
}
_NOTE: Final = (
    "TorchScript as PyTorch 1.0 wrote it: torch.jit.load() of PyTorch 1.6 opens it, that of 1.12 or later does not"
)

Json: TypeAlias = "dict[str, object]"


def sniff(probe: Probe) -> bool:
    """Return whether this is a zip with such an index, without the pickled attributes of later releases."""
    root = None if probe.zip is None else _root(probe.zip)
    return root is not None and probe.zip is not None and f"{root}attributes.pkl" not in probe.zip


def read(probe: Probe) -> Parsed:
    """Read the index; no tensor is read."""
    archive = probe.zip
    assert archive is not None  # sniff saw it
    root = _root(archive) or ""
    index = parse_member(archive, f"{root}{_INDEX}", "torchscript")
    module = index.get("mainModule")
    if not isinstance(module, dict):
        raise _malformed("without a main module")
    tensors = _tensors(archive, root, _objects(index, "tensors"))
    contents, used = Contents(), set[int]()
    group = Group("", "module", class_name=str(module.get("name") or "ScriptModule"))
    for path, entry in _entries(module, archive.limits):
        number = _int64(entry.get("tensorId"))
        if path in contents.tensors:
            raise AmbiguousFile(f"two tensors are called {path!r}", kind="ambiguous-name")
        if number >= len(tensors):
            raise _malformed(f"whose {path!r} is tensor {number:,} of {len(tensors):,}")
        used.add(number)
        kind: Kind = "buffer" if entry.get("isBuffer") is True else "parameter"
        contents.tensors[path] = tensors[number]._replace(kind=kind)
        group.names.append(path)
    contents.groups.append(group)
    return Parsed(
        archive.source,
        NAME,
        TRAITS,
        contents,
        fixed_form="model",
        constants=under("constants", {str(at): one for at, one in enumerate(tensors) if at not in used}),
        notes=(*archive.notes, _NOTE),
        archives=(archive,),
    )


def _root(archive: Archive) -> str | None:
    """Return the folder that contains everything, with its slash, if it has an index and a version."""
    for name in archive.called(_INDEX):
        root = name[: -len(_INDEX)]
        if root.count("/") == 1 and f"{root}version" in archive:
            return root
    return None


def _entries(module: Json, limits: Limits) -> list[tuple[str, Json]]:
    """Return the parameters and buffers of a module and of those in it, by name, in the order of its state_dict()."""
    found: list[tuple[str, Json]] = []
    todo = [("", module)]
    while todo:
        check_cancelled(limits.cancellation)
        prefix, current = todo.pop()
        own = _objects(current, "parameters")
        own.sort(key=lambda entry: entry.get("isBuffer") is True)
        found += ((prefix + _name(entry), entry) for entry in own)
        todo += ((f"{prefix}{_name(one)}.", one) for one in reversed(_objects(current, "submodules")))
        if len(found) > limits.tensors or len(prefix) > limits.name_nbytes:
            raise LimitExceeded(f"a model of more than {limits.tensors:,} names", actual=limits.tensors)
    return found


def _tensors(archive: Archive, root: str, entries: list[Json]) -> list[TensorInfo]:
    storages: dict[str, StorageRef] = {}
    found = []
    for entry in entries:
        check_cancelled(archive.limits.cancellation)
        data, kind, device = entry.get("data"), entry.get("dataType"), str(entry.get("device") or "cpu")
        key = data.get("key") if isinstance(data, dict) else None
        record = archive.get(f"{root}{key}")
        if record is None:
            raise MalformedFile(f"a tensor has no record {f'{root}{key}'!r}", kind="missing-storage")
        if not isinstance(kind, str) or kind not in _TYPES:
            raise _malformed(f"with a tensor of the type {kind!r}")
        storage = stored(archive, record.name, str(key), device, storages)
        info = TensorInfo(
            BY_NAME[_TYPES[kind]],
            tuple(map(_int64, _list(entry, "dims"))),
            tuple(map(_int64, _list(entry, "strides"))),
            _int64(entry.get("offset")),
            storage,
            storage.location,  # memory that is shared is on one device
            entry.get("requiresGrad") is True,
        )
        check_extent(info)
        found.append(info)
    return found


def _list(owner: Json, key: str) -> list[object]:
    value = owner.get(key, [])
    if not isinstance(value, list):
        raise _malformed(f"whose {key!r} is not a list")
    return value


def _objects(owner: Json, key: str) -> list[Json]:
    found = [one for one in _list(owner, key) if isinstance(one, dict)]
    if len(found) != len(_list(owner, key)):
        raise _malformed(f"whose {key!r} are not objects")
    return found


def _name(entry: Json) -> str:
    name = entry.get("name")
    if not isinstance(name, str):
        raise _malformed("with something that has no name")
    return name


def _int64(value: object) -> int:
    """Return a number that JSON has as text; zero if it is left out."""
    if value is None:
        return 0
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _LONGEST_NUMBER:
        return int(value)
    if type(value) is int and value >= 0:
        return value
    raise _malformed(f"with {str(value)[:40]!r} for a number")


def _malformed(what: str) -> MalformedFile:
    return MalformedFile(f"an index of TorchScript {what}", kind="malformed-torchscript")
