"""
``torch.export.save``: an exported program and its weights in a zip.

Since 2.8:
    <root>/archive_format                              "pt2"
    <root>/data/weights/<model>_weights_config.json    {"config": {name: {path_name, is_param, tensor_meta, …}}}
    <root>/data/weights/weight_N                       one storage, raw; tied tensors share one
    <root>/data/constants/<model>_constants_config.json, tensor_N    constants and non-persistent buffers, likewise
Before:
    serialized_state_dict.pt or .json                  a torch.save zip of the state dict
    serialized_constants.pt or .json                   a torch.save zip of the constants

Both also hold pickles that are not weights, which torch.export.load() unpickles: inputs to try it with, custom objects.

See torch/export/pt2_archive/_package.py and torch/_export/serde/schema.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.archives.archive import Archive
from ckptool.checkpoints.contents import Contents, Group
from ckptool.checkpoints.parsed import Parsed, Traits, under
from ckptool.errors import AmbiguousFile, Failure, MalformedFile
from ckptool.formats.probe import Probe
from ckptool.formats.strict_json import parse_member
from ckptool.tensors import dtypes
from ckptool.tensors.tensor import StorageRef, TensorInfo, check_extent

NAME = "pt2"
TRAITS = Traits(program="the graph of an exported program", loader="torch.export.load")

_OLD_PROGRAM = "serialized_exported_program.json"
_OLD_TENSORS = ("serialized_state_dict.pt", "serialized_constants.pt")
"""Members that are read as tensors; others with this suffix are pickles that torch.export.load() unpickles."""
_CLASS = "torch.export.ExportedProgram"
_WEIGHTS = ("weights", "_weights_config.json")
_CONSTANTS = ("constants", "_constants_config.json")
_OBJECTS = ("/custom_obj_", "/opaque_obj_")
"""Beginnings of the names of constants that are pickles of other objects than tensors; folders may follow."""


def sniff(probe: Probe) -> bool:
    """Return whether a zip is an exported program."""
    if probe.zip is None:
        return False
    return _old_folder(probe.zip) is not None or _new_folder(probe.zip) is not None


def read(probe: Probe) -> Parsed:
    """Read the index of an exported program; its graph is not inspected."""
    archive = probe.zip
    assert archive is not None  # sniff saw it
    contents, constants, pickled = Contents(), dict[str, TensorInfo](), set[str]()
    folder = _new_folder(archive)
    older = _read_old(probe, archive, contents, constants) if folder is None else []
    for model, infos in _read_configs(probe, archive, folder, *_WEIGHTS, pickled):
        named = under(model, infos) if model else infos
        if twice := named.keys() & contents.tensors.keys():
            raise AmbiguousFile(f"two tensors are called {min(twice)!r}", kind="ambiguous-name")
        contents.groups.append(Group(model, "module", list(named), class_name=_CLASS))
        contents.tensors |= named
    for model, infos in _read_configs(probe, archive, folder, *_CONSTANTS, pickled):
        constants |= under(f"constants.{model}" if model else "constants", infos)
    streams, unopened = [stream for one in older for stream in one.streams], []
    for name, record in archive.items():
        last = name.rpartition("/")[2]
        is_object = record.nbytes > 0 and last.endswith(".pt") and last not in _OLD_TENSORS
        if name in pickled or is_object or any(map(name.__contains__, _OBJECTS)):
            try:
                streams += [one.inside(name) for one in probe.read_inner(archive.open(name)).streams]
            except Failure as error:
                unopened.append((name, error.message))
    return Parsed(
        archive.source,
        NAME,
        TRAITS,
        contents,
        fixed_form="model",
        constants=constants,
        notes=archive.notes,
        streams=tuple(streams),
        archives=(archive, *(found for one in older for found in one.archives)),
        unopened=tuple(unopened),
    )


def _new_folder(archive: Archive) -> str | None:
    for name in archive.called("archive_format"):
        if archive.text(name) == "pt2":
            return name[: -len("archive_format")]
    return None


def _old_folder(archive: Archive) -> str | None:
    found = archive.called(_OLD_PROGRAM)
    return found[0][: -len(_OLD_PROGRAM)] if found else None


def _read_configs(
    probe: Probe, archive: Archive, folder: str | None, kind: str, suffix: str, pickled: set[str]
) -> Iterator[tuple[str, dict[str, TensorInfo]]]:
    """
    Yield the name of each program in the archive, which is empty for a single one, and its tensors.

    The records that are pickled are added to ``pickled``.
    """
    place = f"{folder}data/{kind}/"
    configs = [name for name in archive if folder is not None and name.startswith(place) and name.endswith(suffix)]
    storages: dict[str, StorageRef] = {}
    for config in configs:
        tensors: dict[str, TensorInfo] = {}
        entries = parse_member(archive, config, "pt2").get("config")
        if not (isinstance(entries, dict) and all(isinstance(entry, dict) for entry in entries.values())):
            raise MalformedFile(f"{config!r} is not a list of tensors", kind="malformed-pt2")
        for name, entry in entries.items():
            if entry.get("use_pickle"):
                pickled.add(f"{place}{entry.get('path_name')}")
            info = _tensor(probe, archive, place, name, entry, storages)
            if info is not None:
                tensors[name] = info
        yield "" if len(configs) == 1 else config[len(place) : -len(suffix)], tensors
    for one in storages:
        if one in pickled or one.endswith(".pt") or any(map(one.__contains__, _OBJECTS)):
            raise AmbiguousFile(f"record {one!r} is a tensor, and torch unpickles it as well", kind="ambiguous-pt2")


def _tensor(
    probe: Probe,
    archive: Archive,
    place: str,
    name: str,
    entry: dict[str, object],
    storages: dict[str, StorageRef],
) -> TensorInfo | None:
    path = entry.get("path_name")
    record_name = f"{place}{path}"
    if record_name not in archive:
        raise MalformedFile(f"tensor {name!r} has no record {record_name!r}", kind="missing-storage")
    meta = entry.get("tensor_meta")
    if not isinstance(meta, dict):
        return None  # a custom object: code, not a tensor
    if entry.get("use_pickle"):
        inner = probe.read_inner(archive.open(record_name))
        return next(iter(inner.contents.tensors.values()), None)
    number = meta.get("dtype")
    dtype = dtypes.BY_PT2.get(number) if isinstance(number, int) else None
    if dtype is None:
        raise MalformedFile(f"tensor {name!r} has an unknown dtype", kind="malformed-pt2")
    info = TensorInfo(
        dtype,
        tuple(_sym_int(size) for size in _list(meta.get("sizes"))),
        tuple(_sym_int(step) for step in _list(meta.get("strides"))),
        _sym_int(meta.get("storage_offset")),
        stored(archive, record_name, str(path), device := _device(meta.get("device")), storages),
        device,
        meta.get("requires_grad") is True,
        "parameter" if entry.get("is_param") is True else "buffer",
    )
    check_extent(info)
    return info


def stored(archive: Archive, name: str, key: str, device: str, storages: dict[str, StorageRef]) -> StorageRef:
    """Return the storage that is this member; ``storages`` are those returned before, as tied tensors share one."""
    record = archive[name]
    new = StorageRef(key, device, record.nbytes, archive.content(name), 0, crc32=record.crc32 or 0)
    return storages.setdefault(name, new)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _sym_int(value: object) -> int:
    number = value.get("as_int") if isinstance(value, dict) else value
    return number if type(number) is int else -1  # check_extent refuses it


def _device(value: object) -> str:
    if not isinstance(value, dict):
        return "unknown"
    index = value.get("index")
    return f"{value.get('type')}" if index is None else f"{value.get('type')}:{index}"


def _read_old(probe: Probe, archive: Archive, contents: Contents, constants: dict[str, TensorInfo]) -> list[Parsed]:
    """Add the tensors of an archive from before 2.8; return the checkpoints that its weights and constants are."""
    inner = {}
    for which in ("state_dict", "constants"):
        for suffix in (".pt", ".json"):
            name = f"{_old_folder(archive)}serialized_{which}{suffix}"
            if name in archive and archive[name].nbytes:
                inner[which] = probe.read_inner(archive.open(name))
    if "state_dict" not in inner:
        raise MalformedFile("an exported program without its state dict", kind="malformed-pt2")
    contents.tensors |= inner["state_dict"].contents.tensors
    contents.groups.append(Group("", "module", list(contents.tensors), class_name=_CLASS))
    if "constants" in inner:
        constants |= under("constants", inner["constants"].contents.tensors)
    return list(inner.values())
