"""
Which names are wanted: globs to include, and globs to exclude.

A glob is compared with the names of a state dict, or with full paths, which begin with the key of the state dict. Which
of the two is meant, the names that are there say; where they leave it open, it is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ckptool.errors import MigrationRefused
from ckptool.messages import some


class Filter(NamedTuple):
    """Globs that names are compared with, case and all; ``*`` also matches dots."""

    include: tuple[str, ...] = ()
    """Where there are any, a name has to match one of them."""
    exclude: tuple[str, ...] = ()

    @property
    def takes_all(self) -> bool:
        """Whether every name is wanted."""
        return not (self.include or self.exclude)

    def takes(self, name: str, key: str = "") -> bool:
        """Say whether a name of the state dict under ``key`` is wanted."""
        if self.include and not any(matches(glob, name, key) for glob in self.include):
            return False
        return not any(matches(glob, name, key) for glob in self.exclude)

    def read(self, names: Mapping[str, Collection[str]], *, prefers_full: bool = False) -> Filter:
        """
        Return these globs with a dot in front of those that mean full paths; ``names`` are those under each key.

        They are names of a state dict where they match one, unless full paths are preferred.

        Raises:
            MigrationRefused: One begins with a key, matches both, and not the same.
        """
        if self.takes_all or set(names) <= {""}:
            return self
        read = [tuple(_read(glob, names, prefers_full) for glob in globs) for globs in self]
        return Filter(*read)


def matches(glob: str, name: str, key: str = "") -> bool:
    """Say whether a glob matches a name; one that begins with a dot is compared with a dot and the full path, too."""
    from fnmatch import fnmatchcase  # most calls take all names, without asking

    is_full = glob.startswith(".") and fnmatchcase(f".{key}.{name}" if key else f".{name}", glob)
    return is_full or fnmatchcase(name, glob)


def matched(glob: str, names: Mapping[str, Collection[str]]) -> list[str]:
    """Return the full paths of the names that a glob matches."""
    return [f"{key}.{name}" if key else name for key, own in names.items() for name in own if matches(glob, name, key)]


def _read(glob: str, names: Mapping[str, Collection[str]], prefers_full: bool) -> str:
    if glob.startswith("."):
        return glob
    full, relative = matched(f".{glob}", names), matched(glob, names)
    if not full or full == relative:
        return glob
    if relative and any(key and glob.startswith(f"{key}.") for key in names):
        raise two_readings(glob, full, relative)
    return f".{glob}" if prefers_full or not relative else glob


def two_readings(text: str, full: Iterable[str], relative: Iterable[str]) -> MigrationRefused:
    """Return the error for a name, or a glob, that means one thing as a full path, and another inside a state dict."""
    one, other = some(list(map(repr, full))), some(list(map(repr, relative)))
    return MigrationRefused(
        f"{text!r} means {one} as a full path, and {other} as a name inside its state dict",
        kind="two-readings",
        hint=f"Write '.{text}' for the full path; or the other one with the key of its state dict in front.",
    )
