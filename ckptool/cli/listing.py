"""How the tensors of a file are listed: as a table of some columns, or as a tree; all of them, or the first ones."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.summary import sharing
from ckptool.checkpoints.tables import Table, fitted, plain_table
from ckptool.cli import tables
from ckptool.cli.options import left_out, no_room
from ckptool.cli.terminal import wrapped
from ckptool.messages import counted, show_nbytes
from ckptool.tensors.reading import LazyTensor

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
