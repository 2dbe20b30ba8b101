"""A checkpoint is read by the keys at its top as the object that torch loads is: without running anything."""

from __future__ import annotations

import argparse
import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptool
from tests.loading.same import torch_load
from tests.scale import one_of_twins

VALID = Path(ckptool.__file__).parents[1] / "fixtures" / "valid"
FILES = sorted(VALID.glob("checkpoint-*.pth"))


class Loud:
    """Runs something when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("it ran",)


def assert_alike(found: Any, expected: Any) -> None:
    """Fail unless a value is what torch loads, with lazy tensors in place of tensors."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, ckptool.LazyTensor)
        assert found.torch().equal(expected.cpu())
    elif isinstance(expected, argparse.Namespace):
        assert_alike(found, vars(expected))
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, one in expected.items():
            assert_alike(found[key], one)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_alike(*pair)
    elif not isinstance(expected, torch.device):
        assert found == expected


@pytest.mark.parametrize("file", one_of_twins(FILES), ids=lambda file: file.name)
def test_what_is_at_the_top_is_what_torch_loads(file: Path) -> None:
    expected = torch_load(file, weights_only=False)

    with ckptool.open_checkpoint(file) as checkpoint:
        assert list(checkpoint) == list(checkpoint.keys()) == list(expected)
        for key, one in expected.items():
            assert key in checkpoint
            # Of a model without its class there is what its state_dict() would give.
            assert_alike(checkpoint[key], one.state_dict() if isinstance(one, nn.Module) else one)


def test_weights_are_state_dicts_and_the_rest_is_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {
        "model": collections.OrderedDict(w=torch.ones(2)),
        "args": argparse.Namespace(lr=0.1, seen={1}),
        "best": np.float64(0.5),
        "loud": Loud(),
        "device": torch.device("cpu"),
        7: [b"x", {"t": torch.zeros(1)}],
    }
    torch.save(content, tmp_path / "it.pth")

    with ckptool.open_checkpoint(tmp_path / "it.pth") as checkpoint:
        assert isinstance(checkpoint["model"], ckptool.StateDict)
        assert checkpoint["args"] == {"lr": 0.1, "seen": {1}}
        assert checkpoint["best"] == 0.5
        assert repr(checkpoint["loud"]) == "<Call __builtin__.print('it ran')>"
        assert repr(checkpoint["device"]) == "<Call torch.device('cpu')>"
        assert checkpoint[7][0] == b"x"
        assert checkpoint[7][1]["t"].name == "7.1.t"
        assert list(dict(checkpoint)) == list(content)
        with pytest.raises(KeyError, match="'args' is"):
            checkpoint["arg"]
        with pytest.raises(KeyError):
            checkpoint[8]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["safetensors-tied-cpu.safetensors", "model-plain-forged-cuda0-legacy.pth"])
def test_what_holds_tensors_alone_has_their_names(name: str) -> None:
    with ckptool.open_checkpoint(VALID / name) as checkpoint:
        assert list(checkpoint) == list(checkpoint.tensors)
        assert all(checkpoint[key] is tensor for key, tensor in checkpoint.tensors.items())


def test_a_state_dict_alone_has_the_names_of_its_tensors(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "it.pth")

    with ckptool.open_checkpoint(tmp_path / "it.pth") as checkpoint:
        assert list(checkpoint) == ["weight", "bias"]
        assert checkpoint["bias"] is checkpoint.tensors["bias"]


def test_what_is_nested_beyond_measure_is_an_error(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    deep.append(deep)
    torch.save({"deep": deep, "n": 1}, tmp_path / "it.pth")

    with ckptool.open_checkpoint(tmp_path / "it.pth") as checkpoint:
        assert checkpoint["n"] == 1
        with pytest.raises(ckptool.LimitExceeded, match="nested"):
            checkpoint["deep"]


def test_the_full_name_of_a_tensor_is_a_key_too(tmp_path: Path) -> None:
    torch.save({"model": {"a.weight": torch.arange(4.0)}, "epoch": 3}, tmp_path / "x.pth")
    with ckptool.open_checkpoint(tmp_path / "x.pth") as checkpoint:
        (name,) = checkpoint.tensors
        assert name in checkpoint
        assert checkpoint[name] is checkpoint.tensors[name]
        assert list(checkpoint) == ["model", "epoch"]
