"""``ckptool stat``: what the values in checkpoints are like."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import click

from ckptool.checking.value_survey import ValueRow, statistics_of
from ckptool.checkpoints.tables import Table, fitted, plain_table
from ckptool.cli import tables
from ckptool.cli.json_output import JsonOutput, error_object
from ckptool.cli.options import allow_unmatched_option, left_out, limit_of, many_files, no_room, refuse_idle, rows
from ckptool.cli.tables import selection_of
from ckptool.cli.targets import AnyPath, far_options, is_many, refuse_none, targets
from ckptool.cli.text import ProgressLine, error_text, pager, say, terminal_width, wrapped
from ckptool.cli.verbs import Command
from ckptool.errors import CkptoolError
from ckptool.formats import open_checkpoint
from ckptool.messages import show
from ckptool.torch_ops.statistics import Statistics

SCHEMA = "ckptool.stat/1"
_HEADERS: Final = ("name", "dtype", "shape", "mean", "std", "min", "max", "norm", "zeros", "NaN", "inf", "histogram")
_IS_NUMBER: Final = (False, False, False, *(True,) * 8, False)
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_SPARE: Final = ("dtype", "shape", "norm", "std")
_SPARE_IF_SAME: Final = ("inf", "NaN", "zeros")
"""Columns that a narrow terminal does without; what is odd about values stays."""
_RAW_HEADERS: Final = ("name", "dtype", "shape", "tensors", *Statistics._fields)


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=AnyPath())
@many_files
@click.option(
    "--depth",
    type=click.IntRange(0),
    help="Print one row for all tensors whose names share this many first components.",
)
@click.option("--grep", metavar="REGEX", help="Look only at tensors whose name matches.")
@click.option("--include", multiple=True, metavar="GLOB", help="Look only at names that match a glob. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out names that match a glob. Repeatable.")
@allow_unmatched_option
@rows
@far_options
def stat(files: tuple[str, ...], **options: Any) -> None:
    """
    Say what the values of each tensor are like.

    Shows mean, deviation, range, norm, zeros, NaN and infinities, and a histogram of eight equal parts from the least
    value to the largest. All values are read, piece by piece. A complex value counts as two; a quantised one as its
    integer. Needs numpy, but not torch. Exit code 1 means that a pattern matches no name in any file, or that values of
    a tensor could not be read; 2 that a file could not be read.
    """
    refuse_idle()
    selection = selection_of(options)
    found = targets(files, recursive=options["recursive"])
    failed, incomplete, passed = False, False, 0
    with pager(asked=options["pager"]):
        output = _output(options, is_list=is_many(files, found))
        line = ProgressLine(len(found), shown=not isinstance(output, _Objects))
        for target in found:
            line.next(target.path)
            try:
                with open_checkpoint(target.path) as checkpoint:
                    chosen = selection.of(checkpoint)
                    found_rows = list(statistics_of(checkpoint, chosen, depth=options["depth"], progress=line))
                    nothing = selection.nothing(checkpoint.tensors, chosen)
            except CkptoolError as error:
                line.clear()
                if error.kind == "missing-package":
                    raise
                if target.passes_over(error):
                    passed += 1
                else:
                    failed = True
                    output.failed(target.shown, error)
                continue
            line.clear()
            incomplete = incomplete or any(row.is_lost for row in found_rows)
            output.computed(target.shown, found_rows, nothing)
        output.end()
    refuse_none(passed, found, files)
    refused = selection.refused()
    sys.exit(2 if failed else int(refused or incomplete))


def _output(options: dict[str, Any], *, is_list: bool) -> _Objects | _Pasted | _Tables:
    if options["as_json"] or options["as_lines"]:
        return _Objects(JsonOutput(as_lines=options["as_lines"], is_list=is_list))
    if options["table_format"] is not None:
        return _Pasted(options["table_format"], limit_of(options), has_paths=is_list)
    return _Tables(limit_of(options), None if options["wide"] else terminal_width())


class _Objects:
    """JSON."""

    def __init__(self, output: JsonOutput) -> None:
        self._output = output

    def computed(self, path: str, rows: Sequence[ValueRow], _: str | None) -> None:
        self._output.add({"schema": SCHEMA, "path": path, "rows": [_object(row) for row in rows]})

    def failed(self, path: str, error: CkptoolError) -> None:
        self._output.add({"schema": SCHEMA, "path": path, "error": error_object(error)})

    def end(self) -> None:
        self._output.end()


class _Pasted:
    """In one of the formats of tables."""

    def __init__(self, table_format: str, limit: int | None, *, has_paths: bool) -> None:
        self._limit = limit
        self._has_paths = has_paths
        self._table = tables.Pasted(table_format, has_paths=has_paths)

    def computed(self, path: str, rows: Sequence[ValueRow], nothing: str | None) -> None:
        if nothing is not None:
            say(f"{show(path)}: {nothing.strip()}" if self._has_paths else nothing.strip(), err=True)
            return
        is_raw = self._table.is_raw
        cells: Iterator[Sequence[object]] = map(_raw if is_raw else _cells, rows[: self._limit])
        self._table.add(path, _RAW_HEADERS if is_raw else _HEADERS, cells, _IS_NUMBER)

    def failed(self, _: str, error: CkptoolError) -> None:
        say(error_text(error), err=True)

    def end(self) -> None:
        text = self._table.text()
        if text is not None:
            say(text)


class _Tables:
    """For people."""

    def __init__(self, limit: int | None, width: int | None) -> None:
        self._limit = limit
        self._width = width
        self._begun = False

    def computed(self, path: str, rows: Sequence[ValueRow], nothing: str | None) -> None:
        if self._begun:
            say("")
        self._begun = True
        say(show(path))
        say(nothing if nothing is not None else "\n".join(self._lines(rows)))

    def failed(self, _: str, error: CkptoolError) -> None:
        say(error_text(error), err=True)

    def end(self) -> None:
        pass

    def _lines(self, rows: Sequence[ValueRow]) -> Iterator[str]:
        shown = rows[: self._limit]
        table = Table(_HEADERS, [_cells(row) for row in shown], _IS_NUMBER)
        spared: list[str] = []
        if self._width is not None:
            table, spared = fitted(table, self._width, _SPARE, _SPARE_IF_SAME)
        yield from plain_table(table, self._width)
        if spared:
            yield from wrapped([no_room(spared)], self._width)
        if len(rows) > len(shown):
            yield left_out(len(rows) - len(shown))


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


def _raw(row: ValueRow) -> list[object]:
    values = row.values or (None,) * len(Statistics._fields)
    return [
        show(row.name),
        ", ".join(row.dtypes),
        None if row.shape is None else list(row.shape),
        row.tensors,
        *(list(value) if isinstance(value, tuple) else value for value in values),
    ]


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
    del found["is_lost"]  # ``why`` says it
    return found
