"""Undo an edit in place that was cut off: ``output/editing`` does it."""

from __future__ import annotations

import os

from ckptool.migration.output.editing import roll_back


def recover(path: str | os.PathLike[str]) -> int:
    """
    Undo a ``migrate(path, in_place=True)`` that was cut off, from the journal beside the file.

    Return how many bytes were written back: 0 where the edit had not begun, or all of it was written. If ``recover`` is
    cut off, call it again.

    Raises:
        FileUnavailable: There is no such file, or no journal of it (``no-journal``), or it may not be read.
        MigrationRefused: It is being edited now; or the journal is another file's, or the file was saved over since
            (``another-file``); or what has the journal's name does not count (``foreign-journal``).
        DamagedFile: The journal is not what was written. The file was not changed.
        OutputFailed: The system refused; the journal is still there.
    """
    return roll_back(os.fspath(path))
