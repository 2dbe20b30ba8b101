"""
One line for each of many files, printed as soon as it is known: how it is, its path, and what else to say of it.

At the end, how many there are of each kind.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptool.checking.finding import Finding, worst_of
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import Summary
from ckptool.checkpoints.tables import padded
from ckptool.cli.options import no_room
from ckptool.cli.text import painted, say, terminal_width, with_options
from ckptool.errors import CkptoolError
from ckptool.messages import counted, counts, labelled, show, show_nbytes, some

if TYPE_CHECKING:
    from ckptool.checking.check import CheckReport
    from ckptool.migration.report import MigrationReport


_SEVERITY: Final = 7
_PAINTED: Final = ("error", "warning")
_GAP: Final = "  "
_SHORTEST_PATH: Final = 20
_SHARE_OF_NOTE: Final = 0.45
"""Of the width of a terminal, at least."""
_WORDS = {"warning": "with warnings", "error": "with errors"}
_NOT_OPENED = "not opened"
_NAMED = 4
"""Of files that were passed over."""
_GRADES = ("data", "program", "code", "system", "unknown")


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
    _Column("elements", 14, True, 140),
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
        parameters = "-" if summary.parameters is None else f"{summary.parameters:,}"
        sizes = (f"{summary.tensors:,}", parameters, f"{summary.numel:,}", show_nbytes(checkpoint.file_nbytes))
        say(self._line(_word(worst_of(findings), "opened"), path, [checkpoint.format, checkpoint.form, *sizes]))

    def failed(self, path: str, error: CkptoolError) -> None:
        say(self._paths.line("error", path, _why(error)))

    def left_out(self) -> Iterator[str]:
        """Yield a line that names the columns that the terminal has no room for."""
        left = [one.header for index, one in enumerate(_COLUMNS) if index not in self._shown]
        if left:
            yield no_room(left)

    def _line(self, word: str, path: str, cells: Sequence[str]) -> str:
        shown = (padded(cells[index], _COLUMNS[index].room, right=_COLUMNS[index].is_number) for index in self._shown)
        return self._paths.line(word, path, _GAP.join(shown))


_OF_SAFETY: Final = ("CK205", "CK216", "CK206", "CK217", "CK207")
"""What is asked about many files first: what they would run."""


class BriefCheck:
    """What ``check`` says of each file in a line: the first of its severest findings."""

    def __init__(self, paths: Iterable[str]) -> None:
        width = terminal_width()
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
        width = terminal_width()
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


class Totals:
    """
    Counts of the files that a verb was given; ``otherwise`` is its word for those with which nothing is wrong.

    If they are ``whole``, all files that were passed over are named.
    """

    def __init__(self, otherwise: str, *, whole: bool = False) -> None:
        self._otherwise = otherwise
        self._named = sys.maxsize if whole else _NAMED
        self._found: Counter[str] = Counter()
        self._formats: Counter[str] = Counter()
        self._grades: Counter[str] = Counter()
        self._nbytes = 0
        self._passed = 0
        self._others: list[str] = []
        """The first of those that were passed over."""

    def opened(self, worst: str | None, file_format: str | None, nbytes: int | None) -> None:
        """Count a file that was opened, by the severest of its findings."""
        self._found[_WORDS.get(worst or "", self._otherwise)] += 1
        self._formats[file_format or "unknown"] += 1
        self._nbytes += nbytes or 0

    def graded(self, grade: str) -> None:
        """Count a file by what unpickling it would do: ``unknown`` if not all of it could be looked at."""
        self._grades[grade] += 1

    def not_opened(self) -> None:
        self._found[_NOT_OPENED] += 1

    def passed_over(self, path: str) -> None:
        """Count a file that is no checkpoint, and was not said to be one."""
        self._passed += 1
        if len(self._others) < self._named:
            self._others.append(show(path))

    def lines(self, *, always: bool = False) -> Iterator[str]:
        """Yield the totals of several files; of one, only if asked to."""
        files = self._found.total()
        if files < 2 and not always:
            return
        kinds = ", ".join(
            f"{number:,} {word}"
            for word in (self._otherwise, *_WORDS.values(), _NOT_OPENED)
            if (number := self._found[word])
        )
        yield ""
        yield f"{counted(files, 'checkpoint')}, {show_nbytes(self._nbytes)}{': ' if kinds else ''}{kinds}"
        if self._formats:
            most_first = sorted(self._formats.items(), key=lambda one: (-one[1], one[0]))
            yield labelled("formats", counts(dict(most_first)))
        if self._grades:
            yield labelled("grades", counts({grade: self._grades[grade] for grade in _GRADES if self._grades[grade]}))
        if self._passed:
            rest = self._passed - len(self._others)
            more = f" and {rest:,} more" if rest else ""
            what = f"{counted(self._passed, 'file')} of other kinds"
            yield labelled("passed over", f"{what}: {', '.join(self._others)}{more}")


def left_out(folders: Sequence[str]) -> Iterator[str]:
    """Yield a line about folders that were not looked into, if there are some."""
    if folders:
        what = f"{counted(len(folders), 'folder')} of version control or of tools, or behind links that lead elsewhere"
        yield labelled("left out", f"{what}: {some([show(one) for one in folders], _NAMED)}")
