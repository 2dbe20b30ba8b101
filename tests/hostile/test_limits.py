"""One object of limits, taken by everything that opens a file."""

from __future__ import annotations

import inspect as signatures
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool import LimitExceeded, Limits
from tests import build
from tests.formats.said import refused
from tests.scale import some

NARROW = Limits(tensors=1)
CALLS: dict[str, Callable[[Path, Limits], Any]] = {
    "open_checkpoint": lambda path, limits: ckptool.open_checkpoint(path, limits=limits).close(),
    "migrate": lambda path, limits: ckptool.migrate(path, path.with_name("out"), form="state_dict", limits=limits),
    "load": lambda path, limits: ckptool.load(path, limits=limits),
    "predict_memory": lambda path, limits: ckptool.predict_memory(path, limits=limits),
    "load_into": lambda path, limits: ckptool.load_into(torch.nn.Linear(1, 1), path, limits=limits),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "model.safetensors"
    made.write_bytes(build.safetensors({"weight": build.floats(1), "bias": build.floats(1)}))
    return made


@pytest.mark.parametrize("name", CALLS)
def test_a_call_goes_by_the_limits_that_it_is_given(name: str, path: Path) -> None:
    with pytest.raises(LimitExceeded):
        CALLS[name](path, NARROW)
    assert not path.with_name("out").exists()


@pytest.mark.parametrize("name", ["open_checkpoint", "migrate", "load", "predict_memory"])
def test_the_same_file_is_read_within_the_defaults(name: str, path: Path) -> None:
    CALLS[name](path, Limits())


def test_check_reports_what_goes_beyond_its_limits(path: Path) -> None:
    assert ckptool.check(path).error is None
    assert isinstance(ckptool.check(path, limits=NARROW).error, LimitExceeded)


@pytest.mark.parametrize("name", [*CALLS, "check", "LiveModel"])
def test_the_limits_have_defaults(name: str) -> None:
    assert signatures.signature(getattr(ckptool, name)).parameters["limits"].default == Limits()


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_what_is_written_is_read_back_within_the_limits_of_the_call(suffix: str, tmp_path: Path) -> None:
    name = "a" * (Limits().name_nbytes + 1)
    (tmp_path / "long").write_bytes(build.safetensors({name: build.floats(1)}))
    written = tmp_path / f"written.{suffix}"

    assert ckptool.migrate(tmp_path / "long", written, limits=Limits(name_nbytes=len(name))).verified
    refused(written, LimitExceeded)


def repeated(path: Path, value: int, count: int = 60) -> Path:
    """Write a file of tensors that each repeat the few bytes of one storage, all but their shapes alike."""
    base = torch.full((8,), value)
    torch.save({str(number): base.as_strided((1 << 20, 2 + number % 6), (0, 0)) for number in range(count)}, path)
    return path


def overlapping(path: Path, value: int, count: int = 60) -> Path:
    """Write a file of tensors that are nearly all of one storage each."""
    base = torch.full((1 << 20,), value)
    torch.save({str(number): base[number:] for number in range(count)}, path)
    return path


@pytest.mark.parametrize("make", [repeated, overlapping])
def test_views_that_repeat_the_bytes_of_a_file_are_not_written_out_without_end(make: Any, tmp_path: Path) -> None:
    path, target = make(tmp_path / "views.pth", 1), tmp_path / "written.safetensors"
    with pytest.raises(LimitExceeded) as caught:
        ckptool.migrate(path, target)

    assert caught.value.needed > caught.value.actual == max(8 * path.stat().st_size, 64 << 20)
    assert [path] == list(tmp_path.iterdir())
    ckptool.migrate(path, tmp_path / "same.pth")  # which keeps them views


@pytest.mark.parametrize("make", some([repeated, overlapping], 2))
def test_views_that_repeat_the_bytes_of_a_file_are_not_compared_without_end(make: Any, tmp_path: Path) -> None:
    one, other = make(tmp_path / "one.pth", 1), make(tmp_path / "other.pth", 2)

    with pytest.raises(LimitExceeded):
        ckptool.diff(one, other)
    fewer = make(tmp_path / "fewer.pth", 2, 2)
    assert not ckptool.diff(make(tmp_path / "alike.pth", 1, 2), fewer).same
