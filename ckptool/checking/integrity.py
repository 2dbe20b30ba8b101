"""
``verify``: whether every byte matches its checksum; SHA-256 of a file; which tensors of a cut file are whole.

Large records are read by two threads through small buffers, so memory does not grow with the file. It needs no torch.

The items in the files of a directory (pieces of tensors, and values) are opened one by one in the order of the files,
compared with the index, and closed.

The same reading makes the SHA-256 of the file and the digest of its weights: tensors whose elements are contiguous in
the file are hashed on the way. Those of views in another order, of compressed members and of other files are read
again.

Of a file that was cut short, ``of_cut`` finds which tensors are complete, and how many bytes are missing. The index is
stored before the data in every format: the pickle of a torch zip or stream, the header of safetensors. If it is
complete, it says where each tensor was. The local headers of a zip are read one after the other, because its directory
was at the lost end. Nothing is repaired, and a tensor that is complete may still have wrong bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ckptool.archives.archive import Archive, Record, check_records
from ckptool.archives.zips import DESCRIPTOR_MAGIC, LOCAL, LOCAL_MAGIC
from ckptool.cancellation import Cancellation, each
from ckptool.checking.finding import MOST_FINDINGS, Finding, note
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.contents import collect
from ckptool.checkpoints.parsed import Parsed, Part
from ckptool.checkpoints.weights import digest_of, tensors_of
from ckptool.errors import CkptoolError, Failure, FileUnavailable
from ckptool.formats import safetensors, torch_legacy
from ckptool.formats.sharded import is_index
from ckptool.limits import Limits
from ckptool.messages import counted, some
from ckptool.pickles.nodes import Inert
from ckptool.pickles.reader import Pickle, read_pickle
from ckptool.sources.checksums import Take, checksum_of_range, checksums_of_file, read_once
from ckptool.sources.files import Origin, file_under, open_source
from ckptool.sources.source import Meter, ReadAhead, Source
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import StorageId, StorageRef, TensorInfo, TypedStorage, identity, storage_id, storages_of

if TYPE_CHECKING:
    from hashlib import _Hash as HASH


_AGAIN: Final = "Download the file again, or take it from a backup."
_ONCE_MORE = "Copy the file again, or take the folder from a backup."


class Integrity(NamedTuple):
    """The result of reading every byte."""

    findings: tuple[Finding, ...]
    records: int
    """Members of its archives; 0 if it is not an archive."""
    matching: int
    """How many of these members match their checksums."""
    parts: int
    """Pieces and values in the files of a directory, each with checksums of its own; their records count, too."""
    intact: int
    """How many of these were read, match their checksums, and are what the index says."""


def verify(checkpoint: Checkpoint, limits: Limits, meter: Meter, watch: Take | None = None) -> Integrity:
    """
    Read every byte of a checkpoint, and compare each record with its checksum. ``watch`` gets the opened file's bytes.

    Raises:
        CkptoolError: The file cannot be read any more, or changed meanwhile.
    """
    for one in (checkpoint.source, *(shard.source for shard in checkpoint.shards)):
        one.prefetch([(0, one.nbytes)])  # of a file far away, several parts are on their way while one is compared
    inside = _parts(checkpoint, limits, meter)
    files = {part.file for part in checkpoint.parts}
    for source in (checkpoint.source, *(shard.source for shard in checkpoint.shards if shard.name not in files)):
        if not any(archive.source is source for archive in checkpoint.archives):
            own = watch if source is checkpoint.source else None
            checksums_of_file(source, [(0, source.nbytes)], meter, own)  # only read: a bad disk raises an error
    findings = list(inside.findings)
    records, matching = inside.records, inside.matching
    bare: list[Record] = []
    for archive in checkpoint.archives:
        own = watch if archive.source is checkpoint.source else None
        damaged, without = check_records(archive, limits, meter, own)
        findings += [_damaged(checkpoint, archive, record, fact) for record, fact in damaged[:MOST_FINDINGS]]
        if len(damaged) > MOST_FINDINGS:
            more = f"{counted(len(damaged) - MOST_FINDINGS, 'record')} more do not match their checksums"
            findings.append(note("CK105", more, _AGAIN))
        bare += without
        records += len(archive)
        matching += len(archive) - len(damaged) - len(without)
    checkpoint.check_unchanged()
    if bare:
        which = f"{counted(len(bare), 'record')} of {sum(record.nbytes for record in bare):,} bytes"
        findings.append(note("CK104", f"no checksum for {which}: a changed byte there would not show"))
    return inside._replace(findings=tuple(findings), records=records, matching=matching)


def _damaged(checkpoint: Checkpoint, archive: Archive, record: Record, fact: str) -> Finding:
    """CK105: a record that is not what was saved."""
    shard = next((one.name for one in checkpoint.shards if one.source is archive.source), None)
    inside = [
        tensor.name
        for tensor in (*checkpoint.tensors.values(), *checkpoint.attributes.values())
        if checkpoint.shard_of.get(tensor.name) == shard and _lies_in(tensor.info, archive, record)
    ]
    where = f"shard {shard!r}: " if shard is not None else ""
    return note("CK105", f"{where}{fact}{'; it holds ' + some(inside) if inside else ''}", _AGAIN)


def _lies_in(info: TensorInfo, archive: Archive, record: Record) -> bool:
    """Return whether a tensor, or a part of it, is in a record."""
    for storage in storages_of([info]):
        if record.compression != "stored":
            if storage.crc32 == record.crc32 and storage.nbytes == record.nbytes:
                return True
        elif storage.source is archive.source and storage.offset == record.offset:
            return True
    return False


def _parts(checkpoint: Checkpoint, limits: Limits, meter: Meter) -> Integrity:
    """Read every part, and compare its records with their checksums and its tensor with the index."""
    findings: list[Finding] = []
    parts = intact = records = matching = bare = 0
    for part in each(checkpoint.parts, limits.cancellation):
        parts += 1
        try:
            parsed = part.open()
        except FileUnavailable:
            continue  # another finding reports the missing file
        except Failure as error:
            is_lacking = error.kind == "missing-package"
            own = note("CK113", error.message, error.hint, error.command) if is_lacking else None
            findings.append(own or _finding("CK143", part, f"it cannot be read: {error.message}"))
            continue
        found: list[Finding] = []
        for archive in parsed.archives:
            damaged, without = check_records(archive, limits, meter)
            found += [_finding("CK105", part, fact) for _, fact in damaged]
            records += len(archive)
            matching += len(archive) - len(damaged) - len(without)
        storage = info.storage if not parsed.archives and (info := parsed.tensor()) is not None else None
        if storage is not None:  # only read: a bad disk raises an error
            checksum_of_range(storage.source, storage.offset, storage.offset + storage.nbytes)
            bare, parts = bare + 1, parts - 1
        what = part.contradiction(parsed) if not found and part.contradiction is not None else None
        if what is not None:
            found.append(_finding("CK143", part, f"it {what}, as the index says"))
        elif not found and part.twin is not None and not _are_equal(parsed, part.twin()):
            fact = f"{part.what}: the copy in {part.file!r} is not equal to that of the first rank, which is taken"
            hint = "Each rank may have had values of its own: compare them where the model is."
            found.append(note("CK144", fact, hint))
        intact += storage is None and (not found or found[0].code == "CK144")
        findings += found
    if len(findings) > MOST_FINDINGS:
        more = f"{counted(len(findings) - MOST_FINDINGS, 'item')} more are damaged, or not what the index says"
        findings[MOST_FINDINGS:] = [note("CK105", more, _ONCE_MORE)]
    if bare:
        findings.append(note("CK104", f"no checksum for {counted(bare, 'item')}: a changed byte there would not show"))
    return Integrity(tuple(findings), records, matching, parts, intact)


def _are_equal(one: Parsed, other: Parsed) -> bool:
    first, second = one.tensor(), other.tensor()
    if first is not None and second is not None:
        return first.shape == second.shape and LazyTensor("", first).read() == LazyTensor("", second).read()
    streams = [
        [stream.source.read(stream.start, stream.end - stream.start) for stream in by.streams] for by in (one, other)
    ]
    return streams[0] == streams[1]


def _finding(code: str, part: Part, fact: str) -> Finding:
    return note(code, f"the item of {part.what} in {part.file!r}: {fact}", _ONCE_MORE)


Range: TypeAlias = tuple[int, int, tuple[object, ...]]
"""The bytes of the file where a tensor begins and ends, and the identity of the tensor."""


class Hashing:
    """Hashes the bytes of a file as they are read in order: all of them, and those of each tensor."""

    def __init__(self, checkpoint: Checkpoint, limits: Limits) -> None:
        self._checkpoint = checkpoint
        self._limits = limits
        self._file = sha256()
        self._seen = 0
        is_one = not (checkpoint.shards or checkpoint.parts) and checkpoint.source.file_offset(0) == 0
        self.watch = self._take if is_one else None
        """To be called with each piece of the file; None if the checkpoint is not one file."""
        self._waiting: list[Range] = []
        """Ranges that were not reached yet; the first one is last."""
        self._within: list[tuple[Range, HASH]] = []
        self._known: dict[tuple[object, ...], str] = {}
        self._error: CkptoolError | None = None
        try:
            tensors = tensors_of(checkpoint, limits)
        except Failure as error:
            self._error = error
        else:
            self._waiting = sorted(self._ranges(tensors.values()), key=lambda one: one[0], reverse=True)

    def _ranges(self, tensors: Iterable[LazyTensor]) -> Iterable[Range]:
        for info in {identity(one.info): one.info for one in tensors}.values():
            storage = info.storage
            if storage is None or not info.nbytes or not info.is_as_stored:
                continue
            if info.dtype.packed > 1 and info.storage_offset:
                continue  # several elements are in a byte, and the first one may be within it
            under = file_under(storage.source, storage.offset)
            if under is not None and under[0] is self._checkpoint.source:
                start = under[1] + info.storage_offset * info.dtype.itemsize
                yield start, start + info.nbytes, identity(info)

    def _take(self, start: int, piece: memoryview) -> None:
        if start < self._seen:  # read before, for another archive in the same file
            return
        stop = self._seen = start + len(piece)
        self._file.update(piece)
        while self._waiting and self._waiting[-1][0] < stop:
            self._within.append((self._waiting.pop(), sha256()))
        for one, found in self._within:
            found.update(piece[max(one[0] - start, 0) : one[1] - start])
        if any(one[1] <= stop for one, _ in self._within):
            self._known.update((one[2], found.hexdigest()) for one, found in self._within if one[1] <= stop)
            self._within = [pair for pair in self._within if pair[0][1] > stop]

    def finish(self) -> tuple[str | None, str | None, CkptoolError | None]:
        """
        Return the SHA-256 of the file, the digest of the weights, and the error that says why there is no digest.

        The first is None if the checkpoint is several files. Bytes that were not hashed on the way are read now.
        """
        content, error = None, self._error
        if self.watch is not None:
            if self._seen != self._checkpoint.source.nbytes:
                read_once(self._checkpoint.source, self.watch)
            content = self._file.hexdigest()
        try:
            digest = digest_of(self._checkpoint, self._limits, hashed=self._known) if error is None else None
        except Failure as failure:
            digest, error = None, failure
        return content, digest, error


def sha256_of(origin: Origin, cancellation: Cancellation | None = None) -> str | None:
    """
    Return the SHA-256 of a file, as ``sha256sum`` prints it; None if it cannot be read, or is not all that was checked:
    a folder, an index of other files.
    """
    try:
        source, _ = open_source(origin, cancellation)
        found = sha256()
        with closing(source):
            if is_index(source):
                return None
            read_once(source, lambda _, piece: found.update(piece))
        return found.hexdigest()
    except Failure:
        return None


_SEARCHED: Final = 1 << 16
_MOST_SEARCHES: Final = 1000


def of_cut(origin: Origin, limits: Limits) -> tuple[Finding, ...]:
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
                places = safetensors.places(source)
                are_whole = {name: end <= source.nbytes for name, (_, end) in places.items()}
                return (_of_cut(source.nbytes, are_whole, places.values()),)
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
    yield _located(source, tree, announced, places, limits)


def _zip(source: Source, limits: Limits) -> Iterator[Finding]:
    """Read the local headers of a torch zip from its beginning; its pickle gives the sizes of its records."""
    ahead, position, searches = ReadAhead(source), 0, 0
    tree: Pickle | None = None
    announced: dict[str, StorageId] = {}
    places: dict[str, int] = {}
    for _ in range(limits.entries):
        header = ahead.read(position, LOCAL.size) if position + LOCAL.size <= source.nbytes else b""
        if not header.startswith(LOCAL_MAGIC):
            break
        *_, stored, _, name_n, extra_n = LOCAL.unpack(header)
        payload = position + LOCAL.size + name_n + extra_n
        if payload > source.nbytes:
            break
        name = str(ahead.read(position + LOCAL.size, name_n), "utf-8", "replace")
        folder, _, key = name.rpartition("/")
        end = payload + stored  # 0 bytes are stored if its writer did not know yet how many there would be
        if tree is None and name.endswith("data.pkl"):
            tree = read_pickle(source, payload)
            announced, end = _announced(tree), tree.end
        elif key in announced and folder.rpartition("/")[2] == "data":
            places[key], end = payload, payload + announced[key].nbytes
        near = source.read(end, min(4 + 24, source.nbytes - end)) if end < source.nbytes else b""
        starts = (at for at in (0, 16, 24) if near.startswith(LOCAL_MAGIC, at))
        behind = next((at for at in starts if not at or near.startswith(DESCRIPTOR_MAGIC)), None)
        if behind is None and near and searches < _MOST_SEARCHES:  # torch's files have five records of unknown size
            searches += 1
            behind = source.read(end, min(_SEARCHED, source.nbytes - end)).find(LOCAL_MAGIC)
        if behind is None or behind < 0:
            break
        position = end + behind
    if tree is not None:
        yield _located(source, tree, announced, places, limits)


def _announced(tree: Pickle) -> dict[str, StorageId]:
    found: dict[str, StorageId] = {}
    for node in tree.persistent_ids:
        named = storage_id(node.pid)
        if named is not None:
            found.setdefault(named.key, named)
    return found


def _located(
    source: Source, tree: Pickle, announced: dict[str, StorageId], places: dict[str, int], limits: Limits
) -> Finding:
    nbytes = source.nbytes

    def resolve(pid: Inert) -> TypedStorage | None:
        named = storage_id(pid)
        if named is None:
            return None
        offset = places.get(named.key, nbytes)  # what is in no known place is not there
        return TypedStorage(StorageRef(named.key, named.location, named.nbytes, source, offset), named.dtype)

    contents = collect(tree.root, Rebuilder(resolve), limits)

    def is_there(info: TensorInfo) -> bool:
        return all(one.offset + one.nbytes <= nbytes for one in storages_of([info]))

    ranges = [(begin := places.get(key, nbytes), begin + one.nbytes) for key, one in announced.items()]
    return _of_cut(nbytes, {name: is_there(info) for name, info in contents.tensors.items()}, ranges)


def _of_cut(nbytes: int, are_whole: Mapping[str, bool], ranges: Iterable[tuple[int, int]]) -> Finding:
    """CK106: which tensors are complete, and how many bytes of these ranges are after the end of the file."""
    lost = [name for name, is_whole in are_whole.items() if not is_whole]
    missing = sum(end - max(begin, min(nbytes, end)) for begin, end in ranges)
    what = f"{len(are_whole) - len(lost):,} of {len(are_whole):,} tensors are whole, {missing:,} bytes are missing"
    hint = "Download or copy the file again; nothing can bring back what is missing."
    return note("CK106", f"{what}{f': lost {some(lost)}' if lost else ''}", hint)
