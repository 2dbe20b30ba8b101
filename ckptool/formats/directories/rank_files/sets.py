"""Which files in a folder the ranks of one save wrote, going by their names."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from ckptool.checkpoints.parsed import Traits
from ckptool.sources.folder import FolderSource

NAME: Final = "rank_files"
TRAITS: Final = Traits(has_tree=True, loader="torch.load() in as many processes as there are files")
_NAME: Final = re.compile(
    r"(?P<stem>.{0,200}?)(?:_?world_size_(?P<world>\d{1,6}))?_?rank[_-]?(?P<rank>\d{1,6})\.(?P<suffix>pt|pth|bin|ckpt)"
)


class Set(NamedTuple):
    """Files that differ in the rank of their name alone."""

    stem: str
    """What their names begin with: ``model``, ``optim``."""
    world: int | None
    """How many there are, by their names."""
    files: dict[int, str]
    """By rank."""


def sets_in(folder: FolderSource, inside: str) -> list[Set]:
    """Return the sets of files of ranks in a folder, those of models first."""
    found: dict[tuple[str, str, str], Set] = {}
    for name in folder.names(inside)[0]:
        match = _NAME.fullmatch(name)
        if match is not None:
            world = int(match["world"]) if match["world"] else None
            one = found.setdefault(
                (match["stem"], match["world"] or "", match["suffix"]), Set(match["stem"], world, {})
            )
            one.files.setdefault(int(match["rank"]), f"{inside}/{name}" if inside else name)
    return sorted(found.values(), key=lambda one: ("model" not in one.stem, one.stem))
