"""Recipes of models that make images give what diffusers' own conversion gives, and what it was made of."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from tests.recipes.by_libraries import Weights, assert_same, like, moved, under
from tests.scale import exhaustive

pytestmark = pytest.mark.filterwarnings("ignore")  # of what other libraries say when they are imported

SMALL = {"cross_attention_dim": 12, "norm_num_groups": 4, "layers_per_block": 2, "sample_size": 8}
XL = {
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 52,
}
PLAIN, ATTENTION = ("DownBlock2D", "UpBlock2D"), ("CrossAttnDownBlock2D", "CrossAttnUpBlock2D")


def levels(*kinds: tuple[str, str]) -> dict[str, Any]:
    """Return the settings that say which levels of a UNet have attention, and narrow channels for them."""
    return {
        "block_out_channels": (8, 16, 32, 32)[: len(kinds)],
        "down_block_types": tuple(down for down, _ in kinds),
        "up_block_types": tuple(up for _, up in reversed(kinds)),
    }


UNETS = {
    "Stable Diffusion 1": ("sd-unet", {"attention_head_dim": 4, **levels(*[ATTENTION] * 3, PLAIN)}),
    "Stable Diffusion 2": (
        "sd-unet",
        {"attention_head_dim": (2, 4, 8, 8), "use_linear_projection": True, **levels(*[ATTENTION] * 3, PLAIN)},
    ),
    "SDXL": (
        "sdxl-unet",
        {"attention_head_dim": (2, 4, 8), "transformer_layers_per_block": (1, 2, 10), **XL}
        | levels(PLAIN, ATTENTION, ATTENTION),
    ),
    "SDXL's refiner": (
        "sd-unet",
        {"attention_head_dim": 4, "transformer_layers_per_block": 4, **XL} | levels(PLAIN, ATTENTION, ATTENTION, PLAIN),
    ),
}


def unet(model: str) -> Any:
    recipe, settings = UNETS[model]
    return recipe, pytest.importorskip("diffusers").UNet2DConditionModel(**SMALL, **settings)


@exhaustive
@pytest.mark.parametrize("model", UNETS)
def test_unets(model: str, tmp_path: Path) -> None:
    recipe, net = unet(model)
    convert = pytest.importorskip("diffusers.loaders.single_file_utils").convert_ldm_unet_checkpoint
    theirs = like(net)
    original = moved(theirs, recipe, tmp_path, reverse=True)
    prefix = "model.diffusion_model."
    assert_same(convert(under(prefix, original), dict(net.config)), theirs)
    assert_same(moved(original, recipe, tmp_path), theirs)
    assert_same(moved(under(prefix, original), recipe, tmp_path), under(prefix, theirs))


@exhaustive
def test_controlnet(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    convert = pytest.importorskip("diffusers.loaders.single_file_utils").convert_controlnet_checkpoint
    shape = {key: value for key, value in UNETS["Stable Diffusion 1"][1].items() if key != "up_block_types"}
    settings = {key: value for key, value in SMALL.items() if key != "sample_size"}
    net = diffusers.ControlNetModel(**settings, **shape, conditioning_embedding_out_channels=(4, 8, 12, 16))
    theirs = like(net)
    original = moved(theirs, "sd-controlnet", tmp_path, reverse=True)
    assert_same(convert(dict(original), dict(net.config)), theirs)
    assert_same(moved(original, "sd-controlnet", tmp_path), theirs)


def vae(**more: Any) -> Any:
    settings = {"latent_channels": 4, **more}
    return pytest.importorskip("diffusers").AutoencoderKL(
        block_out_channels=(8, 16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        norm_num_groups=4,
        **settings,
    )


@exhaustive
@pytest.mark.parametrize(
    "more", [{}, {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}], ids=["SD", "FLUX"]
)
def test_vae(more: dict[str, Any], tmp_path: Path) -> None:
    diffusers, net = pytest.importorskip("diffusers"), vae(**more)
    convert = pytest.importorskip("diffusers.loaders.single_file_utils").convert_ldm_vae_checkpoint
    theirs = like(net)
    original = moved(theirs, "sd-vae", tmp_path, reverse=True, channels=32)
    assert original["encoder.mid.attn_1.q.weight"].shape == (32, 32, 1, 1)
    assert_same(convert(under("first_stage_model.", original), dict(net.config)), theirs)
    assert_same(moved(original, "sd-vae", tmp_path, channels=32), theirs)

    # What an older diffusers had saved, whose names its loader still takes.
    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    before = {re.sub("to_(q|k|v|out.0)(?=[.])", lambda found: older[found[0]], name): theirs[name] for name in theirs}
    net.save_pretrained(tmp_path)
    save_file(before, tmp_path / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    assert_same(diffusers.AutoencoderKL.from_pretrained(tmp_path).state_dict(), theirs)
    assert_same(moved(before, "sd-vae", tmp_path, reverse=True, channels=32), original)


def text_model(kind: str, layers: int, width: int = 16) -> Any:
    transformers = pytest.importorskip("transformers")
    settings = transformers.CLIPTextConfig(
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=50,
        max_position_embeddings=77,
        projection_dim=width,
        bos_token_id=1,
        eos_token_id=2,
    )
    return getattr(transformers, kind)(settings)


@exhaustive
@pytest.mark.parametrize(
    ("kind", "prefix", "layers"),
    [
        ("CLIPTextModel", "cond_stage_model.model.", 23),
        ("CLIPTextModelWithProjection", "conditioner.embedders.1.model.", 3),
    ],
)
def test_text_encoders(kind: str, prefix: str, layers: int, tmp_path: Path) -> None:
    convert = pytest.importorskip("diffusers.loaders.single_file_utils").convert_open_clip_checkpoint
    net = text_model(kind, layers)
    theirs = {"text_model." * (not name.startswith("text_")) + name: value for name, value in like(net).items()}
    original = moved(theirs, "open-clip", tmp_path, reverse=True)
    assert_same(convert(net, under(prefix, original), prefix=prefix), theirs)
    assert_same(moved(original, "open-clip", tmp_path), theirs)


def tokenizer(folder: Path) -> Any:
    words = ["a", "b", "a</w>", "b</w>", "ab", "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    kind = pytest.importorskip("transformers").CLIPTokenizer
    return kind(str(folder / "vocab.json"), str(folder / "merges.txt"))


@exhaustive
@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        ("sd1", "Stable Diffusion 1"),
        ("sd2", "Stable Diffusion 2"),
        ("sdxl", "SDXL"),
        ("sdxl-refiner", "SDXL's refiner"),
    ],
)
def test_pipelines(recipe: str, model: str, tmp_path: Path) -> None:
    """A folder of a pipeline becomes one original checkpoint, from which diffusers makes the same pipeline."""
    diffusers = pytest.importorskip("diffusers")
    nets = {"unet": unet(model)[1], "vae": vae(), "text_encoder": text_model("CLIPTextModel", 23)}
    others = {"tokenizer": tokenizer(tmp_path), "scheduler": diffusers.DDIMScheduler()}
    if recipe == "sdxl-refiner":
        kind = diffusers.StableDiffusionXLImg2ImgPipeline
        nets |= {"text_encoder": None, "text_encoder_2": text_model("CLIPTextModelWithProjection", 3, width=32)}
        others |= {"tokenizer": None, "tokenizer_2": others["tokenizer"], "requires_aesthetics_score": True}
    elif recipe == "sdxl":
        kind = diffusers.StableDiffusionXLPipeline
        nets["text_encoder_2"] = text_model("CLIPTextModelWithProjection", 3, width=32)
        others["tokenizer_2"] = others["tokenizer"]
    else:
        kind = diffusers.StableDiffusionPipeline
        others |= {"safety_checker": None, "feature_extractor": None}
    kind(**nets, **others).save_pretrained(tmp_path / "pipeline")

    nets = {name: net for name, net in nets.items() if net is not None}
    original = tmp_path / "original.safetensors"
    channels = {"channels": 32}
    ckptool.migrate(
        tmp_path / "pipeline", original, key="(all)", recipe=recipe, reverse=True, recipe_arguments=channels
    )
    again = kind.from_single_file(str(original), config=str(tmp_path / "pipeline"), local_files_only=True)
    for name, net in nets.items():
        assert_same(getattr(again, name).state_dict(), net.state_dict())

    made = moved(load_file(original), recipe, tmp_path, **channels)
    assert_same(moved(made, recipe, tmp_path, reverse=True, **channels), load_file(original))
    plain = {name.replace("text_encoder.text_model.", "text_encoder."): value for name, value in made.items()}
    wanted = {f"{part}.{name}": value for part, net in nets.items() for name, value in net.state_dict().items()}
    assert_same(plain, wanted)


def lora(model: str, encoders: list[str]) -> Weights:
    """Return a LoRA of all that one can be for, in PEFT's names."""
    peft = pytest.importorskip("peft")
    weights = Weights()
    nets = {"unet": unet(model)[1], **{name: text_model("CLIPTextModel", 2) for name in encoders}}
    for part, net in nets.items():
        layers = [
            name
            for name, layer in net.named_modules()
            if type(layer).__name__ in ("Linear", "Conv2d") and "blocks" in name.replace("mid_block", "mid_blocks.")
        ] + ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
        adapted = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=layers))
        for name, value in peft.get_peft_model_state_dict(adapted).items():
            plain = name.removeprefix("base_model.model.").removeprefix("text_model.")
            weights[f"{part}.{plain if part == 'unet' else f'text_model.{plain}'}"] = value.new_empty(
                value.shape
            ).normal_()
    return weights


@exhaustive
@pytest.mark.parametrize(
    ("recipe", "model", "encoders", "pipeline"),
    [
        ("kohya-lora", "Stable Diffusion 1", ["text_encoder"], "StableDiffusionLoraLoaderMixin"),
        ("kohya-lora-sdxl", "SDXL", ["text_encoder", "text_encoder_2"], "StableDiffusionXLLoraLoaderMixin"),
    ],
)
def test_lora_of_kohya(recipe: str, model: str, encoders: list[str], pipeline: str, tmp_path: Path) -> None:
    loaders = pytest.importorskip("diffusers.loaders")
    names = pytest.importorskip("diffusers.utils.state_dict_utils")
    peft = lora(model, encoders)
    kohya = moved(peft, recipe, tmp_path, reverse=True)
    downs = [name.removesuffix(".lora_down.weight") for name in kohya if name.endswith(".lora_down.weight")]
    assert len(downs) * 2 == len(kohya) == len(peft)

    alphas = {f"{name}.alpha": kohya[f"{name}.lora_down.weight"].new_tensor(4.0) for name in downs}
    loaded, _ = getattr(loaders, pipeline).lora_state_dict({**kohya, **alphas}, unet_config=unet(model)[1].config)
    parts = {part: {} for part in ("unet", *encoders)}
    for name, value in loaded.items():
        part, _, plain = name.partition(".")
        parts[part][plain] = value
    theirs = under("unet.", names.convert_unet_state_dict_to_peft(parts.pop("unet")))
    for part, weights in parts.items():
        theirs |= under(f"{part}.", names.convert_state_dict_to_peft(weights))
    assert_same(theirs, peft)

    whole = moved({**kohya, **alphas}, recipe, tmp_path)
    assert_same({name: value for name, value in whole.items() if not name.endswith(".alpha")}, peft)
    assert_same(moved(whole, recipe, tmp_path, reverse=True), {**kohya, **alphas})
    if recipe == "kohya-lora":
        written = names.convert_state_dict_to_kohya({name: value for name, value in peft.items() if "unet" in name})
        written = {name: value for name, value in written.items() if not name.endswith(".alpha")}
        assert_same(written, {name: value for name, value in kohya.items() if "unet" in name})


@exhaustive
def test_alpha_that_is_the_rank_is_none(tmp_path: Path) -> None:
    """What a recipe makes without alpha gives the same images as kohya's file, if each alpha is the rank."""
    loader = pytest.importorskip("diffusers.loaders").StableDiffusionLoraLoaderMixin
    net = unet("Stable Diffusion 1")[1].eval()
    torch.manual_seed(0)
    peft = {name: torch.randn(value.shape) * 0.3 for name, value in lora("Stable Diffusion 1", []).items()}
    kohya = moved(peft, "kohya-lora", tmp_path, reverse=True)
    downs = [name for name in kohya if name.endswith("lora_down.weight")]

    def image(weights: Weights, alphas: Any = None) -> torch.Tensor:
        adapted = copy.deepcopy(net)
        loader.load_lora_into_unet(weights, alphas, adapted)
        with torch.no_grad():
            given: torch.Tensor = adapted(torch.ones(1, 4, 8, 8), 1, torch.ones(1, 3, 12)).sample
        return given

    wanted = image(peft)
    for alpha in (None, 2.0, 1.0):
        alphas = {name.replace("lora_down.weight", "alpha"): torch.tensor(alpha) for name in downs if alpha is not None}
        weights, found = loader.lora_state_dict({**kohya, **alphas}, unet_config=net.config)
        assert torch.equal(image(weights, found), wanted) == (alpha != 1)


@exhaustive
def test_lora_of_diffusers(tmp_path: Path) -> None:
    names = pytest.importorskip("diffusers.utils.state_dict_utils")
    peft = lora("Stable Diffusion 1", ["text_encoder"])
    theirs = names.convert_state_dict_to_diffusers(peft, names.StateDictType.PEFT)
    assert_same(moved(peft, "diffusers-lora", tmp_path, reverse=True), theirs)
    assert_same(moved(theirs, "diffusers-lora", tmp_path), peft)

    first = moved(peft, "diffusers-lora-processor", tmp_path, reverse=True)
    assert any(name.endswith(".attn1.processor.to_out_lora.down.weight") for name in first)
    unet_part = {name: value for name, value in first.items() if name.startswith("unet.")}
    text_part = {name: value for name, value in first.items() if not name.startswith("unet.")}
    back = names.convert_unet_state_dict_to_peft(unet_part)
    back |= names.convert_state_dict_to_peft(text_part, names.StateDictType.DIFFUSERS)
    assert_same(back, peft)
    assert_same(moved(first, "diffusers-lora-processor", tmp_path), peft)


@exhaustive
def test_wan(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    convert = pytest.importorskip("diffusers.loaders.single_file_utils").convert_wan_transformer_to_diffusers
    convert_lora = pytest.importorskip(
        "diffusers.loaders.lora_conversion_utils"
    )._convert_non_diffusers_wan_lora_to_diffusers
    net = diffusers.WanTransformer3DModel(
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=8,
        ffn_dim=32,
        image_dim=10,
        added_kv_proj_dim=16,
    )
    theirs = like(net)
    original = moved(theirs, "wan", tmp_path, reverse=True)
    assert_same(convert(dict(original)), theirs)
    assert_same(moved(original, "wan", tmp_path), theirs)

    layers = [
        name.removesuffix("weight") for name, value in theirs.items() if name.endswith("weight") and value.dim() == 2
    ]
    adapter = {layer + half: torch.rand(2, 3) for layer in layers for half in ("lora_A.weight", "lora_B.weight")}
    adapter = under("transformer.", adapter)
    original = moved(adapter, "wan-lora", tmp_path, reverse=True)
    assert_same(convert_lora(original), adapter)
    assert_same(moved(original, "wan-lora", tmp_path), adapter)


@exhaustive
def test_flux(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    convert = pytest.importorskip(
        "diffusers.loaders.single_file_utils"
    ).convert_flux_transformer_checkpoint_to_diffusers
    net = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=10,
        guidance_embeds=True,
        axes_dims_rope=(2, 2, 4),
    )
    # diffusers knows one width, 3,072: as many rows, but few columns.
    theirs = {name: torch.rand(len(value) * 3072 // 16, *value.shape[1:]) for name, value in like(net).items()}
    original = moved(theirs, "flux", tmp_path, reverse=True)
    assert_same(convert(dict(original)), theirs)
    assert_same(moved(original, "flux", tmp_path), theirs)


@exhaustive
@pytest.mark.parametrize(
    ("recipe", "kind", "converter", "settings"),
    [
        (
            "flux2",
            "Flux2Transformer2DModel",
            "convert_flux2_transformer_checkpoint_to_diffusers",
            {
                "in_channels": 4,
                "num_layers": 2,
                "num_single_layers": 2,
                "attention_head_dim": 8,
                "num_attention_heads": 2,
                "joint_attention_dim": 12,
                "axes_dims_rope": (2, 2, 2, 2),
            },
        ),
        (
            "z-image",
            "ZImageTransformer2DModel",
            "convert_z_image_transformer_checkpoint_to_diffusers",
            {"in_channels": 4, "dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 12}
            | {"axes_dims": [2, 2, 4]},
        ),
    ],
)
def test_transformers(recipe: str, kind: str, converter: str, settings: dict[str, Any], tmp_path: Path) -> None:
    convert = getattr(pytest.importorskip("diffusers.loaders.single_file_utils"), converter)
    theirs = like(getattr(pytest.importorskip("diffusers"), kind)(**settings))
    original = moved(theirs, recipe, tmp_path, reverse=True)
    assert_same(convert(dict(original)), theirs)
    assert_same(moved(original, recipe, tmp_path), theirs)
