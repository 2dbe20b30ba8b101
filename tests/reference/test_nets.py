from __future__ import annotations

import io
import pickle
import pickletools

import pytest
import torch

from ckptool.reference.nets import MLP, NETS, CifarNet, LeNet, TiedReader


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_lenet_has_the_layers_of_the_worked_example():
    assert shapes(LeNet()) == {
        "conv1.weight": (6, 1, 5, 5),
        "conv1.bias": (6,),
        "conv2.weight": (12, 6, 5, 5),
        "conv2.bias": (12,),
        "fc1.weight": (120, 192),
        "fc1.bias": (120,),
        "fc2.weight": (60, 120),
        "fc2.bias": (60,),
        "out.weight": (10, 60),
        "out.bias": (10,),
    }


def test_an_mlp_has_the_size_and_depth_given_and_no_biases():
    assert shapes(MLP(8, 3)) == {
        "layers.0.weight": (8, 8),
        "layers.2.weight": (8, 8),
        "layers.4.weight": (8, 8),
    }


def test_an_mlp_takes_other_widths_at_its_ends():
    assert list(shapes(MLP(8, 2, inputs=5, outputs=3)).values()) == [(8, 5), (3, 8)]


def test_an_mlp_has_a_relu_after_each_linear_but_the_last():
    kinds = [type(layer).__name__ for layer in MLP(4, 3).layers]

    assert kinds == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]


def test_cifar_net_has_three_convolutions():
    convolutions = [module for module in CifarNet().modules() if isinstance(module, torch.nn.Conv2d)]

    assert len(convolutions) == 3


@pytest.mark.parametrize("name", NETS)
def test_every_net_gives_ten_logits_for_an_image_of_its_side(name):
    row = NETS[name]
    channels = 3 if row.data == "cifar10" else 1

    assert row.build()(torch.rand(2, channels, row.side, row.side)).shape == (2, 10)


def test_the_tied_reader_ties_its_head_to_its_embedding():
    model = TiedReader(8)

    assert model.head.weight is model.embedding.weight
    assert {"head.weight", "embedding.weight"} <= shapes(model).keys()


def test_the_tied_reader_keeps_one_buffer_out_of_its_state_dict():
    model = TiedReader(8)

    assert "positions" in dict(model.named_buffers())
    assert "positions" not in shapes(model)


def test_the_tied_reader_counts_batches_in_an_integer_without_dimensions():
    counter = TiedReader(8).state_dict()["norm.num_batches_tracked"]

    assert (counter.dtype, counter.shape) == (torch.int64, ())


def test_the_tied_reader_holds_an_lstm():
    assert shapes(TiedReader(8))["lstm.weight_hh_l0"] == (32, 8)


@pytest.mark.parametrize(
    "model", [LeNet(), MLP(4, 2), CifarNet(), TiedReader(8)], ids=lambda model: type(model).__name__
)
def test_a_pickled_net_names_its_class_in_this_module(model):
    data = io.BytesIO(pickle.dumps(model, protocol=2))
    names = {argument for opcode, argument, _ in pickletools.genops(data) if opcode.name == "GLOBAL"}

    assert f"ckptool.reference.nets {type(model).__name__}" in names
