"""What every output has: a file here, or an object of a store."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from typing_extensions import Self


class _Block(Protocol):
    """What is used in a ``with`` block."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SinkFile(_Block, Protocol):
    """One file being written. Used in a ``with`` block; without ``publish`` it leaves nothing."""

    path: str
    """What to call it."""
    position: int
    """Bytes appended so far."""
    takes_any_order: bool
    """Whether ``fill`` may be called in any order, and by several threads at once."""

    def reserve(self, nbytes: int) -> None:
        """Make sure that so many bytes will fit."""
        ...

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        ...

    def flush(self) -> None:
        """Hand on the bytes that wait."""
        ...

    def leave(self, nbytes: int) -> int:
        """Leave a gap that ``fill`` will write, and return where it begins."""
        ...

    def fill(self, position: int, view: memoryview) -> None:
        """Write bytes into a gap that was left for them."""
        ...

    def filled(self, nbytes: int) -> None:
        """Count bytes that ``fill`` has written."""
        ...

    @property
    def nbytes(self) -> int:
        """Size so far."""
        ...

    def reading_path(self) -> str:
        """Return a path or an address of what was written, once it was begun to be put where it stays."""
        ...

    def sync(self) -> None:
        """Begin to put what was written where it stays; it can be read back then."""
        ...

    def publish(self) -> None:
        """Give it its name, in one step."""
        ...

    def close(self) -> None:
        """Remove it if it has no name yet."""
        ...


class Place(NamedTuple):
    """Where a file of a folder is written until that has its name: plain data, for any process."""

    path: str
    shown: str
    """What to call it."""
    reached: dict[str, Any] | None = None
    """How a store is reached; None for a path."""


class Sink(_Block, Protocol):
    """A file or folder being written. Used in a ``with`` block; without ``publish`` it leaves nothing."""

    path: str

    @property
    def replaced(self) -> Sequence[str]:
        """Names of the files in the folder that is to be replaced."""
        ...

    def reserve(self, nbytes: int) -> None:
        """Make sure that so many bytes will fit."""
        ...

    def file(self, name: str) -> SinkFile:
        """Return a file to be written."""
        ...

    def keep(self, file: SinkFile) -> None:
        """Let a file of it that is complete have its name as soon as the whole has its own."""
        ...

    def reading_path(self, name: str = "") -> str:
        """Return the path of the whole, or of a file, while it is written, for reading back."""
        ...

    def publish(self) -> None:
        """Give the whole its name, in one step."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What is to be said of what was replaced."""
        ...


class SinkFolder(Sink, Protocol):
    """A folder, whose files other processes may write as well."""

    def elsewhere(self, name: str, nbytes: int) -> Place:
        """Return where another process writes a file of so many bytes, with ``open_place``."""
        ...
