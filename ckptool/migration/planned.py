"""What every plan has; and what one of a folder has: its files in the order in which they are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ckptool.errors import MigrationRefused, OutputFailed
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.messages import counted
from ckptool.migration.output.sink import Sink
from ckptool.sources.files import open_source
from ckptool.sources.source import Meter
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


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What is ready to be written: a file, or a folder."""

    expected: Sequence[tuple[str | None, TensorInfo]]
    """The tensors that must be found in it, in order; None for one that lies deeper in an entry."""
    tied: dict[str, str] = field(default_factory=dict)
    """Names that were left out, and the name under which each tensor is stored."""
    renamed: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()
    retagged: dict[str, int] = field(default_factory=dict)
    """The old device tags of what gets another, and how many tensors had each."""
    pickles: tuple[bytes, ...] = ()
    """What is unpickled when it is loaded."""

    @property
    def tensor_count(self) -> int:
        """Tensors in it; tied ones that are not left out count under each name."""
        return len(self.expected)


@dataclass(frozen=True, kw_only=True)
class FolderPlan(Planned):
    """A folder that is ready to be written."""

    files: Sequence[tuple[str, PlannedFile]]
    """Names and files; the last one makes the others a checkpoint."""
    partly: Sequence[LazyTensor] = ()
    """Tensors whose storages are not copied from end to end, where everything is taken."""

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.nbytes for _, file in self.files)

    @property
    def copied(self) -> list[Payload]:
        """What is copied into the files."""
        return [payload for _, file in self.files for payload in file.copied]

    def verify(self, path: str, limits: Limits) -> None:
        """Read the files back together, where the folder is written but has no name yet: each was, alone."""


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
