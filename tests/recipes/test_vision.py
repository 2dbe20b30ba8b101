"""Recipes of models for images: what they make gives the same answers in the library of the other side."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.by_libraries import assert_same, moved, opened, saved, scrambled
from tests.scale import exhaustive

pytestmark = [exhaustive, pytest.mark.filterwarnings("ignore")]  # of what other libraries say when they are imported

PATCHES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "layer_norm_eps": 1e-6}


def answers(model: Any, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        given = (
            model.forward_features(images)
            if hasattr(model, "num_features") and not model.num_classes
            else model(images)
        )
    return given if torch.is_tensor(given) else given.logits if "logits" in given else given.last_hidden_state


def both_ways(
    recipe: str, here: Any, there: Any, size: int, folder: Path, leaves_out: frozenset[str] = frozenset()
) -> None:
    """Assert that each of two models does what the other does with the weights that a recipe makes of the other's."""
    images = torch.rand(2, 3, size, size)
    weights = {name: value for name, value in saved(scrambled(here), folder).items() if name not in leaves_out}
    made = moved(weights, recipe, folder, reverse=True)
    there.load_state_dict(made)
    torch.testing.assert_close(answers(there.eval(), images), answers(here, images), rtol=1e-5, atol=1e-6)
    assert_same(moved(made, recipe, folder), weights)

    torch.manual_seed(1)
    for value in there.state_dict().values():
        if value.is_floating_point():
            value.mul_(torch.rand_like(value) + 0.5)
    made = moved(there.state_dict(), recipe, folder)
    again = opened(type(here), made, folder, leaves_out)
    torch.testing.assert_close(answers(again, images), answers(there, images), rtol=1e-5, atol=1e-6)


def test_vit_of_timm(tmp_path: Path) -> None:
    timm, transformers = pytest.importorskip("timm"), pytest.importorskip("transformers")
    settings = transformers.ViTConfig(**PATCHES, intermediate_size=64, image_size=32, patch_size=8, num_labels=5)
    there = timm.models.VisionTransformer(32, 8, embed_dim=16, depth=2, num_heads=4, num_classes=5)
    both_ways("timm-vit", transformers.ViTForImageClassification(settings), there, 32, tmp_path)


def test_deit_of_timm(tmp_path: Path) -> None:
    timm, transformers = pytest.importorskip("timm.models.deit"), pytest.importorskip("transformers")
    settings = transformers.DeiTConfig(**PATCHES, intermediate_size=64, image_size=32, patch_size=8, num_labels=5)
    there = timm.VisionTransformerDistilled(
        img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=4, num_classes=5, weight_init="skip"
    )
    both_ways("timm-deit", transformers.DeiTForImageClassificationWithTeacher(settings), there, 32, tmp_path)


@pytest.mark.parametrize("model", ["small", "small_plus"])
@pytest.mark.parametrize("has_biases", [False, True])
def test_dinov3_of_timm(model: str, has_biases: bool, tmp_path: Path) -> None:
    timm, transformers = pytest.importorskip("timm"), pytest.importorskip("transformers")
    recipe = "timm-dinov3-gated" if model == "small_plus" else "timm-dinov3"
    settings = transformers.DINOv3ViTConfig(
        hidden_size=16,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_register_tokens=4,
        **({"use_gated_mlp": True, "hidden_act": "silu"} if recipe == "timm-dinov3-gated" else {}),
        query_bias=has_biases,
        value_bias=has_biases,
    )
    name = f"vit_{model}_patch16_dinov3{'_qkvb' if has_biases else ''}"
    there = timm.create_model(name, depth=2, embed_dim=16, num_heads=1, img_size=64, mlp_ratio=4)
    mask = frozenset({"embeddings.mask_token"})
    both_ways(recipe, transformers.DINOv3ViTModel(settings), there, 64, tmp_path, mask)


@pytest.mark.parametrize(
    ("kind", "model", "more", "gated"),
    [
        ("Dinov2", "vit_small_patch14_dinov2", {}, False),
        ("Dinov2WithRegisters", "vit_small_patch14_reg4_dinov2", {"num_register_tokens": 4}, False),
        ("Dinov2", "vit_giant_patch14_dinov2", {}, True),
    ],
)
def test_dinov2(kind: str, model: str, more: dict[str, int], gated: bool, tmp_path: Path) -> None:
    """What timm reads of Meta's names gives the same answers."""
    timm, transformers = pytest.importorskip("timm"), pytest.importorskip("transformers")
    as_timm_reads_it: Callable[..., Any] = timm.models.vision_transformer.checkpoint_filter_fn
    settings = getattr(transformers, f"{kind}Config")(
        **PATCHES, **more, image_size=56, patch_size=14, use_swiglu_ffn=gated
    )
    here = scrambled(getattr(transformers, f"{kind}Model")(settings))
    weights = saved(here, tmp_path)
    metas = moved(weights, "dinov2", tmp_path, reverse=True)
    width = {"mlp_ratio": metas["blocks.0.mlp.w12.weight"].shape[0] / 16} if gated else {}
    there = timm.create_model(model, depth=2, embed_dim=16, num_heads=4, img_size=56, **width)
    there.load_state_dict(as_timm_reads_it(dict(metas), there))
    images = torch.rand(2, 3, 56, 56)
    torch.testing.assert_close(answers(there.eval(), images), answers(here, images), rtol=1e-5, atol=1e-6)
    assert_same(moved(metas, "dinov2", tmp_path), weights)


def test_convnext_of_timm(tmp_path: Path) -> None:
    timm, transformers = pytest.importorskip("timm"), pytest.importorskip("transformers")
    depths, widths = [1, 2, 1, 1], [8, 16, 24, 32]
    settings = transformers.ConvNextConfig(depths=depths, hidden_sizes=widths, num_labels=5, layer_norm_eps=1e-6)
    here = transformers.ConvNextForImageClassification(settings)
    there = timm.models.ConvNeXt(depths=depths, dims=widths, num_classes=5)
    both_ways("timm-convnext", here, there, 64, tmp_path)


def test_swin_of_timm(tmp_path: Path) -> None:
    timm, transformers = pytest.importorskip("timm"), pytest.importorskip("transformers")
    shape = {"patch_size": 4, "window_size": 4, "embed_dim": 8, "depths": [2, 2, 2], "num_heads": [2, 4, 4]}
    settings = transformers.SwinConfig(image_size=64, num_labels=5, layer_norm_eps=1e-5, **shape)
    there = timm.models.SwinTransformer(img_size=64, num_classes=5, **shape)
    both_ways("timm-swin", transformers.SwinForImageClassification(settings), there, 64, tmp_path)


def test_vit_of_torchvision(tmp_path: Path) -> None:
    torchvision, transformers = pytest.importorskip("torchvision"), pytest.importorskip("transformers")
    settings = transformers.ViTConfig(**PATCHES, intermediate_size=64, image_size=32, patch_size=8, num_labels=5)
    there = torchvision.models.VisionTransformer(32, 8, 2, 4, 16, 64, num_classes=5)
    both_ways("torchvision-vit", transformers.ViTForImageClassification(settings), there, 32, tmp_path)

    older = {"mlp.0": "mlp.linear_1", "mlp.3": "mlp.linear_2"}
    weights = there.state_dict()
    before = {re.sub("mlp[.][03]", lambda found: older[found[0]], name): value for name, value in weights.items()}
    assert len(before.keys() - weights.keys()) == 8
    there.load_state_dict(dict(before))  # torchvision still takes them
    assert_same(moved(before, "torchvision-vit", tmp_path), moved(weights, "torchvision-vit", tmp_path))


@pytest.mark.parametrize("library", ["torchvision", "timm"])
@pytest.mark.parametrize(
    ("kind", "widths"), [("Bottleneck", [256, 512, 1024, 2048]), ("BasicBlock", [64, 128, 256, 512])]
)
def test_resnet(library: str, kind: str, widths: list[int], tmp_path: Path) -> None:
    models = pytest.importorskip(f"{library}.models.resnet")
    transformers = pytest.importorskip("transformers")
    settings = transformers.ResNetConfig(
        hidden_sizes=widths, depths=[1, 2, 1, 1], layer_type=kind.removesuffix("Block").lower(), num_labels=5
    )
    there = models.ResNet(getattr(models, kind), [1, 2, 1, 1], num_classes=5)
    both_ways("torchvision-resnet", transformers.ResNetForImageClassification(settings), there, 64, tmp_path)


def test_clip(tmp_path: Path) -> None:
    clip, transformers = pytest.importorskip("open_clip.model"), pytest.importorskip("transformers")
    there = clip.CLIP(
        24,
        clip.CLIPVisionCfg(layers=2, width=64, head_width=16, patch_size=8, image_size=32),
        clip.CLIPTextCfg(context_length=10, vocab_size=50, width=32, heads=4, layers=3),
        quick_gelu=True,
    )
    shared = {"num_attention_heads": 4, "projection_dim": 24}
    settings = transformers.CLIPConfig(
        projection_dim=24,
        text_config={
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "vocab_size": 50,
            "max_position_embeddings": 10,
            "eos_token_id": 49,
            **shared,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "image_size": 32,
            "patch_size": 8,
            **shared,
        },
    )
    here = scrambled(transformers.CLIPModel(settings))
    weights = saved(here, tmp_path)
    made = moved(weights, "open-clip", tmp_path, reverse=True)
    there.load_state_dict(made)
    assert_same(moved(made, "open-clip", tmp_path), weights)
    again = opened(transformers.CLIPModel, moved(there.state_dict(), "open-clip", tmp_path), tmp_path)

    images, words = torch.rand(2, 3, 32, 32), torch.tensor([[3, 4, 49], [5, 6, 49]])
    words = torch.nn.functional.pad(words, (7, 0), value=1)
    with torch.no_grad():
        seen, read = there.eval().encode_image(images, normalize=True), there.encode_text(words, normalize=True)
        given = again(input_ids=words, pixel_values=images)
    torch.testing.assert_close(given.image_embeds, seen, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(given.text_embeds, read, rtol=1e-5, atol=1e-6)
