"""
Files compressed as a whole: gzip, zlib, bzip2, xz and lzma, told by their first bytes.

joblib writes all of them; a state dict that was packed by hand is in one, too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import BytesIO
from typing import Any, Final, NamedTuple, Protocol

from ckptool.archives.archive import too_large
from ckptool.errors import CkptoolError, LimitExceeded, MalformedFile, MissingPackage, UnsupportedFeature
from ckptool.limits import Limits
from ckptool.sources.source import Source

_CHUNK: Final = 1 << 16
"""What may be inflated to a thousand times as much before the next is read."""
_PIECE: Final = 1 << 20
"""Bytes that are unpacked at once."""
_XZ_MEMORY: Final = 1 << 28
"""What unpacking may take for its dictionary; the largest preset takes a quarter."""
_LZMA_DICTIONARY: Final = 1 << 26
"""What a dictionary needs at most, for no more is unpacked of a small file, whatever it announces."""
_WINDOW: Final = 1 << 27
"""What unpacking may take for its window: that of the highest level of the usual ones."""
_COMMAND: Final = 'pip install "ckptool[zstd]"'


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
"""The formats of ``lzma``, by their numbers there."""


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
_ZFILE: Final = b"ZF"
_ZFILE_HEAD: Final = 21
"""Bytes of its magic and of its length, in hexadecimal; in Python 2 a space may follow."""
BEGINNINGS: Final = (_ZFILE, *(kind.magic for kind in _KINDS))
_LEAST_ZLIB: Final = 8
_OF_LZMA: Final = ("xz", "lzma")
"""Python's reader of both tells each stream of a file anew, so that one may follow the other."""
_OF_ZLIB: Final = ("gzip", "zlib")
"""joblib's reader of both never ends behind the first member, whatever comes there."""
_LZMA_HEAD: Final = 5
"""Bytes of its properties and of the length of its dictionary."""
_BEHIND: Final = "bytes-behind"
"""The kind of error for bytes behind the last member: by then, all of it is unpacked."""
_NEEDS_MEMORY: Final = "memory usage limit"
_SHORT: Final = ("bzip2", "lzma", "zlib")
"""Those whose magic is so short that other files begin with it: a little of them is unpacked."""


def behind_length(head: bytes) -> int | None:
    """Return where zlib begins behind its length in text, as joblib wrote it before 0.10; None if this is none."""
    if not head.startswith(_ZFILE):
        return None
    begin = _ZFILE_HEAD + (head[_ZFILE_HEAD : _ZFILE_HEAD + 1] == b" ")
    return begin if _unpacks(ZLIB, head[begin:]) else None


def may_be_lzma(head: bytes) -> bool:
    """
    Say whether lzma could unpack a file that begins so: no magic says it, and its properties are any byte below 225.

    What says nothing else has what its reader asks for: a dictionary of a usual length, a size below 256 GiB or none.
    """
    length, nbytes = int.from_bytes(head[1:_LZMA_HEAD], "little"), int.from_bytes(head[_LZMA_HEAD:13], "little")
    bits = f"{length:b}".rstrip("0")
    is_usual = bits in ("", "1", "11") or length == (1 << 32) - 1
    is_head = len(head) > 13 and head[0] < 225 and head[13] == 0 and is_usual
    return is_head and (nbytes < 1 << 38 or nbytes == (1 << 64) - 1) and _unpacks(LZMA, head)


def compression_of(head: bytes) -> Compression | None:
    """Return how a file is compressed that begins with these bytes, or None if it is not."""
    for kind in _KINDS:
        if head.startswith(kind.magic):
            return kind if kind.name not in _SHORT or _unpacks(kind, head) else None
    return None


def _unpacks(kind: Compression, head: bytes) -> bool:
    if kind is ZLIB and len(head) < _LEAST_ZLIB:
        return False  # text, that begins with an x
    if kind.name == "lzma":  # with a dictionary too long to be unpacked, it is packed all the same
        longest = min(int.from_bytes(head[1:_LZMA_HEAD], "little"), _LZMA_DICTIONARY)
        head = head[:1] + longest.to_bytes(4, "little") + head[_LZMA_HEAD:]
    try:
        kind.start().decompress(head, len(head))
    except ImportError:
        return True  # decompress says what is missing
    except _errors():
        return False
    return True


def _errors() -> tuple[type[Exception], ...]:
    """Return what unpackers raise for bytes that they cannot unpack."""
    found: list[type[Exception]] = [zlib.error, OSError, EOFError, ValueError]
    try:
        import lzma
    except ImportError:
        return tuple(found)
    return (*found, lzma.LZMAError)


def decompress(source: Source, kind: Compression, limits: Limits) -> tuple[bytearray, int]:
    """
    Return what a compressed file holds, all members joined, and how many bytes of the file every reader takes for it.

    Raises:
        LimitExceeded: It grows larger than ``limits`` allow for its size.
        MalformedFile: It is damaged or ends too early.
        UnsupportedFeature: This Python was built without what unpacks it.
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
    """Return what can be unpacked of a compressed file, to the byte, and what is wrong with the rest."""
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
    """Unpack to ``output``: piece by piece, for a piece is lost with what is wrong in it; then byte by byte."""
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
                if kind.name in _OF_ZLIB and first_end is None:
                    first_end = position - len(pending)
                pending = _behind_padding(kind, pending)
                if not pending:
                    continue
                is_either = kind.name in _OF_LZMA
                if not is_either and not pending.startswith(kind.magic[:1]):  # some readers pass over it
                    fact = f"bytes that are no {kind.name} follow it"
                    raise MalformedFile(fact, kind=_BEHIND, offset=position - len(pending))
                unpacker = (_lzma(_AUTO) if is_either else kind.start)()
            is_full = True
            while is_full and not unpacker.eof:
                longest = _PIECE if finer_from is None else min(_PIECE, max(1, finer_from - len(output)))
                piece = unpacker.decompress(pending, longest)
                output += piece
                if len(output) > allowed:
                    raise too_large(f"of the {kind.name} file", len(output), allowed)
                pending = getattr(unpacker, "unconsumed_tail", b"")  # the others keep it themselves
                is_full = bool(pending) or len(piece) == longest
            pending = unpacker.unused_data if unpacker.eof else b""
    except ImportError as error:
        raise UnsupportedFeature(
            f"a {kind.name} file, and this Python has no {error.name}", kind="no-unpacker"
        ) from error
    except _errors() as error:
        if kind.name in _OF_LZMA and _NEEDS_MEMORY in str(error).lower():
            fact = f"the {kind.name} file needs more than {_XZ_MEMORY:,} bytes of memory to be unpacked"
            raise LimitExceeded(fact, actual=_XZ_MEMORY) from error
        raise MalformedFile(f"the {kind.name} file cannot be unpacked: {error}", kind=f"damaged-{kind.name}") from error
    if not unpacker.eof:
        fact = f"the {kind.name} file is truncated after {len(output):,} unpacked bytes"
        raise MalformedFile(fact, kind=f"truncated-{kind.name}", hint="Download the file again.")
    if first_end is not None:
        raise MalformedFile(f"it goes on behind its first {kind.name} member", kind=_BEHIND, offset=first_end)


def _behind_padding(kind: Compression, rest: bytes) -> bytes:
    """Return what follows a member, but for the zeros that tar on tape leaves; Python's gzip goes on behind any."""
    rest = rest.lstrip(b"\0") if kind is GZIP else rest
    return rest if rest.strip(b"\0") else b""


def unpack(data: bytes, limits: Limits) -> bytes:
    """
    Return what frames of Zstandard hold.

    Raises:
        LimitExceeded: It grows larger than ``limits`` allow for its size.
        MalformedFile: It is damaged or ends too early.
        MissingPackage: Nothing that unpacks it is installed.
    """
    zstandard = _package()
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


def _package() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise MissingPackage.named("zstandard", _COMMAND, kind="no-unpacker") from error
    return zstandard
