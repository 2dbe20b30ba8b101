"""Known families are recognised by names and shapes, as the libraries write them, and others are not taken for them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.each import each
from tests.page.pages import write_safetensors
from tests.program import invoke

Shapes = dict[str, list[int]]

PEFT = "base_model.model.model.layers.0.self_attn.q_proj"
KOHYA = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
WHOLE = "model.diffusion_model."
UNET = {f"{WHOLE}out.2.weight": [4, 320, 3, 3], f"{WHOLE}input_blocks.0.0.weight": [320, 4, 3, 3]}
CROSS = f"{WHOLE}input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight"
VAE = {
    "decoder.conv_in.weight": [512, 4, 3, 3],
    "encoder.down.0.block.0.norm1.weight": [128],
    "decoder.up.0.block.0.norm1.weight": [128],
}
DIFFUSERS_VAE = {
    "decoder.conv_in.weight": [512, 16, 3, 3],
    "decoder.conv_out.weight": [3, 128, 3, 3],
    "encoder.down_blocks.0.resnets.0.norm1.weight": [128],
}
DIFFUSERS = {
    "conv_in.weight": [320, 4, 3, 3],
    **{f"{side}_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.weight": [640, 1024] for side in ("down", "up")},
}

FLUX = {
    "context_embedder.weight": [3072, 4096],
    "transformer_blocks.0.attn.add_k_proj.weight": [3072, 3072],
    "time_text_embed.text_embedder.linear_1.weight": [3072, 768],
    "single_transformer_blocks.0.proj_mlp.weight": [12288, 3072],
}


def under(head: str, names: Shapes) -> Shapes:
    return {head + name: shape for name, shape in names.items()}


KINDS: dict[str, Shapes] = {
    "LoRA": {f"{PEFT}.lora_A.weight": [8, 64], f"{PEFT}.lora_B.weight": [64, 8]},
    "DoRA": {f"{PEFT}.lora_A.weight": [8, 64], f"{PEFT}.lora_B.weight": [64, 8], f"{PEFT}.lora_magnitude_vector": [64]},
    "LoKr": {f"{PEFT}.lokr_w1": [8, 8], f"{PEFT}.lokr_w2_a": [8, 8], f"{PEFT}.lokr_w2_b": [8, 8]},
    "LoHa": {f"{PEFT}.hada_w{one}_{side}": [8, 64] for one in (1, 2) for side in "ab"},
    "IA3": {f"{PEFT}.ia3_l": [64, 1]},
    "OFT": {f"{PEFT}.oft_R.weight": [8, 28]},
    "BOFT": {f"{PEFT}.boft_R": [1, 8, 8, 8], f"{PEFT}.boft_s": [64, 1]},
    "VeRA": {f"{PEFT}.vera_lambda_b": [64], f"{PEFT}.vera_lambda_d": [8], "base_model.vera_A": [8, 64]},
    "AdaLoRA": {f"{PEFT}.lora_A": [12, 64], f"{PEFT}.lora_B": [64, 12], f"{PEFT}.lora_E": [12, 1]},
    "prompt tuning or prefix tuning": {"prompt_embeddings": [20, 64]},
}
OTHERS: dict[str, tuple[str, Shapes]] = {
    "kohya": (
        "LoRA",
        {f"{KOHYA}.lora_down.weight": [8, 320], f"{KOHYA}.lora_up.weight": [320, 8], f"{KOHYA}.alpha": []},
    ),
    "kohya, DoRA": ("DoRA", {f"{KOHYA}.lora_down.weight": [8, 320], f"{KOHYA}.dora_scale": [1, 320]}),
    "LyCORIS": ("LoKr", {f"{KOHYA}.lokr_w1": [8, 8], f"{KOHYA}.lokr_w2": [40, 40], f"{KOHYA}.dora_scale": [1, 320]}),
    "LyCORIS, IA3": ("IA3", {f"{KOHYA}.weight": [320, 1], f"{KOHYA}.on_input": []}),
    "kohya, OFT": ("OFT", {f"{KOHYA.replace('lora', 'oft', 1)}.oft_blocks": [4, 80, 80]}),
    "embedding": ("textual inversion", {"emb_params": [4, 768]}),
    "embedding, XL": ("textual inversion", {"clip_l": [4, 768], "clip_g": [4, 1280]}),
    "embedding, diffusers": ("textual inversion", {"<cat-toy>": [768]}),
    "1": (
        "Stable Diffusion 1: unet, vae, text encoder",
        {**UNET, CROSS: [640, 768], **under("first_stage_model.", VAE)}
        | {"cond_stage_model.transformer.text_model.final_layer_norm.weight": [768]},
    ),
    "1, averaged": ("Stable Diffusion 1: unet, averaged weights", {**UNET, CROSS: [640, 768], "model_ema.decay": []}),
    "2": ("Stable Diffusion 2: unet", {**UNET, CROSS: [640, 1024]}),
    "XL": (
        "Stable Diffusion XL: unet, text encoders",
        {**UNET, CROSS: [640, 2048]}
        | {f"conditioner.embedders.{one}.model.ln_final.weight": [768] for one in range(2)},
    ),
    "2, diffusers": ("Stable Diffusion 2: unet", DIFFUSERS),
    "2, pipeline": (
        "Stable Diffusion 2: unet, vae, text encoder",
        {**under("unet.", DIFFUSERS), **under("vae.", DIFFUSERS_VAE), "text_encoder.text_model.x": [4]},
    ),
    "3": ("Stable Diffusion 3: transformer", {f"{WHOLE}joint_blocks.0.context_block.attn.qkv.weight": [4608, 1536]}),
    "3, diffusers": (
        "Stable Diffusion 3: transformer",
        {
            "context_embedder.weight": [1536, 4096],
            "pos_embed.proj.weight": [1536, 16, 2, 2],
            "time_text_embed.text_embedder.linear_1.weight": [1536, 2048],
            "transformer_blocks.0.attn.add_k_proj.weight": [1536, 1536],
        },
    ),
    "Flux": (
        "Flux: transformer",
        {"txt_in.weight": [3072, 4096], "double_blocks.0.img_attn.norm.key_norm.scale": [128]},
    ),
    "Flux, diffusers": ("Flux: transformer", FLUX),
    "VAE": ("VAE", VAE),
    "VAE, diffusers": ("VAE", DIFFUSERS_VAE),
}
NONE: dict[str, Shapes] = {
    "a model with an adapter in it": {"fc.weight": [64, 64], "fc.lora_A": [8, 64], "fc.lora_B": [64, 8]},
    "the same in PEFT": {"fc.base_layer.weight": [64, 64], "fc.lora_A.default.weight": [8, 64]},
    "videos": {**UNET, CROSS: [640, 1024], f"{WHOLE}input_blocks.1.1.time_stack.0.norm1.weight": [320]},
    "ControlNet of Flux": {**FLUX, "controlnet_blocks.0.weight": [3072, 3072]},
    "Bria": {name: FLUX[name] for name in FLUX if not name.startswith("time_")},
    "ControlNet": {key: DIFFUSERS[key] for key in DIFFUSERS if not key.startswith("up")},
    "quantised codes": {**VAE, "quantize.embedding.weight": [1024, 256]},
    "a VAE of videos": {**VAE, "decoder.conv_in.weight": [512, 16, 3, 3, 3]},
    "a VAE beside what is not known": {**under("vae.", VAE), "unet.conv_in.weight": [32, 4, 3, 3]},
    "other text": {**UNET, CROSS: [640, 4096]},
    "two words": {"clip_l": [4, 768], "logit_scale": []},
    "a narrow vector": {"<cat-toy>": [64]},
}


def form(path: Path) -> str:
    lines = invoke(["inspect", "-q", str(path)]).stdout.splitlines()
    return next(line.split(maxsplit=1)[1] for line in lines if line.startswith("  form "))


def family(path: Path) -> Any:
    return json.loads(invoke(["inspect", "--json", str(path)]).stdout).get("family")


def written(folder: Path, names: Shapes) -> Path:
    return write_safetensors(folder / "adapter_model.safetensors", {name: ("F32", one) for name, one in names.items()})


@each("case", [*KINDS, *OTHERS])
def test_names_and_shapes_are_a_guess(case: str, tmp_path: Path) -> None:
    expected, names = OTHERS.get(case) or (case, KINDS[case])
    path = written(tmp_path, names)
    name, _, parts = expected.partition(": ")

    assert form(path) == f"state_dict, looks like {expected}"
    assert family(path) == {"name": name, "parts": parts.split(", ") if parts else [], "is_guess": True}


@each(
    ("settings", "kind"),
    [
        *(
            ({"peft_type": kind.upper()}, kind)
            for kind in KINDS
            if kind not in ("DoRA", "prompt tuning or prefix tuning")
        ),
        ({"peft_type": "LORA", "use_dora": True}, "DoRA"),
        ({"peft_type": "PREFIX_TUNING"}, "prefix tuning"),
        ({"peft_type": "NEW\x1b[2J"}, "NEW\\x1b[2J"),
    ],
)
def test_what_peft_says_beside_it_is_a_fact(settings: dict[str, object], kind: str, tmp_path: Path) -> None:
    path = written(tmp_path, {"base_model.model.fc.unknown": [4]})
    assert family(path) is None
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))

    assert form(path) == form(tmp_path) == f"state_dict, {kind}"
    assert family(path)["is_guess"] is False


def test_settings_of_an_adapter_say_nothing_of_the_base_beside_it(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", {"fc.weight": ("F32", [4, 4])})
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    torch.save({"args": [1, 2]}, tmp_path / "training_args.bin")

    assert form(path) == "state_dict"
    assert family(tmp_path / "training_args.bin") is None


@each("case", list(NONE))
def test_others_are_not_taken_for_them(case: str, tmp_path: Path) -> None:
    assert form(written(tmp_path, NONE[case])) == "state_dict"


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


def test_inspect_says_how_an_adapter_gets_into_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    modules = ["attn.to_q", "attn.to_out.0"]
    save_file({f"{name}.weight": torch.ones(16, 32) for name in modules}, "base.safetensors")
    save_file(named(".lora_A.weight", ".lora_B.weight", modules, rank=4), "style.safetensors")

    shown = invoke(["inspect", "-q", "style.safetensors"]).output
    assert "LoRA of rank 4 on to_out.0, to_q, in 2 modules" in shown
    (line,) = re.findall(r"to load +into its base: ckptool (.*)", shown)
    assert invoke(shlex.split(line.replace("BASE", "base.safetensors"))).exit_code == 0
    assert "to load" not in invoke(["inspect", "-q", "base.safetensors"]).output


def test_names_with_lora_in_them_are_not_adapters_yet(tmp_path: Path) -> None:
    save_file({"lora.weight": torch.zeros(2, 2), "exploration.lora_scale": torch.zeros(1)}, tmp_path / "x.safetensors")
    assert adapter(tmp_path / "x.safetensors") is None


@pytest.mark.skipif(not REAL.exists(), reason=f"no {REAL}")
def test_a_real_adapter() -> None:
    assert adapter(REAL) == {"ranks": [2], "targets": ["c_attn"], "modules": 2, "base": None}
