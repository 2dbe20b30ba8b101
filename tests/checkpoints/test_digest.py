"""The digest of weights: one for equal weights, whatever holds them, and another for any other weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptool import migrate
from ckptool.fleet import row
from ckptool.names.wrappers import ANYWHERE, HEADS
from tests.checkpoints.digest_by_hand import MARKED, WRAPPERS
from tests.checkpoints.digest_by_hand import digest as by_hand
from tests.scale import exhaustive

WEIGHTS = {
    "body.0.weight": torch.arange(24.0).reshape(4, 6),
    "body.0.bias": torch.tensor([1, -2, 3], dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "mask": torch.tensor([[True], [False]]),
    "empty": torch.zeros(0, 3),
    "factors": torch.tensor([1 + 2j]),
}


def digest(path: Path) -> object:
    return row(path, digest=True)["digest"]


def wrapped(head: str, weights: Mapping[str, torch.Tensor] = WEIGHTS) -> dict[str, torch.Tensor]:
    return {f"{head}{name}": tensor for name, tensor in weights.items()}


def _migrated_to_dcp(path: Path) -> None:
    torch.save(WEIGHTS, path.with_name("zip.pth"))
    migrate(path.with_name("zip.pth"), path, form="dcp")


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
    "migrated-to-dcp": _migrated_to_dcp,
    "dcp": _dcp,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", [pytest.param(form, marks=[exhaustive] * (form == "dcp")) for form in FORMS])
def test_equal_weights_have_one_digest_in_every_form(form: str, tmp_path: Path) -> None:
    path = tmp_path / ("model" if "dcp" in form else f"model.{'safetensors' if form == 'safetensors' else 'pth'}")
    FORMS[form](path)

    assert digest(path) == by_hand(WEIGHTS)


def test_the_computation_of_the_page_removes_what_every_wrapper_adds() -> None:
    assert (set(WRAPPERS), set(MARKED)) == (set(HEADS), set(ANYWHERE))


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

    found = row(tmp_path / "model.pth", digest=True)
    assert found["digest"] is None
    assert found["digest_error"] == "no-plain-bytes"


DIFFERENT: dict[str, Callable[[], torch.Tensor]] = {
    "values": lambda: torch.zeros(2, 3),
    "one bit": lambda: torch.tensor([[0.0, 0, 0], [0, 0, -0.0]]),
    "type": lambda: torch.zeros(2, 3, dtype=torch.int32),
    "shape": lambda: torch.zeros(3, 2),
    "turned": lambda: torch.arange(6.0).reshape(2, 3),
    "not turned": lambda: torch.arange(6.0).reshape(3, 2).t(),
    "complex": lambda: torch.ones(2, 3, dtype=torch.complex64) * 1j,
    "conjugate": lambda: (torch.ones(2, 3, dtype=torch.complex64) * 1j).conj(),
    "sparse": lambda: torch.eye(2000).to_sparse(),
    "sparse, one other": lambda: (
        torch.eye(2000).index_fill(1, torch.tensor(1000), 0.0).fill_diagonal_(1).mul(1).to_sparse()
    ),
    "sparse, scaled": lambda: (torch.eye(2000) + torch.diag(torch.arange(2000) == 1000).float()).to_sparse(),
    "csr": lambda: torch.eye(2000).to_sparse_csr(),
    "csr, scaled": lambda: (torch.eye(2000) + torch.diag(torch.arange(2000) == 1000).float()).to_sparse_csr(),
    "csc": lambda: (torch.eye(2000) + torch.diag(torch.arange(2000) == 1000).float()).to_sparse_csc(),
    "quantised": lambda: torch.quantize_per_tensor(torch.arange(2000.0), 0.5, 0, torch.qint32),
    "quantised, one other": lambda: torch.quantize_per_tensor(
        torch.arange(2000.0) + (torch.arange(2000) == 1000), 0.5, 0, torch.qint32
    ),
    "quantised, scaled": lambda: torch.quantize_per_tensor(torch.arange(2000.0) / 2, 0.25, 0, torch.qint32),
    "by channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 3), torch.tensor([0.5, 0.25]), torch.tensor([0, 0]), 0, torch.qint8
    ),
}


@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz")
@pytest.mark.filterwarnings("ignore:Sparse ")
def test_tensors_of_all_kinds_have_digests_of_their_own(tmp_path: Path) -> None:
    def of(name: str, tensor: torch.Tensor) -> object:
        torch.save({name: tensor, "y": torch.zeros(1)}, tmp_path / "model.pth")
        return digest(tmp_path / "model.pth")

    digests = {name: of("x", make()) for name, make in DIFFERENT.items()}

    same = {digests["sparse"], digests["sparse, one other"]}
    assert len(same) == 1
    assert len(set(digests.values())) == len(digests) - 1, digests
    assert of("x", torch.zeros(2, 3)) == digests["values"]
    assert of("z", torch.zeros(2, 3)) != digests["values"]
    assert of("x", torch.zeros(3, 2).t()) == digests["values"]


@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz")
@pytest.mark.parametrize("form", ["state_dict", "model", "checkpoint"])
def test_packed_weights_count(form: str, tmp_path: Path) -> None:
    found = set()
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        linear = torch.nn.Linear(4, 4, bias=False)
        model = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(linear), {torch.nn.Linear})
        content = {"state_dict": model.state_dict(), "model": model, "checkpoint": {"e": 1, "net": model.state_dict()}}
        torch.save(content[form], tmp_path / "model.pth")
        found.add(digest(tmp_path / "model.pth"))

    assert len(found) == 2
