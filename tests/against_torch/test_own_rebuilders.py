"""Tensors that a function of another library makes: known ones are read, of all others nothing is lost in silence."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import ckptool


def _rebuild_manifold_tensor(*arguments: Any, build_fn: Any) -> Any:
    tensor = build_fn(*arguments[:-4])
    return arguments[-3](tensor, manifold=arguments[-2], requires_grad=arguments[-1])


class ManifoldTensor(torch.Tensor):
    """Made and pickled as geoopt's own of 0.5."""

    def __new__(cls, data: torch.Tensor, manifold: Any = None, requires_grad: bool = False) -> Any:
        made = torch.Tensor._make_subclass(cls, data.detach(), requires_grad)
        made.manifold = manifold  # type: ignore[attr-defined]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        build, arguments = super().__reduce_ex__(protocol)
        rebuild = functools.partial(_rebuild_manifold_tensor, build_fn=build)
        return rebuild, (*arguments, {}, self.__class__, self.manifold, self.requires_grad)  # type: ignore[attr-defined]


class ManifoldParameter(ManifoldTensor, nn.Parameter):  # type: ignore[misc]
    pass


class Curved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ball = ManifoldParameter(torch.randn(4, 2), {"c": torch.ones(1)}, True)
        self.layer = nn.Linear(2, 2)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = ModuleType("geoopt"), ModuleType("geoopt.tensor")
    for one in (_rebuild_manifold_tensor, ManifoldTensor, ManifoldParameter):
        monkeypatch.setattr(one, "__module__", "geoopt.tensor")
        setattr(module, one.__name__, one)
    monkeypatch.setitem(sys.modules, "geoopt", package)
    monkeypatch.setitem(sys.modules, "geoopt.tensor", module)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_of_geoopt_are_read_and_loaded(zipped: bool, tmp_path: Path) -> None:
    model, path = Curved(), tmp_path / "made.pth"
    plain = ManifoldTensor(torch.randn(2, 3), "Euclidean")
    torch.save({"model": model, "x": plain, "y": torch.ones(1)}, path, _use_new_zipfile_serialization=zipped)
    with ckptool.open_checkpoint(path) as checkpoint:
        assert checkpoint.tensors["x"].info.subclass == "geoopt.tensor.ManifoldTensor"
        assert torch.equal(checkpoint.tensors["x"].torch(), plain.as_subclass(torch.Tensor))
        assert checkpoint.tensors["model.ball"].info.kind == "parameter"
    found = ckptool.load(path)
    assert list(found) == ["ball", "layer.weight", "layer.bias"]
    assert all(
        torch.equal(found[name], tensor.as_subclass(torch.Tensor)) for name, tensor in model.state_dict().items()
    )
    ckptool.migrate(path, tmp_path / "new.safetensors")
    ckptool.migrate(path, tmp_path / "same.pth", form="same", keep_calls=True)
    again = torch.load(tmp_path / "same.pth", weights_only=False)
    assert type(again["x"]) is ManifoldTensor
    assert torch.equal(again["x"], plain)
    assert torch.equal(again["model"].ball, model.ball)


@pytest.mark.parametrize("beside", [{}, {"y": torch.ones(2)}])
def test_weights_that_only_an_unknown_function_can_make_are_refused(
    beside: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    state = {"w": torch.ones(2), "x": ManifoldTensor(torch.randn(2, 3)), **beside}
    torch.save(state, tmp_path / "made.pth")
    with pytest.raises(ckptool.IncompleteWeights, match=r"'x' holds tensors in .*_rebuild_manifold_tensor"):
        ckptool.load(tmp_path / "made.pth")
    assert list(ckptool.load(tmp_path / "made.pth", allow_missing=True)) == ["w", *beside]
    with pytest.raises(ckptool.MigrationRefused, match="'x'"):
        ckptool.migrate(tmp_path / "made.pth", tmp_path / "new.pth", form="state_dict")
