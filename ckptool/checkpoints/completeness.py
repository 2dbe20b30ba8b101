"""
What is missing from weights (entries that code adds, empty stubs, half adapters, layers), and its refusal.

What code adds is known for a few packages only, see ``modules``; for all other classes it is not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Final, NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint, StateDict, paths_above, walk_of
from ckptool.errors import IncompleteWeights
from ckptool.messages import counted, some
from ckptool.names.renaming import LONGEST, Filter
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Inert
from ckptool.tensors.reading import LazyTensor, fault_of
from ckptool.tensors.rebuild import Rebuilder

_PARAM_SHAPES: Final = "param_shapes"
"""DeepSpeed's key for the shapes that parameters had before ZeRO partitioned them."""


class Stubs(NamedTuple):
    """Tensors without elements, whose values are in other files; or factors of an adapter without their other half."""

    code: str
    """The finding: CK120 if the file records them, CK121 for most weights, CK124 for some; CK122, CK123 for factors."""
    names: tuple[str, ...]
    fact: str
    hint: str


GATHER: Final = "Often ZeRO-3: the values are in the states of its engine. Save it again with the weights gathered."
_FACTOR: Final = re.compile(
    r"(?<![^\W_])(lora_embedding_|lora[._]|lokr_|hada_|dora_)(A|B|down|up|magnitude_vector|scale|w[12](?:_[ab])?)(?=\.|$)"
)
_DIGITS: Final = 7
"""A number with this many digits is not a layer's."""
_PRODUCTS: Final = tuple(
    frozenset(factors.split())
    for factors in ("A B", "down up", "w1 w2", "w1 w2_a w2_b", "w1_a w1_b w2", "w1_a w1_b w2_a w2_b")
)
"""The sets of factors of a complete product; in LoKr, either factor may be a product itself, in LoHa both are."""
MERGE_PARTITIONS: Final = "Open the folder that the file is in: what was partitioned is put together."


def refuse_slice(checkpoint: Checkpoint, which: str = "auto") -> None:
    """Raise IncompleteWeights if a file has parts of tensors, not all tensors, or rounded ones that were not chosen."""
    part = checkpoint.part_of
    if part is not None and part.is_slice:
        raise _incomplete((), f"{part.what}: no model fits this one alone", part.remedy or SAVE_WHOLE)
    if any(str(one) == REFERENCE for one in checkpoint.globals):
        raise _incomplete((), "its tensors are in files of their own, to which it refers", SAVE_WHOLE)
    for code, what, hint in checkpoint.remarks:
        if code == "CK122" or (code == "CK159" and which == "auto"):
            raise _incomplete((), what, hint or GATHER)
    if checkpoint.unopened and checkpoint.form != "archive":  # one of the others may be meant
        others = [name for name, _ in checkpoint.unopened]
        fact = f"{counted(len(others), 'checkpoint')} beside it cannot be opened: {some(list(map(repr, others)))}"
        raise _incomplete(others, fact, "Give the path of the one that you mean.")


REFERENCE: Final = "torch_xla.utils.serialization.TensorReference"
SAVE_WHOLE: Final = "Load all of them where they were written, and save the model whole."


def refuse_stubs(checkpoint: Checkpoint, state_dict: StateDict, taken: Filter, *, known: bool = False) -> None:
    """Raise IncompleteWeights if wanted names are stubs: CK120, and CK121 unless only ``known`` stubs count."""
    stubs, codes = stubs_in(checkpoint, state_dict), ("CK120",) if known else ("CK120", "CK121")
    if stubs is not None and stubs.code in codes and any(taken.takes(name, state_dict.key) for name in stubs.names):
        raise _incomplete(stubs.names, stubs.fact, stubs.hint)


def refuse_incomplete(checkpoint: Checkpoint, state_dict: StateDict, taken: Filter | None = None) -> None:
    """
    Raise IncompleteWeights if something that ``taken`` does not exclude is missing from a state dict.

    Its ``missing`` are the paths of modules and the names of entries.
    """
    wanted = taken or Filter()
    # Probable stubs (CK121) are searched later in the whole plan of a migration, which passes ``taken``.
    refuse_stubs(checkpoint, state_dict, wanted, known=taken is not None)
    halves = halves_alone(state_dict)
    if halves is not None and halves.code == "CK122":
        raise _incomplete((), halves.fact, halves.hint)
    absent = (
        [name for name in checkpoint.absent if wanted.takes(name, state_dict.key)]
        if state_dict is checkpoint.weights
        else []
    )
    if absent:
        fact = f"{counted(len(absent), 'name')} of the model without a value in any file: {some(absent)}"
        raise _incomplete(absent, fact, "Get the files that are missing.")
    gaps = [(name, why) for name, why, entry in _gaps(checkpoint, state_dict) if wanted.takes(entry, state_dict.key)]
    if gaps:
        listed = some([f"{name or 'the model itself'} ({why})" for name, why in gaps])
        raise _incomplete(
            [name for name, _ in gaps],
            f"its state_dict() would hold more than can be named: {listed}",
            "Load it once where those classes are installed, and save model.state_dict().",
        )


def refuse_broken(tensors: Iterable[LazyTensor]) -> None:
    """Raise the error of tensors in pieces that cannot be read completely, before any is read."""
    faults = [(one.name, fault_of(one.info.storage.source)) for one in tensors if one.info.storage is not None]
    broken = [(name, error) for name, error in faults if error is not None]
    for _, error in broken:
        if len(broken) == 1:
            raise error
        fact = f"{len(broken):,} tensors are not whole: {some([name for name, _ in broken])}; {error.message}"
        raise type(error)(fact, kind=error.kind, hint=error.hint)


def holds_storage(rebuilder: Rebuilder | None, root: Inert) -> bool:
    """Return whether a value contains a storage of a tensor, even inside objects that only code could make."""
    todo, seen = [root], {id(root)}
    while todo and rebuilder is not None:
        node = todo.pop()
        if rebuilder.storage(node) is not None:
            return True
        fresh = [child for child in nodes.held(node) if nodes.is_container(child) and id(child) not in seen]
        seen.update(map(id, fresh))
        todo += fresh
    return False


def refuse_lost(checkpoint: Checkpoint) -> None:
    """Raise IncompleteWeights if values in the index cannot be read: for callers that write everything."""
    if checkpoint.lost:
        fact = f"{counted(len(checkpoint.lost), 'value')} that the index names cannot be read: {some(checkpoint.lost)}"
        raise IncompleteWeights(fact, hint="Migrate the weights alone, with `form='state_dict'`.")


def _incomplete(names: Sequence[str], fact: str, what_to_do: str) -> IncompleteWeights:
    error = IncompleteWeights(fact, hint=f"{what_to_do} To go on with what there is, say `allow_missing=True`.")
    error.missing = tuple(names)
    return error


def stubs_in(checkpoint: Checkpoint, state_dict: StateDict) -> Stubs | None:
    """Return the stubs in a state dict: those that the file records, or else probable ones of shape [0]; or None."""
    empty = tuple(name for name, tensor in state_dict.items() if 0 in tensor.info.shape)
    if not empty:
        return None
    said = next((node for path, node in checkpoint.extras if path.rpartition(".")[2] == _PARAM_SHAPES), None)
    sizes: dict[str, int] = {}
    for group in said if isinstance(said, list) else [said]:  # one mapping of shapes, or one for each optimizer group
        for name, size in nodes.mapping_pairs(group) or []:
            shape = size.args[0] if isinstance(size, Call) and isinstance(size.args, tuple) and size.args else size
            if isinstance(name, str) and isinstance(shape, tuple | list) and all(type(one) is int for one in shape):
                sizes[name] = prod(shape)
    known = tuple(name for name in empty if sizes.get(name))
    if known:
        fact = (
            f"{len(known):,} tensors have no elements, and {_PARAM_SHAPES} says {sum(map(sizes.__getitem__, known)):,} "
            "parameters: ZeRO-3 partitions, the values are in *_optim_states.pt"
        )
        return Stubs("CK120", known, fact, MERGE_PARTITIONS)
    is_all = len(empty) == len(state_dict)
    found = empty if is_all else tuple(name for name in empty if state_dict[name].info.shape == (0,))
    own, weights = (sum(name.endswith("weight") for name in names) for names in (found, state_dict))
    is_most = is_all or 2 * len(found) > len(state_dict) or 2 * own > weights > 1
    if state_dict.role not in ("model", "ema") or not (own or (is_most and len(found) > 1)):
        return None
    fact = f"{len(found):,} of {counted(len(state_dict), 'tensor')} have no elements: {some(found)}"
    code, hint = "CK121" if is_most else "CK124", "If training was partitioned, the values are in other files."
    return Stubs(code, found, fact, hint)


def halves_alone(tensors: Mapping[str, LazyTensor]) -> Stubs | None:
    """Return an adapter's factors that lack the other half: CK122 if all do, CK123 if some do; None if none do."""
    products: dict[tuple[str, str, str], dict[str, str]] = {}
    scaled: set[str] = set()
    for name in tensors:
        if (one := _FACTOR.search(name)) is None or not tensors[name].info.numel:
            continue
        if one[2] in ("magnitude_vector", "scale"):
            scaled.add(name[: one.start()])
        else:
            products.setdefault((name[: one.start()], one[1], name[one.end() :]), {})[one[2]] = name
    halves = [
        name for of in products.values() if not any(of.keys() >= all_of for all_of in _PRODUCTS) for name in of.values()
    ]
    count = sum(map(len, products.values()))
    if halves:
        code = "CK122" if len(halves) == count else "CK123"
        fact = f"{len(halves):,} of {count:,} tensors of an adapter are without the other half: {some(halves)}"
        return Stubs(code, tuple(halves), fact, GATHER)
    bare = {module: name for (module, _, _), of in products.items() if module not in scaled for name in of.values()}
    if not scaled or not bare:
        return None
    fact = f"{counted(len(bare), 'module')} of DoRA without magnitudes, which others have: {some([*bare.values()])}"
    return Stubs("CK123", tuple(bare.values()), fact, GATHER)


def holes_in(tensors: Mapping[str, LazyTensor]) -> Iterator[str]:
    """
    Yield the path of each layer or expert whose number is missing between two others with equal contents.

    The others must have the same names, in several modules, and the same shapes: in a ``Sequential``, modules without
    weights have numbers, too. If more than a quarter of a stack is missing, nothing is reported.
    """
    stacks: dict[str, dict[int, dict[str, tuple[int, ...]]]] = {}
    for name, tensor in tensors.items():
        parts = name.split(".") if len(name) <= LONGEST else []
        for at, part in enumerate(parts[:-2]):
            if part.isdecimal() and len(part) < _DIGITS:
                stack = stacks.setdefault(".".join(parts[:at]), {})
                stack.setdefault(int(part), {})[".".join(parts[at + 1 :])] = tensor.info.shape
    for path, stack in stacks.items():
        numbers = sorted(stack)
        if numbers[0] > 1 or 3 * (numbers[-1] + 1 - numbers[0] - len(numbers)) > len(numbers):
            continue
        for before, after in pairwise(numbers):
            if stack[before] == stack[after] and len({name.partition(".")[0] for name in stack[after]}) > 1:
                yield from (f"{path}.{number}" for number in range(before + 1, after))


def _gaps(checkpoint: Checkpoint, state_dict: StateDict) -> Iterator[tuple[str, str, str]]:
    """
    Yield what the model's state dict would have and cannot be read: the path of a module or the name of an entry, why,
    and the name of the entry, or of one that the module could add: a filter that excludes it excludes the gap.
    """
    walk, head = walk_of(checkpoint, state_dict), state_dict.head
    for part in state_dict.parts:
        inner = part.head[len(head) :]
        yield from ((inner + name, why, inner + entry) for name, why, entry in _gaps(checkpoint, part))
    if walk is None:
        return
    outside = [name[len(head) :] for name in checkpoint.attributes if name.startswith(head)]
    inside = {above for name in (*state_dict, *outside) for above in paths_above(name)} if walk.unlisted else ()
    yield from (_in_module(path, cls) for path, cls in walk.unlisted if path in inside)
    # A state-dict hook may add tensors that are plain attributes of its module.
    hooked = {path: f"{cls}, with the state-dict hook {hook}" for path, cls, hook in walk.hooks}
    paths, buffers = {path for path, _ in walk.modules}, {entry.name for entry in walk.transient}
    kept = [name for name in outside if name not in buffers] if hooked else []
    owners = (next(filter(paths.__contains__, paths_above(name))) for name in kept)
    yield from (_in_module(path, hooked[path]) for path in dict.fromkeys(owners) if path in hooked)
    for name, cls in checkpoint.contents.unreadable:
        if name.startswith(head) and any(entry.name == name[len(head) :] for entry in walk.entries):
            yield name[len(head) :], cls, name[len(head) :]


def _in_module(path: str, why: str) -> tuple[str, str, str]:
    return path, why, f"{path}.weight" if path else "weight"
