"""The report of one migration: text for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.cli.json_output import error_object
from ckptool.cli.tables import plain_table
from ckptool.cli.text import FORMS, counts, grouped, labelled, listed
from ckptool.errors import CkptoolError
from ckptool.messages import show, show_nbytes
from ckptool.migration.casting import Cast
from ckptool.migration.report import MigrationReport, Side

SCHEMA = "ckptool.migrate/2"

_LABEL = 11


def report_lines(report: MigrationReport) -> Iterator[str]:
    """Yield the lines about a migration: the target, the file before and after, then every change."""
    yield show(report.target)
    yield labelled("result", _result(report))
    yield labelled("source", show(report.source))
    yield labelled("content", _taken(report))
    rows = [[f"{label:<{_LABEL}}", *cells] for label, *cells in _rows(report.before, report.after)]
    yield from (f"  {line}" for line in plain_table([" " * _LABEL, "before", "after"], rows, [False] * 3, None))
    devices = [f"{show(tag)} -> {report.location}: {count:,}" for tag, count in report.retagged.items()]
    yield from listed("device", devices)
    yield from listed("renamed", [f"{show(old)} -> {show(new)}" for old, new in report.renamed])
    yield from listed("cast", list(_casts(report)))
    yield from listed("tied", [f"{show(name)} is {show(kept)}" for name, kept in report.tied.items()])
    yield from listed("left out", grouped(report.dropped, "entries"))
    yield from listed("note", [show(note) for note in report.notes])


def report_as_json(report: MigrationReport) -> dict[str, object]:
    """Return the object that ``migrate --json`` prints for a source."""
    found = report._asdict()
    found["renamed"] = [list(pair) for pair in report.renamed]
    found["casts"] = [cast._asdict() for cast in report.casts]
    for name, side in (("before", report.before), ("after", report.after)):
        found[name] = side._asdict()
    return {"schema": SCHEMA, **found}


def error_as_json(source: str, error: CkptoolError) -> dict[str, object]:
    """Return the object that ``migrate --json`` prints for a source that was not migrated."""
    return {"schema": SCHEMA, "source": source, "error": error_object(error)}


def _result(report: MigrationReport) -> str:
    if not report.written:
        return "not written: a dry run"
    return "written and verified" if report.verified else "written, not verified"


def _taken(report: MigrationReport) -> str:
    if report.weights_key is None:
        return "the model" if report.form == "model" else "everything"
    where = f" under {show(report.weights_key)}" if report.weights_key else ""
    return f"the weights{where}{', into a model that is built' if report.form == 'model' else ''}"


def _rows(*sides: Side) -> Iterator[tuple[str, ...]]:
    yield "format", *(f"{side.format}, {show_nbytes(side.file_nbytes)}" for side in sides)
    yield "form", *(FORMS[side.form] for side in sides)
    yield "tensors", *(f"{side.tensors:,}" + (f", {side.tied:,} of them tied" if side.tied else "") for side in sides)
    yield "parameters", *(f"{side.numel:,}" for side in sides)
    yield "devices", *(counts(side.devices) or "-" for side in sides)
    yield "dtypes", *(counts(side.dtypes) or "-" for side in sides)
    if any(side.prefixes for side in sides):
        yield "prefix", *(show("".join(side.prefixes)) or "-" for side in sides)


def _casts(report: MigrationReport) -> Iterator[str]:
    """Yield what was cast: all together, then one by one, the largest error first."""
    by_types: dict[tuple[str, str], list[Cast]] = {}
    for cast in report.casts:
        by_types.setdefault((cast.source, cast.target), []).append(cast)
    for (source, target), casts in by_types.items():
        many = f"{len(casts):,} tensor{'s' * (len(casts) > 1)}: {source} -> {target}"
        if not report.written:
            yield many
            continue
        casts.sort(key=lambda cast: -cast.max_error)
        yield f"{many}, off by at most {casts[0].max_error:.3g}{_cut(sum(cast.overflowed for cast in casts))}"
        yield from (f"{show(cast.name)}: {cast.max_error:.3g}{_cut(cast.overflowed)}" for cast in casts)


def _cut(overflowed: int) -> str:
    return f", {overflowed:,} cut to the largest value" if overflowed else ""
