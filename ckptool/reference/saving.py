"""What people put into ``torch.save`` after training: six habits, good and bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckptool.errors import FileUnavailable

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from torch.optim.swa_utils import AveragedModel

    from ckptool.reference.trainer import Trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a training script holds when it comes to save. ``args`` is its command line."""

    wrapped: nn.Module
    ema: AveragedModel
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    epoch: int
    accuracy: float
    args: argparse.Namespace


def parts_of(trained: Trained, args: argparse.Namespace) -> Parts:
    """Return what the trainer itself would save."""
    return Parts(
        wrapped=trained.wrapped,
        ema=trained.ema,
        optimizer=trained.optimizer.state_dict(),
        scheduler=trained.scheduler.state_dict(),
        epoch=len(trained.epochs),
        accuracy=trained.epochs[-1].accuracy if trained.epochs else 0.0,
        args=args,
    )


def training_checkpoint(parts: Parts) -> dict[str, Any]:
    """Return the dictionary that training resumes from, with the two guests that ``weights_only`` refuses."""
    import numpy as np

    return {
        "epoch": parts.epoch,
        "model": parts.wrapped.state_dict(),
        "optimizer": parts.optimizer,
        "scheduler": parts.scheduler,
        "best_accuracy": np.float64(parts.accuracy),
        "args": parts.args,
    }


HABITS: dict[str, Callable[[Parts], Any]] = {
    "state_dict": lambda parts: parts.wrapped.state_dict(),
    "model": lambda parts: parts.wrapped,
    "checkpoint": training_checkpoint,
    "ema": lambda parts: parts.ema.state_dict(),
    "list": lambda parts: [parts.wrapped, parts.ema],
    # The missing parentheses are the point: the method drags the whole model along.
    "method": lambda parts: parts.wrapped.state_dict,
}
"""Ways to save, by what they are called."""


def save(content: Any, target: Path, *, legacy: bool = False, protocol: int = 2) -> None:
    """
    Call ``torch.save`` as users do, in today's zip or in the format from before PyTorch 1.6.

    Raises:
        FileUnavailable: The folder is missing, or nothing may be written there.
    """
    try:
        torch.save(content, target, pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)
    except (OSError, RuntimeError) as error:
        # torch's zip writer reports a missing folder as a RuntimeError of several lines.
        if isinstance(error, OSError) or not target.parent.is_dir():
            reason = str(error).partition("\n")[0]
            raise FileUnavailable(
                f"cannot be written: {reason}",
                path=str(target),
                hint="Name a folder that exists and is yours.",
            ) from error
        raise
