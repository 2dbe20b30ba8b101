"""The tables that ``scan --parquet`` writes: what the lines say, whole or not at all, for whatever reads Parquet."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.migration.output import lines as lines_module
from tests.cli.test_scan import FINE, scan
from tests.program import run

TEXT = {"properties": {"a": {"type": "string"}}}
COMMAND = 'pip install "ckptool[parquet]"'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "runs"
    place.mkdir()
    shutil.copy(FINE, place / "fine.pth")
    (place / "broken.pth").write_bytes(b"PK\3\4 and no more")
    torch.save({"w": torch.zeros(2, 3), "optimizer": {"state": {}, "param_groups": []}}, place / "more.pth")
    return place


def test_tables_hold_what_the_latest_lines_say(folder: Path, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow.parquet", reason=f"pyarrow is not installed: {COMMAND}")
    output, listed = tmp_path / "rows.jsonl", tmp_path / "tensors.jsonl"
    scan(folder, "-o", output, "--tensors", listed, "--parquet", code=2)
    torch.save({"w": torch.zeros(4)}, folder / "more.pth")
    scan(folder, "-o", output, "--tensors", listed, "--parquet", code=2)

    for lines, table in ((output, "rows.parquet"), (listed, "tensors.parquet")):
        rows = [json.loads(line) for line in lines.read_text().splitlines()]
        latest = {row["path"]: row["scanned_ns"] for row in rows}
        wanted = [row for row in rows if row["scanned_ns"] == latest[row["path"]]]
        found = [plain(row) for row in arrow.read_table(tmp_path / table).to_pylist()]
        # A column of what was not asked for is empty; a line leaves it out.
        left_out = dict.fromkeys(key for row in found for key in row if key not in rows[0])
        assert left_out.keys() <= {"gate", "sha256"}
        assert found == [left_out | {key: value for key, value in row.items() if key != "schema"} for row in wanted]
        assert len(wanted) < len(rows)


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as JSON has it: what Arrow calls a map is a list of pairs."""
    maps = {"dtypes", "devices", "roles", "findings"}
    return {key: dict(value) if key in maps and value is not None else value for key, value in row.items()}


def test_a_database_reads_them(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason=f"pyarrow is not installed: {COMMAND}")
    duckdb = pytest.importorskip("duckdb", reason="DuckDB is not installed")
    scan(folder, "-o", tmp_path / "rows.jsonl", "--tensors", tmp_path / "tensors.jsonl", "--parquet", code=2)
    asked = f"""
        SELECT parse_filename(path), c.tensors, dtypes['float32'], roles['model'].parameters, count(t.name), error.kind
        FROM '{tmp_path}/rows.parquet' c LEFT JOIN '{tmp_path}/tensors.parquet' t USING (path, scanned_ns)
        GROUP BY ALL ORDER BY 1
    """

    broken, fine, more = duckdb.sql(asked).fetchall()
    assert (broken[1], broken[4], broken[5]) == (
        None,
        0,
        json.loads((tmp_path / "rows.jsonl").read_text().split("\n")[0])["error"]["kind"],
    )
    assert fine == ("fine.pth", 10, 10, 32_998, 10, None)
    assert more[1] == more[4] == 1


def test_an_interrupted_table_leaves_the_one_before(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason=f"pyarrow is not installed: {COMMAND}")
    path = tmp_path / "rows.parquet"
    lines_module.write_parquet(str(path), [{"a": "one"}], TEXT)
    before = path.read_bytes()

    def rows() -> Any:
        yield {"a": "two"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lines_module.write_parquet(str(path), rows(), TEXT)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_odd_texts_and_numbers_have_a_place(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow.parquet", reason=f"pyarrow is not installed: {COMMAND}")
    path = tmp_path / "rows.parquet"
    lines_module.write_parquet(
        str(path),
        [{"a": "x\udc80", "n": 1 << 70}, {}],
        {"properties": {**TEXT["properties"], "n": {"type": "integer"}}},
    )

    assert arrow.read_table(path).to_pylist() == [{"a": "x\\udc80", "n": (1 << 63) - 1}, {"a": None, "n": None}]


def test_a_file_of_something_else_stays(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason=f"pyarrow is not installed: {COMMAND}")
    (tmp_path / "rows.parquet").write_bytes(FINE.read_bytes())
    said = scan(folder, "-o", tmp_path / "rows.jsonl", "--parquet", code=2).stderr

    assert "is not a Parquet file" in said
    assert (tmp_path / "rows.parquet").read_bytes() == FINE.read_bytes()


def test_without_the_package_nothing_begins(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    result = run("scan", folder, "-o", tmp_path / "rows.jsonl", "--parquet", code=2)
    assert COMMAND in result.output
    assert not (tmp_path / "rows.jsonl").exists()
