"""
Match the names of a checkpoint with those of a model, and find the renames that explain the difference.

Strategy: try the few renames that wrappers and trainers make (a wrapper's component, a prefix more, a prefix less,
another prefix, old spellings), and keep the fewest under which most names are equal and have equal shapes. Names that
are only similar are never paired: ``suggestions`` says what a person might have meant. Pure, and without torch: shapes
are tuples.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import ckptool.system as system
from ckptool.errors import MigrationRefused
from ckptool.names import renaming

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]


class _AnyShape(tuple[int, ...]):
    """Equal to every shape."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


ANY_SHAPE: Shape = _AnyShape()
"""The shape of a tensor of a lazy module, which has that of the file."""

Option: TypeAlias = Literal["strip_module", "strip_wrappers", "strip_prefix", "rename", "add_prefix"]

BENIGN = frozenset({
    "num_batches_tracked", "position_ids", "token_type_ids", "relative_position_index", "relative_coords_table",
    "inv_freq", "n_averaged", "attn_mask", "causal_mask", "masked_bias", "total_ops", "total_params",
})  # fmt: skip
"""Last components of buffers that a model computes itself: releases of a library differ in whether they save them."""

SPELLINGS = (
    ((r"\bgamma$", "weight"), (r"\bbeta$", "bias")),
    (
        (r"\bparametrizations\.(\w+)\.original0$", r"\1_g"),
        (r"\bparametrizations\.(\w+)\.original1$", r"\1_v"),
    ),
    (
        (r"\bparametrizations\.(\w+)\.original$", r"\1_orig"),
        (r"\bparametrizations\.(\w+)\.0\._([uv])$", r"\1_\2"),
    ),
    (
        (r"\b(q|k|v)(?:uery|ey|alue)\.(weight|bias)$", r"to_\1.\2"),
        (r"\bproj_attn\.(weight|bias)$", r"to_out.0.\1"),
    ),
)
"""
Names that libraries spell in two ways: normalisation in TensorFlow and torch; weight_norm and spectral_norm in torch,
as parametrizations and before; attention in diffusers, before and since 0.18.
"""

_SPELLINGS = (
    *SPELLINGS,
    (
        (r"\b(weight\w*)_g$", r"parametrizations.\1.original0"),
        (r"\b(weight\w*)_v$", r"parametrizations.\1.original1"),
    ),
    (
        (r"\b(weight\w*)_orig$", r"parametrizations.\1.original"),
        (r"\b(weight\w*)_([uv])$", r"parametrizations.\1.0._\2"),
    ),
    ((r"\b(lora_\w+)\.default\b", r"\1"),),
    ((r"\b(lora_(?:embedding_)?[AB])\b", r"\1.default"),),
    (
        (r"\bto_q\.(weight|bias)$", r"query.\1"),
        (r"\bto_k\.(weight|bias)$", r"key.\1"),
        (r"\bto_v\.(weight|bias)$", r"value.\1"),
        (r"\bto_out\.0\.(weight|bias)$", r"proj_attn.\1"),
    ),
)

_DEPTH = 16
_REPLACED_DEPTH = 3
_CANDIDATES = 3
_SAME_SUFFIX = 4


def is_extra_state(name: str) -> bool:
    """Say whether an entry is what TransformerEngine keeps of FP8, which is no weight, also in parts of its ranks."""
    return re.search(r"(^|\.)_extra_state(/shard_\d+_\d+)?$", name) is not None


def may_be_missing(name: str) -> bool:
    """Say whether a model does without an entry: it computes the buffer itself, or keeps no state of FP8."""
    return is_benign(name) or is_extra_state(name)


class Rename(NamedTuple):
    """One change of names; ``option`` and ``argument`` are those of ``migrate`` that make it."""

    option: Option
    argument: str = ""

    @property
    def rule(self) -> renaming.Rule:
        """The function from names to names."""
        if self.option == "strip_module":
            return renaming.strip_module
        if self.option == "strip_wrappers":
            return renaming.strip_wrappers
        if self.option == "strip_prefix":
            return self.as_rename.rule
        if self.option == "add_prefix":
            return renaming.add_prefix(self.argument)
        pattern, _, replacement = self.argument.partition("=")
        return renaming.substitute(pattern, replacement)

    @property
    def as_rename(self) -> Rename:
        """The same change of a prefix as a regular expression, which names without the prefix do not refuse."""
        if self.option not in ("strip_prefix", "add_prefix"):
            return self
        old, new = (re.escape(f"{self.argument}."), "") if self.option == "strip_prefix" else ("", f"{self.argument}.")
        return Rename("rename", f"^{old}={new}")

    @property
    def arguments(self) -> tuple[str, ...]:
        """What to write on the command line of ``ckptool migrate``."""
        flag = f"--{self.option.replace('_', '-')}"
        return (flag, self.argument) if self.argument else (flag,)

    def __str__(self) -> str:
        return " ".join(self.arguments)


Renames: TypeAlias = tuple[Rename, ...]


def unwrapped(names: list[str]) -> Iterator[tuple[Renames, list[str]]]:
    """Yield each way of taking wrappers off names, and the names then: first none, as they are."""
    yield (), names
    for changes in ((Rename("strip_module"),), (Rename("strip_wrappers"),)):
        stripped = renamed(names, changes)
        if stripped is not None and stripped != names:
            yield changes, stripped


def wrappers_off(names: Iterable[str]) -> Renames:
    """Return what takes all wrappers off these names; nothing where there are none."""
    return list(unwrapped(list(names)))[-1][0]


class Reshaped(NamedTuple):
    """A name that both have, with different shapes."""

    name: str
    """As the model expects it."""
    found_name: str
    expected: Shape
    found: Shape


class KeyMatch(NamedTuple):
    """How the names of a checkpoint match those that a model expects. Names are in the order of their mapping."""

    pairs: dict[str, str]
    """Expected name to found name, where the shapes are equal."""
    missing: tuple[str, ...]
    """Expected names that nothing in the checkpoint matches."""
    unexpected: tuple[str, ...]
    """Names in the checkpoint, as they are there, that the model does not expect."""
    reshaped: tuple[Reshaped, ...]
    changes: Renames
    """What has to be done to the names of the checkpoint, in this order, for the rest to be true; often nothing."""
    alternatives: tuple[Renames, ...] = ()
    """Other renames, as few, under which as many names match: then nobody can know which were meant."""
    target_wrapped: bool = False
    """The model itself has wrappers inside that the checkpoint has not; ``pairs`` see through them."""

    @property
    def exact(self) -> bool:
        """Whether every name on each side has a counterpart of equal shape."""
        return not (self.missing or self.unexpected or self.reshaped)

    @property
    def loads(self) -> bool:
        """Whether all that is not paired is computed by the model itself, and nothing is ambiguous."""
        return not self.reshaped and not self.alternatives and all(map(is_benign, (*self.missing, *self.unexpected)))


def is_benign(name: str) -> bool:
    """Say whether a name is that of a buffer that the model computes itself, so that it can be missing or left."""
    return name.rpartition(".")[2] in BENIGN


def match(expected: Shapes, found: Shapes) -> KeyMatch:
    """
    Pair the names that a model expects with those of a checkpoint.

    Only whole names that are equal after ``changes`` are ever paired; no name is paired twice. The changes are the
    fewest of those under which most names match with equal shapes; where others, as few, do as well, they are
    ``alternatives``.
    """
    best = [_Attempt(expected, found, list(found), (), 0)]
    tried = {(0, tuple(found))}
    bare = renamed(list(expected), (Rename("strip_wrappers"),))
    targets = [(expected, 0)]
    if bare is not None and bare != list(expected):  # the model itself has wrappers inside
        targets.append((dict(zip(bare, expected.values(), strict=True)), 1))
    for propose in (_one_change, _several_changes):
        for target, cost in targets:
            if best[0].is_complete:
                break
            for changes in propose(target, list(found)):
                names = renamed(list(found), changes)
                if names is None or (cost, tuple(names)) in tried:
                    continue
                tried.add((cost, tuple(names)))
                attempt = _Attempt(target, found, names, changes, cost + len(changes))
                if attempt.score >= best[0].score:
                    best = [*best, attempt] if attempt.score == best[0].score else [attempt]
    pairing = best[0].pairing(found)
    if any(name not in pairing and found.get(name) == shape for name, shape in expected.items()):
        best = [_Attempt(expected, found, list(found), (), 0)]  # or what fits as it is would get another name
        pairing = best[0].pairing(found)
    rivals = tuple(other.changes for other in best[1:] if other.pairing(found) != pairing)
    return _result(expected, found, best[0], rivals)


def by_name(expected: Shapes, found: Shapes) -> KeyMatch:
    """Pair names that are equal as they are."""
    return _result(expected, found, _Attempt(expected, found, list(found), (), 0), ())


class _Attempt:
    """Names of the checkpoint after some renames, compared with those that are expected."""

    def __init__(self, target: Shapes, found: Shapes, names: Sequence[str], changes: Renames, cost: int) -> None:
        self.target = target
        self.names = names
        self.changes = changes
        same = named = 0
        for name, shape in zip(names, found.values(), strict=True):
            wanted = target.get(name)
            if wanted is not None:
                named += 1
                same += wanted == shape
        self.score = (same, named, -cost)
        self.is_complete = same == len(target)

    def pairing(self, found: Shapes) -> dict[str, str]:
        """Return the found name for each expected one, as the target spells it; shapes may differ."""
        return {name: old for name, old in zip(self.names, found, strict=True) if name in self.target}


def _one_change(expected: Shapes, names: list[str]) -> Iterator[Renames]:
    """Yield the changes that most checkpoints need, of one kind each; wrappers first, for they explain most."""
    ways = list(unwrapped(names))
    yield from (wrappers for wrappers, _ in ways)
    for wrappers, bare in ways:
        yield from ((*wrappers, *prefixes) for prefixes in _prefix_changes(expected, bare))


def _several_changes(expected: Shapes, names: list[str]) -> Iterator[Renames]:
    """Yield prefixes instead of other prefixes, and old spellings under any prefix."""
    for wrappers, bare in unwrapped(names):
        replaced = [
            (Rename("strip_prefix", old), Rename("add_prefix", new)) for old, new in _replaced_prefixes(expected, bare)
        ]
        yield from ((*wrappers, *prefixes) for prefixes in replaced)
        for prefixes in ((), *_prefix_changes(expected, bare), *replaced):
            changes = (*wrappers, *prefixes)
            for spelling in _spellings(expected, renamed(names, changes) or ()):
                yield in_order(changes, spelling)


def renamed(names: Sequence[str], changes: Renames) -> list[str] | None:
    """Return the names after some changes, in order; None where they cannot be made without losing one."""
    try:
        found = renaming.rename(names, [change.rule for change in changes])
    except MigrationRefused:
        return None
    return ["" if name is None else name for name in found]  # an entry that goes with its wrapper: no name is empty


def _prefix_changes(expected: Shapes, names: Sequence[str]) -> Iterator[Renames]:
    """Yield a prefix less and a prefix more, where some names would then match; those with most of them first."""
    stripped = Counter(head for name in names for head, rest in _splits(name, _DEPTH) if rest in expected)
    yield from ((Rename("strip_prefix", head),) for head, _ in stripped.most_common(_CANDIDATES))
    have = set(names)
    added = Counter(head for name in expected for head, rest in _splits(name, _DEPTH) if rest in have)
    yield from ((Rename("add_prefix", head),) for head, _ in added.most_common(_CANDIDATES))


def _replaced_prefixes(expected: Shapes, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    heads: dict[str, list[str]] = {}
    for name in names:
        for head, rest in _splits(name, _REPLACED_DEPTH):
            known = heads.setdefault(rest, [])
            if "." in rest and len(known) < _SAME_SUFFIX:
                known.append(head)
    found = Counter(
        (old, new)
        for name in expected
        for new, rest in _splits(name, _REPLACED_DEPTH)
        for old in heads.get(rest, ())
        if old != new
    )
    yield from (pair for pair, _ in found.most_common(_CANDIDATES))


def _spellings(expected: Shapes, names: Sequence[str]) -> Iterator[Renames]:
    for spelling in _SPELLINGS:
        changes = []
        for pattern, replacement in spelling:
            matching = [name for name in names if name not in expected and re.search(pattern, name)]
            if any(re.sub(pattern, replacement, name) in expected for name in matching):
                changes.append(Rename("rename", f"{pattern}={replacement}"))
        if changes:
            yield tuple(changes)


def _splits(name: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield the ways of taking a name apart at one of its first dots."""
    at = name.find(".")
    while at >= 0 and depth:
        yield name[:at], name[at + 1 :]
        at = name.find(".", at + 1)
        depth -= 1


def _result(expected: Shapes, found: Shapes, chosen: _Attempt, rivals: tuple[Renames, ...]) -> KeyMatch:
    original = chosen.pairing(found)
    pairs: dict[str, str] = {}
    missing: list[str] = []
    reshaped: list[Reshaped] = []
    used: set[str] = set()
    for (name, shape), wanted in zip(expected.items(), chosen.target, strict=True):
        old = original.get(wanted)
        if old is None:
            missing.append(name)
            continue
        used.add(old)
        if found[old] == shape:
            pairs[name] = old
        else:
            reshaped.append(Reshaped(name, old, shape, found[old]))
    used |= {old for old, name in zip(found, chosen.names, strict=True) if not name}  # they go with their wrapper
    unexpected = tuple(name for name in found if name not in used)
    target_wrapped = chosen.target is not expected
    return KeyMatch(pairs, tuple(missing), unexpected, tuple(reshaped), chosen.changes, rivals, target_wrapped)


def as_options(changes: Renames) -> str:
    """Return what to write on the command line of ``ckptool migrate``, for a POSIX shell."""
    return system.command_line(*(word for change in changes for word in change.arguments)) or "no change"


def in_order(changes: Renames, renames: Iterable[Rename]) -> Renames:
    """Return changes in the order in which migrate carries them out: renames come between stripping and adding."""
    at = sum(change.option != "add_prefix" for change in changes)
    return *changes[:at], *renames, *changes[at:]
