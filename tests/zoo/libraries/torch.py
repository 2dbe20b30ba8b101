"""torch itself: every way in which it saves."""

from __future__ import annotations

import copy
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.zoo.box import Box, Net, library, step, trained


@library("torch: files")
def files(box: Box) -> None:
    """State dicts, checkpoints and whole models, in every format and protocol."""
    model, optimizer = trained()
    everything = {"epoch": 3, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "loss": 0.5}
    for protocol in range(2, 6):
        for legacy in (False, True):
            kind = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": not legacy}
            tail = f"{protocol}{'_legacy' if legacy else ''}"
            box.save(f"state_{tail}.pt", model.state_dict(), model, **kind)
            box.weights(box.save(f"checkpoint_{tail}.pt", everything, **kind), model, key="model")
            box.save(f"model_{tail}.pt", model, model, **kind)
    box.save("objects.pth.tar", {"model": model, "optimizer": optimizer, "epoch": 1})
    box.weights("objects.pth.tar", model)
    box.save("nested.pt", {"a": {"b": [model.state_dict(), {"c": model.state_dict()}]}})
    box.save("list.pt", list(model.state_dict().values()))
    box.save("tensor.pt", torch.arange(6.0))
    box.save("ints.pt", {0: torch.ones(2), 1: torch.zeros(3)})
    box.save("tuples.pt", {("a", 1): torch.ones(2), ("a", 2): torch.zeros(3)})
    with box.path("pickled.pkl").open("wb") as file:
        pickle.dump(model.state_dict(), file)
    box.weights("pickled.pkl", model)


@library("torch: kinds of tensors")
def kinds(box: Box) -> None:
    """Every element type, layout and view."""
    types = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    types = {name: kind for name, kind in types.items() if not re.fullmatch("u?int[1-7]|qu?int.*", name)}
    for name, kind in types.items():
        box.attempt(name, lambda name=name, kind=kind: _dtype(box, name, kind))
    base = torch.randn(6, 6)
    views = {
        "whole": base,
        "rows": base[1:3],
        "turned": base.t(),
        "every": base[::2, ::3],
        "wide": base[0].expand(4, 6),
    }
    box.weights(box.save("views.pt", views), views)
    conjugate = {
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "imag": torch.randn(3, dtype=torch.complex64).conj().imag,
    }
    box.save("conjugate.pt", conjugate)
    sparse = torch.eye(4).to_sparse()
    box.save("sparse.pt", {"coo": sparse, "csr": torch.eye(4).to_sparse_csr(), "csc": torch.eye(4).to_sparse_csc()})
    box.save("blocks.pt", {"bsr": torch.eye(4).to_sparse_bsr((2, 2)), "bsc": torch.eye(4).to_sparse_bsc((2, 2))})
    box.save("nested_tensor.pt", {"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])})
    box.save("jagged.pt", {"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)})
    box.save("meta.pt", {"m": torch.empty(3, 4, device="meta")})
    box.save("empty.pt", {"none": torch.empty(0), "rows": torch.empty(0, 5), "number": torch.tensor(7)})
    box.save("channels_last.pt", nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).state_dict())
    box.save("storage.pt", {"s": torch.arange(4.0).untyped_storage(), "t": torch.arange(4.0).storage()})
    quantised = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 3, torch.qint8)
    channels = torch.quantize_per_channel(
        torch.randn(2, 4), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    )
    box.save("quantised.pt", {"tensor": quantised, "channel": channels})
    attributed = torch.ones(3)
    attributed.note = "a word"  # type: ignore[attr-defined]
    box.save("attribute.pt", {"w": attributed})


def _dtype(box: Box, name: str, kind: torch.dtype) -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    tensor = (raw % 2).bool() if kind is torch.bool else raw.view(kind)
    box.weights(box.save(f"dtype_{name}.pt", {"w": tensor}), {"w": tensor})


@library("torch: modules")
def modules(box: Box) -> None:
    """Modules of torch.nn, whole and as state dicts."""
    examples: dict[str, nn.Module] = {
        "transformer": nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        "attention": nn.MultiheadAttention(8, 2, add_bias_kv=True),
        "lstm": nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2),
        "gru": nn.GRU(3, 4),
        "conv": nn.Sequential(nn.Conv1d(2, 3, 3), nn.ConvTranspose2d(2, 3, 3), nn.Conv3d(1, 2, 1)),
        "norms": nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True), nn.RMSNorm(4)),
        "embedding": nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.EmbeddingBag(4, 3)),
        "lists": nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2)]), "b": nn.ParameterList([torch.ones(2)])}),
        "parameters": nn.ParameterDict({"x": torch.ones(2), "y": torch.zeros(3)}),
        "bilinear": nn.Bilinear(2, 3, 4),
        "adaptive": nn.AdaptiveLogSoftmaxWithLoss(8, 10, [4]),
        "prelu": nn.Sequential(nn.PReLU(3), nn.Softmax(dim=-1)),
    }
    tied = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    tied["head"].weight = tied["embed"].weight
    examples["tied"] = tied
    for name, module in examples.items():
        box.save(f"{name}.pt", module.state_dict(), module)
        box.save(f"{name}_whole.pt", module, module)
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    box.save("lazy_empty.pt", lazy.state_dict())
    lazy(torch.randn(3, 5))
    box.save("lazy.pt", lazy.state_dict(), lazy)


@library("torch: parametrizations")
def parametrized(box: Box) -> None:
    """Weights that are computed from others."""
    made = {
        "weight_norm": parametrizations.weight_norm(nn.Linear(4, 4)),
        "old_weight_norm": torch.nn.utils.weight_norm(nn.Linear(4, 4)),
        "spectral_norm": parametrizations.spectral_norm(nn.Linear(4, 4)),
        "old_spectral_norm": torch.nn.utils.spectral_norm(nn.Linear(4, 4)),
        "orthogonal": parametrizations.orthogonal(nn.Linear(4, 4)),
        "own": _with_own(nn.Linear(4, 4)),
        "pruned": prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
        "pruned_for_good": prune.remove(prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5), "weight"),
    }
    for name, module in made.items():
        box.save(f"{name}.pt", module.state_dict(), module)
        box.attempt(f"{name}, whole", lambda name=name, module=module: box.save(f"{name}_whole.pt", module, module))


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


def _with_own(module: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "weight", Doubled())
    return module


@library("torch: wrappers")
def wrappers(box: Box) -> None:
    """DataParallel, DistributedDataParallel, compile, averages, and nests of them."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    try:
        _wrapped(box)
    finally:
        torch.distributed.destroy_process_group()


def _wrapped(box: Box) -> None:
    from torch.nn.parallel import DistributedDataParallel as Ddp
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model, optimizer = trained()
    plain = model.state_dict()
    made: dict[str, nn.Module] = {
        "dp": nn.DataParallel(copy.deepcopy(model)),
        "ddp": Ddp(copy.deepcopy(model)),
        "compiled": torch.compile(copy.deepcopy(model)),
        "compiled_ddp": torch.compile(Ddp(copy.deepcopy(model))),
        "ddp_compiled": Ddp(torch.compile(copy.deepcopy(model))),
    }
    for name, wrapped in made.items():
        box.weights(box.save(f"{name}.pt", wrapped.state_dict()), plain)
        checkpoint = {"epoch": 1, "state_dict": wrapped.state_dict(), "optimizer": optimizer.state_dict()}
        box.weights(box.save(f"{name}_checkpoint.pth.tar", checkpoint), plain)
        box.attempt(f"{name}, whole", lambda name=name, one=wrapped: box.save(f"{name}_whole.pt", one))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    averaged.update_parameters(model)
    box.weights(box.save("averaged.pt", averaged.state_dict()), averaged.module.state_dict())
    both = {"model": model.state_dict(), "ema": averaged.state_dict(), "optimizer": optimizer.state_dict()}
    box.save("averaged_checkpoint.pt", both)
    box.weights("averaged_checkpoint.pt", model, choice="raw")
    box.weights("averaged_checkpoint.pt", averaged.module.state_dict(), choice="ema")
    _fully_sharded(box)


def _fully_sharded(box: Box) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net()
    plain = copy.deepcopy(model.state_dict())
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    box.save("fsdp2_dtensors.pt", model.state_dict())
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    box.weights(box.save("fsdp2_full.pt", full), plain)
    state, optimizer_state = get_state_dict(model, optimizer)
    folder = box.path("dcp/.metadata").parent
    box.attempt(
        "dcp", lambda: dcp.save({"model": state, "optimizer": optimizer_state, "step": 3}, checkpoint_id=folder)
    )
    box.weights(folder, plain)
    one = box.path("dcp_as_file.pt")
    box.attempt("dcp to torch", lambda: dcp_to_torch_save(str(folder), str(one)))
    box.weights(one, plain)


@library("torch: optimizers")
def optimizers(box: Box) -> None:
    """Every optimizer and schedule with its state, as state dicts and as objects."""
    makers = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"}
    for name, kind in makers.items():
        if issubclass(kind, torch.optim.Optimizer):
            box.attempt(name, lambda name=name, kind=kind: _optimizer(box, name, kind))
    model, optimizer = trained(optimizer=torch.optim.SGD, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    scaler = torch.amp.GradScaler("cpu")
    parts = {"net": model, "opt": optimizer, "sched": schedule, "scaler": scaler}
    box.save("all_states.pt", {name: part.state_dict() for name, part in parts.items()})
    box.weights("all_states.pt", model)
    box.attempt("objects", lambda: box.save("all_objects.pt", {"net": model, "opt": optimizer, "sched": schedule}))


def _optimizer(box: Box, name: str, kind: type[torch.optim.Optimizer]) -> None:
    if name == "Muon":
        model: nn.Module = nn.Linear(3, 2, bias=False)
    elif name == "SparseAdam":
        model = nn.Embedding(4, 3, sparse=True)
    else:
        model = Net()
    optimizer = kind(model.parameters())  # type: ignore[call-arg]
    if name == "SparseAdam":
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    else:
        step(model, optimizer)
    box.save(f"{name}.pt", optimizer.state_dict())
    box.weights(box.save(f"{name}_both.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}), model)
    box.save(f"{name}_objects.pt", {"model": model, "optimizer": optimizer})
    box.weights(f"{name}_objects.pt", model)


@library("torch: programs")
def programs(box: Box) -> None:
    """TorchScript, torch.fx, torch.export, torch.package."""
    model, _ = trained()
    model.eval()
    x = torch.randn(2, 3)
    scripted, traced = torch.jit.script(model), torch.jit.trace(model, x)
    for name, program in (("scripted", scripted), ("traced", traced)):
        path = box.path(f"{name}.pt")
        program.save(str(path))
        box.weights(path, model)
    torch.jit.freeze(scripted).save(str(box.path("frozen.pt")))
    scripted._save_for_lite_interpreter(str(box.path("mobile.ptl")))
    graph = torch.fx.symbolic_trace(nn.Sequential(*model.body, model.head))  # a forward without text for types
    box.save("fx.pt", graph, graph)
    box.save("fx_state.pt", graph.state_dict(), graph)
    program = torch.export.export(model, (x,))
    torch.export.save(program, str(box.path("exported.pt2")))
    box.weights("exported.pt2", model.state_dict())
    with torch.package.PackageExporter(str(box.path("package.pt"))) as exporter:
        exporter.extern("**")
        exporter.save_pickle("model", "model.pkl", {"model": nn.Linear(2, 2)})


@library("torch: quantisation")
def quantisation(box: Box) -> None:
    """torch.ao.quantization: dynamic, static, aware training, fx."""
    from torch.ao import quantization as ao

    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    dynamic = ao.quantize_dynamic(copy.deepcopy(net), {nn.Linear}, dtype=torch.qint8)
    half = ao.quantize_dynamic(copy.deepcopy(net), {nn.Linear}, dtype=torch.float16)
    lstm = ao.quantize_dynamic(nn.Sequential(nn.LSTM(3, 4)), {nn.LSTM}, dtype=torch.qint8)
    static = nn.Sequential(ao.QuantStub(), nn.Conv2d(1, 2, 3), nn.ReLU(), ao.DeQuantStub()).eval()
    static.qconfig = ao.get_default_qconfig("fbgemm")  # type: ignore[assignment]
    prepared = ao.prepare(static)
    prepared(torch.randn(1, 1, 5, 5))
    box.save("prepared.pt", prepared.state_dict(), prepared)
    converted = ao.convert(copy.deepcopy(prepared))
    aware = copy.deepcopy(net).train()
    aware.qconfig = ao.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    aware = ao.prepare_qat(aware)
    aware(torch.randn(2, 3))
    for name, module in {"dynamic": dynamic, "half": half, "lstm": lstm, "static": converted, "aware": aware}.items():
        box.weights(box.save(f"{name}.pt", module.state_dict()), module)
        box.attempt(f"{name}, whole", lambda name=name, one=module: box.save(f"{name}_whole.pt", one, one))


@library("cloudpickle")
def cloud(box: Box) -> None:
    """Whole models by the pickles of others."""
    import cloudpickle

    class Inner(Net):
        pass

    model, optimizer = trained(Inner())
    box.path("cloud.pkl").write_bytes(cloudpickle.dumps(model))
    box.save("cloud.pt", {"model": model, "optimizer": optimizer.state_dict()}, pickle_module=cloudpickle)


@library("joblib")
def jobs(box: Box) -> None:
    """State dicts by joblib, with and without compression."""
    import joblib

    model, _ = trained()
    arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    contents: dict[str, Any] = {"tensors": model.state_dict(), "arrays": arrays, "model": model}
    for name, content in contents.items():
        joblib.dump(content, box.path(f"{name}.joblib"))
        joblib.dump(content, box.path(f"{name}.joblib.gz"), compress=3)
    assert Path(box.path("model.joblib")).exists()
