"""``ckptool example``: a small checkpoint to try the verbs on."""

from __future__ import annotations

from pathlib import Path

import click

import ckptool.system as system
from ckptool.cli.text import say
from ckptool.cli.verbs import Command, flag
from ckptool.migration.migrate import migrate


@click.command(cls=Command)
@click.argument("target", metavar="[PATH]", default="example.pth")
@flag("--force", says="Replace a file that is there.")
def example(target: str, *, force: bool) -> None:
    """
    Write a small checkpoint to try the verbs on.

    It is what a training under DistributedDataParallel on a GPU leaves behind: 11 KB, written to PATH, by default
    example.pth. It needs no torch.
    """
    migrate(Path(__file__).with_name("example.pth"), target, form="same", force=force)
    say(f"{target}: written\nRun: ckptool {system.quoted(target)}")
