"""
What the layers of other libraries compute in several ranks, their tensors do when ckptool has joined them.

Each test is skipped where its library is not installed: ``pip install fairscale megatron-core``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ckptool

FAIRSCALE = """
import sys
import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as parallel
from fairscale.nn.model_parallel import layers

rank, folder, embedding = int(sys.argv[1]), sys.argv[2], getattr(layers, sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
parallel.initialize_model_parallel(2)
torch.manual_seed(rank)
net = torch.nn.Module()
net.tok_embeddings = embedding(10, 8, init_method=torch.nn.init.normal_)
layer = torch.nn.Module()
layer.feed_forward = torch.nn.Module()
layer.feed_forward.w1 = layers.ColumnParallelLinear(8, 12, bias=False, gather_output=False)
layer.feed_forward.w2 = layers.RowParallelLinear(12, 8, bias=False, input_is_parallel=True)
net.layers = torch.nn.ModuleList([layer])
net.norm = torch.nn.LayerNorm(8, bias=False)
net.output = layers.ColumnParallelLinear(8, 10, bias=False)
torch.save(net.state_dict(), f"{folder}/consolidated.{rank:02}.pth")
with torch.no_grad():
    found = net.tok_embeddings(torch.arange(10))
    found = net.output(net.norm(layer.feed_forward.w2(layer.feed_forward.w1(found).relu())))
if rank == 0:
    torch.save(found, f"{folder}/found.pt")
"""
MEGATRON = """
import argparse, sys
from contextlib import nullcontext
from types import SimpleNamespace
import torch
from megatron import core
from megatron.core.models import gpt
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

rank, ranks, folder, gated = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "True"
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks)
core.parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
core.tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)
torch.cuda.current_device = lambda: "cpu"
off = ("bias_dropout_fusion", "masked_softmax_fusion", "persist_layer_norm", "gradient_accumulation_fusion")
off = dict.fromkeys((*off, "apply_rope_fusion", "bias_activation_fusion"), False)
config = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, kv_channels=8, ffn_hidden_size=24,
    gated_linear_unit=gated, activation_func=torch.nn.functional.silu, use_cpu_initialization=True,
    tensor_model_parallel_size=ranks, hidden_dropout=0.0, attention_dropout=0.0, **off,
)  # fmt: skip
names = {"parallel_output": False, "share_embeddings_and_output_weights": False, "position_embedding_type": "rope"}
model = gpt.GPTModel(config, get_gpt_layer_local_spec(), 32, 16, **names)
if ranks == 1:
    model.load_state_dict(torch.load(f"{folder}/whole.pth"), strict=False)
else:
    for name, one in model.named_parameters():
        torch.manual_seed(rank if getattr(one, "tensor_model_parallel", False) else 7)
        torch.nn.init.normal_(one.data)
    args = argparse.Namespace(swiglu=gated, tensor_model_parallel_size=ranks)
    torch.save({"args": args, "model": model.state_dict()}, f"{folder}/mp_rank_{rank:02}/model_optim_rng.pt")
mask = torch.triu(torch.ones(1, 1, 5, 5, dtype=torch.bool), 1)
with torch.no_grad():
    found = model(torch.arange(5)[None], torch.arange(5)[None], mask)
if rank == 0:
    torch.save(found, f"{folder}/found{ranks}.pt")
"""


def in_ranks(ranks: int, program: str, *arguments: object) -> None:
    calls = [[sys.executable, "-c", program, str(rank), *map(str, arguments)] for rank in range(ranks)]
    started = [subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for call in calls]
    assert [one.wait(300) for one in started] == [0] * ranks


@pytest.mark.parametrize(
    ("rules", "embedding"), [("meta-llama", "ParallelEmbedding"), ("meta-llama3", "VocabParallelEmbedding")]
)
def test_layers_of_fairscale(rules: str, embedding: str, tmp_path: Path) -> None:
    pytest.importorskip("fairscale")
    in_ranks(2, FAIRSCALE, tmp_path, embedding)
    ckptool.migrate(tmp_path, tmp_path / "whole.pth", join=rules)
    whole = torch.load(tmp_path / "whole.pth")
    embedded = whole["tok_embeddings.weight"] @ whole["layers.0.feed_forward.w1.weight"].T
    normed = torch.nn.functional.layer_norm(
        embedded.relu() @ whole["layers.0.feed_forward.w2.weight"].T, (8,), whole["norm.weight"]
    )
    torch.testing.assert_close(normed @ whole["output.weight"].T, torch.load(tmp_path / "found.pt"))


@pytest.mark.parametrize("gated", [True, False])
def test_gpt_of_megatron(gated: bool, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    for rank in range(2):
        (tmp_path / f"mp_rank_{rank:02}").mkdir()
    in_ranks(2, MEGATRON, 2, tmp_path, gated)
    ckptool.migrate(tmp_path, tmp_path / "whole.pth", join="megatron")
    in_ranks(1, MEGATRON, 1, tmp_path, gated)
    torch.testing.assert_close(torch.load(tmp_path / "found1.pt"), torch.load(tmp_path / "found2.pt"))
