"""What a watched path promises: whatever is there in the end is served, and no failure is the last."""

from __future__ import annotations

import logging
import queue
import re
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


def finite(weights: Mapping[str, torch.Tensor]) -> None:
    for name, values in weights.items():
        if not values.isfinite().all():
            raise ValueError(f"{name} has NaN or infinities")


def test_a_worker_starts_on_the_last_good_file_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, good = tmp_path / "model.pth", tmp_path / "good.pth"
    a = save_as_gpus_do(good, seed=1)
    path.write_bytes(good.read_bytes()[:5000])
    told: queue.Queue[Reload | CkptoolError] = queue.Queue()
    with LiveModel(LeNet().eval(), path, fallback=good) as live:
        assert answer(live) == [pytest.approx(row, abs=1e-6) for row in a]
        (line,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
        assert line.startswith(f"not loaded: {path}: truncated")
        assert isinstance(live.last_error, CkptoolError)
        assert repr(live).startswith(f"<LiveModel LeNet {live.digest} from '{good}' since")
        assert f"not reloaded at 20{repr(live).partition('at 20')[2]}".endswith(f"{live.last_error}>")
        assert live.status()["last_error"] == str(live.last_error)
        live.watch(every=0.01, on_reload=told.put)  # the file that is still to be loaded
        b = save_as_gpus_do(path, seed=2)
        while not isinstance(told.get(timeout=PATIENCE), Reload):
            pass
        assert answer(live) == [pytest.approx(row, abs=1e-6) for row in b]
        assert live.last_error is None
    good.unlink()
    path.unlink()
    with pytest.raises(CkptoolError, match=r"good\.pth: no such file"):
        LiveModel(LeNet().eval(), path, fallback=good)
    with pytest.raises(ValueError, match="fallback"):
        LiveModel(LeNet().eval(), fallback=good)


class Hooked(LeNet):
    """A model that takes part in loading."""

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)


@pytest.mark.parametrize(
    ("commit", "kind", "options", "said"),
    [
        ("in_place", LeNet, {}, r"NaN or infinities in 1 tensor: out.bias \(1 of 10\)"),
        ("swap", Hooked, {}, r"NaN or infinities in 1 tensor: out.bias \(1 of 10\)"),
        ("swap", LeNet, {"allow_nan": True, "accept": finite}, "accept= refuses the weights: out.bias has NaN"),
        (
            "in_place",
            Hooked,
            {"allow_nan": True, "accept": lambda weights: weights["out.bias"].isfinite().all()},
            "it returned tensor",
        ),
    ],
)
def test_weights_that_are_not_accepted_never_serve(
    tmp_path: Path, commit: Any, kind: type[LeNet], options: dict[str, Any], said: str
) -> None:
    path = tmp_path / "model.pth"
    a = save_as_gpus_do(path, seed=1)
    broken = LeNet().state_dict()
    broken["out.bias"][3] = float("inf")
    told: queue.Queue[Reload | CkptoolError] = queue.Queue()
    with LiveModel(kind().eval(), path, commit=commit, **options) as live:
        live.watch(path, every=0.01, on_reload=told.put)
        torch.save(broken, tmp_path / "new.pth")
        (tmp_path / "new.pth").rename(path)
        error = told.get(timeout=PATIENCE)
        assert isinstance(error, CkptoolError)
        assert re.search(said, str(error))
        assert live.last_error is error
        assert answer(live) == [pytest.approx(row, abs=1e-6) for row in a]
        b = save_as_gpus_do(path, seed=2)
        assert isinstance(told.get(timeout=PATIENCE), Reload)
        assert answer(live) == [pytest.approx(row, abs=1e-6) for row in b]
    torch.save(broken, path)
    with pytest.raises(CkptoolError, match=said):
        LiveModel(kind().eval(), path, commit=commit, **options)
    LiveModel(kind().eval(), path, commit=commit, allow_nan=True)


def test_nan_that_accept_leaves_does_not_serve(tmp_path: Path) -> None:
    save_as_gpus_do(tmp_path / "model.pth", seed=1)
    with pytest.raises(CkptoolError, match=r"NaN or infinities in 1 tensor: out\.bias"):
        LiveModel(
            LeNet().eval(),
            tmp_path / "model.pth",
            accept=lambda weights: weights["out.bias"].fill_(torch.nan) is not None,
        )


def test_a_mask_of_infinities_is_no_reason_to_refuse(tmp_path: Path) -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
            self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
            self.register_buffer("min_val", torch.tensor(torch.inf))

    torch.save(Masked().state_dict(), tmp_path / "model.pth")
    assert LiveModel(Masked().eval(), tmp_path / "model.pth").digest


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
