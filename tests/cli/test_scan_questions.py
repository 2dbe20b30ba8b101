"""The questions of ``docs/scan.md``, asked of a database over what scan prints, and answered without one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool import migrate
from ckptool.fleet import row
from tests.cli.scan_questions import QUESTIONS, TABLE

duckdb = pytest.importorskip("duckdb", reason="the questions are asked of DuckDB, which is not installed")

FIXTURES = Path(__file__).parents[2] / "fixtures"
COPIED = (
    *(
        "lenet-state-dict-cpu-zip.pth",
        "lenet-state-dict-data-parallel-forged-cuda0-zip.pth",
        "checkpoint-ddp-forged-cuda0-zip.pth",
    ),
    "lenet-model-forged-cuda0-legacy.pth",
)
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rows, dict[str, list[tuple[Any, ...]]]]:
    folder = tmp_path_factory.mktemp("models")
    for name in COPIED:
        shutil.copy(FIXTURES / "valid" / name, folder / name)
    migrate(FIXTURES / "valid" / COPIED[0], folder / "copy.safetensors")
    shutil.copy(FIXTURES / "invalid" / "lfs-pointer.pth", folder / "pointer.pth")
    torch.save({"state_dict": {"w": torch.zeros(4)}, "rest": torch.zeros(5000)}, folder / "old.ckpt")
    os.utime(folder / "old.ckpt", (0, 0))
    found = [row(path, digest=True) for path in sorted(folder.iterdir())]
    older = [{**one, "format": "none", "scanned_ns": 0} for one in found]
    lines = "".join(f"{json.dumps(one)}\n" for one in (*found, *older))
    (folder / "models.jsonl").write_text(lines)
    with duckdb.connect() as database:
        database.execute(TABLE.replace("models.jsonl", str(folder / "models.jsonl")))
        return found, {question: database.sql(query).fetchall() for question, query in QUESTIONS.items()}


EXPECTED: tuple[Callable[[dict[str, Any]], Any], ...] = (
    lambda one: one["error"] is None and (one["format"],),
    lambda one: "float32" in (one["dtypes"] or ()) and (one["path"], one["weights_nbytes"] // 2),
    lambda one: "optimizer" in (one["roles"] or ()) and (one["path"], one["roles"]["optimizer"]["nbytes"]),
    lambda one: one["path"].endswith((COPIED[0], "copy.safetensors")) and (one["digest"],),
    lambda one: one["grade"] in ("code", "system") and (one["path"], one["grade"]),
    lambda one: one["error"] and (one["error"]["kind"], 1, one["path"], one["error"]["message"]),
    lambda one: "cuda" in one["path"] and (one["path"], list(one["devices"])),
    lambda one: ("ddp" in one["path"] or "parallel" in one["path"]) and (one["path"], "module."),
    lambda one: False,
    lambda one: one["path"].endswith("old.ckpt") and (one["path"], one["rest_nbytes"]),
)
"""For each question, the beginning of the answer's line that a row leads to, if it leads to one."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_answer_follows_from_the_rows(
    question: str, answers: tuple[Rows, dict[str, list[tuple[Any, ...]]]]
) -> None:
    found, answered = answers
    lines = [line for one in found if (line := EXPECTED[list(QUESTIONS).index(question)](one))]
    if question.startswith("What is found most often"):
        lines = [(code, (one["writer"] or {}).get("name")) for one in found for code in one["findings"]]

    assert lines
    given = [line[: len(lines[0])] for line in answered[question]]
    assert sorted(map(repr, given)) == sorted({repr(line) for line in lines})
