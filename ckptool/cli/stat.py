"""``ckptool stat``: what the values in checkpoints are like."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from typing import Final

import click

from ckptool.checking.value_statistics import ValueRow, statistics_of
from ckptool.cli import tables
from ckptool.cli.inspect import Selection, pattern
from ckptool.cli.json_output import error_object, print_json
from ckptool.cli.paths import AnyPath, far_options
from ckptool.cli.text import error_text, say
from ckptool.errors import CkptoolError
from ckptool.formats import open_checkpoint
from ckptool.messages import show
from ckptool.names.filter import Filter
from ckptool.sources.files import shown_path
from ckptool.tables import plain_table

SCHEMA = "ckptool.stat/1"
_HEADERS: Final = ("name", "dtype", "shape", "mean", "std", "min", "max", "norm", "zeros", "NaN", "inf", "histogram")
_IS_NUMBER: Final = (False, False, False, *(True,) * 8, False)
_BLOCKS: Final = "▁▂▃▄▅▆▇█"


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=AnyPath())
@click.option("--depth", type=click.IntRange(0), help="Take the tensors of a module together, by so many components.")
@click.option("--grep", metavar="REGEX", help="Look only at tensors whose name matches.")
@click.option("--include", multiple=True, metavar="GLOB", help="Look only at names that match a glob. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out names that match a glob. Repeatable.")
@click.option("--table", "table_format", metavar="FORMAT", help="Table format: github, csv, or any of tabulate's.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object for each file; a list if there are several."
)
@far_options
def stat(
    files: tuple[str, ...],
    *,
    depth: int | None,
    grep: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    table_format: str | None,
    as_json: bool,
) -> None:
    """
    Say what the values of each tensor are like.

    Mean, deviation, range, norm, zeros, NaN and infinities, and how values spread from the least to the largest in
    eight equal parts. All of a tensor is read, piece by piece. Complex values count as two; quantised ones as their
    integers. Needs numpy, and no torch. Exit code 2 means that a file could not be read.
    """
    selection = Selection(pattern(grep), Filter(include, exclude), "file")
    if table_format is not None and table_format not in tables.table_formats():
        raise click.BadParameter(f"choose from {', '.join(tables.table_formats())}", param_hint="--table")
    failed = False
    for number, path in enumerate(files):
        try:
            with open_checkpoint(path) as checkpoint:
                chosen = selection.of(checkpoint.tensors.values())
                rows = list(statistics_of(checkpoint, chosen, depth=depth))
                nothing = selection.nothing(checkpoint.tensors, chosen)
        except CkptoolError as error:
            if error.kind == "missing-package":
                raise
            failed = True
            if as_json:
                print_json(
                    {"schema": SCHEMA, "path": shown_path(path), "error": error_object(error)}, number, len(files)
                )
            else:
                say(error_text(error), err=True)
            continue
        if as_json:
            objects = [_object(row) for row in rows]
            print_json({"schema": SCHEMA, "path": path, "rows": objects}, number, len(files))
            continue
        if table_format is None:
            say("\n" * bool(number) + show(path))
        say(nothing if nothing is not None else "\n".join(_lines(rows, table_format)))
    sys.exit(2 if failed else 0)


def _lines(rows: list[ValueRow], table_format: str | None) -> Iterator[str]:
    cells = [_cells(row) for row in rows]
    if table_format is not None:
        yield tables.formatted_table(_HEADERS, cells, _IS_NUMBER, table_format)
        return
    width = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None
    yield from plain_table(_HEADERS, cells, _IS_NUMBER, width)


def _cells(row: ValueRow) -> list[str]:
    shape = f"{row.tensors:,} tensors" if row.shape is None else str(list(row.shape))
    start = [show(row.name) or "(root)", ", ".join(row.dtypes), shape]
    found = row.values
    if found is None:
        return [*start, *("-",) * 8, show(row.why or "")]
    share = f"{found.zeros / found.total:.1%}" if found.total else "-"
    counts = [f"{number:,}" if number else "-" for number in (found.nan, found.infinite)]
    moments = (found.mean, found.std, found.min, found.max, found.norm)
    return [*start, *map(_number, moments), share if found.zeros else "-", *counts, _bars(found.histogram)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _bars(histogram: tuple[int, ...]) -> str:
    """Return a histogram as blocks: the height of each part beside the highest, and a blank where nothing is."""
    highest = max(histogram)
    return "".join(
        " " if not number else _BLOCKS[max(0, math.ceil(len(_BLOCKS) * number / highest) - 1)] for number in histogram
    )


def _object(row: ValueRow) -> dict[str, object]:
    found = row._asdict() | {"dtypes": list(row.dtypes), "shape": None if row.shape is None else list(row.shape)}
    if row.values is not None:
        found["values"] = row.values._asdict() | {"histogram": list(row.values.histogram)}
    return found
