"""
What the reference trainer saved on the device for tests, in each habit:  python -m tests.device.trained FOLDER

A process of its own: torch keeps a device once it is registered.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from ckptool.reference import trainer
from ckptool.reference.nets import TiedReader
from ckptool.reference.trainer import Recipe, Trained, process_group, train, wrap
from tests.device.register import KIND, register
from tests.device.tags import WRAPPERS
from tests.fixture_set import everyday
from tests.fixture_set.cases import Case, Place, torch_cases
from tests.fixture_set.places import relative_places

IMAGES = 64
WIDTH = 16  # as that of the committed fixtures


def write(folder: Path) -> None:
    """Train a net on the device, for few steps, and write its files with a JSON beside each."""
    device = torch.device(KIND, 0)
    split = trainer.digits(28, seed=0)
    few = trainer.Split(*(TensorDataset(*part[:IMAGES]) for part in (split.train, split.held_out)))
    with warnings.catch_warnings(), process_group(device), relative_places():
        warnings.simplefilter("ignore")
        trained = train(lambda: TiedReader(WIDTH), few, Recipe(epochs=1), device)
        for case in (*everyday.every_habit(trained, device), *wrapped(trained, device)):
            case.write(folder / case.filename)
            (folder / f"{case.name}.json").write_text(case.as_json(), encoding="utf-8")


def wrapped(trained: Trained, device: torch.device) -> Iterator[Case]:
    """Yield the whole model as those save it who train on several devices."""
    for how in WRAPPERS:
        model = wrap(deepcopy(trained.model), how, device)
        yield from torch_cases(f"model-{how}", model, form="model", shows="", place=Place(str(device)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    register()
    write(Path(sys.argv[1]))
