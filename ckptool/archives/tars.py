"""
The member table of a tar: POSIX ustar and the extensions that writers use for long names and large sizes.

    512-byte header, payload padded to 512 bytes    for each member
    two blocks of zeros                             at the end

Only regular files become records. Links, devices and folders are passed over, never followed; nothing is extracted.
See POSIX.1-2017, pax, "ustar Interchange Format".
"""

from __future__ import annotations

from typing import Final

from ckptool.archives.archive import Archive, Record
from ckptool.errors import AmbiguousFile, LimitExceeded, MalformedFile, TruncatedFile, UnsupportedFeature
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.sources.read_ahead import ReadAhead
from ckptool.sources.source import Source

_BLOCK: Final = 512
_LONGEST_NAME: Final = 1 << 16


def is_tar(head: bytes) -> bool:
    """Say whether the first block is a tar header: its checksum is right."""
    return len(head) >= _BLOCK and head[0] != 0 and _checksum_is_right(head[:_BLOCK])


def read_tar(source: Source, limits: Limits = DEFAULT_LIMITS) -> Archive:
    """
    Return the regular files of a tar, in order.

    Raises:
        TruncatedFile: A member reaches over the end of the file.
        MalformedFile: A header is damaged.
        UnsupportedFeature: A member is sparse: its bytes are not its content.
        AmbiguousFile: Two members have one name.
    """
    records: dict[str, Record] = {}
    ahead = ReadAhead(source)
    position = 0
    override: dict[str, str] = {}
    notes: tuple[str, ...] = ("the tar has no end: members may be missing",)
    while position < source.nbytes:
        if position + _BLOCK > source.nbytes:
            raise _truncated(position, position + _BLOCK, source.nbytes)
        header = ahead.read(position, _BLOCK)
        if not any(header):
            notes = ()
            break
        if not _checksum_is_right(header):
            raise MalformedFile(f"malformed tar header at byte {position:,}", kind="malformed-tar", offset=position)
        kind = header[156:157]
        is_extension = kind in (b"x", b"L")
        if "size" in override and not is_extension:
            nbytes = _decimal(override["size"], position)
        else:
            nbytes = _number(header[124:136], position)
        payload = position + _BLOCK
        end = payload + nbytes
        if end > source.nbytes:
            raise _truncated(position, end, source.nbytes)
        position = payload + -(-nbytes // _BLOCK) * _BLOCK
        if is_extension:
            if nbytes > _LONGEST_NAME:
                raise MalformedFile(f"a tar name of {nbytes:,} bytes", kind="malformed-tar", offset=payload)
            text = source.read(payload, nbytes)
            override |= _pax(text, payload) if kind == b"x" else {"path": _text(text)}
            continue
        name = override.get("path") or _name(header)
        override = {}
        if kind not in (b"0", b"\0", b"7"):
            continue
        if name in records:
            raise AmbiguousFile(f"the tar holds {name!r} twice", kind="ambiguous-tar", offset=payload)
        if len(records) >= limits.entries:
            raise LimitExceeded(f"more than {limits.entries:,} members in a tar", actual=limits.entries)
        records[name] = Record(name, payload, nbytes, nbytes)
    return Archive(source, records, limits, notes)


def _truncated(offset: int, needed: int, actual: int) -> TruncatedFile:
    return TruncatedFile(
        f"truncated: a tar member ends at byte {needed:,}, the file has {actual:,}",
        kind="truncated-tar",
        hint="Download the file again.",
        offset=offset,
        needed=needed,
        actual=actual,
    )


def _checksum_is_right(header: bytes) -> bool:
    # The checksum counts its own eight bytes as spaces.
    found = header[148:156].strip(b"\0 ")
    if not found or any(digit not in b"01234567" for digit in found):
        return False
    return int(found, 8) == sum(header[:148]) + 256 + sum(header[156:])


def _number(digits: bytes, position: int) -> int:
    if digits[0] & 0x80:  # GNU: too large for octal, so binary
        return int.from_bytes(digits[1:], "big") | (digits[0] & 0x7F) << 88
    digits = digits.strip(b"\0 ")
    if any(digit not in b"01234567" for digit in digits):
        raise MalformedFile(f"malformed tar size at byte {position:,}", kind="malformed-tar", offset=position)
    return int(digits or b"0", 8)


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _decimal(text: str, position: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise MalformedFile(f"malformed tar size at byte {position:,}", kind="malformed-tar", offset=position)
    return int(text)


def _pax(records: bytes, offset: int) -> dict[str, str]:
    """Return the path and size of a pax header: lines of ``length key=value``, the length counting itself."""
    found: dict[str, str] = {}
    position = 0
    while position < len(records):
        length, _, _ = records[position : position + 20].partition(b" ")
        stop = position + int(length) if length.isdigit() else 0
        if stop <= position + len(length) or records[stop - 1 : stop] != b"\n":
            at = offset + position
            raise MalformedFile(f"malformed tar header at byte {at:,}", kind="malformed-tar", offset=at)
        line = records[position + len(length) + 1 : stop - 1]
        key, _, value = line.partition(b"=")
        if key.startswith(b"GNU.sparse"):
            raise UnsupportedFeature("a sparse file in a tar", kind="sparse-tar", offset=offset)
        if key in (b"path", b"size"):
            found[key.decode()] = _text(value)
        position = stop
    return found


def _text(data: bytes) -> str:
    return str(data.partition(b"\0")[0], "utf-8", "replace")
