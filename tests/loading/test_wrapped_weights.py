"""Averages and other wrappers of libraries: the weights come out under the model's own names, and nothing else does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool


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
    """As tensordict has it: what it calls ``module`` is no wrapper's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def averages() -> dict[str, tuple[nn.Module, nn.Module]]:
    """Return averaged models, each with the model in it; the libraries' own where they are installed."""
    made = [ExponentialMovingAverage(net()), EMA(net()), EMA(net(), include_online_model=False)]
    made += [torch.optim.swa_utils.AveragedModel(net())]
    made += [torch.optim.swa_utils.AveragedModel(nn.DataParallel(net()))]
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
    found = {}
    for number, one in enumerate(made):
        inner: Any = one.ema_model if hasattr(one, "ema_model") else one.module
        inner = inner.module if isinstance(inner, nn.DataParallel) else inner
        with torch.no_grad():
            inner[0].weight.add_(1)
        found[f"{number} {type(one).__module__}.{type(one).__name__}"] = (one, inner)
    return found


def equal(found: Any, model: nn.Module) -> bool:
    state = model.state_dict()
    return list(found) == list(state) and all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.parametrize("name", averages())
@pytest.mark.filterwarnings("ignore")  # of libraries
def test_the_average_comes_out_alone(name: str, tmp_path: Path) -> None:
    averaged, inner = averages()[name]
    raw = net()
    torch.save({"model": raw.state_dict(), "ema": averaged.state_dict()}, tmp_path / "both.pth")
    torch.save(averaged.state_dict(), tmp_path / "alone.pth")

    assert equal(ckptool.load(tmp_path / "both.pth"), raw)
    assert equal(ckptool.load(tmp_path / "both.pth", weights="ema"), inner)
    assert equal(ckptool.load(tmp_path / "alone.pth"), inner)
    for path, options in (("both.pth", {"weights": "ema"}), ("alone.pth", {})):
        ckptool.migrate(tmp_path / path, tmp_path / "o.safetensors", strip_wrappers=True, force=True, **options)  # type: ignore[arg-type]
        assert equal(dict(sorted(ckptool.load(tmp_path / "o.safetensors").items())), inner) or equal(
            ckptool.load(tmp_path / "o.safetensors"), inner
        )
        target = net()
        ckptool.load_into(target, tmp_path / path, **options)  # type: ignore[arg-type]
        assert equal(target.state_dict(), inner)


@pytest.mark.parametrize("name", averages())
def test_nothing_of_what_training_goes_on_with_is_lost(name: str, tmp_path: Path) -> None:
    averaged, _ = averages()[name]
    state = averaged.state_dict()
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

    assert (
        {*torch.load(tmp_path / "b.pth")} == {*state} == {*ckptool.load(tmp_path / "a.pth", weights="ema", strip=None)}
    )
    assert len(report.dropped) == len(net().state_dict())


@pytest.mark.parametrize("model", [TensorDictModule(net()), nn.Sequential(TensorDictModule(net()))])
def test_a_module_that_is_called_module_stays_where_the_model_is_there(model: nn.Module, tmp_path: Path) -> None:
    state = model.state_dict()
    for wrapped in (model, nn.DataParallel(model), torch.optim.swa_utils.AveragedModel(nn.DataParallel(model))):
        torch.save(wrapped, tmp_path / "a.pth")
        assert list(ckptool.load(tmp_path / "a.pth")) == list(state)
        ckptool.migrate(tmp_path / "a.pth", tmp_path / "b.pth", form="state_dict", strip_wrappers=True, force=True)
        assert list(torch.load(tmp_path / "b.pth")) == list(state)
    torch.save(model, tmp_path / "a.pth")
    assert "CK301" not in {one.code for one in ckptool.check(tmp_path / "a.pth").findings}


def test_a_counter_of_another_name_is_no_wrappers(tmp_path: Path) -> None:
    state = {f"module.{name}": value for name, value in net().state_dict().items()} | {"count": torch.tensor(3)}
    torch.save(state, tmp_path / "a.pth")

    assert list(ckptool.load(tmp_path / "a.pth")) == list(state)
