"""Training goes on from a folder of DCP in which the states of optimizers have the names of parameters, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ckptool import MigrationRefused, load_into, migrate, open_checkpoint
from tests.program import as_json
from tests.scale import in_turn

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about its own


class Net(nn.Module):
    """A net with two layers of one shape, buffers, and a tied weight."""

    def __init__(self, *, mask: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embedding.weight
        if mask:
            self.register_buffer("mask", torch.ones(1, 1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        found: torch.Tensor = self.head(x)
        return found


def by_kind(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups as they are most often made: matrices with decay, all else without."""
    matrices = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.003}]


def in_parts(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups that follow each other, of which no two have parameters of one shape."""
    head = [model.get_parameter("head.bias")]
    rest = [one for one in model.parameters() if one is not head[0]]
    return [{"params": rest}, {"params": head, "lr": 0.5}]


def named(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups that shapes do not tell apart, with the names of their parameters."""
    pairs = list(model.named_parameters())
    return [{"params": pairs[::2], "lr": 0.02}, {"params": pairs[1::2]}]


Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
OF_NO_SHAPE = ("sgd", "adafactor")
"""Kinds whose states do not have the shapes of parameters: that something else is a buffer, they cannot tell."""
OPTIMIZERS: dict[str, Optimizer] = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
    "adamw by kind": lambda model: torch.optim.AdamW(by_kind(model), lr=0.01),
    "adamw, named": lambda model: torch.optim.AdamW(named(model), lr=0.01),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "sgd with momentum": lambda model: torch.optim.SGD(in_parts(model), lr=0.01, momentum=0.9),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.5, centered=True),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> list[float]:
    """Return the losses of some steps."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        x = torch.randint(0, 6, (8,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), (x + 1) % 6)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(path: Path, kind: str) -> list[float]:
    """Train, save half way, and return the losses of the second half."""
    torch.manual_seed(0)
    model = Net(mask=kind not in OF_NO_SHAPE)
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, range(4))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 4}
    torch.save(state, path)
    return train(model, optimizer, range(4, 8))


def resumed(folder: Path, kind: str, options: StateDictOptions, *, at_root: bool = False) -> list[float]:
    """Load a folder into a fresh model as torch does, and return the losses of the second half."""
    torch.manual_seed(1)
    model = Net(mask=kind not in OF_NO_SHAPE)
    optimizer = OPTIMIZERS[kind](model)
    weights, state = get_state_dict(model, optimizer, options=options)
    wanted: dict[str, Any] = {"model": weights, "optimizer": state}
    if at_root:  # torchtitan leaves out which names an optimizer has
        wanted = {**weights, "optimizer": {name: one for name, one in state.items() if "param_names" not in name}}
    torch_dcp.load(wanted, checkpoint_id=folder, no_dist=True)
    found = {name: wanted[name] for name in weights} if at_root else wanted["model"]
    set_state_dict(
        model, optimizer, model_state_dict=found, optim_state_dict=state | wanted["optimizer"], options=options
    )
    return train(model, optimizer, range(4, 8))


@pytest.mark.parametrize(("kind", "layout"), in_turn(OPTIMIZERS, ["nested", "flat", "torchtitan"]))
def test_training_goes_on_as_if_it_had_never_stopped(kind: str, layout: Any, tmp_path: Path) -> None:
    losses = trained(tmp_path / "a.pth", kind)
    migrate(tmp_path / "a.pth", tmp_path / "a", form="dcp", optimizer_names=layout)
    options = StateDictOptions(flatten_optimizer_state_dict=layout != "nested")
    assert resumed(tmp_path / "a", kind, options, at_root=layout == "torchtitan") == losses


@pytest.mark.parametrize("layout", ["nested", "flat"])
def test_names_are_those_that_torch_writes(layout: Any, tmp_path: Path) -> None:
    trained(tmp_path / "a.pth", "adamw by kind")
    migrate(tmp_path / "a.pth", tmp_path / "a", form="dcp", optimizer_names=layout)
    saved = torch.load(tmp_path / "a.pth")
    model = Net()
    optimizer = OPTIMIZERS["adamw by kind"](model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    options = StateDictOptions(flatten_optimizer_state_dict=layout == "flat")
    weights, state = get_state_dict(model, optimizer, options=options)
    torch_dcp.save({"model": weights, "optimizer": state, "epoch": 4}, checkpoint_id=tmp_path / "b", no_dist=True)
    ours, theirs = (FileSystemReader(tmp_path / name).read_metadata() for name in "ab")
    assert ours.planner_data == theirs.planner_data
    assert ours.state_dict_metadata == theirs.state_dict_metadata


def test_ckptool_resumes_from_it_too(tmp_path: Path) -> None:
    losses = trained(tmp_path / "a.pth", "adamw by kind")
    migrate(tmp_path / "a.pth", tmp_path / "a", form="dcp", optimizer_names="nested")
    model = Net()
    optimizer = OPTIMIZERS["adamw by kind"](model)
    load_into(model, tmp_path / "a", optimizer=optimizer)
    assert train(model, optimizer, range(4, 8)) == losses


def test_names_change_with_those_of_the_weights(tmp_path: Path) -> None:
    trained(tmp_path / "a.pth", "adamw, named")
    saved = torch.load(tmp_path / "a.pth")
    saved["model"] = {f"module.{name}": one for name, one in saved["model"].items()}
    for group in saved["optimizer"]["param_groups"]:
        group["param_names"] = [f"module.{name}" for name in group["param_names"]]
    state = {"state_dict": saved["model"], "optimizer_states": [saved["optimizer"]]}
    torch.save(state, tmp_path / "b.ckpt")
    options = ["--form", "dcp", "--strip-module", "--optimizer-names", "nested"]
    report = as_json("migrate", tmp_path / "b.ckpt", tmp_path / "b", *options)
    assert ["optimizer_states.0.state.0.step", "optimizer_states.0.state.embedding.weight.step"] in report["renamed"]
    assert not any("old names" in note or "has no names" in note for note in report["notes"])
    with open_checkpoint(tmp_path / "b") as found:
        names = {name.removeprefix("optimizer_states.0.state.") for name in found.tensors if name.startswith("opt")}
    assert {name.rpartition(".")[0] for name in names} == {name for name, _ in Net().named_parameters()}


def saved(folder: Path, groups: Callable[[nn.Module], Any], model: nn.Module | None = None, **more: Any) -> Path:
    """Write a checkpoint of a net that was trained for a step."""
    model = model or nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.Adam(groups(model))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}, folder / "a.pth")
    return folder / "a.pth"


def pairs_of_layers(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": layer.parameters()} for layer in reversed([*model.children()])]


def test_what_is_not_certain_is_refused_by_name(tmp_path: Path) -> None:
    def fails(reason: str, path: Path, **options: Any) -> None:
        with pytest.raises(MigrationRefused, match=reason) as refused:
            migrate(path, tmp_path / "out", **{"form": "dcp", "optimizer_names": "nested", **options})
        assert "optimizer_names" in str(refused.value.hint)
        assert not (tmp_path / "out").exists()

    fails(r"under 'model', 2 states of \[3, 3\] in several groups", saved(tmp_path, pairs_of_layers))
    backwards = saved(tmp_path, lambda model: reversed([*model.parameters()]))
    fails("going by shapes, group 0 has '0.weight' behind '0.bias'", backwards)
    some = saved(tmp_path, lambda model: [*model.parameters()][2:])
    fails(r"1 states of \[3, 3\], and 2 parameters of that shape", some)
    twins = saved(tmp_path, lambda model: model.parameters())
    state = torch.load(twins)
    torch.save(
        {
            "first": state["model"],
            "second": {n: t + 1 for n, t in state["model"].items()},
            "optimizer": state["optimizer"],
        },
        twins,
    )
    fails("several models have them", twins)
    lone = {**state["optimizer"], "param_groups": []}
    torch.save({"model": state["model"], "optimizer": lone}, twins)
    fails("4 states of what is in no group", twins)
    torch.save({"model": state["model"], "epoch": 1}, twins)
    fails("no optimizer's state_dict", twins)
    torch.save({"optimizer": state["optimizer"], "epoch": 1}, twins)
    fails("there are no weights", twins)
    torch.save(state, twins)
    fails("get names of parameters where everything is written", twins, form="same")
    fails("get names of parameters where everything is written", twins, key="model")
    migrate(twins, tmp_path / "numbers", form="dcp")
    fails("says nothing of the order of the names", tmp_path / "numbers")


def test_torchtitan_finds_the_optimizer_and_the_weights_whatever_their_keys_were(tmp_path: Path) -> None:
    state = torch.load(saved(tmp_path, lambda model: model.parameters()))
    torch.save({"net": state["model"], "optim_state": state["optimizer"], "step": 1}, tmp_path / "a.pth")
    report = migrate(tmp_path / "a.pth", tmp_path / "a", form="dcp", optimizer_names="torchtitan")
    with open_checkpoint(tmp_path / "a") as found:
        heads = {name.partition(".state.")[0] for name in found.tensors}
    assert heads == {*state["model"], "optimizer"}
    assert report.after.prefixes == ()


def test_several_optimizers_are_told_by_their_models(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    for name, model in {"generator": nn.Linear(2, 5), "critic": nn.Linear(5, 1)}.items():
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, model.in_features)).sum().backward()
        optimizer.step()
        state |= {name: model.state_dict(), f"{name}_optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "a.pth")
    migrate(tmp_path / "a.pth", tmp_path / "a", form="dcp", optimizer_names="nested")
    with open_checkpoint(tmp_path / "a") as found:
        for name in ("generator", "critic"):
            assert found.tensors[f"{name}_optimizer.state.weight.exp_avg"].info.shape == state[name]["weight"].shape
