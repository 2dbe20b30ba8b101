"""
Trains a net, and saves it as people do: six habits, good and bad.

Images to train on that need no download: scikit-learn's digits, and CIFAR-10 where it is already there.

``python -m ckptool.reference`` is the command. For data-parallel training on several devices or processes:
``torchrun --nproc-per-node 2 -m ckptool.reference --wrap ddp``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ckptool.errors import CkptoolError, FileUnavailable
from ckptool.reference.nets import NETS, TiedReader
from ckptool.torch_ops import devices as torch_devices
from ckptool.torch_ops import needed
from ckptool.torch_ops.devices import DeviceReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


Batches: TypeAlias = "DataLoader[tuple[Tensor, ...]]"
EMA_DECAY = 0.99
WRAPS = ("none", "data-parallel", "ddp", "compile")


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


def ema_average(averaged: Tensor, current: Tensor, _steps: int | Tensor) -> Tensor:
    """Move an averaged parameter towards the current one. A whole AveragedModel pickles this by name."""
    return averaged.lerp(current, 1 - EMA_DECAY)


def train(
    build: Callable[[], nn.Module],
    split: Split,
    recipe: Recipe,
    device: torch.device,
    tell: Callable[[Epoch], None] = lambda _: None,
    steps: Callable[[Batches, int], AbstractContextManager[Iterable[Any]]] = lambda batches, _: nullcontext(batches),
) -> Trained:
    """
    Build a net and train it with AdamW and a cosine schedule, keeping an exponential average of its weights.

    After each epoch ``tell`` gets it; ``steps`` goes round the batches of one.

    With the ``ddp`` wrapper every process of the group calls this with the same arguments and trains on its
    own part of each epoch. Random numbers elsewhere in the process are left as they were.
    """
    numbers = [device.index or 0] if device.type == "cuda" else []
    # cuDNN is kept to algorithms that give the same sums twice.
    with torch.random.fork_rng(numbers), torch.backends.cudnn.flags(benchmark=False, deterministic=True):
        torch.manual_seed(recipe.seed)
        model = build().to(device)
        wrapped = wrap(model, recipe.wrap, device)
        if recipe.wrap == "ddp":
            share: DistributedSampler[Any] = DistributedSampler(split.train, seed=recipe.seed)
            batches = DataLoader(split.train, max(1, recipe.batch // dist.get_world_size()), sampler=share)
        else:
            generator = torch.Generator().manual_seed(recipe.seed)
            batches = DataLoader(split.train, recipe.batch, shuffle=True, generator=generator)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=recipe.learning_rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(recipe.epochs * len(batches), 1))
        ema = AveragedModel(model, avg_fn=ema_average)
        trained = Trained(model, wrapped, ema, optimizer, scheduler, recipe, [])
        for number in range(1, recipe.epochs + 1):
            if isinstance(batches.sampler, DistributedSampler):
                batches.sampler.set_epoch(number)
            with steps(batches, number) as watched:
                loss = _one_epoch(trained, watched, device)
            epoch = Epoch(number, loss, accuracy(model, split.held_out, device))
            trained.epochs.append(epoch)
            tell(epoch)
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


@contextmanager
def process_group(device: torch.device) -> Iterator[int]:
    """
    Join the processes that torchrun started, or be a group of one where it started none; yield their number.

    Does nothing where a group exists already.
    """
    if dist.is_initialized():
        yield dist.get_world_size()
        return
    # What processes talk through for a device: what torch, or the maker of the device, names for it.
    named: dict[str, str] = getattr(dist.Backend, "default_device_backend_map", {"cuda": "nccl"})
    backend = named.get(device.type, "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        # A store in this process: no port, no file. torch does not list it among its exports.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield dist.get_world_size()
    finally:
        dist.destroy_process_group()


def wrap(model: nn.Module, how: str, device: torch.device) -> nn.Module:
    """Wrap a model that is on ``device`` already. ``ddp`` needs a process group."""
    numbers = None if device.type != "cuda" else [device.index or 0]
    if how == "none":
        return model
    if how == "data-parallel":
        return nn.DataParallel(model, device_ids=numbers)
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=numbers)
    with warnings.catch_warnings():
        # Importing the compiler uses torch's own deprecated functions.
        warnings.simplefilter("ignore", DeprecationWarning)
        return cast("nn.Module", torch.compile(model))


@dataclass(frozen=True, slots=True)
class Choice:
    """A device and the reason for it, in words that complete "training on …:"."""

    device: torch.device
    why: str


def choose(request: str, report: DeviceReport, *, local_rank: int | None = None) -> Choice:
    """
    Turn ``auto``, a kind of device or a tag, as ``cuda`` or ``cuda:1``, into a device of the report.

    ``auto`` takes CUDA, else what else the machine has beside the CPU, else the CPU. Of a kind the device with the most
    free memory is taken. Under torchrun ``local_rank`` takes the place of that choice, so that no two processes share
    a device.

    Raises:
        CkptoolError: The machine has no such device; the message says why.
    """
    missing, kinds = report.cuda_missing, [device.tag.partition(":")[0] for device in report.devices]
    wanted = request
    if request == "auto":
        wanted = next((kind for kind in ("cuda", *kinds) if kind in kinds and kind != "cpu"), "cpu")
    found = [device for device, kind in zip(report.devices, kinds, strict=True) if wanted in (kind, device.tag)]
    if not found:
        if missing is not None and wanted.partition(":")[0] == "cuda":
            raise _unavailable(request, missing.message, missing.hint)
        tags = ", ".join(device.tag for device in report.devices)
        raise _unavailable(request, f"this machine has {tags}", "Use auto, or a device that 'ckptool devices' lists.")
    taken = Choice(torch.device(found[0].tag), "asked for")
    if wanted not in (found[0].tag, "cpu"):
        if local_rank is not None and local_rank >= len(found):
            raise _unavailable(
                f"{wanted}:{local_rank}",
                f"{len(found)} devices of this kind, and a process for each of at least {local_rank + 1}",
                f"Start at most {len(found)} processes: torchrun --nproc-per-node {len(found)}.",
            )
        if local_rank is not None:
            taken = Choice(torch.device(found[local_rank].tag), f"local rank {local_rank}")
        else:
            best = max(found, key=lambda device: device.free_nbytes or 0)
            free = f"{(best.free_nbytes or 0) / 2**30:,.1f} GiB free, the most of {len(found)} device(s) of its kind"
            why = best.name if best.free_nbytes is None else f"{best.name}, {free}"
            taken = Choice(torch.device(best.tag), why)
    if request == "auto" and wanted != "cuda":
        return Choice(taken.device, missing.message if missing else "torch lists no CUDA device")
    return taken


def _unavailable(tag: str, reason: str, hint: str) -> CkptoolError:
    return CkptoolError(f"no device '{tag}' to train on: {reason}", kind="no-such-device", hint=hint)


@dataclass(frozen=True, slots=True)
class Split:
    """Labelled images, NxCxHxW in 0…1, in two parts that share none: ``train`` and ``held_out``."""

    train: TensorDataset
    held_out: TensorDataset


def digits(side: int, seed: int) -> Split:
    """Return the 1,797 handwritten digits, one in five held out, enlarged from 8x8 to ``side`` pixels."""
    found = needed("sklearn.datasets", "scikit-learn", '"ckptool[train]"').load_digits()
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
    pixels = [torch.from_numpy(part.data).permute(0, 3, 1, 2).float().div(255).contiguous() for part in parts]
    return Split(*(TensorDataset(one, torch.tensor(part.targets)) for one, part in zip(pixels, parts, strict=True)))


# What is saved


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


# The command


_USUAL = Recipe()


@click.command()
@click.option("--net", type=click.Choice(list(NETS)), default="lenet", show_default=True)
@click.option(
    "--data-dir", type=click.Path(path_type=Path), help="Where CIFAR-10 is, for --net cifar.  [default: data]"
)
@click.option("--epochs", type=click.IntRange(1), default=_USUAL.epochs, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=_USUAL.batch, show_default=True, help="Images per step.")
@click.option("--lr", type=click.FloatRange(0), default=_USUAL.learning_rate, show_default=True)
@click.option("--seed", type=int, default=_USUAL.seed, show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, or what 'ckptool devices' lists.")
@click.option("--wrap", type=click.Choice(WRAPS), default=_USUAL.wrap, show_default=True)
@click.option("--save", "target", type=click.Path(path_type=Path), help="Write a checkpoint here.")
@click.option("--save-as", type=click.Choice(list(HABITS)), default="state_dict", show_default=True)
@click.option("--legacy", is_flag=True, help="Save in the format from before PyTorch 1.6.")
@click.option("--logdir", type=click.Path(path_type=Path), help="Write a TensorBoard log here.")
def main(**options: Any) -> None:
    """Train a small net for real and save it the way that people save theirs."""
    try:
        run(argparse.Namespace(**options))
    except CkptoolError as error:
        click.echo(f"Error: {error}", err=True)
        if error.hint and error.hint not in error.message:
            click.echo(f"Hint: {error.hint}", err=True)
        if error.command and error.command not in error.message:
            click.echo(f"Run: {error.command}", err=True)
        sys.exit(2)


def run(args: argparse.Namespace) -> None:
    """Do what the command line says. Under torchrun, only the first process speaks and saves."""
    # torchrun tells each process its place by environment variables, as it does the scripts of its users.
    local_rank = int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None
    first = os.environ.get("RANK", "0") == "0"
    if args.target is not None and not args.target.parent.is_dir():
        # Better before the training than after it.
        raise FileUnavailable("its folder does not exist", path=str(args.target), hint="Make the folder first.")
    report = torch_devices.devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    choice = choose(args.device, report, local_rank=local_rank)
    with ExitStack() as stack:
        processes = stack.enter_context(process_group(choice.device)) if args.wrap == "ddp" else 1
        if first:
            shared = f", {processes} processes" if processes > 1 else ""
            click.echo(f"training on {choice.device}{shared}: {choice.why}", err=True)
        trained = _train(args, choice, stack, first=first)
        if first and args.target is not None:
            save(HABITS[args.save_as](parts_of(trained, args)), args.target, legacy=args.legacy)
            click.echo(f"saved {args.save_as} to {args.target}")


def _train(args: argparse.Namespace, choice: Choice, stack: ExitStack, *, first: bool) -> Trained:
    row = NETS[args.net]
    split = cifar10(args.data_dir) if row.data == "cifar10" else digits(row.side, args.seed)
    recipe = Recipe(epochs=args.epochs, batch=args.batch, learning_rate=args.lr, seed=args.seed, wrap=args.wrap)
    log = None
    if first and args.logdir:
        needed("tensorboard", "tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        log = stack.enter_context(SummaryWriter(str(args.logdir)))
    started = time.monotonic()

    def tell(epoch: Epoch) -> None:
        seconds = time.monotonic() - started
        click.echo(
            f"epoch {epoch.number:>3}/{recipe.epochs}   loss {epoch.loss:.4f}   "
            f"held-out accuracy {epoch.accuracy:.2%}   {seconds:5.1f} s"
        )
        if log is not None:
            log.add_scalar("loss/train", epoch.loss, epoch.number)
            log.add_scalar("accuracy/held-out", epoch.accuracy, epoch.number)

    if not first:
        return train(row.build, split, recipe, choice.device)
    return train(row.build, split, recipe, choice.device, tell, _progress)


def _progress(batches: Batches, number: int) -> AbstractContextManager[Iterable[Any]]:
    if not sys.stderr.isatty():
        return nullcontext(batches)
    return click.progressbar(batches, label=f"epoch {number:>3}", length=len(batches), file=sys.stderr)


def write_fixtures(folder: Path, device: torch.device, tell: Callable[[str], None] = lambda _: None) -> int:
    """
    Train a net for two epochs, and write ``HABIT-WRAPPER-zip.pth`` and ``-legacy.pth`` for each; return their number.

    The wrappers are tried on CUDA alone: elsewhere there is nothing to be parallel over. Files of the same names are
    replaced.

    Raises:
        FileUnavailable: The folder cannot be made or written.
        CkptoolError: scikit-learn, whose digits are trained on, is not installed.
    """
    split = digits(28, seed=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"fixtures cannot be written here: {error.strerror or error}"
        raise FileUnavailable(what, path=str(folder), hint="Name a folder that is yours to write.") from error
    written = 0
    with warnings.catch_warnings(), process_group(device):
        warnings.simplefilter("ignore")  # torch warns of all that is old, which half of these files are
        for wrapper in WRAPS if device.type == "cuda" else WRAPS[:1]:
            trained = train(lambda: TiedReader(16), split, Recipe(epochs=2, wrap=wrapper), device)
            parts = parts_of(trained, argparse.Namespace(net="tied", wrap=wrapper, device=device))
            slug = "plain" if wrapper == "none" else wrapper
            for habit, content in HABITS.items():
                for container in ("zip", "legacy"):
                    name = f"{habit.replace('_', '-')}-{slug}-{container}.pth"
                    save(content(parts), folder / name, legacy=container == "legacy")
                    tell(name)
                    written += 1
    return written
