"""Persistent ids that do more than say where something is: loaders call what they hold, or methods of it."""

from __future__ import annotations

from typing import Final

from ckptool.pickles.nodes import Global, Inert

_BEFORE_ARGUMENTS: Final = 2
"""Parts of the id of what is to be called."""


def is_call(pid: Inert) -> bool:
    """Say whether the importer of ``torch.package`` calls what a persistent id holds."""
    return isinstance(pid, tuple) and len(pid) > _BEFORE_ARGUMENTS and pid[0] == "reduce_package"


def is_sourced_object(pid: Inert) -> bool:
    """Say whether the persistent id of a class with its source has something else in the place of the class."""
    if not isinstance(pid, tuple) or len(pid) != (4 if pid[:1] == ("module",) else 3):
        return False
    return pid[0] != "storage" and not isinstance(pid[-3], Global | str)
