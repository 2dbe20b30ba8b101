"""
Edits of a pickled tree before it is written again: rename keys, leave out entries, unwrap whole models.

Nodes are never changed, as the checkpoint goes on using them: a ``TreeRewriter`` gets their replacements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.entries import entries_at, to_drop
from ckptool.checkpoints.modules import ModuleFacts, StateDictWalk, names_without, unwrapped
from ckptool.checkpoints.quantized import within
from ckptool.checkpoints.weights import NameChanges, by_name, prepare
from ckptool.errors import MigrationRefused
from ckptool.migration.tree_rewriter import TreeRewriter
from ckptool.names import renaming
from ckptool.names.wrappers import COMPANIONS, is_averaged_pair
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Global, Inert

_ORDERED_DICT = Global("collections", "OrderedDict")


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
    dropped = _drop(checkpoint, drop, edits)
    for one in edits.values():
        rewriter.replace(one.node, one.mapping())
    return new_names, left_out, dropped


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
        if not nodes.is_container(node) or id(node) in seen:
            continue
        seen.add(id(node))
        inside = unwrapped(node, classes)
        if inside is not None:
            rewriter.replace(node, inside)
        todo.extend(child for _, child in nodes.children(node))
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
            for key, value in nodes.mapping_pairs(self.node) or []
            if not (type(key) in (str, int) and keys.get(key, key) is None)
        ]
        made = nodes.mapping_like(self.node, pairs)
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
            if error.kind == "no-such-prefix" and any(_takes(checkpoint, one, own) for one in by_name(checkpoint)):
                hint = "Take what has it alone, `key=`; or remove it where it is, `rename='^PREFIX='`."
            raise MigrationRefused(f"in {state_dict.key!r}, {error.message}", kind=error.kind, hint=hint) from error
        renamed = dict(weights.renamed)
        gone = set(weights.dropped)
        if not renamed and not gone:
            continue
        edit = edits.setdefault(id(state_dict.node), _Edit(state_dict.node))
        edit.keys.update({**renamed, **dict.fromkeys(gone)})
        edit.modules = weights.modules
        head = state_dict.head
        new_names.update((head + name, head + renamed.get(name, name)) for name in state_dict if name not in gone)
        left_out |= dict.fromkeys(head + name for name in state_dict if name in gone)
        others = {head + name: head + renamed.get(name, name) for name in (*renamed, *gone) if name not in state_dict}
        inside = list(within(checkpoint.tensors, others)) if others else []
        held = {entry for _, entry in inside}  # for these, the tensors inside are named
        new_names.update(
            (name, new) for name, new in others.items() if name[len(head) :] not in gone and name not in held
        )
        bare = (name for name in weights.dropped if name not in state_dict)
        left_out |= dict.fromkeys(head + name for name in bare if head + name not in held)
        for name, entry in inside:
            if entry[len(head) :] in gone:
                left_out[name] = None
            else:
                new_names[name] = others[entry] + name[len(entry) :]
    return new_names, left_out


def _takes(checkpoint: Checkpoint, state_dict: StateDict, changes: NameChanges) -> bool:
    with suppress(MigrationRefused):
        return bool(prepare(checkpoint, state_dict, changes))
    return False


def _drop(checkpoint: Checkpoint, drop: Sequence[str], edits: _Edits) -> tuple[str, ...]:
    """Add the entries to leave out to ``edits``, and return their full paths."""
    paths: dict[str, None] = {}
    for path in (path for what in drop for path in to_drop(checkpoint, what)):
        entries = list(entries_at(checkpoint.root, path))
        if not entries:
            raise MigrationRefused(
                f"{path!r} cannot be dropped alone: it is inside a list or an object",
                kind="nothing-to-drop",
                hint="Drop the entry that it is in, or take the weights alone: `form='state_dict'`.",
            )
        for mapping, key in entries:
            edits.setdefault(id(mapping), _Edit(mapping)).keys[key] = None
        paths[path] = None
    return tuple(paths)
