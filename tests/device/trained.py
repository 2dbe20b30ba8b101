"""
What the reference trainer saved on the device for tests, in each habit:  python -m tests.device.trained FOLDER

A process of its own: torch keeps a device once it is registered.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from ckptool.reference import data, everyday
from ckptool.reference.nets import TiedReader
from ckptool.reference.places import relative_places
from ckptool.reference.trainer import Recipe, train
from tests.device.register import KIND, register

IMAGES = 64
WIDTH = 16  # as that of the committed fixtures


def write(folder: Path) -> None:
    """Train a net on the device, for few steps, and write its files with a JSON beside each."""
    device = torch.device(KIND, 0)
    split = data.digits(28, seed=0)
    few = data.Split(*(TensorDataset(*part[:IMAGES]) for part in (split.train, split.held_out)))
    with warnings.catch_warnings(), relative_places():
        warnings.simplefilter("ignore")
        trained = train(lambda: TiedReader(WIDTH), few, Recipe(epochs=1), device)
        for case in everyday.every_habit(trained, device):
            case.write(folder / case.filename)
            (folder / f"{case.name}.json").write_text(case.as_json(), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    register()
    write(Path(sys.argv[1]))
