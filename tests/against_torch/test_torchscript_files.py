"""A TorchScript file's tensors are those of ``torch.jit.load(…).state_dict()``."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ckptool import open_checkpoint
from tests.against_torch import oracle

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:Lite Interpreter is deprecated"),
]


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(size)
        self.scale = nn.Parameter(torch.arange(float(size)))
        self.fixed = nn.Parameter(torch.ones(size), requires_grad=False)
        self.register_buffer("kept", torch.arange(size, dtype=torch.int32))
        self.register_buffer("forgotten", torch.full((size,), 0.5), persistent=False)
        self.plain = torch.arange(3.0)
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x) * self.scale) + self.fixed + self.kept + self.forgotten + self.plain.sum()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Block(4), Block(4)])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "a tied embedding": (Tied, torch.arange(5)),
    "an LSTM": (Recurrent, torch.zeros(2, 1, 3)),
    "a sequence": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.PReLU()), torch.zeros(1, 1, 4, 4)),
    "half precision": (
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).bfloat16(),
        torch.zeros(1, 3).bfloat16(),
    ),
    "nothing": (nn.ReLU, torch.zeros(2)),
}


def scripted(name: str) -> torch.jit.ScriptModule:
    return torch.jit.script(MODELS[name][0]().eval())


def traced(name: str) -> torch.jit.ScriptModule:
    make, example = MODELS[name]
    return torch.jit.trace(make().eval(), example)


def saved(module: torch.jit.ScriptModule) -> bytes:
    stream = io.BytesIO()
    torch.jit.save(module, stream)
    return stream.getvalue()


@pytest.mark.parametrize("make", [scripted, traced])
@pytest.mark.parametrize("name", MODELS)
def test_names_order_and_bytes_are_those_of_the_loaded_modules_state_dict(
    name: str, make: Callable[[str], torch.jit.ScriptModule]
) -> None:
    data = saved(make(name))
    # state_dict() hands out detached tensors; the file says what was a parameter.
    expected = {key: value.detach() for key, value in torch.jit.load(io.BytesIO(data)).state_dict().items()}

    with open_checkpoint(data) as checkpoint:
        assert checkpoint.format == "torchscript"
        assert list(checkpoint.tensors) == list(expected)
        for key, found in checkpoint.tensors.items():
            assert (found.info.shape, found.info.stride) == (tuple(expected[key].shape), expected[key].stride())
            assert f"torch.{found.info.dtype}" == str(expected[key].dtype)
            assert found.read() == oracle.tensor_bytes(expected[key])
        found_ties = oracle.ties(list(checkpoint.tensors.values()))
        assert found_ties == oracle.torch_ties(list(expected.values()))


@pytest.mark.parametrize("make", [scripted, traced])
def test_parameters_and_buffers_are_told_apart_by_the_code(make: Callable[[str], torch.jit.ScriptModule]) -> None:
    module = torch.jit.load(io.BytesIO(saved(make("a tied embedding"))))
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}

    tensors = open_checkpoint(saved(make("a tied embedding"))).tensors
    assert {name for name, tensor in tensors.items() if tensor.info.kind == "parameter"} == parameters
    assert tensors["blocks.0.kept"].info.kind == "buffer"
    assert tensors["blocks.0.forgotten"].info.kind == "buffer"
    found = open_checkpoint(saved(make("a tied embedding")))
    assert make is traced or found.attributes["blocks.0.plain"].read() == oracle.tensor_bytes(torch.arange(3.0))


def test_a_frozen_model_shows_its_weights_as_constants() -> None:
    module = scripted("a sequence")
    expected = sorted(oracle.tensor_bytes(tensor) for tensor in module.parameters())
    data = saved(torch.jit.freeze(module, optimize_numerics=False))

    with open_checkpoint(data) as checkpoint:
        assert not checkpoint.tensors
        found = [tensor.read() for name, tensor in checkpoint.attributes.items() if name.startswith("constants.")]
        assert all(weights in found for weights in expected)


def test_a_file_for_mobile_reads_like_any_other() -> None:
    module = scripted("a tied embedding")
    data = module._save_to_buffer_for_lite_interpreter()
    expected = {key: value.detach() for key, value in torch.jit.load(io.BytesIO(data)).state_dict().items()}

    with open_checkpoint(data) as checkpoint:
        assert checkpoint.format == "torchscript"
        assert list(checkpoint.tensors) == list(expected)
        for name, tensor in expected.items():
            assert checkpoint.tensors[name].read() == oracle.tensor_bytes(tensor)


def test_extra_files_do_not_confuse_it() -> None:
    stream = io.BytesIO()
    torch.jit.save(scripted("an LSTM"), stream, _extra_files={"data.pkl": "not the tree", "notes/data.pkl": "nor this"})

    assert open_checkpoint(stream).form == "model"
