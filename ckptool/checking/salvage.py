"""
Finds what a file that was cut short still holds: which tensors are complete, and how many bytes are missing.

The index is stored before the data in every format: the pickle of a torch zip or stream, the header of safetensors.
If it is complete, it says where each tensor was. The local headers of a zip are read one after the other, because its
directory was at the lost end. Nothing is repaired, and a tensor that is complete may still have wrong bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Final

from ckptool.archives.zips import DESCRIPTOR_MAGIC, LOCAL, LOCAL_MAGIC
from ckptool.checking.finding import Finding, note
from ckptool.checkpoints.contents import collect
from ckptool.errors import Failure
from ckptool.formats import safetensors, torch_legacy
from ckptool.limits import Limits
from ckptool.messages import some
from ckptool.pickles.nodes import Inert
from ckptool.pickles.reader import Pickle, read_pickle
from ckptool.sources.files import Origin, open_source
from ckptool.sources.source import ReadAhead, Source
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import StorageId, StorageRef, TensorInfo, TypedStorage, storage_id, storages_of

_SEARCHED: Final = 1 << 16
_MOST_SEARCHES: Final = 1000


def examine(origin: Origin, limits: Limits) -> tuple[Finding, ...]:
    """CK106: which tensors of a file that was cut short are complete; nothing for files that cannot be followed."""
    try:
        source, _ = open_source(origin, limits.cancellation)
        with closing(source):
            head = source.read(0, min(64, source.nbytes))
            if head.startswith(LOCAL_MAGIC):
                return tuple(_zip(source, limits))
            if torch_legacy.is_legacy(head):
                return tuple(_legacy(source, limits))
            if safetensors.is_safetensors(source, head):
                return tuple(_safetensors(source))
    except Failure:
        pass
    return ()


def _legacy(source: Source, limits: Limits) -> Iterator[Finding]:
    pickles = [read_pickle(source)]
    for _ in range(4):
        pickles.append(read_pickle(source, pickles[-1].end))
    tree, keys = pickles[3:]
    announced = _announced(tree)
    position = keys.end
    places: dict[str, int] = {}
    for key in keys.root if isinstance(keys.root, list) else ():
        if str(key) in announced and str(key) not in places:
            places[str(key)] = position + 8
            position += 8 + announced[str(key)].nbytes
    yield _found(source, tree, announced, places, limits)


def _zip(source: Source, limits: Limits) -> Iterator[Finding]:
    """Read the local headers of a torch zip from its beginning; its pickle gives the sizes of its records."""
    walk = _LocalHeaders(source)
    tree: Pickle | None = None
    announced: dict[str, StorageId] = {}
    places: dict[str, int] = {}
    for _, (name, payload) in zip(range(limits.entries), walk, strict=False):
        if tree is None and name.endswith("data.pkl"):
            tree = read_pickle(source, payload)
            announced = _announced(tree)
            walk.go_on(tree.end)
            continue
        folder, _, key = name.rpartition("/")
        if key in announced and folder.rpartition("/")[2] == "data":
            places[key] = payload
            walk.go_on(payload + announced[key].nbytes)
    if tree is not None:
        yield _found(source, tree, announced, places, limits)


class _LocalHeaders:
    """
    The local headers of a zip, one after the other, as ``(name, offset of the payload)``.

    A header lacks the size if its writer did not know it yet: then ``go_on`` says where the payload ends, or the next
    header is searched for nearby.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._ahead = ReadAhead(source)
        self._next = 0
        self._searches = 0

    def go_on(self, end: int) -> None:
        """Look for the next header at ``end``, where the payload ends."""
        self._next = end

    def __iter__(self) -> Iterator[tuple[str, int]]:
        position = 0
        while position + LOCAL.size <= self._source.nbytes:
            header = self._ahead.read(position, LOCAL.size)
            if not header.startswith(LOCAL_MAGIC):
                return
            _, _, _, _, _, _, _, stored, _, name_n, extra_n = LOCAL.unpack(header)
            payload = position + LOCAL.size + name_n + extra_n
            if payload > self._source.nbytes:
                return
            self._next = payload + stored
            yield str(self._ahead.read(position + LOCAL.size, name_n), "utf-8", "replace"), payload
            found = self._find(self._next)
            if found is None:
                return
            position = found

    def _find(self, start: int) -> int | None:
        """Return the offset of the next header, which may follow a data descriptor; None if none is found."""
        if start >= self._source.nbytes:
            return None
        near = self._source.read(start, min(4 + 24, self._source.nbytes - start))
        for behind in (0, 16, 24):
            if near.startswith(LOCAL_MAGIC, behind) and (not behind or near.startswith(DESCRIPTOR_MAGIC)):
                return start + behind
        self._searches += 1
        if self._searches > _MOST_SEARCHES:  # torch's files have five records of unknown size
            return None
        window = self._source.read(start, min(_SEARCHED, self._source.nbytes - start))
        at = window.find(LOCAL_MAGIC)
        return None if at < 0 else start + at


class _Announced:
    """Finds storages as the pickle describes them, whether their bytes are there or not."""

    def __init__(self, source: Source, announced: dict[str, StorageId], places: dict[str, int]) -> None:
        self._source = source
        self._announced = announced
        self._places = places

    def resolve(self, pid: Inert) -> TypedStorage | None:
        """Return a storage, placed at the end of the file if its place is not known."""
        named = storage_id(pid)
        if named is None:
            return None
        nbytes = named.nbytes
        offset = self._places.get(named.key, self._source.nbytes)
        return TypedStorage(StorageRef(named.key, named.location, nbytes, self._source, offset), named.dtype)


def _announced(tree: Pickle) -> dict[str, StorageId]:
    found: dict[str, StorageId] = {}
    for node in tree.persistent_ids:
        named = storage_id(node.pid)
        if named is not None:
            found.setdefault(named.key, named)
    return found


def _found(
    source: Source, tree: Pickle, announced: dict[str, StorageId], places: dict[str, int], limits: Limits
) -> Finding:
    contents = collect(tree.root, Rebuilder(_Announced(source, announced, places).resolve), limits)
    nbytes = source.nbytes

    def is_there(info: TensorInfo) -> bool:
        return all(one.offset + one.nbytes <= nbytes for one in storages_of([info]))

    ranges = [(begin := places.get(key, nbytes), begin + one.nbytes) for key, one in announced.items()]
    return _finding(nbytes, {name: is_there(info) for name, info in contents.tensors.items()}, ranges)


def _safetensors(source: Source) -> Iterator[Finding]:
    placed = safetensors.places(source)
    yield _finding(source.nbytes, {name: end <= source.nbytes for name, (_, end) in placed.items()}, placed.values())


def _finding(nbytes: int, are_whole: Mapping[str, bool], ranges: Iterable[tuple[int, int]]) -> Finding:
    """CK106: which tensors are complete, and how many bytes of these ranges are after the end of the file."""
    lost = [name for name, is_whole in are_whole.items() if not is_whole]
    missing = sum(end - max(begin, min(nbytes, end)) for begin, end in ranges)
    what = f"{len(are_whole) - len(lost):,} of {len(are_whole):,} tensors are whole, {missing:,} bytes are missing"
    hint = "Download or copy the file again; nothing can bring back what is missing."
    return note("CK106", f"{what}{f': lost {some(lost)}' if lost else ''}", hint)
