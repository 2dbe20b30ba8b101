"""
``check --sarif``: findings in the format that code hosts show beside files.

See https://docs.oasis-open.org/sarif/sarif/v2.1.0/.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import ascii_letters, digits

from ckptool import __version__
from ckptool.checking.check import CheckReport
from ckptool.checking.codes import CODES
from ckptool.cli.text import with_options

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
