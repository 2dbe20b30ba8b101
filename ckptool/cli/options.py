"""Options that several verbs share."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from ckptool.cli import tables
from ckptool.cli.completion import choices

F = TypeVar("F", bound=Callable[..., Any])


LIMIT: Final = 200
"""Rows on a terminal, unless another number is asked for."""
_WHICH: Final = ("grep", "include", "exclude", "show_all", "show_globals", "show_source")
_HOW: Final = ("table_format", "limit", "columns", "tree", "depth", "no_fold", "sort")
"""What says which tensors or names of a file to list, and how to list them."""

brief_option = click.option("-b", "--brief", is_flag=True, help="Print one line for each file, and a total.")
allow_unmatched_option = click.option(
    "--allow-unmatched", is_flag=True, help="Allow patterns that match no name in any file."
)
_recursive = click.option(
    "-r",
    "--recursive",
    is_flag=True,
    help="Take every checkpoint in a folder and below; the files of one checkpoint count once.",
)
_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object for each file; a list if there are several."
)
_jsonl = click.option("--jsonl", "as_lines", is_flag=True, help="Print a line of JSON for each file, as it comes.")
_limit = click.option(
    "--limit",
    type=click.IntRange(0),
    metavar="N",
    help=f"Rows to list, 0 for all; by default {LIMIT} on a terminal, and all elsewhere.",
)
_wide = click.option("--wide", is_flag=True, help="Do not cut lines to the width of the terminal.")
pager_option = click.option("--pager", is_flag=True, help="Show everything in a pager.")
LOCAL: Final = "local"
_ADDRESS: Final = re.compile(r"(ray://.+|[\w.-]+:\d+|\[[0-9a-fA-F:]+\]:\d+|auto|local)")
"""What may follow the option: anything else is the next argument."""


def many_files(command: F) -> F:
    """Add what verbs take that look at any number of files, one after the other."""
    return _recursive(_json(_jsonl(command)))


def rows(command: F) -> F:
    """Add what verbs take that list many rows."""
    return _limit(_wide(pager_option(_table(command))))


def limit_of(options: dict[str, Any]) -> int | None:
    """Return how many rows to list; None for all."""
    if options["limit"] is not None:
        return options["limit"] or None
    is_screen = sys.stdout.isatty() and not (options["pager"] or options["table_format"])
    return LIMIT if is_screen else None


def left_out(number: int, what: str = "") -> str:
    """Return a line about rows that are not listed."""
    return f"… and {number:,} more{what}; --limit 0 lists all"


def no_room(headers: Sequence[str]) -> str:
    """Return a line about columns that the terminal has no room for."""
    return f"… no room for {', '.join(headers)}; --wide shows all"


def _table_format(_ctx: click.Context, _param: click.Parameter, asked: str | None) -> str | None:
    if asked is not None and asked not in tables.RAW_FORMATS and asked not in tables.table_formats():
        raise click.BadParameter(f"choose from {', '.join(tables.table_formats())}", param_hint="--table")
    return asked


_table = click.option(
    "--table",
    "table_format",
    metavar="FORMAT",
    callback=_table_format,
    shell_complete=choices(tables.table_formats),
    help="Print only the table: as csv, tsv or json with plain numbers, or in a format of tabulate (github, html…).",
)


def check_one_form(options: dict[str, Any]) -> None:
    """Refuse options that ask for several forms of output at once, or for what the form has not."""
    if options["as_json"] and options["as_lines"]:
        raise click.UsageError("--json and --jsonl are two forms: give one of them.")
    context = click.get_current_context()
    if options.get("brief") and "form" not in options:  # which names to write is no matter of lists
        for one in context.command.params:
            if one.name in (*_WHICH, *_HOW) and context.get_parameter_source(one.name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(
                    f"--brief is a line for each file, and {one.opts[-1]} is about a list of what is in each: give one "
                    "of them. For programs, --jsonl has an object for each file."
                )


class RayCommand(click.Command):
    """A command with ``--ray``, behind which an address may stand, or the next argument."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        for index in range(end):
            if args[index] == "--ray" and not (index + 1 < end and _ADDRESS.fullmatch(args[index + 1])):
                args[index] = f"--ray={LOCAL}"
        return super().parse_args(ctx, args)


def ray_option(what: str) -> Callable[[F], F]:
    """Return what adds ``--ray`` to a ``RayCommand``."""
    return click.option(
        "--ray", metavar="[ADDRESS]", help=f"{what} on Ray: the one at ADDRESS, or one that is started here."
    )
