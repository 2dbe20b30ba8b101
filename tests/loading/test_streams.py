"""What is done on a device is done in order with the caller's own work, and with calls on other streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool import LiveModel
from ckptool.loading.memory.threads import in_own_thread
from ckptool.loading.serving import commit as commits
from ckptool.loading.serving import live_model as live_module
from ckptool.torch_ops import accelerators
from tests.loading.late_device import LateDevice
from tests.loading.same import saved


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """Let the memory of the CPU be that of a device with streams."""
    late = LateDevice(monkeypatch)
    monkeypatch.setattr(accelerators, "_OF_TORCH", ("cuda", "cpu"))
    monkeypatch.setattr(accelerators, "_HOSTS", ("meta",))
    for name in ("synchronize", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.cpu, name, getattr(torch.cuda, name), raising=False)
    monkeypatch.setattr(torch.cpu, "is_initialized", lambda: False, raising=False)
    return late


def linear(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2, dtype=dtype)


def clear(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def test_a_thread_of_ours_works_on_the_stream_of_its_caller(device: LateDevice) -> None:
    target, stream = torch.ones(5), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.queue(target.zero_)
        in_own_thread(lambda: target.copy_(torch.full((5,), 2.0)))
    stream.synchronize()

    assert target.tolist() == [2.0] * 5


@pytest.mark.parametrize("default", [True, False])
def test_loading_comes_behind_what_the_caller_does_to_the_model(
    default: bool, device: LateDevice, tmp_path: Path
) -> None:
    wanted, model = linear(1, torch.float64), linear(2)
    saved(wanted.state_dict(), tmp_path / "x.pth")
    stream = device.default if default else torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.queue(lambda: clear(model))  # an initialisation, say
        ckptool.load_into(model, tmp_path / "x.pth")  # the types differ: it is cast, apart from the caller
    stream.synchronize()

    assert torch.equal(model.weight, wanted.weight.float())


def test_in_place_the_kernels_of_calls_that_have_returned_come_first(device: LateDevice, tmp_path: Path) -> None:
    model, seen = linear(1), []
    before = model.weight.detach().clone()
    saved(linear(2).state_dict(), tmp_path / "x.pth")
    live = LiveModel(model)
    torch.cuda.Stream().queue(lambda: seen.append(model.weight.detach().clone()))

    live.reload(tmp_path / "x.pth")

    assert torch.equal(seen[0], before)
    assert not torch.equal(model.weight, before)


def test_in_place_all_of_it_is_there_before_the_next_call_begins(
    device: LateDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, done = LiveModel(linear(1)), []
    saved(linear(2).state_dict(), tmp_path / "x.pth")

    def late(function: Any) -> None:
        in_own_thread(function)
        device.current.queue(lambda: done.append(live._gate._is_alone))  # strided memory is filled by a kernel

    monkeypatch.setattr(commits, "in_own_thread", late)
    live.reload(tmp_path / "x.pth")

    assert done == [True]


@pytest.mark.parametrize("own_way", [True, False])
def test_a_model_is_whole_on_its_device_before_it_is_swapped_in(
    own_way: bool, device: LateDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made = linear(1), []
    if own_way:
        model.register_load_state_dict_pre_hook(lambda *given: None)
    saved(linear(2).state_dict(), tmp_path / "x.pth")
    live = LiveModel(model, commit="swap")

    def late(real: Any) -> Any:
        def copy(*given: Any) -> Any:
            device.current.queue(lambda: made.append(live.digest))  # copies within a device are not waited for
            return real(*given)

        return copy

    monkeypatch.setattr(live_module, "with_weights", late(live_module.with_weights))
    monkeypatch.setattr(live_module, "copy_of", late(live_module.copy_of))
    live.reload(tmp_path / "x.pth")

    assert made == [None]  # all of it is there while the old weights still serve
