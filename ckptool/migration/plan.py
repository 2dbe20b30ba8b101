"""
What is ready to be written: files, each a name and what is written into it in order; and what is to be found in them.

Nothing here writes: ``writing`` does, whatever the files are of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ckptool.checkpoints.weights import NameChanges, Weights
from ckptool.errors import MigrationRefused
from ckptool.limits import DEFAULT_LIMITS
from ckptool.messages import counted
from ckptool.migration.changes import DeviceTags, TargetForm
from ckptool.tensors.made import MadeWeight
from ckptool.tensors.payloads import Payload
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo

if TYPE_CHECKING:
    from ckptool.migration.casting import Casting
    from ckptool.recipes.apply import Move
    from ckptool.sources.files import FileSource
    from ckptool.sources.journal import Run

METADATA: Final = "__metadata__."
"""What stands before the keys of a file's own text, where these are among names."""
Part: TypeAlias = bytes | Payload
Content: TypeAlias = Callable[[Sequence[int]], Iterator[Part]]
"""Yields what is written, in order; is given where the CRC-32 of what was read for each payload is added."""


class OutFile(NamedTuple):
    """A file that is ready to be written."""

    name: str
    """In its folder; of a single file, nothing."""
    nbytes: int
    content: Content
    payloads: Sequence[Payload] = ()
    """What is copied into it; an index has none."""
    needs_checksums: bool = False
    """Whether the content needs the CRC-32 of each payload."""
    reader: Callable[[str], str | None] | None = None
    """Reads a path with the reference library, and returns its version; None where it is not there, or is too old."""
    base: FileSource | None = None
    """Of a clone, the file whose bytes it shares, all but those in ``edits``; its content is not written."""
    edits: Sequence[Run] = ()

    @property
    def written_nbytes(self) -> int:
        """How many of its bytes are written."""
        return self.nbytes if self.base is None else sum(len(run.data) for run in self.edits)


def file_of_bytes(name: str, data: bytes) -> OutFile:
    """Return a small file whose bytes are known."""
    return OutFile(name, len(data), lambda _: iter([data]))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One migration, ready to be carried out when it has files: these, and what is to be found in them."""

    form: TargetForm
    target: str
    location: DeviceTags | None
    """The device tags that what is in it gets; None leaves them as they are."""
    names: NameChanges
    weights: Weights | None = None
    """None where everything is taken."""
    casting: Casting | None = None
    made: Sequence[MadeWeight] = ()
    """The weights that are computed of others."""
    moves: Sequence[Move] = ()
    """What a recipe makes of the weights."""
    keeps_layout: bool = False
    """Whether the source's own layout is kept: an edit of it, or of a clone."""
    files: Sequence[OutFile] = ()
    """The last one makes the others a checkpoint."""
    is_folder: bool = False
    expected: Sequence[tuple[str | None, TensorInfo]] = ()
    """The tensors that must be found in it, in order; None for one that lies deeper in an entry."""
    parts: Sequence[Plan] = ()
    """What is in each file, where these are slices of several ranks: all that is to be found in it."""
    packed: Collection[str] | None = None
    """Names of tensors that are written as elements alone, without storage, stride or device; None where none is."""
    tied: dict[str, str] = field(default_factory=dict)
    """Names that were left out, and the name under which each tensor is stored."""
    renamed: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Text that is set beside the tensors, where the source does not say the same."""
    retagged: dict[str, int] = field(default_factory=dict)
    """The old device tags of what gets another, and how many tensors had each."""
    pickles: tuple[bytes, ...] = ()
    """What is unpickled when it is loaded."""
    header: bytes = b""
    """Of a safetensors file."""
    cut: Sequence[LazyTensor] = ()
    """Tensors whose storages are not copied from end to end, where everything is taken."""
    notes: tuple[str, ...] = ()

    @property
    def tensor_count(self) -> int:
        """Tensors in it; tied ones that are not left out count under each name."""
        return len(self.expected)

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.nbytes for file in self.files)

    @property
    def payloads(self) -> Iterator[Payload]:
        """What is copied into the files."""
        return (payload for file in self.files for payload in file.payloads)

    @property
    def builds_model(self) -> bool:
        """Whether torch builds a model and saves it."""
        return self.form == "model" and self.weights is not None


def is_plain(info: TensorInfo) -> bool:
    """Say whether a tensor is nothing but elements, which a file has for it."""
    return info.storage is not None and info.layout == "strided" and info.location != "meta"


def split(sizes: Iterable[tuple[str, int]], most_nbytes: int) -> list[list[str]]:
    """
    Return the names in each file: they are filled in order.

    What is larger than a file may be has one of its own, before the one that is being filled.
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
