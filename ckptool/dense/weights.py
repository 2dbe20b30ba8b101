"""
Weights with what is quantised among them made dense, while it is read.

What scales them, and all that means nothing without them, is left out. Everything else stays as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from math import prod

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.quantized_layouts import FP8
from ckptool.checkpoints.weights import Weights
from ckptool.dense.layouts import HALF, OF_ACTIVATIONS, PLAIN_OF_COMFY, Dense, dense_of, refuse_unknown
from ckptool.errors import MigrationRefused
from ckptool.formats.json_beside import quantization_of
from ckptool.tensors import dtypes
from ckptool.tensors.made import MadeWeight
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity


class DenseSource(MadeWeight):
    """The bytes of a dense weight, computed while they are read from the first to the last."""

    def __init__(self, name: str, dense: Dense, scheme: str, dtype: str, *, saturate: bool) -> None:
        nbytes, said = prod(dense.shape) * dtypes.BY_NAME[dtype].itemsize, f"{scheme} before, dense now, in {dtype}"
        super().__init__(name, nbytes, said, list(dense.parts.values()))
        self.dense = dense
        self._dtype = dtype
        self._saturate = saturate

    def made(self) -> Iterator[bytes]:
        from ckptool.torch_ops.dequantize import HOW, packed  # no other migration needs torch

        dense = self.dense
        parts = {name: tensor.torch() for name, tensor in dense.parts.items()}
        values = HOW[dense.how](parts, dense.facts)
        return packed(values, self._dtype, self._name, saturate=self._saturate)


def _is_of_activations(path: str, tensor: LazyTensor, around: Collection[str]) -> bool:
    """Say whether a number scales activations or caches, in a module ``around`` quantised weights; or marks a file."""
    is_marker = path.rpartition(".")[2] == "scaled_fp8" and tensor.dtype in FP8
    is_scale = tensor.numel == 1 and OF_ACTIVATIONS.search(path) is not None
    return is_marker or (is_scale and path.rpartition(".")[0] in around)


def _refuse_comfy(checkpoint: Checkpoint) -> None:
    """Refuse a file whose header says that scales are in an order that only kernels have."""
    forms = re.findall(r'"format"\s*:\s*"(\w{1,40})"', checkpoint.metadata.get("_quantization_metadata", ""))
    if other := next((one for one in forms if not one.startswith(PLAIN_OF_COMFY)), None):
        raise MigrationRefused(f"it cannot be made dense: its layout is {other!r}, of ComfyUI", kind="not-dense")


def _are_same(one: Dense, other: Dense) -> bool:
    """Say whether two names of the same values are one weight: their scales may be copies."""
    from ckptool.torch_ops.differences import differ  # few are tied

    if one._replace(parts={}) != other._replace(parts={}) or one.parts.keys() != other.parts.keys():
        return False
    pairs = [(part, other.parts[key]) for key, part in one.parts.items()]
    return all(a.shape == b.shape and a.dtype == b.dtype and not differ(a, b) for a, b in pairs)


def make_dense(
    checkpoint: Checkpoint,
    weights: Weights,
    dtype: str | None = None,
    *,
    saturate: bool = False,
    at_once: bool = False,
) -> tuple[Weights, list[DenseSource]]:
    """
    Return weights in which what was quantised is dense, and what makes each that is.

    ``dtype`` is the type that dense weights get. Without it, that is the type of their scales if it has 16 bits, or
    what the layout says, or bfloat16. Names keep what was changed of them. The bytes of a dense weight are computed
    each time that they are read: in order, or ``at_once`` where who reads them would take pieces in any order.

    Raises:
        MigrationRefused: Nothing is quantised; or a weight has no scale, a layout that cannot be made dense, parts that
            do not fit, or a name that does not say any more what it is.
    """
    found = quantization_of(checkpoint)
    if found is None or not found.bound:
        raise MigrationRefused(
            "nothing in it is quantised, as far as is known", kind="not-quantised", hint="Leave out `dequantize=`."
        )
    _refuse_comfy(checkpoint)
    head = weights.state_dict.head
    new = {head + old: name for name, old in weights.old_names.items() if name in weights.tensors}
    there = {**checkpoint.tensors, **{path: weights.tensors[name] for path, name in new.items()}}  # with what is tied
    chosen = {one.name: (one, others) for one, others in found.bound if one.name in new}
    usual = Counter(dict.fromkeys(HALF, 0))
    for tensor in weights.tensors.values():
        usual[tensor.dtype] += tensor.numel * (tensor.dtype in HALF)
    made: dict[str, tuple[str, LazyTensor]] = {}
    sources: list[DenseSource] = []
    tied: dict[object, DenseSource] = {}
    gone = {other for _, others in chosen.values() for other in others} - chosen.keys()
    around = {path[:end] for path in chosen for end, char in enumerate(path) if char == "."}
    gone |= {path for path in new if _is_of_activations(path, there[path], around)}
    for path, (weight, others) in chosen.items():
        dense = dense_of(weight, there, found.settings, usual.most_common(1)[0][0])
        used = {id(part) for part in dense.parts.values()}
        refuse_unknown(path, [one for one in others if id(there.get(one)) not in used])
        name = new[path]
        if not name.endswith(dense.end):
            hint = "Make it dense first, and change names afterwards."
            raise MigrationRefused(
                f"{path!r} is called {name!r} now: what it is cannot be known", kind="not-dense", hint=hint
            )
        name = name[: len(name) - len(dense.end)] + dense.new_end
        own = dtype or dense.dtype
        memory = identity(dense.parts["values"].info)
        source = tied.get(memory)
        if source is None or not _are_same(source.dense, dense):
            source = tied[memory] = DenseSource(name, dense, weight.scheme, own, saturate=saturate)
            source.is_compressed = at_once
            sources.append(source)
        info = source.tensor(there[path].info, dtypes.BY_NAME[own], dense.shape)
        made[path] = name, LazyTensor(name, info)
    tensors: dict[str, LazyTensor] = {}
    old_names = dict(weights.old_names)
    for name, tensor in weights.tensors.items():
        path = head + weights.old_names[name]
        if path in gone:
            del old_names[name]
            continue
        dense_name, one = made.get(path, (name, tensor))
        if path not in made and tensor.dtype in FP8:
            raise MigrationRefused(f"{path!r} is of type {tensor.dtype}, and has no scale", kind="not-dense")
        if dense_name in tensors or (dense_name != name and dense_name in weights.old_names):
            raise MigrationRefused(f"two tensors would be called {dense_name!r}", kind="not-dense")
        tensors[dense_name] = one
        old_names[dense_name] = old_names.pop(name)
    left = tuple(old for name, old in weights.old_names.items() if head + old in gone)
    return weights._replace(tensors=tensors, old_names=old_names, dropped=(*weights.dropped, *left)), sources
