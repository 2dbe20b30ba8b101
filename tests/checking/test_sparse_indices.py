"""``check --deep``: indices of sparse tensors that point beside their values, as torch itself judges them."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch

from ckptool import check
from ckptool.reports import Finding
from tests.scale import step

warnings.filterwarnings("ignore", message="Sparse .* is in beta")

DENSE = torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0], [0.0, 4.0, 5.0, 6.0]])
LAYOUTS: dict[str, tuple[torch.Tensor, tuple[str, ...]]] = {
    "coo": (DENSE.to_sparse().coalesce(), ("indices",)),
    "coo of rows": (DENSE.to_sparse(1).coalesce(), ("indices",)),
    "csr": (DENSE.to_sparse_csr(), ("crow_indices", "col_indices")),
    "csc": (DENSE.to_sparse_csc(), ("ccol_indices", "row_indices")),
    "bsr": (DENSE.to_sparse_bsr((2, 2)), ("crow_indices", "col_indices")),
    "bsc": (DENSE.to_sparse_bsc((2, 2)), ("ccol_indices", "row_indices")),
    "csr, several": (torch.stack([DENSE, DENSE.flip(0)]).to_sparse_csr(), ("crow_indices", "col_indices")),
}


def checked(state: dict[str, torch.Tensor], **options: bool) -> dict[str, Finding]:
    """Return what a deep check finds in a file of these tensors, by code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return {finding.code: finding for finding in check(buffer.getvalue(), deep=True, **options).findings}


def parts(tensor: torch.Tensor, names: tuple[str, ...]) -> list[torch.Tensor]:
    return [getattr(tensor, name)().clone() for name in names]


def made(tensor: torch.Tensor, found: list[torch.Tensor], **options: Any) -> torch.Tensor:
    if tensor.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(found[0], tensor.values(), tensor.shape, **options)
    return torch.sparse_compressed_tensor(*found, tensor.values(), tensor.shape, layout=tensor.layout, **options)


@pytest.mark.parametrize("name", LAYOUTS)
def test_sound_indices_are_no_finding(name: str) -> None:
    assert "CK108" not in checked({"w": LAYOUTS[name][0]})


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_index_is_outside_where_torch_says_so(name: str) -> None:
    tensor, names = LAYOUTS[name]
    refused = 0
    for which, part in enumerate(parts(tensor, names)):
        for place in range(0, part.numel(), step(5)):
            for value in (-1, 0, 1, 2, 3, 4, 6, 7, 1 << 40):
                found = parts(tensor, names)
                found[which].view(-1)[place] = value
                reason = ""
                try:
                    made(tensor, found, check_invariants=True)
                except RuntimeError as error:
                    reason = str(error)
                with torch.sparse.check_sparse_tensor_invariants(enable=False):
                    is_found = "CK108" in checked({"w": made(tensor, found)})
                # That a row has its columns once, and in order, is asked first, and only matters to kernels.
                assert is_found is bool(reason) or "distinct" in reason, (which, place, value, reason)
                refused += is_found
    assert refused


def test_looking_at_values_costs_no_more_than_the_file_may() -> None:
    base = torch.zeros(8, dtype=torch.int64)
    views = {str(number): base.as_strided((1 << 20, 2 + number), (0, 0)) for number in range(30)}

    assert checked(views, values=True)["CK113"].message.endswith(", or too many: 2, 3, 4 and 25 more")


@pytest.mark.parametrize("are_alike", [True, False])
def test_indices_that_many_tensors_share_are_not_read_for_each(are_alike: bool) -> None:
    indices, values = torch.arange(1 << 20).reshape(1, -1), torch.zeros(1 << 20)
    sizes = [2_000_000 if are_alike else 2_000_000 + number for number in range(24)]
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        state = {str(number): torch.sparse_coo_tensor(indices, values, (size,)) for number, size in enumerate(sizes)}
    found = checked(state).get("CK108")

    assert (found is None) is are_alike  # of one pattern, they are looked at once
    assert found is None or (found.severity, "12, 13, 14" in found.message) == ("info", True)
