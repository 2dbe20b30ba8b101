"""One line for each of many files, printed as soon as it is known: how it is, its path, and what else to say of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptool.checking.finding import Finding, worst_of
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import Summary
from ckptool.checkpoints.tables import padded
from ckptool.cli import terminal
from ckptool.cli.text import painted, say, with_options
from ckptool.errors import CkptoolError
from ckptool.messages import counted, show, show_nbytes, some

if TYPE_CHECKING:
    from ckptool.checking.check import CheckReport
    from ckptool.migration.report import MigrationReport

_SEVERITY: Final = 7
_PAINTED: Final = ("error", "warning")
_GAP: Final = "  "
_SHORTEST_PATH: Final = 20
_SHARE_OF_NOTE: Final = 0.45
"""Of the width of a terminal, at least."""


class _Column(NamedTuple):
    header: str
    room: int
    is_number: bool
    from_width: int
    """Columns of a terminal from which on there is room for it."""


_COLUMNS: Final = (
    _Column("format", 15, False, 60),
    _Column("form", 10, False, 80),
    _Column("tensors", 8, True, 120),
    _Column("parameters", 14, True, 100),
    _Column("size", 9, True, 0),
)


class BriefInspect:
    """What ``inspect`` says of each file in a line: a table whose columns are as wide as they may become."""

    def __init__(self, paths: Iterable[str], width: int | None) -> None:
        self._shown = [index for index, one in enumerate(_COLUMNS) if width is None or width >= one.from_width]
        columns = [_COLUMNS[index] for index in self._shown]
        self._paths = _Paths(paths, width, sum(one.room + len(_GAP) for one in columns))
        say(self._line("", "file", [one.header for one in _COLUMNS]))

    def opened(self, path: str, checkpoint: Checkpoint, summary: Summary, findings: Sequence[Finding]) -> None:
        sizes = (f"{summary.tensors:,}", f"{summary.numel:,}", show_nbytes(checkpoint.file_nbytes))
        say(self._line(_word(worst_of(findings), "opened"), path, [checkpoint.format, checkpoint.form, *sizes]))

    def failed(self, path: str, error: CkptoolError) -> None:
        say(self._paths.line("error", path, _why(error)))

    def _line(self, word: str, path: str, cells: Sequence[str]) -> str:
        shown = (padded(cells[index], _COLUMNS[index].room, right=_COLUMNS[index].is_number) for index in self._shown)
        return self._paths.line(word, path, _GAP.join(shown))


_OF_SAFETY: Final = ("CK205", "CK216", "CK206", "CK217", "CK207")
"""What is asked about many files first: what they would run."""


class BriefCheck:
    """What ``check`` says of each file in a line: the first of its severest findings."""

    def __init__(self, paths: Iterable[str]) -> None:
        width = terminal.width()
        self._paths = _Paths(paths, width, int(_SHARE_OF_NOTE * (width or 0)))

    def checked(self, report: CheckReport, path: str) -> None:
        if report.error is not None:
            from ckptool.checking.would_run import of_refused

            said = [*of_refused(report.acts), _why(report.error)]  # lines are cut at their end
            say(self._paths.line("error", path, "; ".join(said)))
            return
        worst = report.worst
        found = [one for one in report.findings if one.severity == worst and worst != "info"]
        found.sort(key=lambda one: one.code not in _OF_SAFETY)
        files = dict.fromkeys(os.path.basename(one.path) for one in found[1:] if one.path and one.path != path)
        more = f" (and {len(found) - 1:,} more{f': {some(list(files))}' if files else ''})" if found[1:] else ""
        facts = f"{report.format}, {show_nbytes(report.file_nbytes or 0)}"
        line = f"{found[0].code} {found[0].message}{more}" if found else facts
        say(self._paths.line(_word(worst, "fine"), path, line))


class BriefMigrate:
    """What ``migrate`` says of each source in a line: what was written, and where."""

    def __init__(self, paths: Iterable[str]) -> None:
        width = terminal.width()
        self._paths = _Paths(paths, width, int(_SHARE_OF_NOTE * (width or 0)))

    def done(self, word: str, report: MigrationReport) -> None:
        left = f"; leaves out {counted(len(report.dropped), 'entry')}" if report.dropped else ""
        what = f"{report.target}: {report.after.format}, {show_nbytes(report.nbytes)}{left}"
        say(self._paths.line(word, report.source, what))

    def failed(self, path: str, error: CkptoolError) -> None:
        say(self._paths.line("error", path, error.message))


class _Paths:
    """Lines that begin with a severity and a path."""

    def __init__(self, paths: Iterable[str], width: int | None, rest: int) -> None:
        longest = max((len(show(path)) for path in paths), default=0)
        self._width = width
        self._room = longest
        if width is not None:
            self._room = min(longest, max(_SHORTEST_PATH, width - _SEVERITY - len(_GAP) - rest))

    def line(self, word: str, path: str, text: str) -> str:
        shown = show(path)
        path = padded(shown if self._width is None else _cut_start(shown, self._room), self._room)
        line = f"{word:<{_SEVERITY}}{_GAP}{path}{_GAP}{show(with_options(text))}".rstrip()
        line = line if self._width is None else _cut_end(line, self._width)
        return f"{painted(word)}{line[len(word) :]}" if word in _PAINTED else line


def _cut_start(path: str, room: int) -> str:
    """Return the end of a path, which tells it from others more than what they have in common."""
    return path if len(path) <= room else f"…{path[len(path) - room + 1 :]}"


def _cut_end(line: str, room: int) -> str:
    return line if len(line) <= room else f"{line[: room - 1]}…"


def _word(worst: str | None, otherwise: str) -> str:
    """Return the severity of what is wrong with a file; another word where nothing is, as far as a verb has looked."""
    return otherwise if worst in (None, "info") else str(worst)


def _why(error: CkptoolError) -> str:
    return f"not opened: {error.message}"
