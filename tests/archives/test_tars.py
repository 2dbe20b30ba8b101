"""Tars of every dialect; what is not a regular file is passed over, and nothing is followed."""

from __future__ import annotations

import io
import tarfile

import pytest

from ckptool import (
    AmbiguousFile,
    CkptoolError,
    LimitExceeded,
    Limits,
    MalformedFile,
    TruncatedFile,
    UnsupportedFeature,
)
from ckptool.archives.archive import Archive
from ckptool.archives.tars import is_tar, read_tar
from ckptool.sources.source import BytesSource
from tests.each import each

DIALECTS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def member(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def packed(*members: tuple[tarfile.TarInfo, bytes], dialect: str = "ustar") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=DIALECTS[dialect]) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def archive_of(data: bytes, limits: Limits | None = None) -> Archive:
    return read_tar(BytesSource(data, is_file=True), limits or Limits())


def contents(data: bytes) -> dict[str, bytes]:
    archive = archive_of(data)
    return {name: archive.open(name).read(0, record.nbytes) for name, record in archive.items()}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_regular_files_are_read_in_order(dialect: str) -> None:
    data = packed(member("b", b"second"), member("a/x", b"y" * 1000), member("empty"), dialect=dialect)

    assert is_tar(data[:512])
    assert contents(data) == {"b": b"second", "a/x": b"y" * 1000, "empty": b""}
    assert list(contents(data)) == ["b", "a/x", "empty"]


@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        ("ustar", "folder/" * 20 + "x" * 90),
        ("gnu", "folder/" * 40 + "x" * 120),
        ("pax", "folder/" * 40 + "x" * 120),
        ("pax", "模型/weights.th"),
        ("gnu", "模型/weights.th"),
    ],
)
def test_long_and_foreign_names_are_read_in_every_dialect(dialect: str, name: str) -> None:
    assert contents(packed(member(name, b"x"), member("next", b"y"), dialect=dialect)) == {name: b"x", "next": b"y"}


def test_sizes_in_extended_headers_and_in_binary_are_understood() -> None:
    extended = packed(member("a", b"x" * 600, pax_headers={"size": "600", "mtime": "1.5"}), dialect="pax")
    assert contents(extended) == {"a": b"x" * 600}

    data = bytearray(packed(member("a", b"x" * 600)))
    data[124:136] = b"\x80" + (600).to_bytes(11, "big")
    assert contents(with_checksum(data)) == {"a": b"x" * 600}


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]
)
def test_what_is_no_regular_file_is_passed_over(kind: bytes) -> None:
    data = packed(member("x", type=kind, linkname="/etc/passwd"), member("y", b"plain"), dialect="gnu")

    assert contents(data) == {"y": b"plain"}


def test_what_stands_behind_the_end_is_not_read() -> None:
    data = packed(member("a", b"x"))

    assert list(archive_of(data + packed(member("b", b"y")))) == ["a"]
    assert archive_of(data).notes == ()


def test_a_tar_without_an_end_is_read_and_told_of() -> None:
    archive = archive_of(packed(member("a", b"x"))[:1024])

    assert list(archive) == ["a"]
    assert len(archive.notes) == 1


def test_a_member_that_reaches_over_the_end_is_told_of_with_its_numbers() -> None:
    data = packed(member("a", b"x" * 3000))

    with pytest.raises(TruncatedFile) as caught:
        archive_of(data[:2000])
    assert (caught.value.needed, caught.value.actual) == (3512, 2000)


def test_the_checksum_covers_every_byte_of_the_first_header() -> None:
    sound = packed(member("a", b"x"))[:512]
    assert is_tar(sound)

    for at in (*range(148), *range(156, 512)):  # between them, the checksum itself
        assert not is_tar(sound[:at] + bytes([sound[at] ^ 0x41]) + sound[at + 1 :])


def test_extended_headers_name_the_next_member_only() -> None:
    data = extended(b"15 path=a/long\n14 comment=hi\n") + packed(member("b", b"x"), member("c", b"y"))

    assert contents(data) == {"a/long": b"x", "c": b"y"}


def test_more_members_than_allowed_are_refused() -> None:
    data = packed(*(member(str(number)) for number in range(5)))

    assert len(archive_of(data, Limits(entries=5))) == 5
    with pytest.raises(LimitExceeded):
        archive_of(data, Limits(entries=4))

    links = packed(*(member(str(number), type=tarfile.SYMTYPE, linkname="x") for number in range(5)))
    assert not archive_of(links, Limits(entries=5))
    with pytest.raises(LimitExceeded, match="links"):
        archive_of(links, Limits(entries=4))


def test_cut_anywhere_it_is_an_error_or_the_members_before_the_cut() -> None:
    data = packed(member("a", b"x" * 700), member("b" * 120, b"y" * 10), dialect="gnu")
    whole = contents(data)

    for length in range(512, len(data)):
        try:
            found = contents(data[:length])
        except CkptoolError:
            continue
        assert found.items() <= whole.items()


def with_checksum(data: bytearray) -> bytes:
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


def extended(records: bytes) -> bytes:
    """Return a pax header in front of a member."""
    data = bytearray(packed(member("PaxHeader", records, type=b"x")))[: 512 + -(-len(records) // 512) * 512]
    return with_checksum(data)


def test_what_only_other_readers_take_for_a_file_has_no_part_in_it() -> None:
    data = packed(
        member("plain", b"1"), member("special", b"payload", type=b"Z"), member("folder", type=tarfile.DIRTYPE)
    )

    found = archive_of(data)
    assert [bytes(data[one.start : one.stop]) for one in found.unused[:-1]] == [b"payload"]
    assert found.unused[-1].stop == len(data)


def test_an_extended_header_may_reach_just_to_the_end() -> None:
    data = packed(member("n" * 200, b"x"), dialect="gnu")
    payload = 512 + 201  # the name and the zero behind it

    assert archive_of(data[:payload]).notes
    with pytest.raises(TruncatedFile) as caught:
        archive_of(data[: payload - 1])
    assert (caught.value.needed, caught.value.actual) == (payload, payload - 1)


def extension(kind: bytes, data: bytes) -> bytes:
    info, _ = member("h", data, type=kind)
    return info.tobuf() + data.ljust(512, b"\0")


def sized(size: str) -> bytes:
    """Return a member whose size an extended header says."""
    line = f" size={size}\n".encode()
    length = len(line) + 2
    return extended(str(length + len(str(length)) - 2).encode() + line) + packed(member("a", b"x"))


def with_size(field: bytes) -> bytes:
    data = bytearray(packed(member("a", b"x")))
    data[124:136] = field
    return with_checksum(data)


NAMED, OTHER = (extension(b"x", b"11 path=a%d\n" % number) for number in (1, 2))
PLAIN = packed(member("a", b"x"))
REFUSED = {
    "two members of one name": (packed(member("a", b"1"), member("a", b"2")), AmbiguousFile, "ambiguous-tar"),
    "a damaged header": (PLAIN[:1024] + b"b" + packed(member("c"))[1:], MalformedFile, "malformed-tar"),
    "a sparse file": (extended(b"22 GNU.sparse.major=1\n") + PLAIN, UnsupportedFeature, "sparse-tar"),
    "a long header": (
        packed(member("a", b"x", pax_headers={"comment": "y" * 70_000}), dialect="pax"), MalformedFile, "malformed-tar"
    ),
    **{
        f"the size {size[:20]}": (sized(size), CkptoolError, None)
        for size in ("-1", "x", "", "²", "٣", "1" * 30, "9" * 5000, "0x10")
    },
    **{
        f"the field {field!r}": (with_size(field), CkptoolError, None)
        for field in (b"\xff" * 11 + b"\0", b"99999999999\0", b"zzzzzzzzzzz\0", b"77777777777\0")
    },
    **{
        f"the header {records!r}": (extended(records) + PLAIN, MalformedFile, "malformed-tar")
        for records in (
            *(b"x path=a\n", b"0 path=a\n", b"1 path=a\n", b"2 path=a\n", b"8 path=a\n", b"11 path=a\n"),
            *(b"99 path=a\n", b"9 path=a", b"9 path=ab", b"9 path=a\nrest", b"-9 path=a\n", b"\0" * 9),
            b"9" * 20 + b" path=a\n",
        )
    },
    **{
        f"two names, {number}": (names + PLAIN, MalformedFile, "malformed-tar")
        for number, names in enumerate(
            (NAMED + OTHER, NAMED + extension(b"L", b"a2"), extension(b"g", b"11 path=a1\n"))
        )
    },
}  # fmt: skip


@each("name", REFUSED)
def test_what_readers_take_for_different_things_or_for_none_is_refused(name: str) -> None:
    data, error, kind = REFUSED[name]
    with pytest.raises(error) as caught:
        archive_of(data)
    assert kind in (None, caught.value.kind)
    assert kind != "malformed-tar" or caught.value.offset >= 512


def test_a_general_header_that_names_nothing_is_passed_over() -> None:
    assert list(archive_of(extension(b"g", b"12 comment=\n") + PLAIN)) == ["a"]
