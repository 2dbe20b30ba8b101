"""
Values: searches all tensors for NaN, infinities and wrong indices, and makes the statistics of ``stat``.

Indices of sparse tensors have to stay inside their shapes:

    sparse_coo     indices (dims, n): row d holds places below shape[d]
    sparse_csr     crow_indices (rows + 1): rising from 0 to n; col_indices (n): places below the columns
    sparse_bsr     the same in blocks; csc and bsc the other way round

Files are read as they are: an index out of range harms a program that makes a tensor of it unchecked. Indices
are read piece by piece, so memory does not grow with them. Layouts: torch.sparse_coo_tensor,
torch.sparse_compressed_tensor.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from ckptool.arguments import checked
from ckptool.cancellation import check_cancelled
from ckptool.checking.finding import Finding, Severity, note
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import names_matching, refuse_archive
from ckptool.errors import (
    Failure,
    FileUnavailable,
    LimitExceeded,
    MissingPackage,
    SourceChanged,
    UnreadableFile,
    UnsupportedFeature,
    about,
)
from ckptool.formats import open_checkpoint
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.messages import counted, some
from ckptool.sources.files import Origin, file_under
from ckptool.sources.source import Meter, Progress
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, identity, with_parts
from ckptool.torch_ops.statistics import Statistics, Tally, ValueFacts

_VALUES_AT_ONCE: Final = 1 << 22
_NEARLY_ALL: Final = 0.9
_NO_NUMBERS: Final = "they are not plain numbers, or too many"
_UNREADABLE: Final = "they cannot be read"
_PIECE_NBYTES: Final = 1 << 20
_ROWWISE: Final = ("sparse_csr", "sparse_bsr")
SPARSE: Final = ("sparse_coo", *_ROWWISE, "sparse_csc", "sparse_bsc")
_COUNTED_AT_ONCE: Final = 1 << 20
DIVERGED: Final = "Take an earlier checkpoint: training has diverged, or a cast was too narrow."
_NEVER_FILLED: Final = "Copy the file again: it may have got its size, and never its bytes."
_COMPARE: Final = "Compare the file with another copy: 'ckptool diff'."
_HARMLESS: Final = "infinities or NaN in masks, in ranges that have seen no value, or beside the weights"
_ODD: Final[tuple[tuple[str, str, str, str | None, Severity], ...]] = (
    ("nan", "CK110", "values that are not numbers (NaN)", DIVERGED, "warning"),
    ("infinite", "CK111", "infinite values", DIVERGED, "warning"),
    ("harmless", "CK111", _HARMLESS, None, "info"),
    ("damaged", "CK119", "values unlike all others of their tensors, as after damage", _COMPARE, "info"),
)


def survey(
    checkpoint: Checkpoint,
    limits: Limits,
    meter: Meter,
    known: Callable[[LazyTensor], ValueFacts | str | None] = lambda _: None,
) -> Iterator[Finding]:
    """
    Yield findings about odd values: CK110 NaN, CK111 infinities, CK112 tensors that are all zero, or nearly all
    tensors of a file, CK119 values that look damaged: far beyond all others, or a block of zeros.

    Imports torch, unless ``known`` returns the facts of each tensor, or why there are none. Tensors without plain bytes
    are left out, and reported (CK113).
    """
    trained = _trained(checkpoint, ("model", "ema", "optimizer"))
    weights = _trained(checkpoint, ("model", "ema"))
    odd: dict[str, list[str]] = {}
    """Names of tensors, by the kind in ``_ODD``, or by why their values were not looked at."""
    files: dict[str, list[bool]] = {}
    """By shard: for each of its weights, whether it is all zero."""
    seen: set[tuple[object, ...]] = set()
    left = limits.expanded(checkpoint.file_nbytes)  # many tensors may be views of the same bytes
    every = (*checkpoint.tensors.values(), *checkpoint.attributes.values())
    parts = ((one, info) for one in every for info in with_parts([one.info]))
    floats = ("float", "bfloat", "complex")  # among parts, the values of a sparse tensor, and scales
    own = (LazyTensor(one.name, part) for one, part in parts if part is one.info or part.dtype.name.startswith(floats))
    for tensor in own:
        info = tensor.info
        if identity(info) in seen or not info.numel or info.storage is None:
            continue
        seen.add(identity(info))
        left -= info.nbytes
        meter.read(info.nbytes)
        facts = known(tensor) or (_facts(tensor, limits) if left >= 0 else _NO_NUMBERS)
        if isinstance(facts, str):
            odd.setdefault(facts, []).append(tensor.name)
            continue
        if (facts.nan or facts.infinite) and (tensor.name not in trained or is_meant(tensor.name, facts, info.numel)):
            odd.setdefault("harmless", []).append(tensor.name)  # the best score of no epoch yet, say
        elif facts.nan or facts.infinite:
            many = f"{tensor.name} ({facts.nan or facts.infinite:,} of {info.numel:,})"
            odd.setdefault("nan" if facts.nan else "infinite", []).append(many)
        if facts.all_zero:
            odd.setdefault("zero", []).append(tensor.name)
        if tensor.name in weights:
            files.setdefault(checkpoint.shard_of.get(tensor.name, ""), []).append(facts.all_zero)
        if facts.far and tensor.name in weights:
            odd.setdefault("damaged", []).append(f"{tensor.name} ({facts.far:,} a million deviations away)")
        if facts.zeros is not None and _is_block(tensor.info, *facts.zeros):
            start, nbytes = facts.zeros
            lost = f"{tensor.name} ({nbytes:,} bytes of zeros, from byte {start:,} on)"
            odd.setdefault("damaged", []).append(lost)
    for kind, code, fact, hint, severity in _ODD:
        if kind in odd:
            yield note(code, f"{fact}: {some(odd.pop(kind))}", hint, severity=severity)
    if zero := odd.pop("zero", None):
        blank = [name for name, are_zero in files.items() if 1 < len(are_zero) <= sum(are_zero) / _NEARLY_ALL]
        where = f" in {some(blank)}" if any(blank) else ""
        fact = f"nearly all weights{where} are zero" if blank else f"{counted(len(zero), 'tensor')} all zero"
        hint, severity = (_NEVER_FILLED, "warning") if blank else (None, "info")
        yield note("CK112", f"{fact}: {some(zero)}", hint, severity=severity)
    for why, names in sorted(odd.items()):
        yield note("CK113", f"values not looked at, for {why}: {some(names)}")


def facts_of(row: ValueRow, tensor: LazyTensor) -> ValueFacts | str:
    """Return the facts that ``survey`` needs from known statistics of a tensor, or a text on why there are none."""
    found = row.values
    if found is None:
        return _NO_NUMBERS
    is_mask = found.infinite > 0 and found.infinite + found.zeros == found.total
    step = tensor.info.dtype.swap_nbytes  # bytes of a real number: half of a complex one
    # In a tensor of zeros and infinities, the top byte of a positive infinity alone is between these.
    only_masks = is_mask and not any(
        0 < top < 0x80 for piece in tensor.chunks(_VALUES_AT_ONCE) for top in piece[step - 1 :: step]
    )
    return ValueFacts(found.nan, found.infinite, found.zeros == found.total, only_masks)


def _facts(tensor: LazyTensor, limits: Limits) -> ValueFacts | str:
    """Return facts about the values of a tensor, or a text on why they are not inspected."""
    from ckptool.torch_ops import values as torch_values

    try:
        return torch_values.survey(tensor.chunks(_VALUES_AT_ONCE, limits=limits), tensor.dtype)
    except (UnsupportedFeature, LimitExceeded):
        return _NO_NUMBERS
    except SourceChanged:
        raise  # it is another file now, of which nothing that was found before is true
    except (FileUnavailable, UnreadableFile):  # a piece of it is missing, or is not as the index says
        return _UNREADABLE


def is_meant(name: str, facts: ValueFacts, numel: int) -> bool:
    """
    Return whether infinities of a tensor are intended: in a mask, or as the least or greatest value before the first
    batch, as observers keep them (``min_val``).
    """
    is_extreme = not {"min", "max", "amin", "amax"}.isdisjoint(name.rpartition(".")[2].split("_"))
    return facts.only_minus_infinity_and_zero or (facts.infinite == numel and is_extreme)


def _is_block(info: TensorInfo, start: int, nbytes: int) -> bool:
    """Return whether zeros seem a lost block of a disk, and not one row, or first or last rows, which may be empty."""
    storage, row = info.storage, info.nbytes // (info.shape or (1,))[0]
    if storage is None or nbytes < _BLOCK or nbytes == row:
        return False
    if not nbytes % row and (not start or start + nbytes == info.nbytes):
        return False
    place = file_under(storage.source, storage.offset + info.storage_offset * info.dtype.itemsize)
    return not start % _BLOCK or (place is not None and not (place[1] + start) % _BLOCK)


def _trained(checkpoint: Checkpoint, roles: Collection[str]) -> set[str]:
    """Return the full names of the tensors of state dicts with these roles."""
    found = [one for one in checkpoint.state_dicts if one.role in roles]
    return {f"{one.key}.{name}" if one.key else name for one in found for name in one}


_BLOCK: Final = 4096


def examine(checkpoint: Checkpoint, limits: Limits) -> Iterator[Finding]:
    """CK108: sparse tensors whose indices are out of range. Imports nothing, and reads only the indices."""
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
        yield note("CK108", what, "Leave them out when you migrate it: `exclude='NAME'`.", severity="error")
    if unread:
        yield note(
            "CK108", f"indices not looked at, for they are far larger than the file: {some(unread)}", severity="info"
        )


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
    """Return a text about the first index that is not below the bound of its row; None if there is none."""
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
    """Return a text if the row pointers do not rise from 0 to ``most``, by at most ``places`` a step; else None."""
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
    """Yield integers in row-major order, in pieces, each with the position of its first."""
    code, start = {"int64": "q", "int32": "i"}.get(indices.dtype.name), 0
    if code is None or indices.storage is None:
        return  # torch takes no others
    for chunk in LazyTensor("", indices).chunks(_PIECE_NBYTES, limits=limits):
        numbers = array(code, chunk)
        if sys.byteorder == "big":
            numbers.byteswap()
        yield start, numbers
        start += len(numbers)


class ValueRow(NamedTuple):
    """Statistics of the values of a tensor, or of the tensors of a module."""

    name: str
    tensors: int
    """Number of tensors; tied ones count once."""
    dtypes: tuple[str, ...]
    shape: tuple[int, ...] | None
    """None for a module."""
    values: Statistics | None
    """None if nothing could be computed; ``why`` has the reason."""
    why: str | None = None
    is_lost: bool = False
    """Whether there are values, and some cannot be read: the file is damaged, or a part of it is missing."""


@checked()
def stat(
    origin: Origin,
    *,
    include: Sequence[str] = (),
    depth: int | None = None,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> list[ValueRow]:
    """
    Return statistics of the values of each tensor, as ``ckptool stat``. Nothing runs; needs numpy, but not torch.

    ``include`` takes the names that match a glob, or one of several. With ``depth``, a row is about all tensors whose
    names share so many first components. A row whose values cannot be read says why.

    Raises:
        AmbiguousWeights: It is an archive of several checkpoints; the hint lists them.
        MissingPackage: numpy is not installed.
        WeightsNotFound: ``include`` matches no name.
        CkptoolError: The file cannot be read.
    """
    if depth is not None and depth < 0:
        raise ValueError(f"depth is a number of components, 0 or more, not {depth}")
    with open_checkpoint(origin, limits=limits) as checkpoint, about(checkpoint.path):
        tensors = checkpoint.tensors
        if not tensors:
            refuse_archive(checkpoint)
        chosen = [tensors[name] for name in names_matching("include", include, list(tensors))]
        return list(statistics_of(checkpoint, chosen, depth=depth, progress=progress, limits=limits))


def statistics_of(
    checkpoint: Checkpoint,
    tensors: Sequence[LazyTensor],
    *,
    depth: int | None,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[ValueRow]:
    """
    Yield statistics of the values of each of these tensors; with ``depth``, of the tensors of each module together,
    whose name is so many components.

    Tensors are read one after the other, in pieces; ``progress`` is called with the bytes that were read so far, and
    those to be read in all. Needs numpy, but not torch.

    Raises:
        MissingPackage: numpy is not installed.
        SourceChanged: The file is no longer what was opened.
    """
    checkpoint.announce(tensors)
    left = limits.expanded(checkpoint.file_nbytes)  # many tensors may be views of the same bytes
    meter = Meter(progress, sum(tensor.info.nbytes for tensor in tensors))
    for name, group in _groups(tensors, depth):
        check_cancelled(checkpoint.source.cancellation)
        whole = Tally()
        reasons: dict[str, None] = {}
        is_lost = False
        seen: set[tuple[object, ...]] = set()
        for tensor in group:
            if identity(tensor.info) in seen:
                continue
            seen.add(identity(tensor.info))
            left -= tensor.info.nbytes
            try:
                if left < 0:
                    raise LimitExceeded("its tensors repeat the bytes of the file many times over")
                tally = whole if len(group) == 1 else Tally()
                tally.add(_counted(tensor.chunks(_COUNTED_AT_ONCE, limits=limits), meter), tensor.dtype)
                if tally is not whole:
                    whole.join(tally)
            except (SourceChanged, MissingPackage):
                raise
            except Failure as error:
                reasons.setdefault(error.message)
                is_lost = is_lost or not isinstance(error, UnsupportedFeature)
        values = whole.result() if len(seen) > len(reasons) or not reasons else None
        shape = group[0].shape if depth is None else None
        dtypes = tuple(dict.fromkeys(tensor.dtype for tensor in group))
        yield ValueRow(name, len(seen), dtypes, shape, values, next(iter(reasons), None), is_lost)


def _counted(pieces: Iterable[bytes], meter: Meter) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        meter.read(len(piece))


def _groups(tensors: Iterable[LazyTensor], depth: int | None) -> Iterator[tuple[str, list[LazyTensor]]]:
    """Yield the tensors of each module, in the order of their first ones; each tensor by itself without ``depth``."""
    if depth is None:
        yield from ((tensor.name, [tensor]) for tensor in tensors)
        return
    found: dict[str, list[LazyTensor]] = {}
    for tensor in tensors:
        found.setdefault(".".join(tensor.name.split(".")[:-1][:depth]), []).append(tensor)
    yield from found.items()
