"""``include`` and ``prefix``: a part of the weights, by the names that ``load`` gives them; the rest is not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import WeightsNotFound
from tests.loading.same import assert_same


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)  # files of one name whose weights alone differ, in folders 0 and 1, may be of two ranks
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), "encoders": nn.Linear(1, 1)})
    torch.save({"model": nn.DataParallel(model).state_dict(), "epoch": 1}, tmp_path / "it.pth")
    return tmp_path / "it.pth"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"include": "*.bias"}, ["encoder.0.bias", "encoder.1.bias", "encoders.bias"]),
        ({"include": ["encoder.0.*", "encoders.weight"]}, ["encoder.0.weight", "encoder.0.bias", "encoders.weight"]),
        ({"prefix": "encoder", "include": ["*.weight"]}, ["0.weight", "1.weight"]),
        ({"prefix": "encoder.0."}, ["weight", "bias"]),
    ],
)
def test_a_part_has_the_values_of_the_whole(given: dict[str, Any], names: list[str], path: Path) -> None:
    head = f"{given.get('prefix', '').rstrip('.')}." if "prefix" in given else ""
    whole = ckptool.load(path)

    assert_same(ckptool.load(path, **given), {name: whole[head + name] for name in names})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"include": "conv*"}, r"include 'conv\*' matches none of 9 names"),
        ({"include": ["*", "encoder.9"]}, "include 'encoder.9' matches none"),
        ({"prefix": "enc"}, "prefix 'enc' is that of none of 9 names"),
    ],
)
def test_what_is_about_no_name_is_an_error_with_the_names(given: dict[str, Any], says: str, path: Path) -> None:
    with pytest.raises(WeightsNotFound, match=says) as caught:
        ckptool.load(path, **given)
    assert "encoder.0.weight" in str(caught.value.hint)


def test_what_is_left_out_may_be_damaged(path: Path) -> None:
    weight = ckptool.load(path)["encoder.0.weight"].numpy().tobytes()
    data = path.read_bytes()
    path.write_bytes(data.replace(weight, bytes(len(weight))))

    with pytest.raises(ckptool.DamagedFile):
        ckptool.load(path, verify=True)
    assert len(ckptool.load(path, verify=True, prefix="encoders")) == 2


def test_a_part_of_a_model_is_filled_and_the_rest_left_as_it_was(path: Path) -> None:
    whole = ckptool.load(path)
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), "encoders": nn.Linear(9, 9)})
    before = model["encoders"].weight.clone()

    report = ckptool.load_into(model, path, include="encoder.*")  # the other layer has another shape

    assert torch.equal(model["encoder"][0].weight, whole["encoder.0.weight"])  # type: ignore[index]
    assert torch.equal(model["encoders"].weight, before)
    assert (report.loaded, report.missing, report.unexpected) == (7, (), ())
    assert report.left_out == ("module.encoders.weight", "module.encoders.bias")
    assert "left out 2" in str(report)
    with pytest.raises(WeightsNotFound, match="include 'nothing' matches none of 9 names"):
        ckptool.load_into(model, path, include="nothing")
    model["encoder"].append(nn.Linear(2, 2, bias=False))  # type: ignore[operator]
    with pytest.raises(ckptool.KeyMismatch, match=r"1 of 10 names are missing: encoder\.2\.weight"):
        ckptool.load_into(model, path, include=["encoder.*"])


def test_a_module_is_filled_from_what_is_below_its_name(path: Path) -> None:
    encoder = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    report = ckptool.load_into(encoder, path, prefix="encoder")

    found = ckptool.load(path, prefix="encoder")
    assert_same(dict(encoder.state_dict()), dict(found))
    assert found._metadata == encoder.state_dict()._metadata  # type: ignore[attr-defined]
    encoder.load_state_dict(found)
    assert report.share == 1
    with pytest.raises(WeightsNotFound, match="prefix 'enc' is that of none of 9 names"):
        ckptool.load_into(encoder, path, prefix="enc")
    encoder.register_load_state_dict_post_hook(lambda *_: None)
    with pytest.raises(ckptool.UnsupportedFeature, match="by its own code"):
        ckptool.load_into(encoder, path, prefix="encoder")


def test_the_cost_of_a_part_is_known(path: Path) -> None:
    cost = ckptool.predict_memory(path, include="encoder.0.*", dtype="half", mmap=False)
    assert cost.host_nbytes == 2 * (3 * 2 + 2)
    assert ckptool.predict_memory(path, prefix="encoders", mmap=False).host_nbytes == 8
