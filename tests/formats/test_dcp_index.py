"""An index of ``torch.distributed.checkpoint`` that is not as it writes them: it is said what is wrong, or read."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ckptool
from ckptool.limits import Limits
from tests.each import each
from tests.formats.dcp_folder import Writer, rows

TENSORS = {"a": torch.arange(12.0).reshape(4, 3), "b": torch.arange(6.0)}


def written(folder: Path) -> Writer:
    writer = Writer(folder)
    for name, tensor in TENSORS.items():
        writer.tensor(name, tensor, rows(tensor.shape, 2))
    return writer


def no_text(metadata: Any) -> None:
    metadata.state_dict_metadata[3] = metadata.state_dict_metadata["a"]


def no_length(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).length = None


def negative_offset(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).offset = -1


def odd_transforms(metadata: Any) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = "stream.zstd/1"


def no_pieces(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].chunks = None


def no_sizes(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].chunks[1].sizes = None


def texts_for_offsets(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].chunks[1].offsets = ("2", "0")


def too_many_dimensions(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].chunks[1].offsets = [0] * 65


@each(
    ("change", "message"),
    [
        (no_text, "a name that is no text"),
        (no_length, "an item without a name, or a place"),
        (negative_offset, "an item without a name, or a place"),
        (odd_transforms, "transforms are no list"),
        (no_pieces, "'a' without pieces"),
        (no_sizes, "a piece without offsets or sizes"),
        (texts_for_offsets, "'a' has pieces at what are no numbers"),
        (too_many_dimensions, "a piece without offsets or sizes"),
    ],
)
def test_what_is_wrong_is_said(change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    writer = written(tmp_path)
    change(writer.metadata)
    with pytest.raises(ckptool.MalformedFile, match=message) as caught:
        ckptool.open_checkpoint(writer.close())
    assert caught.value.message.startswith("'.metadata': ")


def test_something_else_is_no_index(tmp_path: Path) -> None:
    folder = written(tmp_path).close()
    (folder / ".metadata").write_bytes(pickle.dumps(OrderedDict(a=1)))
    with pytest.raises(ckptool.MalformedFile, match="OrderedDict and no Metadata"):
        ckptool.open_checkpoint(folder)


def test_names_are_limited(tmp_path: Path) -> None:
    folder = written(tmp_path).close()
    with pytest.raises(ckptool.LimitExceeded, match="more than 1 names") as caught:
        ckptool.open_checkpoint(folder, limits=Limits(tensors=1))
    assert (caught.value.needed, caught.value.actual) == (2, 1)


def test_what_a_later_release_may_add_changes_nothing(tmp_path: Path) -> None:
    writer = written(tmp_path)
    for described in writer.metadata.state_dict_metadata.values():
        for chunk in described.chunks:  # type: ignore[union-attr]
            chunk.device_mesh = (2, 1)  # type: ignore[attr-defined]
            chunk.sizes = list(chunk.sizes)  # type: ignore[assignment]
    for stored in writer.metadata.storage_data.values():
        stored.checksum = "crc32:0"
    writer.metadata.storage_meta = SimpleNamespace(save_id="one")  # type: ignore[assignment]
    writer.metadata.planner_data[5] = ("no", "name")  # type: ignore[index]
    writer.metadata.planner_data["a"] = "no path"  # type: ignore[index]
    folder = writer.close()

    loaded = ckptool.load(folder)

    assert list(loaded) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded[name], tensor)


def test_items_in_any_order_overlap_where_they_do(tmp_path: Path) -> None:
    """Two files have their items in another order than their places; in one of them, one begins inside another."""
    writer = Writer(tmp_path)
    for name, tensor in TENSORS.items():
        writer.tensor(name, tensor)
    stored = writer.metadata.storage_data
    first, second = stored.values()
    writer.metadata.storage_data = dict(reversed(stored.items()))
    report = ckptool.check(writer.close())
    assert [one.code for one in report.findings if one.severity == "error"] == []

    second.offset = first.offset + first.length - 1
    report = ckptool.check(writer.close(), deep=True)

    assert f"overlap at byte {second.offset:,}" in next(one.message for one in report.findings if one.code == "CK146")


def test_no_two_names_become_one(tmp_path: Path) -> None:
    """One has a character of two halves, the other the halves apart; others have what is special in texts."""
    names = ["w\U0001f600", "w\ud83d\ude00", "w\ud83d", 'w"\\ud83d', "w\0\n\u2028", "\u00e9"]
    writer = Writer(tmp_path)
    for number, name in enumerate(names):
        writer.tensor(name, torch.full((2,), float(number)))

    with ckptool.open_checkpoint(writer.close()) as opened:
        assert list(opened.tensors) == names
        assert [tensor.torch()[0] for tensor in opened.tensors.values()] == [0, 1, 2, 3, 4, 5]
