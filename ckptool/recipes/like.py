"""
Finds the renames and recipes that give weights the names and shapes of another checkpoint.

Shapes alone decide nothing, as q and k have the same one: a way is a few renames that wrappers and trainers make, one
of the recipes that come with ckptool, or two in a row, and again a few renames.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from glob import escape
from itertools import islice, takewhile
from typing import Final, NamedTuple, TypeAlias

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import NameChanges, Weights, choose, prepare
from ckptool.errors import Failure, MigrationRefused, about
from ckptool.formats import open_checkpoint
from ckptool.formats.json_beside import object_beside
from ckptool.messages import as_path, counted, some
from ckptool.names import matching
from ckptool.names.matching import KeyMatch, Rename, Renames, Shapes, is_benign
from ckptool.names.patterns import Pattern
from ckptool.names.renaming import matches
from ckptool.recipes import NO_NUMBERS
from ckptool.recipes.apply import Applied, Move
from ckptool.recipes.find import applied, named_recipes, read_recipe, settings_of
from ckptool.recipes.recipe import Recipe

_SAMPLES: Final = 5
"""Names of each side that a recipe has to match before it is tried."""
_LONGEST: Final = 64
"""Most characters of a model type."""
_DEEPEST: Final = 3
"""Most leading components of all names that a recipe may lack."""
Made: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
"""The names that a tensor is made of, and what is done to them."""


class Step(NamedTuple):
    """A recipe on a way."""

    recipe: Recipe
    """In the direction of the way."""
    reverse: bool
    numbers: Mapping[str, int]
    """Numbers to pass to it."""

    def patterns(self, *, to: bool) -> list[Pattern]:
        """Return the patterns of the names that it takes, or with ``to``, of those that it makes."""
        rules = [rule for rule in self.recipe.rules if rule.only != "back"]
        return [one for rule in rules for one in (rule.targets if to else rule.sources)]


class Route(NamedTuple):
    """One way from the weights of a checkpoint to other names and shapes."""

    changes: Renames
    """The renames before the recipes."""
    steps: tuple[Step, ...]
    then: Renames
    """The renames after the recipes."""
    matched: KeyMatch
    """How the result matches the other checkpoint."""
    made: Mapping[str, Made] = {}
    """What each tensor is made of."""
    exclude: tuple[str, ...] = ()
    """Globs of buffers that a model computes itself, and that the other checkpoint lacks."""
    lacks: str = ""
    """The error for a number that nothing gives, as text; empty if none is missing."""

    @property
    def fits(self) -> bool:
        """Whether every expected name has one candidate, and nothing is left over."""
        matched = self.matched
        is_clear = not (matched.reshaped or matched.alternatives or self.lacks)
        return is_clear and bool(matched.pairs) and all(map(is_benign, (*matched.missing, *matched.unexpected)))

    @property
    def is_renaming(self) -> bool:
        """Whether it consists of the first renames alone."""
        return not (self.steps or self.matched.target_wrapped)

    def applied(self, checkpoint: Checkpoint, weights: Weights) -> Applied:
        """Return weights, which are renamed already, in the layout and with the names of the other checkpoint."""
        moves, notes = list[Move](), list[str]()
        for step in self.steps:
            weights, own, more = applied(step.recipe, step.numbers, checkpoint, weights)
            moves += own
            notes += more
        named = _named(weights, {found: name for name, found in self.matched.pairs.items()})
        return Applied(named, tuple(moves), tuple(notes))

    @property
    def options(self) -> str:
        """The options of ``migrate`` that do it; of several calls, one after another."""
        calls = [_said(self.changes)]
        calls[0] += [f"`exclude={list(self.exclude)}`"] if self.exclude else []
        for step in self.steps:
            given = [f"`recipe={step.recipe.name!r}`"]
            given += ["`reverse=True`"] if step.reverse else []
            given += [f"`recipe_arguments={dict(step.numbers)}`"] if step.numbers else []
            calls = [*calls, given] if step is not self.steps[0] else [calls[0] + given]
        last = _said(self.then) + (["its wrappers"] if self.matched.target_wrapped else [])
        return ", then ".join(", ".join(call) for call in (*calls, last) if call) or "no change"

    @property
    def left(self) -> str:
        """What does not fit, as text."""
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
        return "; ".join(facts)


def _said(changes: Renames) -> list[str]:
    return [f"`{one.option}='{one.argument}'`" if one.argument else f"`{one.option}=True`" for one in changes]


def route_to(checkpoint: Checkpoint, weights: Weights, like: str | os.PathLike[str], given: Mapping[str, int]) -> Route:
    """
    Return the one way to the names and shapes of another checkpoint; ``given`` are numbers for recipes.

    Raises:
        MigrationRefused: No known way leads there, or more than one.
        CkptoolError: The other cannot be read, or it is not clear which weights it has.
    """
    with open_checkpoint(like) as other, about(other.path):
        tensors = prepare(other, choose(other, None, "auto"), NameChanges()).tensors
        wanted = {name: tensor.shape for name, tensor in tensors.items()}
        said = {} if settings_of(checkpoint) else settings_of(other)
    way, *others = routes_to(checkpoint, weights, wanted, {**said, **given})
    if not others and way.fits:
        return way
    ways = [one.options for one in (way, *others)]
    fact = f"more than one way leads to the names of {as_path(other.path)}: {some(ways)}"
    if not way.fits:
        fact = f"no known way leads to the names of {as_path(other.path)}: with {way.options}, {way.left}"
    model_type = str(object_beside(checkpoint.path, checkpoint.source, "config.json").get("model_type"))
    is_type = model_type != "None" and len(model_type) < _LONGEST and model_type.replace("-", "_").isidentifier()
    known = f", and `recipe='transformers:{model_type}'` is transformers' own" if is_type else ""
    hint = f"Say which; 'ckptool recipe list' lists the layouts that are known{known}."
    raise MigrationRefused(fact, kind="not-alike", hint=hint)


def routes_to(
    checkpoint: Checkpoint, weights: Weights, expected: Shapes, numbers: Mapping[str, int] = NO_NUMBERS
) -> list[Route]:
    """
    Return the different ways that fit; if none does, the one that explains most.

    ``numbers`` are for recipes, in addition to those beside the checkpoint.
    """
    start = _Stage(checkpoint, weights, {name: ((old,), ()) for name, old in weights.old_names.items()})
    plain = start.way(expected)
    if plain.fits:
        return [plain]
    bare = start.renamed(matching.wrappers_off(weights.names)) or start
    steps: list[Step] = []
    for name in named_recipes():
        recipe = read_recipe(name)
        own = {one: value for one, value in numbers.items() if one in {*recipe.numbers, *recipe.lets}}
        steps.append(Step(recipe, False, own))
        with suppress(MigrationRefused):  # it has no way back
            steps.append(Step(recipe.reversed, True, own))
    wanted = _sample(expected)
    last = [step for step in steps if list(_seen_as(step.patterns(to=True), wanted, step.recipe))]
    ways = [one.way(expected) for one in _reached(bare, last)]
    if not any(way.fits or way.lacks for way in ways):
        hops = (hop for hop in _reached(bare, steps) if not hop.lacks)
        ways += [one.way(expected) for hop in hops for one in _reached(hop, last)]
    fitting: list[Route] = []
    for way in sorted(ways, key=lambda way: len(way.changes) + len(way.then)):
        if way.fits and all(way.made != other.made for other in fitting):
            fitting.append(way)
    lacking = [way for way in ways if way.lacks]
    best = max((plain, *ways), key=lambda way: len(way.matched.pairs))
    return [*fitting, *lacking] if fitting else lacking[:1] or [best]


def _sample(names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return a few of many names, and the components that all of them begin with."""
    listed = list(names)
    some_of = dict.fromkeys(listed[len(listed) * at // _SAMPLES] for at in range(_SAMPLES if listed else 0))
    parts = (name.split(".")[:-1] for name in listed)
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    return list(some_of), [column[0] for column in islice(columns, _DEEPEST)]


def _seen_as(patterns: Sequence[Pattern], sample: tuple[list[str], list[str]], recipe: Recipe) -> Iterator[Renames]:
    """Yield changes of prefixes after which a recipe matches names: none, some removed, or one of its own added."""
    names, begin = sample

    def knows(changes: Renames) -> bool:
        found = matching.renamed(names, changes) or []
        taken = (any(one.match(name) is not None for one in patterns) for name in found)
        return bool(found) and (any if recipe.keeps_rest else all)(taken)

    depths = range(len(begin) + 1)
    less = [(Rename("strip_prefix", ".".join(begin[:depth])),) if depth else () for depth in depths]
    known = [changes for changes in less if knows(changes)]
    heads = dict.fromkeys(one.text.partition(".")[0] for one in patterns if not known)
    more = ((Rename("add_prefix", head),) for head in heads if "{" not in head)
    yield from known or filter(knows, more)


class _Stage(NamedTuple):
    """Weights at one point of a way, and what each of them is made of."""

    checkpoint: Checkpoint
    weights: Weights
    made: Mapping[str, Made]
    changes: Renames = ()
    steps: tuple[Step, ...] = ()
    lacks: str = ""

    def renamed(self, changes: Renames) -> _Stage | None:
        names = matching.renamed(self.weights.names, changes)
        if names is None or not all(names):
            return None
        new = dict(zip(self.weights.names, names, strict=True))
        made = {new[name]: one for name, one in self.made.items()}
        return self._replace(weights=_named(self.weights, new), made=made, changes=(*self.changes, *changes))

    def after(self, step: Step) -> _Stage | None:
        """Return the weights after a recipe, or which number it lacks; None if it does not match them."""
        weights = self.weights._replace(old_names={name: name for name in self.weights.names}, made_of={})
        steps = (*self.steps, step)
        try:
            weights, moves, _ = applied(step.recipe, step.numbers, self.checkpoint, weights)
        except MigrationRefused as error:
            if error.kind != "recipe-number" or step.recipe.keeps_rest:
                return None
            return self._replace(steps=steps, lacks=f"{error.message}. {error.hint or ''}".rstrip())
        except Failure:
            return None
        does = {name: (move.does,) for move in moves for name, _ in move.after}
        made = dict[str, Made]()
        for name, old in weights.old_names.items():
            parts = [self.made[one] for one in weights.made_of.get(name, (old,))]
            own = dict.fromkeys(one for _, done in parts for one in done)
            made[name] = tuple(one for names, _ in parts for one in names), (*own, *does.get(name, ()))
        return self._replace(weights=weights, made=made, steps=steps)

    def way(self, expected: Shapes) -> Route:
        """Return the way to here, and how it fits."""
        if self.lacks:
            return Route(self.changes, self.steps, (), matching.by_name({}, {}), lacks=self.lacks)
        matched = matching.match(expected, {name: one.shape for name, one in self.weights.tensors.items()})
        made = {name: self.made[found] for name, found in matched.pairs.items()}
        # Globs of the buffers that are left over, by their names in the source, which match nothing that is used.
        left = [self.made[name][0][0] for name in matched.unexpected if is_benign(name)]
        taken = [one for names, _ in made.values() for one in names]
        exclude = tuple(dict.fromkeys(f"*{name.rpartition('.')[2]}" for name in left))
        if any(matches(glob, name) for glob in exclude for name in taken):
            exclude = tuple(map(escape, left))
        if self.steps or matched.target_wrapped:
            return Route(self.changes, self.steps, matched.changes, matched, made, exclude)
        return Route(matched.changes, (), (), matched, made, exclude)


def _reached(stage: _Stage, steps: Sequence[Step]) -> Iterator[_Stage]:
    """Yield the results of recipes that match the names; only before the first recipe may the prefix change."""
    names, gone = _sample(stage.weights.names), {step.recipe.name for step in stage.steps}
    for step in steps:
        for changes in _seen_as(step.patterns(to=False), names, step.recipe) if step.recipe.name not in gone else ():
            start = stage if not changes else stage.renamed(changes) if not gone else None
            if start is not None and (found := start.after(step)) is not None:
                yield found


def _named(weights: Weights, new: Mapping[str, str]) -> Weights:
    """Return weights under other names, for those that ``new`` has."""
    names = {name: new.get(name, name) for name in weights.names}
    if len(set(names.values())) < len(names):
        raise MigrationRefused("two of its names would be one", kind="name-collision")
    return weights._replace(
        tensors={names[name]: tensor for name, tensor in weights.tensors.items()},
        others={names[name]: node for name, node in weights.others.items()},
        old_names={names[name]: old for name, old in weights.old_names.items()},
        made_of={names[name]: parts for name, parts in weights.made_of.items()},
        modules={},
        assumed={},
    )
