"""TorchScript of PyTorch 1.0, whose index is JSON: laid out as 1.0.0 does it, and indexes that lie."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool import Checkpoint, CkptoolError, LimitExceeded, Limits, MalformedFile, open_checkpoint
from tests import build
from tests.formats.said import refused

VALUES = torch.arange(12.0)
INDEX: dict[str, Any] = {
    "protoVersion": "1",
    "mainModule": {
        "submodules": [
            {
                "parameters": [
                    {"isBuffer": True, "tensorId": "2", "name": "mean"},
                    {"isBuffer": False, "tensorId": "0", "name": "weight"},
                    {"tensorId": "1", "name": "bias"},
                ],
                "name": "0",
                "optimize": True,
            },
            {"submodules": [{"parameters": [{"tensorId": "0", "name": "tied"}], "name": "deep"}], "name": "1"},
        ],
        "torchscriptArena": {"key": "code/program.py"},
        "name": "program",
    },
    "producerName": "pytorch",
    "producerVersion": "1.0",
    "tensors": [
        {
            "dims": ["4", "3"],
            "offset": "0",
            "strides": ["3", "1"],
            "requiresGrad": True,
            "dataType": "FLOAT",
            "data": {"key": "tensors/0"},
            "device": "cuda:0",
        },
        {"dims": ["4"], "offset": "8", "strides": ["1"], "dataType": "FLOAT", "data": {"key": "tensors/0"}},
        {"dataType": "INT64", "data": {"key": "tensors/1"}, "device": "cpu"},
        {"dims": ["2"], "strides": ["1"], "dataType": "FLOAT", "data": {"key": "tensors/0"}, "device": "cpu"},
    ],
}


def program(index: Any = INDEX, **members: bytes) -> bytes:
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    found = {
        "version": b"1\n",
        "code/program.py": b"op_version_set = 0\n",
        "tensors/0": VALUES.numpy().tobytes(),
        "tensors/1": (7).to_bytes(8, "little"),
        "model.json": text,
    }
    return build.zip_file({f"program/{name}": data for name, data in (found | members).items()})


def opened(**changes: Any) -> Checkpoint:
    return open_checkpoint(program({**copy.deepcopy(INDEX), **changes}))


def changed(number: int, **changes: Any) -> dict[str, Any]:
    tensors = copy.deepcopy(INDEX["tensors"])
    tensors[number] |= changes
    return {"tensors": tensors}


def test_names_and_values_are_those_of_its_state_dict() -> None:
    state = ckptool.load(program())

    assert list(state) == ["0.weight", "0.bias", "0.mean", "1.deep.tied"]
    assert torch.equal(state["0.weight"], VALUES.view(4, 3))
    assert torch.equal(state["0.bias"], VALUES[8:])
    assert torch.equal(state["0.mean"], torch.tensor(7))
    assert state["1.deep.tied"].data_ptr() == state["0.weight"].data_ptr()


def test_kinds_devices_and_constants_are_told() -> None:
    checkpoint = opened()

    assert (checkpoint.format, checkpoint.form) == ("torchscript_json", "model")
    infos = {name: tensor.info for name, tensor in checkpoint.tensors.items()}
    assert [info.kind for info in infos.values()] == ["parameter", "parameter", "buffer", "parameter"]
    assert infos["0.weight"].location == "cuda:0"
    assert infos["0.weight"].requires_grad
    assert list(checkpoint.attributes) == ["constants.3"]  # of the code


def test_it_is_migrated_checked_and_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "program.pt"
    path.write_bytes(program())
    ckptool.migrate(path, tmp_path / "out.pt", form="state_dict")
    again = torch.load(tmp_path / "out.pt", map_location="cpu")
    assert all(torch.equal(value, again[name]) for name, value in ckptool.load(path).items())
    report = ckptool.check(path, deep=True)
    assert report.error is None
    assert "PyTorch 1.0" in next(one.message for one in report.findings if one.code == "CK101")
    model = torch.nn.Module()
    model.add_module("0", torch.nn.Module())
    model.get_submodule("0").register_buffer("mean", torch.tensor(0))
    ckptool.load_into(model, path, strict=False)
    assert model.get_submodule("0").mean == 7


@pytest.mark.parametrize(
    "changes",
    {
        "no module": {"mainModule": None},
        "no list": {"tensors": {}},
        "no objects": {"tensors": ["x"]},
        "one no object": {"tensors": [*INDEX["tensors"], "x"]},
        "no record": changed(0, data={"key": "tensors/9"}),
        "no key": changed(0, data=None),
        "no type": changed(0, dataType=None),
        "another type": changed(0, dataType="STRING"),
        "no number": changed(0, offset="-1"),
        "a long number": changed(0, offset="9" * 5000),
        "outside": changed(0, offset="1"),
        "far outside": changed(0, dims=["9223372036854775807", "2"], strides=["0", "0"]),
        "no strides": changed(0, strides=[]),
        "no such tensor": {"mainModule": {"parameters": [{"name": "w", "tensorId": "4"}]}},
        "no name": {"mainModule": {"parameters": [{"tensorId": "0"}]}},
        "one name twice": {"mainModule": {"parameters": [{"name": "w", "tensorId": "0"}] * 2}},
    }.values(),
)
def test_an_index_that_lies_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CkptoolError):
        opened(**changes)


@pytest.mark.parametrize(("offset", "read"), [(8, True), ("8", True), ("8".zfill(20), True), ("8".zfill(21), False)])
def test_a_number_has_up_to_twenty_digits(offset: Any, read: bool) -> None:
    if read:
        assert opened(**changed(1, offset=offset)).tensors["0.bias"].read() == VALUES[8:].numpy().tobytes()
    else:
        with pytest.raises(MalformedFile, match="for a number"):
            opened(**changed(1, offset=offset))


def test_a_number_may_be_nothing_and_not_less() -> None:
    for nothing in (0, None, "0"):
        assert opened(**changed(0, offset=nothing)).tensors["0.weight"].read() == VALUES.numpy().tobytes()
    for less in (-1, "-1", True, 0.0):
        with pytest.raises(MalformedFile, match="for a number"):
            opened(**changed(0, offset=less))


@pytest.mark.parametrize(("limits", "read"), [((4, 7), True), ((3, 7), False), ((4, 6), False)])
def test_a_program_has_as_many_names_and_as_long_ones_as_allowed(limits: tuple[int, int], read: bool) -> None:
    most = Limits(tensors=limits[0], name_nbytes=limits[1])  # the longest module is called "1.deep."
    if read:
        assert len(open_checkpoint(program(), limits=most).tensors) == 4
    else:
        refused(program(), LimitExceeded, limits=most)


def test_modules_in_modules_end_in_an_error() -> None:
    nested = b'{"name": "m", "submodules": [' * 100_000 + b"]}" * 100_000  # Python 3.14 reads a third of them
    refused(program(b'{"tensors": [], "mainModule": ' + nested + b"}"), MalformedFile)


def test_the_layout_with_pickled_attributes_is_named() -> None:
    refused(program(**{"attributes.pkl": b"\x80\x02]q\x00."}), ckptool.UnsupportedFeature, r"PyTorch 1\.1 to 1\.3")


def test_other_zips_with_a_file_of_that_name_are_no_programs() -> None:
    data = build.zip_file({"m/model.json": b"{}", "m/weights.bin": b"0"})
    refused(data, ckptool.NotACheckpoint)
