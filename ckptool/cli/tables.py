"""
Tables of tensors in the formats that people paste elsewhere, and which tensors of a file to list.

Nothing from a file reaches a terminal raw: ``show`` escapes all that is not printable (control characters,
bidirectional marks, zero-width and private characters, lone surrogates).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

import click

from ckptool import messages
from ckptool.checkpoints.summary import candidates
from ckptool.cli.text import say
from ckptool.inspecting.columns import LONGEST_CELL, OTHER_SORT_KEYS, SORT_KEYS
from ckptool.names.renaming import LONGEST, Filter, Trials, matched
from ckptool.sections import Row, cut_middle
from ckptool.tensors.reading import LazyTensor

if TYPE_CHECKING:
    from ckptool.checkpoints.checkpoint import Checkpoint


_TAKE_HTML = frozenset(
    {"github", "pipe", "mediawiki", "moinmoin", "textile", "jira", "youtrack", "unsafehtml", "orgtbl", "asciidoc"}
)
"""Formats of pages that may render the HTML in a cell."""

RAW_FORMATS = ("csv", "tsv", "json")
"""Formats for programs, which take numbers as they are."""


def raw_table(headers: Row, rows: Sequence[Sequence[object]], table_format: str) -> str:
    """Return a table for programs: as CSV, TSV, or a JSON list of objects."""
    if table_format == "json":
        import json

        objects = (dict(zip(headers, row, strict=True)) for row in rows)
        return f"[{f',{chr(10)} '.join(json.dumps(one, allow_nan=False) for one in objects)}]"
    import csv
    import io

    output = io.StringIO()
    writer = csv.writer(output, delimiter="\t" if table_format == "tsv" else ",", lineterminator="\n")
    writer.writerow(headers)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return output.getvalue().rstrip("\n")


def formatted_table(headers: Row, rows: Sequence[Row], numbers: Sequence[bool], table_format: str) -> str:
    """Return a table in a format, with what the format would take for markup disarmed."""
    if table_format in RAW_FORMATS:
        return raw_table(headers, rows, table_format)
    from html import escape

    from tabulate import tabulate  # thirty milliseconds that only this path needs

    rows = [[cut_middle(cell, LONGEST_CELL) for cell in row] for row in rows]
    if table_format in _TAKE_HTML:
        rows = [[escape(cell, quote=False) for cell in row] for row in rows]
    if table_format in ("github", "pipe", "jira"):
        rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return tabulate(
        rows,
        headers=list(headers),
        tablefmt=table_format,
        disable_numparse=True,
        colalign=["right" if number else "left" for number in numbers] if rows else None,
    )


def table_formats() -> list[str]:
    """Return the names that ``formatted_table`` takes."""
    from tabulate import tabulate_formats

    # "unsafehtml" and "latex_raw" pass what the file says on as markup.
    return sorted({*tabulate_formats, *RAW_FORMATS} - {"unsafehtml", "latex_raw"})


def _cell(value: object) -> object:
    """Return what a spreadsheet shows of a value. No text is a formula to it."""
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).lower()
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) and value != "-":
        return f"'{value}"
    return value


class Selection:
    """Which tensors to list, as the options --grep, --include and --exclude say, and in which order."""

    def __init__(self, options: Mapping[str, Any], *, sort: str = "file") -> None:
        try:
            self._grep: re.Pattern[str] | None = options["grep"] and re.compile(options["grep"])
        except re.error as error:
            raise click.BadParameter(str(error), param_hint="--grep") from error
        self._filter = Filter(options["include"], options["exclude"])
        self._sort = OTHER_SORT_KEYS.get(sort, sort)
        self._allows_unmatched = options["allow_unmatched"]
        self._seen: dict[str, bool] = {}
        """Each of these options, as it is written, and whether it matches a name in what was looked at."""
        self._is_any_listed = False

    def of(self, checkpoint: Checkpoint) -> list[LazyTensor]:
        """
        Return the tensors to list.

        Raises:
            MigrationRefused: A glob means one thing as a full path, and another as a name in a state dict.
        """
        chosen = list(checkpoint.tensors.values()) if self._filter.takes_all else self._filtered(checkpoint)
        if self._grep is not None:
            long = sum(len(name) > LONGEST for name in checkpoint.tensors)
            if long:
                what = f"{messages.counted(long, 'name')} of more than {LONGEST:,} characters not tried with --grep."
                say(f"Note: {what}", err=True)
            trials, search = Trials(), self._grep.search
            found = {name for name in checkpoint.tensors if len(name) <= LONGEST and trials.on(name, search)}
            self._note("grep", self._grep.pattern, found)
            chosen = [tensor for tensor in chosen if tensor.name in found]
        self._is_any_listed |= bool(chosen)
        return chosen if self._sort == "file" else sorted(chosen, key=SORT_KEYS[self._sort])  # type: ignore[arg-type]

    def _filtered(self, checkpoint: Checkpoint) -> list[LazyTensor]:
        names = {one.key: list(one) for one in candidates(checkpoint)}
        within = {f"{key}.{name}" if key else name for key, own in names.items() for name in own}
        names[""] = [*names.get("", ()), *(name for name in checkpoint.tensors if name not in within)]
        read = self._filter.read(names, prefers_full=True)
        for option, given, globs in zip(self._filter._fields, self._filter, read, strict=True):
            for text, glob in zip(given, globs, strict=True):
                self._note(option, text, matched(glob, names))
        taken = {
            f"{key}.{name}" if key else name for key, own in names.items() for name in own if read.takes(name, key)
        }
        return [tensor for name, tensor in checkpoint.tensors.items() if name in taken]

    def _note(self, option: str, text: str, found: Sized) -> None:
        word = f"--{option} {text!r}"
        self._seen[word] = self._seen.get(word, False) or bool(found)

    def refused(self) -> bool:
        """Say so where patterns match no name in any file, or leave none, and return whether that is an error."""
        none = [word for word, is_there in self._seen.items() if not is_there]
        if self._allows_unmatched or not self._seen or (self._is_any_listed and not none):
            return False
        fact = f"{', '.join(none)} match{'es' * (len(none) == 1)} no name" if none else "no tensor is left to look at"
        hint = "If this is meant, say so with --allow-unmatched."
        say(f"Error: {messages.show(fact)}\nHint: {hint}", err=True)
        return True

    def nothing(self, tensors: Mapping[str, LazyTensor], chosen: Sequence[LazyTensor]) -> str | None:
        """Return what is said of a selection that takes none of the names there are."""
        if chosen or not tensors:
            return None
        patterns = {"grep": (self._grep.pattern,) if self._grep is not None else (), **self._filter._asdict()}
        asked = " ".join(f"--{option} {value!r}" for option, values in patterns.items() for value in values)
        return f"0 of {len(tensors):,} names match {messages.show(asked)}"
