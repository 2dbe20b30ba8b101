"""
The paths of a command: patterns, folders of many, addresses; which checkpoints they stand for.

Files that are one checkpoint together count as one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import CkptoolError, Failure, FileUnavailable, LimitExceeded, NotACheckpoint
from ckptool.formats import filenames
from ckptool.messages import counted
from ckptool.sources import HUB, STORES
from ckptool.sources.folder import FolderSource
from ckptool.sources.paths import (
    IGNORED_FOLDERS,
    POINTERS,
    file_of,
    is_below,
    is_likely,
    is_likely_packed,
    is_remote,
    shown_path,
)

if TYPE_CHECKING:
    from ckptool.sources.address import Remote
    from ckptool.sources.remote_folder import RemoteFolder

_PATTERN: Final = frozenset("*?[")
Found: TypeAlias = tuple[str, bool]
"""A path, and whether its name is that of a checkpoint."""

_OF_BUCKET: Final = 3
"""Slashes in the address of a whole bucket."""
_SNAPSHOTS: Final = "snapshots"
_BLOBS: Final = "blobs"
"""The folder in the cache of a hub that the links in the snapshots lead to."""


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
        self._seen: set[int] = set()  # hashes of paths: of millions of files, the paths would be too much

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
            elif os.path.isdir(path):
                yield from _in_folder(path, self.passed, opens=False, or_itself=are_asked)
            else:
                yield Target(path)

    def _at(self, address: str) -> Iterator[Target]:
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
    if "://" in path or _PATTERN.isdisjoint(path) or os.path.lexists(file_of(path)):
        return [path]
    from glob import glob  # shells do this, mostly

    return sorted(glob(path, recursive=True)) or [path]


def _in_folder(
    folder: str, passed: list[str] | None, *, opens: bool = True, or_itself: bool = True
) -> Iterator[Target]:
    """Yield the checkpoints in a folder and below; the folder itself if there are none."""
    for path, is_meant in checkpoints_below(folder, opens=opens, passed=passed):
        or_itself = False
        yield Target(path, is_meant)
    if or_itself:
        yield Target(os.path.join(folder, ""))


def checkpoints_below(path: str, *, opens: bool = True, passed: list[str] | None = None) -> Iterator[Found]:
    """
    Yield the path of every checkpoint in and below a folder, sorted in each folder, its files before its folders.

    Files whose names do not show what they are come, too: their content decides. Links to folders are not followed, and
    folders of version control and tools are left out; of these, ``passed`` gets those that lead out of ``path``, or
    contain what is not found otherwise. With ``opens``, folders that are checkpoints are opened to find what else is in
    them; otherwise the caller, who opens them, calls ``beside``.
    """
    todo = [path]
    passed = [] if passed is None else passed
    while todo:
        place = todo.pop()
        try:
            folder = FolderSource(place)
        except Failure:  # opening it reports why
            yield place, True
            continue
        with closing(folder):
            is_one = _is_one(folder)
        if is_one and not opens:
            yield place, True
        elif is_one:
            yield from _beside(place, passed)
        else:
            yield from files_of(place, folder.files)
            todo += reversed(list(_folders(place, folder)))
        for name in folder.folders:
            inside = os.path.join(place, name)
            if name in IGNORED_FOLDERS or (os.path.islink(inside) and not is_below(path, inside)):
                passed.append(inside)  # it is not found under another name, either


def _folders(place: str, folder: FolderSource) -> Iterator[str]:
    is_hub = _SNAPSHOTS in folder.folders
    for name in folder.folders:
        path = os.path.join(place, name)
        if not (name in IGNORED_FOLDERS or (is_hub and name == _BLOBS) or os.path.islink(path)):
            yield path


def _is_one(folder: FolderSource) -> bool:
    from ckptool.formats import directories  # a single file needs none of this

    return directories.is_one(folder)


def _beside(place: str, passed: list[str]) -> Iterator[Found]:
    """Yield a folder that is one checkpoint, and what else is in it."""
    from ckptool.formats import open_checkpoint

    yield place, True
    try:
        with open_checkpoint(place) as checkpoint:
            others = beside(checkpoint)
    except Failure:  # opening the folder raises the same
        others = inside_refused(place)
    for other in others:
        if os.path.isdir(other):
            yield from checkpoints_below(other, passed=passed)
        else:
            yield other, True


def beside(checkpoint: Checkpoint) -> list[str]:
    """Return the paths in the folder of a checkpoint that may be others: folders, and files by their names."""
    if checkpoint.beside and is_remote(checkpoint.path):
        far = ((one, is_likely(one.name)) for one in checkpoint.beside)
        return [one.path if is_file else f"{one.path}/" for one, is_file in far if is_file or one.nbytes is None]
    paths = [one.path for one in checkpoint.beside]
    return [path for path in paths if os.path.isdir(path) or is_likely(path)]


def inside_refused(place: str) -> list[str]:
    """Return the paths in a folder that cannot be opened as a checkpoint, as ``beside`` would."""
    try:
        folder = FolderSource(place)
    except Failure:
        return []
    with closing(folder):
        files = [path for path, is_known in files_of(place, folder.files) if is_known and path != place]
        return [*files, *_folders(place, folder)]


def files_of(place: str, files: Sequence[str]) -> Iterator[Found]:
    """Yield the checkpoints among the files of a folder, which itself stands for its only index, or set of shards."""
    together = [one for one in filenames.candidates(files) if one.kind != "file"]
    chosen = filenames.choose(files).candidates
    whole = together[0] if len(chosen) == 1 and together[:1] == list(chosen) else None
    indexes = [one.name for one in together if one.kind == "index"]
    if whole is not None:
        yield place, True
    for name in files:
        is_part = name in POINTERS or (whole is not None and name in whole.files)
        if is_part or any(filenames.belongs_to(index, name) for index in indexes):
            continue
        if whole is None or name != whole.name:
            yield os.path.join(place, name), is_likely_packed(name) or name in indexes


def checkpoints_at(address: Remote) -> Iterator[Remote]:
    """
    Yield the address of every checkpoint at an address, with its tag and its size if a listing has them.

    One listing shows what is below a prefix. Of files, only those with names of checkpoints come, as opening each takes
    a request; files that are one checkpoint together are one.

    What cannot be listed, or is empty, comes unchanged: opening it reports why.

    Raises:
        CkptoolError: The store or the hub cannot be reached.
    """
    from ckptool.sources.remote.opening import listed  # imported only when an address is given

    if address.scheme == HUB and address.partition("://")[2].strip("/").count("/") == 1:
        yield from _of_repository(listed(address))
    elif address.scheme in STORES:
        yield from _in_store(address)
    else:
        yield address


def _in_store(address: Remote) -> Iterator[Remote]:
    from ckptool.sources.remote.bucket import Bucket
    from ckptool.sources.remote_folder import open_prefix

    place = address if address.endswith("/") else address.elsewhere(f"{address}/")
    is_bucket = place.count("/") == _OF_BUCKET
    found = None if is_bucket else Bucket(address).find()
    if found is not None:
        yield address.as_listed(*found)
    try:
        folder = open_prefix(place)
    except (FileUnavailable, LimitExceeded) as error:
        if found is None or error.kind != "missing":
            yield place
        return
    is_empty = found is None
    for one in _below(folder, place):
        is_empty = False
        yield one
    if is_empty:
        yield place


def _below(outermost: RemoteFolder, address: Remote) -> Iterator[Remote]:
    todo = [(outermost, address)]
    while todo:
        folder, place = todo.pop()
        with closing(folder):
            if _is_one(folder):
                yield folder.as_listed()
                continue
            for path, is_known in files_of(place, folder.files):
                name = path.removeprefix(place)
                if is_known:
                    yield folder.address_of(name) if name else folder.as_listed()
            names = [name for name in folder.folders if name not in IGNORED_FOLDERS]
            todo += [(folder.below(name), place.elsewhere(f"{place}{name}/")) for name in reversed(names)]


def _of_repository(files: list[Remote]) -> Iterator[Remote]:
    """Yield the checkpoints among the files of a repository; an index stands for the shards beside it."""
    names = {str(one).rpartition("/")[2] for one in files}
    indexes = [one.name for one in filenames.candidates(sorted(names)) if one.kind == "index"]
    for one in files:
        name = one.rpartition("/")[2]
        if name in indexes or (is_likely(name) and not any(filenames.belongs_to(index, name) for index in indexes)):
            yield one
