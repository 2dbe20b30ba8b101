"""Optimizers that took a few steps, and what their own ``state_dict()`` says must be found in a file."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

import ckptool
from tests.against_torch.oracle import named_tensors

Make: TypeAlias = Callable[[torch.nn.Sequential], Any]
"""Makes an optimizer for a model."""


def net() -> torch.nn.Sequential:
    """Return a small model with a weight that is not trained."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4), torch.nn.Linear(4, 4))
    model[2].weight.requires_grad_(False)
    return model


def groups(model: torch.nn.Sequential) -> list[dict[str, Any]]:
    """Return the parameters of a model in two groups, in another order than the model's."""
    return [
        {"params": [model[1].bias, model[1].weight]},
        {"params": [*model[0].parameters(), *model[2].parameters()], "lr": 0.01},
    ]


def stepped(make: Make, steps: int = 2) -> tuple[torch.nn.Sequential, Any]:
    """Return a model and its optimizer, after some steps."""
    model = net()
    optimizer = make(model)
    if hasattr(optimizer, "train"):  # of those without a schedule
        optimizer.train()

    def closure() -> torch.Tensor:
        with torch.enable_grad():
            optimizer.zero_grad()
            loss: torch.Tensor = (model(torch.randn(5, 8)) ** 2).sum()
            loss.backward()
        return loss

    for _ in range(steps):
        closure()
        optimizer.step(*[closure] * isinstance(optimizer, torch.optim.LBFGS))
    return model, optimizer


def of_object(optimizer: Any, path: str) -> dict[str, torch.Tensor]:
    """
    Return all that an optimizer and those inside it keep, under the numbers that ``state_dict()`` gives parameters.

    The numbers are torch's own, for classes change what their state_dict() gives.
    """
    inner = next(
        (one for name in ("optimizer", "base") if isinstance(one := getattr(optimizer, name, None), Optimizer)), None
    )
    found = of_object(inner, f"{path}.{'optimizer' if hasattr(optimizer, 'optimizer') else 'base'}") if inner else {}
    if "state" not in vars(optimizer):
        return found
    packed = Optimizer.state_dict(inner or optimizer)
    numbers = {
        id(parameter): number
        for group, plain in zip(optimizer.param_groups, packed["param_groups"], strict=True)
        for parameter, number in zip(group["params"], plain["params"], strict=True)
    }
    state = {numbers.get(id(key), key): value for key, value in optimizer.state.items()}
    return found | dict(named_tensors(state, f"{path}.state"))


def same(found: ckptool.LazyTensor, expected: torch.Tensor) -> bool:
    """Say whether a tensor of a file is this one, byte for byte."""
    return found.dtype == str(expected.dtype).removeprefix("torch.") and torch.equal(
        torch.frombuffer(bytearray(found.read()), dtype=expected.dtype).reshape(expected.shape), expected.detach()
    )


def differences(saved: dict[str, Any], expected: dict[str, torch.Tensor], *, is_zip: bool) -> list[str]:
    """Return the names in ``expected`` that a file of ``saved`` has not, or not with these values, and clashes."""
    file = io.BytesIO()
    torch.save(saved, file, _use_new_zipfile_serialization=is_zip)
    with ckptool.open_checkpoint(file.getvalue()) as checkpoint:
        tensors = checkpoint.tensors
        wrong = [name for name, value in expected.items() if name not in tensors or not same(tensors[name], value)]
        return [*wrong, *checkpoint.contents.clashes]
