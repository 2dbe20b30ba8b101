"""
Files whose tensors only claim to be on a device, then the same from one:  python -m tests.device.saved FORGED REAL

A process of its own: torch keeps a device, and the name of one, once it has it. What is forged comes first, while torch
has no more than the name.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.swa_utils import AveragedModel

from ckptool.reference.nets import MLP
from ckptool.reference.trainer import Recipe, Trained, ema_average
from tests.device.register import KIND, register
from tests.fixture_set.cases import Case, Place, torch_cases
from tests.fixture_set.everyday import every_habit
from tests.fixture_set.forging import mixed, pretend, tagged
from tests.fixture_set.places import relative_places

TAG = f"{KIND}:0"


def trained() -> Trained:
    """Return a net after one step on the CPU, where every process finds the same numbers."""
    torch.manual_seed(0)
    model = MLP(8, 3, inputs=6, outputs=4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    ema = AveragedModel(model, avg_fn=ema_average)
    F.cross_entropy(model(torch.rand(5, 1, 2, 3)), torch.arange(5) % 4).backward()
    optimizer.step()
    scheduler.step()
    ema.update_parameters(model)
    return Trained(model, model, ema, optimizer, scheduler, Recipe(), [])


def write(folder: Path, *, forge: bool) -> None:
    """Write each habit of saving, a net in DataParallel, and layers in two places."""
    device = torch.device("cpu" if forge else TAG)
    cases = list(every_habit(trained(), device, forge=TAG if forge else None))
    model = trained().model.to(device)
    parallel = nn.DataParallel(model, [0])
    if forge:
        pretend(parallel, torch.device(TAG))
    place = Place(TAG, forged=forge, tag_of=tagged(TAG)) if forge else Place(TAG)
    cases += torch_cases("data-parallel", parallel, form="model", shows="", place=place)
    state = trained().model.state_dict()
    first = next(iter(state))
    place = Place("mixed", forged=True, tag_of=mixed([(state[first], TAG)])) if forge else Place("mixed")
    if not forge:
        state[first] = state[first].to(device)
    cases += torch_cases("two-places", state, form="state_dict", shows="", place=place)
    with relative_places():
        for case in cases:
            case.write(folder / _unforged(case))


@contextmanager
def name_only() -> Iterator[None]:
    """Let torch know the name, for attributes that hold a device, and no device, until one is registered."""
    torch.utils.rename_privateuse1_backend(KIND)
    module = types.ModuleType(f"torch.{KIND}")
    module.__dict__.update(is_available=lambda: False, device_count=lambda: 0)
    torch._register_device_module(KIND, module)
    yield
    delattr(torch, KIND)


def _unforged(case: Case) -> str:
    # A zip holds its own name.
    return case.filename.replace("forged-", "")


if __name__ == "__main__":
    with name_only():
        write(Path(sys.argv[1]), forge=True)
    register()
    write(Path(sys.argv[2]), forge=False)
