"""Which findings are reported, and which give ``check`` the exit code 1: by code, grade, severity, question."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final, get_args

from ckptool.checking.check import CheckReport
from ckptool.checking.codes import CODES
from ckptool.checking.finding import Severity
from ckptool.pickles.verdicts import Grade

_RANKED: Final[tuple[Severity, ...]] = ("info", "warning", "error")
QUESTIONS: Final = ("whole", "safe", "loads", "fits")
"""CK1: is it whole? CK2: is it safe? CK3 to CK5: will it load, and as what? CK6: does it fit into the model?"""
_OF_HUNDRED: Final = {"1": "whole", "2": "safe", "3": "loads", "4": "loads", "5": "loads", "6": "fits"}
_GRADES: Final[tuple[Grade, ...]] = get_args(Grade)
CONDITIONS: Final = (*_GRADES, *_RANKED, *CODES)
_RANK: Final = {grade: rank for rank, grade in enumerate(_GRADES, 1)}


def is_condition(text: str) -> bool:
    """Say whether a text is a code, a grade (``code``, ``system``) or a severity."""
    return text in CONDITIONS


def question_of(code: str) -> str:
    """Return the question that findings with this code answer."""
    return "safe" if code == "CK115" else _OF_HUNDRED[code[2]]


def about(report: CheckReport, questions: Collection[str]) -> CheckReport:
    """Return a report with the findings that answer these questions; with none of them, all."""
    if not questions:
        return report
    kept = (one for one in report.findings if question_of(one.code) in questions or one.code == "CK115")
    return report._replace(findings=tuple(kept), only=tuple(questions))


def fails(report: CheckReport, conditions: Iterable[str]) -> bool:
    """
    Say whether a report meets one of the conditions: a code; a severity, or a worse one; a grade, or a worse one.

    A file that cannot be opened fails under all of them, for nothing is known of it.
    """
    if report.error is not None:
        return True
    return any(_is_met(one, report) for one in conditions)


def _is_met(condition: str, report: CheckReport) -> bool:
    findings = report.findings
    if condition in _GRADES:  # what was not looked at may be of any; what only makes data fails nothing
        return bool(report.unseen) or (report.grade != "data" and condition in _GRADES[: _RANK[report.grade]])
    if condition in _RANKED:
        return any(one.severity in _RANKED[_RANKED.index(condition) :] for one in findings)
    return any(one.code == condition for one in findings)
