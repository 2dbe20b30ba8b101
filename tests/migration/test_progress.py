"""Progress of a migration: told as it goes, and stopped from there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptool
from ckptool import Cancellation, Cancelled, Limits
from tests.each import each

TARGETS = [("out.pth", {}), ("out.safetensors", {}), ("folder", {"form": "dcp"}), ("shards", {"max_shard_size": "9MB"})]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    state = {f"layer{number}.weight": torch.randn(1000, 1000) for number in range(4)}
    torch.save({**state, "bias": torch.zeros(3)}, tmp_path / "in.pth")
    return tmp_path / "in.pth"


@each(("target", "options"), TARGETS)
@each("limits", [Limits(), Limits(cancellation=Cancellation())])
def test_progress_grows_to_the_size_of_what_is_written(
    source: Path, target: str, options: dict[str, object], limits: Limits, tmp_path: Path
) -> None:
    told: list[tuple[int, int]] = []
    report = ckptool.migrate(
        source,
        tmp_path / target,
        progress=lambda *now: told.append(now),
        limits=limits,
        force=True,
        **options,  # type: ignore[arg-type]
    )
    written = [now for now, _ in told]
    assert written == sorted(written)
    assert told[-1] == (report.nbytes, report.nbytes)


@each(("target", "options"), TARGETS)
def test_reading_back_is_told_too(source: Path, target: str, options: dict[str, object], tmp_path: Path) -> None:
    for verify in (True, False):
        told: list[tuple[int, int]] = []
        report = ckptool.migrate(
            source,
            tmp_path / target,
            read_back=lambda *now: told.append(now),  # noqa: B023 - it is called at once
            force=True,
            verify=verify,
            **options,  # type: ignore[arg-type]
        )
        assert report.nbytes is not None
        assert [now for now, _ in told] == sorted(now for now, _ in told)
        assert {total for _, total in told} == ({report.nbytes} if verify else set())
        assert not verify or told[-1][0] > 0.99 * report.nbytes


@each(("target", "options"), TARGETS)
def test_a_migration_that_is_cancelled_on_the_way_leaves_nothing(
    source: Path, target: str, options: dict[str, object], tmp_path: Path
) -> None:
    for at in (0, 1 << 20, 9 << 20):
        cancellation = Cancellation()

        def progress(written: int, _: int, cancellation: Cancellation = cancellation, at: int = at) -> None:
            if written > at:
                cancellation.cancel()

        before = sorted(tmp_path.iterdir())
        with pytest.raises(Cancelled):
            ckptool.migrate(
                source,
                tmp_path / target,
                progress=progress,
                limits=Limits(cancellation=cancellation),
                **options,  # type: ignore[arg-type]
            )
        assert sorted(tmp_path.iterdir()) == before
