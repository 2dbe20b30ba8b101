from __future__ import annotations

import io
import pickle
import pickletools

import pytest
import torch

from ckptool.reference.nets import MLP, CifarNet, LeNet, TiedReader


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_lenet_has_the_layers_of_the_worked_example():
    weights = {name: shape for name, shape in shapes(LeNet()).items() if name.endswith("weight")}

    assert weights == {
        "conv1.weight": (6, 1, 5, 5),
        "conv2.weight": (12, 6, 5, 5),
        "fc1.weight": (120, 192),
        "fc2.weight": (60, 120),
        "out.weight": (10, 60),
    }


def test_the_tied_reader_holds_what_breaks_loaders():
    model = TiedReader(8)
    found = model.state_dict()

    assert model.head.weight is model.embedding.weight
    assert {"head.weight", "embedding.weight"} <= found.keys()
    assert "positions" in {*dict(model.named_buffers())} - found.keys()
    assert (found["norm.num_batches_tracked"].dtype, found["norm.num_batches_tracked"].shape) == (torch.int64, ())
    assert found["lstm.weight_hh_l0"].shape == (32, 8)


@pytest.mark.parametrize(
    "model", [LeNet(), MLP(4, 2), CifarNet(), TiedReader(8)], ids=lambda model: type(model).__name__
)
def test_a_pickled_net_names_its_class_in_this_module(model):
    data = io.BytesIO(pickle.dumps(model, protocol=2))
    names = {argument for opcode, argument, _ in pickletools.genops(data) if opcode.name == "GLOBAL"}

    assert f"ckptool.reference.nets {type(model).__name__}" in names
