"""Names of models for images and of LoRA as the libraries of both sides write them: a recipe makes one of the other."""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from tests.each import each
from tests.program import invoke
from tests.recipes.by_libraries import assert_same, moved

NAMES = ConfigParser()
NAMES.optionxform = str  # type: ignore[assignment, method-assign]  # names have capitals
NAMES.read(Path(__file__).with_name("names_of_images.ini"))

SHAPES = {"encoder.mid.attn_1.q.weight": (2, 2, 1, 1)}
ARGUMENTS = {"sd-vae": {"channels": 2}, "flux": {"num_attention_heads": 2, "attention_head_dim": 3}}


@each("recipe", NAMES.sections())
def test_names(recipe: str, tmp_path: Path) -> None:
    expected = {name: names.split() for name, names in NAMES[recipe].items()}
    original = {name: torch.rand(SHAPES.get(name, (6 * 7, 2))) for name in expected}
    arguments = ARGUMENTS.get(recipe, {})
    made = moved(original, recipe, tmp_path, **arguments)
    assert sorted(made) == sorted(name for names in expected.values() for name in names)
    for name, names in expected.items():
        together = torch.cat([made[one] for one in names])
        assert sorted(together.flatten().tolist()) == sorted(original[name].flatten().tolist())
    assert_same(moved(made, recipe, tmp_path, reverse=True, **arguments), original)


def test_halves_change_places(tmp_path: Path) -> None:
    """What Flux calls shift and scale is scale and shift in diffusers."""
    shift_and_scale = {"final_layer.adaLN_modulation.1.bias": torch.arange(6.0)}
    made = moved(shift_and_scale, "flux", tmp_path)
    assert made["norm_out.linear.bias"].tolist() == [3, 4, 5, 0, 1, 2]


@pytest.mark.parametrize("recipe", ["kohya-lora", "kohya-lora-sdxl"])
def test_lora_without_text_encoders(recipe: str, tmp_path: Path) -> None:
    """A recipe has rules that are about no name of a file."""
    expected = {name: made for name, made in NAMES[recipe].items() if name.startswith("lora_unet_")}
    assert sorted(moved({name: torch.rand(2, 3) for name in expected}, recipe, tmp_path)) == sorted(expected.values())


def test_an_adapter_of_peft_becomes_one_of_kohya(tmp_path: Path) -> None:
    layer = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    saved = {f"base_model.model.{layer}.lora_{half}.weight": torch.rand(2, 2) for half in "AB"}
    save_file(saved, tmp_path / "adapter_model.safetensors")
    renames = [(r"^base_model\.model\.", "unet.")]
    ckptool.migrate(
        tmp_path / "adapter_model.safetensors",
        tmp_path / "kohya.safetensors",
        rename=renames,
        recipe="kohya-lora",
        reverse=True,
    )
    kohya = ckptool.load(tmp_path / "kohya.safetensors")
    name = "lora_unet_" + layer.replace(".", "_")
    assert torch.equal(kohya[f"{name}.lora_down.weight"], saved[f"base_model.model.{layer}.lora_A.weight"])
    assert torch.equal(kohya[f"{name}.lora_up.weight"], saved[f"base_model.model.{layer}.lora_B.weight"])


def test_rules_of_one_way_are_shown_as_such() -> None:
    shown = invoke(["recipe", "show", "sd-vae"]).stdout.splitlines()
    assert {"only back" in line for line in shown if "attentions.0.query" in line} == {True}
    assert {"only" in line for line in shown if "attentions.0.to_q" in line} == {False}


@each(("only", "says"), [("forward", "fine, 1 rules"), ("", "fine, 1 rules, and no way back")])
def test_what_is_dropped_one_way_has_a_way_back(only: str, says: str, tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text(f'[[rule]]\nfrom = "freqs"\nop = "drop"\nonly = "{only}"\n')
    assert invoke(["recipe", "check", str(recipe)]).stdout == f"own: {says}\n"
