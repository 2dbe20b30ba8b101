"""Files that strangers published are loaded as ``torch.load`` loads them. Skipped where the folder is not there."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import ckptool
from tests.against_torch import oracle
from tests.corpus.files import FOLDER, MARKS, ROWS, name_of
from tests.loading.same import assert_same_tensor, sharing, torch_load

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:.*[Qq]uantiz"),
]


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row["torch_weights_only"] == "ok" and row["container"] != "safetensors"], ids=name_of
)
def test_what_torch_loads_is_loaded_equally(row: dict[str, Any]) -> None:
    path = FOLDER / row["file"]
    with ckptool.open_checkpoint(path) as checkpoint:
        weights = checkpoint.weights
    if weights is None:
        pytest.skip("no state dict of it is the weights")
    expected = dict(oracle.named_tensors(torch_load(path)))
    head = f"{weights.key}." if weights.key else ""

    for mmap in (True, False):
        found = ckptool.load(path, key=weights.key, strip=None, mmap=mmap)
        ours = {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}
        theirs = {name: expected[head + name] for name in ours}
        assert [name for name in expected if name in {head + one for one in ours}] == [head + name for name in ours]
        assert set(weights) <= set(ours)
        for name, tensor in theirs.items():
            assert_same_tensor(ours[name], tensor, name)
        assert sharing(ours) == sharing(theirs)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_every_file_is_loaded_or_refused_by_name(row: dict[str, Any]) -> None:
    path = FOLDER / row["file"]
    error, found = None, {}
    try:
        found = ckptool.load(path, strip=None)
    except ckptool.CkptoolError as raised:
        error = raised
    if error is not None:
        assert error.path == str(path)
        assert pickle.loads(pickle.dumps(error)).message == error.message
        return
    with ckptool.open_checkpoint(path) as checkpoint:
        assert checkpoint.weights is not None
        lazy = dict(checkpoint.weights)
        for name, tensor in lazy.items():
            if tensor.info.layout == "strided" and tensor.info.storage is not None and name in found:
                assert oracle.tensor_bytes(found[name]) == tensor.read(), name
        assert {name for name in lazy if "." not in name} <= set(found)
