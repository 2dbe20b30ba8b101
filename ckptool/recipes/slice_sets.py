"""
Rules of programs that save a file for each rank of tensor parallelism, and the names of these files.

``slice_rules`` explains the rules, which come from the published code of each program.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from ckptool.recipes.recipe import Number


class SliceSet(NamedTuple):
    """How one program cuts the tensors of its models."""

    name: str = "join"
    rules: tuple[str, ...] = ()
    source: str = ""
    """The code that the rules come from."""
    files: str = ""
    """A pattern of the names of its files, with groups for the numbers of the rank and of a part of its tensors."""
    written: str = "rank{}"
    """Name of the file of a rank that is written; without a suffix, the form adds its own. Empty if none is written."""
    key: str | None = None
    """The key of the weights, where a file has several state dicts."""
    lets: Mapping[str, Number] = MappingProxyType({})
    """Numbers to use if no settings give them."""
    per_rank: tuple[str, ...] = ()
    """Numbers that all ranks must have an equal share of."""


def _meta(name: str, embedding: int) -> SliceSet:
    return SliceSet(
        name,
        (
            f"tok_embeddings.weight={embedding}@norm.weight",
            *(f"*.attention.{one}.weight=0" for one in ("wq", "wk", "wv")),
            "*.attention.wo.weight=1@norm.weight",
            "*.feed_forward.w1.weight=0",
            "*.feed_forward.w2.weight=1",
            "*.feed_forward.w3.weight=0",
            "*_norm.weight=same",
            "norm.weight=same",
            "rope.freqs=same",
            "output.weight=0",
        ),
        "https://github.com/meta-llama/llama, meta-llama/llama3; llama/model.py",
        r"consolidated\.(?P<rank>\d{2,3})\.(?:pth|pt|safetensors)",
        "consolidated.{:02}.pth",
        per_rank=("n_heads", "n_kv_heads"),
    )


def _each(names: str, how: str, ends: str = "weight bias") -> tuple[str, ...]:
    return tuple(f"*{name}.{end}={how}" for name in names.split() for end in ends.split())


_QKV: Final = "0/num_attention_heads:num_key_value_heads:num_key_value_heads"
NAMED: Final[Mapping[str, SliceSet]] = {
    "meta-llama": _meta("meta-llama", 1),  # Llama 1 and 2, Code Llama
    "meta-llama3": _meta("meta-llama3", 0),
    "metaseq": SliceSet(
        "metaseq",
        (
            *_each("embed_tokens", "0", "weight"),
            *_each(".qkv_proj", "0/3"),
            *_each(".q_proj .k_proj .v_proj .fc1 .ffn_layernorm", "0"),
            *_each(".out_proj", "1@decoder.layers.0.final_layer_norm.weight", "weight"),
            *_each(".fc2", "1", "weight"),
            *_each(".out_proj .fc2", "same", "bias"),
            *_each("layer_norm", "same"),
            "*embed_positions*=same",
            "*.version=same",
        ),
        "https://github.com/facebookresearch/metaseq; metaseq/scripts/reshard_mp.py",
        r".*model_part-(?P<rank>\d{1,4})\.pt",
        written="",
    ),
    "vllm": SliceSet(
        "vllm",
        (
            *_each(".embed_tokens lm_head", "0", "weight"),
            *_each(".qkv_proj", _QKV),
            *_each(".gate_up_proj", "0/2"),
            *_each(".o_proj", "1", "weight"),
            *_each(".mlp.down_proj", "1@intermediate_size", "weight"),
            *_each(".o_proj .down_proj", "same", "bias"),
            *_each("norm", "same"),
            "*.experts.w13_weight=1/2",
            "*.experts.w2_weight=2",
            *_each(".mlp.gate .block_sparse_moe.gate", "same", "weight"),
        ),
        "https://github.com/vllm-project/vllm; vllm/model_executor/layers/linear.py, fused_moe/layer.py",
        r"model-rank-(?P<rank>\d{1,4})-part-(?P<part>\d{1,5})\.safetensors",
        "model-rank-{}-part-0.safetensors",
        lets=MappingProxyType({"num_key_value_heads": "num_attention_heads"}),
        per_rank=("num_attention_heads", "num_key_value_heads"),
    ),
    "megatron": SliceSet(
        "megatron",
        (
            *_each("word_embeddings output_layer", "0", "weight"),
            *_each("position_embeddings router", "same", "weight"),
            *_each(".query_key_value .linear_qkv", "0"),
            *_each(".dense_h_to_4h .linear_fc1", "0/1 + swiglu"),
            *_each("attention.dense .linear_proj .dense_4h_to_h .linear_fc2", "1", "weight"),
            *_each("attention.dense .linear_proj .dense_4h_to_h .linear_fc2", "same", "bias"),
            *_each("norm", "same"),
            "*.layer_norm_weight=same",
            "*.layer_norm_bias=same",
        ),
        "https://github.com/NVIDIA/Megatron-LM; tools/checkpoint/loader_base.py",
        r"mp_rank_(?P<rank>\d{2,4})/model_(?:optim_)?rng\.pt",
        written="",
        key="model",
    ),
}
