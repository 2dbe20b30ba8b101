"""
A checkpoint → a folder as ``torch.distributed.checkpoint`` (DCP) writes it: files of items, and an index.

    __0_0.distcp    values first, then tensors, cut along their first dimension where they are large
    __0_1.distcp    more of them, where files are to be smaller than all; the items of a tensor are in one
    .metadata       the index, written last

Tensors are packed, on the CPU, each under every name that it has; all else is a value, as ``torch.save`` writes it. See
torch/distributed/checkpoint/{filesystem,default_planner}.py.

A tree is flattened as DCP does it: dicts, and those lists that have dicts or tensors in them. Keys that are no text
become text, as there. See torch/distributed/checkpoint/_traverse.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Final, NamedTuple, TypeAlias

from ckptool.cancellation import Cancellation, check_cancelled, each
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import Weights, refuse_others
from ckptool.errors import LimitExceeded, MigrationRefused, OutputFailed
from ckptool.limits import Limits
from ckptool.messages import counted, some
from ckptool.migration.casting import Casting
from ckptool.migration.folders import dcp_items
from ckptool.migration.folders.dcp_items import Box, Entry, Item, ItemsFile, Path
from ckptool.migration.planned import BytesFile, FolderPlan, split
from ckptool.migration.torch_plan import EditedTree
from ckptool.migration.tree_rewriter import TreeRewriter
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Global, Inert
from ckptool.pickles.writer import write_pickle
from ckptool.sources.source import BytesSource
from ckptool.tensors.dtypes import DType
from ckptool.tensors.payloads import Payload, StoragePayload, payload_of
from ckptool.tensors.pieces import PiecesSource
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import StorageRef, TensorInfo, row_major

_Kind: TypeAlias = tuple[DType, tuple[int, ...], bool]
_ITEM_NBYTES: Final = 64 << 20
"""Of a tensor: whoever loads a part of it reads whole items."""
_DEEPEST: Final = 500
"""Torch follows them by calls of functions in each other, of which Python allows a thousand."""
_MOST_REPEATED: Final = 10_000


@dataclass(frozen=True, kw_only=True)
class DcpPlan(FolderPlan):
    """A folder that is ready to be written: tied tensors are written under each name."""

    entries: tuple[Entry, ...]
    notes: tuple[str, ...]

    def verify(self, path: str, limits: Limits) -> None:
        """
        Read the folder back: every name, type and shape, and one item of each kind.

        Raises:
            OutputFailed: The folder does not hold what was to be written.
        """
        from ckptool.formats import open_checkpoint

        with open_checkpoint(path, limits=limits) as written:
            found = {}
            for tensor in written.tensors.values():
                if tensor.info.storage is not None and isinstance(tensor.info.storage.source, PiecesSource):
                    found[tensor.info.storage.source.name] = tensor.info
            wanted = {one.name: one for one in self.entries if one.tensor is not None}
            seen: set[tuple[DType, Sequence[Box]]] = set()
            for name, info in found.items():
                entry = wanted.pop(name, None)
                if entry is None or entry.tensor is None or entry.tensor[:2] != (info.dtype, info.shape):
                    raise OutputFailed(f"{name!r} in it is not what was to be written", kind="verification-failed")
                if (info.dtype, entry.boxes) not in seen:
                    seen.add((info.dtype, entry.boxes))
                    _open_items(info)
            if wanted:
                raise OutputFailed(f"{next(iter(wanted))!r} is not in it", kind="verification-failed")


def _open_items(info: TensorInfo) -> None:
    """Open all items of a tensor: type and boxes say all about their headers."""
    assert info.storage is not None  # there are pieces
    source = info.storage.source
    assert isinstance(source, PiecesSource)  # as the caller saw
    for number in range(len(source.pieces)):
        source.info(number)


def plan_weights(
    checkpoint: Checkpoint, weights: Weights, most_nbytes: int | None = None, *, drop_unsupported: bool = False
) -> DcpPlan:
    """
    Return how weights become a folder, their names as they are, in files of at most ``most_nbytes`` of items.

    Raises:
        MigrationRefused: A tensor is one that only its own class can write, and was not to be dropped.
    """
    rewriter = TreeRewriter(checkpoint.rebuilder or Rebuilder(), None)
    work = _Work(checkpoint.source.cancellation)
    unsupported = []
    for name in each(weights.names, checkpoint.source.cancellation):
        tensor = weights.tensors.get(name)
        if tensor is None:
            work.value(name, (name,), weights.others[name], rewriter)
        elif _is_plain(tensor.info):
            work.tensor(name, (name,), tensor.info)
        else:
            try:
                work.odd_tensor(name, (name,), tensor.info, rewriter)
            except MigrationRefused:
                unsupported.append(name)
    refuse_others({name: weights.tensors[name] for name in unsupported}, drop=drop_unsupported)
    tensors = {name: one.info for name, one in weights.tensors.items() if name not in unsupported}
    texts = (f"__metadata__.{key}" for key, _ in weights.texts)
    return work.plan(tensors.items(), weights.renamed, (*weights.dropped, *unsupported, *texts), {}, most_nbytes)


def plan_everything(
    checkpoint: Checkpoint, edited: EditedTree, casting: Casting | None, most_nbytes: int | None = None
) -> DcpPlan:
    """
    Return how all that a checkpoint holds becomes a folder, flattened as DCP flattens a state dict, as above.

    Raises:
        MigrationRefused: Two names would become one, or a key has no text.
        LimitExceeded: The same things are held again and again.
    """
    rewriter, rebuilder = edited.rewriter, checkpoint.rebuilder or Rebuilder()
    work = _Work(checkpoint.source.cancellation)

    def plain(node: Inert) -> TensorInfo | None:
        info = rebuilder.tensor(node)
        return info if info is not None and _is_plain(info) and info.subclass is None else None

    empty: list[str] = []
    numbered: dict[str, None] = {}
    for leaf in leaves(
        edited.root, rewriter.replaced, lambda node: rebuilder.tensor(node) is not None, work.cancellation
    ):
        name = ".".join(map(str, leaf.path))
        if leaf.has_number:
            numbered[str(leaf.path[0])] = None
        info = None if leaf.is_empty else plain(leaf.node)
        if leaf.is_empty:
            empty.append(name)
        elif info is not None:
            work.tensor(name, leaf.path, edited.cast(info))
        else:
            work.value(name, leaf.path, leaf.node, rewriter)
    if casting is not None:
        casting.refuse_what_was_missed(work.storages)
    if numbered:
        many = "keys that are no text have become text, as torch.distributed.checkpoint writes them"
        work.notes.append(f"{many}: in {some(list(numbered))}")
    return work.plan(edited.expected, edited.renamed, (*edited.dropped, *empty), rewriter.retagged, most_nbytes)


class _Work:
    """Collects the items of a folder."""

    def __init__(self, cancellation: Cancellation | None) -> None:
        self.cancellation = cancellation
        self.notes: list[str] = []
        self.storages: list[Payload] = []
        """What is copied, whole or in items."""
        self._entries: dict[str, Entry] = {}
        self._values: list[Item] = []
        self._tensors: list[Item] = []
        self._cut: list[tuple[int, int, Payload]] = []
        self._partly: list[LazyTensor] = []
        self._pickles: dict[tuple[DType, tuple[int, ...]], bytes] = {}
        self._nbytes: dict[tuple[int, ...], int] = {}
        self._kinds: dict[_Kind, _Kind] = {}
        """The same ones for all that are alike, as there are many."""
        self._cuts: dict[tuple[Box, ...], tuple[Box, ...]] = {}

    def value(self, name: str, path: Path, node: Inert, rewriter: TreeRewriter) -> None:
        """Take what is no tensor, or is one that its own call makes."""
        self._value(name, path, node, rewriter.for_another_file())

    def odd_tensor(self, name: str, path: Path, info: TensorInfo, rewriter: TreeRewriter) -> None:
        """
        Take a tensor that is not plain memory: it becomes a value.

        Raises:
            MigrationRefused: Only its own class can write it.
        """
        own = rewriter.for_another_file()
        self._value(name, path, own.tensor(info, detached=True), own)

    def _value(self, name: str, path: Path, node: Inert, own: TreeRewriter) -> None:
        pickled = write_pickle(node, own, self.cancellation)
        self._enter(Entry(name, path))
        self._values.append(dcp_items.item(name, None, pickled, tuple(own.storages), self._nbytes))
        self.storages += own.storages

    def tensor(self, name: str, path: Path, info: TensorInfo) -> None:
        """Take a plain tensor."""
        boxes = self._boxes(info)
        start = len(self._tensors)
        whole = payload_of(LazyTensor(name, info))
        for offsets, sizes in boxes:
            payload = whole
            if len(boxes) > 1:
                skipped = sum(offset * step for offset, step in zip(offsets, info.stride, strict=True))
                box = info._replace(shape=sizes, storage_offset=info.storage_offset + skipped)
                payload = payload_of(LazyTensor(name, box))
            pickled = self._pickle(info.dtype, sizes)
            self._tensors.append(dcp_items.item(name, offsets, pickled, (payload,), self._nbytes))
        self.storages.append(whole)
        if not isinstance(whole, StoragePayload):
            self._partly.append(LazyTensor(name, info))
        elif len(boxes) > 1:
            if whole.known_crc32:
                self._cut.append((start, len(self._tensors), whole))
            else:
                self._partly.append(LazyTensor(name, info))
        kind = (info.dtype, info.shape, info.requires_grad is True)
        self._enter(Entry(name, path, self._kinds.setdefault(kind, kind), boxes))

    def _boxes(self, info: TensorInfo) -> tuple[Box, ...]:
        """Return offsets and sizes of what becomes an item each: the same ones for all that are cut alike."""
        boxes = tuple(_boxes(info))
        return self._cuts.setdefault(boxes, boxes)

    def _enter(self, entry: Entry) -> None:
        other = self._entries.setdefault(entry.name, entry)
        if other is not entry:
            raise MigrationRefused(
                f"{'/'.join(map(str, other.path))!r} and {'/'.join(map(str, entry.path))!r} would both be called "
                f"{entry.name!r}",
                kind="name-collision",
                hint="Rename one with `rename=`, or leave one out with `drop=`.",
            )

    def _pickle(self, dtype: DType, sizes: tuple[int, ...]) -> bytes:
        """Return the pickle of a tensor, the same for all of one type and shape."""
        known = self._pickles.get((dtype, sizes))
        if known is None:
            storage = StorageRef("0", "cpu", prod(sizes) * dtype.itemsize, BytesSource(b""), 0)
            rewriter = TreeRewriter(Rebuilder(), None)
            made = rewriter.tensor(TensorInfo(dtype, sizes, row_major(sizes), 0, storage, "cpu"))
            known = self._pickles[dtype, sizes] = write_pickle(made, rewriter)
        return known

    def plan(
        self,
        expected: Iterable[tuple[str, TensorInfo]],
        renamed: tuple[tuple[str, str], ...],
        dropped: tuple[str, ...],
        retagged: dict[str, int],
        most_nbytes: int | None,
    ) -> DcpPlan:
        objects = [one.name for one in self._values if one.storages]
        if objects:
            many = counted(len(objects), "entry")
            self.notes.append(f"{many} with tensors inside, which load as a whole: {some(objects)}")
        data = [(f"__0_{number}.distcp", file) for number, file in enumerate(self._files(most_nbytes))]
        entries = tuple(self._entries.values())
        index = dcp_items.index(entries, [(name, file.items) for name, file in data])
        return DcpPlan(
            files=[*data, (dcp_items.NAME, BytesFile(index))],
            entries=entries,
            partly=self._partly,
            expected=tuple(expected),
            renamed=renamed,
            dropped=dropped,
            retagged=retagged,
            pickles=tuple(one.pickled for one in self._values),
            notes=tuple(self.notes),
        )

    def _files(self, most_nbytes: int | None) -> Iterator[ItemsFile]:
        """Yield the files: values first, and all of a tensor in one, whose storage is read and compared in order."""
        items = [*self._values, *self._tensors]
        shift = len(self._values)
        cut = {start + shift: (stop - start, payload) for start, stop, payload in self._cut}
        if most_nbytes is None:
            yield ItemsFile(tuple(items), tuple((at, at + count, payload) for at, (count, payload) in cut.items()))
            return
        groups = {name: list(numbers) for name, numbers in groupby(range(len(items)), lambda at: items[at].name)}
        sizes = ((name, sum(items[at].nbytes for at in numbers)) for name, numbers in groups.items())
        for names in split(sizes, most_nbytes) or [[]]:
            numbers = [at for name in names for at in groups[name]]
            cuts = ((place, *cut[at]) for place, at in enumerate(numbers) if at in cut)
            yield ItemsFile(
                tuple(items[at] for at in numbers),
                tuple((place, place + count, payload) for place, count, payload in cuts),
            )


def _is_plain(info: TensorInfo) -> bool:
    return info.storage is not None and info.layout == "strided" and info.location != "meta"


def _boxes(info: TensorInfo) -> Iterable[Box]:
    """Yield offsets and sizes of what becomes an item each, in row-major order."""
    storage = info.storage
    if info.dtype.packed > 1 or (storage is not None and storage.source.is_compressed):  # it is read as a whole
        return [((0,) * len(info.shape), info.shape)]
    return _cut(info.shape, info.dtype.itemsize)


def _cut(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    nbytes = prod(shape) * itemsize
    if nbytes <= _ITEM_NBYTES or not shape:
        yield (0,) * len(shape), shape
        return
    row = nbytes // shape[0]
    rows = max(1, _ITEM_NBYTES // row)
    for start in range(0, shape[0], rows):
        count = min(rows, shape[0] - start)
        if row > _ITEM_NBYTES:  # then along the next one
            yield from (((start, *offsets), (1, *sizes)) for offsets, sizes in _cut(shape[1:], itemsize))
        else:
            yield (start, *(0,) * (len(shape) - 1)), (count, *shape[1:])


class Leaf(NamedTuple):
    """What becomes an item, or an empty dict, which has none."""

    path: Path
    node: Inert
    is_empty: bool = False
    has_number: bool = False
    """A key on its path was no text."""


def leaves(
    root: Inert,
    replaced: Callable[[Inert], Inert],
    is_tensor: Callable[[Inert], bool],
    cancellation: Cancellation | None = None,
) -> Iterator[Leaf]:
    """
    Yield the leaves in the order of the tree.

    Raises:
        MigrationRefused: A key has no plain text, or things are nested too deep for torch.
        LimitExceeded: The same things are held again and again.
    """
    seen: set[int] = set()
    repeated = 0
    todo: list[Leaf] = [Leaf((), root)]
    while todo:
        check_cancelled(cancellation)
        path, node, _, has_number = todo.pop()
        node = replaced(node)
        below = _below(node, replaced, is_tensor)
        if below is None:
            yield Leaf(path, node, has_number=has_number)
            continue
        repeated += id(node) in seen
        seen.add(id(node))
        if repeated > _MOST_REPEATED:
            raise LimitExceeded(
                f"dicts and lists that are held more than {_MOST_REPEATED:,} times over",
                kind="repeated",
                actual=_MOST_REPEATED,
            )
        if len(path) > _DEEPEST:
            raise MigrationRefused(
                f"dicts and lists in each other, more than {_DEEPEST} deep, which torch could not read",
                kind="too-deep",
                hint="Take the weights alone: `weights='raw'`.",
            )
        if not below:
            yield Leaf(path, node, is_empty=True)
        children = []
        for key, child in below:
            component = key if isinstance(node, list) else _text(key, path)
            children.append(Leaf((*path, component), child, has_number=has_number or component is not key))
        todo.extend(reversed(children))


def _below(node: Inert, replaced: Callable[[Inert], Inert], is_tensor: Callable[[Inert], bool]) -> nodes.Pairs | None:
    """Return what a node is taken apart into; None if it is a leaf."""
    if isinstance(node, list):
        return list(enumerate(node)) if _has_more(node, replaced, is_tensor) else None
    return nodes.mapping_pairs(node)


def _has_more(items: list[Inert], replaced: Callable[[Inert], Inert], is_tensor: Callable[[Inert], bool]) -> bool:
    """Say whether a list, or a list in it, has a dict or a tensor."""
    todo, seen = [items], {id(items)}
    while todo:
        for one in map(replaced, todo.pop()):
            if isinstance(one, list):
                if id(one) not in seen:
                    seen.add(id(one))
                    todo.append(one)
            elif nodes.mapping_pairs(one) is not None or is_tensor(one):
                return True
    return False


def _text(key: Inert, path: Path) -> str:
    """Return the text of a key, as Python writes it."""
    if isinstance(key, str):
        return key
    parts = key if isinstance(key, tuple) else (key,)
    if all(part is None or isinstance(part, bool | int | float | str | bytes) for part in parts):
        return str(key)
    if isinstance(key, Global) and key.module == "torch":
        return str(key)
    where = ".".join(map(str, path)) or "the root"
    raise MigrationRefused(
        f"a key of {where} that is neither text nor a number: {nodes.class_name(key)}",
        kind="unsupported-key",
        hint="Leave that out with `drop=`, or take the weights alone: `weights='raw'`.",
    )
