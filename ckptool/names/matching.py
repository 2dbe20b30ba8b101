"""
Which names of a checkpoint are which of a model: the renames that explain the difference.

Strategy: try the few renames that wrappers and trainers make (a wrapper's component, an added, removed or replaced
prefix, old spellings), and keep the fewest under which most names are equal and have equal shapes. Names that are only
similar are never paired: ``suggestions`` guesses what a person might have meant. Pure functions without torch: shapes
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
    """A shape that equals every shape."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


ANY_SHAPE: Shape = _AnyShape()
"""The shape of a tensor of a lazy module, which takes the shape in the file."""

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
as parametrizations and before them; attention in diffusers, before and since 0.18.
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
    """Return whether an entry is TransformerEngine's state of FP8, or one rank's part of it, which is not a weight."""
    return re.search(r"(^|\.)_extra_state(/shard_\d+_\d+)?$", name) is not None


def may_be_missing(name: str) -> bool:
    """Return whether a model works without an entry: a buffer that it computes itself, or a state of FP8."""
    return is_benign(name) or is_extra_state(name)


_STRIPS: dict[str, renaming.Rule] = {"strip_module": renaming.strip_module, "strip_wrappers": renaming.strip_wrappers}


class Rename(NamedTuple):
    """One change of names, as an option of ``migrate`` and its argument."""

    option: Option
    argument: str = ""

    @property
    def rule(self) -> renaming.Rule:
        """The function from names to names."""
        if self.option in _STRIPS:
            return _STRIPS[self.option]
        if self.option == "add_prefix":
            return renaming.add_prefix(self.argument)
        pattern, _, replacement = self.as_rename.argument.partition("=")
        return renaming.substitute(pattern, replacement)

    @property
    def as_rename(self) -> Rename:
        """The same change as a ``rename``, which also accepts names that do not have the prefix."""
        if self.option not in ("strip_prefix", "add_prefix"):
            return self
        old, new = (re.escape(f"{self.argument}."), "") if self.option == "strip_prefix" else ("", f"{self.argument}.")
        return Rename("rename", f"^{old}={new}")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The words for the command line of ``ckptool migrate``."""
        flag = f"--{self.option.replace('_', '-')}"
        return (flag, self.argument) if self.argument else (flag,)

    def __str__(self) -> str:
        return " ".join(self.arguments)


Renames: TypeAlias = tuple[Rename, ...]


def unwrapped(names: list[str]) -> Iterator[tuple[Renames, list[str]]]:
    """Yield each way to strip wrappers from names, with the resulting names; first no change."""
    yield (), names
    for changes in ((Rename("strip_module"),), (Rename("strip_wrappers"),)):
        stripped = renamed(names, changes)
        if stripped is not None and stripped != names:
            yield changes, stripped


def wrappers_off(names: Iterable[str]) -> Renames:
    """Return the changes that strip all wrappers from names; empty if there are none."""
    return list(unwrapped(list(names)))[-1][0]


class Reshaped(NamedTuple):
    """A name that both have, with different shapes."""

    name: str
    """The name that the model expects."""
    found_name: str
    expected: Shape
    found: Shape


class KeyMatch(NamedTuple):
    """How the names of a checkpoint match those that a model expects. Names are in the order of their mapping."""

    pairs: dict[str, str]
    """Found name by expected name, of equal shapes."""
    missing: tuple[str, ...]
    """Expected names that nothing in the checkpoint matches."""
    unexpected: tuple[str, ...]
    """Names in the checkpoint, unchanged, that the model does not expect."""
    reshaped: tuple[Reshaped, ...]
    changes: Renames
    """The changes to the checkpoint's names, in order, under which they match; often none."""
    alternatives: tuple[Renames, ...] = ()
    """Other renames, equally few, under which as many names match, so that it is not clear which were meant."""
    target_wrapped: bool = False
    """Whether the model has wrappers inside that the checkpoint lacks; ``pairs`` ignore them."""

    @property
    def exact(self) -> bool:
        """Whether every name on each side has a counterpart of equal shape."""
        return not (self.missing or self.unexpected or self.reshaped)

    @property
    def loads(self) -> bool:
        """Whether the model computes all unpaired entries itself, and nothing is ambiguous."""
        return not self.reshaped and not self.alternatives and all(map(is_benign, (*self.missing, *self.unexpected)))


def is_benign(name: str) -> bool:
    """Return whether a name is of a buffer that the model computes itself, so that it may be missing or left over."""
    return name.rpartition(".")[2] in BENIGN


def match(expected: Shapes, found: Shapes) -> KeyMatch:
    """
    Pair the names that a model expects with those of a checkpoint.

    Names are paired only if they are equal after ``changes``; no name is paired twice. The changes are the fewest under
    which most names match with equal shapes. Others that are equally few and match as many are the ``alternatives``.
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
                if attempt.score >= best[0].score:  # equals are kept, as it is not clear which of them is meant
                    best = [*best, attempt] if attempt.score == best[0].score else [attempt]
    pairing = best[0].pairing(found)
    if any(name not in pairing and found.get(name) == shape for name, shape in expected.items()):
        best = [_Attempt(expected, found, list(found), (), 0)]  # a name that fits unchanged must not be renamed
        pairing = best[0].pairing(found)
    rivals = tuple(other.changes for other in best[1:] if other.pairing(found) != pairing)
    return _result(expected, found, best[0], rivals)


def by_name(expected: Shapes, found: Shapes) -> KeyMatch:
    """Pair names that are equal as they are."""
    return _result(expected, found, _Attempt(expected, found, list(found), (), 0), ())


class _Attempt:
    """The checkpoint's names after some renames, compared with the expected ones."""

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
        """Return the found name by the target's name; shapes may differ."""
        return {name: old for name, old in zip(self.names, found, strict=True) if name in self.target}


def _one_change(expected: Shapes, names: list[str]) -> Iterator[Renames]:
    """Yield the most frequent changes, of one kind each: wrappers first, then also prefixes."""
    ways = list(unwrapped(names))
    yield from (wrappers for wrappers, _ in ways)
    for wrappers, bare in ways:
        yield from ((*wrappers, *prefixes) for prefixes in _prefix_changes(expected, bare))


def _several_changes(expected: Shapes, names: list[str]) -> Iterator[Renames]:
    """Yield replaced prefixes, and old spellings combined with any change of prefixes."""
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
    """Return the names after some changes, in order; None if these are refused, as they would lose a name."""
    try:
        found = renaming.rename(names, [change.rule for change in changes])
    except MigrationRefused:
        return None
    return ["" if name is None else name for name in found]  # None: an entry of a wrapper itself; no name is empty


def _prefix_changes(expected: Shapes, names: Sequence[str]) -> Iterator[Renames]:
    """Yield removals and then additions of a prefix under which some names match; those with most matches first."""
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
    """Yield the splits of a name at one of its first ``depth`` dots."""
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
    used |= {old for old, name in zip(found, chosen.names, strict=True) if not name}  # entries of wrappers
    unexpected = tuple(name for name in found if name not in used)
    target_wrapped = chosen.target is not expected
    return KeyMatch(pairs, tuple(missing), unexpected, tuple(reshaped), chosen.changes, rivals, target_wrapped)


def as_options(changes: Renames) -> str:
    """Return the options of ``ckptool migrate`` for the changes, as text for the shell."""
    return system.command_line(*(word for change in changes for word in change.arguments)) or "no change"


def in_order(changes: Renames, renames: Iterable[Rename]) -> Renames:
    """Insert renames into changes where migrate carries them out: after stripping and before adding prefixes."""
    at = sum(change.option != "add_prefix" for change in changes)
    return *changes[:at], *renames, *changes[at:]
