"""Text that several verbs print for people: labelled lines, lists cut to their first items, errors, findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptool.checking.finding import Finding
from ckptool.errors import CkptoolError
from ckptool.messages import show

FORMS = {
    "state_dict": "state_dict",
    "checkpoint": "checkpoint: weights and more",
    "model": "model",
    "tensors": "tensors, not named by a model",
    "data": "no tensors",
    "archive": "archive of several checkpoints",
}
"""How each form is called in text."""

LISTED = 8
"""Items of a list that are shown."""
_LABEL = 13


def labelled(label: str, text: str) -> str:
    """Return one line of a head: a fact, and what it is about."""
    return f"  {label:<{_LABEL}}{text}"


def listed(label: str, items: Sequence[str], most: int | None = LISTED) -> Iterator[str]:
    """Yield a line for each of the first ``most`` items, and how many more there are."""
    for index, item in enumerate(items[:most]):
        yield labelled(label if index == 0 else "", item)
    if most is not None and len(items) > most:
        yield labelled("", f"and {len(items) - most:,} more")


def grouped(names: Sequence[str], noun: str, depth: int = 1) -> list[str]:
    """Return names, or where they are many, the first ``depth`` components of each, and how many begin with these."""
    if len(names) <= LISTED:
        return [show(name) for name in names]
    heads: dict[str, int] = {}
    for name in names:
        head = head_of(name, depth)
        heads[head] = heads.get(head, 0) + 1
    return [show(head) if count == 1 else f"{show(head)}: {count:,} {noun}" for head, count in heads.items()]


def head_of(name: str, depth: int) -> str:
    """Return the first components of a name."""
    return ".".join(name.split(".", depth)[:depth])


def counts(found: Mapping[str, int]) -> str:
    """Return what there is, and how many of each."""
    return ", ".join(f"{show(name)} ({count:,})" for name, count in found.items())


def error_text(error: CkptoolError) -> str:
    """Return the one to three lines that a person sees of an error: the fact, what to do about it, what to run."""
    hint = f"\nHint: {show(error.hint)}" if error.hint else ""
    command = f"\nRun: {show(error.command)}" if error.command else ""
    return f"Error: {show(str(error))}{hint}{command}"


def finding_lines(finding: Finding) -> Iterator[str]:
    """Yield the line of a finding, and below it what to do, and the command that does it."""
    yield labelled(finding.severity, f"{finding.code} {show(finding.message)}")
    if finding.hint:
        yield labelled("", show(finding.hint))
    if finding.command:
        yield labelled("", f"Run: {show(finding.command)}")
