from __future__ import annotations

import io
import pickle
import pickletools

import pytest
import torch

from ckptool.reference.nets import MLP, CifarNet, LeNet, TiedReader


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
