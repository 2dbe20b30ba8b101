"""Files that strangers published: each equals itself. Skipped where the folder is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptool import CkptoolError, diff, open_checkpoint
from tests.corpus.files import FOLDER, MARKS, ROWS, name_of
from tests.scale import some

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
