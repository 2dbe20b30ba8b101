"""An index of ``torch.distributed.checkpoint`` at its bounds: as much as there may be, one more, and none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import ckptool
from ckptool import LimitExceeded, MalformedFile
from ckptool.formats.directories.dcp.index import Entry, Index, read_index
from ckptool.limits import Limits
from ckptool.sources.files import FileSource
from ckptool.tensors.tensor import MAX_RANK, MAX_SIZE
from tests.each import each
from tests.formats.dcp_folder import Boxes, Writer, rows


class Reduced:
    """What is pickled as a call, with a state or without."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


def index_of(writer: Writer, *, nbytes: int = 0, **limits: int) -> Index:
    """Read the index, in a file of so many bytes."""
    path = writer.close() / ".metadata"
    data = path.read_bytes()
    assert len(data) <= nbytes or not nbytes
    path.write_bytes(data.ljust(nbytes, b"\0"))
    source = FileSource(str(path))
    try:
        return read_index(source, ".metadata", Limits(**limits))
    finally:
        source.close()


def entry_of(writer: Writer, name: str = "w") -> Entry:
    entry = index_of(writer).entries[name]
    assert isinstance(entry, Entry)
    return entry


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


def test_as_many_names_as_are_allowed(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for name in ("a", "b"):
        writer.tensor(name, torch.ones(2))

    assert list(index_of(writer, tensors=2).entries) == ["a", "b"]
    with pytest.raises(LimitExceeded, match="more than 1 names"):
        index_of(writer, tensors=1)


def test_as_many_pieces_as_the_index_has_bytes(tmp_path: Path) -> None:
    writer = with_pieces(tmp_path, (64,), rows((64,), 64))
    described = writer.metadata.state_dict_metadata
    for number in range(400):
        described[f"w{number}"] = described["w"]
    count = 401 * 64

    assert len(index_of(writer, nbytes=count).entries) == 401
    with pytest.raises(LimitExceeded, match="more pieces of tensors"):
        index_of(writer, nbytes=count - 1)


def test_as_many_keys_in_paths_as_the_index_has_bytes(tmp_path: Path) -> None:
    writer = with_pieces(tmp_path, (2,), [])
    described, planner = writer.metadata.state_dict_metadata, writer.metadata.planner_data
    assert planner is not None
    path = planner["w"] = ("k",) * 100
    for number in range(399):
        described[f"w{number}"], planner[f"w{number}"] = described["w"], path

    assert len(index_of(writer, nbytes=400 * 100).paths) == 400
    with pytest.raises(LimitExceeded, match="more keys in paths"):
        index_of(writer, nbytes=400 * 100 - 1)


@each(
    ("key", "is_one"),
    [(MAX_SIZE, False), (MAX_SIZE - 1, True), (1 - MAX_SIZE, True), (-MAX_SIZE, False), (True, False), (0, True)],
)
def test_keys_of_paths_are_of_64_bits(key: int, is_one: bool, tmp_path: Path) -> None:
    writer = with_pieces(tmp_path, (2,), [])
    writer.metadata.planner_data["w"] = ("list", key)  # type: ignore[index]

    assert index_of(writer).paths == ({"w": ("list", key)} if is_one else {})


def with_transforms(writer: Writer, count: int) -> None:
    stored: Any = next(iter(writer.metadata.storage_data.values()))
    stored.transform_descriptors = ["one"] * count


def with_arguments(writer: Writer, count: int) -> None:
    """Give the piece offsets that a call makes of so many arguments."""
    described: Any = writer.metadata.state_dict_metadata["w"]
    described.chunks[0].offsets = Reduced(torch.Size, ((0,), (0,))[:count])


def with_attributes(writer: Writer, count: int) -> None:
    described: Any = writer.metadata.state_dict_metadata["w"]
    for number in range(count - 2):
        setattr(described.chunks[0], f"more{number}", None)


def with_state(writer: Writer, count: int) -> None:
    """Give the piece a state of two parts, as objects with slots have."""
    described: Any = writer.metadata.state_dict_metadata["w"]
    fields = {"offsets": torch.Size([0]), "sizes": torch.Size([2])}
    fields |= {f"more{number}": None for number in range(count - 2)}
    described.chunks[0] = Reduced(SimpleNamespace, (), (None, fields))


@each(
    ("change", "count", "is_one"),
    [
        (with_transforms, 8, True),
        (with_transforms, 9, False),
        (with_arguments, 0, False),
        (with_arguments, 1, True),
        (with_arguments, 2, False),
        (with_attributes, 64, True),
        (with_attributes, 65, False),
        (with_state, 2, True),
        (with_state, 64, True),
        (with_state, 65, False),
    ],
)
def test_as_much_as_there_may_be_and_one_more(
    change: Callable[[Writer, int], None], count: int, is_one: bool, tmp_path: Path
) -> None:
    writer = Writer(tmp_path)
    writer.tensor("w", torch.ones(2))
    change(writer, count)
    if is_one:
        assert entry_of(writer).boxes == [((0,), (2,))]
    else:
        with pytest.raises(MalformedFile, match="no index of"):
            index_of(writer)


@each("kind", [tuple, list])
def test_as_many_dimensions_as_torch_has(kind: type, tmp_path: Path) -> None:
    for rank in (MAX_RANK, MAX_RANK + 1):
        shape, zeros = (2, *[1] * (rank - 1)), [0] * rank
        writer = with_pieces(tmp_path / str(rank), (2,), [])
        described: Any = writer.metadata.state_dict_metadata["w"]
        described.size = shape[:MAX_RANK]
        described.chunks = [ChunkStorageMetadata(kind(zeros), kind(shape))]
        if rank == MAX_RANK:
            assert entry_of(writer).boxes == [(tuple(zeros), shape)]
        else:
            with pytest.raises(MalformedFile, match="without offsets or sizes"):
                index_of(writer)


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
    found = entry_of(with_pieces(tmp_path, (4, 3), boxes))

    if words is None:
        assert found.fault is None
        assert found.boxes == sorted(boxes, key=lambda box: box[0])
    else:
        assert words in str(found.fault)


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
    found = entry_of(writer)

    assert [item and item.offset // 100 for item in found.items] == [at if at in listed else None for at in (0, 2, 4)]
    missing = 3 - len({0, 2, 4} & set(listed))
    assert (f"no item for {missing} piece" in str(found.fault)) == bool(missing)


def test_a_file_ends_where_the_last_of_its_items_does(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for name in ("a", "b", "c"):
        writer.tensor(name, torch.ones(2))
    stored = writer.metadata.storage_data
    nbytes = (tmp_path / "__0_0.distcp").stat().st_size
    for order in (list(stored.items()), list(reversed(stored.items()))):
        writer.metadata.storage_data = dict(order)
        (use,) = index_of(writer).files.values()
        assert (use.items, use.end, use.overlap) == (3, nbytes, None)
    assert list(ckptool.load(tmp_path)) == ["a", "b", "c"]
