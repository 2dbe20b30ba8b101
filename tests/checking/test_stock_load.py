"""What plain torch.load() refuses, held against torch itself over every file there is."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool import check
from tests.build import call, named, ops, pickled, raw, torch_zip
from tests.corpus.test_corpus import FOLDER, ROWS
from tests.each import each
from tests.program import VALID
from tests.scale import some

# map_location does not reach tensors that are rebuilt on their device from a stream: what that says of this machine is
# not about the file.
NEEDS_ITS_DEVICE = "device-rebuilt-forged-xla0-legacy.pth"
OURS = [
    path for path in sorted(VALID.iterdir()) if path.suffix in (".pth", ".pt", ".pt2") and path.name != NEEDS_ITS_DEVICE
]


def python_2(text: bytes) -> bytes:
    """Return the opcodes that push a string of Python 2, which torch takes."""
    return b"U" + bytes([len(text)]) + text


def torch_opens(path: Path) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # noqa: BLE001 - whatever it is, it does not open
            return False
    return True


def is_said_to_be_refused(path: Path) -> bool:
    report = check(path)
    return report.error is not None or "CK202" in {one.code for one in report.findings}


@each("path", OURS)
def test_what_is_said_to_be_refused_is_refused_and_nothing_else(path: Path) -> None:
    assert is_said_to_be_refused(path) != torch_opens(path)


@pytest.mark.corpus
@pytest.mark.skipif(not ROWS, reason=f"no folder of real files at {FOLDER}")
@pytest.mark.parametrize(
    "row", some([row for row in ROWS if row["container"] != "safetensors"], 10), ids=lambda row: row["file"]
)
def test_real_files_are_judged_as_torch_judges_them(row: dict[str, str]) -> None:
    path = FOLDER / row["file"]
    assert is_said_to_be_refused(path) != torch_opens(path)


def test_a_name_is_listed_with_its_record_and_its_offset(tmp_path: Path) -> None:
    tree = {"w": call(named("argparse", "Namespace"))}
    data = pickled(tree)
    path = tmp_path / "x.pth"
    path.write_bytes(torch_zip(tree))
    (found,) = check(path).globals

    assert (found.name, found.is_allowed) == ("argparse.Namespace", False)
    assert found.record.endswith("/data.pkl")
    assert data[found.offset :].startswith(b"cargparse\nNamespace\n")


def test_names_in_the_first_pickles_of_a_stream_are_listed_too() -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer, _use_new_zipfile_serialization=False)
    data = buffer.getvalue()
    at = data.index(b"}q\x00(X\x10\x00\x00\x00protocol_version") - 2  # the third pickle: the machine that wrote it
    evil = data[: at + 2] + named("os", "system") + b"0" + data[at + 2 :]

    names = {one.name: one for one in check(evil).globals}
    assert names["os.system"].offset == at + 2
    assert not names["os.system"].is_allowed


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_inside_strings_are_looked_into(protocol: int) -> None:
    inner = pickle.dumps(io.BytesIO, protocol)
    text = ops(str(inner, "latin-1")) if protocol == 2 else raw(inner)
    report = check(torch_zip({"blob": text}))

    nested = [one for one in report.globals if one.nested_at is not None]
    assert [one.name for one in nested] == ["_io.BytesIO"]
    assert [finding.severity for finding in report.findings if finding.code == "CK203"] == ["info"]


def test_every_pickle_of_a_stream_inside_a_pickle_is_looked_into() -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer, _use_new_zipfile_serialization=False)
    names = {one.name for one in check(pickle.dumps({"stream": buffer.getvalue()})).globals}
    assert "torch._utils._rebuild_tensor_v2" in names

    innermost = pickle.dumps(io.BytesIO, 4)
    deep = pickle.dumps({"outer": pickle.dumps({"inner": innermost}, 4)}, 4)
    assert [one.name for one in check(deep).globals] == ["_io.BytesIO"]


@pytest.mark.parametrize("text", ["\x80", "\x80\x02", "\x80\x02caf", "the os.system of it", "__reduce__"])
def test_strings_that_only_look_like_something_are_no_finding(text: str) -> None:
    report = check(torch_zip({"note": text, "blob": raw(text.encode("latin-1"))}))
    assert {one.code for one in report.findings} <= {"CK125", "CK202"}  # there is no tensor
    assert report.globals == ()
    old = check(torch_zip({"note": text, "blob": python_2(text.encode("latin-1"))}))
    assert (old.acts == ()) == text.isascii()  # readers take other bytes of Python 2 for other text


def test_a_pickle_in_a_string_that_breaks_off_is_listed_if_it_calls_something() -> None:
    for inner, names in ((named("os", "system"), []), (call(named("os", "system"), "true"), ["os.system"])):
        report = check(torch_zip({"blob": raw(b"\x80\x02" + inner)}))
        assert [one.name for one in report.globals] == names


def test_an_opcode_that_torch_does_not_know_is_named() -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer, pickle_protocol=4)
    (finding,) = [one for one in check(buffer.getvalue()).findings if one.code == "CK202"]

    assert finding.severity == "warning"
    assert "pickle opcode 149 FRAME (data.pkl, byte 2)" in finding.message


def saved(changes: Mapping[str, bytes]) -> bytes:
    """Return a torch zip in which records are replaced, or added."""
    first, second = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.ones(4)}, first)
    with zipfile.ZipFile(first) as old, zipfile.ZipFile(second, "w") as new:
        records = {name: old.read(name) for name in old.namelist()}
        for name, data in {**records, **changes}.items():
            new.writestr(name, data)
    return second.getvalue()


@pytest.mark.parametrize(
    "changes",
    [{}, {"archive/version": b"3x\n"}, {"archive/version": b"  3\n"}, *({"archive/version": one} for one in (
        b"\n", b"x3", b"0", b"-1")), {"Data/0": b"text"}, {"other/x": b"text"}, {"__MACOSX/x": b"text"}],
)  # fmt: skip
def test_check_and_torch_agree_on_odd_zips(changes: dict[str, bytes]) -> None:
    data = saved(changes)
    try:
        torch.load(io.BytesIO(data), weights_only=True)
        opens = True
    except RuntimeError:
        opens = False
    report = ckptool.check(data, deep=True)
    assert ("CK202" not in {one.code for one in report.findings}) == opens


@pytest.mark.parametrize(("at", "byte"), [(16, 1), (20, 1), (72, 0), (72, 2)])
def test_a_zip64_of_several_volumes_is_refused(at: int, byte: int) -> None:
    data = saved({})
    end = data.rindex(b"PK\5\6")
    count, nbytes, offset = struct.unpack_from("<H2L", data, end + 10)
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, nbytes, offset)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    whole = (
        data[:end] + end64 + locator + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, *[(1 << 32) - 1] * 2, 0)
    )
    assert list(ckptool.load(whole)) == ["w"]
    torch.load(io.BytesIO(whole), weights_only=True)
    flipped = bytearray(whole)
    flipped[end + at] = byte
    with pytest.raises(ckptool.UnsupportedFeature, match="several volumes"):
        ckptool.open_checkpoint(bytes(flipped))
    with pytest.raises(RuntimeError):
        torch.load(io.BytesIO(flipped), weights_only=True)
