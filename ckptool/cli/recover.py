"""``ckptool recover``: undo an edit in place that was cut off."""

from __future__ import annotations

import sys

import click

from ckptool.cli.paths import AnyPath
from ckptool.cli.text import error_text, say
from ckptool.errors import CkptoolError, MigrationRefused
from ckptool.messages import show, show_nbytes
from ckptool.migration.recover import recover as recover_file
from ckptool.sources.naming import shown_path


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=AnyPath())
def recover(files: tuple[str, ...]) -> None:
    """
    Undo a 'migrate --in-place' that was cut off.

    The bytes that the edit overwrote are in a journal beside the file, '.FILE.ckptool-undo'. They are written back, and
    the journal is removed. A file that is being edited now is left alone, and so is one without a journal.

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
        what = f"{show_nbytes(done)} written back" if done else "no edit had begun"
        say(f"{show(path)}: it is what it was before the edit, {what}")
    sys.exit(code)
