"""``check --deep``: indices of sparse tensors that point beside their values, as torch itself judges them."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch

from ckptool import check
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


def codes(tensor: torch.Tensor) -> set[str]:
    buffer = io.BytesIO()
    torch.save({"w": tensor}, buffer)
    return {finding.code for finding in check(buffer.getvalue(), deep=True).findings}


def parts(tensor: torch.Tensor, names: tuple[str, ...]) -> list[torch.Tensor]:
    return [getattr(tensor, name)().clone() for name in names]


def made(tensor: torch.Tensor, found: list[torch.Tensor], **options: Any) -> torch.Tensor:
    if tensor.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(found[0], tensor.values(), tensor.shape, **options)
    return torch.sparse_compressed_tensor(*found, tensor.values(), tensor.shape, layout=tensor.layout, **options)


@pytest.mark.parametrize("name", LAYOUTS)
def test_sound_indices_are_no_finding(name: str) -> None:
    assert "CK108" not in codes(LAYOUTS[name][0])


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
                    is_found = "CK108" in codes(made(tensor, found))
                # That a row has its columns once, and in order, is asked first, and only matters to kernels.
                assert is_found is bool(reason) or "distinct" in reason, (which, place, value, reason)
                refused += is_found
    assert refused


def many_views(count: int) -> bytes:
    """Return a file of tensors that each repeat the few bytes of one storage, all a little differently."""
    buffer = io.BytesIO()
    base = torch.zeros(8, dtype=torch.int64)
    torch.save({str(number): base.as_strided((1 << 20, 2 + number), (0, 0)) for number in range(count)}, buffer)
    return buffer.getvalue()


def test_looking_at_values_costs_no_more_than_the_file_may() -> None:
    report = check(many_views(30), deep=True, values=True)

    (unread,) = [finding for finding in report.findings if finding.code == "CK113"]
    assert unread.message.endswith(", or too many: 2, 3, 4 and 25 more")


def test_indices_that_many_tensors_share_are_not_read_for_each() -> None:
    indices = torch.arange(1 << 20).reshape(1, -1)
    values = torch.zeros(1 << 20)
    state = {str(number): torch.sparse_coo_tensor(indices, values, (2_000_000 + number,)) for number in range(24)}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    report = check(buffer.getvalue(), deep=True)

    (found,) = [finding for finding in report.findings if finding.code == "CK108"]
    assert (found.severity, "12, 13, 14" in found.message) == ("info", True)


def test_tensors_of_one_pattern_are_looked_at_once() -> None:
    indices = torch.arange(1 << 20).reshape(1, -1)
    values = torch.zeros(1 << 20)
    state = {str(number): torch.sparse_coo_tensor(indices, values, (2_000_000,)) for number in range(24)}
    buffer = io.BytesIO()
    torch.save(state, buffer)

    assert "CK108" not in {finding.code for finding in check(buffer.getvalue(), deep=True).findings}
