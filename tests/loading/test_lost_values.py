"""Values that a load would lose: too large for the type that they get, or one of two for the same memory of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool import LiveModel
from tests import where
from tests.loading.same import assert_same, saved

pytestmark = where.on_any


def net(dtype: torch.dtype | None = None, device: str = "", hook: bool = False) -> Any:
    with torch.device(device or where.device):
        model = nn.Linear(2, 3, dtype=dtype)
    if hook:
        model.register_load_state_dict_pre_hook(lambda *given: None)
    return model


WAYS: dict[str, Any] = {
    "load": lambda data, dtype: ckptool.load(data, dtype=dtype),
    "load to a device": lambda data, dtype: ckptool.load(data, where.device, dtype=dtype),
    "meta": lambda data, dtype: ckptool.load_into(net(device="meta"), data, dtype=dtype),
    "real": lambda data, dtype: ckptool.load_into(net(dtype), data),
    "own code": lambda data, dtype: ckptool.load_into(net(dtype, hook=True), data),
    "in place": lambda data, dtype: LiveModel(net(dtype), data, allow_nan=True),
    "swap": lambda data, dtype: LiveModel(net(dtype), data, commit="swap", allow_nan=True),
    "live on meta": lambda data, dtype: LiveModel(net(device="meta"), data, dtype=dtype, allow_nan=True),
    "live, own code": lambda data, dtype: LiveModel(net(dtype, hook=True), data, commit="swap", allow_nan=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_value_that_the_new_type_cannot_hold_is_refused_and_infinities_are_kept(way: str) -> None:
    fits = torch.tensor([[65504.0, -65519.0], [torch.inf, torch.nan], [1e-9, 0.0]])  # 65519 is rounded to 65504
    bias = torch.zeros(3)
    WAYS[way](saved({"weight": fits, "bias": bias}), torch.float16)

    for large in (65520.0, -1e6):
        data = saved({"weight": torch.where(fits == 0, large, fits), "bias": bias})
        with pytest.raises(ckptool.UnsupportedFeature, match=r"too large for float16: 1 of 6") as caught:
            WAYS[way](data, torch.float16)
        assert (caught.value.kind, "'weight'" in caught.value.message) == ("overflow", True)
        WAYS[way](data, torch.bfloat16)


@pytest.mark.parametrize("way", WAYS)
def test_tensors_of_which_many_values_become_zero_are_named(way: str, caplog: pytest.LogCaptureFixture) -> None:
    small = torch.full((3, 2), 1e-9)
    WAYS[way](saved({"weight": small, "bias": torch.tensor([0.0, 1e-9, 1.0])}), torch.float16)
    assert "values of 2 tensors are too small for float16, and zero in it: weight (all), bias (50.0%)" in caplog.text

    caplog.clear()
    WAYS[way](saved({"weight": torch.zeros(3, 2), "bias": torch.tensor([0.0, 1e-7, 1.0])}), torch.float16)
    WAYS[way](saved({"weight": small, "bias": torch.zeros(3)}), torch.bfloat16)
    assert "too small" not in caplog.text


def test_only_what_a_tensor_shows_of_its_memory_counts() -> None:
    memory = torch.tensor([1.0, 1e9, 2.0, 1e9])
    assert ckptool.load(saved({"shown": memory[::2]}), dtype="float16")["shown"].tolist() == [1, 2]
    with pytest.raises(ckptool.UnsupportedFeature, match="'rest'"):
        ckptool.load(saved({"shown": memory[::2], "rest": memory[1::2]}), dtype="float16")


class Tied(nn.Module):
    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.a, self.b = net(), net()
        self.b.weight = self.a.weight
        if own:
            self.register_load_state_dict_pre_hook(lambda *given: None)


@pytest.mark.parametrize("own", [False, True], ids=["plain", "own"])
def test_two_values_for_what_a_model_ties_are_refused(own: bool, caplog: pytest.LogCaptureFixture) -> None:
    equal = {name: torch.ones(one.shape) for name, one in Tied().state_dict().items()}
    assert ckptool.load_into(Tied(own), saved(equal)).tied_apart == ()
    data = saved(equal | {"b.weight": torch.zeros(3, 2)})

    model = Tied(own)
    before = model.a.weight.tolist()
    for load in (ckptool.load_into, LiveModel):
        with pytest.raises(ckptool.WeightsMismatch, match=r"different values: a\.weight and b\.weight") as caught:
            load(model, data)
        assert (caught.value.kind, model.a.weight.tolist()) == ("tied-values", before)

    report = ckptool.load_into(model, data, strict=False)
    assert report.tied_apart == (("a.weight", "b.weight"),)
    assert "different in the file 1: a.weight is now b.weight" in str(report)
    assert "a.weight is now b.weight" in caplog.text
    assert not model.a.weight.any()


class Shared(nn.Module):
    def __init__(self, kind: str, own: bool = False) -> None:
        super().__init__()
        memory = torch.zeros(3, 4, device=where.device)
        self.a, self.b = nn.Parameter(memory), nn.Parameter(PARTS[kind](memory))
        if own:
            self.register_load_state_dict_pre_hook(lambda *given: None)


PARTS: dict[str, Any] = {"transposed": torch.t, "a part": lambda memory: memory[1:], "same": lambda memory: memory}


@pytest.mark.parametrize("own", [False, True], ids=["plain", "own"])
@pytest.mark.parametrize("kind", PARTS)
def test_two_values_for_memory_that_parameters_share_are_refused(kind: str, own: bool) -> None:
    values = Shared(kind)
    values.a.data.copy_(torch.arange(12.0).reshape(3, 4))
    model = Shared(kind, own)
    ckptool.load_into(model, saved(values.state_dict()))
    assert_same(model.state_dict(), values.state_dict())

    other = saved({"a": values.a.detach(), "b": values.b.detach() + 1})
    for strict in (True, False):
        with pytest.raises(ckptool.WeightsMismatch, match="different values: a and b"):
            ckptool.load_into(model, other, strict=strict)
    assert_same(model.state_dict(), values.state_dict())


def test_columns_of_one_matrix_share_no_memory() -> None:
    model, both = nn.Module(), torch.zeros(3, 4, device=where.device)
    model.a, model.b = nn.Parameter(both[:, :2]), nn.Parameter(both[:, 2:])
    assert ckptool.load_into(model, saved({"a": torch.ones(3, 2), "b": torch.full((3, 2), 2.0)})).loaded == 2
    assert both.tolist() == [[1, 1, 2, 2]] * 3


I64, F32 = torch.int64, torch.float32
KINDS: list[tuple[Any, torch.dtype, torch.dtype, str | None]] = [
    (100001, I64, torch.float16, "100001"),
    (2049, I64, torch.float16, "2049"),
    ([2048, -2048, 4096], I64, torch.float16, None),
    (2**24 + 1, I64, F32, "16777217"),
    (2**63 - 1, I64, F32, "9223372036854775807"),
    ([-(2**63), 2**62], I64, F32, None),
    (2**53 + 1, I64, torch.float64, "9007199254740993"),
    ([2**40, 2**31, 5], I64, torch.int32, "1099511627776"),
    ([2**31 - 1, -(2**31)], I64, torch.int32, None),
    ([255, -1, 0], I64, torch.uint8, "-1"),
    ([-1, 0], torch.int8, torch.uint8, "-1"),
    ([128], torch.uint8, torch.int8, "128"),
    ([2, 1], I64, torch.bool, "2"),
    ([0, 1], I64, torch.bool, None),
    ([2**63], torch.uint64, I64, "9223372036854775808"),
    ([2**63 - 1], torch.uint64, I64, None),
    ([0.5, 1.0], F32, I64, "0.5"),
    ([1.0, float("nan")], F32, I64, "nan"),
    ([2.0**63], F32, I64, "9.22"),
    ([-(2.0**63), 3.0, -0.0], F32, I64, None),
    ([2.0**31], F32, torch.int32, "2147483648.0"),
    ([float("inf")], torch.float8_e5m2, torch.uint8, "inf"),
    ([0.1, -2, 0], F32, torch.bool, "0.1"),
    ([0, 1.0], torch.bfloat16, torch.bool, None),
]


@pytest.mark.parametrize("way", ["plain", "own", "in place", "swap"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_integers_are_equal_in_the_model_or_refused(way: str, kind: tuple[Any, torch.dtype, torch.dtype, Any]) -> None:
    given, dtype, into, lost = kind
    values = torch.tensor(given, dtype=dtype)
    model = net(hook=way == "own").to(where.device)
    model.register_buffer("n", torch.ones(values.shape, dtype=into, device=where.device))
    data = saved(net(device="cpu").state_dict() | {"n": values})
    before = {name: one.clone() for name, one in model.state_dict().items()}

    def load() -> Any:
        if way in ("plain", "own"):
            return ckptool.load_into(model, data)
        return LiveModel(model, data, commit="swap" if way == "swap" else "in_place")

    if lost is None:
        model = getattr(load(), "model", model)
        assert model.n.tolist() == pytest.approx(values.tolist(), rel=0)
        return
    name = str(into).removeprefix("torch.")
    with pytest.raises(ckptool.UnsupportedFeature) as caught:
        load()
    assert f"tensor 'n' has values that {name} cannot hold, as {lost}" in caught.value.message
    assert caught.value.kind == "overflow"
    assert_same(model.state_dict(), before)


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_no_code_of_a_model_takes_complex_values_without_their_second_part() -> None:
    data = saved(net(device="cpu").state_dict() | {"bias": torch.tensor([1, 1 + 2j, 3])})
    with pytest.raises(ckptool.UnsupportedFeature, match=r"'bias' has values that float32 cannot hold, as \(1\+2j\)"):
        ckptool.load_into(net(hook=True), data)


C64, C128 = torch.complex64, torch.complex128


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("way", ["plain", "own", "in place"])
@pytest.mark.parametrize(("value", "into"), [(1e300 + 0j, C64), (1e300j, C64), (1e5 + 1j, torch.complex32)], ids=str)
def test_complex_values_that_are_too_large_are_refused(way: str, value: complex, into: torch.dtype) -> None:
    def load(given: complex) -> Any:
        model = net(hook=way == "own").to(where.device)
        model.register_buffer("n", torch.zeros(2, dtype=into, device=where.device))
        data = saved(net(device="cpu").state_dict() | {"n": torch.tensor([1j, given], dtype=C128)})
        LiveModel(model, data) if way == "in place" else ckptool.load_into(model, data)
        return model.n

    assert torch.view_as_real(load(2 + 3j)).tolist() == [[0, 1], [2, 3]]
    with pytest.raises(ckptool.UnsupportedFeature, match=r"'n' has values that are too large"):
        load(value)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [*(("float8_e4m3fn", value) for value in (1e5, -480.0, torch.inf)), ("float8_e5m2", 7e4), ("float8_e8m0fnu", -2.0)],
)
def test_what_a_type_of_a_byte_would_turn_into_another_number_is_refused(dtype: str, value: float) -> None:
    fits = torch.tensor([1.0, 2.0, 0.5])
    made = ckptool.load(saved({"w": fits}), dtype=dtype)["w"]
    assert (made.dtype, made.float().tolist()) == (getattr(torch, dtype), fits.tolist())
    with pytest.raises(ckptool.UnsupportedFeature, match=rf"'w' has values that are too large for {dtype}: 1 of 4"):
        ckptool.load(saved({"w": torch.cat([fits, torch.tensor([value])])}), dtype=dtype)
