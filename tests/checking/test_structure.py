"""What is said of whole models, archives and folders: files that torch writes, compared with what the model gives."""

from __future__ import annotations

import io
import pickle
import sys
import types
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from ckptool import check, open_checkpoint
from tests.each import each


def said(path: Path, code: str) -> list[Any]:
    return [one for one in check(path).findings if one.code == code]


def written(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def add_nothing(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A hook that pickle finds by its name."""


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.table = torch.ones(2)


def hooked() -> nn.Module:
    model = nn.Linear(2, 2)
    model._register_state_dict_hook(add_nothing)
    return model


def without_a_tensor() -> nn.Module:
    model = nn.Linear(2, 2)
    model._parameters["weight"] = types.SimpleNamespace(data=1)  # type: ignore[assignment]
    return model


OURS = f"{__name__}."
MODELS: dict[str, tuple[str, Callable[[], Any], str, Callable[[], Any]]] = {
    "tensors that its state_dict leaves out": ("CK401", Constants, ": mask, table", lambda: nn.Linear(2, 2)),
    "classes that may override what is saved": (
        *("CK404", lambda: nn.Sequential(Constants(), Constants()), f"{OURS}Constants"),
        lambda: nn.Sequential(nn.Linear(2, 2)),
    ),
    "hooks": ("CK402", hooked, f"{OURS}add_nothing of torch.nn.modules.linear.Linear", lambda: nn.Linear(2, 2)),
    "parameters that are not tensors": (
        *("CK406", without_a_tensor, "only their classes can read them: weight (types.SimpleNamespace)"),
        lambda: nn.Linear(2, 2),
    ),
    "small views of large storages": (
        *("CK303", lambda: {"w": torch.zeros(1000, 1000)[0]}, "tensors cover 4,000 of the 4,000,000 bytes"),
        lambda: {"w": torch.zeros(1000, 1000)[0].clone(), "v": torch.zeros(3, 1000)[0]},
    ),
}
"""A code, what has it, what is said of that, and what has it not."""


@each("what", MODELS)
def test_what_is_odd_about_a_model_is_named(what: str, tmp_path: Path) -> None:
    code, odd, message, usual = MODELS[what]
    (found,) = said(written(tmp_path / "odd.pth", odd()), code)

    assert message in found.message
    assert said(written(tmp_path / "usual.pth", usual()), code) == []
    if code == "CK406":
        with open_checkpoint(tmp_path / "odd.pth") as checkpoint:
            assert list(checkpoint.tensors) == ["bias"]


def test_modules_of_packages_that_save_in_code_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class HQQLinear(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {"W_q": self.weight.data}

    package = types.ModuleType("hqq")
    HQQLinear.__module__, HQQLinear.__qualname__ = "hqq", "HQQLinear"
    package.HQQLinear = HQQLinear  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hqq", package)
    (found,) = said(written(tmp_path / "model.pth", nn.Sequential(HQQLinear(2, 2))), "CK403")

    assert found.message.endswith("what 1 module would add to a state_dict in code: 0 (hqq.HQQLinear)")


def test_other_checkpoints_of_an_archive_are_named_with_the_command_that_opens_one(tmp_path: Path) -> None:
    path = tmp_path / "several.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("a.pth", "b.pth"):
            archive.write(written(tmp_path / name, {"w": torch.ones(2)}), name)
    (found,) = said(path, "CK102")

    assert found.message == "an archive of 2 checkpoints"
    assert found.command == f"ckptool inspect {path}::a.pth"


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """The index of a folder that torch.distributed.checkpoint has written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save({"w": torch.ones(3), "b": torch.zeros(2)}, checkpoint_id=tmp_path / "run", no_dist=True)
    return tmp_path / "run/.metadata"


def test_an_index_away_from_its_folder_says_what_it_is(index: Path, tmp_path: Path) -> None:
    alone = tmp_path / "index.pkl"
    alone.write_bytes(index.read_bytes())
    assert [one.severity for one in said(alone, "CK133")] == ["info"]
    with io.BytesIO(index.read_bytes()) as stream:
        assert "CK133" in {one.code for one in check(stream).findings}
    assert said(index, "CK133") == []  # it stands for its folder


def test_items_of_names_that_the_index_does_not_list_are_counted(index: Path) -> None:
    assert said(index.parent, "CK147") == []
    found: Metadata = pickle.loads(index.read_bytes())
    found.storage_data[MetadataIndex("gone", (0,), 0)] = next(iter(found.storage_data.values()))
    index.write_bytes(pickle.dumps(found))

    (finding,) = said(index.parent, "CK147")
    assert "1 item of no tensor or value" in finding.message
    assert check(index.parent).known_grade == "unknown"  # nothing has read it


def test_a_quantised_weight_without_the_scale_that_others_have_is_a_warning(tmp_path: Path) -> None:
    state = {f"{name}.weight": torch.ones(4, 4).to(torch.float8_e4m3fn) for name in "abc"}
    path = written(tmp_path / "x.pth", {**state, "a.weight_scale": torch.ones(1), "b.weight_scale": torch.ones(1)})

    (found,) = said(path, "CK507")
    assert (found.severity, "c.weight" in found.message) == ("warning", True)
