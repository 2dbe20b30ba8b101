"""The real files that tests use where their folder is there: what its manifest says of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "shared" / "corpus"
_MANIFEST = FOLDER / "manifest.jsonl"
ROWS: list[dict[str, Any]] = (
    [json.loads(line) for line in _MANIFEST.read_text().splitlines()] if _MANIFEST.exists() else []
)

MARKS = [
    pytest.mark.corpus,
    pytest.mark.skipif(not ROWS, reason=f"no folder of real files at {FOLDER}"),
]


def name_of(row: dict[str, Any]) -> str:
    return str(row["file"]).removeprefix("files/")
