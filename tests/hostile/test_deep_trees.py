"""What nests deeper than the limit allows is refused; with another limit it goes through everything, however deep."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptool
from ckptool import LimitExceeded, Limits
from tests.formats.said import refused
from tests.hostile.cases.pickles import NESTS, zipped
from tests.scale import scaled, times

LEVELS = times(1_500, 12_000)
ANY_DEPTH = Limits(depth=10_000_000)


@pytest.mark.parametrize("name", NESTS)
def test_what_is_deeper_than_the_limit_is_refused(name: str) -> None:
    make, most = NESTS[name]
    data = zipped(make(most // 1000))
    allowed = Limits().depth // 1000

    ckptool.open_checkpoint(data, limits=Limits(depth=allowed)).close()
    caught = refused(data, LimitExceeded, limits=Limits(depth=allowed - 3))
    assert caught.kind == "too-deep"
    assert caught.actual == allowed - 3


@scaled
@pytest.mark.parametrize("name", NESTS)
def test_however_deep_it_is_read_compared_and_written(name: str, tmp_path: Path) -> None:
    make, _ = NESTS[name]
    path, other = tmp_path / "deep.pth", tmp_path / "other.pth"
    path.write_bytes(zipped(make(LEVELS)))
    other.write_bytes(zipped(make(LEVELS - 1)))

    ckptool.migrate(path, tmp_path / "written.pth", limits=ANY_DEPTH)
    assert ckptool.diff(path, tmp_path / "written.pth", limits=ANY_DEPTH).same
    assert not ckptool.diff(path, other, limits=ANY_DEPTH).same
