"""What ``migrate --json`` prints for one migration."""

from __future__ import annotations

from ckptool.cli.json_output import error_object
from ckptool.errors import CkptoolError
from ckptool.migration.report import MigrationReport

SCHEMA = "ckptool.migrate/2"


def report_as_json(report: MigrationReport) -> dict[str, object]:
    """Return the object that ``migrate --json`` prints for a source."""
    fields = report._asdict()
    del fields["dropped_at_root"]  # they are among those that are dropped
    head = {name: fields.pop(name) for name in ("source", "target", "form")}
    found = {**head, "source_format": report.before.format, **fields}
    found["renamed"] = [list(pair) for pair in report.renamed]
    found["casts"] = [cast._asdict() for cast in report.casts]
    found["files"] = [file._asdict() for file in report.files]
    for name, file in (("before", report.before), ("after", report.after)):
        found[name] = file._asdict()
    return {"schema": SCHEMA, **found}


def error_as_json(source: str, error: CkptoolError) -> dict[str, object]:
    """Return the object that ``migrate --json`` prints for a source that was not migrated."""
    return {"schema": SCHEMA, "source": source, "error": error_object(error)}
