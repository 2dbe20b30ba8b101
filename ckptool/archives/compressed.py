"""
Files compressed as a whole (gzip, zlib, bzip2, xz, lzma), recognised by their first bytes.

joblib writes all of them, and people compress state dicts by hand. Also frames of Zstandard, in memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import BytesIO
from typing import Final, NamedTuple, Protocol

from ckptool.archives.archive import too_large
from ckptool.errors import CkptoolError, LimitExceeded, MalformedFile, MissingPackage, UnsupportedFeature
from ckptool.limits import Limits
from ckptool.sources.source import Source

_CHUNK: Final = 1 << 16
"""Bytes of input that are read at a time; they may inflate to a thousand times as many."""
_PIECE: Final = 1 << 20
"""Bytes of output that are unpacked at a time."""
_XZ_MEMORY: Final = 1 << 28
"""Bytes of memory that unpacking xz and lzma may take; the largest preset needs a quarter of it."""
_LZMA_DICTIONARY: Final = 1 << 26
"""Bytes of the largest dictionary that is used to try lzma on a head, whatever the head announces."""
_WINDOW: Final = 1 << 27
"""Bytes of the largest window of Zstandard: that of the highest usual level."""


class _Unpacker(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...


class Compression(NamedTuple):
    """One way to compress a file."""

    name: str
    magic: bytes
    start: Callable[[], _Unpacker]


def _bz2() -> _Unpacker:
    import bz2

    return bz2.BZ2Decompressor()


_AUTO, _XZ, _ALONE = range(3)
"""The format numbers of the module ``lzma``."""


def _lzma(form: int) -> Callable[[], _Unpacker]:
    def start() -> _Unpacker:
        import lzma

        return lzma.LZMADecompressor(form, memlimit=_XZ_MEMORY)

    return start


GZIP: Final = Compression("gzip", b"\x1f\x8b", partial(zlib.decompressobj, 31))
ZLIB: Final = Compression("zlib", b"\x78", zlib.decompressobj)
LZMA: Final = Compression("lzma", b"\x5d\0", _lzma(_ALONE))
_KINDS: Final = (
    GZIP,
    Compression("bzip2", b"BZh", _bz2),
    Compression("xz", b"\xfd7zXZ\0", _lzma(_XZ)),
    LZMA,
    ZLIB,
)
CUT: Final = frozenset(f"{what}-{kind.name}" for what in ("truncated", "damaged") for kind in _KINDS)
"""Kinds of errors of files that were unpacked up to where they are wrong."""
_ZFILE: Final = b"ZF"
_ZFILE_HEAD: Final = 21
"""Bytes of the magic and of the length, in hexadecimal; a space follows if Python 2 wrote it."""
BEGINNINGS: Final = (_ZFILE, *(kind.magic for kind in _KINDS))
_LEAST_ZLIB: Final = 8
_OF_LZMA: Final = ("xz", "lzma")
"""Python's reader of both detects the format of each stream anew, so one may follow the other."""
_LZMA_HEAD: Final = 5
"""Bytes of lzma's properties and of the length of its dictionary."""
_BEHIND: Final = "bytes-behind"
"""The kind of error for bytes after the first or last member; all members are unpacked by then."""


def behind_length(head: bytes) -> int | None:
    """Return the offset of zlib's data after its length as text, as joblib before 0.10 wrote it; None for others."""
    if not head.startswith(_ZFILE):
        return None
    begin = _ZFILE_HEAD + (head[_ZFILE_HEAD : _ZFILE_HEAD + 1] == b" ")
    return begin if _unpacks(ZLIB, head[begin:]) else None


def may_be_lzma(head: bytes) -> bool:
    """
    Return whether lzma could unpack a file with these first bytes: it has no magic, only properties below 225.

    As its reader does, require a dictionary of a usual length, and a size below 256 GiB or an unknown one.
    """
    length, nbytes = int.from_bytes(head[1:_LZMA_HEAD], "little"), int.from_bytes(head[_LZMA_HEAD:13], "little")
    bits = f"{length:b}".rstrip("0")
    is_usual = bits in ("", "1", "11") or length == (1 << 32) - 1
    is_head = len(head) > 13 and head[0] < 225 and head[13] == 0 and is_usual
    return is_head and (nbytes < 1 << 38 or nbytes == (1 << 64) - 1) and _unpacks(LZMA, head)


def compression_of(head: bytes) -> Compression | None:
    """Return the compression of a file that begins with ``head``; None if it is not compressed."""
    for kind in _KINDS:
        if head.startswith(kind.magic):
            # These have so short a magic that other files begin with it: unpacking the head must succeed, too.
            return kind if kind.name not in ("bzip2", "lzma", "zlib") or _unpacks(kind, head) else None
    return None


def _unpacks(kind: Compression, head: bytes) -> bool:
    if kind is ZLIB and len(head) < _LEAST_ZLIB:
        return False  # text that begins with an x
    if kind.name == "lzma":  # try a shorter dictionary: one too long to unpack does not make it another format
        longest = min(int.from_bytes(head[1:_LZMA_HEAD], "little"), _LZMA_DICTIONARY)
        head = head[:1] + longest.to_bytes(4, "little") + head[_LZMA_HEAD:]
    try:
        kind.start().decompress(head, len(head))
    except ImportError:
        return True  # decompress will report what is missing
    except _errors():
        return False
    return True


def _errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that unpackers raise for bytes that they cannot unpack."""
    found: list[type[Exception]] = [zlib.error, OSError, EOFError, ValueError]
    try:
        import lzma
    except ImportError:
        return tuple(found)
    return (*found, lzma.LZMAError)


def decompress(source: Source, kind: Compression, limits: Limits) -> tuple[bytearray, int]:
    """
    Return the content of a compressed file, all members joined, and how many bytes of the file all readers unpack.

    Raises:
        LimitExceeded: It grows larger than ``limits`` allow for its size.
        MalformedFile: It is damaged or ends too early.
        UnsupportedFeature: This Python was built without the module that unpacks it.
    """
    output = bytearray()
    try:
        _decompress(source, kind, limits, output)
    except MalformedFile as error:
        if error.kind != _BEHIND or error.offset is None:
            raise
        return output, error.offset
    return output, source.nbytes


def decompress_as_far(source: Source, kind: Compression, limits: Limits) -> tuple[bytearray, CkptoolError | None]:
    """Return all bytes that can be unpacked of a compressed file, and the error for the rest, or None."""
    output = bytearray()
    try:
        _decompress(source, kind, limits, output)
    except LimitExceeded as error:
        return output, error.with_traceback(None)
    except MalformedFile as error:
        finer = bytearray()
        with suppress(MalformedFile):
            _decompress(source, kind, limits, finer, finer_from=len(output))
        return finer, error.with_traceback(None)
    return output, None


def _decompress(
    source: Source, kind: Compression, limits: Limits, output: bytearray, *, finer_from: int | None = None
) -> None:
    """
    Append the content to ``output``, in pieces; an error in a piece loses all of it.

    So from ``finer_from`` bytes of output on, pieces are of one byte.
    """
    allowed = limits.inflated(source.nbytes)
    position = 0
    pending = b""
    first_end = None
    try:
        unpacker = kind.start()
        while pending or position < source.nbytes:
            if not pending:
                pending = source.read(position, min(_CHUNK, source.nbytes - position))
                position += len(pending)
            if unpacker.eof:
                # joblib's reader of these never ends if anything follows the first member.
                if kind.name in ("gzip", "zlib") and first_end is None:
                    first_end = position - len(pending)
                pending = pending.lstrip(b"\0") if kind is GZIP else pending
                if not pending.strip(b"\0"):  # padding
                    pending = b""
                    continue
                is_either = kind.name in _OF_LZMA
                if not is_either and not pending.startswith(kind.magic[:1]):  # some readers ignore it
                    fact = f"bytes that are not {kind.name} follow it"
                    raise MalformedFile(fact, kind=_BEHIND, offset=position - len(pending))
                unpacker = (_lzma(_AUTO) if is_either else kind.start)()
            is_full = True
            while is_full and not unpacker.eof:
                longest = _PIECE if finer_from is None else min(_PIECE, max(1, finer_from - len(output)))
                piece = unpacker.decompress(pending, longest)
                output += piece
                if len(output) > allowed:
                    raise too_large(f"of the {kind.name} file", len(output), allowed)
                pending = getattr(unpacker, "unconsumed_tail", b"")  # other unpackers keep it themselves
                is_full = bool(pending) or len(piece) == longest
            pending = unpacker.unused_data if unpacker.eof else b""
    except ImportError as error:
        raise UnsupportedFeature(
            f"a {kind.name} file, and this Python has no {error.name}", kind="no-unpacker"
        ) from error
    except _errors() as error:
        if kind.name in _OF_LZMA and "memory usage limit" in str(error).lower():
            fact = f"the {kind.name} file needs more than {_XZ_MEMORY:,} bytes of memory to be unpacked"
            raise LimitExceeded(fact, actual=_XZ_MEMORY) from error
        what = "ambiguous" if "header" in str(error) and kind is GZIP else "damaged"  # Python does not look at these
        raise MalformedFile(f"the {kind.name} file cannot be unpacked: {error}", kind=f"{what}-{kind.name}") from error
    if not unpacker.eof:
        fact = f"the {kind.name} file is truncated after {len(output):,} unpacked bytes"
        raise MalformedFile(fact, kind=f"truncated-{kind.name}", hint="Download the file again.")
    if first_end is not None:
        raise MalformedFile(f"it goes on behind its first {kind.name} member", kind=_BEHIND, offset=first_end)


def unpack(data: bytes, limits: Limits) -> bytes:
    """
    Return the content of frames of Zstandard.

    Raises:
        LimitExceeded: It grows larger than ``limits`` allow for its size.
        MalformedFile: It is damaged or ends too early.
        MissingPackage: zstandard is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise MissingPackage.named("zstandard", 'pip install "ckptool[zstd]"', kind="no-unpacker") from error
    allowed = limits.inflated(len(data))
    try:
        unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        with unpacker.stream_reader(BytesIO(data), read_across_frames=True) as reader:
            found: bytes = reader.read(allowed + 1)
        frame = zstandard.get_frame_parameters(data)
    except zstandard.ZstdError as error:
        raise MalformedFile(f"cannot be unpacked: {error}", kind="damaged-zstd") from error
    if len(found) > allowed:
        raise too_large("of Zstandard", len(found), allowed)
    announced = frame.content_size
    if announced < 1 << 63 and len(found) < announced:
        fact = f"the Zstandard frame ends after {len(found):,} of {announced:,} unpacked bytes"
        raise MalformedFile(fact, kind="truncated-zstd", needed=announced, actual=len(found))
    return found
