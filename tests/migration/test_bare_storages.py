"""Storages that stand in a checkpoint for themselves keep the elements that torch finds in them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool import migrate
from tests import build

WHOLE, VIEW = build.storage(rest=(None,)), build.storage(rest=(("v", 1, 2),))
TREES = {
    "a storage": {"bare": WHOLE},
    "a view": {"bare": VIEW},
    "a view beside its whole": {"bare": VIEW, "other": WHOLE},
    "a view beside a tensor": {"bare": VIEW, "weight": build.tensor(WHOLE)},
    "a view beside a tensor of it": {"bare": VIEW, "weight": build.tensor(VIEW, (2,))},
}


def elements(path: Path) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: value.tolist() for name, value in torch.load(path, weights_only=False).items()}


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("tree", TREES)
def test_a_storage_keeps_its_elements(tree: str, tmp_path: Path) -> None:
    (tmp_path / "old.pth").write_bytes(build.legacy(TREES[tree], [("0", 4, build.floats())]))
    migrate(tmp_path / "old.pth", tmp_path / "new.pth", form="same")

    assert elements(tmp_path / "new.pth") == elements(tmp_path / "old.pth")
