"""Look through every value of every tensor for NaN, infinities and zeros."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

from ckptool.checking.finding import Finding
from ckptool.checking.value_statistics import ValueRow
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import FileUnavailable, LimitExceeded, SourceChanged, UnreadableFile, UnsupportedFeature
from ckptool.limits import Limits
from ckptool.messages import counted, some
from ckptool.sources.files import file_under
from ckptool.sources.meter import Meter
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, identity
from ckptool.torch_ops.values import ValueFacts

_VALUES_AT_ONCE: Final = 1 << 22
_NO_NUMBERS: Final = "they are no plain numbers, or too many"
_UNREADABLE: Final = "they cannot be read"


def survey(
    checkpoint: Checkpoint,
    limits: Limits,
    meter: Meter,
    known: Callable[[LazyTensor], ValueFacts | str | None] = lambda _: None,
) -> Iterator[Finding]:
    """
    Yield what is odd about values: CK110 no numbers, CK111 infinite ones, CK112 tensors that are all zero,
    CK119 values that look damaged: far beyond all others, or a block of zeros.

    Imports torch, unless all facts are ``known`` already, or why there are none. Tensors that have no plain bytes are
    left out, and said to be (CK113).
    """
    trained = _trained(checkpoint, ("model", "ema", "optimizer"))
    weights = _trained(checkpoint, ("model", "ema"))
    nan: list[str] = []
    infinite: list[str] = []
    harmless: list[str] = []
    zero: list[str] = []
    damaged: list[str] = []
    left_out: dict[str, list[str]] = {_NO_NUMBERS: [], _UNREADABLE: []}
    seen: set[tuple[object, ...]] = set()
    left = limits.expanded(checkpoint.file_nbytes)  # many tensors may be views of the same bytes
    for tensor in _with_parts((*checkpoint.tensors.values(), *checkpoint.attributes.values())):
        info = tensor.info
        if identity(info) in seen or not info.numel or info.storage is None:
            continue
        seen.add(identity(info))
        left -= info.nbytes
        meter.read(info.nbytes)
        facts = known(tensor) or (_facts(tensor, limits) if left >= 0 else _NO_NUMBERS)
        if isinstance(facts, str):
            left_out.setdefault(facts, []).append(tensor.name)
            continue
        is_extreme = facts.infinite == info.numel and _is_extreme(tensor.name)
        is_beside = tensor.name not in trained or facts.only_minus_infinity_and_zero
        if (facts.nan or facts.infinite) and (is_beside or is_extreme):
            harmless.append(tensor.name)  # a mask, the best score of no epoch yet, the range of no batch yet
        elif facts.nan:
            nan.append(f"{tensor.name} ({facts.nan:,} of {info.numel:,})")
        elif facts.infinite:
            infinite.append(f"{tensor.name} ({facts.infinite:,} of {info.numel:,})")
        if facts.all_zero:
            zero.append(tensor.name)
        damaged += _damage(tensor, facts, weights)
    yield from _odd(nan, infinite, harmless, zero, damaged)
    for why, names in left_out.items():
        if names:
            yield Finding("CK113", "info", f"values not looked at, for {why}: {some(names)}")


def _odd(
    nan: list[str], infinite: list[str], harmless: list[str], zero: list[str], damaged: list[str]
) -> Iterator[Finding]:
    if nan:
        yield Finding("CK110", "warning", f"values that are no numbers (NaN): {some(nan)}", _DIVERGED)
    if infinite:
        yield Finding("CK111", "warning", f"infinite values: {some(infinite)}", _DIVERGED)
    if harmless:
        yield Finding("CK111", "info", f"{_HARMLESS}: {some(harmless)}")
    if zero:
        yield Finding("CK112", "info", f"{counted(len(zero), 'tensor')} all zero: {some(zero)}")
    if damaged:
        fact = f"values unlike all others of their tensors, as after damage: {some(damaged)}"
        yield Finding("CK119", "info", fact, _COMPARE)


def _with_parts(tensors: Iterable[LazyTensor]) -> Iterator[LazyTensor]:
    """Yield tensors, and after each, under its name, the values that it is made of: those of a sparse one, scales."""
    for tensor in tensors:
        todo = [tensor.info]
        while todo:
            info = todo.pop()
            if info is tensor.info or info.dtype.name.startswith(("float", "bfloat", "complex")):
                yield LazyTensor(tensor.name, info)
            todo += (part for _, part in info.parts)


def facts_of(row: ValueRow, tensor: LazyTensor) -> ValueFacts | str:
    """Return what ``survey`` asks for of values whose statistics are known."""
    found = row.values
    if found is None:
        return _NO_NUMBERS
    only_masks = found.infinite > 0 and found.infinite + found.zeros == found.total and not _has_infinity(tensor)
    return ValueFacts(found.nan, found.infinite, found.zeros == found.total, only_masks)


def _has_infinity(tensor: LazyTensor) -> bool:
    """Say whether a tensor of zeros and infinities has a positive one."""
    step = tensor.info.dtype.swap_nbytes  # of a complex number, that of each of its two
    return any(any(0 < top < 0x80 for top in piece[step - 1 :: step]) for piece in tensor.chunks(_VALUES_AT_ONCE))


def _facts(tensor: LazyTensor, limits: Limits) -> ValueFacts | str:
    """Return what the values of a tensor are, or why they are not looked at."""
    from ckptool.torch_ops import values as torch_values

    try:
        return torch_values.survey(tensor.chunks(_VALUES_AT_ONCE, limits=limits), tensor.dtype)
    except (UnsupportedFeature, LimitExceeded):
        return _NO_NUMBERS
    except SourceChanged:
        raise
    except (FileUnavailable, UnreadableFile):  # a piece of it is missing, or is not what was said of it
        return _UNREADABLE


def _is_extreme(name: str) -> bool:
    """Say whether a tensor is a least or a greatest value by its name, as observers keep them (``min_val``)."""
    return not {"min", "max", "amin", "amax"}.isdisjoint(name.rpartition(".")[2].split("_"))


def _damage(tensor: LazyTensor, facts: ValueFacts, weights: Collection[str]) -> Iterator[str]:
    if facts.far and tensor.name in weights:
        yield f"{tensor.name} ({facts.far:,} a million deviations away)"
    if facts.zeros is not None and _is_block(tensor.info, *facts.zeros):
        yield f"{tensor.name} ({facts.zeros[1]:,} bytes of zeros, from byte {facts.zeros[0]:,} on)"


def _is_block(info: TensorInfo, start: int, nbytes: int) -> bool:
    """Say whether zeros are a block of a disk, and not one row, or the first or last ones, which models leave empty."""
    storage, row = info.storage, info.nbytes // (info.shape or (1,))[0]
    if storage is None or nbytes < _BLOCK or nbytes == row:
        return False
    if not nbytes % row and (not start or start + nbytes == info.nbytes):
        return False
    place = file_under(storage.source, storage.offset + info.storage_offset * info.dtype.itemsize)
    return not start % _BLOCK or (place is not None and not (place[1] + start) % _BLOCK)


def _trained(checkpoint: Checkpoint, roles: Collection[str]) -> set[str]:
    """Return the names of tensors that training works on, of these roles."""
    found = [one for one in checkpoint.state_dicts if one.role in roles]
    return {f"{one.key}.{name}" if one.key else name for one in found for name in one}


_BLOCK: Final = 4096
_DIVERGED: Final = "Take an earlier checkpoint: training has diverged, or a cast was too narrow."
_COMPARE: Final = "Compare the file with another copy: 'ckptool diff'."
_HARMLESS: Final = "infinities or NaN in masks, in ranges that have seen no value, or beside the weights"
