"""
The members of a tar: POSIX ustar and the extensions that writers use for long names and large sizes.

    512-byte header, payload padded to 512 bytes    for each member
    two blocks of zeros                             at the end

Only regular files become records. Links, devices and folders are skipped, never followed; nothing is extracted.
See POSIX.1-2017, pax, "ustar Interchange Format".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from ckptool.archives.archive import Archive, Record
from ckptool.errors import (
    AmbiguousFile,
    LimitExceeded,
    MalformedFile,
    TruncatedFile,
    UnsupportedFeature,
)
from ckptool.limits import DEFAULT_LIMITS, TAR_NAME_NBYTES, Limits
from ckptool.sources.source import ReadAhead, Source

BLOCK: Final = 512
_FILES: Final = (b"0", b"\0", b"7")
_NO_FILES: Final = (b"1", b"2", b"3", b"4", b"5", b"6")
"""Links, devices and folders, which have no payload."""
_TABLES: Final = ("storages", "tensors")
"""Members that PyTorch unpacks from its own tars whatever their kind."""


def is_tar(head: bytes) -> bool:
    """Return whether the first block can be a header of a tar: its checksum is right for some reader."""
    return len(head) >= BLOCK and _checksum_is_right(head[:BLOCK])


def read_tar(source: Source, limits: Limits = DEFAULT_LIMITS) -> Archive:
    """
    Return the regular files of a tar, in order.

    Raises:
        TruncatedFile: A member extends beyond the end of the file.
        MalformedFile: A header is damaged.
        UnsupportedFeature: A member is sparse: its bytes are not its content.
        AmbiguousFile: Two members have one name, or readers differ in the offsets or kinds of members.
        LimitExceeded: There are too many members.
    """
    records: dict[str, Record] = {}
    no_files: set[str] = set()
    notes: tuple[str, ...] = ("the tar has no end: members may be missing",)
    unused: list[range] = []
    for found in _members(source):
        if isinstance(found, int):
            notes = ()
            unused.append(range(found, source.nbytes))
            break
        member, kind, is_sparse = found
        if member.offset + member.nbytes > source.nbytes:
            raise _truncated(member.offset, member.offset + member.nbytes, source.nbytes)
        if is_sparse:
            raise UnsupportedFeature("a sparse file in a tar", kind="sparse-tar", offset=member.offset)
        name = member.name.rstrip("/")
        is_file = kind in _FILES
        is_twice = name in no_files or member.name in records if is_file else name in records
        if is_twice:  # when unpacked, the later one replaces it
            raise AmbiguousFile(f"the tar holds {name!r} twice", kind="ambiguous-tar", offset=member.offset)
        if not is_file:
            if name in _TABLES:
                raise _ambiguous(f"{name!r} is not a regular file", member.offset)
            if len(no_files) >= limits.entries:
                raise LimitExceeded(f"more than {limits.entries:,} links and the like in a tar", actual=limits.entries)
            no_files.add(name)
            if member.nbytes and kind not in _NO_FILES:  # some readers take an unknown kind for a file
                unused.append(range(member.offset, member.offset + member.nbytes))
            continue
        if len(records) >= limits.entries:
            raise LimitExceeded(f"more than {limits.entries:,} members in a tar", actual=limits.entries)
        records[member.name] = member
    return Archive(source, records, limits, notes, tuple(unused))


def _members(source: Source) -> Iterator[tuple[Record, bytes, bool] | int]:
    """
    Yield each member with its kind and whether it is sparse, and at last the offset of the block of zeros, if any.

    Extended headers are applied. By its size, a member may extend beyond the end of the file.
    """
    ahead = ReadAhead(source)
    position = 0
    override: dict[str, str] = {}
    while position < source.nbytes:
        if position + BLOCK > source.nbytes:
            raise _truncated(position, position + BLOCK, source.nbytes)
        header = ahead.read(position, BLOCK)
        if not any(header):
            yield position
            return
        if not _checksum_is_right(header):
            raise MalformedFile(f"malformed tar header at byte {position:,}", kind="malformed-tar", offset=position)
        kind = header[156:157]
        # Headers of the next member: attributes (x), its name (L), the target of a link (K); or of all members (g).
        is_extension = kind in (b"x", b"L", b"K", b"g")
        said, *others = _readings(header[124:136])
        digits = None if is_extension else override.get("size")
        if said is None or said < 0 or others or not (digits is None or re.fullmatch("[0-9]{1,19}", digits)):
            raise MalformedFile(f"malformed tar size at byte {position:,}", kind="malformed-tar", offset=position)
        nbytes = said if digits is None else int(digits)
        at, payload = position, position + BLOCK
        position = payload + -(-nbytes // BLOCK) * BLOCK
        if is_extension:
            if payload + nbytes > source.nbytes:
                raise _truncated(payload, payload + nbytes, source.nbytes)
            if nbytes > TAR_NAME_NBYTES:
                raise MalformedFile(f"a tar name of {nbytes:,} bytes", kind="malformed-tar", offset=payload)
            if kind == b"K":
                continue
            text = source.read(payload, min(position, source.nbytes) - payload)
            if any(text[nbytes:]):  # some readers read whole blocks
                raise _ambiguous("an extended header with bytes behind it", payload)
            text = text[:nbytes]
            found = {"path": _text(text)} if kind == b"L" else _pax(text, payload)
            if not override.keys().isdisjoint(found) or (kind == b"g" and found):  # readers take either of two
                raise MalformedFile(f"a second tar name at byte {payload:,}", kind="malformed-tar", offset=payload)
            override |= found
            continue
        prefix, own = _text(header[345:500]), _text(header[:100])
        # The prefix counts in every kind of tar, as in Python.
        name = override.get("path", f"{prefix}/{own}" if prefix else own)
        _check_for_all_readers(header, name, max(nbytes, said), at)
        yield Record(name, payload, nbytes, nbytes), kind, "sparse" in override or kind == b"S"
        override = {}


def _check_for_all_readers(header: bytes, name: str, nbytes: int, position: int) -> None:
    """Raise AmbiguousFile for a header whose size or kind readers take differently."""
    kind = header[156:157]
    if kind == b"X":  # an extended header for some readers, a file for others
        raise _ambiguous("an extended header of Solaris", position)
    if nbytes and kind in _NO_FILES:
        raise _ambiguous("a link, device or folder with a size", position)
    is_folder = name.endswith("/") or (kind == b"\0" and _text(header[:100]).endswith("/"))
    if not name:  # some readers ignore the empty name, and take the one in the header
        raise _ambiguous("a member without a name", position)
    if nbytes and kind in _FILES and is_folder:
        raise _ambiguous(f"{name!r} is a file with the name of a folder", position)


def _ambiguous(what: str, position: int) -> AmbiguousFile:
    return AmbiguousFile(f"readers of tars differ: {what}", kind="ambiguous-tar", offset=position)


def _truncated(offset: int, needed: int, actual: int) -> TruncatedFile:
    fact = f"a tar member ends at byte {needed:,}, the file has {actual:,}"
    return TruncatedFile.early(fact, "tar", actual, needed, offset)


def _checksum_is_right(header: bytes) -> bool:
    # The checksum counts its own eight bytes as spaces; old writers summed signed bytes.
    found = _readings(header[148:156])
    if found == {None}:
        return False
    counted = header[:148] + header[156:]
    return sum(counted, 256) in found or sum(memoryview(counted).cast("b"), 256) in found


def _readings(field: bytes) -> set[int | None]:
    """Return the values that readers give a number: GNU's and others use the octal digits, Python what int() takes."""
    if field[0] in (0x80, 0xFF):  # too large for octal, so binary
        return {int.from_bytes(field[1:], "big") if field[0] == 0x80 else int.from_bytes(field, "big", signed=True)}
    digits = re.match(rb"[\0\s]*([0-7]*)", field)
    found: set[int | None] = {int(digits[1], 8)} if digits is not None and digits[1] else set()
    try:
        return found | {int(str(field.partition(b"\0")[0], "ascii").strip() or "0", 8)}
    except ValueError:
        return found | {None}


def _pax(records: bytes, offset: int) -> dict[str, str]:
    """
    Return the path, size and mark of sparse files in a pax header, where given.

    Its lines are ``length key=value``, and the length includes itself.
    """
    found: dict[str, str] = {}
    position = 0
    while position < len(records):
        length, _, _ = records[position : position + 20].partition(b" ")
        stop = position + int(length) if length.isdigit() else 0
        line = records[position + len(length) + 1 : stop - 1]
        if stop <= position + len(length) or records[stop - 1 : stop] != b"\n" or line.find(b"=") < 1:
            at = offset + position
            raise MalformedFile(f"malformed tar header at byte {at:,}", kind="malformed-tar", offset=at)
        key, _, value = line.partition(b"=")
        if key.startswith(b"GNU.sparse"):
            found["sparse"] = "yes"
        if key in (b"path", b"size"):
            if b"\0" in value:  # some readers end the text there
                raise _ambiguous(f"{str(key, 'ascii')!r} in an extended header", offset + position)
            found[key.decode()] = _text(value)
        position = stop
    return found


def _text(data: bytes) -> str:
    return str(data.partition(b"\0")[0], "utf-8", "replace")
