"""What every layout of a folder promises, whichever it is; a new one in ``layouts_in_order()`` needs an example."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.tensor import Shard

import ckptool
from ckptool import CkptoolError
from ckptool.formats import formats_in_order
from ckptool.formats.directories import layouts_in_order
from ckptool.sources.folder import FolderSource
from tests.formats.deepspeed_folder import Engine
from tests.formats.said import refused, run, said
from tests.formats.test_deepspeed_universal import universal
from tests.formats.test_hf_storage import CUT
from tests.formats.test_hf_storage import write as write_pieces
from tests.formats.test_nanotron import saved as write_nanotron
from tests.formats.test_rank_files import megatron, save_ranks
from tests.formats.test_torch_checkpointing import written as write_indexed


class Example(NamedTuple):
    write: Callable[[Path], object]
    """Writes the folder, which does not exist."""
    index: str = ""
    """The file that says what belongs together, if there is one: another program cannot load the folder without it."""
    whole: tuple[str, ...] = ()
    """Names of files that hold all weights, and so may be written as a model, although they are one of a set."""
    alone: tuple[str, ...] = ()
    """Names of files that no other file tells of: nothing can show that one is missing."""


def write_dcp(folder: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(
            {"up.weight": torch.randn(4, 4), "down": torch.randn(3)},
            checkpoint_id=folder,
            no_dist=True,
        )


def write_shards(folder: Path) -> None:
    folder.mkdir()
    names = {f"layers.{one}.weight": f"model-0000{one}-of-00002.safetensors" for one in (1, 2)}
    for name, file in names.items():
        save_file({name: torch.randn(4, 4)}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


LAYOUTS: dict[str, Example] = {
    "dcp": Example(write_dcp, ".metadata"),
    "dcp_safetensors": Example(lambda folder: write_pieces(folder, CUT)),
    "deepspeed_universal": Example(
        lambda folder: universal(Engine(1, 2, dtype=torch.bfloat16), folder), "latest_universal"
    ),
    "deepspeed": Example(lambda folder: Engine(2, 2).save(folder), "latest", whole=("mp_rank_00_model_states.pt",)),
    "megatron": Example(
        lambda folder: megatron(folder, ["mp_rank_00", "mp_rank_01"], {"tensor_model_parallel_size": 2}),
        "latest_checkpointed_iteration.txt",
    ),
    "nanotron": Example(write_nanotron, "checkpoint_metadata.json", alone=("model_weight.safetensors",)),
    "rank_files": Example(lambda folder: save_ranks(folder, (2,), (Shard(0),))),
    "torch_checkpointing": Example(write_indexed, "metadata.pkl"),
}
SEVERAL = {
    **LAYOUTS,
    "deepspeed, stage 3": Example(lambda folder: Engine(3, 2).save(folder), "latest"),
    "deepspeed, rounded": Example(lambda folder: Engine(1, 2, dtype=torch.bfloat16).save(folder), "latest"),
    "shards": Example(write_shards, "model.safetensors.index.json"),
}
FOLDER = TemporaryDirectory(prefix="ckptool-")

every_layout = pytest.mark.parametrize("name", SEVERAL)
with_index = pytest.mark.parametrize("name", [name for name, one in SEVERAL.items() if one.index])


def at(name: str) -> Path:
    """Return the folder of an example, which no test changes."""
    folder = Path(FOLDER.name, name)
    if not folder.exists():
        SEVERAL[name].write(folder)
    return folder


def copy(name: str, to: Path) -> Path:
    return Path(shutil.copytree(at(name), to / "copy"))


def files(folder: Path, *without: str) -> list[Path]:
    """Return one of the files of each name in and below a folder."""
    return list({one.name: one for one in folder.rglob("*") if one.is_file() and one.name not in without}.values())


def test_every_layout_has_an_example_that_it_is_the_first_to_recognise() -> None:
    layouts = list(layouts_in_order())
    for number, name in enumerate(LAYOUTS):
        places = [at(name), *(one for one in at(name).iterdir() if one.is_dir())]
        found = [next((layout for layout in layouts if layout.sniff(FolderSource(str(one)))), None) for one in places]
        assert layouts[number] in found, name
        with ckptool.open_checkpoint(at(name)) as checkpoint:
            assert checkpoint.format == name
    assert len(layouts) == len(LAYOUTS)


@every_layout
def test_no_loader_of_one_file_is_said_to_open_a_folder(name: str) -> None:
    report = ckptool.check(at(name))
    text = "\n".join([*report.loading, *(one.message for one in report.findings)])

    for one in formats_in_order():
        assert f"{one.TRAITS.call} opens it" not in text


@every_layout
def test_a_file_alone_is_said_to_be_a_part_and_not_written_as_a_whole(name: str, tmp_path: Path) -> None:
    example = SEVERAL[name]
    for path in files(at(name), example.index):
        try:
            with ckptool.open_checkpoint(path) as checkpoint:
                if not checkpoint.tensors:
                    continue
        except CkptoolError:
            continue
        assert said(path).get("CK160") == "warning", path
        if path.name not in example.whole:
            done = run("migrate", path, tmp_path / "a.safetensors")
            assert done.exit_code == 1, path


@with_index
def test_the_index_given_alone_leads_to_the_folder(name: str) -> None:
    folder = at(name)
    try:
        with ckptool.open_checkpoint(folder / SEVERAL[name].index) as found:
            leads_to = found.path if found.part_of is None else found.part_of.path
    except CkptoolError as error:
        leads_to = error.command or ""
    assert str(folder) in leads_to


@with_index
def test_an_index_that_is_cut_or_names_what_is_not_there_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    folder = copy(name, tmp_path)
    index = folder / SEVERAL[name].index
    data = index.read_bytes()
    for broken in (data[: len(data) // 2], *([] if data.startswith(b"\x80") else [b"", b"nowhere_7"])):
        index.write_bytes(broken)
        for path in (folder, index):
            assert index.name in str(refused(path)), broken


@pytest.mark.parametrize("name", [name for name in SEVERAL if name != "megatron"])  # whose ranks are not joined
def test_without_one_of_its_files_a_folder_is_an_error_or_the_same_weights(name: str, tmp_path: Path) -> None:
    folder = copy(name, tmp_path)
    whole = {key: tensor.shape for key, tensor in ckptool.load(folder).items()}
    for path in files(folder, *SEVERAL[name].alone):
        kept = path.read_bytes()
        path.unlink()
        with suppress(CkptoolError):
            assert {key: tensor.shape for key, tensor in ckptool.load(folder).items()} == whole, path
        path.write_bytes(kept)


def test_an_index_of_shards_is_not_edited_in_place(tmp_path: Path) -> None:
    index = copy("shards", tmp_path) / SEVERAL["shards"].index
    done = run("migrate", index, "--in-place", "--add-prefix", "x.")
    assert (done.exit_code, "it is in 2 files" in done.output) == (1, True)
