"""``ckptool inspect``: what is in these files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import click

from ckptool.checking.finding import Finding
from ckptool.checking.structure import calls, examine
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import Summary, summarise
from ckptool.cli import inspect_report, tables
from ckptool.cli.options import (
    brief_option,
    choices,
    left_out,
    limit_of,
    many_files,
    patterns,
    refuse_idle,
    rows,
)
from ckptool.cli.outputs import Column, Failed, Result, say_each
from ckptool.cli.tables import Selection, selection_of
from ckptool.cli.targets import AnyPath, Target, far_options
from ckptool.cli.text import ProgressLine, terminal_width
from ckptool.cli.verbs import Command, flag
from ckptool.errors import CkptoolError
from ckptool.formats import member_in, open_checkpoint
from ckptool.messages import counted, show, show_nbytes
from ckptool.sections import Fact, Lines, Section, Table
from ckptool.tensors.reading import LazyTensor

if TYPE_CHECKING:
    from ckptool.checkpoints.digest import Known

SCHEMA = "ckptool.inspect/2"


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=AnyPath())
@brief_option
@many_files
@flag("-q", "--quiet", says="Show what the file is, without the table.")
@flag("--tree", says="Show the names as a tree, with the elements and the size of each module.")
@click.option("--depth", type=click.IntRange(1), help="Levels of the tree to show.")
@flag("--no-fold", says="Show every layer in the tree, also those that are alike.")
@patterns
@click.option(
    "--sort",
    type=click.Choice([*tables.SORT_KEYS, *tables.OTHER_SORT_KEYS]),
    metavar="COLUMN",
    default="file",
    show_default=True,
    help=f"Order of the table: {', '.join(tables.SORT_KEYS)}.",
)
@click.option(
    "--columns",
    metavar="A,B,…",
    callback=lambda _, __, value: _columns(value),
    shell_complete=choices(lambda: (*tables.COLUMNS, "all"), is_list=True),
    help=f"Columns of the table: all, or some of: {', '.join(tables.COLUMNS)}.",
)
@rows
@flag("--all", "show_all", says="Also list the values that are not tensors, and tensors outside the state_dict.")
@flag("--globals", "show_globals", says="List only the names that unpickling would import.")
@flag("--source", "show_source", says="Print only the source code of classes that is in old files.")
@flag("--digest", says="Read the weights, and print their digest: equal weights have the same in any form.")
@far_options
def inspect(files: tuple[str, ...], **options: Any) -> None:
    """
    Say what is in checkpoints, without running them.

    FILE is a checkpoint of any kind, or an index of shards, or a folder; FILE::MEMBER picks one out of an archive. Only
    the index is read, so this is quick whatever the size. Exit code 1 means that a pattern matches no name in any file,
    2 that a file could not be read.
    """
    refuse_idle()
    selection = selection_of(options, sort=options["sort"])

    @contextmanager
    def look(target: Target, _: ProgressLine) -> Iterator[Result]:
        with open_checkpoint(target.path) as checkpoint:
            yield _Inspected(target.shown, checkpoint, selection, options)

    def failed(target: Target, error: CkptoolError) -> Result | None:
        if target.passes_over(error):
            return None
        return Failed(target.shown, error, schema=SCHEMA, path=target.shown, member=member_in(target.shown))

    is_bare = options["show_globals"] or options["show_source"]
    code = say_each(files, options, look, failed, columns=_COLUMNS, is_bare=is_bare)
    sys.exit(max(code, int(selection.refused())))


def _columns(asked: str | None) -> Sequence[str]:
    if asked is None:
        return tables.DEFAULT_COLUMNS
    names = [tables.column_named(name) for name in asked.split(",") if name.strip()]
    if names == ["all"]:
        return tuple(tables.COLUMNS)
    unknown = [name for name in names if name not in tables.COLUMNS]
    if unknown or not names:
        raise click.BadParameter(f"choose from {', '.join(tables.COLUMNS)}, or all", param_hint="--columns")
    return names


_COLUMNS: Final = (
    Column("format", 15, False, 60),
    Column("form", 10, False, 80),
    Column("tensors", 8, True, 120),
    Column("parameters", 14, True, 100),
    Column("elements", 14, True, 140),
    Column("size", 9, True, 0),
)
_SPARE: Final = ("device", "dtype", "elements")
"""Columns that a narrow terminal does without; the head has counts of all three."""


class _Inspected(Result):
    """A checkpoint that is open."""

    otherwise = "opened"

    def __init__(self, path: str, checkpoint: Checkpoint, selection: Selection, options: dict[str, Any]) -> None:
        super().__init__(path)
        self._checkpoint = checkpoint
        self._selection = selection
        self._options = options
        self.format = checkpoint.format
        self.nbytes = checkpoint.file_nbytes

    @cached_property
    def _summary(self) -> Summary:
        return summarise(self._checkpoint)

    @cached_property
    def _tensors(self) -> Sequence[LazyTensor]:
        return self._selection.of(self._checkpoint)

    @cached_property
    def findings(self) -> Sequence[Finding]:
        return (*calls(self._checkpoint), *examine(self._checkpoint))

    @property
    def note(self) -> str | None:
        if self._options["show_globals"]:
            return None
        if self._options["show_source"]:
            return None if self._checkpoint.class_sources else f"{self.path}: it carries no source code"
        return self._selection.nothing(self._checkpoint.tensors, self._tensors)

    def cells(self) -> Sequence[str]:
        found = self._summary
        parameters = "-" if found.parameters is None else f"{found.parameters:,}"
        sizes = (f"{found.tensors:,}", parameters, f"{found.numel:,}", show_nbytes(self.nbytes))
        return [self._checkpoint.format, self._checkpoint.form, *sizes]

    def object(self) -> dict[str, object]:
        from ckptool.cli.inspect_object import inspect_object  # few are asked for

        found = inspect_object(self._checkpoint, self._summary, self.findings, self._tensors, self._digest)
        return {"schema": SCHEMA, **found}

    def table(self, *, is_raw: bool) -> Table:
        return self._table(self._tensors[: limit_of(self._options)], is_raw=is_raw)

    def sections(self) -> Iterator[Section]:
        checkpoint, options = self._checkpoint, self._options
        if options["show_globals"]:
            yield Lines(show(str(found)) for found in checkpoint.globals)
            return
        if options["show_source"]:
            for found in checkpoint.class_sources:
                yield Lines([show(f"# {found.name}, from {found.path}")])
                yield Lines(show(line.expandtabs(8)) for line in found.text.split("\n"))
            return
        is_whole = options["wide"] or terminal_width() is None
        yield from inspect_report.head_sections(checkpoint, self._summary, self.findings, self._digest, whole=is_whole)
        if self.note is not None:
            yield Fact("listed", [self.note])
        if self._tensors and not options["quiet"]:
            yield ""
            yield from self._listing()
        if options["show_all"] and checkpoint.attributes:
            yield from ("", "Not part of the state_dict:")
            yield self._table(list(checkpoint.attributes.values()))
        if options["show_all"] and checkpoint.extras:
            yield from ("", "Not tensors:", Lines(inspect_report.extra_lines(checkpoint)))

    def _listing(self) -> Iterator[Section]:
        options, limit = self._options, limit_of(self._options)
        if options["tree"] or options["depth"] is not None:
            from ckptool.cli.tree import tree_lines

            lines = tree_lines(self._tensors, depth=options["depth"], fold=not options["no_fold"])
            yield Lines(islice(lines, limit))
            if left := sum(1 for _ in lines):
                yield left_out(left)
            return
        yield self._table(self._tensors[:limit])
        if limit is not None and (rest := self._tensors[limit:]):
            numel = sum(tensor.info.numel for tensor in rest)
            nbytes = sum(tensor.info.total_nbytes for tensor in rest)
            yield left_out(len(rest), f", of {counted(numel, 'element')}, {show_nbytes(nbytes)}")

    def _table(self, tensors: Sequence[LazyTensor], *, is_raw: bool = False) -> Table:
        columns = self._options["columns"]
        spare = _SPARE if columns == tables.DEFAULT_COLUMNS else ()
        return tables.tensor_table(self._checkpoint, tensors, columns, is_raw=is_raw)._replace(spare=spare)

    @cached_property
    def _digest(self) -> Known | None:
        if not self._options["digest"]:
            return None
        from ckptool.checkpoints.digest import digest_or_why  # it reads every byte, and is seldom asked for

        return digest_or_why(self._checkpoint)
