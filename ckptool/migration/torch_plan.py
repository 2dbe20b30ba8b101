"""
A checkpoint → a zip as ``torch.save`` writes it: the weights alone, or everything that the source holds.

The pickled tree is written again with its storages numbered anew; the storages are copied byte for byte. No class is
needed, and nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckptool.cancellation import each
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.modules import StateDictWalk, names_without, unwrapped
from ckptool.checkpoints.weights import ModuleFacts, NameChanges, Weights, by_name, prepare
from ckptool.errors import MigrationRefused
from ckptool.limits import Limits
from ckptool.migration import verify as verify_torch
from ckptool.migration.casting import Casting
from ckptool.migration.output import Output
from ckptool.migration.tree_rewriter import TreeRewriter
from ckptool.migration.zip_writer import WrittenZip, torch_zip_nbytes, write_torch_zip
from ckptool.names import renaming
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Global, Inert
from ckptool.pickles.writer import write_pickle
from ckptool.sources.cancellable import cancellation_of
from ckptool.tensors.payloads import StoragePayload
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.storage_ids import TypedStorage
from ckptool.tensors.tensor import TensorInfo

_ORDERED_DICT = Global("collections", "OrderedDict")

_REWRITABLE = ("torch_zip", "torch_legacy", "torch_tar", "pickle")
"""Formats that are a pickled tree and nothing else."""

_BESIDE = {"torchscript": "the code of a TorchScript model", "pt2": "the graph of an exported program"}
"""What other formats hold that no one but torch can write."""


class TorchPlan(NamedTuple):
    """A file that is ready to be written: its pickle, and the storages that the pickle refers to."""

    root: str
    pickled: bytes
    storages: tuple[StoragePayload, ...]
    expected: tuple[tuple[str | None, TensorInfo], ...]
    """The tensors that must be found in the file, in order; None for one that lies deeper in an entry."""
    retagged: dict[str, int]
    renamed: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...]

    @property
    def tensor_count(self) -> int:
        """Tensors in the file; tied ones count under each name."""
        return len(self.expected)

    @property
    def tied(self) -> dict[str, str]:
        """Nothing: tied names keep their ties."""
        return {}

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return torch_zip_nbytes(self.root, len(self.pickled), [payload.nbytes for payload in self.storages])

    def write(self, output: Output, *, checksums: bool = True) -> WrittenZip:
        """Write the file, and return its members with the CRC-32 of what was read for each."""
        written = write_torch_zip(output, self.root, self.pickled, self.storages, checksums=checksums)
        output.flush()
        return written

    def verify(self, path: str, written: WrittenZip, limits: Limits) -> None:
        """Read the file back; see ``verify_torch.verify``."""
        verify_torch.verify(path, written, self.storages, self.expected, limits)


def plan_weights(checkpoint: Checkpoint, weights: Weights, location: str | None, root: str) -> TorchPlan:
    """
    Return how weights become a plain state_dict: an OrderedDict with the modules' facts as its metadata.

    Raises:
        MigrationRefused: A tensor is one that only its own class can write.
    """
    rewriter = TreeRewriter(checkpoint.rebuilder or Rebuilder(_NoStorages()), location)
    detached = weights.state_dict.class_name is not None
    cancellation = cancellation_of(checkpoint.source)
    made: dict[int, Inert] = {}
    for tensor in each(weights.tensors.values(), cancellation):
        if id(tensor.info) not in made:
            made[id(tensor.info)] = rewriter.tensor(tensor.info, detached=detached)
    tree = Call(_ORDERED_DICT, ())
    tree.pairs = [
        (name, made[id(weights.tensors[name].info)] if name in weights.tensors else weights.others[name])
        for name in weights.names
    ]
    if weights.modules:
        tree.state = Dict([("_metadata", _metadata_node(weights.modules))])
    pickled = write_pickle(tree, rewriter, cancellation)
    return TorchPlan(
        root,
        pickled,
        tuple(rewriter.storages),
        tuple(_expected(checkpoint, weights)),
        rewriter.retagged,
        weights.renamed,
        (*weights.dropped, *(f"__metadata__.{key}" for key, _ in weights.texts)),
    )


def plan_same(
    checkpoint: Checkpoint,
    changes: NameChanges,
    location: str | None,
    root: str,
    *,
    peel: frozenset[str] = frozenset(),
    drop: tuple[str, ...] = (),
    model: StateDict | None = None,
    casting: Casting | None = None,
) -> TorchPlan:
    """
    Return how a checkpoint becomes itself: everything it holds, with device tags set and names changed.

    ``peel`` names the classes of training wrappers that give way to the model inside them, ``drop`` the paths and
    roles of what is left out; with ``model``, that whole model is all that is written. ``casting`` casts weights, and
    nothing of an optimizer.

    Raises:
        MigrationRefused: The format has no pickled tree, or two names would become one.
    """
    _refuse_what_has_no_tree(checkpoint)
    _refuse_names_of_a_model(checkpoint, changes, model)
    recast = casting.info if casting is not None else None
    rewriter = TreeRewriter(checkpoint.rebuilder or Rebuilder(_NoStorages()), location, recast)
    tree = checkpoint.root if model is None else model.node
    tensors = checkpoint.tensors if model is None else dict(model)
    walks = checkpoint.walks if model is None else [("", walk) for path, walk in checkpoint.walks if path == model.key]
    new_names = _peeled_names(walks, peel)
    if new_names:
        _peel(tree, rewriter, peel)
    edits = _Edits()
    renamed_mappings, left_out = _rename_state_dicts(checkpoint, changes, edits) if model is None else ({}, {})
    new_names |= renamed_mappings
    dropped = _drop(checkpoint, drop, edits) if model is None else ()
    for node, other in edits.mappings():
        rewriter.replace(node, other)
    gone = tuple(f"{path}." for path in dropped) or ("\0",)
    kept = {name: t for name, t in tensors.items() if name not in left_out and not f"{name}.".startswith(gone)}
    if casting is not None:
        casting.take((new_names.get(name, name), tensor) for name, tensor in _to_cast(checkpoint, kept, model))
    pickled = write_pickle(tree, rewriter, cancellation_of(checkpoint.source))
    if casting is not None:
        casting.refuse_what_was_missed(rewriter.storages)
    expected = tuple(
        (new_names.get(name, name), recast(tensor.info) if recast else tensor.info) for name, tensor in kept.items()
    )
    renamed = tuple((old, new) for old, new in new_names.items() if new != old)
    return TorchPlan(
        root, pickled, tuple(rewriter.storages), expected, rewriter.retagged, renamed, (*dropped, *left_out)
    )


class _Edits:
    """What is to change in mappings of the tree: keys that go, keys that get another name."""

    def __init__(self) -> None:
        self._nodes: dict[int, Inert] = {}
        self._keys: dict[int, dict[str, str | None]] = {}
        self._modules: dict[int, dict[str, ModuleFacts]] = {}

    def rename(self, node: Inert, names: dict[str, str | None], modules: dict[str, ModuleFacts]) -> None:
        self._nodes[id(node)] = node
        self._keys.setdefault(id(node), {}).update(names)
        self._modules[id(node)] = modules

    def drop(self, node: Inert, key: str) -> None:
        self._nodes[id(node)] = node
        self._keys.setdefault(id(node), {})[key] = None

    def mappings(self) -> list[tuple[Inert, Inert]]:
        """Return each mapping, and the mapping that takes its place."""
        found = []
        for own, node in self._nodes.items():
            keys = self._keys[own]
            pairs = [
                (keys.get(key, key) if isinstance(key, str) else key, value)
                for key, value in nodes.mapping_pairs(node) or []
                if not (isinstance(key, str) and keys.get(key, key) is None)
            ]
            found.append((node, _mapping_like(node, pairs, self._modules.get(own))))
        return found


def _mapping_like(node: Inert, pairs: nodes.Pairs, modules: dict[str, ModuleFacts] | None) -> Inert:
    if isinstance(node, Dict):
        return Dict(pairs)
    made = Call(node.func, () if node.pairs is None else node.args, node.how, node.kwargs)
    made.items, made.pairs, made.state = node.items, pairs, node.state
    if modules and isinstance(node.state, Dict):
        metadata = _metadata_node(modules)
        made.state = Dict([(k, metadata if k == "_metadata" else v) for k, v in node.state.pairs])
    return made


def _metadata_node(modules: dict[str, ModuleFacts]) -> Inert:
    metadata = Call(_ORDERED_DICT, ())
    metadata.pairs = [(path, _dict_node(facts)) for path, facts in modules.items()]
    return metadata


def _dict_node(facts: ModuleFacts) -> Dict:
    return Dict([(key, _dict_node(fact) if isinstance(fact, dict) else fact) for key, fact in facts.items()])


def _rename_state_dicts(
    checkpoint: Checkpoint, changes: NameChanges, edits: _Edits
) -> tuple[dict[str, str], dict[str, None]]:
    """Note the new keys of every mapping of weights; return the new full names, and the names that go."""
    new_names: dict[str, str] = {}
    left_out: dict[str, None] = {}
    for state_dict in by_name(checkpoint) if changes != NameChanges() else ():
        own = changes
        # Beside the model, an AveragedModel's names begin with "module." by right: training goes on with it.
        if state_dict is not checkpoint.weights and not renaming.COMPANIONS.isdisjoint(state_dict):
            own = changes._replace(rules=tuple(rule for rule in changes.rules if rule not in renaming.WRAPPER_RULES))
        weights = prepare(checkpoint, state_dict, own)
        renamed = dict(weights.renamed)
        gone = set(weights.dropped)
        if not renamed and not gone:
            continue
        edits.rename(state_dict.node, {**renamed, **dict.fromkeys(gone)}, weights.modules)
        head = f"{state_dict.key}." if state_dict.key else ""
        new_names |= {head + name: head + renamed.get(name, name) for name in state_dict if name not in gone}
        left_out |= dict.fromkeys(head + name for name in state_dict if name in gone)
    return new_names, left_out


def _drop(checkpoint: Checkpoint, asked: tuple[str, ...], edits: _Edits) -> tuple[str, ...]:
    """Note what is to be left out, and return the paths that go: of a role, every state dict that has it."""
    paths = []
    for what in asked:
        found = [one.key for one in checkpoint.state_dicts if one.role == what and one.key] or [what]
        for path in found:
            place = _entry_of(checkpoint.root, path)
            if place is None:
                raise MigrationRefused(f"there is nothing called {what!r} to drop", kind="nothing-to-drop")
            mapping, key, full = place
            edits.drop(mapping, key)
            paths.append(full)
    return tuple(dict.fromkeys(paths))


def _entry_of(root: Inert, path: str) -> tuple[Inert, str, str] | None:
    """Return the innermost mapping on the way to a path, its key there, and the path of that entry."""
    node, walked, rest = root, "", path
    found = None
    while rest:
        pairs = nodes.mapping_pairs(node)
        keys = [key for key, _ in pairs or [] if isinstance(key, str) and (rest == key or rest.startswith(f"{key}."))]
        if not keys:
            break
        key = max(keys, key=len)
        walked = f"{walked}.{key}" if walked else key
        found = (node, key, walked)
        node, rest = nodes.lookup(pairs or [], key), rest[len(key) + 1 :]
    return found


def _refuse_what_has_no_tree(checkpoint: Checkpoint) -> None:
    if checkpoint.format not in _REWRITABLE:
        beside = _BESIDE.get(checkpoint.format)
        raise MigrationRefused(
            f"{beside} cannot be written by anything but torch" if beside else f"{checkpoint.format} has no objects",
            kind="no-tree",
            hint="Take its weights: `form='state_dict'` or `form='safetensors'`.",
        )


def _refuse_names_of_a_model(checkpoint: Checkpoint, changes: NameChanges, model: StateDict | None) -> None:
    is_model = any(one.role in ("model", "ema") for one in checkpoint.state_dicts) and not by_name(checkpoint)
    if changes.is_by_name and (is_model or model is not None):
        raise MigrationRefused(
            "the names inside a whole model are its class's",
            kind="names-of-a-model",
            hint="Take its weights: `form='state_dict'` or `form='safetensors'`.",
        )


def _to_cast(
    checkpoint: Checkpoint, kept: dict[str, LazyTensor], model: StateDict | None
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the weights, averaged ones too, and with a whole model what its own ``to`` would cast beside them."""
    chosen = [model] if model is not None else [one for one in checkpoint.state_dicts if one.role in ("model", "ema")]
    for state_dict in chosen:
        head = f"{state_dict.key}." if state_dict.key and model is None else ""
        yield from ((head + name, tensor) for name, tensor in state_dict.items() if head + name in kept)
        walks = [walk for path, walk in checkpoint.walks if path == state_dict.key]
        for entry in walks[0].transient if walks and checkpoint.rebuilder else ():
            info = checkpoint.rebuilder.tensor(entry.node) if checkpoint.rebuilder else None
            if info is not None and any(head + name in kept for name in state_dict):
                yield head + entry.name, LazyTensor(head + entry.name, info)


def _peeled_names(walks: Iterable[tuple[str, StateDictWalk]], classes: frozenset[str]) -> dict[str, str]:
    """Return the new full name of every tensor of every whole model that has a wrapper of these classes."""
    return {
        f"{path}.{old}" if path else old: f"{path}.{new}" if path else new
        for path, walk in walks
        for old, new in names_without(walk, classes).items()
    }


def _peel(root: Inert, rewriter: TreeRewriter, classes: frozenset[str]) -> None:
    """Put the model in the place of each wrapper of these classes, wherever in the tree."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if not nodes.is_container(node) or id(node) in seen:
            continue
        seen.add(id(node))
        inside = unwrapped(node, classes)
        if inside is not None:
            rewriter.replace(node, inside)
        todo.extend(child for _, child in nodes.children(node))


def _expected(checkpoint: Checkpoint, weights: Weights) -> Iterator[tuple[str | None, TensorInfo]]:
    """Yield the tensors in order, those that lie deeper in an entry where the entry stands."""
    key = weights.state_dict.key
    for name, old in weights.old_names.items():
        if name in weights.tensors:
            yield name, weights.tensors[name].info
        else:
            head = f"{key}.{old}." if key else f"{old}."
            yield from ((None, tensor.info) for one, tensor in checkpoint.tensors.items() if one.startswith(head))


class _NoStorages:
    """What a format without a pickled tree refers to: nothing."""

    def resolve(self, pid: Inert) -> TypedStorage | None:  # noqa: ARG002
        return None

    def nested(self, stream: bytes) -> None:  # noqa: ARG002
        return
