"""Where the result goes when the source is a directory: beside it, under its name, and over none of its files."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.errors import DamagedFile, MigrationRefused
from tests.each import each
from tests.formats.dcp_folder import columns, rows, save
from tests.migration.refused import refused
from tests.scale import exhaustive

TENSORS = {"model.w": torch.randn(12, 10)}


def saved(folder: Path) -> Path:
    return save(folder, TENSORS, {"model.w": columns((12, 10), 3)})


@each(
    ("name", "form", "expected"),
    [
        ("step-500", "same", "step-500.pth"),
        ("step-500/", "safetensors", "step-500.safetensors"),
        ("step-1.5", "state_dict", "step-1.5.state_dict.pth"),
        ("epoch=1.ckpt", "same", "epoch=1.migrated.ckpt"),
        ("step-500/.metadata", "same", "step-500.pth"),
    ],
)
def test_the_result_is_beside_the_folder_and_named_after_it(
    tmp_path: Path, name: str, form: str, expected: str
) -> None:
    saved(tmp_path / name.split("/")[0])
    report = ckptool.migrate(f"{tmp_path}/{name}", form=form)  # type: ignore[arg-type]
    assert report.target == str(tmp_path / expected)
    weights = ckptool.load(report.target)
    assert torch.equal(weights["w"], TENSORS["model.w"])


def test_the_current_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved(tmp_path / "step-7"))
    assert ckptool.migrate(".").target == str(tmp_path / "step-7.pth")


@each("place", ["__0_0.distcp", "__1_0.distcp", ".metadata", "link/__0_0.distcp"])
def test_no_file_of_the_source_is_replaced(tmp_path: Path, place: str) -> None:
    folder = saved(tmp_path / "saved")
    (tmp_path / "link").symlink_to(folder)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    target = tmp_path / place if place.startswith("link") else folder / place
    with pytest.raises(MigrationRefused) as error:
        ckptool.migrate(folder, target, force=True)
    assert error.value.kind == "part-of-source"
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize(("large", "verify"), [(False, True), (True, False), (True, True)])
def test_pieces_are_put_together_on_the_way(tmp_path: Path, large: bool, verify: bool) -> None:
    shape = (700, 1000) if large else (7, 10)  # a large one goes through several threads
    tensors = {"a": torch.randn(shape), "b": torch.randn(shape), "c": torch.randn(shape).half()}
    cuts = {"a": columns(shape, 3), "b": rows(shape, 2), "c": columns(shape, 2)}
    folder = save(tmp_path / "saved", tensors, cuts)
    ckptool.migrate(folder, tmp_path / "out.safetensors", verify=verify)
    found = load_file(tmp_path / "out.safetensors")
    assert {name: found[name].equal(one) for name, one in tensors.items()} == dict.fromkeys(tensors, True)


@pytest.mark.parametrize("lay", ["plain", "transposed"])
def test_a_piece_that_is_damaged_is_found_while_it_is_copied(tmp_path: Path, lay: str) -> None:
    values = torch.arange(700_000.0).view(700, 1000)
    folder = save(tmp_path / "saved", {"a": values}, {"a": columns((700, 1000), 2)}, lay=lay)
    data = bytearray((folder / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "__1_0.distcp").write_bytes(data)
    for target in ("out.safetensors", "out.pth"):
        refused(folder, tmp_path / target, match=r"__1_0\.distcp", error=DamagedFile)
        assert not (tmp_path / target).exists()


@exhaustive
def test_what_was_copied_is_let_go_of(tmp_path: Path) -> None:
    """What is known of the pieces of many small tensors does not gather: 1.5 KB of each, beside 2.2 KB of its own."""
    count = 300
    save(tmp_path / "saved", {f"w{number}": torch.full((4, 4), float(number)) for number in range(count)})
    held: list[int] = []
    ckptool.migrate(tmp_path / "saved", tmp_path / "first.safetensors")  # what is imported late
    tracemalloc.start()
    try:
        ckptool.migrate(
            tmp_path / "saved",
            tmp_path / "m.safetensors",
            progress=lambda *_: held.append(tracemalloc.get_traced_memory()[0]),
        )
    finally:
        tracemalloc.stop()
    assert max(held) < 3_000 * count
    assert len(ckptool.load(tmp_path / "m.safetensors")) == count
