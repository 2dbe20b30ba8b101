"""
Applies a recipe to the weights of a checkpoint.

All rules match the original names, and are applied at once. A name that two rules match, a part that is missing, and a
name that no rule matches are refused, by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Final, NamedTuple, TypeAlias

from ckptool.cancellation import Cancellation, each
from ckptool.checkpoints.weights import Weights
from ckptool.errors import MigrationRefused
from ckptool.messages import counted, some
from ckptool.names.renaming import by_likeness
from ckptool.recipes.moves import Value, moved
from ckptool.recipes.recipe import Recipe, Rule, value_of
from ckptool.tensors.reading import LazyTensor

Bound: TypeAlias = tuple[tuple[str, str], ...]
"""The values of variables, each with its variable, without the variable of a list."""
_REST_HINT: Final = "Leave them out when it is migrated, `exclude=`; a recipe that says rest = 'keep' keeps them."


class Move(NamedTuple):
    """What a rule that does more than rename makes of tensors: names and shapes before and after."""

    does: str
    """The operations: ``stack 0, concat 1``."""
    before: tuple[tuple[str, tuple[int, ...]], ...]
    after: tuple[tuple[str, tuple[int, ...]], ...]


class Applied(NamedTuple):
    """Weights in another layout, and how they were made."""

    weights: Weights
    moves: tuple[Move, ...]
    notes: tuple[str, ...] = ()
    """A note on the names that the recipe left alone."""


class Made(NamedTuple):
    """One name of the other layout."""

    at: str
    """The old name whose place in the order it takes."""
    name: str
    sources: tuple[str, ...]
    tensor: LazyTensor | None
    """None if the tensor, or other value, of its source is only renamed."""


class _Taken(NamedTuple):
    """The names that a rule takes together: for each of its patterns, names by their numbers in a list, or one by 0."""

    rule: Rule
    bound: Bound
    names: list[dict[int, str]]


def apply_recipe(
    recipe: Recipe, weights: Weights, given: Mapping[str, int], cancellation: Cancellation | None = None
) -> Applied:
    """
    Return weights in the layout that a recipe makes of theirs; ``given`` are numbers for the recipe.

    Raises:
        MigrationRefused: The recipe matches none of the names; two rules match one; a part of a rule is missing; a name
            that must not stay is matched by no rule; shapes do not fit; or two tensors would have one name.
    """
    value = value_of(recipe, given)
    groups, rest = _groups(recipe, weights, cancellation)
    if not groups:
        names, takes = some(weights.names), [str(rule.sources[0]) for rule in recipe.rules if rule.only != "back"]
        fact = f"recipe {recipe.name!r} is about none of the {counted(len(weights.names), 'name')}: {names}"
        way = f"It goes from {recipe.sides[0]} to {recipe.sides[1]}; `reverse=True` is the other way. "
        hint = f"{way if all(recipe.sides) else ''}The names are to be as in its rules: {some(takes, 2)}."
        raise MigrationRefused(fact, kind="recipe-unmatched", hint=hint)
    if rest and not recipe.keeps_rest:
        fact = f"recipe {recipe.name!r} takes {len(weights.names) - len(rest):,} names, and not {some(rest)}"
        busy = {id(group.rule) for group in groups}
        idle = [str(one) for rule in recipe.rules if id(rule) not in busy and not rule.only for one in rule.sources]
        near = [f"Is {one!r} meant, which takes none? " for one in by_likeness(rest[0], idle)[:1]]
        raise MigrationRefused(fact, kind="recipe-rest", hint="".join([*near, _REST_HINT]))
    place = {name: number for number, name in enumerate(weights.names)}
    made, moves, dropped = list[Made](), list[Move](), list[str]()
    for group in each(groups, cancellation):
        columns = [[names[number] for number in sorted(names)] for names in group.names]
        sources = tuple(name for column in columns for name in column)
        if not group.rule.targets:
            dropped += [weights.old_names[name] for name in sources]
            continue
        outcome = list(_made(group, columns, weights, value))
        at = min(sources, key=place.__getitem__)
        each_own = group.rule.is_rename
        for number, (name, tensor) in enumerate(outcome):
            made.append(Made(at, name, (sources[number],) if each_own else sources, tensor))
        if not each_own:
            before = tuple((name, weights.tensors[name].shape) for name in sources)
            after = tuple((name, one.shape) for name, one in outcome if one is not None)
            moves.append(Move(group.rule.does, before, after))
    return put_together(recipe.name, weights, made, moves, rest, dropped)


def put_together(
    recipe: str,
    weights: Weights,
    made: Sequence[Made],
    moves: Sequence[Move],
    rest: Sequence[str],
    dropped: Sequence[str] = (),
) -> Applied:
    """
    Return the weights that were made, and the rest, in the order of the source.

    Raises:
        MigrationRefused: Two would have one name.
    """
    kept = f"recipe {recipe!r} leaves {counted(len(rest), 'name')} alone: {some(rest)}" if rest else ""
    place = {name: number for number, name in enumerate(weights.names)}
    whole = sorted([*made, *(Made(name, name, (name,), None) for name in rest)], key=lambda one: place[one.at])
    tensors: dict[str, LazyTensor] = {}
    others = dict[str, object]()
    old_names: dict[str, str] = {}
    made_of: dict[str, tuple[str, ...]] = {}
    for _, name, sources, tensor in whole:
        if name in old_names:
            twins = f"{old_names[name]!r} and {weights.old_names[sources[0]]!r}"
            raise MigrationRefused(f"{twins} would both be called {name!r}", kind="name-collision")
        old_names[name] = weights.old_names[sources[0]]
        known = weights.tensors.get(sources[0])
        one = known if tensor is None else tensor
        if one is None:
            others[name] = weights.others[sources[0]]
        else:
            tensors[name] = LazyTensor(name, one.info)
        if one is not known or sources[0] in weights.made_of:
            parts = (weights.made_of.get(source, (weights.old_names[source],)) for source in sources)
            made_of[name] = tuple(chain.from_iterable(parts))
    found = weights._replace(
        tensors=tensors,
        others=others,
        modules={},  # which are different modules now
        old_names=old_names,
        made_of=made_of,
        dropped=(*weights.dropped, *dropped),
        assumed={},
    )
    return Applied(found, tuple(moves), (kept,) if kept else ())


def _groups(recipe: Recipe, weights: Weights, cancellation: Cancellation | None) -> tuple[list[_Taken], list[str]]:
    """Return the names that rules take together, and those that no rule takes."""
    plain: dict[str, list[tuple[int, int]]] = {}
    others: list[tuple[int, int]] = []
    for number, rule in enumerate(recipe.rules):
        if rule.only == "back":
            continue
        for index, pattern in enumerate(rule.sources):
            (others if pattern.variables else plain.setdefault(pattern.text, [])).append((number, index))
    groups: dict[tuple[int, Bound], _Taken] = {}
    rest: list[str] = []
    for name in each(weights.names, cancellation):
        taken = -1
        for number, index in (*plain.get(name, ()), *others):
            rule = recipe.rules[number]
            pattern = rule.sources[index]
            found = pattern.match(name)
            if found is None:
                continue
            if taken >= 0:
                rules = f"{recipe.rules[taken]} and {rule}"
                raise MigrationRefused(f"two rules of {recipe.name!r} take {name!r}: {rules}", kind="recipe-overlap")
            taken = number
            at = int(found.pop(pattern.many)) if pattern.many else 0
            bound = tuple(sorted(found.items()))
            group = groups.setdefault((number, bound), _Taken(rule, bound, [{} for _ in rule.sources]))
            group.names[index][at] = name
        if taken < 0:
            rest.append(name)
    for group in groups.values():
        _refuse_missing(recipe, group)
    return list(groups.values()), rest


def _refuse_missing(recipe: Recipe, group: _Taken) -> None:
    """Raise MigrationRefused if a part of what a rule takes together is missing."""
    last = max(max(names) for names in group.names if names)
    wanted = range(last + 1)
    for pattern, names in zip(group.rule.sources, group.names, strict=True):
        if len(names) == len(wanted):
            continue
        lacking = next(number for number in wanted if number not in names)
        bound = dict(group.bound) | ({pattern.many: str(lacking)} if pattern.many else {})
        there = next(iter(next(filter(None, group.names)).values()))
        fact = f"recipe {recipe.name!r} needs {pattern.name(bound)!r}, which is not there, beside {there!r}"
        raise MigrationRefused(fact, kind="recipe-missing", hint="Is a shard of it missing, or is it another layout?")


def _made(
    group: _Taken, columns: list[list[str]], weights: Weights, value: Value
) -> Iterator[tuple[str, LazyTensor | None]]:
    """Yield the new names of a group with their tensors; None for an entry that is not a tensor, and stays."""
    rule, bound = group.rule, dict(group.bound)
    if rule.is_rename:
        for target, column in zip(rule.targets, columns, strict=True):
            for number, name in enumerate(column):
                own = bound | ({target.many: str(number)} if target.many else {})
                yield target.name(own), weights.tensors.get(name)
        return
    if others := [name for column in columns for name in column if name not in weights.tensors]:
        raise MigrationRefused(f"{others[0]!r} is not a tensor, and can only be renamed", kind="recipe-not-plain")
    tensors = [[LazyTensor(name, weights.tensors[name].info) for name in column] for column in columns]
    found = moved(rule, tensors, value)
    for target, made in zip(rule.targets, found, strict=True):
        for number, tensor in zip(count(), made):
            own = bound | ({target.many: str(number)} if target.many else {})
            yield target.name(own), tensor


def moves_shown(moves: Sequence[Move]) -> Iterator[str]:
    """Yield a line for each kind of move that a recipe makes, with the first of its kind."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for number, move in enumerate(moves):
        shapes = [tuple(shape for _, shape in side) for side in (move.before, move.after)]
        kinds.setdefault((move.does, *shapes), []).append(number)
    for (does, *_), numbers in kinds.items():
        first = moves[numbers[0]]
        sides = [some([f"{name} {list(shape)}" for name, shape in side]) for side in (first.before, first.after)]
        more = f", and {len(numbers) - 1:,} more alike" if len(numbers) > 1 else ""
        yield f"{does}: {sides[0]} -> {sides[1]}{more}"
