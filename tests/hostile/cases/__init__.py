"""The hostile files, named, each under a row of the list: how it is made, and what must happen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Make = bytes | Callable[[Path], str]
"""The bytes of the file, or what makes it in an empty folder and returns its path."""


class Case(NamedTuple):
    """A hostile file, and what every verb must make of it."""

    row: str
    name: str
    make: Make
    expect: str
    """
    ``read``: it opens. ``refused``: each verb ends in the same error of ours. ``any``: an error of ours or none.
    ``one``: an error, or the weights that are given and no others. Any other text is the kind of the error.
    """
    weights: dict[str, bytes] | bool | None = None
    """What migrating and loading give: these bytes; True, something; False, an error of ours; None, either."""
    nbytes: int = 256 << 20
    """Address space that opening it may take."""
    beside: tuple[str, ...] = ()
    """Components of the names of other files that may be opened, one by one and without following a link."""

    @property
    def label(self) -> str:
        return f"{self.row}: {self.name}"


def written(make: Callable[[], bytes]) -> Make:
    """Return what makes a file only when it is asked for, as it is large."""

    def write(folder: Path) -> str:
        (folder / "file").write_bytes(make())
        return str(folder / "file")

    return write
