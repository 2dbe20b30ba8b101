"""Weights beside those that are chosen are never left out in silence, and what is not weights raises no alarm."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from tests.each import each
from tests.loading.same import saved


def big() -> dict[str, Any]:
    return nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 32)).state_dict()


def small() -> dict[str, Any]:
    return nn.Linear(32, 3).state_dict()


@each(
    "make",
    [
        lambda: {"backbone": big(), "classifier": small()},
        lambda: {"policy": big(), "value": small(), "epoch": 3},
        lambda: {"features": big(), "classifier": small()},
        lambda: {"backbone": big(), "neck": small(), "head": small()},
        lambda: {"policy": big(), "epoch": 3, "seen": 4, "logit_scale": torch.tensor(1.0)},
        lambda: {"model": {"backbone": big(), "head": small()}},
    ],
)
def test_parts_under_names_of_their_own_are_not_chosen_by_size(make: Callable[[], Any], tmp_path: Path) -> None:
    path = tmp_path / "parts.pth"
    saved(make(), path)

    with pytest.raises(ckptool.AmbiguousWeights) as caught:
        ckptool.load(path)
    assert "`key=`" in (caught.value.hint or "")
    with pytest.raises(ckptool.AmbiguousWeights) as refused:
        ckptool.migrate(path, tmp_path / "out.safetensors")
    assert "`form='same'`" in (refused.value.hint or "")


@each(
    ("make", "said"),
    [
        (lambda: {"state_dict": big(), "head.weight": torch.ones(3, 32)}, "head.weight (96 elements)"),
        (lambda: {"model": big(), "logit_scale": torch.tensor(1.0)}, "logit_scale (1 element)"),
        (lambda: {"model": small(), "lstm": nn.LSTM(8, 8).state_dict()}, "lstm (576 elements)"),
        (lambda: {"net": small(), "layers": [torch.ones(2)]}, "layers.0 (2 elements)"),
    ],
)
def test_what_is_beside_weights_under_a_well_known_key_is_said(
    make: Callable[[], Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "parts.pth"
    saved(make(), path)
    caplog.clear()

    with caplog.at_level(logging.WARNING, logger="ckptool"):
        ckptool.load(path)
        ckptool.load(path, key=ckptool.open_checkpoint(path).weights.key)  # asked for: nothing to say
    assert [said in one.message for one in caplog.records] == [True]
    report = ckptool.migrate(path, tmp_path / "out.safetensors")
    assert any(said in note for note in report.notes)
    assert any(said in line for line in ckptool.diff(path, report.target).not_compared)
    (found,) = (one for one in ckptool.check(path).findings if one.code == "CK302")
    assert found.severity == "warning"
    assert said in found.message


@each("key", ["state_dict", "net_G"])
def test_what_is_known_to_be_no_weights_raises_no_alarm(
    key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counted = {"epoch": 3, "mean": torch.ones(3), "std": torch.ones(3), "best_acc": torch.tensor(0.1)}
    examples = {"data": {"x": torch.ones(5, 3), "y": torch.ones(5)}, "input_sample": torch.ones(1, 3)}
    trained = {"rng": [torch.get_rng_state()], "train_idx": torch.ones(4), "loss_weight": torch.ones(2)}
    of_it = {"grads": big(), "hyper_parameters": {"transform": {"scale": torch.ones(2)}}}
    path = tmp_path / "parts.pth"
    saved({key: big(), **counted, **examples, **trained, **of_it}, path)
    caplog.clear()

    assert len(ckptool.load(path)) == 4
    assert not caplog.records
    assert not [one for one in ckptool.check(path).findings if one.code == "CK302"]


@pytest.mark.parametrize(
    ("model", "fact"),
    [
        ({}, "there are none under 'model': those under 'ema' are averaged"),
        (None, "there are none under 'model': those under 'ema' are averaged"),
        ({"w": torch.ones(3)}, "the averaged weights under 'ema' have 2 tensors that those under 'model' lack: b, c"),
    ],
)
def test_a_choice_that_averaged_weights_make_odd_is_said(
    model: Any, fact: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    averaged = {name: torch.ones(3) for name in "wbc"}
    torch.save({"model": model, "ema": averaged}, tmp_path / "a.pth")
    ckptool.load(tmp_path / "a.pth")
    assert fact in caplog.text
    assert fact in ckptool.migrate(tmp_path / "a.pth", tmp_path / "b.pth", form="state_dict").notes
    caplog.clear()
    torch.save({"model": averaged, "ema": averaged | {"decay": torch.tensor(0.9)}}, tmp_path / "a.pth")
    ckptool.load(tmp_path / "a.pth")
    assert "averaged" not in caplog.text


@pytest.mark.parametrize("load", [ckptool.load, lambda path, **more: ckptool.load_into(nn.Linear(1, 1), path, **more)])
def test_an_empty_glob_is_refused(load: Any, tmp_path: Path) -> None:
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "a.pth")
    with pytest.raises(ValueError, match="include='' is empty"):
        load(tmp_path / "a.pth", include="")
