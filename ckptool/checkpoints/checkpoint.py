"""``Checkpoint``: one file's tensors by name, and everything else it holds; the hub that other modules meet at."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from ckptool.archives.archive import Archive
from ckptool.checkpoints.contents import Contents
from ckptool.checkpoints.modules import StateDictWalk
from ckptool.checkpoints.roles import Role, choose_weights, role_of
from ckptool.errors import DamagedFile
from ckptool.names.missing import ByName
from ckptool.pickles.nodes import Global, Inert
from ckptool.sources.files import FileSource
from ckptool.sources.source import Source
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import identity

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it since Python 3.11


Form: TypeAlias = Literal["state_dict", "checkpoint", "model", "tensors", "data", "archive"]


class ClassSource(NamedTuple):
    """The source of a class, as legacy files carry it. Text: never compiled."""

    name: str
    path: str
    """Of the source file on the machine that saved the checkpoint."""
    text: str


class Member(NamedTuple):
    """A checkpoint inside an archive that holds several: open it as ``FILE::NAME``."""

    name: str
    format: str
    form: Form
    tensors: int
    nbytes: int
    """Size of the member, unpacked."""


class Stream(NamedTuple):
    """Pickles one behind the other: bytes ``start`` to ``end`` of ``source``, which is a record or the file."""

    record: str
    """Name of the archive member; empty for the file itself."""
    source: Source
    start: int
    end: int
    globals: tuple[Global, ...]
    """Every name that unpickling them would import, in order of first use."""


class StateDict(Mapping[str, LazyTensor]):
    """A mapping of names to tensors found inside a checkpoint. Names are relative to ``key``; order is the file's."""

    def __init__(
        self, key: str, role: Role, tensors: dict[str, LazyTensor], class_name: str | None, node: Inert = None
    ) -> None:
        self.key = key
        """Full dotted path where it stands; empty for the root."""
        self.role: Role = role
        self.class_name = class_name
        """The model's class, where the file holds the whole model."""
        self.node = node
        """The mapping or model in the pickled tree; None where the format has no tree."""
        self._tensors = ByName(tensors)

    @property
    def numel(self) -> int:
        """Elements of all its tensors; tied ones count once."""
        distinct = {identity(tensor.info): tensor.info.numel for tensor in self._tensors.values()}
        return sum(distinct.values())

    def __getitem__(self, name: str) -> LazyTensor:
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def items(self) -> ItemsView[str, LazyTensor]:
        return self._tensors.items()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<StateDict {self.key!r} {self.role} of {len(self)} tensors>"

    def _repr_html_(self) -> str:
        return _html(repr(self), self._tensors)


class Checkpoint:
    """
    What is in one file, or in an index and its shards. Tensors are lazy: their bytes are read when ``LazyTensor.read``
    is called.

    Nothing changes after opening, so threads may share one. It keeps its file open until ``close()``, or until the
    end of a ``with`` block.
    """

    def __init__(
        self,
        source: Source,
        format: str,  # noqa: A002 - the project's word for it
        contents: Contents,
        *,
        form: Form | None = None,
        root: Inert = None,
        rebuilder: Rebuilder | None = None,
        metadata: Mapping[str, str] | None = None,
        class_sources: tuple[ClassSource, ...] = (),
        notes: tuple[str, ...] = (),
        damage: str | None = None,
        members: tuple[Member, ...] = (),
        streams: tuple[Stream, ...] = (),
        archives: tuple[Archive, ...] = (),
        shards: tuple[Shard, ...] = (),
        shard_of: Mapping[str, str] | None = None,
        announced_nbytes: int | None = None,
    ) -> None:
        self.path = ""
        self.member: str | None = None
        """Name of the archive member that was opened, where the file is an archive of others."""
        self.format = format
        self.source = source
        self.file_nbytes = source.nbytes + sum(shard.nbytes for shard in shards)
        """Size in bytes; with shards, of the index and all of them."""
        self.root = root
        """The whole pickled tree, inert; None where the format has none."""
        self.rebuilder = rebuilder
        """What recognises the tensors of the tree."""
        self.streams = streams
        """The pickles that were read."""
        self.archives = archives
        """The archives that it lies in, outermost first; with shards, the one that each is, in their order."""
        self.shards = shards
        """The files that hold the tensors, where the one that was opened is an index of them. They are all open."""
        self.shard_of: Mapping[str, str] = shard_of or {}
        """For each tensor, the name of the shard that it stands in."""
        self.announced_nbytes = announced_nbytes
        """What an index of shards says that all tensors have (``total_size``)."""
        self.metadata: Mapping[str, str] = metadata or {}
        """The text that the format keeps beside the tensors (safetensors' ``__metadata__``)."""
        self.class_sources = class_sources
        self.notes = notes
        """What is odd about the container though nothing in it can be misread."""
        self.damage = damage
        """What is wrong with the index itself, by its checksum: names and shapes may not be those that were saved."""
        self.members = members
        self.inside: Mapping[str, Checkpoint] = {}
        """The other checkpoints in its archive by name, as ``FILE::NAME`` opens them; all, where none was picked."""
        self.unopened: tuple[tuple[str, str], ...] = ()
        """Members of its archive that seem to be checkpoints and cannot be opened: their names, and why."""
        self.walks: tuple[tuple[str, StateDictWalk], ...] = tuple(contents.walks)
        self.unreadable: tuple[tuple[str, str], ...] = tuple(contents.unreadable)
        """Entries of a state_dict that are tensors of a kind we cannot read: their names, and their classes."""
        self.clashes: Mapping[str, str] = dict(contents.clashes)
        """Names that were given to tensors whose own name another has already (``a.b#2``), and that own name."""
        self.bound_method = contents.bound_method
        self.tensors: dict[str, LazyTensor] = ByName(
            {name: LazyTensor(name, info) for name, info in contents.tensors.items()}
        )
        """Every tensor by full dotted name, in file order; one that is tied stands under each of its names."""
        self.attributes = {name: LazyTensor(name, info) for name, info in contents.attributes.items()}
        """Tensors inside whole models that a state_dict() would not give: plain attributes, non-persistent buffers."""
        self.extras: tuple[tuple[str, Inert], ...] = tuple(contents.extras)
        """What is not a tensor: the largest subtrees without one, by path."""
        self.state_dicts = tuple(
            StateDict(
                group.key,
                role_of(group, contents),
                {name[len(group.key) + 1 if group.key else 0 :]: self.tensors[name] for name in group.names},
                group.class_name,
                group.node,
            )
            for group in contents.groups
            if group.names
        )
        self.form: Form = form or _form(contents, self.state_dicts)

    @property
    def globals(self) -> tuple[Global, ...]:
        """Every name that unpickling would have imported, in order of first use. None was."""
        found: dict[tuple[str, str], Global] = {}
        for stream in self.streams:
            for one in stream.globals:
                found.setdefault((one.module, one.name), one)
        return tuple(found.values())

    @cached_property
    def weights(self) -> StateDict | None:
        """The state dict that is the model's weights, or None if none is, or several could be."""
        found = self.state_dicts
        chosen = choose_weights([(one.key, one.role) for one in found], lambda index: found[index].numel)
        return None if chosen is None else self.state_dicts[chosen]

    def add_attributes(self, prefix: str, contents: Contents) -> None:
        """Add tensors that no state_dict() holds. For readers of formats, while they read."""
        for name, info in (contents.tensors | contents.attributes).items():
            full = f"{prefix}.{name}" if name else prefix
            self.attributes[full] = LazyTensor(full, info)

    def check_unchanged(self) -> None:
        """Raise SourceChanged if the file, or a shard of it, was written to since it was opened."""
        if isinstance(self.source, FileSource):
            self.source.check_unchanged()

    def check_index(self) -> None:
        """Raise DamagedFile if the index is not the one that was written, by its own checksum."""
        if self.damage:
            raise DamagedFile(self.damage, hint="Download the file again.")

    def release_tree(self) -> None:
        """Let go of the pickled tree, which nobody needs who only wants tensors. For long-lived checkpoints."""
        self.root = self.rebuilder = None
        self.extras = ()
        self.walks = ()
        self.inside = {}
        for state_dict in self.state_dicts:
            state_dict.node = None

    def close(self) -> None:
        """Close the file. Tensors that were not read yet cannot be read any more."""
        self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path!r} {self.format} {self.form} of {len(self.tensors)} tensors>"

    def _repr_html_(self) -> str:
        return _html(repr(self), self.tensors)


def _html(caption: str, tensors: Mapping[str, LazyTensor]) -> str:
    """Return a table of tensors for a notebook."""
    from ckptool.tables import html_table

    rows = ((name, str(list(one.shape)), one.dtype, one.device) for name, one in tensors.items())
    return html_table(caption, ("name", "shape", "dtype", "device"), rows, len(tensors))


def _form(contents: Contents, state_dicts: tuple[StateDict, ...]) -> Form:
    if not contents.tensors and not contents.attributes:
        return "data"
    if not state_dicts:
        return "tensors" if all(name.startswith("_") for name, _ in contents.extras) else "checkpoint"
    first = state_dicts[0]
    if first.key:
        return "checkpoint"
    if first.class_name is not None:
        return "model"
    if first.role == "optimizer" or len(state_dicts) > 1:
        return "checkpoint"
    return "state_dict" if first.role == "model" and len(first) == len(contents.tensors) else "checkpoint"


class Shard(NamedTuple):
    """One of the files that an index names, with some of the tensors."""

    name: str
    """As the index has it: a path from the index's folder."""
    tensors: int
    nbytes: int
    """Size of the file."""
    source: Source
