"""
What was found in each file for programs: as an object, with ``--json``; as SARIF, which code hosts show beside files.

See https://docs.oasis-open.org/sarif/sarif/v2.1.0/.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import ascii_letters, digits

from ckptool import __version__
from ckptool.checking.check import CheckReport
from ckptool.checking.finding import CODES
from ckptool.checking.torch_load import GlobalUse
from ckptool.cli.json_output import JsonOutput, error_object, finding_object
from ckptool.cli.text import with_options
from ckptool.errors import CkptoolError
from ckptool.formats import member_in
from ckptool.formats.runnable.unpacking import Act
from ckptool.messages import cut

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


SCHEMA = "ckptool.check/3"
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
        "loading": list(map(with_options, report.loading)),
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
