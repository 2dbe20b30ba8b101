"""``ckptool inspect --digest``: the digest of the weights, as anybody can compute it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptool.fleet import row
from tests.checkpoints.digest_by_hand import digest as by_hand
from tests.program import as_json, run, validated


@pytest.mark.parametrize("name", ["model.pth", "wrapped.pth", "meta.pth"])
def test_the_digest_is_the_one_that_anybody_can_compute(name: str, tmp_path: Path) -> None:
    weights = {"body.weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(7)}
    wrapped = {f"module.{key}": tensor for key, tensor in weights.items()}
    torch.save({"state_dict": wrapped, "epoch": 3} if name == "wrapped.pth" else weights, tmp_path / name)
    if name == "meta.pth":
        torch.save({**weights, "lost": torch.zeros(2, device="meta")}, tmp_path / name)
    said = run("inspect", "-q", "--digest", tmp_path / name).output
    found = validated(as_json("inspect", "--digest", tmp_path / name), "inspect")

    if name == "meta.pth":
        assert (found["digest"], found["digest_error"]) == (None, "no-plain-bytes")
        assert "none: tensor 'lost' has no bytes in the file" in said
    else:
        assert (found["digest"], found["digest_error"]) == (by_hand(weights), None)
        assert by_hand(weights) in said
    assert found["digest"] == row(tmp_path / name, digest=True)["digest"]
