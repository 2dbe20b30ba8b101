"""What is notable about the folder that a checkpoint lies in: files of other saves, and files that belong together."""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.checking.finding import Finding, command_line
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import Summary
from ckptool.messages import counted, some


def one_of_a_set(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK160: the file is one of several that are one checkpoint."""
    part = checkpoint.part_of
    if part is not None:
        yield Finding(
            "CK160",
            "warning",
            f"{part.what}: what is in the others is not here",
            "Give what they are together:",
            command_line(part.path, "inspect"),
        )


def once_more(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK161: the folder holds the same weights once more."""
    names = [f"{one.name} ({one.about})" for one in checkpoint.beside if one.role == "duplicate"]
    if names:
        yield Finding("CK161", "info", f"the same weights are there once more, and were not opened: {some(names)}")


def leftovers(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK162: shards that no index names."""
    names = [one.name for one in checkpoint.beside if one.role == "leftover"]
    if names:
        yield Finding(
            "CK162",
            "warning",
            f"{counted(len(names), 'shard')} that the index does not name: {some(names)}",
            "They may be left from another save into the same folder: remove them, or get the index again.",
        )


def unfinished(checkpoint: Checkpoint, _: Summary) -> Iterator[Finding]:
    """CK163: downloads that were not finished."""
    names = [one.name for one in checkpoint.beside if one.role == "incomplete"]
    if names:
        what = (
            f"{counted(len(names), 'download')} that {'was' if len(names) == 1 else 'were'} not finished: {some(names)}"
        )
        yield Finding("CK163", "warning", what, "Download again what is missing; what was opened is whole without it.")
