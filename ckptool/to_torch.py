"""
A checkpoint → a zip as ``torch.save`` writes it: the weights alone, or everything that the source holds.

The pickled tree is written again with its storages numbered anew; the storages are copied byte for byte. No class is
needed, and nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

from ckptool import files, inert, transforms
from ckptool.checkpoint import Checkpoint, StateDict
from ckptool.collector import collector_paused
from ckptool.contents import collect
from ckptool.errors import MigrationRefused, OutputFailed
from ckptool.files import SliceSource
from ckptool.inert import Call, Dict, Global, Inert
from ckptool.limits import DEFAULT_LIMITS
from ckptool.modules import unwrapped
from ckptool.outputs import Output
from ckptool.payloads import StoragePayload
from ckptool.pickle_writer import write_pickle
from ckptool.pickles import read_pickle
from ckptool.rebuild import Rebuilder
from ckptool.rewrite import TreeRewriter
from ckptool.storage_ids import TypedStorage, storage_id
from ckptool.tensors import TensorInfo
from ckptool.transfer import checksums_of_file
from ckptool.weights import ModuleFacts, NameChanges, Weights, prepare
from ckptool.zip_writer import WrittenZip, write_torch_zip
from ckptool.zips import find_directory

_ORDERED_DICT = Global("collections", "OrderedDict")

_REWRITABLE = ("torch_zip", "torch_legacy", "torch_tar", "pickle")
"""Formats that are a pickled tree and nothing else: TorchScript has code beside it, an exported program a graph."""


class TorchPlan(NamedTuple):
    """A file that is ready to be written: its pickle, and the storages that the pickle refers to."""

    root: str
    pickled: bytes
    storages: tuple[StoragePayload, ...]
    expected: tuple[tuple[str | None, TensorInfo], ...]
    """The tensors that must be found in the file, in order; None where a wrapper's going changes the name."""
    retagged: dict[str, int]
    renamed: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...]

    @property
    def tensor_count(self) -> int:
        """Tensors in the file; tied ones count under each name."""
        return len(self.expected)

    @property
    def tied(self) -> dict[str, str]:
        """Nothing: tied names keep their ties."""
        return {}

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes, less headers of a few hundred bytes a storage."""
        return len(self.pickled) + sum(payload.nbytes for payload in self.storages)

    def write(self, output: Output, *, checksums: bool = True) -> WrittenZip:
        """Write the file, and return its members with the CRC-32 of what was read for each."""
        written = write_torch_zip(output, self.root, self.pickled, self.storages, checksums=checksums)
        output.flush()
        return written

    def verify(self, path: str, written: WrittenZip) -> None:
        """
        Read the file back: every byte, and of every tensor its name, type, shape and place in its storage.

        The bytes are compared, by checksums, with those that were meant: payloads one by one, everything between them
        together. That what was meant is a zip that says what was planned is seen by readers that know nothing of the
        writers: they find the directory, and interpret the pickle. Headers and the entries of the directory are not
        interpreted again: they are the same few fields for every member, whatever the checkpoint.

        Raises:
            OutputFailed: What stands in the file is not what was to be written.
        """
        source, _ = files.open_source(path)
        with closing(source), collector_paused():
            members = written.members
            ranges = [(member.offset, member.offset + member.nbytes) for member in members]
            checksums, frame = checksums_of_file(source, ranges)
            for member, checksum in zip(members, checksums, strict=True):
                if checksum != member.crc32:
                    raise _failed(f"{member.name!r} was not written as it was read")
            directory, _ = find_directory(source)
            if frame != written.frame_crc32 or directory[::2] != (written.directory, len(members)):
                raise _failed("its headers are not those that were written")
            tree = read_pickle(SliceSource(source, members[0].offset, members[0].nbytes)).root
            found = collect(tree, Rebuilder(_WrittenStorages(self.storages)), DEFAULT_LIMITS).tensors
            if len(found) != len(self.expected) or any(map(_differ, found.items(), self.expected)):
                raise _failed("the tensors in it are not those that were to be written")


def plan_weights(checkpoint: Checkpoint, weights: Weights, location: str | None, root: str) -> TorchPlan:
    """
    Return how weights become a plain state_dict: an OrderedDict with the modules' facts as its metadata.

    Raises:
        MigrationRefused: A tensor is one that only its own class can write.
    """
    rewriter = TreeRewriter(checkpoint.rebuilder or Rebuilder(_NoStorages()), location)
    detached = weights.state_dict.class_name is not None
    made: dict[int, Inert] = {}
    for tensor in weights.tensors.values():
        if id(tensor.info) not in made:
            made[id(tensor.info)] = rewriter.tensor(tensor.info, detached=detached)
    tree = Call(_ORDERED_DICT, ())
    tree.pairs = [
        (name, made[id(weights.tensors[name].info)] if name in weights.tensors else weights.others[name])
        for name in weights.names
    ]
    if weights.modules:
        tree.state = Dict([("_metadata", _metadata_node(weights.modules))])
    pickled = write_pickle(tree, rewriter)
    return TorchPlan(
        root,
        pickled,
        tuple(rewriter.storages),
        tuple(_expected(checkpoint, weights)),
        rewriter.retagged,
        weights.renamed,
        weights.dropped,
    )


def verify_model(path: str, weights: Weights) -> None:
    """
    Read back a whole model that torch saved, and compare every tensor's bytes with the weights.

    Raises:
        OutputFailed: They differ.
    """
    from ckptool.formats import open_checkpoint

    with open_checkpoint(path) as found:
        for name, tensor in weights.tensors.items():
            if name not in found.tensors or found.tensors[name].read() != tensor.read():
                raise OutputFailed(f"tensor {name!r} was not written as it was read", kind="verification-failed")


def plan_same(
    checkpoint: Checkpoint,
    changes: NameChanges,
    location: str | None,
    root: str,
    *,
    peel: frozenset[str] = frozenset(),
    drop: tuple[str, ...] = (),
    model: StateDict | None = None,
) -> TorchPlan:
    """
    Return how a checkpoint becomes itself: everything it holds, with device tags set and names changed.

    ``peel`` names the classes of training wrappers that give way to the model inside them, ``drop`` the paths and
    roles of what is left out; with ``model``, that whole model is all that is written.

    Raises:
        MigrationRefused: The format has no pickled tree, or two names would become one.
    """
    if checkpoint.format not in _REWRITABLE:
        raise MigrationRefused(
            f"a {checkpoint.format} file cannot be written as it is",
            kind="no-tree",
            hint="Take its weights: --form state_dict or --form safetensors.",
        )
    rewriter = TreeRewriter(checkpoint.rebuilder or Rebuilder(_NoStorages()), location)
    tree = checkpoint.root if model is None else model.node
    tensors = checkpoint.tensors if model is None else dict(model)
    wrapped = any(cls in peel for _, walk in checkpoint.walks for _, cls in walk.modules)
    peeled = _peel(tree, rewriter, peel) if wrapped else False
    edits = _Edits()
    new_names, left_out = _rename_state_dicts(checkpoint, changes, edits)
    dropped = _drop(checkpoint, drop, edits)
    for node, other in edits.mappings():
        rewriter.replace(node, other)
    pickled = write_pickle(tree, rewriter)
    gone = tuple(f"{path}." for path in dropped)
    expected = tuple(
        (None if peeled else new_names.get(name, name), tensor.info)
        for name, tensor in tensors.items()
        if name not in left_out and not (gone and f"{name}.".startswith(gone))
    )
    renamed = tuple((old, new) for old, new in new_names.items() if new != old)
    return TorchPlan(
        root, pickled, tuple(rewriter.storages), expected, rewriter.retagged, renamed, (*dropped, *left_out)
    )


class _Edits:
    """What is to change in mappings of the tree: keys that go, keys that get another name."""

    def __init__(self) -> None:
        self._nodes: dict[int, Inert] = {}
        self._keys: dict[int, dict[str, str | None]] = {}
        self._modules: dict[int, dict[str, ModuleFacts]] = {}

    def rename(self, node: Inert, names: dict[str, str | None], modules: dict[str, ModuleFacts]) -> None:
        self._nodes[id(node)] = node
        self._keys.setdefault(id(node), {}).update(names)
        self._modules[id(node)] = modules

    def drop(self, node: Inert, key: str) -> None:
        self._nodes[id(node)] = node
        self._keys.setdefault(id(node), {})[key] = None

    def mappings(self) -> list[tuple[Inert, Inert]]:
        """Return each mapping, and the mapping that takes its place."""
        found = []
        for own, node in self._nodes.items():
            keys = self._keys[own]
            pairs = [
                (keys.get(key, key) if isinstance(key, str) else key, value)
                for key, value in inert.mapping_pairs(node) or []
                if not (isinstance(key, str) and keys.get(key, key) is None)
            ]
            found.append((node, _mapping_like(node, pairs, self._modules.get(own))))
        return found


def _mapping_like(node: Inert, pairs: inert.Pairs, modules: dict[str, ModuleFacts] | None) -> Inert:
    if isinstance(node, Dict):
        return Dict(pairs)
    made = Call(node.func, () if node.pairs is None else node.args, node.how, node.kwargs)
    made.items, made.pairs, made.state = node.items, pairs, node.state
    if modules and isinstance(node.state, Dict):
        metadata = _metadata_node(modules)
        made.state = Dict([(k, metadata if k == "_metadata" else v) for k, v in node.state.pairs])
    return made


def _metadata_node(modules: dict[str, ModuleFacts]) -> Inert:
    metadata = Call(_ORDERED_DICT, ())
    metadata.pairs = [(path, _dict_node(facts)) for path, facts in modules.items()]
    return metadata


def _dict_node(facts: ModuleFacts) -> Dict:
    return Dict([(key, _dict_node(fact) if isinstance(fact, dict) else fact) for key, fact in facts.items()])


def _rename_state_dicts(
    checkpoint: Checkpoint, changes: NameChanges, edits: _Edits
) -> tuple[dict[str, str], dict[str, None]]:
    """Note the new keys of every mapping of weights; return the new full names, and the names that go."""
    new_names: dict[str, str] = {}
    left_out: dict[str, None] = {}
    for state_dict in checkpoint.state_dicts:
        if state_dict.role not in ("model", "ema") or state_dict.class_name is not None:
            continue
        own = changes
        if "n_averaged" in state_dict:  # an AveragedModel's, whose names begin with "module." by right
            own = changes._replace(rules=tuple(rule for rule in changes.rules if rule not in transforms.WRAPPER_RULES))
        weights = prepare(checkpoint, state_dict, own)
        renamed = dict(weights.renamed)
        gone = set(weights.dropped)
        if not renamed and not gone:
            continue
        edits.rename(state_dict.node, {**renamed, **dict.fromkeys(gone)}, weights.modules)
        head = f"{state_dict.key}." if state_dict.key else ""
        new_names |= {head + name: head + renamed.get(name, name) for name in state_dict if name not in gone}
        left_out |= dict.fromkeys(head + name for name in state_dict if name in gone)
    return new_names, left_out


def _drop(checkpoint: Checkpoint, asked: tuple[str, ...], edits: _Edits) -> tuple[str, ...]:
    """Note what is to be left out, and return the paths that go: of a role, every state dict that has it."""
    paths = []
    for what in asked:
        found = [one.key for one in checkpoint.state_dicts if one.role == what and one.key] or [what]
        for path in found:
            place = _entry_of(checkpoint.root, path)
            if place is None:
                raise MigrationRefused(f"there is nothing called {what!r} to drop", kind="nothing-to-drop")
            mapping, key, full = place
            edits.drop(mapping, key)
            paths.append(full)
    return tuple(dict.fromkeys(paths))


def _entry_of(root: Inert, path: str) -> tuple[Inert, str, str] | None:
    """Return the innermost mapping on the way to a path, its key there, and the path of that entry."""
    node, walked, rest = root, "", path
    found = None
    while rest:
        pairs = inert.mapping_pairs(node)
        keys = [key for key, _ in pairs or [] if isinstance(key, str) and (rest == key or rest.startswith(f"{key}."))]
        if not keys:
            break
        key = max(keys, key=len)
        walked = f"{walked}.{key}" if walked else key
        found = (node, key, walked)
        node, rest = inert.lookup(pairs or [], key), rest[len(key) + 1 :]
    return found


def _peel(root: Inert, rewriter: TreeRewriter, classes: frozenset[str]) -> bool:
    """Put the model in the place of each wrapper of these classes, wherever in the tree."""
    peeled = False
    seen: set[int] = set()
    todo = [root]
    while todo:
        node = todo.pop()
        if not inert.is_container(node) or id(node) in seen:
            continue
        seen.add(id(node))
        inside = unwrapped(node, classes)
        if inside is not None:
            rewriter.replace(node, inside)
            peeled = True
        todo.extend(child for _, child in inert.children(node))
    return peeled


def _expected(checkpoint: Checkpoint, weights: Weights) -> Iterator[tuple[str | None, TensorInfo]]:
    """Yield the tensors in order, those that lie deeper in an entry where the entry stands."""
    key = weights.state_dict.key
    for name, old in weights.old_names.items():
        if name in weights.tensors:
            yield name, weights.tensors[name].info
        else:
            head = f"{key}.{old}." if key else f"{old}."
            yield from ((None, tensor.info) for one, tensor in checkpoint.tensors.items() if one.startswith(head))


class _NoStorages:
    """What a format without a pickled tree refers to: nothing."""

    def resolve(self, pid: Inert) -> TypedStorage | None:  # noqa: ARG002
        return None

    def nested(self, stream: bytes) -> None:  # noqa: ARG002
        return


class _WrittenStorages(_NoStorages):
    """What the pickle of a file that was just written refers to: the storages of the source that stand in it."""

    def __init__(self, payloads: Sequence[StoragePayload]) -> None:
        self._payloads = {str(number): payload for number, payload in enumerate(payloads)}

    def resolve(self, pid: Inert) -> TypedStorage | None:
        named = storage_id(pid)
        if named is None:
            return None
        payload = self._payloads.get(named.key)
        if payload is None or payload.nbytes != named.nbytes:
            raise _failed(f"its storage {named.key!r} is not the one that was to be written")
        return TypedStorage(payload.storage, named.dtype)


def _failed(what: str) -> OutputFailed:
    return OutputFailed(what, kind="verification-failed")


def _differ(found: tuple[str, TensorInfo], expected: tuple[str | None, TensorInfo]) -> bool:
    return (expected[0] is not None and found[0] != expected[0]) or _are_unlike(found[1], expected[1])


def _are_unlike(one: TensorInfo, other: TensorInfo) -> bool:
    if (one.dtype, one.shape, one.stride) != (other.dtype, other.shape, other.stride):
        return True
    if (one.layout, one.conj, one.neg) != (other.layout, other.conj, other.neg) or _begin(one) != _begin(other):
        return True
    if one.layout == "strided":
        return False  # what hangs on a plain tensor (a gradient, attributes) is not the tensor's value
    parts, others = ([part for _, part in info.parts] for info in (one, other))
    return len(parts) != len(others) or any(map(_are_unlike, parts, others))


def _begin(info: TensorInfo) -> tuple[int, int] | None:
    """Return where in the source the first element stands; a view of a storage and of its whole give the same."""
    storage = info.storage
    if storage is None:
        return None
    return id(storage.source), storage.offset + info.storage_offset * info.dtype.itemsize // info.dtype.packed
