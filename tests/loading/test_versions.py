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
from tests.loading.same import saved

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


class Stem(nn.Module):
    """The second version of a class, whose first had a narrower layer under another name."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.version: Any = "never asked"

    def _load_from_state_dict(self, state: Any, prefix: str, facts: Any, *rest: Any) -> None:
        self.version = facts.get("version")
        if self.version is None or self.version < 2:
            old = f"{prefix}narrow."
            for name in [name for name in state if name.startswith(old)]:
                state[f"{prefix}layer.{name.removeprefix(old)}"] = state.pop(name)
            self.layer = nn.Linear(2, 4)
        super()._load_from_state_dict(state, prefix, facts, *rest)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kept", ["alone", "inside", "in a training file", "in another model", "dcp", "safetensors"])
def test_a_version_that_no_file_has_is_the_model_s(kept: str, tmp_path: Path) -> None:
    source, path = nn.Sequential(Second(), nn.BatchNorm1d(2)), tmp_path / "x"
    inner: Any = source[0] if kept == "alone" else source
    if kept == "dcp":
        dcp.save(source.state_dict(), checkpoint_id=path)
    elif kept == "safetensors":
        save_file(source.state_dict(), path)
    else:
        torch.save({"epoch": 1, "model": inner} if kept == "in a training file" else inner, path)

    for load in (load_into, LiveModel):
        fresh: Any = Second() if kept == "alone" else nn.Sequential(Second(), nn.BatchNorm1d(2))
        load(nn.DataParallel(fresh) if kept == "in another model" else fresh, path)
        found = fresh.state_dict()
        assert (fresh if kept == "alone" else fresh[0]).w.tolist() == ONES
        assert all(torch.equal(found[name], tensor) for name, tensor in inner.state_dict().items())
        assert found._metadata == inner.state_dict()._metadata


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


def test_an_old_model_is_converted_by_the_new_class_and_a_state_dict_keeps_its_version() -> None:
    old = Stem()
    del old.layer
    old.narrow = nn.Linear(2, 4)
    state = old.state_dict()
    state._metadata[""]["version"] = 1  # type: ignore[attr-defined]
    for data in (saved(old), saved(state)):
        model = Stem()
        load_into(model, data)
        assert model.version == 1
        assert torch.equal(model.layer.weight, old.narrow.weight)
    model = Stem()
    load_into(model, saved(Stem().state_dict()))
    assert model.version == 2
