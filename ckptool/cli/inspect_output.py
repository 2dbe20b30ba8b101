"""The ways in which ``inspect`` says what is in files: for people, for programs, to be pasted, a line for each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckptool import messages
from ckptool.checking.finding import Finding, worst_of
from ckptool.checking.structure import calls, examine
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import Summary, sharing, summarise
from ckptool.checkpoints.tables import Table, fitted, plain_table
from ckptool.cli import inspect_report, tables
from ckptool.cli.options import left_out, limit_of, no_room
from ckptool.cli.tables import Selection
from ckptool.cli.text import error_text, say, terminal_width, wrapped
from ckptool.errors import CkptoolError
from ckptool.messages import counted, show, show_nbytes
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity

if TYPE_CHECKING:
    from ckptool.checkpoints.digest import Known
    from ckptool.cli.brief import Totals


_LINES_AT_ONCE = 1000
_SPARE: Final = ("device", "dtype", "elements")
"""Columns that a narrow terminal does without; the head has counts of all three."""
_DEEPEST_INDENT: Final = 40
_NUMBER: Final = re.compile("0|[1-9][0-9]{0,8}")


def output_for(
    options: dict[str, Any], selection: Selection, paths: Sequence[str], *, is_list: bool
) -> Reports | Brief | Plain | Objects:
    if options["as_json"] or options["as_lines"]:
        return Objects(selection, as_lines=options["as_lines"], is_list=is_list, has_digest=options["digest"])
    if options["show_globals"]:
        return Globals()
    if options["show_source"]:
        return Sources()
    width = None if options["wide"] else terminal_width()
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
            *wrapped((*head, *filter(None, [nothing])), self._listing.width),
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
            _print(wrapped(self._totals.lines(), self._listing.width))


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
        _print(wrapped((*lines, *self._lines.left_out()), self._width))


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

    return Totals("opened", whole=options["wide"] or terminal_width() is None)


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


class _Branch:
    """A component of names. ``kind`` is equal for branches that hold the same, whatever they are called."""

    __slots__ = ("below", "dtypes", "kind", "leaf", "nbytes", "numel", "tensors")

    def __init__(self) -> None:
        self.below: dict[str, _Branch] = {}
        self.leaf: LazyTensor | None = None
        self.tensors = self.numel = self.nbytes = self.kind = 0
        self.dtypes: dict[str, None] = {}

    @property
    def total(self) -> str:
        dtypes = f", {', '.join(self.dtypes)}" if self.dtypes else ""
        sizes = f"{counted(self.numel, 'element')}, {show_nbytes(self.nbytes)}{dtypes}"
        return f"{counted(self.tensors, 'tensor')}, {sizes}"


def tree_lines(tensors: Iterable[LazyTensor], depth: int | None = None, *, fold: bool = True) -> Iterator[str]:
    """
    Yield the names as a tree, each component once, with count, elements, size and types of what is below it.

    What is tied has several names, and its elements and its size count once in a total.

    ``depth`` is how many levels are shown. With ``fold``, neighbours with consecutive numbers that hold the same names,
    shapes, types and devices are one line, with how many there are. Numbers come in their own order, whatever the
    file's is: many writers sort names as text.
    """
    root = _grown(tensors)
    todo = [(name, branch, count, 0) for name, branch, count in reversed(_folded(root, fold=fold))]
    while todo:
        name, branch, count, level = todo.pop()
        # A chain of single components (module.encoder.) is one line.
        while branch.leaf is None and len(branch.below) == 1:
            ((component, only),) = branch.below.items()
            name, branch = f"{name}.{component}", only
        start = f"{'  ' * min(level, _DEEPEST_INDENT)}{show(name)}  {f'{count:,} × ' if count > 1 else ''}"
        if branch.leaf is not None:
            info = branch.leaf.info
            yield f"{start}{list(info.shape)} {info.dtype} {show(info.location)}"
        if branch.below:
            yield start + branch.total
            if depth is None or level + 1 < depth:
                below = _folded(branch, fold=fold)
                todo.extend((inner, one, number, level + 1) for inner, one, number in reversed(below))


def _grown(tensors: Iterable[LazyTensor]) -> _Branch:
    root = _Branch()
    branches = [root]  # those inside others after them
    everything = list(tensors)
    many = Counter(identity(tensor.info) for tensor in everything)
    counted_in: set[tuple[int, object]] = set()
    for tensor in everything:
        branch = root
        memory = identity(tensor.info)
        is_tied = many[memory] > 1
        for component in tensor.name.split("."):
            branch.tensors += 1
            place = (id(branch), memory)
            if not is_tied or place not in counted_in:
                branch.numel += tensor.info.numel
                branch.nbytes += tensor.info.total_nbytes
            if is_tied:
                counted_in.add(place)
            branch.dtypes.setdefault(tensor.dtype)
            below = branch.below.get(component)
            if below is None:
                below = branch.below[component] = _Branch()
                branches.append(below)
            branch = below
        branch.leaf = tensor
    kinds: dict[object, int] = {}
    for branch in reversed(branches):
        info = branch.leaf.info if branch.leaf is not None else None
        leaf = None if info is None else (info.dtype.name, info.location, str(info.shape))
        branch.below = _in_order(branch.below)
        inside = tuple(sorted((component, one.kind) for component, one in branch.below.items()))
        branch.kind = kinds.setdefault((leaf, inside, branch.numel), len(kinds))
    return root


def _in_order(below: dict[str, _Branch]) -> dict[str, _Branch]:
    """Return components with the numbers among them in the order of numbers, in the places that numbers have."""
    numbers = sorted((component for component in below if _NUMBER.fullmatch(component)), key=int)
    ordered = iter(numbers)
    names = [next(ordered) if _NUMBER.fullmatch(component) else component for component in below]
    return {name: below[name] for name in names}


def _folded(branch: _Branch, *, fold: bool) -> list[tuple[str, _Branch, int]]:
    """Return what is below a branch: names, one branch of those that are alike, and how many are."""
    found: list[tuple[str, _Branch, int]] = []
    first = 0
    for component, one in branch.below.items():
        name, last, count = found[-1] if found else ("", one, 0)
        if fold and count and one.kind == last.kind and component == str(first + count):
            found[-1] = f"{name.partition('–')[0]}–{component}", last, count + 1
            continue
        first = int(component) if _NUMBER.fullmatch(component) else -1
        found.append((component, one, 1 if first >= 0 else 0))
    return found
