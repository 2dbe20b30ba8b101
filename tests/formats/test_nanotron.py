"""Nanotron's folders: a file for each part of a parameter, whose slices are text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool import LimitExceeded, Limits, MalformedFile, open_checkpoint
from tests.formats.said import refused

MAX_RANK = 64  # as many dimensions as torch has
QKV = torch.randn(12, 4)
WIDE = torch.randn(3, 8)
NORM = torch.randn(4)


def put(folder: Path, name: str, data: torch.Tensor, rank: str = "", pairs: str = "", shape: str = "") -> None:
    *modules, last = name.split(".")
    place = folder.joinpath("model", *modules)
    place.mkdir(parents=True, exist_ok=True)
    text = {"version": "1.4", "local_global_slices_pairs": pairs, "unsharded_shape": shape} if pairs else None
    save_file({"data": data.contiguous()}, place / f"model_{last}{rank}.safetensors", text)


def saved(folder: Path) -> Path:
    """Save as two tensor-parallel ranks do: q, k and v are three slices of what each has."""
    for rank in range(2):
        of = f"_pp-rank-0-of-1_tp-rank-{rank}-of-2"
        own, pairs = [], []
        for part in range(3):
            begin = part * 4 + rank * 2
            own.append(QKV[begin : begin + 2])
            pairs.append(f"{part * 2},{part * 2 + 2},None|None,None,None#{begin},{begin + 2},None|None,None,None")
        put(folder, "model.decoder.0.pp_block.qkv.weight", torch.cat(own), of, ";".join(pairs), "(12, 4)")
        begin = rank * 4
        slices = f"None,None,None|None,None,None#None,None,None|{begin},{begin + 4},None"
        put(folder, "model.head.weight", WIDE[:, begin : begin + 4], of, slices, "(3, np.int64(8))")
    put(folder, "model.norm.weight", NORM)
    (folder / "checkpoint_metadata.json").write_text(json.dumps({"version": "1.4", "tp": 2, "dp": 1}))
    return folder


def test_slices_are_put_together(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "nanotron"
    found = ckptool.load(folder)
    expected = {"decoder.0.pp_block.qkv.weight": QKV, "head.weight": WIDE, "norm.weight": NORM}
    for name, tensor in expected.items():
        (own,) = [one for key, one in found.items() if key.endswith(name)]
        assert torch.equal(own, tensor)
    assert ckptool.check(folder, deep=True).worst in (None, "info")
    ckptool.migrate(folder, tmp_path / "one.safetensors")
    again = ckptool.load(tmp_path / "one.safetensors")
    assert again.keys() == found.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in found.items())


def test_a_missing_rank_is_a_hole(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (gone,) = folder.rglob("head/*tp-rank-1*")
    gone.unlink()
    assert [one.code for one in ckptool.check(folder).findings if one.severity == "error"] == ["CK141"]
    refused(folder, match="hole", by=ckptool.load)


@pytest.mark.parametrize(
    ("pairs", "shape"),
    [
        ("0,9,None#0,9,None", "(4,)"),
        ("0,2,None#0,3,None", "(4,)"),
        ("0,4,2#0,4,2", "(4,)"),
        ("0,4,None", "(4,)"),
        ("-1,4,None#0,4,None", "(4,)"),
        ("0,4,None|0,1,None#0,4,None|0,1,None", "(4,)"),
        ("0,4,None#0,4,None", "(4, 1)"),
        ("0,4,None#0,4,None", f"(4{', 1' * MAX_RANK},)"),
        ("0,4,None#0,4,None", "(99999999999999999, 99999999999999999)"),
    ],
)
def test_slices_that_make_no_sense(pairs: str, shape: str, tmp_path: Path) -> None:
    folder = saved(tmp_path)
    put(folder, "model.norm.weight", NORM, "", pairs, shape)
    refused(folder, MalformedFile, r"slices|shape")


def test_files_that_are_no_parts(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    save_file({"data": NORM, "more": NORM.clone()}, folder / "model/model/norm/model_weight.safetensors")
    refused(folder, MalformedFile, "does not hold one tensor")
    put(folder, "model.norm.weight", NORM, "", "0,4,None#0,4,None" * 10_000, "(4,)")
    refused(folder, LimitExceeded, "characters of its slices")
    put(folder, "model.norm.weight", NORM)
    refused(folder, LimitExceeded, "files of tensors", limits=Limits(tensors=4))


def digits(nbytes: int, *numbers: int) -> str:
    """Return slices of so many characters: their numbers have zeros in front."""
    missing = nbytes - len(",,None#,,None")
    widths = [missing // 4 + (number < missing % 4) for number in range(4)]
    first, second, third, fourth = (str(one).zfill(width) for one, width in zip(numbers, widths, strict=True))
    return f"{first},{second},None#{third},{fourth},None"


def test_as_much_as_there_can_be_is_read(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    long = torch.arange(1024.0)
    cuts = ";".join(digits(63, at, at + 1, at, at + 1) for at in range(1023))
    cuts = f"{cuts};{digits(64, 1023, 1024, 1023, 1024)}"
    assert len(cuts) == 1 << 16
    put(folder, "model.long.weight", long, "", cuts, f"(1024,{' ' * ((1 << 16) - 7)})")
    deep = torch.ones((2, *[1] * (MAX_RANK - 1)))
    every = "|".join(["None,None,None"] * MAX_RANK)
    put(folder, "model.deep.weight", deep, "", f"{every}#{every}", str(tuple(deep.shape)))
    put(folder, "model.norm.weight", NORM, "", "0,4,None#0,4,None;2,2,None#0,0,None;4,4,None#4,4,None", "(4,)")

    found = ckptool.load(folder, limits=Limits(tensors=7))

    for name, tensor in (("long.weight", long), ("deep.weight", deep), ("norm.weight", NORM)):
        (own,) = [one for key, one in found.items() if key.endswith(name)]
        assert torch.equal(own, tensor)
    put(folder, "model.long.weight", long, "", f"{cuts};0,0,None#0,0,None", "(1024,)")
    refused(folder, LimitExceeded, "characters of its slices")


def test_ranks_that_say_another_shape_of_the_whole_are_of_several_saves(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    slices = "None,None,None|None,None,None#None,None,None|4,8,None"
    put(folder, "model.head.weight", WIDE[:, 4:], "_pp-rank-0-of-1_tp-rank-1-of-2", slices, "(3, 9)")
    assert refused(folder, MalformedFile, "another shape").kind == "mixed-saves"
