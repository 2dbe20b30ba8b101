"""Statistics of values: compared with float64 references of torch's, for every type that torch can compute with."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptool import open_checkpoint
from ckptool.checking.value_survey import ValueRow, statistics_of
from ckptool.errors import MissingPackage
from ckptool.torch_ops.statistics import Statistics, Tally
from tests.program import invoke
from tests.scale import in_turn

FIXTURES = Path(__file__).parents[2] / "fixtures" / "valid"
FLOATS = (
    "float64", "float32", "float16", "bfloat16", "complex64", "complex128",
    "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz",
)  # fmt: skip
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "bool")


def statistics(path: Path, depth: int | None = None) -> list[ValueRow]:
    with open_checkpoint(path) as checkpoint:
        return list(statistics_of(checkpoint, list(checkpoint.tensors.values()), depth=depth))


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def reference(values: torch.Tensor) -> tuple[float, ...]:
    flat = torch.view_as_real(values).flatten() if values.is_complex() else values.flatten()
    exact = flat.to(torch.float64)
    finite = exact[exact.isfinite()]
    counts = (flat.numel(), int(exact.isnan().sum()), int(exact.isinf().sum()), int((finite == 0).sum()))
    moments = (finite.mean(), finite.std(unbiased=False), finite.min(), finite.max(), finite.norm())
    return (*counts, *map(float, moments))


def assert_equal(found: Statistics, values: torch.Tensor) -> None:
    assert found[:9] == pytest.approx(reference(values), rel=1e-6, abs=1e-12)
    flat = torch.view_as_real(values).flatten() if values.is_complex() else values.flatten()
    exact = flat.to(torch.float64)
    finite = exact[exact.isfinite()].numpy()
    expected, _ = np.histogram(finite, 8)
    assert sum(found.histogram) == finite.size
    assert np.abs(np.array(found.histogram) - expected).sum() <= 0.03 * finite.size + 2


@pytest.mark.parametrize(("scale", "dtype"), in_turn([1.0, 1e-3], [*FLOATS, *INTEGERS]))
def test_every_type_is_as_its_float64_reference(dtype: str, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(70_001, generator=generator) * 20 * scale + 1
    if dtype in FLOATS:
        values[5], values[7], values[9] = math.nan, math.inf, 0.0
    elif dtype.startswith(("u", "b")):
        values = values.abs() if dtype != "bool" else values > 1
    values = values.to(getattr(torch, dtype))
    tally = Tally()
    data = raw(values)
    middle = len(data) // 2 // values.itemsize * values.itemsize
    tally.add([data[:middle], data[middle:]], dtype)

    assert_equal(tally.result(), values)


def test_four_bits_and_scales_are_as_their_tables() -> None:
    nibbles = Tally()
    nibbles.add([bytes([0x00, 0x7F, 0x12])], "float4_e2m1fn_x2")
    scales = Tally()
    scales.add([bytes([127, 128, 255])], "float8_e8m0fnu")

    assert nibbles.result()[:8] == pytest.approx((6, 0, 0, 2, 0.25, math.sqrt(73.25 / 6 - 0.0625), -6.0, 6.0))
    assert scales.result()[:9] == pytest.approx((3, 1, 0, 0, 1.5, 0.5, 1.0, 2.0, math.sqrt(5)))


@pytest.mark.parametrize(
    "values",
    [
        torch.full((100,), 1e8, dtype=torch.float32) + torch.arange(100),
        torch.tensor([1e300, -1e300], dtype=torch.float64),
        torch.tensor([math.nan, math.inf, -math.inf]),
        torch.tensor([]),
        torch.tensor([3.0]),
        torch.tensor([2**63 - 1, -(2**63)], dtype=torch.int64),
    ],
)
def test_extremes(values: torch.Tensor) -> None:
    tally = Tally()
    tally.add([raw(values)], str(values.dtype).removeprefix("torch."))
    found = tally.result()

    finite = values.to(torch.float64)[values.to(torch.float64).isfinite()]
    assert found.total == values.numel()
    assert sum(found.histogram) == finite.numel()
    if finite.numel():
        exact = np.array(finite.tolist(), dtype=np.longdouble)
        assert found.mean == pytest.approx(float(exact.mean()), rel=1e-9)
        with np.errstate(over="ignore"):
            squares = float((exact * exact).sum())
        std = pytest.approx(float(exact.std()), rel=1e-9) if math.isfinite(squares) else None
        assert found.std == std


def test_a_signaling_nan_is_a_nan_and_warns_nobody() -> None:
    tally = Tally()
    tally.add([bytes.fromhex("0100807f 0000803f")], "float32")

    assert (tally.result().nan, tally.result().mean) == (1, 1.0)


def test_joined_tallies_are_that_of_all_values() -> None:
    parts = [torch.randn(1000) * power + power for power in (1, 10, 1000)]
    whole = Tally()
    for part, dtype in zip(parts, (torch.float32, torch.float16, torch.bfloat16), strict=True):
        tally = Tally()
        tally.add([raw(part.to(dtype))], str(dtype).removeprefix("torch."))
        whole.join(tally)
    together = torch.cat(
        [
            part.to(dtype).double()
            for part, dtype in zip(parts, (torch.float32, torch.float16, torch.bfloat16), strict=True)
        ]
    )

    assert_equal(whole.result(), together)


def test_a_file_by_tensor_and_by_module(tmp_path: Path) -> None:
    weight = torch.randn(30, 20)
    state = {"a.weight": weight, "a.tied": weight, "a.view": weight.T, "b.sparse": torch.eye(3).to_sparse()}
    torch.save(state, tmp_path / "s.pth")
    rows = {row.name: row for row in statistics(tmp_path / "s.pth")}
    modules = {row.name: row for row in statistics(tmp_path / "s.pth", depth=1)}

    for name in ("a.weight", "a.tied", "a.view"):
        found = rows[name].values
        assert found is not None
        assert_equal(found, weight)
    assert rows["b.sparse"].values is None
    assert "no plain bytes" in str(rows["b.sparse"].why)
    assert modules["a"].tensors == 2  # a view in another order is another tensor, a tied one is not
    assert modules["a"].values is not None
    assert modules["a"].values.total == 2 * weight.numel()
    assert modules["b"].values is None


def test_every_fixture_has_statistics_or_a_reason() -> None:
    for path in sorted(FIXTURES.glob("*-zip.pth")):
        for row in statistics(path):
            assert (row.values is None) == (row.why is not None)


def test_the_command_prints_it(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([0.0, 1.0, 1.0, math.nan])}, tmp_path / "w.pth")
    table = invoke(["stat", str(tmp_path / "w.pth")])
    missing = invoke(["stat", str(tmp_path / "absent.pth"), str(tmp_path / "w.pth")])

    assert table.exit_code == 0
    assert table.output.splitlines()[-1].split()[:4] == ["w", "float32", "[4]", "0.6667"]
    assert "25.0%" in table.output
    assert "▄      █" in table.output
    assert missing.exit_code == 2
    assert "w  " in missing.output


def test_without_numpy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)

    with pytest.raises(MissingPackage, match=r"pip install 'ckptool\[stat\]'"):
        statistics(FIXTURES / "lenet-state-dict-cpu-zip.pth")


def test_a_tensor_that_cannot_be_read_is_exit_code_1(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "fixtures" / "folders" / "dcp-rank-missing"
    result = invoke(["stat", str(folder)])

    assert result.exit_code == 1
    assert "no such file" in result.stdout
    torch.save({"w": torch.ones(3)}, tmp_path / "whole.pth")
    assert invoke(["stat", str(tmp_path / "whole.pth")]).exit_code == 0
