"""``ckptool report``: a page to look at, of one checkpoint or of two."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import click

from ckptool import __version__
from ckptool.checking.check import CheckReport
from ckptool.checking.check import check as check_file
from ckptool.checking.value_survey import ValueRow, facts_of, statistics_of, survey
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.cli.page import (
    add_values,
    compared_rows,
    comparison_facts,
    document,
    file_facts,
    packed,
    parts_of,
    report_facts,
    tensor_rows,
)
from ckptool.cli.targets import AnyPath, far_options
from ckptool.cli.text import ProgressLine, error_text, say
from ckptool.cli.verbs import Command, flag, takes
from ckptool.diffing.diff import diff as diff_files
from ckptool.diffing.sides import side_of
from ckptool.errors import CkptoolError, FileUnavailable
from ckptool.formats import open_checkpoint
from ckptool.limits import DEFAULT_LIMITS
from ckptool.messages import show
from ckptool.migration.output import Output
from ckptool.migration.output.opening import mode_of
from ckptool.sources.paths import is_same_file
from ckptool.sources.source import SILENT
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity
from ckptool.torch_ops.values import ValueFacts

SCHEMA = "ckptool.page/2"


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
@flag("--force", says="Overwrite what exists.")
@far_options
def report(file: str, other: str | None, output: str, *, force: bool, values: bool | None, **sides: Any) -> None:
    """
    Write a page to look at: what is in a checkpoint, or where two differ.

    The page is one file of HTML that needs no network. It shows what the file is, what is notable about it, with
    commands to copy, its modules by size, and all tensors in a table to search and sort. With OTHER, it shows what
    differs and by how much. The same files make the same page. Exit code 2 means that a file could not be read; if it
    exists, the page says why. Nobody may read the page who may not read the files.
    """
    if other is None and any(sides.values()):
        raise click.UsageError("--key-a, --key-b and --ignore-wrappers are about two files: give OTHER, too.")
    line = ProgressLine()
    error: CkptoolError | None = None
    with Output(_page_path(output, (file, other)), force=force, shown=output) as page:
        # It is there before anything is read: a name that cannot be written to is said at once.
        try:
            if other is None:
                content, error = _of_one(file, line, page, with_values=bool(values))
            else:
                content = _of_two(file, other, line, page, values=values, **sides)
        finally:
            line.clear()
        page.write(content)
        page.publish()
    if error is not None:
        say(error_text(error), err=True)
    say(f"{show(output)}: written")
    sys.exit(0 if error is None else 2)


def _page_path(output: str, files: tuple[str, str | None]) -> str:
    """Return the path of the page; refuse one under which something else was meant, or that is read."""
    if "://" in output:
        raise click.BadParameter("an address, and pages are written to files here", param_hint="--output")
    stem, suffix = os.path.splitext(output)
    if suffix.lower() not in (".html", ".htm"):
        raise click.BadParameter(f"a page is a file of HTML: name it {show(stem)}.html", param_hint="--output")
    if any(one is not None and is_same_file(output, one.partition("::")[0]) for one in files):
        raise click.BadParameter(f"{show(output)} is what is read: write to another file", param_hint="--output")
    return output


def _of_one(path: str, line: ProgressLine, page: Output, *, with_values: bool) -> tuple[bytes, CkptoolError | None]:
    """Return a page of one file, and why that cannot be opened."""
    found = check_file(path)
    if found.error is not None:
        if isinstance(found.error, FileUnavailable) and not os.path.isdir(path):
            raise found.error
        with suppress(OSError, ValueError):  # far away
            page.narrow(os.stat(path.partition("::")[0]).st_mode)
        return _page([report_facts(found)]), found.error
    with open_checkpoint(path) as checkpoint:
        parts = parts_of(checkpoint)
        rows = tensor_rows(parts)
        if with_values:
            line.next(path)
            found_rows: list[ValueRow] = []
            for head, one in parts.items():
                tensors = [*one.tensors.values(), *one.attributes.values()]
                own = list(_rows(one, tensors, line))
                found_rows += own[: len(one.tensors)]
                found = _with_values(found, one, zip(tensors, own, strict=True), f"{head[:-1]}: " if head else "")
            add_values(rows, found_rows)
        facts = file_facts(checkpoint, found)
        page.narrow(mode_of(checkpoint.source))
        checkpoint.check_unchanged()
    return _page([facts], rows), None


def _of_two(a: str, b: str, line: ProgressLine, page: Output, *, values: bool | None, **sides: Any) -> bytes:
    """Return a page of two files, and of where they differ; without ``values``, these are compared, and no more."""
    line.next(b)
    compared = diff_files(a, b, values=values is not False, stat=bool(values), progress=line, **sides)
    with ExitStack() as stack:
        checkpoints = [stack.enter_context(open_checkpoint(path)) for path in (a, b)]
        both = []
        for one, label in zip(checkpoints, "ab", strict=True):
            side = side_of(one, compared.scope, sides[f"key_{label}"], label, aligned=sides["ignore_wrappers"])
            both.append(side.tensors | side.attributes)
        rows = compared_rows(compared, *both)
        found = [check_file(path) for path in (a, b)]
        if values:
            names = dict.fromkeys((*both[0], *both[1]))
            for at, (one, tensors) in enumerate(zip(checkpoints, both, strict=True)):
                line.next(one.path)
                own = dict(zip(tensors, _rows(one, list(tensors.values()), line), strict=True))
                add_values(rows, map(own.get, names))
                found[at] = _with_values(found[at], one, zip(tensors.values(), own.values(), strict=True))
        facts = [file_facts(*one) for one in zip(checkpoints, found, strict=True)]
        for one in checkpoints:
            page.narrow(mode_of(one.source))
            one.check_unchanged()
    return _page(facts, rows, comparison_facts(compared))


def _with_values(
    found: CheckReport, checkpoint: Checkpoint, rows: Iterable[tuple[LazyTensor, ValueRow]], head: str = ""
) -> CheckReport:
    """Return what was found in a file, with what is odd about the values of a checkpoint in it, as `check` says it."""
    by_place = {identity(tensor.info): row for tensor, row in rows}

    def known(tensor: LazyTensor) -> ValueFacts | str:
        row = by_place.get(identity(tensor.info))
        return "they are not compared" if row is None else facts_of(row, tensor)

    odd = (one._replace(message=f"{head}{one.message}") for one in survey(checkpoint, DEFAULT_LIMITS, SILENT, known))
    return found._replace(depth="values", findings=(*found.findings, *odd))


def _rows(checkpoint: Checkpoint, tensors: Sequence[LazyTensor], line: ProgressLine) -> Iterator[ValueRow]:
    return statistics_of(checkpoint, tensors, depth=None, progress=line)


def _page(
    files: list[dict[str, object]], rows: Sequence[dict[str, Any]] | None = None, compared: object = None
) -> bytes:
    title = " and ".join(str(file["name"]) for file in files)
    content = {
        "schema": SCHEMA,
        "version": __version__,
        "files": files,
        "compared": compared,
        "tensors": None if rows is None else packed(rows),
    }
    return document(title, content)
