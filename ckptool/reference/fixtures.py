"""Small checkpoints of a net that was trained here, saved in every way in which people save theirs."""

from __future__ import annotations

import argparse
import warnings
from typing import TYPE_CHECKING

from ckptool.errors import FileUnavailable
from ckptool.reference import data
from ckptool.reference.nets import TiedReader
from ckptool.reference.saving import HABITS, parts_of, save
from ckptool.reference.trainer import WRAPS, Recipe, process_group, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch


def write_fixtures(folder: Path, device: torch.device, tell: Callable[[str], None] = lambda _: None) -> int:
    """
    Train a net for two epochs, and write ``HABIT-WRAPPER-zip.pth`` and ``-legacy.pth`` for each; return their number.

    The wrappers are tried on CUDA alone: elsewhere there is nothing to be parallel over. Files of the same names are
    replaced.

    Raises:
        FileUnavailable: The folder cannot be made or written.
        CkptoolError: scikit-learn, whose digits are trained on, is not installed.
    """
    digits = data.digits(28, seed=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"fixtures cannot be written here: {error.strerror or error}"
        raise FileUnavailable(what, path=str(folder), hint="Name a folder that is yours to write.") from error
    written = 0
    with warnings.catch_warnings(), process_group(device):
        warnings.simplefilter("ignore")  # torch warns of all that is old, which half of these files are
        for wrapper in WRAPS if device.type == "cuda" else WRAPS[:1]:
            trained = train(lambda: TiedReader(16), digits, Recipe(epochs=2, wrap=wrapper), device)
            parts = parts_of(trained, argparse.Namespace(net="tied", wrap=wrapper, device=device))
            slug = "plain" if wrapper == "none" else wrapper
            for habit, how in HABITS.items():
                for container in ("zip", "legacy"):
                    name = f"{habit.replace('_', '-')}-{slug}-{container}.pth"
                    save(how.content(parts), folder / name, legacy=container == "legacy")
                    tell(name)
                    written += 1
    return written
