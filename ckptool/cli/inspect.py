"""``ckptool inspect``: what is in these files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from ckptool.cli import tables
from ckptool.cli.brief import left_out
from ckptool.cli.completion import choices
from ckptool.cli.inspect_output import output_for
from ckptool.cli.options import allow_unmatched_option, brief_option, many_files, refuse_idle, rows
from ckptool.cli.tables import selection_of
from ckptool.cli.targets import AnyPath, far_options, is_many, refuse_none, targets
from ckptool.cli.text import pager, say
from ckptool.cli.verbs import Command
from ckptool.errors import CkptoolError
from ckptool.formats import open_checkpoint


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=AnyPath())
@brief_option
@many_files
@click.option("-q", "--quiet", is_flag=True, help="Show what the file is, without the table.")
@click.option("--tree", is_flag=True, help="Show the names as a tree, with the elements and the size of each module.")
@click.option("--depth", type=click.IntRange(1), help="Levels of the tree to show.")
@click.option("--no-fold", is_flag=True, help="Show every layer in the tree, also those that are alike.")
@click.option("--grep", metavar="REGEX", help="List only tensors whose name matches.")
@click.option("--include", multiple=True, metavar="GLOB", help="List only names that match a glob. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out names that match a glob. Repeatable.")
@allow_unmatched_option
@click.option(
    "--sort",
    type=click.Choice([*tables.SORT_KEYS, *tables.OTHER_SORT_KEYS]),
    metavar="COLUMN",
    default="file",
    show_default=True,
    help=f"Order of the table: {', '.join(tables.SORT_KEYS)}.",
)
@click.option(
    "--columns",
    metavar="A,B,…",
    callback=lambda _, __, value: _columns(value),
    shell_complete=choices(lambda: (*tables.COLUMNS, "all"), is_list=True),
    help=f"Columns of the table: all, or some of: {', '.join(tables.COLUMNS)}.",
)
@rows
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="Also list the values that are not tensors, and tensors outside the state_dict.",
)
@click.option("--globals", "show_globals", is_flag=True, help="List only the names that unpickling would import.")
@click.option(
    "--source", "show_source", is_flag=True, help="Print only the source code of classes that is in old files."
)
@click.option(
    "--digest", is_flag=True, help="Read the weights, and print their digest: equal weights have the same in any form."
)
@far_options
def inspect(files: tuple[str, ...], **options: Any) -> None:
    """
    Say what is in checkpoints, without running them.

    FILE is a checkpoint of any kind, or an index of shards, or a folder; FILE::MEMBER picks one out of an archive. Only
    the index is read, so this is quick whatever the size. Exit code 1 means that a pattern matches no name in any file,
    2 that a file could not be read.
    """
    refuse_idle()
    selection = selection_of(options, sort=options["sort"])
    unseen: list[str] = []
    found = targets(files, recursive=options["recursive"], passed=unseen)
    failed, passed = False, 0
    with pager(asked=options["pager"]):
        output = output_for(options, selection, [one.shown for one in found], is_list=is_many(files, found))
        for target in found:
            try:
                with open_checkpoint(target.path) as checkpoint:
                    output.opened(checkpoint, target.shown)
            except CkptoolError as error:
                if target.passes_over(error):
                    output.passed_over(target.shown)
                    passed += 1
                else:
                    failed = True
                    output.failed(target.shown, error)
        output.end()
    for text in left_out(unseen):
        say(text, err=True)
    refuse_none(passed, found, files)
    refused = selection.refused()
    sys.exit(2 if failed else int(refused))


def _columns(asked: str | None) -> Sequence[str]:
    if asked is None:
        return tables.DEFAULT_COLUMNS
    names = [tables.column_named(name) for name in asked.split(",") if name.strip()]
    if names == ["all"]:
        return tuple(tables.COLUMNS)
    unknown = [name for name in names if name not in tables.COLUMNS]
    if unknown or not names:
        raise click.BadParameter(f"choose from {', '.join(tables.COLUMNS)}, or all", param_hint="--columns")
    return names
