"""Files without tensors, and tensors without values: nothing that looks like weights is made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptool
from ckptool.errors import UnsupportedFeature, WeightsNotFound
from tests.migration.refused import refused
from tests.scale import in_turn


def optimizer() -> dict[str, object]:
    return {"optimizer": torch.optim.Adam(nn.Linear(2, 2).parameters()).state_dict()}


EMPTY: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty.pth": (lambda path: torch.save({}, path), "and nothing else"),
    "settings.pth": (lambda path: torch.save({"lr": 0.1, "name": "x"}, path), "only lr, name"),
    "optimizer.pth": (lambda path: torch.save(optimizer(), path), "only optimizer"),
    "kept.pth": (lambda path: torch.save({"state_dict": {}, "epoch": 3}, path), "only epoch"),
    "empty.safetensors": (lambda path: save_file({}, path), "and nothing else"),
}


@pytest.mark.parametrize(("name", "form"), in_turn(EMPTY, ["state_dict", "safetensors", "shards"]))
def test_no_weights_are_written_of_a_file_without_tensors_and_it_is_said_what_it_has(
    tmp_path: Path, name: str, form: str
) -> None:
    write, held = EMPTY[name]
    write(tmp_path / name)
    options = {"max_shard_size": "1GB"} if form == "shards" else {"form": form}

    with pytest.raises(WeightsNotFound, match="there is no tensor in it, ") as caught:
        ckptool.migrate(tmp_path / name, tmp_path / "out", **options)  # type: ignore[arg-type]

    assert held in str(caught.value)
    assert [one.name for one in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("target", ["out.safetensors", "out.pth"])
def test_tensors_on_meta_stay_there_or_are_refused(tmp_path: Path, target: str) -> None:
    path = tmp_path / "meta.pth"
    torch.save({"w": torch.ones(3), "m": torch.empty(3, device="meta")}, path)

    if target == "out.safetensors":
        refused(path, tmp_path / target, match=r"'m' \(meta float32\)")
        return
    report = ckptool.migrate(path, tmp_path / target, to="cpu", dtype="fp16")

    assert torch.load(tmp_path / target)["m"].is_meta
    assert "1 tensor on the meta device, without values: they stay as they are" in report.notes
    (found,) = (one for one in ckptool.check(path).findings if one.code == "CK126")
    assert (found.severity, "m" in found.message) == ("warning", True)


def test_no_model_is_built_of_tensors_without_values(tmp_path: Path) -> None:
    path = tmp_path / "meta.pth"
    torch.save(nn.Linear(2, 2, device="meta").state_dict(), path)
    arguments = {"in_features": 2, "out_features": 2}

    with pytest.raises(UnsupportedFeature, match="it is on the meta device"):
        ckptool.migrate(path, tmp_path / "out.pth", form="model", model="torch.nn:Linear", model_arguments=arguments)
    with pytest.raises(UnsupportedFeature, match="has no bytes"):
        ckptool.load_into(nn.Linear(2, 2), path)
