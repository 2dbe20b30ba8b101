"""What ckptool.formats.identify says of files that are not checkpoints, and that it keeps silent about checkpoints."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import sqlite3
import struct
import time
import wave
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.errors import CkptoolError, NotACheckpoint, TruncatedFile, UnsupportedFeature
from ckptool.formats.identify import name_foreign, name_foreign_zip
from ckptool.sources.source import BytesSource
from tests.each import each
from tests.scale import step


def named(data: bytes) -> CkptoolError | None:
    return name_foreign(BytesSource(data))


def error_of(data: bytes) -> CkptoolError:
    """Return what is said of something that is known."""
    error = named(data)
    assert error is not None
    return error


def wav() -> bytes:
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(range(256)))
    return stream.getvalue()


def npy() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.zeros((3, 4), np.float32))
    return stream.getvalue()


def sqlite() -> bytes:
    with sqlite3.connect(":memory:") as database:
        database.execute("create table weights (name text)")
    stored = database.serialize() if hasattr(database, "serialize") else b"SQLite format 3\0" + bytes(84)
    database.close()
    return stored


def proto(*fields: tuple[int, bytes | str | int]) -> bytes:
    """Encode one protobuf message."""

    def varint(number: int) -> bytes:
        digits = bytearray()
        while number > 0x7F:
            digits.append(number & 0x7F | 0x80)
            number >>= 7
        return bytes([*digits, number])

    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            body = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(body)) + body
    return out


def onnx(*, producer: bool = True) -> bytes:
    node = proto((1, "input"), (1, "weight"), (2, "output"), (3, "/fc/Gemm"), (4, "Gemm"))
    weight = proto((1, 4), (2, 1), (8, "weight"), (9, np.arange(4, dtype=np.float32).tobytes()))
    graph = proto((1, node), (2, "main_graph"), (5, weight))
    made = ((2, "pytorch"), (3, "2.1.0")) if producer else ()
    return proto((1, 8), *made, (7, graph), (8, proto((1, ""), (2, 17))))


def saved_model() -> bytes:
    operations = proto((1, proto((1, "AddV2"), (2, proto((1, "x"))))), (1, proto((1, "Const"))))
    meta = proto((2, operations), (4, "serve"), (5, "2.15.0"))
    return proto((1, 1), (2, proto((1, meta), (2, proto((1, proto((1, "x"), (2, "Placeholder"))))))))


def frozen_graph() -> bytes:
    node = proto((1, "input"), (2, "Placeholder"), (5, proto((1, "dtype"), (2, proto((6, 1))))))
    return proto((1, node), (1, proto((1, "add"), (2, "AddV2"), (3, "input"))), (4, proto((1, 1482))))


def mindspore(kind: str = "Float32") -> bytes:
    tensor = proto((1, 3), (1, 4), (2, kind), (3, bytes(48)))
    return proto((1, proto((1, "conv.weight"), (2, tensor))), (1, proto((1, "conv.bias"), (2, tensor))))


def paddle() -> bytes:
    described = proto((1, 5), (2, 3), (2, 4))
    return bytes(16) + struct.pack("<i", len(described)) + described + bytes(48)


def flax() -> bytes:
    array = b"\x93\x92\x02\x02\xa7float32\xc4\x10" + bytes(16)
    leaf = b"\x82\xa4bias\xc7" + bytes([len(array)]) + b"\x01" + array
    return b"\x82\xa4step\x05\xa6params\x81\xa5Dense" + leaf + b"\xa6kernel\xc0"


def tensorboard() -> bytes:
    event = b"\x09" + struct.pack("<d", 1.7e9) + b"\x1a\x0dbrain.Event:2"
    return struct.pack("<Q", len(event)) + b"\x12\x34\x56\x78" + event + b"\x9a\xbc\xde\xf0"


def torch7() -> bytes:
    name = b"torch.FloatTensor"
    head = struct.pack("<iii", 3, 1, 3) + b"V 1" + struct.pack("<i", len(name)) + name
    return head + struct.pack("<iqq", 1, 4, 1)


def index(tensors: int, shards: int) -> bytes:
    names = [f"model-{shard:05}-of-{shards:05}.safetensors" for shard in range(1, shards + 1)]
    weight_map = {f"model.layers.{i}.weight": names[i % shards] for i in range(tensors)}
    return json.dumps({"metadata": {"total_size": 8 * tensors}, "weight_map": weight_map}, indent=2).encode()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4947bf5605d6%s\nsize 548118077\n" % (b"ab" * 26)
README = b"---\nlicense: mit\ntags:\n- vision\n---\n\n# A model\n\nIt sees.\n"
DENIED = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'
)
GERMAN = "<html><head><title>Zugriff verweigert f\u00fcr m\u00fcde B\u00e4ren</title></head><body>Nein.</body>"
FLATBUFFER = b"\x1c\0\0\0%s" + bytes(8) + b"\x14\0\x20\0\x04\0\x08\0" + bytes(32)
TENSORFLOW_INDEX = bytes(range(100)) + b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"

FILES: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "empty", "0 bytes"),
    "zero byte": (b"\0", "zeros", "not a checkpoint: 1 byte of zeros"),
    "zeros": (bytes(5000), "zeros", "5,000 bytes of zeros"),
    "zeros first": (bytes(200_000) + b"end", "zeros", "the first 65,536 bytes of 200,003 are zero"),
    "lfs": (LFS, "lfs-pointer", "a Git LFS pointer to a file of 548,118,077 bytes (sha256 4947bf5605d6…)"),
    "lfs crlf": (LFS.replace(b"\n", b"\r\n"), "lfs-pointer", "548,118,077 bytes"),
    "lfs cut": (LFS[:60], "lfs-pointer", "a Git LFS pointer"),
    "xet": (b"# xet version 0\nfilesize = 5\nhash = 'ab'\n", "xet-pointer", "Xet"),
    "dvc": (b"outs:\n- md5: 0123456789abcdef\n  size: 5\n  path: model.pt\n", "dvc-pointer", "DVC"),
    "annex": (b"/annex/objects/SHA256E-s548118077--ab.pt\n", "annex-pointer", "git-annex"),
    "html": (b"\n<!DOCTYPE html><html><title>Caf&eacute; &lt;3</title>", "html", "titled 'Café <3'"),
    "html without title": (b"<html><body>" + b"x" * 100, "html", "an HTML page of 112 bytes"),
    "html in latin-1": (GERMAN.encode("latin-1"), "html", "Zugriff verweigert"),
    "html in euc-jp": (
        "<html>\n<body>\u30ed\u30b0\u30a4\u30f3".encode("euc-jp"),
        "html",
        "an HTML page of 21 bytes",
    ),
    "html in utf-16": (GERMAN.encode("utf-16"), "html", "für müde Bären"),
    "html after a mark": (b"\xef\xbb\xbf<HTML><TITLE>Up</TITLE>", "html", "titled 'Up'"),
    "xhtml": (b'<?xml version="1.0"?><html><title>Sign in</title></html>', "html", "titled 'Sign in'"),
    "s3": (DENIED, "xml", "'AccessDenied: Access Denied'"),
    "xml": (b'<?xml version="1.0"?><net name="x" version="10"/>', "xml", "an XML file of 49 bytes"),
    "json error": (b'{"error":"Repository not found"}', "json", "error message: 'Repository not found'"),
    "json nested error": (
        b'{"error": {"code": 403, "message": "Denied"}}',
        "json",
        "error message: 'Denied'",
    ),
    "config": (b'{"architectures": ["GPT2"], "n_layer": 12}', "json", "configuration of a model, 42 bytes"),
    "notebook": (b'{"cells": [], "nbformat": 4}', "json", "a Jupyter notebook"),
    "json": (b'{"a": 1, "b": [2], "c": {}, "d": null, "e": 0}', "json", "with 'a', 'b', 'c', 'd', …"),
    "json list": (b"[1, 2, 3]", "json", "a list of 3 values"),
    "index": (index(7, 2), "index-json", "an index of 7 tensors in 2 files"),
    "long index": (index(5000, 3), "index-json", "an index of 5,000 tensors in 3 files"),
    "index of many": (
        index(20_000, 20_000),
        "index-json",
        "at least 10,000 tensors in at least 10,000 files",
    ),
    "json object": (b" {}\n", "json", "a JSON file, 4 bytes"),
    "json cut": (b'{"a": 1, "b": [2, ', "json", "a JSON file, 18 bytes"),
    "index cut": (index(5000, 3)[:-100], "index-json", "at least 4,998 tensors in at least 3 files"),
    "404": (b"404: Not Found", "text", "an error message: '404: Not Found'"),
    "entry not found": (b"Entry not found", "text", "an error message"),
    "forbidden": (b"Forbidden.", "text", "an error message"),
    "text": (b"loss 0.5\nloss 0.4\n", "text", "a text file of 2 lines, beginning 'loss 0.5'"),
    "long text": (b"all work\n" * 9999, "text", "a text file of 89,991 bytes"),
    "numbers": (b"0.320 0.339\n", "text", "a text file of 1 line, beginning '0.320 0.339'"),
    "changes": (b"2.2.2 (2024)\n", "text", "a text file"),
    "readme with html": (b'<h1 align="center">A model</h1>\n', "text", "a text file"),
    "utf-8": ("权重文件\n".encode(), "text", "'权重文件'"),
    "utf-16": ("weights\r\n".encode("utf-16"), "text", "'weights'"),
    "prose": (b"See PTMF for a note on TFL3 files.", "text", "a text file"),
    "blank": (b"\n \n", "text", "all blank"),
    "deepspeed latest": (b"global_step1000", "text", "the name of a checkpoint folder, 'global_step1000'"),
    "link": (b"../../blobs/0a1b2c", "text", "a path"),
    "site-pth": (b"import os; x = 1\n", "site-pth", "as in a .pth file of Python's site module, 1 line"),
    "site-pth paths": (b"/home/me/project\n./egg\nC:\\lib\n", "site-pth", "3 lines"),
    "readme": (README, "text", "a text file of 9 lines, beginning '---'"),
    "zstd": (bytes.fromhex("28b52ffd2000010000"), "zstd", "a Zstandard file of 9 bytes"),
    "lz4": (bytes.fromhex("04224d186440a700000000"), "lz4", "an LZ4 file"),
    "old joblib": (b"ZF0x1f4" + bytes(20), "joblib", "joblib before 0.10"),
    "7z": (bytes.fromhex("377abcaf271c0004") + bytes(24), "7z", "a 7-Zip archive"),
    "rar": (b"Rar!\x1a\x07\x01\x00" + bytes(8), "rar", "a RAR archive"),
    "jpeg": (b"\xff\xd8\xff\xe0\x00\x10JFIF\0\x01", "image", "a JPEG image of 12 bytes"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(20), "image", "a PNG image of 28 bytes"),
    "gif": (b"GIF89a\x01\0", "image", "a GIF image of 8 bytes"),
    "heic": (b"\0\0\0\x18ftypheic" + bytes(12), "media", "HEIF"),
    "webp": (b"RIFF\x24\0\0\0WEBPVP8 " + bytes(20), "image", "a WebP image"),
    "pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "pdf", "a PDF document"),
    "mp4": (b"\0\0\0\x18ftypmp42" + bytes(12), "media", "an MP4, QuickTime or HEIF file"),
    "wav": (wav(), "media", "a WAV file of 300 bytes"),
    "office": (bytes.fromhex("d0cf11e0a1b11ae1") + bytes(504), "office", "a Microsoft Office document"),
    "npy": (npy(), "numpy", "a numpy array of shape (3, 4), dtype '<f4', in 176 bytes"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(88), "hdf5", "an HDF5 file of 96 bytes"),
    "gguf cut": (b"GGUF\3\0\0\0", "gguf", "a GGUF file of 8 bytes"),
    "gguf big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 24), "gguf", "a GGUF file of 24 bytes"),
    "gguf": (b"GGUF" + struct.pack("<IQQ", 3, 291, 24), "gguf", "a GGUF file, version 3, with 291 tensors"),
    "ggml": (b"lmgg" + struct.pack("<II", 51864, 1500), "ggml", "a GGML file"),
    "ggjt": (b"tjgg" + struct.pack("<II", 3, 32000), "ggml", "a GGJT file"),
    "onnx": (onnx(), "onnx", "IR version 8, written by 'pytorch 2.1.0'"),
    "onnx without producer": (onnx(producer=False), "onnx", "IR version 8"),
    "onnx cut": (onnx()[:90], "onnx", "an ONNX model of 90 bytes"),
    "ort": (FLATBUFFER % b"ORTM", "onnx", "an ONNX Runtime model"),
    "saved model": (saved_model(), "tensorflow", "a TensorFlow graph or SavedModel"),
    "frozen graph": (frozen_graph(), "tensorflow", "a TensorFlow graph or SavedModel"),
    "tensorflow index": (TENSORFLOW_INDEX, "tensorflow", "a TensorFlow index of 108 bytes"),
    "tensorflow list": (b'model_checkpoint_path: "model-7"\n', "tensorflow", "list of checkpoints"),
    "tflite": (FLATBUFFER % b"TFL3", "tflite", "a TensorFlow Lite model"),
    "ptmf": (FLATBUFFER % b"PTMF", "torch-mobile-flatbuffer", "not handled: a TorchScript model for mobile"),
    "executorch": (FLATBUFFER % b"ET12", "executorch", "an ExecuTorch program"),
    "torch7 object": (torch7(), "torch7", "a Lua Torch7 file"),
    "torch7 table": (struct.pack("<iiiii", 4, 1, 12, 2, 5) + b"model", "torch7", "a Lua Torch7 file"),
    "torch7 words": (struct.pack("<iiiii", 3, 1, 5, 2, 1) + b"<", "torch7", "a Lua Torch7 file"),
    "torch7 list": (struct.pack("<iiiid", 3, 1, 1, 1, 1.0) + b"\1\0\0\0", "torch7", "a Lua Torch7 file"),
    "torch7 text": (b"4\n1\n1\n2\n5\nmodel\n", "torch7", "in text form"),
    "mindspore": (mindspore(), "mindspore", "a MindSpore checkpoint of "),
    "mindspore of halves": (mindspore("BFloat16"), "mindspore", "a MindSpore checkpoint of "),
    "paddle": (paddle(), "paddle", "parameters of PaddlePaddle in 74 bytes"),
    "flax": (flax(), "flax", "Flax parameters (msgpack) of "),
    "tensorboard": (tensorboard(), "tensorboard", "a TensorBoard event file"),
    "elf": (b"\x7fELF\x02\x01\x01" + bytes(9), "executable", "an ELF executable"),
    "mach-o": (bytes.fromhex("cffaedfe0c000001"), "executable", "a macOS executable"),
    "java": (bytes.fromhex("cafebabe0000003d"), "executable", "a Java class"),
    "exe": (b"MZ\x90\0\3\0\0\0" + bytes(56), "executable", "a Windows executable"),
    "sqlite": (sqlite(), "sqlite", "a SQLite database"),
    "parquet": (b"PAR1\x15\x04\x15" + bytes(8) + b"PAR1", "parquet", "a Parquet file"),
    "arrow": (b"ARROW1\0\0" + bytes(8), "arrow", "an Arrow file"),
    "appledouble": (bytes.fromhex("0005160700020000") + b"Mac OS X", "appledouble", "macOS metadata"),
    "openssl": (b"Salted__\x01\x02\x03\x04\xff\xfe\xfd\xfc", "encrypted", "encrypted by OpenSSL"),
}


@each(("data", "kind", "words"), FILES.values())
def test_each_kind_has_its_name_and_messages_follow_the_house_style(data: bytes, kind: str, words: str) -> None:
    error = error_of(data)

    assert (error.kind, words in error.message) == (kind, True), error.message
    assert error.message[:1].islower()
    assert not error.message.endswith(".")
    assert len(error.message) < 240
    assert error.message.isprintable()
    assert error.hint is None or (error.hint[0].isupper() and error.hint.endswith("."))
    prefixes = {NotACheckpoint: ("not a checkpoint: ",), UnsupportedFeature: ("not handled: ",)}
    assert error.message.startswith(prefixes.get(type(error), ("empty: ", "truncated: ")))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lfs", "Run 'git lfs pull'."),
        ("index", "Open it by its path, beside the files that it names, such as 'model-00001-of-00002.safetensors'."),
        ("zeros", "Download the file again."),
        ("deepspeed latest", "Open the files in that folder."),
    ],
)
def test_the_hint_says_what_to_do(name: str, hint: str) -> None:
    assert error_of(FILES[name][0]).hint == hint


def test_missing_bytes_are_a_truncation_and_mobile_models_are_unsupported() -> None:
    assert isinstance(named(b""), TruncatedFile)
    assert isinstance(named(FILES["ptmf"][0]), UnsupportedFeature)
    assert isinstance(named(FILES["html"][0]), NotACheckpoint)


def test_text_from_the_file_cannot_steer_a_terminal_and_stays_short() -> None:
    title = "a\x1b[31m\u202eevil\u2066\u200b\n" + "x" * 5000

    error = error_of(f"<html><title>{title}</title>".encode())

    assert error.message.isprintable()
    assert r"\x1b[31m\u202eevil\u2066\u200b" in error.message
    assert len(error.message) < 150


def test_reads_no_more_than_the_ends() -> None:
    class Counting(BytesSource):
        taken = 0

        def read(self, offset: int, nbytes: int) -> bytes:
            self.taken += nbytes
            return super().read(offset, nbytes)

    source = Counting(b"\x89PNG\r\n\x1a\n" + bytes(10_000_000))
    name_foreign(source)

    assert source.taken <= 70_000


# What must not be named: checkpoints, whole or cut short


@each("protocol", range(6))
def test_pickles_of_objects_cut_anywhere_are_not_named(protocol: int) -> None:
    data = pickle.dumps({"when": time.gmtime(0), "spec": np.zeros(3), "name": ["conv1", "conv2"]}, protocol)

    assert [cut for cut in range(40, len(data)) if named(data[:cut]) is not None] == []


def test_no_length_of_a_safetensors_header_is_mistaken_for_a_magic() -> None:
    body = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    wrong = [size for size in range(1, 1 << 16, step(7)) if named(struct.pack("<Q", size) + body) is not None]

    assert wrong == []


@each(
    "data",
    [
        b"PK\x03\x04" + bytes(26),
        b"some/path".ljust(257, b"\0") + b"ustar\x0000",
        b"\x80\x02",
        b"BM\x01\0",
        b"MZ" + bytes(80),
        b"\x03\0\0\0\x01\0\0\0\xff\xff\xff\x7f",
        b"\x78\x9c\xff",
        b"\x93NUMP",
        b"\x81\xa6params\xc7",
        b"\x08\x08\x12\x07pytorch",
        bytes(range(1, 256)),
    ],
)
def test_too_little_to_go_by_is_not_named(data: bytes) -> None:
    assert named(data) is None


# Damage and hostility: a result or None, soon, and nothing else


def is_printable(error: CkptoolError | None) -> bool:
    return error is None or error.message.isprintable()


@given(st.binary(max_size=300))
def test_any_bytes_give_a_result_or_none(data: bytes) -> None:
    assert is_printable(named(data))


@given(
    st.text(
        st.sampled_from("az09{}[]<>\"'\\:,;#!/ \n\t\r\0\x1b\x7f\xe9\u0301\u202e\u2028\ud83d\ude00\U0001f600"),
        max_size=300,
    )
)
def test_any_text_gives_a_printable_result_or_none(text: str) -> None:
    for data in (text.encode("utf-8", "surrogatepass"), text.encode("utf-16", "surrogatepass")):
        assert is_printable(named(data))


@given(
    st.sampled_from([row[0][:4096] for row in FILES.values()]),
    st.integers(0, 400),
    st.binary(max_size=12),
    st.integers(0, 12),
)
def test_damaged_heads_give_a_result_or_none(data: bytes, at: int, patch: bytes, skip: int) -> None:
    assert is_printable(named(data[:at] + patch + data[at + skip :]))


@each(
    "data",
    [
        b"[" * 100_000,
        b'{"a":' * 20_000,
        b"[" * 60_000,
        b'{"a":' + b"[" * 60_000,
        b'{"a": ' + b"9" * 60_000 + b"}",
        b"[" + b"9" * 60_000 + b"]",
        b"<html>" + b"<title " * 9_000,
        b"<title>&#" + b"9" * 60_000 + b";</title>",
        b"<!--" * 16_000,
        b"outs:" + b"\n" * 60_000,
        b"# x" + b"\n" * 60_000,
        b"# x\n" + b" \n" * 30_000 + b"#",
        b"---\n" * 16_000,
        b"(" * 60_000,
        b"V" * 60_000,
        b"S'\n" * 20_000,
        b"c\n" * 30_000,
        b"ca\nb\n" * 12_000,
        b"from " + b"a." * 30_000,
        b"import os\n" * 6_000,
        b"/a\n" * 20_000,
        b"a/" * 30_000,
        b" " * 60_000,
        b"\\" * 60_000,
        b'{"' + b"\\\\" * 30_000,
        b'{"weight_map": {"' + b"\\\\" * 3_000_000,
        b'{"weight_map": {' + b" " * 5_000_000,
        b'{"weight_map":' * 500_000,
        b'{"weight_map": {' + b'"":"a",' * 500_000,
        b"\x08\x01" * 30_000,
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f" * 6_000,
        b"\x0a\x02" * 30_000,
        b"\x81\xa1a" + b"\x81" * 60_000,
        b"\x81\xa1a" + b"\xdf" * 60_000,
        b"\xff\xfe" + b"a\0" * 30_000,
        gzip.compress(bytes(8_000_000), mtime=0),
        zlib.compress(bytes(8_000_000)),
    ],
)
def test_hostile_heads_cost_little(data: bytes) -> None:
    start = time.process_time()
    named(data)

    assert time.process_time() - start < 6  # each takes a fraction of a second


@each(
    ("names", "kind", "words"),
    [
        (["a.npy", "b.npy"], "npz", "a numpy .npz archive of 2 arrays: 'a', 'b'"),
        (["metadata.json", "config.json", "model.weights.h5"], "keras", "a Keras model, a zip of 3 files"),
        (["[Content_Types].xml", "word/document.xml"], "office", "a Microsoft Office document"),
        (["[Content_Types].xml", "xl/workbook.xml"], "office", "a Microsoft Office document"),
        (["[Content_Types].xml", "ppt/presentation.xml"], "office", "a Microsoft Office document"),
        (["mimetype", "content.xml"], "office", "an OpenDocument file"),
        (["META-INF/MANIFEST.MF", "a/B.class"], "jar", "a Java or Android archive"),
        (["m.mlpackage/Manifest.json", "m.mlpackage/Data/com.apple.CoreML/m.mlmodel"], "coreml", "Core ML"),
        (["x/__init__.py", "x-1.0.dist-info/WHEEL"], "wheel", "a Python wheel"),
        (["MAR-INF/MANIFEST.json", "model.pt", "handler.py"], "mar", "a TorchServe model archive"),
        (["m/saved_model.pb", "m/variables/variables.index"], "tensorflow", "a TensorFlow SavedModel"),
        (["a.txt", "b/", "b/c.txt", "d", "e"], "archive", "of 4 files: 'a.txt', 'b/c.txt', 'd' and 1 more"),
        (["__MACOSX/._a", "a"], "archive", "a zip archive of 1 file: 'a'"),
        (["b/"], "archive", "a zip archive without files"),
        ([], "archive", "a zip archive without files"),
        (["a\x1b[2J\u202e\ud800" + "n" * 500], "archive", r"'a\x1b[2J\u202e\ud800nnn"),
    ],
)
def test_foreign_zips_have_their_names(names: list[str], kind: str, words: str) -> None:
    error = name_foreign_zip(names)

    assert error is not None
    assert (error.kind, words in error.message) == (kind, True), error.message
    assert error.message.isprintable()
    assert len(error.message) < 240


def test_a_zip_of_weights_says_which_member_to_open() -> None:
    error = name_foreign_zip(["run/config.yaml", "run/best.PTH"])

    assert error is not None
    assert error.hint == "Unpack it and open 'run/best.PTH'."


@pytest.mark.parametrize(
    ("number", "rest"),
    [(2, "."), (8, ", 'c.pt', 'd.pt', 'e.pt', 'f.pt', 'g.pt', 'h.pt'."), (10, " and 2 more.")],
)
def test_a_zip_of_several_weights_lists_them(number: int, rest: str) -> None:
    error = name_foreign_zip(["notes.txt", *(f"{letter}.pt" for letter in "abcdefghij"[:number])])

    assert error is not None
    assert error.hint is not None
    assert error.hint.startswith("Unpack it and open one of 'a.pt', 'b.pt'")
    assert error.hint.endswith(rest)


@pytest.mark.parametrize(
    "names",
    [
        ["archive/data.pkl", "archive/data/0", "archive/version"],
        ["data.pkl", "data/0"],
        ["m/constants.pkl", "m/code/__torch__.py", "m/data.pkl"],
        ["m/model.json", "m/tensors/0"],
        ["serialized_exported_program.json", "version"],
        ["m/archive_format", "m/models/model.json"],
        ["p/.data/extern_modules", "p/net.py"],
    ],
    ids=lambda names: names[0],
)
def test_zips_laid_out_as_torch_does_are_not_named(names: list[str]) -> None:
    assert name_foreign_zip(names) is None
