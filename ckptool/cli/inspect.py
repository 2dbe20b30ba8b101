"""``ckptool inspect``: what is in these files."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import click

from ckptool import messages
from ckptool.checking.structure import calls, examine
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import sharing, summarise
from ckptool.cli import inspect_report, tables
from ckptool.cli.paths import AnyPath, far_options
from ckptool.cli.text import error_text, say
from ckptool.errors import CkptoolError
from ckptool.formats import open_checkpoint
from ckptool.names.filter import Filter
from ckptool.sources.files import shown_path
from ckptool.tables import plain_table
from ckptool.tensors.reading import LazyTensor

Body: TypeAlias = Callable[[Checkpoint, Sequence[LazyTensor]], Iterator[str]]
"""What lists tensors."""

_LINES_AT_ONCE = 1000


class Selection(NamedTuple):
    """Which tensors to list, and in which order."""

    grep: re.Pattern[str] | None
    filter: Filter
    sort: str

    def of(self, tensors: Iterable[LazyTensor]) -> list[LazyTensor]:
        chosen = list(tensors)
        if not self.filter.takes_all:
            chosen = [tensor for tensor in chosen if self.filter.takes(tensor.name)]
        if self.grep is not None:
            chosen = _matching(self.grep, chosen)
        return chosen if self.sort == "file" else sorted(chosen, key=tables.SORT_KEYS[self.sort])  # type: ignore[arg-type]

    def nothing(self, tensors: Mapping[str, LazyTensor], chosen: Sequence[LazyTensor]) -> str | None:
        """Return a line about a selection that takes none of the names there are, and what would take some."""
        if chosen or not tensors:
            return None
        patterns = (self.grep.pattern,) if self.grep is not None else ()
        options = {"grep": patterns, "include": self.filter.include, "exclude": self.filter.exclude}
        asked = " ".join(f"--{option} {value!r}" for option, values in options.items() for value in values)
        near = next(filter(None, self._nearly(tensors)), "")
        return messages.labelled("listed", f"0 of {len(tensors):,} names match {messages.show(asked)}{near}")

    def _nearly(self, tensors: Mapping[str, LazyTensor]) -> Iterator[str]:
        if self.grep is not None:
            count = len(_matching(re.compile(self.grep.pattern, re.IGNORECASE), list(tensors.values())))
            yield f"; {count:,} do in another case: --grep '(?i)…'" if count else ""
        for glob in self.filter.include:
            inside = Filter((f"*{glob}*",), ())
            count = sum(1 for name in tensors if inside.takes(name))
            wider = messages.show(repr(inside.include[0]))
            yield f"; a glob is compared with whole names: {wider} matches {count:,}" if count else ""


def _matching(pattern: re.Pattern[str], tensors: Sequence[LazyTensor]) -> list[LazyTensor]:
    """Return the tensors whose name matches; that names are too long to be tried is said."""
    from ckptool.names.patterns import LONGEST, Trials

    tried = [tensor for tensor in tensors if len(tensor.name) <= LONGEST]
    if len(tried) < len(tensors):
        long = messages.counted(len(tensors) - len(tried), "name")
        say(f"Note: {long} of more than {LONGEST:,} characters not tried with --grep.", err=True)
    trials = Trials()
    return [tensor for tensor in tried if trials.on(tensor.name, pattern.search)]


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=AnyPath())
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object for each file; a list if there are several.",
)
@click.option("--tree", is_flag=True, help="Show the names as a tree, with the parameters and the size of each module.")
@click.option("--depth", type=click.IntRange(1), help="Levels of the tree to show.")
@click.option("--no-fold", is_flag=True, help="Show layers that are alike one by one in the tree.")
@click.option("-q", "--quiet", is_flag=True, help="Show what the file is, without the table.")
@click.option("--grep", metavar="REGEX", help="List only tensors whose name matches.")
@click.option("--include", multiple=True, metavar="GLOB", help="List only names that match a glob. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out names that match a glob. Repeatable.")
@click.option(
    "--sort",
    type=click.Choice(list(tables.SORT_KEYS)),
    default="file",
    show_default=True,
    help="Order of the table.",
)
@click.option("--columns", metavar="A,B,…", help=f"Columns of the table, from: {', '.join(tables.COLUMNS)}.")
@click.option(
    "--table",
    "table_format",
    metavar="FORMAT",
    help="Table format: github, csv, html, or any other of tabulate's.",
)
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="Also list the values that are not tensors, and tensors outside the state_dict.",
)
@click.option(
    "--globals",
    "show_globals",
    is_flag=True,
    help="List the names that unpickling would import, and nothing else.",
)
@click.option(
    "--source",
    "show_source",
    is_flag=True,
    help="Print the class source that old files carry, and nothing else.",
)
@far_options
def inspect(
    files: tuple[str, ...],
    *,
    as_json: bool,
    tree: bool,
    depth: int | None,
    no_fold: bool,
    quiet: bool,
    grep: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    sort: str,
    columns: str | None,
    table_format: str | None,
    show_all: bool,
    show_globals: bool,
    show_source: bool,
) -> None:
    """
    Say what is in checkpoints, without running them.

    FILE is a checkpoint of any kind, or an index of shards; FILE::MEMBER picks one out of an archive. Only the index is
    read, so this takes milliseconds whatever the size. Exit code 2 means that a file could not be read.
    """
    selection = Selection(pattern(grep), Filter(include, exclude), sort)
    chosen = _columns(columns)
    if table_format is not None and table_format not in tables.table_formats():
        raise click.BadParameter(f"choose from {', '.join(tables.table_formats())}", param_hint="--table")

    def lines_of(checkpoint: Checkpoint) -> Iterator[str]:
        if show_globals:
            return (messages.show(str(found)) for found in checkpoint.globals)
        if show_source:
            return _source_lines(checkpoint)
        body = None if quiet else partial(_plain, columns=chosen)
        if body is not None and (tree or depth is not None):
            from ckptool.cli.tree import tree_lines

            body = partial(_tree, lines=partial(tree_lines, depth=depth, fold=not no_fold))
        return _report(checkpoint, selection, chosen, table_format, body, show_all=show_all)

    failed = False
    for number, path in enumerate(files):
        try:
            with open_checkpoint(path) as checkpoint:
                if as_json:
                    _print_json(_object(checkpoint, selection), number, len(files))
                else:
                    _print([""] if number and not (show_globals or show_source) else [])
                    _print(lines_of(checkpoint))
        except CkptoolError as error:
            failed = True
            if as_json:
                _print_json(_unreadable(shown_path(path), error), number, len(files))
            else:
                if show_globals:
                    _print(_names_up_to_there(path))
                say(error_text(error), err=True)
    sys.exit(2 if failed else 0)


def _names_up_to_there(path: str) -> Iterator[str]:
    """Yield the names that the pickles of a file ask for that cannot be opened, up to where reading ended."""
    from ckptool.checking.safety import survey_origin

    names = (f"{one.module}.{one.name}" for one in survey_origin(path).names)
    return map(messages.show, dict.fromkeys(names))


def _report(
    checkpoint: Checkpoint,
    selection: Selection,
    columns: Sequence[str],
    table_format: str | None,
    body: Body | None,
    *,
    show_all: bool,
) -> Iterator[str]:
    tensors = selection.of(checkpoint.tensors.values())
    if table_format is not None:  # to be pasted or parsed: the table alone
        yield _formatted(checkpoint, tensors, columns, table_format)
        nothing = selection.nothing(checkpoint.tensors, tensors)
        if nothing is not None:
            say(nothing.strip(), err=True)
        return
    summary = summarise(checkpoint)
    yield from inspect_report.head_lines(checkpoint, summary, (*calls(checkpoint), *examine(checkpoint, summary)))
    nothing = selection.nothing(checkpoint.tensors, tensors)
    if nothing is not None:
        yield nothing
    if body is not None and tensors:
        yield ""
        yield from body(checkpoint, tensors)
    if show_all:
        yield from _everything_else(checkpoint, columns)


def _tree(
    _: Checkpoint, tensors: Sequence[LazyTensor], lines: Callable[[Sequence[LazyTensor]], Iterator[str]]
) -> Iterator[str]:
    return lines(tensors)


def _everything_else(checkpoint: Checkpoint, columns: Sequence[str]) -> Iterator[str]:
    if checkpoint.attributes:
        yield from ("", "Not part of the state_dict:")
        yield from _plain(checkpoint, list(checkpoint.attributes.values()), columns)
    if checkpoint.extras:
        yield from ("", "Not tensors:")
        yield from inspect_report.extra_lines(checkpoint)


def _plain(checkpoint: Checkpoint, tensors: Sequence[LazyTensor], columns: Sequence[str]) -> Iterator[str]:
    headers, rows, numbers = _cells(checkpoint, tensors, columns)
    width = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None
    return plain_table(headers, rows, numbers, width)


def _formatted(checkpoint: Checkpoint, tensors: Sequence[LazyTensor], columns: Sequence[str], table_format: str) -> str:
    headers, rows, numbers = _cells(checkpoint, tensors, columns)
    return tables.formatted_table(headers, rows, numbers, table_format)


def _cells(
    checkpoint: Checkpoint, tensors: Sequence[LazyTensor], columns: Sequence[str]
) -> tuple[list[str], list[list[str]], list[bool]]:
    groups = sharing(checkpoint.tensors.values()) if "shared_with" in columns else []
    shared = {name: group for group in groups for name in group}
    parameters: dict[str, str] = {}
    if "parameter" in columns:
        from ckptool.checkpoints.training import parameter_names  # seldom asked for

        parameters = parameter_names(checkpoint)
    rows = list(tables.tensor_rows(tensors, columns, tables.Related(shared, parameters)))
    chosen = [tables.COLUMNS[name] for name in columns]
    return [column.header for column in chosen], rows, [column.is_number for column in chosen]


def _source_lines(checkpoint: Checkpoint) -> Iterator[str]:
    for found in checkpoint.class_sources:
        yield messages.show(f"# {found.name}, from {found.path}")
        yield from (messages.show(line.expandtabs(8)) for line in found.text.split("\n"))


def _print_json(found: dict[str, object], number: int, count: int) -> None:
    from ckptool.cli.json_output import print_json

    print_json(found, number, count)


def _unreadable(path: str, error: CkptoolError) -> dict[str, object]:
    from ckptool.cli.json_output import inspect_error

    return inspect_error(path, error)


def _object(checkpoint: Checkpoint, selection: Selection) -> dict[str, object]:
    from ckptool.cli.json_output import inspect_object  # JSON takes milliseconds to import, and is seldom asked for

    summary = summarise(checkpoint)
    tensors = selection.of(checkpoint.tensors.values())
    return inspect_object(checkpoint, summary, (*calls(checkpoint), *examine(checkpoint, summary)), tensors)


def pattern(grep: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(grep) if grep is not None else None
    except re.error as error:
        raise click.BadParameter(str(error), param_hint="--grep") from error


def _columns(asked: str | None) -> Sequence[str]:
    if asked is None:
        return tables.DEFAULT_COLUMNS
    names = [name.strip() for name in asked.split(",") if name.strip()]
    unknown = [name for name in names if name not in tables.COLUMNS]
    if unknown or not names:
        raise click.BadParameter(f"choose from {', '.join(tables.COLUMNS)}", param_hint="--columns")
    return names


def _print(lines: Iterable[str]) -> None:
    batch: list[str] = []
    for line in lines:
        batch.append(line)
        if len(batch) == _LINES_AT_ONCE:
            say("\n".join(batch))
            batch.clear()
    if batch:
        say("\n".join(batch))
