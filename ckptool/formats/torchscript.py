"""
TorchScript: the zip that ``torch.jit.save`` writes, also for mobile.

    <root>/data.pkl           the module; its attributes lie flat in its state
    <root>/data/<key>         storages
    <root>/constants.pkl      a tuple of tensors that the code refers to by number
    <root>/constants/<key>    their storages
    <root>/code/…py           the classes, as text: which attribute is a parameter, which a buffer

The code is read as text, for the two lists at the head of each class. Code of PyTorch 1.4 has only the first: there,
every tensor that is not a parameter is a buffer. See torch/csrc/jit/serialization/export.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from ckptool.archives.archive import Archive
from ckptool.checkpoints.contents import collect
from ckptool.checkpoints.modules import ModuleEntry, ModuleGraph, StateDictWalk
from ckptool.checkpoints.parsed import Parsed, Stream, Traits, under
from ckptool.errors import LimitExceeded, MalformedFile
from ckptool.formats import torch_zip
from ckptool.formats.probe import Probe
from ckptool.limits import Limits
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Inert
from ckptool.pickles.reader import read_pickle
from ckptool.tensors.tensor import Kind

NAME = "torchscript"
TRAITS = Traits(program="the code of a TorchScript model", loader="torch.jit.load")

_LINE: Final = r"(?m)^(?:class (\w+)\((\w+)\):|  __(parameters|buffers)__ = \[(.*?)\])"
"""The head of a class, or one of its two lists."""
_PREFIX = "__torch__"


def sniff(probe: Probe) -> bool:
    """Return whether this is a torch zip whose pickle names a class of TorchScript."""
    if not torch_zip.sniff(probe) or probe.zip is None:
        return False
    root = torch_zip.root_folder(probe.zip)
    # Its root is an object of such a class: the first opcode after the protocol's two bytes.
    return probe.zip.head(f"{root}data.pkl", 12)[2:] == b"c__torch__" or f"{root}constants.pkl" in probe.zip


def read(probe: Probe) -> Parsed:
    """Read the index of a TorchScript archive, and the lists of parameters and buffers in its code."""
    archive = probe.zip
    assert archive is not None  # sniff saw it
    root = torch_zip.root_folder(archive)
    graph = ScriptModules(_class_tables(archive, f"{root}code/"))
    parsed = torch_zip.read_archive(archive, NAME, TRAITS, graph)
    cls = nodes.class_of(parsed.root)
    if cls is not None and cls.module.startswith(_PREFIX):  # one without parameters is a model all the same
        parsed = parsed._replace(fixed_form="model")
    name = f"{root}constants.pkl"
    if name not in archive:
        return parsed
    # Tensors that the code refers to by number: in a frozen model, all its weights.
    big_endian = torch_zip.is_big_endian(archive, f"{root}byteorder")
    content = archive.open(name)
    pickled = read_pickle(content)
    storages = torch_zip.ZipStorages(archive, f"{root}constants/", big_endian=big_endian)
    found = collect(pickled.root, storages.rebuilder(), archive.limits)
    return parsed._replace(
        constants=under("constants", found.tensors | found.attributes),
        streams=(*parsed.streams, Stream(name, content, 0, pickled.end, pickled.globals, opcodes=pickled.opcodes)),
    )


class ScriptModules(ModuleGraph):
    """How TorchScript modules are pickled: objects of ``__torch__`` classes, attributes flat in their state."""

    def __init__(self, tables: dict[str, _Table]) -> None:
        self._tables = tables

    def is_module(self, node: Inert) -> bool:
        """Return whether a node is an object of a TorchScript class, other than a named tuple or a foreign class."""
        found = nodes.class_of(node)
        if found is None or not found.module.startswith(_PREFIX) or found.module.startswith("__torch__.torch.classes"):
            return False
        # One that was saved by its own __getstate__ has a tuple for its state, and nothing in a state_dict().
        has_state = bool(nodes.attribute_pairs(node)) or (isinstance(node.state, tuple) and bool(self._tables))
        return has_state and (not self._tables or str(found) in self._tables)

    def class_name(self, node: Inert) -> str:
        """Return the full name of the class in the program that was scripted."""
        return nodes.class_name(node).removeprefix(f"{_PREFIX}.")

    def children(self, node: Inert) -> Iterable[tuple[Inert, Inert]]:
        return nodes.children(node)

    def walk(self, node: Inert, limits: Limits) -> StateDictWalk:
        """Return what the module's state_dict() would hold; TorchScript's also has non-persistent buffers."""
        walk = StateDictWalk()
        inside: set[int] = set()
        todo: list[tuple[Inert, str, bool]] = [(node, "", False)]
        visits = 0
        while todo:
            current, prefix, leaving = todo.pop()
            if leaving:
                inside.discard(id(current))
                continue
            if id(current) in inside:
                raise MalformedFile(f"module {prefix!r} holds itself", kind="malformed-module")
            inside.add(id(current))
            todo.append((current, prefix, True))
            attributes = nodes.attribute_pairs(current)
            walk.entries.extend(self._own_entries(current, attributes, prefix))
            for name, child in reversed(attributes):
                if isinstance(name, str) and self.is_module(child):
                    todo.append((child, f"{prefix}{name}.", False))
            visits += 1
            if max(visits, len(walk.entries)) > limits.tensors or len(prefix) > limits.name_nbytes:
                raise LimitExceeded(f"a model of more than {limits.tensors:,} names", actual=limits.tensors)
        return walk

    def _own_entries(self, node: Call, attributes: nodes.Pairs, prefix: str) -> list[ModuleEntry]:
        table = self._tables.get(nodes.class_name(node))
        found = [(name, value, nodes.class_of(value)) for name, value in attributes if isinstance(name, str)]
        tensors = [
            (name, value)
            for name, value, cls in found
            if cls is not None and cls.module == "torch._utils" and cls.name.startswith("_rebuild_")
        ]
        if table is None:
            return [ModuleEntry(prefix + name, value, None) for name, value in tensors]
        kinds: tuple[Kind, ...] = ("parameter", "buffer")
        return [
            ModuleEntry(prefix + name, value, kind)
            for kind in kinds
            for name, value in tensors
            if table.kinds.get(name, table.rest) == kind
        ]


class _Table:
    """Which attributes of a class are parameters and which buffers."""

    __slots__ = ("kinds", "rest")

    def __init__(self) -> None:
        self.kinds: dict[str, Kind] = {}
        self.rest: Kind | None = None
        """The kind of the tensors that the code does not list."""


def _class_tables(archive: Archive, folder: str) -> dict[str, _Table]:
    """Return the table of each class in the archive's code."""
    tables: dict[str, _Table] = {}
    for name, record in archive.items():
        if not (name.startswith(folder) and name.endswith(".py")):
            continue
        text = str(archive.open(name).read(0, record.nbytes), "utf-8", "replace")
        module = name[len(folder) : -len(".py")].replace("/", ".")
        table = _Table()
        for cls, base, which, names in re.findall(_LINE, text):
            if cls:
                table = tables.setdefault(f"{module}.{cls}", _Table()) if base == "Module" else _Table()
                continue
            kind: Kind = "parameter" if which == "parameters" else "buffer"
            table.kinds.update(dict.fromkeys(re.findall(r'"([^"]*)"', names), kind))
            table.rest = "buffer" if which == "parameters" else None  # the list of buffers comes second
    return tables
