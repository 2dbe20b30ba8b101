"""
Names what a file is that is not a checkpoint, by its first bytes; imported only then.

A kind that begins with bytes of its own is a row of ``_ROWS``, a zip with a telling member one of ``_IN_ZIPS``, a kind
of text one of ``_TEXTS``. A row has a function beside it only where the bytes alone would raise false alarms, or where
a number after them is worth showing. No row may fit the start of a pickle, a zip, a tar, or a safetensors header.
"""

from __future__ import annotations

import codecs
import html
import json
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from ckptool.errors import NotACheckpoint, TruncatedFile, UnsupportedFeature
from ckptool.messages import counted, quoted, some
from ckptool.sources.paths import is_likely
from ckptool.sources.source import Source

Foreign = NotACheckpoint | TruncatedFile | UnsupportedFeature


def name_foreign(source: Source) -> Foreign | None:
    """
    Return the error that names a file that no format accepts, or None if nothing here knows it.

    The caller raises it; nothing is raised but what ``source.read`` raises. Reads 64 KiB from the start and 8 bytes
    from the end; 16 MiB of JSON, as an index of shards can be that long.
    """
    head = Head(source)
    if not head.nbytes:
        hint = "Download or save the file again."
        return TruncatedFile("empty: the file has 0 bytes", kind="empty", hint=hint, actual=0)
    if not head.data.strip(b"\0"):
        fact = f"{head.size} of zeros"
        if not head.whole:
            fact = f"the first {counted(len(head.data), 'byte')} of {head.nbytes:,} are zero"
        return not_a_checkpoint(f"{fact}, as in a download that reserved its space and stopped", "zeros", AGAIN)
    if head.text is None:
        return _name_by_magic(head) or _name_binary(head)
    return _name_markup(head, head.text) or _name_json(head, head.text) or _name_text(head, head.text)


# The start of a file, as bytes and as text


_HEAD_NBYTES = 65_536
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f]")
_MARKUP = re.compile(rb"\s*<(?:!doctype|\?xml|html)", re.IGNORECASE)


class Head:
    """The first 64 KiB of a file."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.nbytes = source.nbytes
        """Size of the whole file in bytes."""
        self.size = counted(self.nbytes, "byte")
        self.whole = self.nbytes <= _HEAD_NBYTES
        """Whether this is all of the file."""
        self.data = source.read(0, min(self.nbytes, _HEAD_NBYTES))
        self.text = _decoded(self.data, whole=self.whole)
        """``data`` as text without a byte order mark; None if it is not text."""

    def has(self, mark: bytes, offset: int) -> bool:
        """Return whether the mark is at the offset, which counts from the end if it is negative."""
        if offset >= 0:
            return self.data.startswith(mark, offset)
        return -offset <= self.nbytes and self.source.read(self.nbytes + offset, len(mark)) == mark


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


AGAIN = "Download the file again."
ACCESS = "Check the address and whether it asks for a login, then download the file again."
EXPORTED = "Use the PyTorch file that it was exported from."
UNPACK = "Unpack it and open the file inside."
IN_TENSORFLOW = "Read it with TensorFlow."


def not_a_checkpoint(what: str, kind: str, hint: str | None = None) -> NotACheckpoint:
    """Return the error for a file that is ``what``."""
    return NotACheckpoint(f"not a checkpoint: {what}", kind=kind, hint=hint)


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    return some([*(quoted(name, 40) for name in names[:most]), *names[most:]], most)


_TENSORFLOW_OP = re.compile(rb"[\n\x12](?:\x05Const|\x04NoOp|\x0bVarHandleOp)|\x12\x0bPlaceholder")
"""The length and name of an operation that nearly every graph has."""
_MSGPACK_MAP = re.compile(rb"(?:[\x81-\x8f]|\xde..|\xdf....)[\xa1-\xbf][ -~]", re.DOTALL)
_MINDSPORE_TYPE = re.compile(rb"(?:B?Float|U?Int|Bool|Complex|String)[0-9]*")
_FLAX_ARRAY = re.compile(rb"(?:\xc7.|\xc8..|\xc9....)\x01\x93[\x90-\x9f]", re.DOTALL)
"""Extension 1 of flax.serialization, which begins with a list of three: shape, dtype, bytes."""
_NAMES_LOOKED_AT = 10_000
_TORCH_MEMBER = re.compile(
    r"(?:[^/]+/)?(?:(?:data|constants|attributes)\.pkl|archive_format|serialized_exported_program\.json"
    r"|\.data/extern_modules)|[^/]+/model\.json"
)
_IN_ZIPS = tuple(
    (re.compile(pattern, re.DOTALL), kind, what, hint)
    for pattern, kind, what, hint in (
        (r"(?:.*/)?Data/com\.apple\.CoreML/.*", "coreml", "a Core ML package", EXPORTED),
        (r"(?:.*/)?model\.weights\.h5", "keras", "a Keras model", "Read it with Keras."),
        (r"(?:.*/)?saved_model\.pb", "tensorflow", "a TensorFlow SavedModel", IN_TENSORFLOW),
        (r"MAR-INF/MANIFEST\.json", "mar", "a TorchServe model archive", UNPACK),
        (r"(?:word|xl|ppt)/.*\.xml", "office", "a Microsoft Office document", None),
        (r"content\.xml", "office", "an OpenDocument file", None),
        (r"[^/]+\.dist-info/WHEEL", "wheel", "a Python wheel", "Install it with pip."),
        (r"META-INF/MANIFEST\.MF", "jar", "a Java or Android archive", None),
    )
)


def _name_binary(head: Head) -> NotACheckpoint | None:
    """Name protobuf or msgpack that holds the model of another framework."""
    data = head.data
    if _MSGPACK_MAP.match(data) and _FLAX_ARRAY.search(data):
        what = f"Flax parameters (msgpack) of {head.size}"
        return not_a_checkpoint(what, "flax", "Read it with flax.serialization.")
    fields = list(islice(_fields(data), 16))
    if not fields or fields[0].number != 1:
        return None
    if _is_onnx(data, fields):
        strings = [_string(data, field) for field in fields if field.number in (2, 3)]
        by = f", written by {quoted(' '.join(strings))}" if strings else ""
        what = f"an ONNX model of {head.size}, IR version {fields[0].value}{by}"
        return not_a_checkpoint(what, "onnx", EXPORTED)
    if _is_mindspore(data, fields[0]):
        return not_a_checkpoint(f"a MindSpore checkpoint of {head.size}", "mindspore", "Read it with MindSpore.")
    if _TENSORFLOW_OP.search(data):  # a GraphDef begins with its nodes, a SavedModel with its version, 1
        what = f"a TensorFlow graph or SavedModel of {head.size}"
        return not_a_checkpoint(what, "tensorflow", IN_TENSORFLOW) if fields[0].value in (-1, 1) else None
    return None


class _Field(NamedTuple):
    number: int
    value: int
    """The value of a number; -1 for bytes."""
    start: int
    stop: int


def _is_onnx(data: bytes, fields: list[_Field]) -> bool:
    # onnx.proto, ModelProto: 1 ir_version, 2-4 and 6 strings, 5 model_version, 7 graph, 8 opset_import
    if fields[0].value <= 0:
        return False
    for field in fields[1:]:
        if field.number == 7:  # it begins with a node or, without one, with its name
            return field.value < 0 and data[field.start : field.start + 1] in (b"\n", b"\x12")
        if field.number in (2, 3, 4) and not _string(data, field).isprintable():
            return False
        if field.number not in (2, 3, 4, 5, 6, 8, 14) or (field.number == 5) != (field.value >= 0):
            return False
    return False


def _is_mindspore(data: bytes, first: _Field) -> bool:
    # checkpoint.proto: 1 entries, each with its name, 1, and its tensor, 2, of which 1 are dimensions and 2 is the type
    entry = data[first.start : first.stop]
    fields = list(islice(_fields(entry), 2))
    if [field.number for field in fields] != [1, 2]:
        return False
    tensor = entry[fields[1].start : fields[1].stop]
    types = (tensor[field.start : field.stop] for field in islice(_fields(tensor), 64) if field.number == 2)
    return any(map(_MINDSPORE_TYPE.fullmatch, types))


def _string(data: bytes, field: _Field) -> str:
    return data[field.start : field.stop].decode("ascii", "replace")


def _fields(data: bytes) -> Iterator[_Field]:
    """Walk the outermost fields of a protobuf message; the last one may reach beyond the head."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if tag < 8 or number >= 1 << 29 or wire not in (0, 2):
            return
        size, start = _varint(data, at)
        if size < 0:
            return
        at = start + size if wire == 2 else start
        yield _Field(number, -1 if wire == 2 else size, start, at)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number and the offset after it; -1 if it has no end."""
    value = 0
    for shift, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    return -1, at


class _Row(NamedTuple):
    kind: str
    what: str
    magic: bytes
    offset: int = 0
    """Negative: counted from the end of the file."""
    then: tuple[int, bytes] | None = None
    """A second mark, at its own offset."""
    hint: str | None = None
    describe: Callable[[Head], str | None] | None = None
    """Returns ``what`` with its numbers, or None if the row does not apply after all."""
    error: type[NotACheckpoint | UnsupportedFeature] = NotACheckpoint


def _name_by_magic(head: Head) -> NotACheckpoint | UnsupportedFeature | None:
    """Return the error of the first row that fits."""
    for row in _ROWS:
        is_one = head.has(row.magic, row.offset) and (row.then is None or head.has(row.then[1], row.then[0]))
        phrase = row.describe(head) if row.describe is not None and is_one else f"{row.what} of {head.size}"
        if is_one and phrase is not None:
            prefix = "not a checkpoint" if row.error is NotACheckpoint else "not handled"
            return row.error(f"{prefix}: {phrase}", kind=row.kind, hint=row.hint)
    return None


def _npy(head: Head) -> str:
    text = head.data[:512].decode("latin-1")
    dtype = re.search(r"'descr': '([^']{1,40})'", text)
    shape = re.search(r"'shape': \(([\d, ]{0,200})\)", text)
    what = f"a numpy array of shape ({shape[1].strip()})" if shape else "a numpy array"
    return what + (f", dtype {quoted(dtype[1])}" if dtype else "") + f", in {head.size}"


def _paddle(head: Head) -> str | None:
    # DenseTensor: u32 version, u64 levels of rows, u32 version, i32 size of what follows: 1 type, 2 dimensions
    size, field, _, dimension = struct.unpack_from("<i3B", head.data.ljust(24), 16)
    is_one = 0 < size < 256 and (field, dimension) == (0x08, 0x10)
    return f"parameters of PaddlePaddle in {head.size}" if is_one else None


def _gguf(head: Head) -> str:
    version, tensors = struct.unpack_from("<IQ", head.data.ljust(16, b"\0"), 4)
    if not 2 <= version < 256 or len(head.data) < 16:  # version 1 has narrower numbers, a large one is big-endian
        return f"a GGUF file of {head.size}"
    return f"a GGUF file, version {version}, with {counted(tensors, 'tensor')}"


_MOBILE = "a TorchScript model for mobile devices, a flatbuffer (PTMF)"
_TO_GGUF = "Convert it to GGUF with llama.cpp."
_REAL = "Open the file of the same name without '._' at its start."

_ROWS = (
    # compressed
    _Row("zstd", "a Zstandard file", b"\x28\xb5\x2f\xfd", hint="Decompress it first, with 'zstd -d'."),
    _Row("lz4", "an LZ4 file", b"\x04\x22\x4d\x18", hint="Decompress it first, with 'lz4 -d'."),
    _Row("joblib", "a file of joblib before 0.10", b"ZF0x", hint="Write it again with joblib."),
    # archives
    _Row("7z", "a 7-Zip archive", b"7z\xbc\xaf\x27\x1c", hint=UNPACK),
    _Row("rar", "a RAR archive", b"Rar!\x1a\x07", hint=UNPACK),
    # models of other frameworks
    _Row("numpy", "", b"\x93NUMPY", hint="Read it with numpy.load.", describe=_npy),
    _Row("hdf5", "an HDF5 file", b"\x89HDF\r\n\x1a\n", hint="Read it with Keras or h5py."),
    _Row("gguf", "", b"GGUF", hint="Run it with llama.cpp.", describe=_gguf),
    _Row("ggml", "a GGML file", b"lmgg", hint="Run it with whisper.cpp or an old llama.cpp."),
    _Row("ggml", "a GGJT file", b"tjgg", hint=_TO_GGUF),
    _Row("tflite", "a TensorFlow Lite model", b"TFL3", 4),
    _Row("executorch", "an ExecuTorch program", b"ET12", 4, hint=EXPORTED),
    _Row("onnx", "an ONNX Runtime model", b"ORTM", 4, hint=EXPORTED),
    _Row("torch-mobile-flatbuffer", _MOBILE, b"PTMF", 4, hint=EXPORTED, error=UnsupportedFeature),
    _Row("torch7", "a Lua Torch7 file", b"\4\0\0\0\1\0\0\0", then=(10, b"\0\0")),
    _Row("torch7", "a Lua Torch7 file", b"\3\0\0\0\1\0\0\0", then=(12, b"V ")),
    _Row("torch7", "a Lua Torch7 file", b"\3\0\0\0\1\0\0\0", then=(12, b"\1\0\0\0")),  # a table: by numbers
    _Row("torch7", "a Lua Torch7 file", b"\3\0\0\0\1\0\0\0", then=(12, b"\2\0\0\0")),  # or names
    _Row("paddle", "", bytes(16), hint="Read it with PaddlePaddle.", describe=_paddle),
    _Row("tensorboard", "a TensorBoard event file", b"brain.Event:", 23, hint="Read it with TensorBoard."),
    _Row("tensorflow", "a TensorFlow index", b"\x57\xfb\x80\x8b\x24\x75\x47\xdb", -8, hint=IN_TENSORFLOW),
    # images, documents, media
    _Row("image", "a PNG image", b"\x89PNG\r\n\x1a\n"),
    _Row("image", "a JPEG image", b"\xff\xd8\xff"),
    _Row("image", "a GIF image", b"GIF8"),
    _Row("image", "a WebP image", b"RIFF", then=(8, b"WEBP")),
    _Row("media", "a WAV file", b"RIFF", then=(8, b"WAVE")),
    _Row("media", "an MP4, QuickTime or HEIF file", b"ftyp", 4),
    _Row("pdf", "a PDF document", b"%PDF-"),
    _Row("office", "a Microsoft Office document", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),
    # programs and data
    _Row("executable", "an ELF executable or library", b"\x7fELF"),
    _Row("executable", "a macOS executable or library", b"\xcf\xfa\xed\xfe"),
    _Row("executable", "a Java class or macOS universal binary", b"\xca\xfe\xba\xbe"),
    _Row("executable", "a Windows executable or library", b"MZ\x90\0\3\0\0\0"),
    _Row("sqlite", "a SQLite database", b"SQLite format 3\0"),
    _Row("parquet", "a Parquet file", b"PAR1"),
    _Row("arrow", "an Arrow file", b"ARROW1\0\0"),
    _Row("appledouble", "macOS metadata about another file", b"\0\5\x16\7\0\2\0\0", hint=_REAL),
    _Row("appledouble", "a macOS folder's .DS_Store", b"\0\0\0\1Bud1"),
    _Row("encrypted", "a file encrypted by OpenSSL", b"Salted__", hint="Decrypt it first."),
)


def name_foreign_zip(names: Sequence[str]) -> NotACheckpoint | None:
    """
    Return the error that names a zip by its members, or None if they are laid out as torch does.

    A zip of no particular kind is an ``archive``, and the hint names the members that look like weights.
    """
    some = names[:_NAMES_LOOKED_AT]
    if any(_TORCH_MEMBER.fullmatch(name) for name in some):
        return None
    files = [name for name in names if not name.endswith("/") and not name.startswith("__MACOSX/")]
    if not files:
        return not_a_checkpoint("a zip archive without files", "archive")
    number = len(files)
    if all(name.endswith(".npy") for name in files):
        arrays = listed([name[: -len(".npy")] for name in files])
        what = f"a numpy .npz archive of {counted(number, 'array')}: {arrays}"
        return not_a_checkpoint(what, "npz", "Read it with numpy.load.")
    for pattern, kind, what, hint in _IN_ZIPS:
        if any(pattern.fullmatch(name) for name in some):
            return not_a_checkpoint(f"{what}, a zip of {counted(number, 'file')}", kind, hint)
    what = f"a zip archive of {counted(number, 'file')}: {listed(files)}"
    weights = [name for name in files if is_likely(name)]
    one = quoted(weights[0]) if len(weights) == 1 else f"one of {listed(weights, 8)}"
    return not_a_checkpoint(what, "archive", f"Unpack it and open {one}." if weights else None)


# Text: web pages and errors saved as a file, pointers that stand for one, and any other text


_INDEX_NBYTES = 16 << 20
_SHARDS_TOLD_APART = 10_000
_LONGEST_JSON_ERROR = 8_192
_OBJECT = re.compile(r'\s*\{\s*(?:"(?:[^"\\\n]|\\.){0,1000}"\s*:|\}\s*\Z)')
_WEIGHT_MAP = re.compile(rb'"weight_map"\s{0,100}:\s{0,100}\{')
_WEIGHT = re.compile(rb'\s*"(?:[^"\\]|\\.){0,4000}"\s*:\s*"((?:[^"\\]|\\.){0,4000})"\s*(,|\})')
_ERRORS = ("error", "message", "detail", "error_description", "Message", "msg")
_BESIDE = "Open the weights beside it."
_KINDS = (
    (re.compile(r'\s*\{\s*"cells"\s*:'), "a Jupyter notebook", None),
    (re.compile(r'.*"peft_type"\s*:', re.DOTALL), "the configuration of an adapter", _BESIDE),
    (re.compile(r'.*"(?:architectures|model_type)"\s*:', re.DOTALL), "the configuration of a model", _BESIDE),
    (re.compile(r'.*"added_tokens"\s*:', re.DOTALL), "a tokenizer", _BESIDE),
)


def _name_json(head: Head, text: str) -> NotACheckpoint | None:
    """Name JSON: an object, complete or cut off, or a complete list."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    value: object = None
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
    if isinstance(value, list):
        return not_a_checkpoint(f"a JSON file of {head.size}: a list of {counted(len(value), 'value')}", "json")
    if not _OBJECT.match(text):
        return None
    index = _name_index(head)
    if index is not None:
        return index
    pairs = value if isinstance(value, dict) else {}
    for key in _ERRORS if head.nbytes <= _LONGEST_JSON_ERROR else ():
        said = pairs.get(key)
        said = said.get("message") if isinstance(said, dict) else said
        if isinstance(said, str) and said.strip():
            return not_a_checkpoint(f"a JSON error message: {quoted(said)}", "json", ACCESS)
    known = ((what, hint) for pattern, what, hint in _KINDS if pattern.match(text))
    what, hint = next(known, ("a JSON file", None))
    keys = ", ".join(quoted(key, 30) for key in islice(pairs, 4)) + (", …" if len(pairs) > 4 else "")
    return not_a_checkpoint(f"{what}, {head.size} of JSON" + (f" with {keys}" if keys else ""), "json", hint)


def _name_index(head: Head) -> NotACheckpoint | None:
    # Not json.loads: the index of a large model is megabytes, and the objects would take many times that.
    data = head.source.read(0, min(head.nbytes, _INDEX_NBYTES))
    match = _WEIGHT_MAP.search(data)
    if not match:
        return None
    tensors, at, end = 0, match.end(), b""
    shards: dict[bytes, None] = {}
    while end != b"}" and len(shards) < _SHARDS_TOLD_APART and (entry := _WEIGHT.match(data, at)):
        tensors += 1
        at, end = entry.end(), entry[2]
        shards.setdefault(entry[1])
    if not tensors:
        return None
    least = "" if end == b"}" else "at least "
    what = f"an index of {least}{counted(tensors, 'tensor')} in {least}{counted(len(shards), 'file')}"
    first = quoted(next(iter(shards)).decode("utf-8", "replace"))
    return not_a_checkpoint(
        what, "index-json", f"Open it by its path, beside the files that it names, such as {first}."
    )


_LONGEST_ERROR = 1024
_HTML = re.compile(r"\s*<(?:!doctype html|html|head|body|title|script|meta)\b", re.IGNORECASE)
_XML = re.compile(r"\s*<(?:\?xml|error>|svg)", re.IGNORECASE)
_SAID = re.compile(
    r"not found|access ?denied|forbidden|unauthori[sz]ed|invalid username|too many requests"
    r"|rate limit exceeded|bad gateway|gateway time-?out|service unavailable|internal server error"
    r"|has expired|no ?such ?key|is restricted|quota exceeded|^[45]\d\d(?:: | [A-Z])",
    re.IGNORECASE,
)
_PICKLED = re.compile(r"\(?[dlt]p\d+\n|\(?[ci][\w.]+\n[\w.<>]+\n[p(]")
"""The start of a pickle of protocol 0, which is text: it may be a checkpoint cut short."""
_FOLDER, _LINK = "Open the files in that folder.", "Open the file that it names."
_TEXTS = tuple(
    (re.compile(pattern), kind, what, hint)
    for pattern, kind, what, hint in (
        (r"# xet version", "xet-pointer", "a Xet pointer", "Download the file again with huggingface_hub."),
        (r"(?:[^\n]*\n){0,9}outs:[ \r]*\n *- *\w+:", "dvc-pointer", "a DVC pointer", "Run 'dvc pull'."),
        (r"\S{0,400}/annex/objects/", "annex-pointer", "a git-annex pointer", "Run 'git annex get' on it."),
        (r"model_checkpoint_path: \"", "tensorflow", "TensorFlow's list of checkpoints", None),
        (r"[34]\n1\n\d+\n", "torch7", "a Lua Torch7 file in text form", None),
        (r"%PDF-", "pdf", "a PDF document", None),
        (r"(?:global_)?(?:step|iter)_?\d+\s*\Z", "text", "the name of a checkpoint folder", _FOLDER),
        (r"\.\.?/\S+\Z", "text", "a path, as in a symbolic link copied as text", _LINK),
    )
)
_SITE_LINE = re.compile(r"import[ \t].*|(?:/(?![/*])|\.{1,2}[/\\]|[A-Za-z]:[/\\]).*")


def _name_markup(head: Head, text: str) -> NotACheckpoint | None:
    """Name an HTML page by its title, and an XML error of an object store by what it says."""
    if not re.match(r"\s*<", text):
        return None
    start = text[:1024].lower()
    if _HTML.match(text) or "<html" in start:
        title = _element(text, "title")
        what = f"an HTML page of {head.size}" + (f" titled {quoted(title)}" if title else "")
        return not_a_checkpoint(what, "html", "Download the file itself: the address gave a page about it.")
    if not _XML.match(text):
        return None
    said = [part for part in (_element(text, "code"), _element(text, "message")) if part]
    if said and "<error" in start:
        return not_a_checkpoint(f"an XML error message: {quoted(': '.join(said))}", "xml", ACCESS)
    return not_a_checkpoint(f"an XML file of {head.size}", "xml")


def _element(text: str, name: str) -> str:
    """Return the text in the first element of this name, unescaped; empty if there is none."""
    match = re.search(f"<{name}(?:\\s[^>]{{0,200}})?>", text, re.IGNORECASE)
    if not match:
        return ""
    inside = text[match.end() : match.end() + 1000]
    return " ".join(html.unescape(inside.split("<")[0]).split())


def _name_text(head: Head, text: str) -> NotACheckpoint | None:
    """Name any text except a pickle, at least by its first line."""
    if _PICKLED.match(text):
        return None
    if text.startswith("version https://git-lfs.github.com/"):
        size = re.search(r"^size (\d{1,19})\s*$", text[:1024], re.MULTILINE)
        oid = re.search(r"^oid sha256:([0-9a-f]{12})", text[:1024], re.MULTILINE)
        what = "a Git LFS pointer" + (f" to a file of {counted(int(size[1]), 'byte')}" if size else "")
        what += f" (sha256 {oid[1]}…)" if oid else ""
        return not_a_checkpoint(what, "lfs-pointer", "Run 'git lfs pull'.")
    lines = [line.strip() for line in text.splitlines()]
    told = [line for line in lines if line]
    if not told:
        return not_a_checkpoint(f"a text file of {head.size}, all blank", "text", AGAIN)
    begin = quoted(told[0])
    for pattern, kind, what, hint in _TEXTS:
        if pattern.match(text):
            return not_a_checkpoint(f"{what}, {begin}", kind, hint)
    if head.nbytes <= _LONGEST_ERROR and _SAID.search(text.strip()):
        return not_a_checkpoint(f"an error message: {quoted(text)}", "text", ACCESS)
    length = counted(len(lines), "line") if head.whole else head.size
    if head.whole and all(_SITE_LINE.fullmatch(line) for line in told):
        what = "a list of paths or imports, as in a .pth file of Python's site module"
        return not_a_checkpoint(f"{what}, {length}, beginning {begin}", "site-pth")
    return not_a_checkpoint(f"a text file of {length}, beginning {begin}", "text")
