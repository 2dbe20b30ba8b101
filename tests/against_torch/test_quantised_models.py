"""Whole models that were quantised: the names and values of their ``state_dict()``, from the file alone."""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.nn
import torch.ao.quantization as ao
from torch import nn

import ckptool
from ckptool.checkpoints import modules
from ckptool.errors import IncompleteWeights, UnsupportedFeature
from ckptool.loading.extra_state import pack
from tests.loading.loadable import QUICK
from tests.scale import exhaustive

pytestmark = pytest.mark.filterwarnings("ignore")


class Static(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
        self.convs = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.line = nn.Conv1d(4, 4, 1)
        self.act = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
        self.head = nn.Linear(5, 2)
        self.add = torch.ao.nn.quantized.FloatFunctional()
        self.norm = nn.LayerNorm(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convs(self.quant(x))
        x = self.line(self.add.add(x, x).flatten(2)).mean(2)
        return self.dequant(self.norm(self.head(self.act(x))))  # type: ignore[no-any-return]


class Dynamic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.lstm, self.gru = nn.LSTM(4, 3, 2, bidirectional=True), nn.GRU(6, 3)
        self.cells = nn.ModuleList([nn.LSTMCell(4, 3), nn.GRUCell(4, 3), nn.RNNCell(4, 3)])
        self.head = nn.Linear(3, 2, bias=False)


@cache
def static() -> nn.Module:
    model = Static().eval()
    ao.fuse_modules(model, [["convs.0", "convs.1"], ["convs.2", "convs.3"], ["act.0", "act.1"]], inplace=True)
    model.qconfig = QUICK
    ao.prepare(model, inplace=True)
    model(torch.randn(2, 3, 6, 6))
    return ao.convert(model)  # type: ignore[no-any-return]


@cache
def dynamic(dtype: torch.dtype = torch.qint8) -> nn.Module:
    layers = {nn.LSTM, nn.GRU, nn.Linear, nn.LSTMCell, nn.GRUCell, nn.RNNCell}
    return ao.quantize_dynamic(Dynamic(), layers, dtype=dtype)  # type: ignore[no-any-return]


@cache
def embeddings() -> nn.Module:
    model = nn.ModuleDict({"a": nn.Embedding(6, 8), "b": nn.EmbeddingBag(6, 8, mode="sum"), "c": nn.Embedding(6, 8)})
    model["c"].qconfig = ao.float_qparams_weight_only_qconfig_4bit
    model.qconfig = ao.float_qparams_weight_only_qconfig
    mapping = {nn.Embedding: torch.ao.nn.quantized.Embedding, nn.EmbeddingBag: torch.ao.nn.quantized.EmbeddingBag}
    ao.prepare(model, inplace=True)
    return ao.convert(model, mapping=mapping)  # type: ignore[no-any-return]


def reference() -> nn.Module:
    made = torch.ao.nn.quantized.reference.Linear.from_float(
        nn.Linear(3, 2), {"qscheme": torch.per_tensor_affine, "dtype": torch.qint8, "scale": 0.1, "zero_point": 2}
    )
    return nn.Sequential(made, nn.Linear(2, 2))


@cache
def fx() -> nn.Module:
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    example = torch.randn(2, 4)
    mapping = ao.QConfigMapping().set_global(QUICK)
    prepared = prepare_fx(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), mapping, (example,))
    prepared(example)
    return convert_fx(prepared)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "static": static,
    "dynamic": dynamic,
    "dynamic, of half floats": lambda: dynamic(torch.float16),
    "embeddings": embeddings,
    "reference modules": reference,
    "fx": fx,
    "a module alone": lambda: static().convs[0],
}


def same(real: Any, found: Any) -> bool:
    """Say whether two values of state dicts are the same, bit for bit."""
    if isinstance(real, torch.ScriptObject):
        return same(real.__getstate__(), found.__getstate__())  # type: ignore[attr-defined]
    if isinstance(real, torch.Tensor):
        if (real.dtype, real.shape, real.is_quantized) != (found.dtype, found.shape, found.is_quantized):
            return False
        if real.is_quantized:
            return repr(real) == repr(found) and torch.equal(real.int_repr(), found.int_repr())
        return torch.equal(real, found)
    if isinstance(real, tuple | list):
        return len(real) == len(found) and all(map(same, real, found))
    return bool(real == found)


CASES = [(name, container) for container in ("zip", "legacy") for name in MODELS]
CHEAP = {
    ("static", "zip"),
    ("dynamic", "zip"),
    ("embeddings", "zip"),
    ("reference modules", "zip"),
    ("static", "legacy"),
}


@pytest.mark.parametrize(
    ("name", "container"), [pytest.param(*case, marks=() if case in CHEAP else exhaustive) for case in CASES]
)
def test_a_migrated_state_dict_is_the_one_that_the_model_gives(name: str, container: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    torch.save(model, tmp_path / "whole.pt", _use_new_zipfile_serialization=container == "zip")
    real = model.state_dict()

    report = ckptool.migrate(tmp_path / "whole.pt", tmp_path / "weights.pt", form="state_dict", keep_calls=True)
    found = torch.load(tmp_path / "weights.pt", weights_only=False)

    assert list(found) == list(real)
    assert all(same(real[key], found[key]) for key in real)
    assert found._metadata == real._metadata
    assert not report.dropped
    assert model.load_state_dict(found).missing_keys == []


@pytest.mark.parametrize("name", [one for one in MODELS if one not in ("fx", "a module alone")])
def test_a_state_dict_is_loaded_as_the_model_gives_it(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    torch.save(model, tmp_path / "whole.pt")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    real = model.state_dict()

    for path in ("whole.pt", "weights.pt"):
        found = ckptool.load(tmp_path / path)

        assert list(found) == list(real)
        assert all(same(real[key], found[key]) for key in real)
    with (
        ckptool.open_checkpoint(tmp_path / "whole.pt") as whole,
        ckptool.open_checkpoint(tmp_path / "weights.pt") as flat,
    ):
        assert list(whole.tensors) == list(flat.tensors)
    assert ckptool.diff(tmp_path / "whole.pt", tmp_path / "weights.pt").same


def test_a_quantised_model_is_filled_from_a_whole_one(tmp_path: Path) -> None:
    model, other = static(), copy.deepcopy(static())
    for scaled in (other.quant, other.norm, other.convs[0]):
        scaled.scale *= 2
    torch.save(model, tmp_path / "whole.pt")

    ckptool.load_into(other, tmp_path / "whole.pt")

    assert all(same(value, other.state_dict()[key]) for key, value in model.state_dict().items())


class Cells(nn.Module):
    """Nothing but packed weights: its state dict has no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(4, 3), nn.GRUCell(4, 3)])
        self.gru = nn.GRU(4, 3)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [*self.cells[0](x), self.cells[1](x), *self.gru(x[None])]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 3, 2, bidirectional=True), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.head(self.lstm(x[None])[0])]


@pytest.mark.parametrize("kind", [Cells, Recurrent])
@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
@pytest.mark.parametrize("whole", [True, False])
def test_packed_recurrent_layers_are_filled(
    kind: type[nn.Module], dtype: torch.dtype, whole: bool, tmp_path: Path
) -> None:
    layers = {nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.Linear}
    model, other = (ao.quantize_dynamic(kind(), layers, dtype=dtype) for _ in range(2))
    torch.save(model if whole else model.state_dict(), tmp_path / "saved.pt")

    ckptool.load_into(other, tmp_path / "saved.pt")

    x = torch.randn(5, 4)
    assert all(map(torch.equal, model(x), other(x)))
    assert all(same(value, other.state_dict()[key]) for key, value in model.state_dict().items())


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    WEIGHT = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8)
    CHANNELS = torch.quantize_per_channel(torch.ones(3, 0), torch.ones(0), torch.zeros(0).long(), 1, torch.qint8)
    PACKED = torch.ops.quantized.linear_prepack(WEIGHT, None)


@pytest.mark.parametrize(
    ("name", "content"),
    {
        "no pair": ("quantized.LinearPackedParamsBase", [WEIGHT]),
        "no tensor": ("quantized.LinearPackedParamsBase", ["weight", None]),
        "one dimension": ("quantized.LinearPackedParamsBase", [WEIGHT[0], None]),
        "another length": ("quantized.LinearPackedParamsBase", [WEIGHT, torch.ones(5)]),
        "no columns": ("quantized.LinearPackedParamsBase", [CHANNELS, None]),
        "a view": ("quantized.LinearPackedParamsBase", [torch.ones(1, 1).expand(1 << 20, 1 << 20), None]),
        "no cell": ("rnn.CellParamsBase", ["quantized_dynamic"]),
        "a cell of old": ("rnn.CellParamsBase", ["quantized", [], [], [], [PACKED, PACKED]]),
        "cells of tensors": ("rnn.CellParamsBase", ["quantized_fp16", [], [], [], [WEIGHT, WEIGHT]]),
        "too few": ("rnn.CellParamsBase", ["quantized_dynamic", [], [], [1], [PACKED, PACKED]]),
    }.values(),
)
def test_what_no_layer_packs_is_refused(name: str, content: Any) -> None:
    with pytest.raises(UnsupportedFeature, match=rf"^packed weights of {name}: "):
        pack(name, content)


@pytest.mark.parametrize("whole", [True, False])
def test_what_only_code_can_make_is_left_out_only_if_that_was_asked_for(whole: bool, tmp_path: Path) -> None:
    state = {"layer.scale": torch.ones(1), "layer.packed": embeddings()["a"]._packed_params._packed_weight}
    torch.save({"model": state} if whole else state, tmp_path / "saved.pt")

    with pytest.raises(IncompleteWeights) as caught:
        ckptool.load(tmp_path / "saved.pt")

    assert caught.value.missing == ("layer.packed",)
    left = ckptool.load(tmp_path / "saved.pt", allow_missing=True)
    assert list(left) == ["layer.scale"]


@exhaustive
def test_every_class_of_torch_that_saves_in_code_is_known() -> None:
    """A class without a rule would lose what it adds."""
    overriding = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packages = [torch.ao.nn, importlib.import_module("torch.nn")]
        found = [name for one in packages for name in _modules_below(one)]
        for name in found:
            for cls in vars(importlib.import_module(name)).values():
                if inspect.isclass(cls) and issubclass(cls, nn.Module) and cls.__module__.startswith("torch."):
                    overriding += [cls] if cls._save_to_state_dict is not nn.Module._save_to_state_dict else []
    bases = ("_", "RNNCellBase", "RNNBase", "ReferenceQuantizedModule", "Lazy")
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in overriding if not cls.__name__.startswith(bases)}

    assert len(names) > 30
    assert [name for name in names if not modules._fields(name)] == []
    assert all(modules._is_quantized(name) for name in names)


def _modules_below(package: Any) -> list[str]:
    return [one.name for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}.") if not one.ispkg]
