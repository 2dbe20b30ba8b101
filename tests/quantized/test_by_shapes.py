"""What no name tells: matrices of integers or 8 bits beside floats that fit them, and places in code books."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import ckptool
from ckptool import MigrationRefused, UnsupportedFeature
from tests.quantized.layouts import bits, fp8
from tests.quantized.test_known import said
from tests.quantized.test_numbers import codes
from tests.quantized.test_other_names import refuses

FITS = {"tensor": (1,), "row": (8,), "rows": (8, 1), "column": (1, 16), "block": (4, 4)}


@pytest.mark.parametrize("shape", FITS)
@pytest.mark.parametrize("scale", ["inv", "s", "multiplier", "weight_inv_s"])
def test_8_bits_beside_a_float_that_fits(scale: str, shape: str, tmp_path: Path) -> None:
    for weight in ("weight", "w1", "in_proj_weight"):
        state = {f"fc.{weight}": fp8(8, 16), f"fc.{scale}": torch.full(FITS[shape], 0.1), "fc.bias": torch.ones(8)}
        torch.save(state, tmp_path / "m.pth")

        refuses(tmp_path / "m.pth", f"fc.{scale}", "with scales under other names", tmp_path)


@pytest.mark.parametrize("shape", FITS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize(("values", "scale"), [("kernel", "gain"), ("weight", "scales"), ("qweight", "delta")])
def test_integers_beside_a_float_that_fits(
    values: str, scale: str, dtype: torch.dtype, shape: str, tmp_path: Path
) -> None:
    state = {f"m.{values}": codes(8, 16, dtype=dtype), f"m.{scale}": torch.full(FITS[shape], 0.1)}
    torch.save(state | {"m.bias": torch.ones(8)}, tmp_path / "m.pth")

    refuses(tmp_path / "m.pth", f"m.{scale}", "integers with scales", tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("values", "beside"),
    [("qweight", ("scales",)), ("weight", ("weight_scale",)), ("kernel", ("delta", "zero_point"))],
)
def test_small_numbers_that_are_said_to_be_quantised(
    values: str, beside: tuple[str, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    four = (bits(8, 16, dtype=torch.uint8) % 16).to(dtype)
    torch.save({f"m.{values}": four} | {f"m.{one}": torch.full((8,), 0.1) for one in beside}, tmp_path / "m.pth")

    refuses(tmp_path / "m.pth", f"m.{beside[0]}", "integers", tmp_path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("labels", "book"), [("labels", "centroids"), ("codes", "codebook"), ("weight_idx", "centers")]
)
@pytest.mark.parametrize("shape", [(4,), (4, 2)])
def test_places_in_a_code_book(
    labels: str, book: str, shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    places = (bits(8, 16, dtype=torch.uint8) % 4).to(dtype)
    torch.save({f"m.{labels}": places, f"m.{book}": torch.rand(shape)}, tmp_path / "m.pth")

    refuses(tmp_path / "m.pth", f"m.{book}", "cod" if dtype != torch.uint8 else "", tmp_path)


def tables() -> dict[str, dict[str, Tensor]]:
    """Return nets that are not quantised, with integers or floats of 8 bits beside floats that would fit."""
    index = torch.arange(64).reshape(8, 8)
    net = {f"blocks.{one}.weight": fp8(8, 8) for one in range(4)}
    return {
        "buckets": {"m.boundaries": torch.rand(8), "m.table": index, "m.hash_weight": index, "m.w": index},
        "Swin": {"m.relative_position_index": index.int(), "m.relative_position_bias_table": torch.rand(8, 1)},
        "batch norm": {"bn.weight": torch.ones(8), "bn.num_batches_tracked": torch.tensor(3)},
        "positions": {"e.position_ids": torch.arange(8)[None], "e.token_table": index, "e.gain": torch.ones(8)},
        "groups of data": {"labels": torch.arange(64) % 4, "centroids": torch.rand(4, 3)},
        "more labels than centroids": {"m.labels": index, "m.centroids": torch.rand(8, 3)},
        "classes": {"m.types": index.to(torch.int8), "m.kernel": index.to(torch.int8), "m.gain": torch.ones(8)},
        "a parameter in a net of 8 bits": net | {"cell.A": fp8(8, 8), "cell.a": torch.rand(8)},
        "weight norm of 8 bits": {"m.weight_v": fp8(8, 8), "m.weight_g": torch.ones(8, 1)},
        "a transformer of 8 bits": {"pos_embed": fp8(1, 8, 8), "cls_token": torch.rand(1, 1, 8), **net},
    }


@pytest.mark.parametrize("name", tables())
def test_what_is_not_quantised_is_cast(name: str, tmp_path: Path) -> None:
    torch.save(tables()[name], tmp_path / "m.pth")

    assert said(tmp_path / "m.pth") == []
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", dtype="float64")
    ckptool.load(tmp_path / "m.pth", dtype="float64")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_a_model_on_meta_takes_no_integers(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(8, 8, dtype=dtype), "bias": torch.ones(8)}, tmp_path / "m.pth")
    with torch.device("meta"):
        model = nn.Linear(8, 8)

    with pytest.raises(UnsupportedFeature, match="1 tensor of integers"):
        ckptool.load_into(model, tmp_path / "m.pth")
    with pytest.raises(UnsupportedFeature, match="1 tensor of integers"):
        ckptool.LiveModel(model).reload(tmp_path / "m.pth")
    assert model.weight.is_meta
    ckptool.load_into(model, tmp_path / "m.pth", break_quantized=True)
    assert model.weight.dtype == dtype


def test_a_scale_of_several_weights_is_that_of_each(tmp_path: Path) -> None:
    state = {f"{one}_weight": codes(8, 8) for one in "qkv"} | {"step": torch.tensor(0.1)}
    torch.save({"attn": state}, tmp_path / "m.pth")
    for one in "qkv":
        with pytest.raises(MigrationRefused, match=rf"{one}_weight without attn\.step"):
            ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", include=[f"{one}_weight"], form="state_dict")


@pytest.mark.parametrize(
    ("values", "scales"),
    [("ckpt.model.a.w", "ckpt.scales.a.w"), ("weights.a.w", "zeros.a.w"), ("m.state.a.w", "m.quant.a.w_scale")],
)
def test_dicts_that_are_parts_of_names(values: str, scales: str, tmp_path: Path) -> None:
    save_file({values: codes(8, 16), scales: torch.full((8,), 0.1)}, tmp_path / "m.safetensors")

    refuses(tmp_path / "m.safetensors", scales, "integers", tmp_path)


@pytest.mark.parametrize("values", ["int8", "uint8", "fp8"])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_scales_of_all_weights(shape: tuple[int, ...], values: str, tmp_path: Path) -> None:
    made = {"int8": codes(8, 16), "uint8": bits(8, 16, dtype=torch.uint8), "fp8": fp8(8, 16)}[values]
    model = {"a.weight": made, "b.weight": made.clone()}
    for whole in (
        {"model": model, "scale": torch.ones(shape)},
        {"ckpt": {"model": model, "scales": torch.ones(shape)}},
    ):
        torch.save(whole, tmp_path / "m.pth")

        if "scale" in whole:  # elsewhere, a number alone is not cast
            with pytest.raises(MigrationRefused, match="a cast breaks"):
                ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", dtype="bfloat16")
        with pytest.raises(MigrationRefused, match=r"2 quantised weights .* lose what scales them"):
            ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", form="state_dict")


@pytest.mark.parametrize(("code", "book"), [("codes", "codebooks"), ("labels", "centroids"), ("idx", "lut")])
def test_code_books_in_another_dict(code: str, book: str, tmp_path: Path) -> None:
    places = bits(8, 16, dtype=torch.uint8)
    torch.save({code: {"a": places % 16}, book: {"a": torch.rand(16)}}, tmp_path / "m.pth")
    with pytest.raises(MigrationRefused, match="codes with a code book"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", dtype="bfloat16")
    torch.save({f"a.{code}": places, f"a.{book}": torch.rand(8, 16)}, tmp_path / "m.pth")  # two in a byte
    with pytest.raises(UnsupportedFeature, match=r"codes with a code book|AQLM"):
        ckptool.load(tmp_path / "m.pth", dtype="bfloat16")


@pytest.mark.parametrize("make", [tuple, list, lambda pair: {"q": pair[0], "s": pair[1]}])
def test_a_weight_and_its_scale_in_one_entry(make: Callable[[Any], Any], tmp_path: Path) -> None:
    pair = make((codes(8, 16), torch.full((8,), 0.1)))
    torch.save({"model": {"a.weight": pair, "a.bias": torch.ones(8)}, "epoch": 1}, tmp_path / "m.pth")

    with pytest.raises(UnsupportedFeature, match="a cast breaks"):
        ckptool.load(tmp_path / "m.pth", dtype="bfloat16")


class Tied(nn.Module):
    """A layer whose scale is no part of its ``state_dict()``."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", torch.full((8,), 0.1), persistent=False)


@pytest.mark.parametrize("values", ["int8", "int32", "fp8"])
def test_scales_that_no_state_dict_has(values: str, tmp_path: Path) -> None:
    weight = {"int8": codes(8, 16), "int32": codes(8, 16, dtype=torch.int32), "fp8": fp8(8, 16)}[values]
    torch.save(Tied(weight), tmp_path / "m.pth")

    with pytest.raises(MigrationRefused, match=r"1 quantised weight .* weight without scale"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", form="state_dict")
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", keep_calls=True)


@pytest.mark.parametrize("key", ["codebook", "nf4_table", "absmax", "meta"])
def test_integers_in_the_place_of_weights_are_not_parted_from_what_may_scale_them(key: str, tmp_path: Path) -> None:
    codes = torch.randint(0, 16, (64, 32), dtype=torch.uint8)
    floats = {"fc.weight": torch.randn(64)} if key == "absmax" else torch.randn(16)
    kept = {"delta": floats} if key == "meta" else floats
    path = tmp_path / "codes.pth"
    torch.save({"model": {"fc.weight": codes, "fc.bias": torch.randn(64)}, key: kept}, path)

    (found,) = [one for one in ckptool.check(path).findings if one.code == "CK506"]
    assert "(uint8)" in found.message
    with pytest.raises(ckptool.MigrationRefused, match="loses what scales it"):
        ckptool.migrate(path, tmp_path / "out.safetensors")
    assert ckptool.migrate(path, tmp_path / "all.pth", form="same").written


def test_bytes_that_are_no_weights_are_not_quantised(tmp_path: Path) -> None:
    tensors = {"image": torch.zeros(4, 4, dtype=torch.uint8), "mask": torch.ones(4, 4, dtype=torch.int8)}
    torch.save({"model": {"fc.weight": torch.randn(4, 4), **tensors}, "mean": torch.randn(3)}, tmp_path / "a.pth")

    assert "CK506" not in [one.code for one in ckptool.check(tmp_path / "a.pth").findings]
    assert ckptool.migrate(tmp_path / "a.pth", tmp_path / "a.safetensors").written


def test_fp8_keeps_what_transformer_engine_has_in_extra_state(tmp_path: Path) -> None:
    state = {"m.weight": fp8(32, 32), "m.bias": torch.randn(32), "m._extra_state": torch.zeros(100, dtype=torch.uint8)}
    torch.save(state, tmp_path / "te.pth")

    with pytest.raises(MigrationRefused, match="a cast breaks quantised weights"):
        ckptool.migrate(tmp_path / "te.pth", tmp_path / "out.pth", dtype="float32")
    with pytest.raises(UnsupportedFeature):
        ckptool.load(tmp_path / "te.pth", dtype="float32")
