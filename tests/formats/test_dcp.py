"""Folders of torch.distributed.checkpoint: what its own loader gives, and what is said of those that are broken."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckptool
from ckptool.errors import CkptoolError, FileUnavailable, LimitExceeded, MalformedFile
from tests.each import each
from tests.formats import dcp_ranks
from tests.formats.dcp_folder import Writer, grid, rows, sharded, tensors
from tests.formats.said import refused, wrong
from tests.scale import exhaustive


def by_torch(folder: Path) -> dict[str, Any]:
    """Return the state dict that torch's own loader makes of a folder, in one process."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=dcp.FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return state


def flat(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield path, state
    pairs = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in pairs:
        yield from flat(value, f"{path}.{key}" if path else str(key))


def same_as_torch(folder: Path) -> None:
    expected = dict(flat(by_torch(folder)))
    assert expected
    with ckptool.open_checkpoint(folder) as opened:
        assert set(opened.tensors) == set(expected)
        for name, tensor in expected.items():
            found = opened.tensors[name].torch()
            assert found.dtype == tensor.dtype, name
            assert torch.equal(found, tensor), name


def save(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


def one_tensor(folder: Path) -> Writer:
    """Return a writer of a folder with one tensor, which has one item."""
    writer = Writer(folder)
    writer.tensor("w", torch.ones(4))
    return writer


def stored(writer: Writer) -> Any:
    """Return what the index says of the first item."""
    return next(iter(writer.metadata.storage_data.values()))


def training() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.randn(3, 5)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "metrics": {"a.b": {7: torch.ones(2)}},
    }


@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}, {"thread_count": 3}], ids=str)
def test_a_save_of_one_process(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = save(training(), tmp_path / "saved", **options)
    same_as_torch(folder)
    with ckptool.open_checkpoint(folder) as opened:
        assert opened.format == "dcp"
        assert [one.role for one in opened.state_dicts[:2]] == ["model", "optimizer"]
        assert dict(opened.extras)["epoch"] == 3
    report = ckptool.check(folder, deep=True)
    assert not wrong(report)
    assert report.intact == report.parts > 10
    assert "match their checksums" in report.verdict


def test_pieces_of_many_shapes(tmp_path: Path) -> None:
    folder, found = sharded(tmp_path / "saved")
    same_as_torch(folder)
    assert set(found) <= set(ckptool.open_checkpoint(folder).tensors)


STRIDED = [((0, 0), (7, 10)), ((14, 0), (7, 10)), ((7, 0), (7, 10)), ((21, 0), (2, 10))]


@pytest.mark.parametrize(
    "boxes", [grid((23, 10), 2, 2), grid((23, 10), 3, 4), rows((23, 10), 24), [*rows((23, 10), 4)][::-1], STRIDED]
)
def test_a_matrix_cut_in_boxes(tmp_path: Path, boxes: Any) -> None:
    writer = Writer(tmp_path / "saved")
    writer.tensor("w", tensors()["model.weight"], boxes)
    same_as_torch(writer.close())


def test_a_transposed_piece(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "saved")
    whole = torch.randn(6, 8)
    writer.tensor("w", whole, rows((6, 8), 2, 1))
    for index in list(writer.metadata.storage_data):
        piece = whole[:, index.offset[1] : index.offset[1] + 4].t().contiguous().t()
        writer.item("__9_0.distcp", index, piece)
    same_as_torch(writer.close())


def test_no_planner_data(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "saved")
    writer.metadata.planner_data = None
    writer.tensor("decoder.weight", torch.randn(6, 4), rows((6, 4), 2))
    writer.value("decoder.extra/shard_0_1", {"a": 1})
    torch.save({"iteration": 100, "checkpoint_version": 3.0}, writer.folder / "common.pt")
    with ckptool.open_checkpoint(writer.close()) as opened:
        assert list(opened.tensors) == ["decoder.weight"]
        extras = dict(opened.extras)
        assert (extras["iteration"], extras["checkpoint_version"]) == (100, 3.0)
        assert "decoder.extra/shard_0_1" in extras


def test_lightnings_values_belong_to_the_tree(tmp_path: Path) -> None:
    folder, _ = sharded(tmp_path / "saved")
    torch.save({"global_step": 12, "epoch": 9, "loops": {}}, folder / "meta.pt")
    with ckptool.open_checkpoint(folder) as opened:
        extras = dict(opened.extras)
    assert extras["global_step"] == 12
    assert (extras["epoch"], extras["meta.pt.epoch"]) == (3, 9)
    (folder / "meta.pt").write_bytes(b"no checkpoint")
    report = ckptool.check(folder)
    assert wrong(report) == ["CK143"]
    assert "meta.pt" in report.findings[0].message


def test_whole_state_dicts_in_one_item(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    state = {"model": {"w": torch.randn(3, 2), "b": torch.ones(2)}, "top": torch.arange(4)}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, planner=planner, no_dist=True)
    with ckptool.open_checkpoint(folder) as opened:
        assert torch.equal(opened.tensors["model.w"].torch(), state["model"]["w"])
        assert torch.equal(opened.tensors["top"].torch(), state["top"])


def test_ranks_that_saved_for_themselves(tmp_path: Path) -> None:
    whole, shared = torch.randn(8, 3), torch.randn(4)
    for rank in range(2):
        writer = Writer(tmp_path / "saved")
        for name, tensor, boxes in (("w", whole, rows((8, 3), 2)), ("buffer", shared, None)):
            chosen = boxes[rank : rank + 1] if boxes else None
            own = Writer(tmp_path / f"of-{rank}-{name}")
            own.tensor(name, tensor, chosen)
            entry = own.metadata.state_dict_metadata[name]
            for chunk in entry.chunks:
                piece = tensor[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))]
                writer.item(
                    f"__{rank}_0.distcp",
                    MetadataIndex(name, chunk.offsets, 0),
                    piece.clone() + (rank and name == "buffer"),
                )
            writer.metadata.state_dict_metadata[name] = entry
        writer.value("epoch", 3, f"__{rank}_0.distcp")
        writer.close(f"__{rank}.metadata")
    folder = tmp_path / "saved"
    with ckptool.open_checkpoint(folder) as opened:
        assert torch.equal(opened.tensors["w"].torch(), whole)
        assert torch.equal(opened.tensors["buffer"].torch(), shared)
    report = ckptool.check(folder)
    assert not wrong(report)
    assert "complete as far as the files tell" in str(report)
    deep = ckptool.check(folder, deep=True)
    assert wrong(deep) == ["CK144"]
    assert "'buffer'" in str(deep)
    (folder / "__0.metadata").unlink()
    broken = ckptool.check(folder)
    assert {"CK140", "CK141", "CK142"} == set(wrong(broken))


def test_an_old_index_has_dicts_and_no_storage_meta(tmp_path: Path) -> None:
    folder, found = sharded(tmp_path / "saved")
    metadata = pickle.loads((folder / ".metadata").read_bytes())

    class Old(pickle.Pickler):
        def reducer_override(self, thing: Any) -> Any:
            if type(thing).__name__ == "TensorProperties":
                return object.__new__, (type(thing),), {"dtype": thing.dtype, "requires_grad": False}
            return NotImplemented

    del metadata.__dict__["storage_meta"]
    with (folder / ".metadata").open("wb") as file:
        Old(file, protocol=2).dump(metadata)
    with ckptool.open_checkpoint(folder) as opened:
        assert torch.equal(opened.tensors["model.weight"].torch(), found["model.weight"])


# What is broken


def test_a_missing_file_hides_nothing_else(tmp_path: Path) -> None:
    folder, found = sharded(tmp_path / "saved")
    (folder / "__2_0.distcp").unlink()
    with ckptool.open_checkpoint(folder) as opened:
        assert opened.tensors["model.weight"].shape == (23, 10)
        assert torch.equal(opened.tensors["model.flags"].torch(), found["model.flags"])
        with pytest.raises(FileUnavailable, match="__2_0"):
            opened.tensors["model.weight"].read()
    report = ckptool.check(folder)
    assert wrong(report) == ["CK140"]
    assert "'__2_0.distcp': no such file; 4 items of 4 names were in it: model.weight" in report.findings[0].message
    for form in ("state_dict", "same", "safetensors"):
        with pytest.raises(CkptoolError, match="__2_0"):
            ckptool.migrate(folder, tmp_path / "out", form=form)
    refused(folder, match="__2_0", by=ckptool.load)
    assert not (tmp_path / "out").exists()
    ckptool.migrate(folder, tmp_path / "flags.safetensors", form="safetensors", include=["flags", "steps"])


def test_a_missing_file_with_values(tmp_path: Path) -> None:
    writer = one_tensor(tmp_path / "saved")
    writer.value("epoch", 3, "__1_0.distcp")
    folder = writer.close()
    (folder / "__1_0.distcp").unlink()
    assert ckptool.load(folder)["w"].tolist() == [1, 1, 1, 1]
    assert wrong(folder) == ["CK140"]
    with pytest.raises(CkptoolError, match="epoch"):
        ckptool.migrate(folder, tmp_path / "out.pt", form="same")


def test_a_file_that_is_too_short(tmp_path: Path) -> None:
    folder, found = sharded(tmp_path / "saved")
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    report = ckptool.check(folder)
    assert wrong(report) == ["CK140", "CK209"]
    assert "'__1_0.distcp' is truncated" in report.findings[0].message
    assert "1 item of 1 name" in report.findings[0].message
    with ckptool.open_checkpoint(folder) as opened:
        assert torch.equal(opened.tensors["model.weight"].torch(), found["model.weight"])


def test_an_unfinished_save(tmp_path: Path) -> None:
    folder, _ = sharded(tmp_path / "saved")
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    refused(folder, FileUnavailable, r"in 4 files without its index: there is no .metadata, but .metadata.tmp")
    assert ckptool.check(folder).worst == "error"


def test_holes_and_overlaps_are_of_their_tensor_alone(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "saved")
    writer.tensor("hole", torch.randn(8, 3), [((0, 0), (4, 3)), ((5, 0), (3, 3))])
    writer.tensor("overlap", torch.randn(8, 3), [((0, 0), (5, 3)), ((4, 0), (4, 3))])
    writer.tensor("outside", torch.randn(8, 3), [((0, 0), (8, 3))])
    writer.metadata.state_dict_metadata["outside"].size = torch.Size((7, 3))
    writer.tensor("right", torch.ones(3))
    folder = writer.close()
    report = ckptool.check(folder)
    assert wrong(report) == ["CK141"] * 3
    assert "'hole' has a hole" in str(report)
    assert "'overlap': two pieces overlap" in str(report)
    with ckptool.open_checkpoint(folder) as opened:
        assert opened.tensors["right"].torch().tolist() == [1, 1, 1]
        for name in ("hole", "overlap", "outside"):
            with pytest.raises(MalformedFile):
                opened.tensors[name].read()


def test_what_an_earlier_save_left(tmp_path: Path) -> None:
    folder, _ = sharded(tmp_path / "saved")
    shutil.copy(folder / "__3_0.distcp", folder / "__4_0.distcp")
    report = ckptool.check(folder)
    assert wrong(report) == ["CK142"]
    assert "__4_0.distcp" in report.findings[0].message


def test_items_of_another_save(tmp_path: Path) -> None:
    folder, _ = sharded(tmp_path / "saved")
    other = Writer(tmp_path / "other")
    other.value("epoch", 3)
    other.value("note", "words")
    for name, tensor in tensors().items():
        other.tensor(name, tensor.to(torch.float32), None)
    other.close()
    data = (other.folder / "__0_0.distcp").read_bytes()
    size = (folder / "__0_0.distcp").stat().st_size
    (folder / "__0_0.distcp").write_bytes(data.ljust(size, b"\0")[: max(size, len(data))])
    report = ckptool.check(folder, deep=True)
    assert "CK143" in wrong(report)


def test_an_item_of_another_type(tmp_path: Path) -> None:
    writer = one_tensor(tmp_path / "saved")
    writer.metadata.state_dict_metadata["w"].properties.dtype = torch.int32
    report = ckptool.check(writer.close(), deep=True)
    assert wrong(report) == ["CK143"]
    assert "is of float32, not int32" in str(report)
    assert report.intact == 0


def test_values_of_any_size_are_read(tmp_path: Path) -> None:
    values = {"large": [f"text {number}" for number in range(20_000)], "small": 3, "same": 3, "nested": {"a": [1, 2]}}
    writer = one_tensor(tmp_path / "saved")
    for name, value in values.items():
        writer.value(name, value)
    folder = writer.close()
    assert values == {name: one for name, one in by_torch(folder).items() if name != "w"}
    ckptool.migrate(folder, tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth")
    assert {name: found[name] for name in values} == values


def test_an_item_that_is_no_tensor_and_a_value_that_is_no_file_of_torch(tmp_path: Path) -> None:
    writer = one_tensor(tmp_path / "saved")
    writer.value("step", 3)
    writer.item("__0_0.distcp", MetadataIndex("w", torch.Size([0]), 0), {"not": "a tensor"})
    text = b"{}      "
    stored = writer.metadata.storage_data[MetadataIndex("step")]
    stored.offset, stored.length = (writer.folder / stored.relative_path).stat().st_size, len(text)
    with (writer.folder / stored.relative_path).open("ab") as file:
        file.write(text)
    with ckptool.open_checkpoint(writer.close()) as opened:
        with pytest.raises(MalformedFile, match=r"the item of 'w' in '__0_0\.distcp' is not a tensor"):
            opened.tensors["w"].read()
        assert not opened.extras
    report = ckptool.check(writer.folder)
    assert next(one.message for one in report.findings if one.code == "CK143").startswith("the item of 'step' in")


def test_a_flipped_byte_is_found_and_named(tmp_path: Path) -> None:
    folder, _ = sharded(tmp_path / "saved", 2)
    with ckptool.open_checkpoint(folder) as opened:
        infos = [opened.tensors["model.weight"].info, opened.tensors["model.wide"].info]
        places = []
        for info in infos:
            piece = info.storage.source.info(1)
            places.append(piece.storage.file_offset)
    path = folder / "__1_0.distcp"
    data = path.read_bytes()
    for name, place in zip(("model.weight", "model.wide"), places, strict=True):
        path.write_bytes(data[: place + 5] + bytes([data[place + 5] ^ 4]) + data[place + 6 :])
        report = ckptool.check(folder, deep=True)
        assert wrong(report) == ["CK105"]
        assert f"item of {name!r} at [" in report.findings[-1].message or f"item of {name!r} at [" in str(report)
        assert "'__1_0.distcp'" in str(report)
        assert report.intact == report.parts - 1
        with pytest.raises(CkptoolError, match="damaged"):
            ckptool.migrate(folder, tmp_path / "out.safetensors", form="safetensors", key="model")


# What is hostile


class _Command:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("echo ran",)


def test_hostile_names_in_the_index_and_in_a_value(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    index, value = one_tensor(tmp_path / "index"), one_tensor(tmp_path / "value")
    index.metadata.storage_meta = _Command()
    value.value("extra", {"a": _Command()})
    report = ckptool.check(index.close())
    assert wrong(report) == ["CK204", "CK205"]
    assert "system" in report.loading[0]
    with ckptool.open_checkpoint(index.folder) as opened:
        opened.tensors["w"].read()
    report = ckptool.check(value.close(), deep=True)
    assert "CK205" in wrong(report)
    assert "extra" in str(report)
    assert "ran" not in capfd.readouterr().out


def test_a_plain_folder_is_nothing_to_warn_of(tmp_path: Path) -> None:
    report = ckptool.check(save(training(), tmp_path / "saved"))
    assert [one.code for one in report.findings] == ["CK202"]
    (loading,) = report.loading
    assert loading.startswith("torch.distributed.checkpoint.load() unpickles its index and its values")
    assert "only makes data" in loading


@each("name", ["../outside.distcp", "/etc/passwd", "a/../../b", "", "x\0y", "..", "a\\b"])
def test_a_name_that_leads_out(tmp_path: Path, name: str) -> None:
    writer = one_tensor(tmp_path / "saved")
    stored(writer).relative_path = name
    refused(writer.close(), MalformedFile, "cannot be the name of a file")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder, _ = sharded(tmp_path / "saved")
    (folder / "__1_0.distcp").rename(tmp_path / "elsewhere")
    (folder / "__1_0.distcp").symlink_to(tmp_path / "elsewhere")
    report = ckptool.check(folder)
    assert wrong(report) == ["CK149", "CK209"]
    assert "a link" in report.findings[0].message
    assert "cp -rL" in str(report.findings[0].hint)
    assert "cp -rL" in str(refused(folder, FileUnavailable, "a link", by=ckptool.load).hint)


def test_links_of_the_hub_into_its_blobs_are_followed(tmp_path: Path) -> None:
    folder, whole = sharded(tmp_path / "models--a--b" / "snapshots" / ("0" * 40))
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{number:064x}")
        file.symlink_to(f"../../blobs/{number:064x}")
    assert ckptool.check(folder, deep=True).worst in (None, "info")
    for name, tensor in ckptool.load(folder).items():
        assert torch.equal(tensor, whole[f"model.{name}"])


def test_an_index_of_something_else_beside_those_of_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        writer = Writer(tmp_path)
        writer.value(f"value{rank}", rank, f"__{rank}_0.distcp")
        writer.close(f"__{rank}.metadata")
    (tmp_path / ".metadata").write_bytes(b"something else")
    assert "2 ranks saved without an index of all" in str(ckptool.check(tmp_path))


def test_a_length_beyond_the_file(tmp_path: Path) -> None:
    writer = one_tensor(tmp_path / "saved")
    stored(writer).length = 1 << 62
    assert wrong(writer.close()) == ["CK140", "CK209"]


@pytest.mark.parametrize("transform", ["stream.rot13", "stream.zstd/9", "aes/1"])
def test_an_unknown_transform(tmp_path: Path, transform: str) -> None:
    writer = one_tensor(tmp_path / "saved")
    stored(writer).transform_descriptors = [transform]
    with ckptool.open_checkpoint(writer.close()) as opened:
        assert opened.tensors["w"].shape == (4,)
        with pytest.raises(CkptoolError, match=transform):
            opened.tensors["w"].read()
    assert "CK143" in wrong(ckptool.check(writer.folder, deep=True))


def test_a_million_chunks_take_bounded_time(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "saved")
    writer.tensor("w", torch.ones(4), rows((4,), 2))
    entry = writer.metadata.state_dict_metadata["w"]
    entry.chunks = entry.chunks * 20_000
    started = time.process_time()
    report = ckptool.check(writer.close())
    assert wrong(report) == ["CK141"]
    assert time.process_time() - started < 10


@each(("field", "value"), product(["state_dict_metadata", "storage_data"], [None, 3, [1], {1: 2}, {"w": 3}]))
def test_an_index_that_is_none(tmp_path: Path, field: str, value: Any) -> None:
    writer = one_tensor(tmp_path / "saved")
    setattr(writer.metadata, field, value)
    refused(writer.close())


# Extensions


def test_zstd_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    writer = Writer(tmp_path / "saved")
    writer.tensor("w", torch.ones(4), changed=lambda data: data)
    with ckptool.open_checkpoint(writer.close()) as opened:
        assert opened.tensors["w"].shape == (4,)
        with pytest.raises(ckptool.errors.MissingPackage, match=r'pip install "ckptool\[zstd\]"'):
            opened.tensors["w"].read()


def test_zstd(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    pack = zstandard.ZstdCompressor().compress
    writer = Writer(tmp_path / "saved")
    whole = torch.randn(23, 10)
    writer.tensor("w", whole, rows((23, 10), 3), changed=pack)
    with ckptool.open_checkpoint(writer.close()) as opened:
        assert torch.equal(opened.tensors["w"].torch(), whole)
    assert not wrong(ckptool.check(writer.folder, deep=True))
    bomb = Writer(tmp_path / "bomb")
    bomb.tensor("w", torch.zeros(40 << 20), changed=pack)
    with pytest.raises(LimitExceeded), ckptool.open_checkpoint(bomb.close()) as opened:
        opened.tensors["w"].read()


@exhaustive
@pytest.mark.parametrize(("world", "kinds"), [(2, dcp_ranks.KINDS[0::2]), (4, dcp_ranks.KINDS[1::2])])
def test_what_several_processes_save(tmp_path: Path, world: int, kinds: tuple[str, ...]) -> None:
    dcp_ranks.save(tmp_path, world, *kinds)
    for kind in kinds:
        is_as_it_was_saved(tmp_path / kind, kind)


def is_as_it_was_saved(folder: Path, kind: str) -> None:
    if kind in ("ranks", "safetensors"):  # of which torch has no loader for one process without a state dict
        weights = ckptool.load(folder)
        names = {name.removeprefix("model.") for name in weights}
        assert {"0.weight", "1.running_mean", "2.bias"} <= names
    else:
        same_as_torch(folder)
    report = ckptool.check(folder, deep=True)
    assert not [one for one in report.findings if one.severity == "error"]
    ckptool.migrate(folder, folder.with_name(f"{kind}.safetensors"))
    ckptool.migrate(folder, folder.with_name(f"{kind}.pt"), form="state_dict")


@pytest.mark.parametrize("backend", ["torch", "other"])
def test_values_that_megatron_keeps_beside_are_missed(tmp_path: Path, backend: str) -> None:
    folder, _ = sharded(tmp_path / "saved")
    said = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": backend}
    (folder / "metadata.json").write_text(json.dumps(said))
    assert wrong(folder) == (["CK140"] if backend == "torch" else [])
    torch.save({"iteration": 7}, folder / "common.pt")
    assert wrong(folder) == []
