"""
Whether plain ``torch.load(path)`` opens a file, and which devices, releases and packages it needs.

Nothing is called. Since PyTorch 2.6, plain ``torch.load`` is ``weights_only=True``: it refuses names that are not on
its list, opcodes that it does not know, and files that are for another loader. The findings are about form and names;
they do not promise that loading succeeds.

This machine is not inspected: the caller says which devices it has, and packages are only named.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from ckptool.checking.finding import Advice, Finding, instead, migration, note, place, state_dict
from ckptool.checking.safety import packing
from ckptool.checking.structure import foreign
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import summarise
from ckptool.messages import some
from ckptool.pickles.nodes import Global
from ckptool.pickles.weights_only import OPCODES, is_allowed, is_of_index, is_torchscripts, is_usual

Kind: TypeAlias = Literal["name", "opcode", "container", "loader"]

_OPCODE_NAMES = {
    0x95: "FRAME",
    0x8C: "SHORT_BINUNICODE",
    0x93: "STACK_GLOBAL",
    0x94: "MEMOIZE",
    ord("C"): "SHORT_BINBYTES",
    ord("B"): "BINBYTES",
}
_VERSION = re.compile(r"\s*\+?0*([1-9]|10)(?!\d)")


class GlobalUse(NamedTuple):
    """A name that a pickle imports: where, and whether torch.load allows it."""

    name: str
    record: str
    """The archive member; empty for the file itself."""
    offset: int
    """Offset in the record of the first opcode that imports it."""
    is_allowed: bool
    nested_at: int | None = None
    """Offset in the record of the pickle that imports it, if that is inside another pickle."""


class Refusal(NamedTuple):
    """One reason why plain ``torch.load(path)`` does not open a file."""

    kind: Kind
    what: str


def refusals(checkpoint: Checkpoint) -> list[Refusal]:
    """Return why plain ``torch.load(path)`` does not open a checkpoint; nothing if it does. No tensor is read."""
    container = _container(checkpoint)
    # Names count whatever the container is: it can be unpacked, or opened with another loader.
    return [*container, *_names(checkpoint), *(() if container else _opcodes(checkpoint))]


def asked(checkpoint: Checkpoint) -> tuple[GlobalUse, ...]:
    """Return the names that the pickles of a checkpoint import."""
    return tuple(_ask(one, stream.record) for stream in checkpoint.streams for one in stream.globals)


def _ask(found: Global, record: str) -> GlobalUse:
    return GlobalUse(str(found), record, found.offset, is_allowed(found.module, found.name))


def _names(checkpoint: Checkpoint) -> list[Refusal]:
    """Return the names that torch does not allow and TorchScript does not write; unusual names come first."""
    own = checkpoint.traits.program is not None
    found = [
        (is_usual(one.module, one.name), _ask(one, stream.record))
        for stream in checkpoint.streams
        for one in stream.globals
        if not (own and is_torchscripts(one.module, one.name))
        and not (stream.is_index and is_of_index(one.module, one.name))
    ]
    found.sort(key=lambda pair: pair[0])
    first: dict[str, GlobalUse] = {}  # the files of all ranks import the same names
    for _, one in found:
        if not one.is_allowed:
            first.setdefault(one.name, one)
    return [Refusal("name", f"{name} ({place(one.record, one.offset)})") for name, one in first.items()]


def _container(checkpoint: Checkpoint) -> list[Refusal]:
    """Return what torch.load refuses about the file itself, whatever its pickles import."""
    if checkpoint.shards and checkpoint.root is None:
        return [Refusal("loader", "an index of shards is opened by what wrote it, from_pretrained() mostly")]
    if checkpoint.member is not None or checkpoint.form == "archive":
        return [Refusal("loader", "torch.load() does not look into archives of files")]
    if checkpoint.traits.loader != "torch.load":
        opener = checkpoint.traits.call if checkpoint.traits.is_read else "ckptool.load()"
        return [Refusal("loader", f"{opener} opens it")]
    compression = packing(checkpoint)
    if compression is not None:
        return [Refusal("loader", f"torch.load() does not unpack {compression.name}")]
    if checkpoint.traits.refusal is not None:
        return [Refusal("container", checkpoint.traits.refusal)]
    if not checkpoint.archives:
        if any(str(one) == "torch.storage.UntypedStorage" for one in checkpoint.globals):
            return [Refusal("container", "a legacy stream with untyped storages is not read with weights_only=True")]
        return []
    archive = checkpoint.archives[-1]
    folder, _, rest = next(iter(archive)).partition("/")  # torch takes the folder of the first record for that of all
    if not rest or f"{folder}/data.pkl" not in archive:
        return [Refusal("container", "its records are not in one folder")]
    outside = next((name for name in archive if not name.startswith(f"{folder}/")), None)
    if outside is not None:
        return [Refusal("container", f"its record {outside!r} is not in the folder of the others")]
    version = f"{folder}/version"
    if version in archive and not _VERSION.match(archive.text(version)):
        return [Refusal("container", f"its version is {archive.text(version)!r}, not a number from 1 to 10")]
    return []


def _opcodes(checkpoint: Checkpoint) -> Iterator[Refusal]:
    """Yield the first opcode of each stream that torch.load does not know."""
    for stream in checkpoint.streams:
        unknown = [(offset, op) for op, offset in stream.opcodes.items() if op not in OPCODES]
        if unknown:
            offset, op = min(unknown)
            what = f"pickle opcode {op} {_OPCODE_NAMES.get(op, '')}".rstrip()
            yield Refusal("opcode", f"{what} ({place(stream.record, offset)})")


def findings(checkpoint: Checkpoint, refused: Sequence[Refusal]) -> list[Finding]:
    """CK202: plain torch.load(path) refuses the file. CK204: its names are refused, too, if another loader opens it."""
    if not refused or checkpoint.traits.is_plain:
        return []
    first, *rest = refused
    names = some([refusal.what for refusal in rest])
    mend = state_dict(checkpoint)
    if mend.command is None:
        mend = instead(checkpoint)
    if first.kind == "loader":
        found = [note("CK202", f"not for torch.load(): {first.what}", severity="info")]
        if rest:
            found.append(note("CK204", f"its pickles ask for what torch.load() does not allow: {names}", *mend))
        return found
    if first.kind == "container":
        fact = f"torch.load() refuses it: {first.what}{f'; it asks for what is not allowed: {names}' if rest else ''}"
    else:
        what = some([refusal.what for refusal in refused])
        fact = f"torch.load() refuses it, as weights_only=True is its default since 2.6: {what}"
    return [note("CK202", fact, *mend)]


_HARDWARE = {
    "cuda": "a CUDA or ROCm device",
    "mps": "an Apple GPU",
    "xpu": "an Intel GPU",
    "npu": "an Ascend NPU, and torch_npu",
    "hpu": "a Gaudi device, and its build of torch",
    "xla": "a TPU or another XLA device, and torch_xla",
    "mlu": "a Cambricon MLU, and torch_mlu",
    "privateuseone": "a device of another kind, and its package",
}

_TO_CPU = {
    "torch.jit.load": "Load it with torch.jit.load(path, map_location='cpu').",
    "torch.export.load": "Export it again on the device that is to run it; its weights alone can be migrated.",
}
"""How to move a program to the CPU, by its loader. Everything else can be migrated."""

_SINCE = {
    "float8_e4m3fn": (2, 1),
    "float8_e5m2": (2, 1),
    "float8_e4m3fnuz": (2, 2),
    "float8_e5m2fnuz": (2, 2),
    "uint16": (2, 3),
    "uint32": (2, 3),
    "uint64": (2, 3),
    "float8_e8m0fnu": (2, 7),
    "float4_e2m1fn_x2": (2, 8),
}
"""The first release of torch that has an element type, if the oldest supported release lacks it."""


def examine(checkpoint: Checkpoint, devices: Collection[str] | None) -> Iterator[Finding]:
    """Yield the required devices, torch release and packages; with ``devices``, those that are missing."""
    yield from _devices(checkpoint, devices)
    needed = [(_SINCE[name], name) for name in summarise(checkpoint).dtypes if name in _SINCE]
    if needed:  # element types that came with a later release of torch
        (major, minor), _ = max(needed)
        yield note("CK504", f"needs torch {major}.{minor} or later, for {', '.join(name for _, name in needed)}")
    # A whole model can only be loaded as one if its classes can be imported.
    is_model = bool(checkpoint.walks) and checkpoint.traits.program is None
    modules = dict.fromkeys(name.partition(".")[0] for name in foreign(checkpoint)) if is_model else {}
    if modules:
        wants = ["the script that defined its class" if one == "__main__" else f"package {one!r}" for one in modules]
        yield note("CK505", f"to load as a model it needs {some(wants)}, in the version that saved it")


def _devices(checkpoint: Checkpoint, devices: Collection[str] | None) -> Iterator[Finding]:
    """CK503: saved on a device that loading requests again."""
    infos = [tensor.info for tensor in (*checkpoint.tensors.values(), *checkpoint.attributes.values())]
    tags = dict.fromkeys(info.location for info in infos if info.location not in ("cpu", "meta"))
    if not tags:
        return
    listed = [f"{tag} ({_HARDWARE[kind]})" if (kind := tag.partition(":")[0]) in _HARDWARE else tag for tag in tags]
    hint = _TO_CPU.get(checkpoint.traits.loader)
    advice = Advice(hint) if hint is not None else migration(checkpoint, to="cpu")
    if devices is None:
        what = f"saved on {some(listed)}: loading asks for that device again unless map_location says otherwise"
        yield note("CK503", what, *advice, severity="info")
        return
    # A tag without a number is of the first device of its kind.
    there = {*devices, *(device.partition(":")[0] for device in devices)}
    lacking = [tag for tag in tags if tag not in there]
    if lacking:
        what = f"saved on {some(lacking)}, which this machine does not have; it has {', '.join(devices)}"
        yield note("CK503", what, *advice)
