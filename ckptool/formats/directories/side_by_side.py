"""
Several files as one checkpoint: put under one tree, or each under its own name.

The tree is like that of a pickle, so that state dicts, optimizers and names are found in it as in any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

from ckptool.checkpoints.parsed import Parsed, Remark, Traits
from ckptool.checkpoints.roles import collect_weights
from ckptool.errors import AmbiguousFile, CkptoolError, Failure, MalformedFile, within
from ckptool.formats import torch_legacy
from ckptool.formats.probe import Probe
from ckptool.formats.sharded import with_files
from ckptool.limits import Limits
from ckptool.messages import counted, quoted, some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Dict, Inert, PersistentId
from ckptool.sources.folder import FolderSource
from ckptool.tensors.pieces import Box, check_tiling
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import TensorInfo, TypedStorage

Path: TypeAlias = tuple[str | int, ...]


class TreeBuilder:
    """Makes the leaves of a tree; ``rebuilder`` recognises the tensors among them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        # By the id of their persistent id, of leaves from other trees: the leaf, so that no other gets its id, and what
        # recognises it. The rebuilder does not refer to the builder, so both are freed at once.
        self._others: dict[int, tuple[Inert, Rebuilder]] = {}
        resolve = partial(_resolve, self._others)
        self.rebuilder = Rebuilder(resolve, partial(torch_legacy.nested_storage, limits=limits))

    def tensor(self, info: TensorInfo) -> Inert:
        """Return the leaf that is a tensor. One leaf under two names is one tensor under two names."""
        return PersistentId(info)

    def transplant(self, node: Inert, rebuilder: Rebuilder | None) -> Inert:
        """Return a part of another tree as a part of this one; ``rebuilder`` recognises its tensors."""
        if rebuilder is None:  # there are none in it
            return node
        todo = [node]
        seen: set[int] = set()
        while todo:
            one = todo.pop()
            if id(one) in seen or not nodes.is_container(one):
                continue
            seen.add(id(one))
            if isinstance(one, PersistentId):
                self._others[id(one.pid)] = one, rebuilder
            todo.extend(nodes.held(one))
        return node


def _resolve(others: Mapping[int, tuple[Inert, Rebuilder]], pid: Inert) -> TypedStorage | TensorInfo | None:
    """Return what a persistent id of a tree refers to."""
    if type(pid) is TensorInfo:
        return pid
    _, rebuilder = others.get(id(pid), (None, None))
    return None if rebuilder is None else rebuilder.resolve(pid)


def nested(leaves: Iterable[tuple[Path, Inert]]) -> Dict:
    """
    Return nested dicts with the leaves at their paths; a dict whose keys are 0, 1, 2… becomes a list.

    A path that is both a leaf and the beginning of others keeps the leaf, under an empty name among them.

    Raises:
        AmbiguousFile: Two leaves have one path.
    """
    root: dict[str | int, Inert] = {}
    branches: list[tuple[dict[str | int, Inert], str | int]] = []
    for path, leaf in leaves:
        inside = root
        for key in path[:-1]:
            below = inside.get(key)
            if not isinstance(below, dict):  # no leaf is one
                below = inside[key] = {} if below is None else {"": below}
                branches.append((inside, key))
            inside = below
        own, last = inside.get(path[-1]), path[-1]
        if isinstance(own, dict):
            inside, last = own, ""
        if last in inside:
            raise AmbiguousFile(f"two values have the path {quoted('.'.join(map(str, path)))}", kind="ambiguous-name")
        inside[last] = leaf
    for inside, key in reversed(branches):  # inner branches come later; a path may be of any length
        below = inside[key]
        is_list = all(type(one) is int for one in below) and sorted(below) == list(range(len(below)))
        inside[key] = [below[index] for index in range(len(below))] if is_list else Dict(list(below.items()))
    return Dict(list(root.items()))


ANOTHER_SAVE: Final = "Its files are of different saves: get the folder again, from one."


def opened(folder: FolderSource, probe: Probe, name: str) -> Parsed:
    """Read a file of the folder; errors have its name."""
    source = folder.open(name)
    with within(repr(name)):
        return probe.read_inner(source)


class FolderTree(TreeBuilder):
    """A tree of the contents of several files of a folder. It keeps what it has read of each, and remarks on them."""

    def __init__(self, folder: FolderSource, probe: Probe, layout: str, traits: Traits) -> None:
        super().__init__(probe.limits)
        self.folder = folder
        self.files: dict[str, Parsed] = {}
        self.remarks: list[Remark] = []
        self._probe = probe
        self._layout = layout
        self._traits = traits

    def open(self, name: str) -> Parsed:
        """Return what a file holds; errors have its name."""
        known = self.files.get(name)
        if known is None:
            known = self.files[name] = opened(self.folder, self._probe, name)
        return known

    def root_of(self, file: str) -> Inert:
        """Return the tree of a file as a part of this one; for a file without a tree, a dict of its tensors."""
        parsed = self.open(file)
        if parsed.root is None:
            return Dict([(name, self.tensor(info)) for name, info in parsed.contents.tensors.items()])
        return self.transplant(parsed.root, parsed.rebuilder)

    def side_by_side(self, files: Mapping[str, str], why: str | None) -> Parsed:
        """Return the checkpoint with the tree of each file under its key; ``why`` says why they are not one model."""
        root = Dict([(key, self.root_of(file)) for key, file in files.items()])
        return self.parsed(root, files.values())._replace(unmerged=why)

    def parsed(self, root: Inert, files: Iterable[str] | None = None) -> Parsed:
        """Return the checkpoint with this tree, of these ``files``, or of all that were read."""
        contents = collect_weights(root, self.rebuilder, self.limits)
        whole = Parsed(
            self.folder,
            self._layout,
            self._traits,
            contents,
            root=root,
            rebuilder=self.rebuilder,
            remarks=tuple(self.remarks),
        )
        return with_files(whole, [(name, self.files[name]) for name in (self.files if files is None else files)])


def agree(what: str, said: Iterable[tuple[str, object]]) -> None:
    """Raise MalformedFile unless all values but None are equal; each comes with the file that it is from."""
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


def of_larger_run(files: Sequence[str], world: int) -> Remark:
    """Return the remark on files of more ranks than those that saved what is read."""
    what = f"{counted(len(files), 'file')} of ranks that this run has not, {world:,} are its: {some(files)}"
    return Remark("CK150", what, "They are of a run with more ranks that was saved here before.")


def tiling_fault(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> CkptoolError | None:
    """Return the error if boxes do not fill a tensor, each element once; None if they do."""
    try:
        check_tiling(name, shape, boxes)
    except Failure as error:
        return error
    return None


def given(info: TensorInfo) -> TensorInfo:
    """Return the tensor itself: it reads a piece that is known already."""
    return info
