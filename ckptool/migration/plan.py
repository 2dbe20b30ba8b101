"""
``Plan``: the files to write, each with its content in order, and the tensors to be found in them.

Nothing here writes: ``writing`` carries out plans of every form.
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
from ckptool.tensors.payloads import ComputedWeight, Payload
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo

if TYPE_CHECKING:
    from ckptool.migration.casting import Casting
    from ckptool.recipes.apply import Move
    from ckptool.sources.files import FileSource
    from ckptool.sources.journal import Run

METADATA: Final = "__metadata__."
"""Prefix of the keys of a file's metadata where they are listed among names of tensors."""
Part: TypeAlias = bytes | Payload
Content: TypeAlias = Callable[[Sequence[int]], Iterator[Part]]
"""Yields the parts of a file in order; its argument is a list to which the caller adds each payload's CRC-32."""


class OutFile(NamedTuple):
    """A file that is ready to be written."""

    name: str
    """Name in its folder; empty for a single file."""
    nbytes: int
    content: Content
    payloads: Sequence[Payload] = ()
    """The payloads that are copied into it; an index has none."""
    needs_checksums: bool = False
    """Whether the content needs the CRC-32 of each payload."""
    reader: Callable[[str], str | None] | None = None
    """Reads a path with the reference library; returns the library's name and version, or None if it cannot be used."""
    base: FileSource | None = None
    """For a clone, the file whose bytes it shares, except those in ``edits``; ``content`` is not written then."""
    edits: Sequence[Run] = ()


def file_of_bytes(name: str, data: bytes) -> OutFile:
    """Return a small file whose bytes are known."""
    return OutFile(name, len(data), lambda _: iter([data]))


@dataclass(frozen=True)
class Plan:
    """One migration, ready to be carried out once ``files`` is set: the files, and what is to be found in them."""

    form: TargetForm
    target: str
    location: DeviceTags | None
    """The new device tags; None leaves the tags as they are."""
    is_folder: bool
    names: NameChanges
    weights: Weights | None = None
    """None where everything is taken."""
    casting: Casting | None = None
    made: Sequence[ComputedWeight] = ()
    """The weights that are computed from others."""
    moves: Sequence[Move] = ()
    """What a recipe does to weights beyond renaming them."""
    keeps_layout: bool = False
    """Whether the source's own layout is kept: the plan edits the source, or a clone of it."""
    files: Sequence[OutFile] = ()
    """The last one makes the others a checkpoint."""
    expected: Sequence[tuple[str | None, TensorInfo]] = ()
    """The tensors that must be found in it, in order, with their names; None for a tensor nested in an entry."""
    parts: Sequence[Plan] = ()
    """For slices of several ranks, the plan of each file."""
    packed: Collection[str] | None = None
    """
    Names of tensors that are written as elements alone, without storage, stride or device; None where no tensor is.
    """
    tied: dict[str, str] = field(default_factory=dict)
    """Names that are left out, to the name under which their tensor is stored."""
    renamed: tuple[tuple[str, str], ...] = ()
    dropped: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata that is set and differs from the source's."""
    retagged: dict[str, int] = field(default_factory=dict)
    """The old device tags that change, and how many storages and devices had each."""
    pickles: tuple[bytes, ...] = ()
    """The pickles that loading it unpickles."""
    header: bytes = b""
    """The header of a safetensors file."""
    cut: Sequence[LazyTensor] = ()
    """Tensors in items of DCP whose storages are not copied as a whole: their checksums are compared separately."""
    notes: tuple[str, ...] = ()

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
    """Return whether a tensor is strided and its elements are in the file."""
    return info.storage is not None and info.layout == "strided" and info.location != "meta"


def split(sizes: Iterable[tuple[str, int]], most_nbytes: int) -> list[list[str]]:
    """
    Return the names in each file; files are filled in order with tensors of up to ``most_nbytes``.

    A larger tensor gets a file of its own, before the one that is being filled.
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
