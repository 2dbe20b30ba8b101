"""``migrate --like OTHER`` between what libraries write: values are compared with what the library itself makes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from tests.recipes.by_libraries import Weights, like, under
from tests.scale import exhaustive

pytestmark = [exhaustive, pytest.mark.filterwarnings("ignore")]  # of what other libraries say when they are imported

BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 24}


def spelled(weights: Weights, *rules: tuple[str, str]) -> Weights:
    """Return weights by other names."""
    for pattern, to in rules:
        weights = {re.sub(pattern, to, name): value for name, value in weights.items()}
    return weights


def bert_of_old() -> tuple[Weights, Weights]:
    transformers = pytest.importorskip("transformers")
    new = like(transformers.BertModel(transformers.BertConfig(**BERT)))
    old = spelled(new, (r"LayerNorm\.weight$", "LayerNorm.gamma"), (r"LayerNorm\.bias$", "LayerNorm.beta"))
    return {**under("bert.", old), "bert.embeddings.position_ids": torch.arange(4)}, new


def gpt2_without_its_head() -> tuple[Weights, Weights]:
    transformers = pytest.importorskip("transformers")
    base = like(transformers.GPT2Model(transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=24)))
    return base, under("transformer.", base)


def weight_norm() -> tuple[Weights, Weights]:
    olds, news = torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm
    old, new = (torch.nn.Sequential(norm(torch.nn.Conv1d(3, 4, 3))) for norm in (olds, news))
    weights = like(old)
    new.load_state_dict(weights)
    return weights, dict(new.state_dict())


def adapter_of_peft() -> tuple[Weights, Weights]:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig(**BERT))
    whole = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"]))
    weights = {name: value for name, value in like(whole).items() if "lora_" in name}
    whole.load_state_dict(weights, strict=False)
    return dict(peft.get_peft_model_state_dict(whole)), weights


def resnet_of_timm_in_a_trainer() -> tuple[Weights, Weights]:
    timm = pytest.importorskip("timm")
    weights = like(timm.create_model("resnet18", num_classes=5))
    return under("model._orig_mod.", weights), weights


PAIRS: dict[str, Callable[[], tuple[Weights, Weights]]] = {
    one.__name__: one
    for one in (bert_of_old, gpt2_without_its_head, weight_norm, adapter_of_peft, resnet_of_timm_in_a_trainer)
}


@pytest.mark.parametrize(
    ("name", "back"),
    [(name, back) for name in PAIRS for back in (False, True) if (name, back) != ("bert_of_old", True)],
)
def test_a_pair(name: str, back: bool, tmp_path: Path) -> None:
    source, wanted = PAIRS[name]()
    if back:
        source, wanted = wanted, source
    torch.save(source, tmp_path / "source.pth")
    torch.save({one: torch.zeros_like(value) for one, value in wanted.items()}, tmp_path / "other.pth")
    ckptool.migrate(tmp_path / "source.pth", tmp_path / "out.safetensors", like=tmp_path / "other.pth")
    found = load_file(tmp_path / "out.safetensors")
    assert sorted(found) == sorted(wanted)
    assert not [one for one, value in wanted.items() if not torch.equal(value, found[one])]
