"""The zip is ``torch.save``'s own, to the byte where it can be: torch opens it plainly, mapped, and on ``meta``."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool import migrate, open_checkpoint
from ckptool.migration.plan import OutFile
from ckptool.migration.torch_plan import torch_zip, torch_zip_nbytes
from ckptool.migration.writing import fill
from tests import build
from tests.bounds.sources import BytesPayload
from tests.scale import exhaustive


def locals_of(data: bytes) -> dict[str, tuple[int, list[int], bytes]]:
    """Return of each member where its payload begins, what its local header says, and the extra fields there."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        offsets = {info.filename: info.header_offset for info in archive.infolist()}
    found = {}
    for name, offset in offsets.items():
        assert data[offset : offset + 4] == b"PK\x03\x04"
        *facts, name_n, extra_n = struct.unpack_from("<5H3L2H", data, offset + 4)
        begin = offset + 30 + name_n
        found[name] = begin + extra_n, [*facts[:4], *facts[5:]], data[begin : begin + extra_n]  # the date is any
    return found


STATES: dict[str, Any] = {
    "a few": lambda: {"w": torch.ones(3, 5), "b": torch.zeros(1), "n": torch.tensor(3)},
    "empty": lambda: {"none": torch.empty(0), "some": torch.ones(2)},
    "many": lambda: {f"layers.{number}.weight": torch.full((number,), number) for number in range(70)},
    "no tensor": lambda: {"epoch": 3},
    "large": lambda: {"w": torch.arange(300_000), "v": torch.ones(7, dtype=torch.uint8)},
}


@pytest.mark.parametrize("state", STATES)
def test_the_file_is_laid_out_as_torch_lays_it_out(state: str, tmp_path: Path) -> None:
    torch.save(STATES[state](), tmp_path / "x.pth")
    (tmp_path / "out").mkdir()
    migrate(tmp_path / "x.pth", tmp_path / "out" / "x.pth", form="same")
    theirs, ours = (path.read_bytes() for path in (tmp_path / "x.pth", tmp_path / "out" / "x.pth"))

    with zipfile.ZipFile(io.BytesIO(theirs)) as expected, zipfile.ZipFile(io.BytesIO(ours)) as found:
        # An id that torch makes up for each file, and that nobody reads.
        names = [name for name in expected.namelist() if name != "x/.data/serialization_id"]
        assert found.namelist() == names
        assert found.testzip() is None
        for name in names:
            a, b = expected.getinfo(name), found.getinfo(name)
            for fact in ("compress_type", "create_system", "create_version", "extract_version", "external_attr"):
                assert getattr(b, fact) == getattr(a, fact), name
            assert (b.flag_bits, b.date_time) == (a.flag_bits, a.date_time), name
            if name != "x/data.pkl":
                assert (b.CRC, b.file_size, b.extra) == (a.CRC, a.file_size, a.extra), name
                assert found.read(name) == expected.read(name)
    wanted = locals_of(theirs)
    for name, (payload, facts, extra) in locals_of(ours).items():
        _, other_facts, other = wanted[name]
        assert payload % 64 == 0, name
        assert facts == other_facts, name
        assert (extra[:2], set(extra[4:])) == (other[:2], set(other[4:]) & {ord("Z")}), name


def test_the_end_of_the_file_is_torchs_own(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "x.pth")
    (tmp_path / "out").mkdir()
    migrate(tmp_path / "x.pth", tmp_path / "out" / "x.pth", form="same")
    theirs, ours = (path.read_bytes()[-98:] for path in (tmp_path / "x.pth", tmp_path / "out" / "x.pth"))

    zip64 = struct.Struct("<4sQ2H2L4Q")
    found, expected = zip64.unpack(ours[:56]), zip64.unpack(theirs[:56])
    assert found[:6] == expected[:6]  # how the record is made, and that there is but one disk
    assert found[6] == found[7] == expected[6] - 1
    assert [ours[56:60], ours[76:80], ours[96:]] == [theirs[56:60], theirs[76:80], theirs[96:]]


@pytest.mark.parametrize(
    ("name", "root"),
    [("model.pth", "model"), ("a b.pth", "archive"), ("ü.pth", "archive"), (".pth", "archive"), ("m.v2.pt", "m.v2")],
)
def test_any_name_of_a_file_makes_an_archive_that_torch_opens(name: str, root: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "source")
    migrate(tmp_path / "source", tmp_path / name, form="same")

    with zipfile.ZipFile(tmp_path / name) as archive:
        assert {member.partition("/")[0] for member in archive.namelist()} == {root}
    assert torch.equal(torch.load(tmp_path / name)["w"], torch.ones(4))


# zip64: zeros that take no room on the disk.


class Zeros(BytesPayload):
    """So many bytes, all of them zero."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(b"")
        self.nbytes = nbytes

    def chunks(self) -> Iterator[bytes]:
        chunk = bytes(1 << 22)
        for start in range(0, self.nbytes, len(chunk)):
            yield chunk[: self.nbytes - start]


class Skipping:
    """An output that seeks over zeros in place of writing them: just what ``fill`` needs of one."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")
        self.position = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if len(data) == 1 << 22:
            self.file.seek(len(data), io.SEEK_CUR)
        else:
            self.file.write(data)
        self.position += len(data)

    def flush(self) -> None:
        self.file.flush()


def write(output: Any, root: str, pickled: bytes, payloads: list[BytesPayload]) -> None:
    fill(OutFile("", 0, lambda found: torch_zip(root, pickled, payloads, found), needs_checksums=True), output)


@exhaustive
def test_more_than_4_gib_open_in_torch_and_here(tmp_path: Path) -> None:
    path, large = tmp_path / "x.pth", (1 << 32) + 100
    keys = (("a", "0", 4), ("large", "1", large), ("b", "2", 4))
    tree = {name: build.tensor(build.storage(key, count, "ByteStorage"), (count,)) for name, key, count in keys}
    payloads = [BytesPayload(b"abcd"), Zeros(large), BytesPayload(b"efgh")]
    output = Skipping(path)
    write(output, "x", build.pickled(tree), payloads)
    output.file.close()

    assert path.stat().st_size == torch_zip_nbytes("x", len(build.pickled(tree)), [4, large, 4])
    with open_checkpoint(path) as found:
        assert [found.tensors[name].info.shape for name in tree] == [(4,), (large,), (4,)]
        assert found.tensors["b"].read() == b"efgh"
    state = torch.load(path, mmap=True)
    assert bytes(state["a"].numpy()) == b"abcd"
    assert state["large"].shape == (large,)
    assert state["large"][-1] == 0
    assert bytes(state["b"].numpy()) == b"efgh"
    with zipfile.ZipFile(path) as archive:
        assert archive.read("x/data/2") == b"efgh"
        assert archive.getinfo("x/data/1").file_size == large
        assert archive.getinfo("x/data/1").compress_size == large
