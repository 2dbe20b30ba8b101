"""Progress of a migration: told as it goes, and stopped from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool import Cancellation, Cancelled, Limits
from tests.each import each

TARGETS: list[tuple[str, dict[str, Any]]] = [
    *(("out.pth", {}), ("out.safetensors", {}), ("folder", {"form": "dcp"}), ("shards", {"max_shard_size": "5MB"}))
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    state = {f"layer{number}.weight": torch.randn(1000, 600) for number in range(4)}
    torch.save({**state, "bias": torch.zeros(3)}, tmp_path / "in.pth")
    return tmp_path / "in.pth"


@each(("target", "options"), TARGETS)
def test_progress_grows_to_the_size_of_what_is_written_and_read_back(
    source: Path, target: str, options: dict[str, Any], tmp_path: Path
) -> None:
    for verify, limits in ((True, Limits(cancellation=Cancellation())), (False, Limits())):
        told: list[tuple[int, int]] = []
        back: list[tuple[int, int]] = []
        report = ckptool.migrate(
            source,
            tmp_path / target,
            progress=lambda *now: told.append(now),  # noqa: B023 - it is called at once
            read_back=lambda *now: back.append(now),  # noqa: B023
            limits=limits,
            force=True,
            verify=verify,
            **options,
        )
        assert report.nbytes is not None
        assert told == sorted(told)
        assert told[-1] == (report.nbytes, report.nbytes)
        assert back == sorted(back)
        assert {total for _, total in back} == ({report.nbytes} if verify else set())
        assert not verify or back[-1][0] > 0.99 * report.nbytes


@each(("target", "options"), TARGETS)
def test_a_migration_that_is_cancelled_on_the_way_leaves_nothing(
    source: Path, target: str, options: dict[str, Any], tmp_path: Path
) -> None:
    for at in (0, 1 << 20, 5 << 20):
        cancellation = Cancellation()

        def progress(written: int, _: int, cancellation: Cancellation = cancellation, at: int = at) -> None:
            if written > at:
                cancellation.cancel()

        before = sorted(tmp_path.iterdir())
        with pytest.raises(Cancelled):
            ckptool.migrate(
                source, tmp_path / target, progress=progress, limits=Limits(cancellation=cancellation), **options
            )
        assert sorted(tmp_path.iterdir()) == before
