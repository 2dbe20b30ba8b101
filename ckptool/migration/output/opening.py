"""Open the output for a target: a path or an address, of a file or of a folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress

from ckptool.migration.output import Output
from ckptool.migration.output.folder import OutputFolder
from ckptool.migration.output.sink import Place, Sink, SinkFolder
from ckptool.sources.naming import is_far
from ckptool.sources.source import HasVersions, Source


def open_output(target: str, *, force: bool, progress: Callable[[int, int], None] | None, mode: int) -> Sink:
    """
    Return what a file is written to.

    Raises:
        OutputExists: Something is there, and is not to be replaced.
        OutputFailed: It cannot be written to.
    """
    if not is_far(target):
        return Output(target, force=force, progress=progress, mode=mode)
    from ckptool.migration.output.far import FarOutput  # few targets are far away
    from ckptool.sources.remote.address import as_remote

    return FarOutput(as_remote(target), force=force, progress=progress)


def open_folder(target: str, *, force: bool, progress: Callable[[int, int], None] | None, mode: int) -> SinkFolder:
    """
    Return what the files of a folder are written to.

    Raises:
        OutputExists: Something is there, and is not to be replaced; nothing far away is, whatever is asked for.
        OutputFailed: It cannot be written to.
    """
    if not is_far(target):
        return OutputFolder(target, force=force, progress=progress, mode=mode)
    from ckptool.migration.output.far import FarFolder
    from ckptool.sources.remote.address import as_remote

    return FarFolder(as_remote(target), progress=progress)


def open_place(place: Place, progress: Callable[[int, int], None] | None, mode: int) -> Sink:
    """
    Return what a file is written to that belongs to a folder of another process. Others may write the same file.

    Raises:
        OutputFailed: It cannot be written to; the folder may be gone, as the other process is.
    """
    if place.reached is None:
        return Output(place.path, force=True, progress=progress, shown=place.shown, mode=mode)
    from ckptool.migration.output.far import written_at

    return written_at(place, progress)


def mode_of(source: Source) -> int:
    """Return the mode of files made of a source: nobody may do with them what he may not do with each of its files."""
    mode = 0o666
    for path, _ in source.versions() if isinstance(source, HasVersions) else ():
        with suppress(OSError, ValueError):  # far away
            mode &= os.stat(path).st_mode
    return mode | stat.S_IRUSR  # to be read back
