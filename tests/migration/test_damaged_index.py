"""A damaged index is said by check and stops migrate: names and shapes could be other than those that were saved."""

from __future__ import annotations

import zipfile
from pathlib import Path

import ckptool
from tests.each import each
from tests.migration.refused import refused

SOURCE = Path(__file__).parents[2] / "fixtures" / "valid" / "state-dict-plain-cpu-zip.pth"


def flipped(bit: int) -> bytes:
    data = bytearray(SOURCE.read_bytes())
    with zipfile.ZipFile(SOURCE) as archive:
        index = next(archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))
    data[data.index(index) + bit // 8 % len(index)] ^= 1 << bit % 8
    return bytes(data)


@each("bit", range(0, 4096, 67))
def test_no_flipped_bit_of_the_index_gets_through(bit: int, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.pth"
    damaged.write_bytes(flipped(bit))
    refused(damaged, tmp_path / "out.pth", to="cpu")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged.pth"]
    report = ckptool.check(damaged)
    assert report.error or "CK103" in {finding.code for finding in report.findings}


def test_a_whole_index_is_no_finding() -> None:
    assert "CK103" not in {finding.code for finding in ckptool.check(SOURCE).findings}
