"""Recipes: how the tensors of one layout become those of another, without computing anything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ckptool.recipes.find import AskedRecipe

NO_NUMBERS: Final[Mapping[str, int]] = MappingProxyType({})


def asked_recipe(
    given: str | os.PathLike[str] | None, numbers: Mapping[str, int], *, reverse: bool = False
) -> AskedRecipe | None:
    """
    Return the recipe that a caller asked for; None if for none: most ask for none, and import nothing of all this.

    Raises:
        ValueError: There are numbers, or ``reverse``, and no recipe.
        MigrationRefused: There is no such recipe, or no way back.
    """
    if given is None and not numbers and not reverse:
        return None
    from ckptool.recipes.find import asked

    return asked(given, numbers, reverse=reverse)
