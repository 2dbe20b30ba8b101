"""
``torch.save`` of PyTorch 0.1.x: a tar of four members.

    storages    pickle(count); for each: pickle (key, location, class), i64 numel, raw elements; pickle [views]
    tensors     pickle(count); for each: pickle (key, storage key, class), i32 ndim, 4 bytes, i64 sizes, i64 strides,
                i64 offset
    pickle      the tree; tensors and storages appear as persistent ids, which are their keys
    sys_info    the machine that wrote it

A view is (key, root key, offset, numel): a storage that is a slice of another. See torch/serialization.py,
_legacy_load.legacy_load.
"""

from __future__ import annotations

from functools import partial
from struct import Struct

from ckptool.archives.archive import Archive
from ckptool.checkpoints.arrays import collect_weights
from ckptool.checkpoints.parsed import Parsed, Stream, Traits
from ckptool.errors import MalformedFile, TruncatedFile
from ckptool.formats import torch_legacy
from ckptool.formats.probe import Probe
from ckptool.pickles.nodes import Global, Inert
from ckptool.pickles.reader import read_pickle
from ckptool.sources.source import Source
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.storage_ids import TypedStorage, storage_id
from ckptool.tensors.tensor import StorageRef, TensorInfo, check_extent

NAME = "torch_tar"
TRAITS = Traits(has_tree=True, refusal="files of PyTorch 0.1 are not read with weights_only=True")

_I64 = Struct("<q")
_NDIM = Struct("<i4x")
_MEMBERS = ("storages", "tensors", "pickle")


def sniff(probe: Probe) -> bool:
    """Say whether this is a tar with the three members that hold the data, or one of them missing."""
    tar = probe.tar
    return tar is not None and sum(name in tar for name in _MEMBERS) > 1


def read(probe: Probe) -> Parsed:
    """Read the index of a 0.1.x file: its pickles, and what precedes each storage."""
    archive = probe.tar
    assert archive is not None  # noqa: S101 - sniff saw it
    for name in _MEMBERS:
        if name not in archive:
            raise MalformedFile(f"a tar of PyTorch 0.1 without its member {name!r}", kind="missing-member")
    tables = TarStorages(archive)
    content = archive.open("pickle")
    tree = read_pickle(content)
    rebuilder = Rebuilder(tables.resolve, partial(torch_legacy.nested_storage, limits=probe.limits))
    contents = collect_weights(tree.root, rebuilder, probe.limits)
    return Parsed(
        probe.source,
        NAME,
        TRAITS,
        contents,
        root=tree.root,
        rebuilder=rebuilder,
        streams=(
            Stream("pickle", content, 0, tree.end, tree.globals),
            *(Stream(name, archive.open(name), 0, 0, found) for name, found in tables.globals.items()),
        ),
        archives=(archive,),
        class_sources=torch_legacy.class_sources(tree),
    )


class TarStorages:
    """The storages and tensors of a 0.1.x file, by their keys."""

    def __init__(self, archive: Archive) -> None:
        self._storages: dict[str, TypedStorage] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self.globals: dict[str, tuple[Global, ...]] = {}
        """Names that the pickles before storages and tensors import, by member."""
        self._read_storages(archive.open("storages"))
        self._read_tensors(archive.open("tensors"))

    def resolve(self, pid: Inert) -> TypedStorage | TensorInfo | None:
        """Return the tensor or storage that has this key."""
        key = _key(pid)
        return None if key is None else self._tensors.get(key) or self._storages.get(key)

    def _note(self, member: str, names: tuple[Global, ...]) -> None:
        known = {(found.module, found.name): found for found in self.globals.get(member, ())}
        fresh = tuple(found for found in names if (found.module, found.name) not in known)
        if fresh:
            self.globals[member] = (*known.values(), *fresh)

    def _read_storages(self, source: Source) -> None:
        position, count = _count(source, 0)
        for _ in range(count):
            entry = read_pickle(source, position)
            self._note("storages", entry.globals)
            key, location, cls = _triple(entry.root)
            (numel,) = _I64.unpack(_read(source, entry.end, 8))
            named = storage_id(("storage", cls, key, location, numel))
            if named is None or _key(key) is None:
                raise MalformedFile("an entry that is not a storage", kind="malformed-tar")
            start = entry.end + 8
            position = start + named.nbytes
            if position > source.nbytes:
                raise _truncated(position, source.nbytes)
            ref = StorageRef(str(key), named.location, named.nbytes, source, start)
            self._storages[str(key)] = TypedStorage(ref, named.dtype)
        for view in _sequence(read_pickle(source, position).root):
            self._add_view(view)

    def _add_view(self, view: Inert) -> None:
        if not (isinstance(view, tuple) and len(view) == 4):
            raise MalformedFile("a storage view of the wrong kind", kind="malformed-tar")
        key, root_key, offset, numel = view
        root = self._storages.get(str(_key(root_key)))
        if root is None or _key(key) is None or not all(type(n) is int and n >= 0 for n in (offset, numel)):
            raise MalformedFile("a view of a storage that is not there", kind="malformed-tar")
        itemsize = root.dtype.itemsize
        if (offset + numel) * itemsize > root.ref.nbytes:
            raise MalformedFile("a view that reaches over its storage", kind="storage-size")
        ref = StorageRef(
            str(key),
            root.ref.location,
            numel * itemsize,
            root.ref.source,
            root.ref.offset + offset * itemsize,
            whole=root.ref.whole or root.ref,
        )
        self._storages[str(key)] = TypedStorage(ref, root.dtype)

    def _read_tensors(self, source: Source) -> None:
        position, count = _count(source, 0)
        for _ in range(count):
            entry = read_pickle(source, position)
            self._note("tensors", entry.globals)
            key, storage_key, _ = _triple(entry.root)
            (ndim,) = _NDIM.unpack(_read(source, entry.end, 8))
            if not 0 <= ndim <= 64:
                raise MalformedFile(f"a tensor of {ndim} dimensions", kind="malformed-tar")
            position = entry.end + 8
            numbers = Struct(f"<{2 * ndim + 1}q").unpack(_read(source, position, 8 * (2 * ndim + 1)))
            position += 8 * (2 * ndim + 1)
            storage = self._storages.get(str(_key(storage_key)))
            if storage is None or _key(key) is None:
                raise MalformedFile(
                    f"a tensor of storage {str(_key(storage_key))!r}, which is not there",
                    kind="missing-storage",
                )
            shape, stride, offset = numbers[:ndim], numbers[ndim:-1], numbers[-1]
            info = TensorInfo(storage.dtype, shape, stride, offset, storage.ref, storage.ref.location)
            check_extent(info)
            self._tensors[str(key)] = info


def _count(source: Source, position: int) -> tuple[int, int]:
    pickled = read_pickle(source, position)
    count = pickled.root
    if type(count) is not int or not 0 <= count <= source.nbytes:
        raise MalformedFile("a count of the wrong kind", kind="malformed-tar")
    return pickled.end, count


def _triple(node: Inert) -> tuple[Inert, Inert, Inert]:
    if not (isinstance(node, tuple) and len(node) == 3):
        raise MalformedFile("an entry of the wrong kind", kind="malformed-tar")
    return node


def _sequence(node: Inert) -> list[Inert]:
    if not isinstance(node, list | tuple):
        raise MalformedFile("a list of the wrong kind", kind="malformed-tar")
    return list(node)


def _key(pid: Inert) -> str | None:
    return str(pid) if isinstance(pid, str | int) and not isinstance(pid, bool) else None


def _read(source: Source, offset: int, nbytes: int) -> bytes:
    if offset + nbytes > source.nbytes:
        raise _truncated(offset + nbytes, source.nbytes)
    return source.read(offset, nbytes)


def _truncated(needed: int, actual: int) -> TruncatedFile:
    return TruncatedFile(
        f"truncated: a member needs {needed:,} bytes and has {actual:,}",
        kind="truncated-tar",
        hint="Download the file again.",
        needed=needed,
        actual=actual,
    )
