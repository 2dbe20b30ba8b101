"""Quantised weights whose scales have names of no known layout, are in another file, or get other names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import ckptool
from ckptool import MigrationRefused, UnsupportedFeature
from ckptool.cli import cli
from tests.quantized.layouts import State, fp8, plain, whole
from tests.quantized.test_known import said
from tests.quantized.test_numbers import codes

SCALES = (
    "m.weights_scaling_factor",
    "m.weight_quantizer._scale",
    "m.weight.scale",
    "m.weight_dequant_scale",
    "m.weight_amax",
    "m.descale",
    "m.w_scale",
    "m.wscales",
    "scales.m",
    "m.quantizer.amax",
    "all_scales",
    "net.scales.of.the.m",
)


def refuses(source: Path, scale: str, says: str, folder: Path) -> None:
    """Assert that no cast breaks a file, and that its scale does not go without its weight."""
    target = folder / f"out{source.suffix}"
    for option in (["--dtype", "float64"], ["--exclude", scale]):
        args = ["migrate", str(source), str(target), *option]
        result = CliRunner().invoke(cli, args)

        assert result.exit_code == 1, (option, result.output)
        assert says in result.output
        assert not target.exists()
        assert CliRunner().invoke(cli, [*args, "--break-quantized"]).exit_code == 0
        target.unlink()
    with pytest.raises(UnsupportedFeature, match="a cast breaks"):
        ckptool.load(source, dtype=torch.float64)
    assert CliRunner().invoke(cli, ["check", str(source)]).exit_code == 0
    assert [one for one in said(source) if says in one]


@pytest.mark.parametrize("shape", [(), (8, 1), (3, 5)])
@pytest.mark.parametrize("scale", SCALES)
def test_8_bits_beside_scales_of_any_name(scale: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    state = {"m.weight": fp8(8, 8), scale: torch.full(shape, 0.1), "norm.weight": torch.ones(8)}
    torch.save(state, tmp_path / "m.pth")
    save_file(state, tmp_path / "m.safetensors")

    for source in (tmp_path / "m.pth", tmp_path / "m.safetensors"):
        refuses(
            source, scale, "FP8 (e4m3), with scales under other names" if scale != "m.weight.scale" else "FP8", tmp_path
        )


def test_a_model_does_not_take_8_bits_without_such_a_scale(tmp_path: Path) -> None:
    torch.save({"weight": fp8(8, 8), "descale": torch.ones(1)}, tmp_path / "m.pth")
    model = nn.Linear(8, 8, bias=False)

    with pytest.raises(UnsupportedFeature, match="quantised weight"):
        ckptool.load_into(model, tmp_path / "m.pth", strict=False)
    model.register_buffer("descale", torch.zeros(1))
    with pytest.raises(UnsupportedFeature, match="quantised weight"):
        ckptool.LiveModel(model).reload(tmp_path / "m.pth")
    assert not model.descale.any()


def test_values_and_scales_in_two_dicts(tmp_path: Path) -> None:
    values = {"a.weight": fp8(8, 8), "b.weight": fp8(8, 8)}
    scales = {"a.weight": torch.ones(1), "b.weight": torch.ones(1)}
    for keys in (("weights", "scales"), ("model", "model_scales")):
        torch.save(dict(zip(keys, (values, scales), strict=True)), tmp_path / "m.pth")

        with pytest.raises(UnsupportedFeature, match="with scales under other names"):
            ckptool.load(tmp_path / "m.pth", key=keys[0], dtype="bfloat16")
        with pytest.raises(MigrationRefused, match=rf"a\.weight without {keys[1]}\.a\.weight"):
            ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", form="state_dict", key=keys[0])
        assert "with scales under other names" in said(tmp_path / "m.pth")[0]


def test_a_layer_goes_with_its_own_scale(tmp_path: Path) -> None:
    state = {f"{one}.weight": fp8(8, 8) for one in "abc"} | {f"{one}.descale": torch.ones(1) for one in "abc"}
    torch.save(state, tmp_path / "m.pth")
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", exclude=["a.*"])

    assert set(torch.load(tmp_path / "o.pth")) == {name for name in state if name[0] != "a"}


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("values", ["weight", "qweight", "q_weight"])
@pytest.mark.parametrize("scale", ["scales", "scales_and_zeros", "per_channel_scale", "q_scale", "weight_scaling"])
def test_integers_beside_floats_that_scale_them(values: str, scale: str, dtype: torch.dtype, tmp_path: Path) -> None:
    state = {f"m.{values}": whole(8, 8, dtype=dtype), f"m.{scale}": torch.ones(5, 3), "m.bias": torch.ones(8)}
    torch.save(state, tmp_path / "m.pth")

    refuses(tmp_path / "m.pth", f"m.{scale}", "integers with scales", tmp_path)


class Static(nn.Sequential):
    """A net as torch quantises it."""

    def __init__(self) -> None:
        nnq = torch.ao.nn.quantized
        super().__init__(nnq.Quantize(0.1, 0, torch.quint8), nnq.Linear(8, 8), nnq.Conv2d(3, 3, 1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("whole_model", [False, True])
@pytest.mark.parametrize("scale", ["0.scale", "1.scale", "2.scale"])
def test_scales_of_outputs_of_quantised_nets_of_torch(scale: str, whole_model: bool, tmp_path: Path) -> None:
    model = Static()
    torch.save(model if whole_model else model.state_dict(), tmp_path / "m.pth")

    for options in ({"dtype": "bfloat16", "form": "state_dict"}, {"exclude": [scale], "form": "state_dict"}):
        with pytest.raises(MigrationRefused, match=r"quantised weights?.*torch \(qint8\)"):
            ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", **options)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFeature, match="a cast breaks"):
        ckptool.load(tmp_path / "m.pth", dtype="bfloat16")
    with pytest.raises(MigrationRefused):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", dtype="bfloat16")
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth")


def test_scales_of_activations_in_a_whole_model_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("optimum", "optimum.quanto", "optimum.quanto.nn"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    kind = type("QLinear", (nn.Module,), {"__module__": "optimum.quanto.nn"})
    sys.modules["optimum.quanto.nn"].QLinear = kind  # type: ignore[attr-defined]
    layer = kind()
    layer.weight = nn.Parameter(whole(8, 8, dtype=torch.int8), requires_grad=False)
    layer.register_buffer("input_scale", torch.ones(()))
    layer.register_buffer("output_scale", torch.ones(()))
    torch.save(nn.Sequential(layer, nn.Linear(8, 8)), tmp_path / "m.pth")

    with pytest.raises(UnsupportedFeature, match=r"a cast breaks quantised weights, .*quanto QLinear"):
        ckptool.load(tmp_path / "m.pth", dtype="bfloat16", allow_missing=True)
    with pytest.raises(MigrationRefused, match=r"0\.weight without 0\.output_scale"):
        ckptool.migrate(
            tmp_path / "m.pth", tmp_path / "o.pth", form="state_dict", exclude=["0.output_scale"], allow_missing=True
        )


def shards(folder: Path, *parts: State) -> list[Path]:
    """Write shards with their index."""
    paths = [folder / f"model-0000{one + 1}-of-0000{len(parts)}.safetensors" for one in range(len(parts))]
    for part, path in zip(parts, paths, strict=True):
        save_file(part, path)
    files = {name: path.name for part, path in zip(parts, paths, strict=True) for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return paths


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        ({"m.weight": fp8(8, 8)}, {"m.weight_scale_inv": torch.ones(1, 1)}),
        ({"m.up_proj": fp8(2, 8, 8)}, {"m.up_proj_scale": torch.ones(2, 1, 1)}),
        ({"a.weight": fp8(8, 8), "a.descale": torch.ones(1)}, {"m.weight_scale": torch.ones(8, 1)}),
        ({"m.qweight": whole(32, 64)}, {"m.scales": torch.ones(2, 64)}),
    ],
)
def test_one_shard_alone_is_not_cast_without_the_others(weight: State, scale: State, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for path in shards(tmp_path / "set", weight, scale):
        if all(one.dtype == torch.int32 for one in (weight if "00001-" in path.name else scale).values()):
            continue
        args = ["migrate", str(path), str(tmp_path / "o.safetensors"), "--dtype", "float64", "--allow-missing"]
        result = CliRunner().invoke(cli, args)

        assert result.exit_code == 1, result.output
        assert "a cast breaks quantised weights" in result.output
        assert "may be in other files: give " in result.output
        assert not (tmp_path / "o.safetensors").exists()
        with pytest.raises(UnsupportedFeature, match="a cast breaks"):
            ckptool.load(path, dtype="float64", allow_missing=True)


def test_one_shard_of_a_plain_net_is_cast(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    first = {"m.weight": torch.randn(8, 8), "m.weight_scale": torch.ones(1), "ls1.scale": torch.ones(1)}
    for path in shards(tmp_path / "set", first, {"logit_scale": torch.ones(1), "n.weight": torch.randn(8, 8)}):
        ckptool.migrate(path, tmp_path / path.name, dtype="bfloat16", allow_missing=True)


@pytest.mark.parametrize(
    "rename",
    [
        [("a.weight_scale", "z.weight_scale")],
        [("^a.weight$", "z.weight")],
        [("^a.weight_scale", "x.weight_scale"), ("^b.weight_scale", "a.weight_scale"), ("^x", "b")],
        [("_scale$", "_factor")],
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_new_name_does_not_part_a_weight_from_its_scale(
    rename: list[tuple[str, str]], nested: bool, tmp_path: Path
) -> None:
    state: dict[str, Any] = {f"{one}.weight": fp8(8, 8) for one in "ab"}
    state |= {f"{one}.weight_scale": torch.full((1,), 0.1) for one in "ab"}
    torch.save({"model": state, "epoch": 1} if nested else state, tmp_path / "m.pth")
    for form in ("same", "state_dict", "safetensors"):
        with pytest.raises(MigrationRefused, match=r"2? quantised weights? .* loses? what scales"):
            ckptool.migrate(tmp_path / "m.pth", tmp_path / "o", rename=rename, form=form)
    assert not (tmp_path / "o").exists()
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o", rename=rename, form="state_dict", break_quantized=True)


@pytest.mark.parametrize(
    "rename", [[("^", "net.")], [("weight_scale", "weight_scale_inv")], [("^a", "c"), ("^b", "a")]]
)
def test_new_names_for_both_are_no_loss(rename: list[tuple[str, str]], tmp_path: Path) -> None:
    state = {f"{one}.weight": fp8(8, 8) for one in "ab"} | {f"{one}.weight_scale": torch.ones(1) for one in "ab"}
    torch.save({"model": state, "epoch": 1}, tmp_path / "m.pth")
    for form in ("same", "state_dict"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / f"{form}.pth", rename=rename, form=form)  # type: ignore[arg-type]

        assert "2 of 2 weights have a scale" in said(tmp_path / f"{form}.pth")[0]


def test_plain_nets_stay_plain(tmp_path: Path) -> None:
    assert {"integers without scales", "8 bits without any scale", "buffers"} <= set(plain())
    table = {"emb.weight": whole(8, 8, dtype=torch.int32), "m.mask": whole(8, 8, dtype=torch.uint8)}
    torch.save(table | {"m.scale": torch.ones(1), "m.weight": torch.ones(8, 8)}, tmp_path / "m.pth")

    assert said(tmp_path / "m.pth") == []
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", dtype="bfloat16")


@pytest.mark.parametrize("name", ["logit_scale", "blocks.0.layer_scale", "blocks.0.norm.query_norm.scale"])
def test_parameters_that_are_called_scales_scale_no_8_bits(name: str, tmp_path: Path) -> None:
    save_file({"blocks.0.qkv.weight": fp8(8, 8), name: torch.ones(8)}, tmp_path / "m.safetensors")

    ckptool.migrate(tmp_path / "m.safetensors", tmp_path / "cast.safetensors", dtype="bfloat16")
    ckptool.migrate(tmp_path / "m.safetensors", tmp_path / "left.safetensors", exclude=[name])
    assert ckptool.load(tmp_path / "left.safetensors").keys() == {"blocks.0.qkv.weight"}
    assert not said(tmp_path / "m.safetensors")


@pytest.mark.parametrize("keys", [("model", "scales"), ("weights", "alpha"), ("state_dict", "meta")])
def test_integers_whose_scales_are_in_another_dict(keys: tuple[str, str], tmp_path: Path) -> None:
    values = {f"{one}.weight": codes(8, 16) for one in "ab"}
    torch.save({keys[0]: values, keys[1]: {name: torch.ones(8) for name in values}}, tmp_path / "m.pth")

    with pytest.raises(MigrationRefused, match=rf"a\.weight without {keys[1]}\.a\.weight"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", form="state_dict", key=keys[0])
    with pytest.raises(MigrationRefused, match="a cast breaks"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", dtype="bfloat16")
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth")
    assert "integers with scales" in said(tmp_path / "m.pth")[0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
def test_a_model_of_floats_takes_no_matrices_of_integers(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(8, 8, dtype=dtype), "bias": torch.ones(8)}, tmp_path / "m.pth")
    hooked, plain = nn.Linear(8, 8), nn.Linear(8, 8)
    hooked.register_load_state_dict_post_hook(lambda module, keys: None)
    before = plain.weight.clone()

    for model in (plain, hooked):
        with pytest.raises(UnsupportedFeature, match=r"1 tensor of integers.*: weight"):
            ckptool.load_into(model, tmp_path / "m.pth")
    with pytest.raises(UnsupportedFeature, match="1 tensor of integers"):
        ckptool.LiveModel(plain).reload(tmp_path / "m.pth")
    assert torch.equal(plain.weight, before)
    ckptool.load_into(plain, tmp_path / "m.pth", break_quantized=True)
    assert torch.equal(plain.weight, torch.ones(8, 8))


@pytest.mark.parametrize("rename", [r"^m\.(.*\.weight)$=net.\1", r"^m\.(.*_scale)$=\1", r"^m\.a\.weight$=z.a.weight"])
def test_a_new_prefix_does_not_part_8_bits_from_their_scales(rename: str, tmp_path: Path) -> None:
    state = {f"m.{one}.weight": fp8(8, 8) for one in "ab"} | {f"m.{one}.weight_scale": torch.ones(8, 1) for one in "ab"}
    save_file(state, tmp_path / "m.safetensors")
    pair = rename.partition("=")[::2]

    with pytest.raises(MigrationRefused, match="what scales"):
        ckptool.migrate(tmp_path / "m.safetensors", tmp_path / "o.safetensors", rename=[pair])
    ckptool.migrate(tmp_path / "m.safetensors", tmp_path / "o.safetensors", rename=[(r"^m\.", "net.")])
