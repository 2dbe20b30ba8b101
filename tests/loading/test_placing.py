"""Devices and types that no tensor of a model would get are refused before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "w.pth")
    return tmp_path / "w.pth"


@pytest.mark.parametrize("dtype", [torch.float16, "bf16", torch.float64])
def test_a_type_that_the_model_would_not_get_is_refused_with_a_next_step(path: Path, dtype: Any) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.clone()

    for load in (ckptool.load_into, ckptool.LiveModel):
        with pytest.raises(ValueError, match=r"dtype=torch\.\w+ is for tensors on the meta device.*model\.to\(torch"):
            load(model.eval(), path, dtype=dtype)

    assert torch.equal(model.weight, before)


def test_the_type_that_the_model_has_is_fine_and_so_is_any_where_tensors_are_on_meta(path: Path) -> None:
    ckptool.load_into(nn.Linear(3, 2), path, dtype=torch.float32)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 2))[0]
    ckptool.load_into(model, path, dtype="fp16")

    assert model.weight.dtype is torch.float16


def test_two_devices_for_one_load_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="map_location='meta' and device='cpu' are two words for one thing"):
        ckptool.load(path, "meta", device="cpu")
    assert ckptool.load(path, "meta", device="meta")["weight"].is_meta
    assert ckptool.load(path, device="meta")["weight"].is_meta
