"""
The plan of a DCP folder: files of items, and an index.

    __0_0.distcp    values first, then tensors, cut along their first dimension where they are large
    __0_1.distcp    more of them, where files are to be smaller than all; the items of a tensor are in one
    .metadata       the index, written last

Tensors are packed, on the CPU, each under every name that it has; all else is a value, as ``torch.save`` writes it. See
torch/distributed/checkpoint/{filesystem,default_planner}.py.

A tree is flattened as DCP does it: dicts, and lists that contain dicts or tensors. Keys that are not text become text,
as there. See torch/distributed/checkpoint/_traverse.py.

A ``.distcp`` file holds items one after another, each a complete zip.

The index is a pickle of ``torch.distributed.checkpoint.metadata.Metadata``, as torch 2.13 writes it. Fields that newer
releases added are left out where older ones would look up a class that they lack. The path of the folder is left out,
too, as it belongs to one machine.

The states of optimizers may get the names of parameters, so that training resumes from the folder. ``torch.save`` keeps
an optimizer's ``state_dict()``, where parameters are numbers: 0 is the first of the first group. In DCP they have
names, as torch/distributed/checkpoint/state_dict.py gives them:

    nested      state.NAME.exp_avg, and param_groups.0.lr with the names in param_groups.0.params: get_state_dict()
    flat        state.NAME.exp_avg, and param_groups.NAME.lr for each parameter: with flatten_optimizer_state_dict
    torchtitan  flat, below "optimizer", and the weights below nothing

A file may record which parameter a number is (``param_names``). Otherwise the order of the weights decides, if each
state has the shape of its parameter and no other order fits: there is one group, of all parameters; or there are, for
each shape, as many states as parameters, in one group. Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice, pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from ckptool.cancellation import Cancellation, check_cancelled, each
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.contents import groups_of
from ckptool.checkpoints.training import BUFFERS, ELEMENTWISE, names_by_number, states
from ckptool.checkpoints.weights import Weights, refuse_others
from ckptool.errors import LimitExceeded, MigrationRefused
from ckptool.messages import counted, some
from ckptool.migration.changes import Changes, most_nbytes_of
from ckptool.migration.plan import METADATA, OutFile, Part, Plan, file_of_bytes, is_plain, split
from ckptool.migration.torch_plan import EditedTree, torch_zip, torch_zip_nbytes
from ckptool.migration.tree_rewriter import TreeRewriter
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, DictInBatches, Global, Inert, PairList, Pairs
from ckptool.pickles.writer import write_pickle
from ckptool.sources.checksums import joined_crc32
from ckptool.sources.source import BytesSource
from ckptool.tensors.dtypes import DType
from ckptool.tensors.payloads import Payload, StoragePayload, payload_of
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import StorageRef, TensorInfo, identity, row_major

if TYPE_CHECKING:
    from ckptool.migration.changes import OptimizerNames

_ROOT: Final = "archive"  # torch's name for an archive without a file name
NAME: Final = ".metadata"
_MODULE: Final = "torch.distributed.checkpoint.metadata"
_VERSION: Final = "1.0.0"
_BATCH: Final = 1000
"""Number of entries that are nodes at a time; ``pickle`` itself writes batches of this size."""
_T = TypeVar("_T")
Path: TypeAlias = tuple[str | int, ...]
Box = tuple[tuple[int, ...], tuple[int, ...]]
_LAYOUT: Final = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_MEMORY_FORMAT: Final = Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))


class Item(NamedTuple):
    """A tensor, a box of one, or a value, as ``torch.save`` writes it to a stream."""

    box: Box | None
    """Offsets and sizes in its tensor; None for a value."""
    pickled: bytes
    storages: tuple[Payload, ...]
    nbytes: int


class Entry(NamedTuple):
    """A tensor or a value of the state dict."""

    name: str
    path: Path
    """The keys and positions that lead to it where it is nested."""
    items: Sequence[Item]
    tensor: tuple[DType, tuple[int, ...], bool] | None = None
    """Element type, shape and whether it requires a gradient; None for a value."""
    cut: Payload | None = None
    """The whole storage, where items copy it in parts, in order."""

    @property
    def nbytes(self) -> int:
        """Size of its items."""
        return sum(one.nbytes for one in self.items)


def _content(entries: Sequence[Entry], found: Sequence[int]) -> Iterator[Part]:
    """Yield items one after another, each as it would be alone; check the storages that they copy in parts."""
    for entry in entries:
        whole = 0
        for one in entry.items:
            yield from torch_zip(_ROOT, one.pickled, one.storages, found)
            if entry.cut is not None:
                whole = joined_crc32(whole, found[-1], one.storages[0].nbytes)
        if entry.cut is not None:
            entry.cut.check(whole)


def index(entries: Collection[Entry], files: Sequence[tuple[str, Sequence[Entry]]]) -> bytes:
    """Return the pickled index: the entries, and where each item is stored. ``files`` are names with their entries."""
    nodes = _Nodes()
    fields: PairList = [
        ("state_dict_metadata", _in_batches((one.name, _metadata(one, nodes)) for one in entries)),
        ("planner_data", _in_batches((one.name, one.path) for one in entries)),
        ("storage_data", _in_batches(chain.from_iterable(_places(*file, nodes) for file in files))),
        ("storage_meta", None),
        ("version", _VERSION),
    ]
    return write_pickle(_object(Global(_MODULE, "Metadata"), fields), shared=nodes.shared)


def _in_batches(pairs: Iterator[tuple[Inert, Inert]]) -> DictInBatches:
    # The names of all globals here are plain, so this is written once, with protocol 2.
    return DictInBatches(lambda: iter(lambda: list(islice(pairs, _BATCH)), []))


def _places(file: str, entries: Iterable[Entry], nodes: _Nodes) -> Iterator[tuple[Inert, Inert]]:
    """Yield which piece or value each item is, and where it is stored."""
    position = 0
    for entry in entries:
        for number, item in enumerate(entry.items):
            key: PairList = [("fqn", entry.name), ("index", None if item.box is None else number)]
            if item.box is not None:
                key.append(("offset", nodes.sizes(item.box[0])))
            place: PairList = [("relative_path", file), ("offset", position), ("length", item.nbytes)]
            info = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
            yield _object(Global(_MODULE, "MetadataIndex"), key), _object(info, place)
            position += item.nbytes


class _Nodes:
    """Nodes that repeat in the index: one for all equal values, so that readers make few objects, too."""

    def __init__(self) -> None:
        self._made: dict[object, Inert] = {}
        self.shared = {id(_LAYOUT), id(_MEMORY_FORMAT)}

    def _once(self, key: object, make: Callable[[], Inert]) -> Inert:
        if key not in self._made:
            made = self._made[key] = make()
            self.shared.add(id(made))
        return self._made[key]

    def sizes(self, sizes: tuple[int, ...]) -> Inert:
        return self._once(sizes, lambda: Call(Global("torch", "Size"), (sizes,)))

    def chunk(self, box: Box) -> Inert:
        fields: PairList = [("offsets", self.sizes(box[0])), ("sizes", self.sizes(box[1]))]
        return self._once(box, lambda: _object(Global(_MODULE, "ChunkStorageMetadata"), fields))

    def properties(self, dtype: DType, requires_grad: bool) -> Inert:
        made = Call(Global(_MODULE, "TensorProperties"), (), "newobj")
        made.state = (Global("torch", dtype.name), _LAYOUT, requires_grad, _MEMORY_FORMAT, False)
        return self._once((dtype, requires_grad), lambda: made)


def _metadata(entry: Entry, nodes: _Nodes) -> Inert:
    if entry.tensor is None:
        return _object(Global(_MODULE, "BytesStorageMetadata"), [])
    dtype, shape, requires_grad = entry.tensor
    fields: PairList = [
        ("properties", nodes.properties(dtype, requires_grad)),
        ("size", nodes.sizes(shape)),
        ("chunks", [nodes.chunk(one.box) for one in entry.items if one.box is not None]),
    ]
    return _object(Global(_MODULE, "TensorStorageMetadata"), fields)


def _object(cls: Global, fields: Pairs) -> Inert:
    made = Call(cls, (), "newobj")
    made.state = Dict(fields) if fields else None
    return made


_ITEM_NBYTES: Final = 64 << 20
"""Most bytes of an item of a tensor: loading a part of a tensor reads whole items."""
_DEEPEST: Final = 500
"""Torch recurses into nested values, and Python allows a thousand calls in each other."""
_MOST_REPEATED: Final = 10_000


def plan_weights(plan: Plan, checkpoint: Checkpoint, weights: Weights, changes: Changes) -> Plan:
    """Return the plan of a folder with the weights under their names; files hold up to ``max_shard_size`` of items."""
    rewriter = TreeRewriter(checkpoint.rebuilder or Rebuilder(), None)
    work = _Work(checkpoint.source.cancellation)
    unsupported = []
    for name in each(weights.names, checkpoint.source.cancellation):
        tensor = weights.tensors.get(name)
        if tensor is None:
            work.value(name, (name,), weights.others[name], rewriter.for_another_file())
        elif is_plain(tensor.info):
            work.tensor(name, (name,), tensor.info)
        else:
            own = rewriter.for_another_file()
            try:
                work.value(name, (name,), own.tensor(tensor.info, detached=True), own)
            except MigrationRefused:
                unsupported.append(name)
    refuse_others(checkpoint, {name: weights.tensors[name] for name in unsupported}, drop=changes.drop_unsupported)
    tensors = {name: one.info for name, one in weights.tensors.items() if name not in unsupported}
    dropped = (*weights.dropped, *unsupported, *(f"{METADATA}{key}" for key, _ in weights.texts))
    expected = tuple(tensors.items())
    return work.planned(plan, most_nbytes_of(changes), expected=expected, renamed=weights.renamed, dropped=dropped)


def plan_everything(plan: Plan, checkpoint: Checkpoint, edited: EditedTree, changes: Changes) -> Plan:
    """Return the plan of a folder with everything in a checkpoint, flattened as DCP flattens a state dict."""
    rewriter, rebuilder = edited.rewriter, checkpoint.rebuilder or Rebuilder()
    work = _Work(checkpoint.source.cancellation)
    named = changes.optimizer_names and NamedOptimizers(checkpoint, edited.new_names, changes.optimizer_names)

    def plain(node: Inert) -> TensorInfo | None:
        info = rebuilder.tensor(node)
        return info if info is not None and is_plain(info) and info.subclass is None else None

    empty: list[str] = []
    numbered: dict[str, None] = {}
    found = leaves(edited.root, rewriter.replaced, lambda node: rebuilder.tensor(node) is not None, work.cancellation)
    moved: dict[str, str] = {}
    for leaf in found:
        for path, node in named.placed(leaf.path, leaf.node) if named else [(leaf.path, leaf.node)]:
            name = _joined(path)
            moved.setdefault(_joined(leaf.path), name)
            if leaf.has_number and path == leaf.path:
                numbered[str(path[0])] = None
            info = None if leaf.is_empty else plain(node)
            if leaf.is_empty:
                empty.append(name)
            elif info is not None:
                work.tensor(name, path, edited.cast(info))
            else:
                work.value(name, path, node, rewriter.for_another_file())
    if plan.casting is not None:
        plan.casting.refuse_what_was_missed(work.storages)
    if named:
        work.notes += named.notes
        names = {old: edited.new_names.get(old, old) for old in edited.kept}
        edited = edited._replace(new_names={old: moved.get(new, new) for old, new in names.items()})
    if numbered:
        many = "keys that are not text have become text, as torch.distributed.checkpoint writes them"
        work.notes.append(f"{many}: in {some(list(numbered))}")
    return work.planned(plan, most_nbytes_of(changes), **edited.facts(*empty), retagged=rewriter.retagged)


class _Work:
    """Collects the items of a folder."""

    def __init__(self, cancellation: Cancellation | None) -> None:
        self.cancellation = cancellation
        self.notes: list[str] = []
        self.storages: list[Payload] = []
        """The payloads that are copied, as a whole or in items."""
        self._entries: dict[str, Entry] = {}
        self._partly: list[LazyTensor] = []
        self._pickles: dict[tuple[DType, tuple[int, ...]], bytes] = {}
        self._alike: dict[Any, Any] = {}
        """One of each set of equal values, as there are many."""

    def value(self, name: str, path: Path, node: Inert, own: TreeRewriter) -> None:
        """Add a value, or a tensor that only its own call makes; ``own`` is a rewriter for this item alone."""
        pickled = write_pickle(node, own, self.cancellation)
        self._enter(Entry(name, path, (self._item(None, pickled, own.storages),)))
        self.storages += own.storages

    def tensor(self, name: str, path: Path, info: TensorInfo) -> None:
        """Add a plain tensor."""
        whole, items = payload_of(LazyTensor(name, info)), []
        read_whole = info.dtype.packed > 1 or (info.storage is not None and info.storage.source.is_compressed)
        every = ((0,) * len(info.shape), info.shape)
        for box in self._one((every,) if read_whole else tuple(_cut(info.shape, info.dtype.itemsize))):
            offsets, sizes = box
            payload = whole
            if sizes != info.shape:
                skipped = sum(offset * step for offset, step in zip(offsets, info.stride, strict=True))
                part = info._replace(shape=sizes, storage_offset=info.storage_offset + skipped)
                payload = payload_of(LazyTensor(name, part))
            items.append(self._item(box, self._pickle(info.dtype, sizes), (payload,)))
        self.storages.append(whole)
        is_cut = len(items) > 1 and isinstance(whole, StoragePayload)
        if not isinstance(whole, StoragePayload) or (is_cut and not whole.known_crc32):
            self._partly.append(LazyTensor(name, info))
        facts = self._one((info.dtype, info.shape, info.requires_grad is True))
        self._enter(Entry(name, path, tuple(items), facts, whole if is_cut and whole.known_crc32 else None))

    def _item(self, box: Box | None, pickled: bytes, storages: Sequence[Payload]) -> Item:
        nbytes = torch_zip_nbytes(_ROOT, len(pickled), [payload.nbytes for payload in storages])
        return Item(box, pickled, tuple(storages), self._one(nbytes))

    def _one(self, value: _T) -> _T:
        found: _T = self._alike.setdefault(value, value)
        return found

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

    def planned(self, plan: Plan, most_nbytes: int | None, **facts: Any) -> Plan:
        """Return a plan with files of all that was added, and with more ``facts``."""
        entries = self._entries.values()
        values = [one for one in entries if one.tensor is None]
        objects = [one.name for one in values if one.items[0].storages]
        if objects:
            many = counted(len(objects), "entry")
            self.notes.append(f"{many} with tensors inside, which load as a whole: {some(objects)}")
        parts = [[*values, *(one for one in entries if one.tensor is not None)]]
        if most_nbytes is not None:  # all items of a tensor in one file
            names = split(((one.name, one.nbytes) for one in parts[0]), most_nbytes) or [[]]
            parts = [[self._entries[name] for name in part] for part in names]
        files, written = [(f"__0_{number}.distcp", part) for number, part in enumerate(parts)], []
        for name, part in files:
            payloads = [payload for one in part for item in one.items for payload in item.storages]
            payloads += [one.cut for one in part if one.cut is not None]  # which several items copy in parts
            nbytes = sum(one.nbytes for one in part)
            written.append(OutFile(name, nbytes, partial(_content, part), payloads, needs_checksums=True))
        return replace(
            plan,
            files=[*written, file_of_bytes(NAME, index(entries, files))],
            packed={one.name for one in entries if one.tensor is not None},
            cut=self._partly,
            pickles=tuple(one.items[0].pickled for one in values),
            notes=tuple(self.notes),
            **facts,
        )


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
    """What becomes an item; or an empty dict, which does not."""

    path: Path
    node: Inert
    is_empty: bool = False
    has_number: bool = False
    """Whether a key on its path was not text."""


def leaves(
    root: Inert,
    replaced: Callable[[Inert], Inert],
    is_tensor: Callable[[Inert], bool],
    cancellation: Cancellation | None = None,
) -> Iterator[Leaf]:
    """Yield the leaves in the order of the tree."""
    seen: set[int] = set()
    repeated = 0
    todo: list[Leaf] = [Leaf((), root)]
    while todo:
        check_cancelled(cancellation)
        path, node, _, has_number = todo.pop()
        node = replaced(node)
        below: nodes.Pairs | None = nodes.mapping_pairs(node)
        if isinstance(node, list):
            below = list(enumerate(node)) if _has_more(node, replaced, is_tensor) else None
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


def _has_more(items: list[Inert], replaced: Callable[[Inert], Inert], is_tensor: Callable[[Inert], bool]) -> bool:
    """Return whether a list, or a list nested in it, contains a dict or a tensor."""
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
    where = _joined(path) or "the root"
    raise MigrationRefused(
        f"a key of {where} that is neither text nor a number: {nodes.class_name(key)}",
        kind="unsupported-key",
        hint="Leave that out with `drop=`, or take the weights alone: `weights='raw'`.",
    )


_Shape: TypeAlias = tuple[int, ...]


class _Optimizer(NamedTuple):
    """An optimizer, and the names that its parameters get."""

    path: str
    names: dict[str, str]
    """New names of its parameters, by the keys of its state as text."""
    groups: dict[int, list[str]]


class _Slot(NamedTuple):
    """A parameter of an optimizer."""

    key: Inert
    group: int
    shape: _Shape | None
    """None if it has no state with a shape."""


class NamedOptimizers:
    """Finds the new path of everything in a folder."""

    def __init__(self, checkpoint: Checkpoint, new_names: Mapping[str, str], layout: OptimizerNames) -> None:
        self.notes: list[str] = []
        self._layout = layout
        self._model = checkpoint.weights.key if checkpoint.weights is not None and layout == "torchtitan" else ""
        known = ((path, node, pairs) for path, node, pairs, role in states(checkpoint) if role == "optimizer")
        found = [(path, pairs) for path, node, pairs in known if nodes.mapping_pairs(node) is not None]
        if not found:
            fact = "no optimizer's state_dict() is in it"
            raise MigrationRefused(fact, kind="no-optimizer", hint="Leave out `optimizer_names=`.")
        self._optimizers = [self._named(checkpoint, new_names, path, pairs) for path, pairs in found]

    def _named(self, checkpoint: Checkpoint, new_names: Mapping[str, str], path: str, pairs: Pairs) -> _Optimizer:
        slots = _slots(checkpoint, pairs)
        told = names_by_number(checkpoint, nodes.lookup(pairs, "param_groups"), {})
        own = [told.get(str(place), slot.key) for place, slot in enumerate(slots)]
        has_order = checkpoint.traits.keeps_order and not checkpoint.is_folder
        problem, fits = "there are no weights", []
        for model in (one for one in checkpoint.state_dicts if one.role == "model"):
            is_told = all(isinstance(name, str) and name in model for name in own)
            names = own if is_told else _in_order(model, slots, has_order)
            if isinstance(names, str):
                problem = f"under {model.key!r}, {names}" if model.key else names
            else:
                fits.append((model.head, names, is_told))
        keys = {str(slot.key) for slot in slots}
        lone = [key for key, _ in nodes.mapping_pairs(nodes.lookup(pairs, "state")) or () if str(key) not in keys]
        if len(fits) != 1 or lone:
            problem = f"{counted(len(lone), 'state')} of what is in no group" if lone else problem
            raise MigrationRefused(
                f"which parameters {path or '(root)'!r} is of cannot be told: "
                + ("several models have them" if fits and not lone else problem),
                kind="unnamed-optimizer",
                hint="Leave out `optimizer_names=`; or save again with an optimizer of model.named_parameters().",
            )
        head, names, is_told = fits[0]
        if not is_told:
            taken = "its parameters are taken to be the weights in their order, whose shapes fit"
            self.notes.append(f"{path!r} has no names: {taken}")
        found = _Optimizer(path, {}, {})
        for slot, name in zip(slots, names, strict=True):
            new = new_names.get(f"{head}{name}", f"{head}{name}").removeprefix(head)
            found.names[str(slot.key)] = new
            found.groups.setdefault(slot.group, []).append(new)
        return found

    def placed(self, path: Path, node: Inert) -> Iterator[tuple[Path, Inert]]:
        """Yield the new path of a leaf of the tree, and its node; a leaf of a group may go to several parameters."""
        for one in self._optimizers:
            depth = _depth(path, one.path)
            if depth is not None and len(path) > depth + 1 and path[depth] in ("state", "param_groups"):
                head = ("optimizer",) if self._layout == "torchtitan" else path[:depth]
                for below, what in self._of_optimizer(one, path[depth:], node):
                    yield (*head, *(below if self._layout == "nested" else (_joined(below),))), what
                return
        yield path[_depth(path, self._model) or 0 if self._model else 0 :], node

    def _of_optimizer(self, one: _Optimizer, below: Path, node: Inert) -> Iterator[tuple[Path, Inert]]:
        """Yield the path of a leaf below its optimizer, and its node."""
        kind, number, *rest = below
        if kind == "state":
            yield (kind, one.names.get(str(number), str(number)), *rest), node
        elif not isinstance(number, int) or not rest:
            yield below, node
        else:
            group = one.groups.get(number, [])
            node = list(group) if rest[0] in ("params", "param_names") else node
            if self._layout == "nested":
                yield below, node
            elif rest[0] != "params" and not (rest[0] == "param_names" and self._layout == "torchtitan"):
                yield from (((kind, name, *rest), node) for name in group)


def _joined(path: Path) -> str:
    return ".".join(map(str, path))


def _depth(path: Path, key: str) -> int | None:
    """Return how many components of a path are a key; None where it does not begin so."""
    return next((depth for depth in range(len(path)) if _joined(path[:depth]) == key), None)


def _slots(checkpoint: Checkpoint, pairs: Pairs) -> list[_Slot]:
    """Return the parameters of an optimizer, in the order of its groups, with the shapes of their states."""
    tensor = checkpoint.rebuilder.tensor if checkpoint.rebuilder is not None else lambda _: None
    shapes: dict[str, _Shape] = {}
    for key, entries in nodes.mapping_pairs(nodes.lookup(pairs, "state")) or ():
        for name, node in nodes.mapping_pairs(entries) or ():
            info = tensor(node) if name in ELEMENTWISE else None
            if info is not None and info.shape:
                shapes[str(key)] = info.shape
    groups = groups_of(nodes.lookup(pairs, "param_groups"))
    return [_Slot(key, number, shapes.get(str(key))) for number, (_, keys) in enumerate(groups) for key in keys]


def _in_order(model: StateDict, slots: Sequence[_Slot], has_order: bool) -> list[str] | str:
    """Return the name of each parameter of an optimizer by the order of the weights, or why it is not certain."""
    first = {identity(tensor.info): name for name, tensor in reversed([*model.items()])}
    parameters = {
        name: tensor.info.shape
        for name, tensor in model.items()
        if first[identity(tensor.info)] == name
        and not name.endswith(BUFFERS)
        and tensor.info.dtype.name.startswith(("float", "bfloat", "complex"))  # what has gradients
    }
    if has_order and len(parameters) == len(slots) and len({slot.group for slot in slots}) == 1:
        pairs = zip(slots, parameters.values(), strict=True)
        slots = [slot._replace(shape=slot.shape or shape) for slot, shape in pairs]  # some may have no state
    by_shape: dict[_Shape, list[str]] = {}
    for name, shape in parameters.items():
        by_shape.setdefault(shape, []).append(name)
    alike: dict[_Shape, list[_Slot]] = {}
    for slot in slots:
        if slot.shape is None:
            counts = f"{len(slots):,} parameters in groups, {len(parameters):,} in the weights"
            return f"{counts}, and no state says of which shape parameter {slot.key} is"
        alike.setdefault(slot.shape, []).append(slot)
    left: dict[_Shape, Iterator[str]] = {}
    for shape, own in alike.items():
        names, states_of = by_shape.get(shape, []), f"{len(own):,} states of {list(shape)}"
        if len(names) != len(own):
            return f"{states_of}, and {len(names):,} parameters of that shape"
        if len({slot.group for slot in own}) > 1:
            return f"{states_of} in several groups"
        if len(own) > 1 and not has_order:
            return f"{states_of}, and the file says nothing of the order of the names"
        left[shape] = iter(names)
    names = [next(left[slot.shape]) for slot in slots if slot.shape is not None]
    places = {name: place for place, name in enumerate(parameters)}
    for (before, group), (name, other) in pairwise((name, slot.group) for name, slot in zip(names, slots, strict=True)):
        if has_order and group == other and places[name] < places[before]:
            return f"going by shapes, group {group} has {name!r} behind {before!r}"
    return names
