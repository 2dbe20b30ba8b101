"""What the cases stand on: the device and its streams, files, models that answer late, and the names of the cases."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.device.register import KIND

CASES: dict[str, Callable[[], object]] = {}
Case = Callable[..., object]
WEIGHTS = 6
FOLDER = tempfile.TemporaryDirectory(prefix="ckptool-device-")  # goes with the process
FILES = Path(FOLDER.name)
BIG = [torch.randn(700, 700) for _ in range(20)]


def case(name: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES[name] = function
        return function

    return add


def device() -> torch.device:
    return torch.device(KIND, 0)


def api() -> Any:
    return getattr(torch, KIND)


@contextmanager
def on_own_stream(own: bool = True) -> Iterator[None]:
    before = api().current_stream()
    api().set_stream(api().Stream(device()) if own else before)
    try:
        yield
    finally:
        api().set_stream(before)


@contextmanager
def having(where: Any, attribute: str, value: Any) -> Iterator[None]:
    kept = getattr(where, attribute)
    setattr(where, attribute, value)
    try:
        yield
    finally:
        setattr(where, attribute, kept)


def linear(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(64, 64, dtype=dtype)


def saved(state: Any, name: str) -> Path:
    path = FILES / name
    if not path.exists():
        torch.save(state, path)
    return path


def compared(state: Any, wanted: Any) -> object:
    api().synchronize(device())
    return all(torch.equal(state[name].cpu(), wanted[name]) for name in wanted) or "not the weights of the file"


def big() -> Path:
    return saved({f"w{number}": one for number, one in enumerate(BIG)}, "big.pth")


class Copies(nn.Module):
    """Answers with a copy of each weight, which is made late."""

    def __init__(self, value: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.ParameterList([torch.full((500,), value, dtype=dtype) for _ in range(WEIGHTS)])

    def forward(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [one.clone() for one in reversed(list(self.w))]


class LoadsApart(Copies):
    """Loads in its own way, on a stream of its own."""

    def load_state_dict(self, *given: Any, **named: Any) -> Any:
        with on_own_stream():
            return super().load_state_dict(*given, **named)
