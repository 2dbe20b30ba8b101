"""
What the libraries of the other side make of what recipes write: their own converters, or logits of their own models.

Each test is skipped where its library is not installed: ``pip install transformers torchtune megatron-core mlx[cpu]
mlx-lm llama-models fairscale mistral-inference``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from tests.recipes.layouts import (
    DIM,
    GROUPS,
    HEAD,
    HEADS,
    HIDDEN,
    LAYERS,
    LLAMA,
    VOCABULARY,
    State,
    llama,
    migrated,
    same,
)

pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]
META = {"n_heads": HEADS, "n_kv_heads": GROUPS, "dim": DIM}
IDS = torch.arange(12)[None] * 7 % VOCABULARY


def by_path(package: str, file: str) -> ModuleType:
    """Return a module of a package that cannot itself be imported beside the versions that are here."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    spec = spec_from_file_location(f"_{package}", Path(found.submodule_search_locations[0]) / file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of(model: nn.Module) -> State:
    """Return the tensors of a model, which all get values that matter to its logits."""
    numbers = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1 if parameter.dim() > 1 else 1.0, generator=numbers)
    return {name: one.clone() for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}


def logits(state: State, config: str, folder: Path, **said: Any) -> torch.Tensor:
    """Return the logits of a model of transformers that loads a state dict, and finds in it all and nothing else."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    settings = {**LLAMA, "rms_norm_eps": 1e-5, "rope_parameters": rope, "sliding_window": None, **said}
    getattr(transformers, config)(**settings).save_pretrained(folder)
    (folder / "made.safetensors").rename(folder / "model.safetensors")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def there(recipe: str, state: State, before: dict[str, Any], folder: Path, after: dict[str, Any] = LLAMA) -> State:
    """Return what a recipe makes of a state dict, after the way back has made the same state dict again."""
    made = migrated(recipe, state, before, folder)
    same(migrated(recipe, made, after, folder / "back", reverse=True), state)
    return made


def test_torchtune_converts_the_same_both_ways(tmp_path: Path) -> None:
    theirs = by_path("torchtune", "models/convert_weights.py")
    state = llama()
    tune = theirs.hf_to_tune(state, HEADS, GROUPS, DIM)
    same(theirs.tune_to_hf(tune, HEADS, GROUPS, DIM), state)
    same(there("torchtune-llama", {name: one.contiguous() for name, one in tune.items()}, LLAMA, tmp_path), state)
    meta = {name: one.contiguous() for name, one in theirs.tune_to_meta(tune).items()}
    same(there("meta-llama", meta, META, tmp_path / "meta"), state)


def test_llama_of_meta_has_the_logits_of_transformers(tmp_path: Path, one_rank: None) -> None:
    parallel = pytest.importorskip("fairscale.nn.model_parallel.initialize")
    package = find_spec("llama_models")
    if package is None or not package.submodule_search_locations:
        pytest.skip("llama_models is not installed")
    at = Path(package.submodule_search_locations[0]) / "llama3"
    llama3 = ModuleType("llama_models.llama3")  # without its __init__, which asks for a tokenizer
    llama3.__path__ = [str(at)]
    sys.modules["llama_models.llama3"] = llama3
    library = pytest.importorskip("llama_models.llama3.model")
    parallel.initialize_model_parallel(1)
    said = {"n_layers": LAYERS, "vocab_size": VOCABULARY, "multiple_of": 16, "rope_theta": 10000, "max_seq_len": 32}
    model = library.Transformer(library.ModelArgs(**META, **said, max_batch_size=1))
    state = of(model) | {"rope.freqs": torch.randn(HEAD // 2)}
    made = there("meta-llama", state, META, tmp_path)
    size = made["model.layers.0.mlp.up_proj.weight"].shape[0]
    torch.testing.assert_close(model(IDS, 0), logits(made, "LlamaConfig", tmp_path, intermediate_size=size))


@pytest.mark.parametrize("experts", [0, 3])
def test_layers_of_mistral_have_the_logits_of_transformers(
    experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None = None) -> torch.Tensor:
        turned = (one.transpose(1, 2) for one in (q, k, v))
        return nn.functional.scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)

    if find_spec("mistral_inference") is None:
        pytest.skip("mistral_inference is not installed")
    nothing = SimpleNamespace
    for name, members in {  # its attention runs on GPUs alone
        "xformers": {},
        "xformers.ops": {},
        "xformers.ops.fmha": {"memory_efficient_attention": attention},
        "xformers.ops.fmha.attn_bias": {"BlockDiagonalMask": nothing},
        "simple_parsing": {},
        "simple_parsing.helpers": {"Serializable": object},
        "mistral_inference.args": {"LoraArgs": nothing},
        "mistral_inference.cache": {"CacheView": nothing},
        "mistral_inference.lora": {"LoRALinear": nothing},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(members, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    library = pytest.importorskip("mistral_inference.transformer_layers")
    rotations = pytest.importorskip("mistral_inference.rope").precompute_freqs_cis(2 * HEAD, 32, 10000.0)
    moe = library.MoeArgs(experts, 2) if experts else None
    block = {"n_heads": HEADS, "n_kv_heads": GROUPS, "head_dim": 2 * HEAD, "norm_eps": 1e-5, "moe": moe}
    layers = {str(n): library.TransformerBlock(DIM, HIDDEN, **block) for n in range(LAYERS)}
    model = nn.ModuleDict(
        {
            "tok_embeddings": nn.Embedding(VOCABULARY, DIM),
            "layers": nn.ModuleDict(layers),
            "norm": library.RMSNorm(DIM, 1e-5),
            "output": nn.Linear(DIM, VOCABULARY, bias=False),
        }
    )
    made = there("mistral-consolidated", of(model), META, tmp_path)
    with torch.no_grad():
        hidden = model["tok_embeddings"](IDS[0])
        for layer in layers.values():
            hidden = layer(hidden, rotations[: len(IDS[0])])
        theirs = model["output"](model["norm"](hidden))[None]
    said: dict[str, Any] = {"head_dim": 2 * HEAD} | ({"num_local_experts": experts} if experts else {})
    torch.testing.assert_close(theirs, logits(made, "MixtralConfig" if experts else "MistralConfig", tmp_path, **said))


@pytest.mark.parametrize("experts", [0, 4])
def test_gpt_of_megatron_has_the_logits_of_transformers(
    experts: int, tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gpt(experts, monkeypatch)
    state, theirs = of(model), logits_of_gpt(model)
    recipe = "megatron-moe" if experts else "megatron-gpt"
    said = LLAMA | {"head_dim": 2 * HEAD}
    made = there(recipe, with_transformer_engine(state, experts), said, tmp_path, said)
    same(migrated(recipe, state, said, tmp_path / "local"), made)
    config = {"head_dim": 2 * HEAD, "attn_implementation": "eager"}
    config |= {"num_local_experts": experts, "num_experts_per_tok": 2} if experts else {}
    torch.testing.assert_close(theirs, logits(made, "MixtralConfig" if experts else "LlamaConfig", tmp_path, **config))


def test_what_megatron_stores_in_torch_dist_is_the_same_model(
    tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gpt(0, monkeypatch)
    of(model)
    stored = {name: one for name, one in model.sharded_state_dict().items() if not name.endswith("_extra_state")}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    (tmp_path / "stored").mkdir()
    pytest.importorskip("megatron.core.dist_checkpointing").save(stored, str(tmp_path / "stored"))
    said = LLAMA | {"head_dim": 2 * HEAD}
    made = there("megatron-dist", ckptool.load(tmp_path / "stored"), said, tmp_path, said)
    torch.testing.assert_close(logits_of_gpt(model), logits(made, "LlamaConfig", tmp_path, head_dim=2 * HEAD))


def gpt(experts: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a GPT of Megatron-core on a CPU."""
    core = pytest.importorskip("megatron.core")
    models = pytest.importorskip("megatron.core.models.gpt")
    specs = pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")
    configs = pytest.importorskip("megatron.core.transformer.transformer_config")
    routing = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    core.parallel_state.destroy_model_parallel()
    core.parallel_state.initialize_model_parallel()
    # Without a GPU there are neither its random numbers nor transformer_engine.
    monkeypatch.setattr(core.tensor_parallel, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=nullcontext))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(routing, "te_general_gemm", None, raising=False)
    settings: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": DIM,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "kv_channels": 2 * HEAD,
        "ffn_hidden_size": HIDDEN,
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "layernorm_epsilon": 1e-5,
        **dict.fromkeys(("bias_dropout_fusion", "masked_softmax_fusion", "persist_layer_norm"), False),
        **dict.fromkeys(("gradient_accumulation_fusion", "apply_rope_fusion", "bias_activation_fusion"), False),
    }
    if experts:
        settings |= {"num_moe_experts": experts, "moe_router_topk": 2, "moe_ffn_hidden_size": HIDDEN}
        settings |= {"moe_router_load_balancing_type": "none", "moe_router_dtype": "fp32"}
    spec = specs.get_gpt_layer_local_spec(experts or None, moe_grouped_gemm=False, normalization="RMSNorm")
    return models.GPTModel(
        configs.TransformerConfig(**settings),
        spec,
        VOCABULARY,
        32,
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=False,
    )


def logits_of_gpt(model: Any) -> torch.Tensor:
    length = IDS.shape[1]
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    with torch.no_grad():
        found: torch.Tensor = model(IDS, torch.arange(length)[None], mask)
        return found


def with_transformer_engine(state: State, experts: int) -> State:
    """Return the tensors of a GPT by the names that they have with transformer_engine, which needs a GPU."""
    norms = {r"\.input_layernorm\.": ".self_attention.linear_qkv.layer_norm_"}
    if experts:
        norms |= {r"experts\.local_experts\.(\d+)\.(linear_fc.)\.weight": r"experts.\2.weight\1"}
    else:
        norms |= {r"\.pre_mlp_layernorm\.": ".mlp.linear_fc1.layer_norm_"}
    made = {}
    for name, tensor in state.items():
        for pattern, to in norms.items():
            name = re.sub(pattern, to, name)
        made[name] = tensor
    return made


_MLX: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "intermediate_size": HIDDEN, "sliding_window": None},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": HEAD, "decoder_sparse_step": 1},
    "olmoe": {"num_experts": 4},
    "mamba": {"state_size": 8, "conv_kernel": 4, "time_step_rank": 4, "intermediate_size": 2 * DIM},
    "mamba2": {"state_size": 8, "conv_kernel": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1},
}


@pytest.mark.parametrize("model_type", _MLX)
def test_mlx_makes_the_same_of_the_weights_of_transformers(model_type: str, tmp_path: Path) -> None:
    mlx, transformers = pytest.importorskip("mlx.core"), pytest.importorskip("transformers")
    numpy, load_file = pytest.importorskip("numpy"), pytest.importorskip("safetensors.torch").load_file
    library = pytest.importorskip(f"mlx_lm.models.{model_type}")
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    said = LLAMA | {"num_experts_per_tok": 2} | tokens | _MLX[model_type]
    config = transformers.CONFIG_MAPPING[model_type].from_dict(said)
    ours = transformers.AutoModelForCausalLM.from_config(config).eval()
    of(ours)
    ours.save_pretrained(tmp_path / "saved")
    state = load_file(tmp_path / "saved" / "model.safetensors")
    settings = {"num_experts": 4, "intermediate_size": HIDDEN} | config.to_dict()
    settings["rope_theta"] = (settings.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    model = library.Model(library.ModelArgs.from_dict(settings | {"model_type": model_type}))
    theirs = model.sanitize({name: mlx.array(one.numpy()) for name, one in state.items()})
    made = migrated("mlx", state, {}, tmp_path / "made", reverse=True)
    same(made, {name: torch.from_numpy(numpy.array(one)) for name, one in theirs.items()})
    same(migrated("mlx", made, {}, tmp_path / "back"), state)
    model.load_weights([(name, mlx.array(one.numpy())) for name, one in made.items()], strict=True)
    with torch.no_grad():
        want = ours(IDS).logits
    got = torch.from_numpy(numpy.array(model(mlx.array(IDS.tolist()))))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
