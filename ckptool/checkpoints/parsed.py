"""``Parsed``: what the reader of a format found in a file. A ``Checkpoint`` is made of it."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from ckptool.archives.archive import Archive
from ckptool.checkpoints.contents import Contents, Form
from ckptool.checkpoints.roles import NO_WEIGHTS, role_of
from ckptool.pickles.nodes import Global, Inert
from ckptool.pickles.reader import Pickle
from ckptool.sources.source import Source
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import TensorInfo

if TYPE_CHECKING:  # most checkpoints are alone, and each of these classes takes a while to make
    from ckptool.checkpoints.companions import Beside, ClassSource, Member, PartOf, Remark, Shard
    from ckptool.checkpoints.modules import ModuleFacts

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
    """Where bytes of the source begin that stand behind what is loaded with it; None if none do."""
    opcodes: Mapping[int, int] = {}
    """Opcodes in them, but for the frequent ones of protocol 2, and the offset of the first of each."""

    def inside(self, file: str) -> "Stream":
        """Return it as one of a file that is one of several, or a member: ``FILE::RECORD``."""
        return self._replace(record=f"{file}::{self.record}" if self.record else file)


class Part:
    """A file inside a file of a directory: a piece of a tensor, or a value, with checksums of its own."""

    __slots__ = ("contradiction", "file", "open", "twin", "what")

    def __init__(
        self,
        what: str,
        file: str,
        open: "Callable[[], Parsed]",  # noqa: A002 - what it does
        contradiction: "Callable[[Parsed], str | None] | None" = None,
        twin: "Callable[[], Parsed] | None" = None,
    ) -> None:
        self.what = what
        self.file = file
        self.open = open
        self.contradiction = contradiction
        """Returns in what it is not what the index says."""
        self.twin = twin
        """Opens what it has to be equal to, where ranks saved copies."""


class Recorded(NamedTuple):
    """What the text of a file says about its tensors, and the text that says nothing about them."""

    ties: Mapping[str, str] = _NOTHING
    """Names that were left out of the file, and for each the name under which its tensor is stored."""
    order: tuple[str, ...] = ()
    """All names, the left-out ones too, in the order that they had; empty where it is not recorded."""
    modules: "Mapping[str, ModuleFacts]" = MappingProxyType({})
    texts: Mapping[str, str] = _NOTHING


class Parsed(NamedTuple):
    """What is in one file, or in files that belong together. ``Checkpoint`` describes the fields that it shares."""

    source: Source
    format: str
    traits: Traits
    contents: Contents
    fixed_form: Form | None = None
    """The form, where the format knows it without looking at the contents."""
    root: Inert = None
    pickles: tuple[Pickle, ...] = ()
    rebuilder: Rebuilder | None = None
    constants: Mapping[str, TensorInfo] = MappingProxyType({})
    """Tensors of a program that are no attributes of its modules."""
    metadata: Mapping[str, str] = _NOTHING
    recorded: Recorded = Recorded()
    class_sources: "tuple[ClassSource, ...]" = ()
    notes: tuple[str, ...] = ()
    damage: str | None = None
    member: str | None = None
    members: "tuple[Member, ...]" = ()
    inside: "Mapping[str, Parsed]" = MappingProxyType({})
    unopened: tuple[tuple[str, str], ...] = ()
    streams: tuple[Stream, ...] = ()
    archives: tuple[Archive, ...] = ()
    shards: "tuple[Shard, ...]" = ()
    shard_of: Mapping[str, str] = _NOTHING
    announced_nbytes: int | None = None
    remarks: "tuple[Remark, ...]" = ()
    lost: tuple[str, ...] = ()
    parts: Iterable[Part] = ()
    absent: tuple[str, ...] = ()
    unmerged: str | None = None
    beside: "tuple[Beside, ...]" = ()
    part_of: "PartOf | None" = None

    @property
    def form(self) -> Form:
        """What the file is as a whole: one state dict, a whole model, or more than that."""
        return self.fixed_form or _form(self.contents)

    @property
    def nbytes(self) -> int:
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
