"""``ckptool recover``: undo an edit in place that was cut off."""

from __future__ import annotations

import sys

import click

from ckptool.cli.options import AnyPath
from ckptool.cli.text import advised, error_text, say
from ckptool.cli.verbs import Command
from ckptool.errors import CkptoolError, MigrationRefused
from ckptool.messages import show_nbytes
from ckptool.migration.output.editing import recover as recover_file
from ckptool.sources.paths import command_line, shown_path


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=AnyPath())
def recover(files: tuple[str, ...]) -> None:
    """
    Undo a 'migrate --in-place' that was cut off.

    The bytes that the edit overwrote are in a journal beside the file, '.FILE.ckptool-undo'. They are written back, and
    the journal is removed. A file that is whole stays as it is, before the edit or after it. One that is being edited
    now is left alone, and so is one that was saved over since, or has no journal that counts: a regular file of root,
    of the owner of FILE or of yourself, which nobody else may write.

    Exit code 1: refused; 2: could not be done.
    """
    code = 0
    for path in files:
        try:
            done = recover_file(path)
        except CkptoolError as error:
            error.path = shown_path(error.path or path)
            code = max(code, 1 if isinstance(error, MigrationRefused) else 2)
            say(error_text(error), err=True)
            continue
        undone = f"what the edit had changed is as before it, {show_nbytes(done)} written back; whether anybody else "
        undone += "wrote to the rest of the file meanwhile is not known"
        whole = "it is whole, and was not changed: no edit had begun, or all of it was written"
        command = command_line(path, "check", deep=True) if done else None
        say(advised(f"{path}: {undone if done else whole}", command=command))
    sys.exit(code)
