"""Weights → a folder with one file for each rank, which holds that rank's slices."""

from __future__ import annotations

from dataclasses import replace

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import Weights
from ckptool.migration import safetensors_plan, torch_plan
from ckptool.migration.changes import Changes
from ckptool.migration.plan import Plan
from ckptool.migration.selection import refuse_cut_apart
from ckptool.migration.target import archive_root
from ckptool.recipes.apply import Move
from ckptool.recipes.find import settings_of
from ckptool.recipes.slice_rules import SliceRules, refuse_width, slices
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity


def plan_slices(plan: Plan, checkpoint: Checkpoint, weights: Weights, changes: Changes) -> Plan:
    """
    Return the plan of a folder with the slices of each rank; tied names stay tied in each file.

    Raises:
        MigrationRefused: No rule matches a tensor, or a tensor cannot be cut by its rule.
    """
    rules, ranks = SliceRules(changes.join), changes.cut or 1
    names = [rules.file_name(rank, plan.form) for rank in range(ranks)]
    numbers = rules.numbers({**settings_of(checkpoint), **changes.recipe_arguments}, ranks)
    own: list[dict[str, LazyTensor]] = [{} for _ in names]
    known: dict[object, list[LazyTensor]] = {}
    moves: list[Move] = []
    for name, rule in rules.by_name(weights.tensors).items():
        whole = weights.tensors[name]
        refuse_width(rule, whole, weights.tensors, numbers)
        place = (*identity(whole.info), rule.dim, rule.shares)
        found = known.get(place) or slices(rule, whole, ranks, numbers)
        known[place] = found
        for rank, tensor in enumerate(found):
            own[rank][name] = LazyTensor(name, tensor.info)
        if rule.dim is not None:
            sides = ((name, whole.shape),), tuple((name, one.shape) for one in found)
            moves.append(Move(f"cut {rule.text.rpartition('=')[2]}", *sides))
    wholes, first = (
        {one.name: of[name].shape for name, one in weights.tensors.items()} for of in (weights.tensors, own[0])
    )
    refuse_cut_apart(checkpoint, wholes, first, changes)
    parts = []
    for name, tensors in zip(names, own, strict=True):
        taken = weights._replace(tensors=tensors)
        one = replace(plan, weights=taken)
        if plan.form == "safetensors":
            one = safetensors_plan.plan_weights(one, checkpoint, taken, changes)
        else:
            one = torch_plan.plan_weights(one, checkpoint, taken, changes, archive_root(name))
        parts.append(replace(one, files=[file._replace(name=name) for file in one.files]))
    return replace(
        parts[0],
        parts=parts,
        files=[file for one in parts for file in one.files],
        is_folder=True,
        expected=[pair for one in parts for pair in one.expected],
        pickles=tuple(pickled for one in parts for pickled in one.pickles),
        moves=(*plan.moves, *moves),
    )
