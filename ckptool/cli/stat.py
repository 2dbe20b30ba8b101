"""``ckptool stat``."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import click

from ckptool.checking.value_survey import ValueRow, statistics_of
from ckptool.checkpoints.weights import refuse_archive
from ckptool.cli.options import AnyPath, many_files, remote_options
from ckptool.cli.printing import Failed, Result, say_each
from ckptool.cli.tables import Selection, left_out, limit_of, patterns, rows
from ckptool.cli.text import ProgressLine, can_print
from ckptool.cli.verbs import Command
from ckptool.errors import CkptoolError, about
from ckptool.formats import open_checkpoint
from ckptool.formats.listing import Target
from ckptool.messages import counted, show
from ckptool.sections import Fact, Section, Table, as_json
from ckptool.torch_ops.statistics import Statistics

SCHEMA = "ckptool.stat/1"
_HEADERS: Final = ("name", "dtype", "shape", "mean", "std", "min", "max", "norm", "zeros", "NaN", "inf", "histogram")
_IS_NUMBER: Final = (False, False, False, *(True,) * 8, False)
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS: Final = "12345678"
_SPARE: Final = ("dtype", "shape", "norm", "std")
"""Columns that a narrow terminal does without. Those of odd values are left out only if all rows are equal:"""
_ODD: Final = ("inf", "NaN", "zeros")
_RAW_HEADERS: Final = ("name", "dtype", "shape", "tensors", *Statistics._fields)


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=AnyPath())
@many_files
@click.option(
    "--depth",
    type=click.IntRange(0),
    help="Print one row for all tensors whose names share this many first components.",
)
@patterns
@rows
@remote_options
def stat(files: tuple[str, ...], **options: Any) -> None:
    """
    Say what the values of each tensor are like.

    Shows mean, deviation, range, norm, zeros, NaN and infinities, and a histogram of eight equal parts from the least
    value to the largest. All values are read, piece by piece. A complex value counts as two; a quantised one as its
    integer. Needs numpy, but not torch. Exit code 1 means that a pattern matches no name in any file, or that values of
    a tensor could not be read; 2 that a file could not be read.
    """
    selection = Selection(options)

    @contextmanager
    def look(target: Target, line: ProgressLine) -> Iterator[Result]:
        with open_checkpoint(target.path) as checkpoint:
            if not checkpoint.tensors:
                with about(checkpoint.path):
                    refuse_archive(checkpoint)
            chosen = selection.of(checkpoint)
            found = list(statistics_of(checkpoint, chosen, depth=options["depth"], progress=line))
            nothing = selection.nothing(checkpoint.tensors, chosen)
        yield _Computed(target.shown, found, nothing, limit_of(options))

    def failed(target: Target, error: CkptoolError) -> Result | None:
        if error.kind == "missing-package":
            raise error
        return None if target.passes_over(error) else Failed(target.shown, error, schema=SCHEMA, path=target.shown)

    code = say_each(files, options, look, failed, has_totals=False)
    sys.exit(max(code, int(selection.refused())))


class _Computed(Result):
    """Statistics of the values of a file."""

    def __init__(self, path: str, rows: Sequence[ValueRow], nothing: str | None, limit: int | None) -> None:
        super().__init__(path)
        self._rows = rows
        self._nothing = nothing
        self._limit = limit
        self.exit_code = int(any(row.is_lost for row in rows))

    @property
    def note(self) -> str | None:
        return self._nothing

    def sections(self) -> Iterator[Section]:
        yield show(self.path)
        if self._nothing is not None:
            yield Fact("listed", [self._nothing])
            return
        table = self.table(is_raw=False)
        usual = [one for one in _ODD if len({row[_HEADERS.index(one)] for row in table.rows}) == 1]
        yield table._replace(spare=(*usual, *_SPARE))
        if self._limit is not None and len(self._rows) > self._limit:
            yield left_out(len(self._rows) - self._limit)

    def table(self, *, is_raw: bool) -> Table:
        rows: list[Any] = list(map(_raw if is_raw else _cells, self._rows[: self._limit]))
        return Table(_RAW_HEADERS if is_raw else _HEADERS, rows, _IS_NUMBER)

    def object(self) -> dict[str, object]:
        rows = [as_json(row) for row in self._rows]
        for row in rows:
            del row["is_lost"]  # ``why`` says it
        return {"schema": SCHEMA, "path": self.path, "rows": rows}


def _cells(row: ValueRow) -> list[str]:
    shape = counted(row.tensors, "tensor") if row.shape is None else str(list(row.shape))
    start = [show(row.name) or "(root)", ", ".join(row.dtypes), shape]
    found = row.values
    if found is None:
        return [*start, *("-",) * 8, show(row.why or "")]
    share = f"{found.zeros / found.total:.1%}" if found.total else "-"
    counts = [f"{number:,}" if number else "-" for number in (found.nan, found.infinite)]
    highest, blocks = max(found.histogram), _BLOCKS if can_print(_BLOCKS) else _PLAIN_BLOCKS
    bars = "".join(
        blocks[max(0, math.ceil(len(blocks) * one / highest) - 1)] if one else " " for one in found.histogram
    )
    moments = (found.mean, found.std, found.min, found.max, found.norm)
    return [
        *start,
        *("-" if value is None else f"{value:.4g}" for value in moments),
        share if found.zeros else "-",
        *counts,
        bars,
    ]


def _raw(row: ValueRow) -> list[object]:
    values = row.values or (None,) * len(Statistics._fields)
    return [
        show(row.name),
        ", ".join(row.dtypes),
        None if row.shape is None else list(row.shape),
        row.tensors,
        *(list(value) if isinstance(value, tuple) else value for value in values),
    ]
