"""Trains a reference net for real, and returns the model with all else that a checkpoint holds."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ckptool.reference.wraps import wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptool.reference.data import Split

Batches: TypeAlias = "DataLoader[tuple[Tensor, ...]]"
EMA_DECAY = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What decides the weights: the same recipe on the same device gives the same ones again."""

    epochs: int = 12
    batch: int = 32
    """Images per step, over all processes."""
    learning_rate: float = 2e-3
    seed: int = 0
    wrap: str = "none"


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch: mean loss over the training images, and the part of the held-out ones that was right."""

    number: int
    loss: float
    accuracy: float


@dataclass(slots=True)
class Trained:
    """Everything that a training checkpoint is made of. ``wrapped`` holds ``model``; ``ema`` averages it."""

    model: nn.Module
    wrapped: nn.Module
    ema: AveragedModel
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    recipe: Recipe
    epochs: list[Epoch]


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told: ``epoch`` after each epoch, ``steps`` to go round the batches of one."""

    epoch: Callable[[Epoch], None] = lambda _: None
    steps: Callable[[Batches, int], AbstractContextManager[Iterable[Any]]] = lambda batches, _: nullcontext(batches)


def ema_average(averaged: Tensor, current: Tensor, _steps: int | Tensor) -> Tensor:
    """Move an averaged parameter towards the current one. A whole AveragedModel pickles this by name."""
    return averaged.lerp(current, 1 - EMA_DECAY)


def train(
    build: Callable[[], nn.Module],
    split: Split,
    recipe: Recipe,
    device: torch.device,
    watch: Watch | None = None,
) -> Trained:
    """
    Build a net and train it with AdamW and a cosine schedule, keeping an exponential average of its weights.

    With the ``ddp`` wrapper every process of the group calls this with the same arguments and trains on its
    own part of each epoch. Random numbers elsewhere in the process are left as they were.
    """
    watch = watch or Watch()
    with _repeatable(recipe.seed, device):
        model = build().to(device)
        wrapped = wrap(model, recipe.wrap, device)
        batches = _batches(split.train, recipe)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=recipe.learning_rate)
        steps = recipe.epochs * len(batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(steps, 1))
        ema = AveragedModel(model, avg_fn=ema_average)
        trained = Trained(model, wrapped, ema, optimizer, scheduler, recipe, [])
        for number in range(1, recipe.epochs + 1):
            if isinstance(batches.sampler, DistributedSampler):
                batches.sampler.set_epoch(number)
            with watch.steps(batches, number) as watched:
                loss = _one_epoch(trained, watched, device)
            epoch = Epoch(number, loss, accuracy(model, split.held_out, device))
            trained.epochs.append(epoch)
            watch.epoch(epoch)
    return trained


@torch.no_grad()
def accuracy(model: nn.Module, held_out: TensorDataset, device: torch.device) -> float:
    """Return the part of the images, 0 to 1, to which the model gives their label."""
    training = model.training
    model.eval()
    right = seen = 0
    for images, labels in DataLoader(held_out, batch_size=512):
        answers = model(images.to(device)).argmax(1)
        right += int((answers == labels.to(device)).sum())
        seen += len(labels)
    model.train(training)
    return right / max(seen, 1)


def _one_epoch(trained: Trained, batches: Iterable[Any], device: torch.device) -> float:
    trained.wrapped.train()
    total = torch.zeros(2, device=device)
    for images, labels in batches:
        loss = F.cross_entropy(trained.wrapped(images.to(device)), labels.to(device))
        trained.optimizer.zero_grad()
        # torch's own annotation of backward is missing.
        loss.backward()  # type: ignore[no-untyped-call]
        trained.optimizer.step()
        trained.scheduler.step()
        trained.ema.update_parameters(trained.model)
        total += torch.stack([loss.detach() * len(labels), torch.tensor(float(len(labels)), device=device)])
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total[0] / total[1])


def _batches(train_set: TensorDataset, recipe: Recipe) -> Batches:
    if recipe.wrap == "ddp":
        share: DistributedSampler[Any] = DistributedSampler(train_set, seed=recipe.seed)
        return DataLoader(train_set, max(1, recipe.batch // dist.get_world_size()), sampler=share)
    generator = torch.Generator().manual_seed(recipe.seed)
    return DataLoader(train_set, recipe.batch, shuffle=True, generator=generator)


@contextmanager
def _repeatable(seed: int, device: torch.device) -> Iterator[None]:
    """Fix the seed and keep cuDNN to algorithms that give the same sums twice; undo both at the end."""
    numbers = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(numbers), torch.backends.cudnn.flags(benchmark=False, deterministic=True):
        torch.manual_seed(seed)
        yield
