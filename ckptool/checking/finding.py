"""``Finding``: one notable fact, and the command that does something about it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.messages import labelled, show
from ckptool.sources.naming import shown_path

Severity: TypeAlias = Literal["info", "warning", "error"]
"""A note; something that will get in somebody's way; something that is broken."""
SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "info")
"""The severest first."""


MOST_FINDINGS: Final = 16
"""Of one kind in a report; the last one counts the others."""


class Finding(NamedTuple):
    """One notable fact. ``code`` is stable, for programs; ``hint`` says what to do, where something can be done."""

    code: str
    severity: Severity
    message: str
    hint: str | None = None
    command: str | None = None
    """The command line that does it, for a POSIX shell."""
    path: str | None = None
    """The file that it is about, if that is another file of the folder than the one that was opened."""


def place(record: str, offset: int, nested_at: int | None = None) -> str:
    """Return where in a file something stands, for people to read: the folder that a zip has round it is left out."""
    inside = "" if nested_at is None else f" of a pickle inside, at {nested_at:,}"
    member, mark, record = record.rpartition("::")
    record = f"{member}{mark}{record.rpartition('/')[2]}"
    return f"{record + ', ' if record else ''}byte {offset:,}{inside}"


class Advice(NamedTuple):
    """The last two fields of a finding."""

    hint: str | None = None
    command: str | None = None


class Advisable(NamedTuple):
    """A finding, and what looks for a better hint: that takes a while, and who counts findings needs none."""

    finding: Finding
    advice: Callable[[], Advice | None]

    def advised(self) -> Finding:
        """Return the finding with the advice, if there is some."""
        found = self.advice()
        return self.finding if found is None else self.finding._replace(hint=found.hint, command=found.command)


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

    ``options`` and ``words`` are those of ``command_line``; ``member`` names another member of its archive instead.
    """
    path, inside = checkpoint.path or "FILE", member or checkpoint.member
    return Advice(why, command_line(f"{path}::{inside}" if inside else path, verb, *words, **options))


def command_line(path: str, verb: str, *words: str, **options: str | bool | Sequence[str]) -> str:
    """
    Return a command line for a POSIX shell.

    ``options`` are those of the verb, each value of a sequence one option; what is false or empty is left out.
    ``words`` follow them as they are.
    """
    from shlex import join  # few files need advice

    shown = f"./{path}" if path.startswith("-") else shown_path(path)  # or it would be taken for an option
    return join(("ckptool", verb, shown, *_spelled(options), *words))


def _spelled(options: Mapping[str, str | bool | Sequence[str]]) -> Iterator[str]:
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            yield flag
        elif value:
            for one in (value,) if isinstance(value, str) else value:
                yield from (flag, one)


def finding_lines(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield the line of each finding, and below it what to do, and the command that does it, unless it stood before."""
    shown: set[str] = set()
    for finding in findings:
        yield labelled(finding.severity, f"{finding.code} {show(finding.message)}")
        if finding.hint:
            yield labelled("", show(finding.hint))
        if finding.command and finding.command not in shown:
            shown.add(finding.command)
            yield labelled("", f"Run: {show(finding.command)}")


def worst_of(findings: Iterable[Finding]) -> Severity | None:
    """Return the severest of all; None if there are no findings."""
    severities = {one.severity for one in findings}
    return next((one for one in SEVERITIES if one in severities), None)
