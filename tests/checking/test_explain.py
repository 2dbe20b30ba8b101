"""Messages that people paste: provoked where the installed libraries still give them, quoted where they do not."""

from __future__ import annotations

import gzip
import io
import json
import pathlib
import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

from ckptool.checking.error_messages import ENTRIES, FRAGMENTS, GENERAL
from ckptool.checking.explain import explain
from ckptool.cli import cli
from tests.each import each

VALID = Path(__file__).parents[2] / "fixtures" / "valid"
INVALID = Path(__file__).parents[2] / "fixtures" / "invalid"
LENET = (VALID / "lenet-state-dict-cpu-zip.pth").read_bytes()
STREAM = (VALID / "lstm-one-storage-cpu-legacy.pth").read_bytes()
SAFETENSORS = (VALID / "safetensors-float32-cpu.safetensors").read_bytes()


def message_of(action: Callable[[], object]) -> str:
    """Return what a person would paste: the last lines of a traceback."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as caught:
            action()
    return f"{type(caught.value).__name__}: {caught.value}"


def load(data: bytes, folder: Path, **options: object) -> object:
    path = folder / "x.pth"
    path.write_bytes(data)
    return torch.load(path, **options)  # type: ignore[arg-type]


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def of_version(version: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(LENET)) as source, zipfile.ZipFile(buffer, "w") as archive:
        for entry in source.infolist():
            archive.writestr(entry.filename, version if entry.filename.endswith("/version") else source.read(entry))
    return buffer.getvalue()


def cut_safetensors(folder: Path, data: bytes) -> object:
    path = folder / "x.safetensors"
    path.write_bytes(data)
    return load_file(path)


ONES = torch.ones(3, 4)
LINEAR = nn.Linear(2, 3)
HTML = (INVALID / "html.pth").read_bytes()
POINTER = (INVALID / "lfs-pointer.pth").read_bytes()
UNSAFE = {"weights_only": False}

PROVOKED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "xpu": ("device-missing", lambda _: torch.load(VALID / "device-forged-xpu0-zip.pth")),
    "npu": ("device-unknown", lambda _: torch.load(VALID / "device-forged-npu0-zip.pth")),
    "warp": ("device-unknown", lambda _: torch.load(VALID / "device-forged-warp7-zip.pth")),
    "misspelt": ("device-unknown", lambda d: load(LENET, d, map_location="gpu")),
    "hpu": ("device-module", lambda _: torch.load(VALID / "device-forged-hpu-zip.pth")),
    "meta": ("meta", lambda _: torch.ones(2, device="meta").cpu()),
    "namespace": ("unsafe-global", lambda _: torch.load(VALID / "checkpoint-plain-cpu-zip.pth")),
    "os": ("blocked-module", lambda d: load(STREAM[:2] + b"cos\nsystem\n0" + STREAM[2:], d)),
    "torchscript": ("torchscript", lambda _: torch.load(VALID / "torchscript-script-cpu.pt")),
    "lfs": ("lfs-pointer", lambda d: load(POINTER, d)),
    "lfs, unsafe": ("lfs-pointer", lambda d: load(POINTER, d, **UNSAFE)),
    "html": ("html", lambda d: load(HTML, d)),
    "html, unsafe": ("html", lambda d: load(HTML, d, **UNSAFE)),
    "html after a line break": ("html", lambda d: load(b"\n" + HTML, d)),
    "html after a line break, unsafe": ("html", lambda d: load(b"\n" + HTML, d, **UNSAFE)),
    "json": ("json", lambda d: load(b'{"error": 404}', d)),
    "json, unsafe": ("json", lambda d: load(b'{"error": 404}', d, **UNSAFE)),
    "gzip": ("gzip", lambda d: load(gzip.compress(LENET), d)),
    "gzip, unsafe": ("gzip", lambda d: load(gzip.compress(LENET), d, **UNSAFE)),
    "7z": ("7z", lambda d: load(b"7z\xbc\xaf'\x1c" + bytes(50), d)),
    "7z, unsafe": ("7z", lambda d: load(b"7z\xbc\xaf'\x1c" + bytes(50), d, **UNSAFE)),
    "jpeg": ("image", lambda d: load(b"\xff\xd8\xff\xe0" + bytes(50), d)),
    "jpeg, unsafe": ("image", lambda d: load(b"\xff\xd8\xff\xe0" + bytes(50), d, **UNSAFE)),
    "png": ("image", lambda d: load(b"\x89PNG\r\n\x1a\n" + bytes(50), d)),
    "pickle": ("plain-pickle", lambda d: load(pickle.dumps({"a": 1}), d)),
    "pickle, unsafe": ("plain-pickle", lambda d: load(pickle.dumps({"a": 1}), d, **UNSAFE)),
    "zip of files": ("foreign-zip", lambda d: load(zipped(a=b"x", b=b"y"), d)),
    "exported program": ("foreign-zip", lambda _: torch.load(VALID / "export-cpu.pt2")),
    "cut zip": ("truncated-zip", lambda d: load(LENET[:100], d)),
    "longer cut zip": ("truncated-zip", lambda d: load(LENET[:20000], d)),
    "cut stream": ("truncated-legacy", lambda d: load(STREAM[:-500], d)),
    "empty": ("empty", lambda d: load(b"", d)),
    "empty, unsafe": ("empty", lambda d: load(b"", d, **UNSAFE)),
    "cut pickle": ("empty", lambda d: load(STREAM[:60], d, **UNSAFE)),
    "version": ("future-version", lambda d: load(of_version(b"11\n"), d)),
    "jit": ("not-torchscript", lambda d: torch.jit.load(VALID / "state-dict-plain-cpu-zip.pth")),
    "mmap": ("mmap-legacy", lambda d: load(STREAM, d, mmap=True)),
    "untyped": ("untyped-legacy", lambda _: torch.load(VALID / "every-dtype-cpu-legacy.pth")),
    "python 2": ("python-2", lambda _: pickle.loads(b"U\x04caf\xe9.")),
    "numpy": ("numpy", lambda _: pickle.loads(b"cnumpy._core.no_such_module\nscalar\n.")),
    "path": ("path", lambda _: pathlib.WindowsPath("x")),
    "class": ("missing-class", lambda _: pickle.loads(b"c__main__\nNoSuchNet\n.")),
    "module": ("missing-module", lambda _: pickle.loads(b"cno_such_models.yolo\nModel\n.")),
    "eval": ("not-a-model", lambda _: OrderedDict(a=1).eval()),  # type: ignore[attr-defined]
    "a path": ("not-a-state-dict", lambda _: LINEAR.load_state_dict("x.pth")),  # type: ignore[arg-type]
    "parentheses": ("not-a-state-dict", lambda _: LINEAR.load_state_dict(LINEAR.state_dict)),  # type: ignore[arg-type]
    "data parallel": ("data-parallel", lambda _: nn.DataParallel(LINEAR).no_such_thing),
    "no safetensors": ("not-safetensors", lambda d: cut_safetensors(d, b"")),
    "html as safetensors": ("not-safetensors", lambda d: cut_safetensors(d, HTML)),
    "cut safetensors": ("truncated-safetensors", lambda d: cut_safetensors(d, SAFETENSORS[:-10])),
    "cut header": ("truncated-safetensors", lambda d: cut_safetensors(d, SAFETENSORS[:30])),
    "longer safetensors": ("truncated-safetensors", lambda d: cut_safetensors(d, SAFETENSORS + b"x")),
    "shared": ("shared-tensors", lambda d: save_file({"a": ONES, "b": ONES}, d / "x")),
    "strided": ("non-contiguous", lambda d: save_file({"a": ONES.t()}, d / "x")),
    "sparse": ("sparse", lambda d: save_file({"a": ONES.to_sparse()}, d / "x")),
    "nested": ("nested", lambda d: save_file({"a": {"b": ONES}}, d / "x")),  # type: ignore[dict-item]
    "shape": ("shape", lambda _: LINEAR.load_state_dict(nn.Linear(2, 4).state_dict())),
    "wrapped": ("keys-renamed", lambda _: LINEAR.load_state_dict(nn.DataParallel(LINEAR).state_dict())),
    "checkpoint": ("keys-nested", lambda _: nn.Sequential(LINEAR, LINEAR).load_state_dict({"model": {}, "epoch": 3})),
    "others": ("keys", lambda _: LINEAR.load_state_dict({"w": ONES, "b": ONES, "c": ONES})),
}

QUOTED = {
    "Attempting to deserialize object on a CUDA device": "some-device",
    "Can't get attribute 'Net'": "some-class",
    "Missing key(s) in state_dict": "some-keys",
    "Missing key(s) in state_dict: conv1.weight. Unexpected key(s): module.conv1.weight": "keys-renamed",
    "size mismatch for fc.weight": "some-shape",
    "PytorchStreamReader failed": "some-damage",
    "Killed": "some-memory",
    "Attempting to deserialize object on CUDA device 3 but torch.cuda.device_count() is 1. Please use": "device-number",
    "RuntimeError: torch.UntypedStorage(): Storage device not recognized: mps": "device-unknown",
    "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.": "device-missing",
    "Cannot use ``weights_only=True`` with files saved in the legacy .tar format.": "old-tar",
    "we now require users to upgrade torch to at least v2.6 in order to use the function": "torch-too-old",
    'RuntimeError: invalid hash value (expected "19c8e357", got "0c16…")': "hash",
    "worker died with exit code: 135": "mapped",
    "OSError: … (os error code: 1224)": "mapped",
    "Only one file(not dir) is allowed in the zipfile": "zip-in-old-torch",
    "x.pth is a zip archive (did you mean to use torch.jit.load()?)": "zip-in-old-torch",
    "ModuleNotFoundError: No module named 'numpy._core'": "numpy",
    "SafetensorError: Error while deserializing header: MetadataIncompleteBuffer": "truncated-safetensors",
    "SafetensorError: Error while deserializing header: HeaderTooLarge": "not-safetensors",
    "OSError: The safetensors archive passed at x does not contain the valid metadata.": "safetensors-metadata",
    "AssertionError: _CURRENT_DESERIALIZER is already set": "threads",
    "_pickle.UnpicklingError: invalid load key, '\\xe8'.": "not-a-pickle",
    "PytorchStreamReader failed reading file data/7: file read failed": "zip-reader",
    "Weights only load failed. Something new": "weights-only",
}


@each("case", PROVOKED)
def test_a_message_of_the_libraries_is_explained(case: str, tmp_path: Path) -> None:
    kind, action = PROVOKED[case]
    message = message_of(lambda: action(tmp_path))

    assert [one.kind for one in explain(message)] == [kind], message


@each("text", QUOTED)
def test_a_message_that_is_only_quoted_is_explained(text: str) -> None:
    assert [one.kind for one in explain(text)] == [QUOTED[text]]


def test_every_entry_has_a_message() -> None:
    tested = {kind for kind, _ in PROVOKED.values()} | set(QUOTED.values())

    assert {entry.kind for entry in (*ENTRIES, *GENERAL, *FRAGMENTS)} <= tested


def test_the_numbers_of_a_message_are_in_its_explanation() -> None:
    (one,) = explain(message_of(lambda: LINEAR.load_state_dict(nn.Linear(2, 4).state_dict())))

    assert one.meaning.startswith("weight is torch.Size([4, 2]) in the file and torch.Size([3, 2]) in the model")


def test_the_hint_for_keys_names_the_options() -> None:
    (one,) = explain(message_of(lambda: LINEAR.load_state_dict(nn.DataParallel(LINEAR).state_dict())))

    assert one.hint.endswith("ckptool migrate FILE --form state_dict --strip-module")


@pytest.mark.parametrize("text", ["", "hello", "x" * 2_000_000, "a killed process"])
def test_what_is_no_known_message_is_said_to_be_none(text: str) -> None:
    assert explain(text) == ()


def test_the_command_explains_and_says_by_its_exit_code_whether_it_could() -> None:
    text = message_of(lambda: torch.load(VALID / "device-forged-npu0-zip.pth"))
    result = CliRunner().invoke(cli, ["check", "--explain", text])
    assert result.exit_code == 0
    assert result.stdout.startswith("device-unknown: torch knows no device called 'npu:0'")
    piped = CliRunner().invoke(cli, ["check", "--explain", "-", "--json"], input=text)
    assert json.loads(piped.stdout)["explanations"][0]["kind"] == "device-unknown"
    assert CliRunner().invoke(cli, ["check", "--explain", "hello"]).exit_code == 1


def test_a_heading_without_end_is_no_trouble() -> None:
    assert [one.kind for one in explain('Missing key(s) in state_dict: "' * 10_000)] == ["some-keys"]
