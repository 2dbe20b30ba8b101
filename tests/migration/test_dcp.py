"""
Folders of torch.distributed.checkpoint: what torch writes for the same state dict, and what torch reads, bit by bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ckptool import CkptoolError, migrate, open_checkpoint
from ckptool.errors import DamagedFile, OutputFailed
from ckptool.migration import dcp_plan
from tests import build
from tests.migration import test_shards
from tests.migration.refused import refused
from tests.scale import exhaustive, in_turn, one_of_twins

FIXTURES = Path(__file__).parents[2] / "fixtures" / "valid"
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about its own


class Point(NamedTuple):
    x: int
    y: int


def training() -> dict[str, Any]:
    """Return what a training keeps, with everything in it that a flattened state dict can hold."""
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    flat = torch.randn(40)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "scores": [0.5, 0.25],
        "history": [1, 2, {"loss": torch.ones(2), 3: None}],
        "lists": [[[torch.arange(3)]], [4]],
        "parameter": model[0].weight,
        "turned": torch.randn(6, 4).t(),
        "views": {"a": flat[3:9], "b": flat[10:30].view(4, 5)[:, 1:3], "one": flat[:1].expand(3, 2)},
        "types": {str(one): torch.ones(3, 4).to(one) for one in TYPES},
        "empty": {"list": [], "tensor": torch.zeros(0, 3), "tensors": torch.zeros(2, 0)},
        "scalar": torch.tensor(2.5),
        "nothing": None,
        "text": "text",
        "flags": {True: 1, None: 2, 2.5: 3},
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
    }


TYPES = (
    *(torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64),
    *(torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2),
)


def assert_equal(found: Any, expected: Any, path: str = "") -> None:
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key in expected:
            assert_equal(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{path}.{number}")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert bits(found) == bits(expected), path
    else:
        assert found == expected, path


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist())


def as_torch_reads(folder: Path) -> Any:
    """Return the state dict that torch makes of a folder."""
    dcp_to_torch_save(str(folder), str(folder.parent / "read-by-torch.pth"))
    return torch.load(folder.parent / "read-by-torch.pth", weights_only=False)


def index_of(folder: Path) -> Metadata:
    return FileSystemReader(folder).read_metadata()


written = partial(test_shards.written, form="dcp")


# What torch writes


def test_it_says_what_torch_says_of_the_same_state_dict(tmp_path: Path) -> None:
    ours = written(training(), tmp_path)
    torch_save_to_dcp(str(tmp_path / "model.pth"), str(tmp_path / "theirs"))

    assert_equal(as_torch_reads(ours), as_torch_reads(tmp_path / "theirs"))
    one, other = index_of(ours), index_of(tmp_path / "theirs")
    assert one.planner_data == other.planner_data
    assert one.version == other.version
    assert list(one.state_dict_metadata) == list(other.state_dict_metadata)
    assert one.state_dict_metadata == other.state_dict_metadata
    assert one.storage_data.keys() == other.storage_data.keys()


def test_every_item_is_a_whole_file_of_torch_save(tmp_path: Path) -> None:
    out = written(training(), tmp_path)

    index, data = index_of(out), (out / "__0_0.distcp").read_bytes()
    position = 0
    for key, place in index.storage_data.items():
        assert (place.relative_path, place.offset) == ("__0_0.distcp", position)
        position += place.length
        (tmp_path / "item").write_bytes(data[place.offset : position])
        is_tensor = isinstance(index.state_dict_metadata[key.fqn], TensorStorageMetadata)
        item = torch.load(tmp_path / "item", weights_only=True)
        assert isinstance(item, torch.Tensor) == is_tensor
        if is_tensor:
            assert item.untyped_storage().nbytes() == item.numel() * item.itemsize
            assert (item.device.type, item.requires_grad, item.is_contiguous()) == ("cpu", False, True)
    assert position == len(data)


@pytest.mark.parametrize("most", [pytest.param(1, marks=exhaustive), 100])
def test_large_tensors_are_cut(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_plan, "_ITEM_NBYTES", most)
    tree = {**training(), "cube": torch.randn(3, 5, 7), "row": torch.arange(90).view(1, 90), "flat": torch.arange(77)}

    out = written(tree, tmp_path)

    torch_save_to_dcp(str(tmp_path / "model.pth"), str(tmp_path / "theirs"))
    assert_equal(as_torch_reads(out), as_torch_reads(tmp_path / "theirs"))
    for name, entry in index_of(out).state_dict_metadata.items():
        for chunk in entry.chunks if isinstance(entry, TensorStorageMetadata) else ():
            count = torch.Size(chunk.sizes).numel()
            assert count * entry.properties.dtype.itemsize <= most or count == 1, name
    with open_checkpoint(out) as ours, open_checkpoint(tmp_path / "model.pth") as source:
        for name, tensor in source.tensors.items():
            if name in ours.tensors:
                assert ours.tensors[name].read() == tensor.read(), name


@pytest.mark.parametrize("most", [60, 64 << 20])
def test_torch_loads_it_into_tensors(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_plan, "_ITEM_NBYTES", most)
    tree = training()
    out = written(tree, tmp_path)

    for key in ("model", "views", "types"):
        into = {key: {name: torch.zeros_like(tensor.contiguous()) for name, tensor in tree[key].items()}}
        torch_dcp.load(into, checkpoint_id=str(out), no_dist=True)
        assert_equal(into[key], {name: tensor.contiguous() for name, tensor in tree[key].items()})


LOADING = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.tensor import distribute_tensor, init_device_mesh, Shard, Replicate
rank, world, folder, place, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
expected = torch.load(place)
for mesh in ([(world,)] if world < 4 else [(world,), (2, 2)]):
    devices = init_device_mesh("cpu", mesh)
    for axis in range(3):
        for other in range(3) if len(mesh) == 2 else (0,):
            placements = [Shard(axis), Shard(other)][: len(mesh)]
            fit = {name: t for name, t in expected.items() if t.dim() > max(axis, other)}
            into = {name: distribute_tensor(torch.zeros_like(t), devices, placements) for name, t in fit.items()}
            dcp.load(into, checkpoint_id=folder)
            for name, t in fit.items():
                assert torch.equal(into[name].full_tensor(), t), (name, axis, other)
                assert torch.equal(into[name].to_local(), distribute_tensor(t, devices, placements).to_local())
dist.destroy_process_group()
print("loaded")
"""


@exhaustive
@pytest.mark.parametrize(("world", "most"), [(2, 64 << 20), (3, 100)])
def test_processes_load_their_parts(world: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_plan, "_ITEM_NBYTES", most)
    tree = {
        "cube": torch.randn(5, 6, 7),
        "table": torch.arange(90).view(9, 10),
        "turned": torch.randn(8, 6).t(),
        "flat": torch.randn(77).to(torch.bfloat16),
    }
    out = written(tree, tmp_path)
    command = [sys.executable, "-c", LOADING]
    place = tmp_path / "meeting"
    started = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(out), str(tmp_path / "model.pth"), str(place)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    for process in started:
        said, failed = process.communicate(timeout=300)
        assert said == "loaded\n", failed


# Every source


def openable() -> list[Path]:
    return sorted(path for path in FIXTURES.iterdir() if path.suffix in (".pth", ".pt", ".safetensors", ".ckpt"))


@pytest.mark.parametrize("path", one_of_twins(openable(), 8), ids=lambda path: path.name)
def test_every_fixture(path: Path, tmp_path: Path) -> None:
    try:
        report = migrate(path, tmp_path / "out", form="dcp")
    except CkptoolError as error:
        with pytest.raises(type(error)):
            migrate(path, tmp_path / "out.safetensors")
        assert list(tmp_path.iterdir()) == []
        return
    with open_checkpoint(tmp_path / "out") as found, open_checkpoint(path) as source:
        facts = report.after
        assert (facts.format, facts.form, facts.tensors) == (found.format, found.form, len(found.tensors))
        assert facts.dtypes == Counter(tensor.dtype for tensor in found.tensors.values())
        assert facts.devices == Counter(tensor.device for tensor in found.tensors.values())
        if report.weights_key is None:
            assert set(source.tensors) - set(report.dropped) <= set(found.tensors)
        for name, tensor in found.tensors.items():
            key = f"{report.weights_key}.{name}" if report.weights_key else name
            key = source.recorded.ties.get(key, key)
            if tensor.info.storage is not None and source.tensors[key].info.layout == "strided":
                assert tensor.read() == source.tensors[key].read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert as_torch_reads(tmp_path / "out")


def test_a_whole_model_gives_its_state_dict(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.BatchNorm1d(9))
    out = written(model, tmp_path)

    assert_equal(as_torch_reads(out), dict(model.state_dict()))
    assert index_of(out).planner_data == {name: (name,) for name in model.state_dict()}


def test_weights_alone_where_they_are_picked(tmp_path: Path) -> None:
    tree = training()
    assert_equal(as_torch_reads(written(tree, tmp_path, key="model")), dict(tree["model"]))


def test_a_model_beside_other_values_is_a_value(tmp_path: Path) -> None:
    tree = {"net": torch.nn.Linear(3, 2), "pair": (torch.ones(2), Point(1, 2)), "epoch": 3}
    torch.save(tree, tmp_path / "model.pth")

    report = migrate(tmp_path / "model.pth", tmp_path / "out", form="dcp")

    assert any("load as a whole: net, pair" in note for note in report.notes)
    back = as_torch_reads(tmp_path / "out")
    assert_equal(dict(back["net"].state_dict()), dict(tree["net"].state_dict()))
    assert_equal(back["pair"], tree["pair"])


def test_tensors_that_are_not_plain_are_values(tmp_path: Path) -> None:
    sparse = torch.eye(4).to_sparse()
    tree = {"sparse": sparse, "meta": torch.ones(2, device="meta"), "w": torch.ones(3)}

    back = as_torch_reads(written(tree, tmp_path))

    assert torch.equal(back["sparse"].to_dense(), sparse.to_dense())
    assert back["meta"].is_meta
    (tmp_path / "again").mkdir()
    weights = as_torch_reads(written(tree, tmp_path / "again", weights="raw"))
    assert torch.equal(weights["sparse"].to_dense(), sparse.to_dense())


def test_folders_are_sources_too(tmp_path: Path) -> None:
    tree = training()
    first = written(tree, tmp_path)

    migrate(first, tmp_path / "second", form="dcp")
    migrate(first, tmp_path / "shards", max_shard_size=300, key="model")
    migrate(tmp_path / "shards" / "model.safetensors.index.json", tmp_path / "third", form="dcp")
    without = migrate(first, form="dcp")

    assert_equal(as_torch_reads(tmp_path / "second"), as_torch_reads(first))
    assert_equal(as_torch_reads(tmp_path / "third"), dict(tree["model"]))
    assert Path(without.target).parent == tmp_path
    refused(first, first, form="dcp", force=True, match="the source")


# What else is asked for


@pytest.mark.parametrize(
    ("options", "most"),
    in_turn(
        [
            {"rename": [(r"^0\.", "first.")]},
            {"include": ["0.*"]},
            {"exclude": ["*.bias"], "strip_module": True},
            {"drop": ["optimizer", "history"]},
            {"dtype": "bfloat16", "keep_dtype": ["running"]},
            {"key": "model", "rename": [("^", "net.")], "dtype": "float64"},
        ],
        [40, 64 << 20],
    ),
)
def test_changes_are_as_for_one_file(
    options: dict[str, Any], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_plan, "_ITEM_NBYTES", most)
    out = written(training(), tmp_path, **options)
    report = migrate(tmp_path / "model.pth", tmp_path / "one.pth", **options)

    torch_save_to_dcp(str(tmp_path / "one.pth"), str(tmp_path / "theirs"))
    assert_equal(as_torch_reads(out), as_torch_reads(tmp_path / "theirs"))
    again = migrate(tmp_path / "model.pth", tmp_path / "dry", form="dcp", dry_run=True, **options)
    assert (again.renamed, len(again.casts)) == (report.renamed, len(report.casts))
    assert set(report.dropped) <= set(again.dropped)


def test_device_tags_are_those_of_values_alone(tmp_path: Path) -> None:
    stored = build.tensor(build.storage("0", 4, "FloatStorage", "cuda:0"), (4,))
    (tmp_path / "model.pth").write_bytes(build.torch_zip({"w": stored}, {"0": build.floats(4)}))

    report = migrate(tmp_path / "model.pth", tmp_path / "out", form="dcp", to="cuda:1")

    assert report.after.devices == {"cpu": 1}
    assert any("no device tags" in note for note in report.notes)
    assert as_torch_reads(tmp_path / "out")["w"].device.type == "cpu"


# What is refused


class System:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, ("true",)


def doubled(levels: int) -> Any:
    found: Any = {"w": 1}
    for _ in range(levels):
        found = {"a": found, "b": found}
    return found


def circle() -> Any:
    found: dict[str, Any] = {"w": torch.ones(1)}
    found["again"] = [found]
    return found


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "name-collision"),
        ({1: torch.ones(1), "1": 2}, "name-collision"),
        ({"a": {frozenset((1,)): torch.ones(1)}}, "unsupported-key"),
        ({"w": torch.ones(1), "call": System()}, "kept-calls"),
        ({"w": torch.ones(1), "call": [{"deep": (System(),)}]}, "kept-calls"),
        ([torch.ones(1)], "no-state-dict"),
        (circle(), "too-deep"),
        ({"w": torch.ones(1), "again": doubled(20)}, "repeated"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(tree: Any, kind: str, tmp_path: Path) -> None:
    torch.save(tree, tmp_path / "model.pth")
    error = refused(tmp_path / "model.pth", tmp_path / "out", form="dcp")

    assert error.kind in (kind, "which-weights", "ambiguous-name")


@pytest.mark.parametrize("most", [100, 64 << 20])
def test_a_damaged_storage_is_found(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_plan, "_ITEM_NBYTES", most)
    values = torch.arange(300.0)
    torch.save({"w": values, "v": torch.ones(50)[10:20]}, tmp_path / "model.pth")
    data = bytearray((tmp_path / "model.pth").read_bytes())
    data[data.index(bits(values)) + 777] ^= 4
    (tmp_path / "model.pth").write_bytes(data)

    refused(tmp_path / "model.pth", tmp_path / "out", form="dcp", error=DamagedFile)


@pytest.mark.parametrize("wrong", ["shape", "type", "name", "place"])
def test_an_index_that_is_not_what_was_meant_is_found(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(3, 4), "v": torch.ones(2)}, tmp_path / "model.pth")
    index = dcp_plan.index

    def wrongly(entries: Any, files: Any) -> bytes:
        ((file, _),) = files
        first, second = entries
        (item,), (other,), (dtype, shape, grad) = first.items, second.items, first.tensor
        if wrong == "shape":
            first = first._replace(tensor=(dtype, (4, 3), grad), items=[item._replace(box=((0, 0), (4, 3)))])
        elif wrong == "type":
            first = first._replace(tensor=(dtype._replace(name="int32"), shape, grad))
        elif wrong == "place":
            second = second._replace(items=[other._replace(nbytes=other.nbytes + 64)])
        return index(
            *{"name": ([second], [(file, [second])]), "place": (entries, [(file, [second, first])])}.get(
                wrong, ([first, second], [(file, [first, second])])
            )
        )

    monkeypatch.setattr(dcp_plan, "index", wrongly)
    refused(tmp_path / "model.pth", tmp_path / "out", form="dcp", kind="verification-failed")


def test_an_item_of_another_length_than_planned_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(3, 4)}, tmp_path / "model.pth")
    monkeypatch.setattr(dcp_plan, "torch_zip_nbytes", lambda *_: 5)

    refused(tmp_path / "model.pth", tmp_path / "out", form="dcp", match="5 were planned", error=OutputFailed)
