"""
``save``: tensors in memory to a file, as ``migrate`` writes one.

There is no separate writer: the tensors are put into a ``Checkpoint``, a new one or the original with its tensors
replaced, and that is migrated. The original's file is only read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from ckptool.arguments import Unpack, checked
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.contents import Contents, Group, GroupKind, collect
from ckptool.checkpoints.modules import facts_by_module
from ckptool.checkpoints.parsed import Parsed, Traits
from ckptool.checkpoints.quantized import keep
from ckptool.checkpoints.roles import collect_weights
from ckptool.checkpoints.weights import NameChanges, choose, prepare
from ckptool.errors import MigrationRefused, about
from ckptool.formats import open_checkpoint
from ckptool.formats.directories.side_by_side import TreeBuilder
from ckptool.formats.json_beside import quantization_among
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.messages import counted, some
from ckptool.migration.changes import ChangeOptions, Changes, changes_of
from ckptool.migration.make_plan import form_of
from ckptool.migration.migrate import WriteOptions, migrate_by
from ckptool.migration.report import MigrationReport
from ckptool.migration.torch_plan import metadata_node
from ckptool.names import renaming
from ckptool.pickles.nodes import Call, Dict, Global, Inert, held, is_container, mapping_like, mapping_pairs
from ckptool.pickles.values import plain_value
from ckptool.sources.source import BytesSource, Progress
from ckptool.tensors.payloads import have_same_bytes
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, identity
from ckptool.torch_ops.caller_tensors import CallerTensors

Missing: TypeAlias = Literal["refuse", "keep", "drop"]

_NAME: Final = "state_dict"
"""The path to show for a state that is from no file."""
_PLAIN: Final = (type(None), bool, int, float, str, bytes)
_STRIPPING: Final = ((), (renaming.strip_wrappers,), (renaming.strip_module,))
"""The rules by which ``load`` may have changed names."""


@checked(options=Changes._fields)
def save(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    like: str | os.PathLike[str] | None = None,
    *,
    missing: Missing = "refuse",
    allow_new: bool = False,
    force: bool = False,
    verify: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
    read_back: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
    **options: Unpack[ChangeOptions],
) -> MigrationReport:
    """
    Write a state dict, by the rules and with the guarantees of ``migrate``.

    ``state`` has a ``torch.Tensor``, an array of numpy or a ``LazyTensor`` under each name. The suffix of ``path``
    decides between safetensors and a zip as ``torch.save`` writes it, ``max_shard_size`` makes it a folder of shards;
    all options of ``migrate`` that are about what is written do the same here. Without ``like``, that is all there is
    in the file: the names in their order, tensors that share a storage, plain values such as extra state, and the
    ``_metadata`` of a state dict.

    ``like`` is the path of the checkpoint that the state was loaded from. Everything else of it goes along: the
    optimizer, other entries, the text of safetensors, the order of names, device tags. Names may be those of the file,
    or as ``load`` gives them without what wrappers put before them: they are written as the file has them. What is
    equal to the original, bit for bit, stays as it is there; shape and type may have changed. Tied tensors stay tied if
    they are still equal, and a note in the report says which are not. Entries that are not tensors stay if ``state``
    lacks them.

    A tensor of the original that ``state`` lacks is refused, or stays with ``missing="keep"``, or goes with
    ``"drop"``. A name that the original lacks is refused, unless ``allow_new``.

    Raises:
        MigrationRefused: The names are not those of the original, or something would be lost or confused.
        UnsupportedFeature: A tensor is of a class, layout or type that cannot be written.
        WeightsNotFound: It is not clear which weights of ``like`` they replace: ``key`` or ``weights`` says it.
        OutputExists: ``path`` exists, and ``force`` was not given.
        OutputFailed: It could not be written, or is not what was to be written.
        CkptoolError: ``like`` cannot be read, or is damaged.
        TypeError: A value is neither a tensor nor plain.
        ValueError: An option has a value that it does not take.
    """
    asked = changes_of(None, options)
    if like is None and (asked.key is not None or asked.weights != "auto"):
        raise ValueError("key and weights say which weights of like are meant, and there is no like")
    if like is None and (missing != "refuse" or allow_new):
        raise ValueError("missing and allow_new are about names of like, and there is no like")
    if not state and not asked.allow_empty:
        hint = "If this is meant, say so with `allow_empty=True`."
        raise MigrationRefused("the state has no names", kind="no-tensor-left", hint=hint)
    how = WriteOptions(force, verify, dry_run, False, progress, read_back, limits)
    target, notes, gone, given = os.fspath(path), dict[str, None](), tuple[str, ...](), CallerTensors()
    with _alone(state, given, limits) if like is None else open_checkpoint(os.fspath(like), limits=limits) as made:
        if like is not None:
            with about(made.path):
                replacing = _Replacing(made, state, given, asked, target, missing, allow_new, limits)
                replacing.compare()
                made, notes, gone = replacing.edited(), replacing.notes, tuple(replacing.gone)
            asked = asked._replace(key=None, weights="auto")
        report = migrate_by(None, os.fspath(like or _NAME), target, asked, how, opened=made)
    if given.with_attributes:
        notes[f"attributes of {some(list(map(repr, given.with_attributes)))} are not written"] = None
    return report._replace(dropped=(*gone, *report.dropped), notes=(*report.notes, *notes))


def _alone(state: Mapping[str, Any], given: CallerTensors, limits: Limits) -> Checkpoint:
    """Return a checkpoint in memory that has only this state dict."""
    builder = TreeBuilder(limits)
    root = Call(Global("collections", "OrderedDict"), ())
    root.pairs = [
        (str.__str__(name), _node(name, value, given, builder, is_inside=name.endswith("_extra_state")))
        for name, value in state.items()  # a name may be of a class of its own, as numpy's
    ]
    metadata = getattr(state, "_metadata", None)
    modules = facts_by_module(list(metadata.items())) if isinstance(metadata, Mapping) else {}
    if modules:
        root.state = Dict([("_metadata", metadata_node(modules))])
    contents = collect(root, builder.rebuilder, limits)
    source = BytesSource(b"", limits.cancellation)
    parsed = Parsed(source, "memory", Traits(has_tree=True), contents, root=root, rebuilder=builder.rebuilder)
    made = Checkpoint(_NAME, source, parsed)
    for one in made.state_dicts:
        if not one.key:
            _choose(made, one)
    return made


def _choose(checkpoint: Checkpoint, state_dict: StateDict) -> None:
    """Make a state dict the weights of a checkpoint without judging names and sizes: the caller knows."""
    state_dict.role = "model" if state_dict.role not in ("model", "ema") else state_dict.role
    checkpoint.__dict__["weights"] = state_dict  # where the property keeps what it has found


def _node(name: str, value: object, given: CallerTensors, builder: TreeBuilder, *, is_inside: bool = False) -> Inert:
    """Return the node of a value in a pickled tree; a numpy array is a tensor, and refused inside a value."""
    info = given.info(name, value) if not is_inside or type(value).__module__ != "numpy" else None
    if info is not None:
        if info.storage is None and not info.parts:  # on the meta device
            raise _without_values(name)
        return builder.tensor(info)
    if type(value) in _PLAIN:
        return value
    inside = partial(_node, name, given=given, builder=builder, is_inside=True)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(inside, value))
    if is_inside and isinstance(value, dict) and all(type(key) in _PLAIN for key in value):
        return Dict([(key, inside(one)) for key, one in value.items()])
    takes = "torch.Tensor | numpy.ndarray | LazyTensor, or plain values inside what is not a tensor"
    hint = ": give the state dict of the model, and the checkpoint that it is from as like" if not is_inside else ""
    raise TypeError(f"state[{name!r}] takes {takes}, not {type(value).__name__}{hint}")


def _without_values(name: str) -> MigrationRefused:
    return MigrationRefused(f"tensor {name!r} is on the meta device, and has no values", kind="no-values")


class _Replacing:
    """A given state dict, and the one in a file that it replaces."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        state: Mapping[str, Any],
        given: CallerTensors,
        changes: Changes,
        target: str,
        missing: Missing,
        allow_new: bool,
        limits: Limits,
    ) -> None:
        checkpoint.check_index()
        chosen = choose(checkpoint, changes.key, changes.weights)
        if chosen.parts:
            hint = f"Say which one with `key=`: {some([repr(one.key) for one in chosen.parts])}"
            fact = f"{changes.key!r} joins {counted(len(chosen.parts), 'state dict')}, and one is replaced at a time"
            raise MigrationRefused(fact, kind="several-state-dicts", hint=hint)
        if all(chosen is not one for one in checkpoint.state_dicts):
            raise MigrationRefused(
                "the averaged weights stand among the others, under other names",
                kind="weights-among-others",
                hint="Leave `weights=` out, and give all under the names that the file has.",
            )
        self._checkpoint, self._chosen = checkpoint, chosen
        self._state = state
        self._changes = changes
        self._missing, self._allow_new = missing, allow_new
        self._limits = limits
        self._given = given
        self._own = prepare(checkpoint, chosen, NameChanges())
        self._unknown = object()
        """Stands for objects that cannot be compared, in entries that are not tensors."""
        self._has_unknown = False
        form = form_of(target, checkpoint, changes._replace(key=None, weights="auto"))
        self._is_whole = checkpoint.traits.has_tree and form in ("same", "model", "dcp")
        self.notes: dict[str, None] = {}
        self._tensors: dict[str, TensorInfo] = {}
        """Changed and new tensors, by their names in the file."""
        self._others: dict[str, object] = {}
        """Values of entries that are not tensors and have changed, by the same names."""
        self._gone: dict[str, None] = {}
        """Names in the file that are left out."""

    @property
    def gone(self) -> Iterator[str]:
        """The full names of what is left out."""
        return (self._chosen.head + name for name in self._gone)

    def compare(self) -> None:
        """
        Compare the state with the file, and record what changes.

        Raises:
            MigrationRefused: The names do not fit, or a changed tensor is one that only its own class can write.
        """
        state, own = self._state, self._own
        names, new = self._names()
        lacking = [name for name, old in names.items() if name not in state and old in own.tensors]
        self._refuse(lacking, new)
        if self._missing == "drop":
            self._gone = dict.fromkeys(names[name] for name in lacking)
        tied: dict[object, list[str]] = {}
        for name, old in ((name, old) for name, old in names.items() if name in state):
            tensor = own.tensors.get(old)
            if tensor is not None:
                same = tied.setdefault(identity(tensor.info), [])
                same.append(old)
                self._compare_tensor(name, tensor.info, old, same)
            elif not self._says_same(own.others[old], name):
                self._others[old] = state[name]
        for group in tied.values():
            now = {identity(self._tensors[name]) if name in self._tensors else None for name in group}
            if len(now) > 1:
                self.notes[f"{some(list(map(repr, group)))} were one tensor, and are {len(now)} now"] = None
        for name, old in new.items():
            info = self._given.info(name, state[name])
            if info is None:
                self._others[old] = state[name]
            else:
                self._tensors[old] = info
        if not self._changes.break_quantized:
            self._refuse_broken({self._chosen.head + names[name] for name in lacking})

    def _refuse_broken(self, kept: Collection[str]) -> None:
        """Raise MigrationRefused where a part of a quantised weight is removed or new, and another stays the file's."""
        head = self._chosen.head
        before = {name: tensor.info.dtype.name for name, tensor in self._checkpoint.tensors.items()}
        left = {name: before[name] for name in before.keys() - {*self.gone}}
        quantised = quantization_among(self._checkpoint, left.keys())
        if quantised is None:
            return
        new = {head + name: info.dtype.name for name, info in self._tensors.items()}
        as_before = {name: dtype for name, dtype in left.items() if new.get(name, dtype) == dtype}
        wrong = quantised.damage(as_before, is_cast=False)  # what is dense now needs no scale
        for parts in ((one.name, *others) for one, others in quantised.bound):
            changed = [one for one in parts if one in new]
            is_cast = any(before.get(one) != new[one] for one in changed)
            stay = [one for one in parts if one in left and one not in new and (is_cast or one in kept)]
            if changed and stay:
                wrong = wrong or f"{changed[0]!r} is new, and {stay[0]!r}, which belongs to it, is that of the file"
        if wrong:
            raise MigrationRefused(wrong, kind="breaks-quantized", hint=keep(self._checkpoint.part_of))

    def _names(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the names in the file by those in the state, and the same for names that the file lacks."""
        best: dict[str, str] = {}
        most = -1
        for rules in _STRIPPING:
            with suppress(MigrationRefused):  # as ``load`` keeps names then
                changes = NameChanges(rules).chosen(self._changes.weights)
                found = prepare(self._checkpoint, self._chosen, changes).old_names
                hits = sum(name in found for name in self._state)
                if hits > most:
                    best, most = found, hits
        heads = {old.removesuffix(name) if old.endswith(name) else None for name, old in best.items()} or {""}
        head = heads.pop() if len(heads) == 1 else None
        new = {name: f"{head or ''}{name}" for name in self._state if name not in best}
        if new and head is None and self._allow_new:
            raise MigrationRefused(
                f"it is not clear where {some(list(map(repr, new)))} would be in the file, whose names have wrappers",
                kind="new-names",
                hint="Give all names as the file has them: `load(…, strip=None)`.",
            )
        return best, new

    def _refuse(self, lacking: list[str], new: Mapping[str, str]) -> None:
        """Raise MigrationRefused where the names of both sides differ, unless that is meant."""
        of_model = self._chosen.class_name is not None
        if lacking and (self._missing == "refuse" or (of_model and self._missing == "drop")):
            raise MigrationRefused(
                f"the state lacks {counted(len(lacking), 'tensor')} of the file: {some(list(map(repr, lacking)))}",
                kind="missing-names",
                hint="Keep those of the file with `missing='keep'`"
                + ("." if of_model else ", or leave them out with `missing='drop'`."),
            )
        if new and (not self._allow_new or of_model):
            raise MigrationRefused(
                f"the file lacks {counted(len(new), 'name')} of the state: {some(list(map(repr, new)))}",
                kind="new-names",
                hint="The names inside a whole model are its class's."
                if of_model
                else "If they are to be added, say so with `allow_new=True`.",
            )

    def _compare_tensor(self, name: str, own: TensorInfo, old: str, tied: list[str]) -> None:
        """Record a tensor that changed; if it still equals one that it was tied to, both become one tensor."""
        value = self._state[name]
        info = self._given.info(name, value, own.location if own.storage or own.parts else None)
        if info is None:
            kind = type(value).__name__
            raise TypeError(f"state[{name!r}] takes torch.Tensor | numpy.ndarray | LazyTensor, not {kind}")
        if are_equal(info, own, self._limits):
            return
        if info.storage is None and not info.parts:  # on the meta device
            raise _without_values(name)
        odd = own.subclass or ("one with tensors of its own" if own.layout == "strided" and own.parts else None)
        if odd and self._is_whole:
            raise MigrationRefused(
                f"tensor {name!r} has changed, and only its own class can write it: {odd}",
                kind="unsupported-tensor",
                hint="Take the weights alone: `form='state_dict'` or `form='safetensors'`.",
            )
        others = (self._tensors[one] for one in tied if one in self._tensors)
        same = next((one for one in others if are_equal(info, one, self._limits)), info)
        self._tensors[old] = same._replace(requires_grad=own.requires_grad, kind=own.kind, subclass=None)

    def _says_same(self, node: Inert, name: str) -> bool:
        """Return whether an entry that is not a tensor stays: it is equal, or cannot be compared."""
        rebuilder = self._checkpoint.rebuilder

        def leaf(inner: Inert) -> LazyTensor | None:
            info = rebuilder.tensor(inner) if rebuilder is not None else None
            return None if info is None else LazyTensor(name, info)

        own = plain_value(node, leaf, self._limits.cancellation, lambda *_: self._unknown)
        self._has_unknown = False
        is_same = self._are_same(own, self._state[name])
        if is_same and self._has_unknown:
            self.notes[f"{name!r} is as it is in the file: it holds objects, which cannot be compared"] = None
        return is_same

    def _are_same(self, own: Any, value: Any) -> bool:
        """Return whether an entry of the file equals a value; unknown objects count as equal."""
        if isinstance(own, LazyTensor):
            info = self._given.info(own.name, value)
            return info is not None and are_equal(info, own.info, self._limits)
        if own is self._unknown:
            self._has_unknown = True
            return True
        if type(own) is not type(value):
            return False
        if isinstance(own, dict | list | tuple):
            sides = [list(one.items()) if isinstance(one, dict) else one for one in (own, value)]
            pairs = zip(*sides, strict=False)
            return len(own) == len(value) and all(self._are_same(one, other) for one, other in pairs)
        return repr(own) == repr(value) if isinstance(own, float | complex) else bool(own == value)  # NaN, minus zero

    def edited(self) -> Checkpoint:
        """Return the checkpoint with the changes made. Nobody else has its tree, which is edited in place."""
        checkpoint, chosen, limits = self._checkpoint, self._chosen, self._limits
        record = {one.name: checkpoint.__dict__[one.name] for one in fields(Parsed)}
        record["inside"] = {}
        if checkpoint.traits.has_tree and checkpoint.rebuilder is not None:
            builder = TreeBuilder(limits)
            root = builder.transplant(checkpoint.root, checkpoint.rebuilder)
            leaves = {name: builder.tensor(info) for name, info in self._tensors.items()}
            for name, one in self._others.items():
                leaves[name] = _node(name, one, self._given, builder, is_inside=True)
            if chosen.class_name is None:
                _edit_mapping(chosen, leaves, self._gone)
            else:
                _edit_model(checkpoint, root, chosen.key, self._tensors, leaves)
            contents = collect_weights(root, builder.rebuilder, limits)
            record |= {"root": root, "rebuilder": builder.rebuilder, "contents": contents}
        else:
            infos = {name: tensor.info for name, tensor in self._own.tensors.items() if name not in self._gone}
            infos = {chosen.head + name: info for name, info in (infos | self._tensors).items()}
            own_names = {chosen.head + name for name in chosen}
            others = {name: one.info for name, one in checkpoint.tensors.items() if name not in own_names}
            contents = Contents(others | infos)
            contents.walks = list(checkpoint.walks)
            kind: GroupKind = "mapping" if chosen.class_name is None else "module"
            group = Group(chosen.key, kind, list(infos), chosen.class_name, chosen.node)
            contents.groups = [group] if infos else []
            record["contents"] = contents
            record["recorded"] = checkpoint.recorded._replace(ties={}, order=())  # what is tied shares its memory here
        edited = Checkpoint(checkpoint.path, checkpoint.source, Parsed(**record))
        for state_dict in edited.state_dicts:
            if state_dict.key == chosen.key and state_dict.class_name == chosen.class_name:
                _choose(edited, state_dict)
        return edited


def are_equal(one: TensorInfo, other: TensorInfo, limits: Limits) -> bool:
    """Return whether two tensors have the same type, shape and layout, and the same bytes in each element."""
    kinds = [(info.dtype.name, info.shape, info.layout, info.details, info.storage is None) for info in (one, other)]
    if kinds[0] != kinds[1] or (one.storage is not None and not have_same_bytes(one, other, limits)):
        return False
    if one.layout == "strided":
        return True  # the parts of a plain tensor (a gradient, attributes) are not its value
    parts, others = dict(one.parts), dict(other.parts)
    return parts.keys() == others.keys() and all(are_equal(part, others[name], limits) for name, part in parts.items())


def _edit_mapping(chosen: StateDict, leaves: dict[str, Inert], gone: Collection[str]) -> None:
    """Replace values in the mapping of a state dict, remove some, and append those that it has no key for."""
    own = chosen.own_keys
    head = chosen.head if own is not None else ""
    pairs, known = [], set()
    for key, value in mapping_pairs(chosen.node) or ():
        name = key[len(head) :] if isinstance(key, str) and (own is None or key in own) else None
        known.add(name)
        if name not in gone:
            pairs.append((key, leaves.get(name, value) if name is not None else value))
    pairs += [(head + name, leaf) for name, leaf in leaves.items() if name not in known]
    if isinstance(chosen.node, Call):
        chosen.node.args = mapping_like(chosen.node, pairs).args
    chosen.node.pairs = pairs


def _edit_model(
    checkpoint: Checkpoint, root: Inert, key: str, changed: Mapping[str, TensorInfo], leaves: Mapping[str, Inert]
) -> None:
    """
    Replace tensors of a whole model in its tree.

    Raises:
        MigrationRefused: Two names are one object, and are to be different tensors; or it is in a tuple.
    """
    walk = next(walk for path, walk in checkpoint.walks if path == key)
    named: dict[int, tuple[str, object]] = {}
    wanted: dict[int, Inert] = {}
    for entry in walk.entries:
        now = identity(changed[entry.name]) if entry.name in changed else None
        first, before = named.setdefault(id(entry.node), (entry.name, now))
        if before != now:
            raise MigrationRefused(
                f"{first!r} and {entry.name!r} are one parameter of a whole model, and would be two",
                kind="untied",
                hint="Give both the same values, or save the state alone, without `like=`.",
            )
        if entry.name in leaves:
            wanted.setdefault(id(entry.node), leaves[entry.name])
    stuck = _replace(root, wanted)
    if stuck:
        names = some([repr(named[own][0]) for own in stuck])
        raise MigrationRefused(f"{names} cannot be changed inside a whole model", kind="names-of-a-model")


def _replace(root: Inert, wanted: Mapping[int, Inert]) -> set[int]:
    """Replace nodes by their ids, wherever they are in a tree; return the ids that are not found, or are in a tuple."""
    found, stuck = set[int](), set[int]()
    todo, seen = [root], set[int]()
    while todo:
        one = todo.pop()
        if not is_container(one) or id(one) in seen:
            continue
        seen.add(id(one))
        inside = list(held(one))
        here = {id(inner) for inner in inside if id(inner) in wanted}
        todo += inside
        found |= here
        if not here:
            continue
        if isinstance(one, tuple):
            stuck |= here
        elif isinstance(one, list):
            one[:] = [wanted.get(id(inner), inner) for inner in one]
        elif isinstance(one, Dict | Call):
            one.pairs = [(key, wanted.get(id(inner), inner)) for key, inner in one.pairs or ()]
            if isinstance(one, Call) and one.items:
                one.items = [wanted.get(id(inner), inner) for inner in one.items]
    return stuck | (wanted.keys() - found)
