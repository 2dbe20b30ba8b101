"""
By which renames and which recipe the weights of one checkpoint get the names and shapes of another.

Nothing is guessed by shapes alone, for q and k have one shape: a way is a few renames that wrappers and trainers make,
and one of the recipes that come with ckptool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import Weights
from ckptool.errors import Failure
from ckptool.messages import counted, some
from ckptool.names import matching
from ckptool.names.matching import KeyMatch, Renames, Shapes, is_benign
from ckptool.recipes.apply import Applied
from ckptool.recipes.find import AskedRecipe, named_recipes, read_recipe
from ckptool.recipes.recipe import Recipe

_SAMPLES: Final = 5
"""Names of each side that a recipe has to know before it is tried."""
_SIDES: Final = attrgetter("sources"), attrgetter("targets")


class Way(NamedTuple):
    """One way from the weights of a checkpoint to other names and shapes."""

    changes: Renames
    """What is done to the names first."""
    recipe: str | None
    reverse: bool
    matched: KeyMatch
    """How the outcome fits."""
    made: Mapping[str, object] = {}
    """What each tensor is made of."""

    @property
    def fits(self) -> bool:
        """Whether every name that is wanted has one candidate, and nothing is left over."""
        matched = self.matched
        is_clear = not (matched.unexpected or matched.reshaped or matched.alternatives or matched.target_wrapped)
        return is_clear and bool(matched.pairs) and all(map(is_benign, matched.missing))

    @property
    def options(self) -> str:
        """The options of ``migrate`` that go it."""
        given: list[tuple[str, str]] = []
        given += [(change.option, f"'{change.argument}'" if change.argument else "True") for change in self.changes]
        given += [("recipe", f"'{self.recipe}'")] if self.recipe else []
        given += [("reverse", "True")] if self.reverse else []
        return ", ".join(f"`{option}={value}`" for option, value in given) or "no change"

    @property
    def left(self) -> str:
        """What does not fit."""
        matched = self.matched
        missing = [name for name in matched.missing if not is_benign(name)]
        facts = [f"{counted(len(missing), 'name')} missing: {some(missing)}"] if missing else []
        facts += [f"{len(matched.unexpected):,} left over: {some(matched.unexpected)}"] if matched.unexpected else []
        odd = [f"{one.found_name} is {list(one.found)}, not {list(one.expected)}" for one in matched.reshaped]
        facts += [f"{len(odd):,} of another shape: {some(odd)}"] if odd else []
        ways = [matching.as_options(changes) for changes in (matched.changes, *matched.alternatives)]
        facts += [f"more than one way: {some(ways)}"] if matched.alternatives else []
        return "; ".join(facts) or "its wrappers"


def ways_to(checkpoint: Checkpoint, weights: Weights, expected: Shapes) -> list[Way]:
    """Return the ways that fit, each other than the others; if none does, the one that explains most, and fits not."""
    shapes = _shapes(weights)
    plain = matching.match(expected, shapes)
    best = Way(plain.changes, None, False, plain)
    if best.fits:
        return [best]
    fitting: list[Way] = []
    for recipe, reverse in _recipes(list(shapes), list(expected)):
        way = _way(checkpoint, weights, expected, recipe, reverse=reverse)
        if way is None:
            continue
        if way.fits and all(way.made != other.made for other in fitting):
            fitting.append(way)
        if len(way.matched.pairs) > len(best.matched.pairs):
            best = way
    return fitting or [best]


def _shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in weights.tensors.items()}


def _recipes(found: Sequence[str], expected: Sequence[str]) -> Iterator[tuple[Recipe, bool]]:
    """Yield the recipes, and whether they are reversed, that may be about names on both sides."""
    bare = matching.renamed(list(found), matching.wrappers_off(found)) or list(found)
    sides = [[names[len(names) * at // _SAMPLES] for at in range(_SAMPLES)] for names in (bare, expected) if names]
    for name in named_recipes() if len(sides) == 2 else ():
        recipe = read_recipe(name)
        for reverse in (False, True):
            try:
                turned = recipe.reversed if reverse else recipe
            except Failure:  # it has no way back
                continue
            patterns = [[one for rule in turned.rules for one in side(rule)] for side in _SIDES]
            pairs = zip(patterns, sides, strict=True)
            taken = [[any(one.match(name) is not None for one in own) for name in names] for own, names in pairs]
            if all(map(any if recipe.keeps_rest else all, taken)):
                yield turned, reverse


def _way(checkpoint: Checkpoint, weights: Weights, expected: Shapes, recipe: Recipe, *, reverse: bool) -> Way | None:
    """Return the way by a recipe: after the renames that its outcome shows to be needed; None if it is no way."""
    asked = AskedRecipe(recipe, {})
    changes = matching.wrappers_off(weights.tensors)
    for _ in range(2):
        renamed = _renamed(weights, changes)
        if renamed is None:
            return None
        try:
            applied = asked.applied(checkpoint, renamed)
        except Failure:
            return None
        matched = matching.match(expected, _shapes(applied.weights))
        if not matched.changes:
            return Way(changes, recipe.name, reverse, matched, _made(applied))
        changes = (*changes, *matched.changes)
    return None


def _renamed(weights: Weights, changes: Renames) -> Weights | None:
    names = matching.renamed(weights.names, changes)
    if names is None or not all(names):
        return None
    new = dict(zip(weights.names, names, strict=True))
    return weights._replace(
        tensors={new[name]: tensor for name, tensor in weights.tensors.items()},
        others={new[name]: node for name, node in weights.others.items()},
        old_names={new[name]: old for name, old in weights.old_names.items()},
    )


def _made(applied: Applied) -> dict[str, object]:
    """Return what each tensor is made of, and how."""
    does = {name: move.does for move in applied.moves for name, _ in move.after}
    weights = applied.weights
    return {name: (weights.made_of.get(name, old), does.get(name)) for name, old in weights.old_names.items()}
