"""Find the checkpoints that paths stand for: files, patterns that no shell expanded, folders of many."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptool.errors import CkptoolError, Failure, NotACheckpoint
from ckptool.messages import counted
from ckptool.sources.paths import is_remote, shown_path

if TYPE_CHECKING:
    from ckptool.sources.address import Remote

_PATTERN: Final = frozenset("*?[")


class Target(NamedTuple):
    """One thing to open."""

    path: str
    is_meant: bool = True
    """Whether it was named, or has the name of a checkpoint; that another file is not one is not reported."""
    known: str | None = None
    """The version that results are already known for, if only its server knows whether it is the current one."""

    @property
    def shown(self) -> str:
        """The path to show, without secrets in an address."""
        return shown_path(self.path)

    def passes_over(self, error: CkptoolError) -> bool:
        """Return whether an error only means that a file among many is something else."""
        return not self.is_meant and means_other(type(error).__name__, error.kind)


def means_other(error: str | None, kind: str) -> bool:
    """Return whether an error of this class and kind means that a file is not a checkpoint."""
    return error in ("NotACheckpoint", "UnknownFormat") or kind == "empty"


def targets(paths: Sequence[str], *, recursive: bool = False, passed: list[str] | None = None) -> list[Target]:
    """
    Return what the paths stand for, in their order; the checkpoints of a folder come only once.

    A path that does not exist and contains ``*``, ``?`` or ``[`` is a pattern; ``**`` is folders at any depth. With
    ``recursive``, a folder stands for every checkpoint in it and below; folders that are not searched are added to
    ``passed``.
    """
    found: list[Target] = []
    for path in paths:
        for one in matches(path):
            if recursive and os.path.isdir(one):
                known = {target.path for target in found}
                found += (target for target in _in_folder(one, passed) if target.path not in known)
            else:
                found.append(Target(one))
    return found


class Listing:
    """What paths stand for and, of folders, every checkpoint in them and below, each once, found when requested."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._far: Remote | None = None
        """How to reach addresses that were found beside others."""
        self._targets = self._each(one for path in paths for one in matches(path))
        self._beside: list[str] = []
        self.passed: list[str] = []
        """Folders that were not searched."""
        self._seen: set[int] = set()

    def add(self, paths: Iterable[str]) -> None:
        """Add paths to the list: what was found beside a checkpoint when it was opened."""
        self._beside += paths

    def next(self) -> Target | None:
        """Return the next target; None if there is none now."""
        while True:
            target = next(self._targets, None)
            if target is None and self._beside:
                self._targets, self._beside = self._each(self._beside, are_asked=False), []
                continue
            place = hash(os.path.abspath(target.path)) if target is not None else 0
            if place not in self._seen or target is None:
                self._seen.add(place)
                return target

    def _each(self, paths: Iterable[str], *, are_asked: bool = True) -> Iterator[Target]:
        for path in paths:
            if is_remote(path):
                yield from self._at(path)
                continue
            if not os.path.isdir(path):
                yield Target(path)
                continue
            yield from _in_folder(path, self.passed, opens=False, or_itself=are_asked)

    def _at(self, address: str) -> Iterator[Target]:
        from ckptool.formats.directories.walk import checkpoints_at
        from ckptool.sources.address import Remote

        if isinstance(address, Remote):
            self._far = address
        try:
            yield from map(Target, checkpoints_at(self._far.elsewhere(address) if self._far else Remote(address)))
        except Failure:  # opening it reports why
            yield Target(address)


def refuse_others(passed: int, paths: Iterable[str]) -> None:
    """Raise NotACheckpoint for ``passed`` files of which none is a checkpoint."""
    fact = f"no checkpoint among {counted(passed, 'file')}"
    raise NotACheckpoint(fact, kind="no-checkpoint", path=", ".join(map(shown_path, paths)))


def matches(path: str) -> list[str]:
    """Return the paths that a pattern matches, sorted; the path itself if it is not a pattern, or nothing matches."""
    if "://" in path or _PATTERN.isdisjoint(path) or os.path.lexists(path.partition("::")[0]):
        return [path]
    from glob import glob  # shells do this, mostly

    return sorted(glob(path, recursive=True)) or [path]


def _in_folder(
    folder: str, passed: list[str] | None, *, opens: bool = True, or_itself: bool = True
) -> Iterator[Target]:
    """Yield the checkpoints in a folder and below; the folder itself if there are none."""
    from ckptool.formats.directories.walk import checkpoints_below

    for path, is_meant in checkpoints_below(folder, opens=opens, passed=passed):
        or_itself = False
        yield Target(path, is_meant)
    if or_itself:
        yield Target(os.path.join(folder, ""))
