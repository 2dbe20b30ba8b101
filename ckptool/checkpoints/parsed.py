"""
``Parsed``: the record of what the reader of a format found in a file; a ``Checkpoint`` is one that is open.

With what few have: shards, members, files beside them, the set that they are of, source code, remarks.
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
    """What is true of every file of a format. Other packages ask for these, never for a format by its name."""

    has_tree: bool = False
    """It is a pickled tree of objects and nothing else, so it can be written again as a whole."""
    tree_is_made: bool = False
    """No file has its tree, which was made of several: its weights are written, unless the tree is asked for."""
    is_plain: bool = False
    """It holds named tensors and text alone: no pickle, no object."""
    keeps_devices: bool = True
    keeps_ties: bool = True
    keeps_order: bool = True
    keeps_versions: bool = True
    """Whether it has a place for the versions of the modules' classes, which ``load_state_dict`` converts by."""
    is_trusted: bool = False
    """The loader unpickles whatever is in it, as ``weights_only=False`` does."""
    program: str | None = None
    """What it holds that only torch can write: the code or the graph of a model."""
    loader: str = "torch.load"
    """The function that opens such a file."""
    unpickled_by: tuple[str, ...] = ("torch.load(weights_only=False)",)
    """Other functions that open such a file, and call what is in it."""
    is_read: bool = True
    """Whether the loader reads its tensors, and does not only unpickle what is beside them."""
    refusal: str | None = None
    """Why ``torch.load(weights_only=True)`` refuses every such file."""
    edited_by: Literal["member", "pickles", "header"] | None = None
    """
    What can be edited without a tensor being moved: a pickle that is a member of a zip, pickles in front of the
    tensors, or a header of text; None where all that there is would be written again.
    """

    @property
    def call(self) -> str:
        """How the loader is called, for people to read."""
        return self.loader if "(" in self.loader else f"{self.loader}()"


class Stream(NamedTuple):
    """Consecutive pickles: bytes ``start`` to ``end`` of ``source``, which is a record or the file."""

    record: str
    """Name of the archive member; empty for the file itself."""
    source: Source
    start: int
    end: int
    globals: tuple[Global, ...]
    """Every name that unpickling them would import, in order of first use."""
    blocks: tuple[range, ...] = ()
    """Where bytes lie between the opcodes, or between the pickles, in order."""
    is_index: bool = False
    """Whether it is an index, whose own classes every one of its kind asks for."""
    has_arrays: bool = False
    """Whether joblib may load it, which reads elements of arrays between the opcodes."""
    rest: int | None = None
    """Where in the source the bytes after the loaded pickles begin; None if there are none."""
    opcodes: Mapping[int, int] = {}
    """Opcodes in them, but for the frequent ones of protocol 2, and the offset of the first of each."""

    def inside(self, file: str) -> Stream:
        """Return it as one of a file that is one of several, or a member: ``FILE::RECORD``."""
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
    """Opens the copy of another rank, which has to be equal."""
    at: tuple[int, int] = (0, 0)
    """Where it begins in the file, and how many bytes it has there."""


class Recorded(NamedTuple):
    """What the text of a file says about its tensors, and the text that says nothing about them."""

    ties: Mapping[str, str] = _NOTHING
    """Names that were left out of the file, and for each the name under which its tensor is stored."""
    order: tuple[str, ...] = ()
    """All names, the left-out ones too, in the order that they had; empty where it is not recorded."""
    modules: Mapping[str, ModuleFacts] = MappingProxyType({})
    texts: Mapping[str, str] = _NOTHING


_NOTHING_RECORDED: Final = Recorded()


class Shard(NamedTuple):
    """One of the files that an index names, with some of the tensors."""

    name: str
    """As the index has it: a path from the index's folder."""
    tensors: int
    nbytes: int
    """Size of the file."""
    source: Source
    holds: str = "tensor"
    """What is counted: tensors, or items, which may be pieces of them."""


class Member(NamedTuple):
    """A checkpoint inside an archive that holds several: open it as ``FILE::NAME``."""

    name: str
    format: str
    form: Form
    tensors: int
    nbytes: int
    """Size of the member, unpacked."""


class Beside(NamedTuple):
    """Something that lies in the same folder, and is no part of the checkpoint that was opened."""

    name: str
    role: str
    """What it is for, by its name: ``optimizer``, ``scheduler``, ``rng``, ``duplicate``…"""
    path: str
    """The path to give, to open it."""
    nbytes: int | None = None
    """None for a folder."""
    about: str | None = None
    """What it says in short, where that is known without opening a checkpoint."""


class PartOf(NamedTuple):
    """The set of files that a file is one of."""

    what: str
    """What the file is, in words."""
    path: str
    """The path to give for all of them together."""
    is_slice: bool = False
    """Whether its tensors are parts themselves, or not all that a model has: no model fits it."""
    remedy: str = ""
    """What to do, where it is not to save the model whole."""


class ClassSource(NamedTuple):
    """The source of a class, as legacy files carry it. Text: never compiled."""

    name: str
    path: str
    """Of the source file on the machine that saved the checkpoint."""
    text: str


class Remark(NamedTuple):
    """Something notable that the reader of a format saw, and that is a finding: its code says how grave it is."""

    code: str
    what: str
    hint: str | None = None


@dataclass(eq=False)
class Parsed:
    """What is in one file, or in files that belong together. It never changes: ``_replace`` gives another."""

    source: Source
    format: str
    traits: Traits
    """What is true of every file of its format."""
    contents: Contents
    fixed_form: Form | None = None
    """The form, where it is known without looking at the contents."""
    root: Inert = None
    """The whole pickled tree, inert; None where the format has none."""
    pickles: tuple[Pickle, ...] = ()
    """The pickles of the first of ``streams``, where they were kept: in one of them is the tree."""
    rebuilder: Rebuilder | None = None
    """What recognises the tensors of the tree."""
    constants: Mapping[str, TensorInfo] = field(default_factory=dict)
    """Tensors of a program that are no attributes of its modules."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The text that the format keeps beside the tensors (safetensors' ``__metadata__``)."""
    recorded: Recorded = _NOTHING_RECORDED
    """What that text says about the tensors."""
    class_sources: tuple[ClassSource, ...] = ()
    notes: tuple[str, ...] = ()
    """What is odd about the container though nothing in it can be misread."""
    damage: str | None = None
    """What is wrong with the index itself, by its checksum: names and shapes may not be those that were saved."""
    member: str | None = None
    """Name of the archive member that was opened, where the file is an archive of others."""
    members: tuple[Member, ...] = ()
    inside: Mapping[str, Parsed] = field(default_factory=dict)
    """The other checkpoints in its archive by name, as ``FILE::NAME`` opens them; all, where none was picked."""
    unopened: tuple[tuple[str, str], ...] = ()
    """Members of its archive that seem to be checkpoints and cannot be opened: their names, and why."""
    streams: tuple[Stream, ...] = ()
    """The pickles that were read."""
    archives: tuple[Archive, ...] = ()
    """The archives that it lies in, outermost first; with shards, the one that each is, in their order."""
    shards: tuple[Shard, ...] = ()
    """The files that hold the tensors, where the one that was opened is an index of them. They are all open."""
    shard_of: Mapping[str, str] = field(default_factory=dict)
    """For each tensor, the name of the shard that holds it."""
    announced_nbytes: int | None = None
    """The size of all tensors, as an index of shards has it (``total_size``)."""
    remarks: tuple[Remark, ...] = ()
    """What is notable about how the files of a directory fit together."""
    lost: tuple[str, ...] = ()
    """Names of values that the index has, and that cannot be read."""
    parts: Iterable[Part] = ()
    """The files inside the files of a directory, which are opened one by one."""
    absent: tuple[str, ...] = ()
    """Names that the weights should have, and that have no values in any of its files."""
    unmerged: str | None = None
    """Why the state dicts, which are parts of one model, cannot be put together; None where that is not so."""
    unmerged_remedy: str = ""
    """What to do about that, where it is not to save the model whole."""
    beside: tuple[Beside, ...] = ()
    """What lies in the same folder and is no part of it, where a folder was opened."""
    part_of: PartOf | None = None
    """The set of files that the one file is a part of, going by its name."""

    def _replace(self, **changes: Any) -> Self:
        """Return the record with other values of some fields, as a NamedTuple does."""
        return replace(self, **changes)

    @property
    def form(self) -> Form:
        """What the file is as a whole: one state dict, a whole model, or more than that."""
        return self.fixed_form or _form(self.contents)

    @property
    def walks(self) -> Sequence[tuple[str, StateDictWalk]]:
        """For each whole model: its path, and what could not be known about its state_dict()."""
        return self.contents.walks

    @property
    def file_nbytes(self) -> int:
        """Size in bytes; with shards, of the index and all of them; of a folder of checkpoints, of these."""
        own = self.source.nbytes + sum(shard.nbytes for shard in self.shards)
        return own or sum(member.nbytes for member in self.members)

    @property
    def number(self) -> int:
        """How many tensors it has; those of all members, if none was picked."""
        return len(self.contents.tensors) or sum(member.tensors for member in self.members)

    def tensor(self) -> TensorInfo | None:
        """Return the tensor that it is as a whole; None if it is something else, or has several."""
        if self.rebuilder is not None:
            return self.rebuilder.tensor(self.root)
        found = list(self.contents.tensors.values())
        return found[0] if len(found) == 1 else None


def _form(contents: Contents) -> Form:
    if not contents.tensors and not contents.attributes:
        return "data"
    groups = [group for group in contents.groups if group.names]
    if not groups:
        return "tensors"
    first = groups[0]
    if not first.key and first.class_name is not None:
        return "model"
    roles = {role_of(group, contents) for group in groups}
    if roles.isdisjoint(("model", "ema")):
        return "tensors" if roles.isdisjoint(NO_WEIGHTS) else "training"
    is_whole = len(groups) == 1 and len(first.names) == len(contents.tensors) and first.own_keys is None
    return "state_dict" if is_whole and not first.key and roles <= {"model", "ema"} else "checkpoint"


def under(path: str, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return tensors by their full names below a path; one without a name has the path itself."""
    return {f"{path}.{name}" if name else path: info for name, info in tensors.items()}
