"""The index of a DCP folder: of very many entries, in little memory, and what torch makes of it."""

from __future__ import annotations

import pickle
import tracemalloc

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from ckptool.migration.dcp_plan import Entry, Item, index
from ckptool.tensors.dtypes import BY_NAME

FLOAT32 = BY_NAME["float32"]


def planned(count: int) -> tuple[list[Entry], list[Item]]:
    """Return entries of which every seventh is a value, and every fifth of the others is cut in two."""
    entries, items = [], []
    for number in range(count):
        name, shape = f"layers.{number}.weight", (4, number % 3 + 1)
        boxes = [((0, 0), shape)] if number % 5 else [((0, 0), (1, shape[1])), ((1, 0), (3, shape[1]))]
        if number % 7 == 3:
            entries.append(Entry(name, ("layers", number, "weight")))
            items.append(Item(name, None, b"", (), 100 + number))
            continue
        entries.append(Entry(name, ("layers", number, "weight"), (FLOAT32, shape, False), boxes))
        items += [Item(name, offsets, b"", (), 1000 + number) for offsets, _ in boxes]
    return entries, items


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 2500])
def test_torch_reads_every_entry(count: int) -> None:
    entries, items = planned(count)
    found = pickle.loads(index(entries, [("__0_0.distcp", items)]))
    assert isinstance(found, Metadata)
    assert found.planner_data == {one.name: one.path for one in entries}
    assert list(found.state_dict_metadata) == [one.name for one in entries]
    for one in entries:
        described = found.state_dict_metadata[one.name]
        if one.tensor is None:
            assert described == BytesStorageMetadata()
            continue
        assert isinstance(described, TensorStorageMetadata)
        assert (described.properties.dtype, described.size) == (torch.float32, torch.Size(one.tensor[1]))
        assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in described.chunks] == list(one.boxes)
    position = 0
    assert len(found.storage_data) == len(items)
    for item in items:
        offset = None if item.offsets is None else torch.Size(item.offsets)
        place = found.storage_data[MetadataIndex(item.name, offset)]
        assert (place.relative_path, place.offset, place.length) == ("__0_0.distcp", position, item.nbytes)
        position += item.nbytes


def test_pieces_of_a_tensor_are_numbered() -> None:
    entries, items = planned(30)
    found = pickle.loads(index(entries, [("__0_0.distcp", items)]))
    numbers = [key.index for key in found.storage_data if key.fqn == "layers.0.weight"]
    assert numbers == [0, 1]
    assert [key.index for key in found.storage_data if key.fqn == "layers.3.weight"] == [None]


def test_memory_does_not_grow_with_nodes() -> None:
    entries, items = planned(4_000)
    tracemalloc.start()
    try:
        written = index(entries, [("__0_0.distcp", items)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The pickle twice, what it refers to by number, and a thousand entries: all nodes at once were five times that.
    assert peak < 5 * len(written) + (2 << 20)
