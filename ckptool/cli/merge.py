"""``ckptool merge``: adapters into the model that they are for, or the mean of several checkpoints."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import click

from ckptool.cli.migrate import Migrated, NotMigrated, migrate
from ckptool.cli.options import AnyPath
from ckptool.cli.printing import Result, output_for
from ckptool.cli.text import ProgressLine
from ckptool.cli.verbs import Command, flag, takes
from ckptool.errors import CkptoolError
from ckptool.merging.merge import Path
from ckptool.merging.merge import merge as merge_files
from ckptool.migration.changes import Changes
from ckptool.sources.paths import shown_path

_OF_MIGRATE: Final = (
    *("form", "max_shard_size", "config_from", "key", "weights", "dtype", "dequantize"),
    *("force", "dry_run", "quiet", "as_json"),
)
"""Options that are those of ``migrate``."""


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, metavar="BASE [FILE...]", type=AnyPath())
@takes("--lora", "ADAPTER[=X]", "Add this LoRA adapter to BASE, X times as strong. Repeatable.", multiple=True)
@click.option("--scale", type=float, default=1.0, show_default=True, help="Multiply what all adapters add.")
@flag("--average", says="Write the mean of all files, in the types of the first.")
@takes("--shares", "1,2,1", "With --average, how much each file counts.")
@click.option("--ema", type=float, help="With --average, the share that a moving average keeps at each file.")
@flag("--allow-unmatched", says="Leave out what of an adapter fits no weight, and say so.")
@click.option("-o", "--output", "target", required=True, metavar="DST", type=AnyPath(), help="What to write.")
def merge(files: tuple[str, ...], **options: Any) -> None:
    """
    Put LoRA adapters into a checkpoint, or write the mean of several.

    Nothing in the files runs. DST appears when it is complete, read back and compared, in any form that 'migrate'
    writes. Every part of an adapter must fit a weight, by name and shape. Needs torch.

    Exit code 1: refused, because something does not fit; 2: could not be done.
    """
    if options["average"] == bool(options["lora"]):
        raise click.UsageError("give --lora ADAPTER for what is put into BASE, or --average for the mean of all files")
    if options["average"] == (len(files) < 2):
        raise click.UsageError("--average takes two files or more; --lora one, and names each adapter")
    strong: dict[Path, float] = dict(map(_strong, options["lora"]))
    if len(strong) < len(options["lora"]):
        raise click.UsageError("one adapter is given twice: add up its numbers")
    same = {name: options[name] for name in Changes._fields if name in options}
    output = output_for({**options, "as_lines": False}, files[:1], is_list=False, is_bare=options["quiet"])
    line = ProgressLine(1, shown=output.shows_progress)
    line.next(files[0])
    result: Result
    try:
        report = merge_files(
            files[0],
            options["target"],
            lora=strong or None,
            scale=options["scale"],
            average=files[1:] or None,
            shares=_shares(options["shares"]),
            ema=options["ema"],
            force=options["force"],
            dry_run=options["dry_run"],
            progress=line,
            read_back=line.read_back,
            **same,
        )
        result = Migrated(report, quiet=options["quiet"])
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except CkptoolError as error:
        result = NotMigrated(shown_path(files[0]), error)
    line.clear()
    output.add(result)
    output.end()
    sys.exit(result.exit_code)


merge.params.extend(one for one in migrate.params if one.name in _OF_MIGRATE)


def _strong(text: str) -> tuple[str, float]:
    """Return the path of an adapter, and its factor."""
    path, equals, number = text.rpartition("=")
    if not equals or os.path.lexists(text):
        return text, 1.0
    try:
        return path, float(number)
    except ValueError as error:
        if os.path.lexists(path):
            raise click.BadParameter(f"not a number: {number!r}, in {text}", param_hint="--lora") from error
        return text, 1.0


def _shares(text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(one) for one in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"not numbers with commas between them: {text}", param_hint="--shares") from error
