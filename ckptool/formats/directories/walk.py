"""Find all checkpoints in and below a folder, or at an address; files that are one checkpoint together count as one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import Failure, FileUnavailable, LimitExceeded
from ckptool.formats import directories, filenames
from ckptool.sources.folder import FolderSource
from ckptool.sources.paths import IGNORED_FOLDERS, is_below, is_likely, is_likely_packed, is_remote

if TYPE_CHECKING:
    from ckptool.sources.address import Remote
    from ckptool.sources.remote_folder import RemoteFolder

Found: TypeAlias = tuple[str, bool]
"""A path, and whether its name is that of a checkpoint."""

_OF_BUCKET: Final = 3
"""Slashes in the address of a whole bucket."""
_SNAPSHOTS: Final = "snapshots"
_BLOBS: Final = "blobs"
"""The folder in the cache of a hub that the links in the snapshots lead to."""


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
            is_one = directories.is_one(folder)
        if is_one and not opens:
            yield place, True
        elif is_one:
            yield from _beside(place, passed)
        else:
            yield from files_of(place, folder.files)
            todo += reversed(list(_folders(place, folder)))
        passed += _passed(path, place, folder)


def _folders(place: str, folder: FolderSource) -> Iterator[str]:
    is_hub = _SNAPSHOTS in folder.folders
    for name in folder.folders:
        path = os.path.join(place, name)
        if not (name in IGNORED_FOLDERS or (is_hub and name == _BLOBS) or os.path.islink(path)):
            yield path


def _passed(root: str, place: str, folder: FolderSource) -> Iterator[str]:
    """Yield the folders that are not searched here, and not under another name below ``root``."""
    for name in folder.folders:
        path = os.path.join(place, name)
        if name in IGNORED_FOLDERS or (os.path.islink(path) and not is_below(root, path)):
            yield path


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
        is_part = name in filenames.POINTERS or (whole is not None and name in whole.files)
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
    from ckptool.sources.address import HUB, STORES
    from ckptool.sources.remote import hub  # imported only when an address is given

    if address.scheme == HUB and address.partition("://")[2].strip("/").count("/") == 1:
        yield from _of_repository(hub.listed(address))
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
    except FileUnavailable as error:
        if found is None or error.kind != "missing":
            yield place
        return
    except LimitExceeded:
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
            if directories.is_one(folder):
                yield folder.as_listed()
                continue
            for path, is_known in files_of(place, folder.files):
                name = path.removeprefix(place)
                if is_known and not name:
                    yield folder.as_listed()
                elif is_known:
                    yield folder.address_of(name)
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
