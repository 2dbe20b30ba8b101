"""
``torch.distributed.checkpoint`` (DCP): an index, and files of items.

    .metadata              a pickle: names, shapes, how each tensor is cut, and where the pieces are
    __<rank>.metadata      instead of it, one for each rank that saved for itself
    __<rank>_<n>.distcp    items: each a whole file of ``torch.save``, of one tensor or one value; or values, then
                           a file of safetensors with all tensors
    meta.pt, common.pt     values that Lightning, or Megatron, keeps beside them: a file of ``torch.save``

The index alone has names, shapes and types. Items of values are read as data when the folder is opened, those of
tensors when their bytes are read. See torch/distributed/checkpoint/{metadata,filesystem}.py.

Files that the index names may be missing or too short. That does not hide the rest: names and shapes come from the
index, and a tensor that is not complete raises when it is read.

Values are read in one pass over each file; writers have thousands of equal ones, each of which is parsed once.

Changes that extensions made to items are undone: ``stream.zstd/1``, one frame of Zstandard around an item.
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html, torch/distributed/checkpoint/_extension.py

Tensors that were written as safetensors are together in one file of safetensors for each ``.distcp`` file, after the
values. The index gives for each the offset of that file, and the size of its own bytes. As each name is there once, the
metadata says which piece it is. See ``SerializationFormat`` in torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Final, NamedTuple

from ckptool.archives.compressed import unpack
from ckptool.cancellation import Cancellation, each
from ckptool.checkpoints.contents import Contents
from ckptool.checkpoints.parsed import Parsed, Part, Remark, Shard, Stream, Traits
from ckptool.checkpoints.roles import WEIGHT_KEYS, collect_weights
from ckptool.errors import (
    CkptoolError,
    Failure,
    FileUnavailable,
    MalformedFile,
    TruncatedFile,
    UnsupportedFeature,
    within,
)
from ckptool.formats import safetensors
from ckptool.formats.directories.dcp.index import (
    ITEMS,
    Copy,
    Entry,
    Index,
    Item,
    flattened_pieces,
    is_index,
    read_indexes,
)
from ckptool.formats.directories.side_by_side import Path, TreeBuilder, nested
from ckptool.formats.json_beside import json_object
from ckptool.formats.probe import Probe
from ckptool.formats.strict_json import parse_object
from ckptool.limits import Limits
from ckptool.messages import counted, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.sources.descriptors import LINK
from ckptool.sources.files import FileSource
from ckptool.sources.folder import FolderSource
from ckptool.sources.source import BytesSource, ReadAhead, SliceSource, Source, StepwiseSource
from ckptool.tensors.pieces import Piece, joined
from ckptool.tensors.tensor import TensorInfo

NAME = "dcp"
TRAITS = Traits(has_tree=True, keeps_versions=False, loader="torch.distributed.checkpoint.load", is_trusted=True)
_AGAIN: Final = "Copy the folder again, with all of its files."
_METADATA: Final = "metadata.json"
COMMON: Final = "common.pt"
"""What Megatron-core keeps beside the items: values, in a file of ``torch.save``."""
META: Final = "meta.pt"
"""The same of Lightning."""
_ITEMS_OF_RANK: Final = re.compile(r"__(\d{1,9})_\d+\.distcp")
_STATE_DICT: Final = "state_dict"
_OF_LIGHTNING: Final = re.compile(r"optimizer_\d+")
"""Keys under which Lightning's trainer saves optimizers."""
_MOST_FILES: Final = 8
"""Most files that are reported one by one."""
_SMALL: Final = 1 << 16
"""Values of fewer bytes are read ahead, and compared with others."""
_ZSTD: Final = "stream.zstd"
_MOST_KEPT: Final = 4
"""Items that are kept unpacked: as many as threads read at once."""
_HEAD_NBYTES: Final = 64


def sniff(folder: FolderSource) -> bool:
    """Return whether the folder has an index of DCP, or what is left of a save that was not finished."""
    if any(name.endswith(ITEMS) or is_index(folder, name) for name in folder.files):
        return True
    return COMMON in folder.files and _is_torch_dist(folder)


def read(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the index of a folder, and the items that are not tensors.

    Raises:
        FileUnavailable: There is no index: the save was not finished.
        MalformedFile: The index is not one of DCP.
        CkptoolError: It cannot be read.
    """
    index = read_indexes(folder, probe.limits)
    files = _opened(folder, index)
    items = Items(folder, probe)
    values, unread_values = _values(index, items, files)
    builder = TreeBuilder(probe.limits)
    leaves: list[tuple[Path, Inert]] = []
    for name, entry in each(index.entries.items(), probe.limits.cancellation):
        path = index.paths.get(name, (name,))
        if name in values:
            leaves.append((path, builder.transplant(values[name].root, values[name].rebuilder)))
        elif isinstance(entry, Entry):
            shape = index.whole_shapes.get(name)
            pieces = _Pieces(items, name, entry, shape)
            shape, fault = entry.shape if shape is None else shape, files.faults.get(name)
            info = joined(name, shape, entry.dtype, pieces, folder.cancellation, fault=fault)
            leaves.append((path, builder.tensor(info)))
    distinct: dict[int, Stream] = {}
    for name, value in values.items():
        distinct.setdefault(id(value), value.streams[0].inside(name))
    streams = [*index.streams, *distinct.values()]
    as_safetensors = items.in_safetensors(index.entries.values())
    for file, source in files.sources.items():
        if (end := index.files[file].end) < source.nbytes and file not in as_safetensors:  # which fill their file
            streams.append(Stream(file, source, end, end, (), rest=end))
    remarks = [*_remarks(folder, index, files, items), *unread_values]
    unread = [name for name, one in index.entries.items() if not isinstance(one, Entry) and name not in values]
    taken = {path[0] for path, _ in leaves}
    of_index = frozenset(taken)
    for name in filter(folder.has, (META, COMMON)):
        try:
            beside = items.value(folder.open(name))
        except Failure as error:
            remarks.append(Remark("CK143", f"{name!r}: {error.message}", error.hint))
            unread.append(name)
        else:
            streams.append(beside.streams[0].inside(name))
            leaves += _beside(name, builder.transplant(beside.root, beside.rebuilder), taken)
    remarks += _missing_beside(folder, index, of_index)
    root, keys_beside = nested(leaves), taken - of_index
    del leaves, taken, of_index  # there may be very many, and what follows takes memory, too
    if as_safetensors:
        what = f"tensors are safetensors in {counted(len(as_safetensors), 'file')}, which "
        what += f"torch.distributed.checkpoint.load() does not read: {some(as_safetensors)}"
        remarks.append(Remark("CK158", what, "Migrate it to the form 'dcp', which its loader reads."))
    return Parsed(
        index.streams[0].source,
        NAME,
        TRAITS._replace(is_read=not as_safetensors),
        collect_weights(root, builder.rebuilder, probe.limits, beside=keys_beside),
        root=root,
        rebuilder=builder.rebuilder,
        streams=tuple(streams),
        shards=tuple(
            Shard(file, index.files[file].items, source.nbytes, source, "item")
            for file, source in sorted(files.sources.items())
        ),
        remarks=tuple(remarks),
        lost=tuple(unread),
        absent=tuple(name for name in unread if name in WEIGHT_KEYS),
        parts=ItemParts(items, index.entries, index.copies),
    )


def _values(index: Index, items: Items, files: Files) -> tuple[dict[str, Parsed], list[Remark]]:
    """Return the values, and remarks on others. A quantised tensor in one piece counts: its item has scales."""
    wanted = {}
    for name, entry in index.entries.items():
        is_one = isinstance(entry, Entry) and entry.dtype.is_quantised and len(entry.items) == 1
        item = entry.items[0] if isinstance(entry, Entry) and is_one else entry
        if isinstance(item, Item) and name not in files.faults:
            wanted[name] = item
    values, remarks = items.values(wanted)
    without = [name for name, entry in index.entries.items() if entry is None]
    remarks += [Remark("CK143", f"the index has no item for the value {name!r}") for name in without]
    return values, remarks


class _Pieces:
    """Makes the pieces of a tensor when they are requested."""

    __slots__ = ("_entry", "_items", "_name", "_whole_shape")  # one for each tensor: a partial takes twice as much

    def __init__(self, items: Items, name: str, entry: Entry, whole_shape: tuple[int, ...] | None) -> None:
        self._items = items
        self._name = name
        self._entry = entry
        self._whole_shape = whole_shape

    def __call__(self) -> list[Piece]:
        entry = self._entry
        found = [
            (box, item.file, partial(self._items.tensor, self._name, item, box[0]))
            for box, item in zip(entry.boxes, entry.items, strict=True)
            if item is not None
        ]
        if self._whole_shape is not None:
            return list(flattened_pieces(self._whole_shape, entry.shape, found))
        return [Piece(offsets, sizes, file, read) for (offsets, sizes), file, read in found]


def _beside(file: str, root: Inert, taken: set[str | int]) -> Iterator[tuple[Path, Inert]]:
    """Yield path and node of what a file beside the items contains, under keys that the index does not have."""
    pairs = nodes.mapping_pairs(root)
    if pairs is None or any(type(key) is not str for key, _ in pairs):
        pairs = [(file, root)]
    for key, node in pairs:
        own = key if key not in taken else f"{file}.{key}"
        taken.add(own)
        yield (own,), node


class Files(NamedTuple):
    """The files that the index names, and what is lost with those that cannot be read."""

    sources: dict[str, FileSource]
    unread: dict[str, CkptoolError]
    """Files that cannot be opened, or are too short, and why."""
    faults: dict[str, CkptoolError]
    """Why a tensor, or a value, is not complete, by its name."""
    lost: dict[str, tuple[int, dict[str, None]]]
    """For each file that cannot be read, the number of items in it, and their names."""


def _opened(folder: FolderSource, index: Index) -> Files:
    """
    Open the files that the index names, as far as they exist.

    Raises:
        MalformedFile: A name could lead out of the folder.
    """
    files = Files({}, {}, {}, {})
    for name, use in index.files.items():
        try:
            source = files.sources[name] = folder.open(name)
        except FileUnavailable as error:
            files.unread[name] = error
            continue
        if use.end > source.nbytes:
            files.unread[name] = TruncatedFile(
                f"{name!r} is truncated: it has {source.nbytes:,} bytes, the index names {use.end:,}",
                kind="truncated-piece",
                hint="Copy or download it again.",
                needed=use.end,
                actual=source.nbytes,
            )
    for name, entry in index.entries.items():
        if isinstance(entry, Entry) and entry.fault is not None:
            files.faults[name] = entry.fault
    for name, entry in index.entries.items() if files.unread else ():
        for item in entry.items if isinstance(entry, Entry) else (entry,):
            if item is None or item.file not in files.unread:
                continue
            if item.file in files.sources and item.offset + item.nbytes <= files.sources[item.file].nbytes:
                continue  # it is before the end of a file that is too short
            count, names = files.lost.get(item.file, (0, {}))
            names[name] = None
            files.lost[item.file] = count + 1, names
            remedy = f"Get {item.file!r} from where the folder was saved, or leave the tensor out."
            why = files.unread[item.file]
            hint, fact = why.hint if why.kind == LINK else remedy, f"{name!r} is not whole: {why.message}"
            files.faults.setdefault(name, FileUnavailable(fact, kind="missing-pieces", hint=hint))
    return files


def _remarks(folder: FolderSource, index: Index, files: Files, items: Items) -> Iterator[Remark]:
    yield from _lost_files(files)
    for name, fault in files.faults.items():
        if isinstance(index.entries[name], Entry) and fault.kind != "missing-pieces":
            yield Remark("CK141", fault.message, fault.hint)
    for file, use in index.files.items():
        overlap = use.overlap
        if overlap is None and use.shared is not None and file in files.sources:
            overlap = None if items.begin_at(file, use.shared) else use.shared
        if overlap is not None:
            what = f"items of {file!r} overlap at byte {overlap:,}: one of them is not what was saved"
            yield Remark("CK146", what, "Get the folder again, from one save.")
    if index.strays:
        what = f"the index has {counted(index.strays, 'item')} of no tensor or value that it names"
        yield Remark("CK147", what)
    left = [name for name in folder.files if name.endswith(ITEMS) and name not in index.files]
    named = [name for name in left if not items.is_unused(name)]
    if index.ranks and (alone := [name for name in named if _rank_of(name) not in (None, *index.ranks)]):
        named = [name for name in named if name not in alone]
        lost = dict.fromkeys(f"'__{_rank_of(name)}.metadata'" for name in alone)
        yield Remark("CK140", f"{some(list(lost))}: no such file, though ranks wrote items: {some(alone)}", _AGAIN)
        yield Remark("CK142", f"{counted(len(alone), 'file')} of items that no index names: {some(alone)}", _AGAIN)
    if named:
        what = f"{counted(len(named), 'file')} of items that the index does not name, of an earlier save: {some(named)}"
        yield Remark("CK142", what, "Nothing reads them: delete them, if no save is under way.")
    known = frozenset(index.ranks)
    if missing := [rank for rank in range(max(known, default=-1)) if rank not in known]:
        what = f"ranks saved without an index of all, and none is there of {counted(len(missing), 'rank')}"
        yield Remark("CK140", f"{what}: {some([str(rank) for rank in missing])}", _AGAIN)
    elif index.ranks:
        what = (
            f"{counted(len(index.ranks), 'rank')} saved without an index of all, and nothing says how many there were: "
            "complete as far as the files tell"
        )
        yield Remark("CK145", what)


def _rank_of(name: str) -> int | None:
    match = _ITEMS_OF_RANK.fullmatch(name)
    return int(match[1]) if match else None


def _lost_files(files: Files) -> Iterator[Remark]:
    for are_links in (False, True):
        told = [file for file in files.lost if (files.unread[file].kind == LINK) is are_links]
        code = "CK149" if are_links else "CK140"
        for file in told[:_MOST_FILES]:
            count, names = files.lost[file]
            error, be = files.unread[file], "was" if count == 1 else "were"
            what = f"{counted(count, 'item')} of {counted(len(names), 'name')} {be} in it: {some(list(names))}"
            yield Remark(code, f"{error.message}; {what}", error.hint if are_links else _AGAIN)
        if rest := told[_MOST_FILES:]:
            why, hint = ("links, which are not followed", None) if are_links else ("missing, or too short", _AGAIN)
            yield Remark(code, f"{counted(len(rest), 'file')} more are {why}: {some(rest)}", hint)


def _missing_beside(folder: FolderSource, index: Index, keys: Collection[str | int]) -> Iterator[Remark]:
    """Yield remarks on missing files that have to be beside the items; ``keys`` are the outermost."""
    is_megatrons = index.is_megatrons or _is_torch_dist(folder)
    if is_megatrons and COMMON not in folder.files:
        yield Remark("CK140", f"{COMMON!r}: no such file; the values that are not sharded were in it", _AGAIN)
    elif is_megatrons and not json_object(folder, _METADATA):
        what = f"{_METADATA!r}: no such file, or a broken one; Megatron-core writes it last, and needs it to load"
        yield Remark("CK166", what, _AGAIN)
    if META not in folder.files and any(_OF_LIGHTNING.fullmatch(str(key)) for key in keys) and _STATE_DICT in keys:
        what = f"{META!r}: no such file; Lightning keeps epochs, steps and hyperparameters in it"
        yield Remark("CK166", what, _AGAIN)


def _is_torch_dist(folder: FolderSource) -> bool:
    """Return whether the metadata of Megatron-core in a folder says that pieces and values were saved into it."""
    said = json_object(folder, _METADATA) if _METADATA in folder.files else {}
    return said.get("sharded_backend") == "torch_dist" and said.get("common_backend") == "torch"


class Items:
    """Opens the items of one folder."""

    def __init__(self, folder: FolderSource, probe: Probe) -> None:
        self._folder = folder
        self._probe = probe
        self._undone = lru_cache(_MOST_KEPT)(partial(_undone, probe.limits))
        self._safetensors = cache(partial(_read_safetensors, folder, probe))

    def source(self, item: Item) -> Source:
        """
        Return the bytes of an item, as ``torch.save`` wrote them.

        Raises:
            FileUnavailable: Its file is missing.
            TruncatedFile: Its file ends before the item does.
            UnsupportedFeature: It was changed in a way that cannot be undone here.
            MissingPackage: The package that can undo it is not installed.
        """
        for one in item.transforms:
            kind, _, version = one.partition("/")
            if kind != _ZSTD or version not in ("", "1"):
                raise UnsupportedFeature(
                    f"items were changed by an extension, {one!r}, which only its own code can undo",
                    kind="unknown-transform",
                    hint="Load it where the extension is registered, and save it without.",
                )
        file = self._folder.open(item.file)
        if item.offset + item.nbytes > file.nbytes:
            raise TruncatedFile(
                f"{item.file!r} is truncated: {item.nbytes:,} bytes at {item.offset:,} are needed, "
                f"it has {file.nbytes:,}",
                kind="truncated-piece",
                hint="Copy or download it again.",
                needed=item.offset + item.nbytes,
                actual=file.nbytes,
            )
        whole = SliceSource(file, item.offset, item.nbytes)
        if not item.transforms:
            return whole
        return _UndoneSource(partial(self._undone, whole, item.transforms), whole.cancellation)

    def open(self, item: Item) -> Parsed:
        """Read an item."""
        return self._probe.read_inner(self.source(item))

    def piece(self, name: str, item: Item, offsets: tuple[int, ...]) -> Parsed:
        """
        Read an item that is the piece of a tensor at these offsets, as if it were alone in a file.

        Raises:
            MalformedFile: It is in safetensors, which have no such piece.
            CkptoolError: It cannot be read.
        """
        if item.transforms or not self.begin_at(item.file, item.offset):
            return self.open(item)
        parsed, said = self._safetensors(item.file, item.offset)
        info = parsed.contents.tensors.get(name)
        if info is None:
            raise MalformedFile(f"no tensor {name!r} in the safetensors of {item.file!r}", kind="piece")
        where = said.get(name)
        found = where.get("saved_offsets") if isinstance(where, dict) else None
        if found != list(offsets):
            fact = (
                f"the safetensors of {item.file!r} have the piece of {name!r} at {found}, not that at {list(offsets)}"
            )
            raise MalformedFile(fact, kind="piece")
        return parsed._replace(contents=Contents({name: info}))

    def tensor(self, name: str, item: Item, offsets: tuple[int, ...]) -> TensorInfo:
        """Return the tensor in an item that is a piece."""
        with within(_place(name, item), known=item.file):
            info = self.piece(name, item, offsets).tensor()
        if info is None:
            raise MalformedFile(f"{_place(name, item)} is not a tensor", kind="piece")
        return info

    def values(self, items: Mapping[str, Item]) -> tuple[dict[str, Parsed], list[Remark]]:
        """Return values by name, and remarks on those that cannot be read, in the order of the files."""
        values: dict[str, Parsed] = {}
        remarks: list[Remark] = []
        known: dict[bytes, Parsed] = {}
        ahead: tuple[str, ReadAhead] | None = None
        for name, item in sorted(items.items(), key=lambda one: (one[1].file, one[1].offset)):
            try:
                source = self.source(item)
                if item.transforms or item.nbytes > _SMALL:
                    values[name] = self.value(source)
                    continue
                if ahead is None or ahead[0] != item.file:
                    ahead = item.file, ReadAhead(self._folder.open(item.file))
                data = ahead[1].read(item.offset, item.nbytes)
                value = known.get(data)
                if value is None:
                    value = self.value(BytesSource(data, source.cancellation, is_file=True))
                    parts = value.root if type(value.root) is tuple else (value.root,)
                    # Only what cannot be told from another equal one: a number, a text, or a tuple of these.
                    if all(part is None or type(part) in (bool, int, float, str) for part in parts):
                        known[data] = value
                values[name] = value
            except Failure as error:
                place = "" if item.file in error.message else f"{_place(name, item)}: "
                remarks.append(Remark("CK143", f"{place}{error.message}", error.hint))
        return values, remarks

    def value(self, source: Source) -> Parsed:
        """Read a file of ``torch.save``: an item, or a file of the folder that the index does not name."""
        parsed = self._probe.read_inner(source)
        if parsed.rebuilder is None or not parsed.streams or parsed.traits.program:
            raise MalformedFile("is not a file of torch.save", kind="item")
        return parsed

    def in_safetensors(self, entries: Iterable[Entry | Item | None]) -> list[str]:
        """Return the names of the files in which tensors are safetensors, by the first tensor of each."""
        first: dict[str, Item] = {}
        for entry in entries:
            for item in entry.items if isinstance(entry, Entry) else ():
                if item is not None and not item.transforms:
                    first.setdefault(item.file, item)
        return sorted(file for file, item in first.items() if self.begin_at(file, item.offset))

    def begin_at(self, file: str, offset: int) -> bool:
        """Return whether safetensors begin at an offset of a file, by their first bytes; not if it cannot be opened."""
        try:
            source = self._folder.open(file)
        except FileUnavailable:
            return False
        rest = source.nbytes - offset
        inside = SliceSource(source, offset, rest) if rest > 0 else None
        return inside is not None and safetensors.is_safetensors(inside, inside.read(0, min(rest, _HEAD_NBYTES)))

    def is_unused(self, file: str) -> bool:
        """Return whether a rank had nothing to write into a file: it is empty, or safetensors without tensors."""
        try:
            return not self._folder.open(file).nbytes or (
                self.begin_at(file, 0) and not self._safetensors(file, 0)[0].contents.tensors
            )
        except FileUnavailable:
            return True
        except Failure:
            return False


def _read_safetensors(folder: FolderSource, probe: Probe, file: str, offset: int) -> tuple[Parsed, dict[str, object]]:
    """Return the safetensors that begin at an offset of a file, and where their pieces are in the whole tensors."""
    source = folder.open(file)
    parsed = safetensors.read(probe.inner(SliceSource(source, offset, source.nbytes - offset)))
    text = parsed.metadata.get(safetensors.OF_PIECES, "{}")
    return parsed, parse_object(text.encode(), safetensors.OF_PIECES, "sharding")


def _place(name: str, item: Item) -> str:
    return f"the item of {name!r} in {item.file!r}"


class ItemParts:
    """Every item that the index names, in the order of the files, and copies that have to be equal."""

    def __init__(self, items: Items, entries: Mapping[str, Entry | Item | None], copies: Sequence[Copy]) -> None:
        self._items = items
        self._entries = entries
        self._copies = copies

    def __iter__(self) -> Iterator[Part]:
        found: list[tuple[str, int, str, int]] = []
        for name, entry in self._entries.items():
            if isinstance(entry, Entry):
                found += [(one.file, one.offset, name, at) for at, one in enumerate(entry.items) if one is not None]
            elif entry is not None:
                found.append((entry.file, entry.offset, name, -1))
        found.sort()
        for file, _, name, at in found:
            entry = self._entries[name]
            if isinstance(entry, Item):
                yield Part(repr(name), file, partial(self._items.open, entry))
            elif entry is not None and (item := entry.items[at]) is not None:
                offsets, sizes = entry.boxes[at]
                compare = partial(self._piece_contradiction, entry, sizes)
                opens = partial(self._items.piece, name, item, offsets)
                yield Part(f"{name!r} at {list(offsets)}", file, opens, compare, at=(item.offset, item.nbytes))
        for copy in self._copies:
            entry = self._entries[copy.name]
            same = partial(self._piece_contradiction, entry, None) if isinstance(entry, Entry) else None
            reader: Callable[[Item], Parsed] = self._items.open
            if copy.offsets is not None:
                reader = partial(self._items.piece, copy.name, offsets=copy.offsets)
            other = copy.other
            place = other.offset, other.nbytes
            yield Part(repr(copy.name), other.file, partial(reader, other), same, partial(reader, copy.taken), place)

    @staticmethod
    def _piece_contradiction(entry: Entry, sizes: tuple[int, ...] | None, parsed: Parsed) -> str | None:
        """Return how an item contradicts the index; None if it does not."""
        try:
            info = parsed.tensor()
        except Failure as error:
            return error.message
        if info is None:
            return "is not a tensor"
        flat = sizes is not None and len(sizes) == 1 and info.numel == sizes[0]
        if sizes is not None and info.shape != sizes and not flat:
            return f"has shape {list(info.shape)}, not {list(sizes)}"
        if info.dtype != entry.dtype:
            return f"is of {info.dtype}, not {entry.dtype}"
        return None


def _undone(limits: Limits, item: SliceSource, transforms: tuple[str, ...]) -> bytes:
    data = item.read(0, item.nbytes)
    for _ in transforms:
        data = unpack(data, limits)
    return data


class _UndoneSource(StepwiseSource):
    """The bytes of an item before it was changed. They are in memory only while they are read."""

    def __init__(self, content: Callable[[], bytes], cancellation: Cancellation | None) -> None:
        self._content = content
        self.cancellation = cancellation
        self.nbytes = len(content())

    def _read(self, offset: int, nbytes: int) -> bytes:
        return self._content()[offset : offset + nbytes]
