"""
Tables of tensors: which columns there are, and how rows become text.

Nothing from a file reaches a terminal raw: ``show`` escapes all that is not printable (control characters,
bidirectional marks, zero-width and private characters, lone surrogates).

Which tensors of a file to list, and in which order, as the options of several verbs say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from ckptool import messages
from ckptool.cli.text import say
from ckptool.messages import show, show_nbytes, some
from ckptool.sections import Row, Table, cut_middle
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo

if TYPE_CHECKING:
    from ckptool.checkpoints.checkpoint import Checkpoint
    from ckptool.names.renaming import Filter


_SHARED_SHOWN = 3
_LONGEST = 256
"""What a cell shows at most where all are as wide as the longest, and of whatever is no name."""

_TAKE_HTML = frozenset(
    {"github", "pipe", "mediawiki", "moinmoin", "textile", "jira", "youtrack", "unsafehtml", "orgtbl", "asciidoc"}
)
"""Formats of pages that may render the HTML in a cell."""

RAW_FORMATS = ("csv", "tsv", "json")
"""Formats for programs, which take numbers as they are."""


class Related(NamedTuple):
    """What the tensors of a file have to do with each other, by name."""

    shared: Mapping[str, Sequence[str]] = MappingProxyType({})
    """All names of tensors that share memory."""
    parameters: Mapping[str, str] = MappingProxyType({})
    """The parameter that an optimizer keeps a tensor for."""


class Column(NamedTuple):
    """One column: its header, whether its values are numbers, and how to get one from a tensor."""

    header: str
    is_number: bool
    value: Callable[[str, TensorInfo, Related], str]
    raw: Callable[[TensorInfo], object] | None = None
    """The value for programs, where its text is for people."""


def _of_info(
    header: str, raw: Callable[[TensorInfo], object], shown: Callable[[Any], str] = str, *, is_number: bool = True
) -> Column:
    """Return a column of what the file says of a tensor by itself, with how it is shown to people."""
    return Column(header, is_number, lambda _name, info, _related: shown(raw(info)), raw)


def _dtype(_name: str, info: TensorInfo, _related: Related) -> str:
    what = info.subclass or info.layout
    return info.dtype.name if what == "strided" else f"{info.dtype.name} ({show(what[:_LONGEST])})"


def _shared_with(name: str, _info: TensorInfo, related: Related) -> str:
    others = [show(cut_middle(other, _LONGEST)) for other in related.shared.get(name, ()) if other != name]
    return some(others, _SHARED_SHOWN)


def _pieces(_name: str, info: TensorInfo, _related: Related) -> str:
    from ckptool.tensors.pieces import cut_of  # a column that few ask for

    found = cut_of(info)
    return "-" if found is None else f"{found}: {some([show(cut_middle(file, _LONGEST)) for file in found.files])}"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _yes_no(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


COLUMNS: dict[str, Column] = {
    "name": Column("name", False, lambda name, _info, _related: show(name) or "(root)"),
    "shape": _of_info("shape", lambda info: list(info.shape), is_number=False),
    "dtype": Column("dtype", False, _dtype),
    "device": Column("device", False, lambda _name, info, _related: show(info.location)),
    "elements": _of_info("elements", lambda info: info.numel, "{:,}".format),
    "size": _of_info("size", lambda info: info.total_nbytes, show_nbytes),
    "bytes": _of_info("bytes", lambda info: info.total_nbytes),
    "stride": _of_info("stride", lambda info: list(info.stride), is_number=False),
    "storage": Column("storage", False, lambda _name, info, _related: show(info.storage.key) if info.storage else "-"),
    "storage_offset": _of_info("storage offset", lambda info: info.storage_offset),
    "file_offset": _of_info("file offset", lambda info: tensor_file_offset(info), _or_dash),
    "requires_grad": _of_info("requires grad", lambda info: info.requires_grad, _yes_no, is_number=False),
    "kind": _of_info("kind", lambda info: info.kind, lambda kind: kind or "-", is_number=False),
    "of_parameter": Column("of parameter", False, lambda name, _info, related: show(related.parameters.get(name, "-"))),
    "shared_with": Column("shared with", False, _shared_with),
    "pieces": Column("pieces", False, _pieces),
}
"""Each is called as its header, with ``_`` for a space."""
_OTHER_NAMES = {"numel": "elements", "parameters": "elements", "nbytes": "bytes", "parameter": "of_parameter"}
DEFAULT_COLUMNS = ("name", "shape", "dtype", "device", "elements", "size")

_NUMBERS = re.compile("([0-9]{1,18})")
SORT_KEYS: dict[str, Callable[[LazyTensor], object]] = {
    "file": lambda _tensor: 0,
    "name": lambda tensor: [int(one) if at % 2 else one for at, one in enumerate(_NUMBERS.split(tensor.name))],
    "size": lambda tensor: -tensor.info.total_nbytes,
    "elements": lambda tensor: -tensor.info.numel,
    "dtype": lambda tensor: tensor.info.dtype.name,
    "device": lambda tensor: tensor.info.location,
}
OTHER_SORT_KEYS = {"numel": "elements", "parameters": "elements", "bytes": "size", "nbytes": "size"}
"""Other names for them, as those of columns."""


def column_named(text: str) -> str:
    """Return the name of a column as it is called here; text that is none as it is."""
    name = "_".join(text.lower().replace("-", " ").split())
    return _OTHER_NAMES.get(name, name)


def tensor_file_offset(info: TensorInfo) -> int | None:
    """Return the offset of a tensor's first element in the file; None where its bytes are not there as they are."""
    start = info.storage.file_offset if info.storage else None
    return None if start is None else start + info.storage_offset * info.dtype.itemsize // info.dtype.packed


def tensor_table(
    checkpoint: Checkpoint, tensors: Iterable[LazyTensor], columns: Sequence[str], *, is_raw: bool = False
) -> Table:
    """
    Return a row for each tensor, and one for each part of a tensor that is in parts.

    If it is raw, for programs, headers are the names of columns, and numbers are numbers, in elements and bytes.
    """
    chosen = [COLUMNS[name] for name in columns]
    related = _related(checkpoint, columns)
    named = ((name, info, its) for tensor in tensors for name, info, its in _with_parts(tensor, related))
    if is_raw:
        rows: list[Any] = [
            [one.raw(info) if one.raw else one.value(name, info, its) for one in chosen] for name, info, its in named
        ]
    else:
        values = [one.value for one in chosen]
        rows = [[value(name, info, its) for value in values] for name, info, its in named]
    headers = columns if is_raw else [one.header for one in chosen]
    return Table(headers, rows, [one.is_number for one in chosen])


def _related(checkpoint: Checkpoint, columns: Sequence[str]) -> Related:
    shared: dict[str, Sequence[str]] = {}
    parameters: dict[str, str] = {}
    if "shared_with" in columns:
        from ckptool.checkpoints.summary import sharing

        shared = {name: group for group in sharing(checkpoint.tensors.values()) for name in group}
    if "of_parameter" in columns:
        from ckptool.checkpoints.training import parameter_names  # seldom asked for

        parameters = parameter_names(checkpoint)
    return Related(shared, parameters)


def _with_parts(tensor: LazyTensor, related: Related) -> Iterator[tuple[str, TensorInfo, Related]]:
    yield tensor.name, tensor.info, related
    for part, info in tensor.info.parts:
        yield f"{tensor.name}[{part}]", info, Related()


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

    rows = [[cut_middle(cell, _LONGEST) for cell in row] for row in rows]
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
            from ckptool.names.renaming import LONGEST  # most calls list all names

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
        from ckptool.checkpoints.summary import candidates
        from ckptool.names.renaming import matched

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
    from ckptool.names.renaming import LONGEST, Trials

    trials = Trials()
    return {name for name in names if len(name) <= LONGEST and trials.on(name, pattern.search)}


def selection_of(options: Mapping[str, Any], *, sort: str = "file") -> Selection:
    """Return what the options --grep, --include and --exclude say."""
    wanted = None
    if options["include"] or options["exclude"]:
        from ckptool.names.renaming import Filter  # most calls list all names

        wanted = Filter(options["include"], options["exclude"])
    grep = options["grep"]
    try:
        return Selection(grep and re.compile(grep), wanted, sort, options["allow_unmatched"], {})
    except re.error as error:
        raise click.BadParameter(str(error), param_hint="--grep") from error
