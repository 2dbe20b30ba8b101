"""Optimizers saved as objects, the way of many tutorials: every value under the number that state_dict() gives it."""

from __future__ import annotations

import enum
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptool

OPTIMIZERS = {
    name: made
    for name in torch.optim.__all__
    if isinstance(made := getattr(torch.optim, name, None), type)
    and issubclass(made, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam", "Muon")
}
OPTIONS = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}}


class Colour(enum.Enum):
    RED = "red"


Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - what libraries pickle


def stepped(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a small model and an optimizer with two groups, after two steps."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    groups = [{"params": [model[1].bias, model[1].weight]}, {"params": list(model[0].parameters()), "lr": 0.01}]
    options: dict[str, Any] = {"lr": 0.1, **OPTIONS.get(name, {})}
    optimizer = OPTIMIZERS[name](groups, **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return model, optimizer


def same(found: ckptool.LazyTensor, expected: torch.Tensor) -> bool:
    return torch.frombuffer(bytearray(found.read()), dtype=expected.dtype).equal(expected.detach().reshape(-1))


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "LBFGS"])  # which takes one group only
def test_an_optimizer_object_has_the_names_of_its_state_dict(name: str, is_zip: bool, tmp_path: Path) -> None:
    model, optimizer = stepped(name)
    path = tmp_path / "checkpoint.pth"
    saved = {"epoch": 2, "model": model, "optimizer": optimizer}
    torch.save(saved, path, _use_new_zipfile_serialization=is_zip)
    expected = {
        f"optimizer.state.{number}.{key}": value
        for number, entry in optimizer.state_dict()["state"].items()
        for key, value in entry.items()
        if isinstance(value, torch.Tensor)
    }

    with ckptool.open_checkpoint(path) as checkpoint:
        found = {one: tensor for one, tensor in checkpoint.tensors.items() if one.startswith("optimizer.state.")}

        assert found.keys() == expected.keys()
        assert expected
        assert all(same(tensor, expected[one]) for one, tensor in found.items())
        assert not checkpoint.clashes
        assert list(checkpoint.weights or ()) == list(model.state_dict())


@pytest.mark.parametrize("form", ["same", "state_dict", "safetensors"])
def test_a_file_with_an_optimizer_object_is_migrated(form: Any, tmp_path: Path) -> None:
    model, optimizer = stepped("AdamW")
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "checkpoint.pth")
    target = tmp_path / ("out.safetensors" if form == "safetensors" else "out.pth")
    ckptool.migrate(tmp_path / "checkpoint.pth", target, form=form)

    assert all(value.equal(model.state_dict()[name]) for name, value in ckptool.load(target).items())
    if form == "same":
        again = torch.load(target, weights_only=False)
        parameters = list(again["model"].parameters())
        assert set(again["optimizer"].state) == set(parameters)  # by identity: they are the model's own


def test_the_optimizer_can_be_dropped(tmp_path: Path) -> None:
    model, optimizer = stepped("Adam")
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "checkpoint.pth")
    report = ckptool.migrate(tmp_path / "checkpoint.pth", tmp_path / "out.pth", drop=["optimizer"])

    assert report.dropped == ("optimizer",)
    assert list(torch.load(tmp_path / "out.pth")) == ["model"]


KEYS = {
    "0": np.int64(0),
    "1.5": np.float64(1.5),
    "word": np.str_("word"),
    "red": Colour.RED,
    "(1, 2)": Pair(1, 2),
    "(1, (2.5, a))": (1, (2.5, "a")),
    "{7}": frozenset({7}),
    "cuda:1": torch.device("cuda", 1),
    "(2, 3)": torch.Size([2, 3]),
    "bytes": b"bytes",
    "torch.float32": torch.float32,
    "True": True,
    "1": torch.ones(3),  # no value of its own: the first number that is free
    "2": torch.nn.Parameter(torch.ones(1)),
    "3": 1 << 200,
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("is_zip", [True, False])
def test_keys_of_any_kind_are_named(protocol: int, is_zip: bool, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    state = {"w": torch.zeros(2)}
    stats = {key: torch.full((2,), float(place)) for place, key in enumerate(KEYS.values())}
    saved = {"model": state, "stats": stats}
    torch.save(saved, path, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)

    with ckptool.open_checkpoint(path) as checkpoint:
        names = [name.removeprefix("stats.") for name in checkpoint.tensors][1:]
        assert names == list(KEYS)
        assert all(
            same(checkpoint.tensors[f"stats.{name}"], torch.full((2,), float(place)))
            for place, name in enumerate(names)
        )
    ckptool.migrate(path, tmp_path / "again.pth")
    assert len(torch.load(tmp_path / "again.pth", weights_only=False)["stats"]) == len(KEYS)
    assert list(ckptool.load(path)) == ["w"]
