"""Averages and other wrappers of libraries: the weights come out under the model's own names, and nothing else does."""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckptool
from tests.program import invoke
from tests.scale import in_turn


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class ExponentialMovingAverage(nn.Module):
    """As mmengine has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.register_buffer("steps", torch.tensor(3))


class EMA(nn.Module):
    """As ema-pytorch has it."""

    def __init__(self, model: nn.Module, *, include_online_model: bool = True) -> None:
        super().__init__()
        if include_online_model:
            self.online_model = model
        self.ema_model = copy.deepcopy(model)
        self.register_buffer("initted", torch.tensor(True))
        self.register_buffer("step", torch.tensor(3))


class TensorDictModule(nn.Module):
    """As tensordict has it: what it calls ``module`` is not a wrapper's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def averages() -> dict[str, tuple[dict[str, Any], nn.Module]]:
    """Return the state of averaged models, and the model in each; the libraries' own where they are installed."""
    made = [ExponentialMovingAverage(net()), EMA(net()), EMA(net(), include_online_model=False)]
    made += [AveragedModel(net()), AveragedModel(nn.DataParallel(net()))]
    try:
        from mmengine.model import ExponentialMovingAverage as Theirs

        made.append(Theirs(net()))
    except ImportError:
        pass
    try:
        import ema_pytorch

        made += [ema_pytorch.EMA(net()), ema_pytorch.EMA(net(), include_online_model=False)]
    except ImportError:
        pass
    found: dict[str, tuple[dict[str, Any], nn.Module]] = {}
    for number, one in enumerate(made):
        inner: Any = one.ema_model if hasattr(one, "ema_model") else one.module
        inner = inner.module if isinstance(inner, nn.DataParallel) else inner
        with torch.no_grad():
            inner[0].weight.add_(1)
        found[f"{number} {type(one).__module__}.{type(one).__name__}"] = (one.state_dict(), inner)
    inner = net()
    compiled = {f"module._orig_mod.{name}": value for name, value in inner.state_dict().items()}
    found["of a compiled model"] = (compiled | {"n_averaged": torch.tensor(1)}, inner)
    state, inner = found[next(name for name in found if name.endswith(".EMA"))]
    found["the average first"] = (dict(sorted(state.items(), key=lambda pair: "online" in pair[0])), inner)
    return found


def equal(found: Any, model: nn.Module) -> bool:
    state = model.state_dict()
    return list(found) == list(state) and all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.parametrize("name", averages())
@pytest.mark.filterwarnings("ignore")  # of libraries
def test_the_average_comes_out_alone(name: str, tmp_path: Path) -> None:
    state, inner = averages()[name]
    raw = net()
    torch.save({"model": raw.state_dict(), "ema": state}, tmp_path / "both.pth")
    torch.save(state, tmp_path / "alone.pth")

    assert equal(ckptool.load(tmp_path / "both.pth"), raw)
    assert equal(ckptool.load(tmp_path / "both.pth", weights="ema"), inner)
    assert equal(ckptool.load(tmp_path / "alone.pth"), inner)
    with pytest.raises(ckptool.WeightsNotFound):
        ckptool.load(tmp_path / "alone.pth", weights="raw")
    ways: list[tuple[str, dict[str, Any]]] = [("both.pth", {"weights": "ema"}), ("alone.pth", {"weights": "ema"})]
    for path, options in [*ways, ("alone.pth", {})]:
        ckptool.migrate(tmp_path / path, tmp_path / "o.safetensors", strip_wrappers=True, force=True, **options)
        found = ckptool.load(tmp_path / "o.safetensors")
        assert equal({one: found[one] for one in inner.state_dict()}, inner)
        assert len(found) == len(inner.state_dict())
        target = net()
        report = ckptool.load_into(target, tmp_path / path, **options)
        assert equal(target.state_dict(), inner)
        assert set(report.left_out) == {one for one in state if not one.startswith(("module.", "ema_model."))}
        assert f"left out {len(report.left_out)}: " in str(report)


@pytest.mark.parametrize(("nested", "name"), in_turn([False, True], averages()))
@pytest.mark.filterwarnings("ignore")
def test_the_prefix_of_averaged_weights_is_told_and_the_command_takes_it_off(
    name: str, nested: bool, tmp_path: Path
) -> None:
    state, inner = averages()[name]
    torch.save({"swa": state} if nested else state, tmp_path / "made.pth")
    (told,) = [one for one in ckptool.check(tmp_path / "made.pth").findings if one.code == "CK301"]
    beside = next(one for one in state if not one.startswith(("module.", "ema_model.")))
    assert f"but {beside}" in told.message
    assert not nested or "swa." not in told.message
    program, verb, source, *options = shlex.split(told.command or "")
    assert (program, verb) == ("ckptool", "migrate")
    assert invoke([verb, source, str(tmp_path / "out.pth"), *options]).exit_code == 0
    found = torch.load(tmp_path / "out.pth")
    assert equal(found.get("swa", found), inner)


@pytest.mark.parametrize("name", averages())
def test_nothing_of_what_training_goes_on_with_is_lost(name: str, tmp_path: Path) -> None:
    state, _ = averages()[name]
    torch.save({"model": nn.DataParallel(net()).state_dict(), "ema": state}, tmp_path / "both.pth")
    ckptool.migrate(tmp_path / "both.pth", tmp_path / "same.pth", form="same", strip_wrappers=True)
    again = torch.load(tmp_path / "same.pth")

    assert list(again["model"]) == list(net().state_dict())
    assert list(again["ema"]) == list(state)


def test_without_the_other_copy_names_are_kept(tmp_path: Path) -> None:
    averaged = EMA(net())
    torch.save({"ema": averaged.state_dict()}, tmp_path / "a.pth")
    report = ckptool.migrate(tmp_path / "a.pth", tmp_path / "b.pth", weights="ema")
    state = {name: value for name, value in averaged.state_dict().items() if not name.startswith("online_model.")}

    assert {*torch.load(tmp_path / "b.pth")} == {*state}
    assert {*ckptool.load(tmp_path / "a.pth", weights="ema", strip=None)} == {*state}
    assert len(report.dropped) == len(net().state_dict())


@pytest.mark.parametrize("model", [TensorDictModule(net()), nn.Sequential(TensorDictModule(net()))])
def test_a_module_that_is_called_module_stays_where_the_model_is_there(model: nn.Module, tmp_path: Path) -> None:
    state = model.state_dict()
    for wrapped in (model, nn.DataParallel(model), AveragedModel(nn.DataParallel(model))):
        torch.save(wrapped, tmp_path / "a.pth")
        assert list(ckptool.load(tmp_path / "a.pth")) == list(state)
        ckptool.migrate(tmp_path / "a.pth", tmp_path / "b.pth", form="state_dict", strip_wrappers=True, force=True)
        assert list(torch.load(tmp_path / "b.pth")) == list(state)
    torch.save(model, tmp_path / "a.pth")
    assert "CK301" not in {one.code for one in ckptool.check(tmp_path / "a.pth").findings}


@pytest.mark.parametrize(
    "names",
    [["n_averaged", "module.w", "head.w"], ["steps", "w"], ["n_averaged", "v.module.w"], ["module.w", "count"]],
)
def test_a_counter_alone_makes_no_average(names: list[str], tmp_path: Path) -> None:
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "made.pth")
    assert list(ckptool.load(tmp_path / "made.pth", weights="raw")) == names
    assert not [one for one in ckptool.check(tmp_path / "made.pth").findings if one.code == "CK301"]
