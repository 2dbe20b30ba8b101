"""What a watched path promises: whatever is there in the end is served, and no failure is the last."""

from __future__ import annotations

import logging
import queue
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool import CkptoolError, LiveModel, Reload
from ckptool.reference.nets import LeNet
from tests.serving.running import IMAGES, PATIENCE, save_as_gpus_do


def answer(live: LiveModel) -> list[list[float]]:
    with torch.inference_mode():
        return live(IMAGES).tolist()


def test_a_file_that_came_between_loading_and_watching_is_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    save_as_gpus_do(path, seed=1)
    told: queue.Queue[Reload | CkptoolError] = queue.Queue()
    with LiveModel(LeNet().eval(), path) as live:
        b = save_as_gpus_do(path, seed=2)
        live.watch(path, every=0.01, on_reload=told.put)
        assert isinstance(told.get(timeout=PATIENCE), Reload)
        assert answer(live) == [pytest.approx(row, abs=1e-6) for row in b]


def test_a_file_that_was_loaded_is_not_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    save_as_gpus_do(path, seed=1)
    told: queue.Queue[Reload | CkptoolError] = queue.Queue()
    with LiveModel(LeNet().eval(), path) as live:
        live.watch(path, every=0.01, on_reload=told.put)
        with pytest.raises(queue.Empty):
            told.get(timeout=0.5)


def test_a_model_that_has_nothing_yet_takes_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    told: queue.Queue[Reload | CkptoolError] = queue.Queue()
    with LiveModel(LeNet().eval()) as live:
        live.watch(path, every=0.01, on_reload=told.put)  # there is no file yet
        a = save_as_gpus_do(path, seed=1)
        assert isinstance(told.get(timeout=PATIENCE), Reload)
        assert answer(live) == [pytest.approx(row, abs=1e-6) for row in a]


def finite(weights: Mapping[str, torch.Tensor]) -> None:
    for name, values in weights.items():
        if not values.isfinite().all():
            raise ValueError(f"{name} has NaN or infinities")


class Hooked(LeNet):
    """A model that takes part in loading."""

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)


@pytest.mark.parametrize(
    ("commit", "kind", "refuses"),
    [("in_place", LeNet, finite), ("swap", Hooked, lambda weights: weights["out.bias"].isfinite().all())],
)
def test_weights_that_the_caller_does_not_accept_never_serve(
    tmp_path: Path, commit: Any, kind: type[LeNet], refuses: Any
) -> None:
    path = tmp_path / "model.pth"
    a = save_as_gpus_do(path, seed=1)
    broken = LeNet().state_dict()
    broken["out.bias"][3] = float("inf")
    told: queue.Queue[Reload | CkptoolError] = queue.Queue()
    with LiveModel(kind().eval(), path, commit=commit, accept=refuses) as live:
        live.watch(path, every=0.01, on_reload=told.put)
        torch.save(broken, tmp_path / "new.pth")
        (tmp_path / "new.pth").rename(path)
        error = told.get(timeout=PATIENCE)
        assert isinstance(error, CkptoolError)
        assert error.kind == "not-accepted"
        assert live.last_error is error
        assert answer(live) == [pytest.approx(row, abs=1e-6) for row in a]
        b = save_as_gpus_do(path, seed=2)
        assert isinstance(told.get(timeout=PATIENCE), Reload)
        assert answer(live) == [pytest.approx(row, abs=1e-6) for row in b]
    torch.save(broken, path)
    with pytest.raises(CkptoolError, match="accept= refuses the weights"):
        LiveModel(kind().eval(), path, commit=commit, accept=refuses)


def test_an_error_of_torch_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.pth"
    save_as_gpus_do(path, seed=1)
    told: queue.Queue[Reload | CkptoolError | None] = queue.Queue()

    def fail(source: object, **_: object) -> Reload:
        told.put(None)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with LiveModel(LeNet().eval(), path) as live:
        with monkeypatch.context() as broken, caplog.at_level(logging.ERROR, "ckptool"):
            broken.setattr(live, "reload", fail)
            live.watch(path, every=0.01, on_reload=told.put)
            save_as_gpus_do(path, seed=2)
            assert told.get(timeout=PATIENCE) is None
        save_as_gpus_do(path, seed=3)
        assert isinstance(told.get(timeout=PATIENCE), Reload)
    assert "not reloaded" in caplog.text
