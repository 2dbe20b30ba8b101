"""
What is notable about a checkpoint, why it matters, and what mends it.

Each check is one function that looks at a ``Checkpoint`` and yields ``Finding``s; ``CHECKS`` is the list of them.
Nothing is read, run or imported. There are no heuristics: a finding is what the file proves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from ckptool.checking import allowed
from ckptool.checking.finding import Finding, run, state_dict_command
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import Summary, summarise
from ckptool.messages import counted, some
from ckptool.names.wrappers import ADDED_BY
from ckptool.tensors.tensor import identity


def examine(checkpoint: Checkpoint, summary: Summary | None = None) -> tuple[Finding, ...]:
    """Return everything notable about a checkpoint, in the order of ``CHECKS``."""
    known = summary or summarise(checkpoint)
    return tuple(finding for check in CHECKS for finding in check(checkpoint, known))


def container_notes(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK101: oddities of the archive or stream in which nothing can be misread."""
    for note in checkpoint.notes:
        yield Finding("CK101", "info", note)


def damaged_index(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK103: the index does not match its checksum."""
    if checkpoint.damage:
        yield Finding(
            "CK103",
            "error",
            f"{checkpoint.damage}: names and shapes may not be those that were saved",
            "Download the file again.",
        )


def other_members(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK102: the archive holds more checkpoints than the one that was opened."""
    found = [member for member in checkpoint.members if member.name != checkpoint.member]
    others = [member.name for member in sorted(found, key=lambda member: -member.tensors)]
    if checkpoint.form == "archive":
        yield Finding(
            "CK102", "info", f"an archive of {len(others):,} checkpoints", *run(checkpoint, "inspect", member=others[0])
        )
    elif others:
        yield Finding(
            "CK102", "info", f"the archive also holds {some(others)}", *run(checkpoint, "inspect", member=others[0])
        )


def unopened_members(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK114: a member of the archive is a checkpoint, by its name or its content, and cannot be opened."""
    for name, why in checkpoint.unopened:
        advice = run(checkpoint, "check", member=name, why="Nothing is known of what it holds.")
        yield Finding("CK114", "error", f"member {name!r} cannot be opened: {why}", *advice)


def announced_size(checkpoint: Checkpoint, summary: Summary) -> Iterator[Finding]:
    """CK107: an index of shards announces another size than its tensors have."""
    said = checkpoint.announced_nbytes
    if said is None:
        return
    # Writers count what is tied under each name, or once; or the memory that is saved with it.
    infos = [tensor.info for tensor in checkpoint.tensors.values()]
    named = sum(info.total_nbytes for info in infos)
    distinct = sum({identity(info): info.total_nbytes for info in infos}.values())
    if said not in (named, distinct, summary.nbytes):
        yield Finding(
            "CK107",
            "warning",
            f"the index announces {said:,} bytes of tensors (total_size), the shards hold {named:,}",
            "Compare the index and the shards with those that were published: one of them may belong to another model.",
        )


def clashing_names(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK109: two tensors have one dotted name."""
    if checkpoint.clashes:
        head = f"{weights.key}." if (weights := checkpoint.weights) and weights.key else ""
        in_weights = any(name.removeprefix(head) in (weights or ()) for name in checkpoint.clashes)
        yield Finding(
            "CK109",
            "warning" if in_weights else "info",
            f"{counted(len(checkpoint.clashes), 'name')} with a number added, as another tensor has the name without "
            f"it: {some(list(checkpoint.clashes))}",
        )


def foreign_names(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK201: unpickling would import something else than what makes containers, numbers, arrays and torch's objects."""
    own = checkpoint.traits.program is not None
    names = [
        str(one)
        for one in checkpoint.globals
        if not allowed.is_usual(one.module, one.name) and not (own and allowed.is_torchscripts(one.module, one.name))
    ]
    if names:
        yield Finding(
            "CK201",
            "info",
            f"unpickling would import {some(names)} (not imported here)",
            *run(checkpoint, "inspect", globals=True),
        )


def wrapper_prefixes(checkpoint: Checkpoint, summary: Summary) -> Iterator[Finding]:
    """CK301: the names carry components that a training wrapper put in front."""
    wrapped = [prefix for prefix in summary.prefixes if prefix[:-1] in ADDED_BY]
    if wrapped:
        plain = wrapped[0] == "module." and len(set(wrapped)) == 1
        who = ", then ".join(ADDED_BY[prefix[:-1]] for prefix in wrapped)
        yield Finding(
            "CK301",
            "info",
            f"every name of the weights begins with {''.join(wrapped)!r}, which {who} added",
            *run(
                checkpoint,
                "migrate",
                why="A model without that wrapper expects the names without it.",
                strip_module=plain,
                strip_wrappers=not plain,
            ),
        )


def several_weights(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK302: more than one state dict could be the model's weights."""
    candidates = [found.key or "(root)" for found in checkpoint.state_dicts if found.role == "model"]
    if len(candidates) > 1 and checkpoint.weights is None:
        yield Finding(
            "CK302",
            "info",
            f"several state dicts could be the weights: {some(candidates)}",
            *(state_dict_command(checkpoint, "Pick one with `key=`.") or ()),
        )


def unused_storage(checkpoint: Checkpoint, summary: Summary) -> Iterator[Finding]:
    """CK303: tensors are small views of storages that were saved whole."""
    covered = sum(tensor.info.total_nbytes for tensor in checkpoint.tensors.values())
    if summary.nbytes > 2 * covered and summary.nbytes - covered > 1 << 20:
        yield Finding(
            "CK303",
            "info",
            f"tensors cover {covered:,} of the {summary.nbytes:,} bytes of storage that were saved with them",
            *run(checkpoint, "migrate", why="Clone views before saving them.", form="safetensors"),
        )


def outside_state_dict(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK401: a whole model holds tensors that its state_dict() would not give."""
    if checkpoint.attributes:
        names = list(checkpoint.attributes)
        yield Finding(
            "CK401",
            "info",
            f"outside the state_dict (constants, plain attributes, non-persistent buffers): {some(names)}",
            *run(checkpoint, "inspect", all=True),
        )


def model_code(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK402 to CK404: what a state_dict() would hold depends on code, which is not in the file."""
    for path, walk in checkpoint.walks:
        where = f" under {path!r}" if path else ""
        for cls, hook in walk.hooks:
            yield Finding(
                "CK402",
                "warning",
                f"a state-dict hook may add or rename keys: {hook} of {cls}{where}",
                _ASK_THE_CLASS,
            )
        if walk.own_savers:
            yield Finding(
                "CK403",
                "warning",
                f"not listed: what {some(walk.own_savers)}{where} would add to a state_dict in code",
                _ASK_THE_CLASS,
            )
        if walk.foreign_classes:
            yield Finding(
                "CK404",
                "info",
                f"names are right if these have no extra state and no state_dict() of their own: "
                f"{some(walk.foreign_classes)}{where}",
            )


def bound_method(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK405: a method was saved, and with it the whole model."""
    if checkpoint.bound_method:
        yield Finding(
            "CK405",
            "warning",
            "a bound method was saved, and the whole model with it: state_dict is missing its parentheses",
            *(state_dict_command(checkpoint, "Save model.state_dict() instead.") or ()),
        )


def unreadable(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK406: parameters or buffers that only code can make into tensors."""
    if checkpoint.unreadable:
        names = [f"{name} ({cls})" for name, cls in checkpoint.unreadable]
        yield Finding(
            "CK406",
            "warning",
            f"not listed, for only their classes can read them: {some(names)}",
            "Load it once where those classes are installed, and save model.state_dict().",
        )


def mixed_devices(checkpoint: Checkpoint, summary: Summary) -> Iterator[Finding]:
    """CK501: tensors were saved from more than one accelerator."""
    devices = [tag for tag in summary.devices if tag not in ("cpu", "meta")]
    if len(devices) > 1:
        yield Finding(
            "CK501",
            "warning",
            f"tensors were saved on {len(devices)} devices: {some(devices)}",
            *run(checkpoint, "migrate", to="cpu"),
        )


def not_plain(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK502: some tensors are no plain strided memory."""
    layouts: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        what = tensor.info.subclass or tensor.info.layout
        if what != "strided":
            layouts[what] = layouts.get(what, 0) + 1
    if layouts:
        listed = ", ".join(f"{count:,} {what}" for what, count in layouts.items())
        yield Finding("CK502", "info", f"tensors that are not plain strided memory: {listed}")


def calls(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """CK205: unpickling would call what reaches the system, as far as the pickles say that formats read."""
    members = [checkpoint]
    for one in members:
        members += one.inside.values()
    if all(allowed.is_usual(one.module, one.name) for member in members for one in member.globals):
        return ()
    from ckptool.checking import safety, would_run  # most files have no such names

    return tuple(would_run.system_calls(safety.quick(checkpoint), state_dict_command(checkpoint)))


def foreign(checkpoint: Checkpoint) -> list[str]:
    """Return the names that unpickling would import from elsewhere than torch, numpy and Python's containers."""
    return [str(found) for found in checkpoint.globals if not str(found).startswith(_FAMILIAR)]


_ASK_THE_CLASS = "Compare the names with those of the class: `model='package.module:Class'`."

_FAMILIAR = (
    "torch.",
    "collections.",
    "numpy.",
    "builtins.",
    "__builtin__.",
    "_codecs.encode",
    "copyreg.",
    "copy_reg.",
    "__torch__.",
)

Check: TypeAlias = Callable[[Checkpoint, Summary], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    damaged_index,
    container_notes,
    other_members,
    unopened_members,
    announced_size,
    clashing_names,
    bound_method,
    wrapper_prefixes,
    several_weights,
    mixed_devices,
    not_plain,
    unused_storage,
    outside_state_dict,
    model_code,
    unreadable,
    foreign_names,
)
