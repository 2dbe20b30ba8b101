"""Files that strangers published: each opens, or is named for what it is. Skipped where the folder is not there."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckptool import (
    Checkpoint,
    CkptoolError,
    FileUnavailable,
    NotACheckpoint,
    TensorInfo,
    TruncatedFile,
    open_checkpoint,
)
from tests.against_torch import oracle
from tests.corpus.files import FOLDER, MARKS, ROWS, name_of
from tests.scale import some

pytestmark = MARKS

# What the manifest calls them → the error that says so.
NO_CHECKPOINTS: dict[str, tuple[type[CkptoolError], str]] = {
    "zip (truncated: no central directory)": (TruncatedFile, "truncated-zip"),
    "text": (NotACheckpoint, "site-pth"),
    "broken: HTML/XML page": (NotACheckpoint, "html"),
    "broken: git-lfs pointer": (NotACheckpoint, "lfs-pointer"),
    "HF shard index.json": (FileUnavailable, "missing-shards"),
    "gzip:tar": (NotACheckpoint, "archive"),
    "gzip:tar > broken: empty file": (TruncatedFile, "empty"),
    "broken: empty file": (TruncatedFile, "empty"),
}

FORMATS = {
    "zip (torch>=1.6)": "torch_zip",
    "legacy (torch<1.6 stream)": "torch_legacy",
    "torchscript zip": "torchscript",
    "zip with __torch__ classes but no code/": "torchscript",
    "gzip:tar > legacy (torch<1.6 stream)": "torch_legacy",
    "gzip:tar > zip (torch>=1.6)": "torch_zip",
    "stable-baselines3 zip": "torch_zip",
    "safetensors": "safetensors",
    "torch.export .pt2": "pt2",
    "0.1.x tar": "torch_tar",
    "plain pickle": "pickle",
}

# Where the manifest is wrong, and what is right: (tensors, storages, devices).
MANIFEST_IS_WRONG = {
    # It did not look into constants.pkl, which holds one tensor more.
    "files/snakers4__silero-vad/files__silero_vad.jit": (127, 113, {"cpu": 113}),
    # It counted no storages in a 0.1.x tar; there are eight, of four parameters and their gradients.
    "files/spro__practical-pytorch/char-rnn-classification__char-rnn-classification.pt": (8, 8, {"cpu": 8}),
}


def rows_of(*, readable: bool) -> list[dict[str, Any]]:
    return [row for row in ROWS if (row["container"] not in NO_CHECKPOINTS) == readable]


def checkpoint_of(row: dict[str, Any]) -> Checkpoint:
    return open_checkpoint(FOLDER / row["file"])


def infos_of(checkpoint: Checkpoint) -> Iterator[TensorInfo]:
    todo = [tensor.info for tensor in (*checkpoint.tensors.values(), *checkpoint.attributes.values())]
    while todo:
        info = todo.pop()
        yield info
        todo.extend(part for _, part in info.parts)


def test_every_file_of_the_folder_is_in_the_manifest() -> None:
    files = {str(path.relative_to(FOLDER)) for path in (FOLDER / "files").rglob("*") if path.is_file()}

    assert files == {row["file"] for row in ROWS}


@pytest.mark.parametrize("row", some(rows_of(readable=False), 10), ids=name_of)
def test_what_is_no_checkpoint_is_named_for_what_it_is(row: dict[str, Any]) -> None:
    cls, kind = NO_CHECKPOINTS[row["container"]]

    with pytest.raises(cls) as caught:
        checkpoint_of(row)
    assert caught.value.kind == kind
    assert caught.value.path == str(FOLDER / row["file"])


@pytest.mark.parametrize("row", some(rows_of(readable=True), 20), ids=name_of)
def test_each_checkpoint_opens_as_the_manifest_says_and_can_be_read(row: dict[str, Any]) -> None:
    tensors, storages, devices = MANIFEST_IS_WRONG.get(
        row["file"], (row["num_tensors"], row["num_storages"], row["devices"])
    )

    with checkpoint_of(row) as checkpoint:
        assert checkpoint.format == FORMATS[row["container"]]
        everything = (*checkpoint.tensors.values(), *checkpoint.attributes.values())
        assert any(not tensor.info.is_array for tensor in everything) == (tensors != 0)  # the manifest has no arrays
        assert all(len(one.read()) == one.info.nbytes for one in everything if one.info.storage is not None)
        if not tensors:
            return
        # The manifest counts what is pickled: a state_dict holds tied tensors twice, a whole model holds them once.
        infos = list(infos_of(checkpoint))
        assert len(set(infos) if checkpoint.walks else set(map(id, infos))) == tensors
        if storages is None:  # safetensors: the manifest has no devices, and the format has none either
            assert {info.location for info in infos} == {"cpu"}
            return
        held = {info.storage for info in infos if info.storage is not None}
        assert len(held) == storages
        assert Counter(storage.location for storage in held) == devices


@pytest.mark.parametrize(
    "row",
    some([row for row in ROWS if row["torch_weights_only"] == "ok" and row["container"] != "safetensors"], 10),
    ids=name_of,
)
def test_what_torch_opens_reads_as_torch_reads_it(row: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = torch.load(FOLDER / row["file"], map_location="cpu", weights_only=True)

    with checkpoint_of(row) as checkpoint:
        oracle.assert_same(checkpoint, dict(oracle.named_tensors(loaded)))


@pytest.mark.parametrize("row", some([row for row in ROWS if row["container"] == "safetensors"], 10), ids=name_of)
def test_safetensors_files_read_as_the_reference_reads_them(row: dict[str, Any]) -> None:
    from safetensors import safe_open

    with safe_open(FOLDER / row["file"], framework="pt") as reference, checkpoint_of(row) as checkpoint:
        assert sorted(checkpoint.tensors) == sorted(reference.keys())
        assert dict(checkpoint.metadata) == (reference.metadata() or {})
        for name in reference.keys():  # noqa: SIM118 - it is not a mapping
            oracle.assert_same_tensor(checkpoint.tensors[name], reference.get_tensor(name))


@pytest.mark.parametrize("row", some([row for row in ROWS if row["container"] == "torchscript zip"], 10), ids=name_of)
def test_torchscript_files_read_as_their_own_code_says(row: dict[str, Any]) -> None:
    with checkpoint_of(row) as checkpoint:
        weights = checkpoint.weights
        assert weights is not None
        assert weights.class_name is not None
        assert all(tensor.info.kind is not None for tensor in weights.values())
