"""What every plan of a folder has: its files in the order in which they are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from ckptool.errors import MigrationRefused, OutputFailed
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.messages import counted
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


def split(sizes: Iterable[tuple[str, int]], most_nbytes: int) -> list[list[str]]:
    """
    Return the names in each file: they are filled in order.

    What is larger than a file may be has one of its own, before the one that is being filled.

    Raises:
        MigrationRefused: There would be too many to be read.
    """
    files: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, nbytes in sizes:
        if nbytes > most_nbytes:
            files.append([name])
            continue
        if filled + nbytes > most_nbytes:
            files.append(current)
            current, filled = [], 0
        current.append(name)
        filled += nbytes
    files += [current] if current else []
    if len(files) > DEFAULT_LIMITS.shards:
        raise MigrationRefused(
            f"{counted(len(files), 'shard')}; {DEFAULT_LIMITS.shards:,} can be read",
            kind="too-many-shards",
            hint="Make them larger, with `max_shard_size=`.",
        )
    return files
