"""
What a migration writes: form, path and plan, from the requested changes.

A plan reads no tensors. Changes that would lose or confuse something are refused here, before anything is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.completeness import refuse_broken, refuse_incomplete, refuse_lost, refuse_slice
from ckptool.checkpoints.weights import EMPTY, NameChanges, Weights, by_name, choose, prepare, refuse_archive
from ckptool.errors import AmbiguousWeights, MigrationRefused, WeightsNotFound
from ckptool.messages import as_path
from ckptool.migration import selection, torch_plan
from ckptool.migration.casting import Casting, memory_of
from ckptool.migration.changes import Changes, TargetForm
from ckptool.migration.plan import Plan
from ckptool.migration.target import archive_root, folder_path, is_folder, target_path
from ckptool.migration.torch_plan import KeptLayout
from ckptool.names.renaming import Filter, Rule, Trials, strip_module, strip_wrappers
from ckptool.names.wrappers import COMPONENTS, DATA_PARALLEL
from ckptool.pickles import nodes
from ckptool.recipes import requested_recipe
from ckptool.tensors.payloads import ComputedWeight
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, identity

if TYPE_CHECKING:
    from ckptool.recipes.apply import Move
    from ckptool.recipes.find import Layout
    from ckptool.recipes.like import Route

Merge: TypeAlias = Callable[[Checkpoint, Weights], tuple[Weights, Sequence[ComputedWeight]]]
"""Puts weights of other files into those of a checkpoint; returns the weights, and those that are computed."""


def make_plan(
    checkpoint: Checkpoint,
    dst: str | None,
    changes: Changes,
    *,
    kept: KeptLayout | None = None,
    merge: Merge | None = None,
) -> Plan:
    """
    Return the plan of a migration; ``changes`` come from ``Changes.in_full``. ``kept`` is what an edit in place keeps
    of the source's layout. ``merge`` puts weights of other files into the weights.

    Raises:
        WeightsNotFound: No state dict matches the request, several do, or a part of it is missing.
        MigrationRefused: It would lose or confuse something.
    """
    refuse_archive(checkpoint)
    _refuse_slicing(changes)
    if not changes.allow_missing and kept is None:  # edited in place, a slice stays a slice
        refuse_slice(checkpoint, changes.weights)
    changes, way, notes = _as_like(checkpoint, changes)
    form = form_of(dst, checkpoint, changes, merges=merge is not None)
    tags = [changes.to or ""] if isinstance(changes.to, str | None) else dict.fromkeys(changes.to.values())
    mark_of_tags = "-".join(tags) if form not in ("safetensors", "dcp") else ""
    marks = [mark for mark in (changes.dtype, mark_of_tags) if mark]
    makes_folder, is_kept = changes.makes_folder, kept is not None
    target = (folder_path if makes_folder else target_path)(dst, checkpoint, form, marks)
    trials = Trials(checkpoint.source.cancellation)
    names, wrappers = _name_changes(changes, trials)
    dtype, layout = str(changes.dtype or ""), kept or KeptLayout()
    casting = Casting(dtype, changes.keep_dtype, trials, saturate=changes.saturate) if dtype else None
    plan = Plan(form, target, changes.to, makes_folder, names, casting=casting, keeps_layout=is_kept, notes=notes)
    is_whole_dcp = form == "dcp" and not _picks(changes) and merge is None  # a state dict, as DCP saves it
    is_whole_dcp &= checkpoint.traits.has_tree and nodes.mapping_pairs(checkpoint.root) is not None
    if changes.optimizer_names and not is_whole_dcp:
        what = "optimizers get names of parameters where everything is written with form 'dcp'"
        _refuse(what, "Leave out `optimizer_names=`.")
    if form == "model" and changes.model is None and merge is not None:
        _refuse("a whole model is written as it is", "Leave out `form=`, or name its class with `model=`.")
    if is_whole_dcp or form == "same" or (form == "model" and changes.model is None):
        return _of_everything(plan, checkpoint, changes, wrappers, merge, layout)
    numbers = changes.recipe_arguments if changes.recipe is not None or not changes.join else {}
    recipe = way.applied if way else requested_recipe(changes.recipe, numbers, reverse=changes.reverse)
    plan, weights = _prepared(plan, checkpoint, changes, merge, recipe)
    return _of_weights(plan, checkpoint, weights, changes, layout)


def _of_everything(
    plan: Plan,
    checkpoint: Checkpoint,
    changes: Changes,
    wrappers: frozenset[str],
    merge: Merge | None,
    layout: KeptLayout,
) -> Plan:
    """Return the plan of a file that keeps all values of the source, or of a folder of DCP with all of them."""
    names = _read(checkpoint, plan.names, by_name(checkpoint))
    refuse_lost(checkpoint)
    left_out: set[int] = set()
    for one in by_name(checkpoint) if not names.filter.takes_all else ():
        left_out |= {id(tensor) for name, tensor in one.items() if not names.filter.takes(name, one.key)}
    refuse_broken(tensor for tensor in checkpoint.tensors.values() if id(tensor) not in left_out)
    plan, replaced = replace(plan, names=names), None
    if merge is not None:
        replaced, made = _put_in_place(checkpoint, changes, merge)
        plan = replace(plan, made=made)
    model = choose(checkpoint, changes.key, changes.weights) if plan.form == "model" else None
    if model is not None and model.class_name is None:
        raise MigrationRefused(
            f"{checkpoint.format} holds weights and no model",
            kind="no-model",
            hint="Name the class to build with `model='package.module:Class'`.",
        )
    edited = torch_plan.edit_everything(plan, checkpoint, changes, wrappers, model, replaced, layout.rewriter)
    if plan.form == "dcp":
        from ckptool.migration import dcp_plan  # most plans are of files

        return dcp_plan.plan_everything(plan, checkpoint, edited, changes)
    return torch_plan.plan_everything(plan, checkpoint, edited, archive_root(plan.target), layout.pickled_nbytes)


def _of_weights(plan: Plan, checkpoint: Checkpoint, weights: Weights, changes: Changes, layout: KeptLayout) -> Plan:
    """Return the plan of the files that weights become."""
    if changes.cut is not None:
        return _of_slices(plan, checkpoint, weights, changes)
    if plan.form == "safetensors":
        from ckptool.migration import safetensors_plan

        plan = safetensors_plan.plan_weights(plan, checkpoint, weights, changes, layout.tensors_at)
        if changes.config_from is not None:
            plan = replace(plan, files=[*safetensors_plan.config_files(changes), *plan.files])
        return plan
    if plan.form == "dcp":
        from ckptool.migration import dcp_plan  # most plans are of files

        return dcp_plan.plan_weights(plan, checkpoint, weights, changes)
    if plan.form == "model":
        plan, changes = replace(plan, location="cpu"), changes._replace(to="cpu")  # it is built there
    return torch_plan.plan_weights(plan, checkpoint, weights, changes, archive_root(plan.target))


def _of_slices(plan: Plan, checkpoint: Checkpoint, weights: Weights, changes: Changes) -> Plan:
    """
    Return the plan of a folder with one file for each rank, which holds its slices; tied names stay tied in each.

    Raises:
        MigrationRefused: No rule matches a tensor, or a tensor cannot be cut by its rule.
    """
    from ckptool.recipes.apply import Move  # few are cut
    from ckptool.recipes.find import settings_of
    from ckptool.recipes.slices import SliceRules, refuse_width, slices

    rules, ranks = SliceRules(changes.join), changes.cut or 1
    names = [rules.file_name(rank, plan.form) for rank in range(ranks)]
    value = rules.numbers({**settings_of(checkpoint), **changes.recipe_arguments}, ranks)
    own: list[dict[str, LazyTensor]] = [{} for _ in names]
    known: dict[object, list[LazyTensor]] = {}
    moves: list[Move] = []
    for name, rule in rules.by_name(weights.tensors).items():
        whole = weights.tensors[name]
        refuse_width(rule, whole, weights.tensors, value)
        place = (*identity(whole.info), rule.dim, rule.shares)
        if place not in known:
            known[place] = slices(rule, whole, ranks, value)
        for tensors, tensor in zip(own, known[place], strict=True):
            tensors[name] = LazyTensor(name, tensor.info)
        if rule.dim is not None:
            sides = ((name, whole.shape),), tuple((name, one.shape) for one in known[place])
            moves.append(Move(f"cut {rule.text.rpartition('=')[2]}", *sides))
    wholes, first = ({name: of[name].shape for name in weights.tensors} for of in (weights.tensors, own[0]))
    selection.refuse_cut_apart(checkpoint, wholes, first, changes)
    parts = []
    for name, tensors in zip(names, own, strict=True):
        taken = weights._replace(tensors=tensors)
        one = replace(plan, target=name, weights=taken)
        one = _of_weights(one, checkpoint, taken, changes._replace(cut=None), KeptLayout())
        parts.append(replace(one, target=plan.target, files=[file._replace(name=name) for file in one.files]))
    return replace(
        parts[0],
        parts=parts,
        files=[file for one in parts for file in one.files],
        expected=[pair for one in parts for pair in one.expected],
        pickles=tuple(pickled for one in parts for pickled in one.pickles),
        moves=(*plan.moves, *moves),
    )


def _prepared(
    plan: Plan, checkpoint: Checkpoint, changes: Changes, merge: Merge | None, recipe: Layout | None
) -> tuple[Plan, Weights]:
    """Return the plan with the weights as they are to be written, and the weights."""
    try:
        chosen = choose(checkpoint, changes.key, changes.weights)
    except WeightsNotFound as error:
        if error.hint is None and not error.message.endswith(EMPTY):
            error.hint = "Keep everything with `form='same'`, in a .pth file."
        elif error.candidates and checkpoint.traits.has_tree and isinstance(error, AmbiguousWeights):
            error.hint = f"{error.hint}. Or keep everything with `form='same'`, in a .pth file."
        raise
    names = _read(checkpoint, plan.names, [chosen]).chosen(changes.weights)
    if not changes.allow_missing:
        refuse_incomplete(checkpoint, chosen, names.filter)
    weights = prepare(checkpoint, chosen, names, drop=changes.drop)
    refuse_broken(weights.tensors.values())
    made: list[ComputedWeight] = []
    if changes.dequantize:
        from ckptool.dense import make_dense  # most plans make nothing dense

        weights, dense = make_dense(checkpoint, weights, changes.dtype, saturate=changes.saturate)
        made += dense
    moves: Sequence[Move] = ()
    notes = plan.notes
    if recipe is not None:
        weights, moves, kept = recipe(checkpoint, weights)
        notes += kept
    if merge is not None:
        weights, merged = merge(checkpoint, weights)
        made += merged
    if plan.casting is not None:
        weights = plan.casting.apply(weights)
    if plan.form == "model":  # it is built from tensors alone
        weights = weights.without(weights.others)
    elif plan.form == "state_dict" and not changes.keep_calls:
        weights = selection.without_refused(checkpoint, weights, drop=changes.drop_unsupported)
    return replace(plan, names=names, weights=weights, made=made, moves=moves, notes=notes), weights


def _as_like(checkpoint: Checkpoint, changes: Changes) -> tuple[Changes, Route | None, tuple[str, ...]]:
    """Return changes with the renames to the names of ``like``, the recipes to apply after them, and a note on both."""
    if changes.like is None:
        return changes, None, ()
    from ckptool.recipes.like import route_to  # few ask for it

    if changes.recipe is not None:
        _refuse("a recipe and another checkpoint both say what the names will be", "Leave out `recipe=`, or `like=`.")
    chosen = choose(checkpoint, changes.key, changes.weights)
    names = _read(checkpoint, _name_changes(changes, Trials(checkpoint.source.cancellation))[0], [chosen])
    weights = prepare(checkpoint, chosen, names, drop=changes.drop)
    way = route_to(checkpoint, weights, changes.like, changes.recipe_arguments)
    notes = (f"as {as_path(os.fspath(changes.like))} is: {way.options}",)
    rename = (*changes.rename, *(change.rule for change in way.changes))
    changes = changes._replace(rename=rename, exclude=(*changes.exclude, *way.exclude))
    if not way.is_renaming:
        return changes, way, notes
    numbers = changes.recipe_arguments if changes.join else {}  # for the slices of ranks
    return changes._replace(like=None, recipe_arguments=numbers), None, notes


def _put_in_place(
    checkpoint: Checkpoint, changes: Changes, merge: Merge
) -> tuple[Callable[[TensorInfo], TensorInfo], Sequence[ComputedWeight]]:
    """Return a function from a tensor to the one that a merge puts in its place or itself, and the computed weights."""
    weights = prepare(checkpoint, choose(checkpoint, changes.key, changes.weights), NameChanges())
    merged, made = merge(checkpoint, weights)
    others = {memory_of(one.info): merged.tensors[name].info for name, one in weights.tensors.items()}
    sources = {id(one): one for one in made}
    for name, one in weights.tensors.items():
        storage = merged.tensors[name].info.storage
        if storage is not None and (source := sources.pop(id(storage.source), None)) is not None:
            source.parts = [*source.parts, one]  # it is not copied, so not read as a whole

    def replaced(info: TensorInfo) -> TensorInfo:
        other = others.get(memory_of(info), info)
        return info if other is info else other._replace(requires_grad=info.requires_grad, kind=info.kind)

    return replaced, made


def _read(checkpoint: Checkpoint, names: NameChanges, state_dicts: Sequence[StateDict]) -> NameChanges:
    """Return changes with their globs resolved: as names in state dicts, or as full paths."""
    there = {} if names.filter.takes_all else selection.names_of(checkpoint, state_dicts)
    return names._replace(filter=names.filter.read(there))


def _picks(changes: Changes) -> bool:
    """Return whether certain weights are requested."""
    picks = changes.key is not None or changes.weights != "auto" or changes.dequantize
    return picks or changes.recipe is not None or changes.like is not None or bool(changes.join)


def form_of(dst: str | None, checkpoint: Checkpoint, changes: Changes, *, merges: bool = False) -> TargetForm:
    """Return the form to write: the requested or default one, as far as the source supports it."""
    picks = _picks(changes) or merges
    form = changes.form or _default_form(dst, checkpoint, changes, picks=picks)
    if form == "same" and checkpoint.traits.is_plain:
        form = "safetensors"
    elif form == "same" and checkpoint.shards and checkpoint.root is None:  # each shard is a tree of its own
        form = "state_dict"
    if merges and form == "same" and changes.dtype is not None:
        _refuse("form 'same' keeps types where something is merged", "Cast what comes out, or leave out `form=`.")
    _refuse_contradictions(form, changes, picks=changes.dequantize if merges else picks)
    return form


def _name_changes(changes: Changes, trials: Trials) -> tuple[NameChanges, frozenset[str]]:
    """Return the changes of names, and the classes of the wrappers that whole models are taken out of."""
    strip: tuple[Rule, ...] = ()
    classes: frozenset[str] = frozenset()
    if changes.strip_wrappers:
        strip, classes = (strip_wrappers,), frozenset(COMPONENTS)
    elif changes.strip_module:
        strip, classes = (strip_module,), frozenset(DATA_PARALLEL.classes)
    rules = (*strip, *selection.noted([rule for rule in changes.rename if callable(rule)], trials))
    return NameChanges(rules, Filter(tuple(changes.include), tuple(changes.exclude))), classes


def _default_form(dst: str | None, checkpoint: Checkpoint, changes: Changes, *, picks: bool) -> TargetForm:
    """Return the form to write where none is named: by the target's suffix, else by the other changes."""
    suffix = "" if dst is None or is_folder(dst) else os.path.splitext(dst)[1].lower()
    if changes.cut is not None:
        from ckptool.recipes.slices import SliceRules

        return SliceRules(changes.join).form
    if changes.max_shard_size is not None:
        return "safetensors"
    if changes.model is not None:
        return "model"
    if suffix == ".safetensors" or (not suffix and checkpoint.traits.is_plain):
        return "safetensors"
    is_made = checkpoint.traits.tree_is_made or checkpoint.unmerged is not None
    if picks or is_made or (suffix and not checkpoint.traits.has_tree):
        return "state_dict"
    return "same"


def _refuse_contradictions(form: TargetForm, changes: Changes, *, picks: bool) -> None:
    """Raise MigrationRefused where one change would make another have no effect."""
    if changes.model is not None and form != "model":
        _refuse(f"form {form!r} builds no model", "Leave out `form=`, or `model=`.")
    if changes.model is not None and changes.to not in (None, "cpu"):
        _refuse("a model that is built is saved from the CPU", "Migrate what comes out once more, with `to=`.")
    if changes.max_shard_size is not None and form not in ("safetensors", "dcp"):
        _refuse(f"form {form!r} is not written as shards", "Leave out `form=`, or `max_shard_size=`.")
    if changes.config_from is not None and (form != "safetensors" or changes.max_shard_size is None):
        _refuse("settings go along into a folder of shards", "Say how large they may be, with `max_shard_size=`.")
    if (changes.set_metadata or changes.drop_metadata) and form != "safetensors":
        _refuse(f"form {form!r} has no metadata beside its tensors", "Write `form='safetensors'`, which has.")
    if changes.expand_tied and form != "safetensors":
        _refuse(f"form {form!r} keeps what is tied under each name", "Leave out `expand_tied=`.")
    if form == "same" and picks:
        _refuse("form 'same' takes everything as it is", "Leave out `form=` to take those weights alone.")
    if (changes.keep_dtype or changes.saturate) and changes.dtype is None:
        _refuse("nothing is cast", "Say to which type with `dtype=`.")
    if changes.model_arguments and changes.model is None:
        _refuse("no model is built", "Name its class with `model='package.module:Class'`.")
    numbers_only = bool(changes.recipe_arguments) and not changes.join and changes.like is None
    if changes.recipe is None and (changes.reverse or numbers_only):
        what = "`reverse=`" if changes.reverse else "`recipe_arguments=`"
        _refuse("no recipe is applied", f"Name it with `recipe=`, or leave out {what}.")


def _refuse_slicing(changes: Changes) -> None:
    """Raise MigrationRefused where weights cannot be cut: no rules, fewer than two ranks, or another form."""
    if changes.cut is None:
        return
    if changes.cut < 2 or not changes.join:
        _refuse(f"slices of {changes.cut} ranks, by {len(changes.join)} rules", "Say `cut=2`, and how with `join=`.")
    if changes.form not in (None, "state_dict", "safetensors") or changes.max_shard_size is not None:
        _refuse("slices are one file for each rank", "Leave out `max_shard_size=`, or say `form='safetensors'`.")


def _refuse(fact: str, hint: str) -> NoReturn:
    raise MigrationRefused(fact, kind="contradiction", hint=hint)
