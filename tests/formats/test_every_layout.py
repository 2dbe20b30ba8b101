"""What every layout of a folder promises, whichever it is; a new one in ``layouts_in_order()`` needs an example."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.tensor import Shard

import ckptool
from ckptool.formats import formats_in_order
from ckptool.formats.directories import layouts_in_order
from ckptool.sources.folder import FolderSource
from tests.formats.deepspeed_folder import Engine
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


def write_dcp(folder: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(
            {"up.weight": torch.randn(4, 4), "down": torch.randn(3), "state": {"a": 1}},
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
    "deepspeed_universal": Example(lambda folder: universal(Engine(1, 2), folder), "latest_universal"),
    "deepspeed": Example(lambda folder: Engine(2, 2, dtype=torch.bfloat16).save(folder), "latest"),
    "megatron": Example(
        lambda folder: megatron(folder, ["mp_rank_00", "mp_rank_01"], {"tensor_model_parallel_size": 2}),
        "latest_checkpointed_iteration.txt",
    ),
    "nanotron": Example(write_nanotron, "checkpoint_metadata.json"),
    "rank_files": Example(lambda folder: save_ranks(folder, (2,), (Shard(0),))),
    "torch_checkpointing": Example(write_indexed, "metadata.pkl"),
}
SEVERAL = {
    **LAYOUTS,
    "deepspeed, stage 3": Example(lambda folder: Engine(3, 2).save(folder), "latest"),
    "shards": Example(write_shards, "model.safetensors.index.json"),
}
FOLDER = TemporaryDirectory(prefix="ckptool-")

every_layout = pytest.mark.parametrize("name", SEVERAL)


def at(name: str) -> Path:
    """Return the folder of an example, which no test changes."""
    folder = Path(FOLDER.name, name)
    if not folder.exists():
        SEVERAL[name].write(folder)
    return folder


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
