"""
Tables of tensors in the formats that people paste elsewhere, and which tensors of a file to list.

Nothing from a file reaches a terminal raw: ``show`` escapes all that is not printable (control characters,
bidirectional marks, zero-width and private characters, lone surrogates).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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


_LISTED: Final = "listed"
"""Under which it is noted whether anything was listed at all."""


class Selection(NamedTuple):
    """Which tensors to list, and in which order."""

    grep: re.Pattern[str] | None
    filter: Filter | None
    sort: str
    allows: bool
    """Whether a pattern may match no name in any file."""
    seen: dict[str, bool]
    """The options that choose names, as they are written, and whether they match a name in what was looked at."""

    def of(self, checkpoint: Checkpoint) -> list[LazyTensor]:
        """
        Return the tensors to list.

        Raises:
            MigrationRefused: A glob means one thing as a full path, and another as a name in a state dict.
        """
        everything = list(checkpoint.tensors.values())
        chosen = everything if self.filter is None else self._filtered(checkpoint, self.filter)
        if self.grep is not None:
            long = sum(len(one.name) > LONGEST for one in everything)
            if long:
                what = f"{messages.counted(long, 'name')} of more than {LONGEST:,} characters not tried with --grep."
                say(f"Note: {what}", err=True)
            found = _matching(self.grep, checkpoint.tensors)
            self._note("grep", self.grep.pattern, found)
            chosen = [tensor for tensor in chosen if tensor.name in found]
        if self.seen:
            self.seen[_LISTED] = self.seen.get(_LISTED, False) or bool(chosen)
        sort = OTHER_SORT_KEYS.get(self.sort, self.sort)
        return chosen if sort == "file" else sorted(chosen, key=SORT_KEYS[sort])  # type: ignore[arg-type]

    def _filtered(self, checkpoint: Checkpoint, wanted: Filter) -> list[LazyTensor]:
        names = {one.key: list(one) for one in candidates(checkpoint)}
        within = {f"{key}.{name}" if key else name for key, own in names.items() for name in own}
        names[""] = [*names.get("", ()), *(name for name in checkpoint.tensors if name not in within)]
        read = wanted.read(names, prefers_full=True)
        for option, given, globs in zip(wanted._fields, wanted, read, strict=True):
            for text, glob in zip(given, globs, strict=True):
                self._note(option, text, matched(glob, names))
        taken = {
            f"{key}.{name}" if key else name for key, own in names.items() for name in own if read.takes(name, key)
        }
        return [tensor for name, tensor in checkpoint.tensors.items() if name in taken]

    def _note(self, option: str, text: str, found: Sized) -> None:
        word = f"--{option} {text!r}"
        self.seen[word] = self.seen.get(word, False) or bool(found)

    def refused(self) -> bool:
        """Say so where patterns match no name in any file, or leave none, and return whether that is an error."""
        none = [word for word, is_there in self.seen.items() if not is_there and word != _LISTED]
        if self.allows or not (none or not self.seen.get(_LISTED, True)):
            return False
        fact = f"{', '.join(none)} match{'es' * (len(none) == 1)} no name" if none else "no tensor is left to look at"
        hint = "If this is meant, say so with --allow-unmatched."
        say(f"Error: {messages.show(fact)}\nHint: {hint}", err=True)
        return True

    def nothing(self, tensors: Mapping[str, LazyTensor], chosen: Sequence[LazyTensor]) -> str | None:
        """Return what is said of a selection that takes none of the names there are."""
        if chosen or not tensors:
            return None
        patterns = (self.grep.pattern,) if self.grep is not None else ()
        include, exclude = self.filter or ((), ())
        options = {"grep": patterns, "include": include, "exclude": exclude}
        asked = " ".join(f"--{option} {value!r}" for option, values in options.items() for value in values)
        return f"0 of {len(tensors):,} names match {messages.show(asked)}"


def _matching(pattern: re.Pattern[str], names: Iterable[str]) -> set[str]:
    """Return the names that match, of those that are not too long to be tried."""
    trials = Trials()
    return {name for name in names if len(name) <= LONGEST and trials.on(name, pattern.search)}


def selection_of(options: Mapping[str, Any], *, sort: str = "file") -> Selection:
    """Return what the options --grep, --include and --exclude say."""
    wanted = None
    if options["include"] or options["exclude"]:
        wanted = Filter(options["include"], options["exclude"])
    grep = options["grep"]
    try:
        return Selection(grep and re.compile(grep), wanted, sort, options["allow_unmatched"], {})
    except re.error as error:
        raise click.BadParameter(str(error), param_hint="--grep") from error
