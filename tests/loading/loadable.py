"""Small models that take part in loading in every way that there is, by what is special about them."""

from __future__ import annotations

import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.utils.prune
from torch import nn
from torch.nn.utils import parametrizations, parametrize

MODELS: dict[str, Callable[[], nn.Module]] = {}


def model(name: str) -> Callable[[Any], Any]:
    """Note a function or class that builds a model."""

    def note(build: Any) -> Any:
        MODELS[name] = build
        return build

    return note


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


class Base(nn.Module):
    """One parameter and one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.randn(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


MODELS |= {
    "linear": lambda: nn.Linear(3, 2),
    "no tensors": nn.Softmax,
    "no tensors, nested": lambda: nn.Sequential(nn.ReLU(), nn.InstanceNorm1d(3)),
    "sequential": plain,
    "batch norm": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)),
    "instance norm": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "embedding bag": lambda: nn.EmbeddingBag(5, 3),
    "dictionaries": lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ModuleDict({"c": nn.PReLU()})}),
    "lists": lambda: nn.ModuleList([nn.Linear(2, 2), nn.ModuleList([nn.PReLU()])]),
    "parameter list": lambda: nn.ParameterList([torch.randn(2), torch.randn(3, 1)]),
    "parameter dict": lambda: nn.ParameterDict({"x": torch.randn(2), "y": nn.Parameter(torch.randn(1))}),
    "complex": lambda: nn.Linear(3, 2, dtype=torch.complex64),
    "halves": lambda: nn.Linear(3, 2, dtype=torch.bfloat16),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.ReLU()),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4))),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "spectral norm of old": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4))),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(2)),
    "lazy convolution": lambda: nn.Sequential(
        nn.LazyConv2d(2, 3), nn.LazyConvTranspose2d(3, 2), nn.LazyInstanceNorm2d()
    ),
    "compiled": lambda: torch.compile(plain()),
    "data parallel": lambda: nn.DataParallel(plain()),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(plain()),
}  # fmt: skip


@model("weight norm of old")
def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.ReLU())


@model("weight norm of old, after a call")
def called_weight_norm() -> nn.Module:
    found = old_weight_norm()
    if not found[0].bias.is_meta:
        found(torch.ones(1, 3))  # its weight is computed, and cannot be copied
    return found


@model("spectral norm of old, after a call")
def called_spectral_norm() -> nn.Module:
    found = nn.utils.spectral_norm(nn.Linear(3, 4))
    if not found.bias.is_meta:
        found(torch.ones(1, 3))
    return found


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


@model("parametrized twice")
def parametrized() -> nn.Module:
    found = nn.Linear(3, 2)
    parametrize.register_parametrization(found, "weight", Doubled())
    parametrize.register_parametrization(found, "weight", Doubled())
    return found


@model("pruned")
def pruned() -> nn.Module:
    found = nn.Linear(3, 4)
    torch.nn.utils.prune.random_unstructured(found, "weight", 0.5)  # type: ignore[no-untyped-call]
    return found


@model("tied")
def tied() -> nn.Module:
    found = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    found["head"].weight = found["embedding"].weight  # type: ignore[assignment]
    return found


@model("one module twice")
def twice() -> nn.Module:
    shared = nn.Linear(3, 3)
    return nn.Sequential(shared, nn.ReLU(), shared)


@model("views of one storage")
def views() -> nn.Module:
    found, flat = nn.Module(), torch.randn(6)
    found.register_buffer("first", flat[:3])
    found.register_buffer("second", flat[2:])
    return found


@model("a buffer that is not saved")
class Unsaved(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.ones(2), persistent=False)


@model("a module that is None")
class WithoutModule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_module("head", None)
        self.register_parameter("bias", None)
        self.register_buffer("mask", None)


@model("an attribute called module")
class WithModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = plain()


@model("a lazy attribute called module")
class WithLazyModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.LazyLinear(2)


@model("extra state")
class Extra(Base):
    def __init__(self) -> None:
        super().__init__()
        self.extra: Any = {"steps": 7, "names": ["a", "b"]}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@model("extra state of tensors")
class ExtraTensors(Extra):
    def __init__(self) -> None:
        super().__init__()
        self.extra = {"mean": torch.randn(4), "sum": 0.0}

    def set_extra_state(self, state: Any) -> None:
        self.extra = {"mean": state["mean"].clone(), "sum": float(state["mean"].sum())}  # which needs values


@model("nothing but extra state")
class OnlyExtra(nn.Module):
    def get_extra_state(self) -> Any:
        return 5

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@model("a hook before that renames")
class Renames(Base):
    def __init__(self) -> None:
        super().__init__()
        self._register_load_state_dict_pre_hook(self.rename)

    def rename(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "old" in state:
            state[prefix + "weight"] = state.pop(prefix + "old")


@model("a hook before that looks at values")
class Looks(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self.look)

    def look(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "weight" in state and bool((state[prefix + "weight"] > 100).any()):
            raise ValueError("too large")


@model("a hook before that writes into what is loaded")
class Writes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.tensor(3.0))
        self._register_load_state_dict_pre_hook(self.write)

    def write(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("weight", "number"):
            if prefix + name in state:
                state[prefix + name].mul_(2)


@model("a hook before that writes, and needs values")
class WritesValues(Writes):
    def write(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("weight", "number"):
            if prefix + name in state:
                state[prefix + name].mul_(float(state[prefix + name].sum()))


@model("a hook before, a function that has the model")
def closure() -> nn.Module:
    found = Base()
    found.seen = None

    def note(state: dict[str, Any], prefix: str, *rest: Any) -> None:
        found.seen = sorted(state)

    found._register_load_state_dict_pre_hook(note)
    return found


@model("a hook before that resizes")
class Resizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.randn(0))
        self._register_load_state_dict_pre_hook(self.resize)

    def resize(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "seen" in state:
            self.seen = state[prefix + "seen"].new_empty(state[prefix + "seen"].shape)


@model("a hook after that computes")
class Computes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self.register_load_state_dict_post_hook(lambda module, keys: module.compute())

    def compute(self) -> None:
        self.total = float(self.weight.sum())


@model("a hook after that forgives")
class Forgives(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(self.forgive)

    def forgive(self, module: nn.Module, keys: Any) -> None:
        keys.unexpected_keys.clear()
        keys.missing_keys.clear()


@model("an override of loading")
class Overrides(Base):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "weight" in state:
            state[prefix + "weight"] = state[prefix + "weight"] + 1
        super()._load_from_state_dict(state, prefix, *rest)


@model("an override that touches data")
class Touches(Base):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "weight" in state:
            self.largest = state[prefix + "weight"].max().item()
        super()._load_from_state_dict(state, prefix, *rest)


@model("an override of old, without a result")
class NoResult(Base):
    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:  # type: ignore[override]
        super().load_state_dict({name: one for name, one in state_dict.items() if name != "epoch"}, strict)


@model("an override without options")
class NoOptions(Base):
    def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict(state_dict)


@model("an override of one object")
def patched() -> nn.Module:
    found = Base()

    def load_state_dict(self: nn.Module, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return nn.Module.load_state_dict(self, dict(state), strict, assign)

    found.load_state_dict = types.MethodType(load_state_dict, found)  # type: ignore[method-assign]
    return found


@model("names that only the override knows")
class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = plain()

    def state_dict(self, *given: Any, **options: Any) -> Any:
        return OrderedDict((f"module.{name}", one) for name, one in self.inner.state_dict().items())

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        cut = {name[len("module.") :]: one for name, one in state_dict.items()}
        return self.inner.load_state_dict(cut, strict, assign)


@model("a saver that leaves names out")
class SavesLess(Base):
    def state_dict(self, *given: Any, **options: Any) -> Any:
        return OrderedDict(
            (name, one) for name, one in super().state_dict(*given, **options).items() if "count" in name
        )


@model("a saver without arguments")
class SavesBare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = plain()

    def state_dict(self) -> Any:  # type: ignore[override]
        return nn.Module.state_dict(self)


@model("a saver that saves more")
class SavesMore(Base):
    """As mmengine's models, which save what others do not."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "copied"] = self.weight.detach() * 2

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.copied = state.pop(prefix + "copied", None)
        super()._load_from_state_dict(state, prefix, *rest)


@model("a saver with a hook")
def saving_hook() -> nn.Module:
    found = Base()

    def rename(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "saved"] = state.pop(prefix + "weight")

    found._register_state_dict_hook(rename)
    return found


@model("something that cannot be copied")
class Locked(Renames):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class GraphLinear(nn.Module):
    """A layer without a size for its input, as PyTorch Geometric has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        lazy = inputs < 0
        self.weight: Any = nn.UninitializedParameter() if lazy else nn.Parameter(torch.randn(outputs, inputs))  # type: ignore[call-arg]
        self.bias = nn.Parameter(torch.randn(outputs))
        self._register_load_state_dict_pre_hook(self.materialise)
        if lazy:
            self._hook = self.register_forward_pre_hook(self.infer)

    @torch.no_grad()
    def infer(self, module: nn.Module, given: Any) -> None:
        if isinstance(self.weight, nn.UninitializedParameter):
            self.inputs = given[0].size(-1)
            self.weight.materialize((self.outputs, self.inputs))
            nn.init.normal_(self.weight)
        self._hook.remove()
        del self._hook

    def materialise(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        weight = state.get(prefix + "weight")
        if weight is not None and isinstance(self.weight, nn.UninitializedParameter):
            self.inputs = weight.size(-1)
            self.weight.materialize((self.outputs, self.inputs))
            self._hook.remove()
            del self._hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


MODELS["lazy as in graph networks"] = lambda: nn.Sequential(GraphLinear(-1, 4), nn.ReLU(), GraphLinear(-1, 2))


class GraphLinearApart(GraphLinear):
    """The same, which also has its own ways of being copied and saved."""

    def __deepcopy__(self, memo: Any) -> Any:
        import copy

        found = type(self)(self.inputs, self.outputs)
        if self.inputs > 0:
            found.weight = copy.deepcopy(self.weight, memo)
        found.bias = copy.deepcopy(self.bias, memo)
        return found

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        is_lazy = isinstance(self.weight, nn.UninitializedParameter)
        destination[prefix + "weight"] = self.weight if keep_vars or is_lazy else self.weight.detach()
        destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()


MODELS["lazy with copies of its own"] = lambda: nn.Sequential(GraphLinearApart(-1, 4), GraphLinearApart(-1, 2))


def _quantised(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def quiet() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return build()

    return quiet


QUICK = torch.ao.quantization.QConfig(
    torch.ao.quantization.default_observer, torch.ao.quantization.default_per_channel_weight_observer
)
"""As by default, but without the search for the best range of activations, which takes a second for each layer."""


def _static() -> nn.Module:
    net = torch.ao.quantization.QuantWrapper(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)))
    net.eval().qconfig = QUICK  # type: ignore[assignment]
    torch.ao.quantization.prepare(net, inplace=True)
    net(torch.rand(1, 1, 4, 4))
    return torch.ao.quantization.convert(net, inplace=True)  # type: ignore[no-any-return]


def _prepared() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 2)).train()
    net.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    found = torch.ao.quantization.prepare_qat(net)
    found(torch.rand(4, 3))
    return found  # type: ignore[no-any-return]


def _dynamic(dtype: torch.dtype, build: Callable[[], nn.Module], kinds: set[Any]) -> Callable[[], nn.Module]:
    return lambda: torch.ao.quantization.quantize_dynamic(build(), kinds, dtype=dtype)


MODELS |= {
    "quantised": _quantised(_static),
    "quantised, in training": _quantised(_prepared),
    "quantised dynamically": _quantised(_dynamic(torch.qint8, plain, {nn.Linear})),
    "quantised dynamically, in halves": _quantised(_dynamic(torch.float16, plain, {nn.Linear})),
    "quantised dynamically, an lstm": _quantised(
        _dynamic(torch.qint8, lambda: nn.Sequential(nn.LSTM(3, 4)), {nn.LSTM})
    ),
}  # fmt: skip
