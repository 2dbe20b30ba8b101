"""
Names what a file is when it is no checkpoint, from its first bytes.

A table says which bytes stand where in which kind of file; a row has a function beside it only where the
bytes alone would raise false alarms, or where they hold a number worth telling. Text, JSON, protobuf and
msgpack have no mark of their own, so each has a reader that gives up at the first thing that does not fit.
"""

from __future__ import annotations

import codecs
import html
import json
import re
import struct
import zlib
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ckptool.errors import NotACheckpoint, TruncatedFile, UnsupportedFeature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptool.files import Source

Foreign = NotACheckpoint | TruncatedFile | UnsupportedFeature

_HEAD_NBYTES = 65_536
_TAIL_NBYTES = 4_096
_INDEX_NBYTES = 32 << 20
_SHORTEST_GZIP = 20
_AGAIN = "Download the file again."
_ACCESS = "Check the address and whether it asks for a login, then download the file again."


def name_foreign(source: Source) -> Foreign | None:
    """
    Say what a file is that no checkpoint format accepts, or return None if nothing here knows it.

    The error is returned for the caller to raise; nothing is raised but what ``source.read`` raises. A
    checkpoint is never named, whole or cut short: no zip, no tar, no pickle of any protocol, no safetensors
    header. Reads 64 KiB from the start and 4 KiB from the end; JSON up to 32 MiB, because an index of shards
    can be that long.
    """
    head = _Head.of(source)
    for find in (_by_content, _by_magic, _by_markup, _by_json, _by_protobuf, _by_msgpack, _by_text):
        found = find(head)
        if found is not None:
            return found
    return None


def name_foreign_zip(names: Sequence[str]) -> NotACheckpoint | None:
    """
    Say what a zip is from the names of its members, or return None if they are laid out as torch does.

    A zip of no particular kind is an ``archive``, and the hint names a member that looks like weights.
    """
    some = names[:_NAMES_LOOKED_AT]
    if any(_TORCH_MEMBER.fullmatch(name) for name in some):
        return None
    files = [name for name in names if not name.endswith("/") and not name.startswith("__MACOSX/")]
    if files and all(name.endswith(".npy") for name in files):
        return _not(f"a numpy .npz archive of {_some_of([name[:-4] for name in files], 'array')}", "npz")
    for pattern, kind, what, hint in _ZIPS:
        if any(pattern.fullmatch(name) for name in some):
            return _not(f"{what}, a zip of {_count(len(files), 'file')}", kind, hint)
    if not files:
        return _not("a zip archive without files", "archive")
    weights = next((name for name in files if name.lower().endswith(_WEIGHTS)), None)
    hint = f"Unpack it and open {_quoted(weights)}." if weights is not None else None
    return _not(f"a zip archive of {_some_of(files, 'file')}", "archive", hint)


@dataclass(frozen=True, slots=True)
class _Head:
    source: Source
    nbytes: int
    data: bytes
    tail: bytes
    text: str | None
    """The head as text, None if it is not; without a byte order mark."""

    @classmethod
    def of(cls, source: Source) -> _Head:
        nbytes = source.nbytes
        data = source.read(0, min(nbytes, _HEAD_NBYTES))
        size = min(nbytes, _TAIL_NBYTES)
        tail = data[-size:] if nbytes <= _HEAD_NBYTES else source.read(nbytes - size, size)
        return cls(source, nbytes, data, tail, _decoded(data, whole=nbytes <= _HEAD_NBYTES))

    @property
    def whole(self) -> bool:
        return self.nbytes <= _HEAD_NBYTES

    @property
    def size(self) -> str:
        return _count(self.nbytes, "byte")

    def number(self, layout: str, offset: int) -> int:
        """Return one integer, or -1 where the head is too short for it."""
        if offset < 0 or offset + struct.calcsize(layout) > len(self.data):
            return -1
        return int(struct.unpack_from(layout, self.data, offset)[0])


def _not(what: str, kind: str, hint: str | None = None) -> NotACheckpoint:
    return NotACheckpoint(f"not a checkpoint: {what}", kind=kind, hint=hint)


def _quoted(text: str, limit: int = 80) -> str:
    """Quote on one line, with what could steer a terminal or turn the reading direction escaped."""
    line = " ".join(text[: 16 * limit].split())
    cut = line[:limit]
    while len(repr(cut)) > limit + 2:  # escapes are longer than what they stand for
        cut = cut[:-1]
    return repr(cut if cut == line and len(text) <= 16 * limit else cut + "…")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _some_of(names: Sequence[str], noun: str) -> str:
    shown = ", ".join(_quoted(name, 40) for name in names[:3])
    return f"{_count(len(names), noun)}: {shown}" + (
        f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    )


def _by_content(head: _Head) -> Foreign | None:
    if not head.nbytes:
        hint = "Download or save the file again."
        return TruncatedFile("empty: the file has 0 bytes", kind="empty", hint=hint, actual=0)
    if head.data.strip(b"\0"):
        return None
    if head.whole:
        fact = "the only byte is zero" if head.nbytes == 1 else f"all {head.nbytes:,} bytes are zero"
    elif head.tail.strip(b"\0"):
        fact = f"the first {len(head.data):,} of {head.nbytes:,} bytes are zero"
    else:
        fact = (
            f"the first {len(head.data):,} and the last {len(head.tail):,} of {head.nbytes:,} bytes are zero"
        )
    return _not(f"{fact}, as in a download that reserved its space and stopped", "zeros", _AGAIN)


@dataclass(frozen=True, slots=True)
class _Row:
    kind: str
    what: str
    magic: bytes
    offset: int = 0
    """Negative: counted from the end of the file."""
    then: tuple[int, bytes] | None = None
    """A second mark, at its own offset."""
    hint: str | None = None
    describe: Callable[[_Head], str | None] | None = None
    """Returns the whole phrase, or None if the row does not apply after all."""
    error: type[NotACheckpoint | UnsupportedFeature] = NotACheckpoint

    def phrase(self, head: _Head) -> str | None:
        if not self._at(head, self.offset, self.magic) or (self.then and not self._at(head, *self.then)):
            return None
        return f"{self.what} of {head.size}" if self.describe is None else self.describe(head)

    @staticmethod
    def _at(head: _Head, offset: int, magic: bytes) -> bool:
        if offset < 0:
            return len(head.tail) >= -offset and head.tail.startswith(magic, len(head.tail) + offset)
        return head.data.startswith(magic, offset)


def _by_magic(head: _Head) -> Foreign | None:
    gzip = _hollow_gzip(head)
    if gzip is not None:
        return gzip
    for row in _ROWS:
        if head.text is not None and row.kind not in _TEXT_KINDS:
            continue  # prose can say PTMF at its fifth byte
        phrase = row.phrase(head)
        if phrase is not None:
            prefix = "not a checkpoint" if row.error is NotACheckpoint else "not handled"
            return row.error(f"{prefix}: {phrase}", kind=row.kind, hint=row.hint)
    return None


def _hollow_gzip(head: _Head) -> TruncatedFile | None:
    if not head.data.startswith(b"\x1f\x8b\x08"):
        return None
    if head.nbytes < _SHORTEST_GZIP:
        fact = f"truncated: a gzip file of {head.nbytes:,} bytes, the shortest has {_SHORTEST_GZIP}"
        return TruncatedFile(fact, kind="gzip", hint=_AGAIN, needed=_SHORTEST_GZIP, actual=head.nbytes)
    stream = zlib.decompressobj(wbits=31)
    try:
        inside = stream.decompress(head.data, 1)
    except zlib.error:
        return None
    if inside or not stream.eof or not head.whole or stream.unused_data.strip(b"\0"):
        return None
    fact = f"empty: a gzip file of 0 bytes, {head.nbytes:,} compressed"
    return TruncatedFile(fact, kind="gzip-empty", hint="Download or compress the file again.", actual=0)


def _lfs(head: _Head) -> str | None:
    pointer = head.data[:1024].decode("ascii", "replace")
    size = re.search(r"^size (\d{1,19})\s*$", pointer, re.MULTILINE)
    oid = re.search(r"^oid sha256:([0-9a-f]{12})", pointer, re.MULTILINE)
    what = "a Git LFS pointer"
    if size:
        what += f" to a file of {_count(int(size[1]), 'byte')}"
    return what + (f" (sha256 {oid[1]}…)" if oid else "")


def _gzip(head: _Head) -> str:
    what = f"a gzip file of {head.size}"
    if len(head.data) > 10 and head.data[3] & 0x0C == 0x08:  # a name, and no extra field before it
        what += f" that holds {_quoted(head.data[10:1034].split(bytes(1))[0].decode('latin-1'))}"
    return what


def _zlib(head: _Head) -> str | None:
    stream = zlib.decompressobj()
    try:
        inside = stream.decompress(head.data, 64)
    except zlib.error:
        return None
    if len(inside) < 64 and not stream.eof:
        return None
    return f"a zlib stream of {head.size}, as joblib writes them"


def _png(head: _Head) -> str:
    return _pixels(head, "a PNG image", head.number(">I", 16), head.number(">I", 20))


def _gif(head: _Head) -> str:
    return _pixels(head, "a GIF image", head.number("<H", 6), head.number("<H", 8))


def _bmp(head: _Head) -> str | None:
    if head.number("<I", 14) not in (12, 40, 52, 56, 64, 108, 124) or head.number("<I", 6):
        return None  # "BM" alone is also the length of a safetensors header
    return f"a BMP image of {head.size}"


def _ico(head: _Head) -> str | None:
    icons = head.number("<H", 4)
    if not 0 < icons <= 64 or head.number("<I", 18) != 6 + 16 * icons:
        return None
    return f"a Windows icon of {_count(icons, 'image')}"


def _pixels(head: _Head, what: str, width: int, height: int) -> str:
    if width < 0 or height < 0:
        return f"{what} of {head.size}"
    return f"{what} of {width:,} × {height:,} pixels"


def _npy(head: _Head) -> str:
    text = head.data[: 10 + 512].decode("latin-1")
    dtype = re.search(r"'descr': '([^']{1,40})'", text)
    shape = re.search(r"'shape': \(([\d, ]{0,200})\)", text)
    what = f"a numpy array of shape ({shape[1].strip()})" if shape else "a numpy array"
    return what + (f", dtype {_quoted(dtype[1])}" if dtype else "") + f", in {head.size}"


def _keras(head: _Head) -> str | None:
    if not re.search(rb"keras_version|model_weights|layer_names|_layer_checkpoint_dependencies", head.data):
        return None
    return f"a Keras model in an HDF5 file of {head.size}"


def _gguf(head: _Head) -> str:
    for layout, wide in (("<I", "<Q"), (">I", ">Q")):
        version = head.number(layout, 4)
        if 1 <= version < 256:
            tensors = head.number(layout if version == 1 else wide, 8)
            what = f"a GGUF file, version {version}"
            return what if tensors < 0 else f"{what}, with {_count(tensors, 'tensor')}"
    return f"a GGUF file of {head.size}"


def _executorch(head: _Head) -> str | None:
    number = head.data[6:8]
    return f"an ExecuTorch program of {head.size}" if number.isdigit() else None


def _pyc(head: _Head) -> str | None:
    magic = head.number("<H", 0)
    flagged = 3390 <= magic < 4000 and 0 <= head.number("<I", 4) <= 3  # PEP 552, Python 3.7
    if not flagged and not 3000 <= magic < 3390 and not 62_000 <= magic <= 62_300:
        return None
    return f"compiled Python code (.pyc) of {head.size}"


def _windows(head: _Head) -> str | None:
    at = head.number("<I", 60)
    if at < 0 or head.data[at : at + 4] != b"PE\0\0":
        return None
    return f"a Windows executable or library of {head.size}"


def _cafebabe(head: _Head) -> str | None:
    slices = head.number(">I", 4)
    if 0 < slices < 32:
        return f"a macOS universal binary for {_count(slices, 'architecture')}"
    return f"a Java class file of {head.size}" if head.number(">H", 6) >= 45 else None


def _torch7_table(head: _Head) -> str | None:
    # int type, int index, int entries; then the first key, which is a number, a string or a boolean
    if head.number("<i", 8) < 0 or head.number("<i", 12) not in (1, 2, 5):
        return None
    return f"a Lua Torch7 file that holds a table of {_count(head.number('<i', 8), 'value')}"


def _torch7_object(head: _Head) -> str | None:
    at = 12 + head.number("<i", 8)
    if not re.fullmatch(rb"V \d{1,4}", head.data[12:at]):  # the class version, then the class
        return None
    name = head.data[at + 4 : at + 4 + min(80, max(0, head.number("<i", at)))].decode("latin-1")
    return f"a Lua Torch7 file that holds {_quoted(name)}"


def _mobile(head: _Head) -> str:
    return f"a TorchScript model for mobile devices, a flatbuffer (PTMF) of {head.size}"


def _mxnet(head: _Head) -> str | None:
    arrays = head.number("<Q", 16)
    return f"MXNet parameters: {_count(arrays, 'array')}" if 0 <= arrays < 1 << 32 else None


def _dcp_metadata(head: _Head) -> str | None:
    if b"torch.distributed.checkpoint.metadata" not in head.data[:4096]:
        return None
    return f"the .metadata of a distributed checkpoint (DCP), {head.size}"


_GUNZIP, _UNPACK = "Decompress it first, with {}.", "Unpack it and open the file inside."
_EXPORTED = "Use the PyTorch file that it was exported from."
_REAL = "Open the file of the same name without '._' at its start."
_DCP = "Join its folder: python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE."
_PULL = "Run 'git lfs pull'."

_TEXT_KINDS = ("lfs-pointer", "pdf")
_ROWS = (
    _Row("lfs-pointer", "", b"version https://git-lfs.github.com/", hint=_PULL, describe=_lfs),
    _Row("lfs-pointer", "", b"version https://hawser.github.com/", hint=_PULL, describe=_lfs),
    # compressed
    _Row("gzip", "", b"\x1f\x8b\x08", hint=_GUNZIP.format("gunzip"), describe=_gzip),
    _Row("bzip2", "a bzip2 file", b"BZh", then=(4, b"1AY&SY"), hint=_GUNZIP.format("bunzip2")),
    _Row("bzip2", "an empty bzip2 file", b"BZh", then=(4, b"\x17rE8P\x90"), hint=_AGAIN),
    _Row("xz", "an xz file", b"\xfd7zXZ\0", hint=_GUNZIP.format("unxz")),
    _Row("zstd", "a Zstandard file", b"\x28\xb5\x2f\xfd", hint=_GUNZIP.format("'zstd -d'")),
    _Row("lz4", "an LZ4 file", b"\x04\x22\x4d\x18", hint=_GUNZIP.format("'lz4 -d'")),
    _Row("zlib", "", b"\x78\x01", describe=_zlib),
    _Row("zlib", "", b"\x78\x5e", describe=_zlib),
    _Row("zlib", "", b"\x78\x9c", describe=_zlib),
    _Row("zlib", "", b"\x78\xda", describe=_zlib),
    # archives
    _Row("7z", "a 7-Zip archive", b"7z\xbc\xaf\x27\x1c", hint=_UNPACK),
    _Row("rar", "a RAR archive", b"Rar!\x1a\x07", hint=_UNPACK),
    _Row("archive", "a Windows cabinet", b"MSCF\0\0\0\0", hint=_UNPACK),
    _Row("archive", "an ar archive (static library or Debian package)", b"!<arch>\n"),
    # other frameworks
    _Row("numpy", "", b"\x93NUMPY", hint="Read it with numpy.load.", describe=_npy),
    _Row("keras", "", b"\x89HDF\r\n\x1a\n", hint="Read it with Keras.", describe=_keras),
    _Row("hdf5", "an HDF5 file", b"\x89HDF\r\n\x1a\n", hint="Read it with h5py."),
    _Row("matlab", "a MATLAB file", b"MATLAB 5.0 MAT-file", hint="Read it with scipy.io.loadmat."),
    _Row("matlab", "a MATLAB 7.3 file", b"MATLAB 7.3 MAT-file", hint="Read it with h5py."),
    _Row("gguf", "", b"GGUF", hint="Run it with llama.cpp.", describe=_gguf),
    _Row("ggml", "a GGML file", b"lmgg", hint="Run it with whisper.cpp or an old llama.cpp."),
    _Row("ggml", "a GGMF file", b"fmgg", hint="Convert it to GGUF with llama.cpp."),
    _Row("ggml", "a GGJT file", b"tjgg", hint="Convert it to GGUF with llama.cpp."),
    _Row("ggml", "a GGLA adapter", b"algg", hint="Convert it to GGUF with llama.cpp."),
    _Row("tflite", "a TensorFlow Lite model", b"TFL3", 4),
    _Row(
        "torch-mobile-flatbuffer", "", b"PTMF", 4, hint=_EXPORTED, describe=_mobile, error=UnsupportedFeature
    ),
    _Row("executorch", "", b"ET", 4, hint=_EXPORTED, describe=_executorch),
    _Row("onnx", "an ONNX Runtime model", b"ORTM", 4, hint=_EXPORTED),
    _Row("tensorrt", "a TensorRT engine", b"ftrt", then=(6, b"\0\0"), hint=_EXPORTED),
    _Row("tensorrt", "a TensorRT engine", b"ptrt", then=(6, b"\0\0"), hint=_EXPORTED),
    _Row("torch7", "", b"\4\0\0\0\1\0\0\0", describe=_torch7_table),
    _Row("torch7", "", b"\3\0\0\0\1\0\0\0", describe=_torch7_object),
    _Row("mxnet", "", b"\x12\1\0\0\0\0\0\0" + bytes(8), describe=_mxnet),
    _Row("darknet", "Darknet weights, version 0.1,", bytes(4) + b"\1\0\0\0" + bytes(4)),
    _Row("darknet", "Darknet weights, version 0.2,", bytes(4) + b"\2\0\0\0" + bytes(4)),
    _Row("darknet", "Darknet weights, version 0.2,", bytes(4) + b"\2\0\0\0\5\0\0\0"),
    _Row("fasttext", "a fastText model", b"\xba\x16\x4f\x2f\x0c\0\0\0"),
    _Row("tensorboard", "a TensorBoard event file", b"brain.Event:", 23, hint="Read it with TensorBoard."),
    _Row(
        "tensorflow",
        "a TensorFlow checkpoint index or LevelDB table",
        b"\x57\xfb\x80\x8b\x24\x75\x47\xdb",
        -8,
    ),
    _Row("dcp-metadata", "", b"\x80", hint=_DCP, describe=_dcp_metadata, error=UnsupportedFeature),
    # images, documents, media
    _Row("image", "", b"\x89PNG\r\n\x1a\n", describe=_png),
    _Row("image", "a JPEG image", b"\xff\xd8\xff"),
    _Row("image", "", b"GIF87a", describe=_gif),
    _Row("image", "", b"GIF89a", describe=_gif),
    _Row("image", "a WebP image", b"RIFF", then=(8, b"WEBP")),
    _Row("image", "", b"BM", describe=_bmp),
    _Row("image", "a TIFF image", b"II*\0"),
    _Row("image", "a TIFF image", b"MM\0*"),
    _Row("image", "a Photoshop image", b"8BPS\0\1"),
    _Row("image", "", b"\0\0\1\0", describe=_ico),
    _Row("image", "a HEIF image", b"ftypheic", 4),
    _Row("image", "a HEIF image", b"ftypmif1", 4),
    _Row("image", "an AVIF image", b"ftypavif", 4),
    _Row("media", "an MP4 or QuickTime file", b"ftyp", 4),
    _Row("media", "a WAV file", b"RIFF", then=(8, b"WAVE")),
    _Row("media", "an AVI file", b"RIFF", then=(8, b"AVI ")),
    _Row("media", "an Ogg file", b"OggS\0"),
    _Row("media", "an MP3 file", b"ID3", then=(5, b"\0")),
    _Row("media", "a FLAC file", b"fLaC\0\0\0\x22"),
    _Row("media", "a Matroska or WebM file", b"\x1a\x45\xdf\xa3"),
    _Row("pdf", "a PDF document", b"%PDF-"),
    _Row("office", "a Microsoft Office document", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),
    # programs and data
    _Row("python-bytecode", "", b"\r\n", 2, describe=_pyc),
    _Row("executable", "an ELF executable or library", b"\x7fELF"),
    _Row("executable", "a macOS executable or library", b"\xcf\xfa\xed\xfe"),
    _Row("executable", "a macOS executable or library", b"\xce\xfa\xed\xfe"),
    _Row("executable", "", b"\xca\xfe\xba\xbe", describe=_cafebabe),
    _Row("executable", "", b"MZ", describe=_windows),
    _Row("executable", "a WebAssembly module", b"\0asm"),
    _Row("sqlite", "a SQLite database", b"SQLite format 3\0"),
    _Row("lmdb", "an LMDB database", b"\xde\xc0\xef\xbe", 16),
    _Row("parquet", "a Parquet file", b"PAR1"),
    _Row("arrow", "an Arrow file", b"ARROW1\0\0"),
    _Row("arrow", "a Feather file", b"FEA1"),
    _Row("appledouble", "macOS metadata about another file", b"\0\5\x16\7\0\2\0\0", hint=_REAL),
    _Row("appledouble", "a macOS folder's .DS_Store", b"\0\0\0\1Bud1"),
    _Row("encrypted", "a file encrypted by OpenSSL", b"Salted__", hint="Decrypt it first."),
)


_NAMES_LOOKED_AT = 10_000
_WEIGHTS = (".pt", ".pth", ".safetensors", ".ckpt", ".bin", ".pkl", ".tar")
_TORCH_MEMBER = re.compile(
    r"(?:[^/]+/)?(?:data|constants|attributes)\.pkl|(?:[^/]+/)?(?:archive_format|serialized_exported_program\.json)"
    r"|(?:[^/]+/)?\.data/extern_modules|[^/]+/model\.json"
)
_ZIPS = tuple(
    (re.compile(pattern, re.DOTALL), kind, what, hint)
    for pattern, kind, what, hint in (
        (r"(?:.*/)?Data/com\.apple\.CoreML/.*", "coreml", "a Core ML package", _EXPORTED),
        (r"(?:.*/)?model\.weights\.h5", "keras", "a Keras model", "Read it with Keras."),
        (r"(?:.*/)?saved_model\.pb", "tensorflow", "a TensorFlow SavedModel", "Read it with TensorFlow."),
        (r"MAR-INF/MANIFEST\.json", "mar", "a TorchServe model archive", _UNPACK),
        (r"word/document\.xml", "office", "a Word document", None),
        (r"xl/workbook\.(?:xml|bin)", "office", "an Excel workbook", None),
        (r"ppt/presentation\.xml", "office", "a PowerPoint presentation", None),
        (r"content\.xml", "office", "an OpenDocument file", None),
        (r"META-INF/container\.xml", "epub", "an EPUB book", None),
        (r"AndroidManifest\.xml", "apk", "an Android package", None),
        (r"[^/]+\.dist-info/WHEEL", "wheel", "a Python wheel", "Install it with pip."),
        (r"META-INF/MANIFEST\.MF", "jar", "a Java archive", None),
    )
)


_HTML = re.compile(r"\s*<(?:!doctype html|html|head|body|title|script|meta)\b", re.IGNORECASE)
_XML = re.compile(r"\s*<(?:\?xml|error>|svg)", re.IGNORECASE)


def _by_markup(head: _Head) -> NotACheckpoint | None:
    text = head.text
    if text is None or not re.match(r"\s*<", text):
        return None
    start = text[:1024].lower()
    size = head.size
    if _HTML.match(text) or "<html" in start:
        title = _element(text, "title")
        what = f"an HTML page of {size}" + (f" titled {_quoted(title)}" if title else "")
        return _not(what, "html", "Download the file itself: the address gave a page about it.")
    if not _XML.match(text):
        return None
    if "<svg" in start:
        return _not(f"an SVG image of {size}", "image")
    said = [part for part in (_element(text, "code"), _element(text, "message")) if part]
    if said and "<error" in start:
        return _not(f"an XML error message: {_quoted(': '.join(said))}", "xml", _ACCESS)
    return _not(f"an XML file of {size}", "xml")


def _element(text: str, name: str) -> str:
    """Return what the first element of this name holds, unescaped; empty if there is none."""
    match = re.search(f"<{name}(?:\\s[^>]{{0,200}})?>", text, re.IGNORECASE)
    if not match:
        return ""
    inside = text[match.end() : match.end() + 1000]
    return " ".join(html.unescape(inside.split("<")[0]).split())


_OBJECT = re.compile(r"\s*\{\s*")
_KEY = re.compile(r'\s*"((?:[^"\\\n]|\\.){0,1000})"\s*:\s*')
_COMMA = re.compile(r"\s*,")
_WEIGHT_MAP = re.compile(rb'"weight_map"\s{0,100}:\s{0,100}\{')
_WEIGHT = re.compile(rb'\s*"(?:[^"\\]|\\.){0,4000}"\s*:\s*"((?:[^"\\]|\\.){0,4000})"\s*(,|\})')
_SHARDS_TOLD_APART = 10_000
_JSON_ERRORS = ("error", "message", "detail", "error_description", "Message", "msg")
_JSON_KINDS = (
    ({"nbformat", "cells"}, "a Jupyter notebook", None),
    ({"peft_type"}, "the configuration of an adapter", "Open the weights beside it."),
    ({"architectures"}, "the configuration of a model", "Open the weights beside it."),
    ({"model_type"}, "the configuration of a model", "Open the weights beside it."),
    ({"added_tokens", "model"}, "a tokenizer", "Open the weights beside it."),
)


def _by_json(head: _Head) -> NotACheckpoint | None:
    text = head.text
    if text is None:
        return None
    start = _OBJECT.match(text)
    if not start:
        return _json_array(head, text)
    if not _KEY.match(text, start.end()) and text[start.end() :].strip() != "}":
        return None
    index = _shard_index(head)
    if index is not None:
        return index
    pairs = _json_pairs(text, start.end())
    said = _said_by(pairs) if head.nbytes <= 8192 else None
    if said is not None:
        return _not(f"a JSON error message: {_quoted(said)}", "json", _ACCESS)
    what, hint = next(
        ((what, hint) for keys, what, hint in _JSON_KINDS if keys <= pairs.keys()), ("a JSON file", None)
    )
    keys = ", ".join(_quoted(key, 30) for key in islice(pairs, 4)) + (", …" if len(pairs) > 4 else "")
    return _not(f"{what}, {head.size} of JSON" + (f" with {keys}" if keys else ""), "json", hint)


def _json_array(head: _Head, text: str) -> NotACheckpoint | None:
    if not text.lstrip().startswith("["):
        return None
    length = None
    try:
        length = len(json.loads(text))
    except RecursionError:
        pass
    except ValueError:
        if head.whole or not re.match(r'\s*\[\s*["{\[]', text):
            return None
    return _not(
        f"a JSON file of {head.size}: a list" + ("" if length is None else f" of {_count(length, 'value')}"),
        "json",
    )


def _json_pairs(text: str, at: int) -> dict[str, object]:
    """Return the members of the outermost object up to where the head is cut or the JSON breaks off."""
    pairs: dict[str, object] = {}
    decoder = json.JSONDecoder()
    while key := _KEY.match(text, at):
        pairs[key[1]] = None
        try:
            pairs[key[1]], at = decoder.raw_decode(text, key.end())
        except (ValueError, RecursionError):
            break
        comma = _COMMA.match(text, at)
        if not comma:
            break
        at = comma.end()
    return pairs


def _said_by(pairs: dict[str, object]) -> str | None:
    for key in _JSON_ERRORS:
        value = pairs.get(key)
        if isinstance(value, dict):
            value = value.get("message")
        if isinstance(value, str) and value.strip():
            return value
    return None


def _shard_index(head: _Head) -> NotACheckpoint | None:
    data = head.data if head.whole else head.source.read(0, min(head.nbytes, _INDEX_NBYTES))
    match = _WEIGHT_MAP.search(data)
    if not match:
        return None
    tensors, at, end = 0, match.end(), b""
    shards: dict[bytes, None] = {}
    while end != b"}" and (entry := _WEIGHT.match(data, at)):
        tensors += 1
        at, end = entry.end(), entry[2]
        if len(shards) <= _SHARDS_TOLD_APART:
            shards.setdefault(entry[1])
    if not tensors:
        return None
    least = "at least " if end != b"}" else ""
    files = (
        f"over {_SHARDS_TOLD_APART:,} files"
        if len(shards) > _SHARDS_TOLD_APART
        else _count(len(shards), "file")
    )
    first = _quoted(next(iter(shards)).decode("utf-8", "replace"))
    what = f"an index of {least}{_count(tensors, 'tensor')} in {files}"
    return _not(what, "index-json", f"Open the files that it names, such as {first}.")


class _Field(NamedTuple):
    number: int
    value: int
    """Of a number; -1 for bytes."""
    start: int
    stop: int


def _by_protobuf(head: _Head) -> NotACheckpoint | None:
    data = head.data
    fields = list(islice(_fields(data, 0, 1 << 62), 16))  # the file may be cut short
    if len(fields) < 2 and not (fields and fields[0].stop > len(data)):
        return None
    size = head.size
    if fields[0].number == 1 and fields[0].value > 0:
        if _is_onnx(data, fields):
            strings = [
                _string(data, field) for field in fields if field.number in (2, 3) and field.value < 0
            ][:2]
            by = f", written by {_quoted(' '.join(strings))}" if strings else ""
            return _not(f"an ONNX model of {size}, IR version {fields[0].value}{by}", "onnx", _EXPORTED)
        if _is_coreml(data, fields):
            return _not(f"a Core ML model of {size}, version {fields[0].value}", "coreml", _EXPORTED)
        if _is_saved_model(data, fields):
            return _not(f"a TensorFlow SavedModel of {size}", "tensorflow", "Read it with TensorFlow.")
        return None
    if _is_graph_def(data, fields):
        return _not(f"a TensorFlow graph of {size}", "tensorflow", "Read it with TensorFlow.")
    if _is_caffe(data, fields):
        return _not(f"a Caffe model of {size} named {_quoted(_string(data, fields[0]))}", "caffe")
    return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number and where it ends; -1 where it does not."""
    value = 0
    for shift, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    return -1, at


def _fields(data: bytes, at: int, stop: int) -> Iterator[_Field]:
    """Walk the fields of one message in the head, until one does not fit inside ``stop``."""
    while at < min(stop, len(data)):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        value = -1
        if tag < 8 or number >= 1 << 29 or wire not in (0, 1, 2, 5):
            return
        start = at
        if wire in (0, 2):
            size, start = _varint(data, at)
            if size < 0:
                return
            value = size if wire == 0 else -1
            at = start if wire == 0 else start + size
        else:
            at += 8 if wire == 1 else 4
        if at > stop:
            return
        yield _Field(number, value, start, at)


def _inside(data: bytes, field: _Field) -> list[_Field]:
    return list(islice(_fields(data, field.start, field.stop), 4)) if field.value < 0 else []


def _string(data: bytes, field: _Field) -> str:
    """Return a field of printable ASCII, or an empty string."""
    inside = data[field.start : field.stop]
    whole = field.value < 0 and field.stop <= len(data)
    return inside.decode("ascii") if whole and re.fullmatch(rb"[ -~]+", inside) else ""


def _is_onnx(data: bytes, fields: list[_Field]) -> bool:
    # onnx.proto, ModelProto: 1 ir_version, 2-4 and 6 strings, 5 model_version, 7 graph, 8 opset_import
    for field in fields[1:]:
        if field.number == 7:
            first = _inside(data, field)[:1]
            if not first or first[0].number not in (1, 2):
                return False
            node = _inside(data, first[0])[:1] if first[0].number == 1 else first
            return bool(node) and node[0].number <= 4 and bool(_string(data, node[0]))
        if field.number in (2, 3, 4) and field.start < field.stop and not _string(data, field):
            return False
        if field.number not in (2, 3, 4, 5, 6, 8, 14) or (field.number == 5) != (field.value >= 0):
            return False
    return False


def _is_coreml(data: bytes, fields: list[_Field]) -> bool:
    # Model.proto: 1 specificationVersion, 2 description {1 input {1 name, 2 shortDescription, 3 type}}
    inputs = _inside(data, fields[1])[:1] if fields[1].number == 2 else []
    feature = _inside(data, inputs[0]) if inputs and inputs[0].number == 1 else []
    named = len(feature) > 1 and feature[0].number == 1 and feature[1].number in (2, 3)
    return named and bool(_string(data, feature[0]))


def _is_saved_model(data: bytes, fields: list[_Field]) -> bool:
    # saved_model.proto: 1 version, 2 meta_graphs {1 meta_info_def {2 ops {1 op {1 name}}, 4 tags, 5 version}}
    if fields[0].value != 1 or fields[1].number != 2:
        return False
    path = [fields[1]]
    while path[-1].number in (1, 2) and len(path) < 5:
        inside = _inside(data, path[-1])
        if not inside:
            break
        path.append(inside[0])
    numbers = [field.number for field in path]
    if numbers[:3] == [2, 1, 2]:
        return len(path) == 5 and re.fullmatch(r"[A-Z_]\w*", _string(data, path[4])) is not None
    return numbers[:2] == [2, 1] and numbers[2:3] in ([4], [5]) and bool(_string(data, path[2]))


def _is_graph_def(data: bytes, fields: list[_Field]) -> bool:
    # graph.proto: 1 node {1 name, 2 op}, again and again
    node = _inside(data, fields[0]) if fields[0].number == 1 else []
    if [field.number for field in node[:2]] != [1, 2] or (len(fields) > 1 and fields[1].number > 4):
        return False
    return bool(_string(data, node[0])) and re.fullmatch(r"[A-Z]\w*", _string(data, node[1])) is not None


def _is_caffe(data: bytes, fields: list[_Field]) -> bool:
    # caffe.proto, NetParameter: 1 name, 100 layer {1 name, 2 type}
    layer = next((_inside(data, field) for field in fields if field.number == 100), [])
    named = [field.number for field in layer[:2]] == [1, 2] and all(_string(data, part) for part in layer[:2])
    return named and fields[0].number == 1 and bool(_string(data, fields[0]))


_MSGPACK_FIXED = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0),
    **dict.fromkeys((0xCC, 0xD0), 1),
    **dict.fromkeys((0xCD, 0xD1), 2),
    **dict.fromkeys((0xCA, 0xCE, 0xD2), 4),
    **dict.fromkeys((0xCB, 0xCF, 0xD3), 8),
    **dict.fromkeys((0xDC, 0xDE), 2),
    **dict.fromkeys((0xDD, 0xDF), 4),
}
_MSGPACK_SIZED = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_MSGPACK_EXTENDED = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}


def _by_msgpack(head: _Head) -> NotACheckpoint | None:
    """Find the first array in a map of names, as flax.serialization.to_bytes writes it."""
    data, at = head.data, 1
    if not 0x81 <= data[0] <= 0x8F and data[0] not in (0xDE, 0xDF):
        return None
    at += _MSGPACK_FIXED.get(data[0], 0)
    name = data[at + 1 : at + 1 + (data[at] & 0x1F)] if at < len(data) and data[at] >> 5 == 5 else b""
    if not re.fullmatch(rb"[ -~]+", name):
        return None
    while at < len(data):
        byte = data[at]
        if byte in _MSGPACK_EXTENDED:
            after = at + 1 + struct.calcsize(_MSGPACK_EXTENDED[byte])
            if not re.match(rb"\x01\x93[\x90-\x9f]", data[after : after + 3]):  # array: [shape, dtype, bytes]
                return None
            what = f"Flax parameters (msgpack) in {head.size}, the first under"
            return _not(f"{what} {_quoted(name.decode('ascii'))}", "flax", "Read it with flax.serialization.")
        if byte in _MSGPACK_SIZED:
            layout = _MSGPACK_SIZED[byte]
            at += 1 + struct.calcsize(layout) + max(0, head.number(layout, at + 1))
        elif byte in _MSGPACK_FIXED:
            at += 1 + _MSGPACK_FIXED[byte]
        elif 0xA0 <= byte < 0xC0:
            at += 1 + (byte & 0x1F)
        elif byte < 0xA0 or byte >= 0xE0:  # a small number, or the start of a small map or array
            at += 1
        else:
            return None
    return None


_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f]")
_MARKUP = re.compile(rb"\s*<(?:!doctype|\?xml|html)", re.IGNORECASE)
_SAID = re.compile(
    r"not found|access ?denied|forbidden|unauthori[sz]ed|invalid username|too many requests"
    r"|rate limit exceeded|bad gateway|gateway time-?out|service unavailable|internal server error"
    r"|has expired|no ?such ?key|is restricted|quota exceeded|^[45]\d\d(?:: | [A-Z])",
    re.IGNORECASE,
)
_PICKLED = (
    r"(?:[(012NRabdelostu)\]}]|[gp]\d+\n|I-?\d+\n|L-?\d+L?\n|F[-+.\w]+\n|S['\"][^\n]*\n|V[^\n]*\n|P\S*\n"
    r"|[ci][\w.]+\n[\w.<>]+\n)"
)
_PICKLED_TEXT = re.compile(
    rf"(?=[(NILFSVPci)\]}}]){_PICKLED}+\.|{_PICKLED}{{16}}|\(?[dlt]p\d+\n|\(?[ci][\w.]+\n[\w.<>]+\n[p(]"
)
"""A pickle of protocol 0, which is text: up to its STOP, or as much as prose would not begin with."""
_FOLDER, _LINK = "Open the files in that folder.", "Open the file that it names."
_TEXTS = tuple(
    (re.compile(pattern), kind, what, hint)
    for pattern, kind, what, hint in (
        (r"# xet version", "xet-pointer", "a Xet pointer", "Download the file again with huggingface_hub."),
        (r"(?:[^\n]*\n){0,9}outs:[ \r]*\n *- *\w+:", "dvc-pointer", "a DVC pointer", "Run 'dvc pull'."),
        (r"\S{0,400}/annex/objects/", "annex-pointer", "a git-annex pointer", "Run 'git annex get' on it."),
        (r"model_checkpoint_path: \"", "tensorflow", "TensorFlow's list of checkpoints", None),
        (r"[34]\n1\n\d+\n", "torch7", "a Lua Torch7 file in text form", None),
        (r"7767517\n", "ncnn", "the layers of an ncnn model", _EXPORTED),
        (r"tree\nversion=", "lightgbm", "a LightGBM model", None),
        (r"(?:global_)?(?:step|iter)_?\d+\s*\Z", "text", "the name of a checkpoint folder", _FOLDER),
        (r"\.\.?/\S+\Z", "text", "a path, as in a symbolic link copied as text", _LINK),
    )
)
_PYTHON = re.compile(
    r"(?m)^(?:import [\w.]+(?:,| as |\s*$|\s*#|; )|from [\w.]+ import |(?:async )?def \w+\(|class \w+[(:])"
)
_PYTHON_START = re.compile(
    r"import \w|from [\w.]+ import |(?:async )?def |class \w|@\w|[rR]?[\"']{3}|if |try:|\w+ = |__\w"
)
_SITE_PATH = re.compile(r"(/(?![/*])|\.{1,2}(?:/|\\\w)|[A-Za-z]:[/\\]).*|[\w.+-]+(?:[/\\][\w.+-]+)*")
_YAML = re.compile(r"(?m)^[\w.\"'-]{1,80}:(?: |$)")
_MARKDOWN = re.compile(r"---\n(?:[^\n]*\n){1,200}?---\n\s*\S|#{1,6} \S[^\n]*\n[ \r]*\n")


def _decoded(data: bytes, *, whole: bool) -> str | None:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        try:
            text = codecs.getincrementaldecoder("utf-16")().decode(data, final=whole)
        except UnicodeDecodeError:
            return None
        plain = sum(" " <= character <= "~" or character in "\r\n\t" for character in text)
        return text if plain * 2 > len(text) else None  # almost any bytes are UTF-16
    if _CONTROL.search(data):
        return None
    try:
        return codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=whole)
    except UnicodeDecodeError:
        plain = len(re.findall(rb"[\t\n\r -~]", data))
        legible = len(data) >= 64 and plain * 10 > len(data) * 6
        return data.decode("utf-8", "replace") if legible or _MARKUP.match(data) else None


def _by_text(head: _Head) -> NotACheckpoint | None:
    text = head.text
    if text is None or _PICKLED_TEXT.match(text):
        return None
    lines = [line.strip() for line in text.splitlines()]
    size = _count(len(lines), "line") if head.whole else head.size
    begin = _quoted(next((line for line in lines if line), ""))
    if begin == "''":
        return _not(f"a text file of {head.size}, all blank", "text", _AGAIN)
    for pattern, kind, what, hint in _TEXTS:
        if pattern.match(text):
            return _not(f"{what}, {begin}", kind, hint)
    if head.nbytes <= 1024 and _SAID.search(text.strip()):
        return _not(f"an error message: {_quoted(text)}", "text", _ACCESS)
    if head.nbytes < 12 and text.endswith(".") and " " not in text:
        return None  # a pickle of protocol 1 that holds one number can look like this
    if head.whole and _is_site_pth(lines):
        what = "a list of paths or imports, as in a .pth file of Python's site module"
        return _not(f"{what}, {size}, beginning {begin}", "site-pth")
    code = [line for line in lines if line and not line.startswith("#")][:1]
    if re.match(r"#![^\n]*python", text) or (code and _PYTHON_START.match(code[0]) and _PYTHON.search(text)):
        return _not(f"Python source, {size}, beginning {begin}", "python-source")
    what = "a text file"
    if _MARKDOWN.match(text):
        what = "a Markdown file"
    elif code and (_YAML.match(code[0]) or code[0] == "---"):
        what = "a YAML file"
    return _not(f"{what} of {size}, beginning {begin}", "text")


def _is_site_pth(lines: list[str]) -> bool:
    told = [line for line in lines if line and not line.startswith("#")]
    imports = [line for line in told if line.startswith(("import ", "import\t"))]
    paths = [_SITE_PATH.fullmatch(line) for line in told if not line.startswith(("import ", "import\t"))]
    if not told or not all(paths):
        return False
    return (
        any(path and path[1] for path in paths)  # names alone could be any list of words
        or len(told) == len(imports) == 1
        or any(";" in line for line in imports)
    )
