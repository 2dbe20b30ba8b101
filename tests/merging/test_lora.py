"""Adapters of low rank are put into weights as peft and kohya do it, or are refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ckptool
from ckptool import MigrationRefused
from tests.dense.test_dense import gptq, written
from tests.program import invoke
from tests.scale import in_turn

Tensors: TypeAlias = dict[str, torch.Tensor]
OUTPUTS, INPUTS, RANK = 12, 10, 4
SHAPES = {"m.q": (OUTPUTS, INPUTS), "m.conv": (6, 3, 3, 3), "m.point": (6, 4, 1, 1)}


def base(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    tensors |= {"m.emb.weight": torch.randn(9, 5).to(dtype), "m.q.bias": torch.randn(OUTPUTS).to(dtype)}
    save_file(tensors, folder / "base.safetensors")
    return folder / "base.safetensors"


def matrices(name: str, rank: int = RANK) -> tuple[torch.Tensor, torch.Tensor]:
    outputs, inputs, *kernel = SHAPES[name]
    return torch.randn(rank, inputs, *kernel), torch.randn(outputs, rank, *(1 for _ in kernel))


def product(down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.einsum("or,r...->o...", up.flatten(1).double(), down.double())


def adapter(
    folder: Path, tensors: Tensors, settings: dict[str, Any] | None = None, name: str = "adapter_model"
) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({key: one.contiguous() for key, one in tensors.items()}, folder / f"{name}.safetensors")
    if settings is not None:
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
    return folder / f"{name}.safetensors"


NAMES = {
    "peft": ("base_model.model.{}.lora_A.weight", "base_model.model.{}.lora_B.weight"),
    "peft, the adapter named": (
        "base_model.model.{}.lora_A.default.weight",
        "base_model.model.{}.lora_B.default.weight",
    ),
    "without m": ("{}.lora_A.weight", "{}.lora_B.weight"),
    "diffusers": ("unet.{}.lora_A.weight", "unet.{}.lora_B.weight"),
    "old diffusers": ("unet.{}.lora.down.weight", "unet.{}.lora.up.weight"),
    "ComfyUI": ("diffusion_model.{}.lora_A.weight", "diffusion_model.{}.lora_B.weight"),
    "kohya": ("lora_unet_{}.lora_down.weight", "lora_unet_{}.lora_up.weight"),
    "kohya, of a text encoder": ("lora_te1_{}.lora_down.weight", "lora_te1_{}.lora_up.weight"),
}


@pytest.mark.parametrize(("style", "alpha"), in_turn(NAMES, ["settings", "tensors", "nothing"]))
def test_names_and_alphas_of_every_library(style: str, alpha: str, tmp_path: Path) -> None:
    path, own = base(tmp_path), {}
    before, tensors = load_file(path), Tensors()
    for name in SHAPES:
        down, up = matrices(name)
        own[f"{name}.weight"] = product(down, up)
        module = name.removeprefix("m.") if style == "without m" else name
        module = module.replace(".", "_") if "kohya" in style else module
        tensors |= {one.format(module): tensor for one, tensor in zip(NAMES[style], (down, up), strict=True)}
        if alpha == "tensors":
            tensors[NAMES[style][0].format(module).partition(".lora")[0] + ".alpha"] = torch.tensor(2.0).bfloat16()
    settings = {"r": RANK, "lora_alpha": 2} if alpha == "settings" else None
    lora = adapter(tmp_path / "a", tensors, settings)

    report = ckptool.merge(path, tmp_path / "out.safetensors", lora={lora: 0.5}, scale=3)
    after, scale = load_file(report.target), 1.5 * (1 if alpha == "nothing" else 2 / RANK)
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        want = before[name].double() + own.get(name, torch.tensor(0.0)) * scale
        assert torch.allclose(tensor.double(), want, rtol=1e-6, atol=1e-5), name
        assert (name in own) != torch.equal(tensor, before[name])
    assert ("nothing says the alpha" in str(report)) == (alpha == "nothing")
    quiet = invoke(["merge", "-q", str(path), "--lora", str(lora), "-o", str(tmp_path / "quiet.safetensors")])
    assert quiet.stdout == f"{tmp_path / 'quiet.safetensors'}\n"
    told = f"Warning: nothing says the alpha of {str(lora)!r}: it is taken to be the rank\n"
    assert quiet.stderr == (told if alpha == "nothing" else "")
    assert report.verified


def kohya(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """Return what the script of kohya that merges adapters makes of a weight."""
    if weight.ndim == 2:
        return weight + 1.0 * (up @ down) * scale
    if down.shape[2:] == (1, 1):
        flat = up.squeeze(3).squeeze(2) @ down.squeeze(3).squeeze(2)
        return weight + 1.0 * flat.unsqueeze(2).unsqueeze(3) * scale
    conved = nn.functional.conv2d(down.permute(1, 0, 2, 3), up).permute(1, 0, 2, 3)
    return weight + 1.0 * conved * scale


def test_it_is_bit_by_bit_what_the_formula_of_kohya_gives(tmp_path: Path) -> None:
    path, pairs = base(tmp_path), {name: matrices(name) for name in SHAPES}
    tensors = Tensors()
    for name, (down, up) in pairs.items():
        head = f"lora_unet_{name.replace('.', '_')}"
        tensors |= {f"{head}.lora_down.weight": down, f"{head}.lora_up.weight": up, f"{head}.alpha": torch.tensor(3.0)}
    after = load_file(ckptool.merge(path, tmp_path / "out.safetensors", lora=adapter(tmp_path / "a", tensors)).target)

    for name, (down, up) in pairs.items():
        assert torch.equal(after[f"{name}.weight"], kohya(load_file(path)[f"{name}.weight"], down, up, 3 / RANK))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_short_type_is_reached_in_one_rounding(dtype: torch.dtype, tmp_path: Path) -> None:
    path, (down, up) = base(tmp_path, dtype), matrices("m.q")
    tensors = {"base_model.model.m.q.lora_A.weight": down.to(dtype), "base_model.model.m.q.lora_B.weight": up.to(dtype)}
    lora = adapter(tmp_path / "a", tensors, {"r": RANK, "lora_alpha": 2 * RANK, "use_rslora": True})
    want = load_file(path)["m.q.weight"].float() + (up.to(dtype).float() @ down.to(dtype).float()) * (2 * RANK / 2)

    assert torch.equal(
        ckptool.load(ckptool.merge(path, tmp_path / "o.pth", lora=lora).target)["m.q.weight"], want.to(dtype)
    )
    report = ckptool.merge(path, tmp_path / "shards", lora=lora, max_shard_size="1KB", dtype="float32")
    assert torch.equal(ckptool.load(report.target)["m.q.weight"], want.to(dtype).float())


@pytest.mark.parametrize("turns", [False, True])
def test_large_weights_are_what_the_product_of_all_gives(turns: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape, rank = (1100, 2048), 8
    weight, down, up = (
        torch.randn(shape).bfloat16(),
        torch.randn(rank, shape[1 - turns]),
        torch.randn(shape[turns], rank),
    )
    save_file({"m.q.weight": weight}, tmp_path / "base.safetensors")
    tensors = {"m.q.lora_A.weight": down, "m.q.lora_B.weight": up}
    lora = adapter(tmp_path / "a", tensors, {"r": rank, "lora_alpha": 3, "fan_in_fan_out": turns})

    target = ckptool.merge(tmp_path / "base.safetensors", tmp_path / "o.safetensors", lora=lora).target
    added = (up @ down) * (3 / rank)
    assert torch.equal(load_file(target)["m.q.weight"], (weight + (added.T if turns else added)).bfloat16())


def test_embeddings_magnitudes_patterns_and_saved_modules(tmp_path: Path) -> None:
    path, (down, up), head = base(tmp_path), matrices("m.q", 2), "base_model.model."
    small, large, magnitude, point = (
        torch.randn(RANK, 9),
        torch.randn(5, RANK),
        torch.rand(OUTPUTS),
        torch.randn(6, 4, 1, 1),
    )
    tensors = {f"{head}m.q.lora_A.weight": down, f"{head}m.q.lora_B.weight": up}
    tensors |= {f"{head}m.q.lora_magnitude_vector": magnitude, f"{head}m.point.weight": point.double()}
    tensors |= {f"{head}m.emb.lora_embedding_A": small, f"{head}m.emb.lora_embedding_B": large}
    settings = {"r": RANK, "lora_alpha": 8, "rank_pattern": {"q": 2}, "alpha_pattern": {r"^m\.q": 3}}
    before = load_file(path)
    report = ckptool.merge(path, tmp_path / "out.safetensors", lora=adapter(tmp_path / "a", tensors, settings))
    after = load_file(report.target)

    whole = before["m.q.weight"] + product(down, up) * 1.5
    assert torch.allclose(after["m.q.weight"].double(), whole * (magnitude / whole.norm(dim=1)).unsqueeze(1), atol=1e-5)
    assert torch.allclose(
        after["m.emb.weight"].double(), before["m.emb.weight"] + product(small, large).T * 2, atol=1e-5
    )
    assert torch.equal(after["m.point.weight"], point)
    assert torch.equal(after["m.q.bias"], before["m.q.bias"])


def test_what_peft_saves_below_the_matrices_is_used(tmp_path: Path) -> None:
    path, (down, up), head = base(tmp_path), matrices("m.q"), "base_model.model.m.q."
    own, bias = torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS)
    tensors = {f"{head}lora_A.weight": down, f"{head}lora_B.weight": up}
    tensors |= {f"{head}base_layer.weight": own, f"{head}base_layer.bias": bias}
    lora = adapter(tmp_path / "a", tensors)
    report = ckptool.merge(path, tmp_path / "out.safetensors", lora=lora)

    assert torch.equal(load_file(report.target)["m.q.weight"], own + up @ down)
    assert torch.equal(load_file(report.target)["m.q.bias"], bias)
    assert "added to its own weight, of rank 4" in str(report)
    two = [lora, adapter(tmp_path / "b", {f"{head}lora_A.weight": down, f"{head}lora_B.weight": up})]
    with pytest.raises(MigrationRefused, match="changed in another way"):
        ckptool.merge(path, tmp_path / "two.safetensors", lora=two)


def test_an_adapter_of_several_parts_of_a_model(tmp_path: Path) -> None:
    names = ["model.diffusion_model.attn.to_q", "model.diffusion_model.attn.to_out.0", "cond.text.q", "ema.attn.to_q"]
    before = {f"{name}.weight": torch.randn(OUTPUTS, INPUTS) for name in names}
    save_file(before, tmp_path / "base.safetensors")
    keys, pairs = (
        ("attn.processor.to_q_lora", "attn.processor.to_out_lora", "text.q.lora"),
        [matrices("m.q") for _ in "123"],
    )
    tensors = Tensors()
    for head, key, (down, up) in zip(("unet", "unet", "text_encoder"), keys, pairs, strict=True):
        tensors |= {f"{head}.{key}.down.weight": down, f"{head}.{key}.up.weight": up}
    said = {"unet.r": RANK, "unet.lora_alpha": 2, "text_encoder.lora_alpha": 3, "unet.alpha_pattern": {"to_q": 8}}
    save_file(tensors, tmp_path / "lora.safetensors", {"lora_adapter_metadata": json.dumps(said)})

    report = ckptool.merge(
        tmp_path / "base.safetensors", tmp_path / "o.safetensors", lora=tmp_path / "lora.safetensors"
    )
    found = load_file(report.target)
    for name, (down, up), scale in zip(names, pairs, (2, 0.5, 0.75), strict=False):
        assert torch.equal(found[f"{name}.weight"], before[f"{name}.weight"] + up @ down * scale)
    assert torch.equal(found["ema.attn.to_q.weight"], before["ema.attn.to_q.weight"])  # it has not all that unet has
    alone = {name: one for name, one in tensors.items() if "to_q" in name}
    with pytest.raises(MigrationRefused, match=r"may be ema\.attn\.to_q\.weight, model\.diffusion_model\."):
        ckptool.merge(tmp_path / "base.safetensors", tmp_path / "x.pth", lora=adapter(tmp_path / "a", alone))


def test_what_is_tied_stays_tied(tmp_path: Path) -> None:
    weight, (down, up) = torch.randn(OUTPUTS, INPUTS), matrices("m.q")
    torch.save({"m.q.weight": weight, "head.weight": weight}, tmp_path / "base.pth")
    lora = adapter(tmp_path / "a", {"m.q.lora_A.weight": down, "m.q.lora_B.weight": up})
    report = ckptool.merge(tmp_path / "base.pth", tmp_path / "out.pth", lora=lora)

    found = torch.load(report.target)
    assert found["m.q.weight"].data_ptr() == found["head.weight"].data_ptr()
    assert torch.equal(found["head.weight"], weight + up @ down)
    assert "'head.weight' is tied" in str(report)


def test_a_quantised_base_is_refused_unless_it_is_made_plain(tmp_path: Path) -> None:
    (down, up), scale = matrices("m.q"), torch.rand(OUTPUTS, 1) / 9
    values = (torch.randn(OUTPUTS, INPUTS) / scale).to(torch.float8_e4m3fn)
    save_file({"m.q.weight": values, "m.q.weight_scale": scale}, tmp_path / "base.safetensors")
    lora, path = (
        adapter(tmp_path / "a", {"m.q.lora_A.weight": down, "m.q.lora_B.weight": up}),
        tmp_path / "base.safetensors",
    )

    with pytest.raises(MigrationRefused, match="float8_e4m3fn") as caught:
        ckptool.merge(path, tmp_path / "o.safetensors", lora=lora)
    assert "dequantize" in str(caught.value.hint)
    done = ckptool.merge(path, tmp_path / "o.safetensors", lora=lora, dequantize=True, dtype="float32")
    assert torch.equal(load_file(done.target)["m.q.weight"], values.float() * scale + up @ down)


def test_weights_whose_names_change_when_they_are_made_plain(tmp_path: Path) -> None:
    tensors, dense, says = gptq(4, is_new=False)
    path, down, up = written(tensors, says, tmp_path), torch.randn(2, dense.shape[1]), torch.randn(dense.shape[0], 2)
    lora = adapter(tmp_path / "a", {"m.lora_A.weight": down, "m.lora_B.weight": up})

    with pytest.raises(MigrationRefused) as caught:
        ckptool.merge(path, tmp_path / "o.safetensors", lora=lora)
    assert "dequantize" in str(caught.value.hint)
    done = ckptool.merge(path, tmp_path / "o.safetensors", lora=lora, dequantize=True)
    assert torch.equal(load_file(done.target)["m.weight"], (dense.float() + up @ down).to(dense.dtype))
    with pytest.raises(MigrationRefused, match="it is quantised"):
        ckptool.merge(path, tmp_path / "x.safetensors", average=done.target)


def pair(module: str = "base_model.model.m.q", rank: int = RANK) -> Tensors:
    down, up = matrices("m.q", rank)
    return {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}


def ones(down: tuple[int, int], up: tuple[int, int]) -> Tensors:
    return {"m.q.lora_A.weight": torch.ones(down), "m.q.lora_B.weight": torch.ones(up)}


REFUSED: dict[str, tuple[Tensors, dict[str, Any] | None, str]] = {
    "a base of its own, of another shape": (
        {**pair(), "base_model.model.m.q.base_layer.weight": torch.ones(13, 10)}, None, r"\[13, 10\], and 'm.q.weight'",
    ),
    "a name that is not there": (pair("base_model.model.m.k"), None, "1 of its 1 parts fit no weight: base"),
    "one of two": (pair() | pair("base_model.model.m.r"), None, "fit no weight: base_model.model.m.r"),
    "two adapters": (
        {"m.q.lora_A.a.weight": torch.ones(4, 10), "m.q.lora_B.b.weight": torch.ones(12, 4)}, None, "two adapters",
    ),
    "another shape": (ones((4, 11), (12, 4)), None, r"\[12, 10\]"),
    "turned round": (ones((4, 12), (10, 4)), None, r"\[12, 10\]"),
    "half a pair": ({"m.q.lora_A.weight": torch.ones(4, 10)}, None, "no matrix 'up'"),
    "ranks that differ": (ones((4, 10), (12, 3)), None, "12, 3"),
    "a rank unlike the settings": (pair(), {"r": 8, "lora_alpha": 8}, "rank 4, and its settings say 8"),
    "a pattern that is one": (pair(), {"r": 4, "lora_alpha": 8, "alpha_pattern": {"(a+)+b": 3}}, "has a pattern"),
    "alpha that is not a number": (pair(), {"r": 4, "lora_alpha": "8"}, "'lora_alpha'"),
    "an alpha of NaN": (pair() | {"base_model.model.m.q.alpha": torch.tensor(torch.nan)}, None, "is not a number"),
    "another kind, by its settings": (pair(), {"peft_type": "LOHA"}, "LOHA"),
    "a base that is changed": (pair(), {"r": 4, "lora_alpha": 4, "init_lora_weights": "pissa"}, "pissa"),
    "parameters": (pair(), {"r": 4, "lora_alpha": 4, "target_parameters": ["m.q"]}, "target_parameters"),
    "LoKr": ({"lora_unet_m_q.lokr_w1": torch.ones(2, 2)}, None, "LoKr"),
    "LoHa": ({"lora_unet_m_q.hada_w1_a": torch.ones(2, 2)}, None, "LoHa"),
    "whole differences": ({"diffusion_model.m.q.diff": torch.ones(12, 10)}, None, "whole differences"),
    "VeRA": ({"base_model.model.m.q.vera_lambda_b": torch.ones(12)}, None, "VeRA"),
    "biases": (pair() | {"base_model.model.m.q.lora_B.bias": torch.ones(12)}, None, "lora_B.bias"),
    "a saved module of another shape": ({**pair(), "base_model.model.m.q.bias": torch.ones(13)}, None, r"\[13\]"),
    "floats of 8 bits": ({name: one.to(torch.float8_e5m2) for name, one in pair().items()}, None, "no plain floats"),
    "a whole model": ({"m.q.weight": torch.ones(12, 10)}, None, "none of its 1 tensor is one of a pair"),
    "modules alone": ({"base_model.model.m.q.weight": torch.ones(12, 10)}, None, "no pair"),
    "one saved for two adapters": (
        {**pair(), **{f"base_model.model.m.q.modules_to_save.{one}.bias": torch.ones(12) for one in "ab"}},
        None, "'base_model.model.m.q.bias' twice",
    ),
    "saved integers": ({**pair(), "base_model.model.m.q.bias": torch.ones(12).int()}, None, "int32 on cpu"),
    "floats of two sizes": (
        {"m.q.lora_A.weight": torch.ones(4, 10).double(), "m.q.lora_B.weight": torch.ones(12, 4)}, None,
        "matrices of float64 and float32",
    ),
    "infinite": ({name: one / 0 for name, one in pair().items()}, None, "infinite or NaN"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str, tmp_path: Path) -> None:
    tensors, settings, words = REFUSED[name]
    with pytest.raises(MigrationRefused, match=words) as caught:
        ckptool.merge(base(tmp_path), tmp_path / "o.safetensors", lora=adapter(tmp_path / "a", tensors, settings))
    assert not (tmp_path / "o.safetensors").exists()
    hints = {
        "a whole model": "that is the base, and `lora=` takes the adapter",
        "another shape": "the model that the adapter was made for",
        "turned round": "fan_in_fan_out",
    }
    assert hints.get(name, "") in (caught.value.hint or "")


@pytest.mark.parametrize("ties", [True, False, None])
@pytest.mark.parametrize("is_equal", [True, False])
def test_what_settings_alone_tie_changes_together(ties: bool | None, is_equal: bool, tmp_path: Path) -> None:
    embedding = torch.randn(9, 5)
    head = embedding.clone() if is_equal else torch.randn(9, 5)
    save_file({"lm_head.weight": head, "model.embed_tokens.weight": embedding}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({} if ties is None else {"tie_word_embeddings": ties}))
    down, up = torch.randn(RANK, 5), torch.randn(9, RANK)
    pair = {"base_model.model.lm_head.lora_A.weight": down, "base_model.model.lm_head.lora_B.weight": up}
    lora = adapter(tmp_path / "a", pair, {"r": RANK, "lora_alpha": RANK})

    report = ckptool.merge(tmp_path, tmp_path / "out.pth", lora=lora, form="state_dict")
    after = torch.load(tmp_path / "out.pth")
    assert torch.allclose(after["lm_head.weight"], head + up @ down, atol=1e-5)
    together = ties is True and is_equal
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"]) == together
    assert torch.equal(after["model.embed_tokens.weight"], embedding) != together
    assert any("is tied to what is merged, and changes with it" in note for note in report.notes) == together


def test_an_output_layer_that_is_tied_and_not_there_is_named(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.rand(9, 4)}, tmp_path / "model.safetensors")
    lora = adapter(
        tmp_path / "a", {"lm_head.lora_A.weight": torch.rand(2, 4), "lm_head.lora_B.weight": torch.rand(9, 2)}
    )
    with pytest.raises(MigrationRefused) as caught:
        ckptool.merge(tmp_path / "model.safetensors", tmp_path / "o.safetensors", lora=lora)
    assert "tied to 'model.embed_tokens.weight'" in str(caught.value.hint)


@pytest.mark.parametrize(("pattern", "alpha"), [("m.q", 3), ("m[q", 0), ("q", 3), ("..q", 3), (r"m\.q$", 3), ("x", 4)])
def test_patterns_are_those_of_peft(pattern: str, alpha: int, tmp_path: Path) -> None:
    settings = {"r": 4, "lora_alpha": 4, "alpha_pattern": {pattern: 3}}
    path, lora = base(tmp_path), adapter(tmp_path / "a", pair("base_model.model.m.q"), settings)
    if not alpha:
        with pytest.raises(MigrationRefused, match="has a pattern"):
            ckptool.merge(path, tmp_path / "o.safetensors", lora=lora)
        return
    assert f"times {alpha / 4:g}" in str(ckptool.merge(path, tmp_path / "o.safetensors", lora=lora))


def test_a_square_weight_beside_others_that_are_not_turned_is_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(4, 4), "b.weight": torch.ones(6, 4)}, tmp_path / "b.safetensors")
    tensors = {f"{one}.lora_A.weight": torch.ones(2, 4) for one in "ab"}
    tensors |= {"a.lora_B.weight": torch.ones(4, 2), "b.lora_B.weight": torch.ones(6, 2)}
    lora = adapter(tmp_path / "a", tensors, {"r": 2, "lora_alpha": 2, "fan_in_fan_out": True})
    with pytest.raises(MigrationRefused, match="'a' is square"):
        ckptool.merge(tmp_path / "b.safetensors", tmp_path / "o.safetensors", lora=lora)


def test_one_adapter_given_twice_is_refused(tmp_path: Path) -> None:
    path, lora = base(tmp_path), adapter(tmp_path / "a", pair())
    for other in (tmp_path / "a" / ".." / "a" / lora.name, tmp_path / "a"):
        with pytest.raises(ValueError, match="twice"):
            ckptool.merge(path, tmp_path / "o.safetensors", lora=[lora, str(other)])


def test_what_settings_announce_and_an_adapter_lacks_is_noted(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "a", pair(), {"r": 4, "lora_alpha": 4, "peft_type": "LORA", "target_modules": ["q", "v"]})
    report = ckptool.merge(base(tmp_path), tmp_path / "o.safetensors", lora=lora)
    (said,) = report.assumed
    assert said in report.notes
    assert "no tensor of the adapter is of v," in said


def test_settings_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "a", pair(), {})
    (tmp_path / "a" / "adapter_config.json").write_text("{")
    with pytest.raises(MigrationRefused, match="cannot be read"):
        ckptool.merge(base(tmp_path), tmp_path / "o.safetensors", lora=lora)


def test_the_command(tmp_path: Path) -> None:
    path, one, two = base(tmp_path), adapter(tmp_path / "a", pair()), adapter(tmp_path / "b", pair("m.q"))
    target = tmp_path / "out.pth"

    done = invoke(["merge", path, "--lora", f"{one}=0.5", "--lora", two, "-o", target, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["target"] == str(target)
    downs = [load_file(lora) for lora in (one, two)]
    added = [list(tensors.values()) for tensors in downs]
    want = load_file(path)["m.q.weight"] + added[0][1] @ added[0][0] * 0.5 + added[1][1] @ added[1][0]
    assert torch.allclose(torch.load(target)["m.q.weight"], want, atol=1e-5)

    again = invoke(["merge", path, "--lora", one, "-o", target])
    assert again.exit_code == 2
    assert "exists" in again.output
    assert invoke(["merge", path, "--lora", one, "-o", target, "--force", "--dry-run"]).exit_code == 0
    more = adapter(tmp_path / "c", pair() | pair("text_encoder.z"))
    refused = invoke(["merge", path, "--lora", more, "-o", tmp_path / "x.pth"])
    assert refused.exit_code == 1
    assert "--allow-unmatched" in refused.output
    assert (
        "left out: text_encoder.z"
        in invoke(["merge", path, "--lora", more, "-o", tmp_path / "x.pth", "--allow-unmatched"]).output
    )
    for wrong in (
        ["-o", target],
        ["--lora", one, "--lora", f"{one}=2", "-o", target, "--force"],
        ["--lora", one],
        ["--lora", one, "--average", "-o", target],
        [path, "--lora", one, "-o", target],
    ):
        assert invoke(["merge", path, *wrong]).exit_code == 2
    for number in ("abc", "1,5", ""):
        failed = invoke(["merge", path, "--lora", f"{one}={number}", "-o", tmp_path / "x.pth"])
        assert failed.exit_code == 2
        assert f"not a number: {number!r}" in failed.output


def test_settings_that_stay_behind_are_told_of(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a", pair(), {"r": 4, "lora_alpha": 8})
    alone = adapter(tmp_path / "b", pair())
    said = "'adapter_config.json' beside the source stays there"
    for source in (path, path.parent):
        for target, options in {"x.safetensors": {}, "x.pth": {}, "shards": {"max_shard_size": "1GB"}}.items():
            report = ckptool.migrate(source, tmp_path / target, dry_run=True, **options)  # type: ignore[arg-type]
            assert sum(said in note for note in report.notes) == 1
    assert said not in str(ckptool.migrate(path, path.parent / "y.safetensors", dtype="float16"))
    assert said not in str(ckptool.migrate(alone, tmp_path / "z.safetensors", dtype="float16"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.lin, self.square = nn.Embedding(50, 32), nn.Linear(32, 64), nn.Linear(32, 32)
        self.conv, self.point, self.head = nn.Conv2d(8, 16, 3), nn.Conv2d(8, 16, 1), nn.Linear(64, 5)


class Named(Net):
    """A net whose embedding peft knows: it saves what is below the matrices that are for it."""

    def get_input_embeddings(self) -> nn.Module:
        return self.emb


PEFT: dict[str, list[dict[str, Any]]] = {
    "an embedding that is saved as well": [{"target_modules": ["emb", "lin"]}],
    "biases": [{"target_modules": ["lin", "conv"], "bias": "all"}],
    "every layer": [{"target_modules": ["emb", "lin", "square", "conv", "point"], "modules_to_save": ["head"]}],
    "several": [
        {"target_modules": ["lin", "conv"], "rank_pattern": {"lin": 8}, "alpha_pattern": {"^lin": 3}},
        {"target_modules": ["lin", "square"], "use_rslora": True},
    ],
    "DoRA": [{"target_modules": ["lin", "square"], "use_dora": True}],
    "DoRA of an embedding and of convolutions": [{"target_modules": ["emb", "conv", "point"], "use_dora": True}],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PEFT)
def test_it_is_bit_by_bit_what_peft_merges(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    net, weights = (Named() if "saved as well" in name else Net()).to(dtype), {}
    save_file(net.state_dict(), tmp_path / "base.safetensors")
    for number, settings in enumerate(PEFT[name]):
        trained = peft.get_peft_model(copy.deepcopy(net), peft.LoraConfig(r=4, lora_alpha=7, **settings))
        for key, parameter in trained.named_parameters():
            if parameter.requires_grad:
                parameter.data += (
                    torch.rand_like(parameter) / 3 if "magnitude" in key else torch.randn_like(parameter) / 3
                )
        trained.save_pretrained(tmp_path / f"{number}")
        weights[str(tmp_path / f"{number}")] = (1.0, 0.7)[number]
    paths = list(weights)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(net), paths[0], adapter_name="0")
    for path in paths[1:]:
        model.load_adapter(path, adapter_name=Path(path).name)
    for module in model.modules():
        for path, weight in weights.items():
            if Path(path).name in getattr(module, "scaling", {}):
                module.set_scale(Path(path).name, weight)
    want = model.merge_and_unload(adapter_names=[Path(path).name for path in paths]).state_dict()

    found = load_file(ckptool.merge(tmp_path / "base.safetensors", tmp_path / "o.safetensors", lora=weights).target)
    assert found.keys() == want.keys()
    assert [key for key, tensor in want.items() if not torch.equal(found[key], tensor)] == []
    assert any(not torch.equal(found[key], tensor) for key, tensor in net.state_dict().items())
