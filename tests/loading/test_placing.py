"""Devices and types that no tensor of a model would get are refused before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "w.pth")
    return tmp_path / "w.pth"


@pytest.mark.parametrize("dtype", [torch.float16, "bf16", torch.float64])
def test_a_type_that_the_model_would_not_get_is_refused_with_a_next_step(path: Path, dtype: Any) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.clone()

    for load in (ckptool.load_into, ckptool.LiveModel):
        with pytest.raises(ValueError, match=r"dtype=torch\.\w+ is for tensors on the meta device.*model\.to\(torch"):
            load(model.eval(), path, dtype=dtype)

    assert torch.equal(model.weight, before)


def test_the_type_that_the_model_has_is_fine_and_so_is_any_where_tensors_are_on_meta(path: Path) -> None:
    ckptool.load_into(nn.Linear(3, 2), path, dtype=torch.float32)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 2))[0]
    ckptool.load_into(model, path, dtype="fp16")

    assert model.weight.dtype is torch.float16


@pytest.mark.parametrize("word", ["map_location", "device"])
def test_each_function_takes_either_word(word: str, path: Path) -> None:
    def on_meta() -> nn.Module:
        return nn.Linear(3, 2, device="meta").eval()

    whole, gone = (path.with_name(f"{name}.pth") for name in ("model", "gone"))  # devices are known before it is read
    torch.save(nn.Linear(3, 2), whole)
    calls: list[Any] = [
        lambda path, **there: ckptool.load(path, **there)["weight"],
        lambda path, **there: ckptool.load_into(on_meta(), path, **there),
        lambda path, **there: ckptool.LiveModel(on_meta(), path, **there),
        lambda path, **there: ckptool.load_model(path if path == gone else whole, trust=True, **there),
        lambda path, **there: ckptool.predict_memory(path, **there),
    ]
    assert ckptool.load(path, **{"map_location": "meta", word: "meta"})["weight"].is_meta
    for call in calls:
        call(path, **{word: "cpu"})
        with pytest.raises(ckptool.DeviceUnavailable, match="'nowhere' is not a device"):
            call(gone, **{word: "nowhere"})
        with pytest.raises(ValueError, match="map_location='meta' and device='cpu' are two words for one thing"):
            call(gone, map_location="meta", device="cpu")


@pytest.mark.parametrize("text", ["bf16", "bfloat16", "torch.bfloat16"])
def test_types_are_spelled_alike_everywhere(text: str, path: Path) -> None:
    fresh = nn.Linear(3, 2, device="meta")
    ckptool.load_into(fresh, path, dtype=text)
    live = ckptool.LiveModel(nn.Linear(3, 2, device="meta").eval(), path, dtype=text)
    found = ckptool.load(path, dtype=text)
    ckptool.migrate(path, path.with_name("o.pth"), dtype=text)
    ckptool.save(ckptool.load(path), path.with_name("s.pth"), dtype=text)
    written = [ckptool.load(path.with_name(name)) for name in ("o.pth", "s.pth")]

    assert {one["weight"].dtype for one in (found, *written)} == {torch.bfloat16}
    assert {fresh.weight.dtype, live.model.weight.dtype} == {torch.bfloat16}
    assert ckptool.predict_memory(path, dtype=text, mmap=False).host_nbytes == 2 * 8
