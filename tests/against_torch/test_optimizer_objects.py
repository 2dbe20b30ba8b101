"""Optimizers saved as objects, the way of many tutorials: every value under the number that state_dict() gives it."""

from __future__ import annotations

import enum
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptool
from tests.against_torch.optimizers import Make, differences, groups, of_object, same, stepped
from tests.against_torch.oracle import named_tensors
from tests.scale import in_turn


def made(name: str, **options: Any) -> Make:
    return lambda model: getattr(torch.optim, name)(groups(model), lr=0.1, **options)


def twice(model: torch.nn.Sequential) -> torch.optim.Optimizer:
    """Return an optimizer with a parameter that stands twice in its group: torch warns, and numbers it by the later."""
    first, bias, *others = model.parameters()
    return torch.optim.Adam([{"params": [first, bias, first]}, {"params": others}])


class KeepsMore(torch.optim.SGD):
    """Keeps things that are not tensors, and some for no parameter."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.state["everywhere"] = {"scale": torch.ones(2), "calls": 3}  # type: ignore[index]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] |= {"log": [torch.ones(1), {"x": torch.zeros(3)}], "none": None, "word": "a"}
        return loss


class Slow:
    """Keeps a state by parameter around an optimizer, as Lookahead does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.state = {one: {"slow": one.detach() + 1} for one in reversed(optimizer.param_groups[1]["params"])}
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad

    def __getstate__(self) -> dict[str, Any]:
        return {"state": self.state, "optimizer": self.optimizer}


OPTIMIZERS: dict[str, Make] = {
    **{name: made(name) for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam")},
    "Adafactor": made("Adafactor"),
    "AMSGrad": made("Adam", amsgrad=True),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
    "Muon": lambda model: torch.optim.Muon([model[1].weight, model[0].weight]),
    "RMSprop": made("RMSprop", momentum=0.9, centered=True),
    "Rprop": made("Rprop"),
    "SGD": made("SGD", momentum=0.9),
    "named": lambda model: torch.optim.AdamW(model.named_parameters()),
    "twice": twice,
    "KeepsMore": lambda model: KeepsMore(groups(model), lr=0.1),
    "Slow": lambda model: Slow(made("Adam")(model)),
}


def sparse() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model whose gradients are sparse, and its optimizer."""
    model = torch.nn.Embedding(4, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    return model, optimizer


class Colour(enum.Enum):
    RED = "red"


Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - what libraries pickle


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize(("is_zip", "name"), in_turn([True, False], [*OPTIMIZERS, "SparseAdam"]))
def test_every_value_is_found_under_the_number_of_its_parameter(name: str, is_zip: bool) -> None:
    model, optimizer = sparse() if name == "SparseAdam" else stepped(OPTIMIZERS[name])
    kept = of_object(optimizer, "optimizer")

    assert kept
    assert differences({"epoch": 2, "model": model, "optimizer": optimizer}, kept, is_zip=is_zip) == []
    if isinstance(optimizer, torch.optim.Optimizer):
        state = dict(named_tensors(optimizer.state_dict(), "optimizer"))
        assert state.keys() == kept.keys()
        assert differences({"optimizer": optimizer.state_dict()}, state, is_zip=is_zip) == []


def test_what_is_kept_beside_an_optimizer_takes_no_longer_than_its_size(tmp_path: Path) -> None:
    model, optimizer = stepped(OPTIMIZERS["Slow"])
    steps = [([float(n), float(n + 1)], {"reward": [float(n)]}) for n in range(10_000)]
    torch.save({"model": model, "optimizer": optimizer, "replay": steps}, tmp_path / "agent.pth")
    torch.save({"model": model, "replay": steps}, tmp_path / "plain.pth")

    def seconds(name: str) -> float:
        start = time.process_time()
        ckptool.open_checkpoint(tmp_path / name).close()
        return time.process_time() - start

    assert seconds("agent.pth") < 4 * seconds("plain.pth") + 0.5


def test_all_of_torchs_optimizers_are_here() -> None:
    found = [getattr(torch.optim, name) for name in torch.optim.__all__]
    names = {one.__name__ for one in found if isinstance(one, type) and issubclass(one, torch.optim.Optimizer)}

    assert names - {"Optimizer", "SparseAdam"} <= OPTIMIZERS.keys()


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "KeepsMore", "LBFGS"])
def test_a_migrated_file_has_the_same_optimizer(name: str, tmp_path: Path) -> None:
    model, optimizer = stepped(OPTIMIZERS[name])
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "checkpoint.pth")
    ckptool.migrate(tmp_path / "checkpoint.pth", tmp_path / "out.pth", form="same")
    again = torch.load(tmp_path / "out.pth", weights_only=False)
    expected, found = (dict(named_tensors(one.state_dict())) for one in (optimizer, again["optimizer"]))

    assert type(again["optimizer"]) is type(optimizer)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(value) for name, value in expected.items())
    assert again["optimizer"].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    # By identity: the state is that of the model's own parameters.
    assert {one for one in again["optimizer"].state if isinstance(one, torch.Tensor)} <= {*again["model"].parameters()}


@pytest.mark.parametrize("options", [{"drop": ["optimizer"]}, {"key": "model"}, {"form": "safetensors"}, {}])
def test_the_model_can_be_taken_without_its_optimizer(options: Any, tmp_path: Path) -> None:
    model, optimizer = stepped(OPTIMIZERS["Adam"])
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "checkpoint.pth")
    target = tmp_path / ("out.safetensors" if "form" in options else "out.pth")
    ckptool.migrate(tmp_path / "checkpoint.pth", target, **options)
    weights = ckptool.load(target)

    assert all(value.equal(weights[name]) for name, value in model.state_dict().items())
    if "drop" in options:
        assert list(torch.load(target)) == ["model"]


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
