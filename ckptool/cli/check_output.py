"""
The ways in which ``check`` says what it found: for people, a line for each file, as JSON, as SARIF.

SARIF is what code hosts show beside files: https://docs.oasis-open.org/sarif/sarif/v2.1.0/.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import ascii_letters, digits
from typing import Any, NoReturn, Protocol

from ckptool import __version__
from ckptool.checking.check import CheckReport
from ckptool.checking.codes import CODES
from ckptool.checking.torch_load import GlobalUse
from ckptool.cli.brief import Totals
from ckptool.cli.json_output import JsonOutput, error_object, finding_object
from ckptool.cli.text import error_text, say, terminal_width, with_options, wrapped
from ckptool.errors import CkptoolError
from ckptool.formats import member_in
from ckptool.formats.runnable.surveys import Act
from ckptool.messages import cut


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
        return Objects(as_lines=options["as_lines"], is_list=is_list)
    return Brief(paths) if options["brief"] else Reports(show_globals=options["show_globals"])


class _Totalled:
    """What ends with a total."""

    def __init__(self) -> None:
        self._totals = Totals("fine", whole=terminal_width() is None)
        self._width = terminal_width()

    def checked(self, report: CheckReport, _: str) -> None:
        is_known = report.grade != "data" or (report.error is None and not report.unseen)
        self._totals.graded(report.grade if is_known else "unknown")
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
            say("\n".join(wrapped(lines, self._width)))

    def end(self) -> None:
        if lines := list(self._totals.lines()):
            say("\n".join(wrapped(lines, self._width)))


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
        say("\n".join(wrapped(self._totals.lines(always=True), self._width)))


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

        print_json(sarif(self._reports))


_LEVELS = {"info": "note", "warning": "warning", "error": "error"}
_UNREADABLE = "unreadable"


def sarif(reports: Sequence[tuple[str, CheckReport]]) -> dict[str, object]:
    """Return one run with the findings of all reports, each with the path that was given for it."""
    rules = [{"id": code, "shortDescription": {"text": entry.says}} for code, entry in CODES.items()]
    rules.append({"id": _UNREADABLE, "shortDescription": {"text": "The file cannot be opened."}})
    driver = {"name": "ckptool", "version": __version__, "rules": rules}
    results = [result for path, report in reports for result in _results(path, report)]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _uri(path: str) -> str:
    """Return a path as a reference: what is no plain character is escaped."""
    plain = f"{ascii_letters}{digits}-._~/".encode()
    octets = Path(path).as_posix().encode("utf-8", "surrogateescape")
    return "".join(chr(one) if one in plain else f"%{one:02X}" for one in octets)


def _results(path: str, report: CheckReport) -> list[dict[str, object]]:
    found = [(one.code, _LEVELS[one.severity], one.message, one.hint, one.path or path) for one in report.findings]
    if report.error is not None:
        found.append((_UNREADABLE, "error", report.error.message, report.error.hint, path))
    return [
        {
            "ruleId": code,
            "level": level,
            "message": {"text": with_options(f"{message}. {hint}" if hint else message)},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": _uri(where)}}}],
        }
        for code, level, message, hint, where in found
    ]


SCHEMA = "ckptool.check/2"
_LONGEST = 4096
"""Of a name in JSON: torch's own have some dozens of characters."""


class Objects:
    """One object for each file."""

    def __init__(self, *, as_lines: bool, is_list: bool) -> None:
        self._output = JsonOutput(as_lines=as_lines, is_list=is_list)

    def checked(self, report: CheckReport, _: str) -> None:
        self._output.add(_object(report))

    def failed(self, error: CkptoolError, path: str) -> None:
        self._output.add(_not_looked_at(path, error))

    def passed_over(self, _: str) -> None:
        pass

    def end(self) -> None:
        self._output.end()


def _object(report: CheckReport) -> dict[str, object]:
    found: dict[str, object] = {
        "schema": SCHEMA,
        "path": report.path,
        "member": report.member,
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
        "member": member_in(path),
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
