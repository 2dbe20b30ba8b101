"""What the commands say of tensors that lie in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cli.test_schemas import valid
from tests.formats.dcp_folder import columns, rows, save
from tests.program import invoke, run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {"model.a": torch.randn(12, 8), "model.b": torch.randn(6, 8), "model.c": torch.randn(5)}
    boxes = [((0, 0), (6, 3)), ((0, 3), (6, 5)), ((6, 0), (6, 8))]
    return save(tmp_path / "saved", tensors, {"model.a": boxes, "model.b": columns((6, 8), 4)}, files=5)


def test_inspect_says_how_tensors_are_cut_and_where_the_pieces_are(folder: Path) -> None:
    result = invoke(["inspect", str(folder), "--columns", "name,pieces", "--table", "csv"])

    assert result.stdout.splitlines()[-4:] == [
        "name,pieces",
        'model.a,"3 boxes: __0_0.distcp, __1_0.distcp, __2_0.distcp"',
        'model.b,"4 along 1: __3_0.distcp, __4_0.distcp, __0_0.distcp and 1 more"',
        "model.c,1: __2_0.distcp",
    ]


def test_json_has_the_boxes(folder: Path) -> None:
    found = {one["name"]: one for one in valid("inspect", folder)["tensors"]}

    assert found["model.a"]["pieces"] == {
        "count": 3,
        "along": None,
        "boxes": [
            {"offsets": [0, 0], "sizes": [6, 3], "file": "__0_0.distcp"},
            {"offsets": [0, 3], "sizes": [6, 5], "file": "__1_0.distcp"},
            {"offsets": [6, 0], "sizes": [6, 8], "file": "__2_0.distcp"},
        ],
    }
    assert found["model.b"]["pieces"]["along"] == 1


def test_files_that_are_whole_have_no_pieces(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pth")
    (tensor,) = valid("inspect", tmp_path / "a.pth")["tensors"]

    assert "pieces" not in tensor
    result = invoke(["inspect", str(tmp_path / "a.pth"), "--columns", "pieces", "--table", "csv"])
    assert result.stdout.splitlines()[-2:] == ["pieces", "-"]


def test_a_deep_check_compares_every_piece(tmp_path: Path) -> None:
    values = torch.arange(3000.0).reshape(60, 50)
    for lay in ("plain", "transposed"):
        folder = save(tmp_path / lay, {"model.a": values}, {"model.a": rows((60, 50), 3)}, lay=lay)
        result = invoke(["check", "--deep", str(folder)])
        assert "every byte was read; all 3 items match their checksums" in result.stdout

        file = folder / "__1_0.distcp"
        data = bytearray(file.read_bytes())
        data[data.index(values[25, 7].numpy().tobytes() if lay == "plain" else values[20:22, 7].numpy().tobytes())] ^= 1
        file.write_bytes(data)
        result = run("check", "--deep", folder, code=1)
        assert (
            "CK105 the item of 'model.a' at [20, 0] in '__1_0.distcp': record 'archive/data/0' is damaged"
            in result.stdout
        )
        assert "2 of 3 items match their checksums" in result.stdout


def test_what_cannot_be_read_does_not_hide_the_values_of_the_rest(tmp_path: Path) -> None:
    tensors = {"model.a": torch.ones(12, 8), "model.b": torch.full((6, 8), torch.nan)}
    folder = save(tmp_path / "saved", tensors, {"model.a": rows((12, 8), 3)}, files=4)
    (folder / "__1_0.distcp").unlink()

    result = run("check", "--values", folder, code=1)
    assert "CK110 values that are not numbers (NaN): model.b (48 of 48)" in result.stdout
    assert "CK113 values not looked at, for they cannot be read: model.a" in result.stdout
    stat = invoke(["stat", str(folder)])
    assert "model.a" in stat.stdout
    assert "__1_0.distcp" in stat.stdout
