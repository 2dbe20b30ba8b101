"""
Several files that are one checkpoint: read, compared, and put under one tree, or each under its own name.

The tree reads as that of a pickle does, so that state dicts, optimizers and names are found in it in the one way that
there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from ckptool.checkpoints.arrays import collect_weights
from ckptool.checkpoints.parsed import Parsed, Remark, Shard, Stream, Traits
from ckptool.errors import AmbiguousFile, CkptoolError, Failure, MalformedFile
from ckptool.formats import torch_legacy
from ckptool.formats.probe import Probe
from ckptool.limits import Limits
from ckptool.messages import quoted
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Dict, Inert, PersistentId
from ckptool.pickles.reader import Pickle
from ckptool.sources.folder import FolderSource
from ckptool.tensors.pieces import Box, Piece, PiecesSource, check_tiling, in_pieces
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import TensorInfo, TypedStorage

Path: TypeAlias = tuple[str | int, ...]


class TreeBuilder:
    """Makes the leaves of a tree, and knows afterwards what they are: ``rebuilder`` recognises its tensors."""

    def __init__(self, limits: Limits) -> None:
        self._leaves = _Leaves()
        self.rebuilder = Rebuilder(self._leaves.resolve, partial(torch_legacy.nested_storage, limits=limits))

    def tensor(self, info: TensorInfo) -> Inert:
        """Return the leaf that is a tensor. One leaf under two names is one tensor under two names."""
        return PersistentId(info)

    def graft(self, pickled: Pickle, rebuilder: Rebuilder) -> Inert:
        """Return what a pickle gave, to be a part of the tree: its tensors are those of its own rebuilder."""
        for node in pickled.persistent_ids:
            self._leaves.take(node, rebuilder)
        return pickled.root

    def transplant(self, node: Inert, rebuilder: Rebuilder) -> Inert:
        """Return a part of another tree, to be a part of this one: its tensors are those of its own rebuilder."""
        todo = [node]
        seen: set[int] = set()
        while todo:
            one = todo.pop()
            if id(one) in seen or not nodes.is_container(one):
                continue
            seen.add(id(one))
            if isinstance(one, PersistentId):
                self._leaves.take(one, rebuilder)
            todo.extend(nodes.held(one))
        return node


class _Leaves:
    """What the leaves of a tree are. It refers to no builder: with the rebuilder, which has it, it goes at once."""

    def __init__(self) -> None:
        self.others: dict[int, Rebuilder] = {}
        self.kept: list[Inert] = []
        """Ids are compared: they must not be used again."""

    def take(self, node: PersistentId, rebuilder: Rebuilder) -> None:
        """Note whose a leaf of another tree is."""
        self.kept.append(node)
        self.others[id(node.pid)] = rebuilder

    def resolve(self, pid: Inert) -> TypedStorage | TensorInfo | None:
        """Return what a persistent id of the tree refers to."""
        if type(pid) is TensorInfo:
            return pid
        other = self.others.get(id(pid))
        return None if other is None else other.resolve(pid)


def nested(leaves: Iterable[tuple[Path, Inert]]) -> Dict:
    """
    Return dicts in each other that hold leaves at their paths; where all keys of one are 0, 1, 2…, it is a list.

    A path that is both a leaf and a folder of others keeps the leaf, under an empty name among them.

    Raises:
        AmbiguousFile: Two leaves have one path.
    """
    root: dict[str | int, Inert] = {}
    branches: list[tuple[dict[str | int, Inert], str | int]] = []
    for path, leaf in leaves:
        inside = root
        for key in path[:-1]:
            below = inside.get(key)
            if not isinstance(below, _Branch):
                below = inside[key] = _Branch({} if below is None else {"": below})
                branches.append((inside, key))
            inside = below.children
        own, last = inside.get(path[-1]), path[-1]
        if isinstance(own, _Branch):
            inside, last = own.children, ""
        if last in inside:
            raise AmbiguousFile(f"two values have the path {quoted('.'.join(map(str, path)))}", kind="ambiguous-name")
        inside[last] = leaf
    for inside, key in reversed(branches):  # those within a branch are later than it; a path may be of any length
        inside[key] = _finished(inside[key].children)
    return Dict(list(root.items()))


class _Branch:
    __slots__ = ("children",)

    def __init__(self, children: dict[str | int, Inert]) -> None:
        self.children = children


def _finished(children: dict[str | int, Inert]) -> Inert:
    if all(type(key) is int for key in children) and sorted(map(int, children)) == list(range(len(children))):
        return [children[index] for index in range(len(children))]
    return Dict(list(children.items()))


ANOTHER_SAVE: Final = "Its files are of different saves: get the folder again, from one."


def opened(folder: FolderSource, probe: Probe, name: str) -> Parsed:
    """Read a file of the folder; errors have its name."""
    source = folder.open(name)
    try:
        return probe.read_inner(source)
    except CkptoolError as error:
        error.message = f"{name!r}: {error.message}"
        raise


def agree(what: str, said: Iterable[tuple[str, object]]) -> None:
    """Raise MalformedFile unless all files that say something say the same."""
    first: tuple[str, object] | None = None
    for name, value in said:
        if value is None:
            continue
        if first is None:
            first = name, value
        elif value != first[1]:
            fact = f"{what} differ: {_shown(first[1])} in {first[0]!r}, {_shown(value)} in {name!r}"
            raise MalformedFile(fact, kind="mixed-saves", hint=ANOTHER_SAVE)


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def of_files(
    folder: FolderSource,
    probe: Probe,
    name: str,
    traits: Traits,
    files: Mapping[str, tuple[str, Parsed]],
    why: str | None,
    remarks: tuple[Remark, ...] = (),
) -> Parsed:
    """Return what ``files`` hold, each a file's name and what was read of it, under their keys; ``why`` not as one."""
    builder = TreeBuilder(probe.limits)
    pairs: list[tuple[Inert, Inert]] = []
    for key, (_, parsed) in files.items():
        root = parsed.root
        pairs.append((key, root if parsed.rebuilder is None else builder.transplant(root, parsed.rebuilder)))
    return of_tree(folder, probe, name, traits, Dict(pairs), builder, list(files.values()))._replace(
        unmerged=why, remarks=remarks
    )


def of_file(folder: FolderSource, probe: Probe, name: str, traits: Traits, file: str, parsed: Parsed) -> Parsed:
    """Return the one file that a folder's checkpoint is, as what a format found there."""
    builder = TreeBuilder(probe.limits)
    root = parsed.root if parsed.rebuilder is None else builder.transplant(parsed.root, parsed.rebuilder)
    return of_tree(folder, probe, name, traits, root, builder, [(file, parsed)])


def of_tree(
    folder: FolderSource,
    probe: Probe,
    name: str,
    traits: Traits,
    root: Inert,
    builder: TreeBuilder,
    files: list[tuple[str, Parsed]],
) -> Parsed:
    """Return a tree that was made of several files as what a format found in a folder."""
    contents = collect_weights(root, builder.rebuilder, probe.limits)
    streams: list[Stream] = []
    for file, parsed in files:
        streams += [one.inside(file) for one in parsed.streams]
    return Parsed(
        folder,
        name,
        traits,
        contents,
        root=root,
        rebuilder=builder.rebuilder,
        notes=tuple(f"{file!r}: {note}" for file, parsed in files for note in parsed.notes),
        damage=next((f"{file!r}: {one.damage}" for file, one in files if one.damage), None),
        streams=tuple(streams),
        archives=tuple(archive for _, parsed in files for archive in parsed.archives),
        shards=tuple(
            Shard(file, len(parsed.contents.tensors), parsed.source.nbytes, parsed.source) for file, parsed in files
        ),
    )


AGAIN: Final = "Copy the folder again, with the files of all ranks."


class Part(NamedTuple):
    """A box of a whole tensor, and the tensor that fills it."""

    box: Box
    file: str
    info: TensorInfo


def whole(
    folder: FolderSource, name: str, shape: tuple[int, ...], parts: Sequence[Part], remarks: list[Remark]
) -> TensorInfo:
    """
    Return the tensor that parts are; if they do not fill it, ``remarks`` gets the reason, and reading it raises.

    Raises:
        MalformedFile: They are of several types.
    """
    dtype = parts[0].info.dtype
    if any(one.info.dtype != dtype for one in parts):
        raise MalformedFile(f"the pieces of {name!r} differ in type", kind="piece", hint=AGAIN)
    found: dict[Box, Part] = {}
    for part in parts:
        found.setdefault(part.box, part)
    boxes = sorted(found)
    fault: CkptoolError | None = None
    try:
        check_tiling(name, shape, boxes)
    except Failure as error:
        fault = error
        remarks.append(Remark("CK141", error.message, AGAIN))
    pieces = [Piece(*box, found[box].file, partial(given, found[box].info)) for box in boxes]
    source = PiecesSource(shape, dtype, pieces, folder.cancellation, name=name, fault=fault)
    return in_pieces(name, shape, dtype, source, "cpu")


def given(info: TensorInfo) -> TensorInfo:
    """Return the tensor itself: what reads a piece that is known."""
    return info
