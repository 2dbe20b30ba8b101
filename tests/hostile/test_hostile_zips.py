"""
Zips that two programs would read differently, or that lie about their size: refused, with the reason.

Z1 to Z15 are rows of the project's list of hostile input. The matrix has each lie of each field, for every verb.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ckptool import CkptoolError, LimitExceeded, open_checkpoint
from tests import build
from tests.each import each
from tests.formats.said import refused
from tests.process import ROOT
from tests.scale import exhaustive, scaled, times
from tests.zip_bytes import (
    FULL16,
    FULL32,
    Member,
    deflated,
    local_header,
    read,
    stored,
    streamed,
    whole,
    zip64_field,
)

A, B, C = stored("x/a", b"first"), stored("x/b", b"second one"), deflated("x/c", b"third" * 50)
D = streamed(stored("x/d", b"fourth"))
SPLIT, AMBIGUOUS = "split-zip", "ambiguous-zip"
EVERYTHING = {"here": FULL16, "count": FULL16, "nbytes": FULL32, "offset": FULL32}
FIRST = len(local_header(A)) + len(A.payload)
OUTER = stored("x/outer", b"before" + local_header(A) + A.payload)
NESTED = stored("x/outer", local_header(A) + A.payload)
MODES = (0o120777, 0o040755, 0o020666, 0o060666, 0o010644, 0o140644)
MARKED = [(0, 0x10), (3 << 8, 0x10), *((3 << 8, mode << 16) for mode in MODES)]
"""As a folder, a link, a device, a pipe or a socket."""
NAMES = (
    *(b"", b"/etc/passwd", b"../up", b"x/../../up", b"x/..", b"x\\y", b"C:\\x", b"x\0y", b"x\ny", b"x\x1b[31m"),
    b"\xff\xfe",
)


def unicode_path(name: str, *, of: bytes) -> bytes:
    field = b"\x01" + zlib.crc32(of).to_bytes(4, "little") + name.encode()
    return struct.pack("<2H", 0x7075, len(field)) + field


def placed(member: Member, where: str, fields: dict[str, Any]) -> Member:
    return replace(member, **fields) if where == "both" else replace(member, **{where: fields})


def _read() -> Iterator[tuple[str, bytes]]:
    both = {"stored": FULL32, "nbytes": FULL32, "extra": zip64_field(5, 5)}
    yield "zip64", whole([A, B], zip64=True)
    yield "zip64 that says all", whole([A, B], zip64=True, last=EVERYTHING)
    yield "sizes in a field in front", whole([replace(A, local=both), B])
    yield "sizes in a field of the directory", whole([replace(A, central=both), B])
    offset = {"header": FULL32, "extra": zip64_field(FIRST)}
    yield "an offset in a field", whole([A, replace(B, central=offset)])
    yield "a comment", whole([A, B], last={"comment": b"made by hand"})
    for extra in (b"\x46\x42\x04\x00ZZZZ", b"\x55\x54\x05\x00\x01abcd", bytes(3), unicode_path("x/a", of=A.name)):
        for where in ("local", "central", "both"):
            yield f"extra {extra.hex()} in {where}", whole([placed(A, where, {"extra": extra}), B])
    for attributes in (0x20, 0x01, 0o100644 << 16, 0o100755 << 16 | 0x20):
        plain = replace(A, central={"made_by": 3 << 8, "attributes": attributes})
        yield f"marked {attributes:#x}", whole([plain, B])
    folder = replace(stored("x/"), central={"made_by": 3 << 8, "attributes": 0o040755 << 16 | 0x10})
    yield "a folder", whole([folder, A, B])
    for known in (
        {"crc32": A.crc32, "stored": 5, "nbytes": 5},
        {"crc32": 0, "stored": 5, "nbytes": 5},
        {"crc32": A.crc32, "stored": 0, "nbytes": 0},
        {"crc32": 0, "stored": FULL32, "nbytes": FULL32},
        {"crc32": 0, "stored": FULL32, "nbytes": FULL32, "extra": zip64_field(0, 0)},
        {"crc32": 0, **both},
    ):
        yield f"in front and again behind: {known}", whole([replace(streamed(A), local=known), B])
    for filler in (b"\0", b"#!/bin/sh\n", bytes(60_000)):
        for place in ("prefix", "gap", "suffix"):
            yield f"{len(filler)} bytes as {place}", whole([A, B], **{place: filler})  # type: ignore[arg-type]


READ = dict(_read())


@each("name", READ)
def test_what_has_one_reading_is_read(name: str) -> None:
    archive = read(READ[name])
    assert {one: archive.open(one).read(0, archive[one].nbytes) for one in archive} == {
        "x/a": b"first",
        "x/b": b"second one",
    }
    assert bool(archive.notes) == (" bytes as " in name)


def test_archives_hold_archives_and_all_kinds_of_members() -> None:
    assert list(read(whole([stored("inner.zip", whole([A, B])), stored("last", b"x")]))) == ["inner.zip", "last"]
    archive = read(whole([A, B, C, D]))
    assert [archive.open(one).read(0, 5) for one in archive] == [b"first", b"secon", b"third", b"fourt"]


def test_a_member_that_reaches_over_all_others_is_truncated_with_its_numbers() -> None:
    long = {"stored": 1000, "nbytes": 1000}
    data = whole([A, replace(B, local=long, central=long)])
    with pytest.raises(CkptoolError) as caught:
        read(data)
    assert caught.value.kind == "truncated-zip"
    start = FIRST + len(local_header(B))
    assert (caught.value.needed, caught.value.actual) == (start + 1000, data.index(b"PK\x01\x02"))  # type: ignore[attr-defined]


def test_no_bit_of_a_directory_entry_can_be_flipped_and_show_something_else() -> None:
    data = whole([A, B, C])
    start, stop = data.index(b"PK\x01\x02"), data.rindex(b"PK\x05\x06")
    sound = {name: (record.offset, record.nbytes) for name, record in read(data).items()}
    for at, bit in product(range(start, stop), range(8)):
        try:
            archive = read(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        except CkptoolError:
            continue
        found = {name: (record.offset, record.nbytes) for name, record in archive.items()}
        assert found == sound, (at - start, bit)


# Bombs, and what they may cost (Z11)


def test_a_member_may_not_grow_beyond_what_the_file_may_cost() -> None:
    archive = read(whole([deflated("bomb", bytes(1 << 20))]), inflated_nbytes=1 << 16)
    with pytest.raises(LimitExceeded) as caught:
        archive.open("bomb")
    assert (caught.value.needed, caught.value.actual) == (1 << 20, 1 << 16)


PACKED = deflated("x", b"content" * 99)


@each(
    "member",
    [
        *(deflated("x", bytes(1 << 20), nbytes=claimed) for claimed in (10, (1 << 20) - 1, (1 << 20) + 1)),
        deflated("x", b"content", crc32=5),
        replace(PACKED, payload=PACKED.payload + b"more"),
        replace(PACKED, payload=PACKED.payload[:9] + b"\xff" + PACKED.payload[10:]),
        replace(PACKED, payload=PACKED.payload[:9] + PACKED.payload[10:]),
    ],
)
def test_a_compressed_member_of_another_content_than_it_claims_is_refused(member: Member) -> None:
    with pytest.raises(CkptoolError) as caught:
        read(whole([member])).open("x")
    assert caught.value.kind in ("damaged-record", "malformed-zip")


@exhaustive
@scaled
def test_many_bombs_in_one_archive_cost_no_more_than_one(tmp_path: Path) -> None:
    inner = build.pickled({"x": build.raw(bytes(60 << 20)), "weight": build.inline_tensor()})
    (tmp_path / "bombs.zip").write_bytes(whole([deflated(f"{number}.pkl", inner) for number in range(times(4, 12))]))
    script = f"""
import ckptool
from tests.process import peak_nbytes
print(ckptool.open_checkpoint({str(tmp_path / "bombs.zip")!r}).member)
print(peak_nbytes() >> 20)
"""
    said = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=60, cwd=ROOT)
    assert said.startswith("0.pkl")
    assert int(said.split()[-1]) < 300, said  # one takes about 190 MiB, twelve 900


def test_a_compressed_pickle_that_grows_out_of_bounds_never_takes_the_memory_that_it_asks_for(tmp_path: Path) -> None:
    (tmp_path / "bomb.pth").write_bytes(whole([deflated("archive/data.pkl", bytes(times(80, 200) << 20))]))
    tracemalloc.start()
    try:
        refused(tmp_path / "bomb.pth", LimitExceeded)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_more_members_than_allowed_are_refused_before_they_are_read() -> None:
    data = whole([stored(f"x/{number}") for number in range(20)])
    assert len(read(data, entries=20)) == 20
    with pytest.raises(LimitExceeded) as caught:
        read(data, entries=19)
    assert (caught.value.needed, caught.value.actual) == (20, 19)


# Names that are one name to some readers, and bytes between members that some take for members


@each(
    "data",
    [
        whole([stored("é", flags=1 << 11), replace(stored("x"), name=b"\x82")]),  # the same letter in code page 437
        whole([A, B], gap=local_header(C) + C.payload),
        whole([A, B], gap=whole([C])),
    ],
)
def test_what_would_be_another_member_to_some_readers_is_refused(data: bytes) -> None:
    with pytest.raises(CkptoolError) as caught:
        read(data)
    assert caught.value.kind == AMBIGUOUS


# Flags that change what is read (Z15), and whatever else


@each("bit", range(16))
@each("where", ["both", "local", "central"])
def test_every_flag_is_harmless_or_refused(bit: int, where: str) -> None:
    data = whole([placed(A, where, {"flags": 1 << bit}), B])
    says_nothing = where == "both" or bit == 11  # of the spelling of a name of ASCII
    if says_nothing and bit in (1, 2, 4, 7, 8, 9, 10, 11, 12, 14, 15):
        assert read(data).open("x/a").read(0, 5) == b"first"
        return
    with pytest.raises(CkptoolError) as caught:
        read(data)
    assert where != "both" or bit not in (0, 6, 13) or caught.value.kind == "encrypted-zip"


def test_the_format_is_found_by_content_whatever_the_file_is_called(tmp_path: Path) -> None:
    for suffix, (name, data) in product((".pth", ".safetensors", ".zip", ".pkl", ""), build.one_of_each().items()):
        path = tmp_path / f"file{suffix}"
        path.write_bytes(data)
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.format == name
