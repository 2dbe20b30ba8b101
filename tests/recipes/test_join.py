"""Slices of ranks at the public face: what torch.cat makes of them, they become in files, and are cut again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckptool
from tests.program import as_json, run, validated
from tests.scale import times

State = dict[str, torch.Tensor]


def assert_equal(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def refused(folder: Path, join: Any, kind: str, *said: str, **options: Any) -> None:
    with pytest.raises(ckptool.MigrationRefused) as error:
        ckptool.migrate(folder, folder.parent / "refused.safetensors", join=join, **options)
    assert error.value.kind == kind
    shown = f"{error.value} {error.value.hint}"
    assert all(one in shown for one in said), shown
    assert not (folder.parent / "refused.safetensors").exists()


def llama(dim: int = 8, hidden: int = 12, kv: int = 4, vocab: int = 10, layers: int = 2) -> State:
    """The weights of Meta's Llama, whole."""
    state = {"tok_embeddings.weight": torch.randn(vocab, dim), "norm.weight": torch.randn(dim)}
    for layer in range(layers):
        head = f"layers.{layer}."
        state |= {
            f"{head}attention.wq.weight": torch.randn(dim, dim),
            f"{head}attention.wk.weight": torch.randn(kv, dim),
            f"{head}attention.wv.weight": torch.randn(kv, dim),
            f"{head}attention.wo.weight": torch.randn(dim, dim),
            f"{head}feed_forward.w1.weight": torch.randn(hidden, dim),
            f"{head}feed_forward.w2.weight": torch.randn(dim, hidden),
            f"{head}feed_forward.w3.weight": torch.randn(hidden, dim),
            f"{head}attention_norm.weight": torch.randn(dim),
            f"{head}ffn_norm.weight": torch.randn(dim),
        }
    state |= {"output.weight": torch.randn(vocab, dim), "rope.freqs": torch.randn(2)}
    return {name: one.to(torch.bfloat16) for name, one in state.items()}


def dim_of(name: str, embedding: int = 1) -> int | None:
    """Along which dimension fairscale's layers cut a weight of Llama: columns, rows, or not at all."""
    if name == "tok_embeddings.weight":
        return embedding
    if name.endswith(("wo.weight", "w2.weight")):
        return 1
    return None if "norm" in name or name == "rope.freqs" else 0


def slices_of(state: State, ranks: int, embedding: int = 1) -> list[State]:
    found: list[State] = [{} for _ in range(ranks)]
    for name, tensor in state.items():
        dim = dim_of(name, embedding)
        parts = [tensor] * ranks if dim is None else tensor.chunk(ranks, dim)
        for rank, part in enumerate(parts):
            found[rank][name] = part.clone()
    return found


def saved(folder: Path, states: list[State], name: str = "consolidated.{:02}.pth") -> Path:
    folder.mkdir()
    for rank, state in enumerate(states):
        path = folder / name.format(rank)
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".safetensors":
            save_file(state, path)
        else:
            torch.save(state, path)
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("rules", "embedding"), [("meta-llama", 1), ("meta-llama3", 0)])
def test_metas_llama_is_joined_and_cut_again(rules: str, embedding: int, ranks: int, tmp_path: Path) -> None:
    state = llama(vocab=12)
    folder = saved(tmp_path / "ranks", slices_of(state, ranks, embedding))
    (folder / "params.json").write_text(json.dumps({"dim": 8, "n_heads": 4}))
    report = ckptool.migrate(folder, tmp_path / "whole.pth", join=[rules])
    assert_equal(torch.load(tmp_path / "whole.pth"), state)
    assert report.verified
    assert report.source == str(folder)
    assert len(report.moved) == 2 * 7 + 2
    ckptool.migrate(folder / "consolidated.01.pth", tmp_path / "whole.safetensors", join=rules)
    assert_equal(load_file(tmp_path / "whole.safetensors"), state)
    cut = ckptool.migrate(tmp_path / "whole.safetensors", tmp_path / "again", cut=ranks, join=[rules])
    assert [one.name for one in cut.files] == [f"consolidated.{rank:02}.pth" for rank in range(ranks)]
    for rank, wanted in enumerate(slices_of(state, ranks, embedding)):
        assert_equal(torch.load(tmp_path / "again" / f"consolidated.{rank:02}.pth"), wanted)
    other = {"meta-llama": "meta-llama3", "meta-llama3": "meta-llama"}[rules]
    refused(folder, other, "slices-shape", "tok_embeddings.weight", rules)


def test_metas_slices_become_transformers_layout_in_one_call_and_back(tmp_path: Path) -> None:
    state = llama()
    folder = saved(tmp_path / "ranks", slices_of(state, 2))
    (folder / "params.json").write_text(json.dumps({"dim": 8, "n_heads": 2, "n_kv_heads": 2}))
    torch.save(state, tmp_path / "whole.pth")
    (tmp_path / "params.json").write_text(json.dumps({"dim": 8, "n_heads": 2, "n_kv_heads": 2}))
    ckptool.migrate(tmp_path / "whole.pth", tmp_path / "wanted.safetensors", recipe="meta-llama")
    ckptool.migrate(folder, tmp_path / "hf.safetensors", join="meta-llama", recipe="meta-llama")
    assert_equal(load_file(tmp_path / "hf.safetensors"), load_file(tmp_path / "wanted.safetensors"))
    options: Any = {"cut": 2, "join": "meta-llama", "recipe": "meta-llama", "reverse": True}
    ckptool.migrate(tmp_path / "hf.safetensors", tmp_path / "again", **options)
    for rank, wanted in enumerate(slices_of(state, 2)):
        assert_equal(torch.load(tmp_path / "again" / f"consolidated.{rank:02}.pth"), wanted)


def test_the_command_line_joins_and_cuts(tmp_path: Path) -> None:
    state = {"a.weight": torch.randn(6, 4), "b.weight": torch.randn(4, 6), "norm": torch.randn(4)}
    torch.save(state, tmp_path / "whole.pth")
    rules = ["--join", "a.*=0", "--join", "b.*=1", "--join", "norm=same"]
    cut = run("migrate", tmp_path / "whole.pth", tmp_path / "ranks", "--cut", "3", *rules)
    assert "cut 0: a.weight [6, 4] -> a.weight [2, 4]" in cut.output
    assert sorted(one.name for one in (tmp_path / "ranks").iterdir()) == [
        f"rank{rank}.safetensors" for rank in range(3)
    ]
    assert torch.equal(load_file(tmp_path / "ranks" / "rank1.safetensors")["b.weight"], state["b.weight"][:, 2:4])
    run("migrate", tmp_path / "ranks", tmp_path / "back.pth", *rules)
    assert_equal(torch.load(tmp_path / "back.pth"), state)
    dry = run("migrate", tmp_path / "ranks", tmp_path / "dry.pth", "--dry-run", *rules)
    assert "join 1: b.weight [4, 2], b.weight [4, 2], b.weight [4, 2] -> b.weight [4, 6]" in dry.output
    assert not (tmp_path / "dry.pth").exists()
    run("migrate", tmp_path / "whole.pth", tmp_path / "pth", "--form", "state_dict", "--cut", "2", *rules)
    assert torch.equal(torch.load(tmp_path / "pth" / "rank1.pth")["a.weight"], state["a.weight"][3:])


def test_what_is_tied_in_all_ranks_stays_tied(tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    whole = torch.randn(8, 4)
    for rank, part in enumerate(whole.chunk(2)):
        own = part.clone()
        torch.save({"embed": own, "head": own, "norm": torch.ones(4)}, folder / f"rank{rank}.pt")
    rules = ["embed=0", "head=0", "norm=same"]
    ckptool.migrate(folder, tmp_path / "whole.pth", join=rules)
    found = torch.load(tmp_path / "whole.pth")
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    ckptool.migrate(tmp_path / "whole.pth", tmp_path / "again", join=rules, cut=2, form="state_dict")
    again = torch.load(tmp_path / "again" / "rank1.pth")
    assert again["embed"].data_ptr() == again["head"].data_ptr()
    assert torch.equal(again["head"], whole[4:])


def metaseq(ranks: int) -> tuple[list[State], State]:
    """A layer of OPT as metaseq cuts it: k, v and q are one tensor, and each rank has a part of each."""
    whole = {
        "decoder.version": torch.tensor([3.0]),
        "decoder.embed_tokens.weight": torch.randn(12, 8),
        "decoder.embed_positions.weight": torch.randn(5, 8),
        "decoder.layer_norm.weight": torch.randn(8),
        "decoder.layers.0.self_attn.qkv_proj.weight": torch.randn(24, 8),
        "decoder.layers.0.self_attn.qkv_proj.bias": torch.randn(24),
        "decoder.layers.0.self_attn.out_proj.weight": torch.randn(8, 8),
        "decoder.layers.0.self_attn.out_proj.bias": torch.randn(8),
        "decoder.layers.0.self_attn_layer_norm.weight": torch.randn(8),
        "decoder.layers.0.fc1.weight": torch.randn(16, 8),
        "decoder.layers.0.fc1.bias": torch.randn(16),
        "decoder.layers.0.fc2.weight": torch.randn(8, 16),
        "decoder.layers.0.fc2.bias": torch.randn(8),
        "decoder.layers.0.final_layer_norm.weight": torch.randn(8),
    }
    states: list[State] = [{} for _ in range(ranks)]
    for name, tensor in whole.items():
        for rank in range(ranks):
            if "qkv" in name:
                part = torch.cat([one.chunk(ranks)[rank] for one in tensor.chunk(3)])
            elif name.endswith(("embed_tokens.weight", "fc1.weight", "fc1.bias")):
                part = tensor.chunk(ranks)[rank]
            elif name.endswith(("out_proj.weight", "fc2.weight")):
                part = tensor.chunk(ranks, 1)[rank]
            else:
                part = tensor
            states[rank][name] = part.clone()
    return states, whole


def test_metaseq(tmp_path: Path) -> None:
    states, whole = metaseq(2)
    files = [{"cfg": {"model": "opt"}, "model": state} for state in states]
    folder = saved(tmp_path / "opt", files, "reshard-model_part-{}.pt")  # type: ignore[arg-type]
    report = ckptool.migrate(folder, tmp_path / "whole.pth", join="metaseq")
    assert "what is beside the weights of the ranks is left out: cfg" in report.notes[0]
    assert_equal(torch.load(tmp_path / "whole.pth"), whole)
    with pytest.raises(ckptool.MigrationRefused, match="have more in them than weights"):
        ckptool.migrate(tmp_path / "whole.pth", tmp_path / "again", join="metaseq", cut=2)


def vllm(ranks: int, heads: int = 4, kv: int = 2) -> tuple[list[State], State]:
    """A layer of a Llama as vLLM's layers hold it: q, k and v in one tensor, gate and up in one."""
    hidden, inner, size = 8, 12, 2
    q, k, v = torch.randn(heads * size, hidden), torch.randn(kv * size, hidden), torch.randn(kv * size, hidden)
    gate, up = torch.randn(inner, hidden), torch.randn(inner, hidden)
    head = "model.layers.0."
    whole = {
        "model.embed_tokens.weight": torch.randn(16, hidden),
        f"{head}self_attn.qkv_proj.weight": torch.cat([q, k, v]),
        f"{head}self_attn.o_proj.weight": torch.randn(hidden, heads * size),
        f"{head}mlp.gate_up_proj.weight": torch.cat([gate, up]),
        f"{head}mlp.down_proj.weight": torch.randn(hidden, inner),
        f"{head}input_layernorm.weight": torch.randn(hidden),
        "lm_head.weight": torch.randn(16, hidden),
    }
    states = []
    for rank in range(ranks):
        state = {name: whole[name].chunk(ranks)[rank] for name in ("model.embed_tokens.weight", "lm_head.weight")}
        state[f"{head}self_attn.qkv_proj.weight"] = torch.cat([one.chunk(ranks)[rank] for one in (q, k, v)])
        state[f"{head}mlp.gate_up_proj.weight"] = torch.cat([one.chunk(ranks)[rank] for one in (gate, up)])
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            state[f"{head}{name}.weight"] = whole[f"{head}{name}.weight"].chunk(ranks, 1)[rank]
        state[f"{head}input_layernorm.weight"] = whole[f"{head}input_layernorm.weight"]
        states.append({name: one.contiguous() for name, one in state.items()})
    return states, whole


def settings_of_vllm(folder: Path, **numbers: int) -> None:
    given = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 12, **numbers}
    (folder / "config.json").write_text(json.dumps(given))


def test_vllm_whose_ranks_have_several_files(tmp_path: Path) -> None:
    states, whole = vllm(2)
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank, state in enumerate(states):
        names = list(state)
        for part, own in enumerate((names[:3], names[3:])):
            save_file({name: state[name] for name in own}, folder / f"model-rank-{rank}-part-{part}.safetensors")
    refused(folder, "vllm", "recipe-number", "num_attention_heads")
    settings_of_vllm(folder)
    ckptool.migrate(folder, tmp_path / "whole.safetensors", join="vllm")
    assert_equal(load_file(tmp_path / "whole.safetensors"), whole)
    numbers = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 12}
    ckptool.migrate(tmp_path / "whole.safetensors", tmp_path / "again", join="vllm", cut=2, recipe_arguments=numbers)
    for rank, wanted in enumerate(states):
        assert_equal(load_file(tmp_path / "again" / f"model-rank-{rank}-part-0.safetensors"), wanted)
    settings_of_vllm(folder, num_key_value_heads=1)
    refused(folder, "vllm", "slices-shape", "num_key_value_heads is 1", "some have copies")
    settings_of_vllm(folder, intermediate_size=18)
    refused(folder, "vllm", "slices-shape", "intermediate_size")
    settings_of_vllm(folder)
    (folder / "model-rank-1-part-0.safetensors").unlink()
    refused(folder, "vllm", "missing-rank", "part of rank 1 0")


@pytest.mark.parametrize("swiglu", [True, False])
def test_megatron_of_tensor_parallelism(swiglu: bool, tmp_path: Path) -> None:
    gate, up = torch.randn(6, 4), torch.randn(6, 4)
    fc1 = torch.cat([gate, up]) if swiglu else gate
    head = "decoder.layers.0."
    whole = {
        "embedding.word_embeddings.weight": torch.randn(8, 4),
        f"{head}self_attention.linear_proj.weight": torch.randn(4, 4),
        f"{head}self_attention.linear_qkv.layer_norm_weight": torch.randn(4),
        f"{head}self_attention.linear_qkv.weight": torch.randn(12, 4),
        f"{head}mlp.linear_fc1.weight": fc1,
        f"{head}mlp.linear_fc2.weight": torch.randn(4, 6),
        "decoder.final_layernorm.weight": torch.randn(4),
    }
    states = []
    for rank in range(2):
        model = {name: one.chunk(2)[rank] for name, one in whole.items() if "norm" not in name}
        model |= {name: whole[name].chunk(2, 1)[rank] for name in whole if name.endswith(("proj.weight", "fc2.weight"))}
        model |= {name: one for name, one in whole.items() if "norm" in name}
        if swiglu:
            model[f"{head}mlp.linear_fc1.weight"] = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
        args = argparse.Namespace(swiglu=swiglu, tensor_model_parallel_size=2)
        states.append({"args": args, "iteration": 7, "model": {name: one.clone() for name, one in model.items()}})
    name = "mp_rank_{:02}/model_optim_rng.pt"
    folder = saved(tmp_path / "iter_0000007", states, name)  # type: ignore[arg-type]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    for source in (folder, tmp_path, folder / name.format(1)):
        ckptool.migrate(source, tmp_path / "whole.safetensors", join="megatron", force=True)
        assert_equal(load_file(tmp_path / "whole.safetensors"), {name: whole[name] for name in whole})
    args.tensor_model_parallel_size = 4
    torch.save(states[0] | {"args": args}, folder / "mp_rank_00" / "model_optim_rng.pt")
    refused(folder, "megatron", "missing-rank", "4 ranks", "2 are there")


def two(folder: Path, **changed: torch.Tensor) -> Path:
    """The files of two ranks, of which the second is otherwise in something."""
    torch.manual_seed(0)
    first = {"w": torch.randn(4, 6), "norm": torch.randn(6)}
    second = {"w": torch.randn(4, 6), "norm": first["norm"]} | changed
    return saved(folder, [first, {name: one for name, one in second.items() if one.numel()}], "rank{}.pt")


RULES = ("w=0", "norm=same")


@pytest.mark.parametrize(
    ("changed", "join", "kind", "said"),
    [
        ({}, ["w=0"], "slices-rest", ["norm"]),
        ({}, [*RULES, "*orm=0"], "slices-overlap", ["'norm'", "norm=same", "*orm=0"]),
        ({}, ["w=2", "norm=same"], "recipe-shape", ["'w' [4, 6]", "no dimension 2"]),
        ({}, ["w=0/3", "norm=same"], "slices-shape", ["'w' [4, 6]", "1:1:1"]),
        ({}, ["w=0@7", "norm=same"], "slices-shape", ["'w'", "[8, 6]"]),
        ({}, ["w=0@v", "norm=same"], "recipe-number", ["'v'"]),
        ({}, ["w=x", "norm=same"], "bad-slices", ["w=x"]),
        ({}, ["=0"], "bad-slices", ["=0"]),
        ({}, ["llama"], "no-such-rules", ["'llama'"]),
        ({}, ["vllm", "metaseq"], "slices-overlap", ["vllm", "metaseq"]),
        ({}, ["meta-llama"], "no-ranks", ["meta-llama"]),
        ({"norm": torch.ones(6)}, RULES, "slices-differ", ["'norm'", "rank 1"]),
        ({"norm": torch.ones(7)}, RULES, "slices-shape", ["'norm'", "[7]"]),
        ({"norm": torch.tensor([])}, RULES, "slices-missing", ["'norm'", "rank1.pt"]),
        ({"more": torch.ones(7)}, RULES, "slices-missing", ["'more'", "rank0.pt"]),
        ({"w": torch.ones(4, 7)}, RULES, "recipe-shape", ["'w'", "[4, 7]"]),
        ({"w": torch.ones(4, 6).half()}, RULES, "slices-shape", ["'w'", "float16"]),
        ({"w": torch.ones(4)}, ["w=1", "norm=same"], "slices-shape", ["'w'", "[4]"]),
    ],
)
def test_what_is_no_slice_is_refused_by_name(
    changed: State, join: list[str], kind: str, said: list[str], tmp_path: Path
) -> None:
    refused(two(tmp_path / "ranks", **changed), join, kind, *said)


def test_a_copy_is_no_slice_and_zeros_may_be_some(tmp_path: Path) -> None:
    same = torch.randn(4, 6)
    folder = saved(tmp_path / "copies", [{"w": same, "b": torch.zeros(2, 2)}] * 2, "rank{}.pt")
    refused(folder, ["w=0", "b=0"], "slices-differ", "'w' is the same in the first two ranks")
    ckptool.migrate(folder, tmp_path / "b.pth", join=["w=same", "b=0"])
    assert torch.load(tmp_path / "b.pth")["b"].shape == (4, 2)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["rank0.pt", "rank2.pt"], "number 1 not there"),
        (["rank1.pt", "rank2.pt"], "no rank 0"),
        (["model_1_of_3.pt", "model_2_of_3.pt"], "2 of 3 ranks"),
        (["consolidated.00.pth", "consolidated.02.pth"], "no rank 1"),
    ],
)
def test_a_rank_that_is_missing_is_named(names: list[str], said: str, tmp_path: Path) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    for name in names:
        torch.save({"w": torch.randn(4, 6), "norm": torch.ones(6)}, folder / name)
    refused(folder, "meta-llama" if "consolidated" in names[0] else RULES, "missing-rank", said)


def test_two_forms_of_the_same_ranks_are_told_apart_by_a_file(tmp_path: Path) -> None:
    states = slices_of(llama(), 2)
    folder = saved(tmp_path / "ranks", states)
    for rank, state in enumerate(states):
        save_file(state, folder / f"consolidated.{rank:02}.safetensors")
    refused(folder, "meta-llama", "no-ranks", "consolidated.00.pth", "consolidated.00.safetensors")
    found = as_json("migrate", folder / "consolidated.00.safetensors", tmp_path / "a.pth", "--join", "meta-llama")
    validated(found, "migrate")
    assert (found["source"], found["source_format"]) == (str(folder), "slices")


def test_several_sources_are_joined_each_and_globs_are_looked_for_in_all(tmp_path: Path) -> None:
    for name in ("a", "b"):
        saved(tmp_path / name, [{"model": one, "step": 1} for one in slices_of(llama(), 2)])  # type: ignore[list-item]
    options = ("--out-dir", tmp_path / "out", "--join", "meta-llama", "--key", "model", "--exclude", "rope.*")
    run("migrate", tmp_path / "a", tmp_path / "b", *options, "--form", "safetensors")
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == ["a.safetensors", "b.safetensors"]
    assert "rope.freqs" not in load_file(tmp_path / "out" / "b.safetensors")


def test_several_sets_in_one_folder_are_told_apart_by_a_file(tmp_path: Path) -> None:
    folder = two(tmp_path / "ranks")
    for rank in range(2):
        torch.save({"w": torch.full((2, 2), float(rank))}, folder / f"ema_rank{rank}.pt")
    refused(folder, RULES, "no-ranks", "2 sets")
    ckptool.migrate(folder / "ema_rank1.pt", tmp_path / "ema.pth", join="w=1")
    assert torch.load(tmp_path / "ema.pth")["w"].tolist() == [[0, 0, 1, 1]] * 2


def test_what_is_no_file_is_not_joined_and_nothing_is_in_its_place(tmp_path: Path) -> None:
    state = {"w": torch.randn(4, 6)}
    ckptool.save(state, tmp_path / "cut", join="w=1", cut=2)
    assert torch.equal(load_file(tmp_path / "cut" / "rank1.safetensors")["w"], state["w"][:, 3:])
    with pytest.raises(ckptool.MigrationRefused, match="only files are joined"):
        ckptool.save(state, tmp_path / "out.pth", join="w=1")
    for name in ("in.pth", "in.safetensors"):
        ckptool.save(state, tmp_path / name)
        for more in (["--join", "w=1"], ["--join", "w=1", "--cut", "2"]):
            assert "cannot be done in place" in run("migrate", tmp_path / name, "--in-place", *more, code=1).output


@pytest.mark.parametrize(
    "options", [{"cut": 1, "join": "*=0"}, {"cut": 2}, {"cut": 2, "join": "*=0", "max_shard_size": 9}]
)
def test_a_cut_that_is_none_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    torch.save({"w": torch.randn(4, 6)}, tmp_path / "in.pth")
    with pytest.raises(ckptool.MigrationRefused) as error:
        ckptool.migrate(tmp_path / "in.pth", tmp_path / "out", **options)
    assert error.value.kind == "contradiction"
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_cut_equally_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.randn(5, 6)}, tmp_path / "in.pth")
    with pytest.raises(ckptool.MigrationRefused, match="cannot be cut into 2 equal parts"):
        ckptool.migrate(tmp_path / "in.pth", tmp_path / "out", cut=2, join="w=0")
    assert not (tmp_path / "out").exists()


def test_a_damaged_rank_is_found(tmp_path: Path) -> None:
    folder = saved(tmp_path / "ranks", slices_of(llama(), 2))
    path = folder / "consolidated.01.pth"
    data = bytearray(path.read_bytes())
    with ckptool.open_checkpoint(path) as found:
        info = found.tensors["layers.0.feed_forward.w2.weight"].info
        assert info.storage is not None
        at = info.storage.offset
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ckptool.DamagedFile):
        ckptool.migrate(folder, tmp_path / "whole.safetensors", join="meta-llama")
    assert not (tmp_path / "whole.safetensors").exists()


def of_rank(tensor: torch.Tensor, dim: int | None, sizes: list[int], ranks: int, rank: int) -> torch.Tensor:
    """What a rank has of a tensor that is made of blocks of these sizes."""
    if dim is None:
        return tensor
    return torch.cat([block.chunk(ranks, dim)[rank] for block in tensor.split(sizes, dim)], dim)


@settings(max_examples=times(15, 60), deadline=None)
@given(st.data())
def test_any_weights_are_cut_and_joined_as_torch_does(tmp_path_factory: Any, data: Any) -> None:
    folder = tmp_path_factory.mktemp("any")
    ranks = data.draw(st.integers(2, 5))
    form = data.draw(st.sampled_from(["safetensors", "state_dict"]))
    state, rules, cuts = State(), list[str](), dict[str, tuple[int | None, list[int]]]()
    for number in range(data.draw(st.integers(1, 4))):
        name, shape = f"t{number}", data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        dim = data.draw(st.none() | st.integers(0, len(shape) - 1))
        shares = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=3) | st.just([1]))
        sizes = [share * ranks * shape[dim] for share in shares] if dim is not None else []
        if dim is not None:
            shape[dim] = sum(sizes)
        tensor = torch.randn(*shape).to(data.draw(st.sampled_from([torch.float32, torch.float16, torch.float64])))
        is_turned = data.draw(st.booleans())
        state[name] = tensor.transpose(0, -1).contiguous().transpose(0, -1) if is_turned else tensor
        cuts[name] = dim, sizes
        how = "same" if dim is None else f"{dim}/{':'.join(map(str, shares))}"
        rules.append(f"{name}={how}")
    torch.save(state, folder / "in.pth")
    ckptool.migrate(folder / "in.pth", folder / "ranks", cut=ranks, join=rules, form=form)
    for rank in range(ranks):
        (path,) = (folder / "ranks").glob(f"rank{rank}.*")
        wanted = {name: of_rank(one, *cuts[name], ranks, rank) for name, one in state.items()}
        assert_equal(ckptool.load(path, allow_missing=True), wanted)
    ckptool.migrate(folder / "ranks", folder / "back.safetensors", join=rules)
    assert_equal(load_file(folder / "back.safetensors"), state)
