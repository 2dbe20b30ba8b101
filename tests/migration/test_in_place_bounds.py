"""What is edited in place, and what is refused, at the very bounds: ends of zips, local headers, headers, streams."""

from __future__ import annotations

from pathlib import Path
from struct import pack

import pytest
import torch
from safetensors.torch import save_file

from ckptool import MigrationRefused, diff, migrate
from ckptool.archives.archive import Archive
from ckptool.archives.zips import END_MAGIC, END_SEARCH
from ckptool.migration.in_place import _refuse_other_ends, plan_zip
from ckptool.migration.output.editing import FileEdit
from ckptool.sources.journal import Run
from ckptool.sources.source import BytesSource
from tests import build
from tests.each import each
from tests.zip_bytes import read, stored, whole

NAME = "m/data.pkl"


# Ends of zips that a reader would find meanwhile


class Strict(BytesSource):
    """Has no bytes where a file has none."""

    def read(self, offset: int, nbytes: int) -> bytes:
        assert 0 <= offset <= offset + nbytes <= self.nbytes or not nbytes
        return super().read(offset, nbytes)


def is_refused(data: bytes, edit: FileEdit) -> bool:
    try:
        _refuse_other_ends(Strict(data), edit)
    except MigrationRefused as error:
        return error.kind == "not-in-place"
    return False


def edited_with(place: int, nbytes: int = 1 << 17) -> tuple[bytes, FileEdit]:
    """Return a file with another magic of an end record at a place, and an edit of its bytes 200 to 207."""
    data = bytearray(nbytes)
    data[place : place + 4] = END_MAGIC
    guard = nbytes - 22
    data[guard : guard + 4] = END_MAGIC
    return bytes(data), FileEdit(nbytes, (Run(200, bytes(8)),), Run(guard, END_MAGIC), Run(guard, END_MAGIC))


def test_only_ends_that_a_reader_looks_for_are_in_the_way() -> None:
    begin = (1 << 17) - 22 - END_SEARCH

    assert is_refused(*edited_with(begin))
    assert not is_refused(*edited_with(begin - 1))
    assert is_refused(*edited_with(0, 1000))
    assert not is_refused(*edited_with(208))  # behind all that is written
    assert is_refused(*edited_with(208, 1000))
    data, edit = edited_with(0)
    assert is_refused(data, edit._replace(runs=(Run(200, END_MAGIC),)))
    assert not is_refused(data, edit._replace(runs=(edit.guard,)))
    assert not is_refused(*edited_with(200 - 4))


# The places of what is edited in a zip


def torch_zip(*, extra: bytes = b"", payload: bytes = b"") -> bytes:
    pickled = stored(NAME, payload or build.pickled({"a": 1}), local={"name": NAME.encode(), "extra": extra})
    return whole([pickled, stored("m/byteorder", b"little"), stored("m/version", b"3\n")])


def edited(data: bytes, pickled: bytes, name: str = NAME) -> bytes:
    edit = plan_zip(read(data), name, pickled)
    new = bytearray(data.ljust(edit.nbytes, b"\0"))
    for run in edit.runs:
        new[run.offset : run.end] = run.data
    assert edit.new_guard.data == bytes(new[edit.new_guard.offset :][:4]) == END_MAGIC
    return bytes(new)


def pickle_of(archive: Archive) -> bytes:
    assert archive.damage(archive) is None
    return archive.content(NAME).read(0, archive[NAME].nbytes)


@each("change", [-4, -1, 0, 1, 5])
def test_only_a_pickle_of_the_same_size_takes_the_place_of_the_old_one(change: int) -> None:
    old = build.pickled({"a": "x" * 20})
    new = build.pickled({"a": "y" * (20 + change)})
    archive = read(edited(torch_zip(payload=old), new))

    assert pickle_of(archive) == new
    assert (len(archive) == 4) == bool(change)
    assert not archive.notes


def in_extra(name_n: int, extra_n: int) -> bytes:
    """Return an extra field that holds what could be the name of the member behind the end of a local header."""
    inner = pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, name_n, extra_n) + NAME.encode() + bytes(40)
    return pack("<2H", 0x4B42, len(inner)) + inner


@each(("name_n", "extra_n"), [(9, 41), (11, 39), (10, 39), (10, 41), (9, 40), (11, 40)])
def test_names_in_extra_fields_are_not_taken_for_that_of_the_member(name_n: int, extra_n: int) -> None:
    data = torch_zip(extra=in_extra(name_n, extra_n))
    for new in (build.pickled({"a": 2}), build.pickled({"longer": 2})):
        archive = read(edited(data, new))
        assert pickle_of(archive) == new


def test_a_member_whose_name_begins_or_ends_alike_is_another() -> None:
    old = build.pickled({"a": 1})
    names = [f"{NAME}2", "m/data.pk", NAME, f"{NAME}.unused"]
    data = whole([stored(name, old) for name in names])
    for new in (build.pickled({"a": 2}), build.pickled({"longer": 2})):
        archive = read(edited(data, new))
        assert pickle_of(archive) == new
        for name in names:
            if name != NAME:
                assert archive.content(name).read(0, len(old)) == old
                assert archive.damage(archive) is None


# Headers of safetensors, and legacy streams


def test_a_header_may_take_all_the_room_that_there_is(tmp_path: Path) -> None:
    path, copy = tmp_path / "model.safetensors", tmp_path / "copy.safetensors"
    save_file({"a" * 20: torch.ones(3)}, path, {"format": "pt"})
    room = int.from_bytes(path.read_bytes()[:8], "little")
    spaces = room - len(path.read_bytes()[8 : 8 + room].rstrip())
    fits = "b" * (20 + spaces)
    migrate(path, copy, rename=[("^.*$", fits)])
    with pytest.raises(MigrationRefused) as refused:
        migrate(path, in_place=True, rename=[("^.*$", f"{fits}b")])
    migrate(path, in_place=True, rename=[("^.*$", fits)])

    assert (refused.value.kind, refused.value.needed, refused.value.actual) == ("no-room", room + 1, room)
    assert diff(path, copy).same
    assert path.read_bytes()[8:][:room].rstrip()[-1:] == b"}"
    assert path.read_bytes()[8 + room - 1 : 8 + room] == b"}"
