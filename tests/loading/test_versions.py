"""Versions of modules' classes, by which ``load_state_dict`` converts old weights: kept, or known to be unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from ckptool import LiveModel, load_into, migrate

ONES = [1.0, 1.0]


class Second(nn.Module):
    """A class whose first version kept its weight in another unit."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            state[f"{prefix}w"] = state[f"{prefix}w"] * 10
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_where_a_format_has_no_versions_those_of_the_model_count(form: str, tmp_path: Path) -> None:
    state = nn.Sequential(Second()).state_dict()
    path = tmp_path / "x"
    dcp.save(state, checkpoint_id=path) if form == "dcp" else save_file(state, path)
    model = nn.Sequential(Second())
    load_into(model, path)
    assert model[0].w.tolist() == ONES
    model = nn.Sequential(Second())
    LiveModel(model, path)
    assert model[0].w.tolist() == ONES


def test_a_file_without_versions_that_could_have_them_is_of_the_first(tmp_path: Path) -> None:
    torch.save(dict(Second().state_dict()), tmp_path / "x.pth")
    model, theirs = Second(), Second()
    load_into(model, tmp_path / "x.pth")
    theirs.load_state_dict(torch.load(tmp_path / "x.pth"))
    assert model.w.tolist() == theirs.w.tolist() == [10.0, 10.0]


@pytest.mark.parametrize("form", ["state_dict", "same"])
@pytest.mark.parametrize(
    ("renames", "is_whole"),
    [
        ([r"^x\.w=q.w", r"^x\.b=q.b"], True),
        ([r"^x\.(w|b)=q.\1"], True),
        ([r"^x\.w=q.w"], False),
        ([r"^x\.w=q.w", r"^x\.b=r.b"], False),
    ],
)
def test_a_version_goes_where_all_names_of_its_module_go(
    renames: list[str], is_whole: bool, form: Any, tmp_path: Path
) -> None:
    torch.save(nn.ModuleDict({"x": Second()}).state_dict(), tmp_path / "a.pth")
    report = migrate(tmp_path / "a.pth", tmp_path / "b.pth", rename=renames, form=form)
    assert any("the version of its class is lost: x (now q)" in note for note in report.notes) == (not is_whole)
    if is_whole:
        model = nn.ModuleDict({"q": Second()})
        model.load_state_dict(torch.load(tmp_path / "b.pth"))
        assert model["q"].w.tolist() == ONES


def test_versions_that_a_dcp_folder_has_no_place_for_are_said(tmp_path: Path) -> None:
    for number, layer in enumerate([nn.Linear(2, 2), Second()]):
        torch.save({"model": nn.Sequential(layer).state_dict(), "epoch": 1}, tmp_path / "a.pth")
        for form in ({"key": "model"}, {}):
            report = migrate(tmp_path / "a.pth", tmp_path / "d", form="dcp", force=True, **form)  # type: ignore[arg-type]
            found = [note for note in report.notes if "no place for the versions of 1 module: 0" in note]
            assert len(found) == number
