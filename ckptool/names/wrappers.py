"""
The table ``WRAPPERS`` of what training wrappers add to names (``module.``), and functions on it.

Names of classes are only text here, and no class is imported.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from operator import eq
from typing import NamedTuple

from ckptool.messages import show


class Wrapper(NamedTuple):
    """A component that a wrapper prepends to every name of the model that it wraps."""

    component: str
    added_by: str
    classes: tuple[str, ...] = ()
    """Full names of the wrapping classes whose models can be taken out of them in a pickle."""
    at_head: bool = False
    """
    Whether models use the word for their own modules, too, so that it counts only at the start of every name.

    The other components are not a model's own, and are removed wherever they are.
    """
    companions: frozenset[str] = frozenset()
    """Entries of the wrapper itself, which are removed with it."""
    twin: str | None = None
    """The component of the copy that is not averaged, which is removed with the wrapper of the averaged one."""
    marks: tuple[str, ...] = ()
    """Parts of names of classes that add the component; in other classes, a module of this name is their own."""


DATA_PARALLEL = Wrapper(
    "module",
    "DataParallel or DistributedDataParallel",
    (
        "torch.nn.parallel.data_parallel.DataParallel",
        "torch.nn.parallel.distributed.DistributedDataParallel",
    ),
    at_head=True,
    # Averaged models of torch and mmengine use the same component, and keep a counter.
    companions=frozenset({"n_averaged", "steps"}),
    marks=(
        *("DataParallel", "AveragedModel", "MovingAverage", "WeightAverage", "AnnealingEMA", "ModelEma", "ModelEMA"),
        "DeepSpeedEngine",
    ),
)
AVERAGED_PAIR = Wrapper(
    "ema_model",
    "ema-pytorch",
    at_head=True,
    companions=frozenset({"initted", "step"}),
    twin="online_model",
    marks=("EMA",),
)

WRAPPERS = (
    DATA_PARALLEL,
    AVERAGED_PAIR,
    # No class: hooks of the model inside are methods of GradSampleModule, so it cannot be taken out of a pickle.
    Wrapper("_module", "opacus' GradSampleModule", at_head=True, marks=("GradSampleModule",)),
    Wrapper("_orig_mod", "torch.compile", ("torch._dynamo.eval_frame.OptimizedModule",)),
    Wrapper(
        "_fsdp_wrapped_module",
        "FullyShardedDataParallel",
        ("torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",),
    ),
    Wrapper("_fpw_module", "FullyShardedDataParallel"),  # before torch 1.12
    Wrapper(
        "_checkpoint_wrapped_module",
        "activation checkpointing",
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper",),
    ),
    Wrapper("_forward_module", "Lightning Fabric"),
)

ADDED_BY = {wrapper.component: wrapper.added_by for wrapper in WRAPPERS}
"""The wrapper that adds each component."""

COMPONENTS = {name: wrapper.component for wrapper in WRAPPERS for name in wrapper.classes}
"""The component that each wrapping class adds."""

BY_HEAD = {wrapper.component: wrapper for wrapper in WRAPPERS if wrapper.at_head}
HEADS = tuple(BY_HEAD)
ANYWHERE = tuple(wrapper.component for wrapper in WRAPPERS if not wrapper.at_head)
COMPANIONS = frozenset[str]().union(*(wrapper.companions for wrapper in WRAPPERS))


def may_be_averaged_pair(name: str) -> bool:
    """Return whether a name can be of an ``AVERAGED_PAIR``: the averaged model, the other one, or a counter."""
    return name.startswith((f"{AVERAGED_PAIR.component}.", f"{AVERAGED_PAIR.twin}.")) or (
        name in AVERAGED_PAIR.companions
    )


def is_averaged_pair(names: Collection[str]) -> bool:
    """Return whether names are those of an averaged model, with or without the other one."""
    return all(map(may_be_averaged_pair, names)) and any(
        name.startswith(f"{AVERAGED_PAIR.component}.") for name in names
    )


def beside_wrapped(names: Collection[str]) -> tuple[str, ...]:
    """Return the names of an averaging wrapper's own entries, if all others begin with its component."""
    if not any(map(names.__contains__, COMPANIONS)):
        return ()
    for one in BY_HEAD.values():
        if not any(name in names for name in one.companions):
            continue
        beside = tuple(name for name in names if name in one.companions or name.partition(".")[0] == one.twin)
        others = set(names).difference(beside)
        if others and all(name.startswith(f"{one.component}.") for name in others):
            return beside
    return ()


def heads_of(classes: Mapping[str, str]) -> int:
    """
    Return how many components at the start of a model's names were added by wrappers, by the classes of its modules.

    ``classes`` are by module path. Only components with ``at_head`` are counted, which models may use themselves.
    """
    path, count = "", 0
    while True:
        own = classes.get(path, "").rpartition(".")[2]
        fitting = [one for one in WRAPPERS if not one.at_head or any(mark in own for mark in one.marks)]
        inner = {f"{path}.{one.component}".lstrip("."): one for one in fitting}
        found = next(filter(classes.__contains__, inner), None)
        if found is None:
            return count
        path, count = found, count + inner[found].at_head


def prefixes_of(names: Collection[str]) -> tuple[str, ...]:
    """
    Return the components that all names begin with, each with a dot, up to and including the first that is no
    wrapper's. Entries of an averaging wrapper itself do not count.
    """
    if not names:
        return ()
    names = set(names).difference(beside) if (beside := beside_wrapped(names)) else names
    # A prefix of the first and the last name in alphabetical order is a prefix of all.
    first, last = min(names).split("."), max(names).split(".")
    common = [one for one, _ in takewhile(lambda pair: eq(*pair), zip(first[:-1], last[:-1], strict=False))]
    added = sum(1 for _ in takewhile(ADDED_BY.__contains__, common))
    return tuple(f"{component}." for component in common[: added + 1])


def prefix_facts(*sides: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of common prefixes, a label and a cell for each side: those of wrappers, and the model's own."""
    for label, is_added in (("prefix", True), ("all under", False)):
        found = [show("".join(one for one in side if (one[:-1] in ADDED_BY) == is_added)) for side in sides]
        if any(found):
            yield label, *(one or "-" for one in found)
