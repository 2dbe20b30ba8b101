"""``Finding``: one notable fact, and the command that does something about it."""

from __future__ import annotations

from shlex import join
from typing import Literal, NamedTuple, TypeAlias

from ckptool.checkpoints.checkpoint import Checkpoint

Severity: TypeAlias = Literal["info", "warning", "error"]
"""A note; something that will get in somebody's way; something that is broken."""


class Finding(NamedTuple):
    """
    One notable fact. ``code`` is stable, for programs; ``hint`` says what to do, where something can be done.

    What stands behind ``Run:`` in a hint is a command line, for a POSIX shell, that does it.
    """

    code: str
    severity: Severity
    message: str
    hint: str | None = None


def run(checkpoint: Checkpoint, verb: str, *options: str, why: str = "", member: str | None = None) -> str:
    """
    Return a hint: the command line that does something about this checkpoint, and before it why one would.

    ``member`` names another member of its archive instead.
    """
    path = checkpoint.path or "FILE"
    if path.startswith("-"):
        path = f"./{path}"  # or it would be taken for an option
    inside = member or checkpoint.member
    return f"{why} Run: {join(('ckptool', verb, f'{path}::{inside}' if inside else path, *options))}".lstrip()


def state_dict_command(checkpoint: Checkpoint, why: str = "") -> str | None:
    """Return the hint that takes the weights out of a checkpoint, as far as it is known which they are."""
    models = [one for one in checkpoint.state_dicts if one.role != "optimizer"]
    if checkpoint.weights is None and not models:
        return None
    chosen = checkpoint.weights or models[0]
    key = ("--key", chosen.key) if checkpoint.weights is None and chosen.key else ()
    return run(checkpoint, "migrate", "--form", "state_dict", *key, why=why)
