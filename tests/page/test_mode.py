"""Nobody may read a page who may not read the files that it is about."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

import ckptool
from tests.missing import on_windows
from tests.program import invoke

ROOT = Path(ckptool.__file__).parents[1] / "fixtures"


@on_windows("it has no modes for groups and others")
@pytest.mark.parametrize(
    ("kind", "mode"), [("one", 0o644), ("one", 0o640), ("two", 0o600), ("folder", 0o600), ("refused", 0o600)]
)
def test_a_page_is_for_nobody_who_may_not_read_the_files(tmp_path: Path, kind: str, mode: int) -> None:
    old = os.umask(0o022)
    try:
        folder = tmp_path / "of"
        folder.mkdir()
        path = folder / "a.pth"
        shutil.copy(ROOT / "valid" / "lenet-state-dict-cpu-zip.pth", path)
        if kind == "refused":
            path.write_bytes(path.read_bytes()[:5000])
        path.chmod(mode)
        shutil.copy(ROOT / "valid" / "lenet-state-dict-cpu-zip.pth", tmp_path / "b.pth")
        files = {"two": [tmp_path / "b.pth", path], "folder": [folder]}.get(kind, [path])

        done = invoke(["report", *map(str, files), "-o", str(tmp_path / "page.html")])
    finally:
        os.umask(old)

    assert done.exit_code == (2 if kind == "refused" else 0), done.output
    assert stat.S_IMODE((tmp_path / "page.html").stat().st_mode) == mode
