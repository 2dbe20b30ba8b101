"""What every plan of a folder has: its files in the order in which they are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ckptool.errors import OutputFailed
from ckptool.limits import Limits
from ckptool.migration.output.sink import Sink
from ckptool.sources.files import open_source
from ckptool.sources.meter import Meter
from ckptool.tensors.payloads import Payload
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo


class PlannedFile(Protocol):
    """A file that is ready to be written."""

    @property
    def nbytes(self) -> int: ...

    @property
    def copied(self) -> Sequence[Payload]:
        """What is copied into it."""
        ...

    def write(self, output: Sink, *, checksums: bool = True) -> Any:
        """Write it, and return what ``verify`` needs to know about what was written."""
        ...

    def verify(self, path: str, written: Any, limits: Limits, meter: Meter) -> str | None:
        """Read it back; return which library read it beside our own reader."""
        ...


class FolderPlan(Protocol):
    """A folder that is ready to be written."""

    @property
    def files(self) -> Sequence[tuple[str, PlannedFile]]:
        """Names and files; the last one makes the others a checkpoint."""
        ...

    @property
    def nbytes(self) -> int: ...

    @property
    def copied(self) -> Sequence[Payload]: ...

    @property
    def expected(self) -> Sequence[tuple[str | None, TensorInfo]]:
        """The tensors that are in it."""
        ...

    @property
    def partly(self) -> Sequence[LazyTensor]:
        """Tensors whose storages are not copied from end to end, where everything is taken."""
        ...

    def verify(self, path: str, limits: Limits) -> None:
        """Read the files back together, where the folder is written but has no name yet."""
        ...


class BytesFile(NamedTuple):
    """A small file whose bytes are known."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return len(self.data)

    @property
    def copied(self) -> tuple[()]:
        """Nothing: its bytes are known."""
        return ()

    def write(self, output: Sink, *, checksums: bool = True) -> None:  # noqa: ARG002 - there are the bytes
        """Write the file."""
        output.write(self.data)
        output.flush()

    def verify(self, path: str, written: None, limits: Limits, meter: Meter) -> None:  # noqa: ARG002 - as for other files
        """
        Read the file back.

        Raises:
            OutputFailed: It does not hold these bytes.
        """
        source, _ = open_source(path)
        try:
            if source.nbytes != len(self.data) or source.read(0, source.nbytes) != self.data:
                raise OutputFailed("an index was not written as it was made", kind="verification-failed")
        finally:
            source.close()
