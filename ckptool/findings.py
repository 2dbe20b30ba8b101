"""
What is notable about a checkpoint, why it matters, and what mends it.

Each check is one function that looks at a ``Checkpoint`` and yields ``Finding``s; ``CHECKS`` is the list of them.
Nothing is read, run or imported. A finding is true, or it is not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeAlias

from ckptool.checkpoint import Checkpoint
from ckptool.summary import WRAPPER_COMPONENTS, Summary, summarise

Severity: TypeAlias = Literal["info", "warning"]


class Finding(NamedTuple):
    """One notable fact. ``code`` is stable, for programs; ``hint`` says what to do, where something can be done."""

    code: str
    severity: Severity
    message: str
    hint: str | None = None


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
            "warning",
            f"{checkpoint.damage}: names and shapes may not be those that were saved",
            "Download the file again.",
        )


def other_members(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK102: the archive holds more checkpoints than the one that was opened."""
    found = [member for member in checkpoint.members if member.name != checkpoint.member]
    others = [member.name for member in sorted(found, key=lambda member: -member.tensors)]
    if checkpoint.form == "archive":
        yield Finding("CK102", "info", f"an archive of {len(others):,} checkpoints", f"Open one with FILE::{others[0]}")
    elif others:
        yield Finding("CK102", "info", f"the archive also holds {_some(others)}", f"Open it with FILE::{others[0]}")


def foreign_names(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK201: unpickling would import something that is not part of torch, numpy or Python's containers."""
    names = [str(found) for found in checkpoint.globals if not str(found).startswith(_FAMILIAR)]
    if names:
        yield Finding(
            "CK201",
            "info",
            f"unpickling would import {_some(names)} (not imported here)",
            "List every name with --globals.",
        )


def wrapper_prefixes(_: Checkpoint, summary: Summary) -> Iterator[Finding]:
    """CK301: the names carry components that a training wrapper put in front."""
    wrapped = [prefix for prefix in summary.prefixes if prefix[:-1] in WRAPPER_COMPONENTS]
    if wrapped:
        who = ", then ".join(WRAPPER_COMPONENTS[prefix[:-1]] for prefix in wrapped)
        yield Finding(
            "CK301",
            "info",
            f"every name of the weights begins with {''.join(wrapped)!r}, which {who} added",
            "A model without that wrapper expects the names without it.",
        )


def several_weights(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK302: more than one state dict could be the model's weights."""
    candidates = [found.key or "(root)" for found in checkpoint.state_dicts if found.role == "model"]
    if len(candidates) > 1 and checkpoint.weights is None:
        yield Finding("CK302", "info", f"several state dicts could be the weights: {_some(candidates)}")


def unused_storage(checkpoint: Checkpoint, summary: Summary) -> Iterator[Finding]:
    """CK303: tensors are small views of storages that were saved whole."""
    covered = sum(tensor.info.total_nbytes for tensor in checkpoint.tensors.values())
    if summary.nbytes > 2 * covered and summary.nbytes - covered > 1 << 20:
        yield Finding(
            "CK303",
            "info",
            f"tensors cover {covered:,} of the {summary.nbytes:,} bytes of storage that were saved with them",
            "Clone views before saving them.",
        )


def outside_state_dict(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK401: a whole model holds tensors that its state_dict() would not give."""
    if checkpoint.attributes:
        names = list(checkpoint.attributes)
        yield Finding(
            "CK401",
            "info",
            f"outside the state_dict (constants, plain attributes, non-persistent buffers): {_some(names)}",
            "List them with --all.",
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
            )
        if walk.own_savers:
            yield Finding(
                "CK403",
                "warning",
                f"not listed: what {_some(walk.own_savers)}{where} would add to a state_dict in code",
            )
        if walk.foreign_classes:
            yield Finding(
                "CK404",
                "info",
                f"names assume no extra state and no state_dict() override in {_some(walk.foreign_classes)}{where}",
            )


def bound_method(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK405: a method was saved, and with it the whole model."""
    if checkpoint.bound_method:
        yield Finding(
            "CK405",
            "warning",
            "a bound method was saved, and the whole model with it: state_dict is missing its parentheses",
            "Save model.state_dict() instead.",
        )


def unreadable(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK406: parameters or buffers that only code can make into tensors."""
    if checkpoint.unreadable:
        names = [f"{name} ({cls})" for name, cls in checkpoint.unreadable]
        yield Finding("CK406", "warning", f"not listed, for only their classes can read them: {_some(names)}")


def mixed_devices(_: Checkpoint, summary: Summary) -> Iterator[Finding]:
    """CK501: tensors were saved from more than one accelerator."""
    devices = [tag for tag in summary.devices if tag not in ("cpu", "meta")]
    if len(devices) > 1:
        yield Finding("CK501", "warning", f"tensors were saved on {len(devices)} devices: {_some(devices)}")


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


def _some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


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
