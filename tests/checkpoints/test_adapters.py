"""LoRA adapters are recognised by the names of their tensors, as the libraries write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.each import each
from tests.program import invoke

REAL = Path(__file__).parents[3] / "shared" / "corpus-dirs" / "peft-beside-base" / "adapter"


def named(down: str, up: str, modules: list[str], rank: int = 8) -> dict[str, torch.Tensor]:
    found = {}
    for module in modules:
        found[f"{module}{down}"] = torch.zeros(rank, 32)
        found[f"{module}{up}"] = torch.zeros(16, rank)
    return found


LAYERS = [f"model.layers.{number}.self_attn.{name}" for number in range(2) for name in ("q_proj", "v_proj")]
CASES = {
    "peft": named(".lora_A.weight", ".lora_B.weight", [f"base_model.model.{one}" for one in LAYERS]),
    "in training": named(".lora_A.default.weight", ".lora_B.default.weight", LAYERS),
    "loralib": named(".lora_A", ".lora_B", LAYERS),
    "diffusers": named(".lora.down.weight", ".lora.up.weight", LAYERS),
    "diffusers, old": named("_lora.down.weight", "_lora.up.weight", LAYERS),
    "linear layers": named(".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight", LAYERS),
    "kohya": named(".lora_down.weight", ".lora_up.weight", ["lora_unet_" + one.replace(".", "_") for one in LAYERS]),
}


def adapter(path: Path) -> Any:
    return json.loads(invoke(["inspect", "--json", str(path)]).stdout)["adapter"]


@each("case", list(CASES))
def test_adapters_of_each_library(case: str, tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    save_file(CASES[case], path)
    found = adapter(path)

    ends = {target.removeprefix("self_attn_") for target in found["targets"]}
    assert (found["ranks"], ends, found["modules"], found["base"]) == ([8], {"q_proj", "v_proj"}, 4, None)


@each(
    ("metadata", "base"),
    [
        ({"ss_sd_model_name": "v1-5.safetensors", "ss_base_model_version": "sd_v1"}, "v1-5.safetensors"),
        ({"lora_adapter_metadata": json.dumps({"unet.base_model_name_or_path": "org/model"})}, "org/model"),
        ({"lora_adapter_metadata": "[" * 200_000}, None),
        ({"lora_adapter_metadata": "null"}, None),
    ],
)
def test_the_base_model_that_metadata_name(metadata: dict[str, str], base: str | None, tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    save_file(CASES["peft"], path, metadata)
    assert adapter(path)["base"] == base


def test_inspect_says_rank_targets_and_base_for_file_and_folder(tmp_path: Path) -> None:
    tensors = CASES["peft"] | named(".lora_A.weight", ".lora_B.weight", ["base_model.model.lm_head"], rank=4)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base\x1b[2J", "r": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        shown = invoke(["inspect", "-q", str(path)]).output
        assert (
            "  adapter      LoRA of rank 4 and 8 on lm_head, q_proj, v_proj, in 5 modules; for org/base\\x1b[2J\n"
            in shown
        )
        assert adapter(path) == {
            "ranks": [4, 8],
            "targets": ["lm_head", "q_proj", "v_proj"],
            "modules": 5,
            "base": config["base_model_name_or_path"],
        }


def test_names_with_lora_in_them_are_not_adapters_yet(tmp_path: Path) -> None:
    save_file({"lora.weight": torch.zeros(2, 2), "exploration.lora_scale": torch.zeros(1)}, tmp_path / "x.safetensors")
    assert adapter(tmp_path / "x.safetensors") is None


@pytest.mark.skipif(not REAL.exists(), reason=f"no {REAL}")
def test_a_real_adapter() -> None:
    assert adapter(REAL) == {"ranks": [2], "targets": ["c_attn"], "modules": 2, "base": None}
