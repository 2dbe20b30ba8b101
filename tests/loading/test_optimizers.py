"""The state of an optimizer, loaded beside the weights: what ``Optimizer.load_state_dict`` makes of the same file."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import ckptool
from tests.each import each
from tests.loading.same import assert_same_tensor, saved, torch_load
from tests.scale import in_turn

VALUES = torch.rand(4, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam": lambda model: Adam(model.parameters(), 0.01, betas=(0.8, 0.99)),
    "sgd with momentum": lambda model: SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True),
    "sgd": lambda model: SGD(model.parameters(), 0.01),
    "adamw with amsgrad": lambda model: AdamW(model.parameters(), amsgrad=True),
    "rmsprop, centered": lambda model: RMSprop(model.parameters(), centered=True),
    "two groups": lambda model: Adam(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1]},
        ]
    ),
}


def step(model: nn.Module, optimizer: Optimizer, times: int = 2) -> None:
    dtype = next(model.parameters()).dtype
    for _ in range(times):
        optimizer.zero_grad()
        model(VALUES.to(dtype)).square().sum().backward()
        optimizer.step()


def trained(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(4)
    model = Net().to(dtype)
    optimizer = OPTIMIZERS[name](model)
    step(model, optimizer)
    return model, optimizer


def assert_same_tree(found: Any, expected: Any, path: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert_same_tensor(found, expected, path)
        return
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_same_tree(found[key], value, f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for number, value in enumerate(expected):
            assert_same_tree(found[number], value, f"{path}.{number}")
    else:
        assert found == expected, path


@pytest.mark.parametrize(
    ("mmap", "dtype", "name"), in_turn([True, False], [torch.float32, torch.float64, torch.bfloat16], OPTIMIZERS)
)
def test_the_state_is_the_one_that_torch_would_have_loaded(
    name: str, dtype: torch.dtype, mmap: bool, tmp_path: Path
) -> None:
    source, theirs = trained(name)
    path = tmp_path / "x.pth"
    data = saved({"model": source.state_dict(), "optimizer": theirs.state_dict(), "epoch": 3}, path)
    tree = torch_load(path)
    expected_model = Net().to(dtype)
    expected_model.load_state_dict(tree["model"])
    expected = OPTIMIZERS[name](expected_model)
    expected.load_state_dict(tree["optimizer"])
    model = Net().to(dtype)
    optimizer = OPTIMIZERS[name](model)

    report = ckptool.load_into(model, path, optimizer=optimizer, mmap=mmap)

    assert_same_tree(optimizer.state_dict(), expected.state_dict())
    assert report.optimizer == len(theirs.state_dict()["state"])
    step(model, optimizer)
    step(expected_model, expected)
    for ours, other in zip(model.parameters(), expected_model.parameters(), strict=True):
        assert torch.equal(ours, other)
    assert path.read_bytes() == data  # training goes on in memory of its own


@pytest.mark.parametrize("where", ["optimizer", "optimizer_states.0", "deep.er.optim"])
def test_the_state_is_found_wherever_it_is(where: str, tmp_path: Path) -> None:
    source, theirs = trained("adam")
    state: Any = theirs.state_dict()
    content: dict[str, Any] = {"model": source.state_dict()}
    if where == "optimizer_states.0":
        content["optimizer_states"] = [state]
    elif where == "deep.er.optim":
        content["deep"] = {"er": {"optim": state}}
    else:
        content[where] = state
    saved(content, tmp_path / "x.pth")
    model = Net()
    optimizer = OPTIMIZERS["adam"](model)

    ckptool.load_into(model, tmp_path / "x.pth", key="model", optimizer=optimizer)

    assert_same_tree(optimizer.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_that_was_saved_whole_is_loaded(name: str, tmp_path: Path) -> None:
    model, optimizer = trained(name)
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "a.pth")
    model = Net()
    mine = OPTIMIZERS[name](model)
    ckptool.load_into(model, tmp_path / "a.pth", optimizer=mine)

    assert_same_tree(mine.state_dict(), optimizer.state_dict())


def test_a_new_state_of_an_old_release_is_completed_by_torch(tmp_path: Path) -> None:
    source, theirs = trained("adam")
    old = copy.deepcopy(theirs.state_dict())
    for group in old["param_groups"]:
        for name in ("foreach", "maximize", "capturable", "differentiable", "fused"):
            group.pop(name, None)
        group["initial_lr"] = 0.5
    saved({"model": source.state_dict(), "optimizer": old}, tmp_path / "x.pth")
    model = Net()
    optimizer = OPTIMIZERS["adam"](model)

    ckptool.load_into(model, tmp_path / "x.pth", optimizer=optimizer)

    assert optimizer.param_groups[0]["initial_lr"] == 0.5
    step(model, optimizer)


def test_an_optimizer_over_meta_parameters_is_refused(tmp_path: Path) -> None:
    source, theirs = trained("adam")
    saved({"model": source.state_dict(), "optimizer": theirs.state_dict()}, tmp_path / "x.pth")
    with torch.device("meta"):
        model = Net()

    with pytest.raises(ckptool.KeyMismatch) as caught:
        ckptool.load_into(model, tmp_path / "x.pth", optimizer=Adam(model.parameters()))
    assert caught.value.kind == "meta-optimizer"
    assert all(parameter.is_meta for parameter in model.parameters())


def with_other_shapes(state: dict[str, Any]) -> dict[str, Any]:
    state["state"][4]["exp_avg"] = torch.zeros(7, 7)
    return state


STRANGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "groups of text": lambda state: state | {"param_groups": "all"},
    "groups without parameters": lambda state: state | {"param_groups": [{"lr": 1.0}]},
    "a state of a list": lambda state: state | {"state": []},
    "numbers that are lists": lambda state: (
        state | {"param_groups": [state["param_groups"][0] | {"params": [[n] for n in range(6)]}]}
    ),
    "values that only code could make": lambda state: state | {"extra": slice(1, 2)},
    "other shapes": with_other_shapes,
}
MINE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "in another order": lambda model: Adam(reversed(list(model.parameters()))),
    "of another model": lambda model: Adam(Net().parameters()),
}
REFUSED = [
    *((file, mine) for file in OPTIMIZERS for mine in ("sgd", "adam", "two groups") if {file, mine} != {"sgd"}),
    *(("adam", mine) for mine in MINE),
    *((how, "adam") for how in STRANGE),
]


@each(("file", "mine"), [(file, mine) for file, mine in REFUSED if file != mine and "with" not in file])
def test_a_state_that_is_not_of_this_optimizer_is_refused_and_nothing_is_changed(
    file: str, mine: str, tmp_path: Path
) -> None:
    source, theirs = trained(file if file in OPTIMIZERS else "adam")
    state = STRANGE.get(file, lambda same: same)(theirs.state_dict())
    saved({"model": source.state_dict(), "optimizer": state}, tmp_path / "x.pth")
    model = Net()
    optimizer = (OPTIMIZERS | MINE)[mine](model)
    before, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())

    with pytest.raises(ckptool.CkptoolError):
        ckptool.load_into(model, tmp_path / "x.pth", optimizer=optimizer)

    assert_same_tree(optimizer.state_dict(), before)
    assert_same_tree(dict(model.state_dict()), dict(weights))
