"""The digest of weights: one for equal weights, whatever holds them, and another for any other weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptool import migrate, open_checkpoint
from ckptool.checkpoints.digest import digest_of
from ckptool.errors import UnsupportedFeature
from tests.checkpoints.digest_by_hand import digest as by_hand

WEIGHTS = {
    "body.0.weight": torch.arange(24.0).reshape(4, 6),
    "body.0.bias": torch.tensor([1, -2, 3], dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "mask": torch.tensor([[True], [False]]),
    "empty": torch.zeros(0, 3),
    "factors": torch.tensor([1 + 2j]),
}


def digest(path: Path) -> str:
    with open_checkpoint(path) as checkpoint:
        return digest_of(checkpoint)


def wrapped(head: str, weights: Mapping[str, torch.Tensor] = WEIGHTS) -> dict[str, torch.Tensor]:
    return {f"{head}{name}": tensor for name, tensor in weights.items()}


def _dcp(path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    dcp.save(dict(WEIGHTS), checkpoint_id=path, no_dist=True)


FORMS = {
    "zip": lambda path: torch.save(WEIGHTS, path),
    "legacy": lambda path: torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False),
    "another-order": lambda path: torch.save(dict(reversed(WEIGHTS.items())), path),
    "safetensors": lambda path: save_file(dict(WEIGHTS), path),
    "ddp": lambda path: torch.save(wrapped("module."), path),
    "compiled": lambda path: torch.save(wrapped("module._orig_mod."), path),
    "checkpoint": lambda path: torch.save({"state_dict": wrapped("module."), "epoch": 3}, path),
    "views": lambda path: torch.save(
        {name: tensor.T.contiguous().T if tensor.ndim == 2 else tensor for name, tensor in WEIGHTS.items()}, path
    ),
    "dcp": _dcp,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", FORMS)
def test_equal_weights_have_one_digest_in_every_form(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{'safetensors' if form == 'safetensors' else 'pth'}"
    FORMS[form](path)

    assert digest(path) == by_hand(WEIGHTS)


def test_shards_have_the_digest_of_the_whole(tmp_path: Path) -> None:
    torch.save(wrapped("module."), tmp_path / "model.pth")
    migrate(tmp_path / "model.pth", tmp_path / "cut", max_shard_size=100)

    assert len(list((tmp_path / "cut").glob("*-of-*.safetensors"))) > 1
    assert digest(tmp_path / "cut") == by_hand(WEIGHTS)


CHANGES = {
    "a value": {"count": torch.tensor(8)},
    "the sign of a zero": {"body.0.weight": torch.cat([-WEIGHTS["body.0.weight"][:1], WEIGHTS["body.0.weight"][1:]])},
    "a type of the same bytes": {"body.0.bias": WEIGHTS["body.0.bias"].view(torch.int16)},
    "a shape": {"body.0.weight": WEIGHTS["body.0.weight"].reshape(6, 4)},
    "one more": {"more": torch.zeros(0)},
}


@pytest.mark.parametrize("what", CHANGES)
def test_other_weights_have_another_digest(what: str, tmp_path: Path) -> None:
    torch.save({**WEIGHTS, **CHANGES[what]}, tmp_path / "model.pth")

    assert digest(tmp_path / "model.pth") == by_hand({**WEIGHTS, **CHANGES[what]}) != by_hand(WEIGHTS)


def test_names_are_no_lines_of_other_tensors(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1), "b": torch.ones(1)}, tmp_path / "two.pth")
    torch.save({"a\nb": torch.zeros(1)}, tmp_path / "one.pth")

    assert digest(tmp_path / "one.pth") == by_hand({"a\nb": torch.zeros(1)})
    assert digest(tmp_path / "two.pth") != digest(tmp_path / "one.pth")


def test_what_only_some_names_begin_with_stays(tmp_path: Path) -> None:
    mixed = {"module.a": torch.zeros(1), "b._orig_mod.c": torch.ones(1)}
    torch.save(mixed, tmp_path / "model.pth")

    assert digest(tmp_path / "model.pth") == by_hand(mixed)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_is_sparse_or_quantised_counts_with_all_its_parts(tmp_path: Path) -> None:
    found = set()
    for number, scale in enumerate((0.5, 0.25)):
        quantised = torch.quantize_per_tensor(torch.arange(4.0) * scale, scale, 0, torch.qint8)
        sparse = torch.sparse_coo_tensor(torch.tensor([[number]]), torch.tensor([1.0]), (4,), check_invariants=True)
        for one in (quantised, sparse):
            torch.save({"w": one, "b": torch.zeros(2)}, tmp_path / "model.pth")
            found.add(digest(tmp_path / "model.pth"))

    assert len(found) == 4


def test_without_bytes_there_is_no_digest(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2, device="meta"), "b": torch.zeros(2)}, tmp_path / "model.pth")

    with pytest.raises(UnsupportedFeature, match="no bytes"):
        digest(tmp_path / "model.pth")
