"""All checkpoints at an address: in a prefix of a store and below it, in a repository of the hub, or the one file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Final

from ckptool.errors import FileUnavailable, LimitExceeded
from ckptool.formats import filenames
from ckptool.formats.directories import is_one, walk
from ckptool.sources.far_folder import FarFolder, open_prefix
from ckptool.sources.paths import UNTOLD, is_likely
from ckptool.sources.remote import hub
from ckptool.sources.remote.address import HUB, STORES, Remote
from ckptool.sources.remote.bucket import Bucket

_OF_BUCKET: Final = 3
"""Slashes in the address of a whole bucket."""


def checkpoints_at(address: Remote) -> Iterator[Remote]:
    """
    Yield the address of every checkpoint at an address, with its tag and its size where a list has them.

    What a prefix stands for is told by one listing. Of files only those come whose names are those of checkpoints, as
    each that is opened takes a request; files that are one checkpoint together are one.

    What cannot be listed, or has nothing in it, comes as it is: opening it says why.

    Raises:
        CkptoolError: The store or the hub cannot be asked.
    """
    if address.scheme == HUB and address.partition("://")[2].strip("/").count("/") == 1:
        yield from _of_repository(hub.listed(address))
    elif address.scheme in STORES:
        yield from _in_store(address)
    else:
        yield address


def _in_store(address: Remote) -> Iterator[Remote]:
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


def _below(outermost: FarFolder, address: Remote) -> Iterator[Remote]:
    todo = [(outermost, address)]
    while todo:
        folder, place = todo.pop()
        with closing(folder):
            if is_one(folder):
                yield folder.as_listed()
                continue
            for path, is_known in walk.files_of(place, folder.files):
                name = path.removeprefix(place)
                if is_known and not name:
                    yield folder.as_listed()
                elif is_known:
                    yield folder.address_of(name)
            names = [name for name in folder.folders if name not in UNTOLD]
            todo += [(folder.below(name), place.elsewhere(f"{place}{name}/")) for name in reversed(names)]


def _of_repository(files: list[Remote]) -> Iterator[Remote]:
    """Yield the checkpoints among the files of a repository; an index stands for the shards beside it."""
    names = {str(one).rpartition("/")[2] for one in files}
    indexes = [one.name for one in filenames.candidates(sorted(names)) if one.kind == "index"]
    for one in files:
        name = one.rpartition("/")[2]
        if name in indexes or (is_likely(name) and not any(filenames.belongs_to(index, name) for index in indexes)):
            yield one
