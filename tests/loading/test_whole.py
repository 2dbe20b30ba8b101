"""Several state dicts that are one model together: names from the top of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from tests.each import each
from tests.loading.same import assert_same


def parts(head: str = "classifier") -> nn.ModuleDict:
    torch.manual_seed(3)
    return nn.ModuleDict({"backbone": nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), head: nn.Linear(4, 2)})


def saved_apart(path: Path, model: nn.ModuleDict, *, inside: str | None = None, **others: object) -> Path:
    tree: dict[str, Any] = {name: one.state_dict() for name, one in model.items()}
    torch.save({**({inside: tree} if inside else tree), **others}, path)
    return path


@each(
    ("head", "inside", "others"),
    [
        ("classifier", None, {}),
        ("classifier", None, {"epoch": 3, "args": {"lr": 0.1}}),
        ("classifier", "model", {"epoch": 3}),
        ("model", None, {}),  # a key that is well known, and is a part here
    ],
)
def test_a_model_in_parts_is_loaded_as_one(head: str, inside: str | None, others: Any, tmp_path: Path) -> None:
    model = parts(head)
    path = saved_apart(tmp_path / "x.pth", model, inside=inside, **others)
    fresh = parts(head)
    nn.init.zeros_(fresh["backbone"][0].weight)  # type: ignore[index]

    report = ckptool.load_into(fresh, path)

    assert_same(dict(fresh.state_dict()), dict(model.state_dict()))
    keys = [f"{inside}.{key}" if inside else key for key in ("backbone", head)]
    assert (report.share, report.joined, report.missing, report.unexpected) == (1, tuple(keys), (), ())
    assert f"state dicts together 2: {keys[0]}, {keys[1]}" in str(report)


def test_a_live_model_takes_them_too(tmp_path: Path) -> None:
    model = parts().eval()
    live = ckptool.LiveModel(parts().eval(), saved_apart(tmp_path / "x.pth", model))
    assert live.report is not None
    assert live.report.joined == ("backbone", "classifier")


def test_no_key_is_everything_with_names_from_the_top(tmp_path: Path) -> None:
    model = parts()
    _optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    path = saved_apart(tmp_path / "x.pth", model, epoch=3, scale=torch.tensor(2.0))

    found = ckptool.load(path, key="")

    assert_same(dict(found), {**model.state_dict(), "scale": torch.tensor(2.0)})
    assert set(found._metadata) == {*model.state_dict()._metadata} - {""}  # type: ignore[attr-defined]
    written = ckptool.migrate(path, tmp_path / "x.safetensors", key="")
    assert not any("averaged" in note for note in written.notes)
    assert_same(dict(ckptool.load(tmp_path / "x.safetensors")), dict(found))
    with pytest.raises(ckptool.AmbiguousWeights) as caught:
        ckptool.load(path)
    assert "all of them, with names from the top: `key='(all)'`" in str(caught.value.hint)
    with pytest.raises(ckptool.KeyMismatch, match="1 is unexpected: scale"):
        ckptool.load_into(parts(), path, key="")
    assert ckptool.load_into(parts(), path, key="", strict=False).unexpected == ("scale",)
    with pytest.raises(ckptool.MigrationRefused, match="joins 3 state dicts"):
        ckptool.save(found, tmp_path / "y.pth", like=path, key="")


def test_a_path_is_all_that_is_below_it(tmp_path: Path) -> None:
    path = saved_apart(tmp_path / "x.pth", parts(), inside="nets", epoch=1)
    assert_same(dict(ckptool.load(path, key="nets")), dict(parts().state_dict()))
    assert list(ckptool.load(path, key="nets.classifier")) == ["weight", "bias"]


def test_what_is_no_tensor_comes_along(tmp_path: Path) -> None:
    class Noted(nn.Linear):
        def get_extra_state(self) -> object:
            return {"seen": 7}

        def set_extra_state(self, state: object) -> None:
            self.seen = state

    model = nn.ModuleDict({"a": Noted(2, 2), "b": nn.Linear(2, 2)})
    path = saved_apart(tmp_path / "x.pth", model, epoch=3)
    assert list(ckptool.load(path, key="")) == [*(n for n in model.state_dict() if "extra" not in n), "a._extra_state"]
    fresh = nn.ModuleDict({"a": Noted(2, 2), "b": nn.Linear(2, 2)})
    assert ckptool.load_into(fresh, path).joined == ("a", "b")
    assert fresh["a"].seen == {"seen": 7}


@pytest.mark.parametrize("change", ["another layer", "another shape"])
def test_parts_that_are_not_exactly_the_model_are_not_taken(change: str, tmp_path: Path) -> None:
    path = saved_apart(tmp_path / "x.pth", parts())
    model = parts()
    model["classifier"] = nn.Linear(4, 3)
    if change == "another layer":
        model = parts()
        model["neck"] = nn.Linear(1, 1)
    with pytest.raises(ckptool.KeyMismatch, match="no state dict fits the model"):
        ckptool.load_into(model, path)
