"""The operations of transformers' table of conversions, as rules and steps of a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, Final

from ckptool.errors import UnsupportedFeature

Shape = tuple[int, ...]
Rule = dict[str, Any]
_LAYER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_DEQUANTIZES: Final = "Inkling2LoopDequantizeExperts"
_NUMBERS: Final = re.compile(r"(?<![^.])(\d+)(?![^.])")


def is_for_scales(converter: Any) -> bool:
    """Say whether a converter takes weights alone, too: it makes quantised ones plain, and has no part in others."""
    return type(converter.operations[0]).__name__ == _DEQUANTIZES


def rules_of(
    converter: Any, parts: list[dict[str, Shape]], made: Mapping[str, Shape], model: Any, target: str
) -> list[Rule]:
    """
    Return the rules that make of tensors what a converter makes of them, which is ``made``.

    Raises:
        UnsupportedFeature: One of its operations is no move of bytes.
    """
    sources = [list(part) for part in parts]
    results = _in_parts(list(made), len(converter.target_patterns))
    if type(converter.operations[0]).__name__ == "ErnieFuseAndSplitTextVisionExperts":
        return _joined_apart(sources, results, {**made, **{name: one for part in parts for name, one in part.items()}})
    if type(converter.operations[0]).__name__ == "ErnieSplitAndDecoupleTextVisionExperts":
        rules = _joined_apart(results, sources, {**made, **{name: one for part in parts for name, one in part.items()}})
        return [_undone(rule) for rule in rules]
    steps = _Steps(converter, [list(part.values()) for part in parts], list(made.values()), model, target).said
    rule: Rule = {
        "from": _named(sources, bool(steps) and steps[0]["op"] == "stack"),
        "to": _named(results, bool(steps) and steps[-1]["op"] == "unstack"),
    }
    return [rule | ({"steps": steps} if steps else {})]


class _Steps:
    """The steps that do what the operations of one converter do, and the shapes in between."""

    def __init__(self, converter: Any, shapes: list[list[Shape]], made: list[Shape], model: Any, target: str) -> None:
        self.shapes, self.made, self.model, self.target = shapes, made, model, target
        self.keys, self.targets = list(converter.source_patterns), list(converter.target_patterns)
        self.said: list[dict[str, Any]] = []
        for operation in converter.operations:
            say = _OPERATIONS.get(type(operation).__name__)
            if say is None:
                raise _computed(target, operation)
            say(self, operation)
        if [shape for part in self.shapes for shape in part] != made:
            raise UnsupportedFeature(f"{target!r}: transformers makes {made} of it, and these steps {self.shapes}")

    def stacked(self, operation: Any) -> None:
        self.said.append({"op": "stack", "dim": operation.dim})
        dim = operation.dim
        self.shapes = [[(*part[0][:dim], len(part), *part[0][dim:])] for part in self.shapes]

    def unstacked(self, operation: Any) -> None:
        self.said.append({"op": "unstack", "dim": operation.dim})
        self.shapes = [[_at(part[0], operation.dim)] * part[0][operation.dim] for part in self.shapes]

    def joined(self, operation: Any) -> None:
        whole = [shape for part in self.shapes for shape in part]
        dim = operation.dim % len(whole[0])
        sizes = [shape[dim] for shape in whole]
        self.said.append({"op": "concat", "dim": dim} | ({"sizes": sizes} if len(set(sizes)) > 1 else {}))
        self.keys, self.shapes = self.targets[:1], [[_at(whole[0], dim, sum(sizes))]]

    def chunked(self, operation: Any) -> None:
        """As torch.chunk: the last may be smaller."""
        size, count = self.shapes[0][0][operation.dim], max(len(self.targets), 1)
        count = count if count > 1 else len(self.made)
        most = ceil(size / count)
        self._cut(operation.dim, [max(0, min(most, size - n * most)) for n in range(count)])

    def split(self, operation: Any) -> None:
        self._cut(operation.dim, [shape[operation.dim] for shape in self.made])

    def _cut(self, dim: int, sizes: list[int]) -> None:
        (shape,) = self.shapes[0]
        dim %= len(shape)
        equal = len(set(sizes)) == 1
        self.said.append({"op": "chunk", "dim": dim} if equal else {"op": "split", "dim": dim, "sizes": sizes})
        self.keys, self.shapes = self.targets, [[_at(shape, dim, size)] for size in sizes]

    def transposed(self, operation: Any) -> None:
        (shape,) = self.shapes[0]
        if operation.check_dims and shape == tuple(self.model.get_parameter(self.target).shape):
            return
        order, one, other = list(shape), operation.dim0, operation.dim1
        order[one], order[other] = shape[other], shape[one]
        self.said.append({"op": "transpose", "dims": [one, other]})
        self.shapes = [[tuple(order)]]

    def put_apart(self, operation: Any) -> None:
        (shape,) = self.shapes[0]
        dim, half = operation.dim, shape[operation.dim] // 2
        pair = (2, half) if operation.inverse else (half, 2)
        self._reshape(shape, _at(shape, dim, *pair))
        self.said.append({"op": "transpose", "dims": [dim, dim + 1]})
        self._reshape(_at(shape, dim, *pair[::-1]), shape)

    def roped(self, operation: Any) -> None:
        config = self.model.config.__dict__.get(operation.subconfig_key, self.model.config)
        names = operation.permute_layer_names
        chosen = [n for n, key in enumerate(self.keys) if names is None or any(name in key for name in names)]
        step = {"op": "unrope" if operation.inverse else "rope", "heads": getattr(config, "num_attention_heads", 1)}
        self.said.append(step if len(chosen) == len(self.keys) else step | {"of": chosen})

    def flattened(self, _operation: Any) -> None:
        self._reshape(self.shapes[0][0], self.made[0])

    def plain(self, operation: Any) -> None:
        """Nothing, where there are no scales."""
        if len(self.shapes) > 1:
            raise _computed(self.target, operation)

    def unpadded(self, _operation: Any) -> None:
        """Nothing, where no row is padding: dropping some is seen by their number."""

    def queries_merged(self, operation: Any) -> None:
        """Queries of each layer, in pairs of two kinds, and a tensor of four: the second is the last there."""
        order = [0, 2, 3, 1]
        (shape,), made = self.shapes[0], self.made[0]
        pairs = [made[0], 2, made[2]] if not operation.inverse else [shape[0], 2, shape[2]]
        apart = {"op": "reshape", "was": list(shape), "shape": pairs}
        join, cut = {"op": "concat", "dim": 1}, {"op": "chunk", "dim": 1}
        if operation.inverse:
            together = {"op": "reshape", "was": pairs, "shape": list(made)}
            self.said += [cut | {"parts": 4, "order": order}, join | {"parts": 4}, cut, together]
        else:
            self.said += [apart, join, cut | {"parts": 4}, join | {"order": order}]
        self.shapes = [[one] for one in self.made]

    def _reshape(self, was: Shape, shape: Shape) -> None:
        self.said.append({"op": "reshape", "was": list(was), "shape": list(shape)})
        self.shapes = [[shape]]


def _computed(target: str, operation: Any) -> UnsupportedFeature:
    fact = f"{target!r}: transformers does {type(operation).__name__} to it, which is no move of bytes"
    return UnsupportedFeature(fact)


_OPERATIONS: Final[Mapping[str, Callable[[_Steps, Any], None]]] = {
    "MergeModulelist": _Steps.stacked,
    "SplitModulelist": _Steps.unstacked,
    "Concatenate": _Steps.joined,
    "Chunk": _Steps.chunked,
    "Split": _Steps.split,
    "Transpose": _Steps.transposed,
    "Interleave": _Steps.put_apart,
    "PermuteForRope": _Steps.roped,
    "Conv3dToLinear": _Steps.flattened,
    "Inkling2UnpadVocab": _Steps.unpadded,
    "Inkling2LoopMergeMessageQueries": _Steps.queries_merged,
    "LinearToConv3d": _Steps.flattened,
    _DEQUANTIZES: _Steps.plain,
}


def _joined_apart(sources: list[list[str]], results: list[list[str]], shapes: Mapping[str, Shape]) -> list[Rule]:
    """
    Return a rule for each result: the projections of its share of the experts, those of text and then of images.

    Stacked expert for expert, the rows of the projections of one come one after another, as they do in the result.
    """
    rules = []
    shares = _in_parts(list(zip(*sources, strict=True)), len(results))
    for (result,), share in zip(results, shares, strict=True):
        names = [name for expert in share for name in expert]
        was = [len(names), *shapes[names[0]]]
        steps = [{"op": "stack", "dim": 0}, {"op": "reshape", "was": was, "shape": list(shapes[result])}]
        rules.append({"from": names, "to": result, "steps": steps})
    return rules


def _undone(rule: Rule) -> Rule:
    reshape = rule["steps"][1]
    steps = [{"op": "reshape", "was": reshape["shape"], "shape": reshape["was"]}, {"op": "unstack", "dim": 0}]
    return {"from": rule["to"], "to": rule["from"], "steps": steps}


def _in_parts(whole: list[Any], count: int) -> list[list[Any]]:
    """Return a list cut into so many of equal length; the last may be shorter."""
    each = ceil(len(whole) / count)
    return [whole[start : start + each] for start in range(0, len(whole), each)]


def _at(shape: Shape, dim: int, *sizes: int) -> Shape:
    """Return a shape with other sizes in place of one."""
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def _named(parts: list[list[str]], lists: bool) -> str | list[str]:
    """Return the names of one side of a rule: with ``{e*}`` for the numbers in each part, if these are lists."""
    said: list[str] = []
    for part in parts:
        starred = _starred(part) if lists else None
        if lists and starred is None and len(parts) > 1:
            raise UnsupportedFeature(f"the numbers of {part[0]!r} and its like are not 0, 1, 2 …")
        said += part if starred is None else [starred]
    return said[0] if len(said) == 1 else said


def _starred(names: list[str]) -> str | None:
    """
    Return one name for those that differ in one number alone, from 0 in this order; else None.

    Of several numbers, which only a list of one can have, it is the innermost: that of the expert, not of the layer.
    """
    pieces = [_NUMBERS.split(name) for name in names]
    wanted = [str(n) for n in range(len(names))]
    for at in reversed(range(len(pieces[0]))):
        starred = {"".join([*piece[:at], "{e*}", *piece[at + 1 :]]) for piece in pieces}
        if len(starred) == 1 and [piece[at : at + 1] for piece in pieces] == [[one] for one in wanted]:
            return starred.pop()
    return None


def for_all_layers(rules: list[Rule], names: Mapping[str, Shape]) -> list[Rule]:
    """Return the rules, one for all that differ in one number alone, unless it would take other names as well."""
    kinds: dict[str, dict[str, Rule]] = {}
    for rule in rules:
        numbers = {found[0] if (found := _LAYER.search(name)) else "" for name in _names(rule, "from", "to")}
        number = numbers.pop() if len(numbers) == 1 else ""
        kinds.setdefault(repr(_whole(rule) if number else rule), {})[number] = rule
    said: list[Rule] = []
    for same in kinds.values():
        whole = _whole(next(iter(same.values())))
        asked = [
            re.escape(name).replace(r"\{i\}", r"([^.]+)").replace(r"\{e\*\}", r"\d+") for name in _names(whole, "from")
        ]
        patterns = [re.compile(one) for one in asked] if len(same) > 1 else []
        takes = {found[1] for one in patterns for name in names if (found := one.fullmatch(name))}
        said += [whole] if takes == same.keys() else same.values()
    return said


def _names(rule: Rule, *sides: str) -> list[str]:
    return [name for side in sides for name in ([rule[side]] if isinstance(rule[side], str) else rule[side])]


def _whole(rule: Rule) -> Rule:
    """Return a rule with ``{i}`` for the first number of each name."""
    named = {side: [_LAYER.sub("{i}", name, count=1) for name in _names(rule, side)] for side in ("from", "to")}
    return rule | {side: names[0] if isinstance(rule[side], str) else names for side, names in named.items()}
