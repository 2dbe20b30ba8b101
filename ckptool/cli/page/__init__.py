"""
The page of ``report``: one file of HTML, which needs no network and no library.

Nothing from a checkpoint is markup. All of it is JSON in an element that no browser runs, and the script puts it on the
page as text. A policy in the page forbids everything but this style and this script, which it knows by their hashes.

The modules of the script are joined to one: the lines that import are left out, and names are unique in all of them.
https://www.w3.org/TR/CSP3/
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any, Final

import ckptool.messages as messages
from ckptool.checking.check import CheckReport, Depth
from ckptool.checking.finding import CODES, Finding
from ckptool.checking.finding import worst_of as worst_severity
from ckptool.checking.value_survey import ValueRow
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import summarise
from ckptool.cli.check import worst_of
from ckptool.cli.text import with_options
from ckptool.diffing.report import DiffReport, facts_of
from ckptool.inspecting.columns import COLUMNS, Related
from ckptool.inspecting.head import extra_lines, head_facts
from ckptool.messages import counted, cut, show, show_nbytes, some
from ckptool.sections import Fact, as_json
from ckptool.sources.files import packaged
from ckptool.sources.paths import local_name, shown_path
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, identity

LONGEST: Final = 1 << 10
"""Characters of a name or a text from a file that a page shows."""
_DIGITS: Final = 6
"""Digits of a number for people."""
_IN_TABLE: Final = ("shape", "values", "close")
"""Kinds of differences that the table shows for each tensor."""
_MOST: Final = 200
"""Items of a list that a page shows."""
ASSETS: Final = Path(__file__).parent / "assets"
SCRIPTS: Final = (
    *("dom", "text", "data", "tree", "selection", "colours", "squares", "treemap"),
    *("histogram", "columns", "entries", "table", "files", "panel", "head", "main"),
)
"""The modules of the script, each after those that it imports."""
_IMPORT: Final = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ", re.MULTILINE)
_PLACE: Final = re.compile(r"\{\{(\w+)\}\}")
_IN_SCRIPT: Final = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def shown(value: Any) -> Any:
    """Return a value for JSON as a page shows it: texts bounded and safe to print, numbers to six digits."""
    if isinstance(value, str):
        return show(cut(with_options(value), LONGEST))
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {name: shown(one) for name, one in value.items()}
    return [shown(one) for one in value] if isinstance(value, list) else as_json(value)


def tensor_rows(checkpoint: Checkpoint, head: str = "", number: int = 0) -> list[dict[str, Any]]:
    """Return a row for each tensor of a checkpoint. ``number`` rows are before them; ``head`` is put before names."""
    rows: list[dict[str, Any]] = []
    first: dict[object, int] = {}
    roles = dict.fromkeys(checkpoint.tensors, "other")
    for found in sorted(checkpoint.state_dicts, key=lambda one: len(one.key)):  # the innermost last
        roles.update((found.head + name, found.role) for name in found)
    for at, (name, tensor) in enumerate(checkpoint.tensors.items(), number):
        row = {"name": shown(head + name) or "(root)", "tensors": [_what(tensor.info)], "role": roles[name]}
        if checkpoint.traits.keeps_ties and tensor.info.storage is not None and tensor.info.numel:
            tied_to = first.setdefault(identity(tensor.info), at)
            row |= {"tied_to": tied_to} if tied_to != at else {}
        rows.append(row)
    return rows


def _what(info: TensorInfo) -> dict[str, Any]:
    return {
        "shape": str(list(info.shape)),
        "dtype": COLUMNS["dtype"].value("", info, Related()),
        "device": shown(info.location),
        "nbytes": info.total_nbytes,
        "numel": info.numel,
        "what": info.kind,
        "parts": shown(", ".join(f"{name}: {part.dtype.name} {list(part.shape)}" for name, part in info.parts)),
    }


def compared_rows(report: DiffReport, a: Mapping[str, LazyTensor], b: Mapping[str, LazyTensor]) -> list[dict[str, Any]]:
    """Return a row for each name in either: what the tensor is in both, and how it differs."""
    names = dict.fromkeys((*a, *b))
    changes = _changes(report, names)
    likeness = {one.name: one for one in report.likeness}
    measures = {
        one.name: shown({**as_json(one), **{field: getattr(likeness.get(one.name), field, None) for field in _ALIKE}})
        for one in (*report.values, *report.close)
    }
    return [
        {
            "name": shown(name) or "(root)",
            "tensors": [_what(side[name].info) if name in side else None for side in (a, b)],
            "change": changes[name],
            "measures": measures.get(name),
        }
        for name in names
    ]


_ALIKE: Final = ("cosine", "relative")


def _changes(report: DiffReport, names: Iterable[str]) -> dict[str, str]:
    """Return the kind of change of each tensor; if there are several, the last one in this order."""
    found = dict.fromkeys(names, "same" if report.values_compared else "not compared")
    for change, changed in (
        ("close", report.close),
        ("device", report.devices),
        ("layout", report.layouts),
        ("values", report.values),
        ("dtype", report.dtypes),
        ("shape", report.shapes),
    ):
        found.update((one.name, change) for one in changed)
    return found | dict.fromkeys(report.only_a, "only in A") | dict.fromkeys(report.only_b, "only in B")


def add_values(rows: Sequence[dict[str, Any]], found: Iterable[ValueRow | None]) -> None:
    """Add to each row the statistics of its tensor's values, or why there are none."""
    for row, one in zip(rows, found, strict=True):
        known = one and (one.values._asdict() if one.values is not None else {"why": one.why})
        row.setdefault("values", []).append(shown(known and as_json(known)))


def packed(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as JSON, deflated (zlib's format), in base64."""
    text = json.dumps(rows, allow_nan=False, separators=(",", ":"))
    return b64encode(zlib.compress(text.encode("ascii"), 9)).decode("ascii")


def _listed(facts: Iterable[Fact]) -> list[tuple[str, list[str]]]:
    """Return facts with their first items, and how many more there are, without those that the table shows."""
    return [
        (fact.label or "names", shown([*islice(fact.items, _MOST), *_more(len(fact.items) - _MOST)]))
        for fact in facts
        if fact.label not in _IN_TABLE and fact.items
    ]


def _more(number: int) -> list[str]:
    return [f"and {number:,} more"] if number > 0 else []


def comparison_facts(report: DiffReport) -> dict[str, object]:
    """Return the verdict, and the differences by kind."""
    return {"verdict": with_options(report.verdict), "same": report.same, "facts": _listed(facts_of(report))}


def file_facts(checkpoint: Checkpoint, report: CheckReport) -> dict[str, object]:
    """Return what a file is, what is notable about it, and what it holds beside tensors."""
    extras = [*islice(extra_lines(checkpoint), _MOST), *_more(len(checkpoint.extras) - _MOST)]
    return {
        **report_facts(report),
        "verdict": f"{report.outcome}; {_looked_at(report.depth, report.findings)}",
        "nbytes": checkpoint.file_nbytes,
        "digests": {"SHA-256": report.sha256, "weights": report.digest},
        "facts": _listed(head_facts(checkpoint, summarise(checkpoint))),
        "extras": shown(extras),
    }


def _looked_at(depth: str, findings: Iterable[Finding]) -> str:
    some = "the values" if any(one.code == "CK113" for one in findings) else "every value"
    return f"looked at the structure {f'and at {some}' if depth == 'values' else 'alone'}"


def folder_facts(
    path: str, findings: Iterable[Finding], reports: Mapping[str, CheckReport], depth: Depth
) -> dict[str, object]:
    """
    Return a row for each file of a folder, by name, and one for the folder if something is wrong with it; the findings,
    by code; and the verdict.
    """
    files, worst = len(reports), [one.worst for one in reports.values()]
    counts = {word: worst.count(word) for word in ("error", "warning") if word in worst}
    said = ", ".join(f"{number:,} with {word}s" for word, number in counts.items()) or "nothing wrong found in them"
    own = [one for one in findings if one.severity != "info" and one.code != "CK114"]  # a file, which has a row
    if own:
        reports = {".": CheckReport(path, depth, tuple(own)), **reports}
        said += f", and {counted(len(own), 'finding')} about the folder"
    found = [(name, one) for name, report in reports.items() for one in _reasons(report)]
    groups: dict[tuple[str, str], list[tuple[str, Finding]]] = {}
    for name, one in found:
        groups.setdefault((one.code, one.severity), []).append((name, one))
    nbytes = sum(one.file_nbytes or 0 for one in reports.values())
    grades = Counter(one.known_grade for one in reports.values() if one.path != path)
    return {
        **report_facts(CheckReport(shown_path(path), depth, ())),
        "verdict": f"{counted(files, 'file')}: {said}; {_looked_at(depth, (one for _, one in found))}",
        "worst": worst_severity(one for _, one in found if one.severity != "info"),
        "nbytes": nbytes,
        "facts": [
            ("files", [f"{files:,}; {show_nbytes(nbytes)}"]),
            ("grades", [messages.counts(dict(grades.most_common()))]),
        ],
        "files": [
            {
                "name": shown(name),
                "grade": report.known_grade,
                "worst": report.worst,
                "finding": shown("; ".join(worst_of(report))),
                "codes": list(dict.fromkeys(one.code for one in _reasons(report))),
                **{field: shown(getattr(report, field)) for field in ("format", "form", "tensors", "file_nbytes")},
            }
            for name, report in reports.items()
        ],
        "findings": [_group(code, severity, group) for (code, severity), group in groups.items()],
    }


def _reasons(report: CheckReport) -> list[Finding]:
    """Return why a file cannot be opened, as a finding, and its findings."""
    error = report.error
    return [*([Finding(error.kind, "error", error.message, error.hint)] if error is not None else []), *report.findings]


def _group(code: str, severity: str, found: Sequence[tuple[str, Finding]]) -> dict[str, object]:
    """Return the findings of one code as one: what the code says, how many files have it, and which."""
    names = list(dict.fromkeys(shown(name) for name, _ in found))
    says = CODES[code].says if code in CODES and len(names) > 1 else found[0][1].message
    hint = found[0][1].hint if len({one.hint for _, one in found}) == 1 else None
    return {
        "code": code,
        "severity": severity,
        "message": shown(says),
        "hint": shown(hint),
        "files": len(names),
        "some": some(names),
    }


def report_facts(report: CheckReport) -> dict[str, object]:
    """Return the fields of a check's object that a page shows, whether the file can be opened or not."""
    found = report.as_dict()
    name = os.path.basename(local_name(report.path).rstrip(f"/{os.sep}")) or report.path
    said = {field: shown(found.get(field)) for field in ("path", "worst", "findings", "loading", "error")}
    return {**said, "name": shown(name), "verdict": shown(report.outcome)}


def document(title: str, content: Mapping[str, object]) -> bytes:
    """Return a page that shows this content. The same content makes the same bytes."""
    style, script = packaged(ASSETS / "page.css"), joined_script()
    filled = {
        "title": escape(title),
        "policy": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
        "style": style,
        "script": script,
        "content": json.dumps(content, allow_nan=False, separators=(",", ":")).translate(_IN_SCRIPT),
    }
    return _PLACE.sub(lambda place: filled[place[1]], packaged(ASSETS / "page.html")).encode()


def joined_script() -> str:
    """Return the modules of the script as one."""
    return "".join(_EXPORT.sub("", _IMPORT.sub("", packaged(ASSETS / f"{name}.js"))) for name in SCRIPTS)


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
