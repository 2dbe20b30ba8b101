"""Every quantised layout is known by its names with types and shapes; what is not quantised is never called so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import ckptool
from ckptool.checking.row import row
from ckptool.cli import cli
from tests.corpus.files import FOLDER, MARKS, ROWS
from tests.quantized.layouts import LAYOUTS, fp8, plain, whole

FIXTURES = Path(__file__).parents[2] / "fixtures"
CODES = {"CK506", "CK507"}


def said(path: Path) -> list[str]:
    """Return what is said of quantised weights."""
    return [one.message for one in ckptool.check(path).findings if one.code in CODES]


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_is_named_with_its_blocks(name: str, suffix: str, tmp_path: Path) -> None:
    layout, path = LAYOUTS[name], tmp_path / f"model.{suffix}"
    tensors = layout.tensors() | {"norm.weight": torch.ones(8)}
    save_file(tensors, path) if suffix == "safetensors" else torch.save({"state_dict": tensors, "epoch": 1}, path)
    says = ""
    if layout.settings:
        (tmp_path / "config.json").write_text(json.dumps(layout.settings))
        method = layout.settings.get("quantization_config", {"quant_method": "mlx"})["quant_method"]  # type: ignore[index]
        says = f"; config.json says {method}"

    assert said(path) == [f"quantised: {layout.says}, 1 of 1 weight has a scale{says}"]


def test_every_verb_says_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(LAYOUTS["gptq"].tensors(), path)
    run = CliRunner().invoke
    inspected = json.loads(run(cli, ["inspect", "--json", str(path)]).output)
    line_of_scan = json.loads(run(cli, ["scan", str(path)]).stdout.splitlines()[0])

    line = "CK506 quantised: GPTQ, 4 bits, in groups of 128, 1 of 1 weight has a scale"
    assert line in run(cli, ["inspect", str(path)]).output
    assert line in run(cli, ["check", str(path)]).output
    assert inspected["quantization"] == {
        "schemes": [{"name": "GPTQ, 4 bits, in groups of 128", "weights": 1, "unscaled": []}],
        "method": None,
        "tensors": 4,
    }
    assert (line_of_scan["quantized"], line_of_scan["findings"]) == ("GPTQ, 4 bits, in groups of 128", {"CK506": 1})
    assert run(cli, ["check", str(path)]).exit_code == 0


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
    assert CliRunner().invoke(cli, ["check", str(tmp_path / "m.safetensors")]).exit_code == 1


@pytest.mark.parametrize("name", plain())
def test_what_only_has_such_names_is_not_quantised(name: str, tmp_path: Path) -> None:
    torch.save(plain()[name], tmp_path / "m.pth")

    assert said(tmp_path / "m.pth") == []
    ckptool.migrate(tmp_path / "m.pth", tmp_path / "out.pth", dtype="bfloat16")
    ckptool.load(tmp_path / "m.pth", dtype=torch.bfloat16)


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


def test_a_shard_whose_scales_are_in_another_is_not_cast(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    save_file({"m.weight": fp8(8, 8)}, tmp_path / "model-00001-of-00002.safetensors")

    with pytest.raises(ckptool.MigrationRefused, match="quantised"):
        ckptool.migrate(
            tmp_path / "model-00001-of-00002.safetensors",
            tmp_path / "x.safetensors",
            dtype="bfloat16",
            allow_missing=True,
        )


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
    return row(str(path))["quantized"]
