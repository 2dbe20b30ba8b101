"""The ways in which ``inspect`` says what is in files: for people, for programs, to be pasted, a line for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckptool import messages
from ckptool.checking.finding import Finding, worst_of
from ckptool.checking.structure import calls, examine
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import Summary, sharing, summarise
from ckptool.checkpoints.tables import Table, fitted, plain_table
from ckptool.cli import inspect_report, tables, terminal
from ckptool.cli.options import left_out, limit_of, no_room
from ckptool.cli.selection import Selection
from ckptool.cli.terminal import wrapped
from ckptool.cli.text import error_text, say
from ckptool.errors import CkptoolError
from ckptool.messages import counted, show_nbytes
from ckptool.tensors.reading import LazyTensor

if TYPE_CHECKING:
    from ckptool.checkpoints.digest import Known
    from ckptool.cli.brief import Totals


_LINES_AT_ONCE = 1000


def output_for(
    options: dict[str, Any], selection: Selection, paths: Sequence[str], *, is_list: bool
) -> Reports | Brief | Plain | Objects:
    if options["as_json"] or options["as_lines"]:
        return Objects(selection, as_lines=options["as_lines"], is_list=is_list, has_digest=options["digest"])
    if options["show_globals"]:
        return Globals()
    if options["show_source"]:
        return Sources()
    width = None if options["wide"] else terminal.width()
    if options["brief"]:
        return Brief(paths, width, _totals(options))
    listing = Listing(
        options["columns"],
        options["tree"] or options["depth"] is not None,
        options["depth"],
        not options["no_fold"],
        limit_of(options),
        width,
    )
    if options["table_format"] is not None:
        return Tables(selection, listing, options["table_format"], has_paths=is_list)
    totals = _totals(options) if len(paths) > 1 else None
    shows = {"has_body": not options["quiet"], "show_all": options["show_all"], "has_digest": options["digest"]}
    return Reports(selection, listing, totals, **shows)


class Reports:
    """For people: what each file is, its tensors, and what they come to."""

    def __init__(
        self,
        selection: Selection,
        listing: Listing,
        totals: Totals | None,
        *,
        has_body: bool,
        show_all: bool,
        has_digest: bool,
    ) -> None:
        self._has_digest = has_digest
        self._selection = selection
        self._listing = listing
        self._has_body = has_body
        self._show_all = show_all
        self._totals = totals
        self._begun = False

    def opened(self, checkpoint: Checkpoint, _: str) -> None:
        tensors = self._selection.of(checkpoint)
        summary, findings = _examined(checkpoint)
        if self._totals is not None:
            self._totals.opened(worst_of(findings), checkpoint.format, checkpoint.file_nbytes)
        known, whole = _digest(checkpoint, is_asked=self._has_digest), self._listing.width is None
        head = inspect_report.head_lines(checkpoint, summary, findings, known, whole=whole)
        nothing = self._selection.nothing(checkpoint.tensors, tensors)
        lines = [
            *([""] if self._begun else []),
            *terminal.wrapped((*head, *filter(None, [nothing])), self._listing.width),
        ]
        self._begun = True
        if self._has_body and tensors:
            if len(tensors) > _LINES_AT_ONCE:  # a long table takes time
                _print(lines)
                lines.clear()
            _print(chain(lines, ("",), self._listing.lines(checkpoint, tensors)))
        else:
            _print(lines)
        if self._show_all:
            _print(_everything_else(checkpoint, self._listing))

    def failed(self, _: str, error: CkptoolError) -> None:
        if self._totals is not None:
            self._totals.not_opened()
        say(error_text(error), err=True)

    def passed_over(self, path: str) -> None:
        if self._totals is not None:
            self._totals.passed_over(path)

    def end(self) -> None:
        if self._totals is not None:
            _print(terminal.wrapped(self._totals.lines(), self._listing.width))


class Brief:
    """A line for each file."""

    def __init__(self, paths: Sequence[str], width: int | None, totals: Totals) -> None:
        from ckptool.cli.brief import BriefInspect

        self._width = width
        self._lines = BriefInspect(paths, width)
        self._totals = totals

    def opened(self, checkpoint: Checkpoint, path: str) -> None:
        summary, findings = _examined(checkpoint)
        self._lines.opened(path, checkpoint, summary, findings)
        self._totals.opened(worst_of(findings), checkpoint.format, checkpoint.file_nbytes)

    def failed(self, path: str, error: CkptoolError) -> None:
        self._lines.failed(path, error)
        self._totals.not_opened()

    def passed_over(self, path: str) -> None:
        self._totals.passed_over(path)

    def end(self) -> None:
        lines = self._totals.lines(always=True)
        _print(terminal.wrapped((*lines, *self._lines.left_out()), self._width))


class Plain:
    """What is to be pasted or parsed: nothing but what was asked for."""

    def opened(self, checkpoint: Checkpoint, _: str) -> None:
        raise NotImplementedError

    def failed(self, _: str, error: CkptoolError) -> None:
        say(error_text(error), err=True)

    def passed_over(self, _: str) -> None:
        pass

    def end(self) -> None:
        pass


class Tables(Plain):
    def __init__(self, selection: Selection, listing: Listing, table_format: str, *, has_paths: bool) -> None:
        self._selection = selection
        self._listing = listing
        self._has_paths = has_paths
        self._table = tables.Pasted(table_format, has_paths=has_paths)

    def opened(self, checkpoint: Checkpoint, path: str) -> None:
        tensors = self._selection.of(checkpoint)
        self._listing.paste(self._table, path, checkpoint, tensors)
        nothing = self._selection.nothing(checkpoint.tensors, tensors)
        if nothing is not None:
            say(f"{messages.show(path)}: {nothing.strip()}" if self._has_paths else nothing.strip(), err=True)

    def end(self) -> None:
        text = self._table.text()
        _print([text] if text is not None else [])


class Globals(Plain):
    def opened(self, checkpoint: Checkpoint, _: str) -> None:
        _print(messages.show(str(found)) for found in checkpoint.globals)

    def failed(self, path: str, error: CkptoolError) -> None:
        """Print the names that the pickles of a file ask for that cannot be opened, up to where reading ended."""
        from ckptool.checking.safety import survey_origin

        names = (f"{one.module}.{one.name}" for one in survey_origin(path).names)
        _print(map(messages.show, dict.fromkeys(names)))
        super().failed(path, error)


class Sources(Plain):
    def opened(self, checkpoint: Checkpoint, path: str) -> None:
        if not checkpoint.class_sources:
            say(messages.show(f"{path}: it carries no source code"), err=True)
        for found in checkpoint.class_sources:
            _print([messages.show(f"# {found.name}, from {found.path}")])
            _print(messages.show(line.expandtabs(8)) for line in found.text.split("\n"))


class Objects:
    """JSON, which takes milliseconds to import, and is seldom asked for."""

    def __init__(self, selection: Selection, *, as_lines: bool, is_list: bool, has_digest: bool) -> None:
        from ckptool.cli.json_output import JsonOutput

        self._has_digest = has_digest
        self._selection = selection
        self._output = JsonOutput(as_lines=as_lines, is_list=is_list)

    def opened(self, checkpoint: Checkpoint, _: str) -> None:
        from ckptool.cli.json_output import inspect_object

        summary, findings = _examined(checkpoint)
        tensors = self._selection.of(checkpoint)
        known = _digest(checkpoint, is_asked=self._has_digest)
        self._output.add(inspect_object(checkpoint, summary, findings, tensors, known))

    def failed(self, path: str, error: CkptoolError) -> None:
        from ckptool.cli.json_output import inspect_error

        self._output.add(inspect_error(path, error))

    def passed_over(self, _: str) -> None:
        pass

    def end(self) -> None:
        self._output.end()


def _totals(options: dict[str, Any]) -> Totals:
    from ckptool.cli.brief import Totals  # most calls are about one file

    return Totals("opened", whole=options["wide"] or terminal.width() is None)


def _digest(checkpoint: Checkpoint, *, is_asked: bool) -> Known | None:
    if not is_asked:
        return None
    from ckptool.checkpoints.digest import digest_or_why  # it reads every byte, and is seldom asked for

    return digest_or_why(checkpoint)


def _examined(checkpoint: Checkpoint) -> tuple[Summary, Sequence[Finding]]:
    summary = summarise(checkpoint)
    return summary, (*calls(checkpoint), *examine(checkpoint, summary))


def _everything_else(checkpoint: Checkpoint, listing: Listing) -> Iterator[str]:
    if checkpoint.attributes:
        yield from ("", "Not part of the state_dict:")
        yield from listing.table(checkpoint, list(checkpoint.attributes.values()))
    if checkpoint.extras:
        yield from ("", "Not tensors:")
        yield from inspect_report.extra_lines(checkpoint)


def _print(lines: Iterable[str]) -> None:
    batch: list[str] = []
    for line in lines:
        batch.append(line)
        if len(batch) == _LINES_AT_ONCE:
            say("\n".join(batch))
            batch.clear()
    if batch:
        say("\n".join(batch))


_SPARE: Final = ("device", "dtype", "elements")
"""Columns that a narrow terminal does without; the head has counts of all three."""


class Listing(NamedTuple):
    """What to show of tensors, and how."""

    columns: Sequence[str] = tables.DEFAULT_COLUMNS
    is_tree: bool = False
    depth: int | None = None
    fold: bool = True
    limit: int | None = None
    """Rows to show; None for all."""
    width: int | None = None
    """Columns of the terminal; None where lines may be as long as they are."""

    def lines(self, checkpoint: Checkpoint, tensors: Sequence[LazyTensor]) -> Iterator[str]:
        """Yield the lines for people."""
        if self.is_tree:
            from ckptool.cli.tree import tree_lines

            lines = tree_lines(tensors, depth=self.depth, fold=self.fold)
            yield from islice(lines, self.limit)
            if left := sum(1 for _ in lines):
                yield left_out(left)
            return
        yield from self.table(checkpoint, tensors[: self.limit])
        if self.limit is not None and (rest := tensors[self.limit :]):
            numel = sum(tensor.info.numel for tensor in rest)
            nbytes = sum(tensor.info.total_nbytes for tensor in rest)
            yield left_out(len(rest), f", of {counted(numel, 'element')}, {show_nbytes(nbytes)}")

    def table(self, checkpoint: Checkpoint, tensors: Sequence[LazyTensor]) -> Iterator[str]:
        """Yield all of these tensors as a table."""
        chosen = [tables.COLUMNS[name] for name in self.columns]
        rows = list(tables.tensor_rows(tensors, self.columns, self._related(checkpoint)))
        table = Table([column.header for column in chosen], rows, [column.is_number for column in chosen])
        spared: list[str] = []
        if self.width is not None and self.columns == tables.DEFAULT_COLUMNS:
            table, spared = fitted(table, self.width, _SPARE)
        yield from plain_table(table, self.width)
        if spared:
            yield from wrapped([no_room(spared)], self.width)

    def paste(self, table: tables.Pasted, path: str, checkpoint: Checkpoint, tensors: Sequence[LazyTensor]) -> None:
        """Add tensors to a table to be pasted or parsed."""
        tensors, related = tensors[: self.limit], self._related(checkpoint)
        chosen = [tables.COLUMNS[name] for name in self.columns]
        headers = self.columns if table.is_raw else [column.header for column in chosen]
        rows = (tables.raw_rows if table.is_raw else tables.tensor_rows)(tensors, self.columns, related)
        table.add(path, headers, rows, [column.is_number for column in chosen])

    def _related(self, checkpoint: Checkpoint) -> tables.Related:
        groups = sharing(checkpoint.tensors.values()) if "shared_with" in self.columns else []
        shared = {name: group for group in groups for name in group}
        parameters: dict[str, str] = {}
        if "of_parameter" in self.columns:
            from ckptool.checkpoints.training import parameter_names  # seldom asked for

            parameters = parameter_names(checkpoint)
        return tables.Related(shared, parameters)
