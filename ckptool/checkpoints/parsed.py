"""
``Parsed``: what a format's reader returns, of which a ``Checkpoint`` is made; ``Traits`` of formats.

Also the records in it that few files have: shards, members, files beside it, its set of files, source code, remarks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from ckptool.archives.archive import Archive
from ckptool.checkpoints.contents import Contents, Form
from ckptool.checkpoints.roles import NO_WEIGHTS, role_of
from ckptool.pickles.nodes import Global, Inert
from ckptool.pickles.reader import Pickle
from ckptool.sources.source import Source
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import TensorInfo

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it since Python 3.11

    from ckptool.checkpoints.modules import ModuleFacts, StateDictWalk

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class Traits(NamedTuple):
    """What is true of every file of a format. Other packages use these, never the name of a format."""

    has_tree: bool = False
    """Whether it is a pickled tree of objects and nothing else, so that it can be written again as a whole."""
    tree_is_made: bool = False
    """Whether its tree was put together from several files: by default only its weights are written."""
    is_plain: bool = False
    """
    Whether it is like safetensors, as which it is written again by default: named tensors and text; no pickle, no
    object, no storage that two tensors share.
    """
    keeps_devices: bool = True
    keeps_ties: bool = True
    keeps_order: bool = True
    keeps_versions: bool = True
    """Whether it stores the versions of modules, by which ``load_state_dict`` converts old entries."""
    is_trusted: bool = False
    """Whether the loader unpickles anything in it, as ``weights_only=False`` does."""
    program: str | None = None
    """What only torch can write of it: the code or the graph of a model; None if there is no such thing."""
    loader: str = "torch.load"
    """The function that opens such a file."""
    unpickled_by: tuple[str, ...] = ("torch.load(weights_only=False)",)
    """Other functions that open such a file, and make the calls in it."""
    is_read: bool = True
    """Whether the loader reads its tensors, rather than only unpickling what is beside them."""
    refusal: str | None = None
    """Why ``torch.load(weights_only=True)`` refuses every such file."""
    edited_by: Literal["member", "pickles", "header"] | None = None
    """
    What can be edited without moving tensors: a pickle that is a member of a zip, pickles before the tensors, or a
    header of text; None if the whole file must be written again.
    """

    @property
    def call(self) -> str:
        """The loader with parentheses, for people to read."""
        return self.loader if "(" in self.loader else f"{self.loader}()"


class Stream(NamedTuple):
    """Consecutive pickles: bytes ``start`` to ``end`` of ``source``, an archive member or the file."""

    record: str
    """Name of the archive member; empty for the file itself."""
    source: Source
    start: int
    end: int
    globals: tuple[Global, ...]
    """Every name that unpickling them would import, in order of first use."""
    blocks: tuple[range, ...] = ()
    """Ranges of bytes between the opcodes, or between the pickles, in order."""
    is_index: bool = False
    """Whether it is an index of a distributed checkpoint, which always refers to classes of its own."""
    has_arrays: bool = False
    """Whether joblib may load it, which reads elements of arrays between the opcodes."""
    rest: int | None = None
    """Offset in the source of the bytes after the loaded pickles; None if there are none."""
    opcodes: Mapping[int, int] = {}
    """The opcodes in them, without the frequent ones of protocol 2, and the offset of the first of each."""

    def inside(self, file: str) -> Stream:
        """Return it with the record ``FILE::RECORD``, for a file that is one of several, or a member."""
        return self._replace(record=f"{file}::{self.record}" if self.record else file)


@dataclass(eq=False, slots=True)
class Part:
    """A file inside a file of a directory: a piece of a tensor, or a value, with checksums of its own."""

    what: str
    file: str
    open: Callable[[], Parsed]
    contradiction: Callable[[Parsed], str | None] | None = None
    """Returns how it contradicts the index; None if it does not."""
    twin: Callable[[], Parsed] | None = None
    """Opens the copy of another rank, which must be equal."""
    at: tuple[int, int] = (0, 0)
    """Its offset in the file, and its size in bytes."""


class Recorded(NamedTuple):
    """Facts about tensors that a file records as text, and its other texts."""

    ties: Mapping[str, str] = _NOTHING
    """Names that were left out of the file, each with the name under which its tensor is stored."""
    order: tuple[str, ...] = ()
    """All names in their original order, including the left-out ones; empty if it is not recorded."""
    modules: Mapping[str, ModuleFacts] = MappingProxyType({})
    texts: Mapping[str, str] = _NOTHING


_NOTHING_RECORDED: Final = Recorded()


class Shard(NamedTuple):
    """One of the files that an index lists, with some of the tensors."""

    name: str
    """The name in the index: a path relative to the index's folder."""
    tensors: int
    nbytes: int
    """Size of the file."""
    source: Source
    holds: str = "tensor"
    """The noun for what ``tensors`` counts: tensors, or items, which may be pieces of them."""


class Member(NamedTuple):
    """A checkpoint inside an archive that holds several: open it as ``FILE::NAME``."""

    name: str
    format: str
    form: Form
    tensors: int
    nbytes: int
    """Size of the member, unpacked."""


class Beside(NamedTuple):
    """Something in the same folder that is not part of the checkpoint that was opened."""

    name: str
    role: str
    """Its purpose, by its name: ``optimizer``, ``scheduler``, ``rng``, ``duplicate``…"""
    path: str
    """The path that opens it."""
    nbytes: int | None = None
    """None for a folder."""
    about: str | None = None
    """Its contents in short, if they are known without opening a checkpoint."""


class PartOf(NamedTuple):
    """The set of files that a file belongs to."""

    what: str
    """What the file is, in words."""
    path: str
    """The path that opens all files of the set together."""
    is_slice: bool = False
    """Whether it has parts of tensors, or only some of the model's tensors, so that it fits no model alone."""
    remedy: str = ""
    """What to do, if it is not to save the whole model."""


class ClassSource(NamedTuple):
    """The source of a class, as legacy files contain it. It is only text, never compiled."""

    name: str
    path: str
    """The path of the source file on the machine that saved the checkpoint."""
    text: str


class Remark(NamedTuple):
    """A finding by the reader of a format; its code has the severity."""

    code: str
    what: str
    hint: str | None = None


@dataclass(eq=False)
class Parsed:
    """What is in one file, or in files that belong together. It never changes: ``_replace`` returns another."""

    source: Source
    format: str
    traits: Traits
    """What is true of every file of its format."""
    contents: Contents
    fixed_form: Form | None = None
    """The form, if it is known without inspecting the contents."""
    root: Inert = None
    """The whole pickled tree, inert; None if the format has none."""
    pickles: tuple[Pickle, ...] = ()
    """The pickles of the first of ``streams``, if they were kept; one of them has the tree."""
    rebuilder: Rebuilder | None = None
    """Recognises the tensors of the tree."""
    constants: Mapping[str, TensorInfo] = field(default_factory=dict)
    """Tensors of a program that are not attributes of its modules."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The text that the format has beside the tensors (safetensors' ``__metadata__``)."""
    recorded: Recorded = _NOTHING_RECORDED
    """Facts about the tensors in that text."""
    class_sources: tuple[ClassSource, ...] = ()
    notes: tuple[str, ...] = ()
    """Oddities of the container that cannot be misread."""
    damage: str | None = None
    """Message if the index does not match its own checksum: names and shapes may not be those that were saved."""
    member: str | None = None
    """Name of the archive member that was opened, if the file is an archive of others."""
    members: tuple[Member, ...] = ()
    inside: Mapping[str, Parsed] = field(default_factory=dict)
    """The other checkpoints in its archive by name, as in ``FILE::NAME``; all of them, if none was chosen."""
    unopened: tuple[tuple[str, str], ...] = ()
    """Members of its archive that look like checkpoints and cannot be opened: their names, and why."""
    streams: tuple[Stream, ...] = ()
    """The pickles that were read."""
    archives: tuple[Archive, ...] = ()
    """The archives that contain it, outermost first; with shards, the archive of each shard, in their order."""
    shards: tuple[Shard, ...] = ()
    """The files with the tensors, if the one that was opened is an index. They are all open."""
    shard_of: Mapping[str, str] = field(default_factory=dict)
    """The name of the shard that contains each tensor."""
    announced_nbytes: int | None = None
    """The size of all tensors by an index of shards (``total_size``)."""
    remarks: tuple[Remark, ...] = ()
    """Findings by the reader, mostly on how the files of a directory fit together."""
    lost: tuple[str, ...] = ()
    """Names of values that are in the index but cannot be read."""
    parts: Iterable[Part] = ()
    """The files inside the files of a directory, which are opened one by one."""
    absent: tuple[str, ...] = ()
    """Names that the weights should have, but that have no values in any of its files."""
    unmerged: str | None = None
    """Why state dicts that are parts of one model cannot be joined; None if there are none."""
    unmerged_remedy: str = ""
    """What to do about that, if it is not to save the whole model."""
    beside: tuple[Beside, ...] = ()
    """Other things in the same folder, if a folder was opened."""
    part_of: PartOf | None = None
    """The set of files that the opened file is a part of, by its name."""

    def _replace(self, **changes: Any) -> Self:
        """Return the record with other values of some fields, as a NamedTuple does."""
        return replace(self, **changes)

    @property
    def form(self) -> Form:
        """The kind of the file as a whole: one state dict, a whole model, or more than that."""
        contents, groups = self.contents, [group for group in self.contents.groups if group.names]
        if self.fixed_form is not None:
            return self.fixed_form
        if not contents.tensors and not contents.attributes:
            return "data"
        if not groups:
            return "tensors"
        first, roles = groups[0], {role_of(group, contents) for group in groups}
        if not first.key and first.class_name is not None:
            return "model"
        if roles.isdisjoint(("model", "ema")):
            return "tensors" if roles.isdisjoint(NO_WEIGHTS) else "training"
        is_whole = len(groups) == 1 and len(first.names) == len(contents.tensors) and first.own_keys is None
        return "state_dict" if is_whole and not first.key and roles <= {"model", "ema"} else "checkpoint"

    @property
    def walks(self) -> Sequence[tuple[str, StateDictWalk]]:
        """For each whole model: its path, and the entries and unknowns of its state_dict()."""
        return self.contents.walks

    @property
    def file_nbytes(self) -> int:
        """Size in bytes: with shards, of the index and all shards; for a folder of checkpoints, of all of these."""
        own = self.source.nbytes + sum(shard.nbytes for shard in self.shards)
        return own or sum(member.nbytes for member in self.members)

    @property
    def number(self) -> int:
        """How many tensors it has; for an archive of which no member was chosen, those of all members."""
        return len(self.contents.tensors) or sum(member.tensors for member in self.members)

    def tensor(self) -> TensorInfo | None:
        """Return the tensor if the whole content is one; None otherwise."""
        if self.rebuilder is not None:
            return self.rebuilder.tensor(self.root)
        found = list(self.contents.tensors.values())
        return found[0] if len(found) == 1 else None


def under(path: str, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return tensors by their full names below a path; one with an empty name gets the path itself."""
    return {f"{path}.{name}" if name else path: info for name, info in tensors.items()}
