"""
Files that strangers published: each equals itself, and what it is migrated to. Skipped where the folder is not there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptool import CkptoolError, diff, open_checkpoint
from ckptool.errors import MigrationRefused, WeightsNotFound
from ckptool.migration.migrate import migrate
from tests.corpus.files import FOLDER, MARKS, ROWS, name_of
from tests.scale import in_turn, some

pytestmark = MARKS


@pytest.fixture
def source(row: dict[str, Any]) -> Path:
    path = FOLDER / row["file"]
    try:
        with open_checkpoint(path) as checkpoint:
            if checkpoint.form == "archive":
                pytest.skip("an archive of several")
    except CkptoolError as error:
        with pytest.raises(type(error)):
            diff(path, path)
        pytest.skip(f"not openable: {error.kind}")
    return path


@pytest.mark.parametrize("row", some(ROWS, 10), ids=name_of)
def test_a_file_is_equal_to_itself(source: Path) -> None:
    report = diff(source, source)

    assert report.same
    with open_checkpoint(source) as checkpoint:
        known = [*checkpoint.tensors, *checkpoint.attributes]
    assert report.tensors >= len(known if report.scope == "everything" else report.a.key or ())


@pytest.mark.parametrize(("form", "row"), some(in_turn(["state_dict", "safetensors", "same"], ROWS), 10))
def test_a_file_is_equal_to_what_it_is_migrated_to(source: Path, form: Any, tmp_path: Path) -> None:
    target = tmp_path / ("x.safetensors" if form == "safetensors" else "x.pth")
    try:
        migration = migrate(source, target, form=form, drop_unsupported=True, allow_empty=True)
    except (MigrationRefused, WeightsNotFound) as error:
        pytest.skip(f"not migrated: {error.kind}")
    report = diff(source, target)
    dropped = [name for name in report.only_a if name.startswith(migration.dropped)] if migration.dropped else []
    # safetensors of strangers have texts of their own, which are not in what is written.
    expected = {"names": len(dropped), "metadata": 0 if report.a.format != "safetensors" else report.counts["metadata"]}
    if len(dropped) == len(report.only_a) and not report.tensors:
        pytest.skip("nothing is left of it")

    assert {kind: count for kind, count in report.counts.items() if count} == {k: n for k, n in expected.items() if n}
