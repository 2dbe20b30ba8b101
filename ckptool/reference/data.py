"""Images to train on that need no download: scikit-learn's digits, and CIFAR-10 where it is already there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from ckptool.errors import FileUnavailable
from ckptool.torch_ops.needed import needed


@dataclass(frozen=True, slots=True)
class Split:
    """Labelled images, NxCxHxW in 0…1, in two parts that share none: ``train`` and ``held_out``."""

    train: TensorDataset
    held_out: TensorDataset


def load(name: str, *, side: int, seed: int, root: Path | None = None) -> Split:
    """Load a data set by name; ``side`` is in pixels, ``seed`` decides which digits are held out."""
    return cifar10(root) if name == "cifar10" else digits(side, seed)


def digits(side: int, seed: int) -> Split:
    """Return the 1,797 handwritten digits, one in five held out, enlarged from 8x8 to ``side`` pixels."""
    found = needed("sklearn.datasets", "scikit-learn", "'ckptool[train]'").load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).div(16)[:, None]
    labels = torch.tensor(found.target, dtype=torch.int64)
    if side != images.shape[-1]:
        images = F.interpolate(images, size=(side, side), mode="bilinear")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out, train = order[: len(order) // 5], order[len(order) // 5 :]
    return Split(TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out]))


def cifar10(root: Path | None) -> Split:
    """
    Return CIFAR-10 as its publishers split it, from a folder where torchvision finds it. Nothing is
    downloaded.

    Raises:
        MissingPackage: torchvision is not installed.
        FileUnavailable: The folder does not hold the data set.
    """
    datasets = needed("torchvision.datasets", "torchvision", "torchvision")
    folder = root or Path("data")
    try:
        parts = [datasets.CIFAR10(str(folder), train=train) for train in (True, False)]
    except RuntimeError as error:
        raise FileUnavailable(
            "CIFAR-10 is not in this folder",
            path=str(folder),
            hint="Name its folder: --data-dir. torchvision.datasets.CIFAR10(DIR, download=True) fills one.",
        ) from error
    train, held_out = (TensorDataset(_channels_first(part.data), torch.tensor(part.targets)) for part in parts)
    return Split(train, held_out)


def _channels_first(pixels: Any) -> Tensor:
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div(255).contiguous()
