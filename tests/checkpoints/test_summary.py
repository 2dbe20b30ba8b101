"""What tensors come to, whatever they share: as torch has it, and as the same tensors in other files come to."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
import torch

from ckptool import open_checkpoint
from ckptool.checkpoints.summary import Summary, _extent, summarise
from ckptool.sources.source import BytesSource
from ckptool.tensors.tensor import StorageRef

BASE = torch.arange(64, dtype=torch.float32)


def summary(tensors: dict[str, Any]) -> Summary:
    stream = io.BytesIO()
    torch.save(tensors, stream)
    with open_checkpoint(stream.getvalue()) as checkpoint:
        return summarise(checkpoint)


@pytest.mark.parametrize(
    ("tensors", "tied", "numel", "nbytes", "is_apart"),
    [
        ({"a": torch.zeros(2, 3), "b": torch.zeros(4)}, 0, 10, 40, True),
        ({"a": BASE, "b": BASE, "c": torch.ones(4)}, 1, 68, 272, False),
        ({"a": BASE[:8], "b": BASE[8:]}, 0, 64, 256, False),
        ({"a": BASE[:8], "b": BASE}, 0, 72, 256, False),
        ({"a": (empty := torch.zeros(0, 3)), "b": empty}, 1, 0, 0, False),
        ({"a": torch.zeros(0), "b": torch.ones(4)}, 0, 4, 16, False),
        ({"a": torch.zeros(3, device="meta"), "b": torch.ones(4)}, 0, 7, 16, False),
        ({"a": torch.eye(3).to_sparse(), "b": torch.ones(4)}, 0, 13, 76, False),
    ],
    ids=["apart", "tied", "views", "view-and-whole", "empty-tied", "empty", "meta", "sparse"],
)
def test_shared_bytes_and_tied_elements_count_once(
    tensors: dict[str, Any], tied: int, numel: int, nbytes: int, is_apart: bool
) -> None:
    found = summary(tensors)

    assert (found.tensors, found.tied, found.numel, found.nbytes) == (len(tensors), tied, numel, nbytes)
    assert found.is_apart == is_apart


@pytest.mark.parametrize(
    ("tensor", "is_plain"),
    [
        (torch.ones(2), True),
        (torch.tensor(1.0), True),
        (torch.nn.Parameter(torch.ones(2)), True),
        (torch.ones(2, 0), False),
        (torch.eye(2).to_sparse(), False),
    ],
)
def test_what_is_plain_has_elements_in_strided_memory(tensor: Any, is_plain: bool) -> None:
    assert summary({"w": tensor, "b": torch.ones(1)}).is_plain == is_plain


def test_each_byte_of_storages_counts_once_whatever_their_order() -> None:
    sources, chance = [BytesSource(bytes(20)), BytesSource(bytes(20))], random.Random(5)
    wholes = [StorageRef("0", "cpu", 20, source, 0) for source in sources]
    for _ in range(5_000):
        slices, count = chance.random() < 0.5, chance.randint(0, 6)
        which = sources[: chance.randint(1, 2)]
        if slices:
            places = [(chance.randrange(len(which)), chance.randint(0, 12), chance.randint(0, 5)) for _ in range(count)]
        else:  # as formats have them: those that begin elsewhere are apart
            sizes = [chance.randint(0, 5) for _ in range(8)]
            starts = [(one, at) for one in range(len(which)) for at in range(0, 20, 5)]
            places = [(*start, sizes[start[0] * 4 + start[1] // 5]) for start in chance.choices(starts, k=count)]
        places += chance.sample(places, min(len(places), chance.randint(0, 2)))
        storages = [
            StorageRef("0", "cpu", nbytes, which[one], offset, whole=wholes[one] if slices else None)
            for one, offset, nbytes in places
        ]
        bytes_of_all = {(one, byte) for one, begin, nbytes in places for byte in range(begin, begin + nbytes)}
        assert _extent(storages)[0] == len(bytes_of_all), places
