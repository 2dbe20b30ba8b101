"""Shards as huggingface_hub writes them: which tensor is in which file, what the index says, and what comes back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ckptool import CkptoolError, migrate, open_checkpoint
from ckptool.migration.changes import size_in_bytes
from tests.corpus.files import FOLDER
from tests.each import each
from tests.migration.refused import refused

INDEX = "model.safetensors.index.json"


def state_dict(*sizes: int) -> dict[str, torch.Tensor]:
    """Return tensors of so many bytes, named by their places."""
    return {f"layers.{place}.weight": torch.randint(99, (size,), dtype=torch.uint8) for place, size in enumerate(sizes)}


def written(content: Any, folder: Path, **options: Any) -> Path:
    torch.save(content, folder / "model.pth")
    report = migrate(folder / "model.pth", folder / "out", **options)
    assert report.verified
    assert [(file.name, file.nbytes) for file in report.files] == [
        (file.name, (folder / "out" / file.name).stat().st_size) for file in report.files
    ]
    assert {file.name for file in report.files} == {path.name for path in (folder / "out").iterdir()}
    assert report.nbytes == report.after.file_nbytes == sum(file.nbytes for file in report.files)
    return folder / "out"


def index_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return found


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return what the reference library finds, where the index says that it is."""
    found = {}
    for name, file in index_of(folder)["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


# How they are filled


@pytest.mark.parametrize(
    ("sizes", "shards"),
    [
        ((6, 6, 2, 6, 2, 2), [[0], [1, 2], [3, 4, 5]]),
        ((5, 5, 5), [[0, 1], [2]]),
        ((10, 1), [[0], [1]]),
        ((3, 11, 4), [[1], [0, 2]]),  # one that is too large stands before the one that is being filled
        ((11, 12), [[0], [1]]),
        ((4, 0, 6, 0, 1), [[0, 1, 2, 3], [4]]),
    ],
)
def test_shards_are_filled_in_order(sizes: tuple[int, ...], shards: list[list[int]], tmp_path: Path) -> None:
    tensors = state_dict(*sizes)

    out = written(tensors, tmp_path, max_shard_size=10)

    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    expected = {f"layers.{place}.weight": file for file, places in zip(files, shards, strict=True) for place in places}
    assert list(index_of(out)["weight_map"].items()) == list(expected.items())
    assert index_of(out)["metadata"] == {"total_size": sum(sizes)}
    assert_equal(tensors_in(out), tensors)


def test_what_fits_into_one_is_one_file_without_an_index(tmp_path: Path) -> None:
    tensors = state_dict(6, 4)

    out = written(tensors, tmp_path, max_shard_size=10)

    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    with safe_open(out / "model.safetensors", "pt") as opened:
        assert_equal({name: opened.get_tensor(name) for name in opened.keys()}, tensors)  # noqa: SIM118


def odd() -> dict[str, torch.Tensor]:
    shared, flat = torch.randn(7, 5), torch.randn(64)
    return {
        "z.embedding": shared,
        "a.half": torch.randn(33).to(torch.bfloat16),
        "b.turned": torch.randn(8, 6).t(),
        "c.number": torch.tensor(3),
        "d.empty": torch.zeros(0, 4),
        "head": shared,
        "e.view": flat[10:20],
        "f.view": flat[20:40].view(4, 5),
        "ä.ö": torch.ones(3, dtype=torch.bool),
        "g.float8": torch.ones(40).to(torch.float8_e4m3fn),
    }


@pytest.mark.parametrize("most", [1, 100, 200, 10_000])
def test_every_tensor_comes_back(most: int, tmp_path: Path) -> None:
    tensors = odd()
    out = written(tensors, tmp_path, max_shard_size=most)

    with open_checkpoint(out / (INDEX if most < 10_000 else "model.safetensors")) as found:
        assert found.recorded.ties == {"z.embedding": "head"}
        if most < 10_000:
            assert found.announced_nbytes == sum(tensor.nbytes for tensor in found.tensors.values())
            kept = {name: tensor for name, tensor in tensors.items() if name != "z.embedding"}
            assert_equal(tensors_in(out), kept)
    migrate(out / (INDEX if most < 10_000 else "model.safetensors"), tmp_path / "back.pth")
    back = torch.load(tmp_path / "back.pth")
    assert list(back) == list(tensors)  # the order, too
    assert_equal(back, tensors)
    assert back["head"].data_ptr() == back["z.embedding"].data_ptr()


def test_a_model_and_its_modules_versions_come_back(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 2))
    out = written(model.state_dict(), tmp_path, max_shard_size="150B")

    migrate(out / INDEX, tmp_path / "back.pth")

    back = torch.load(tmp_path / "back.pth")
    assert back._metadata == model.state_dict()._metadata
    model.load_state_dict(back)


def test_it_is_what_huggingface_hub_writes(tmp_path: Path) -> None:
    reference = pytest.importorskip("huggingface_hub", reason="the reference library is not installed")
    contiguous = {name: tensor.contiguous() for name, tensor in odd().items() if "view" not in name}
    contiguous["head"] = contiguous["z.embedding"]
    for most in ("60B", "150B", "0.2KB", "1MB"):
        folder = tmp_path / most
        folder.mkdir()
        (folder / "reference").mkdir()
        out = written(contiguous, folder, max_shard_size=most)
        reference.save_torch_state_dict(contiguous, folder / "reference", max_shard_size=size_in_bytes(most))

        names = {path.name for path in (folder / "reference").iterdir()}
        assert {path.name for path in out.iterdir()} == names
        if INDEX in names:
            assert (out / INDEX).read_bytes() == (folder / "reference" / INDEX).read_bytes()
        for name in names - {INDEX}:
            with safe_open(out / name, "pt") as ours, safe_open(folder / "reference" / name, "pt") as theirs:
                assert set(ours.keys()) == set(theirs.keys())


def test_shards_of_shards(tmp_path: Path) -> None:
    folder = FOLDER.with_name("corpus-dirs") / "hf-shards"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    before = index_of(folder)

    migrate(folder / INDEX, tmp_path / "out", max_shard_size="9KB")

    after = index_of(tmp_path / "out")
    assert after["metadata"]["total_size"] == before["metadata"]["total_size"]
    assert_equal(tensors_in(tmp_path / "out"), tensors_in(folder))
    assert len(set(after["weight_map"].values())) == 4


# What else is asked for


def test_names_types_and_choices_are_as_for_one_file(tmp_path: Path) -> None:
    tree = {"model": {f"module.{name}": tensor for name, tensor in odd().items()}, "epoch": 3}
    options: dict[str, Any] = {
        "key": "model",
        "strip_module": True,
        "dtype": "float16",
        "exclude": ["module.[cd].*"],
        "keep_dtype": ["float8"],
    }
    out = written(tree, tmp_path, max_shard_size=100, **options)
    report = migrate(tmp_path / "model.pth", tmp_path / "one.safetensors", **options)

    with safe_open(tmp_path / "one.safetensors", "pt") as opened:
        assert_equal(tensors_in(out), {name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    assert len(report.dropped) == 3


@each(
    ("text", "nbytes"),
    [
        *(("5GB", 5 * 10**9), ("5GiB", 5 << 30), ("5 gb", 5 * 10**9), ("1.5KB", 1500), ("0.5KiB", 512), ("7B", 7)),
        *(("2TB", 2 * 10**12), ("70mib", 70 << 20), ("2K", 2000), ("5g", 5 * 10**9), (123, 123)),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert size_in_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "5", "5.5", "5XB", "5KI", "-5GB", "0", "0.1", "1e9", "5GBB", "5 G B", "nan", 0, -1, "9" * 40]
)
def test_no_sizes(text: str | int, tmp_path: Path) -> None:
    torch.save(state_dict(3), tmp_path / "model.pth")
    refused(tmp_path / "model.pth", tmp_path / "out", max_shard_size=text, kind="not-a-size")


def test_too_many_shards_to_be_read_are_refused(tmp_path: Path) -> None:
    torch.save(state_dict(*([2] * 1001)), tmp_path / "model.pth")
    error = refused(tmp_path / "model.pth", tmp_path / "out", max_shard_size=2, match="1,001 shards")

    assert error.option == "max_shard_size"


@pytest.mark.parametrize("form", ["state_dict", "same", "model"])
def test_files_of_torch_are_no_shards(form: Any, tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2) if form == "model" else state_dict(3), tmp_path / "model.pth")
    refused(tmp_path / "model.pth", tmp_path / "out", form=form, max_shard_size=10, kind="contradiction")


def test_a_dry_run_names_the_files_and_writes_none(tmp_path: Path) -> None:
    torch.save(state_dict(6, 6, 2), tmp_path / "model.pth")
    dry = migrate(tmp_path / "model.pth", tmp_path / "out", max_shard_size=10, dry_run=True)

    assert not (tmp_path / "out").exists()
    assert migrate(tmp_path / "model.pth", tmp_path / "out", max_shard_size=10).files == dry.files
    assert re.search(r"files +model-00001-of-00002.safetensors, \d+ B\n +model-00002-of-00002", str(dry))


# What lies beside the weights of a model


@pytest.mark.parametrize("size", ["1KB", 30])
def test_settings_and_tokenizer_go_along(size: int | str, tmp_path: Path) -> None:
    base, tensors = tmp_path / "base", {"a": torch.ones(4), "b": torch.ones(4)}
    base.mkdir()
    settings = {"dtype": "float32", "text_config": {"torch_dtype": "float32"}, "quantization_config": {"dtype": "int8"}}
    (base / "config.json").write_text(json.dumps(settings))
    for name in ("tokenizer.json", "merges.txt", "modeling_x.py", "pytorch_model.bin", "optimizer.pt"):
        (base / name).write_text(name)

    folder = written(tensors, tmp_path, max_shard_size=size, config_from=str(base))
    assert (folder / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert (folder / "tokenizer.json").read_text() == "tokenizer.json"
    assert not {"modeling_x.py", "pytorch_model.bin", "optimizer.pt"} & {path.name for path in folder.iterdir()}

    cast = migrate(tmp_path / "model.pth", tmp_path / "cast", max_shard_size=size, config_from=str(base), dtype="bf16")
    changed = settings | {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16"}}
    assert json.loads((tmp_path / "cast" / "config.json").read_text()) == changed
    assert not [note for note in cast.notes if "stay there" in note]


def test_settings_that_stay_behind_are_told_of(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4)}, tmp_path / "model.pth")
    (tmp_path / "config.json").write_text("{}")

    notes = migrate(tmp_path / "model.pth", tmp_path / "out", max_shard_size="1KB").notes
    assert f"config.json beside the source stay there: `config_from={str(tmp_path)!r}` takes them along" in notes


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"max_shard_size": 9, "config_from": "gone"}, "no such"),
        ({"max_shard_size": 9, "config_from": "empty"}, "has no settings of a model"),
        ({"config_from": "empty"}, "folder of shards"),
        ({"config_from": "empty", "form": "dcp"}, "folder of shards"),
    ],
)
def test_settings_that_cannot_go_along_are_refused(
    options: dict[str, Any], fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(4)}, "model.pth")
    Path("empty").mkdir()

    with pytest.raises(CkptoolError, match=fact):
        migrate("model.pth", "out", **options)
    assert not Path("out").exists()
