"""What the pickle of a new file would call: calls that reach the system are refused, all others are listed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ckptool.errors import CkptoolError, MigrationRefused
from ckptool.messages import counted, show
from ckptool.migration.changes import Changes
from ckptool.migration.plan import Plan, make_plan
from ckptool.sources.source import BytesSource

if TYPE_CHECKING:
    from ckptool.checkpoints.checkpoint import Checkpoint
    from ckptool.pickles.effects import Effect


class Calls(NamedTuple):
    """What a pickle would call, beyond what makes data."""

    names: tuple[str, ...] = ()
    system: Mapping[str, str] = {}
    """The calls that reach the system, as text, and what each does."""


def kept_calls(
    checkpoint: Checkpoint, plan: Plan, changes: Changes, reopened: Callable[[], Checkpoint]
) -> tuple[str, ...]:
    """
    Return the classes and functions that unpickling the new file would call, beyond what makes data.

    The tree of the checkpoint is not needed; where something is refused, ``reopened`` gives one that has it.

    Raises:
        MigrationRefused: One of them runs commands or text, opens files or connections, or changes the interpreter.
    """
    found = _calls_of(checkpoint, plan)
    if found.system and not changes.keep_calls:
        (shown, why), *more = found.system.items()
        others = f" and {counted(len(more), 'call')} more" if more else ""
        way = "Leave it out with `drop=`."
        if plan.weights is None and _are_weights_without(reopened, changes):
            way = "Take the weights alone with `form='state_dict'`, or leave it out with `drop=`."
        raise MigrationRefused(
            f"unpickling the new file would call {show(shown)}, which {why}{others}",
            kind="kept-calls",
            hint=f"{way} If it is to stay, say so with `keep_calls=True`.",
        )
    return found.names


def _are_weights_without(reopened: Callable[[], Checkpoint], changes: Changes) -> bool:
    """Say whether a state dict of the weights alone would be written, and call nothing that reaches the system."""
    try:
        with reopened() as checkpoint:
            plan = make_plan(checkpoint, None, changes._replace(form="state_dict"), sketch=True)
            return not _calls_of(checkpoint, plan).system
    except CkptoolError:
        return False


def _calls_of(checkpoint: Checkpoint, plan: Plan) -> Calls:
    from ckptool.pickles import grades, grading, results  # their tables are for files that hold more than weights

    if not plan.file.pickles or (plan.weights is not None and not plan.weights.others):
        return Calls()  # weights alone
    if all(grades.is_plain(one.module, one.name) for one in checkpoint.globals):
        return Calls()
    from ckptool.pickles.reaching import Looks
    from ckptool.pickles.tracer import trace

    carried: dict[str, None] = {}
    system: dict[str, str] = {}
    inside = list(plan.file.pickles)
    looks = Looks()

    def listen(effect: Effect) -> object:
        if grading.loads_bytes(effect):
            inside.append(bytes(effect.arguments[0]))
        for one in grading.judge(effect, looks):
            if one.how == "refers":
                continue
            carried[one.name] = None
            if one.grade == "system":
                system.setdefault(one.shown(), one.why or "")
        return results.result(effect)

    for data in inside:  # it grows: what torch.load() is called with lies in the bytes
        source, at = BytesSource(data), 0
        while at < len(data) and not (found := trace(source, at, listen)).broken:
            at = found.end
    return Calls(tuple(carried), system)
