"""How alike tensors are that differ: cosine, and the norm of the difference, as torch has them in float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ckptool
from tests.each import each
from tests.program import invoke

TYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.int64, torch.uint8, torch.complex64),
]


def pair(folder: Path, a: torch.Tensor, b: torch.Tensor) -> tuple[Path, Path]:
    paths = folder / "a.pth", folder / "b.pth"
    for path, values in zip(paths, (a, b), strict=True):
        torch.save({"w": values, "same": torch.ones(3)}, path)
    return paths


def flat(values: torch.Tensor) -> torch.Tensor:
    wide = values.to(torch.complex128 if values.is_complex() else torch.float64).reshape(-1)
    return torch.view_as_real(wide).reshape(-1) if values.is_complex() else wide


@each("dtype", TYPES)
def test_it_is_what_torch_computes_in_float64(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = torch.randn(60, 70) * 20
    a, b = values.abs().to(dtype), (values + torch.randn(60, 70)).abs().to(dtype)
    (found,) = ckptool.diff(*pair(tmp_path, a, b), stat=True).likeness

    x, y = flat(a), flat(b)
    assert found.name == "w"
    assert found.cosine == pytest.approx(float(torch.dot(x, y) / (x.norm() * y.norm())), rel=1e-9)
    assert found.relative == pytest.approx(float((x - y).norm() / y.norm()), rel=1e-9)
    assert found.norm_a == pytest.approx(float(x.norm()), rel=1e-9)
    assert found.norm_b == pytest.approx(float(y.norm()), rel=1e-9)
    assert found.left_out == 0


def test_two_types_and_strides_are_compared_as_they_are_meant(tmp_path: Path) -> None:
    a = torch.randn(40, 50)
    (found,) = ckptool.diff(
        *pair(tmp_path, a.t(), a.t().contiguous().bfloat16()), stat=True, ignore_dtype=True
    ).likeness

    assert found.cosine == pytest.approx(1.0, abs=1e-4)
    assert 0 < (found.relative or 0) < 0.005


def test_what_is_not_finite_is_left_out_and_zero_has_no_angle(tmp_path: Path) -> None:
    a, b = torch.tensor([3.0, 4.0, float("nan"), 1.0]), torch.tensor([3.0, 4.0, 1.0, float("inf")])
    (found,) = ckptool.diff(*pair(tmp_path, a, b), stat=True).likeness
    assert (found.cosine, found.relative, found.norm_a, found.left_out) == (1.0, 0.0, 5.0, 2)

    (found,) = ckptool.diff(*pair(tmp_path, torch.ones(4), torch.zeros(4)), stat=True).likeness
    assert (found.cosine, found.relative, found.norm_a, found.norm_b) == (None, None, 2.0, 0.0)


def test_the_command_line_lists_what_differs_alone(tmp_path: Path) -> None:
    paths = pair(tmp_path, torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    shown = invoke(["diff", "--stat", *map(str, paths)]).output
    found = json.loads(invoke(["diff", "--stat", "--json", *map(str, paths)]).output)

    assert [line.split() for line in shown.splitlines()[-2:]] == [
        ["name", "cosine", "|A", "-", "B|", "/", "|B|", "|A|", "|B|"],
        ["w", "0", "1.41421", "1", "1"],
    ]
    assert found["likeness"] == [
        {"name": "w", "cosine": 0.0, "relative": 2**0.5, "norm_a": 1.0, "norm_b": 1.0, "left_out": 0}
    ]
    assert invoke(["diff", "--stat", "--no-values", *map(str, paths)]).exit_code == 2
    with pytest.raises(ValueError, match="need values=True"):
        ckptool.diff(*paths, stat=True, values=False)
