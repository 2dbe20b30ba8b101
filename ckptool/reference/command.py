"""
The command that trains a reference net and saves it: ``python -m ckptool.reference``.

For data-parallel training on several devices or processes:
``torchrun --nproc-per-node 2 -m ckptool.reference --wrap ddp``.

Small checkpoints of a net that was trained here, saved in every way in which people save theirs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckptool.errors import CkptoolError, FileUnavailable
from ckptool.reference import trainer
from ckptool.reference.nets import NETS, TiedReader
from ckptool.reference.trainer import (
    HABITS,
    WRAPS,
    Batches,
    Choice,
    Epoch,
    Recipe,
    Trained,
    choose,
    parts_of,
    process_group,
    save,
    train,
)
from ckptool.torch_ops import devices as torch_devices
from ckptool.torch_ops import needed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch


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
    is_cifar = row.data == "cifar10"
    split = trainer.cifar10(args.data_dir) if is_cifar else trainer.digits(row.side, args.seed)
    recipe = Recipe(epochs=args.epochs, batch=args.batch, learning_rate=args.lr, seed=args.seed, wrap=args.wrap)
    log = _open_log(args.logdir, stack) if first and args.logdir else None
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


def _open_log(folder: Path, stack: ExitStack) -> Any:
    needed("tensorboard", "tensorboard", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    return stack.enter_context(SummaryWriter(str(folder)))


def write_fixtures(folder: Path, device: torch.device, tell: Callable[[str], None] = lambda _: None) -> int:
    """
    Train a net for two epochs, and write ``HABIT-WRAPPER-zip.pth`` and ``-legacy.pth`` for each; return their number.

    The wrappers are tried on CUDA alone: elsewhere there is nothing to be parallel over. Files of the same names are
    replaced.

    Raises:
        FileUnavailable: The folder cannot be made or written.
        CkptoolError: scikit-learn, whose digits are trained on, is not installed.
    """
    digits = trainer.digits(28, seed=0)
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
            for habit, content in HABITS.items():
                for container in ("zip", "legacy"):
                    name = f"{habit.replace('_', '-')}-{slug}-{container}.pth"
                    save(content(parts), folder / name, legacy=container == "legacy")
                    tell(name)
                    written += 1
    return written
