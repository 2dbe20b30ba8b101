"""
Finds the pickles in a file, whatever contains them, and lists what they would do.

``Search.anything`` detects what a source is: packed (gzip and the like, a zip, a tar), an array of numpy, JSON, or
pickles, each of which is read as far as possible, and judged. What is inside (members, strings of pickles) is searched
in the same way, one level deeper. Levels, time and memory are bounded by the size of the file itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, islice, repeat
from typing import Final, NamedTuple

from ckptool.archives import tars, zips
from ckptool.archives.archive import NUMPY, Archive
from ckptool.archives.compressed import (
    BEGINNINGS,
    LZMA,
    ZLIB,
    Compression,
    behind_length,
    compression_of,
    decompress_as_far,
    may_be_lzma,
    unpack,
)
from ckptool.archives.zips import END_MAGIC, LOCAL_MAGIC, SEVERAL
from ckptool.checkpoints.parsed import Part, Stream
from ckptool.errors import (
    Failure,
    FileUnavailable,
    LimitExceeded,
    MissingPackage,
    TruncatedFile,
    UnreadableFile,
    UnsupportedFeature,
)
from ckptool.formats import holders, other_programs
from ckptool.formats.runnable import Act, Name, Survey, place
from ckptool.formats.torch_legacy import LegacyStream, is_legacy
from ckptool.limits import PADDING_NBYTES, Limits
from ckptool.messages import counted, cut
from ckptool.pickles.alarms import Verdict, is_known
from ckptool.pickles.judge import Judge
from ckptool.pickles.machine import packed_nbytes
from ckptool.pickles.numpy_values import take_elements
from ckptool.pickles.reader import Pickle, read_as_far
from ckptool.sources.source import BytesSource, SliceSource, Source

_PACKED: Final = "packed-otherwise"
"""The kind of the error for what cannot be unpacked here."""
_DEEPEST: Final = 16
"""Most archives, and pickles in the bytes of pickles, inside each other."""
_MOST_COST: Final = 1 << 24
_MOST_RATIO: Final = 4
"""Budget for what is inside others, in bytes: so much, or so many times the size of the file."""
_COST: Final = 128
_COST_OF_PICKLE: Final = 512
"""What each thing inside costs in addition to its bytes, and each pickle that no format has read."""
_MOST_TIMES: Final = 4
"""How many times the size that the file may grow to may be unpacked in all."""
_HEAD: Final = 512
_STEP: Final = 1 << 20
MOST_LISTED: Final = 1000
"""Most acts that are listed; beyond that, only those that are known to reach the system."""
_MOST_UNSEEN: Final = 100
_MOST_NAMES: Final = 100_000
_LONGEST: Final = 4096
"""Most characters of a name that are shown: it may be as long as the file."""
_FURTHER: Final = 2 << 12
"""Bytes before the end of a zip that miniz, which reads zips for PyTorch, may search as well, as it reads blocks."""
_OF_PROGRAMS: Final = (
    *(".py\n", "bytecode.pkl\n", "constants.pkl\n", ".json\n", ".data/extern_modules\n", "archive_format\n"),
    *(f"{other_programs.NEMO}\n", "/models/", "/aotinductor/"),
)
"""Ends of the names of programs, and folders of others, in a list of names by lines."""
_FLATBUFFER: Final = b"PTMF"
_OF_LEGACY: Final = 5
_FIRST_OPCODES: Final = frozenset(
    b"\x80(]}clidoISVLFNUTXKMJGgpPCB\x82\x83\x84\x8a\x8b\x8c\x8d\x8e\x8f\x95\x96)0123aest\x88\x89"
)
"""Opcodes that a pickle may begin with, with PROTO or without."""
_IS_NAME: Final = re.compile(r"[A-Za-z_][\w.]*").fullmatch
_ZSTANDARD: Final = b"\x28\xb5\x2f\xfd"
_UNPACKABLE: Final = "packed with Zstandard or LZ4"
_OTHERWISE: Final = {
    b"\x04\x22\x4d\x18": _UNPACKABLE,
    b"\x02\x21\x4c\x18": _UNPACKABLE,
    **{bytes([first]) + b"\x2a\x4d\x18": _UNPACKABLE for first in range(0x50, 0x60)},
    b"7z\xbc\xaf\x27\x1c": "an archive of 7-Zip",
    b"Rar!\x1a\x07": "an archive of RAR",
    b"\x1f\x9d": "packed by compress",
    b"LZIP\x01": "packed by lzip",
    b"\xff\x06\0\0sNaPpY": "packed with Snappy",
}
"""Beginnings of files that pack others in ways that are not unpacked here."""
_FIRST: Final = frozenset(one[0] for one in (*BEGINNINGS, LOCAL_MAGIC, _ZSTANDARD, *_OTHERWISE))
"""First bytes of everything that packs others, except tars."""


class Place(NamedTuple):
    """The place of something that is searched."""

    record: str = ""
    """The archive member; empty for the file itself."""
    nested_at: int | None = None
    """Offset in the record of the string that contains it, if one does."""
    depth: int = 0
    """How many archives and strings contain it."""

    def member(self, name: str) -> Place:
        """Return the place of the member with this name in it."""
        return self._replace(record=place(self.record, name))

    def inside(self) -> Place:
        """Return the place one level deeper; raise LimitExceeded if that is too deep."""
        if self.depth >= _DEEPEST:
            raise LimitExceeded(f"more than {_DEEPEST} levels deep")
        return self._replace(depth=self.depth + 1)

    def __str__(self) -> str:
        at = "" if self.nested_at is None else f", byte {self.nested_at:,}"
        return f"{self.record or 'the file'}{at}"


_FILE: Final = Place()


class Search:
    """Searches sources, and keeps what it finds."""

    def __init__(self, limits: Limits, beside: Callable[[], str | None] | None = None) -> None:
        self.acts: dict[tuple[object, ...], Act] = {}
        self.names: dict[Name, None] = {}
        self.unseen: list[str] = []
        self.called = 0
        """How often something was done beyond making data."""
        self.limits = limits
        self._judge = Judge(beside)
        self._cost = 0
        self._file_nbytes = 0
        self._held_nbytes = 0
        """Bytes that are unpacked in memory now."""
        self._unpacked_nbytes = 0
        self._parts: set[tuple[str, tuple[int, int]]] = set()

    # What is searched

    def anything(self, source: Source, where: Place = _FILE) -> None:
        """Search whatever a source is; then raise what is wrong with it."""
        head = source.read(0, min(_HEAD, source.nbytes))
        self._of_file(source)
        if where is _FILE or not tars.is_tar(head):  # a tar ends with a member, which is searched by itself
            self.ending(source, where)
        self.flatbuffer(source, where.record)
        if self._packed(source, head, where):
            return
        if holders.is_json(head) or head.isspace():
            for at, data in holders.base64_texts(source):
                self.inside(BytesSource(data), where._replace(nested_at=at))
        elif not head.startswith(NUMPY):
            self._unread_pickles(source, head, where)
        else:
            self._arrays(source, where)

    def in_text(self, source: Source) -> None:
        """Search the base64 in a table, a log or another text."""
        if holders.is_text(head := source.read(0, min(_HEAD, source.nbytes))) and not holders.is_json(head):
            for at, data in holders.base64_texts(source, is_json=False):
                self.inside(BytesSource(data), Place(nested_at=at))

    def inside(self, source: Source, where: Place) -> None:
        """Search something inside another source. What only begins like an archive is ignored."""
        if not self._affords(_COST + source.nbytes, where):
            return
        try:
            self.anything(source, where.inside())
        except LimitExceeded as error:
            self.miss(f"{where}: {error.message}")
        except Failure:
            return

    def member(self, archive: Archive, name: str, record: str) -> None:
        """Search one member of an archive."""
        self._content(partial(archive.open, name), Place(record))

    def _content(self, opened: Callable[[], Source], where: Place) -> None:
        if not self._affords(_COST, where):
            return
        try:
            inner = where.inside()
            source = opened()
            if what := other_programs.in_content(where.record, source):
                self.miss(f"{where.record}: {what}")
            self.anything(source, inner)
        except Failure as error:
            self.miss(f"{where.record or 'the file'}: {error.message}")

    def _affords(self, cost: int, where: Place) -> bool:
        """Return whether the budget allows one more thing; note the first that it does not allow."""
        most, before = max(_MOST_COST, _MOST_RATIO * self._file_nbytes), self._cost
        self._cost += cost
        if before <= most < self._cost:
            self.miss(f"{where.record or 'the file'}: more pickles, strings and members inside it than are looked at")
        return self._cost <= most

    def _of_file(self, source: Source) -> None:
        """Count a source as a part of the file, unless it was unpacked from it."""
        if not self._held_nbytes:
            self._file_nbytes = max(self._file_nbytes, source.nbytes)

    def _arrays(self, source: Source, where: Place) -> None:
        """Search the pickles in a file of numpy, which stand for objects, and what follows its arrays."""
        at = 0
        while at < source.nbytes:
            found = holders.array_at(source, at)
            if found is None:
                if at and source.read(at, min(2, source.nbytes - at)) != b"PK":  # of a cut zip, the next member
                    self._unread_pickles(source, source.read(at, 1), where, at)
                    self.unused(source, [range(at, source.nbytes)], where.record)
                return
            begin, nbytes = found
            at = begin + nbytes if nbytes is not None else self._unread(source, begin, where, is_sure=True)
            if at < 0:
                self.miss(f"{where}: an array, at {begin:,}, that is neither numbers nor a whole pickle")
                return

    # What is packed

    def _packed(self, source: Source, head: bytes, where: Place) -> bool:
        """Search inside a source that packs others; return whether it does."""
        begin, compression = 0, None
        if head and head[0] in _FIRST:
            compression = compression_of(head)
            if compression is None and (behind := behind_length(head)) is not None:
                begin, compression = behind, ZLIB
            packed = next(filter(head.startswith, _OTHERWISE), None)
            if compression is None and packed is not None:
                raise UnsupportedFeature(_OTHERWISE[packed], kind=_PACKED)
        is_zip, is_zstandard, is_tar = head.startswith(LOCAL_MAGIC), head.startswith(_ZSTANDARD), tars.is_tar(head)
        if is_tar and (is_zip or is_zstandard or compression is not None):
            self.as_tar(source, where)
        if is_zip:
            self._zip(source, where)
            return True
        if compression is None and not is_zstandard and not is_tar:
            if may_be_lzma(head):
                content, wrong = decompress_as_far(source, LZMA, self._left())
                if isinstance(wrong, LimitExceeded):
                    self.miss(f"{where}: {wrong.message}")
                self._unpacked(content, source, where, is_sure=False)
            return False
        self.beginning(source, where)
        if compression is not None:
            self._compressed(SliceSource(source, begin, source.nbytes - begin), compression, where)
        elif is_zstandard:
            try:
                unpacked = unpack(source.read(0, source.nbytes), self._left())
            except MissingPackage as error:
                raise UnsupportedFeature(_UNPACKABLE, kind=_PACKED) from error
            self._unpacked(unpacked, source, where)
        else:
            self._tar(source, where)
        return not head.startswith(NUMPY)

    def _left(self) -> Limits:
        """Return limits for unpacking what the file may still grow to."""
        most = self.limits.inflated(self._file_nbytes)
        left = max(0, min(most - self._held_nbytes, _MOST_TIMES * most - self._unpacked_nbytes))
        return self.limits._replace(inflated_nbytes=left, inflation_ratio=0)

    def _unpacked(self, content: bytes | bytearray, packed: Source, where: Place, *, is_sure: bool = True) -> None:
        self._held_nbytes += len(content)
        self._unpacked_nbytes += len(content)
        try:
            inner = BytesSource(content, packed.cancellation, packed_nbytes=packed.nbytes)
            if is_sure:
                self._content(lambda: inner, where)
            else:
                self.inside(inner, where)
        finally:
            self._held_nbytes -= len(content)

    def _compressed(self, source: Source, compression: Compression, where: Place) -> None:
        content, wrong = decompress_as_far(source, compression, self._left())
        self._unpacked(content, source, where)
        if wrong is not None:
            try:
                raise wrong
            finally:
                del wrong  # else each would keep the other, and what was unpacked, until the next collection

    def _zip(self, source: Source, where: Place, *, is_all: bool = True) -> None:
        try:
            archive = zips.read_zip(source, self._left())
        except Failure as error:
            if error.kind == SEVERAL and (parts := zips.zips(source)):
                for one in parts:
                    part = partial(SliceSource, source, one.start, len(one))
                    self._content(part, where.member(f"zip at {one.start:,}"))
                return
            raise
        if is_all:
            self.unused(archive.source, archive.unused, where.record)
        self._members(archive, where)

    def _tar(self, source: Source, where: Place) -> None:
        archive = tars.read_tar(source, self._left())
        self.unused(archive.source, archive.unused, where.record)
        self._members(archive, where, is_tar=True)

    def _members(self, archive: Archive, where: Place, *, is_tar: bool = False) -> None:
        """Search an archive and its members, except the storages of a tree: no loader starts a pickle there."""
        from ckptool.formats import torch_tar, torch_zip  # few files hold archives

        self.programs(archive, where.record)
        tables = {one.record: (one, wrong) for one, wrong in torch_tar.pickles_of_tables(archive)} if is_tar else {}
        storages = torch_zip.storages_of_tree(archive)
        for name in archive:
            wrong = None
            if name in tables:
                table, wrong = tables[name]
                self.stream(table, where.member(name).record)
                if wrong is not None:  # so it may be anything
                    self.miss(f"{where.member(name)}: {wrong}")
            if wrong is not None or (name not in tables and name not in storages):
                self._content(partial(archive.open, name), where.member(name))

    def unused(self, source: Source, parts: Iterable[range], record: str = "") -> None:
        """Note bytes that belong to no part of a format, except zeros, which writers use as padding."""
        for part in parts:
            ends = range(part.start, min(part.stop, part.start + PADDING_NBYTES), _STEP)
            is_padding = not any(source.read(at, min(_STEP, part.stop - at)).strip(b"\0") for at in ends)
            if not is_padding or len(part) > PADDING_NBYTES:
                what = f"{counted(len(part), 'byte')} at {part.start:,} with no part in its format"
                self.miss(f"{record or 'the file'}: {what}")

    def as_tar(self, source: Source, where: Place = _FILE) -> None:
        """Search a tar that is read as something else, too: ``torch.load`` tries tars first."""
        if tars.is_tar(source.read(0, min(tars.BLOCK, source.nbytes))):
            try:
                self._tar(source, where)
            except Failure as error:
                self.miss(f"the tar that it is as well: {error.message}")

    def ending(self, source: Source, where: Place = _FILE) -> None:
        """Search the zip at the end of a file that begins as something else: readers of zips look there."""
        begin = max(0, source.nbytes - zips.END_SEARCH)
        further = max(0, begin - _FURTHER)
        if source.read(0, min(len(LOCAL_MAGIC), source.nbytes)) == LOCAL_MAGIC:
            return
        if packed_nbytes(source) is None and not self._affords(source.nbytes - further, where):
            return
        tail = source.read(further, min(begin + len(END_MAGIC) - 1, source.nbytes) - further)
        front = zips.nbytes_before(source)
        if front is None and END_MAGIC not in tail:
            return  # bytes that only look like the end, if any: no reader opens it
        try:
            part = SliceSource(source, front, source.nbytes - front) if front and front > 0 else source
            self._zip(part, where, is_all=False)  # what precedes it may belong to what the file begins as
        except (LimitExceeded, UnreadableFile, UnsupportedFeature) as error:
            self.miss(f"{where}: the zip at its end: {error.message}")

    # Pickles

    def stream(self, stream: Stream, record: str, pickles: Sequence[Pickle] = ()) -> None:
        """Judge consecutive pickles; read those that were not read before."""
        self._of_file(stream.source)
        where = Place(record)
        for one in pickles:
            self._judged(one, stream.source, where)
        resume = {block.start: block.stop for block in stream.blocks}
        at = -1 if pickles else stream.start
        while 0 <= at < stream.end:
            at = resume[at] if at in resume else self._one(stream.source, at, where, has_arrays=stream.has_arrays)

    def part(self, part: Part) -> None:
        """Search an item of a folder once, whoever has it; a missing file is reported elsewhere."""
        if (part.file, part.at) in self._parts or not self._affords(_COST, Place(part.file)):
            return
        self._parts.add((part.file, part.at))
        try:
            parsed = part.open()
        except FileUnavailable:
            return
        except Failure as error:
            self.miss(f"{part.file}: {error.message}")
            return
        names = len(self.names)
        for stream, pickles in zip(parsed.streams, chain((parsed.pickles,), repeat(())), strict=False):
            self.stream(stream, place(part.file, stream.record), pickles)
        while len(self.names) > names:
            self.names.popitem()  # each tensor asks for the same
        if parsed.traits.program:
            self.miss(f"{part.file}: {parsed.traits.program}")

    def _one(self, source: Source, start: int, where: Place, *, has_arrays: bool = True) -> int:
        """
        Read one pickle and judge it; return where it ends, or -1 if it is not complete.

        If there are elements of arrays between the opcodes, joblib skips them and ``pickle.load`` does not.
        """
        found = read_as_far(source, start, on_build=take_elements if has_arrays else None)
        self._judged(found, source, where)
        if found.is_over_limit:
            self.miss(f"{where.record or 'the file'}: {found.broken}")
        return found.end if found.broken is None else -1

    def _judged(self, pickle: Pickle, source: Source, where: Place) -> None:
        for one in pickle.globals:
            if len(self.names) < _MOST_NAMES:
                self.names[Name(one.module, one.name, where.record, one.offset, where.nested_at)] = None
        for offset, verdict in self._judge.verdicts(pickle):
            self._note(verdict, where, offset)
        for offset, value in pickle.carried:
            try:
                data = value.encode("latin-1") if isinstance(value, str) else value
            except UnicodeError:
                continue
            inner = BytesSource(data, source.cancellation, packed_nbytes=packed_nbytes(source))
            self.inside(inner, where if where.nested_at is not None else where._replace(nested_at=offset))
        if pickle.blocks:
            self._only_sure(read_as_far(source, pickle.start), where, pickle.blocks[0].start)

    def beginning(self, source: Source, where: Place = _FILE) -> None:
        """Search for pickles at the begin of a file of another format: loaders of pickles do not check the format."""
        head, at = source.read(0, min(4, source.nbytes)), 0
        while 0 <= at < source.nbytes and head[0] in _FIRST_OPCODES and head != LOCAL_MAGIC:
            found = read_as_far(source, at)
            self._only_sure(found, where)
            at = found.end if found.broken is None and self._affords(_COST_OF_PICKLE, where) else -1

    def _only_sure(self, pickle: Pickle, where: Place, first: int = 0) -> None:
        """
        Keep what refers to a name or calls it, in bytes of another format: that is hardly a coincidence.

        In elements of arrays, from ``first`` on, it may be one: there, keep only known calls that reach the system.
        """
        for offset, verdict in self._judge.verdicts(pickle):
            is_act = verdict.how not in ("odd", "asks") and _IS_NAME(verdict.name)
            is_alarm = verdict.grade == "system" and verdict.how != "refers" and is_known(verdict.name)
            if offset >= first and is_act and (is_alarm or not first):
                self._note(verdict, where, offset)
        if pickle.is_over_limit:
            self.miss(f"{where}: {pickle.broken}")

    def _unread_pickles(self, source: Source, head: bytes, where: Place, at: int = 0) -> None:
        """Search the pickles at the begin of a source, if there are any."""
        if not head or head[0] not in _FIRST_OPCODES:
            return
        # Plain pickles have a stream of a storage for each tensor.
        if where.nested_at is None or not is_legacy(head) or self._judge.storage_of(source) is None:
            self._pickles(source, at, where)

    def behind(self, source: Source, at: int, record: str = "") -> None:
        """Search what follows the part that is loaded."""
        if compression_of(source.read(0, min(_HEAD, source.nbytes))) is not None:
            what = f"{counted(source.nbytes - at, 'byte')} at {at:,}, which not every loader unpacks or ignores"
            self.miss(f"{record or 'the file'}: {what}")
        else:
            self.unused(source, [range(at, source.nbytes)], record)
        self._pickles(source, at, Place(record))

    def _pickles(self, source: Source, at: int, where: Place) -> None:
        """
        Search consecutive pickles, as many as there are.

        A file that ``torch.save`` wrote before 1.6 has five, followed by its storages.
        """
        begin, legacy_at, left = at, at, 0
        is_marked = where.nested_at is None and source.read(at, 1) == b"\x80"
        while at < source.nbytes:
            if not left and is_legacy(source.read(at, min(_HEAD, source.nbytes - at))):
                legacy_at, left = at, _OF_LEGACY
            end = self._unread(source, at, where)
            if end < 0:
                if is_marked and at > begin:
                    self.unused(source, [range(at, source.nbytes)], where.record)
                return
            at = end
            if left == 1:
                if where.nested_at is not None:
                    return
                stream = SliceSource(source, legacy_at, source.nbytes - legacy_at)
                try:
                    at = max(end, legacy_at + LegacyStream(stream, self.limits).end)
                except TruncatedFile:
                    is_marked = False
                except Failure as error:
                    self.miss(f"{where.record}{', ' if where.record else ''}byte {legacy_at:,}: {error.message}")
            left = max(0, left - 1)

    def _unread(self, source: Source, at: int, where: Place, *, is_sure: bool = False) -> int:
        """
        Judge a pickle that no format has read; return where it ends, or -1. One that breaks off before it calls
        anything is dropped as text, unless it is surely a pickle, or the file begins with it and it names what reaches
        the system.
        """
        if not self._affords(_COST_OF_PICKLE, where):
            return -1
        acts, names, called = len(self.acts), len(self.names), self.called
        end = self._one(source, at, where)
        doubtful = where.nested_at is not None or not (is_sure or source.read(at, 1) == b"\x80")
        if end < 0 and doubtful and self.called == called:
            found = islice(reversed(self.acts.values()), len(self.acts) - acts)
            if where.nested_at is None and any(one.grade == "system" and is_known(one.name) for one in found):
                return end
            for kept, count in ((self.acts, acts), (self.names, names)):
                while len(kept) > count:
                    kept.popitem()
        return end

    # Programs

    def flatbuffer(self, source: Source, record: str = "") -> None:
        """Search the TorchScript of a flatbuffer, which a file of any format may also be."""
        if source.nbytes > len(_FLATBUFFER) + 4 and source.read(4, len(_FLATBUFFER)) == _FLATBUFFER:
            self.programs(source, record)

    def programs(self, found: Archive | Source, record: str = "") -> None:
        """Search the programs in an archive, or one that is a file by itself."""
        if isinstance(found, Archive):
            self.foreign(record, other_programs.among(found, found.head))
            names = "\n/".join(found).lower()
            if not any(map(f"/{names}\n".__contains__, _OF_PROGRAMS)):
                return
        from ckptool.formats.runnable import programs  # few hold some

        try:
            if isinstance(found, Archive):
                members = [(name, one.nbytes, partial(found.open, name)) for name, one in found.items()]
                acts = programs.of_members(members, record)
            else:
                acts = programs.of_flatbuffer(found, record)
            for act in acts:
                self.keep(act)
                if act.name == programs.EXPORTED and (beside := self._judge.beside()) is not None:
                    why = f"may import {beside}, which lies beside the file"
                    self.keep(Act("code", "refers", act.name, act.text, why, act.record, 0))
        except LimitExceeded as error:
            self.miss(f"{record or 'the file'}: {error.message}")

    def foreign(self, record: str, found: Iterable[tuple[str, str, str | None]]) -> None:
        """Keep what other loaders run in the files of a record, and why; without that, note it as not inspected."""
        for name, what, why in found:
            where = place(record, name)
            unseen = f"{where}: {what}" if where else what
            self.keep(Act("code", "runs", what, what, why, where, 0)) if why else self.miss(unseen)

    # What was found

    def survey(self) -> Survey:
        """Return what was found; long names and texts are cut."""
        acts = (one._replace(name=cut(one.name, _LONGEST), text=cut(one.text, _LONGEST)) for one in self.acts.values())
        names = (one._replace(module=cut(one.module, _LONGEST), name=cut(one.name, _LONGEST)) for one in self.names)
        return Survey(tuple(acts), tuple(names), tuple(self.unseen))

    def miss(self, what: str) -> None:
        """Note what could not be searched, up to as many as people read."""
        if len(self.unseen) < _MOST_UNSEEN:
            self.unseen.append(what)

    def keep(self, act: Act) -> None:
        """Keep an act of something beside the pickles."""
        self.acts.setdefault((act.grade, act.name, act.record, act.text), act)

    def _note(self, verdict: Verdict, where: Place, offset: int) -> None:
        is_asked = verdict.how == "asks" and verdict.grade != "system"  # PNG images begin so: plain loaders have none
        self.called += not (is_asked or verdict.how in ("refers", "odd"))
        if len(self.acts) >= 2 * MOST_LISTED:
            return
        repeats = verdict.grade != "system" or verdict.how == "refers"
        shown = None if repeats else verdict.shown()
        key = (verdict.grade, verdict.how, verdict.name, where.record, shown)
        if (known := self.acts.get(key)) is not None:
            self.acts[key] = known._replace(times=known.times + 1)
        elif len(self.acts) < MOST_LISTED or verdict.grade == "system":
            shown = verdict.shown() if shown is None else shown
            said = (verdict.name, shown, verdict.why)
            self.acts[key] = Act(verdict.grade, verdict.how, *said, where.record, offset, where.nested_at)
