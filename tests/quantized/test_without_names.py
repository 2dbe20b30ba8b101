"""Codes that no name tells: they are known by their types, shapes and values, and no cast breaks them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import ckptool
from ckptool import MigrationRefused, UnsupportedFeature
from tests.quantized.layouts import bits, fp8
from tests.quantized.test_known import said
from tests.quantized.test_numbers import codes

BIAS = {"fc.bias": torch.linspace(-1, 1, 64)}
FOUR = bits(64, 32, dtype=torch.uint8) % 16
WORDS = bits(64, 32, dtype=torch.int32)
BOOK = torch.linspace(-1, 1, 16)

FILES: dict[str, Any] = {
    "one code book for all": {"a": FOUR, "b": FOUR, "codebook": BOOK},
    "one code book for all weights": {"fc.weight": FOUR, "codebook": BOOK} | BIAS,
    "codes of 64 bits": {"fc.weight": FOUR.long(), "codebook": BOOK} | BIAS,
    "a float around": {"net.fc.weight": codes(64, 32), "step": torch.ones(64)} | BIAS,
    "packed words": {"fc.w": WORDS} | BIAS,
    "no scale at all": {"fc.weight": codes(64, 32)} | BIAS,
    "a float in a module of its own": {"enc.codes.w": FOUR, "enc.aux.t": torch.ones(64)} | BIAS,
    "a number for 8 bits under their own name": {"model": {"m.weight": fp8(8, 16)}, "m.weight": 0.013},
    "in one entry": {"fc.weight": {"q": codes(64, 32), "scale": torch.ones(64)}} | BIAS,
    "8 bits in one entry": {"fc.weight": {"q": fp8(64, 32), "s": torch.ones(64)}} | BIAS,
}


@pytest.mark.parametrize("name", FILES)
def test_a_cast_is_refused(name: str, tmp_path: Path) -> None:
    torch.save(FILES[name], tmp_path / "m.pth")

    assert said(tmp_path / "m.pth")[0].startswith("quantised: ")
    with pytest.raises(MigrationRefused, match="a cast breaks quantised weights"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", dtype="bfloat16")
    with pytest.raises(UnsupportedFeature, match="a cast breaks quantised weights"):
        ckptool.load(tmp_path / "m.pth", dtype="bfloat16")
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth")
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", dtype="bfloat16", break_quantized=True, force=True)


def test_a_number_under_the_own_name_of_integers_is_not_left(tmp_path: Path) -> None:
    torch.save({"model": {"m.weight": codes(8, 16)}, "m.weight": 0.013}, tmp_path / "m.pth")

    with pytest.raises(MigrationRefused, match=r"m\.weight without m\.weight"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", form="state_dict")
    with pytest.raises(UnsupportedFeature, match="loses what scales it"):
        ckptool.load(tmp_path / "m.pth", dtype="bfloat16")


def as_json(path: Path) -> None:
    path.with_name("scales.json").write_text(json.dumps({"fc.weight": [0.1] * 64}))


def as_tensors(path: Path) -> None:
    save_file({"fc.weight_scale": torch.ones(64)}, path.with_name("extra.safetensors"))


@pytest.mark.parametrize("beside", [as_json, as_tensors])
@pytest.mark.parametrize("weight", [codes(64, 32), fp8(64, 32)])
def test_scales_in_a_file_beside(weight: Tensor, beside: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"fc.weight": weight} | BIAS, path)
    beside(path)
    (file,) = [one.name for one in tmp_path.iterdir() if one != path]

    for source in (path, tmp_path):
        assert f", which {file} may have, 1 weight without" in said(source)[0]
        with pytest.raises(MigrationRefused, match=file):
            ckptool.migrate(source, tmp_path / "out" / "o.pth", dtype="bfloat16")
        with pytest.raises(UnsupportedFeature, match=file):
            ckptool.load(source, dtype="bfloat16")
    ckptool.migrate(path, tmp_path / "o.pth")


def test_what_is_beside_a_net_of_8_bits_without_scales_is_another_net(tmp_path: Path) -> None:
    save_file({"fc.weight": fp8(64, 32)} | BIAS, tmp_path / "model.safetensors")
    save_file({"fc.weight": torch.ones(64, 32)} | BIAS, tmp_path / "other.safetensors")
    (tmp_path / "config.json").write_text('{"fc": {"weight": "xavier"}, "scale": 1.5}')

    assert said(tmp_path / "model.safetensors") == []
    ckptool.migrate(tmp_path / "model.safetensors", tmp_path / "o.pth", dtype="bfloat16")


PLAIN: dict[str, Tensor] = {
    "m.position_ids": torch.arange(64)[None],
    "m.steps": torch.arange(64, dtype=torch.uint8).reshape(8, 8),
    "m.tril": torch.ones(8, 8, dtype=torch.uint8).tril(),
    "m.table": torch.arange(64, dtype=torch.int32).flip(0).reshape(8, 8),
    "m.image": bits(3, 8, 8, dtype=torch.uint8),
    "m.frames": bits(4, 3, 8, 8, dtype=torch.uint8),
    "m.rng": bits(5056, dtype=torch.uint8),
}


def test_masks_positions_tables_and_images_are_no_codes(tmp_path: Path) -> None:
    torch.save(PLAIN | {"m.weight": torch.randn(8, 8), "n.bias": torch.ones(8)}, tmp_path / "m.pth")

    assert said(tmp_path / "m.pth") == []
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", dtype="bfloat16")
    ckptool.load(tmp_path / "m.pth", dtype="bfloat16")
