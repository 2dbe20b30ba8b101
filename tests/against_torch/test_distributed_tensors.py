"""DTensors: what the file holds of them is told, and why they do not go into a model."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptool

distributed = pytest.importorskip("torch.distributed.tensor")
FakeStore = pytest.importorskip("torch.testing._internal.distributed.fake_pg").FakeStore


@pytest.fixture(params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """Yield how many ranks there are, while this process is the first of them."""
    torch.distributed.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    torch.distributed.destroy_process_group()


def test_what_is_here_is_told(ranks: int, tmp_path: Path) -> None:
    mesh = distributed.init_device_mesh("cpu", (ranks,))
    model = torch.nn.Linear(8, 4)
    placed = {
        name: distributed.DTensor.from_local(value.detach()[: 4 // ranks], mesh, [distributed.Shard(0)])
        for name, value in model.state_dict().items()
    }
    file = io.BytesIO()
    torch.save(placed, file)
    found = [one.message for one in ckptool.check(file.getvalue()).findings if one.code == "CK407"]
    with pytest.raises(ckptool.UnsupportedFeature, match="DTensor, which the file holds as _local_tensor"):
        ckptool.load_into(model, file.getvalue())

    assert len(found) == (ranks > 1)
    assert all("18 of 36 elements: weight, bias" in message for message in found)
