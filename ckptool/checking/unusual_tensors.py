"""What is notable about tensors: names given twice, parts of distributed ones, no plain memory, no state dict."""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.checking.finding import Finding, run
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import Summary
from ckptool.messages import counted, some

_DISTRIBUTED = ".DTensor"


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


def parts_of_ranks(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK407: tensors are distributed, and the file holds a part of each."""
    subclassed = [tensor for tensor in checkpoint.tensors.values() if tensor.info.subclass]
    shown = [one for one in subclassed if one.info.parts and (one.info.subclass or "").endswith(_DISTRIBUTED)]
    here = {tensor.name: sum(part.numel for _, part in tensor.info.parts) for tensor in shown}
    cut = [tensor for tensor in shown if here[tensor.name] < tensor.numel]
    if cut:
        yield Finding(
            "CK407",
            "warning",
            f"distributed tensors of which the file holds the part of one rank, {sum(here[one.name] for one in cut):,} "
            f"of {sum(one.numel for one in cut):,} elements: {some([one.name for one in cut])}",
            "Gather them before saving: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of "
            "torch.distributed.checkpoint.state_dict.",
        )


def not_plain(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK502: some tensors are no plain strided memory."""
    layouts: dict[str, int] = {}
    infos = [tensor.info for tensor in checkpoint.tensors.values()]
    for info in [one for one in infos if one.layout != "strided" or one.subclass]:
        what = info.subclass or info.layout
        if not info.is_array:
            layouts[what] = layouts.get(what, 0) + 1
    if layouts:
        listed = ", ".join(f"{count:,} {what}" for what, count in layouts.items())
        yield Finding("CK502", "info", f"tensors that are not plain strided memory: {listed}")


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
