"""Scales that are no tensors: numbers, lists and arrays beside the weights, or in the text of a safetensors file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

import ckptool
from ckptool import MigrationRefused, UnsupportedFeature
from ckptool.cli import cli
from tests.quantized.layouts import fp8
from tests.quantized.test_known import said


def codes(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Return integers of both signs."""
    return torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


WEIGHTS: dict[str, Callable[[], torch.Tensor]] = {
    "int8": lambda: codes(8, 16),
    "int32": lambda: codes(8, 16, dtype=torch.int32),
    "fp8": lambda: fp8(8, 16),
}
NUMBERS: dict[str, Any] = {
    "a number": 0.02,
    "a scalar of numpy": np.float32(0.02),
    "an array of numpy": np.full(8, 0.02, dtype=np.float32),
    "a list": [0.02] * 8,
    "a scale and a zero point": (0.02, 3),
    "a dict": {"scale": 0.02, "zero_point": 3},
}


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("number", NUMBERS)
def test_scales_in_another_dict(number: str, weight: str, tmp_path: Path) -> None:
    model = {"fc.weight": WEIGHTS[weight](), "fc.bias": torch.ones(8)}
    for name in ("fc.weight", "fc", "fc.weight_scale"):
        inner = {"model": model, "scales": {name: NUMBERS[number]}}
        for whole in (inner, {"ckpt": inner}):
            torch.save(whole, tmp_path / "m.pth")
            for form in ("state_dict", "safetensors"):
                args = ["migrate", str(tmp_path / "m.pth"), str(tmp_path / "o"), "--form", form]
                result = CliRunner().invoke(cli, args)

                assert result.exit_code == 1, result.output
                assert f"scales.{name}" in result.output
                assert CliRunner().invoke(cli, [*args, "--break-quantized"]).exit_code == 0
                (tmp_path / "o").unlink()
            assert said(tmp_path / "m.pth")[0].startswith("quantised: ")
            ckptool.migrate(tmp_path / "m.pth", tmp_path / "o")
            (tmp_path / "o").unlink()


def test_loading_says_that_they_are_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for weight in WEIGHTS.values():
        caplog.clear()
        torch.save({"model": {"weight": weight()}, "scales": {"weight": 0.02}}, tmp_path / "m.pth")
        with caplog.at_level(logging.WARNING, "ckptool"):
            loaded = ckptool.load(tmp_path / "m.pth")

        assert loaded["weight"].dtype == weight().dtype
        assert "weight without scales.weight" in caplog.text
        with pytest.raises(UnsupportedFeature, match="quantised"):
            ckptool.load(tmp_path / "m.pth", dtype="bfloat16")
        with pytest.raises(UnsupportedFeature, match=r"quantised|integers"):
            ckptool.load_into(nn.Linear(16, 8, bias=False), tmp_path / "m.pth")


@pytest.mark.parametrize("weight", ["int8", "int32", "fp8"])
def test_they_do_not_go_alone(weight: str, tmp_path: Path) -> None:
    both = {"model": {"fc.weight": WEIGHTS[weight]()}, "scales": {"fc.weight": 0.02}, "epoch": 3}
    torch.save(both, tmp_path / "m.pth")
    with pytest.raises(MigrationRefused, match=r"model\.fc\.weight without scales\.fc\.weight"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", drop=["scales"])
    with pytest.raises(MigrationRefused, match="what scales"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", rename=[("^fc", "net")])
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", drop=["epoch"])

    assert torch.load(tmp_path / "o.pth")["scales"] == both["scales"]


@pytest.mark.parametrize("weight", ["int8", "int32", "fp8"])
@pytest.mark.parametrize("nested", [False, True])
def test_numbers_among_the_weights_stay(weight: str, nested: bool, tmp_path: Path) -> None:
    state = {"fc.weight": WEIGHTS[weight](), "fc.weight_scale": 0.02, "fc.bias": torch.ones(8)}
    torch.save({"model": state, "epoch": 1} if nested else state, tmp_path / "m.pth")
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", form="state_dict", rename=[("^fc", "net")])

    assert torch.load(tmp_path / "o.pth")["net.weight_scale"] == 0.02
    assert ckptool.load(tmp_path / "m.pth")["fc.weight_scale"] == 0.02
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "same.pth", rename=[("^fc", "net")])
    assert "quantised" in said(tmp_path / "same.pth")[0]
    for options in (
        {"exclude": ["fc.weight_scale"]},
        {"rename": [("fc.weight_scale", "x.y")]},
        {"drop_unsupported": True, "form": "safetensors"},
    ):
        with pytest.raises(MigrationRefused, match="loses what scales it"):
            ckptool.migrate(tmp_path / "m.pth", tmp_path / "x", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", ["int8", "int32", "fp8"])
@pytest.mark.parametrize(
    "texts",
    [{"fc.weight_scale": "0.02"}, {"scales": json.dumps({"fc.weight": 0.02})}, {"quantization": '{"fc": [1.5]}'}],
)
def test_texts_of_a_safetensors_file(texts: dict[str, str], weight: str, tmp_path: Path) -> None:
    save_file({"fc.weight": WEIGHTS[weight]()}, tmp_path / "m.safetensors", texts)
    with pytest.raises(MigrationRefused, match=r"fc\.weight without __metadata__\."):
        ckptool.migrate(tmp_path / "m.safetensors", tmp_path / "o.pth")
    ckptool.migrate(tmp_path / "m.safetensors", tmp_path / "o.safetensors", rename=[])

    assert load_file(tmp_path / "o.safetensors").keys() == {"fc.weight"}
    assert said(tmp_path / "o.safetensors")[0].startswith("quantised: ")


@pytest.mark.parametrize(
    "beside",
    [
        {"lr": 0.1, "scaler": {"scale": 65536.0, "growth_factor": 2.0}},
        {"loss_scale": 1024.0, "history": {"fc.loss": [0.1, 0.2]}},
        {"config": {"scale_lr": True, "image_scale": 0.5}, "fc": "a name", "best": np.float64(0.5)},
    ],
)
def test_other_numbers_scale_nothing(beside: dict[str, Any], tmp_path: Path) -> None:
    for weight in (torch.arange(64).reshape(8, 8), fp8(8, 8)):
        torch.save({"model": {"fc.weight": weight, "fc.bias": torch.ones(8)}, **beside}, tmp_path / "m.pth")

        assert said(tmp_path / "m.pth") == []
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", form="state_dict", dtype="bfloat16", force=True)
