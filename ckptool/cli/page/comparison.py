"""What `diff` says of two checkpoints, as columns of a page: a row for each name that one of them has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from ckptool.cli.page.facts import listing
from ckptool.cli.page.packing import Distinct, rounded
from ckptool.cli.page.tensors import kind_rows, kinds_columns, names_column
from ckptool.cli.text import with_options
from ckptool.diffing.report import WRAPPED, DiffReport
from ckptool.messages import LISTED
from ckptool.tensors.reading import LazyTensor

STATUSES: Final = (
    *("same", "close", "device", "layout", "values", "dtype", "shape"),
    *("only in A", "only in B", "not compared"),
)
"""What is said of each tensor: of several, the one that stands last."""

_IN_TABLE: Final = ("shape", "dtype", "device", "layout", "values", "close")
"""What the table says of each tensor: the first few are enough above it."""
_OF_VALUES: Final = ("differing", "nan", "max_abs", "max_rel", "at", "a", "b")
_OF_LIKENESS: Final = ("cosine", "relative")


def comparison_columns(
    report: DiffReport, a: Mapping[str, LazyTensor], b: Mapping[str, LazyTensor]
) -> tuple[list[str], dict[str, object]]:
    """Return the names in both, and the columns: what a tensor is in each, and how it differs."""
    names = [*a, *(name for name in b if name not in a)]
    kinds = Distinct()
    sides = [[side[name].info if name in side else None for name in names] for side in (a, b)]
    status = _status(report, names)
    return names, {
        "names": names_column(names),
        "kind": [kinds_columns(infos, kinds) for infos in sides],
        "kinds": kind_rows(kinds),
        "ties": [],
        "change": {"of": [STATUSES.index(one) for one in status], "statuses": list(STATUSES)},
        "measures": _measures(report, names),
    }


def comparison_facts(report: DiffReport) -> dict[str, object]:
    """Return the verdict, and what differs by kind."""
    facts: list[object] = [
        [label, listing(map(with_options, items), LISTED if label in _IN_TABLE else None)]
        for label, items in report.facts()
        if items
    ]
    if report.wrapped:
        facts.append(["names", [with_options(WRAPPED)]])
    return {"verdict": with_options(report.verdict), "same": report.same, "facts": facts}


def _status(report: DiffReport, names: Iterable[str]) -> list[str]:
    found: dict[str, str] = {}
    by_status: dict[str, Iterable[str]] = {
        "close": (one.name for one in report.close),
        "device": (one.name for one in report.devices),
        "layout": (one.name for one in report.layouts),
        "values": (one.name for one in report.values),
        "dtype": (one.name for one in report.dtypes),
        "shape": (one.name for one in report.shapes),
        "only in A": report.only_a,
        "only in B": report.only_b,
    }
    for status in STATUSES:
        found.update((name, status) for name in by_status.get(status, ()))
    unsaid = "same" if report.values_compared else "not compared"
    return [found.get(name, unsaid) for name in names]


def _measures(report: DiffReport, names: Iterable[str]) -> dict[str, list[object]]:
    """Return by how much values differ: the rows of which that is known, and a column for each measure."""
    rows = {name: row for row, name in enumerate(names)}
    values = {found.name: found for found in (*report.values, *report.close) if found.name in rows}
    likeness = {found.name: found for found in report.likeness}
    columns: dict[str, list[object]] = {"row": [rows[name] for name in values]}
    for field in _OF_VALUES:
        columns[field] = [rounded(found._asdict()[field]) for found in values.values()]
    for field in _OF_LIKENESS:
        columns[field] = [rounded(likeness[name]._asdict()[field]) if name in likeness else None for name in values]
    return columns
