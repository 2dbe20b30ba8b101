"""How tensors are cut, in words: of folders that torch's own classes describe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.tensors.dtypes import BY_NAME
from ckptool.tensors.pieces import Box, Cut, Piece, PiecesSource, cut_of, in_pieces
from tests.formats.dcp_folder import columns, rows, save

GRID = [((0, 0), (6, 3)), ((0, 3), (6, 5)), ((6, 0), (6, 8))]


def cut(tmp_path: Path, shape: tuple[int, ...], boxes: list[Box]) -> Cut:
    folder = save(tmp_path / "saved", {"w": torch.randn(shape)}, {"w": boxes}, files=3)
    with ckptool.open_checkpoint(folder) as checkpoint:
        found = cut_of(checkpoint.tensors["w"].info)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("shape", "boxes", "along", "text", "files"),
    [
        ((12, 8), rows((12, 8), 3), 0, "3 along 0", 3),
        ((6, 8), columns((6, 8), 4), 1, "4 along 1", 3),
        ((12, 8), GRID, None, "3 boxes", 3),
        ((12, 8), [((0, 0), (12, 8))], None, "1", 1),
        ((), [((), ())], None, "1", 1),
        ((0, 4), [((0, 0), (0, 4))], None, "0", 0),
    ],
)
def test_a_cut_says_how_many_and_along_what_and_names_each_file_once(
    shape: tuple[int, ...], boxes: list[Box], along: int | None, text: str, files: int, tmp_path: Path
) -> None:
    found = cut(tmp_path, shape, boxes)
    assert (found.along, str(found), found.is_flat) == (along, text, False)
    assert found.files == tuple(f"__{number}_0.distcp" for number in range(files))


def test_a_tensor_that_was_flattened_is_cut_into_runs() -> None:
    def unread() -> ckptool.TensorInfo:
        raise AssertionError("no piece is opened for its place")

    pieces = [Piece((0,), (50,), "a", unread), Piece((50,), (46,), "b", unread)]
    dtype = BY_NAME["float32"]
    found = cut_of(in_pieces("w", (12, 8), dtype, PiecesSource((96,), dtype, pieces), "cpu"))
    assert found is not None
    assert (str(found), found.is_flat, found.along) == ("2 runs", True, None)


def test_what_is_whole_or_not_known_has_no_cut(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pth")
    folder = save(tmp_path / "saved", {"w": torch.randn(12, 8)}, {"w": rows((12, 8), 3)[:2]})
    for path in (tmp_path / "w.pth", folder):
        with ckptool.open_checkpoint(path) as checkpoint:
            assert cut_of(checkpoint.tensors["w"].info) is None
