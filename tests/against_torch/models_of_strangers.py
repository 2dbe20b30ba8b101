"""
Models whose classes nobody else has: copied, under another name, into a process that saves them and goes away.

Run as ``save_all(folder)`` there. Beside each file it writes what the real ``state_dict()`` held, as JSON.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.late = nn.Parameter(torch.arange(3.0))
        self.head = nn.Linear(4, 2)
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3))) + self.late.sum()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.again = self.body
        self.also = self.body[0].bias


class Odd(nn.Module):
    """Everything that a state_dict leaves out, or puts somewhere else than one expects."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("absent", None)
        self.register_buffer("missing", None)
        self.register_buffer("hidden", torch.arange(4.0), persistent=False)
        self.register_buffer("kept", torch.arange(5, dtype=torch.int16))
        self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.fixed = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.plain = torch.full((2,), 3.0)
        self.several = [torch.zeros(1), {"deep": torch.ones(1)}]
        self.nothing = None
        self.child = None
        self.add_module("none", None)
        self.module = nn.Linear(2, 2)
        self.empty = nn.Identity()
        self.odd = {"a set": {1, 2}, "a tuple": (1, "two"), "a path": Path("x"), "a type": torch.float16}
        self.register_buffer("after", torch.zeros(0, 3))
        self.half = nn.Linear(2, 2).half()


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 1, bias=False)])])
        self.heads = nn.ModuleDict({"b": nn.Linear(2, 1), "a": nn.PReLU(), "0": nn.Linear(1, 1)})
        self.scales = nn.ParameterList([torch.ones(1), torch.zeros(2), "text", nn.Parameter(torch.ones(3))])
        self.named = nn.ParameterDict({"z": torch.ones(1), "a": torch.zeros(1), "n": 5})
        self.gates = nn.ParameterDict()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, num_layers=2, bidirectional=True, proj_size=2)
        self.gru = nn.GRU(2, 3, bias=False)
        self.cell = nn.LSTMCell(2, 2)
        self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=5)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2)


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        if hasattr(nn, "Buffer"):
            self.mean = nn.Buffer(torch.zeros(2))
            self.temporary = nn.Buffer(torch.ones(2), persistent=False)
        self.linear = nn.Linear(2, 2)
        self.register_buffer("view", self.linear.weight.detach()[0])


class WithExtraState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        """Nothing to restore."""


class Renaming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self._register_state_dict_hook(rename)


def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    state[f"{prefix}renamed"] = state.pop(f"{prefix}linear.weight")


class Parent(nn.Module):
    """Its child knows its parent, by a list, so that it is not a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2)
        self.child.parents = [self]


class Slotted(nn.Linear):
    def __getstate__(self) -> Any:
        return self.__dict__, {"slot": torch.ones(1)}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state[0])


def pruned() -> nn.Module:
    model = Net()
    prune.l1_unstructured(model.head, "weight", 0.5)
    prune.random_structured(model.conv, "weight", 0.5, dim=0)
    return model


def normed() -> nn.Module:
    model = nn.Sequential(weight_norm(nn.Linear(3, 2)), spectral_norm(nn.Linear(2, 3)), weight_norm(nn.Conv1d(1, 2, 3)))
    for number, size in ((0, 3), (1, 2)):
        model[number](torch.ones(1, size))
    return model


def data_parallel() -> nn.Module:
    return nn.DataParallel(Net())


def distributed() -> nn.Module:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(Net())


def activation_checkpointed() -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))


def trained() -> dict[str, Any]:
    model = Tied()
    optimizer = torch.optim.AdamW([{"params": model.body.parameters()}, {"params": model.head.parameters()}])
    loss = sum(parameter.sum() for parameter in model.parameters())
    loss.backward()
    optimizer.step()
    ema = AveragedModel(model)
    return {
        "epoch": 3,
        "model": model,
        "ema": ema,
        "optimizer": optimizer.state_dict(),
        "models": [Net(), (nn.Linear(1, 1), Odd())],
        "weights": model.state_dict(),
        "best": {"score": torch.tensor(0.5), "model": None},
        7: nn.Linear(1, 2),
    }


MODELS: dict[str, Callable[[], Any]] = {
    "net": Net,
    "half": lambda: Net().half(),
    "tied": Tied,
    "odd": Odd,
    "containers": Containers,
    "recurrent": Recurrent,
    "with_buffers": WithBuffers,
    "with_extra_state": WithExtraState,
    "renaming": Renaming,
    "parent": Parent,
    "slotted": lambda: nn.Sequential(Slotted(2, 2)),
    "pruned": pruned,
    "normed": normed,
    "sequential": lambda: nn.Sequential(OrderedDict([("a", nn.Linear(1, 1)), ("b", nn.BatchNorm1d(1, affine=False))])),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(1, 1)),
    "bare": nn.Identity,
    "data_parallel": data_parallel,
    "averaged": lambda: AveragedModel(data_parallel()),
    "averaged_buffers": lambda: AveragedModel(Net(), use_buffers=True),
    "compiled": lambda: torch.compile(Net()),
    "compiled_inside": lambda: nn.Sequential(torch.compile(Net()), nn.Linear(1, 1)),
    "traced": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.PReLU())),
    "distributed": distributed,
    "activation_checkpointed": activation_checkpointed,
    "trained": trained,
    "list_of_models": lambda: [Net(), Tied()],
    "bound_method": lambda: Tied().state_dict,
    "bound_method_of_wrapped": lambda: data_parallel().state_dict,
    "bound_method_inside": lambda: {"state_dict": Net().state_dict, "epoch": 1},
}
CONTAINERS: dict[str, Callable[[Any, Path], None]] = {
    "zip": torch.save,
    "zip-5": lambda content, path: torch.save(content, path, pickle_protocol=5),
    "legacy": lambda content, path: torch.save(content, path, _use_new_zipfile_serialization=False),
    "legacy-4": lambda content, path: torch.save(
        content, path, _use_new_zipfile_serialization=False, pickle_protocol=4
    ),
    "pickle": lambda content, path: path.write_bytes(pickle.dumps(content, 4)),
}


def tensors_of(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a checkpoint holds by full name, asking each model for its own state_dict()."""
    if isinstance(tree, nn.Module):
        tree = tree.state_dict(keep_vars=True)
        tree = {name: value for name, value in tree.items() if isinstance(value, torch.Tensor)}
    elif callable(tree):
        tree = tree()
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors_of(value, f"{path}.{key}" if path else str(key))


def described(tensors: list[tuple[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """Return what the test compares, as JSON can hold it."""
    rows: list[dict[str, Any]] = []
    addresses: list[int] = []
    for name, tensor in tensors:
        if isinstance(tensor, nn.UninitializedParameter):
            rows.append({"name": name, "uninitialized": True})
            addresses.append(0)
            continue
        address = tensor.untyped_storage().data_ptr()
        rows.append(
            {
                "name": name,
                "dtype": str(tensor.dtype),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "offset": tensor.storage_offset(),
                "parameter": isinstance(tensor, nn.Parameter),
                "tie": addresses.index(address) if address in addresses and address else len(addresses),
                "sha256": hashlib.sha256(
                    bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
                ).hexdigest(),
            }
        )
        addresses.append(address)
    return rows


def save_all(folder: str) -> None:
    """Write every model in every container, and what it holds as JSON; why not, where torch itself cannot."""
    warnings.simplefilter("ignore")
    inspect.getsourcelines = cache(inspect.getsourcelines)  # torch asks for the source of each class in each file
    for name, make in MODELS.items():
        torch.manual_seed(0)
        content = make()
        held = described(list(tensors_of(content)))
        (Path(folder) / f"{name}.json").write_text(json.dumps(held))
        for container, save in CONTAINERS.items():
            path = Path(folder) / f"{name}.{container}"
            try:
                save(content, path)
            except Exception as error:  # noqa: BLE001 - whatever stops torch from saving it
                path.unlink(missing_ok=True)
                path.with_suffix(f".{container}.refused").write_text(repr(error))
