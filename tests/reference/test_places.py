"""No fixture names a folder of the machine that wrote it."""

from __future__ import annotations

import re
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fixture_set.places import relative

if TYPE_CHECKING:
    from collections.abc import Iterator

FIXTURES = Path(__file__).parents[2] / "fixtures"
# Behind a word or a slash it would be part of an address of the web, or of a relative path.
FOLDER = re.compile(
    rb"(?<![\w./:-])/(?:work|root|home|tmp|usr|opt|mnt|srv|var|private|Users|workspace)(?:/[\w.+-]+)+"
    rb"|(?<![\w./:-])/(?:[\w.+-]{2,}/){2,}[\w.+-]{2,}"
    rb"|[\w./-]*(?:site|dist)-packages[\w./-]*"
    rb"|\b[A-Za-z]:\\{1,2}(?:[\w.+ -]{2,}\\{1,2})+\w+"
)


def contents(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes, and what each deflated member holds, also of archives in the middle of a file."""
    raw = path.read_bytes()
    yield raw
    for local in re.finditer(rb"PK\x03\x04.{4}\x08\x00", raw, re.DOTALL):
        lengths = raw[local.start() + 26 : local.start() + 30]
        begin = local.start() + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        yield zlib.decompressobj(-zlib.MAX_WBITS).decompress(raw[begin:])


def test_the_committed_files_name_no_folder_of_a_machine() -> None:
    files = [path for path in sorted(FIXTURES.rglob("*")) if path.is_file()]
    found = {path.name: FOLDER.findall(content) for path in files for content in contents(path)}

    assert {name: places for name, places in found.items() if places} == {}
    assert len(files) > 250


def test_a_place_is_told_from_the_nearest_folder_of_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    link = tmp_path / "link"
    link.symlink_to(inner)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(link)])

    assert relative(str(inner / "package" / "module.py")) == "package/module.py"
    assert relative(str(link / "package" / "module.py")) == "package/module.py"
    assert relative(str(tmp_path / "other" / "module.py")) == "other/module.py"
    assert relative(str(tmp_path)) == "."
    assert relative(str(tmp_path.parent / "script.py")) == "script.py"
    assert relative(str(tmp_path) + "-2/script.py") == "script.py"
    assert relative("package/module.py") == "package/module.py"
    assert relative("<string>") == "<string>"
    assert relative("") == ""
