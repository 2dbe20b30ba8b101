"""The ways in which ``check`` says what it found: for people, a line for each file, as JSON, as SARIF."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from ckptool.checking.check import CheckReport
from ckptool.cli import terminal
from ckptool.cli.text import error_text, say, with_options
from ckptool.cli.totals import Totals
from ckptool.errors import CkptoolError


class Output(Protocol):
    """One way to say what was found in files."""

    def checked(self, report: CheckReport, path: str) -> None: ...

    def failed(self, error: CkptoolError, path: str) -> None:
        """Say that a file could not be looked at, for what is not of the file; or raise that."""

    def passed_over(self, path: str) -> None: ...

    def end(self) -> None: ...


def output_for(options: dict[str, Any], paths: Sequence[str], *, is_list: bool) -> Output:
    if options["as_sarif"]:
        return Sarif()
    if options["as_json"] or options["as_lines"]:
        from ckptool.cli.check_objects import Objects  # what JSON takes is as much as all of this

        return Objects(as_lines=options["as_lines"], is_list=is_list)
    return Brief(paths) if options["brief"] else Reports(show_globals=options["show_globals"])


class _Totalled:
    """What ends with a total."""

    def __init__(self) -> None:
        self._totals = Totals("fine", whole=terminal.width() is None)
        self._width = terminal.width()

    def checked(self, report: CheckReport, _: str) -> None:
        self._totals.graded(report.known_grade)
        if report.error is not None:
            self._totals.not_opened()
        else:
            self._totals.opened(report.worst, report.format, report.file_nbytes)

    def failed(self, error: CkptoolError, _: str) -> NoReturn:
        raise error

    def passed_over(self, path: str) -> None:
        self._totals.passed_over(path)


class Reports(_Totalled):
    """For people: all about each file."""

    def __init__(self, *, show_globals: bool) -> None:
        super().__init__()
        self._show_globals = show_globals
        self._begun = False

    def checked(self, report: CheckReport, path: str) -> None:
        super().checked(report, path)
        if self._begun:
            say("")
        self._begun = True
        if report.error is not None:
            say(error_text(report.error), err=True)
        if report.error is None or report.findings:
            lines = map(with_options, report.lines(show_globals=self._show_globals))
            say("\n".join(terminal.wrapped(lines, self._width)))

    def end(self) -> None:
        if lines := list(self._totals.lines()):
            say("\n".join(terminal.wrapped(lines, self._width)))


class Brief(_Totalled):
    """A line for each file."""

    def __init__(self, paths: Sequence[str]) -> None:
        from ckptool.cli.brief import BriefCheck

        super().__init__()
        self._lines = BriefCheck(paths)

    def checked(self, report: CheckReport, path: str) -> None:
        super().checked(report, path)
        self._lines.checked(report, path)

    def end(self) -> None:
        say("\n".join(terminal.wrapped(self._totals.lines(always=True), self._width)))


class Sarif:
    """One document for all files."""

    def __init__(self) -> None:
        self._reports: list[tuple[str, CheckReport]] = []

    def checked(self, report: CheckReport, path: str) -> None:
        self._reports.append((path, report))

    def failed(self, error: CkptoolError, _: str) -> NoReturn:
        raise error

    def passed_over(self, _: str) -> None:
        pass

    def end(self) -> None:
        from ckptool.cli.json_output import print_json
        from ckptool.cli.sarif import sarif

        print_json(sarif(self._reports))
