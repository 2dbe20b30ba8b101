"""
Whether the indices of sparse tensors stay inside their shapes.

    sparse_coo     indices (dims, n): row d holds places below shape[d]
    sparse_csr     crow_indices (rows + 1): rising from 0 to n; col_indices (n): places below the columns
    sparse_bsr     the same in blocks; csc and bsc the other way round

Files are read as they are: an index out of range harms a program that makes a tensor of it unchecked. Indices
are read piece by piece, so memory does not grow with them.

Layouts: torch.sparse_coo_tensor, torch.sparse_compressed_tensor.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from typing import Final

from ckptool.checking.finding import Finding
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import LimitExceeded, UnsupportedFeature
from ckptool.limits import Limits
from ckptool.messages import counted, some
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, identity

_PIECE_NBYTES: Final = 1 << 20
_CODES: Final = {"int64": "q", "int32": "i"}
_ROWWISE: Final = ("sparse_csr", "sparse_bsr")
SPARSE: Final = ("sparse_coo", *_ROWWISE, "sparse_csc", "sparse_bsc")


def examine(checkpoint: Checkpoint, limits: Limits) -> Iterator[Finding]:
    """CK108: sparse tensors whose indices point beside their values. Imports nothing, and reads the indices alone."""
    faults: list[str] = []
    unread: list[str] = []
    seen: set[tuple[object, ...]] = set()
    left = limits.expanded(checkpoint.file_nbytes)
    for tensor in (*checkpoint.tensors.values(), *checkpoint.attributes.values()):
        info = tensor.info
        indices = [part for _, part in info.parts[:-1]] if info.layout in SPARSE else []
        key = (info.layout, str(info.shape), *map(identity, indices))
        if not indices or key in seen:
            continue
        seen.add(key)
        left -= sum(part.nbytes for part in indices)
        if left < 0:  # a small file may have any number of views of the same indices
            unread.append(tensor.name)
            continue
        try:
            fault = _fault(info, limits)
        except (LimitExceeded, UnsupportedFeature) as error:
            fault = error.message
        if fault is not None:
            faults.append(f"{tensor.name}: {fault}")
    if faults:
        what = f"{counted(len(faults), 'sparse tensor')} whose indices are wrong: {some(faults)}"
        yield Finding("CK108", "error", what, "Leave them out when you migrate it: `exclude='NAME'`.")
    if unread:
        yield Finding("CK108", "info", f"indices not looked at, for they are far larger than the file: {some(unread)}")


def _fault(info: TensorInfo, limits: Limits) -> str | None:
    """Return what is wrong with the indices of a sparse tensor, or None."""
    if info.layout == "sparse_coo":
        _, indices = info.parts[0]
        dims = indices.shape[0] if len(indices.shape) == 2 else -1
        if not 0 <= dims <= len(info.shape):
            return f"indices of shape {indices.shape} for a tensor of shape {info.shape}"
        return _outside("indices", indices, info.shape[:dims], limits)
    (of_rows, rows), (of_columns, columns), (_, values) = info.parts[:3]
    dim = -1 if info.layout in _ROWWISE else -2
    if len(info.shape) < 2 or len(rows.shape) != len(columns.shape) or not rows.shape or not columns.shape:
        return f"{of_rows} of shape {rows.shape} for a tensor of shape {info.shape}"
    block = values.shape[dim] if info.layout in ("sparse_bsr", "sparse_bsc") and len(values.shape) >= 3 else 1
    places = info.shape[dim] // max(1, block)
    wrong = _not_rising(of_rows, rows, columns.shape[-1], places, limits)
    return wrong or _outside(of_columns, columns, (places,), limits)


def _outside(name: str, indices: TensorInfo, bounds: tuple[int, ...], limits: Limits) -> str | None:
    """Look for the first index that is not below the bound of its row; all rows have one where ``bounds`` has one."""
    row_numel = indices.numel // len(bounds) if bounds else 0
    for start, numbers in _numbers(indices, limits):
        position = 0
        while position < len(numbers):
            row = (start + position) // row_numel
            part = numbers[position : (row + 1) * row_numel - start]
            least, most = min(part), max(part)
            if least < 0 or most >= bounds[row]:
                return f"{name} has {least if least < 0 else most:,} where 0 to {bounds[row] - 1:,} are allowed"
            position += len(part)
    return None


def _not_rising(name: str, pointers: TensorInfo, most: int, places: int, limits: Limits) -> str | None:
    """Look for the first pointer of a row that does not rise from 0 to ``most``, by at most ``places`` a step."""
    width, last = pointers.shape[-1], 0
    for start, numbers in _numbers(pointers, limits):
        for position, number in enumerate(numbers, start):
            column = position % width
            low, high = (last, min(most, last + places)) if column else (0, 0)
            if not (most if column == width - 1 else low) <= number <= high:
                return f"{name} has {number:,} at {position:,}, where it rises from 0 to {most:,}"
            last = number
    return None


def _numbers(indices: TensorInfo, limits: Limits) -> Iterator[tuple[int, array[int]]]:
    """Yield integers in row-major order, with the position of the first."""
    code, start = _CODES.get(indices.dtype.name), 0
    if code is None or indices.storage is None:
        return  # torch takes no others
    for chunk in LazyTensor("", indices).chunks(_PIECE_NBYTES, limits=limits):
        numbers = array(code, chunk)
        if sys.byteorder == "big":
            numbers.byteswap()
        yield start, numbers
        start += len(numbers)
