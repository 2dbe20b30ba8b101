"""
``Side``: the part of a checkpoint that is compared: its weights, or everything in it, under the names to compare.

A side also says what its file cannot record (safetensors: devices, ties, an order), because that is no difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeVar

import ckptool.system as system
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.modules import ModuleFacts
from ckptool.checkpoints.weights import NameChanges, choose, prepare
from ckptool.errors import UnsupportedFeature
from ckptool.names import renaming
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity

if TYPE_CHECKING:
    from ckptool.recipes.find import Layout

Scope: TypeAlias = Literal["weights", "everything"]
Aspect: TypeAlias = Literal["order", "devices", "ties", "module versions", "values that are no tensors"]

_Found = TypeVar("_Found")


class Side(NamedTuple):
    """One of the two sides of a comparison."""

    key: str | None
    """The path of the weights; None for everything."""
    tensors: Mapping[str, LazyTensor]
    others: Mapping[str, Inert]
    """Values that are not tensors, by path; those inside whole models, too."""
    lacks: frozenset[Aspect]
    """Aspects that its format does not record."""
    attributes: Mapping[str, LazyTensor] = {}
    """Tensors inside whole models that a state_dict() would not contain."""
    facts: Mapping[tuple[str, str], str] = {}
    """Facts of modules: their versions, and the class of a whole model. Keys: path and fact."""
    metadata: Mapping[str, str] | None = None
    """The ``__metadata__`` of safetensors; None for other formats."""
    has_models: bool = False
    """Whether there are whole models in it that are not among ``others``."""
    unreadable: tuple[str, ...] = ()
    """Names of tensors of a kind that cannot be read."""

    @property
    def has(self) -> frozenset[Aspect]:
        """Aspects that it has, and that a format may not record."""
        infos = [tensor.info for tensor in self.tensors.values()]
        aspects: dict[Aspect, bool] = {
            "order": len(infos) > 1,
            "devices": any(info.location != "cpu" for info in infos),
            "ties": len({identity(info) for info in infos}) < len(infos),
            "module versions": bool(self.facts),
            "values that are no tensors": bool(self.others),
        }
        return frozenset(aspect for aspect, there in aspects.items() if there)


def scope_of(a: Checkpoint, b: Checkpoint, key_a: str | None, key_b: str | None, recipe: Layout | None = None) -> Scope:
    """Return what to compare of two checkpoints: their weights, unless both are of one kind and have more."""
    if key_a is not None or key_b is not None or recipe is not None:
        return "weights"
    if a.form == b.form != "state_dict":
        roots = [one.weights is not None and not one.weights.key for one in (a, b)]
        if roots[0] == roots[1]:  # else one holds under a key what the other is
            return "everything"
    return "weights" if a.state_dicts and b.state_dicts else "everything"


def side_of(
    checkpoint: Checkpoint,
    scope: Scope,
    key: str | None,
    label: str,
    *,
    aligned: bool,
    recipe: Layout | None = None,
) -> Side:
    """
    Return one side, in the layout of a recipe if there is one.

    ``aligned`` strips what training wrappers added to the names, if names stay distinct.

    Raises:
        WeightsNotFound: It is not clear what is to be compared; the hint says how to name it.
        UnsupportedFeature: It is an archive of several checkpoints.
        MalformedFile: The index is damaged, so names and shapes may not be those that were saved.
    """
    checkpoint.check_index()
    if checkpoint.form == "archive":
        names = [system.quoted(f"{checkpoint.path}::{member.name}") for member in checkpoint.members[:8]]
        raise UnsupportedFeature(
            checkpoint.unmerged
            or f"{'a folder' if checkpoint.is_folder else 'an archive'} of {len(checkpoint.members):,} checkpoints",
            kind="archive",
            hint=f"{'Compare them one by one' if checkpoint.unmerged else 'Name one'}: {', '.join(names)}",
        )
    if scope == "everything":
        return _everything(checkpoint, aligned=aligned)
    chosen = choose(checkpoint, key, "auto", option=f"key_{label}", any_role=True)
    if recipe is None:
        return _weights(checkpoint, chosen, aligned=aligned)
    plain = prepare(checkpoint, chosen, NameChanges((renaming.strip_wrappers,)))
    weights = recipe(checkpoint, plain).weights
    lacks: frozenset[Aspect] = _lacks(checkpoint) | {"order", "ties", "module versions"}
    return Side(chosen.key, weights.tensors, weights.others, lacks)


def _align(names: Iterable[str]) -> dict[str, str]:
    """Return names without what wrappers added, by the old names; those that would become equal stay as they are."""
    stripped = {name: renaming.strip_wrappers([name])[0] or name for name in names}
    count = Counter(stripped.values())
    return {name: short if count[short] == 1 else name for name, short in stripped.items()}


def _weights(checkpoint: Checkpoint, chosen: StateDict, *, aligned: bool) -> Side:
    weights = prepare(checkpoint, chosen, NameChanges())
    head = chosen.head
    others = [one for one in checkpoint.state_dicts if one is not chosen and one.key.startswith(head)]
    apart = tuple(f"{one.key}." for one in others if one.key != chosen.key)
    deeper = _below(checkpoint.tensors, head, apart, set(weights.others))
    tensors = {**weights.tensors, **chosen, **deeper}
    within: dict[str, Inert] = {}
    if chosen.node is not None:
        within = _below(_others(checkpoint), head, apart)
        if chosen.own_keys is not None:
            within = {path: node for path, node in within.items() if {path, *heads(path)} & chosen.own_keys}
    if chosen.class_name is not None:  # only values that the model's state_dict() would hold
        within = {path: node for path, node in within.items() if {path, *heads(path)} & weights.others.keys()}
    names = _align((*tensors, *within)) if aligned else {}
    return Side(
        key=chosen.key,
        tensors={names.get(name, name): tensor for name, tensor in tensors.items()},
        others={names.get(path, path): node for path, node in within.items()},
        facts=_module_facts(weights.modules, list(tensors), aligned=aligned),
        metadata=_metadata(checkpoint),
        unreadable=tuple(name[len(head) :] for name, _ in checkpoint.contents.unreadable if name.startswith(head)),
        lacks=_lacks(checkpoint),
    )


def _below(
    found: Mapping[str, _Found], head: str, apart: tuple[str, ...], entries: set[str] | None = None
) -> dict[str, _Found]:
    """Return items whose paths begin with ``head``, by the rest; without ``apart``; inside ``entries``, if given."""
    below = {path[len(head) :]: item for path, item in found.items() if path.startswith(head)}
    return {
        rest: item
        for rest, item in below.items()
        if not (head + rest).startswith(apart) and (entries is None or any(path in entries for path in heads(rest)))
    }


def heads(path: str) -> Iterator[str]:
    """Yield the parents of a path, without the root, the longest first."""
    while path := path.rpartition(".")[0]:
        yield path


def _everything(checkpoint: Checkpoint, *, aligned: bool) -> Side:
    others = _others(checkpoint)
    names: dict[str, str] = {}
    facts: dict[tuple[str, str], str] = {}
    for state_dict in checkpoint.state_dicts:
        head = state_dict.head
        if aligned:
            below = [path[len(head) :] for path in others if head and path.startswith(head)]
            names |= {head + name: head + short for name, short in _align((*state_dict, *below)).items()}
        elif state_dict.class_name is not None:
            others[state_dict.key] = state_dict.node
            facts[state_dict.key, "class"] = state_dict.class_name
        weights = prepare(checkpoint, state_dict, NameChanges())
        found = _module_facts(weights.modules, list(state_dict), aligned=aligned)
        facts |= {((head + path).rstrip("."), fact): value for (path, fact), value in found.items()}
    return Side(
        key=None,
        tensors={names.get(name, name): tensor for name, tensor in checkpoint.tensors.items()},
        attributes=checkpoint.attributes,
        others={names.get(path, path): node for path, node in others.items()},
        facts=facts,
        metadata=_metadata(checkpoint),
        has_models=aligned and any(one.class_name is not None for one in checkpoint.state_dicts),
        unreadable=tuple(name for name, _ in checkpoint.contents.unreadable),
        lacks=_lacks(checkpoint),
    )


def _others(checkpoint: Checkpoint) -> dict[str, Inert]:
    """Return the values that are no tensors, by path, without metadata of modules, which is compared by module."""
    metadata = [
        nodes.lookup(nodes.attribute_pairs(one.node), "_metadata")
        for one in checkpoint.state_dicts
        if one.node is not None
    ]
    known = {id(node) for node in metadata if node is not None}
    found: dict[str, Inert] = {}
    for path, node in checkpoint.extras:
        if id(node) not in known:
            # A dict may have the keys 1 and "1", and then two values have one path.
            found[path] = (found[path], node) if path in found else node
    return found


def _module_facts(
    modules: Mapping[str, ModuleFacts], names: Sequence[str], *, aligned: bool
) -> dict[tuple[str, str], str]:
    def rule(found: Sequence[str]) -> list[str | None]:
        return [renaming.strip_wrappers([name])[0] for name in found]

    paths: Sequence[str | None] = list(modules)
    if aligned:
        paths = renaming.rename_metadata(list(modules), (rule,), names)
    return {
        (path, fact): repr(value)
        for path, facts in zip(paths, modules.values(), strict=True)
        if path is not None
        for fact, value in facts.items()
    }


def _metadata(checkpoint: Checkpoint) -> dict[str, str] | None:
    """Return the texts in a safetensors file, without those that record something else: ties, an order, a library."""
    if not checkpoint.traits.is_plain:
        return None
    texts = checkpoint.recorded.texts
    return {key: repr(text) for key, text in checkpoint.metadata.items() if key in texts and key != "format"}


def _lacks(checkpoint: Checkpoint) -> frozenset[Aspect]:
    traits, recorded, is_sorted = checkpoint.traits, checkpoint.recorded, bool(checkpoint.shards)  # an index is sorted
    lacks: dict[Aspect, bool] = {
        "devices": not traits.keeps_devices,
        "ties": not traits.keeps_ties,
        "order": is_sorted or not (traits.keeps_order or recorded.order),
        "module versions": is_sorted or not (traits.has_tree or recorded.modules),
        "values that are no tensors": checkpoint.root is None,
    }
    return frozenset(aspect for aspect, is_lacking in lacks.items() if is_lacking)
