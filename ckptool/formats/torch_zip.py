"""
``torch.save`` since PyTorch 1.6: a zip whose members are stored, not deflated.

    <root>/data.pkl        the tree; storages appear as persistent ids
    <root>/data/<key>      one storage, raw, little-endian unless byteorder says big
    <root>/version         "3\\n"
    <root>/byteorder       "little" or "big", since 2.1

The root is whatever precedes data.pkl: the file was often renamed since. See torch/serialization.py, _save
and _load.
"""

from __future__ import annotations

from ckptool.archives.archive import Archive
from ckptool.archives.zips import LOCAL, LOCAL_MAGIC, SEVERAL
from ckptool.checkpoints.modules import ModuleGraph
from ckptool.checkpoints.parsed import Parsed, Stream, Traits
from ckptool.checkpoints.roles import collect_weights
from ckptool.errors import AmbiguousFile, Failure, MalformedFile, TruncatedFile, UnsupportedFeature
from ckptool.formats.probe import Probe
from ckptool.pickles.nodes import Inert
from ckptool.pickles.reader import read_pickle
from ckptool.sources.source import SliceSource
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import StorageRef, TypedStorage, storage_id, unify

NAME = "torch_zip"
TRAITS = Traits(has_tree=True, edited_by="member")


_HEAD_NBYTES = 256
"""First bytes of a file, which contain the name of the first member."""
_DEEPEST = 2
"""Most slashes in the name of a storage: an exported program has pickles in ``<root>/data/weights/`` and the like."""
NEWEST_VERSION = 10
"""kMaxSupportedFileFormatVersion in caffe2/serialize/versions.h."""


def sniff(probe: Probe) -> bool:
    """Return whether this is a zip with a data.pkl in it."""
    try:
        if probe.zip is None:
            return False
        root = root_folder(probe.zip)
        if root is not None:
            probe.zip.prefetch((f"{root}data.pkl", f"{root}version", f"{root}byteorder"))
    except TruncatedFile as error:
        raise truncated(probe, error) from error
    except UnsupportedFeature as error:
        if error.kind != SEVERAL or b"/data.pkl" not in probe.head[:_HEAD_NBYTES]:
            raise
        raise UnsupportedFeature(  # torch zips one after another are not damage
            f"torch zips one after the other, the last at byte {error.offset:,}: "
            "a shard of a torch.distributed.checkpoint (.distcp)",
            kind="distributed-checkpoint",
            hint="Give the folder that it is from.",
            offset=error.offset,
        ) from error
    return root is not None


def read(probe: Probe) -> Parsed:
    """Read the index of a torch zip: its directory, its local headers and data.pkl. No storage is read."""
    assert probe.zip is not None  # sniff saw it
    return read_archive(probe.zip, NAME, TRAITS)


def read_archive(archive: Archive, name: str, traits: Traits, graph: ModuleGraph | None = None) -> Parsed:
    """Read the index of a zip with ``data.pkl`` and its storages; ``graph`` recognises models of another kind."""
    root = root_folder(archive)
    assert root is not None  # the caller saw it
    version = archive.text(f"{root}version")
    if version.isascii() and version.isdigit() and int(version) > NEWEST_VERSION:
        raise UnsupportedFeature(
            f"file format version {int(version)}; the newest known is {NEWEST_VERSION}",
            kind="future-version",
            hint="Update ckptool, or save it again with an older torch.",
            needed=int(version),
            actual=NEWEST_VERSION,
        )
    storages = ZipStorages(archive, f"{root}data/", big_endian=is_big_endian(archive, f"{root}byteorder"))
    tree = archive.open(f"{root}data.pkl")
    pickled = read_pickle(tree)
    rebuilder = storages.rebuilder()
    contents = collect_weights(pickled.root, rebuilder, archive.limits, graph)
    for node in pickled.persistent_ids:  # torch allocates each as the tree says, even if no tensor uses it
        if id(node.pid) not in storages.resolved:
            storages.resolve(node.pid)
    notes = [*archive.notes, *pickled.notes]
    if root.count("/") != 1:
        notes.append(f"data.pkl is in {root.rstrip('/') or 'no folder'!r}: torch wants exactly one folder")
    if pickled.end != archive[f"{root}data.pkl"].nbytes:
        rest = archive[f"{root}data.pkl"].nbytes - pickled.end
        raise AmbiguousFile(f"{rest:,} bytes follow the pickle in data.pkl", kind="ambiguous-pickle")
    return Parsed(
        archive.source,
        name,
        traits,
        contents,
        root=pickled.root,
        pickles=(pickled,),
        rebuilder=rebuilder,
        streams=(Stream(f"{root}data.pkl", tree, 0, pickled.end, pickled.globals, opcodes=pickled.opcodes),),
        archives=(archive,),
        notes=tuple(notes),
        damage=archive.damage([f"{root}data.pkl", f"{root}byteorder"]),
    )


def root_folder(archive: Archive) -> str | None:
    """Return the folder of ``data.pkl``, with its slash, or None if it is not clear which."""
    # A torch.package keeps the models of TorchScript that it holds below a folder of its own.
    found = [name[: -len("data.pkl")] for name in archive.called("data.pkl") if "/.data/" not in name]
    outermost = [root for root in found if root.count("/") == min(other.count("/") for other in found)]
    return outermost[0] if len(outermost) == 1 else None


def storages_of_tree(archive: Archive) -> set[str]:
    """Return which members are storages, if the archive has a single tree, whose pickles name them with their sizes."""
    found: set[str] = set()
    root = root_folder(archive)
    for folder in ("data", "constants") if root is not None else ():
        if f"{root}{folder}.pkl" not in archive:
            continue
        try:
            named = (storage_id(node.pid) for node in read_pickle(archive.open(f"{root}{folder}.pkl")).persistent_ids)
            sizes = {f"{root}{folder}/{one.key}": one.nbytes for one in named if one is not None}
        except Failure:
            continue  # it is not known, and all members may be anything
        found |= {name for name, nbytes in sizes.items() if name in archive and archive[name].nbytes == nbytes}
    return {name for name in found if not may_be_unpickled(archive, name)}


def may_be_unpickled(archive: Archive, name: str) -> bool:
    """Return whether other loaders may unpickle a storage: numpy's opens arrays, torch.export's nested members."""
    return name.count("/") > _DEEPEST or archive.may_hold_objects(name)


def is_big_endian(archive: Archive, name: str) -> bool:
    """
    Return whether the archive names big-endian as its byte order; without a name it is little-endian.

    Raises:
        MalformedFile: It names neither order. torch refuses that too.
    """
    record = archive.get(name)
    order = b"little" if record is None else archive.open(name).read(0, min(16, record.nbytes))
    if order not in (b"little", b"big"):
        raise MalformedFile(f"byte order {order!r} is neither 'little' nor 'big'", kind="byte-order")
    return order == b"big"


class ZipStorages:
    """Storages that are members of a zip, by their key."""

    def __init__(self, archive: Archive, folder: str, *, big_endian: bool = False) -> None:
        self._archive = archive
        self._folder = folder
        self._big_endian = big_endian
        self._known: dict[str, TypedStorage] = {}
        self.resolved: set[int] = set()
        """Ids (``id()``) of the persistent ids that were resolved."""

    def resolve(self, pid: Inert) -> TypedStorage | None:
        """Return the storage of ``("storage", class, key, location, numel)``; None for any other id."""
        named = storage_id(pid)
        if named is None:
            return None
        self.resolved.add(id(pid))
        dtype, key, location, nbytes, _ = named
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = TypedStorage(self._ref(key, location, nbytes), dtype)
        elif (dtype, location, nbytes) != (known.dtype, known.ref.location, known.ref.nbytes):
            return unify(known, TypedStorage(self._ref(key, location, nbytes), dtype))
        return known

    def rebuilder(self) -> Rebuilder:
        """Return a rebuilder of tensors of these storages, and of legacy streams inside the pickle."""
        return Rebuilder(self.resolve, self._nested)

    def _nested(self, data: bytes) -> TypedStorage | None:
        from ckptool.formats.torch_legacy import nested_storage  # few files have one

        return nested_storage(data, self._archive.limits)

    def _ref(self, key: str, location: str, nbytes: int) -> StorageRef:
        name = self._folder + key
        try:
            record = self._archive.records[name]
        except KeyError:
            if not self._folder.endswith("/data/") or f"{self._folder[:-5]}tensors/{key}" not in self._archive:
                raise MalformedFile(f"storage {key!r} has no record {name!r}", kind="missing-storage") from None
            self._folder = f"{self._folder[:-5]}tensors/"  # as PyTorch 1.4 had it, where zips were an experiment
            return self._ref(key, location, nbytes)
        _, offset, actual, _, compression, crc32, _ = record
        if actual != nbytes:
            raise MalformedFile(
                f"storage {key!r} needs {nbytes:,} bytes, its record {name!r} has {actual:,}",
                kind="storage-size",
                needed=nbytes,
                actual=actual,
            )
        if compression == "stored":
            return StorageRef(key, location, nbytes, self._archive.source, offset, self._big_endian, crc32 or 0)
        return StorageRef(key, location, nbytes, self._archive.content(name), 0, self._big_endian, crc32 or 0)


def truncated(probe: Probe, error: TruncatedFile) -> TruncatedFile:
    """Return the error for a zip without its end, with the size that its first record announces."""
    source = probe.source
    header = source.read(0, min(LOCAL.size, source.nbytes))
    if not header.startswith(LOCAL_MAGIC) or len(header) < LOCAL.size:
        return error
    payload = LOCAL.size + sum(LOCAL.unpack(header)[-2:])
    try:
        pickled = read_pickle(SliceSource(source, payload, max(0, source.nbytes - payload)))
        named = (storage_id(node.pid) for node in pickled.persistent_ids)
        announced = sum({storage.key: storage.nbytes for storage in named if storage is not None}.values())
    except (MalformedFile, TruncatedFile):
        return error
    if announced <= source.nbytes:
        return error
    share = f"the file has {source.nbytes:,} ({source.nbytes / announced:.0%}) and no zip central directory"
    fact = f"its data.pkl announces {announced:,} bytes of tensors, {share}"
    return TruncatedFile.early(fact, "zip", source.nbytes, announced)
