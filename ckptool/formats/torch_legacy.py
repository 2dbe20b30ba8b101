"""
``torch.save`` before PyTorch 1.6: consecutive pickles, then raw storages.

    pickle 0x1950a86a20f9469cfc6c    magic
    pickle 1001                      protocol
    pickle {little_endian: …}        the machine that wrote it
    pickle                           the tree; storages appear as persistent ids
    pickle [key, …]                  the order of the storages
    i64 numel, raw elements          one storage for each key

Elements are little-endian whatever the machine was; so is their number, except from old releases on big-endian ones.
No table says where a storage begins: each follows from the sizes of those before it. See torch/serialization.py,
_legacy_save and _legacy_load, and THPStorage_writeFileRaw in torch/csrc/serialization.cpp.
"""

from __future__ import annotations

from bisect import bisect
from functools import partial
from itertools import accumulate, pairwise

from ckptool.checkpoints.parsed import ClassSource, Parsed, Stream, Traits
from ckptool.checkpoints.roles import collect_weights
from ckptool.errors import MalformedFile, TruncatedFile, UnsupportedFeature
from ckptool.formats.probe import Probe
from ckptool.limits import Limits
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert, is_sourced_object
from ckptool.pickles.reader import Pickle, read_pickle
from ckptool.sources.source import BytesSource, ReadAhead, RemoteSource, SliceSource, Source, remote_under
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import StorageId, StorageRef, TypedStorage, storage_id, unify

NAME = "torch_legacy"
TRAITS = Traits(has_tree=True, edited_by="pickles")

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
_MOST_STREAMS = 4
_MAGIC_BINARY = MAGIC_NUMBER.to_bytes(10, "little")
_MAGIC_TEXT = str(MAGIC_NUMBER).encode()


def sniff(probe: Probe) -> bool:
    """Return whether the first pickle is torch's magic number, whichever protocol wrote it."""
    return is_legacy(probe.head)


def is_legacy(head: bytes) -> bool:
    """Return whether these are the first bytes of a stream."""
    return _MAGIC_BINARY in head[:24] or _MAGIC_TEXT in head[:48]


def read(probe: Probe) -> Parsed:
    """Read the index of a legacy stream: its five pickles and the eight bytes before each storage."""
    stream = LegacyStream(probe.source, probe.limits)
    rebuilder = stream.rebuilder()
    contents = collect_weights(stream.tree.root, rebuilder, probe.limits)
    notes = [*stream.notes]
    if stream.big_endian:
        notes.append("written on a big-endian machine; its elements are little-endian all the same")
    rest = probe.source.nbytes - stream.end
    behind = stream.end if rest else None
    if rest:
        another = is_legacy(probe.source.read(stream.end, min(48, rest)))
        notes.append(f"{rest:,} bytes after the last storage{': another saved object' if another else ''}")
    return Parsed(
        probe.source,
        NAME,
        TRAITS,
        contents,
        root=stream.tree.root,
        pickles=stream.pickles,
        rebuilder=rebuilder,
        streams=(Stream("", probe.source, 0, stream.start, stream.globals, rest=behind, opcodes=stream.opcodes),),
        class_sources=class_sources(stream.tree),
        notes=tuple(notes),
    )


def has_computed_magic(source: Source, first: Pickle) -> bool:
    """Return whether a pickle that calls something is in the place of the magic number, before the one of 1001."""
    if not isinstance(first.root, nodes.Call) or first.end == source.nbytes:
        return False
    try:
        return bool(read_pickle(source, first.end).root == PROTOCOL_VERSION)
    except (MalformedFile, TruncatedFile):
        return False


def nested_storage(data: bytes, limits: Limits, *, depth: int = 0) -> TypedStorage | None:
    """Return the storage in a complete stream of bytes; plain pickles carry tensors in this way."""
    if depth >= _MOST_STREAMS:
        raise UnsupportedFeature(f"streams inside streams, more than {_MOST_STREAMS} deep", kind="nested-stream")
    if not is_legacy(data[:48]):
        raise UnsupportedFeature("a tensor inside a pickle that is not a legacy stream", kind="nested-stream")
    stream = LegacyStream(BytesSource(data), limits, depth=depth + 1)
    return stream.rebuilder().storage(stream.tree.root)


class LegacyStream:
    """The tree of a stream, and the offset of each of its storages."""

    def __init__(self, source: Source, limits: Limits, *, depth: int = 0) -> None:
        self._source = source
        self._depth = depth
        self._limits = limits
        magic = read_pickle(source)
        protocol = read_pickle(source, magic.end)
        system = read_pickle(source, protocol.end)
        computed = isinstance(magic.root, nodes.Call)
        if not (computed or magic.root == MAGIC_NUMBER) or protocol.root != PROTOCOL_VERSION:
            fact = f"a legacy stream of another protocol than {PROTOCOL_VERSION}"
            raise UnsupportedFeature(fact, kind="future-version")
        flags = nodes.mapping_pairs(system.root) or []
        self.big_endian = nodes.lookup(flags, "little_endian") is False
        """Whether the machine was. The elements are little-endian nevertheless."""
        self.tree = read_pickle(source, system.end)
        keys = read_pickle(source, self.tree.end)
        self.start = keys.end
        """Where the pickles end and the storages begin."""
        self.pickles = (magic, protocol, system, self.tree, keys)
        self.globals = tuple(found for pickled in self.pickles for found in pickled.globals)
        self.opcodes = {op: at for one in reversed(self.pickles) for op, at in one.opcodes.items()}
        self.notes = tuple(note for pickled in self.pickles for note in pickled.notes)
        if computed:
            self.notes = ("its magic number is not there, but computed by a call", *self.notes)
        self._storages: dict[str, TypedStorage] = {}
        self.end = self._walk_storages(keys.root, keys.end)

    def resolve(self, pid: Inert) -> TypedStorage | None:
        """Return the storage of a persistent id, cut to its view if it is one."""
        named = storage_id(pid)
        if named is None:
            return None
        root = self._storages[named.key]
        if root.dtype != named.dtype or root.ref.location != named.location or root.ref.nbytes != named.nbytes:
            root = unify(root, TypedStorage(self._ref(named, root.ref.offset), named.dtype))
        if named.view is None:
            return root
        view = named.view
        if view.offset + view.nbytes > root.ref.nbytes:
            raise MalformedFile(
                f"storage {view.key!r} needs {view.offset + view.nbytes:,} bytes of {named.key!r}, "
                f"which has {root.ref.nbytes:,}",
                kind="storage-size",
                needed=view.offset + view.nbytes,
                actual=root.ref.nbytes,
            )
        at = root.ref.offset + view.offset
        return root._replace(ref=root.ref._replace(key=view.key, nbytes=view.nbytes, offset=at, whole=root.ref))

    def rebuilder(self) -> Rebuilder:
        """Return a rebuilder of the tensors of this stream."""
        return Rebuilder(self.resolve, partial(nested_storage, limits=self._limits, depth=self._depth))

    def _walk_storages(self, keys: Inert, position: int) -> int:
        """Place each storage after the one before it, and return where the last one ends."""
        announced: dict[str, StorageId] = {}
        """What the tree says about each root storage, by key."""
        for node in self.tree.persistent_ids:
            if (named := storage_id(node.pid)) is not None:
                announced.setdefault(named.key, named)
        if not isinstance(keys, list) or not all(isinstance(key, str | int) for key in keys):
            raise MalformedFile("the storage keys are not a list", kind="malformed-legacy")
        names = [str(key) for key in keys]
        if set(names) != set(announced) or len(names) != len(announced):
            raise MalformedFile(
                f"the tree refers to {len(announced):,} storages, the stream lists {len(names):,} (or others)",
                kind="malformed-legacy",
                needed=len(announced),
                actual=len(names),
            )
        starts = list(accumulate((8 + announced[name].nbytes for name in names), initial=position))
        total, nbytes = starts[-1], self._source.nbytes
        if total > nbytes:
            whole = f"{bisect(starts, nbytes) - 1:,} of {len(names):,} storages are whole"
            fact = f"its storages end at byte {total:,}, the file has {nbytes:,}; {whole}"
            raise TruncatedFile.early(fact, "legacy", nbytes, total)
        far = remote_under(self._source)
        if far is not None:
            self._compare_later(*far, [announced[name] for name in names], starts)
        ahead = ReadAhead(self._source)
        for name, start in zip(names, starts, strict=False):
            if far is None or total < nbytes:
                self._check_storage(ahead, announced[name], start)
            self._storages[name] = TypedStorage(self._ref(announced[name], start + 8), announced[name].dtype)
        return total

    def _compare_later(self, far: RemoteSource, shift: int, storages: list[StorageId], starts: list[int]) -> None:
        """Compare the sizes before storages when these are read, if the last one ends the file; else fetch them."""
        ranges = [(start + shift, stop + shift) for start, stop in pairwise(starts)]
        if starts[-1] < self._source.nbytes:
            far.prefetch([(start, start + 8) for start, _ in ranges])
            return
        unchecked = SliceSource(far.unchecked, shift, self._source.nbytes)
        what = "the sizes in front of {count} storages were not read, which is done together with these"
        far.compare_later(ranges, lambda at: self._check_storage(ReadAhead(unchecked), storages[at], starts[at]), what)

    def _check_storage(self, ahead: ReadAhead, named: StorageId, position: int) -> None:
        """Compare the eight bytes before a storage with its size in the tree."""
        itemsize = named.dtype.itemsize
        numel = ahead.read(position, 8)
        nbytes = int.from_bytes(numel, "little", signed=True) * itemsize
        if nbytes != named.nbytes and self.big_endian:
            nbytes = int.from_bytes(numel, "big", signed=True) * itemsize
        if nbytes != named.nbytes:
            raise MalformedFile(
                f"storage {named.key!r} at byte {position:,} has {nbytes:,} bytes, the tree says {named.nbytes:,}",
                kind="storage-size",
                offset=position,
                needed=named.nbytes,
                actual=nbytes,
            )

    def _ref(self, named: StorageId, offset: int) -> StorageRef:
        return StorageRef(named.key, named.location, named.nbytes, self._source, offset)


def class_sources(tree: Pickle) -> tuple[ClassSource, ...]:
    """
    Return the source that the stream carries for each class: ``(class, file, source)``.

    Raises:
        MalformedFile: An object is in the place of a class; ``torch.load`` would act on what it says of itself.
    """
    found: dict[str, ClassSource] = {}
    for node in tree.persistent_ids:
        if is_sourced_object(node.pid):
            raise MalformedFile("the id of a class has an object in the place of the class", kind="malformed-legacy")
        sourced = nodes.sourced_class(node.pid)
        if sourced and isinstance(sourced[1], str) and isinstance(sourced[2], str):
            name = nodes.class_name(sourced[0])
            found.setdefault(name, ClassSource(name, sourced[1], sourced[2]))
    return tuple(found.values())
