"""What the pickle of a new file would call: calls that reach the system are refused, all others are listed."""

from __future__ import annotations

from ckptool.errors import MigrationRefused
from ckptool.limits import DEFAULT_LIMITS
from ckptool.messages import counted, show
from ckptool.migration.changes import Changes
from ckptool.migration.planned import Plan
from ckptool.sources.source import BytesSource


def kept_calls(plan: Plan, changes: Changes) -> tuple[str, ...]:
    """Return the classes and functions that unpickling the new file would call, beyond what makes data."""
    if not plan.file.pickles or (plan.weights is not None and not plan.weights.others):
        return ()  # weights alone
    from ckptool.formats.runnable.pickle_search import Search

    search = Search(DEFAULT_LIMITS)
    for data in plan.file.pickles:
        search.anything(BytesSource(data))
    acts = [act for act in search.survey().acts if act.grade != "program" and act.how != "refers"]
    system = {act.text: act.why or "" for act in acts if act.grade == "system"}
    if system and not changes.keep_calls:
        (shown, why), *more = system.items()
        others = f" and {counted(len(more), 'call')} more" if more else ""
        weights = ", or take the weights alone with `form='state_dict'`" if plan.weights is None else ""
        raise MigrationRefused(
            f"unpickling the new file would call {show(shown)}, which {why}{others}",
            kind="kept-calls",
            hint=f"Leave it out with `drop=`{weights}. If it is to stay, say so with `keep_calls=True`.",
        )
    return tuple(dict.fromkeys(act.name for act in acts))
