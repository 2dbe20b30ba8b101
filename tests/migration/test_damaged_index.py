"""A damaged index is said by inspect and stops migrate: names and shapes could be other than those that were saved."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptool
from ckptool import CkptoolError
from ckptool.archives.zips import read_zip
from ckptool.checking.structure import examine
from tests.each import each

SOURCE = Path(__file__).parents[2] / "fixtures" / "valid" / "state-dict-plain-cpu-zip.pth"


def flipped(bit: int) -> bytes:
    data = bytearray(SOURCE.read_bytes())
    with ckptool.open_checkpoint(SOURCE) as checkpoint:
        record = next(r for name, r in read_zip(checkpoint.source).items() if name.endswith("/data.pkl"))
    data[record.offset + bit // 8 % record.nbytes] ^= 1 << bit % 8
    return bytes(data)


@each("bit", range(0, 4096, 37))
def test_no_flipped_bit_of_the_index_gets_through(bit: int, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.pth"
    damaged.write_bytes(flipped(bit))
    with pytest.raises(CkptoolError):
        ckptool.migrate(damaged, tmp_path / "out.pth", to="cpu")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged.pth"]
    try:
        checkpoint = ckptool.open_checkpoint(damaged)
    except CkptoolError:
        return
    with checkpoint:
        assert "CK103" in {finding.code for finding in examine(checkpoint)}


def test_a_whole_index_is_no_finding() -> None:
    with ckptool.open_checkpoint(SOURCE) as checkpoint:
        assert "CK103" not in {finding.code for finding in examine(checkpoint)}
