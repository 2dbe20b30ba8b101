"""``ckptool report``: a page to look at, of one checkpoint or of two."""

from __future__ import annotations

import sys
from typing import Any

import click

from ckptool.cli.options import AnyPath, remote_options
from ckptool.cli.page.report import page_path
from ckptool.cli.page.report import report as write_page
from ckptool.cli.text import ProgressLine, error_text, say
from ckptool.cli.verbs import Command, flag, takes
from ckptool.messages import show


@click.command(cls=Command)
@click.argument("file", metavar="FILE", type=AnyPath())
@click.argument("other", metavar="[OTHER]", required=False, type=AnyPath())
@click.option("-o", "--output", required=True, metavar="PAGE", type=AnyPath(), help="Write the page here.")
@click.option(
    "--values/--no-values",
    default=None,
    help="Also show statistics and histograms of the values and, for two files, how alike tensors are. Needs numpy. "
    "The values of two files are compared in any case, unless --no-values is given.",
)
@takes("--key-a", "PATH", "Which state dict of FILE to compare with OTHER.")
@takes("--key-b", "PATH", "Which state dict of OTHER to compare.")
@flag("--ignore-wrappers", says="Compare names without what training wrappers added to them.")
@flag("--digest", says="Read all of each file; show its SHA-256 and the digest of its weights at the foot.")
@flag("--force", says="Overwrite what exists.")
@remote_options
def report(file: str, other: str | None, output: str, *, digest: bool, **options: Any) -> None:
    """
    Write a page to look at: what is in a checkpoint, or where two differ.

    The page is one file of HTML that needs no network. It shows what the file is, what is notable about it, with
    commands to copy, its modules by size, and all tensors in a table to search and sort. With OTHER, it shows what
    differs and by how much. The same files make the same page. Exit code 2 means that a file could not be read; if it
    exists, the page says why. Nobody may read the page who may not read the files.
    """
    if other is None and any(options[name] for name in ("key_a", "key_b", "ignore_wrappers")):
        raise click.UsageError("--key-a, --key-b and --ignore-wrappers are about two files: give OTHER, too.")
    try:
        page_path(output, (file, other))
    except ValueError as refused:
        raise click.BadParameter(str(refused), param_hint="--output") from refused
    line = ProgressLine()
    line.next(other or file)
    try:
        error = write_page(file, output, other, digest=digest, progress=line, **options)
    finally:
        line.clear()
    if error is not None:
        say(error_text(error), err=True)
    say(f"{show(output)}: written")
    sys.exit(0 if error is None else 2)
