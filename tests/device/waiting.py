"""
How often a call makes its caller wait for the device: at the end of what it sent, and for each copy that is converted.

In a process that has the device for tests:  python -m pytest --device sim:0 tests/device/waiting.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from tests import where
from tests.loading.same import saved

pytestmark = where.on_any
TENSORS = 6
CALLS: dict[str, tuple[Callable[[Path, Any], Any], int]] = {
    "load": (lambda folder, model: ckptool.load(folder / "32.pth", where.device), 1),
    # To a type of a smaller range, each tensor is looked at first, and waited for.
    "load with a cast": (lambda folder, model: ckptool.load(folder / "32.pth", where.device, dtype=torch.float64), 1),
    "load_into": (lambda folder, model: ckptool.load_into(model, folder / "32.pth"), 1),
    "load_into with a cast": (lambda folder, model: ckptool.load_into(model, folder / "64.pth"), TENSORS),
    "load_into, of the meta device": (
        lambda folder, model: ckptool.load_into(model.to("meta"), folder / "32.pth", map_location=where.device),
        1,
    ),
}


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(30, 30) for _ in range(TENSORS // 2)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved(layers().state_dict(), tmp_path / "32.pth")
    saved(layers().double().state_dict(), tmp_path / "64.pth")
    return tmp_path


def waits(call: Callable[[], Any]) -> int:
    native: Any = sys.modules["tests.device.native"]
    before = native.blocked()
    call()
    return int(native.blocked()) - before


@pytest.mark.parametrize("name", CALLS)
def test_a_call_waits_no_more_often_than_it_has_to(name: str, folder: Path) -> None:
    call, expected = CALLS[name]
    model = layers().to(where.device)

    assert waits(lambda: call(folder, model)) == expected


@pytest.mark.parametrize("file", ["32.pth", "64.pth"])
@pytest.mark.parametrize(
    ("commit", "more"),
    # Before all copies, and before it serves; before it serves, and before the old weights are let go of.
    [("in_place", 2), ("swap", 2)],
)
def test_a_reload_waits_for_each_copy_and_for_those_who_have_the_weights(
    commit: Any, more: int, file: str, folder: Path
) -> None:
    live = ckptool.LiveModel(layers().to(where.device), folder / "32.pth", commit=commit)

    assert waits(lambda: live.reload(folder / file)) == TENSORS + more


class Own(nn.Module):
    """Loads in its own way, as models with hooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def load_state_dict(self, *args: Any, **named: Any) -> Any:
        return super().load_state_dict(*args, **named)


def test_a_reload_of_a_model_that_loads_in_its_own_way_waits_before_and_after(tmp_path: Path) -> None:
    path = saved(Own().state_dict(), tmp_path / "own.pth")
    live = ckptool.LiveModel(Own().to(where.device), path, commit="in_place")

    # It is copied to the CPU first, which tries the file.
    assert waits(lambda: live.reload(path)) == 2 * TENSORS + 3
