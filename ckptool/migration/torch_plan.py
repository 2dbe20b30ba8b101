"""
A checkpoint → a zip as ``torch.save`` writes it: the weights alone, or everything that the source holds.

The pickled tree is written again with its storages numbered anew; the storages are copied byte for byte. No class is
needed, and nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ckptool.cancellation import each
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict, walk_of
from ckptool.checkpoints.weights import NameChanges, Weights, by_name
from ckptool.errors import MigrationRefused
from ckptool.migration.changes import Changes
from ckptool.migration.plan import METADATA, OutFile, Plan
from ckptool.migration.tree_edits import edit, metadata_node, unwrap
from ckptool.migration.tree_rewriter import TreeRewriter, same
from ckptool.migration.zip_writer import torch_zip, torch_zip_nbytes
from ckptool.pickles.nodes import Call, Dict, Global, Inert
from ckptool.pickles.writer import shared_nodes, write_pickle
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

    @property
    def expected(self) -> tuple[tuple[str, TensorInfo], ...]:
        """The tensors that are to be found in the result, by their new names, in order."""
        return tuple((self.new_names.get(name, name), self.cast(one.info)) for name, one in self.kept.items())

    def facts(self, *dropped: str) -> dict[str, Any]:
        """Return the fields of a plan for the result; ``dropped`` are further entries that are left out."""
        renamed = tuple((old, new) for old, new in self.new_names.items() if new != old)
        return {"expected": self.expected, "renamed": renamed, "dropped": (*self.dropped, *dropped)}


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
    _refuse_what_has_no_tree(checkpoint)
    _refuse_names_of_a_model(checkpoint, names, model)
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


def _refuse_what_has_no_tree(checkpoint: Checkpoint) -> None:
    if not checkpoint.traits.has_tree:
        program = checkpoint.traits.program
        raise MigrationRefused(
            f"{program} cannot be written by anything but torch" if program else f"{checkpoint.format} has no objects",
            kind="no-tree",
            hint="Take its weights: `form='state_dict'` or `form='safetensors'`.",
        )


def _refuse_names_of_a_model(checkpoint: Checkpoint, names: NameChanges, model: StateDict | None) -> None:
    is_model = any(one.role in ("model", "ema") for one in checkpoint.state_dicts) and not by_name(checkpoint)
    if names.is_by_name and (is_model or model is not None):
        raise MigrationRefused(
            "the names inside a whole model are its class's",
            kind="names-of-a-model",
            hint="Take its weights: `form='state_dict'` or `form='safetensors'`.",
        )


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
