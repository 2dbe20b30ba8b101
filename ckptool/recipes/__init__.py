"""Recipes: how the tensors of one layout become those of another."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ckptool.recipes.find import Layout

NO_NUMBERS: Final[Mapping[str, int]] = MappingProxyType({})


def requested_recipe(
    given: str | os.PathLike[str] | None, numbers: Mapping[str, int], *, reverse: bool = False
) -> Layout | None:
    """
    Return the requested recipe, or None if none is requested: most calls request none, and import nothing more.

    Raises:
        ValueError: There are numbers, or ``reverse``, and no recipe.
        MigrationRefused: There is no such recipe, or it cannot be reversed.
    """
    if given is None:
        if reverse or numbers:
            raise ValueError(f"{'reverse' if reverse else 'recipe_arguments'} is for a recipe, and there is none")
        return None
    from ckptool.recipes.find import requested

    return requested(given, numbers, reverse=reverse)
