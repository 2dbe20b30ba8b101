"""The head of a report on a checkpoint: facts about what it is, findings, and how to load it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckptool.checking.finding import Finding, finding_facts, migration, state_dict
from ckptool.checking.structure import calls, examine
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict, walk_of
from ckptool.checkpoints.families import Adapter, Family, adapter_of, family_of
from ckptool.checkpoints.summary import Summary
from ckptool.formats.filenames import ADAPTER
from ckptool.messages import FORMS, counted, counts, rough, show, show_nbytes, some
from ckptool.names.matching import wrappers_off
from ckptool.names.wrappers import COMPONENTS, prefix_facts
from ckptool.pickles.nodes import Call, Inert, class_name
from ckptool.pickles.values import describe, kind_of, scalar_of
from ckptool.sections import Fact, Section, cut_middle
from ckptool.sources.paths import command_line

if TYPE_CHECKING:
    from ckptool.checkpoints.parsed import Beside
    from ckptool.checkpoints.training import TrainingState
    from ckptool.checkpoints.weights import Known

SCHEMA = "ckptool.inspect/2"
_BESIDE_WEIGHTS = ("checkpoint", "training", "tensors", "data")
_BESIDE_SHOWN = 16
_WORD = 32


_ROLES = {
    "rng": "states of random number generators",
    "arguments": "arguments of the training",
    "scaler": "gradient scaler",
    "trainer": "state of the trainer",
    "data": "position in the data",
    "adapter": "adapter",
    "duplicate": "going by its name, a second form",
    "variant": "another variant",
    "leftover": "shard of another save",
    "incomplete": "incomplete",
}
"""Texts for the roles of training states, and of files beside a checkpoint."""


class Room(NamedTuple):
    """How many items of a list, characters of the metadata and characters of a name are shown in a line."""

    extras: int = 8
    metadata: int = 200
    path: int = 48


SHORT, WHOLE = Room(), Room(*[sys.maxsize] * 3)


def findings_of(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return what is notable about a checkpoint, as far as its index shows that."""
    return (*calls(checkpoint), *examine(checkpoint))


def head_sections(
    checkpoint: Checkpoint,
    summary: Summary,
    findings: Sequence[Finding],
    digest: Known | None = None,
    *,
    whole: bool = False,
) -> Iterator[Section]:
    """Yield the path, facts, findings and commands for a file; ``whole`` cuts none, and leaves nothing out."""
    yield show(f"{checkpoint.path}::{checkpoint.member}" if checkpoint.member else checkpoint.path)
    for fact in head_facts(checkpoint, summary, WHOLE if whole else SHORT):
        yield fact._replace(most=None) if whole else fact
    if digest is not None:
        why = "" if digest.error is None else digest.error.message
        yield Fact("digest", [digest.digest or f"none: {show(why)}"])
    to_load = list(_to_load(checkpoint))
    # How to get the weights is shown once: at the end, unless the command of a finding does that, too.
    others = [one._replace(hint=None, command=None) if one.code == "CK404" and to_load else one for one in findings]
    yield from finding_facts(others)
    has_command = any((one.command or "").startswith("ckptool migrate") for one in others)
    yield Fact("to load", [show(line) for line in to_load if not (has_command and line.startswith("Run:"))])


def _to_load(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield how to load the weights if that takes more than plain ``torch.load``, and how to write them alone."""
    where = f"{checkpoint.path}::{checkpoint.member}" if checkpoint.member else checkpoint.path
    weights, family = checkpoint.weights, family_in(checkpoint)
    if family is not None and family.name in ("LoRA", "DoRA"):
        yield f"into its base: {command_line('BASE', 'merge', lora=where, output='merged.safetensors')}"
        return
    walk = walk_of(checkpoint, weights) if weights is not None else None
    is_elsewhere = any(one.info.location not in ("cpu", "meta") for one in weights.values()) if weights else False
    is_plain = checkpoint.traits.program is None and not checkpoint.is_folder
    holds_more = checkpoint.form in ("checkpoint", "training") or is_elsewhere or not is_plain
    if weights is None or (walk is None and not holds_more):
        return
    command = state_dict(checkpoint).command
    if command is None:
        return
    model = "model" if walk is None else _model_of(dict(walk.modules))
    yield f"in Python: ckptool.load_into({model}, {where!r})"
    if model != "model":  # its code may be lost
        yield f"code of {model.removesuffix('()')}, without forward(): {command_line(where, 'inspect', skeleton=True)}"
    yield f"Run: {command}"
    averages = [one for one in checkpoint.state_dicts if one.role == "ema" and one is not weights and one.key]
    if len(averages) == 1 and weights.role == "model":
        look = migration(checkpoint, form="state_dict", key=averages[0].key, renames=wrappers_off(averages[0]))
        yield f"the averages: {look.command}"


def _model_of(classes: Mapping[str, str]) -> str:
    """Return the Python call that makes a model, without wrappers; ``classes`` are those of its modules, by path."""
    path = ""
    while (inside := f"{path}.{COMPONENTS.get(classes.get(path, ''), '')}".strip(".")) in classes and inside != path:
        path = inside
    own = classes.get(path, "torch.")
    return "model" if own.startswith("torch.") else f"{own.rpartition('.')[2]}()"


def head_facts(checkpoint: Checkpoint, summary: Summary, room: Room = SHORT) -> Iterator[Fact]:
    """Yield the facts about a file; those without items print nothing."""
    in_shards = f" in {counted(len(checkpoint.shards), 'shard')}" if checkpoint.shards else ""
    yield Fact("format", [f"{checkpoint.format}{in_shards}, {show_nbytes(checkpoint.file_nbytes)}"])
    family = family_in(checkpoint)
    yield Fact("form", [f"{_form(checkpoint, room)}{f', {show(str(family))}' if family is not None else ''}"])
    if summary.tensors or not checkpoint.members:
        tied = f", {summary.tied:,} of them tied" if summary.tied else ""
        numel, own = summary.numel, summary.parameters
        elements = f"{counted(numel, 'parameter' if own == numel else 'element')}{rough(numel)}"
        if own is not None and own != numel:
            elements = f"{counted(own, 'parameter')}{rough(own)} in the weights, {elements} in all"
        yield Fact("tensors", [f"{summary.tensors:,}{tied}; {elements}, {show_nbytes(summary.nbytes)}"])
    if summary.tensors:
        yield Fact("devices", [counts(summary.devices)])
        yield Fact("dtypes", [counts(summary.dtypes)])
    for label, prefix in prefix_facts(summary.prefixes):
        yield Fact(label, [prefix])
    adapter = adapter_in(checkpoint)
    if adapter is not None:
        kind = family.name if family is not None and family.name.endswith("oRA") else "LoRA"
        ranks = " and ".join(map(str, adapter.ranks))
        if len(adapter.ranks) > 2:
            ranks = f"{adapter.ranks[0]} to {adapter.ranks[-1]}"
        targets = some([show(cut_middle(target, room.path)) for target in adapter.targets], room.extras)
        base = f"; for {show(cut_middle(adapter.base, room.path))}" if adapter.base else ""
        where = f"on {targets}, in {counted(adapter.modules, 'module')}{base}"
        yield Fact("adapter", [f"{kind} of rank {ranks} {where}"])
    if len(checkpoint.state_dicts) > 1 or checkpoint.form in ("checkpoint", "training"):
        dicts = [_state_dict(found, checkpoint.weights, room) for found in checkpoint.state_dicts]
        yield Fact("state dicts", dicts, None)
    if checkpoint.form in _BESIDE_WEIGHTS:
        from ckptool.checkpoints.training import training_states  # other files hold nothing of a training

        yield Fact("training", [_training(found, room) for found in training_states(checkpoint)])
    shards = sorted(checkpoint.shards, key=lambda one: one.name)
    yield Fact(
        "shards",
        [f"{show(one.name)}: {counted(one.tensors, one.holds)}, {show_nbytes(one.nbytes)}" for one in shards],
    )
    members = (
        f"{show(found.name)}: {found.format}, {found.form}, {counted(found.tensors, 'tensor')}, "
        f"{show_nbytes(found.nbytes)}"
        for found in checkpoint.members
    )
    yield Fact("members", list(members), None)
    yield Fact("beside", [_beside(one, checkpoint.path) for one in checkpoint.beside], _BESIDE_SHOWN)
    if checkpoint.metadata:
        # What is cut here is cut again below: only the second cut is seen.
        text = ", ".join(f"{key}={value[: room.metadata + 1]}" for key, value in checkpoint.metadata.items())
        yield Fact("metadata", [show(text if len(text) <= room.metadata else f"{text[: room.metadata]}…")])
    extras = [extra for extra in checkpoint.extras if extra[0].rpartition(".")[2] != "_metadata"]
    if extras:
        yield Fact("also holds", [_extras(extras, room)])


def family_in(checkpoint: Checkpoint) -> Family | None:
    """Return the known family of a file, judged by its tensors, or by a configuration beside it."""

    def settings() -> Mapping[str, object]:
        from ckptool.formats.json_beside import object_beside  # few files have names of PEFT

        return object_beside(checkpoint.path, checkpoint.source, ADAPTER)

    return family_of(checkpoint, settings)


def adapter_in(checkpoint: Checkpoint) -> Adapter | None:
    """Return the adapter that a file holds, with its base model if the file, or a configuration beside it, names it."""
    found = adapter_of(checkpoint)
    if found is None or found.base is not None:
        return found
    from ckptool.formats.json_beside import base_model

    return found._replace(base=base_model(checkpoint.path, checkpoint.source))


def extra_lines(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a line for each value that is not a tensor: its path, its type, what it is."""
    for path, node in checkpoint.extras:
        yield show(f"{path or '(root)'}: {kind_of(node)} = {describe(node)}")


def _form(checkpoint: Checkpoint, room: Room) -> str:
    if checkpoint.form == "data" and isinstance(checkpoint.root, Call) and not checkpoint.root.pairs:
        return f"{FORMS['data']}: {show(cut_middle(class_name(checkpoint.root), room.path))}"
    if checkpoint.form != "model":
        return FORMS[checkpoint.form]
    cls = checkpoint.state_dicts[0].class_name if checkpoint.state_dicts else None
    return f"model: {show(cls)}" if cls else "model"


def _extras(extras: Sequence[tuple[str, Inert]], room: Room) -> str:
    """Return the paths of values that are no tensors, the outermost first, with those that are numbers and words."""
    outermost = sorted(extras, key=lambda extra: extra[0].count("."))
    shown = []
    for path, node in outermost[: room.extras]:
        value, text = scalar_of(node), cut_middle(path, room.path) if path else describe(node)
        if path and value is not None and not (isinstance(value, str) and len(value) > _WORD):
            text += f"={value:.6g}" if isinstance(value, float) else f"={value}"
        shown.append(text)
    return show(some([*shown, *(path for path, _ in outermost[room.extras :])], room.extras))


def _beside(found: Beside, path: str) -> str:
    """Return one line about a file or folder beside the checkpoint, or in it, if it is a folder."""
    folder, name = os.path.split(found.path.rstrip(f"/{os.sep}"))
    shown = name if folder in (path, os.path.dirname(path)) else found.path
    facts = [_ROLES.get(found.role, found.role)]
    facts += [show(found.about)] if found.about else []
    facts += [show_nbytes(found.nbytes)] if found.nbytes is not None else []
    return f"{show(shown)}: {', '.join(facts)}"


def _training(found: TrainingState, room: Room) -> str:
    """Return one line about an optimizer, a scheduler, a scaler or states of random number generators."""
    name = show(cut_middle(found.key, room.path)) or "(root)"
    if found.role in ("rng", "scaler"):
        return f"{name}: {_ROLES[found.role]}"
    kind = show(cut_middle(found.kind, room.path)) if found.kind else f"{found.role} of an unknown class"
    said = kind if found.class_name or not found.kind else f"{kind} by its settings"
    facts = []
    if found.role == "optimizer":
        parameters = sum(group.parameters or 0 for group in found.groups)
        groups = f" in {len(found.groups):,} groups" if len(found.groups) > 1 else ""
        facts.append(f"{counted(parameters, 'parameter tensor')}{groups}")
    rates = dict.fromkeys(f"{group.lr:.6g}" for group in found.groups if group.lr is not None)
    if rates:
        facts.append(f"lr {some(list(rates))}")
    if found.steps is not None:
        facts.append(counted(found.steps, "step"))
    return f"{name}: {', '.join([said, *facts])}"


def _state_dict(found: StateDict, weights: StateDict | None, room: Room) -> str:
    name = show(cut_middle(found.key, room.path)) or "(root)"
    cls = f", {show(found.class_name)}" if found.class_name else ""
    chosen = "  <- the weights" if found is weights else ""
    numel = counted(found.numel, "parameter" if found.role in ("model", "ema") else "element")
    return f"{name}: {found.role}{cls}, {counted(len(found), 'tensor')}, {numel}{chosen}"
