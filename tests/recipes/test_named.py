"""The recipes that come with it do what the formulas of their pages say, and undo it; no library is needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from tests.recipes.layouts import DIM, GROUPS, HEAD, HEADS, LAYERS, LLAMA, State, llama, random, there_and_back

META = {"n_heads": HEADS, "n_kv_heads": GROUPS, "dim": DIM}
_META = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{one}_proj": f"attention.w{one}" for one in "qkvo"},
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "block_sparse_moe": "feed_forward",
}


def in_pairs(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of each head with its two halves alternating, as a rotation of complex numbers wants them."""
    first, second = rows.view(heads, 2, -1, *rows.shape[1:]).unbind(1)
    return torch.stack((first, second), dim=2).reshape(rows.shape)


def of_meta(state: State, names: dict[str, str] = _META) -> State:
    made = {}
    for name, tensor in state.items():
        heads = HEADS if "q_proj" in name else GROUPS if "k_proj" in name else None
        for long, short in names.items():
            name = re.sub(rf"(^|(?<=\.)){re.escape(long)}(?=\.|$)", short, name)
        made[name] = tensor if heads is None else in_pairs(tensor, heads)
    return made


def test_meta_llama(tmp_path: Path) -> None:
    state = llama()
    there_and_back("meta-llama", of_meta(state), state, tmp_path, META)


def test_frequencies_of_meta_are_kept_where_transformers_looks_for_none(tmp_path: Path) -> None:
    state, frequencies = llama(), torch.randn(HEAD // 2)
    first = of_meta(state) | {"rope.freqs": frequencies}
    there_and_back("meta-llama", first, state | {"model.rotary_emb.inv_freq": frequencies}, tmp_path, META)


def test_mistral(tmp_path: Path) -> None:
    for head, experts in ((HEAD, 0), (2 * HEAD, 0), (HEAD, 3)):
        state = llama(head, experts=experts)
        there_and_back("mistral-consolidated", of_meta(state), state, tmp_path / f"{head}-{experts}", META)


def test_torchtune(tmp_path: Path) -> None:
    names = _META | {f"self_attn.{one}_proj": f"attn.{one}_proj" for one in "qkv"} | {
        "self_attn.o_proj": "attn.output_proj",
        "input_layernorm.weight": "sa_norm.scale",
        "post_attention_layernorm.weight": "mlp_norm.scale",
        "model.norm.weight": "norm.scale",
        **{f"mlp.{one}_proj": f"mlp.{short}" for one, short in (("gate", "w1"), ("down", "w2"), ("up", "w3"))},
    }  # fmt: skip
    longest_first = dict(sorted(names.items(), key=lambda item: -len(item[0])))
    there_and_back("torchtune-llama", of_meta(llama(), longest_first), llama(), tmp_path, LLAMA)


def of_megatron(state: State, experts: int = 0) -> State:
    """Return a state dict as Megatron-core names and joins it with transformer_engine."""
    made = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    for layer in range(LAYERS):
        at, to = f"model.layers.{layer}", f"decoder.layers.{layer}"
        attention, mlp = f"{to}.self_attention", f"{to}.mlp"
        for kind in ("weight", "bias"):
            if f"{at}.self_attn.q_proj.{kind}" in state:
                q, k, v = (state[f"{at}.self_attn.{one}_proj.{kind}"] for one in "qkv")
                groups = [
                    torch.cat(parts) for parts in zip(q.chunk(GROUPS), k.chunk(GROUPS), v.chunk(GROUPS), strict=True)
                ]
                made[f"{attention}.linear_qkv.{kind}"] = torch.cat(groups)
        made[f"{attention}.linear_qkv.layer_norm_weight"] = state[f"{at}.input_layernorm.weight"]
        made[f"{attention}.linear_proj.weight"] = state[f"{at}.self_attn.o_proj.weight"]
        norm = state[f"{at}.post_attention_layernorm.weight"]
        made[f"{to}.pre_mlp_layernorm.weight" if experts else f"{mlp}.linear_fc1.layer_norm_weight"] = norm
        if experts:
            made[f"{mlp}.router.weight"] = state[f"{at}.block_sparse_moe.gate.weight"]
        for expert in range(experts):
            one = f"{at}.block_sparse_moe.experts.{expert}"
            both = torch.cat((state[f"{one}.w1.weight"], state[f"{one}.w3.weight"]))
            made[f"{mlp}.experts.linear_fc1.weight{expert}"] = both
            made[f"{mlp}.experts.linear_fc2.weight{expert}"] = state[f"{one}.w2.weight"]
        if not experts:
            both = torch.cat((state[f"{at}.mlp.gate_proj.weight"], state[f"{at}.mlp.up_proj.weight"]))
            made[f"{mlp}.linear_fc1.weight"] = both
            made[f"{mlp}.linear_fc2.weight"] = state[f"{at}.mlp.down_proj.weight"]
    return made


def test_megatron(tmp_path: Path) -> None:
    for head, experts in ((HEAD, 0), (2 * HEAD, 0), (HEAD, 3)):
        state = llama(head, experts=experts)
        if not experts:  # as Qwen2 has them
            state |= random(
                {
                    f"model.layers.{layer}.self_attn.{one}_proj.bias": (n * head,)
                    for layer in range(LAYERS)
                    for one, n in (("q", HEADS), ("k", GROUPS), ("v", GROUPS))
                }
            )
        recipe = "megatron-moe" if experts else "megatron-gpt"
        said = LLAMA | {"head_dim": head}
        theirs = of_megatron(state, experts)
        there_and_back(recipe, theirs, state, tmp_path / f"{head}-{experts}", said, said)
        if not experts:
            there_and_back(
                "megatron-dist",
                layers_stacked(theirs),
                state,
                tmp_path / ("wide" if head > HEAD else "narrow"),
                said,
                said,
            )


def layers_stacked(state: State) -> State:
    """Return a state dict with one tensor for all layers, as Megatron-core stores it in torch_dist."""
    made: dict[str, list[torch.Tensor]] = {}
    for name, tensor in state.items():
        made.setdefault(re.sub(r"layers\.\d+", "layers", name), []).append(tensor)
    return {name: torch.stack(parts) if ".layers." in name else parts[0] for name, parts in made.items()}


def test_mlx(tmp_path: Path) -> None:
    state = llama(experts=3)
    mlx = {name: one for name, one in state.items() if ".experts." not in name}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}.block_sparse_moe"
        for short, long in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            experts = [state[f"{at}.experts.{expert}.{short}.weight"] for expert in range(3)]
            mlx[f"{at}.switch_mlp.{long}.weight"] = torch.stack(experts)
    qwen = random(
        {f"model.layers.2.mlp.experts.{n}.{one}_proj.weight": (4, 6) for n in range(11) for one in ("gate", "up")}
    )
    for one in ("gate", "up"):
        experts = [qwen[f"model.layers.2.mlp.experts.{n}.{one}_proj.weight"] for n in range(11)]
        mlx[f"model.layers.2.mlp.switch_mlp.{one}_proj.weight"] = torch.stack(experts)
    kernel = random({"backbone.layers.0.mixer.conv1d.weight": (6, 1, 4)})
    mlx |= {name: one.transpose(1, 2).contiguous() for name, one in kernel.items()}
    there_and_back("mlx", mlx, state | qwen | kernel, tmp_path, {})


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning")
def test_weight_norm_as_torch_itself_reads_the_old_names(tmp_path: Path) -> None:
    def net(norm: Any) -> nn.Module:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Conv1d(3, 4, 5), nn.Linear(8, 2), nn.ConvTranspose1d(4, 4, 3)]
        made = [norm(layer, dim=dim) for layer, dim in zip(layers, (0, None, 1), strict=True)]
        return nn.Sequential(*made, norm(nn.LSTM(4, 4), "weight_ih_l0"), nn.MultiheadAttention(8, 2, add_bias_kv=True))

    old, new = net(weight_norm), net(parametrizations.weight_norm)
    new.load_state_dict({name: one.clone() for name, one in old.state_dict().items()})
    there_and_back("weight-norm", dict(old.state_dict()), dict(new.state_dict()), tmp_path, {}, {})
