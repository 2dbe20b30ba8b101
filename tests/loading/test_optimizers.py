"""The state of an optimizer, loaded beside the weights: what ``Optimizer.load_state_dict`` makes of the same file."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
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
    assert report.optimizer == (count := len(theirs.state_dict()["state"]))
    assert count == 0 or f"optimizer state of {count} parameters" in str(report)
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


def named(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state as ``torch.distributed.checkpoint.state_dict`` names it."""
    names = {id(one): name for name, one in model.named_parameters()}
    kept = optimizer.state_dict()
    by_number = [names[id(one)] for group in optimizer.param_groups for one in group["params"]]
    groups = [group | {"params": [by_number[number] for number in group["params"]]} for group in kept["param_groups"]]
    return {"state": {by_number[number]: one for number, one in kept["state"].items()}, "param_groups": groups}


@pytest.mark.parametrize("head", ["", "module."])
@pytest.mark.parametrize("how", ["names", "param_names", "get_state_dict"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_state_with_names_goes_to_the_parameters_of_these_names(
    groups: int, how: str, head: str, tmp_path: Path
) -> None:
    def optimizer_of(model: nn.Module, backwards: bool) -> Optimizer:
        pairs = sorted(model.named_parameters(), reverse=backwards)
        if how != "param_names":
            pairs = [one for _, one in pairs]  # type: ignore[misc]
        parts = [pairs] if groups == 1 else [pairs[:3], pairs[3:]] if not backwards else [pairs[:-3], pairs[-3:]]
        rates = (0.1, 0.2) if not backwards else (0.2, 0.1)
        return Adam([{"params": part, "lr": lr} for part, lr in zip(parts, rates, strict=False)])

    torch.manual_seed(4)
    source = Net()
    theirs = optimizer_of(source, backwards=False)
    step(source, theirs)
    weights: Any = source.state_dict()
    state = theirs.state_dict() if how == "param_names" else named(source, theirs)
    if how == "get_state_dict":
        weights, state = get_state_dict(source, theirs)
    if head:  # as of a model in a wrapper
        weights = {head + name: one for name, one in weights.items()}
        for group in state["param_groups"]:
            key = "param_names" if how == "param_names" else "params"
            group[key] = [head + name for name in group[key]]
        if how != "param_names":
            state["state"] = {head + name: one for name, one in state["state"].items()}
    saved({"model": weights, "optimizer": state}, tmp_path / "x.pth")
    model = Net()
    mine = optimizer_of(model, backwards=True)

    ckptool.load_into(model, tmp_path / "x.pth", optimizer=mine)

    for ours, other in zip(model.parameters(), source.parameters(), strict=True):
        assert torch.equal(mine.state[ours]["exp_avg"], theirs.state[other]["exp_avg"])
    rates = {id(one): group["lr"] for group in mine.param_groups for one in group["params"]}
    expected = {id(one): group["lr"] for group in theirs.param_groups for one in group["params"]}
    assert [rates[id(one)] for one in model.parameters()] == [expected[id(one)] for one in source.parameters()]
    step(model, mine)
    step(source, theirs)
    for ours, other in zip(model.parameters(), source.parameters(), strict=True):
        assert torch.equal(ours, other)


def renamed_state(state: dict[str, Any]) -> None:
    state["state"]["other"] = state["state"].pop("0.weight")
    group = state["param_groups"][0]
    group["params"] = ["other" if name == "0.weight" else name for name in group["params"]]


BROKEN: dict[str, tuple[torch.dtype, Callable[[dict[str, Any]], object], str]] = {
    "another name": (torch.float32, renamed_state, "missing 0.weight; unexpected other"),
    "too large": (torch.float16, lambda it: it["state"]["0.bias"]["exp_avg"].fill_(1e5), "too large for float16"),
    "too small": (torch.float16, lambda it: it["state"]["0.bias"]["exp_avg_sq"].fill_(1e-12), "too small for float16"),
    "an entry of one": (torch.float32, lambda it: it["state"]["0.bias"].pop("exp_avg_sq"), "0.bias has no exp_avg_sq"),
    "an entry of all": (torch.float32, lambda it: [one.pop("exp_avg") for one in it["state"].values()], "no exp_avg"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_state_that_would_be_another_in_the_optimizer_is_refused(how: str, tmp_path: Path) -> None:
    dtype, change, fact = BROKEN[how]
    source, theirs = trained("adam")
    state = named(source, theirs)
    for entry in state["state"].values():
        entry["exp_avg"].fill_(0.5)
        entry["exp_avg_sq"].fill_(0.5)
    weights = source.state_dict()
    saved({"model": weights, "optimizer": copy.deepcopy(state)}, tmp_path / "x.pth")
    model = Net().to(dtype)
    ckptool.load_into(model, tmp_path / "x.pth", optimizer=OPTIMIZERS["adam"](model))
    change(state)
    saved({"model": weights, "optimizer": state}, tmp_path / "y.pth")
    model = Net().to(dtype)
    before = copy.deepcopy(model.state_dict())

    with pytest.raises(ckptool.CkptoolError, match=fact):
        ckptool.load_into(model, tmp_path / "y.pth", optimizer=OPTIMIZERS["adam"](model))
    assert_same_tree(dict(model.state_dict()), dict(before))
