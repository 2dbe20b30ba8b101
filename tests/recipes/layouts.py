"""State dicts of small models, and what recipes make of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import ckptool

State = dict[str, torch.Tensor]
HEADS, GROUPS, DIM, HIDDEN, VOCABULARY, HEAD, LAYERS = 4, 2, 32, 48, 24, 8, 2
LLAMA: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "hidden_size": DIM,
    "num_hidden_layers": LAYERS,
    "intermediate_size": HIDDEN,
    "vocab_size": VOCABULARY,
}


def random(shapes: Mapping[str, tuple[int, ...]]) -> State:
    """Return tensors of these shapes, none like another."""
    numbers = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=numbers).bfloat16() for name, shape in shapes.items()}


def llama(head: int = HEAD, *, experts: int = 0) -> State:
    """Return a state dict as transformers' Llama has it; with experts, as its Mixtral on a disk."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, DIM), "model.norm.weight": (DIM,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}_layernorm.weight": (DIM,) for name in ("input", "post_attention")}
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (HEADS * head, DIM),
            f"{at}.self_attn.k_proj.weight": (GROUPS * head, DIM),
            f"{at}.self_attn.v_proj.weight": (GROUPS * head, DIM),
            f"{at}.self_attn.o_proj.weight": (DIM, HEADS * head),
        }
        if experts:
            shapes[f"{at}.block_sparse_moe.gate.weight"] = (experts, DIM)
        for expert in range(experts):
            one = f"{at}.block_sparse_moe.experts.{expert}"
            shapes |= {
                f"{one}.w1.weight": (HIDDEN, DIM),
                f"{one}.w2.weight": (DIM, HIDDEN),
                f"{one}.w3.weight": (HIDDEN, DIM),
            }
        if not experts:
            shapes |= {f"{at}.mlp.{name}_proj.weight": (HIDDEN, DIM) for name in ("gate", "up")}
            shapes[f"{at}.mlp.down_proj.weight"] = (DIM, HIDDEN)
    return random(shapes | {"lm_head.weight": (VOCABULARY, DIM)})


def migrated(recipe: str, state: State, numbers: Mapping[str, Any], folder: Path, *, reverse: bool = False) -> State:
    """Return what a recipe makes of a state dict in a file, beside a config.json or params.json of these numbers."""
    folder.mkdir(exist_ok=True, parents=True)
    beside = "params.json" if "n_heads" in numbers else "config.json"
    (folder / beside).write_text(json.dumps(numbers))
    save_file({name: one.contiguous() for name, one in state.items()}, folder / "model.safetensors")
    ckptool.migrate(folder / "model.safetensors", folder / "made.safetensors", recipe=recipe, reverse=reverse)
    return load_file(folder / "made.safetensors")


def same(one: State, other: State) -> None:
    """Assert that two state dicts have the same names, and the same bytes in the same shapes."""
    assert sorted(one) == sorted(other)
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        both = (each.contiguous().reshape(-1).view(torch.uint8) for each in (tensor, other[name]))
        assert torch.equal(*both), name


def there_and_back(
    recipe: str, first: State, second: State, folder: Path, before: Mapping[str, Any], after: Mapping[str, Any] = LLAMA
) -> None:
    """Assert that a recipe makes the second state dict of the first, and of that the first."""
    same(migrated(recipe, first, before, folder / "there"), second)
    same(migrated(recipe, second, after, folder / "back", reverse=True), first)
