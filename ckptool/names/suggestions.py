"""
Guesses for names that do not match: the nearest name, and renames under which all names match.

The guesses are shown with the command that would carry them out; nothing acts on them.

Strategy of the renames:
1. Names are grouped by what they are without some of their numbers.
2. Groups are paired if they have tensors of the same shapes under the same numbers; among several, the most similar.
3. The differences of paired names become rules, each as general as possible without changing a name for the worse.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import chain, count, pairwise, product
from typing import Final, NamedTuple

from ckptool.names.matching import (
    SPELLINGS,
    Rename,
    Renames,
    Shape,
    Shapes,
    in_order,
    may_be_missing,
    renamed,
    unwrapped,
)
from ckptool.names.renaming import without_marked

_COMPARED = 64
_TRIES = 8
_MOST_NAMES: Final = 20_000
_LONGEST: Final = 256
_MOST_NUMBERS = 4
_MOST_RULES = 24
_TRIED = 128
_LIKE = 0.5
_NUMBER = re.compile(r"(\d+)")
_PART: Final = re.compile(r"(\A|\.)(parametrizations\.|weight\w*_(g|v|u|orig)\Z)")
"""Names of tensors that a weight is computed from, which is another tensor of the same shape."""
_PERMUTED: Final = frozenset({("wq", "q_proj"), ("wk", "k_proj")})
"""Names in Meta's and in Hugging Face's Llama: their rows are in another order, so these are different tensors."""


def nearest(missing: Iterable[str], expected: Shapes, unexpected: Iterable[str], found: Shapes) -> dict[str, str]:
    """Return the most similar unexpected name of equal shape for each missing name, if it has one."""
    wanted, left = {name: expected[name] for name in missing}, {name: found[name] for name in unexpected}
    return {} if _are_too_many(wanted, left) else {new: old for old, new in _targets(wanted, left).items()}


def guess_renames(expected: Shapes, found: Shapes, *, every: bool = True) -> Renames:
    """
    Return the fewest renames under which a checkpoint has every expected name, with its shape; empty if there are none.

    Buffers that a model computes itself may be missing. Unless ``expected`` and ``found`` are ``every`` name, rules
    that could change names that both have are left out. These are guesses for people to read.
    """
    ways: list[Renames] = []
    sides = [{component for name in names for component in name.split(".")} for names in (expected, found)]
    permuted = any(a in one and b in other for a, b in _PERMUTED for one, other in (sides, sides[::-1]))
    if permuted or _are_too_many(expected, found):
        return ()
    for changes, names in unwrapped(list(found)):
        have = {name: shape for name, shape in zip(names, found.values(), strict=True) if name}
        targets = _targets(expected, have)
        if any(bool(_PART.search(old)) is not bool(_PART.search(new)) for old, new in targets.items()):
            continue
        if all(map(may_be_missing, expected.keys() - targets.values())):
            rules = _rules(targets, have, expected, every=every)
            if rules:
                ways.append(in_order(changes, rules))
    return min(ways, key=len, default=())


def _are_too_many(*sides: Collection[str]) -> bool:
    return any(len(names) > _MOST_NAMES or any(len(name) > _LONGEST for name in names) for names in sides)


class _Group(NamedTuple):
    """Names that differ only in some of their numbers."""

    template: str
    names: Mapping[tuple[str, ...], str]
    """The names, by these numbers."""


def _targets(expected: Shapes, have: Shapes) -> dict[str, str]:
    """Return the expected name by each name that has one, or probably has one."""
    targets = {name: name for name, shape in have.items() if expected.get(name) == shape}
    missing = {name: shape for name, shape in expected.items() if name not in have}
    groups = _by_shapes(missing)
    others = _by_shapes({name: shape for name, shape in have.items() if name not in expected})
    taken: set[str] = set()
    signatures = sorted(groups.keys() & others.keys(), key=len, reverse=True)
    known = any(map(len, expected.values()))
    while True:
        before = len(targets)
        for signature in signatures:
            wanted, there = (
                [group for group in side if not any(name in used for name in group.names.values())]
                for side, used in ((groups[signature], taken), (others[signature], targets))
            )
            if len(wanted) * len(there) > _COMPARED**2:
                continue
            for new, old in _paired(wanted, there, known=known):
                fresh = {old.names[numbers]: name for numbers, name in new.names.items()}
                if not (targets.keys() & fresh.keys() or taken & set(fresh.values())):
                    targets.update(fresh)
                    taken.update(fresh.values())
        if len(targets) == before:
            return _without_disorder(targets)


def _without_disorder(targets: dict[str, str]) -> dict[str, str]:
    """Remove layers whose numbers would change their order: these are only similar."""
    families: dict[tuple[str, str], list[tuple[list[int], list[int], str]]] = {}
    for old, new in targets.items():
        before, after = ([int(number) for number in _NUMBER.findall(name)] for name in (old, new))
        families.setdefault((_NUMBER.sub("#", old), _NUMBER.sub("#", new)), []).append((before, after, old))
    for pairs in families.values():
        pairs.sort()
        if any(one[1] >= other[1] for one, other in pairwise(pairs)):
            for _, _, old in pairs:
                del targets[old]
    return targets


def _by_shapes(names: Shapes) -> dict[frozenset[tuple[tuple[str, ...], Shape]], list[_Group]]:
    """Return every group of names, by the shapes that its tensors have under each of the numbers."""
    groups: dict[str, dict[tuple[str, ...], str]] = {}
    for name in names:
        spelled = without_marked(name)
        for pattern, replacement in chain.from_iterable(SPELLINGS):  # in one spelling, where libraries have two
            spelled = re.sub(pattern, replacement, spelled)
        parts = _NUMBER.split(spelled)
        numbers = parts[1::2][-_MOST_NUMBERS:]
        for kept in product((False, True), repeat=len(numbers)):
            first = len(parts) - 2 * len(numbers)
            pairs = list(zip(kept, numbers, strict=True))
            parts[first::2] = [number if literal else "#" for literal, number in pairs]
            groups.setdefault("".join(parts), {})[tuple(number for literal, number in pairs if not literal)] = name
    found: dict[frozenset[tuple[tuple[str, ...], Shape]], list[_Group]] = {}
    for template, members in groups.items():
        signature = frozenset((numbers, names[name]) for numbers, name in members.items())
        found.setdefault(signature, []).append(_Group(template, members))
    return found


def _paired(wanted: list[_Group], there: list[_Group], *, known: bool) -> Iterator[tuple[_Group, _Group]]:
    """
    Yield pairs of groups that are more similar to each other than to any other, and in the same order on both sides.

    A group that is equally similar to two others is left out; if similarity and order disagree, all are.
    """
    pairs: list[tuple[int, int]] = []
    scores = {
        (new, old): _alike(wanted[new].template, there[old].template)
        for new in range(len(wanted))
        for old in range(len(there))
        if _may_be(wanted[new].template, there[old].template, known=known)
    }
    while scores:
        most = max(scores.values())
        best = [pair for pair, score in scores.items() if score == most]
        news, olds = Counter(new for new, _ in best), Counter(old for _, old in best)
        pairs += ((new, old) for new, old in best if news[new] == olds[old] == 1)
        scores = {(new, old): score for (new, old), score in scores.items() if new not in news and old not in olds}
    pairs.sort()
    if all(one[1] < other[1] for one, other in pairwise(pairs)):
        yield from ((wanted[new], there[old]) for new, old in pairs)


def _may_be(new: str, old: str, *, known: bool) -> bool:
    """Return whether two names may be of one tensor; ``known`` says that its shape is known."""
    if _NUMBER.sub("#", new) == _NUMBER.sub("#", old):
        return new == old
    reasons = (known, new.rpartition(".")[2] == old.rpartition(".")[2], _alike(new, old) >= _LIKE)
    return sum(reasons) > 1


@lru_cache(1 << 14)
def _alike(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()


def _rules(
    targets: Mapping[str, str], have: Collection[str], expected: Collection[str], *, every: bool
) -> list[Rename]:
    """Return rules that turn every name into its target, and no other name into an expected one; empty if none do."""
    by_template: dict[str, list[str]] = {}
    for name in have:
        by_template.setdefault(_NUMBER.sub("#", name), []).append(name)
    looked_at = {name for names in by_template.values() for name in (*names[:2], names[-1])}
    for _ in range(_TRIES):
        rules = _greedy([name for name in have if name in looked_at], targets, expected, every=every)
        names = renamed(list(have), tuple(rules)) if rules else None
        if names is None:
            return []
        wrong = [
            old
            for old, new in zip(have, names, strict=True)
            if (targets[old] != new if old in targets else new in expected)
        ]
        if not wrong:
            return rules
        looked_at.update(wrong[:_COMPARED])
    return []


def _greedy(
    order: Sequence[str], targets: Mapping[str, str], expected: Collection[str], *, every: bool
) -> list[Rename]:
    """Return rules for some names, each the one that brings them nearest to their targets in total."""
    now = {name: name for name in order}
    rules: list[Rename] = []
    while any(targets.get(name, new) != new for name, new in now.items()):
        kept = {re.escape(new.partition(".")[0]) for name, new in now.items() if targets.get(name, new) == new}
        away = Counter(
            rule for name, new in now.items() if name in targets for rule in _steps(new, targets[name], kept)
        )
        best: tuple[tuple[int, ...], Rename, dict[str, str]] | None = None
        for (pattern, replacement), _ in away.most_common(_TRIED):
            if not every and (pattern in ("^", r"\bweight$", r"\bbias$") or pattern.startswith("^(?!")):
                continue
            compiled = re.compile(pattern)
            after = {name: compiled.sub(replacement, new) for name, new in now.items()}
            fresh = [(now[name], new, targets.get(name)) for name, new in after.items() if new != now[name]]
            nearer = [_distance(old, to) - _distance(new, to) for old, new, to in fresh if to is not None]
            # A rule brings each name that it changes nearer to its target, and makes no expected name of another.
            is_clear = all(to is not None or new not in expected for _, new, to in fresh)
            if is_clear and nearer and min(nearer) > 0:
                done, gained = sum(new == to for _, new, to in fresh), sum(nearer)
                score = (gained, done, -len(pattern) - len(replacement))
                if best is None or score > best[0]:
                    best = score, Rename("rename", f"{pattern}={replacement}"), after
        if best is None or len(rules) == _MOST_RULES:
            return []
        rules.append(best[1])
        now = best[2]
    return rules


@lru_cache(1 << 14)
def _distance(one: str, other: str) -> int:
    mine, theirs = one.split("."), other.split(".")
    same = sum(block.size for block in SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks())
    return len(mine) + len(theirs) - 2 * same


def _steps(old: str, new: str, kept: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield regular expressions and replacements that turn one part of a name into the part of another name."""
    mine, theirs = old.split("."), new.split(".")
    for kind, i, k, m, n in SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        for left, right in product((0, 1), (0, 1)):
            if i >= left and m >= left and k + right <= len(mine) and n + right <= len(theirs):
                before, after = mine[i - left : k + right], theirs[m - left : n + right]
                yield from _as_rules(before, after, first=i == left, last=k + right == len(mine))
        if kind == "insert" and not i:
            but = f"(?!({'|'.join(sorted(kept))})\\b)" if kept else ""
            yield f"^{but}", f"{'.'.join(theirs[:n])}."
    if _NUMBER.findall(old) == _NUMBER.findall(new):
        yield from _as_rules(mine, theirs, first=True, last=True)


def _as_rules(old: Sequence[str], new: Sequence[str], *, first: bool, last: bool) -> Iterator[tuple[str, str]]:
    if not old:
        return
    before, after = ".".join(old), ".".join(new)
    pattern, replacement = re.escape(before), after.replace("\\", r"\\")
    if _NUMBER.findall(before) == _NUMBER.findall(after):
        groups = count(1)
        pattern = _NUMBER.sub(r"(\\d+)", pattern)
        replacement = _NUMBER.sub(lambda _: f"\\g<{next(groups)}>", replacement)
    if last:
        pattern = f"{pattern}$" if after else f"\\.{pattern}$"
    else:
        pattern, replacement = f"{pattern}\\.", f"{replacement}." if after else ""
    if first:
        yield f"^{pattern}", replacement
    if after or not last:
        yield f"\\b{pattern}", replacement
