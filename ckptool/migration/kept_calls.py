"""What the pickle of a new file would call: calls that reach the system are refused, all others are listed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ckptool.errors import Failure, MigrationRefused
from ckptool.limits import DEFAULT_LIMITS
from ckptool.messages import counted, show
from ckptool.migration.changes import Changes
from ckptool.migration.plan import make_plan
from ckptool.migration.planned import Plan
from ckptool.sources.source import BytesSource

if TYPE_CHECKING:
    from ckptool.checkpoints.checkpoint import Checkpoint


class Calls(NamedTuple):
    """What a pickle would call, beyond what makes data."""

    names: tuple[str, ...] = ()
    system: Mapping[str, str] = {}
    """The calls that reach the system, as text, and what each does."""


def kept_calls(plan: Plan, changes: Changes, reopened: Callable[[], Checkpoint]) -> tuple[str, ...]:
    """
    Return the classes and functions that unpickling the new file would call, beyond what makes data.

    Where something is refused, ``reopened`` gives the checkpoint with its tree.

    Raises:
        MigrationRefused: One of them runs commands or text, opens files or connections, or changes the interpreter.
    """
    found = _calls_of(plan)
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
            plan = make_plan(checkpoint, None, changes._replace(form="state_dict"))
            return not _calls_of(plan).system
    except Failure:
        return False


def _calls_of(plan: Plan) -> Calls:
    if not plan.file.pickles or (plan.weights is not None and not plan.weights.others):
        return Calls()  # weights alone
    from ckptool.formats.runnable.pickle_search import Search

    search = Search(DEFAULT_LIMITS)
    for data in plan.file.pickles:
        search.anything(BytesSource(data))
    acts = [act for act in search.survey().acts if act.grade != "program" and act.how != "refers"]
    names = dict.fromkeys(act.name for act in acts)
    return Calls(tuple(names), {act.text: act.why or "" for act in acts if act.grade == "system"})
