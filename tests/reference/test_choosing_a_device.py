from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ckptool.cli.more import fixtures
from ckptool.errors import CkptoolError, UnsupportedFeature
from ckptool.reference.trainer import Choice, choose
from ckptool.torch_ops.devices import CudaMissing, Device, DeviceReport

NO_CUDA = CudaMissing("no-driver", "no NVIDIA driver", "Install it.")


def report(*devices: Device) -> DeviceReport:
    has_cuda = any(device.tag.startswith("cuda") for device in devices)
    return DeviceReport(
        torch_version="2.13.0",
        cuda_build="13.0",
        devices=(Device(tag="cpu", name="a processor"), *devices),
        cuda_missing=None if has_cuda else NO_CUDA,
    )


def card(number: int, free: int) -> Device:
    return Device(tag=f"cuda:{number}", name="a card", free_nbytes=free << 30, total_nbytes=80 << 30)


CARDS = [Device(tag=f"xpu:{number}", name="a card", free_nbytes=number << 30) for number in range(2)]


@pytest.mark.parametrize("request_", ["auto", "cuda"])
def test_the_card_with_the_most_free_memory_is_taken_and_the_reason_given(request_):
    choice = choose(request_, report(card(0, 3), card(1, 40), card(2, 7)))

    assert str(choice.device) == "cuda:1"
    assert "40.0 GiB free, the most of 3" in choice.why


def test_auto_prefers_mps_to_the_cpu_and_says_why_not_cuda():
    choice = choose("auto", report(Device(tag="mps", name="Apple GPU")))

    assert str(choice.device) == "mps"
    assert choice.why == "no NVIDIA driver"


@pytest.mark.parametrize(
    ("request_", "devices", "local_rank", "tag"),
    [
        ("auto", (), None, "cpu"),
        ("cuda:0", (card(0, 1), card(1, 40)), None, "cuda:0"),
        ("cpu", (card(0, 40),), None, "cpu"),
        ("auto", (card(0, 40), card(1, 1)), 1, "cuda:1"),  # under torchrun each process has that of its rank
        ("cuda", (card(0, 40), card(1, 1)), 1, "cuda:1"),
        *((request, CARDS, None, "xpu:1") for request in ("auto", "xpu", "xpu:1")),
        ("xpu", CARDS, 0, "xpu:0"),
    ],
)
def test_what_is_taken(request_, devices, local_rank, tag):
    assert str(choose(request_, report(*devices), local_rank=local_rank).device) == tag


@pytest.mark.parametrize(
    ("request_", "devices", "local_rank", "fact"),
    [
        ("cuda", (), None, "no device 'cuda' to train on: no NVIDIA driver"),
        ("cuda:1", (), None, "no device 'cuda:1' to train on: no NVIDIA driver"),
        ("cuda:4", (card(0, 1), card(1, 1)), None, "cpu, cuda:0, cuda:1"),
        ("cuda", (card(0, 1),), 1, "'cuda:1'"),
        ("mps", (card(0, 1),), None, "no device 'mps'"),
        ("gpu", (card(0, 1),), None, "no device 'gpu'"),
        ("npu", (card(0, 1),), None, "no device 'npu'"),
        ("cuda:x", (card(0, 1),), None, "no device 'cuda:x'"),
    ],
)
def test_what_cannot_be_had_is_refused_with_a_hint(request_, devices, local_rank, fact):
    with pytest.raises(CkptoolError, match=fact) as caught:
        choose(request_, report(*devices), local_rank=local_rank)

    assert caught.value.hint


def test_fixtures_of_a_device_that_cannot_train_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's own device without memory: it has no kernel that gives a number to Python, as training asks for.
    number = torch.empty(1, device="meta")
    monkeypatch.setattr("ckptool.reference.trainer.write_fixtures", lambda *_: number.item())
    monkeypatch.setattr("ckptool.reference.trainer.choose", lambda *_: Choice(torch.device("meta"), "asked for"))

    done = CliRunner().invoke(fixtures, [str(tmp_path / "set")])

    assert isinstance(done.exception, UnsupportedFeature)
    assert done.exception.message.startswith("meta cannot do all that the nets need: Tensor.item() cannot be called")
    assert done.exception.hint == "Use `--device cpu`."
