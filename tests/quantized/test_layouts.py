"""Layouts that are known by name: each is named with its blocks, and no cast and no option breaks it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckptool
from ckptool import MigrationRefused, UnsupportedFeature
from ckptool.fleet import row
from tests.corpus.files import FOLDER, MARKS, ROWS
from tests.each import each
from tests.program import invoke
from tests.quantized.layouts import LAYOUTS, Layout, State, fp8, said, shards, whole
from tests.scale import in_turn, scaled, step

FIXTURES = Path(__file__).parents[2] / "fixtures"
NORM = {"norm.weight": torch.linspace(0, 1, 8)}
ONLY_8_BITS = ("mxfp8", "mxfp4")
"""Those that have nothing to cast to float64 beside 8 bits."""


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


@each(("name", "suffix"), in_turn(LAYOUTS, ["safetensors", "pth"]))
def test_each_layout_is_named(name: str, suffix: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    path = written(layout, tmp_path, suffix)
    method = (layout.settings or {}).get("quantization_config", {"quant_method": "mlx"})["quant_method"]  # type: ignore[index]
    says = f"; config.json says {method}" if layout.settings else ""

    assert said(path) == [f"quantised: {layout.says}, 1 of 1 weight has a scale{says}"]


@scaled
@each(("name", "suffix"), in_turn(LAYOUTS, ["safetensors", "pth"])[:: step(3)])
def test_each_layout_stays_as_it_is(name: str, suffix: str, tmp_path: Path) -> None:
    path, tensors = written(LAYOUTS[name], tmp_path, suffix), LAYOUTS[name].tensors() | NORM

    ckptool.migrate(path, tmp_path / "out.pth")
    ckptool.migrate(tmp_path / "out.pth", tmp_path / "out.safetensors")
    assert same(torch.load(tmp_path / "out.pth"), tensors)
    assert same(load_file(tmp_path / "out.safetensors"), tensors)
    assert same(dict(ckptool.load(path)), tensors)


@scaled
@each(
    ("name", "suffix"), in_turn([one for one in LAYOUTS if one not in ONLY_8_BITS], ["pth", "safetensors"])[:: step(2)]
)
def test_a_cast_is_refused(name: str, suffix: str, tmp_path: Path) -> None:
    path = written(LAYOUTS[name], tmp_path, suffix)
    before = path.read_bytes()
    args = ["migrate", str(path), str(tmp_path / f"out.{suffix}"), "--dtype", "float64"]
    result = invoke(args)

    assert result.exit_code == 1
    assert f"a cast breaks quantised weights, {LAYOUTS[name].says}: it changes " in result.output
    assert "--break-quantized" in result.output
    assert {one.name for one in tmp_path.iterdir()} == {"config.json", path.name}
    assert path.read_bytes() == before
    assert invoke([*args, "--break-quantized"]).exit_code == 0
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
    parts = (
        {"a.weight": fp8(8, 8), "b.weight": fp8(8, 8)},
        {f"{one}.weight_scale_inv": torch.ones(1, 1) for one in "ab"},
    )
    folder = shards(tmp_path / "set", *parts)[0].parent

    for source in (folder, folder / "model.safetensors.index.json"):
        with pytest.raises(MigrationRefused, match="FP8"):
            ckptool.migrate(source, tmp_path / "x.safetensors", dtype="bfloat16")
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


@each("name", list(LAYOUTS)[::3])
def test_a_scale_does_not_go_without_its_weight(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    path = written(layout, tmp_path)
    values = [one for one in layout.tensors() if one != layout.scale]
    for option in (["--exclude", layout.scale], [part for one in values for part in ("--include", one)]):
        args = ["migrate", str(path), str(tmp_path / "out.safetensors"), *option]
        result = invoke(args)

        assert result.exit_code == 1, result.output
        assert f"1 quantised weight ({layout.says}) loses what scales it: " in result.output
        assert f"without {layout.scale}\n" in result.output
        assert invoke([*args, "--force", "--break-quantized"]).exit_code == 0


@scaled
@each("name", list(LAYOUTS)[:: step(8, 4)])
def test_what_cannot_be_left_out_cannot_get_a_name_of_its_own(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name].tensors()
    path, ends = tmp_path / "model.safetensors", [one.removeprefix("m.") for one in layout]
    save_file(
        {f"l.{layer}.{end}": one.clone() for layer in range(3) for end, one in zip(ends, layout.values(), strict=True)},
        path,
    )
    before = [one.replace("1 of 1", "3 of 3") for one in said(path)]

    def refused(**options: Any) -> str:
        with pytest.raises(MigrationRefused) as error:
            ckptool.migrate(path, tmp_path / "o.pth", dry_run=True, **options)
        return error.value.message

    needed = []
    for end in ends:
        try:
            ckptool.migrate(path, tmp_path / "o.pth", dry_run=True, exclude=[f"l.1.{end}"])
        except MigrationRefused:
            needed.append(end)
    assert LAYOUTS[name].scale.removeprefix("m.") in needed
    for end in needed:
        for layers in ("1", "[01]", "[012]"):
            message = refused(rename=[(rf"^l\.({layers})\.{re.escape(end)}$", r"l.\1.other")])
            assert f" from l.1.{end} (now l.1.other)" in message
        weight = message.rpartition(": ")[2].partition(" from ")[0]
        assert f"{weight} (now x) from " in refused(rename=[(f"^{re.escape(weight)}$", "x")])
    (tmp_path / "pairs").write_text(f"{re.escape(weight)}$=x\n")
    args = ["migrate", str(path), str(tmp_path / "o.pth"), "--rename-file", str(tmp_path / "pairs")]
    assert "new names part 1 quantised weight " in invoke(args).output
    assert invoke([*args, "--break-quantized"]).exit_code == 0
    for rename in ([("^l", "net.layers")], [(r"l\.1\.", "one.")], [("^", "x.")]):
        ckptool.migrate(path, tmp_path / "o.safetensors", rename=rename, force=True)
        assert said(tmp_path / "o.safetensors") == before


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

    (found,) = [one for one in ckptool.check(out).findings if one.code == "CK506"]
    assert "2 of 2" in found.message
    assert found.command is not None
    assert found.command.endswith("--dequantize")
    assert {one.dtype for one in ckptool.load(out, dequantize=True).values()} == {torch.bfloat16}


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


def test_every_verb_says_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(LAYOUTS["gptq"].tensors(), path)
    inspected = json.loads(invoke(["inspect", "--json", str(path)]).output)
    line_of_scan = json.loads(invoke(["scan", str(path)]).stdout.splitlines()[0])

    line = "CK506 quantised: GPTQ, 4 bits, in groups of 128, 1 of 1 weight has a scale"
    assert line in invoke(["inspect", str(path)]).output
    assert line in invoke(["check", str(path)]).output
    assert inspected["quantization"] == {
        "schemes": [{"name": "GPTQ, 4 bits, in groups of 128", "weights": 1, "unscaled": []}],
        "method": None,
        "tensors": 4,
    }
    assert (line_of_scan["quantized"], line_of_scan["findings"]) == ("GPTQ, 4 bits, in groups of 128", {"CK506": 1})
    assert invoke(["check", str(path)]).exit_code == 0


@pytest.mark.parametrize("lacking", ["fp8", "integers", "packed"])
def test_weights_that_lack_their_scale_are_named(lacking: str, tmp_path: Path) -> None:
    value, end, scale = {
        "fp8": (fp8(8, 8), "weight", "weight_scale"),
        "integers": (whole(8, 8, dtype=torch.int8), "weight", "weight_scale"),
        "packed": (whole(8, 8), "qweight", "scales"),
    }[lacking]
    of_scale = torch.ones(1, 8) if lacking == "packed" else torch.ones(8, 1)
    tensors = {f"{one}.{end}": value.clone() for one in "abc"} | {f"{one}.{scale}": of_scale.clone() for one in "ab"}
    save_file(tensors | {"a.bias": fp8(8)}, tmp_path / "m.safetensors")

    first, second = said(tmp_path / "m.safetensors")
    assert first.endswith("2 of 3 weights have a scale")
    assert second.startswith("1 of 3 weights in")
    assert second.endswith(f"have no scale: c.{end}")
    assert invoke(["check", str(tmp_path / "m.safetensors")]).exit_code == 1


def test_values_that_cannot_be_looked_at_are_taken_for_packed_ones(tmp_path: Path) -> None:
    hollow = torch.empty(8, 8, dtype=torch.int32, device="meta")
    torch.save({"m.weight": hollow, "m.scale": torch.ones(1)}, tmp_path / "m.pth")

    assert said(tmp_path / "m.pth") == ["quantised: integers with scales (int32), 1 of 1 weight has a scale"]


def test_settings_beside_a_file_do_not_make_floats_quantised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq", "bits": 4}}')
    torch.save({"m.weight": torch.ones(8, 8), "position_ids": whole(1, 64)}, tmp_path / "m.pth")

    assert said(tmp_path / "m.pth") == []


@pytest.mark.parametrize(
    ("name", "settings", "method"),
    [
        ("config.json", {"quantization_config": {"quant_method": "a-new-one"}}, "a-new-one"),
        ("config.json", {"text_config": {"quantization_config": {"quant_method": "vptq"}}}, "vptq"),
        ("quantization_config.json", {"quant_method": "exl3", "bits": 4.0}, "exl3"),
        ("quant_config.json", {"zero_point": True, "w_bit": 4, "q_group_size": 128}, "awq"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "W4A8"}}, "W4A8"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "gptq"),
    ],
)
def test_a_layout_that_is_not_known_goes_by_the_settings_beside_it(
    name: str, settings: object, method: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(json.dumps(settings))
    table = {"e.position_ids": whole(1, 8, dtype=torch.int64), "e.norm": torch.ones(8)}
    for values in (whole(8, 8, dtype=torch.int8), whole(64, dtype=torch.int16), whole(3, 8, 8, dtype=torch.int64)):
        torch.save(
            {"m.x": values, "m.y": torch.ones(4), "n.store.x": values, "n.store.y": torch.ones(4)} | table,
            tmp_path / "m.pth",
        )

        without = f"{method}, 2 weights without a scale that is known"
        assert said(tmp_path / "m.pth") == [f"quantised: {without}; {name.rpartition('/')[2]} says {method}"]
        with pytest.raises(ckptool.MigrationRefused, match=r"4 tensors that they consist of: m\.y, n\.store\.y"):
            ckptool.migrate(tmp_path / "m.pth", tmp_path / "out.pth", dtype="float16")
        with pytest.raises(ckptool.MigrationRefused, match=r"n\.store\.x without n\.store\.y"):
            ckptool.migrate(tmp_path / "m.pth", tmp_path / "out.pth", exclude=["n.store.y"])


def test_states_of_an_optimizer_of_8_bits_are_no_quantised_weights(tmp_path: Path) -> None:
    of_first = {"weight": whole(8, 8, dtype=torch.int8), "scale": torch.ones(1)}
    optimizer = {"state": {0: of_first}, "param_groups": [{"params": [0], "lr": 0.1}]}
    torch.save({"model": {"w": torch.ones(8, 8)}, "optimizer": optimizer}, tmp_path / "m.pth")

    assert said(tmp_path / "m.pth") == []


def test_no_fixture_is_called_quantised() -> None:
    paths = [path for path in sorted((FIXTURES / "valid").iterdir()) if path.suffix != ".json"]
    paths += sorted((FIXTURES / "folders").iterdir())
    found = {path.name: quantized(path) for path in paths}

    assert len(found) > 50
    assert {name for name, one in found.items() if one} == set()


@pytest.mark.corpus
@pytest.mark.skipif(not ROWS, reason=MARKS[1].kwargs["reason"])
@pytest.mark.parametrize("folder", ["corpus", "corpus-dirs"])
def test_no_real_file_that_is_not_is_called_quantised(folder: str) -> None:
    root = FOLDER if folder == "corpus" else FOLDER.with_name(folder)
    paths = (
        [path for path in sorted(root.rglob("*")) if path.is_file()] if folder == "corpus" else sorted(root.iterdir())
    )

    of_torch = {"model_quantized.pth", "quantized_model.pth"} if folder == "corpus" else set()
    assert {path.name for path in paths if quantized(path)} == of_torch


def quantized(path: Path) -> object:
    """Return what a row of a checkpoint says; None of what cannot be opened."""
    return row(path)["quantized"]


SCALED = {"a.weight": fp8(8, 16), "a.weight_scale": torch.rand(8, 1), "b.weight": fp8(8, 16, divisor=2.0)}
SCALED |= {"b.weight_scale": torch.rand(8, 1), "norm.weight": torch.ones(8)}


def test_a_part_of_a_quantised_weight_is_not_saved_beside_an_old_one(tmp_path: Path) -> None:
    original, target = tmp_path / "q.safetensors", tmp_path / "new.safetensors"
    ckptool.save(SCALED, original)
    dense = ckptool.load(original, dequantize=True)
    own = ckptool.load(original)
    for state in (dense, {"a.weight": SCALED["b.weight"]}, {"a.weight_scale": torch.rand(8, 1)}):
        with pytest.raises(MigrationRefused, match="which belongs to it, is that of the file"):
            ckptool.save(state, target, like=original, missing="keep")
    with pytest.raises(MigrationRefused, match="is that of the file"):
        ckptool.save({**own, "a.weight": dense["a.weight"]}, target, like=original)
    assert not target.exists()
    new = {"a.weight": SCALED["b.weight"], "a.weight_scale": SCALED["b.weight_scale"], "norm.weight": torch.zeros(8)}
    ckptool.save(new, target, like=original, missing="keep")
    assert torch.equal(ckptool.load(target, dequantize=True)["a.weight"], dense["b.weight"])
    ckptool.save(dense, target, like=original, missing="drop", force=True)
    assert ckptool.load(target).keys() == dense.keys()


def test_a_weight_is_cut_as_what_scales_it(tmp_path: Path) -> None:
    path, rules = tmp_path / "q.safetensors", ["norm.weight=same"]
    ckptool.save(SCALED, path)
    for cut in ({"*.weight": (0, 1, 2)}, {"*_scale": (0, 1, 2)}):
        with pytest.raises(UnsupportedFeature, match="is not cut as what scales it"):
            ckptool.load(path, shard=cut)
    part = ckptool.load(path, shard={"?.weight*": (0, 1, 2)})
    assert torch.equal(part["a.weight_scale"], SCALED["a.weight_scale"][4:])
    assert ckptool.load(path, shard={"?.weight": (1, 1, 2)})["a.weight"].shape == (8, 8)
    with pytest.raises(MigrationRefused, match="is not cut as what scales it"):
        ckptool.migrate(path, tmp_path / "ranks", cut=2, join=["?.weight=0", "*_scale=same", *rules])
    ckptool.migrate(path, tmp_path / "ranks", cut=2, join=["?.weight=0", "*_scale=0", *rules])
    with pytest.raises(MigrationRefused, match="is not cut as what scales it"):
        ckptool.migrate(tmp_path / "ranks", tmp_path / "w.safetensors", join=["?.weight=0", "*_scale=1", *rules])
    ckptool.migrate(tmp_path / "ranks", tmp_path / "w.safetensors", join=["?.weight=0", "*_scale=0", *rules])
    assert ckptool.diff(path, tmp_path / "w.safetensors").same


def test_names_that_the_header_has_for_torchao_do_not_change(tmp_path: Path) -> None:
    path, target = tmp_path / "ao.safetensors", tmp_path / "new.safetensors"
    texts = {"tensor_names": '["m.weight"]', "m.weight": '{"_type": "Int8Tensor"}', "title": "x"}
    ckptool.save(LAYOUTS["torchao"].tensors(), path, set_metadata=texts)
    with pytest.raises(MigrationRefused, match="by which torchao finds"):
        ckptool.migrate(path, target, add_prefix="net")
    ckptool.migrate(path, target)
    with ckptool.open_checkpoint(target) as checkpoint:
        assert checkpoint.metadata.items() >= texts.items()
    ckptool.migrate(path, target, dequantize=True, add_prefix="net", force=True)
    with ckptool.open_checkpoint(target) as checkpoint:
        assert checkpoint.metadata.items() & texts.items() == {("title", "x")}
