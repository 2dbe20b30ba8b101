"""A base class for what is closed at the end of a ``with`` block."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it since Python 3.11


class Closing:
    """A context manager that calls its ``close`` at the end of the ``with`` block, also after an error."""

    __slots__ = ()

    def close(self) -> None:
        """Close it; a second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
