"""
What lies in a source that packs others, as far as it can be unpacked: gzip and the like, zips, tars.

All that is in memory at one time, level by level, is bounded by what the file may grow to.

What was found in the pickles of a file: what unpickling does, the names that it asks for, what was not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from ckptool.archives import tars, zips
from ckptool.archives.archive import Archive
from ckptool.archives.compressed import BEGINNINGS, ZLIB, Compression, behind_length, compression_of, decompress_as_far
from ckptool.archives.zip_directory import END, END_MAGIC, LOCAL_MAGIC, SEVERAL
from ckptool.archives.zips import Remnant
from ckptool.checkpoints.parsed import Stream
from ckptool.errors import Failure, LimitExceeded, MissingPackage, UnreadableFile, UnsupportedFeature
from ckptool.formats import torch_tar
from ckptool.limits import Limits
from ckptool.pickles.alarms import Grade, How, package_of
from ckptool.pickles.judge import worst
from ckptool.sources.source import BytesSource, SliceSource, Source

Content: TypeAlias = "Archive | Stream | Remnant | Callable[[], Source]"
"""
An archive whose members follow, or a member of one that has no single reading, which follows; pickles between other
things, where these are known; or what opens a source.
"""

PACKED: Final = "packed-otherwise"
"""The kind of the error for what cannot be unpacked here."""
_MOST_TIMES: Final = 4
"""What the file may grow to, so many times, may be unpacked one after the other."""
_MOST_SEARCHED: Final = 1 << 28
"""Bytes of zips that have no single reading, in which members are searched for."""
_LONGEST_END: Final = END.size + 0xFFFF
"""Bytes of the record that ends a zip, with its comment."""
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
"""How files begin that pack others in ways which are not unpacked here."""
_FIRST: Final = frozenset(one[0] for one in (*BEGINNINGS, LOCAL_MAGIC, _ZSTANDARD, *_OTHERWISE))
"""What anything begins with that packs others, but tars."""


def place(record: str, name: str) -> str:
    """Return the place of what has this name in a record."""
    return "::".join(filter(None, (record, name)))


class Unpacking:
    """Unpacks what lies in the sources of one file, level by level."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.file_nbytes = 0
        """Of the file itself."""
        self._held_nbytes = 0
        """Of what is unpacked in memory now."""
        self._unpacked_nbytes = 0
        self._searched = 0

    def of_file(self, source: Source) -> None:
        """Take a source for a part of the file, unless it was unpacked from it."""
        if not self._held_nbytes:
            self.file_nbytes = max(self.file_nbytes, source.nbytes)

    def contents(self, source: Source, head: bytes, record: str) -> Iterator[tuple[str, Content]] | None:
        """
        Return what lies in a source, each with its place; None if it packs nothing.

        The iterator raises what is wrong with the source once it has yielded what can be had.
        """
        if not head or head[0] not in _FIRST:
            return self._tar(source, record) if tars.is_tar(head) else None
        compression = compression_of(head)
        if compression is not None:
            return self._compressed(source, compression, record)
        if (begin := behind_length(head)) is not None:
            return self._compressed(SliceSource(source, begin, source.nbytes - begin), ZLIB, record)
        if head.startswith(_ZSTANDARD):
            return self._zstandard(source, record)
        if (packed := next(filter(head.startswith, _OTHERWISE), None)) is not None:
            raise UnsupportedFeature(_OTHERWISE[packed], kind=PACKED)
        if head.startswith(LOCAL_MAGIC):
            return self._zip(source, record)
        return self._tar(source, record) if tars.is_tar(head) else None

    def _left(self) -> Limits:
        """Return limits that allow to unpack what the file may grow to, less what is in memory, or was all in all."""
        most = self.limits.inflated(self.file_nbytes)
        left = max(0, min(most - self._held_nbytes, _MOST_TIMES * most - self._unpacked_nbytes))
        return self.limits._replace(inflated_nbytes=left, inflation_ratio=0)

    def _holding(self, content: bytes | bytearray, packed: Source, record: str) -> Iterator[tuple[str, Content]]:
        self._held_nbytes += len(content)
        self._unpacked_nbytes += len(content)
        try:
            inner = BytesSource(content, packed.cancellation, packed_nbytes=packed.nbytes)
            yield record, lambda: inner
        finally:
            self._held_nbytes -= len(content)

    def _compressed(self, source: Source, compression: Compression, record: str) -> Iterator[tuple[str, Content]]:
        content, wrong = decompress_as_far(source, compression, self._left())
        yield from self._holding(content, source, record)
        if wrong is not None:
            try:
                raise wrong
            finally:
                del wrong  # else each would keep the other, and what was unpacked, until the next collection

    def _zstandard(self, source: Source, record: str) -> Iterator[tuple[str, Content]]:
        from ckptool.archives import compressed  # few have it

        try:
            content = compressed.unpack(source.read(0, source.nbytes), self._left())
        except MissingPackage as error:
            raise UnsupportedFeature(_UNPACKABLE, kind=PACKED) from error
        yield from self._holding(content, source, record)

    def _zip(self, source: Source, record: str) -> Iterator[tuple[str, Content]]:
        try:
            archive = zips.read_zip(source, self._left())
        except Failure as error:
            if error.kind == SEVERAL and (parts := zips.zips(source)):
                for one in parts:
                    yield place(record, f"zip at {one.start:,}"), partial(SliceSource, source, one.start, len(one))
                return
            yield from self._remains(source, record)
            raise
        yield from self.members(archive, record)

    def ending(self, source: Source) -> Iterator[tuple[str, Content]]:
        """Yield what lies in a zip that ends a source, and does not begin it; nothing where there is none."""
        begin = max(0, source.nbytes - _LONGEST_END)
        if source.read(0, min(len(LOCAL_MAGIC), source.nbytes)) == LOCAL_MAGIC:
            return
        if END_MAGIC not in source.read(begin, source.nbytes - begin):
            return
        try:
            yield from self._zip(source, "")
        except (UnreadableFile, UnsupportedFeature):
            return  # bytes that only look like the end of a zip, or no reader opens it

    def _remains(self, source: Source, record: str) -> Iterator[tuple[str, Content]]:
        """Yield what lies in a zip that has no single reading."""
        self._searched += min(source.nbytes, zips.SEARCHED)
        if self._searched > _MOST_SEARCHED:
            raise LimitExceeded(f"zips that have no single reading, after {_MOST_SEARCHED:,} bytes")
        for member in zips.members(source, self._left()):
            where = place(record, member.name)
            yield where, member
            yield where, partial(SliceSource, member.source, 0, member.source.nbytes)

    def _tar(self, source: Source, record: str) -> Iterator[tuple[str, Content]]:
        archive, wrong = None, None
        try:
            archive = tars.read_tar(source, self._left())
        except Failure as error:
            wrong = error
        if archive is not None:
            yield from self.members(archive, record)
        yield from self.others(source, archive, record)
        if wrong is not None:
            try:
                raise wrong
            finally:
                del wrong  # else each would keep the other, and what was unpacked, until the next collection

    def others(self, source: Source, archive: Archive | None, record: str) -> Iterator[tuple[str, Content]]:
        """Yield what other readers may take for members of a tar that ``archive`` has not; nothing of what is none."""
        if tars.is_tar(source.read(0, min(tars.BLOCK, source.nbytes))):
            for name, content in tars.others(source, archive):
                yield place(record, name), partial(SliceSource, content, 0, content.nbytes)

    def members(self, archive: Archive, record: str) -> Iterator[tuple[str, Content]]:
        """Yield an archive, and its members, but for the storages of a tree in it: no loader starts a pickle there."""
        from ckptool.formats import torch_zip  # few files hold archives

        yield record, archive
        tables = {one.record: one for one in torch_tar.streams_as_far(archive)} if torch_tar.has_tables(archive) else {}
        storages = torch_zip.storages_as_far(archive)
        for name in archive:
            if name not in storages:
                yield place(record, name), tables.get(name) or partial(archive.open, name)


class Act(NamedTuple):
    """One thing that unpickling does beyond making data. The text may hold any characters of the file."""

    grade: Grade
    how: How
    name: str
    """What is called, built, changed or referred to, under its name in Python 3."""
    text: str
    """The call with its arguments, cut to a line."""
    why: str | None
    record: str
    """The archive member; empty for the file itself."""
    offset: int
    """Of the opcode that does it first, from the start of the record, or of the pickle inside it."""
    nested_at: int | None = None
    """Where in the record the string begins that holds the pickle, if it is inside another one."""
    times: int = 1

    @property
    def package(self) -> str:
        """The package whose code runs."""
        return package_of(self.name)


def of_kind(name: str, record: str) -> Act:
    """Return what it comes to that a file holds a program of a kind, whatever that does."""
    return Act("program", "runs", name, name, None, record, 0)


def of_program(name: str, text: str, why: str, record: str, offset: int) -> Act:
    """Return what a program in a file does that reaches the system."""
    return Act("system", "runs", name, text, why, record, offset)


class Name(NamedTuple):
    """A name that a pickle asks for."""

    module: str
    name: str
    record: str
    offset: int
    nested_at: int | None


class Survey(NamedTuple):
    """What was found in all pickles of a file."""

    acts: tuple[Act, ...] = ()
    """In the order of the file; what is done again and again stands there once."""
    names: tuple[Name, ...] = ()
    """What the pickles that were followed ask for, and those that no format had read."""
    behind: tuple[str, ...] = ()
    """Where pickles lie that stand behind the one that is loaded."""
    unseen: tuple[str, ...] = ()
    """What could not be looked at, and why."""

    def of(self, grade: Grade, *, called: bool = True) -> list[Act]:
        """Return the acts of one grade: those that do something, or references alone."""
        return [act for act in self.acts if act.grade == grade and (act.how != "refers") == called]


def reached(acts: Iterable[Act], *, is_whole: bool = True) -> Grade:
    """Return how far acts reach together. What was not looked at, where they are not the ``whole``, may be code."""
    found = worst(acts)
    return found if is_whole or found == "system" else "code"
