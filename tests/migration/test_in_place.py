"""Edits in place: what comes out is what a copy would be, and what cannot be edited so is refused by name."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool import Changes, CkptoolError, MigrationRefused, check, diff, load, migrate, open_checkpoint, recover
from ckptool.errors import DamagedFile, FileUnavailable, UnfinishedEdit
from tests import build
from tests.each import each
from tests.migration.in_place import LAYOUTS, LONGER, SHORTER, edit, journal_of, readings, torn, weights, write
from tests.missing import lock
from tests.process import ROOT
from tests.program import invoke
from tests.scale import exhaustive

LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


@LAYOUT
def test_an_edit_is_what_a_copy_is(layout: str, tmp_path: Path) -> None:
    path = write(layout, tmp_path)
    changes = LAYOUTS[layout].changes
    copy = tmp_path / f"copy{path.suffix}"
    migrate(path, copy, changes)
    inode = path.stat().st_ino
    done = migrate(path, in_place=True, **{k: v for k, v in changes._asdict().items() if v})  # type: ignore[arg-type]

    assert diff(path, copy).same
    assert (done.written, done.verified, done.how, done.target) == (True, True, "in place", str(path))
    assert path.stat().st_ino == inode
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([path.name, copy.name])
    with open_checkpoint(path) as found, open_checkpoint(copy) as expected:
        assert list(found.tensors) == list(expected.tensors)
        assert [t.info.location for t in found.tensors.values()] == [t.info.location for t in expected.tensors.values()]
        assert not found.notes
        assert done.after.file_nbytes == path.stat().st_size == done.nbytes
        assert done.after == done.after._replace(format=found.format, tensors=len(found.tensors))
    before = check(copy, deep=True).findings if layout in ("slot", "tail") else ()
    assert [one.code for one in check(path, deep=True).findings if one.severity != "info"] == [
        one.code for one in before if one.severity != "info"
    ]
    assert len(dict(readings(path))) == {"header": 1, "stream": 2}.get(layout, 4)


def test_old_pickles_are_not_kept_without_end(tmp_path: Path) -> None:
    path = write("slot", tmp_path, 2)

    def edit_until_refused() -> None:
        for _ in range(60):
            edit(path, Changes(rename=[("$", "00")]))

    with pytest.raises(MigrationRefused) as refused:
        edit_until_refused()

    assert refused.value.kind == "not-in-place"
    assert len([name for name in zipfile.ZipFile(path).namelist() if ".unused" in name]) == 36
    assert len(dict(readings(path))) == 4
    assert not open_checkpoint(path).notes


def test_what_is_dropped_from_a_zip_is_named_as_unused(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save({"model": weights(), "optimizer": {"state": {0: {"m": torch.ones(100)}}, "param_groups": []}}, path)
    nbytes = path.stat().st_size
    done = migrate(path, in_place=True, drop=["optimizer"])

    assert (done.unused_nbytes, path.stat().st_size) == (400, nbytes)
    assert [note for note in done.notes if "unused" in note]
    assert list(torch.load(path)) == ["model"]
    assert not open_checkpoint(path).notes


@LAYOUT
def test_a_compact_file_is_what_a_copy_over_it_is(layout: str, tmp_path: Path) -> None:
    path = write(layout, tmp_path)
    if layout in ("slot", "tail"):
        edit(path, LONGER)
        edit(path, Changes(exclude=["*block2*"]))
    copy = tmp_path / f"copy{path.suffix}"
    shutil.copyfile(path, copy)
    changes = {"rename": [("weight$", "w")], "exclude": ["*block1.*"]}
    planned = migrate(path, in_place=True, compact=True, dry_run=True, **changes)  # type: ignore[arg-type]
    assert path.read_bytes() == copy.read_bytes()
    done = migrate(path, in_place=True, compact=True, **changes)  # type: ignore[arg-type]
    migrate(copy, copy, form="same", force=True, **changes)  # type: ignore[arg-type]

    assert diff(path, copy).same
    assert (done.written, done.verified, done.how, done.unused_nbytes) == (True, True, "copy", 0)
    assert planned.nbytes == done.nbytes == path.stat().st_size
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([path.name, copy.name])
    if layout != "header":
        names = zipfile.ZipFile(path).namelist()
        assert not [name for name in names if ".unused" in name]
        assert (
            len([name for name in names if "/data/" in name])
            == len(torch.load(path, map_location="cpu"))
            == done.tensors
        )


def test_what_cannot_be_made_compact_is_refused_and_stays(tmp_path: Path) -> None:
    path = write("slot", tmp_path)
    old = path.read_bytes()
    with pytest.raises(ValueError, match="compact is for in_place"):
        migrate(path, compact=True)
    with pytest.raises(MigrationRefused) as no_file:
        migrate(tmp_path, in_place=True, compact=True)
    with path.open("rb") as stream:
        lock(stream, shared=True)
        assert refused(path, to="cpu", compact=True).kind == "locked"
    with pytest.raises(MigrationRefused) as empty:
        migrate(path, in_place=True, compact=True, exclude=["*"])
    used = invoke(["migrate", str(path), "--compact"])

    assert (no_file.value.kind, empty.value.kind) == ("not-a-file", "no-tensor-left")
    assert used.exit_code == 2
    assert "--compact is for --in-place" in used.output
    assert path.read_bytes() == old
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert invoke(["migrate", str(path), "--in-place", "--compact", "--to", "cpu"]).exit_code == 0


def test_ties_views_and_objects_stay(tmp_path: Path) -> None:
    for number, legacy in enumerate((False, True)):
        path = tmp_path / f"{number}.pth"
        base = torch.arange(12.0)
        shared = ["one", "list"]
        tree = {"module.a": base, "module.b": base, "module.c": base[3:9].view(2, 3)}
        saved: Any = {"state_dict": tree, "x": shared, "y": shared, "p": torch.nn.Parameter(torch.ones(2))}
        torch.save(saved, path, _use_new_zipfile_serialization=not legacy)
        edit(path, SHORTER._replace(to="cuda:0"))
        found = torch.load(path, map_location="cpu")
        again = found["state_dict"]

        assert list(again) == ["a", "b", "c"]
        assert again["a"].data_ptr() == again["b"].data_ptr() == again["c"].data_ptr() - 12
        assert again["c"].tolist() == base[3:9].view(2, 3).tolist()
        assert found["x"] is found["y"]
        assert isinstance(found["p"], torch.nn.Parameter)


@each("way", [{"rename": [("^", "x.")]}, {"exclude": ["*packed*"]}, {"exclude": ["*packed*"], "rename": [("^", "x.")]}])
def test_tensors_inside_an_entry_go_where_it_goes(way: dict[str, Any], tmp_path: Path) -> None:
    path, copy = tmp_path / "model.pth", tmp_path / "copy.pth"
    torch.save(OrderedDict({"fc.packed": (torch.ones(2), torch.zeros(3)), "fc.weight": torch.ones(4)}), path)
    migrate(path, copy, **way)
    migrate(path, in_place=True, **way)

    assert diff(path, copy).same
    assert list(torch.load(path)) == list(torch.load(copy))


def test_a_legacy_stream_has_room_for_every_length_up_to_its_own(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save(OrderedDict(a=torch.ones(3), b=torch.ones(2)), path, _use_new_zipfile_serialization=False)
    data, fits = path.read_bytes(), []
    for length in range(1, 40):
        path.write_bytes(data)
        try:
            edit(path, Changes(rename=[("^a$", "a" * length + "x")]))
        except MigrationRefused:
            fits.append(False)
        else:
            fits.append(True)
            assert [one.sum().item() for one in torch.load(path).values()] == [3, 2]

    most = fits.index(False)  # one byte less than there is room for cannot be padded, nor three
    assert most > 20
    assert not any(fits[most + 4 :])


def refused(path: Path, **changes: Any) -> CkptoolError:
    """Return the error for an edit that is refused, with the file as it was."""
    before, names = path.read_bytes(), sorted(os.listdir(path.parent))  # noqa: PTH208
    with pytest.raises(CkptoolError) as error:
        migrate(path, in_place=True, **changes)
    assert path.read_bytes() == before
    assert sorted(os.listdir(path.parent)) == names  # noqa: PTH208
    assert error.value.hint
    return error.value


def test_what_others_share_or_hold_is_refused(tmp_path: Path) -> None:
    path = write("slot", tmp_path)
    link = tmp_path / "link.pth"
    link.symlink_to(path)
    assert refused(link, to="cpu").kind == "link"
    os.link(path, tmp_path / "other.pth")
    assert refused(path, to="cpu").kind == "hard-links"
    (tmp_path / "other.pth").unlink()
    path.chmod(0o444)
    assert refused(path, to="cpu").kind == "read-only"
    path.chmod(0o644)
    with path.open("rb") as stream:
        lock(stream, shared=True)
        assert refused(path, to="cpu").kind == "locked"
    journal_of(path).write_bytes(b"")
    assert refused(path, to="cpu").kind == "foreign-journal"


OTHERS = {
    "deflated": lambda: build.zip_file(
        {"m/data.pkl": build.pickled({"a": 1}), "m/version": b"3\n"}, deflated=["m/data.pkl"]
    ),
    "notes": lambda: build.torch_zip(build.ops({})) + b"behind",
    "tar": build.torch_tar,
    "torchscript": build.torchscript,
}


@each("name", OTHERS)
def test_other_layouts_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(OTHERS[name]())

    assert refused(path, to="cuda").kind == "not-in-place"


@each(
    "changes",
    [{"dtype": "float16"}, {"form": "safetensors"}, {"key": "a"}, {"weights": "ema"}, {"max_shard_size": "1GB"}],
)
def test_changes_of_what_is_stored_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    assert refused(write("slot", tmp_path), **changes).kind == "not-in-place"


def test_what_has_no_room_is_refused(tmp_path: Path) -> None:
    longer = {"rename": LONGER.rename}
    for layout in ("header", "stream"):
        error = refused(write(layout, tmp_path), **longer)
        assert error.kind == "no-room"
        assert (error.needed or 0) > (error.actual or 0) > 0
    for layout in ("header", "stream"):
        error = refused(write(layout, tmp_path), exclude=["*block1*"])
        assert error.kind == "not-in-place"


def test_a_zip_inside_the_zip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    inner = build.torch_zip(build.ops({}))
    torch.save({"module.a": torch.frombuffer(bytearray(inner), dtype=torch.uint8)}, path)

    assert refused(path, strip_module=True).kind == "not-in-place"


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    path = write("tail", tmp_path)
    before = path.read_bytes()
    planned = migrate(path, in_place=True, dry_run=True, to="cuda:1")

    assert path.read_bytes() == before
    assert (planned.written, planned.retagged) == (False, {"cpu": 8})
    assert str(migrate(path, in_place=True, to="cpu")).count("nothing that was asked for changes the file") == 1
    assert path.read_bytes() == before


def test_deep_compares_checksums_first(tmp_path: Path) -> None:
    path = write("slot", tmp_path)
    data = bytearray(path.read_bytes())
    with open_checkpoint(path) as found:
        storage = found.tensors["module.block3.weight"].info.storage
        assert storage is not None
        data[storage.offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFile):
        migrate(path, in_place=True, deep=True, to="cuda")
    assert path.read_bytes() == data

    assert migrate(path, in_place=True, to="cuda").written


@LAYOUT
def test_who_mapped_the_file_before_goes_on_reading(layout: str, tmp_path: Path) -> None:
    path = write(layout, tmp_path)
    with open_checkpoint(path) as found:
        places = [(storage.offset, storage.nbytes) for one in found.tensors.values() if (storage := one.info.storage)]
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        before = [mapped[offset : offset + nbytes] for offset, nbytes in places]
        edit(path, LAYOUTS[layout].changes)
        assert [mapped[offset : offset + nbytes] for offset, nbytes in places] == before


def test_whatever_meets_a_file_that_is_neither_old_nor_new_refuses_it(tmp_path: Path) -> None:
    other = write("slot", tmp_path).rename(tmp_path / "other.pth")
    path = torn("slot", tmp_path)
    link = tmp_path / "link.pth"
    link.symlink_to(path)
    names = sorted(os.listdir(tmp_path))  # noqa: PTH208
    calls: list[Any] = [
        lambda: open_checkpoint(path),
        lambda: load(path),
        lambda: migrate(path, tmp_path / "new.pth"),
        lambda: migrate(other, path, force=True),
        lambda: diff(other, path),
    ]
    for call in calls:
        with pytest.raises(UnfinishedEdit) as met:
            call()
        assert met.value.command == f"ckptool recover {path}"
    for verb in (["inspect"], ["check"], ["stat"], ["diff", str(other)], ["migrate", "--in-place", "--to", "cpu"]):
        done = invoke([*verb, str(path)])
        assert done.exit_code == 2
        assert "ckptool recover" in done.output
    assert sorted(os.listdir(tmp_path)) == names  # noqa: PTH208

    with pytest.raises(UnfinishedEdit):
        open_checkpoint(link)


def test_shards_that_are_being_edited_are_refused(tmp_path: Path) -> None:
    path = torn("header", tmp_path)
    names = {f"block{number}.weight": path.name for number in range(8)}
    (tmp_path / "model.safetensors.index.json").write_bytes(build.index_of_shards(names))

    with pytest.raises(UnfinishedEdit):
        open_checkpoint(tmp_path / "model.safetensors.index.json")


def test_recover_says_what_there_is_to_recover(tmp_path: Path) -> None:
    path = write("slot", tmp_path)
    with pytest.raises(FileUnavailable) as missing:
        recover(path)
    assert missing.value.kind == "no-journal"
    incomplete = journal_of(path).with_name(journal_of(path).name + ".new")
    incomplete.write_bytes(b"half a jour")
    done = invoke(["recover", str(path)])

    assert (done.exit_code, incomplete.exists()) == (0, False)
    assert "no edit had begun" in done.output
    assert invoke(["recover", str(path)]).exit_code == 2
    assert ckptool.recover is recover


def test_names_that_are_long_have_a_journal_too(tmp_path: Path) -> None:
    path = tmp_path / f"{'é' * 120}.pth"
    torch.save(weights(), path)
    edit(path, SHORTER)

    assert len(os.fsencode(journal_of(path).name)) <= 255


def test_the_command_line_edits_many(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    paths = [write("slot", tmp_path), write("slot", tmp_path / "a")]
    done = invoke(["migrate", "--in-place", "--strip-module", *map(str, paths)])

    assert (done.exit_code, done.output.count("edited in place")) == (0, 2)
    for option in ("--force", "--no-verify", "--out-dir=x"):
        assert invoke(["migrate", "--in-place", option, str(paths[0])]).exit_code == 2
    assert invoke(["migrate", "--deep", str(paths[0])]).exit_code == 2
    for other, fact in ((tmp_path / "copy.pth", "all paths are files to edit"), ("s3://b/x.pth", "is far away")):
        before = paths[0].read_bytes()
        done = invoke(["migrate", str(paths[0]), str(other), "--in-place", "--to", "cuda"])
        assert (done.exit_code, fact in done.stderr, paths[0].read_bytes() == before) == (2, True, True)


PEAK = """
import sys
import ckptool

if sys.argv[2] == "open":
    ckptool.open_checkpoint(sys.argv[1])
else:
    ckptool.migrate(sys.argv[1], to="cpu", strip_module=True, in_place=True)
from tests.process import peak_nbytes  # which takes memory, too: only now
print(peak_nbytes() >> 10)
"""


@exhaustive
def test_an_edit_takes_little_more_memory_than_opening(tmp_path: Path) -> None:
    path = write("slot", tmp_path, 20_000)
    peaks = [
        int(subprocess.check_output([sys.executable, "-c", PEAK, str(path), what], cwd=ROOT))
        for what in ("open", "edit")
    ]

    # The pickle that is to be written is read once more, to say what torch.load will say of it.
    assert peaks[1] - peaks[0] < 32 << 10, peaks  # KiB
    assert peaks[1] < 84 << 10, peaks


@pytest.mark.parametrize(
    ("changes", "is_recorded"),
    [
        ({"rename": "zeta=ze"}, True),
        ({"rename": "^mid$=dim"}, True),
        ({"strip_prefix": "net"}, True),
        ({"add_prefix": "model"}, False),
    ],
)
def test_the_order_of_names_stays_recorded_where_there_is_room_and_else_it_is_said(
    tmp_path: Path, changes: dict[str, str], is_recorded: bool
) -> None:
    path = tmp_path / "a.safetensors"
    names = ["net.zeta", "net.alpha", "net.mid"] if "strip_prefix" in changes else ["zeta", "alpha", "mid"]
    torch.save({name: torch.ones(at + 1) for at, name in enumerate(names)}, tmp_path / "a.pth")
    ckptool.migrate(tmp_path / "a.pth", path)

    report = ckptool.migrate(path, in_place=True, **changes)  # type: ignore[arg-type]

    new = [name for name, _ in sorted(ckptool.load(path).items(), key=lambda one: one[1].numel())]
    assert list(ckptool.load(path, strip=None)) == new
    with ckptool.open_checkpoint(path) as found:
        assert list(found.recorded.order) == (new if is_recorded else [])
    assert report.notes == (
        () if is_recorded else ("no room is left to record the order of names: it is that of the header alone",)
    )
