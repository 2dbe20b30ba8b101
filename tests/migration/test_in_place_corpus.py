"""Files that strangers published, edited in place: what a copy would be, or refused and left as they were."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptool import Changes, CkptoolError, MigrationReport, diff, migrate, open_checkpoint
from ckptool.checking.check import check
from tests.corpus.files import FOLDER, MARKS, ROWS, name_of
from tests.scale import some

pytestmark = MARKS

CHANGES = {
    "shorter": Changes(to="cuda:1", strip_wrappers=True, keep_calls=True),
    "longer": Changes(rename=[("^", "longer.")], keep_calls=True),
}


def tensors(path: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    with open_checkpoint(path) as found:
        return [(name, one.info.location, one.info.shape) for name, one in found.tensors.items()]


def findings(path: Path) -> set[str]:
    return {one.code for one in check(path, deep=True).findings if one.severity != "info"}


def outcome(path: Path, changes: Changes) -> MigrationReport | CkptoolError:
    try:
        return migrate(path, changes=changes, in_place=True)
    except CkptoolError as error:
        return error


@pytest.mark.parametrize("row", some(ROWS[::2], 15), ids=name_of)
def test_an_edit_is_what_a_copy_is(row: dict[str, Any], tmp_path: Path) -> None:
    for name, changes in CHANGES.items():
        source = FOLDER / row["file"]
        path, copy = tmp_path / f"{name}{source.suffix}", tmp_path / f"copy-{name}.pth"
        shutil.copyfile(source, path)
        before = path.read_bytes()
        done = outcome(path, changes)
        if isinstance(done, CkptoolError) or not done.written:
            assert isinstance(done, MigrationReport) or done.kind != "verification-failed"
            assert path.read_bytes() == before
            continue
        copy = copy.with_suffix(".safetensors") if done.form == "safetensors" else copy
        migrate(source, copy, changes)
        assert diff(path, copy).same
        assert tensors(path) == tensors(copy)
        assert findings(path) <= findings(source)
