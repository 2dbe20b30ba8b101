"""No cast and no option breaks what is quantised, in ``migrate`` and ``load`` alike, unless it is said that it may."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

import ckptool
from ckptool import MigrationRefused, UnsupportedFeature
from ckptool.cli import cli
from tests.quantized.layouts import LAYOUTS, Layout, State, fp8

NORM = {"norm.weight": torch.linspace(0, 1, 8)}
CAST = {name: one for name, one in LAYOUTS.items() if name not in ("mxfp8", "mxfp4")}
"""Those that have something to cast to float64 beside 8 bits."""


def written(layout: Layout, folder: Path, suffix: str = "safetensors") -> Path:
    path, tensors = folder / f"model.{suffix}", layout.tensors() | NORM
    save_file(tensors, path) if suffix == "safetensors" else torch.save(tensors, path)
    (folder / "config.json").write_text(json.dumps(layout.settings or {}))
    return path


def same(found: State, wanted: State) -> bool:
    def raw(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()

    kinds = [{name: (one.dtype, one.shape) for name, one in state.items()} for state in (found, wanted)]
    return kinds[0] == kinds[1] and all(raw(found[name]) == raw(one) for name, one in wanted.items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_an_option_everything_stays_as_it_is(name: str, tmp_path: Path) -> None:
    path = written(LAYOUTS[name], tmp_path)
    ckptool.migrate(path, tmp_path / "out.pth")
    ckptool.migrate(tmp_path / "out.pth", tmp_path / "out.safetensors")

    assert same(torch.load(tmp_path / "out.pth"), load_file(path))
    assert same(load_file(tmp_path / "out.safetensors"), load_file(path))
    assert same(dict(ckptool.load(path)), load_file(path))


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("name", CAST)
def test_a_cast_is_refused(name: str, suffix: str, tmp_path: Path) -> None:
    path = written(CAST[name], tmp_path, suffix)
    before = path.read_bytes()
    args = ["migrate", str(path), str(tmp_path / f"out.{suffix}"), "--dtype", "float64"]
    result = CliRunner().invoke(cli, args)

    assert result.exit_code == 1
    assert f"a cast breaks quantised weights, {CAST[name].says}: it changes " in result.output
    assert "--break-quantized" in result.output
    assert {one.name for one in tmp_path.iterdir()} == {"config.json", path.name}
    assert path.read_bytes() == before
    assert CliRunner().invoke(cli, [*args, "--break-quantized"]).exit_code == 0
    with pytest.raises(UnsupportedFeature, match="a cast breaks quantised weights"):
        ckptool.load(path, dtype=torch.float64)
    assert ckptool.load(path, dtype=torch.float64, break_quantized=True)["norm.weight"].dtype == torch.float64


@pytest.mark.parametrize(
    "options", [{"form": "dcp"}, {"max_shard_size": "1KB"}, {"form": "state_dict"}, {"dry_run": True}]
)
def test_every_form_refuses_a_cast(options: dict[str, Any], tmp_path: Path) -> None:
    tensors = LAYOUTS["fp8 in blocks"].tensors()
    torch.save({"model": tensors, "epoch": 3}, tmp_path / "m.pth")

    with pytest.raises(MigrationRefused, match="2 of the 2 tensors"):
        ckptool.migrate(tmp_path / "m.pth", tmp_path / "out", dtype="bfloat16", **options)
    assert list(tmp_path.iterdir()) == [tmp_path / "m.pth"]


def test_shards_and_folders_refuse_it_though_scales_are_in_another_file(tmp_path: Path) -> None:
    tensors = {f"{one}.weight": fp8(8, 8) for one in "ab"}
    tensors |= {f"{one}.weight_scale_inv": torch.ones(1, 1) for one in "ab"}
    for number, end in enumerate(("weight", "weight_scale_inv"), 1):
        some = {name: one for name, one in tensors.items() if name.endswith(f".{end}")}
        save_file(some, tmp_path / f"model-0000{number}-of-00002.safetensors")
    files = {name: f"model-0000{1 + name.endswith('inv')}-of-00002.safetensors" for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (tmp_path / "out").mkdir()

    for source in (tmp_path, tmp_path / "model.safetensors.index.json"):
        with pytest.raises(MigrationRefused, match="FP8"):
            ckptool.migrate(source, tmp_path / "out" / "x.safetensors", dtype="bfloat16")
        with pytest.raises(UnsupportedFeature, match="FP8"):
            ckptool.load(source, dtype=torch.bfloat16)


def test_names_that_keep_their_type_make_a_cast_harmless(tmp_path: Path) -> None:
    path = written(LAYOUTS["quanto int8"], tmp_path)
    ckptool.migrate(path, tmp_path / "o.safetensors", dtype="bfloat16", keep_dtype=[r"_scale$"])
    found = load_file(tmp_path / "o.safetensors")

    assert (found["norm.weight"].dtype, found["m.output_scale"].dtype) == (torch.bfloat16, torch.float32)
    assert same({name: one for name, one in found.items() if name[0] == "m"}, LAYOUTS["quanto int8"].tensors())


def test_8_bits_without_scales_can_be_cast(tmp_path: Path) -> None:
    save_file({"a.weight": fp8(8, 8), "b.weight": fp8(8, 8)}, tmp_path / "m.safetensors")
    ckptool.migrate(tmp_path / "m.safetensors", tmp_path / "o.safetensors", dtype="bfloat16")

    loaded = ckptool.load(tmp_path / "m.safetensors", dtype=torch.bfloat16)
    for found in (load_file(tmp_path / "o.safetensors"), loaded):
        assert torch.equal(found["a.weight"], fp8(8, 8).to(torch.bfloat16))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_scale_does_not_go_without_its_weight(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    path = written(layout, tmp_path)
    values = [one for one in layout.tensors() if one != layout.scale]
    for option in (["--exclude", layout.scale], [part for one in values for part in ("--include", one)]):
        args = ["migrate", str(path), str(tmp_path / "out.safetensors"), *option]
        result = CliRunner().invoke(cli, args)

        assert result.exit_code == 1, result.output
        assert f"1 quantised weight ({layout.says}) loses what scales it: " in result.output
        assert f"without {layout.scale}\n" in result.output
        assert CliRunner().invoke(cli, [*args, "--force", "--break-quantized"]).exit_code == 0


def test_a_scale_is_not_dropped_in_place_or_from_a_training_checkpoint(tmp_path: Path) -> None:
    torch.save({"model": LAYOUTS["nf4"].tensors() | NORM, "epoch": 1}, tmp_path / "m.pth")
    before = (tmp_path / "m.pth").read_bytes()

    for options in ({"in_place": True}, {"dst": tmp_path / "o.pth"}):
        with pytest.raises(MigrationRefused, match=r"m\.weight without model\.m\.weight\.absmax"):
            ckptool.migrate(tmp_path / "m.pth", drop=["model.m.weight.absmax"], **options)  # type: ignore[arg-type]
    assert (tmp_path / "m.pth").read_bytes() == before
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "o.pth", exclude=["m.*"])
    assert set(torch.load(tmp_path / "o.pth")["model"]) == set(NORM)


@pytest.mark.parametrize("form", ["state_dict", "safetensors", "dcp"])
def test_renamed_and_tied_scales_are_no_loss(form: Any, tmp_path: Path) -> None:
    scale = torch.ones(1)
    weights = {f"module.{one}.weight": fp8(8, 8) for one in "ab"}
    torch.save(weights | {f"module.{one}.weight_scale": scale for one in "ab"}, tmp_path / "m.pth")
    out = tmp_path / ("out" if form == "dcp" else "out.safetensors" if form == "safetensors" else "out.pth")
    ckptool.migrate(tmp_path / "m.pth", out, form=form, strip_module=True, rename=[("^a", "first")])

    assert any(one.code == "CK506" and "2 of 2" in one.message for one in ckptool.check(out).findings)


class Layer(nn.Module):
    """A layer of 8 bits with its scale."""

    def __init__(self, dtype: torch.dtype, scale: torch.dtype | None = torch.float32) -> None:
        super().__init__()
        self.m = nn.Module()
        self.m.weight = nn.Parameter(torch.zeros(8, 16, dtype=dtype), requires_grad=False)
        if scale is not None:
            self.m.register_buffer("weight_scale", torch.zeros(8, 1, dtype=scale))


class Hooked(Layer):
    """The same, which takes part in loading."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


@pytest.mark.parametrize("kind", [Layer, Hooked])
@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.bfloat16, torch.float32), (torch.float8_e5m2, torch.bfloat16), (torch.float32, None)]
)
def test_a_model_does_not_take_values_without_their_scales(
    kind: type[Layer], dtype: torch.dtype, scale: torch.dtype | None, tmp_path: Path
) -> None:
    torch.save(LAYOUTS["fp8 per row"].tensors(), tmp_path / "m.pth")
    model = kind(dtype, scale)
    if kind is Hooked and scale is not None:
        pytest.skip("what a model's own code makes of another type is its own")

    with pytest.raises(UnsupportedFeature, match="quantised weight"):
        ckptool.load_into(model, tmp_path / "m.pth", strict=scale is not None)
    assert not any(map(torch.any, model.state_dict().values()))
    ckptool.load_into(model, tmp_path / "m.pth", strict=scale is not None, break_quantized=True)


def test_a_model_of_the_same_types_takes_it(tmp_path: Path) -> None:
    wanted = LAYOUTS["fp8 per row"].tensors()
    torch.save(wanted, tmp_path / "m.pth")
    model, live = Layer(torch.float8_e5m2), ckptool.LiveModel(Layer(torch.bfloat16))
    ckptool.load_into(model, tmp_path / "m.pth")

    assert same(dict(model.state_dict()), wanted)
    with torch.device("meta"):
        hollow = Layer(torch.float8_e5m2)
    with pytest.raises(UnsupportedFeature, match="a cast breaks"):
        ckptool.load_into(hollow, tmp_path / "m.pth", dtype=torch.bfloat16)
    with pytest.raises(UnsupportedFeature, match="a cast breaks"):
        live.reload(tmp_path / "m.pth")
