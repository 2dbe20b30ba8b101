"""
By which renames and which recipe the weights of one checkpoint get the names and shapes of another.

Nothing is guessed by shapes alone, for q and k have one shape: a way is a few renames that wrappers and trainers make,
and one of the recipes that come with ckptool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from glob import escape
from itertools import islice, takewhile
from operator import attrgetter
from typing import Final, NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import Weights
from ckptool.errors import Failure, MigrationRefused
from ckptool.messages import counted, some
from ckptool.names import matching
from ckptool.names.matching import KeyMatch, Rename, Renames, Shapes, is_benign
from ckptool.names.renaming import matches
from ckptool.recipes import NO_NUMBERS
from ckptool.recipes.apply import Applied
from ckptool.recipes.find import AskedRecipe, named_recipes, read_recipe
from ckptool.recipes.recipe import Recipe

_SAMPLES: Final = 5
"""Names of each side that a recipe has to know before it is tried."""
_DEEPEST: Final = 3
"""Components that all names begin with, of which a recipe may know nothing."""
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
    exclude: tuple[str, ...] = ()
    """Globs of buffers that a model computes itself, and that the other has not."""
    numbers: Mapping[str, int] = NO_NUMBERS
    """What the recipe has to be told."""
    lacks: str = ""
    """Which number nothing says."""

    @property
    def fits(self) -> bool:
        """Whether every name that is wanted has one candidate, and nothing is left over."""
        matched = self.matched
        is_clear = not (matched.reshaped or matched.alternatives or matched.target_wrapped or self.lacks)
        return is_clear and bool(matched.pairs) and all(map(is_benign, (*matched.missing, *matched.unexpected)))

    @property
    def options(self) -> str:
        """The options of ``migrate`` that go it."""
        given: list[tuple[str, str]] = []
        given += [(change.option, f"'{change.argument}'" if change.argument else "True") for change in self.changes]
        given += [("recipe", f"'{self.recipe}'")] if self.recipe else []
        given += [("reverse", "True")] if self.reverse else []
        given += [("recipe_arguments", str(dict(self.numbers)))] if self.numbers else []
        given += [("exclude", str(list(self.exclude)))] if self.exclude else []
        return ", ".join(f"`{option}={value}`" for option, value in given) or "no change"

    @property
    def left(self) -> str:
        """What does not fit."""
        if self.lacks:
            return self.lacks
        matched = self.matched
        missing = [name for name in matched.missing if not is_benign(name)]
        facts = [f"{counted(len(missing), 'name')} missing: {some(missing)}"] if missing else []
        facts += [f"{len(matched.unexpected):,} left over: {some(matched.unexpected)}"] if matched.unexpected else []
        odd = [f"{one.found_name} is {list(one.found)}, not {list(one.expected)}" for one in matched.reshaped]
        facts += [f"{len(odd):,} of another shape: {some(odd)}"] if odd else []
        ways = [matching.as_options(changes) for changes in (matched.changes, *matched.alternatives)]
        facts += [f"more than one way: {some(ways)}"] if matched.alternatives else []
        return "; ".join(facts) or "its wrappers"


def ways_to(
    checkpoint: Checkpoint, weights: Weights, expected: Shapes, numbers: Mapping[str, int] = NO_NUMBERS
) -> list[Way]:
    """
    Return the ways that fit, each other than the others; if none does, the one that explains most, and fits not.

    ``numbers`` are for recipes, beside what the checkpoint says.
    """
    shapes = _shapes(weights)
    plain = matching.match(expected, shapes)
    best = Way(plain.changes, None, False, plain, exclude=_globs(plain, weights.old_names))
    if best.fits:
        return [best]
    fitting: list[Way] = []
    lacking: list[Way] = []
    for start in _starts(list(shapes)):
        for recipe, reverse in _recipes(matching.renamed(list(shapes), start) or [], list(expected)):
            way = _way(checkpoint, weights, expected, recipe, start, reverse=reverse, numbers=numbers)
            if way is None:
                continue
            if way.lacks:
                lacking.append(way)
            elif way.fits and all(way.made != other.made for other in fitting):
                fitting.append(way)
            elif len(way.matched.pairs) > len(best.matched.pairs):
                best = way
    return [*fitting, *lacking] if fitting else lacking[:1] or [best]


def _starts(names: list[str]) -> Iterator[Renames]:
    """Yield what may be taken off names before a recipe: wrappers, then components that all of them begin with."""
    wrappers = matching.wrappers_off(names)
    yield wrappers
    parts = [name.split(".") for name in matching.renamed(names, wrappers) or names]
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*(one[:-1] for one in parts), strict=False))
    common = [column[0] for column in islice(columns, _DEEPEST)]
    for depth in range(1, len(common) + 1):
        yield (*wrappers, Rename("strip_prefix", ".".join(common[:depth])))


def _globs(matched: KeyMatch, old_names: Mapping[str, str]) -> tuple[str, ...]:
    """Return globs of the buffers that are left over, as the source calls them; of nothing that is taken."""
    left = [old_names[name] for name in matched.unexpected if is_benign(name)]
    taken = [old_names[name] for name in matched.pairs.values()]
    short = dict.fromkeys(f"*{name.rpartition('.')[2]}" for name in left)
    if any(matches(glob, name) for glob in short for name in taken):
        return tuple(map(escape, left))
    return tuple(short)


def _shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in weights.tensors.items()}


def _recipes(found: Sequence[str], expected: Sequence[str]) -> Iterator[tuple[Recipe, bool]]:
    """Yield the recipes, and whether they are reversed, that may be about names on both sides."""
    sides = [[names[len(names) * at // _SAMPLES] for at in range(_SAMPLES)] for names in (found, expected) if names]
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


def _way(
    checkpoint: Checkpoint,
    weights: Weights,
    expected: Shapes,
    recipe: Recipe,
    changes: Renames,
    *,
    reverse: bool,
    numbers: Mapping[str, int],
) -> Way | None:
    """Return the way by a recipe: after the renames that its outcome shows to be needed; None if it is no way."""
    known = {*recipe.numbers, *recipe.lets}
    own = {name: value for name, value in numbers.items() if name in known}
    asked = AskedRecipe(recipe, own)
    for _ in range(2):
        renamed = _renamed(weights, changes)
        if renamed is None:
            return None
        try:
            applied = asked.applied(checkpoint, renamed)
        except MigrationRefused as error:
            if error.kind != "recipe-number" or recipe.keeps_rest:
                return None
            left = f"{error.message}. {error.hint or ''}".rstrip()
            return Way(changes, recipe.name, reverse, matching.by_name({}, {}), lacks=left)
        except Failure:
            return None
        matched = matching.match(expected, _shapes(applied.weights))
        if not matched.changes:
            exclude = _globs(matched, applied.weights.old_names)
            return Way(changes, recipe.name, reverse, matched, _made(applied), exclude, own)
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
