"""An index of ``torch.distributed.checkpoint`` that is not as it writes them, or as large as it may be."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import ckptool
from ckptool import LimitExceeded, Limits, MalformedFile
from ckptool.errors import AmbiguousFile
from tests.each import each
from tests.formats.dcp_folder import Boxes, Writer, rows
from tests.formats.said import refused

TENSORS = {"a": torch.arange(12.0).reshape(4, 3), "b": torch.arange(6.0)}


def written(folder: Path) -> Writer:
    writer = Writer(folder)
    for name, tensor in TENSORS.items():
        writer.tensor(name, tensor, rows(tensor.shape, 2))
    return writer


def first(metadata: Any) -> Any:
    """Return what is said of the first item."""
    return next(iter(metadata.storage_data.values()))


def chunk(metadata: Any) -> Any:
    """Return what is said of the second piece of the first tensor."""
    return metadata.state_dict_metadata["a"].chunks[1]


def no_text(metadata: Any) -> None:
    metadata.state_dict_metadata[3] = metadata.state_dict_metadata["a"]


def no_pieces(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].chunks = None


def with_field(of: Callable[[Any], Any], name: str, value: object) -> Callable[[Any], None]:
    return lambda metadata: setattr(of(metadata), name, value)


@each(
    ("change", "message"),
    [
        (no_text, "a name that is not text"),
        (with_field(first, "length", None), "an item without a name, or a place"),
        (with_field(first, "offset", -1), "an item without a name, or a place"),
        (with_field(first, "transform_descriptors", "stream.zstd/1"), "transforms are not a list"),
        (no_pieces, "'a' without pieces"),
        (with_field(chunk, "sizes", None), "a piece without offsets or sizes"),
        (with_field(chunk, "offsets", ("2", "0")), "'a' has pieces at what are not numbers"),
        (with_field(chunk, "offsets", [0] * 65), "a piece without offsets or sizes"),
    ],
)
def test_what_is_wrong_is_said(change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    writer = written(tmp_path)
    change(writer.metadata)
    assert refused(writer.close(), ckptool.MalformedFile, message).message.startswith("'.metadata': ")


def test_something_else_is_no_index(tmp_path: Path) -> None:
    folder = written(tmp_path).close()
    (folder / ".metadata").write_bytes(pickle.dumps(OrderedDict(a=1)))
    refused(folder, ckptool.MalformedFile, "OrderedDict and no Metadata")


def test_names_are_limited(tmp_path: Path) -> None:
    folder = written(tmp_path).close()
    caught = refused(folder, ckptool.LimitExceeded, "more than 1 names", limits=Limits(tensors=1))
    assert (caught.needed, caught.actual) == (2, 1)


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


@pytest.mark.parametrize("value", [7, torch.ones(3)], ids=["value", "tensor"])
def test_two_items_for_one_place_are_refused(value: Any, tmp_path: Path) -> None:
    """They have keys that are one for Python, which keeps the item of the last."""
    writer = Writer(tmp_path)
    writer.tensor("v", value) if isinstance(value, torch.Tensor) else writer.value("v", value)
    key = next(iter(writer.metadata.storage_data))
    writer.item("__1_0.distcp", MetadataIndex("V", key.offset, 1), value)
    index = writer.close() / ".metadata"
    index.write_bytes(index.read_bytes().replace(b"\x8c\x01V", b"\x8c\x01v"))
    kept = pickle.loads(index.read_bytes()).storage_data
    assert [one.relative_path for one in kept.values()] == ["__1_0.distcp"]

    refused(tmp_path, ckptool.MalformedFile, "two items for one place of 'v'")


def test_no_two_names_become_one(tmp_path: Path) -> None:
    """One has a character of two halves, the other the halves apart; others have what is special in texts."""
    names = ["w\U0001f600", "w\ud83d\ude00", "w\ud83d", 'w"\\ud83d', "w\0\n\u2028", "\u00e9"]
    writer = Writer(tmp_path)
    for number, name in enumerate(names):
        writer.tensor(name, torch.full((2,), float(number)))

    with ckptool.open_checkpoint(writer.close()) as opened:
        assert list(opened.tensors) == names
        assert [tensor.torch()[0] for tensor in opened.tensors.values()] == [0, 1, 2, 3, 4, 5]


def padded(writer: Writer, nbytes: int) -> Path:
    """Write a folder whose index is in a file of so many bytes."""
    path = writer.close() / ".metadata"
    data = path.read_bytes()
    assert len(data) <= nbytes
    path.write_bytes(data.ljust(nbytes, b"\0"))
    return path.parent


def fault_of(writer: Writer) -> str | None:
    """Return what is said of the pieces of the one tensor."""
    return next((one.message for one in ckptool.check(writer.close()).findings if one.code == "CK141"), None)


def with_pieces(folder: Path, shape: Sequence[int], boxes: Boxes, listed: Boxes | None = None) -> Writer:
    """Return a writer of a tensor whose pieces are said to be these, and whose items those that are listed."""
    writer = Writer(folder)
    writer.tensor("w", torch.zeros(tuple(shape)), rows(shape, 1))
    described: Any = writer.metadata.state_dict_metadata["w"]
    described.chunks = [ChunkStorageMetadata(tuple(at), tuple(sizes)) for at, sizes in boxes]  # type: ignore[arg-type]
    stored: Any = writer.metadata.storage_data
    (one,) = stored.values()
    stored.clear()
    for at, _ in boxes if listed is None else listed:
        stored[MetadataIndex("w", torch.Size(at), 0)] = one
    return writer


def test_as_many_pieces_as_the_index_has_bytes(tmp_path: Path) -> None:
    writer = with_pieces(tmp_path, (64,), rows((64,), 64))
    described = writer.metadata.state_dict_metadata
    for number in range(400):
        described[f"w{number}"] = described["w"]
    count = 401 * 64

    with ckptool.open_checkpoint(padded(writer, count)) as opened:
        assert len(opened.tensors) == 401
    refused(padded(writer, count - 1), LimitExceeded, "more pieces of tensors")


def test_as_many_keys_in_paths_as_the_index_has_bytes(tmp_path: Path) -> None:
    writer = with_pieces(tmp_path, (2,), [])
    described, planner = writer.metadata.state_dict_metadata, writer.metadata.planner_data
    assert planner is not None
    path = planner["w"] = ("k",) * 1000
    ckptool.open_checkpoint(writer.close()).close()
    for number in range(399):
        described[f"w{number}"], planner[f"w{number}"] = described["w"], path

    refused(padded(writer, 400 * 1000), AmbiguousFile, "two values have the path")
    refused(padded(writer, 400 * 1000 - 1), LimitExceeded, "more keys in paths")


@each(
    "paths",
    [
        (("w", "a"), ("v", "a")),
        (("w", "a"), ("u", "a", "b"), ("v", "a", "b")),
        (("w", "a", "b"), ("v", "a"), ("u", "a")),
        (("w", "v"), ("v",)),
    ],
)
def test_two_values_under_one_path_are_refused(tmp_path: Path, paths: tuple[tuple[str, ...], ...]) -> None:
    writer = with_pieces(tmp_path, (2,), [])
    described, planner = writer.metadata.state_dict_metadata, writer.metadata.planner_data
    assert planner is not None
    for name, *path in paths:
        described[name], planner[name] = described["w"], tuple(path)

    refused(writer.close(), AmbiguousFile, "two values have the path")


def with_transforms(writer: Writer, count: int) -> None:
    stored: Any = next(iter(writer.metadata.storage_data.values()))
    stored.transform_descriptors = ["one"] * count


def with_attributes(writer: Writer, count: int) -> None:
    described: Any = writer.metadata.state_dict_metadata["w"]
    for number in range(count - 2):
        setattr(described.chunks[0], f"more{number}", None)


@each(
    ("change", "count", "is_one"),
    [
        (with_transforms, 8, True),
        (with_transforms, 9, False),
        (with_attributes, 64, True),
        (with_attributes, 65, False),
    ],
)
def test_as_much_as_there_may_be_and_one_more(
    change: Callable[[Writer, int], None], count: int, is_one: bool, tmp_path: Path
) -> None:
    writer = Writer(tmp_path)
    writer.tensor("w", torch.ones(2))
    change(writer, count)
    if is_one:
        with ckptool.open_checkpoint(writer.close()) as opened:
            assert opened.tensors["w"].shape == (2,)
    else:
        refused(writer.close(), MalformedFile, "no index of")


@each("kind", [tuple, list])
def test_as_many_dimensions_as_torch_has(kind: type, tmp_path: Path) -> None:
    for rank in (64, 64 + 1):
        shape, zeros = (2, *[1] * (rank - 1)), [0] * rank
        writer = with_pieces(tmp_path / str(rank), (2,), [])
        described: Any = writer.metadata.state_dict_metadata["w"]
        described.size = shape[:64]
        described.chunks = [ChunkStorageMetadata(kind(zeros), kind(shape))]
        if rank == 64:
            with ckptool.open_checkpoint(writer.close()) as opened:
                assert opened.tensors["w"].shape == shape
        else:
            refused(writer.close(), MalformedFile, "without offsets or sizes")


@each(
    ("boxes", "words"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], None),
        ([((0, 0), (4, 1)), ((0, 1), (4, 2))], None),
        ([((0, 0), (2, 1)), ((0, 1), (2, 2)), ((2, 0), (2, 3))], None),
        ([((0, 0), (2, 3)), ((2, 0), (0, 3)), ((2, 0), (2, 3))], None),
        ([((0, 0), (0, 3)), ((0, 0), (4, 3))], None),
        ([((0, 0), (2, 2)), ((2, 0), (2, 2))], "hole"),
        ([((0, 0), (2, 5)), ((2, 0), (2, 5))], "not inside"),
        ([((0, 0), (2, 3)), ((2, 0), (2, 2))], "hole"),
        ([((0, 0), (2, 3)), ((2, 0), (2, 4))], "not inside"),
        ([((0, 0), (5, 3)), ((5, 0), (-1, 3))], ""),
        ([((0, 0), (2, 3)), ((2, 0), (2,))], ""),
        ([((0, 0), (2, 3)), ((2, 0), ())], ""),
        ([((0, 0), (4, 3, 1))], ""),
        ([((0, 0), (4,))], ""),
        ([((0, 0), ())], ""),
        ([((0, 0), (2, 3)), ((2, 0), (1, 3))], "hole"),
        ([((0, 0), (2, 3)), ((2, 0), (3, 3))], "not inside"),
    ],
)
def test_pieces_fill_the_tensor_or_have_a_fault(boxes: Boxes, words: str | None, tmp_path: Path) -> None:
    found = fault_of(with_pieces(tmp_path, (4, 3), boxes))

    assert found is None if words is None else words in str(found)


@each(
    "listed",
    [(0, 2, 4), (2, 4), (0, 4), (0, 2), (0,), (2,), (4,), (), (0, 1, 2, 4), (1, 2, 4), (0, 2, 4, 6), (6,), (1, 3, 5)],
)
def test_each_piece_has_the_item_with_its_offsets(listed: tuple[int, ...], tmp_path: Path) -> None:
    """Items of no piece are in the way of none."""
    boxes = rows((6,), 3)
    writer = with_pieces(tmp_path, (6,), boxes, [((at,), (2,)) for at in listed])
    stored: Any = writer.metadata.storage_data
    for key in list(stored):
        stored[key] = SimpleNamespace(relative_path="a", offset=100 * key.offset[0], length=9)
    missing = 3 - len({0, 2, 4} & set(listed))
    assert (f"no item for {missing} piece" in str(fault_of(writer))) == bool(missing)
