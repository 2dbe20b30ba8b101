"""
Tiny checkpoints of every format, byte by byte: no torch, no pickle, no zipfile, so they can also be made wrong.

Values become opcodes by ``ops``; ``bytes`` are opcodes already, so parts nest: ``ops({"w": tensor(storage())})``.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from struct import pack
from typing import Any

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C


# Pickles


def ops(value: Any) -> bytes:
    """Return the opcodes that push ``value``: None, bool, int, float, str, list, tuple, dict, or opcodes."""
    if isinstance(value, bytes):
        return value
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return integer(value)
    if isinstance(value, float):
        return b"G" + pack(">d", value)
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return b"X" + pack("<I", len(text)) + text
    if isinstance(value, tuple):
        return b"(" + b"".join(map(ops, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(ops, value)) + b"e"
    pairs = (ops(key) + ops(item) for key, item in value.items())
    return b"}(" + b"".join(pairs) + b"u"


def integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + pack("<i", value)
    digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes([len(digits)]) if len(digits) < 256 else b"\x8b" + pack("<i", len(digits))) + digits


def raw(data: bytes) -> bytes:
    """Return the opcodes that push bytes."""
    return b"B" + pack("<I", len(data)) + data


def named(module: str, name: str) -> bytes:
    """Return GLOBAL: what would be imported."""
    return f"c{module}\n{name}\n".encode()


def call(function: bytes, *args: Any) -> bytes:
    """Return REDUCE: what would be called."""
    return function + ops(args) + b"R"


def pickled(value: Any, *, protocol: int = 2) -> bytes:
    """Return a whole pickle of ``value``."""
    return (bytes([0x80, protocol]) if protocol >= 2 else b"") + ops(value) + b"."


def storage(
    key: Any = "0", numel: Any = 4, dtype: str = "FloatStorage", location: Any = "cpu", rest: Any = ()
) -> bytes:
    """Return the persistent id of a storage; ``rest`` is the view that legacy streams add, or ``(None,)``."""
    return ops(("storage", named("torch", dtype), key, location, numel, *rest)) + b"Q"


def tensor(stored: bytes, size: Any = (4,), stride: Any = (1,), offset: Any = 0) -> bytes:
    """Return ``_rebuild_tensor_v2`` of a storage."""
    hooks = call(named("collections", "OrderedDict"))
    return call(named("torch._utils", "_rebuild_tensor_v2"), stored, offset, size, stride, False, hooks)


def floats(count: int = 4) -> bytes:
    """Return the bytes of ``count`` float32 elements: 0, 1, 2…"""
    return pack(f"<{count}f", *range(count))


# Zips


def zip_file(members: Mapping[str, bytes], *, deflated: Sequence[str] = ()) -> bytes:
    """Return a zip of stored members, but for those named in ``deflated``."""
    body, directory = b"", b""
    for name, data in members.items():
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        payload = packer.compress(data) + packer.flush() if name in deflated else data
        method, sizes = 8 if name in deflated else 0, (len(payload), len(data), len(name.encode()))
        common = pack("<4H3L2H", 0, method, 0, 0, zlib.crc32(data), *sizes, 0)
        directory += b"PK\x01\x02\0\0\0\0" + common + pack("<3H2L", 0, 0, 0, 0, len(body)) + name.encode()
        body += b"PK\x03\x04\0\0" + common + name.encode() + payload
    count = len(members)
    return body + directory + pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, len(directory), len(body), 0)


def torch_zip(
    tree: Any,
    storages: Mapping[str, bytes] | None = None,
    *,
    protocol: int = 2,
    members: Mapping[str, bytes] | None = None,
) -> bytes:
    """Return what ``torch.save`` writes: a tree, and the bytes of each storage by its key."""
    found = {"archive/data.pkl": pickled(tree, protocol=protocol), "archive/byteorder": b"little"}
    found |= {f"archive/data/{key}": data for key, data in (storages or {}).items()}
    return zip_file(found | {"archive/version": b"3\n"} | dict(members or {}))


def torchscript(storages: Mapping[str, bytes] | None = None) -> bytes:
    """Return what ``torch.jit.save`` writes for a module with the one parameter ``weight``."""
    code = b'class Net(Module):\n  __parameters__ = ["weight", ]\n  __buffers__ = []\n  weight : Tensor\n'
    weight = tensor(storage())
    tree = named("__torch__", "Net") + b")\x81" + ops({"training": True, "weight": weight}) + b"b"
    constant = (tensor(storage(numel=2), (2,)),)
    members = {"archive/code/__torch__.py": code}
    members |= {"archive/constants.pkl": pickled(constant), "archive/constants/0": floats(2)}
    return torch_zip(tree, storages or {"0": floats()}, members=members)


# Legacy streams


def legacy(
    tree: Any,
    storages: Sequence[tuple[Any, int, bytes]] = (),
    *,
    keys: Any = None,
    little_endian: bool = True,
    protocol: int = 2,
) -> bytes:
    """Return what ``torch.save`` wrote before 1.6: a tree, and key, numel and bytes of each storage."""
    system = {"protocol_version": 1001, "little_endian": little_endian, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    listed = [key for key, _, _ in storages] if keys is None else keys
    head = (MAGIC_NUMBER, 1001, system, tree, listed)
    order = "<q" if little_endian else ">q"
    return b"".join(pickled(part, protocol=protocol) for part in head) + b"".join(
        pack(order, numel) + data for _, numel, data in storages
    )


def inline_tensor(stream: bytes | None = None) -> bytes:
    """Return a tensor as plain pickles hold one: its storage is a legacy stream in its bytes."""
    stream = legacy(storage(rest=(None,)), [("0", 4, floats())]) if stream is None else stream
    return tensor(call(named("torch.storage", "_load_from_bytes"), raw(stream)))


# Tars


def tar_file(members: Mapping[str, bytes]) -> bytes:
    """Return a tar of regular files."""
    whole = b""
    for name, data in members.items():
        header = (
            name.encode(errors="surrogateescape").ljust(100, b"\0")
            + b"0000644\0"
            + b"0000000\0" * 2
            + b"%011o\0" % len(data)
            + b"0" * 11
            + b"\0"
        )
        rest = (b"0" + b"\0" * 100 + b"ustar\00000").ljust(356, b"\0")
        checksum = sum(header) + 8 * ord(" ") + sum(rest)
        whole += header + b"%06o\0 " % checksum + rest + data + b"\0" * (-len(data) % 512)
    return whole + b"\0" * 1024


def torch_tar(tree: Any = None, **dropped: bytes) -> bytes:
    """
    Return what ``torch.save`` of 0.1.x wrote: one storage, one tensor, and a tree that refers to it.

    ``dropped`` are opcodes whose value is dropped, at the begin of one of the pickles.
    """

    def one(name: str, value: Any) -> bytes:
        return pickled(dropped[name] + b"0" + ops(value)) if name in dropped else pickled(value)

    stored = one("storage", (1, "cpu", named("torch", "FloatStorage"))) + pack("<q", 4) + floats()
    storages = one("storages", 1) + stored + one("views", [])
    described = one("tensor", (2, 1, named("torch", "FloatTensor"))) + pack("<i4xqqq", 1, 4, 1, 0)
    tree = {"weight": ops("2") + b"Q"} if tree is None else tree
    system = pickled({"protocol_version": 1000, "little_endian": True})
    return tar_file(
        {"storages": storages, "tensors": one("tensors", 1) + described, "pickle": pickled(tree), "sys_info": system}
    )


# safetensors


def safetensors(tensors: Mapping[str, bytes]) -> bytes:
    """Return a file of float32 vectors."""
    header, position = {}, 0
    for name, data in tensors.items():
        end = position + len(data)
        header[name] = {"dtype": "F32", "shape": [len(data) // 4], "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return pack("<Q", len(text)) + text + b"".join(tensors.values())


COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
}
"""What compresses a file as a whole."""


def index_of_shards(shard_of: Mapping[str, str], **metadata: object) -> bytes:
    """Return the JSON that says which file holds which tensor."""
    return json.dumps({"metadata": metadata, "weight_map": shard_of}, indent=2).encode() + b"\n"


def written(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write files by their paths in a folder, and return it."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def one_of_each() -> dict[str, bytes]:
    """Return a sound small file of each format, by the format's name."""
    zipped, streamed = (
        {"weight": tensor(stored), "half": tensor(stored, (2, 2), (1, 2)), "epoch": 7}
        for stored in (storage(), storage(rest=(None,)))
    )
    return {
        "torch_zip": torch_zip(zipped, {"0": floats()}),
        "torch_legacy": legacy(streamed, [("0", 4, floats())]),
        "torch_tar": torch_tar(),
        "torchscript": torchscript(),
        "safetensors": safetensors({"weight": floats(), "bias": floats(2)}),
        "pickle": pickled({"weight": inline_tensor(), "epoch": 7}),
    }
