"""``check --json``: what was found in each file, as an object."""

from __future__ import annotations

from ckptool.checking.check import CheckReport
from ckptool.checking.torch_load import GlobalUse
from ckptool.cli.json_output import JsonOutput, error_object, finding_object
from ckptool.cli.text import with_options
from ckptool.errors import CkptoolError
from ckptool.formats import member_in
from ckptool.formats.runnable.surveys import Act
from ckptool.messages import cut

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
