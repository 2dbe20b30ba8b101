"""Statistics of values: compared with float64 references of torch's, for every type that torch can compute with."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.each import each
from tests.program import VALID, invoke, run

FLOATS = (
    "float64", "float32", "float16", "bfloat16", "complex64", "complex128",
    "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz",
)  # fmt: skip
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "bool")


def statistics(path: Path, *options: str) -> dict[str, Any]:
    found = json.loads(invoke(["stat", str(path), *options, "--json"]).stdout)
    return {row["name"]: row for row in found["rows"]}


def statistics_of(state: dict[str, torch.Tensor], folder: Path) -> dict[str, Any]:
    """Return what the command says of the values of tensors."""
    torch.save(state, folder / "x.pth")
    return {name: row["values"] for name, row in statistics(folder / "x.pth").items()}


def reference(values: torch.Tensor) -> tuple[float, ...]:
    flat = torch.view_as_real(values).flatten() if values.is_complex() else values.flatten()
    exact = flat.to(torch.float64)
    finite = exact[exact.isfinite()]
    counts = (flat.numel(), int(exact.isnan().sum()), int(exact.isinf().sum()), int((finite == 0).sum()))
    moments = (finite.mean(), finite.std(unbiased=False), finite.min(), finite.max(), finite.norm())
    return (*counts, *map(float, moments))


FACTS = ("total", "nan", "infinite", "zeros", "mean", "std", "min", "max", "norm")


def assert_equal(found: dict[str, Any], values: torch.Tensor) -> None:
    assert tuple(found[name] for name in FACTS) == pytest.approx(reference(values), rel=1e-6, abs=1e-12)
    flat = torch.view_as_real(values).flatten() if values.is_complex() else values.flatten()
    exact = flat.to(torch.float64)
    finite = exact[exact.isfinite()].numpy()
    expected, _ = np.histogram(finite, 8)
    assert sum(found["histogram"]) == finite.size
    assert np.abs(np.array(found["histogram"]) - expected).sum() <= 0.03 * finite.size + 2


@each("verb", ["stat", "diff", "check"])
def test_no_threads_wait_for_each_other_in_a_loop(tmp_path: Path, verb: str) -> None:
    torch.save({"w": torch.randn(4 << 20)}, tmp_path / "a.pth")
    torch.save({"w": torch.randn(4 << 20)}, tmp_path / "b.pth")
    options = {"stat": [], "diff": [str(tmp_path / "b.pth"), "--stat"], "check": ["--values"]}[verb]
    started, own = time.process_time(), time.thread_time()

    invoke([verb, str(tmp_path / "a.pth"), *options])

    assert time.process_time() - started < 1.3 * (time.thread_time() - own) + 0.1  # tenfold before, and more


def test_every_type_is_as_its_float64_reference(tmp_path: Path) -> None:
    state = {}
    for number, dtype in enumerate((*FLOATS, *INTEGERS)):
        generator = torch.Generator().manual_seed(1)
        values = torch.randn(70_001, generator=generator) * 20 * (1.0, 1e-3)[number % 2] + 1
        if dtype in FLOATS:
            values[5], values[7], values[9] = math.nan, math.inf, 0.0
        elif dtype.startswith(("u", "b")):
            values = values.abs() if dtype != "bool" else values > 1
        state[dtype] = values.to(getattr(torch, dtype))
    found = statistics_of(state, tmp_path)
    for dtype, values in state.items():
        assert_equal(found[dtype], values)


def test_four_bits_and_scales_are_as_their_tables(tmp_path: Path) -> None:
    nibbles = torch.tensor([0x00, 0x7F, 0x12], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    scales = torch.tensor([127, 128, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    found = statistics_of({"nibbles": nibbles, "scales": scales}, tmp_path)
    said = {name: tuple(found[name][fact] for fact in FACTS) for name in found}

    assert said["nibbles"][:8] == pytest.approx((6, 0, 0, 2, 0.25, math.sqrt(73.25 / 6 - 0.0625), -6.0, 6.0))
    assert said["scales"] == pytest.approx((3, 1, 0, 0, 1.5, 0.5, 1.0, 2.0, math.sqrt(5)))


@each(
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
def test_extremes(values: torch.Tensor, tmp_path: Path) -> None:
    found = statistics_of({"w": values}, tmp_path)["w"]

    finite = values.to(torch.float64)[values.to(torch.float64).isfinite()]
    assert found["total"] == values.numel()
    assert sum(found["histogram"]) == finite.numel()
    if finite.numel():
        exact = np.array(finite.tolist(), dtype=np.longdouble)
        assert found["mean"] == pytest.approx(float(exact.mean()), rel=1e-9)
        with np.errstate(over="ignore"):
            squares = float((exact * exact).sum())
        std = pytest.approx(float(exact.std()), rel=1e-9) if math.isfinite(squares) else None
        assert found["std"] == std


def test_a_signaling_nan_is_a_nan_and_warns_nobody(tmp_path: Path) -> None:
    values = torch.tensor([0x7F800001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    found = statistics_of({"w": values}, tmp_path)["w"]

    assert (found["nan"], found["mean"]) == (1, 1.0)


def test_the_statistics_of_a_module_are_those_of_all_its_values(tmp_path: Path) -> None:
    dtypes = {1: torch.float32, 10: torch.float16, 1000: torch.bfloat16}
    parts = {f"m.{power}": (torch.randn(1000) * power + power).to(dtype) for power, dtype in dtypes.items()}
    torch.save(parts, tmp_path / "x.pth")

    together = torch.cat([part.double() for part in parts.values()])
    assert_equal(statistics(tmp_path / "x.pth", "--depth", "1")["m"]["values"], together)
    torch.save({"m.weight": torch.ones(2)}, tmp_path / "x.pth")
    assert "1 tensors" not in invoke(["stat", str(tmp_path / "x.pth"), "--depth", "1"]).stdout


def test_a_file_by_tensor_and_by_module(tmp_path: Path) -> None:
    weight = torch.randn(30, 20)
    state = {"a.weight": weight, "a.tied": weight, "a.view": weight.T, "b.sparse": torch.eye(3).to_sparse()}
    torch.save(state, tmp_path / "s.pth")
    rows = statistics(tmp_path / "s.pth")
    modules = statistics(tmp_path / "s.pth", "--depth", "1")

    for name in ("a.weight", "a.tied", "a.view"):
        assert_equal(rows[name]["values"], weight)
    assert rows["b.sparse"]["values"] is None
    assert "no plain bytes" in rows["b.sparse"]["why"]
    assert modules["a"]["tensors"] == 2  # a view in another order is another tensor, a tied one is not
    assert modules["a"]["values"]["total"] == 2 * weight.numel()
    assert modules["b"]["values"] is None


def test_every_fixture_has_statistics_or_a_reason() -> None:
    for path in sorted(VALID.glob("*-zip.pth")):
        for row in statistics(path).values():
            assert (row["values"] is None) == (row["why"] is not None)


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

    assert 'pip install "ckptool[stat]"' in invoke(["stat", str(VALID / "lenet-state-dict-cpu-zip.pth")]).output


def test_a_tensor_that_cannot_be_read_is_exit_code_1(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "fixtures" / "folders" / "dcp-rank-missing"
    result = run("stat", folder, code=1)
    assert "no such file" in result.stdout
    torch.save({"w": torch.ones(3)}, tmp_path / "whole.pth")
    assert invoke(["stat", str(tmp_path / "whole.pth")]).exit_code == 0


def test_every_byte_of_a_bool_but_0_is_1_as_in_torch(tmp_path: Path) -> None:
    torch.save({"b": torch.tensor([2, 1, 0, 255], dtype=torch.uint8).view(torch.bool)}, tmp_path / "b.pth")
    (row,) = json.loads(invoke(["stat", str(tmp_path / "b.pth"), "--json"]).output)["rows"]
    assert [row["values"][name] for name in ("mean", "max", "zeros")] == [0.75, 1.0, 1]
