"""
Zips that two programs would read differently, or that lie about their size: refused, with the reason.

Z1 to Z15 are rows of the project's list of hostile input.
"""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import tracemalloc
import zlib
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ckptool import (
    AmbiguousFile,
    CkptoolError,
    LimitExceeded,
    MalformedFile,
    TruncatedFile,
    UnsupportedFeature,
    open_checkpoint,
)
from tests import build
from tests.each import each
from tests.scale import exhaustive, scaled, times
from tests.zip_bytes import (
    FULL16,
    FULL32,
    Member,
    deflated,
    end,
    entry,
    local_header,
    read,
    stored,
    streamed,
    whole,
    zip64_field,
)

A, B, C = stored("x/a", b"first"), stored("x/b", b"second one"), deflated("x/c", b"third" * 50)


def refused(data: bytes, *, cls: type[CkptoolError] = AmbiguousFile, kind: str = "ambiguous-zip") -> CkptoolError:
    with pytest.raises(cls) as caught:
        read(data)
    assert caught.value.kind == kind
    return caught.value


def test_the_sound_zip_that_the_others_are_made_from_is_read() -> None:
    archive = read(whole([A, B, C, streamed(stored("x/d", b"fourth"))]))

    assert {name: archive.open(name).read(0, archive[name].nbytes) for name in archive} == {
        "x/a": b"first",
        "x/b": b"second one",
        "x/c": b"third" * 50,
        "x/d": b"fourth",
    }
    assert archive.notes == ()


# Two names for one file (Z1, Z3)


@each("copies", [2, 3, 17])
@each("place", [0, 1, 2])
def test_a_name_that_is_there_twice_is_refused(copies: int, place: int) -> None:
    twins = [stored("x/twin", bytes([number])) for number in range(copies)]

    refused(whole([A, B][:place] + twins + [A, B][place:]))


@pytest.mark.parametrize("name", ["data.pkl", "version", "byteorder", "constants.pkl", ".format_version", "data/0"])
def test_names_that_differ_only_in_case_are_refused(name: str) -> None:
    variants = {name.upper(), name.title(), name[:-1] + name[-1].upper(), name.swapcase()} - {name}
    for variant in variants:
        refused(whole([stored(f"archive/{name}"), stored(f"archive/{variant}")]))


def test_one_member_listed_twice_is_refused() -> None:
    refused(whole([A, B], listed=[A, B, B]))


def test_two_spellings_that_decode_to_one_name_are_refused() -> None:
    utf8 = Member(name="x/é".encode(), flags=0x800)
    dos = Member(name="x/é".encode("cp437"))

    refused(whole([utf8, dos]))


@pytest.mark.parametrize("name", ["archive/DATA.PKL", "archive/Data.pkl", "archive/data.PKL"])
def test_only_the_exact_name_counts(name: str) -> None:
    tree = build.pickled({"w": build.tensor(build.storage())})
    data = whole([stored(name, tree), stored("archive/data/0", build.floats()), stored("archive/version", b"3\n")])

    with pytest.raises(CkptoolError):
        open_checkpoint(data)


# More than one archive (Z2)


def test_two_archives_one_behind_the_other_are_refused() -> None:
    refused(whole([A]) + whole([B]), cls=UnsupportedFeature, kind="several-zips")
    refused(whole([B], prefix=whole([A])))
    refused(whole([A], gap=whole([B])))


@pytest.mark.parametrize("filler", [b"\0", b"#!/bin/sh\n", bytes(70_000)])
def test_bytes_that_belong_to_no_member_are_told_of(filler: bytes) -> None:
    for data in (
        whole([A, B], prefix=filler),
        whole([A, B], gap=filler),
        whole([A, B], suffix=filler[:60_000]),
    ):
        archive = read(data)
        assert list(archive) == ["x/a", "x/b"]
        assert archive.notes


def test_a_member_that_only_a_sequential_reader_would_see_is_refused() -> None:
    hidden = stored("x/a", b"other")

    refused(whole([hidden, A, B], listed=[A, B]))
    refused(whole([A, hidden, B], listed=[A, B]))


def test_a_whole_archive_as_a_stored_member_is_no_second_archive() -> None:
    archive = read(whole([stored("inner.zip", whole([A, B])), stored("last", b"x")]))

    assert list(archive) == ["inner.zip", "last"]


# The two headers of a member (Z4)


LIES: dict[str, Any] = {
    "name": b"x/z",
    "flags": 0x002,
    "method": 8,
    "crc32": 1,
    "stored": 9,
    "nbytes": 9,
}


@each("where", ["local", "central"])
@each("name", LIES)
@each("number", [0, 1])
def test_headers_that_disagree_are_refused(name: str, where: str, number: int) -> None:
    members = [A, B]
    members[number] = replace(members[number], **{where: {name: LIES[name]}})

    with pytest.raises((AmbiguousFile, MalformedFile)):
        read(whole(members))


@each("name", ["crc32", "stored", "nbytes"])
@each("magic", [True, False])
@each("width", [4, 8])
def test_descriptors_that_disagree_with_the_directory_are_refused(name: str, magic: bool, width: int) -> None:
    sound = streamed(A, magic=magic, width=width)
    assert list(read(whole([sound, B]))) == ["x/a", "x/b"]

    refused(whole([replace(sound, central={name: LIES[name]}), B]), cls=AmbiguousFile)
    refused(whole([replace(sound, local={**sound.local, name: LIES[name]}), B]))
    at = {"crc32": 0, "stored": 4, "nbytes": 4 + width}[name] + 4 * magic
    bent = sound.descriptor[:at] + b"\x07" + sound.descriptor[at + 1 :]
    refused(whole([replace(sound, descriptor=bent), B]))


@pytest.mark.parametrize(
    "local",
    [
        {"crc32": A.crc32, "stored": 5, "nbytes": 5},
        {"crc32": 0, "stored": 5, "nbytes": 5},
        {"crc32": A.crc32, "stored": 0, "nbytes": 0},
        {"crc32": 0, "stored": FULL32, "nbytes": FULL32},
        {"crc32": 0, "stored": FULL32, "nbytes": FULL32, "extra": zip64_field(0, 0)},
        {"crc32": 0, "stored": FULL32, "nbytes": FULL32, "extra": zip64_field(5, 5)},
    ],
    ids=str,
)
def test_writers_that_know_some_of_it_in_front_and_say_it_again_behind_are_read(local: dict[str, Any]) -> None:
    assert read(whole([replace(streamed(A), local=local), B])).open("x/a").read(0, 5) == b"first"


def test_a_member_without_its_descriptor_is_refused() -> None:
    refused(whole([replace(streamed(A), descriptor=b""), B]))


def test_a_stored_member_with_two_sizes_is_refused() -> None:
    refused(whole([replace(A, nbytes=3), B]))


# Members that overlap (Z5)


def test_members_that_share_bytes_are_refused() -> None:
    first = len(local_header(A)) + len(A.payload)
    refused(whole([A, B], listed=[A, replace(B, central={"header": 0, "name": A.name})]))
    nested = stored("x/outer", local_header(A) + A.payload)
    refused(whole([nested, A], listed=[nested, replace(A, central={"header": len(local_header(nested))})]))
    refused(whole([A, B], listed=[replace(A, central={"stored": first, "nbytes": first}), B]))


def test_a_directory_that_reaches_into_the_members_is_refused() -> None:
    data = whole([A, B])
    directory = data.index(b"PK\x01\x02")

    with pytest.raises(CkptoolError):
        read(
            data[:directory] + data[directory:].replace(struct.pack("<L", directory), struct.pack("<L", directory - 5))
        )


def test_a_member_at_the_very_end_of_another_is_refused() -> None:
    inner = local_header(A) + A.payload
    outer = stored("x/outer", b"before" + inner)
    hidden = replace(A, central={"header": len(local_header(outer)) + 6})

    refused(whole([outer], listed=[outer, hidden]))


def test_a_member_that_reaches_over_all_others_is_truncated_with_its_numbers() -> None:
    long = {"stored": 1000, "nbytes": 1000}
    data = whole([A, replace(B, local=long, central=long)])

    error = refused(data, cls=TruncatedFile, kind="truncated-zip")
    start = len(local_header(A)) + len(A.payload) + len(local_header(B))
    assert (error.needed, error.actual) == (start + 1000, data.index(b"PK\x01\x02"))


@pytest.mark.parametrize("header", [1, 5, 60, 1 << 20, FULL32 - 1])
def test_an_entry_that_points_at_no_header_is_refused(header: int) -> None:
    with pytest.raises(CkptoolError):
        read(whole([A, B], listed=[A, replace(B, central={"header": header})]))


# Entries that are no files (Z6)


@each(
    ("made_by", "attributes"),
    [
        (0, 0x10),
        (3 << 8, 0x10),
        (3 << 8, 0o120777 << 16),  # a symbolic link
        (3 << 8, 0o040755 << 16),
        (3 << 8, 0o020666 << 16),  # a character device
        (3 << 8, 0o060666 << 16),
        (3 << 8, 0o010644 << 16),  # a pipe
        (3 << 8, 0o140644 << 16),
    ],
)
def test_a_member_marked_as_folder_link_or_device_is_refused(made_by: int, attributes: int) -> None:
    refused(whole([A, replace(B, central={"made_by": made_by, "attributes": attributes})]))


@pytest.mark.parametrize("attributes", [0x20, 0x01, 0o100644 << 16, 0o100755 << 16 | 0x20])
def test_a_member_marked_as_a_plain_file_is_read(attributes: int) -> None:
    member = replace(A, central={"made_by": 3 << 8, "attributes": attributes})

    assert list(read(whole([member]))) == ["x/a"]


@pytest.mark.parametrize("name", ["x/empty", "x/with bytes/", "x/both"])
def test_folders_with_bytes_or_without_a_slash_are_refused(name: str) -> None:
    folder = stored(name, b"" if name == "x/empty" else b"bytes", central={"attributes": 0x10})

    refused(whole([A, folder]))


def test_folders_are_no_members() -> None:
    folder = replace(stored("x/"), central={"made_by": 3 << 8, "attributes": 0o040755 << 16 | 0x10})

    assert list(read(whole([folder, A]))) == ["x/a"]


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


# The end of the archive (Z8, Z10)


def test_an_end_record_inside_the_comment_is_refused() -> None:
    fake = end(0, 0, 0)

    with pytest.raises(CkptoolError):
        read(whole([A, B], last={"comment": fake}))
    with pytest.raises(CkptoolError):
        read(whole([A, B], last={"comment": fake + b"more", "comment_n": len(fake) + 4}))


@each(
    "last",
    [
        {"here": 1, "count": 1},
        {"here": 3, "count": 3},
        {"offset": 0},
        {"offset": 3},
        {"nbytes": 40},
        {"nbytes": 1 << 30},
        {"offset": 1 << 30},
        {"comment_n": 5},
    ],
)
def test_an_end_record_that_lies_is_refused(last: dict[str, int]) -> None:
    with pytest.raises((AmbiguousFile, MalformedFile)):
        read(whole([A, B], last=last))


def test_an_end_record_inside_the_directory_is_refused() -> None:
    refused(whole([replace(A, central={"comment": end(0, 0, 0)}), B]))


@pytest.mark.parametrize("junk", [b"\0", b"PK\x01\x02", bytes(46)])
def test_more_in_the_directory_than_its_members_is_refused(junk: bytes) -> None:
    body, directory = local_header(A) + A.payload, entry(A, 0)
    assert list(read(body + directory + end(1, len(directory), len(body)))) == ["x/a"]

    refused(body + directory + junk + end(1, len(directory + junk), len(body)))


@pytest.mark.parametrize("last", [{"disk": 1}, {"start": 1}, {"here": 1}], ids=str)
def test_an_archive_in_several_volumes_is_refused(last: dict[str, int]) -> None:
    refused(whole([A, B], last=last), cls=UnsupportedFeature, kind="split-zip")


def test_a_member_on_another_volume_is_refused() -> None:
    refused(whole([A, replace(B, central={"disk": 1})]), cls=UnsupportedFeature, kind="split-zip")


def test_a_comment_is_no_harm() -> None:
    assert list(read(whole([A, B], last={"comment": b"made by hand"}))) == ["x/a", "x/b"]


# Zip64: what it says twice (Z8, Z9)


def test_a_zip64_directory_that_agrees_is_read() -> None:
    everything = {"here": FULL16, "count": FULL16, "nbytes": FULL32, "offset": FULL32}

    assert list(read(whole([A, B], zip64=True))) == ["x/a", "x/b"]
    assert list(read(whole([A, B], zip64=True, last=everything))) == ["x/a", "x/b"]


@pytest.mark.parametrize(
    "last64",
    [
        {"count": 1, "here": 1},
        {"offset": 0},
        {"nbytes": 46},
        {"record": 0},
        {"record": 1 << 40},
        {"size": 45},
        {"here": 1},
    ],
    ids=str,
)
def test_a_zip64_end_record_that_lies_is_refused(last64: dict[str, int]) -> None:
    for last in ({}, {"here": FULL16, "count": FULL16, "nbytes": FULL32, "offset": FULL32}):
        with pytest.raises((AmbiguousFile, MalformedFile)):
            read(whole([A, B], zip64=True, last64=last64, last=last))


@pytest.mark.parametrize(
    "last", [{"here": 1, "count": 1}, {"offset": 5}, {"nbytes": 46}, {"here": 7, "count": 7}], ids=str
)
def test_an_end_record_that_disagrees_with_a_sound_zip64_record_is_refused(last: dict[str, int]) -> None:
    refused(whole([A, B], zip64=True, last=last))


@pytest.mark.parametrize("shift", [-56, -1, 1, 8, 55, 56, 70])
def test_a_locator_that_points_beside_the_zip64_record_is_refused(shift: int) -> None:
    record = whole([A, B], zip64=True).rindex(b"PK\x06\x06")

    with pytest.raises((AmbiguousFile, MalformedFile)):
        read(whole([A, B], zip64=True, last64={"record": record + shift}))


@pytest.mark.parametrize("last", [{"offset": FULL32}, {"nbytes": FULL32}], ids=str)
def test_an_end_record_that_points_to_a_missing_zip64_record_is_refused(last: dict[str, int]) -> None:
    with pytest.raises((AmbiguousFile, MalformedFile)):
        read(whole([A, B], last=last))


def test_sizes_may_stand_in_a_zip64_field() -> None:
    both = {"stored": FULL32, "nbytes": FULL32, "extra": zip64_field(5, 5)}
    for where in ("local", "central"):
        assert list(read(whole([replace(A, **{where: both}), B]))) == ["x/a", "x/b"]
    offset = {"header": FULL32, "extra": zip64_field(len(local_header(A)) + 5)}
    assert list(read(whole([A, replace(B, central=offset)]))) == ["x/a", "x/b"]


@each("where", ["local", "central"])
@each(
    "fields",
    [
        {"stored": FULL32, "nbytes": FULL32},
        {"stored": FULL32, "nbytes": FULL32, "extra": zip64_field(5)},
        {"stored": FULL32, "nbytes": FULL32, "extra": zip64_field(5, 5) * 2},
        {"stored": FULL32, "nbytes": FULL32, "extra": zip64_field(5, 6)},
        {"stored": FULL32, "nbytes": FULL32, "extra": zip64_field(5, 5, 5)},
        {"stored": FULL32, "nbytes": FULL32, "extra": zip64_field(5, 5)[:-1]},
        {"stored": FULL32, "nbytes": FULL32, "extra": zip64_field(1 << 63, 1 << 63)},
    ],
)
def test_zip64_fields_that_do_not_hold_just_what_is_needed_are_refused(where: str, fields: dict[str, Any]) -> None:
    with pytest.raises(CkptoolError):
        read(whole([replace(A, **{where: fields}), B]))


def test_a_zip64_field_that_nothing_asks_for_is_refused_in_the_directory() -> None:
    refused(whole([replace(A, central={"extra": zip64_field(6, 6)}), B]))


# Names and extra fields (Z10)


@pytest.mark.parametrize("extra", [b"\x01", b"\x46\x42\x10\x00short", b"\x46\x42\x00\x00tail"], ids=bytes.hex)
@pytest.mark.parametrize("where", ["local", "central"])
def test_garbage_among_the_extra_fields_is_refused(extra: bytes, where: str) -> None:
    with pytest.raises(MalformedFile):
        read(whole([replace(A, **{where: {"extra": extra}}), B]))


@pytest.mark.parametrize("extra", [b"\x46\x42\x04\x00ZZZZ", b"\x55\x54\x05\x00\x01abcd", bytes(3)], ids=bytes.hex)
def test_padding_and_time_stamps_among_the_extra_fields_are_no_harm(extra: bytes) -> None:
    for where in ("local", "central", "both"):
        member = replace(A, extra=extra) if where == "both" else replace(A, **{where: {"extra": extra}})
        assert list(read(whole([member, B]))) == ["x/a", "x/b"]


def unicode_path(name: str, *, of: bytes) -> bytes:
    field = b"\x01" + zlib.crc32(of).to_bytes(4, "little") + name.encode()
    return struct.pack("<2H", 0x7075, len(field)) + field


@pytest.mark.parametrize("where", ["local", "central", "both"])
def test_a_second_name_among_the_extra_fields_is_refused(where: str) -> None:
    extra = unicode_path("x/z", of=A.name)
    member = replace(A, extra=extra) if where == "both" else replace(A, **{where: {"extra": extra}})

    refused(whole([member, B]))


def test_the_same_name_among_the_extra_fields_is_no_harm() -> None:
    assert list(read(whole([replace(A, extra=unicode_path("x/a", of=A.name)), B]))) == ["x/a", "x/b"]


@each(
    "name",
    [
        b"",
        b"/etc/passwd",
        b"../up",
        b"x/../../up",
        b"x/..",
        b"x\\y",
        b"C:\\x",
        b"x\0y",
        b"x\ny",
        b"x\x1b[31m",
        b"\xff\xfe",
    ],
)
def test_names_that_no_path_may_have_are_refused(name: bytes) -> None:
    with pytest.raises(MalformedFile):
        read(whole([A, Member(name=name, flags=0x800)]))


# Bombs, and what they may cost (Z11)


def test_a_member_may_not_grow_beyond_what_the_file_may_cost() -> None:
    archive = read(whole([deflated("bomb", bytes(1 << 20))]), inflated_nbytes=1 << 16)

    with pytest.raises(LimitExceeded) as caught:
        archive.open("bomb")
    assert (caught.value.needed, caught.value.actual) == (1 << 20, 1 << 16)


@pytest.mark.parametrize("claimed", [10, (1 << 20) - 1, (1 << 20) + 1])
def test_a_member_that_grows_to_another_size_than_it_claims_is_refused(claimed: int) -> None:
    archive = read(whole([deflated("bomb", bytes(1 << 20), nbytes=claimed)]))

    with pytest.raises(MalformedFile) as caught:
        archive.open("bomb")
    assert caught.value.kind == "damaged-record"


def test_bytes_behind_the_end_of_a_compressed_member_are_refused() -> None:
    member = deflated("x", b"content")
    archive = read(whole([replace(member, payload=member.payload + b"more")]))

    with pytest.raises(MalformedFile):
        archive.open("x")


@pytest.mark.parametrize("damage", [b"\xff", b""])
def test_a_damaged_compressed_member_is_refused(damage: bytes) -> None:
    member = deflated("x", b"content" * 99)
    payload = member.payload[:9] + damage + member.payload[10:]

    with pytest.raises(MalformedFile):
        read(whole([replace(member, payload=payload)])).open("x")


def test_a_compressed_member_is_held_against_its_checksum() -> None:
    with pytest.raises(MalformedFile) as caught:
        read(whole([deflated("x", b"content", crc32=5)])).open("x")
    assert caught.value.kind == "damaged-record"


@exhaustive
@scaled
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the peak of memory")
def test_many_bombs_in_one_archive_cost_no_more_than_one(tmp_path: Path) -> None:
    inner = build.pickled({"x": build.raw(bytes(60 << 20)), "weight": build.inline_tensor()})
    (tmp_path / "bombs.zip").write_bytes(whole([deflated(f"{number}.pkl", inner) for number in range(times(4, 12))]))
    script = f"""
import ckptool
print(ckptool.open_checkpoint({str(tmp_path / "bombs.zip")!r}).member)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)

    assert run.stdout.startswith("0.pkl")
    assert int(run.stdout.split()[-2]) < 300 << 10, run.stdout  # KiB: one takes about 190 MiB, twelve 900


def test_a_compressed_pickle_that_grows_out_of_bounds_never_takes_the_memory_that_it_asks_for(tmp_path: Path) -> None:
    (tmp_path / "bomb.pth").write_bytes(whole([deflated("archive/data.pkl", bytes(times(80, 200) << 20))]))
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceeded):
            open_checkpoint(tmp_path / "bomb.pth")
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


# What torch's own small members say (Z13, Z14)


@each("name", [".format_version", ".storage_alignment"])
@each("text", [b"", b"0", b"-1", b"99999999999999999999", b"\xff" * 90])
def test_members_that_only_advise_are_ignored(name: str, text: bytes) -> None:
    tree = {"w": build.tensor(build.storage())}
    data = build.torch_zip(tree, {"0": build.floats()}, members={f"archive/{name}": text})

    assert open_checkpoint(data).tensors["w"].read() == build.floats()


@pytest.mark.parametrize("text", [b"11", b"1000", b"99999999999999999999"])
def test_a_version_of_the_future_is_named(text: bytes) -> None:
    data = build.torch_zip({}, members={"archive/version": text})

    with pytest.raises(UnsupportedFeature) as caught:
        open_checkpoint(data)
    assert caught.value.kind == "future-version"


@pytest.mark.parametrize("constants", [b"", b"\x80\x02", b"not a pickle", build.pickled(7), b"\x80\x02Q."])
def test_broken_constants_of_torchscript_are_an_error_or_nothing(constants: bytes) -> None:
    code = b"class Net(Module):\n  __parameters__ = []\n"
    tree = build.named("__torch__", "Net") + b")\x81" + build.ops({"training": True}) + b"b"
    members = {"archive/constants.pkl": constants, "archive/code/__torch__.py": code}
    try:
        checkpoint = open_checkpoint(build.torch_zip(tree, members=members))
    except CkptoolError:
        return
    assert not checkpoint.tensors


# Flags and methods that change what is read (Z15)


@each("bit", range(16))
@each("where", ["both", "local", "central"])
def test_every_flag_is_harmless_or_refused(bit: int, where: str) -> None:
    flag = {"flags": 1 << bit}
    member = replace(A, flags=1 << bit) if where == "both" else replace(A, **{where: flag})
    data = whole([member, B])

    harmless = {1, 2, 4, 7, 8, 9, 10, 11, 12, 14, 15}
    if where != "both" and 1 << bit != 0x800:  # which says nothing about a name of ASCII
        with pytest.raises(CkptoolError):
            read(data)
    elif bit in (0, 6, 13):
        refused(data, cls=UnsupportedFeature, kind="encrypted-zip")
    elif bit in harmless:
        assert read(data).open("x/a").read(0, 5) == b"first"
    else:
        with pytest.raises(CkptoolError):
            read(data)


@each("where", ["local", "central"])
def test_a_name_must_have_one_spelling(where: str) -> None:
    refused(whole([replace(A, name="x/é".encode(), **{where: {"flags": 0x800}}), B]))


@each("method", [1, 2, 6, 9, 12, 14, 93, 95, 98, 99, FULL16])
def test_other_methods_are_named_when_refused(method: int) -> None:
    refused(whole([A, replace(B, method=method)]), cls=UnsupportedFeature, kind="zip-method")


# Whatever else


def test_cut_anywhere_it_is_an_error() -> None:
    data = whole([A, B, C, streamed(stored("x/d", b"fourth"))])

    for length in range(len(data)):
        with pytest.raises(CkptoolError):
            read(data[:length])


def test_an_entry_alone_is_no_archive() -> None:
    with pytest.raises(CkptoolError):
        read(entry(A, 0) + end(1, len(entry(A, 0)), 0))


def test_the_format_is_found_by_content_whatever_the_file_is_called(tmp_path: Path) -> None:
    for suffix, (name, data) in product(
        (".pth", ".safetensors", ".zip", ".pkl", ".txt", ""), build.one_of_each().items()
    ):
        path = tmp_path / f"file{suffix}"
        path.write_bytes(data)
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.format == name


def test_a_seekable_stream_is_read_like_a_file() -> None:
    assert list(
        open_checkpoint(
            io.BytesIO(build.torch_zip({"w": build.tensor(build.storage())}, {"0": build.floats()}))
        ).tensors
    ) == ["w"]
