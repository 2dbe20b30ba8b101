"""A row in the table of wrappers is all that stripping, loading and checking need: opacus' GradSampleModule."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ckptool import check, load_into, migrate

PATH = "opacus.grad_sample.grad_sample_module"


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Return a model in opacus' own wrapper where it is installed, else in one of its name, path and shape."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    try:
        from opacus.grad_sample.grad_sample_module import GradSampleModule
    except ImportError:
        for name in ("opacus", "opacus.grad_sample", PATH):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        outer = _stand_in()
        outer._module = model
        model.register_forward_hook(outer.hook)  # as opacus does, so the model refers to its wrapper
        return outer
    return GradSampleModule(model)  # type: ignore[no-any-return]


def _stand_in() -> Any:
    class GradSampleModule(nn.Module):
        def hook(self, module: nn.Module, args: object, output: object) -> None: ...

    GradSampleModule.__module__, GradSampleModule.__qualname__ = PATH, "GradSampleModule"
    vars(sys.modules[PATH])["GradSampleModule"] = GradSampleModule
    return GradSampleModule()


def test_names_are_stripped_of_it(wrapped: nn.Module, tmp_path: Path) -> None:
    torch.save(wrapped.state_dict(), tmp_path / "a.pth")
    migrate(tmp_path / "a.pth", tmp_path / "b.pth", strip_wrappers=True)

    nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).load_state_dict(torch.load(tmp_path / "b.pth"), strict=True)


def test_a_whole_model_stays_in_it_and_its_weights_come_out(wrapped: nn.Module, tmp_path: Path) -> None:
    torch.save(wrapped, tmp_path / "a.pth")
    whole = migrate(tmp_path / "a.pth", tmp_path / "whole.pth", strip_wrappers=True)
    migrate(tmp_path / "a.pth", tmp_path / "weights.pth", form="state_dict", strip_wrappers=True)
    state = wrapped.state_dict()
    same = torch.load(tmp_path / "whole.pth", weights_only=False).state_dict()
    bare = torch.load(tmp_path / "weights.pth")

    assert any("nothing was stripped" in note for note in whole.notes)
    assert list(same) == list(state)
    assert [f"_module.{name}" for name in bare] == list(state)


def test_it_is_seen_through_by_load_into(wrapped: nn.Module, tmp_path: Path) -> None:
    torch.save(wrapped.state_dict(), tmp_path / "a.pth")
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    report = load_into(model, tmp_path / "a.pth")

    assert [str(change) for change in report.changes] == ["--strip-wrappers"]
    assert torch.equal(model[0].weight, wrapped.state_dict()["_module.0.weight"])


def test_check_says_who_added_it(wrapped: nn.Module, tmp_path: Path) -> None:
    torch.save(wrapped.state_dict(), tmp_path / "a.pth")
    (finding,) = (one for one in check(tmp_path / "a.pth").findings if one.code == "CK301")

    assert "'_module.', which opacus' GradSampleModule added" in finding.message
    assert (finding.command or "").endswith("--strip-wrappers")


@pytest.mark.parametrize(("options", "kept"), [({"strip_module": True}, 2), ({"rename": [r"bias$=b"]}, 1)], ids=str)
@pytest.mark.parametrize("how", ["params", "param_names"])
def test_an_optimizer_that_keeps_the_old_names_is_named(how: str, options: Any, kept: int, tmp_path: Path) -> None:
    weights = {"module.weight": torch.ones(2, 2), "module.bias": torch.ones(2)}
    state: dict[str, Any] = {"state": {}, "param_groups": [{"params": [0, 1], "lr": 0.1, how: list(weights)}]}
    torch.save({"model": weights, "optimizer": state}, tmp_path / "a.pth")
    report = migrate(tmp_path / "a.pth", tmp_path / "b.pth", **options)
    assert [f"keeps the old names of {kept}: " in note for note in report.notes if "old names" in note] == [True]
    state["param_groups"][0] = {"params": [0, 1], "lr": 0.1}
    torch.save({"model": weights, "optimizer": state}, tmp_path / "c.pth")
    assert "old names" not in str(migrate(tmp_path / "c.pth", tmp_path / "d.pth", **options))


@pytest.mark.parametrize("options", [{"strip_module": True}, {"strip_wrappers": True}], ids=str)
def test_the_report_of_a_whole_model_in_data_parallel_speaks_of_the_model(options: Any, tmp_path: Path) -> None:
    torch.save(nn.DataParallel(nn.Sequential(nn.Linear(2, 3))), tmp_path / "a.pth")
    whole = migrate(tmp_path / "a.pth", tmp_path / "whole.pth", **options)
    bare = migrate(tmp_path / "a.pth", tmp_path / "bare.pth", form="state_dict", **options)
    same = migrate(tmp_path / "a.pth", tmp_path / "same.pth", form="state_dict")

    assert dict(whole.renamed) == {f"module.0.{name}": f"0.{name}" for name in ("weight", "bias")}
    assert not [note for note in whole.notes if "no name is changed" in note]
    assert "it holds weights alone: to load them, build torch.nn.modules.container.Sequential first" in bare.notes
    assert any("build torch.nn.parallel.data_parallel.DataParallel first" in note for note in same.notes)
