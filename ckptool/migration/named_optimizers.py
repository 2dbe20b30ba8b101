"""
The states of optimizers under the names of parameters, in a folder of DCP, so that training resumes from it.

``torch.save`` keeps an optimizer's ``state_dict()``, where parameters are numbers: 0 is the first of the first group.
In DCP they have names, as torch/distributed/checkpoint/state_dict.py gives them:

    nested      state.NAME.exp_avg, and param_groups.0.lr with the names in param_groups.0.params: get_state_dict()
    flat        state.NAME.exp_avg, and param_groups.NAME.lr for each parameter: with flatten_optimizer_state_dict
    torchtitan  flat, below "optimizer", and the weights below nothing

A file may record which parameter a number is (``param_names``). Otherwise the order of the weights decides, if each
state has the shape of its parameter and no other order fits: there is one group, of all parameters; or there are, for
each shape, as many states as parameters, in one group. Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.contents import groups_of
from ckptool.checkpoints.training import BUFFERS, ELEMENTWISE, names_by_number, states
from ckptool.errors import MigrationRefused
from ckptool.messages import counted
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert, Pairs
from ckptool.tensors.tensor import identity

if TYPE_CHECKING:
    from ckptool.migration.changes import OptimizerNames

Path: TypeAlias = tuple[str | int, ...]
_Shape: TypeAlias = tuple[int, ...]


class _Optimizer(NamedTuple):
    """An optimizer, and the names that its parameters get."""

    path: str
    names: dict[str, str]
    """New names of its parameters, by the keys of its state as text."""
    groups: dict[int, list[str]]


class _Slot(NamedTuple):
    """A parameter of an optimizer."""

    key: Inert
    group: int
    shape: _Shape | None
    """None if it has no state with a shape."""


class NamedOptimizers:
    """Finds the new path of everything in a folder; ``moved`` has the new names by the old ones."""

    def __init__(self, checkpoint: Checkpoint, new_names: Mapping[str, str], layout: OptimizerNames) -> None:
        self.moved: dict[str, str] = {}
        self.notes: list[str] = []
        self._layout = layout
        self._model = checkpoint.weights.key if checkpoint.weights is not None and layout == "torchtitan" else ""
        known = ((path, node, pairs) for path, node, pairs, role in states(checkpoint) if role == "optimizer")
        found = [(path, pairs) for path, node, pairs in known if nodes.mapping_pairs(node) is not None]
        if not found:
            fact = "no optimizer's state_dict() is in it"
            raise MigrationRefused(fact, kind="no-optimizer", hint="Leave out `optimizer_names=`.")
        self._optimizers = [self._named(checkpoint, new_names, path, pairs) for path, pairs in found]

    def _named(self, checkpoint: Checkpoint, new_names: Mapping[str, str], path: str, pairs: Pairs) -> _Optimizer:
        slots = _slots(checkpoint, pairs)
        told = names_by_number(checkpoint, nodes.lookup(pairs, "param_groups"), {})
        own = [told.get(str(place), slot.key) for place, slot in enumerate(slots)]
        has_order = checkpoint.traits.keeps_order and not checkpoint.is_folder
        problem, fits = "there are no weights", []
        for model in (one for one in checkpoint.state_dicts if one.role == "model"):
            is_told = all(isinstance(name, str) and name in model for name in own)
            names = own if is_told else _in_order(model, slots, has_order)
            if isinstance(names, str):
                problem = f"under {model.key!r}, {names}" if model.key else names
            else:
                fits.append((model.head, names, is_told))
        keys = {str(slot.key) for slot in slots}
        lone = [key for key, _ in nodes.mapping_pairs(nodes.lookup(pairs, "state")) or () if str(key) not in keys]
        if len(fits) != 1 or lone:
            problem = f"{counted(len(lone), 'state')} of what is in no group" if lone else problem
            raise MigrationRefused(
                f"which parameters {path or '(root)'!r} is of cannot be told: "
                + ("several models have them" if fits and not lone else problem),
                kind="unnamed-optimizer",
                hint="Leave out `optimizer_names=`; or save again with an optimizer of model.named_parameters().",
            )
        head, names, is_told = fits[0]
        if not is_told:
            taken = "its parameters are taken to be the weights in their order, whose shapes fit"
            self.notes.append(f"{path!r} has no names: {taken}")
        found = _Optimizer(path, {}, {})
        for slot, name in zip(slots, names, strict=True):
            new = new_names.get(f"{head}{name}", f"{head}{name}").removeprefix(head)
            found.names[str(slot.key)] = new
            found.groups.setdefault(slot.group, []).append(new)
        return found

    def placed(self, path: Path, node: Inert) -> Iterator[tuple[Path, Inert]]:
        """Yield the new path of a leaf of the tree, and its node; a leaf of a group may go to several parameters."""
        for place, what in self._placed(path, node):
            self.moved.setdefault(_joined(path), _joined(place))
            yield place, what

    def _placed(self, path: Path, node: Inert) -> Iterator[tuple[Path, Inert]]:
        for one in self._optimizers:
            depth = _depth(path, one.path)
            if depth is not None and len(path) > depth + 1 and path[depth] in ("state", "param_groups"):
                head = ("optimizer",) if self._layout == "torchtitan" else path[:depth]
                for below, what in self._of_optimizer(one, path[depth:], node):
                    yield (*head, *(below if self._layout == "nested" else (_joined(below),))), what
                return
        yield path[_depth(path, self._model) or 0 if self._model else 0 :], node

    def _of_optimizer(self, one: _Optimizer, below: Path, node: Inert) -> Iterator[tuple[Path, Inert]]:
        """Yield the path of a leaf below its optimizer, and its node."""
        kind, number, *rest = below
        if kind == "state":
            yield (kind, one.names.get(str(number), str(number)), *rest), node
        elif not isinstance(number, int) or not rest:
            yield below, node
        else:
            group = one.groups.get(number, [])
            node = list(group) if rest[0] in ("params", "param_names") else node
            if self._layout == "nested":
                yield below, node
            elif rest[0] != "params" and not (rest[0] == "param_names" and self._layout == "torchtitan"):
                yield from (((kind, name, *rest), node) for name in group)


def _joined(path: Path) -> str:
    return ".".join(map(str, path))


def _depth(path: Path, key: str) -> int | None:
    """Return how many components of a path are a key; None where it does not begin so."""
    return next((depth for depth in range(len(path)) if _joined(path[:depth]) == key), None)


def _slots(checkpoint: Checkpoint, pairs: Pairs) -> list[_Slot]:
    """Return the parameters of an optimizer, in the order of its groups, with the shapes of their states."""
    tensor = checkpoint.rebuilder.tensor if checkpoint.rebuilder is not None else lambda _: None
    shapes: dict[str, _Shape] = {}
    for key, entries in nodes.mapping_pairs(nodes.lookup(pairs, "state")) or ():
        for name, node in nodes.mapping_pairs(entries) or ():
            info = tensor(node) if name in ELEMENTWISE else None
            if info is not None and info.shape:
                shapes[str(key)] = info.shape
    groups = groups_of(nodes.lookup(pairs, "param_groups"))
    return [_Slot(key, number, shapes.get(str(key))) for number, (_, keys) in enumerate(groups) for key in keys]


def _in_order(model: StateDict, slots: Sequence[_Slot], has_order: bool) -> list[str] | str:
    """Return the name of each parameter of an optimizer by the order of the weights, or why it is not certain."""
    first = {identity(tensor.info): name for name, tensor in reversed([*model.items()])}
    parameters = {
        name: tensor.info.shape
        for name, tensor in model.items()
        if first[identity(tensor.info)] == name
        and not name.endswith(BUFFERS)
        and tensor.info.dtype.name.startswith(("float", "bfloat", "complex"))  # what has gradients
    }
    if has_order and len(parameters) == len(slots) and len({slot.group for slot in slots}) == 1:
        pairs = zip(slots, parameters.values(), strict=True)
        slots = [slot._replace(shape=slot.shape or shape) for slot, shape in pairs]  # some may have no state
    by_shape: dict[_Shape, list[str]] = {}
    for name, shape in parameters.items():
        by_shape.setdefault(shape, []).append(name)
    alike: dict[_Shape, list[_Slot]] = {}
    for slot in slots:
        if slot.shape is None:
            counts = f"{len(slots):,} parameters in groups, {len(parameters):,} in the weights"
            return f"{counts}, and no state says of which shape parameter {slot.key} is"
        alike.setdefault(slot.shape, []).append(slot)
    left: dict[_Shape, Iterator[str]] = {}
    for shape, own in alike.items():
        names, states_of = by_shape.get(shape, []), f"{len(own):,} states of {list(shape)}"
        if len(names) != len(own):
            return f"{states_of}, and {len(names):,} parameters of that shape"
        if len({slot.group for slot in own}) > 1:
            return f"{states_of} in several groups"
        if len(own) > 1 and not has_order:
            return f"{states_of}, and the file says nothing of the order of the names"
        left[shape] = iter(names)
    names = [next(left[slot.shape]) for slot in slots if slot.shape is not None]
    places = {name: place for place, name in enumerate(parameters)}
    for (before, group), (name, other) in pairwise((name, slot.group) for name, slot in zip(names, slots, strict=True)):
        if has_order and group == other and places[name] < places[before]:
            return f"going by shapes, group {group} has {name!r} behind {before!r}"
    return names
