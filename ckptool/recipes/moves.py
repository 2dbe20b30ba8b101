"""
What the steps of a recipe do to tensors: join, cut, permute, without computing a value.

The bytes of a result are ranges of the bytes of its inputs, or their elements in another order; they are read when it
is written, in bounded pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Final

from ckptool.errors import MigrationRefused
from ckptool.messages import some
from ckptool.recipes.recipe import Number, Rule, Step, after
from ckptool.tensors.pieces import Piece, PiecesSource, in_pieces, joined, packed
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import MAX_RANK, TensorInfo, is_countable, row_major

_MOST_PARTS: Final = 1 << 16
"""Most tensors that one can be cut into."""
Tensors = list[LazyTensor]
"""One tensor, or those of a list of modules."""
Value = Callable[[Number], int]


def moved(rule: Rule, columns: Sequence[Tensors], value: Value) -> list[Tensors]:
    """
    Return what the steps of a rule make of tensors: for each of its targets one, or those of a list.

    Raises:
        MigrationRefused: A tensor is not plain, or shapes and types do not fit a step.
    """
    found = [[plain(one) for one in column] for column in columns]
    is_list = rule.sources[0].many is not None
    for number, step in enumerate(rule.steps, 1):
        try:
            found, is_list = _after(step, found, is_list, rule, value)
        except MigrationRefused as error:
            error.hint = error.hint or f"Look at step {number}, {str(step)!r}, of the rule {rule}."
            raise
    return [[settled(one) for one in column] for column in found]


def _after(step: Step, columns: list[Tensors], is_list: bool, rule: Rule, value: Value) -> tuple[list[Tensors], bool]:
    way, count, is_list = after(step, len(columns), is_list, rule)
    if way == "each":
        of, change = step.of or range(len(columns)), _CHANGES[step.op]
        changed = [
            [change(one, step, value) for one in column] if at in of else column for at, column in enumerate(columns)
        ]
        return changed, is_list
    sizes = tuple(map(value, step.sizes))

    def joined_up(parts: Sequence[LazyTensor]) -> LazyTensor:
        return stacked(parts, step.dim) if step.op == "stack" else concatenated(parts, step.dim, sizes)

    def apart(one: LazyTensor) -> Tensors:
        if step.op == "split":
            return cut(one, step.dim, sizes)
        if step.op == "chunk":
            return chunks(one, step.dim, count if way == "apart" else value(step.parts or 0))
        return _unstacked(one, step.dim, count if way == "apart" else None)

    if way == "rows":
        ordered = [columns[place] for place in step.order or range(len(columns))]
        return [[joined_up(row) for row in zip(*ordered, strict=True)]], is_list
    if way == "lists":
        if step.op == "concat" and len(columns[0]) != value(step.parts or 0):
            fact = f"there are {len(columns[0])} of it, and the recipe wants {value(step.parts or 0)}"
            raise _refused(columns[0][0], fact)
        return [[joined_up(column)] for column in columns], is_list
    if way == "to lists":
        return [apart(column[0]) for column in columns], is_list
    parts = [list(column) for column in zip(*map(apart, columns[0]), strict=True)]
    return [parts[step.order.index(place)] for place in range(len(parts))] if step.order else parts, is_list


def _refused(tensor: LazyTensor, fact: str) -> MigrationRefused:
    return MigrationRefused(f"{tensor.name!r} {list(tensor.shape)}: {fact}", kind="recipe-shape")


def plain(tensor: LazyTensor) -> LazyTensor:
    """Return a tensor, if more can be done with it than rename it; else raise MigrationRefused."""
    info = tensor.info
    if info.storage is None or info.layout != "strided" or info.dtype.packed > 1 or info.is_array:
        what = f"it is {info.layout} {info.dtype} on {info.location}, and only plain tensors can be more than renamed"
        raise MigrationRefused(f"{tensor.name!r}: {what}", kind="recipe-not-plain")
    return tensor


def _dim(tensor: LazyTensor, dim: int, rank: int) -> int:
    if not -rank <= dim < rank:
        raise _refused(tensor, f"there is no dimension {dim}")
    return dim % rank


def _with(tensor: LazyTensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> LazyTensor:
    return LazyTensor(tensor.name, tensor.info._replace(shape=shape, stride=stride, parts=()))


def settled(tensor: LazyTensor) -> LazyTensor:
    """Return a tensor whose elements are in row-major order, and alone in their storage."""
    info = tensor.info
    assert info.storage is not None  # plain saw it
    if info.is_as_stored and info.nbytes == info.storage.nbytes:
        return tensor
    if info.is_as_stored and info.shape:
        return LazyTensor(tensor.name, tensor[:].info)
    made = in_pieces(tensor.name, info.shape, info.dtype, packed(info, tensor.name), info.location)
    return LazyTensor(tensor.name, made._replace(requires_grad=info.requires_grad, kind=info.kind))


def _joined(parts: Sequence[LazyTensor], shape: tuple[int, ...], dim: int, sizes: Sequence[int]) -> LazyTensor:
    """Return parts joined along a dimension, in their order; ``sizes`` are their sizes in it."""
    first = parts[0]
    if len(shape) > MAX_RANK or not is_countable(shape):
        raise _refused(first, f"{len(parts)} of them are more elements than a tensor can have")
    storage = first.info.storage
    assert storage is not None  # plain saw it
    name = first.name if len(parts) == 1 else f"{first.name} and {len(parts) - 1} more"
    pieces = partial(_pieces, parts, len(shape), dim, sizes)
    info = joined(name, shape, first.info.dtype, pieces, storage.source.cancellation)
    info = info._replace(location=first.info.location, requires_grad=first.info.requires_grad, kind=first.info.kind)
    if info.storage is not None:
        info = info._replace(storage=info.storage._replace(location=first.info.location))
    return LazyTensor(name, info)


def _pieces(parts: Sequence[LazyTensor], rank: int, dim: int, sizes: Sequence[int]) -> list[Piece]:
    """Return the pieces of joined parts: for a part that was joined itself, its own pieces, whose bytes are runs."""
    found = []
    for part, begin in zip(parts, accumulate(sizes, initial=0), strict=False):
        source = part.info.storage and part.info.storage.source
        inner = [((0,) * len(part.shape), part.info)]
        if isinstance(source, PiecesSource) and part.info.is_as_stored and source.shape == part.shape:
            inner = [(one.offsets, source.info(index)) for index, one in enumerate(source.pieces)]
        for offsets, info in inner:
            if rank > len(part.shape):  # a dimension more, of one element
                offsets = (*offsets[:dim], 0, *offsets[dim:])
                shape, stride = ((*side[:dim], 1, *side[dim:]) for side in (info.shape, info.stride))
                info = info._replace(shape=shape, stride=stride)
            offsets = (*offsets[:dim], offsets[dim] + begin, *offsets[dim + 1 :])
            found.append(Piece(offsets, info.shape, part.name, partial(_same, info)))
    return found


def _same(info: TensorInfo) -> TensorInfo:
    return info


def _refuse_unlike(parts: Sequence[LazyTensor], kept: Callable[[LazyTensor], object]) -> None:
    """Raise MigrationRefused unless parts have one type, and the same shape except along the joined dimension."""
    first = parts[0]
    for other in parts[1:]:
        if (other.dtype, kept(other)) != (first.dtype, kept(first)):
            what = f"{other.dtype} {list(other.shape)}, and {first.name!r} {first.dtype} {list(first.shape)}"
            raise MigrationRefused(f"{other.name!r} is {what}: they cannot be one tensor", kind="recipe-shape")


def stacked(parts: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """Return tensors of one shape stacked along a new dimension."""
    first = parts[0]
    dim = _dim(first, dim, len(first.shape) + 1)
    _refuse_unlike(parts, lambda one: one.shape)
    shape = (*first.shape[:dim], len(parts), *first.shape[dim:])
    return _joined(parts, shape, dim, [1] * len(parts))


def concatenated(parts: Sequence[LazyTensor], dim: int, sizes: Sequence[int] | None) -> LazyTensor:
    """Return tensors joined along a dimension: of equal sizes, of ``sizes``, or of any sizes if that is None."""
    first = parts[0]
    dim = _dim(first, dim, len(first.shape))
    _refuse_unlike(parts, lambda one: (len(one.shape), *one.shape[:dim], *one.shape[dim + 1 :]))
    found = [one.shape[dim] for one in parts]
    if sizes and found != list(sizes):
        names = some([one.name for one in parts])
        raise _refused(first, f"{names} have {found} along {dim}, and the recipe wants {list(sizes)}")
    if sizes is not None and not sizes and len(set(found)) > 1:
        fact = f"the parts have {found} along {dim}: a recipe says sizes where they are not equal"
        raise _refused(first, fact)
    return _joined(parts, (*first.shape[:dim], sum(found), *first.shape[dim + 1 :]), dim, found)


def cut(tensor: LazyTensor, dim: int, sizes: Sequence[int]) -> Tensors:
    """Return a tensor cut into pieces of these sizes along a dimension."""
    dim = _dim(tensor, dim, len(tensor.shape))
    if sum(sizes) != tensor.shape[dim] or min(sizes) < 0:
        raise _refused(tensor, f"sizes {list(sizes)} are not the {tensor.shape[dim]} along {dim}")
    found, begin = [], 0
    for size in sizes:
        own = (*((slice(None),) * dim), slice(begin, begin + size))
        found.append(LazyTensor(tensor.name, tensor[own].info))
        begin += size
    return found


def chunks(tensor: LazyTensor, dim: int, parts: int) -> Tensors:
    """Return a tensor cut into equal pieces along a dimension."""
    dim = _dim(tensor, dim, len(tensor.shape))
    size = tensor.shape[dim]
    _refuse_many(tensor, parts)
    if parts < 1 or size % parts:
        raise _refused(tensor, f"its {size} along {dim} cannot be cut into {parts} equal parts")
    return cut(tensor, dim, [size // parts] * parts)


def _refuse_many(tensor: LazyTensor, parts: int) -> None:
    if parts > _MOST_PARTS:
        raise _refused(tensor, f"it would become {parts:,} tensors, and {_MOST_PARTS:,} are allowed")


def _unstacked(tensor: LazyTensor, dim: int, wanted: int | None = None) -> Tensors:
    dim = _dim(tensor, dim, len(tensor.shape))
    size = tensor.shape[dim]
    _refuse_many(tensor, size)
    if wanted not in (None, size):
        raise _refused(tensor, f"it has {size} along {dim}, and the recipe wants {wanted}")
    found = []
    for one in cut(tensor, dim, [1] * size) if size else ():
        shape, stride = one.shape, one.info.stride
        found.append(_with(one, (*shape[:dim], *shape[dim + 1 :]), (*stride[:dim], *stride[dim + 1 :])))
    return found


def _permuted(tensor: LazyTensor, step: Step, _: Value) -> LazyTensor:
    rank, dims = len(tensor.shape), list(step.dims)
    if step.op == "transpose":
        one, other = (_dim(tensor, dim, rank) for dim in step.dims)
        dims = list(range(rank))
        dims[one], dims[other] = other, one
    if len(dims) != rank:
        raise _refused(tensor, f"it has not {len(dims)} dimensions")
    shape, stride = (tuple(side[dim] for dim in dims) for side in (tensor.shape, tensor.info.stride))
    return _with(tensor, shape, stride)


def _reshaped(tensor: LazyTensor, step: Step, value: Value) -> LazyTensor:
    was, shape = (_filled(tensor, tuple(map(value, side))) for side in (step.was, step.shape))
    if was != tensor.shape:
        raise _refused(tensor, f"the recipe wants {list(was)}")
    return _viewed(tensor, shape)


def _filled(tensor: LazyTensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape with the size that -1 stands for."""
    known = prod(size for size in shape if size != -1)
    free = tensor.numel // known if known > 0 else 0
    found = tuple(free if size == -1 else size for size in shape)
    if min(found) < 0 or prod(found) != tensor.numel:
        raise _refused(tensor, f"its {tensor.numel:,} elements are not {list(shape)}")
    return found


def _viewed(tensor: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    return _with(settled(tensor), shape, row_major(shape))


def _roped(tensor: LazyTensor, step: Step, value: Value) -> LazyTensor:
    """
    Return rows that are pairs within each head as rows that are halves (``rope``), or the other way.

    transformers; src/transformers/models/llama/convert_llama_weights_to_hf.py, permute
    """
    heads = value(step.heads)
    rows = tensor.shape[0] if tensor.shape else 0
    if heads < 1 or rows % (2 * heads):
        raise _refused(tensor, f"its rows are not pairs in {heads} heads")
    half = rows // heads // 2
    pairs = (heads, half, 2) if step.op == "rope" else (heads, 2, half)
    whole = _viewed(tensor, (*pairs, *tensor.shape[1:]))
    order = (0, 2, 1, *range(3, len(whole.shape)))
    return _viewed(_permuted(whole, Step("permute", dims=order), value), tensor.shape)


_CHANGES: Final[Mapping[str, Callable[[LazyTensor, Step, Value], LazyTensor]]] = {
    "rename": lambda tensor, *_: tensor,
    "transpose": _permuted,
    "permute": _permuted,
    "reshape": _reshaped,
    "rope": _roped,
    "unrope": _roped,
}
