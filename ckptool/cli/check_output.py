"""The ways in which ``check`` says what it found: for people, a line for each file, as JSON, as SARIF."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ckptool.checking.check import CheckReport
from ckptool.checking.surveys import Act
from ckptool.checking.torch_load import GlobalUse
from ckptool.cli import terminal
from ckptool.cli.json_output import JsonOutput, error_object, finding_object, print_json
from ckptool.cli.text import error_text, say, with_options
from ckptool.cli.totals import Totals
from ckptool.errors import CkptoolError
from ckptool.messages import cut

SCHEMA = "ckptool.check/2"
_LONGEST = 4096
"""Of a name in JSON: torch's own have some dozens of characters."""


class Output(Protocol):
    """One way to say what was found in files."""

    def checked(self, report: CheckReport, path: str) -> None: ...

    def passed_over(self) -> None: ...

    def end(self) -> None: ...


def output_for(options: dict[str, Any], paths: Sequence[str], *, is_list: bool) -> Output:
    if options["as_sarif"]:
        return Sarif()
    if options["as_json"] or options["as_lines"]:
        return Objects(as_lines=options["as_lines"], is_list=is_list)
    return Brief(paths) if options["brief"] else Reports(show_globals=options["show_globals"])


class _Totalled:
    """What ends with a total."""

    def __init__(self) -> None:
        self._totals = Totals()
        self._width = terminal.width()

    def checked(self, report: CheckReport, _: str) -> None:
        if report.error is not None:
            self._totals.not_opened()
        else:
            self._totals.opened(report.worst, report.format, report.file_nbytes)

    def passed_over(self) -> None:
        self._totals.passed_over()


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


class Objects:
    """JSON."""

    def __init__(self, *, as_lines: bool, is_list: bool) -> None:
        self._output = JsonOutput(as_lines=as_lines, is_list=is_list)

    def checked(self, report: CheckReport, _: str) -> None:
        self._output.add(_object(report))

    def failed(self, path: str, error: CkptoolError) -> None:
        self._output.add(_not_looked_at(path, error))

    def passed_over(self) -> None:
        pass

    def end(self) -> None:
        self._output.end()


class Sarif:
    """One document for all files."""

    def __init__(self) -> None:
        self._reports: list[tuple[str, CheckReport]] = []

    def checked(self, report: CheckReport, path: str) -> None:
        self._reports.append((path, report))

    def passed_over(self) -> None:
        pass

    def end(self) -> None:
        from ckptool.cli.sarif import sarif

        print_json(sarif(self._reports))


def _object(report: CheckReport) -> dict[str, object]:
    found: dict[str, object] = {
        "schema": SCHEMA,
        "path": report.path,
        "depth": report.depth,
        "worst": report.worst,
        "verdict": with_options(report.verdict),
        "findings": [finding_object(finding) for finding in report.findings],
    }
    found |= {"globals": [_global(one) for one in report.globals], "acts": [_act(one) for one in report.acts]}
    found |= {"grade": report.grade, "unseen": [cut(one, _LONGEST) for one in report.unseen]}
    if report.error is not None:
        return {**found, "error": error_object(report.error)}
    return {
        **found,
        "loading": report.loading and with_options(report.loading),
        "format": report.format,
        "form": report.form,
        "file_nbytes": report.file_nbytes,
        "shards": report.shards,
        "records": report.records,
        "matching": report.matching,
    }


def _not_looked_at(path: str, error: CkptoolError) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "path": path,
        "depth": "structure",
        "worst": "error",
        "verdict": "not looked at",
        "findings": [],
        "globals": [],
        "acts": [],
        "grade": None,
        "unseen": [],
        "error": error_object(error),
    }


def _act(one: Act) -> dict[str, object]:
    names = {"name": cut(one.name, _LONGEST), "text": cut(one.text, _LONGEST), "package": cut(one.package, _LONGEST)}
    return one._asdict() | names | {"record": one.record or None}


def _global(one: GlobalUse) -> dict[str, object]:
    return {
        "name": cut(one.name, _LONGEST),
        "allowed": one.is_allowed,
        "record": one.record or None,
        "offset": one.offset,
        "nested_at": one.nested_at,
    }
