"""
Files that loaders read in another way than one would think: what any of them would run is not data.

In each case a loader makes a folder, by what is hidden in the file.
"""

from __future__ import annotations

import bz2
import gzip
import json
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from struct import pack

import joblib
import pytest
import torch

from ckptool import check
from tests.build import MAGIC_NUMBER, call, floats, named, ops, pickled, tar_file, zip_file
from tests.checking.test_data import tar_member
from tests.program import invoke

MADE = "made"
RUNS = call(named("os", "mkdir"), MADE)
HEAD = pickled(b"C\x1e" + b"z" * 30 + b"0" + ops(MAGIC_NUMBER)) + pickled(1001)
REST = pickled({}) + pickled(RUNS) + pickled([])
"""What torch.save wrote before 1.6: the first of its pickles is a number, and the fourth runs."""
SOUND = {"storages": pickled(0) + pickled([]), "tensors": pickled(0), "pickle": pickled({"a": 1})}
ENTRY = pickled(1, protocol=1) + pickled((1, "cpu", named("torch", "FloatStorage"))) + pack("<q", 4) + floats()
HIDDEN = ENTRY + pickled(RUNS)
"""A table whose second pickle, behind the elements of the storage, runs."""


def safetensors_that_are(pickles: bytes) -> bytes:
    """The length of the header begins a text for a pickle, which goes on in the name of a tensor, and in the data."""
    length, data = 39 << 8 | ord("X"), b"A" * 26 + b"0" + pickles[2:]
    begin = '{"__metadata__":{"'.ljust(36, "a") + "0"
    begin += ("C~" + "b" * 126 + "0") * ((length - len(begin) - 102) // 129) + "C~"
    end = f'":"x"}},"w":{{"dtype":"U8","shape":[{len(data)}],"data_offsets":[0,{len(data)}]}}}}'
    header = begin + end.rjust(100, "c")
    assert len(header) == length
    assert json.loads(header)
    return pack("<Q", length) + header.encode() + data


def tar_that_is_a_stream() -> bytes:
    """A sound tar, but that Python's tarfile stumbles at its end: then torch.load() takes the file for a stream."""
    begin = HEAD + b"\x80\2B" + pack("<I", 512 - len(HEAD) - 7)
    first = tar_member("x", b"." + REST, put={0: begin})
    return first + tar_file(SOUND)[:-1024] + tar_member("p", b"", b"x")


def sized_by_an_extended_header() -> bytes:
    """A table that holds headers of members for who does not take its size for a number."""
    inner = tar_member("x", b"", put={0: SOUND["storages"]}) + tar_member("storages", HIDDEN)
    record = b" size=%d\0\n" % len(inner)
    others = tar_file({name: SOUND[name] for name in ("tensors", "pickle")})[:-1024]
    return tar_member("p", b"%d" % (len(record) + 2) + record, b"x") + tar_member("storages", inner) + others


def sparse() -> bytes:
    """A sparse file without bytes of its own: Python takes as many as its list says, from the header behind it."""
    pieces = b"%011o\0%011o\0" % (0, 512)
    table = tar_member("storages", b"", b"S", put={345: b"p\0", 386: pieces, 483: b"%011o\0" % 512})
    return table + tar_member("x", b"", put={0: pickled(RUNS)})


TAR, TABLE = tar_file(SOUND)[:-1024], tar_member("t", HIDDEN)
TWOFOLD: dict[str, Callable[[], bytes]] = {
    "safetensors that are a stream": lambda: safetensors_that_are(HEAD + REST),
    "a tar that is a stream": lambda: tar_that_is_a_stream() + bytes(1024),
    "a tar that is a stream alone": lambda: (
        tar_member("x", b"." + REST, put={0: tar_that_is_a_stream()[:99]}) + tar_member("p", b"", b"x")
    ),
    "a name that is longer than is said": lambda: TAR + tar_member("l", b"storages", b"L", size=1) + TABLE,
    "a name behind an extended header": lambda: (
        TAR + tar_member("p", b"8 a=bcd\n17 path=storages\n", b"x", size=8) + TABLE
    ),
    "a name, and a line without a value": lambda: TAR + tar_member("p", b"17 path=storages\n7 path\n", b"x") + TABLE,
    "a size that is not a number for some": sized_by_an_extended_header,
    "a sparse table in a folder for some": sparse,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TWOFOLD)
def test_what_a_loader_reads_in_another_way_is_no_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.pt").write_bytes(TWOFOLD[name]() + bytes(1024) * name.startswith("a"))
    with suppress(Exception):  # whatever it says behind that
        torch.load("x.pt", weights_only=False)
    assert Path(MADE).is_dir()
    assert check("x.pt").grade not in ("data", "program")
    assert invoke(["check", "--deep", "--strict", "--fail-on", "code", "x.pt"]).exit_code != 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["weights", "constants", "sample_inputs"])
@pytest.mark.parametrize("kind", ["a tar that is a stream", "safetensors that are a stream"])
def test_files_in_exported_programs_are_looked_at_as_files(
    place: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile("fixtures/valid/export-cpu.pt2") as found:
        members = {name: found.read(name) for name in found.namelist()}
    monkeypatch.chdir(tmp_path)
    Path("x.pt2").write_bytes(zip_file(members))
    assert check("x.pt2").grade == "program"
    root = next(iter(members)).partition("/")[0]
    Path("x.pt2").write_bytes(zip_file({**members, f"{root}/data/{place}/model.pt": TWOFOLD[kind]()}))
    with suppress(Exception):
        torch.export.load("x.pt2")
    assert Path(MADE).is_dir()
    assert check("x.pt2").grade == "system"
    assert invoke(["check", "--fail-on", "code", "x.pt2"]).exit_code == 1


@pytest.mark.parametrize("pack_up", [gzip.compress, zlib.compress, bz2.compress])
def test_what_is_unpacked_may_be_something_else_as_well(
    pack_up: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x").write_bytes(pack_up(safetensors_that_are(pickled(RUNS))))
    joblib.load("x")
    assert Path(MADE).is_dir()
    assert check("x").grade == "system"
    assert invoke(["check", "--deep", "--strict", "--fail-on", "code", "x"]).exit_code == 1
