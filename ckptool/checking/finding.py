"""``Finding``: one notable fact, and the command that does something about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from shlex import join
from typing import Literal, NamedTuple, TypeAlias

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.messages import labelled, show

Severity: TypeAlias = Literal["info", "warning", "error"]
"""A note; something that will get in somebody's way; something that is broken."""


class Finding(NamedTuple):
    """One notable fact. ``code`` is stable, for programs; ``hint`` says what to do, where something can be done."""

    code: str
    severity: Severity
    message: str
    hint: str | None = None
    command: str | None = None
    """The command line that does it, for a POSIX shell."""


class Advice(NamedTuple):
    """The last two fields of a finding."""

    hint: str | None = None
    command: str | None = None


def run(
    checkpoint: Checkpoint,
    verb: str,
    *words: str,
    why: str | None = None,
    member: str | None = None,
    **options: str | bool | Sequence[str],
) -> Advice:
    """
    Return the command line that does something about this checkpoint, and in ``why`` what it is good for.

    ``options`` are those of the verb, each value of a sequence one option; what is false or empty is left out.
    ``words`` follow them as they are. ``member`` names another member of its archive instead.
    """
    path = checkpoint.path or "FILE"
    if path.startswith("-"):
        path = f"./{path}"  # or it would be taken for an option
    inside = member or checkpoint.member
    return Advice(why, join(("ckptool", verb, f"{path}::{inside}" if inside else path, *_spelled(options), *words)))


def _spelled(options: Mapping[str, str | bool | Sequence[str]]) -> Iterator[str]:
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            yield flag
        elif value:
            for one in (value,) if isinstance(value, str) else value:
                yield from (flag, one)


def state_dict_command(checkpoint: Checkpoint, why: str | None = None) -> Advice | None:
    """Return the command line that takes the weights out of a checkpoint, as far as it is known which they are."""
    models = [one for one in checkpoint.state_dicts if one.role != "optimizer"]
    if checkpoint.weights is None and not models:
        return None
    chosen = checkpoint.weights or models[0]
    key = "" if checkpoint.weights is chosen else chosen.key
    return run(checkpoint, "migrate", why=why, form="state_dict", key=key)


def finding_lines(finding: Finding) -> Iterator[str]:
    """Yield the line of a finding, and below it what to do, and the command that does it."""
    yield labelled(finding.severity, f"{finding.code} {show(finding.message)}")
    if finding.hint:
        yield labelled("", show(finding.hint))
    if finding.command:
        yield labelled("", f"Run: {show(finding.command)}")
