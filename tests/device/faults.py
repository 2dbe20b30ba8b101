"""
A device that fails: what was there before stays in use, nothing is kept, and whoever waits is told.

In a process that has the device for tests:  python -m pytest --device sim:0 tests/device/faults.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.loading.memory import filling
from tests import where
from tests.loading.same import saved

pytestmark = where.on_any
LOST = "device error: the device is lost"
FAILED = "device error: a copy failed"
KIND = where.device.partition(":")[0]


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(filling, "PIECE", 4096)  # so that there are many copies
    found: Any = sys.modules["tests.device.native"]
    yield found
    found.heal()


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    for value in (1.0, 2.0):
        saved(layers(value).state_dict(), tmp_path / f"{value}.pth")
    return tmp_path / "1.0.pth", tmp_path / "2.0.pth"


def layers(value: float) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(60, 60) for _ in range(3)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def values(tensors: Any) -> set[float]:
    getattr(torch, KIND).synchronize(where.device)
    return {float(value) for tensor in tensors for value in tensor.detach().cpu().unique()}


def kept(native: Any) -> tuple[int, int]:
    """Return how much memory of the device, and how much that is pinned, is in use."""
    return getattr(torch, KIND).memory_allocated(where.device), native.pinned_nbytes()


FAULTS: dict[str, tuple[Callable[[Any, int], None], str]] = {
    "a copy fails": (lambda native, after: native.fail_copy(after), FAILED),
    "the device is lost": (lambda native, after: native.lose(after), LOST),
}


@pytest.mark.parametrize("after", [0, 3, 7])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_load_that_meets_a_fault_says_so_and_keeps_nothing(
    fault: str, after: int, native: Any, files: tuple[Path, Path]
) -> None:
    strike, said = FAULTS[fault]
    before = kept(native)
    strike(native, after)
    with pytest.raises(RuntimeError, match=said):
        ckptool.load(files[0], where.device)
    native.heal()

    assert kept(native) == before
    assert values(ckptool.load(files[0], where.device).values()) == {1.0}


@pytest.mark.parametrize("after", [0, 2, 5])
def test_memory_that_is_not_there_after_all_is_told_in_bytes(after: int, native: Any, files: tuple[Path, Path]) -> None:
    before = kept(native)
    native.fail_allocation(after)
    with pytest.raises(ckptool.OutOfMemory, match=f"bytes are free on {where.device}") as caught:
        ckptool.load(files[0], where.device)

    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    del caught
    assert kept(native) == before


@pytest.mark.parametrize(
    ("fault", "meta"), [*((fault, meta) for fault in FAULTS for meta in (False, True)), ("no memory", True)]
)
def test_load_into_meets_a_fault_and_can_be_called_again(
    fault: str, meta: bool, native: Any, files: tuple[Path, Path]
) -> None:
    model = layers(0.0).to("meta" if meta else where.device)
    getattr(torch, KIND).synchronize(where.device)
    if fault == "no memory":
        native.fail_allocation(1)
        with pytest.raises(ckptool.OutOfMemory):
            ckptool.load_into(model, files[0], map_location=where.device)
    else:
        strike, said = FAULTS[fault]
        strike(native, 3)
        with pytest.raises(RuntimeError, match=said):
            ckptool.load_into(model, files[0], map_location=where.device)
    native.heal()
    assert not meta or all(parameter.is_meta for parameter in model.parameters())

    ckptool.load_into(model, files[0], map_location=where.device)
    assert values(model.parameters()) == {1.0}


@pytest.mark.parametrize("after", [0, 2, 5])
@pytest.mark.parametrize("fault", [*FAULTS, "no memory"])
def test_a_model_goes_on_serving_when_the_next_cannot_be_made(
    fault: str, after: int, native: Any, files: tuple[Path, Path]
) -> None:
    live = ckptool.LiveModel(layers(1.0).to(where.device), files[0], commit="swap")
    model, digest = live.model, live.digest
    getattr(torch, KIND).synchronize(where.device)
    if fault == "no memory":
        native.fail_allocation(after)
        with pytest.raises(ckptool.OutOfMemory):
            live.reload(files[1])
    else:
        strike, said = FAULTS[fault]
        strike(native, after)
        with pytest.raises(RuntimeError, match=said):
            live.reload(files[1])
    native.heal()

    assert (live.model, live.digest) == (model, digest)
    assert values(model.parameters()) == {1.0}
    live.reload(files[1])
    assert values(live.model.parameters()) == {2.0}


def test_in_place_a_model_that_has_some_of_both_has_no_digest_until_it_is_whole(
    native: Any, files: tuple[Path, Path]
) -> None:
    live = ckptool.LiveModel(layers(1.0).to(where.device), files[0])
    native.fail_copy(3)
    with pytest.raises(RuntimeError, match=FAILED):
        live.reload(files[1])

    assert live.digest is None
    live.reload(files[1])
    assert live.digest is not None
    assert values(live.model.parameters()) == {2.0}
