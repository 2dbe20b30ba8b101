"""
The values of quantised weights as float32, computed as the library of each layout does.

Each does what the library that wrote the layout does, in its order, so that results are equal bit by bit after one
rounding to the requested type. A product of a code of up to 8 bits and a scale of 16 bits is exact in float32. So it
does not matter that some libraries compute in the type of the scale.

Only some rows are computed at a time. The packed weight is in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from ctypes import string_at
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ckptool.errors import MalformedFile, MigrationRefused
from ckptool.torch_ops import needed
from ckptool.torch_ops.values import BLOCK_NUMEL

if TYPE_CHECKING:
    import torch
else:
    torch = needed()  # the error says how to get it

Parts: TypeAlias = "Mapping[str, torch.Tensor]"
Facts: TypeAlias = "Mapping[str, Any]"
Values: TypeAlias = "Iterator[torch.Tensor]"
_Codes: TypeAlias = "Callable[[int, int], torch.Tensor]"
_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of E2M1, by their bits."""
_FP6: Final = (*(one / 8 for one in range(8)), *((8 + one) * 2.0**power for power in (-3, -2, -1) for one in range(8)))
"""The numbers of E2M3 by their bits, without the sign, which is the highest bit."""
_AWQ_ORDER: Final = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}
"""By the bits of a number: where in a word each of its columns is."""
_OF_127: Final = 7.874015718698502e-3
"""The factor that bitsandbytes uses in place of a division by 127."""


def packed(values: Values, dtype: str, name: str, *, saturate: bool) -> Iterator[bytes]:
    """
    Yield the bytes of values in a type, rounded as torch rounds.

    Raises:
        MigrationRefused: Finite values are too large for the type, and ``saturate`` is False.
    """
    target = getattr(torch, dtype)
    largest = torch.finfo(target).max
    for one in values:
        made = one.to(target)
        ends = map(float, torch.aminmax(made)) if made.numel() else ()  # NaN is both
        if not all(map(isfinite, ends)) and bool((lost := made.isinf() & one.isfinite()).any()):
            if not saturate:
                fact = f"tensor {name!r} has values that are too large for {dtype}: at least {int(lost.sum()):,}"
                hint = "Use a wider type, or take the largest value with `saturate=True`."
                raise MigrationRefused(fact, kind="overflow", hint=hint)
            made = torch.where(lost, one.clamp(-largest, largest).to(target), made)
        made = made.contiguous()
        yield string_at(made.data_ptr(), made.nbytes)


def transposed(values: Values, columns: int) -> Values:
    """Yield the transpose of a matrix with so many columns; all of it is in memory."""
    yield torch.cat([one.reshape(-1) for one in values]).reshape(-1, columns).T


def plain(parts: Parts, facts: Facts) -> Values:
    """Yield floats or integers times the scale of the tensor, of their row, or of their block."""
    values = parts["values"]
    flat = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
    zero = parts["zero"].float() if "zero" in parts else None
    table = torch.arange(256).to(torch.uint8).view(values.dtype).float()  # takes a fifth of the time of a cast

    def codes(start: int, end: int) -> torch.Tensor:
        some = flat[start:end]
        return _looked_up(table, some.view(torch.uint8)).reshape(some.shape)

    return _scaled(codes, flat.shape, parts["scale"], zero, facts)


def packed_columns(parts: Parts, facts: Facts) -> Values:
    """Yield integers that are packed along the columns, offset by half of their range (compressed-tensors)."""
    words, bits, columns = parts["values"], facts["bits"], facts["columns"]
    half, zero = 1 << (bits - 1), None
    if "zero" in parts:  # packed along the rows
        zero = _unpacked(parts["zero"].T, bits, len(words)).T.float() - half
    groups = _order(parts["groups"], parts["scale"].shape[-1]) if "groups" in parts else None

    def codes(start: int, end: int) -> torch.Tensor:
        found: torch.Tensor = _unpacked(words[start:end], bits, columns).float() - half
        return found

    return _scaled(codes, (len(words), columns), parts["scale"], zero, facts, groups)


def packed_floats(parts: Parts, facts: Facts) -> Values:
    """Yield floats of 4 or 6 bits, the lower bits first (MXFP4, MXFP6; NVFP4, whose scales have one, too)."""
    bits = facts["bits"]
    table = torch.tensor(_FP4 if bits == 4 else (*_FP6, *(-one for one in _FP6)))
    values = parts["values"].view(torch.uint8)
    flat = values.reshape(-1, values.shape[-1])
    columns = 8 * flat.shape[-1] // bits

    def codes(start: int, end: int) -> torch.Tensor:
        some = flat[start:end]
        if bits == 4:
            index = torch.stack((some & 15, some >> 4), -1)
        else:
            index = _unpacked(some.view(torch.int32), bits, columns)
        return _looked_up(table, index).reshape(len(some), -1)

    def scales(some: torch.Tensor) -> torch.Tensor:
        found = _factors(some)
        found = found / parts["divisor"].float() if "divisor" in parts else found
        return found * parts["factor"].float() if "factor" in parts else found

    return _scaled(codes, (len(flat), columns), parts["scale"], None, facts, factors=scales)


def experts(parts: Parts, facts: Facts) -> Values:
    """Yield blocks of floats of 4 bits of several matrices, each transposed (MXFP4 of gpt-oss)."""
    table = torch.tensor(_FP4)
    for blocks, scales in zip(parts["values"], parts["scale"], strict=True):
        flat = blocks.reshape(len(blocks), -1).T

        def codes(start: int, end: int, flat: torch.Tensor = flat) -> torch.Tensor:
            some = flat[start // 2 : end // 2]
            return _looked_up(table, torch.stack((some & 15, some >> 4), 1)).reshape(end - start, -1)

        yield from _scaled(codes, (2 * len(flat), len(blocks)), scales.T, None, facts, least=2)


def four_bits(parts: Parts, facts: Facts) -> Values:
    """Yield numbers of a table by codes of 4 bits, upper bits first, times the largest of a block (bitsandbytes)."""
    data, table, largest = parts["values"].reshape(-1).view(torch.uint8), parts["table"].float(), parts["scale"]
    if "inner_scale" in parts:
        inner = _looked_up(parts["inner_table"].float(), largest)
        scale = parts["inner_scale"].float().repeat_interleave(facts["inner_block"])[: inner.numel()]
        largest = inner * scale + torch.tensor(facts["offset"])
    block, left = facts["block"], facts["count"]
    if missing := -data.numel() % (block // 2):
        data = torch.cat((data, data.new_zeros(missing)))
    flat = data.reshape(-1, block // 2)
    facts = {"rows": len(flat), "scale_rows": len(flat), "row_block": 1, "column_block": block}

    def codes(start: int, end: int) -> torch.Tensor:
        some = flat[start:end]
        return _looked_up(table, torch.stack((some >> 4, some & 15), -1)).reshape(len(some), -1)

    for one in _scaled(codes, (len(flat), block), largest.float().reshape(-1, 1), None, facts):
        yield one.reshape(-1)[:left]
        left -= min(left, one.numel())


def eight_bits(parts: Parts, _: Facts) -> Values:
    """Yield integers times the largest of their row, divided by 127 (bitsandbytes)."""
    values, largest = parts["values"], parts["scale"].float().reshape(-1, 1)
    for start, end in _steps(*values.shape):
        yield values[start:end].float() * largest[start:end] * _OF_127


def along_inputs(parts: Parts, facts: Facts) -> Values:
    """Yield integers that are packed along the inputs; the matrix is transposed, its zero points packed (GPTQ)."""
    bits, words = facts["bits"], parts["values"].T.contiguous()
    outputs, inputs = len(words), facts["columns"]
    scale = parts["scale"].T.contiguous()
    zero = _unpacked(parts["zero"], bits, outputs) + facts["zero_offset"]  # 0 - 1 was written as the largest number
    zero = (zero & ((1 << bits) - 1)).float().T.contiguous()
    groups = _order(parts["groups"], scale.shape[-1]) if "groups" in parts else None
    if groups is None:
        groups = torch.arange(inputs) // facts["column_block"]

    def codes(start: int, end: int) -> torch.Tensor:
        return _unpacked(words[start:end], bits, inputs).float()

    return _scaled(codes, (outputs, inputs), scale, zero, facts, groups)


def along_outputs(parts: Parts, facts: Facts) -> Values:
    """Yield integers that are packed along the outputs in an order of AWQ's own, transposed."""
    bits, many = facts["bits"], 32 // facts["bits"]
    shifts = torch.tensor(_AWQ_ORDER[bits], dtype=torch.int32)[:, None] * bits
    words = parts["values"].T.contiguous()

    def unpacked(some: torch.Tensor) -> torch.Tensor:
        """Return the rows that are packed in rows of words."""
        found: torch.Tensor = (some[:, None] >> shifts) & ((1 << bits) - 1)
        return found.reshape(-1, some.shape[1]).float()

    def codes(start: int, end: int) -> torch.Tensor:
        first = start // many
        return unpacked(words[first : -(-end // many)])[start - first * many : end - first * many]

    shape = (len(words) * many, words.shape[1])
    zero = unpacked(parts["zero"].T.contiguous())
    return _scaled(codes, shape, parts["scale"].T.contiguous(), zero, facts, least=many)


HOW: Final[Mapping[str, Callable[[Parts, Facts], Values]]] = {
    one.__name__: one
    for one in (*(plain, packed_columns, packed_floats, experts, four_bits, eight_bits, along_inputs, along_outputs),)
}


def _scaled(
    codes: _Codes,
    shape: tuple[int, ...],
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    facts: Facts,
    groups: torch.Tensor | None = None,
    least: int = 1,
    factors: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Values:
    """
    Yield codes, minus their zero points, times their scales.

    ``codes(start, end)`` returns rows as a new tensor. A scale is for ``row_block`` rows and ``column_block`` columns,
    and the last block may be smaller; ``groups``, if given, is the column of ``scale`` for each column instead. There
    may be several matrices, one below the other, each of so many ``rows``, with so many ``scale_rows``. ``factors``
    converts scales to float32, in place of ``_factors``.
    """
    rows, columns = shape
    scale = scale.reshape(-1, scale.shape[-1]) if scale.ndim > 1 else scale.reshape(-1, 1)
    zero = zero.reshape(scale.shape) if zero is not None else None
    height, high, block = max(facts["rows"], 1), facts["scale_rows"], facts["row_block"]

    def spread(one: torch.Tensor) -> torch.Tensor:
        if groups is not None and one.shape[-1] > 1:
            return one.index_select(1, groups)
        if one.shape[-1] in (1, columns):
            return one
        return one.repeat_interleave(facts["column_block"], -1)[:, :columns]

    row, scales, zeros = -1, scale, zero
    for start, end in _steps(rows, columns, height, block, least):
        first = start // height * high + start % height // block
        if block == 1 or first != row:  # many rows have the scales of the rows before
            row, last = first, first + 1 if block > 1 else first + end - start
            scales = spread((factors or _factors)(scale[first:last]))
            zeros = spread(zero[first:last]) if zero is not None else None
        made = codes(start, end)
        if zeros is not None:
            made -= zeros
        made *= scales
        yield made


def _steps(rows: int, columns: int, height: int = 1, block: int = 1, least: int = 1) -> Iterator[tuple[int, int]]:
    """
    Yield the start and end of runs of rows, each with few enough elements for one thread of torch.

    If a ``block`` is more than one row, no run goes beyond it, or beyond a matrix of ``height`` rows.
    """
    many, start = max(least, BLOCK_NUMEL // max(columns, 1) // least * least), 0
    while start < rows:
        at = start % height
        left = min(height, (at // block + 1) * block) - at if block > 1 else many
        yield start, min(rows, start + min(many, left))
        start += min(many, left)


def _unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return ``count`` numbers from each row of words of 32 bits: one stream of bits from the lowest one on."""
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        return ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).reshape(len(words), -1)[:, :count]
    wide = words.long() & 0xFFFFFFFF
    at = torch.arange(count) * bits
    first, shift = at // 32, at % 32
    lower = wide[:, first] >> shift
    upper = wide[:, (first + 1).clamp(max=words.shape[1] - 1)] << (32 - shift)
    return (lower | torch.where(shift + bits > 32, upper, 0)) & ((1 << bits) - 1)


def _order(groups: torch.Tensor, count: int) -> torch.Tensor | None:
    """
    Return the group of each column; None if all are -1, that is, not given.

    Raises:
        MalformedFile: A column is in a group that does not exist.
    """
    found = groups.long()
    if bool((found == -1).all()):
        return None
    if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < count:
        fact = f"columns in groups {int(found.min())} to {int(found.max())}, of {count:,} groups"
        raise MalformedFile(fact, kind="malformed-tensor")
    return found


def _looked_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return entries of a table by their indices, flat; unlike ``table[index]``, this runs on one thread."""
    return table.reshape(-1).index_select(0, index.reshape(-1).int())


def _factors(scale: torch.Tensor) -> torch.Tensor:
    """Return scales as float32; bytes are exponents of two, of which 255 is NaN."""
    if scale.dtype not in (torch.uint8, getattr(torch, "float8_e8m0fnu", None)):
        return scale.float()
    exponent = scale.view(torch.uint8).int()
    exact = torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)
    return torch.where(exponent == 255, torch.nan, exact)
