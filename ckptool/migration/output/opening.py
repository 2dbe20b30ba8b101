"""Open the output for a target: a path or an address, of a file or of a folder."""

from __future__ import annotations

from collections.abc import Callable

from ckptool.migration.output import Output
from ckptool.migration.output.folder import OutputFolder
from ckptool.migration.output.sink import Place, Sink, SinkFolder
from ckptool.sources.naming import is_far


def open_output(target: str, *, force: bool, progress: Callable[[int, int], None] | None) -> Sink:
    """
    Return what a file is written to.

    Raises:
        OutputExists: Something is there, and is not to be replaced.
        OutputFailed: It cannot be written to.
    """
    if not is_far(target):
        return Output(target, force=force, progress=progress)
    from ckptool.migration.output.far import FarOutput  # few targets are far away
    from ckptool.sources.remote.address import as_remote

    return FarOutput(as_remote(target), force=force, progress=progress)


def open_folder(target: str, *, force: bool, progress: Callable[[int, int], None] | None) -> SinkFolder:
    """
    Return what the files of a folder are written to.

    Raises:
        OutputExists: Something is there, and is not to be replaced; nothing far away is, whatever is asked for.
        OutputFailed: It cannot be written to.
    """
    if not is_far(target):
        return OutputFolder(target, force=force, progress=progress)
    from ckptool.migration.output.far import FarFolder
    from ckptool.sources.remote.address import as_remote

    return FarFolder(as_remote(target), progress=progress)


def open_place(place: Place, progress: Callable[[int, int], None] | None) -> Sink:
    """
    Return what a file is written to that belongs to a folder of another process. Others may write the same file.

    Raises:
        OutputFailed: It cannot be written to; the folder may be gone, as the other process is.
    """
    if place.reached is None:
        return Output(place.path, force=True, progress=progress, shown=place.shown)
    from ckptool.migration.output.far import written_at

    return written_at(place, progress)
