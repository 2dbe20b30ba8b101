"""
Make the quantised ones among weights dense: they are computed while they are read.

Their scales, and all that has no meaning without them, are left out. Everything else stays as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Final

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.quantized import BY_TORCHAO
from ckptool.checkpoints.quantized_layouts import FP8
from ckptool.checkpoints.weights import Weights
from ckptool.dense.layouts import HALF, OF_ACTIVATIONS, PLAIN_OF_COMFY, Dense, dense_of, refuse_unknown
from ckptool.errors import MigrationRefused
from ckptool.formats.json_beside import object_beside, quantization_of
from ckptool.tensors import dtypes
from ckptool.tensors.computed import ComputedWeight
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity

_OF_QUANTO: Final = ("input_scale", "output_scale")
_OF_CONV1D: Final = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder")
"""Types of models of transformers that keep the weights of these layers (``_CONV1D``) as [inputs, outputs]."""
_UNKNOWN_MODEL: Final = ", [outputs, inputs]; GPT-2 wants [inputs, outputs], and no config.json says which model it is"
_CONV1D: Final = re.compile(r"\.(?:c_attn|q_attn|c_proj|c_fc)\.[^.]+\Z")


class DenseSource(ComputedWeight):
    """The bytes of a dense weight, computed while they are read from the first to the last."""

    def __init__(self, name: str, dense: Dense, scheme: str, dtype: str, *, saturate: bool) -> None:
        nbytes, said = prod(dense.shape) * dtypes.BY_NAME[dtype].itemsize, f"{scheme} before, dense now, in {dtype}"
        super().__init__(name, nbytes, said, list(dense.parts.values()))
        self.dense = dense
        self._dtype = dtype
        self._saturate = saturate

    def made(self) -> Iterator[bytes]:
        from ckptool.torch_ops.dequantize import HOW, packed, transposed  # no other migration needs torch

        dense = self.dense
        parts = {name: tensor.torch() for name, tensor in dense.parts.items()}
        values = HOW[dense.how](parts, dense.facts)
        values = transposed(values, dense.shape[0]) if dense.is_turned else values
        return packed(values, self._dtype, self.name, saturate=self._saturate)


def _is_of_activations(path: str, tensors: Mapping[str, LazyTensor], around: Collection[str]) -> bool:
    """
    Return whether a number scales activations or caches, or marks a file.

    It is in a module ``around`` quantised weights; or is one of the two that quanto gives a norm without such weights.
    """
    tensor, (module, _, name) = tensors[path], path.rpartition(".")
    is_marker = name == "scaled_fp8" and tensor.dtype in FP8
    is_scale = tensor.numel == 1 and OF_ACTIVATIONS.search(path) is not None
    is_pair = name in _OF_QUANTO and all(f"{module}.{one}" in tensors for one in _OF_QUANTO)
    return is_marker or (is_scale and (module in around or is_pair))


def _refuse_comfy(checkpoint: Checkpoint) -> None:
    """Refuse a file whose header says that scales are in an order that only kernels use."""
    forms = re.findall(r'"format"\s*:\s*"(\w{1,40})"', checkpoint.metadata.get("_quantization_metadata", ""))
    if other := next((one for one in forms if not one.startswith(PLAIN_OF_COMFY)), None):
        raise MigrationRefused(f"it cannot be made dense: its layout is {other!r}, of ComfyUI", kind="not-dense")


def _are_same(one: Dense, other: Dense) -> bool:
    """Return whether two names of the same values are one weight: their scales may be copies."""
    from ckptool.torch_ops.differences import differ  # few are tied

    if one._replace(parts={}) != other._replace(parts={}) or one.parts.keys() != other.parts.keys():
        return False
    pairs = [(part, other.parts[key]) for key, part in one.parts.items()]
    return all(a.shape == b.shape and a.dtype == b.dtype and not differ(a, b) for a, b in pairs)


def _usual_type(plain: Sequence[LazyTensor]) -> str:
    """Return the 16-bit type that most plain elements have; if none has, float32 if any is, else bfloat16."""
    usual = Counter[str]()
    for tensor in plain:
        usual[tensor.dtype] += tensor.numel
    found = [dtype for dtype, _ in usual.most_common() if dtype in HALF]
    return found[0] if found else "float32" if usual["float32"] else HALF[0]


def make_dense(
    checkpoint: Checkpoint, weights: Weights, dtype: str | None = None, *, saturate: bool = False, at_once: bool = False
) -> tuple[Weights, list[DenseSource]]:
    """
    Return weights in which the quantised ones are dense, and the sources that compute these.

    ``dtype`` is the type of the dense weights; by default that of their scales if it has 16 bits, or what the layout
    says, or bfloat16. Changes of names are kept. The bytes of a dense weight are computed each time that they are read:
    in order, or ``at_once`` for readers that take pieces in any order.

    Raises:
        MigrationRefused: Nothing is quantised; or a weight has no scale, a layout that cannot be made dense, parts that
            do not fit, or a name that does not show any more what it is.
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
    made: dict[str, tuple[str, LazyTensor]] = {}
    sources: list[DenseSource] = []
    tied: dict[object, DenseSource] = {}
    gone = {other for _, others in chosen.values() for other in others} - chosen.keys()
    around = {path[:end] for path in chosen for end, char in enumerate(path) if char == "."}
    gone |= {path for path in new if _is_of_activations(path, there, around)}
    plain = _usual_type([there[path] for path in new if path not in gone and path not in chosen])
    model = object_beside(checkpoint.path, checkpoint.source, "config.json").get("model_type")
    for path, (weight, others) in chosen.items():
        dense = dense_of(weight, there, found.settings, plain)
        may_turn = _CONV1D.search(path) is not None and len(dense.shape) == 2
        if may_turn and model in _OF_CONV1D:
            dense = dense._replace(shape=dense.shape[::-1], is_turned=True)
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
            source.said += _UNKNOWN_MODEL if may_turn and model is None else ""
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
    texts = weights.texts
    if BY_TORCHAO in checkpoint.metadata:
        texts = tuple((key, text) for key, text in texts if key != BY_TORCHAO and not text.startswith('{"_type"'))
    made_of = weights._replace(tensors=tensors, old_names=old_names, dropped=(*weights.dropped, *left), texts=texts)
    return made_of, sources
