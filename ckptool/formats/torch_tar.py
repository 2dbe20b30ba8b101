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

from collections.abc import Iterator
from functools import partial
from struct import Struct

from ckptool.archives.archive import Archive
from ckptool.checkpoints.parsed import Parsed, Stream, Traits
from ckptool.checkpoints.roles import collect_weights
from ckptool.errors import Failure, MalformedFile, TruncatedFile
from ckptool.formats import torch_legacy
from ckptool.formats.probe import Probe
from ckptool.pickles.nodes import Global, Inert
from ckptool.pickles.reader import Pickle, read_pickle
from ckptool.sources.source import Source
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import MAX_RANK, StorageRef, TensorInfo, TypedStorage, check_extent, storage_id

NAME = "torch_tar"
TRAITS = Traits(has_tree=True, refusal="files of PyTorch 0.1 are not read with weights_only=True")

_I64 = Struct("<q")
_NDIM = Struct("<i4x")
_TABLES = ("storages", "tensors")


def sniff(probe: Probe) -> bool:
    """Return whether a tar has one of the tables, which ``torch.load`` reads before it misses another member."""
    return probe.tar is not None and any(name in probe.tar for name in _TABLES)


def pickles_of_tables(archive: Archive) -> Iterator[tuple[Stream, str | None]]:
    """
    Yield the pickles of each table, up to the first that cannot be read, with that one and what is wrong with it.

    What follows that pickle is not known, but ``torch.load`` may read it.
    """
    tables = TarStorages(archive)
    for member in _TABLES:
        if member in archive:
            wrong = None
            try:
                tables.read(member)
            except Failure as error:
                wrong = error.message
            yield tables.stream(member), wrong


def read(probe: Probe) -> Parsed:
    """Read the index of a 0.1.x file: its pickles, and what precedes each storage."""
    archive = probe.tar
    assert archive is not None  # sniff saw it
    for name in (*_TABLES, "pickle"):
        if name not in archive:
            raise MalformedFile(f"a tar of PyTorch 0.1 without its member {name!r}", kind="missing-member")
    tables = TarStorages(archive)
    for name in _TABLES:
        tables.read(name)
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
            Stream("pickle", content, 0, tree.end, tree.globals, opcodes=tree.opcodes),
            *(map(tables.stream, _TABLES)),
        ),
        pickles=(tree,),
        archives=(archive,),
        class_sources=torch_legacy.class_sources(tree),
    )


class _Pickles:
    """The pickles of a member, numbers and elements between them."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.end = 0
        """Where the last one ends; if that cannot be read, the offset after its first byte."""
        self.globals: dict[tuple[str, str], Global] = {}
        self.blocks: list[range] = []
        """The ranges of bytes between them."""
        self.opcodes: dict[int, int] = {}

    def read(self, position: int) -> Pickle:
        """Read the pickle at a position."""
        if self.end < position:
            self.blocks.append(range(self.end, position))
        self.end = position + 1
        found = read_pickle(self.source, position)
        self.end = found.end
        self.opcodes = {**found.opcodes, **self.opcodes}
        for one in found.globals:
            self.globals.setdefault((one.module, one.name), one)
        return found

    def count(self) -> tuple[int, int]:
        """Return where the first one ends, and its value: the number of entries that follow."""
        count = self.read(0).root
        if type(count) is not int or not 0 <= count <= self.source.nbytes:
            raise MalformedFile("a count of the wrong kind", kind="malformed-tar")
        return self.end, count


class TarStorages:
    """The storages and tensors of a 0.1.x file, by their keys."""

    def __init__(self, archive: Archive) -> None:
        self._storages: dict[str, TypedStorage] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self._pickles = {name: _Pickles(archive.open(name)) for name in _TABLES if name in archive}

    def read(self, member: str) -> None:
        """Read one of the two members; the one with the storages has to be first."""
        (self._read_storages if member == "storages" else self._read_tensors)(self._pickles[member])

    def stream(self, member: str) -> Stream:
        """Return the pickles of one of the two members."""
        found = self._pickles[member]
        named, blocks = tuple(found.globals.values()), tuple(found.blocks)
        return Stream(member, found.source, 0, found.end, named, blocks, opcodes=found.opcodes)

    def resolve(self, pid: Inert) -> TypedStorage | TensorInfo | None:
        """Return the tensor or storage that has this key."""
        key = _key(pid)
        return None if key is None else self._tensors.get(key) or self._storages.get(key)

    def _read_storages(self, pickles: _Pickles) -> None:
        source = pickles.source
        position, count = pickles.count()
        for _ in range(count):
            entry = pickles.read(position)
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
        views = pickles.read(position).root
        if not isinstance(views, list | tuple):
            raise MalformedFile("a list of the wrong kind", kind="malformed-tar")
        for view in views:
            if not (isinstance(view, tuple) and len(view) == 4):
                raise MalformedFile("a storage view of the wrong kind", kind="malformed-tar")
            key, root_key, offset, numel = view
            root = self._storages.get(str(_key(root_key)))
            if root is None or _key(key) is None or not all(type(n) is int and n >= 0 for n in (offset, numel)):
                raise MalformedFile("a view of a storage that is not there", kind="malformed-tar")
            nbytes, start = numel * root.dtype.itemsize, offset * root.dtype.itemsize
            if start + nbytes > root.ref.nbytes:
                raise MalformedFile("a view that reaches over its storage", kind="storage-size")
            whole = root.ref.whole or root.ref
            ref = root.ref._replace(key=str(key), nbytes=nbytes, offset=root.ref.offset + start, whole=whole)
            self._storages[str(key)] = TypedStorage(ref, root.dtype)

    def _read_tensors(self, pickles: _Pickles) -> None:
        source = pickles.source
        position, count = pickles.count()
        entries = []
        for _ in range(count):
            entry = pickles.read(position)
            (ndim,) = _NDIM.unpack(_read(source, entry.end, 8))
            if not 0 <= ndim <= MAX_RANK:
                raise MalformedFile(f"a tensor of {ndim} dimensions", kind="malformed-tar")
            numbers = Struct(f"<{2 * ndim + 1}q")
            found = numbers.unpack(_read(source, entry.end + 8, numbers.size))
            entries.append((_triple(entry.root), found[:ndim], found[ndim:-1], found[-1]))
            position = entry.end + 8 + numbers.size
        # All entries were read before: in some files storages are missing.
        for (key, storage_key, _), shape, stride, offset in entries:
            storage = self._storages.get(str(_key(storage_key)))
            if storage is None or _key(key) is None:
                raise MalformedFile(
                    f"a tensor of storage {str(_key(storage_key))!r}, which is not there",
                    kind="missing-storage",
                )
            info = TensorInfo(storage.dtype, shape, stride, offset, storage.ref, storage.ref.location)
            check_extent(info)
            self._tensors[str(key)] = info


def _triple(node: Inert) -> tuple[Inert, Inert, Inert]:
    if not (isinstance(node, tuple) and len(node) == 3):
        raise MalformedFile("an entry of the wrong kind", kind="malformed-tar")
    return node


def _key(pid: Inert) -> str | None:
    return str(pid) if isinstance(pid, str | int) and not isinstance(pid, bool) else None


def _read(source: Source, offset: int, nbytes: int) -> bytes:
    if offset + nbytes > source.nbytes:
        raise _truncated(offset + nbytes, source.nbytes)
    return source.read(offset, nbytes)


def _truncated(needed: int, actual: int) -> TruncatedFile:
    return TruncatedFile.early(f"a member needs {needed:,} bytes and has {actual:,}", "tar", actual, needed)
