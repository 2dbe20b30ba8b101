"""
Choose the weights of a checkpoint, and prepare them to be loaded or written: one mapping of names; their digest.

Names are relative to the chosen state dict, with the requested changes; the order is the file's. Besides tensors there
are entries that are not tensors (packed parameters, extra state), and the metadata of the modules.

Also their digest, equal for equal weights in any format; docs/scan.md says how to compute it. It is the SHA-256 of
sorted lines, one for each tensor: the SHA-256 of a text of its type, its shape, the SHA-256 of its elements (packed in
row-major order, little-endian), and its name without wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

from ckptool.cancellation import check_cancelled, each
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict, paths_above, walk_of
from ckptool.checkpoints.completeness import SAVE_WHOLE
from ckptool.checkpoints.entries import averaged, not_averaged_in, to_drop
from ckptool.checkpoints.modules import ModuleFacts, StateDictWalk, facts_by_module, version_of
from ckptool.checkpoints.roles import NO_WEIGHTS, WEIGHT_KEYS, Role, is_of_training
from ckptool.checkpoints.summary import candidates, heads
from ckptool.errors import (
    AmbiguousFile,
    AmbiguousWeights,
    CkptoolError,
    Failure,
    KeyMismatch,
    MigrationRefused,
    UnsupportedFeature,
    WeightsNotFound,
)
from ckptool.limits import DEFAULT_LIMITS, Limits, refuse_repeated
from ckptool.messages import counted, cut, for_shell, show, some
from ckptool.names import renaming
from ckptool.names.renaming import Filter, by_likeness
from ckptool.names.wrappers import AVERAGED_PAIR
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.tensors.payloads import CHUNK_NBYTES
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, identity

WeightsChoice: TypeAlias = Literal["auto", "raw", "ema", "module"]

_ROLES: Final[dict[WeightsChoice, tuple[Role, ...]]] = {"ema": ("ema",), "raw": ("model",), "auto": ("model", "ema")}
_STATES: Final[dict[Role, str]] = {
    "optimizer": "the state of an optimizer",
    "scheduler": "the state of a scheduler",
    "rng": "states of random number generators",
}
ROOT: Final = "(root)"
"""The name of the outermost state dict, which has an empty key."""
ALL: Final = "(all)"
"""The name of everything in a file, with full names."""
_LISTED: Final = 12
EMPTY: Final = "and nothing else"
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_KINDS: Final[dict[WeightsChoice, str]] = {
    "ema": "averaged weights",
    "raw": "weights that are not averaged",
    "auto": "weights",
    "module": "weights of an engine of DeepSpeed",
}


class NameChanges(NamedTuple):
    """The changes to the names of a state dict, in order."""

    rules: tuple[renaming.Rule, ...] = ()
    filter: Filter = Filter()
    """It is applied to the old names."""

    def chosen(self, which: WeightsChoice) -> NameChanges:
        """Return these changes; if averaged weights are chosen, without the copy that is not averaged."""
        if which != "ema":
            return self
        return self._replace(filter=self.filter._replace(exclude=(*self.filter.exclude, f"{AVERAGED_PAIR.twin}.*")))

    @property
    def is_by_name(self) -> bool:
        """Whether there are other changes than stripping wrappers, which is also possible in whole models."""
        asked = [rule for rule in self.rules if rule not in renaming.WRAPPER_RULES]
        return bool(asked) or not self.filter.takes_all


class Weights(NamedTuple):
    """Tensors by new name, in order."""

    state_dict: StateDict
    tensors: dict[str, LazyTensor]
    others: dict[str, Inert]
    """Entries that are not tensors."""
    modules: dict[str, ModuleFacts]
    """The metadata of each module (``state_dict()._metadata``), by its path."""
    old_names: dict[str, str]
    """The old name by the new name of all entries, in order."""
    dropped: tuple[str, ...]
    """Names that the changes leave out, or that were removed with a wrapper."""
    texts: tuple[tuple[str, str], ...] = ()
    """Texts of a safetensors file that are not facts about its tensors."""
    assumed: Mapping[str, str] = _NOTHING
    """
    The classes of modules whose version is only assumed, by path: the pickle of a whole model does not have the version
    of a class outside torch.
    """
    made_of: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """The old names of the tensors that a new one was computed from, by new name."""

    def without(self, unsupported: Iterable[str]) -> Weights:
        """Return these weights without the named entries, which are not tensors."""
        gone = {name: self.old_names[name] for name in unsupported}
        return self._replace(
            others={name: node for name, node in self.others.items() if name not in gone},
            old_names={name: old for name, old in self.old_names.items() if name not in gone},
            dropped=(*self.dropped, *gone.values()),
        )

    def part(self, include: str | Sequence[str], prefix: str) -> Weights:
        """
        Return the entries whose names match one of the globs and begin with a prefix of complete components, which is
        removed; all entries, if neither is given.

        Raises:
            WeightsNotFound: A glob or the prefix matches no name; the hint lists the most similar ones.
        """
        if not (include or prefix):
            return self
        head = f"{prefix.rstrip('.')}." if prefix else ""
        taken = names_matching("include", include, self.names)
        new = {name: name[len(head) :] for name in taken if name.startswith(head)}
        if not new:
            raise _not_there(f"prefix {prefix!r} is that of", prefix, self.names)
        modules = {path: facts for path, facts in self.modules.items() if f"{path}.".startswith(head)}
        return self._replace(
            tensors={new[name]: tensor for name, tensor in self.tensors.items() if name in new},
            others={new[name]: node for name, node in self.others.items() if name in new},
            modules={path[len(head) :]: facts for path, facts in modules.items()} if head else self.modules,
            old_names={new[name]: old for name, old in self.old_names.items() if name in new},
            dropped=(*self.dropped, *(old for name, old in self.old_names.items() if name not in new)),
        )

    @property
    def names(self) -> list[str]:
        """The names of all entries, tensors or not, in order."""
        return list(self.old_names)

    @property
    def renamed(self) -> tuple[tuple[str, str], ...]:
        """Old and new names of entries that were only renamed."""
        return tuple((old, new) for new, old in self.old_names.items() if old != new and new not in self.made_of)

    @property
    def taken(self) -> list[LazyTensor]:
        """The tensors of the source that these are, or are computed from."""
        names = dict.fromkeys([*self.old_names.values(), *(one for parts in self.made_of.values() for one in parts)])
        return [self.state_dict[name] for name in names if name in self.state_dict]


def names_matching(option: str, globs: str | Sequence[str], names: Sequence[str]) -> list[str]:
    """
    Return the names that match one of the globs; all names, if there are no globs.

    Raises:
        WeightsNotFound: A glob matches no name; the message names ``option``, the hint lists the most similar names.
    """
    globs = [globs] if isinstance(globs, str) else globs
    found = {glob: {name for name in names if renaming.matches(glob, name)} for glob in globs}
    for glob in globs:
        if not found[glob]:
            raise _not_there(f"{option} {glob!r} matches", glob, names)
    return [name for name in names if not globs or any(name in found[glob] for glob in globs)]


def _not_there(what: str, text: str, names: Sequence[str]) -> WeightsNotFound:
    near = some([for_shell(name) for name in by_likeness(text.rstrip("*."), names)], _LISTED)
    return WeightsNotFound(f"{what} none of {counted(len(names), 'name')}", hint=f"It has {near}.")


def under(checkpoint: Checkpoint, key: str) -> StateDict | None:
    """
    Return the state dict under a key, or those below it joined to one; None if there is none.

    ``(root)`` is the outermost state dict. ``(all)``, as an empty key, is everything, with full names; if the outermost
    state dict is the only one, it is that.
    """
    key = "" if key == ALL else key
    found = next((one for one in checkpoint.state_dicts if (one.key or ROOT) == (key or ROOT)), None)
    if found is not None and (key or len(checkpoint.state_dicts) == 1):
        return found
    head = f"{key}." if key else ""
    own = {name[len(head) :]: one for name, one in checkpoint.tensors.items() if name.startswith(head)}
    parts = tuple(one for one in checkpoint.state_dicts if one.head.startswith(head))
    return StateDict(key, "model", own, None, parts=parts) if own and (parts or not key) else None


def choose(
    checkpoint: Checkpoint,
    key: str | None,
    which: WeightsChoice,
    fits: Callable[[StateDict], bool] | None = None,
    *,
    option: str = "key",
    any_role: bool = False,
) -> StateDict:
    """
    Return the state dict that is meant by ``key``, else by ``which``, else the model's weights.

    1. ``which="module"`` means DeepSpeed's weights under that key.
    2. If neither is given, and several could be meant, or none, it is the only one that ``fits``; else the joined state
       dicts of several models, if only that ``fits``.
    3. With ``any_role``, it may also be the state of an optimizer, or the only state dict whatever its role.

    ``option`` is the caller's name of ``key``, for hints.

    Raises:
        AmbiguousWeights: Several could be meant; ``candidates`` and the hint list them.
        WeightsNotFound: There is no such state dict.
        KeyMismatch: There are candidates, but none that ``fits``.
    """
    tries = fits if key is None and which == "auto" and checkpoint.unmerged is None else None
    try:
        found = _meant(checkpoint, key, which, option, any_role=any_role)
    except WeightsNotFound as error:
        if tries is None:
            raise
        there = _of_no_training(checkpoint)
        roles: tuple[tuple[Role, ...], ...] = (("model",), ("ema", "other"))
        fitting = next(filter(None, ([one for one in there if one.role in some and tries(one)] for some in roles)), [])
        if len(fitting) > 1:
            raise with_candidates(AmbiguousWeights(f"{len(fitting)} state dicts fit the model"), fitting) from error
        whole = None if fitting else _whole_that_fits(checkpoint, tries)
        if whole is None and not fitting:
            raise KeyMismatch(f"no state dict fits the model: {error.message}", hint=error.hint) from error
        return whole or fitting[0]
    return (_whole_that_fits(checkpoint, tries, found) if tries is not None else None) or found


def _of_no_training(checkpoint: Checkpoint) -> list[StateDict]:
    there = [one for one in checkpoint.state_dicts if one.key not in checkpoint.copies]
    return [one for one in there if not is_of_training(one.key, one, one.class_name)]


def _whole_that_fits(
    checkpoint: Checkpoint, fits: Callable[[StateDict], bool], chosen: StateDict | None = None
) -> StateDict | None:
    """Return the joined state dicts of models, with full names, if that ``fits`` and the chosen one does not."""
    if len(checkpoint.state_dicts) < 2 or (chosen is not None and fits(chosen)):
        return None
    parts = tuple(one for one in _of_no_training(checkpoint) if one.role == "model")
    if len(parts) < 2:
        return None
    own = {one.head + name: tensor for one in parts for name, tensor in one.items()}
    whole = StateDict("", "model", own, None, parts=parts)
    return whole if fits(whole) else None


def _meant(checkpoint: Checkpoint, key: str | None, which: WeightsChoice, option: str, *, any_role: bool) -> StateDict:
    """Return the state dict that is meant, without regard to a model that it should fit."""
    if key is not None and which != "auto":
        fact = f"key {key!r} and weights {which!r} both say which weights are meant"
        raise AmbiguousWeights(fact, kind="two-choices", hint="Give one of them.")
    there = [one for one in checkpoint.state_dicts if one.key not in checkpoint.copies]
    found = there if any_role else candidates(checkpoint)
    if key is not None or which == "module":
        named = _under(checkpoint, "module" if key is None else key, found, option if key is not None else "weights")
        if named.role in NO_WEIGHTS and not any_role:
            raise with_candidates(WeightsNotFound(f"{key!r} is {_STATES[named.role]}, no weights"), found)
        return named
    refuse_archive(checkpoint)
    meant = [one for one in found if one.role in _ROLES.get(which, ())]
    best = next((one for one in meant if one is checkpoint.weights), None)
    if best is None and any_role and len(found) == 1:
        best = found[0]
    if best is None and len(meant) == 1 and which != "auto":
        best = meant[0]
    if best is None and not meant and which == "ema" and checkpoint.weights is not None:
        best = averaged(checkpoint.weights)
    if best is not None:
        return not_averaged_in(best) if which == "raw" else best
    if meant and checkpoint.unmerged is not None:
        error = with_candidates(AmbiguousWeights(checkpoint.unmerged, kind="unmerged"), meant)
        whole = checkpoint.unmerged_remedy or SAVE_WHOLE
        error.hint = f"{whole} `key=` takes one part, which is not a model: {some(error.candidates, _LISTED)}"
        raise error
    if meant:
        fact = f"several state dicts could be the {_KINDS[which]}"
        if beside := checkpoint.unexplained_beside(meant[0]) if len(meant) == 1 else None:
            fact = f"{meant[0].key!r} may not be all of the {_KINDS[which]}; also there: {_listed(beside)}"
        error = with_candidates(AmbiguousWeights(fact), meant, option)
        error.hint = f"{error.hint}; or all of them, with names from the top: `{option}={ALL!r}`"
        raise error
    error = WeightsNotFound(f"there are no {_KINDS[which]}{_instead(checkpoint)}", kind="which-weights")
    from ckptool.checkpoints.embedded import find_embedded

    inside = [f"{checkpoint.path}::{path}" for path in find_embedded(checkpoint.extras)]
    if inside and not found:
        error.hint = f"It holds files inside: open {some(list(map(for_shell, inside)))}."
        raise error
    raise with_candidates(error, found, "weights" if which != "auto" else option)


def _listed(numels: Mapping[str, int]) -> str:
    """Return names with their numbers of elements, as text."""
    total = f", {counted(sum(numels.values()), 'element')} in all" if len(numels) > 1 else ""
    return some([f"{name} ({counted(numel, 'element')})" for name, numel in numels.items()]) + total


def left_beside(checkpoint: Checkpoint, key: str | None, chosen: StateDict) -> str | None:
    """
    Return a text about other possible weights beside those that were chosen by default: averaged ones with more
    tensors, unexplained tensors, or that the chosen ones are averages. None if nothing is, or ``key`` was given.
    """
    weights = checkpoint.weights
    if key is not None or weights is None or weights.key != chosen.key:
        return None
    if chosen.role == "ema":
        pairs = nodes.mapping_pairs(checkpoint.root) or []
        there = [(name, () if one is None else nodes.mapping_pairs(one)) for name, one in pairs if name in WEIGHT_KEYS]
        bare = [name for name, below in there if below is not None and not below]
        return f"there are none under {bare[0]!r}: those under {chosen.key!r} are averaged" if bare else None
    for one in (one for one in checkpoint.state_dicts if one.role == "ema" and one.keys() >= chosen.keys()):
        if more := [name for name, tensor in one.items() if name not in chosen and tensor.info.shape]:
            fact = f"the averaged weights under {one.key!r} have {counted(len(more), 'tensor')}"
            return f"{fact} that those under {chosen.key!r} lack: {some(more)}"
    beside = checkpoint.unexplained_beside(chosen)
    if not beside:
        return None
    return f"beside the weights under {chosen.key!r}, also there, and left out: {_listed(beside)}"


def _under(checkpoint: Checkpoint, key: str, found: Sequence[StateDict], option: str) -> StateDict:
    """Return the state dict under a key; raise WeightsNotFound with a hint that lists the most similar keys first."""
    named = under(checkpoint, key)
    if named is not None:
        return named
    if option == "weights":
        raise with_candidates(WeightsNotFound(f"there are no {_KINDS['module']}", kind="which-weights"), found, option)
    fact = f"no state dict under {key!r}"
    if key in checkpoint.keys():  # noqa: SIM118 - of the file, not of a dict
        fact += f": what is there is a value, and ckptool.open_checkpoint(path)[{key!r}] gives it"
    raise with_candidates(WeightsNotFound(fact), found, option, key)


def _instead(checkpoint: Checkpoint) -> str:
    """Return what a file without weights has instead, as text."""
    if checkpoint.traits.program is not None and any(name.startswith("constants.") for name in checkpoint.attributes):
        return ": it is frozen, they are constants of its code without names"
    if checkpoint.form == "tensors":
        return ", only tensors that no model has named"
    if not checkpoint.tensors:
        return f": {without_tensors(checkpoint)}"
    if checkpoint.form != "training":
        return ""
    roles = dict.fromkeys(one.role for one in checkpoint.state_dicts if one.role in NO_WEIGHTS)
    return f", only {' and '.join(_STATES[role] for role in roles)}"


def without_tensors(checkpoint: Checkpoint) -> str:
    """Return what a file without tensors has instead, as text."""
    pairs = [(key, nodes.mapping_pairs(value)) for key, value in nodes.mapping_pairs(checkpoint.root) or ()]
    held = [cut(key, 64) for key, below in pairs if isinstance(key, str) and (below is None or below)]
    return f"there is no tensor in it, {f'only {some(held)}' if held else EMPTY}"


def refuse_archive(checkpoint: Checkpoint) -> None:
    """Raise AmbiguousWeights for an archive or a folder with several checkpoints, of which none was chosen."""
    if checkpoint.form != "archive":
        return
    if checkpoint.unmerged is not None:
        raise AmbiguousWeights(checkpoint.unmerged, kind="unmerged", hint=checkpoint.unmerged_remedy or SAVE_WHOLE)
    members = [one for one in checkpoint.members if one.form != "training"] or list(checkpoint.members)
    what = f"{'a folder' if checkpoint.is_folder else 'an archive'} of {len(checkpoint.members):,} checkpoints"
    error = AmbiguousWeights(what, kind="archive")
    error.candidates = tuple(f"{checkpoint.path}::{one.name}" if checkpoint.path else one.name for one in members)
    error.hint = f"Pick one: {some(list(map(for_shell, error.candidates)), _LISTED)}"
    raise error


def by_name(checkpoint: Checkpoint) -> list[StateDict]:
    """Return the state dicts of weights that can be renamed; those of whole models follow from their modules."""
    return [one for one in checkpoint.state_dicts if one.role in ("model", "ema") and one.class_name is None]


def with_candidates(
    error: WeightsNotFound, found: Sequence[StateDict], option: str = "key", asked: str = ""
) -> WeightsNotFound:
    """Add the keys of the state dicts that can be chosen to an error, with a hint that lists them."""
    error.candidates = tuple(one.key for one in found)
    if asked:
        near = by_likeness(asked, error.candidates)
        found = sorted(found, key=lambda one: near.index(one.key))
    keys = [f"{for_shell(one.key or ROOT)}{' (averaged)' * (one.role == 'ema')}" for one in found]
    pick = f"Pick one with {'`key=` instead' if option == 'weights' else f'`{option}=`'}: {some(keys, _LISTED)}"
    error.hint = pick if keys else None
    return error


def prepare(
    checkpoint: Checkpoint, state_dict: StateDict, changes: NameChanges, *, drop: Sequence[str] = ()
) -> Weights:
    """
    Return the weights of a state dict under their new names, without the entries in ``drop``.

    Raises:
        AmbiguousFile: Two of its tensors have the same name.
        MigrationRefused: Two names would become equal, a name lacks a prefix, or there is nothing to drop.
    """
    check_cancelled(checkpoint.source.cancellation)
    for given, wanted in checkpoint.contents.clashes.items():
        if given.startswith(state_dict.head) and given[len(state_dict.head) :] in state_dict:
            fact = f"two tensors are called {wanted!r}; the second is listed as {given!r}"
            raise AmbiguousFile(fact, kind="ambiguous-name")
    pairs = entries_of(checkpoint, state_dict)
    direct = dict(pairs)
    others = {name: value for name, value in pairs if name not in state_dict}
    # Tensors deeper in other entries, for example in a tuple, move with their entries.
    tensors = {name: tensor for name, tensor in state_dict.items() if not others or name in direct}
    recorded = checkpoint.recorded
    tensors |= {name: tensors[kept] for name, kept in recorded.ties.items() if kept in tensors}
    if recorded.order:
        tensors = {name: tensors[name] for name in recorded.order if name in tensors}
    modules = {path: (facts, None) for path, facts in recorded.modules.items()} or _modules(checkpoint, state_dict)
    entries = [name for name, _ in pairs] if others else list(tensors)
    gone = tuple(f"{path}." for path in _inside(checkpoint, state_dict, drop)) or ("\0",)  # no name begins so
    kept = entries
    if drop or not changes.filter.takes_all:
        key = state_dict.key
        kept = [name for name in entries if changes.filter.takes(name, key) and not f"{name}.".startswith(gone)]
    check_cancelled(checkpoint.source.cancellation)
    rules = renaming.with_heads(changes.rules, heads(checkpoint, state_dict))
    renamed = dict(zip(kept, renaming.rename(kept, rules), strict=True))
    new = {old: name for old, name in renamed.items() if name is not None}
    paths = renaming.rename_metadata(list(modules), rules, kept)
    moved = {path: found for path, found in zip(paths, modules.values(), strict=True) if path is not None}
    return Weights(
        state_dict,
        {new[name]: tensor for name, tensor in tensors.items() if name in new},
        {new[name]: node for name, node in others.items() if name in new},
        {path: facts for path, (facts, _) in moved.items()},
        {name: old for old, name in new.items()},
        tuple(name for name in entries if name not in new),
        tuple(recorded.texts.items()),
        {path: cls for path, (_, cls) in moved.items() if cls is not None},
    )


def _inside(checkpoint: Checkpoint, state_dict: StateDict, drop: Sequence[str]) -> Iterator[str]:
    """Yield the paths to drop from a state dict, relative to it; others are not taken anyway."""
    head = state_dict.head
    for what in drop:
        for path in to_drop(checkpoint, what):
            if head.startswith(f"{path}."):
                raise MigrationRefused(f"{what!r} is what was to be taken", kind="nothing-left")
            if path.startswith(head):
                yield path[len(head) :]


def entries_of(checkpoint: Checkpoint, state_dict: StateDict) -> list[tuple[str, Inert]]:
    """Return the direct entries of a state dict; for a whole model, empty if all are tensors."""
    head = state_dict.head
    if state_dict.parts:  # joined, without entries that contain another state dict
        keys = {one.key for one in checkpoint.state_dicts}
        models = [one for one in state_dict.parts if one.role in ("model", "ema")]
        full = {one.head + name: node for one in models for name, node in entries_of(checkpoint, one)}
        inner = {path[len(head) :]: node for path, node in full.items() if path not in keys}
        others = {path: node for path, node in inner.items() if path not in state_dict}
        alone = [name for name in state_dict if not others or others.keys().isdisjoint(paths_above(name))]
        return [*((name, None) for name in alone), *others.items()]
    if state_dict.class_name is not None:
        walk = walk_of(checkpoint, state_dict)
        listed = [entry for entry in (walk.entries if walk else ()) if entry.kind is None or entry.name in state_dict]
        return [(entry.name, entry.node) for entry in listed] if len(listed) > len(state_dict) else []
    if state_dict.node is None:
        return []
    pairs = nodes.mapping_pairs(state_dict.node) or []
    found = [(key, node) for key, node in pairs if isinstance(key, str)]
    own = state_dict.own_keys
    if own is None:
        return found
    return [(key[len(head) :], node) for key, node in found if key in own and key.startswith(head)]


def _modules(checkpoint: Checkpoint, state_dict: StateDict) -> dict[str, tuple[ModuleFacts, str | None]]:
    """Return the metadata of each module by its path, with its class if the version is only assumed."""
    if state_dict.parts:
        start = len(state_dict.head)
        every = ((one.head, *item) for one in state_dict.parts for item in _modules(checkpoint, one).items())
        return {f"{head}{path}"[start:].rstrip("."): found for head, path, found in every}
    if state_dict.class_name is not None:
        walk = walk_of(checkpoint, state_dict) or StateDictWalk()
        versions = {path: walk.versions.get(path, version_of(cls)) for path, cls in walk.modules}
        sure: dict[str, ModuleFacts] = {path: {"version": one} for path, one in versions.items() if one is not None}
        return {path: (sure.get(path, {"version": 1}), None if path in sure else cls) for path, cls in walk.modules}
    metadata = nodes.mapping_pairs(nodes.lookup(nodes.attribute_pairs(state_dict.node), "_metadata"))
    return {path: (facts, None) for path, facts in facts_by_module(metadata or []).items()}


def _with_type(name: str, entry: LazyTensor | Inert) -> str:
    """Return the name of an entry with its type, as text."""
    if not isinstance(entry, LazyTensor):
        from ckptool.pickles.values import kind_of

        return f"{name!r} ({kind_of(entry)})"
    info = entry.info
    odd = info.layout if info.layout != "strided" else "meta" if info.location == "meta" else ""
    return f"{name!r} ({odd} {info.dtype.name})" if odd else f"{name!r} ({info.dtype.name})"


def refuse_others(checkpoint: Checkpoint, others: Mapping[str, LazyTensor | Inert], *, drop: bool) -> None:
    """Raise MigrationRefused if there are entries that a target cannot contain, unless ``drop`` is true."""
    if others and not drop:
        named, part = some([_with_type(*one) for one in others.items()]), checkpoint.part_of
        fact, hint = "that the target cannot hold", "Leave them out with `drop_unsupported=True`."
        infos = [one.info for one in others.values() if isinstance(one, LazyTensor)]
        distributed = [info for info in infos if (info.subclass or "").endswith(".DTensor")]
        # Of a distributed tensor, the file has what one rank had.
        if any(0 < sum(part.numel for _, part in info.parts) < info.numel for info in distributed):
            fact, hint = "of which it holds one rank's part", "Save it again with the weights gathered."
            if part is not None and part.path:
                hint = f"Give {show(part.path)}, with the parts of all."
        raise MigrationRefused(
            f"{counted(len(others), 'entry')} {fact}: {named}", kind="unsupported-entries", hint=hint
        )


InMemory: TypeAlias = Callable[[TensorInfo], Iterable[bytes | memoryview] | None]


def digest_of(
    checkpoint: Checkpoint,
    limits: Limits = DEFAULT_LIMITS,
    weights: StateDict | None = None,
    in_memory: InMemory = lambda _: None,
    hashed: Mapping[tuple[object, ...], str] = MappingProxyType({}),
) -> str:
    """
    Return ``sha256:`` and the digest of the weights. Every byte of them is read, in chunks.

    ``weights`` is the state dict if it was chosen already. ``in_memory`` may return the bytes of a tensor so that they
    are not read again; ``hashed`` has known SHA-256s of elements, by the identity of their tensor.

    Raises:
        WeightsNotFound: No state dict is the weights, or several could be.
        UnsupportedFeature: The file has no bytes for a tensor.
        LimitExceeded: Views repeat the same bytes far too often.
        CkptoolError: The file cannot be read any more.
    """
    tensors = tensors_of(checkpoint, limits, weights)
    distinct = {identity(one.info): one for one in tensors.values()}
    known = {
        key: _described(one.info, one.name, limits, in_memory, hashed.get(key))
        for key, one in each(distinct.items(), checkpoint.source.cancellation)
    }
    lines = sorted(_line(known[identity(one.info)], name) for name, one in tensors.items())
    text = "\n".join(lines)
    return f"sha256:{_hex(text)}"


def tensors_of(
    checkpoint: Checkpoint, limits: Limits = DEFAULT_LIMITS, weights: StateDict | None = None
) -> Mapping[str, LazyTensor]:
    """Return the tensors of the digest by the names in it; raises as ``digest_of``, but reads nothing."""
    weights = choose(checkpoint, None, "auto") if weights is None else weights
    given = {**weights, **dict(_packed(checkpoint, weights))}
    given |= {name: given[kept] for name, kept in checkpoint.recorded.ties.items() if kept in given}
    try:
        renamed = renaming.rename([*given], [renaming.strip_wrappers])
    except MigrationRefused:  # a component of only some names may be the model's own
        renamed = renaming.rename([*given], [lambda names: list(map(renaming.without_marked, names))])
    tensors = {new: one for new, one in zip(renamed, given.values(), strict=True) if new is not None}
    distinct = {identity(one.info): one for one in tensors.values()}
    refuse_repeated(sum(one.info.total_nbytes for one in distinct.values()), checkpoint.file_nbytes, limits)
    return tensors


class Known(NamedTuple):
    """A digest, or the error if there is none."""

    digest: str | None
    error: CkptoolError | None = None


def digest_or_why(checkpoint: Checkpoint, limits: Limits = DEFAULT_LIMITS) -> Known:
    """Return the result of ``digest_of``, or its error; only a cancellation is raised."""
    try:
        return Known(digest_of(checkpoint, limits))
    except Failure as error:
        return Known(None, error)


def _hex(text: str) -> str:
    from hashlib import sha256  # takes 3 MiB of memory, and only digests need it

    return sha256(text.encode(errors="surrogatepass")).hexdigest()


def _line(described: str, name: str) -> str:
    # The name is last, and only the digests of lines are joined: no name can imitate other lines.
    return _hex(f"{described} {name}")


def _packed(checkpoint: Checkpoint, weights: StateDict) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors inside entries of a state dict that are not tensors: packed weights, extra state."""
    entries = {name for name, _ in entries_of(checkpoint, weights) if name not in weights}
    others = {one.head + name for one in checkpoint.state_dicts for name in one}
    head = weights.head
    for name, tensor in checkpoint.tensors.items() if entries else ():
        is_ours = name.startswith(head) and name not in others
        if is_ours and not entries.isdisjoint(paths_above(name[len(head) :])):
            yield name[len(head) :], tensor


def _described(info: TensorInfo, name: str, limits: Limits, in_memory: InMemory, hashed: str | None = None) -> str:
    """Return a text of type, shape and SHA-256 of a tensor; if it is not strided, of layout, details and parts, too."""
    if info.storage is None and not info.parts:
        raise UnsupportedFeature(f"tensor {name!r} has no bytes in the file", kind="no-plain-bytes")
    from hashlib import sha256  # as above

    contents = sha256()
    if info.storage is not None and hashed is None:
        known = in_memory(info)
        for chunk in LazyTensor(name, info).chunks(CHUNK_NBYTES, limits=limits) if known is None else known:
            contents.update(chunk)
    shape = ",".join(map(str, info.shape))
    words = [info.dtype.name, f"[{shape}]", hashed or contents.hexdigest()]
    if info.layout != "strided":
        words += [info.layout, *(f"{key}={value!r}" for key, value in info.details)]
    words += [_line(_described(one, f"{name}.{part}", limits, in_memory), part) for part, one in info.parts]
    return " ".join(words)
