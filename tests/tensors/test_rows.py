"""``tensor[2:10]``: the rows that torch gives, of which no other bytes are read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from tests.against_torch import oracle
from tests.loading.same import saved

ROWS = [slice(2, 5), slice(None, 2), slice(-3, None), slice(None), slice(1, 9, 3), slice(4, 2), slice(50, 60)]
TENSORS = {
    "plain": torch.arange(40.0).reshape(10, 4),
    "transposed": torch.arange(40).reshape(4, 10).t(),
    "expanded": torch.arange(4.0).expand(10, 4),
    "view": torch.arange(100, dtype=torch.bfloat16)[7:87].reshape(10, 8)[:, ::2],
    "conjugate": torch.randn(10, 3, dtype=torch.complex64).conj(),
    "vector": torch.arange(10, dtype=torch.uint8),
    "empty": torch.zeros(10, 0),
}


class Counted(io.BytesIO):
    """Bytes of a file, and how many were read."""

    count = 0

    def read(self, nbytes: int | None = -1) -> bytes:
        found = super().read(nbytes)
        self.count += len(found)
        return found


@pytest.mark.parametrize("legacy", [False, True])
def test_rows_are_those_of_torch(legacy: bool) -> None:
    with ckptool.open_checkpoint(saved(TENSORS, legacy=legacy)) as checkpoint:
        for name, whole in TENSORS.items():
            for rows in ROWS:
                found = checkpoint.tensors[name][rows]

                assert found.shape == whole[rows].shape
                assert found.read() == oracle.tensor_bytes(whole[rows].resolve_conj().contiguous()), (name, rows)
                assert found.torch().equal(whole[rows])
            assert checkpoint.tensors[name][2:8][1:3].torch().equal(whole[3:5])


@pytest.mark.parametrize("give", ["read", "numpy", "torch"])
def test_only_the_rows_are_read(give: str, tmp_path: Path) -> None:
    weight = torch.randn(1000, 64)
    torch.save({"w": weight}, tmp_path / "it.pth")
    file = Counted((tmp_path / "it.pth").read_bytes())
    with ckptool.open_checkpoint(file) as checkpoint:
        before = file.count
        rows = checkpoint.tensors["w"][10:14]
        found: Any = {"read": rows.read, "numpy": rows.numpy, "torch": rows.torch}[give]()

        assert file.count - before == rows.nbytes == 4 * 64 * 4
        found = torch.frombuffer(bytearray(found), dtype=torch.float32) if give == "read" else torch.as_tensor(found)
        assert torch.equal(found.reshape(4, 64), weight[10:14])


def test_rows_of_a_tensor_in_pieces_are_read_from_their_pieces() -> None:
    folder = Path(ckptool.__file__).parents[1] / "fixtures" / "folders" / "dcp"
    with ckptool.open_checkpoint(folder) as checkpoint:
        for tensor in checkpoint.tensors.values():
            if tensor.shape and tensor.shape[0] > 2:
                assert tensor[1:3].torch().equal(tensor.torch()[1:3])


def test_what_is_no_slice_of_rows_is_refused_and_says_what_is() -> None:
    content = {"w": torch.ones(3, 2), "n": torch.tensor(1), "s": torch.eye(3).to_sparse()}
    with ckptool.open_checkpoint(saved(content)) as checkpoint:
        tensors = checkpoint.tensors
        for index in (1, (slice(1), 0), None, "x"):
            with pytest.raises(TypeError, match=r"tensor\[2:10\]"):
                tensors["w"][index]  # type: ignore[index]
        with pytest.raises(TypeError, match=r"torch\(\)"):
            list(tensors["w"])  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="one element"):
            tensors["n"][:1]
        with pytest.raises(ValueError, match="at least 1"):
            tensors["w"][::-1]
        with pytest.raises(ckptool.UnsupportedFeature, match="no plain rows: sparse_coo"):
            tensors["s"][:1]
        assert repr(tensors["w"][1:]) == "<LazyTensor 'w[1:]' float32 [2, 2] cpu>"
