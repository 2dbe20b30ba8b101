"""
Casts and what they lose; NaN and infinities in elements; the mean of weights, and what an adapter adds to one.

An adapter is added as peft does it on a CPU: in float32, with one rounding to the type of the weight.
https://github.com/huggingface/peft; src/peft/tuners/lora/layer.py, variants.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from ctypes import string_at
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptool.errors import UnsupportedFeature
from ckptool.messages import MANY_ZEROED
from ckptool.tensors.dtypes import DTYPES, FLOAT4, spelled
from ckptool.torch_ops import needed
from ckptool.torch_ops.statistics import ValueFacts

if TYPE_CHECKING:
    import torch

    from ckptool.tensors.reading import LazyTensor
else:
    torch = needed()  # the error says how to get it


BLOCK_NUMEL: Final = (1 << 15) - 1
"""Elements that torch computes with at a time. It splits 32,768 or more among its threads, which wait for each other in
a loop: where other processes are at work, that takes many times the processor time."""


_LOOKED_AT: Final = 1 << 18
"""Elements that are copied at a time."""
_PIECE_NUMEL: Final = 1 << 20
_TOGETHER: Final = 192
"""A multiple of the number of rows that the kernels of MKL and OpenBLAS compute at a time."""
_INTEGERS: Final = frozenset(one.name for one in DTYPES if one.name.startswith(("int", "uint", "bool")))


class CastBytes(NamedTuple):
    """Elements in another type, and what the cast lost."""

    data: bytes
    max_error: float
    overflowed: int
    nonzero: int = 0
    """Elements that were not zero; counted only if the type can make some of them zero."""
    zeroed: int = 0
    """How many of these became zero."""
    nan: int = 0
    """Elements that were NaN, and still are."""


def cast(data: bytes, source: str, target: str) -> CastBytes:
    """
    Return packed elements cast from one floating type to another, rounded as torch rounds.

    Finite values that ``target`` cannot hold become its largest, and are counted.
    """
    if not data:
        return CastBytes(b"", 0.0, 0)
    values = torch.frombuffer(bytearray(data), dtype=getattr(torch, source))
    result = torch.empty(values.numel(), dtype=getattr(torch, target), device="cpu")
    largest = torch.finfo(result.dtype).max
    max_error, overflowed, nonzero, left, nan = 0.0, 0, 0, 0, 0
    flushes = result.itemsize < values.itemsize or _flushes(values.dtype, result.dtype)
    # This type holds all values of both types, and the difference between a value and its cast.
    wide = torch.float64 if 8 in (values.itemsize, result.itemsize) else torch.float32
    gap = torch.empty(BLOCK_NUMEL, dtype=wide, device="cpu")
    for given, made in zip(_blocks(values), _blocks(result), strict=True):
        made.copy_(given)
        exact, rounded = given.to(wide), made.to(wide)
        least, most = torch.sub(rounded, exact, out=gap[: len(made)]).aminmax()
        error = float(torch.maximum(most, -least))
        if not error < torch.inf:  # NaN, infinity minus itself, or what the type cannot hold
            finite = exact.isfinite()
            nan += int(exact.isnan().sum())
            lost = finite & ~rounded.isfinite()
            if count := int(lost.sum()):
                overflowed += count
                made.copy_(torch.where(lost, exact.clamp(-largest, largest), rounded))
            error = float(torch.where(rounded.isfinite(), (rounded - exact).abs(), 0.0).max())
        max_error = max(max_error, error)
        if flushes:
            kept = int(made.count_nonzero())
            left, nonzero = left + kept, nonzero + (kept if kept == len(made) else int(exact.count_nonzero()))
    return CastBytes(string_at(result.data_ptr(), result.nbytes), max_error, overflowed, nonzero, nonzero - left, nan)


def narrows(own: torch.dtype, target: torch.dtype) -> bool:
    """
    Return whether ``own`` has numbers that ``target`` loses.

    Of two floating types, only numbers that are too large count; if one is a type of integers, all that do not fit.
    """
    if own.is_complex and not target.is_complex:
        return True
    own, target = (one.to_real() if one.is_complex else one for one in (own, target))
    if own.is_floating_point and target.is_floating_point:
        mine, theirs = torch.finfo(own), torch.finfo(target)
        return mine.max > theirs.max or mine.min < theirs.min
    if not _is_integer(own):
        return own.is_floating_point and _is_integer(target)
    low, high = _ends(own)
    if _is_integer(target):
        return low < _ends(target)[0] or high > _ends(target)[1]
    # Up to 2 / eps, a floating type has every integer; above, the first one is missing.
    return target.is_floating_point and max(-low, high) > min(2 / torch.finfo(target).eps, torch.finfo(target).max)


def _is_integer(dtype: torch.dtype) -> bool:
    return spelled(dtype) in _INTEGERS


def _ends(dtype: torch.dtype) -> tuple[int, int]:
    """Return the least and the greatest number of a type of integers."""
    return (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _flushes(own: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a floating type has smaller normal numbers than another one, which may make them zero."""
    return torch.finfo(own).tiny < torch.finfo(target).tiny


class Lost(NamedTuple):
    """What a cast of values would lose."""

    numel: int = 0
    """
    Floats that would change by more than rounding: to infinity or the largest, NaN, a finite number, or another sign.
    If either type is one of integers, values that the new type cannot hold.
    """
    zeroed: float = 0.0
    """The share of the nonzero values that would become zero, 0 to 1."""
    first: object = None
    """If either type is one of integers: the first value that the new type cannot hold."""


def lost_in_cast(values: torch.Tensor, target: torch.dtype) -> Lost:
    """
    Return what a cast of values to a type would lose.

    Nothing is read if the type has the range of the values' own; else it takes one pass, and more if some do not fit.
    """
    if values.is_meta or not narrows(values.dtype, target):
        return Lost()
    values = elements_of(values)
    if values.is_complex() and target.is_complex:
        values = torch.view_as_real(values.resolve_conj()).reshape(-1)
    own, target = values.dtype, target.to_real() if target.is_complex else target
    if not values.numel():
        return Lost()
    pieces = torch.split(values, _LOOKED_AT)
    if not own.is_floating_point or not target.is_floating_point:
        found = [piece[~_is_held(piece, target)] for piece in pieces]
        return Lost(sum(map(len, found)), first=next((one[0].item() for one in found if len(one)), None))
    numel, range_ = 0, torch.finfo(target)
    low, high = 0.0, torch.inf
    if own.itemsize > 1:  # torch cannot compare types of one byte
        low, high = torch.stack(values.aminmax()).tolist()  # both at once: this waits for a device
    wide = torch.float32 if own.itemsize < 8 else own
    if not (range_.min <= low and high <= range_.max):  # true for NaN, too
        numel = sum(int(_is_other(one.to(wide), one.to(target).to(wide), target).sum()) for one in pieces)
    elif (largest := max(-low, high)) and not torch.tensor(largest, dtype=own, device="cpu").to(target).to(wide).any():
        return Lost(zeroed=1.0)
    if not _flushes(own, target):
        return Lost(numel)
    sample = values[:: values.numel() >> 16 | 1]  # an odd step meets all columns
    share = _zeroed(sample, target)
    return Lost(numel, share if share < MANY_ZEROED / 2 or len(sample) == len(values) else _zeroed(values, target))


def _zeroed(values: torch.Tensor, target: torch.dtype) -> float:
    """Return the share of the nonzero values that a type makes zero, 0 to 1."""
    nonzero = left = 0
    # On the CPU, small blocks keep the copies small; on a device, they are larger, as each is waited for.
    for one in _blocks(values) if values.device.type == "cpu" else torch.split(values, _LOOKED_AT):
        given, made = (part if part.itemsize > 1 else part.to(torch.float32) for part in (one, one.to(target)))
        nonzero, left = nonzero + int(given.count_nonzero()), left + int(made.count_nonzero())
    return 1 - left / nonzero if nonzero else 0.0


def _is_other(values: torch.Tensor, made: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    """Return for each float whether a cast, ``made``, has changed it by more than rounding."""
    is_other = values.isfinite() & ~made.isfinite()
    if target.itemsize == 1:  # some of these types have no infinities, and torch takes their largest; one has no signs
        limits = torch.finfo(target)
        is_remote = (made - values).abs() > limits.eps * (values.abs() / 2 + limits.tiny)
        is_other |= (values.isfinite() & is_remote) | (values.isinf() & made.isfinite())
    return is_other


def elements_of(values: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor of any layout as a flat tensor."""
    if values.is_nested or values.layout is not torch.strided:
        values = values._values() if values.layout is torch.sparse_coo else values.values()
    return values.reshape(-1)


def _is_held(values: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    """Return for each value whether a type has the same number; either type is one of integers."""
    own = values.dtype
    if own.is_complex:
        return values.imag == 0
    if not _is_integer(target):  # values beyond the range of int64 are not cast back: they would wrap
        whole, made = values.to(torch.int64), values.to(target).to(torch.float64)
        return (made >= -(2.0**63)) & (made < 2.0**63) & (made.to(torch.int64) == whole)
    low, high = _ends(target)
    if own.is_floating_point:
        exact = values.to(torch.float64)
        return (exact >= low) & (exact < float(high + 1)) & (exact == exact.floor())
    whole = values.to(torch.int64)  # the upper half of uint64 becomes negative
    return (whole >= max(low, _ends(own)[0])) & (whole <= min(high, torch.iinfo(torch.int64).max))


def _blocks(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return values.chunk(max(1, -(-values.numel() // BLOCK_NUMEL)))


_FLOAT4_ZEROS = b"\x00\x08\x80\x88"
"""Two zeros of either sign; its other values are finite."""


def survey(pieces: Iterable[bytes], dtype: str) -> ValueFacts:
    """
    Return facts about the elements of a tensor, given packed and in order, in pieces of whole elements.

    Raises:
        UnsupportedFeature: This torch has no such type, or cannot compute with it.
    """
    if dtype == FLOAT4:  # torch has the type, and no operations for it
        return ValueFacts(0, 0, all(not piece.strip(_FLOAT4_ZEROS) for piece in pieces), False)
    of_type = getattr(torch, dtype, None)
    if of_type is None:
        raise UnsupportedFeature(f"this torch has no type {dtype}", kind="dtype")
    if not of_type.is_floating_point and not of_type.is_complex:
        return ValueFacts(0, 0, not any(map(any, pieces)), True)
    try:
        return survey_values(torch.frombuffer(bytearray(piece), dtype=of_type) for piece in pieces)
    except RuntimeError as error:
        if "not implemented" not in str(error):
            raise
        raise UnsupportedFeature(f"torch cannot compute with {dtype}: {error}", kind="dtype") from error


def survey_values(pieces: Iterable[torch.Tensor]) -> ValueFacts:
    """Return the same facts of floating or complex elements, given as flat tensors on the CPU."""
    nan = infinite = far = zero = numel = 0
    only_masks = True
    first = last = -1
    all_zero = True
    width = 1
    for piece in pieces:
        width = piece.dtype.itemsize // (1 + piece.is_complex())
        for values in _blocks(piece):
            values = torch.view_as_real(values).reshape(-1) if values.is_complex() else values
            if values.dtype.itemsize == 1 or values.dtype == torch.float16:  # few operations know these
                values = values.to(torch.float32)
            zeros = len(values) - int(values.count_nonzero())
            largest = max(map(abs, torch.stack(values.aminmax()).tolist()))  # NaN, if there is one
            if largest < torch.inf:
                far += _far(values, largest)
                only_masks = only_masks and zeros == len(values)
            else:
                nan += int(values.isnan().sum())
                infinite += int(values.isinf().sum())
                only_masks = only_masks and bool(((values == 0) | (values == -torch.inf)).all())
            if zeros:
                is_zero = (values == 0).to(torch.uint8)
                first = numel + int(is_zero.argmax()) if first < 0 else first
                last = numel + len(values) - 1 - int(is_zero.flip(0).argmax())
            all_zero = all_zero and zeros == len(values)
            zero, numel = zero + zeros, numel + len(values)
    run = (first * width, zero * width) if 0 < zero < numel and zero == last - first + 1 else None
    return ValueFacts(nan, infinite, all_zero, only_masks, far, run)


def is_finite(values: torch.Tensor) -> bool:
    """Return whether no element of a flat tensor on the CPU is NaN or infinite; that is quicker than to count them."""
    if FLOAT4 in str(values.dtype):
        return True
    if values.dtype.itemsize == 1:
        every = torch.arange(256, dtype=torch.uint8, device="cpu")
        odd = every[~every.view(values.dtype).to(torch.float32).isfinite()].tolist()
        pieces = (string_at(piece.data_ptr(), len(piece)) for piece in torch.split(values.contiguous(), _LOOKED_AT))
        return not any(one in piece for piece in pieces for one in odd)
    # If a sum is finite, so are all its elements; but the sum of finite ones may be too large.
    return all(bool(block.sum().isfinite()) or bool(block.isfinite().all()) for block in _blocks(values))


def _far(values: torch.Tensor, largest: float) -> int:
    """Return how many finite values are a million deviations of all others away from zero; 0 if they are not few."""
    least = largest / (1 << 20)
    sample = values[:: 1 + len(values) // 1024]
    if 32 * int((sample.abs() > least).sum()) > len(sample):
        return 0  # as of nearly all tensors
    is_remote = values.abs() > least
    count = int(is_remote.sum())
    zeros = len(values) - int(values.count_nonzero())
    return count if 1000 * count <= len(values) and 2 * zeros < len(values) else 0


def add_low_rank(
    weight: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    magnitude: torch.Tensor | None = None,
    *,
    scale: float,
    is_turned: bool,
    is_embedding: bool,
) -> torch.Tensor:
    """
    Return a weight plus ``scale`` times the product of two matrices, or of two kernels; ``weight`` may be changed.

    ``down`` is [rank, inputs, …], ``up`` [outputs, rank, …]. If ``is_turned``, the product is transposed. With a
    ``magnitude``, each row of the sum (or column, if ``is_turned``) gets this length (DoRA).
    """
    down, up = (one if one.dtype == torch.float64 else one.float() for one in (down, up))
    kernel = None
    if any(size > 1 for size in down.shape[2:]):
        convolve = getattr(torch.nn.functional, f"conv{down.ndim - 2}d")
        kernel = (convolve(down.transpose(0, 1), up).transpose(0, 1) * scale).flatten(1)
    rows, down, up = weight.flatten(1), down.flatten(1), up.flatten(1)
    is_whole = is_turned and magnitude is not None  # lengths of columns need all rows
    for start, end in [(0, len(rows))] if is_whole else _runs(*rows.shape):
        some = rows[start:end]
        if kernel is not None:
            added = kernel[start:end]
        elif is_turned:
            added = (up @ down[:, start:end]).mul_(scale).T
        else:
            added = (up[start:end] @ down).mul_(scale)
        if magnitude is None:
            some += added.to(weight.dtype) if is_embedding else added
            continue
        whole = some + added
        lengths = torch.linalg.norm(whole.T if is_turned else whole, dim=1)
        wanted = magnitude.flatten() if is_turned else magnitude.flatten()[start:end]
        factor = wanted / lengths
        some.copy_((factor if is_turned else factor[:, None]) * whole)
    return weight


def _runs(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """
    Yield the start and end of runs of rows, of a few megabytes.

    All but the last have a multiple of the rows that kernels compute at a time. So each sum is made in the same order
    as in the product of all rows.
    """
    step = max(_PIECE_NUMEL // max(columns, 1) // _TOGETHER, 1) * _TOGETHER
    starts = range(0, max(rows - step, 0) + 1, step)
    yield from zip(starts, [*starts[1:], rows], strict=True)


def own(tensor: LazyTensor) -> torch.Tensor:
    """Return a tensor of a file as a torch.Tensor in row-major order, which shares memory with no other."""
    return tensor.torch().detach().contiguous()


def finite_count(tensor: torch.Tensor) -> int:
    """Return how many elements are finite."""
    return int(tensor.isfinite().sum())


def bytes_of(tensor: torch.Tensor) -> Iterator[bytes]:
    """Yield the elements in row-major order, in pieces."""
    for piece in torch.split(tensor.contiguous().reshape(-1), _PIECE_NUMEL):
        yield string_at(piece.data_ptr(), piece.nbytes)


def average(pieces: Sequence[bytes], types: Sequence[str], shares: Sequence[float]) -> bytes:
    """Return the sum of packed tensors, each times its share: made in float64, and rounded once to the first type."""
    given = zip(pieces, types, strict=True)
    blocks = [
        torch.split(torch.frombuffer(bytearray(one), dtype=getattr(torch, dtype)), BLOCK_NUMEL) for one, dtype in given
    ]
    made: list[bytes] = []
    for some in zip(*blocks, strict=True):
        total = sum(
            (one.double() * share for one, share in zip(some, shares, strict=True) if share), torch.tensor(-0.0)
        )
        result = total.to(some[0].dtype)
        made.append(string_at(result.data_ptr(), result.nbytes))
    return b"".join(made)
