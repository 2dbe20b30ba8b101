"""Recipes from transformers' own table: byte for byte what its loading makes of a checkpoint, and its saving."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool import CkptoolError
from ckptool.errors import MissingPackage
from ckptool.recipes.find import _copied, _seen
from ckptool.recipes.moves import settled
from ckptool.torch_ops.tracing import Tracing
from tests.program import invoke
from tests.recipes.layouts import State, same

KINDS = {
    "mixtral": "experts are stacked and joined",
    "jamba": "the same, in some layers",
    "ernie4_5_vl_moe": "experts of text and of images are stacked apart, and a gate is transposed",
    "inkling_mm_model": "rows that alternate are put apart",
    "inkling2": "rows that alternate, and indices that are one more",
    "inkling2_loop": "queries of four kinds in another order",
    "kimi_k25": "cut in three, of which two are turned for rope; names that move up together",
    "gradium_phonon_tts": "cut in three and turned",
    "mistral_large4": "turned for rope, by a number of the vision tower",
    "lara_mini": "cut by the sizes of the parameters",
    "minimax_m3_vl": "joined",
    "qwen4_exp_text": "any number of shards is joined",
    "radio": "cut, below one module",
    "vit": "names alone",
    "llava": "prefixes of parts of the model",
    "bailing_hybrid": "convolutions of q, k and v are joined",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen4_exp_text": {
        "ngram_vocab_size_base": 1000,
        "split_ngram_parts": 12,
        "ple_layer_ids": [1],
        "eos_token_id": 1,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
}
_DEPTHS = "num_hidden_layers|n_layers?|num_layers|depth|(num_)?(en|de)coder_layers|num_nextn_predict_layers"
_EXPERTS = "num_experts|num_local_experts|n_routed_experts|moe_num_experts"


def shrunk(config: Any, by: int) -> None:
    """Make a config, and those in it, one of a model that is small enough for a test."""
    given = list(vars(config).items())
    layers = {value for key, value in given if re.fullmatch(_DEPTHS, key)}
    for key, value in given:
        if hasattr(value, "model_type"):
            shrunk(value, by)
        elif isinstance(value, list) and len(value) in layers and len(value) > 2:
            setattr(config, key, value[:2] if isinstance(value[0], int) else [value[0], value[-1]])
        elif type(value) is int:
            setattr(config, key, _small(key, value, by))


def _small(key: str, value: int, by: int) -> int:
    if re.fullmatch(_DEPTHS, key):
        return min(value, 2)
    if re.fullmatch(_EXPERTS, key):
        return min(value, 12)
    if re.search("per_tok|moe_k$|moe_topk", key):
        return min(value, 2)
    if re.search("n_group|topk_group", key):
        return 1
    if re.search("token_(id|index)$", key):
        return value % 199
    if key.endswith("vocab_size"):
        return min(value, 512)
    if re.search("intermediate|ffn|d_ff", key):
        return min(value, 64)
    scales = re.search("hidden_size|d_model|embed_dim|dim|lora_rank|channels|heads$", key)
    is_of_heads = re.search("head_dim|rope", key)
    return value // by if scales and not is_of_heads and value % by == 0 and value // by >= 1 else value


def small_model(model_type: str, folder: Path) -> Any:
    """Return a model of a type with the values of a file, and its config in a folder."""
    transformers = pytest.importorskip("transformers")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    auto = transformers.models.auto.modeling_auto
    for by in (16, 8, 4, 2, 1):
        config = transformers.CONFIG_MAPPING[model_type]()
        shrunk(config, by)
        for key, value in SETTINGS.get(model_type, {}).items():
            setattr(config, key, value)
        tables = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
        names = [table[model_type] for table in (*tables, auto.MODEL_MAPPING_NAMES) if model_type in table]
        config.architectures = [names[0] if isinstance(names[0], str) else names[0][0]]
        text = config.to_json_string(use_diff=False)
        try:
            with torch.device("meta"):
                read = transformers.CONFIG_MAPPING[model_type].from_dict(json.loads(text))
                model = getattr(transformers, config.architectures[0])(read)
        except Exception:  # noqa: BLE001 - this scale does not suit this model
            continue
        if sum(one.numel() for one in model.parameters()) < 200_000_000:
            (folder / "config.json").write_text(text)
            return model.to(torch.bfloat16)
    raise AssertionError(f"{model_type} is not small enough at any scale")


def values(model: Any) -> State:
    numbers = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(0, 99, one.shape, generator=numbers).to(one.dtype)
        for name, one in model.state_dict().items()
    }


def loaded_by_transformers(model: Any, saved: State) -> State:
    loading = pytest.importorskip("transformers.core_model_loading")
    table = pytest.importorskip("transformers.conversion_mapping")
    settings = pytest.importorskip("transformers.modeling_utils").LoadStateDictConfig
    asked = settings(weight_mapping=table.get_model_conversion_mapping(model), dtype=torch.bfloat16)
    info, _ = loading.convert_and_load_state_dict_in_model(model, dict(saved), asked)
    assert not info.conversion_errors
    return {name: one.detach() for name, one in model.state_dict().items() if one.device.type != "meta"}


@pytest.mark.parametrize("model_type", KINDS)
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_what_transformers_saves_and_loads_a_recipe_makes_of_the_same_bytes(model_type: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = small_model(model_type, tmp_path)
    state = values(model)
    revert = pytest.importorskip("transformers.core_model_loading").revert_weight_conversion
    saved = {name: one.contiguous() for name, one in revert(model, dict(state)).items()}
    loaded = loaded_by_transformers(model, saved)
    save_file({name: one.clone() for name, one in state.items()}, tmp_path / "state.safetensors")
    recipe = f"transformers:{model_type}"
    ckptool.migrate(tmp_path / "state.safetensors", tmp_path / "saved.safetensors", recipe=recipe, reverse=True)
    same(load_file(tmp_path / "saved.safetensors"), saved)
    ckptool.migrate(tmp_path / "saved.safetensors", tmp_path / "loaded.safetensors", recipe=recipe)
    same(load_file(tmp_path / "loaded.safetensors"), loaded)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_experts_are_transposed_only_where_their_shape_is_not_that_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = small_model("qwen3_vl_moe", tmp_path)
    state = values(model)
    turned = {name: one.transpose(1, 2).contiguous() if ".experts." in name else one for name, one in state.items()}
    loaded = loaded_by_transformers(model, turned)
    save_file(turned, tmp_path / "turned.safetensors")
    ckptool.migrate(tmp_path / "turned.safetensors", tmp_path / "made.safetensors", recipe="transformers:qwen3_vl_moe")
    same(load_file(tmp_path / "made.safetensors"), loaded)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_a_model_loads_itself_what_a_recipe_has_made(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = small_model("mixtral", tmp_path)
    state = values(model)
    with torch.device("meta"):
        empty = transformers.MixtralForCausalLM(model.config).to(torch.bfloat16)
    save_file(state, tmp_path / "state.safetensors")
    ckptool.migrate(tmp_path / "state.safetensors", tmp_path / "saved.pth", recipe="transformers:mixtral", reverse=True)
    ckptool.load_into(empty, tmp_path / "saved.pth", recipe="transformers:mixtral")
    same(dict(empty.state_dict()), state)


def run(folder: Path, weights: State, does: Callable[[State], State]) -> State:
    """Return what is made of tensors in a file by what was traced of a function."""
    save_file(weights, folder / "weights.safetensors")
    with ckptool.open_checkpoint(folder / "weights.safetensors") as found:
        tracing = Tracing(_copied)
        given = {name: tracing.tensor(one, one.shape) for name, one in found.weights.items()}
        made = tracing.run(lambda: does(given))
        views = {name: tracing.view(one) for name, one in made.items()}
        lazy = {name: settled(_seen(view)) for name, view in views.items() if view is not None}
        return {name: one.torch() for name, one in lazy.items()}


MOVES: dict[str, Callable[[State], State]] = {
    "stacked and joined": lambda t: {"a": torch.cat([torch.stack([t["x"], t["y"]]), torch.stack([t["y"], t["x"]])], 1)},
    "cut and turned": lambda t: {
        str(n): one.transpose(0, 1).contiguous() for n, one in enumerate(torch.chunk(t["x"], 3, 1))
    },
    "sizes": lambda t: dict(zip("abc", torch.split(t["x"], [1, 2, 1]), strict=True)),
    "rope": lambda t: {"a": t["x"].view(2, 2, 1, 6).transpose(1, 2).reshape(4, 6)},
    "rows that alternate": lambda t: {"a": t["x"].reshape(2, 2, 6).transpose(0, 1).reshape(4, 6).contiguous()},
    "some rows": lambda t: {"a": t["x"][:3].contiguous(), "b": t["y"][[2, 0]].flatten(0, 1), "c": t["y"][1]},
    "cut twice": lambda t: {"a": t["x"].T.contiguous()[1:5].T[2:], "b": torch.cat([t["x"].new_zeros(0, 6), t["x"]])},
    "apart": lambda t: dict(zip("abcd", torch.unbind(t["y"].permute(1, 0).contiguous(), 1), strict=True)),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves_of_torch_are_traced(name: str, tmp_path: Path) -> None:
    weights = {one: torch.randn(4, 6) for one in "xy"}
    wanted = MOVES[name](weights)
    same(run(tmp_path, weights, MOVES[name]), {one: tensor.contiguous() for one, tensor in wanted.items()})


COMPUTED: dict[str, Callable[[State], State]] = {
    "a sum": lambda t: {"a": t["x"] + t["y"]},
    "padding": lambda t: {"a": torch.cat([t["x"], t["x"].new_zeros(1, 6)])},
    "a copy in another order of memory": lambda t: {"a": t["x"].T.clone()},
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_computes_is_unknown(name: str, tmp_path: Path) -> None:
    assert run(tmp_path, {one: torch.randn(4, 6) for one in "xy"}, COMPUTED[name]) == {}


def test_it_needs_the_config_and_transformers(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(CkptoolError, match=r"needs config\.json beside the file"):
        ckptool.migrate(tmp_path / "a.safetensors", tmp_path / "b.safetensors", recipe="transformers:mixtral")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if find_spec("transformers") is None:
        with pytest.raises(MissingPackage, match="transformers"):
            ckptool.migrate(tmp_path / "a.safetensors", tmp_path / "b.safetensors", recipe="transformers:llama")
    else:
        with pytest.raises(CkptoolError, match="says model type 'llama', not 'mixtral'"):
            ckptool.migrate(tmp_path / "a.safetensors", tmp_path / "b.safetensors", recipe="transformers:mixtral")
    found = invoke(["recipe", "show", "transformers:mixtral"])
    assert found.exit_code == 1
    assert "is made for each checkpoint" in found.output
