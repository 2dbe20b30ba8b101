"""What is closed at the end of a ``with`` block."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it since Python 3.11


class Closing:
    """Something that has ``close``, and is closed at the end of a ``with`` block, whatever happens in it."""

    __slots__ = ()

    def close(self) -> None:
        """Close it; what is closed already stays so."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
