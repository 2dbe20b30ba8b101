"""
Tables of tensors: the options that choose and limit them, and the formats of tables.

Tables are for a terminal, or in the formats that people paste elsewhere.

Nothing from a file reaches a terminal raw: ``show`` escapes all that is not printable (control characters,
bidirectional marks, zero-width and private characters, lone surrogates).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Final

import click

import ckptool.messages as messages
from ckptool.checkpoints.summary import candidates
from ckptool.cli.options import choices, pager_option
from ckptool.cli.text import advised, say
from ckptool.cli.verbs import flag, takes, together
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

LIMIT: Final = 200
"""Rows on a terminal, unless another number is requested."""
RAW_FORMATS = ("csv", "tsv", "json")
"""Formats for programs, which take numbers as they are."""


def formatted_table(headers: Row, rows: Sequence[Row], numbers: Sequence[bool], table_format: str) -> str:
    """
    Return a table in a format. For programs, this is CSV, TSV, or a JSON list of objects; for people, characters are
    escaped that the format would take for markup.
    """
    if table_format == "json":
        import json

        objects = (dict(zip(headers, row, strict=True)) for row in rows)
        return f"[{f',{chr(10)} '.join(json.dumps(one, allow_nan=False) for one in objects)}]"
    if table_format in RAW_FORMATS:
        import csv
        import io

        output = io.StringIO()
        writer = csv.writer(output, delimiter="\t" if table_format == "tsv" else ",", lineterminator="\n")
        writer.writerow(headers)
        writer.writerows([_cell(value) for value in row] for row in rows)
        return output.getvalue().rstrip("\n")
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

    # "unsafehtml" and "latex_raw" would pass texts of the file on as markup.
    return sorted({*tabulate_formats, *RAW_FORMATS} - {"unsafehtml", "latex_raw"})


def _cell(value: object) -> object:
    """Return a value for a spreadsheet; a text that would be a formula gets a quote before it."""
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).lower()
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) and value != "-":
        return f"'{value}"
    return value


def _table_format(_ctx: click.Context, _param: click.Parameter, asked: str | None) -> str | None:
    if asked is not None and asked not in RAW_FORMATS and asked not in table_formats():
        raise click.BadParameter(f"choose from {', '.join(table_formats())}", param_hint="--table")
    return asked


patterns = together(
    takes("--grep", "REGEX", "Take only tensors whose name matches."),
    takes("--include", "GLOB", "Take only names that match a glob. Repeatable.", multiple=True),
    takes("--exclude", "GLOB", "Leave out names that match a glob. Repeatable.", multiple=True),
    flag("--allow-unmatched", says="Allow patterns that match no name in any file."),
)
"""Options of verbs that inspect some tensors of a file."""


rows = together(
    click.option(
        "--limit",
        type=click.IntRange(0),
        metavar="N",
        help=f"Rows to list, 0 for all; by default {LIMIT} on a terminal, and all elsewhere.",
    ),
    flag("--wide", says="Do not cut lines to the width of the terminal."),
    pager_option,
    click.option(
        "--table",
        "table_format",
        metavar="FORMAT",
        callback=_table_format,
        shell_complete=choices(table_formats),
        help="Print only the table: as csv, tsv or json with plain numbers, "
        "or in a format of tabulate (github, html…).",
    ),
)
"""Options of verbs that list many rows."""


def limit_of(options: dict[str, Any]) -> int | None:
    """Return how many rows to list; None for all."""
    if options["limit"] is not None:
        return options["limit"] or None
    is_screen = sys.stdout.isatty() and not (options["pager"] or options["table_format"])
    return LIMIT if is_screen else None


def left_out(number: int, what: str = "") -> str:
    """Return a line about rows that are not listed."""
    return f"… and {number:,} more{what}; --limit 0 lists all"


class Selection:
    """The tensors to list, by the options --grep, --include and --exclude, and their order."""

    def __init__(self, options: Mapping[str, Any], *, sort: str = "file") -> None:
        try:
            self._grep: re.Pattern[str] | None = options["grep"] and re.compile(options["grep"])
        except re.error as error:
            raise click.BadParameter(str(error), param_hint="--grep") from error
        self._filter = Filter(options["include"], options["exclude"])
        self._sort = OTHER_SORT_KEYS.get(sort, sort)
        self._allows_unmatched = options["allow_unmatched"]
        self._seen: dict[str, bool] = {}
        """Each of these options, as it is written, and whether it has matched a name so far."""
        self._is_any_listed = False
        self._wider = ""
        """A text about a wider glob that matches names, for one that matches none."""

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
                found = matched(glob, names)
                self._note(option, text, found)
                if not found and (wider := matched(f"*{glob}*", names)):
                    self._wider = f"A glob is compared with the whole name: '*{text}*' matches {len(wider):,}. "
        taken = {
            f"{key}.{name}" if key else name for key, own in names.items() for name in own if read.takes(name, key)
        }
        return [tensor for name, tensor in checkpoint.tensors.items() if name in taken]

    def _note(self, option: str, text: str, found: Sized) -> None:
        word = f"--{option} {text!r}"
        self._seen[word] = self._seen.get(word, False) or bool(found)

    def refused(self) -> bool:
        """Print an error if patterns match no name in any file, or leave none, and return whether there is one."""
        none = [word for word, is_there in self._seen.items() if not is_there]
        if self._allows_unmatched or not self._seen or (self._is_any_listed and not none):
            return False
        fact = f"{', '.join(none)} match{'es' * (len(none) == 1)} no name" if none else "no tensor is left to look at"
        hint = f"{self._wider if none else ''}If this is meant, say so with --allow-unmatched."
        say(advised(f"Error: {fact}", hint=hint), err=True)
        return True

    def nothing(self, tensors: Mapping[str, LazyTensor], chosen: Sequence[LazyTensor]) -> str | None:
        """Return a text about a selection that takes none of the names; None if it takes some."""
        if chosen or not tensors:
            return None
        patterns = {"grep": (self._grep.pattern,) if self._grep is not None else (), **self._filter._asdict()}
        asked = " ".join(f"--{option} {value!r}" for option, values in patterns.items() for value in values)
        return f"0 of {len(tensors):,} names match {messages.show(asked)}"
