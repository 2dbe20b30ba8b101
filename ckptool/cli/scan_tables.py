"""What ``scan`` writes as tables of Parquet: their columns, and of each path the latest rows alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from ckptool.errors import OutputFailed
from ckptool.migration.output.lines import Lines
from ckptool.migration.output.parquet import EACH, Kind, write_parquet

_ROLE: Final = {"tensors": "count", "numel": "count", "nbytes": "count"}
CHECKPOINTS: Final[dict[str, Kind]] = {
    "path": "text",
    "nbytes": "count",
    "mtime_ns": "count",
    "version": "text",
    "etag": "text",
    "asked": "texts",
    "scanned_ns": "count",
    "member": "text",
    "format": "text",
    "form": "text",
    "writer": {"name": "text", "version": "text"},
    "tensors": "count",
    "tied": "count",
    "parameters": "count",
    "numel": "count",
    "tensors_nbytes": "count",
    "weights_nbytes": "count",
    "rest_nbytes": "count",
    "dtypes": "counts",
    "quantized": "text",
    "devices": "counts",
    "prefixes": "texts",
    "roles": {EACH: _ROLE},
    "shards": "count",
    "members": "count",
    "beside": "texts",
    "digest": "text",
    "digest_error": "text",
    "grade": "text",
    "findings": "counts",
    "worst": "text",
    "error": {"kind": "text", "type": "text", "message": "text"},
}
TENSORS: Final[dict[str, Kind]] = {
    "path": "text",
    "version": "text",
    "scanned_ns": "count",
    "member": "text",
    "name": "text",
    "role": "text",
    "dtype": "text",
    "shape": "sizes",
    "numel": "count",
    "nbytes": "count",
    "device": "text",
    "layout": "text",
}


def write_table(lines: Lines, path: str, columns: dict[str, Kind]) -> None:
    """
    Write the latest rows of each path in a file of lines to a table beside it: ``rows.parquet`` for ``rows.jsonl``.

    Raises:
        OutputFailed: It cannot be written, or lines are no rows.
    """
    latest: dict[int, int] = {}
    for row in _rows(lines, path):
        key = hash(row["path"])
        latest[key] = max(row["scanned_ns"], latest.get(key, 0))
    rows = (row for row in _rows(lines, path) if row["scanned_ns"] == latest[hash(row["path"])])
    write_parquet(f"{path.removesuffix('.jsonl')}.parquet", rows, columns)


def _rows(lines: Lines, path: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            row["path"], row["scanned_ns"] + 0
        except (ValueError, KeyError, TypeError) as error:
            fact = f"line {number:,} is no row of scan"
            raise OutputFailed(fact, kind="foreign-lines", path=path, hint="Choose another file.") from error
        yield row
