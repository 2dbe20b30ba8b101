"""Find a recipe by its name or path, and numbers for it beside a checkpoint, and apply it to weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import Weights
from ckptool.errors import MigrationRefused
from ckptool.formats.json_beside import object_beside, quantization_of
from ckptool.messages import some
from ckptool.names.renaming import by_likeness
from ckptool.recipes.apply import Applied, apply_recipe
from ckptool.recipes.of_transformers import applied_by_transformers
from ckptool.recipes.recipe import HINT, Recipe, recipe_of
from ckptool.sources.files import read_toml

_NAMED: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "named")
_SUFFIX: Final = ".toml"
_TRANSFORMERS: Final = "transformers:"
_SETTINGS: Final = ("config.json", "params.json")
_INSIDE: Final = ("text_config", "llm_config")
"""Keys under which settings of models for pictures and text have those of the language model."""


@dataclass(frozen=True)
class RequestedRecipe:
    """A recipe that a caller requested."""

    recipe: Recipe | Callable[[Checkpoint, Weights], Applied]
    """The recipe, or a function that applies it to the weights of a checkpoint."""
    numbers: Mapping[str, int]
    """Numbers that the caller gave."""

    def applied(self, checkpoint: Checkpoint, weights: Weights) -> Applied:
        """
        Return weights of a checkpoint in the layout of the recipe.

        Raises:
            MigrationRefused: What ``apply_recipe`` refuses; or a quantised weight would be more than renamed.
        """
        if isinstance(self.recipe, Recipe):
            given = {**settings_of(checkpoint), **self.numbers}
            found = apply_recipe(self.recipe, weights, given, checkpoint.source.cancellation)
        else:
            found = self.recipe(checkpoint, weights)
        moved = {one for parts in found.weights.made_of.values() for one in parts}
        quantised = quantization_of(checkpoint) if moved else None
        head = weights.state_dict.head
        bound = {one.name for one, _ in quantised.bound} if quantised is not None else set()
        bound |= {part for _, parts in quantised.bound for part in parts} if quantised is not None else set()
        if broken := [name for name in moved if head + name in bound]:
            fact = f"{broken[0]!r} is quantised, or is a scale: it can only be renamed"
            hint = "Write it with `dequantize=True` first, and give what comes out to the recipe."
            raise MigrationRefused(fact, kind="recipe-not-plain", hint=hint)
        return found


def named_recipes() -> list[str]:
    """Return the names of the recipes that come with ckptool."""
    return sorted(name[: -len(_SUFFIX)] for name in os.listdir(_NAMED) if name.endswith(_SUFFIX))


def read_recipe(given: str | os.PathLike[str]) -> Recipe:
    """
    Return the recipe with a name, or in a file of TOML.

    Raises:
        MigrationRefused: No recipe has the name.
        MalformedFile: The file is not a recipe.
        FileUnavailable: It cannot be read.
    """
    text = os.fspath(given)
    is_path = text.endswith(_SUFFIX) or os.path.basename(text) != text or not isinstance(given, str)
    if is_path:
        return _from_file(os.path.splitext(os.path.basename(text))[0], text)
    names = named_recipes()
    if text.startswith(_TRANSFORMERS):
        hint = "What it does is in the report of a migration with it, also of one that is only planned."
        raise MigrationRefused(f"{text!r} is made for each checkpoint", kind="no-such-recipe", hint=hint)
    if text not in names:
        near = f"The nearest are {some(by_likeness(text, names))}. " if names else ""
        hint = f"{near}A recipe of your own is a path that ends in '.toml'."
        raise MigrationRefused(f"there is no recipe {text!r}", kind="no-such-recipe", hint=hint)
    return _of_ours(text)


@cache  # many files may be compared with the results of all recipes
def _of_ours(name: str) -> Recipe:
    return _from_file(name, os.path.join(_NAMED, name + _SUFFIX))


def _from_file(name: str, path: str) -> Recipe:
    def part(other: str) -> Recipe:
        if other not in named_recipes() or other == name:
            raise ValueError(f"a part is no recipe that comes with ckptool: {other!r}")
        return read_recipe(other)

    return recipe_of(name, read_toml(path, "bad-recipe", HINT), path, part)


def requested(
    given: str | os.PathLike[str] | None, numbers: Mapping[str, int], *, reverse: bool = False
) -> RequestedRecipe | None:
    """
    Return the requested recipe; None if none is requested.

    Raises:
        ValueError: There are numbers, or ``reverse``, and no recipe.
        MigrationRefused: There is no such recipe, or it cannot be reversed.
    """
    if given is None:
        if reverse or numbers:
            raise ValueError(f"{'reverse' if reverse else 'recipe_arguments'} is for a recipe, and there is none")
        return None
    if wrong := next((name for name, value in numbers.items() if type(value) is not int), None):
        raise ValueError(f"recipe_arguments are integers: {wrong}={numbers[wrong]!r}")
    is_made = isinstance(given, str) and given.startswith(_TRANSFORMERS)
    recipe = Recipe(os.fspath(given), ()) if is_made else read_recipe(given)
    if unknown := [name for name in numbers if name not in {*recipe.numbers, *recipe.lets}]:
        fact = f"recipe {recipe.name!r} has no number {unknown[0]!r}"
        raise MigrationRefused(fact, kind="recipe-number", hint=f"Its numbers are {some(recipe.numbers or ['none'])}.")
    if is_made:
        return RequestedRecipe(partial(_of_transformers, recipe.name, reverse), {})
    return RequestedRecipe(recipe.reversed if reverse else recipe, dict(numbers))


def _of_transformers(name: str, reverse: bool, checkpoint: Checkpoint, weights: Weights) -> Applied:
    """Return what transformers makes of the weights of the model type in the name of a recipe."""
    config = object_beside(checkpoint.path, checkpoint.source, _SETTINGS[0])
    if not config:
        fact = f"{name!r} needs config.json beside the file, and there is none"
        raise MigrationRefused(fact, kind="recipe-number", hint="Put the config.json of the model beside the file.")
    return applied_by_transformers(name.removeprefix(_TRANSFORMERS), weights, config, reverse=reverse)


def settings_of(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the integers in config.json, or params.json, beside a checkpoint, by name."""
    found: dict[str, int] = {}
    for name in _SETTINGS:
        settings = object_beside(checkpoint.path, checkpoint.source, name)
        inside = [settings.get(key) for key in _INSIDE]
        for one in (settings, *inside):
            if isinstance(one, Mapping):
                found |= {key: value for key, value in one.items() if type(value) is int and key not in found}
    return found
