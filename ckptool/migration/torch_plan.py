"""
The plan of a zip as ``torch.save`` writes it: the weights alone, or everything.

The pickled tree is written again with its storages numbered anew; the storages are copied byte for byte. No class is
needed, and nothing runs. Nodes are never changed, as the checkpoint goes on using them: keys are renamed, entries left
out, and whole models unwrapped by a ``TreeRewriter``, which gets their replacements.

    <root>/data.pkl, .format_version, .storage_alignment, byteorder, data/0 …, version

Members are stored, payloads begin at multiples of 64 bytes (an extra field "FB" holds the padding), sizes and CRC-32
follow each payload in a descriptor, and the zip64 records are always there. See
caffe2/serialize/inline_container.cc, PyTorchStreamWriter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from struct import pack
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar
from zlib import crc32

from ckptool.archives.zips import (
    DESCRIPTOR,
    DESCRIPTOR64,
    DESCRIPTOR_MAGIC,
    END,
    END64,
    END64_MAGIC,
    END_MAGIC,
    ENTRY,
    ENTRY_MAGIC,
    FLAG_DESCRIPTOR,
    FLAG_UTF8,
    FULL16,
    FULL32,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR,
    LOCATOR_MAGIC,
)
from ckptool.cancellation import each
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict, walk_of
from ckptool.checkpoints.entries import entries_at, to_drop
from ckptool.checkpoints.modules import ModuleFacts, StateDictWalk, names_without, unwrapped
from ckptool.checkpoints.quantized import within
from ckptool.checkpoints.weights import NameChanges, Weights, by_name, prepare
from ckptool.errors import MigrationRefused
from ckptool.migration.changes import Changes
from ckptool.migration.plan import METADATA, OutFile, Plan
from ckptool.migration.tree_rewriter import TreeRewriter, same
from ckptool.names import renaming
from ckptool.names.wrappers import COMPANIONS, is_averaged_pair
from ckptool.pickles.nodes import Call, Dict, Global, Inert, children, is_container, mapping_like, mapping_pairs
from ckptool.pickles.writer import shared_nodes, write_pickle
from ckptool.tensors.payloads import Payload
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import TensorInfo

_ORDERED_DICT = Global("collections", "OrderedDict")


class KeptLayout(NamedTuple):
    """What an edit in place keeps of the source's layout."""

    rewriter: type[TreeRewriter] = TreeRewriter
    """The rewriter, which chooses the keys of storages; by default they are numbered anew."""
    pickled_nbytes: int = 0
    """Size in bytes to which a shorter pickle is padded."""
    tensors_at: int | None = None
    """Offset of the tensors of a safetensors file, if they stay in place."""


def _planned(plan: Plan, root: str, pickled: bytes, rewriter: TreeRewriter, **facts: Any) -> Plan:
    """Return a plan with the file of a pickle and the storages that it refers to, and with more ``facts``."""
    storages = rewriter.storages
    nbytes = torch_zip_nbytes(root, len(pickled), [payload.nbytes for payload in storages])
    file = OutFile("", nbytes, partial(torch_zip, root, pickled, storages), storages, needs_checksums=True)
    return replace(plan, files=[file], pickles=(pickled,), retagged=rewriter.retagged, **facts)


def plan_weights(plan: Plan, checkpoint: Checkpoint, weights: Weights, changes: Changes, root: str) -> Plan:
    """Return the plan of weights as a plain state_dict: an OrderedDict with the modules' facts as its metadata."""
    rewriter = TreeRewriter(checkpoint.rebuilder or Rebuilder(), changes.to)
    detached = weights.state_dict.class_name is not None
    cancellation = checkpoint.source.cancellation
    made: dict[int, Inert] = {}
    for info in each((tensor.info for tensor in weights.tensors.values()), cancellation):
        if id(info) not in made:
            made[id(info)] = rewriter.tensor(info, detached=detached)
    tree = Call(_ORDERED_DICT, ())
    tree.pairs = [
        (name, made[id(weights.tensors[name].info)] if name in weights.tensors else weights.others[name])
        for name in weights.names
    ]
    if weights.modules:
        tree.state = Dict([("_metadata", metadata_node(weights.modules))])
    pickled = write_pickle(tree, rewriter, cancellation)
    expected = tuple(_expected(checkpoint, weights))
    dropped = (*weights.dropped, *(f"{METADATA}{key}" for key, _ in weights.texts))
    return _planned(plan, root, pickled, rewriter, expected=expected, renamed=weights.renamed, dropped=dropped)


class EditedTree(NamedTuple):
    """Everything that a checkpoint holds, as it is to be written."""

    root: Inert
    rewriter: TreeRewriter
    """Returns the node to write for each node of ``root``."""
    kept: Mapping[str, LazyTensor]
    """Tensors that stay, by their old names."""
    new_names: Mapping[str, str]
    dropped: tuple[str, ...]
    cast: Callable[[TensorInfo], TensorInfo]
    """Returns a tensor as it is to be written."""

    def facts(self, *dropped: str) -> dict[str, Any]:
        """Return the fields of a plan for the result; ``dropped`` are further entries that are left out."""
        renamed = tuple((old, new) for old, new in self.new_names.items() if new != old)
        expected = tuple((self.new_names.get(name, name), self.cast(one.info)) for name, one in self.kept.items())
        return {"expected": expected, "renamed": renamed, "dropped": (*self.dropped, *dropped)}


def edit_everything(
    plan: Plan,
    checkpoint: Checkpoint,
    changes: Changes,
    wrappers: frozenset[str],
    model: StateDict | None,
    replaced: Callable[[TensorInfo], TensorInfo] | None,
    rewriter_type: type[TreeRewriter],
) -> EditedTree:
    """
    Return everything in a checkpoint, with device tags set, names changed and weights cast.

    ``wrappers`` are the classes of training wrappers that models are taken out of; with ``model``, only that whole
    model is taken. Unless weights are cast, ``replaced`` may return another tensor for each. Names and types in the
    states of optimizers stay.
    """
    names, casting = plan.names, plan.casting
    hint = "Take its weights: `form='state_dict'` or `form='safetensors'`."
    is_model = any(one.role in ("model", "ema") for one in checkpoint.state_dicts) and not by_name(checkpoint)
    if not checkpoint.traits.has_tree:
        program = checkpoint.traits.program
        what = (
            f"{program} cannot be written by anything but torch" if program else f"{checkpoint.format} has no objects"
        )
        raise MigrationRefused(what, kind="no-tree", hint=hint)
    if names.is_by_name and (is_model or model is not None):
        raise MigrationRefused("the names inside a whole model are its class's", kind="names-of-a-model", hint=hint)
    recast = casting.info if casting is not None else replaced or same
    rewriter = rewriter_type(checkpoint.rebuilder or Rebuilder(), changes.to, recast)
    if model is None:
        tree, tensors, walks = checkpoint.root, checkpoint.tensors, checkpoint.walks
    else:
        tree, tensors = model.node, dict(model)
        walks = tuple(("", walk) for path, walk in checkpoint.walks if path == model.key)
    unwrapped = unwrap(tree, walks, wrappers, rewriter)
    renamed, left_out, dropped = edit(checkpoint, names, changes.drop, rewriter) if model is None else ({}, {}, ())
    new_names = {**unwrapped, **renamed} if unwrapped else renamed
    kept = tensors
    if left_out or dropped:
        gone = tuple(f"{path}." for path in dropped)
        left = ((name, t) for name, t in tensors.items() if name not in left_out)
        kept = {name: t for name, t in left if not f"{name}.".startswith(gone)}
    if casting is not None:
        places: list[tuple[str, str, str, LazyTensor]] = []
        for head, name, tensor in _to_cast(checkpoint, kept, model):
            path = new_names.get(head + name, head + name)
            places.append((path, path.removeprefix(head), path, tensor))
        casting.take(places)
    return EditedTree(tree, rewriter, kept, new_names, (*dropped, *left_out), recast)


def plan_everything(plan: Plan, checkpoint: Checkpoint, edited: EditedTree, root: str, pickled_nbytes: int = 0) -> Plan:
    """Return the plan of a zip with everything in a checkpoint; a pickle shorter than ``pickled_nbytes`` is padded."""
    rewriter = edited.rewriter
    whole = next((one for one in checkpoint.pickles if one.root is checkpoint.root), None)
    shared = shared_nodes(checkpoint.streams[0].source, whole) if whole is not None else None
    pickled = write_pickle(edited.root, rewriter, checkpoint.source.cancellation, shared, pickled_nbytes)
    if plan.casting is not None:
        plan.casting.refuse_what_was_missed(rewriter.storages)  # they are known since the pickle was written
    written = {id(one.storage.source) for one in rewriter.storages}
    if missed := next((one for one in plan.made if id(one) not in written), None):
        hint = "Write the weights alone: `form='state_dict'`."
        raise MigrationRefused(f"{missed.name!r} cannot be put in its place", kind="not-in-place", hint=hint)
    return _planned(plan, root, pickled, rewriter, **edited.facts())


def _to_cast(
    checkpoint: Checkpoint, kept: Mapping[str, LazyTensor], model: StateDict | None
) -> Iterator[tuple[str, str, LazyTensor]]:
    """
    Yield the tensors to cast, as (prefix, name, tensor): the weights, averaged ones too, and tensors of a whole model
    that are not in its state_dict() and that its ``to`` would cast.
    """
    chosen = [model] if model is not None else [one for one in checkpoint.state_dicts if one.role in ("model", "ema")]
    for state_dict in chosen:
        head = state_dict.head if model is None else ""
        yield from ((head, name, tensor) for name, tensor in state_dict.items() if head + name in kept)
        walk = walk_of(checkpoint, state_dict)
        for entry in walk.transient if walk is not None and checkpoint.rebuilder else ():
            info = checkpoint.rebuilder.tensor(entry.node) if checkpoint.rebuilder else None
            if info is not None and any(head + name in kept for name in state_dict):
                yield head, entry.name, LazyTensor(head + entry.name, info)


def _expected(checkpoint: Checkpoint, weights: Weights) -> Iterator[tuple[str | None, TensorInfo]]:
    """Yield names and tensors in order; tensors nested in an entry come in its place, with None for a name."""
    for name, old in weights.old_names.items():
        if name in weights.tensors:
            info = weights.tensors[name].info
            yield name, info._replace(subclass=None) if info.is_array else info  # it is written as a tensor
        else:
            head = f"{weights.state_dict.head}{old}."
            yield from ((None, tensor.info) for one, tensor in checkpoint.tensors.items() if one.startswith(head))


def edit(
    checkpoint: Checkpoint, changes: NameChanges, drop: Sequence[str], rewriter: TreeRewriter
) -> tuple[Mapping[str, str], Mapping[str, None], tuple[str, ...]]:
    """
    Rename the weights wherever they are in a checkpoint, and leave out entries by path or role.

    Return the new full names of tensors and other entries by the old ones; the full names of weights that were not to
    be taken, in order; and the paths of entries that go with everything in them.
    """
    edits: _Edits = {}  # both kinds of edits may meet in one mapping, which is replaced once
    new_names, left_out = _rename_state_dicts(checkpoint, changes, edits)
    dropped = dict.fromkeys(path for what in drop for path in to_drop(checkpoint, what))
    for path in dropped:
        entries = list(entries_at(checkpoint.root, path))
        if not entries:
            raise MigrationRefused(
                f"{path!r} cannot be dropped alone: it is inside a list or an object",
                kind="nothing-to-drop",
                hint="Drop the entry that it is in, or take the weights alone: `form='state_dict'`.",
            )
        for mapping, key in entries:
            edits.setdefault(id(mapping), _Edit(mapping)).keys[key] = None
    for one in edits.values():
        rewriter.replace(one.node, one.mapping())
    return new_names, left_out, tuple(dropped)


def unwrap(
    root: Inert, walks: Iterable[tuple[str, StateDictWalk]], classes: frozenset[str], rewriter: TreeRewriter
) -> dict[str, str]:
    """
    Take whole models out of wrappers of some classes, wherever they are in the tree.

    Return the new full name of every tensor of the models that have such a wrapper.
    """
    new_names = {
        f"{path}.{old}" if path else old: f"{path}.{new}" if path else new
        for path, walk in walks
        for old, new in names_without(walk, classes).items()
    }
    seen: set[int] = set()
    todo = [root] if new_names else []  # without a name to change there is no wrapper to look for
    while todo:
        node = todo.pop()
        if not is_container(node) or id(node) in seen:
            continue
        seen.add(id(node))
        inside = unwrapped(node, classes)
        if inside is not None:
            rewriter.replace(node, inside)
        todo.extend(child for _, child in children(node))
    return new_names


def metadata_node(modules: dict[str, ModuleFacts]) -> Inert:
    """Return the ``_metadata`` of a state dict: what each module wrote about itself, by its path."""
    metadata = Call(_ORDERED_DICT, ())
    metadata.pairs = [(path, _dict_node(facts)) for path, facts in modules.items()]
    return metadata


def _dict_node(facts: ModuleFacts) -> Dict:
    return Dict([(key, _dict_node(fact) if isinstance(fact, dict) else fact) for key, fact in facts.items()])


@dataclass
class _Edit:
    """The keys of a mapping to rename or remove."""

    node: Inert
    keys: dict[str | int, str | None] = field(default_factory=dict)
    """New keys by old ones; None for keys that are removed."""
    modules: dict[str, ModuleFacts] = field(default_factory=dict)

    def mapping(self) -> Inert:
        """Return the edited mapping, with ``modules`` as its metadata if it had metadata."""
        keys = self.keys
        pairs = [
            (keys.get(key, key) if type(key) in (str, int) else key, value)
            for key, value in mapping_pairs(self.node) or []
            if not (type(key) in (str, int) and keys.get(key, key) is None)
        ]
        made = mapping_like(self.node, pairs)
        if self.modules and isinstance(made, Call) and isinstance(made.state, Dict):
            metadata = metadata_node(self.modules)
            made.state = Dict([(k, metadata if k == "_metadata" else v) for k, v in made.state.pairs])
        return made


_Edits: TypeAlias = dict[int, _Edit]
"""By the id of the mapping's node, as nodes have no hash."""


def _rename_state_dicts(
    checkpoint: Checkpoint, changes: NameChanges, edits: _Edits
) -> tuple[dict[str, str], dict[str, None]]:
    """Add the new keys of every state dict to ``edits``; return the new full names, and the names left out."""
    new_names: dict[str, str] = {}
    left_out: dict[str, None] = {}
    for state_dict in by_name(checkpoint) if changes != NameChanges() else ():
        own = changes
        # An AveragedModel beside the model keeps its prefix "module.": training goes on with it. So does a state dict
        # of averaged weights and others, of which stripping would leave only the averaged ones.
        is_kept = state_dict is not checkpoint.weights and not COMPANIONS.isdisjoint(state_dict)
        if is_kept or is_averaged_pair(state_dict):
            own = changes._replace(rules=tuple(rule for rule in changes.rules if rule not in renaming.WRAPPER_RULES))
        try:
            weights = prepare(checkpoint, state_dict, own)
        except MigrationRefused as error:
            if not state_dict.key:
                raise
            hint = error.hint
            for one in by_name(checkpoint) if error.kind == "no-such-prefix" else ():
                with suppress(MigrationRefused):
                    prepare(checkpoint, one, own)
                    hint = "Take what has it alone, `key=`; or remove it where it is, `rename='^PREFIX='`."
            raise MigrationRefused(f"in {state_dict.key!r}, {error.message}", kind=error.kind, hint=hint) from error
        changed: dict[str, str | None] = {**dict(weights.renamed), **dict.fromkeys(weights.dropped)}
        if not changed:
            continue
        edit = edits.setdefault(id(state_dict.node), _Edit(state_dict.node))
        edit.keys.update(changed)
        edit.modules = weights.modules
        head, new = state_dict.head, {name: changed.get(name, name) for name in (*state_dict, *changed)}
        places = {head + name: to if to is None else head + to for name, to in new.items()}
        # Of entries that are not tensors, the tensors inside are named.
        others = {head + name for name in changed if name not in state_dict}
        inside = list(within(checkpoint.tensors, others)) if others else []
        held = {entry: places.pop(entry) for entry in dict.fromkeys(entry for _, entry in inside)}
        for name, entry in inside:
            to = held[entry]
            places[name] = None if to is None else to + name[len(entry) :]
        new_names |= {name: to for name, to in places.items() if to is not None}
        left_out |= {name: None for name, to in places.items() if to is None}
    return new_names, left_out


_T = TypeVar("_T")
_ALIGNMENT: Final = 64
_SMALL: Final = 5
"""Number of members beside the storages."""
_MADE_BY, _NEEDED = 798, 45  # what torch's writer puts into the zip64 record


def torch_zip(
    root: str, pickled: bytes, storages: Sequence[Payload], found: Sequence[int]
) -> Iterator[bytes | Payload]:
    """
    Yield the parts of a zip whose storages ``0``, ``1``… are the payloads; offsets count from its first byte.

    The caller adds each payload's CRC-32 to ``found`` before it takes the next part.
    """
    position, directory = 0, bytearray()
    for name, part in _members(pickled, storages):
        nbytes = len(part) if isinstance(part, bytes) else part.nbytes
        frame = Frame(f"{root}/{name}".encode(), nbytes, position)
        local = frame.local()
        yield local
        yield part
        checksum = crc32(part) if isinstance(part, bytes) else found[-1]
        descriptor = frame.descriptor(checksum)
        yield descriptor
        directory += frame.entry(checksum)
        position += len(local) + nbytes + len(descriptor)
    yield bytes(directory) + end_records(position, len(directory), len(storages) + _SMALL)


def _members(pickled: bytes | _T, storages: Iterable[_T]) -> Iterator[tuple[str, bytes | _T]]:
    yield "data.pkl", pickled
    yield ".format_version", b"1"
    yield ".storage_alignment", str(_ALIGNMENT).encode()
    yield "byteorder", b"little"
    yield from ((f"data/{index}", payload) for index, payload in enumerate(storages))
    yield "version", b"3\n"


def torch_zip_nbytes(root: str, pickled_nbytes: int, storages_nbytes: Sequence[int]) -> int:
    """Return the size in bytes of what ``torch_zip`` yields."""
    position = directory = 0
    for name, part in _members(pickled_nbytes, storages_nbytes):
        frame = Frame(f"{root}/{name}".encode(), part if isinstance(part, int) else len(part), position)
        position += len(frame.local()) + frame.nbytes + len(frame.descriptor(0))
        directory += len(frame.entry(0))
    return position + directory + len(end_records(0, 0, 0))


class Frame(NamedTuple):
    """The records around a payload of ``nbytes`` bytes whose local header begins at ``header``."""

    name: bytes
    nbytes: int
    header: int

    def local(self) -> bytes:
        """Return the local header, padded so that the payload begins at a multiple of 64."""
        wide = self._wide()
        start = self.header + LOCAL.size + len(self.name) + len(wide) + 4  # the head of the extra field "FB"
        padding = b"Z" * (-start % _ALIGNMENT)
        extra = wide + pack("<2sH", b"FB", len(padding)) + padding
        local = LOCAL.pack(LOCAL_MAGIC, 0, self._flags(), 0, 0, 0, 0, 0, 0, len(self.name), len(extra))
        return local + self.name + extra

    def descriptor(self, checksum: int) -> bytes:
        """Return the descriptor that follows the payload."""
        if not self.nbytes:
            return b""
        layout = DESCRIPTOR64 if self._wide() else DESCRIPTOR
        return DESCRIPTOR_MAGIC + layout.pack(checksum, self.nbytes, self.nbytes)

    def entry(self, checksum: int) -> bytes:
        """Return the entry in the central directory."""
        wide, size = self._wide(), min(self.nbytes, FULL32)
        entry = (ENTRY_MAGIC, 0, 0, self._flags(), 0, 0, 0, checksum, size, size, len(self.name), len(wide))
        return ENTRY.pack(*entry, 0, 0, 0, 0, min(self.header, FULL32)) + self.name + wide

    def _flags(self) -> int:
        return FLAG_UTF8 | (FLAG_DESCRIPTOR if self.nbytes else 0)

    def _wide(self) -> bytes:
        """Return the zip64 extra field with the values that do not fit into 32 bits; empty if all do."""
        values = [self.nbytes, self.nbytes] if self.nbytes >= FULL32 else []
        values += [self.header] if self.header >= FULL32 else []
        return pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""


def end_records(start: int, nbytes: int, count: int, comment: bytes = b"") -> bytes:
    """Return the records after a directory that begins at ``start`` and has ``count`` entries in ``nbytes`` bytes."""
    end64 = END64.pack(END64_MAGIC, 44, _MADE_BY, _NEEDED, 0, 0, count, count, nbytes, start)
    locator = LOCATOR.pack(LOCATOR_MAGIC, 0, start + nbytes, 1)
    short = (min(count, FULL16), min(count, FULL16), min(nbytes, FULL32), min(start, FULL32))
    return end64 + locator + END.pack(END_MAGIC, 0, 0, *short, len(comment)) + comment
