"""What `inspect` and `check` say of a file, as the head of a page has it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from ckptool.checking.check import CheckReport
from ckptool.checking.finding import Finding
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import summarise
from ckptool.cli.inspect_report import extra_lines, head_facts
from ckptool.cli.page.tensors import shown
from ckptool.cli.text import with_options
from ckptool.messages import counted
from ckptool.sources.naming import local_name

_MOST: Final = 200
"""Items of a list that a page shows."""


def file_facts(checkpoint: Checkpoint, report: CheckReport) -> dict[str, object]:
    """Return what a file is, what is notable about it, and what it holds beside tensors."""
    facts = [[fact.label, listing(fact.items)] for fact in head_facts(checkpoint, summarise(checkpoint))]
    rest = len(checkpoint.extras) - _MOST
    some = "the values" if any(one.code == "CK113" for one in report.findings) else "every value"
    looked = f"and at {some}" if report.depth == "values" else "alone"
    extras = [shown(line) for line in islice(extra_lines(checkpoint), _MOST)]
    return {
        **report_facts(report),
        "verdict": f"{report.outcome}; looked at the structure {looked}",
        "facts": facts,
        "extras": [*extras, f"and {counted(rest, 'other value')}"] if rest > 0 else extras,
    }


def report_facts(report: CheckReport) -> dict[str, object]:
    """Return what a check says of a file, whether it can be opened or not."""
    error, worst = report.error, report.worst
    return {
        "path": shown(report.path),
        "name": shown(local_name(report.path).rstrip("/").rpartition("/")[2] or report.path),
        "verdict": report.outcome,
        "status": "fine" if worst in (None, "info") else worst,
        "loading": [shown(with_options(one)) for one in report.loading],
        "findings": [_finding(one) for one in report.findings],
        "error": error and _finding(Finding(error.kind, "error", error.message, error.hint, error.command)),
    }


def listing(items: Iterable[str], most: int | None = None) -> list[str]:
    """Return the first of some items, and how many more there are."""
    found = list(items)
    most = _MOST if most is None else most
    more = [f"and {len(found) - most:,} more"] if len(found) > most else []
    return [*map(shown, found[:most]), *more]


def _finding(found: Finding) -> dict[str, object]:
    return {
        "code": found.code,
        "severity": found.severity,
        "message": shown(found.message),
        "hint": found.hint and shown(with_options(found.hint)),
        "command": found.command and shown(found.command),
    }
