"""
Adapters of low rank → the weights that they change, computed while they are read.

Names and shapes are compared before anything is written. Every pair of an adapter is used, or the merge is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import Weights
from ckptool.errors import MigrationRefused
from ckptool.formats.json_beside import EMBEDDINGS, HEADS, quantization_of, ties_embedding
from ckptool.merging.adapters import OF_PEFT, Adapter, Pair, head_of, refuse_no_floats, refused
from ckptool.messages import as_path, counted, some
from ckptool.migration.casting import Memory, memory_of
from ckptool.names.renaming import by_likeness
from ckptool.tensors.computed import ComputedWeight
from ckptool.tensors.reading import LazyTensor

_WEIGHT: Final = ".weight"
_OF_KOHYA: Final = "lora_"
_OF_ANOTHER: Final = "Give the model that the adapter was made for."
_SETTINGS_TURN: Final = "It fits the other way round: copy adapter_config.json, too, if it says so (fan_in_fan_out)."
_LACKS: Final = ("CK122", "CK123")
"""Findings that an adapter has no tensors of modules that its settings announce."""
_PLAIN_FIRST: Final = "Quantised weights become plain with `dequantize=True`."


class _Change(NamedTuple):
    """What one adapter does to one weight: it replaces it by a tensor, adds a product, or both."""

    adapter: Adapter
    pair: Pair | None
    parts: Sequence[LazyTensor]
    scale: float = 1.0
    is_turned: bool = False
    saved: LazyTensor | None = None

    @property
    def said(self) -> str:
        if self.pair is None:
            return f"that of {as_path(self.adapter.checkpoint.path)} in its place"
        kind = "DoRA" if self.pair.magnitude is not None else "LoRA"
        added = f"added{' to its own weight' if self.saved is not None else ''}, of rank {self.parts[0].shape[0]}"
        return f"{kind} of {as_path(self.adapter.checkpoint.path)} {added}, times {self.scale:g}"

    @property
    def is_alone(self) -> bool:
        """Whether no other change of the same weight is allowed with it."""
        return self.saved is not None or (self.pair is not None and self.pair.magnitude is not None)


class _Merged(ComputedWeight):
    """The bytes of a weight with what adapters add to it, or of a tensor that replaces it, in the weight's type."""

    def __init__(self, name: str, base: LazyTensor, changes: Sequence[_Change]) -> None:
        parts = [part for one in changes for part in (*one.parts, *filter(None, [one.saved]))]
        super().__init__(name, base.nbytes, "; ".join(one.said for one in changes), parts)
        self._base = base
        self._changes = changes

    def made(self) -> Iterator[bytes]:
        from ckptool.torch_ops import merging
        from ckptool.torch_ops.values import is_finite

        weight = merging.own(self._base)
        for one in self._changes:
            if one.saved is not None:
                weight = merging.own(one.saved).to(weight.dtype)
            if one.pair is not None:
                parts = [merging.own(part) for part in one.parts]
                is_embedding = one.pair.is_embedding
                weight = merging.add_low_rank(
                    weight, *parts, scale=one.scale, is_turned=one.is_turned, is_embedding=is_embedding
                )
            one.adapter.checkpoint.check_unchanged()
        if not is_finite(weight.flatten()):
            lost = merging.finite_count(merging.own(self._base)) - merging.finite_count(weight)
            if lost > 0:
                fact = f"{counted(lost, 'value')} of {self.name!r} would be infinite or NaN, and was finite"
                hint = "The adapter has such values, or is too strong for this type: cast the base to float32 first."
                raise MigrationRefused(fact, kind="not-merged", hint=hint)
        return merging.bytes_of(weight)


class LoraMerge:
    """Applies adapters to weights, one after another, each with its factor."""

    def __init__(self, adapters: Sequence[tuple[Adapter, float]], *, allow_unmatched: bool) -> None:
        self._adapters = adapters
        self._allow_unmatched = allow_unmatched
        self.notes: list[str] = []
        self.assumed: list[str] = []

    def __call__(self, checkpoint: Checkpoint, weights: Weights) -> tuple[Weights, Sequence[ComputedWeight]]:
        """
        Return the weights with the changes of adapters, and those that are computed. Tied names stay tied.

        Raises:
            MigrationRefused: A part of an adapter fits no weight, or several.
        """
        names = {name: name for name in weights.tensors}
        names |= {old: name for name, old in weights.old_names.items() if name in weights.tensors}
        tied = _tied_by_settings(checkpoint, weights)
        changes: dict[object, list[_Change]] = {}
        for adapter, weight in self._adapters:
            fits = self._fits(adapter, checkpoint, names)
            for name, many in Counter(fits.values()).items():
                if many > 1:
                    raise refused(adapter.checkpoint, f"{many} of its parts are of {name!r}")
            here: dict[str, _Change] = {}
            for key, name in fits.items():
                here[key] = change = _change(adapter, key, weight, name, weights.tensors[name])
                memory = memory_of(weights.tensors[name].info)
                together = changes.setdefault(tied.get(memory, memory), [])
                together.append(change)
                if len(together) > 1 and any(one.is_alone for one in together):
                    raise refused(adapter.checkpoint, f"{name!r} is changed in another way, too")
            _refuse_mixed(adapter, here, {key: weights.tensors[name].shape for key, name in fits.items()})
            path, lacks = (
                adapter.checkpoint.path,
                [one.what for one in adapter.checkpoint.remarks if one.code in _LACKS],
            )
            facts = [f"{as_path(path)}: {fact}" for fact in lacks]
            if adapter.has_no_alpha:
                facts.append(f"nothing says the alpha of {as_path(path)}: it is taken to be the rank")
            self.notes += facts
            self.assumed += facts
        made: dict[object, _Merged] = {}
        tensors = dict(weights.tensors)
        for name, tensor in weights.tensors.items():
            memory = memory_of(tensor.info)
            memory = tied.get(memory, memory)
            if memory is None or memory not in changes:
                continue
            if memory in made:
                self.notes.append(f"{name!r} is tied to what is merged, and changes with it")
            else:
                made[memory] = _Merged(name, tensor, changes[memory])
            tensors[name] = LazyTensor(name, made[memory].tensor(tensor.info, tensor.info.dtype))
        return weights._replace(tensors=tensors), list(made.values())

    def _fits(self, adapter: Adapter, base: Checkpoint, names: Mapping[str, str]) -> dict[str, str]:
        """Return the tensor of the base for each pair, and for each replacing tensor, of an adapter."""
        groups: dict[str, list[str]] = {}
        for key in (*adapter.pairs, *adapter.saved):
            groups.setdefault(head_of(key), []).append(key)
        modules = {name.removesuffix(_WEIGHT): new for name, new in names.items() if name.endswith(_WEIGHT)}
        found: dict[str, str] = {}
        for head, keys in groups.items():
            found |= _placed(adapter, head, keys, modules, names)
        left = [key for keys in groups.values() for key in keys if key not in found]
        if left and not (self._allow_unmatched and found):
            fact = f"{len(left):,} of its {len(adapter.pairs) + len(adapter.saved):,} parts fit no weight: {some(left)}"
            plain = left[0].removeprefix(head_of(left[0]))
            hint = f"The nearest of the base: {some(by_likeness(plain, sorted(modules)))}."
            embedding = next(filter(EMBEDDINGS.search, names), None)
            if embedding and any(HEADS.search(f"{key}{_WEIGHT}") for key in left) and ties_embedding(base) is not False:
                hint = f"The output layer of this model is tied to {embedding!r}, and has no tensor: untie and save it."
            hint += " To merge what fits: `allow_unmatched=True`." if found else ""
            quantised = quantization_of(base)
            hint += f" {_PLAIN_FIRST}" if quantised is not None and quantised.bound else ""
            raise refused(adapter.checkpoint, fact, hint)
        if left:
            path = as_path(adapter.checkpoint.path)
            self.notes.append(f"{len(left):,} parts of {path} fit no weight, and are left out: {some(left)}")
        return found


def _tied_by_settings(checkpoint: Checkpoint, weights: Weights) -> dict[Memory | None, Memory | None]:
    """Return the memory of the embedding by that of an output layer, if config.json ties them and they are equal."""
    from ckptool.torch_ops.differences import differ

    tensors = weights.tensors.items()
    head, embedding = (next((one for name, one in tensors if of.search(name)), None) for of in (HEADS, EMBEDDINGS))
    if head is None or embedding is None or (head.shape, head.dtype) != (embedding.shape, embedding.dtype):
        return {}
    if ties_embedding(checkpoint) is not True or differ(head, embedding):
        return {}
    return {memory_of(head.info): memory_of(embedding.info)}


def _placed(
    adapter: Adapter, head: str, keys: Sequence[str], modules: Mapping[str, str], names: Mapping[str, str]
) -> dict[str, str]:
    """
    Return the tensors of the base for the parts of an adapter whose names all begin with ``head``.

    Names of the base may have a longer prefix, if it is the same for all; some parts may be missing if there is none.
    """
    is_flat = head.startswith(_OF_KOHYA)
    if is_flat:  # dots are underscores there: a name that two modules would have is not used
        many = Counter(module.replace(".", "_") for module in modules)
        flat = ((module.replace(".", "_"), name) for module, name in modules.items())
        modules = {module: name for module, name in flat if many[module] == 1}
    best: dict[str, str] = {}
    for start in (head,) if is_flat or head == OF_PEFT else ("", head):
        own = {key: (key[len(start) :], modules if key in adapter.pairs else names) for key in keys}
        first, there = own[keys[0]]
        end = f"{'_' if is_flat else '.'}{first}"
        before = ["", *dict.fromkeys(one[: -len(first)] for one in there if one.endswith(end) and first not in there)]
        whole = [at for at in before if all(at + one in home for one, home in own.values())]
        if len(meant := dict.fromkeys(there[at + first] for at in whole)) > 1:
            raise refused(adapter.checkpoint, f"{keys[0]!r} may be {some(list(meant))}")
        if whole:
            return {key: home[whole[0] + one] for key, (one, home) in own.items()}
        best = max(best, {key: home[one] for key, (one, home) in own.items() if one in home}, key=len)
    return best


def _refuse_mixed(adapter: Adapter, changes: Mapping[str, _Change], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse square weights that are said to be [inputs, outputs] beside others that surely are not."""
    layers = {
        key: one
        for key, one in changes.items()
        if adapter.turns and one.pair is not None and not one.pair.is_embedding and len(shapes[key]) == 2
    }
    square = next((key for key, one in layers.items() if one.is_turned and len(set(shapes[key])) == 1), None)
    other = next((key for key, one in layers.items() if not one.is_turned), None)
    if square is not None and other is not None:
        fact = f"its settings say fan_in_fan_out, which {other!r} is not: {square!r} is square, and may be either"
        raise refused(adapter.checkpoint, fact, "Merge it with the library that made it.")


def _change(adapter: Adapter, key: str, weight: float, name: str, base: LazyTensor) -> _Change:
    """Return the change of a weight of the base by a part of an adapter; refuse what does not fit it."""
    shape = base.shape
    refuse_no_floats(adapter.checkpoint, base, f"{name!r} in the base", hint=_PLAIN_FIRST)
    pair = adapter.pairs.get(key)
    saved = adapter.saved[key] if pair is None else pair.saved
    if saved is not None:
        refuse_no_floats(adapter.checkpoint, saved, repr(saved.name))
        if saved.shape != shape:
            fact = f"{saved.name!r} is {list(saved.shape)}, and {name!r} in the base {list(shape)}"
            raise refused(adapter.checkpoint, fact)
    if pair is None:
        return _Change(adapter, None, [], saved=saved)
    if pair.down.dtype != pair.up.dtype and "float64" in (pair.down.dtype, pair.up.dtype):
        fact = f"{key!r} has matrices of {pair.down.dtype} and {pair.up.dtype}"
        raise refused(adapter.checkpoint, fact)
    down, up, magnitude = pair.down.shape, pair.up.shape, pair.magnitude
    is_product = len(down) > 1 and len(up) > 1 and up[1] == down[0] and not any(size != 1 for size in up[2:])
    full, is_kernel = (*up[:1], *down[1:]), any(size > 1 for size in down[2:])
    is_plain = full == shape if is_kernel else full[:2] == shape[:2] and not any(size != 1 for size in shape[2:])
    is_turned = not is_kernel and full[1::-1] == shape and (adapter.turns or pair.is_embedding)
    has_rows = magnitude is None or magnitude.numel == up[0]
    if not is_product or not (is_turned or (is_plain and not pair.is_embedding)) or not has_rows:
        beside = "" if magnitude is None else f", and a magnitude of {list(magnitude.shape)}"
        fact = f"{key!r} has {list(down)} and {list(up)}{beside}, and {name!r} in the base is {list(shape)}"
        is_other_way = full[1::-1] == shape and not adapter.turns
        raise refused(adapter.checkpoint, fact, _SETTINGS_TURN if is_other_way else _OF_ANOTHER)
    parts = [pair.down, pair.up, *filter(None, [magnitude])]
    return _Change(adapter, pair, parts, pair.scale * weight, is_turned, saved)
