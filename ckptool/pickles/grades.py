"""The grade of a call by its name alone, from the tables of names; ``grading`` looks at the arguments, too."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, TypeAlias

from ckptool.pickles import dangerous_names as table
from ckptool.pickles import plain_names as plain
from ckptool.pickles.effects import How
from ckptool.pickles.reaching import canonical, is_pickler, listed, package_of, reaching

Grade: TypeAlias = Literal["data", "code", "system"]
"""It makes data; runs code of a package; runs commands or text, opens files or connections, changes the interpreter."""


@lru_cache(maxsize=1 << 12)
def is_plain(module: str, name: str) -> bool:
    """Say whether a call of this name only makes data, whatever its arguments are, as long as these are plain too."""
    full = canonical(module, name)
    return full in plain.PLAIN or _fits(full, name)


def _fits(name: str, qualified: str) -> bool:
    """Say whether a name is one of the many that only make data, and none that is known for something else."""
    return re.fullmatch(plain.PLAIN_PATTERN, name) is not None and reaching(name, qualified) is None


def is_known(name: str) -> bool:
    """Say whether this is a name of Python's library, or of what is known to reach the system."""
    return package_of(name) in table.STDLIB or listed(name) is not None


@lru_cache(maxsize=1 << 12)
def grade_of(name: str, qualified: str, how: How) -> tuple[Grade, str | None]:
    """Return how far a call of this name reaches, and why. ``qualified`` is the part of it below its module."""
    if name in plain.PLAIN or _fits(name, qualified):
        return "data", None
    if name in plain.HARMLESS:
        return "code", None
    reason = reaching(name, qualified)
    if reason or (how == "calls" and name in plain.CALLED_CLASSES):
        return "system", reason or table.LOADS
    package = package_of(name)
    if how == "calls" and is_class(name) and name.rpartition(".")[2] not in plain.ENUMERATIONS:
        return "system", table.UNKNOWN_TORCH if package == "torch" else table.UNKNOWN_NUMPY
    if re.fullmatch(plain.HARMLESS_PATTERN, name):
        return "code", None
    if package in table.STDLIB:  # also to build: some classes do much at their objects' end
        return "system", table.UNKNOWN_LIBRARY
    if is_pickler(name) and name.rpartition(".")[2] not in plain.WRITTEN_BY_PICKLERS:
        return "system", table.UNKNOWN_PICKLER
    if how != "builds" and package in ("torch", "numpy"):
        return "system", table.UNKNOWN_TORCH if package == "torch" else table.UNKNOWN_NUMPY
    return "code", None


@lru_cache(maxsize=1 << 12)
def is_class(name: str) -> bool:
    """Say whether this is a class of torch or numpy, and no error."""
    return re.fullmatch(plain.CLASSES, name) is not None and not name.endswith(("Error", "Warning", "Exception"))
