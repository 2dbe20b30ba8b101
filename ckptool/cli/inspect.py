"""``ckptool inspect``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import Any, Final

import click

from ckptool.checking.finding import SEVERITIES, Finding
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import summarise
from ckptool.cli.options import AnyPath, brief_option, choices, many_files, remote_options
from ckptool.cli.printing import Column, Failed, Result, say_each, with_hints
from ckptool.cli.tables import Selection, left_out, limit_of, patterns, rows
from ckptool.cli.text import ProgressLine, in_options, terminal_width
from ckptool.cli.verbs import Command, flag
from ckptool.errors import CkptoolError, about
from ckptool.formats import member_in, open_checkpoint
from ckptool.formats.listing import Target
from ckptool.inspecting import columns
from ckptool.inspecting.head import SCHEMA, extra_lines, findings_of, head_sections
from ckptool.messages import counted, show, show_nbytes
from ckptool.sections import Fact, Lines, Section, Table
from ckptool.tensors.reading import LazyTensor


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
    type=click.Choice([*columns.SORT_KEYS, *columns.OTHER_SORT_KEYS]),
    metavar="COLUMN",
    default="file",
    show_default=True,
    help=f"Order of the table: {', '.join(columns.SORT_KEYS)}.",
)
@click.option(
    "--columns",
    metavar="A,B,…",
    callback=lambda _, __, value: _columns(value),
    shell_complete=choices(lambda: (*columns.COLUMNS, "all"), is_list=True),
    help=f"Columns of the table: all, or some of: {', '.join(columns.COLUMNS)}.",
)
@rows
@flag("--all", "show_all", says="Also list the values that are no tensors, and tensors outside the state_dict.")
@flag(
    "--metadata",
    "show_metadata",
    says="Print only what it says beside its tensors: a line for each key, and long JSON laid out.",
)
@flag("--globals", "show_globals", says="List only the names that unpickling would import.")
@flag("--source", "show_source", says="Print only the source code of classes that is in old files.")
@flag(
    "--skeleton", "show_skeleton", says="Print only Python code of a whole model's classes: its layers, no forward()."
)
@flag("--digest", says="Read the weights, and print their digest: equal weights have the same in any form.")
@remote_options
def inspect(files: tuple[str, ...], **options: Any) -> None:
    """
    Say what is in checkpoints, without running them.

    FILE is a checkpoint of any kind, or an index of shards, or a folder; FILE::MEMBER picks one out of an archive. Only
    the index is read, so this is quick whatever the size. Exit code 1 means that a pattern matches no name in any file,
    2 that a file could not be read.
    """
    selection = Selection(options, sort=options["sort"])

    @contextmanager
    def look(target: Target, _: ProgressLine) -> Iterator[Result]:
        with open_checkpoint(target.path) as checkpoint:
            yield _Inspected(target.shown, checkpoint, selection, options)

    def failed(target: Target, error: CkptoolError) -> Result | None:
        if target.passes_over(error):
            return None
        return Failed(target.shown, error, schema=SCHEMA, path=target.shown, member=member_in(target.shown))

    is_bare = any(options[name] for name in ("show_globals", "show_source", "show_skeleton", "show_metadata"))
    code = say_each(files, options, look, failed, columns=_COLUMNS, is_bare=is_bare)
    sys.exit(max(code, int(selection.refused())))


def _columns(asked: str | None) -> Sequence[str]:
    if asked is None:
        return columns.DEFAULT_COLUMNS
    spelt = ["_".join(name.lower().replace("-", " ").split()) for name in asked.split(",") if name.strip()]
    names = [columns.OTHER_NAMES.get(name, name) for name in spelt]
    if names == ["all"]:
        return tuple(columns.COLUMNS)
    unknown = [name for name in names if name not in columns.COLUMNS]
    if unknown or not names:
        raise click.BadParameter(f"choose from {', '.join(columns.COLUMNS)}, or all", param_hint="--columns")
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
        self._digest = None
        if options["digest"]:
            from ckptool.checkpoints.weights import digest_or_why  # it reads every byte, and is rarely requested

            self._digest = digest_or_why(checkpoint)
        self._selection = selection
        self._options = options
        self.format = checkpoint.format
        self.nbytes = checkpoint.file_nbytes

    @cached_property
    def _tensors(self) -> Sequence[LazyTensor]:
        return self._selection.of(self._checkpoint)

    @cached_property
    def _metadata(self) -> Sequence[str]:
        from ckptool.inspecting.inspect import metadata_lines  # rarely requested

        return [*metadata_lines(self._checkpoint)]

    @cached_property
    def findings(self) -> Sequence[Finding]:
        return findings_of(self._checkpoint)

    @property
    def note(self) -> str | None:
        if self._options["show_globals"] or self._options["show_skeleton"]:
            return None
        if self._options["show_source"]:
            return None if self._checkpoint.class_sources else f"{self.path}: it carries no source code"
        if self._options["show_metadata"]:
            return None if self._metadata else f"{self.path}: it has no metadata"
        return self._selection.nothing(self._checkpoint.tensors, self._tensors)

    def cells(self) -> Sequence[str]:
        found = summarise(self._checkpoint)
        parameters = "-" if found.parameters is None else f"{found.parameters:,}"
        sizes = (f"{found.tensors:,}", parameters, f"{found.numel:,}", show_nbytes(self.nbytes))
        return [self._checkpoint.format, self._checkpoint.form, *sizes]

    def object(self) -> dict[str, object]:
        from ckptool.inspecting.inspect import inspect_object  # rarely requested

        return with_hints(inspect_object(self._checkpoint, self.findings, self._tensors, self._digest))

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
        if options["show_metadata"]:
            yield Lines(self._metadata)
            return
        if options["show_skeleton"]:
            from ckptool.inspecting.skeleton import skeleton  # rarely requested

            with about(self.path):
                yield Lines([*skeleton(checkpoint)])
            return
        is_whole = options["wide"] or terminal_width() is None
        for one in head_sections(checkpoint, summarise(checkpoint), self.findings, self._digest, whole=is_whole):
            # Hints are of findings: other facts have texts of the file.
            yield from in_options([one]) if isinstance(one, Fact) and one.label in SEVERITIES else [one]
        if self._digest is not None and any(options[name] for name in ("grep", "include", "exclude")):
            yield Fact("", ["the digest is of all weights"])
        if self.note is not None:
            yield Fact("listed", [self.note])
        if self._tensors and not options["quiet"]:
            yield ""
            yield from self._listing()
        if options["show_all"] and checkpoint.attributes:
            yield from ("", "Not part of the state_dict:")
            yield self._table(list(checkpoint.attributes.values()))
        if options["show_all"] and checkpoint.extras:
            yield from ("", "Not tensors:", Lines(extra_lines(checkpoint)))

    def _listing(self) -> Iterator[Section]:
        options, limit = self._options, limit_of(self._options)
        if options["tree"] or options["depth"] is not None:
            width = None if options["wide"] else terminal_width()
            lines = columns.tree_lines(self._tensors, depth=options["depth"], fold=not options["no_fold"], width=width)
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
        asked = self._options["columns"]
        spare = _SPARE if asked == columns.DEFAULT_COLUMNS else ()
        return columns.tensor_table(self._checkpoint, tensors, asked, is_raw=is_raw)._replace(spare=spare)
