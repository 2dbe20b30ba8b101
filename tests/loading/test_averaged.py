"""Averaged models: found as such, their prefix told, and what goes with it said in reports."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ckptool
from tests.program import invoke
from tests.scale import in_turn


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def averaged() -> tuple[nn.Sequential, AveragedModel]:
    plain = model()
    found = AveragedModel(plain)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1.0)
    found.update_parameters(plain)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1.0)
    found.update_parameters(plain)
    return plain, found


def with_prefix(prefix: str, state: dict[str, Any], **counters: torch.Tensor) -> dict[str, Any]:
    return {**{f"{prefix}{name}": tensor for name, tensor in state.items()}, **counters}


ONE = torch.tensor(1)
KINDS: dict[str, Callable[[nn.Module, AveragedModel], dict[str, Any]]] = {
    "torch": lambda _, twin: twin.state_dict(),
    "mmengine": lambda _, twin: with_prefix("module.", twin.module.state_dict(), steps=ONE),
    "of a wrapped model": lambda _, twin: with_prefix("module.module.", twin.module.state_dict(), n_averaged=ONE),
    "of a compiled model": lambda _, twin: with_prefix("module._orig_mod.", twin.module.state_dict(), n_averaged=ONE),
    "ema-pytorch, the average first": lambda plain, twin: {
        **with_prefix("ema_model.", twin.module.state_dict()),
        **with_prefix("online_model.", plain.state_dict(), initted=ONE, step=ONE),
    },
    "ema-pytorch, as it saves": lambda plain, twin: {
        "initted": ONE,
        "step": ONE,
        **with_prefix("online_model.", plain.state_dict()),
        **with_prefix("ema_model.", twin.module.state_dict()),
    },
}


def run(command: str, folder: Path) -> Any:
    name, verb, source, *options = shlex.split(command)
    assert (name, verb) == ("ckptool", "migrate")
    assert invoke([verb, source, str(folder / "out.pth"), *options]).exit_code == 0
    return torch.load(folder / "out.pth")


@pytest.mark.parametrize(("nested", "kind"), in_turn([False, True], KINDS))
def test_the_prefix_of_averaged_weights_is_told_and_the_command_takes_it_off(
    kind: str, nested: bool, tmp_path: Path
) -> None:
    plain, twin = averaged()
    state = KINDS[kind](plain, twin)
    torch.save({"swa": state} if nested else state, tmp_path / "made.pth")
    (told,) = [one for one in ckptool.check(tmp_path / "made.pth").findings if one.code == "CK301"]
    beside = next(name for name in state if not name.startswith(("module.", "ema_model.")))
    assert f"but {beside}" in told.message
    assert not nested or "swa." not in told.message
    found = run(told.command or "", tmp_path)
    found = found.get("swa", found)
    assert found.keys() == twin.module.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in twin.module.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_averaged_weights_are_loaded_as_such_and_the_report_says_what_went_with_the_prefix(
    kind: str, tmp_path: Path
) -> None:
    plain, twin = averaged()
    state = KINDS[kind](plain, twin)
    torch.save(state, tmp_path / "made.pth")
    for choice in ("auto", "ema"):
        filled = model()
        report = ckptool.load_into(filled, tmp_path / "made.pth", weights=choice)
        expected = twin.module.state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in filled.state_dict().items())
        assert set(report.left_out) == {name for name in state if not name.startswith(("module.", "ema_model."))}
        assert f"left out {len(report.left_out)}: " in str(report)
    with pytest.raises(ckptool.WeightsNotFound):
        ckptool.load(tmp_path / "made.pth", weights="raw")


@pytest.mark.parametrize("names", [["n_averaged", "module.w", "head.w"], ["steps", "w"], ["n_averaged", "v.module.w"]])
def test_a_counter_alone_makes_no_average(names: list[str], tmp_path: Path) -> None:
    torch.save({name: torch.ones(2) for name in names}, tmp_path / "made.pth")
    assert list(ckptool.load(tmp_path / "made.pth", weights="raw")) == names
    assert not [one for one in ckptool.check(tmp_path / "made.pth").findings if one.code == "CK301"]


def test_a_report_says_what_took_part_in_loading(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.LazyLinear(3))
    saved(torch.ones(1, 2))
    torch.save(saved.state_dict(), tmp_path / "made.pth")
    empty, ran = nn.Sequential(nn.LazyLinear(3)), []
    empty.register_load_state_dict_post_hook(lambda module, keys: ran.append(keys))
    report = ckptool.load_into(empty, tmp_path / "made.pth")
    assert (len(ran), report.hooks) == (1, ("Sequential",))
    assert report.own_loading == "a hook of Sequential"
    assert "filled by load_state_dict(), for a hook of Sequential; hooks ran 1: Sequential" in str(report)
    plain = ckptool.load_into(nn.Sequential(nn.Linear(2, 3)), tmp_path / "made.pth")
    assert (plain.hooks, plain.own_loading, plain.left_out) == ((), None, ())
