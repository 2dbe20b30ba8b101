"""``load_into`` and ``LiveModel`` take what ``load_state_dict(torch.load())`` takes, with the same result."""

from __future__ import annotations

import inspect
import io
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from tests import where
from tests.loading.loadable import MODELS
from tests.loading.same import saved
from tests.scale import in_turn, some

pytestmark = pytest.mark.filterwarnings("ignore")

INPUTS = {
    "lazy": (2, 3),
    "lazy convolution": (1, 3, 8, 8),
    "lazy as in graph networks": (2, 3),
    "lazy with copies of its own": (2, 3),
    "a lazy attribute called module": (2, 3),
    "weight norm": (2, 3),
    "weight norm of old": (2, 3),
    "lstm": (2, 1, 3),
    "quantised dynamically": (2, 3),
    "quantised dynamically, in halves": (2, 3),
    "quantised dynamically, an lstm": (2, 1, 3),
    "spectral norm of old": (2, 3),
}
EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "as it is": lambda state: state,
    "a tensor more": lambda state: state | {"more": torch.ones(2)},
    "a text more": lambda state: state | {"nonsense": "nonsense"},
    "a number for a tensor": lambda state: state | dict.fromkeys(list(state)[:1], 1.5),
    "a tensor less": lambda state: dict(list(state.items())[1:]),
    "nothing": lambda state: {},
    "another shape": lambda state: state | {name: torch.ones(7, 7, 7) for name in list(state)[-1:]},
}
NO_META = {
    "orthogonal",
    "quantised",
    "quantised dynamically",
    "quantised dynamically, in halves",
    "quantised dynamically, an lstm",
}
"""They cannot be built on the meta device."""
LENIENT = {("averaged", "a tensor less"), ("tied", "a tensor less"), ("one module twice", "a tensor less")}
"""torch refuses files that lack what models count themselves, or one name of a tensor that they have under another."""
REFUSED = {
    # nothing in the file is the model's, and nothing was asked for but that it fits
    ("a saver with a hook", "a tensor less", False),
    ("a saver that leaves names out", "a tensor less", False),
    ("embedding bag", "a tensor less", False),
}
UNTRIED = ("something that cannot be copied", "a hook before, a function that has the model")
"""They load without a copy of them doing so first: a failure may leave a part."""
NO_FACTS = {"_modules", "_parameters", "_buffers", "_torchdynamo_wrapper_id"}


def built(name: str, seed: int, device: str = "cpu") -> nn.Module:
    if name.startswith("quantised") and device not in ("cpu", "meta"):
        pytest.skip("torch has quantised layers on the CPU alone")
    torch.manual_seed(seed)
    with warnings.catch_warnings(), torch.device(device):
        warnings.simplefilter("ignore")
        return MODELS[name]()


def source_of(name: str) -> nn.Module:
    """Return a model whose lazy layers know their sizes."""
    model = built(name, 1)
    if name.startswith(("lazy", "a lazy")):
        layer = model.module if name == "a lazy attribute called module" else model
        layer(torch.rand(INPUTS[name]))  # type: ignore[operator]
    return model


def state_of(name: str, edit: str) -> bytes:
    state = source_of(name).state_dict()
    if edit == "as it is":
        return saved(state)
    edited = OrderedDict(EDITS[edit](dict(state)))
    if hasattr(state, "_metadata"):
        edited._metadata = state._metadata  # type: ignore[attr-defined]
    return saved(edited)


def load_as_torch(model: nn.Module, data: bytes, *, strict: bool, assign: bool) -> None:
    state = torch.load(io.BytesIO(data), weights_only=False, map_location=where.device if assign else None)
    taken = inspect.signature(model.load_state_dict).parameters
    options = {"strict": strict, "assign": assign}
    model.load_state_dict(state, **{name: value for name, value in options.items() if name in taken})


def facts(model: nn.Module) -> dict[str, Any]:
    """Return all that a model's modules hold, as text and bytes."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        content = {**vars(module), **module._parameters, **module._buffers}
        names = [name for name in content if "hook" not in name and name not in NO_FACTS]
        found |= {f"{path}:{name}": value for name in names for value in flat(content[name])}
        found[f"{path}:class"] = type(module).__name__
    return found


def flat(value: Any, *, is_packed: bool = False) -> Iterator[Any]:
    if isinstance(value, nn.UninitializedParameter | nn.parameter.UninitializedBuffer):
        yield "uninitialised"
    elif isinstance(value, torch.Tensor):
        data = value.detach().dequantize() if value.is_quantized else value.detach()
        numbers = (
            None if data.is_meta else data.contiguous().flatten().view(torch.uint8).tolist() if data.numel() else []
        )
        yield str(value.dtype), list(value.shape), value.requires_grad and not is_packed, value.is_meta, numbers
    elif isinstance(value, torch.ScriptObject) and value._has_method("__getstate__"):  # type: ignore[attr-defined]
        yield from flat(value.__getstate__(), is_packed=True)  # nobody trains what is in it
    elif isinstance(value, dict):
        yield [(str(key), list(flat(item, is_packed=is_packed))) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        yield [list(flat(item, is_packed=is_packed)) for item in value]
    elif isinstance(value, str | int | float | bool | None):
        yield value


def outcome(load: Callable[[], Any]) -> Exception | None:
    try:
        load()
    except Exception as error:  # noqa: BLE001 - which one is what counts
        return error
    return None


def assert_as_torch(name: str, edit: str, device: str, *, strict: bool) -> None:
    data = state_of(name, edit)
    device = where.device if device == "cpu" else device
    theirs, ours = built(name, 2, device), built(name, 2, device)
    before = facts(ours)

    expected = outcome(lambda: load_as_torch(theirs, data, strict=strict, assign=device == "meta"))
    found = outcome(lambda: ckptool.load_into(ours, data, strict=strict, map_location=where.device))

    if (name, edit, strict) in REFUSED:
        assert isinstance(found, ckptool.CkptoolError)
        return
    if edit == "nothing" and not strict and expected is None and isinstance(found, ckptool.KeyMismatch):
        # no weight of the model would be new, which torch does not mind
        assert name in UNTRIED or facts(ours) == before
        return
    if (name, edit) in LENIENT:
        assert found is None
        return
    is_hook_s = name.startswith("a hook after") and type(found) is type(expected)  # raised as it is
    assert is_hook_s or found is None or isinstance(found, ckptool.CkptoolError), repr(found)
    assert (found is None) == (expected is None), f"torch: {expected!r}, load_into: {found!r}"
    if found is not None and name in UNTRIED and facts(ours) != before:
        assert "a part of it may be new" in str(found)
        return
    assert facts(ours) == (facts(theirs) if found is None or is_hook_s else before)
    if found is None and edit == "as it is" and device == "cpu" and name in INPUTS and name != "lazy convolution":
        x = torch.rand(INPUTS[name]).to(device)
        layers = [one.module if hasattr(one, "module") else one for one in (ours, theirs)]
        assert torch.equal(*[torch.as_tensor(first(layer.eval()(x))) for layer in layers])


def first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


@where.on_any
@pytest.mark.parametrize("name", some(MODELS, 2))
def test_the_result_is_that_of_load_state_dict(name: str) -> None:
    assert_as_torch(name, "as it is", "cpu", strict=True)


def no_tensors(**others: Any) -> OrderedDict[str, Any]:
    """Return the state dict of a model without tensors, with other entries."""
    state: OrderedDict[str, Any] = nn.Softmax().state_dict()
    state.update(others)
    return state


def packed_as_once(kind: type[nn.Module], *, is_first: bool) -> OrderedDict[str, Any]:
    """Return the state dict of a quantised layer as torch 1.3, or 1.4, made it: of tensors alone."""
    state = kind(3, 2).state_dict()
    values = dict(zip(("weight", "bias"), state.pop("_packed_params._packed_params"), strict=True))
    head = "" if is_first else "_packed_params."
    numbers = {name: state[name] for name in ("scale", "zero_point")}
    found = OrderedDict(numbers | {head + name: value for name, value in values.items()})
    if not is_first:
        found["_packed_params.dtype"] = torch.qint8
    versions = (1, 1) if is_first else (3, 2)
    found._metadata = OrderedDict(  # type: ignore[attr-defined]
        zip(("", "_packed_params"), ({"version": version} for version in versions), strict=True)
    )
    return found


class Number(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number, self.weight = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(2))


DYNAMIC, STATIC = torch.ao.nn.quantized.dynamic.Linear, torch.ao.nn.quantized.Linear
ALIKE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], bool]] = {
    "a number of torch 0.3": (Number, lambda: {"number": torch.ones(1), "weight": torch.ones(2)}, True),
    "entries of a module that is None": (
        MODELS["a module that is None"],
        lambda: MODELS["a module that is None"]().state_dict() | {"head.weight": torch.ones(2)},
        True,
    ),
    "nothing, for no tensors": (nn.Softmax, dict, True),
    "nothing, recorded": (nn.Softmax, no_tensors, True),
    "nothing, for a layer": (lambda: nn.Linear(3, 2), dict, True),
    "a text alone, for no tensors": (nn.Softmax, lambda: no_tensors(a="b"), True),
    "dynamic, in halves": (
        lambda: DYNAMIC(3, 2, dtype=torch.float16),
        lambda: DYNAMIC(3, 2, dtype=torch.float16).state_dict(),
        True,
    ),
    "dynamic, of torch 1.3": (lambda: DYNAMIC(3, 2), lambda: packed_as_once(DYNAMIC, is_first=True), True),
    "dynamic, of torch 1.4": (lambda: DYNAMIC(3, 2), lambda: packed_as_once(DYNAMIC, is_first=False), True),
    "static, of torch 1.3": (lambda: STATIC(3, 2), lambda: packed_as_once(STATIC, is_first=True), True),
    "a quantised embedding": (
        lambda: torch.ao.nn.quantized.Embedding(4, 8),
        lambda: torch.ao.nn.quantized.Embedding(4, 8).state_dict(),
        True,
    ),
    "a script": (
        lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 2))),
        lambda: nn.Sequential(nn.Linear(3, 2)).state_dict(),
        True,
    ),
    "a lazy layer without its bias": (lambda: nn.LazyLinear(3), lambda: {"weight": torch.ones(3, 4)}, False),
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_torch_alone_knows_how_to_take_is_taken(case: str) -> None:
    build, state, strict = ALIKE[case]
    data, models = saved(state()), []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(build())
    theirs, ours = models

    expected = outcome(lambda: load_as_torch(theirs, data, strict=strict, assign=False))
    found = outcome(lambda: ckptool.load_into(ours, data, strict=strict))

    assert (found is None) == (expected is None), f"torch: {expected!r}, load_into: {found!r}"
    assert found is None or isinstance(found, ckptool.CkptoolError)
    assert facts(ours) == facts(theirs)
    assert str(ours.state_dict()) == str(theirs.state_dict())


# Each model with each edit; by turns on the CPU and on meta, and strictly or not.
CASES = [
    (name, edit, "meta" if number % 3 == 1 and name not in NO_META else "cpu", number % 2 == 0)
    for number, (name, edit) in enumerate(product(MODELS, EDITS))
]


@where.on_any
@pytest.mark.parametrize(("name", "edit", "device", "strict"), some(CASES[1::3], 8))
def test_files_that_differ_are_taken_or_refused_as_by_load_state_dict(
    name: str, edit: str, device: str, strict: bool
) -> None:
    assert_as_torch(name, edit, device, strict=strict)


@where.on_any
@pytest.mark.parametrize(("commit", "name"), some(in_turn(["in_place", "swap"], MODELS), 5))
def test_a_live_model_serves_what_load_state_dict_makes(name: str, commit: Any) -> None:
    data, theirs = state_of(name, "as it is"), built(name, 2, where.device)
    expected = outcome(lambda: load_as_torch(theirs, data, strict=True, assign=False))
    live = ckptool.LiveModel(built(name, 2, where.device), commit=commit)
    before = facts(live.model)
    found = outcome(lambda: live.reload(data))

    if expected is not None or (name, "as it is", True) in REFUSED or (commit == "swap" and name in UNTRIED):
        assert isinstance(found, ckptool.CkptoolError)
        assert facts(live.model) == before
        return
    assert found is None
    assert facts(live.model) == facts(theirs)
    assert live.digest is not None
