"""What is notable about a checkpoint that is several files, as far as the format saw it."""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.checking.finding import CODES, Finding
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import Summary
from ckptool.messages import counted, some


def remarks(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """What the reader of the format saw; it knows the codes."""
    for code, what, hint in checkpoint.remarks:
        yield Finding(code, CODES[code].severity or "warning", what, hint)


def absent_names(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK152: names of the model have no values."""
    if checkpoint.absent:
        what = f"{counted(len(checkpoint.absent), 'name')} of the model without a value in any file"
        yield Finding("CK152", "warning", f"{what}: {some(checkpoint.absent)}", "They are not among the weights.")


def parts_apart(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK155: the state dicts are parts of one model that cannot be put together."""
    if checkpoint.unmerged is not None:
        yield Finding("CK155", "warning", checkpoint.unmerged, "Load it where it was written, and save it whole.")
