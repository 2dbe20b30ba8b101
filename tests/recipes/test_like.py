"""``migrate --like OTHER``: the one way to the names of another checkpoint is found, or said to be none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from tests.program import invoke
from tests.recipes.layouts import GROUPS, HEADS, LLAMA, llama, same

Names = dict[str, tuple[int, ...]]


def saved(path: Path, names: Names) -> Path:
    torch.save({name: torch.randn(shape) for name, shape in names.items()}, path)
    return path


PLAIN: Names = {"conv.weight": (4, 3), "conv.bias": (4,), "head.weight": (4, 4)}


def under(prefix: str, names: Names) -> Names:
    return {f"{prefix}{name}": shape for name, shape in names.items()}


PAIRS = {
    "ddp": (under("module.", PLAIN), PLAIN),
    "compiled under Lightning": (under("model._orig_mod.", PLAIN), PLAIN),
    "into ddp": (PLAIN, under("module.", PLAIN)),
    "another prefix": (under("net.", PLAIN), under("backbone.", PLAIN)),
    "weight_norm, old to new": (
        {"a.weight_g": (2, 1), "a.weight_v": (2, 2)},
        {"a.parametrizations.weight.original0": (2, 1), "a.parametrizations.weight.original1": (2, 2)},
    ),
    "weight_norm of an LSTM": (
        {"a.weight_ih_l0_g": (2, 1), "a.weight_ih_l0_v": (2, 2), "a.bias_ih_l0": (2,)},
        {
            "a.parametrizations.weight_ih_l0.original0": (2, 1),
            "a.parametrizations.weight_ih_l0.original1": (2, 2),
            "a.bias_ih_l0": (2,),
        },
    ),
    "spectral_norm, old to new": (
        {"a.bias": (2,), "a.weight_orig": (2, 3), "a.weight_u": (2,), "a.weight_v": (3,)},
        {
            "a.bias": (2,),
            "a.parametrizations.weight.original": (2, 3),
            "a.parametrizations.weight.0._u": (2,),
            "a.parametrizations.weight.0._v": (3,),
        },
    ),
    "an adapter as PEFT saves it, to one in its model": (
        {"q.lora_A.weight": (2, 4), "q.lora_B.weight": (4, 2), "e.lora_embedding_A": (2, 4)},
        {"q.lora_A.default.weight": (2, 4), "q.lora_B.default.weight": (4, 2), "e.lora_embedding_A.default": (2, 4)},
    ),
    "an adapter of a model of PEFT, to one that it saves": (
        {"q.lora_A.default.weight": (2, 4), "q.lora_B.default.weight": (4, 2)},
        {"q.lora_A.weight": (2, 4), "q.lora_B.weight": (4, 2)},
    ),
    "attention of diffusers, old to new": (
        {"a.query.weight": (2, 2), "a.key.weight": (2, 2), "a.value.weight": (2, 2), "a.proj_attn.weight": (2, 2)},
        {"a.to_q.weight": (2, 2), "a.to_k.weight": (2, 2), "a.to_v.weight": (2, 2), "a.to_out.0.weight": (2, 2)},
    ),
    "by a recipe, below a trainer's prefix": (
        under("model.", {"layer1.0.conv1.weight": (2, 2), "fc.weight": (3, 2)}),
        {"resnet.encoder.stages.0.layers.0.layer.0.convolution.weight": (2, 2), "classifier.1.weight": (3, 2)},
    ),
    "by a recipe, below a prefix of the other": (
        {"layer1.0.conv1.weight": (2, 2), "fc.weight": (3, 2)},
        {"net.resnet.encoder.stages.0.layers.0.layer.0.convolution.weight": (2, 2), "net.classifier.1.weight": (3, 2)},
    ),
    "by a recipe, where neither has a head": (
        {"layer1.0.conv1.weight": (2, 2), "conv1.weight": (3, 2)},
        {
            "encoder.stages.0.layers.0.layer.0.convolution.weight": (2, 2),
            "embedder.embedder.convolution.weight": (3, 2),
        },
    ),
    "the same back": (
        {
            "encoder.stages.0.layers.0.layer.0.convolution.weight": (2, 2),
            "embedder.embedder.convolution.weight": (3, 2),
        },
        {"layer1.0.conv1.weight": (2, 2), "conv1.weight": (3, 2)},
    ),
    "by two recipes": (
        {f"a.processor.to_{one}_lora.{way}.weight": (2, 2) for one in "qk" for way in ("down", "up")},
        {f"a.to_{one}.lora.{way}.weight": (2, 2) for one in "qk" for way in ("down", "up")},
    ),
    "into modules that are compiled": (
        PLAIN,
        {"conv._orig_mod.weight": (4, 3), "conv._orig_mod.bias": (4,), "head.weight": (4, 4)},
    ),
    "the same": (PLAIN, PLAIN),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_names_of_another_checkpoint(name: str, tmp_path: Path) -> None:
    before, wanted = PAIRS[name]
    source, other = saved(tmp_path / "source.pth", before), saved(tmp_path / "other.pth", wanted)
    report = ckptool.migrate(source, tmp_path / "out.pth", like=other)
    assert f"as {str(other)!r} is: " in str(report)
    found, values = torch.load(tmp_path / "out.pth"), torch.load(source)
    assert {one: tuple(tensor.shape) for one, tensor in found.items()} == wanted
    for new, old in zip(wanted, before, strict=True):
        assert torch.equal(found[new], values[old])


APART = {
    "names that are only alike": ({"q.weight": (2, 2), "k.weight": (2, 2)}, {"a.weight": (2, 2), "b.weight": (2, 2)}),
    "one that is missing": ({"module.conv.weight": (4, 3), "module.conv.bias": (4,)}, PLAIN),
    "one too many": ({**under("module.", PLAIN), "module.other.weight": (9,)}, PLAIN),
    "another shape": (under("module.", {**PLAIN, "conv.bias": (5,)}), PLAIN),
    "layers that are counted from 0 and from 1": (
        {f"layers.{i}.{name}": (2, 2) for i in range(2) for name in ("fc.weight", "proj.weight")},
        {f"layers.{i}.{name}": (2, 2) for i in range(1, 3) for name in ("fc.weight", "proj.weight")},
    ),
    "two modules, and two of other names": (
        {f"{head}.{name}": (2, 2) for head in ("query", "key") for name in ("fc.weight", "proj.weight")},
        {f"{head}.{name}": (2, 2) for head in ("one", "two") for name in ("fc.weight", "proj.weight")},
    ),
    "two modules by a recipe, and two of other names": (
        {f"{head}.processor.to_{one}_lora.down.weight": (2, 2) for head in ("q", "k") for one in "qk"},
        {f"{head}.to_{one}.lora_A.weight": (2, 2) for head in ("one", "two") for one in "qk"},
    ),
    "two modules by two recipes, and two of other names": (
        {f"{head}.processor.to_{one}_lora.down.weight": (2, 2) for head in ("q", "k") for one in "qk"},
        {f"{head}.to_{one}.lora.down.weight": (2, 2) for head in ("one", "two") for one in "qk"},
    ),
    "two models by a recipe": (
        {
            **under("student.", {"fc.weight": (3, 2), "conv1.weight": (2, 2)}),
            **under("teacher.", {"fc.weight": (3, 2), "conv1.weight": (2, 2)}),
        },
        {"resnet.embedder.embedder.convolution.weight": (2, 2), "classifier.1.weight": (3, 2)},
    ),
    "two modules, and two of other names, one of them compiled": (
        {f"{head}.{name}": (2, 2) for head in ("query", "key") for name in ("fc.weight", "proj.weight")},
        {f"{head}.{name}": (2, 2) for head in ("one._orig_mod", "two") for name in ("fc.weight", "proj.weight")},
    ),
    "two modules that have changed places, below a prefix": (
        {"q.weight": (2, 2), "k.weight": (2, 2), "q.bias": (2,)},
        {"net.k.weight": (2, 2), "net.q.weight": (2, 2), "net.k.bias": (2,)},
    ),
    "two that could be it": ({**under("student.", PLAIN), **under("teacher.", PLAIN)}, PLAIN),
}


@pytest.mark.parametrize("name", APART)
def test_what_is_not_clear_is_refused_with_what_is_left(name: str, tmp_path: Path) -> None:
    before, wanted = APART[name]
    source, other = saved(tmp_path / "source.pth", before), saved(tmp_path / "other.pth", wanted)
    done = invoke(["migrate", str(source), str(tmp_path / "out.safetensors"), "--like", str(other)])
    assert done.exit_code == 1
    assert str(source) in done.stderr
    assert "no known way leads to the names" in done.stderr
    assert not (tmp_path / "out.safetensors").exists()


def test_buffers_that_a_model_computes_are_left_out_where_the_other_has_none(tmp_path: Path) -> None:
    computed: Names = {"position_ids": (1, 4), "norm.num_batches_tracked": ()}
    source = saved(tmp_path / "source.pth", under("module.", {**PLAIN, **computed}))
    other = saved(tmp_path / "other.pth", PLAIN)
    report = ckptool.migrate(source, tmp_path / "out.safetensors", like=other)
    assert "`exclude=['*position_ids', '*num_batches_tracked']`" in str(report)
    assert set(load_file(tmp_path / "out.safetensors")) == set(PLAIN)
    some = saved(tmp_path / "some.pth", {**PLAIN, "norm.num_batches_tracked": ()})
    more = saved(tmp_path / "more.pth", {**PLAIN, **computed, "next.num_batches_tracked": ()})
    ckptool.migrate(more, tmp_path / "some.safetensors", like=some)
    assert set(load_file(tmp_path / "some.safetensors")) == {*PLAIN, "norm.num_batches_tracked"}


def test_numbers_of_a_recipe_are_those_of_the_source_or_of_the_other_or_are_asked_for(tmp_path: Path) -> None:
    hf = llama()
    folders = [tmp_path / name for name in ("source", "other")]
    for folder in folders:
        folder.mkdir()
    torch.save(hf, folders[1] / "hf.pth")
    (folders[1] / "config.json").write_text(json.dumps(LLAMA))
    (folders[0] / "params.json").write_text(json.dumps({"n_heads": HEADS, "n_kv_heads": GROUPS}))
    source, out = folders[0] / "meta.pth", tmp_path / "out.safetensors"
    ckptool.migrate(folders[1] / "hf.pth", source, recipe="meta-llama", reverse=True)

    assert "recipe_arguments" not in str(ckptool.migrate(source, out, like=folders[1] / "hf.pth"))
    same(load_file(out), hf)
    (folders[0] / "params.json").unlink()  # then the other says it
    report = ckptool.migrate(source, out, like=folders[1] / "hf.pth", force=True)
    assert "`recipe_arguments={'num_attention_heads': 4, 'num_key_value_heads': 2}`" in str(report)
    same(load_file(out), hf)
    (folders[1] / "config.json").unlink()
    with pytest.raises(ckptool.MigrationRefused, match=r"'meta-llama'.* needs 'num_attention_heads'") as refused:
        ckptool.migrate(source, out, like=folders[1] / "hf.pth", force=True)
    assert "recipe_arguments" in str(refused.value)
    numbers = {"n_heads": HEADS, "n_kv_heads": GROUPS}
    ckptool.migrate(source, out, like=folders[1] / "hf.pth", recipe_arguments=numbers, force=True)
    same(load_file(out), hf)


def test_a_recipe_and_another_checkpoint_contradict_each_other(tmp_path: Path) -> None:
    source = saved(tmp_path / "source.pth", PLAIN)
    with pytest.raises(ckptool.MigrationRefused, match="both say"):
        ckptool.migrate(source, tmp_path / "out.pth", like=source, recipe="any")


def test_transformers_own_table_is_named_where_a_config_says_the_model(tmp_path: Path) -> None:
    source = saved(tmp_path / "source.pth", {"a.experts.0.w1.weight": (2, 2)})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    with pytest.raises(ckptool.MigrationRefused) as refused:
        ckptool.migrate(source, tmp_path / "out.pth", like=saved(tmp_path / "other.pth", {"a.gate_up": (1, 2, 2)}))
    assert "`recipe='transformers:mixtral'` is transformers' own" in str(refused.value.hint)
