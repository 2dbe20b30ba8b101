"""What loading a file would run: findings, and a line for each way to load it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from ckptool.checking.finding import Advice, Finding, note, place
from ckptool.checking.safety import references
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.formats.runnable.acts import Act, Survey
from ckptool.messages import counted, show, some
from ckptool.pickles.alarms import canonical
from ckptool.pickles.dangerous_names import NATIVE, SETTINGS, SOURCE
from ckptool.pickles.judge import is_listed
from ckptool.pickles.weights_only import is_allowed

AskAdvice: TypeAlias = Callable[[], Advice]
"""To find what helps takes a while, and most files need none."""

_SHOWN = 3
_LOADERS = "torch.jit.load(), torch.export.load(), NeMo's restore_from() and what calls the model"
_DATA = "only makes data"
_LAST = ("asks", "refers", "odd")
"""What is told of after calls."""
_TRUST = "Unpickle it only if you trust where it comes from."
_TRUST_LOADER = "Load it only if you trust where it comes from."


def findings(survey: Survey, advice: AskAdvice = Advice) -> Iterator[Finding]:
    """Yield what is to be known before a file is unpickled. ``advice`` says how to get its tensors without."""
    yield from nested(survey)
    yield from deeds(survey, advice)
    if survey.behind:
        more = counted(len(survey.behind), "more pickle")
        fact = f"{more} behind the first, which pickle.load() leaves: {some(survey.behind)}"
        yield note("CK208", fact, _TRUST)
    if survey.unseen:
        yield note("CK209", f"not looked at: {some(survey.unseen)}", _TRUST_LOADER)


def imported(survey: Survey) -> Iterator[Finding]:
    """CK201, of a file that cannot be opened: its pickles ask for what makes no data."""
    own = (one for one in survey.names if one.nested_at is None and not is_listed(canonical(one.module, one.name)))
    names = list(dict.fromkeys(f"{one.module}.{one.name}" for one in own))
    if names:
        yield note("CK201", f"unpickling would import {some(names)} (not imported here)")


def nested(survey: Survey) -> Iterator[Finding]:
    """CK203: pickles inside the strings of others ask for names, too."""
    inside = (one for one in survey.names if one.nested_at is not None and not is_allowed(one.module, one.name))
    names = dict.fromkeys(f"{one.module}.{one.name}" for one in inside)
    if names:
        fact = f"pickles inside its strings ask for {some(list(names))} (not imported here)"
        yield note("CK203", fact)


def deeds(survey: Survey, advice: AskAdvice = Advice) -> Iterator[Finding]:
    """Yield what pickles call and name beyond what makes data, by how far that reaches: CK205, CK206, CK207."""
    yield from system_calls(survey, advice)
    code = [act for act in survey.acts if act.grade == "code" and act.how != "runs"]
    acts = sorted(code, key=lambda act: _LAST.index(act.how) if act.how in _LAST else -1)
    if acts:
        packages = _packages(acts)
        what = f"runs code of {some(packages)}" if packages else "may do more than make data"
        found = advice()
        found = found if found.command else Advice(_TRUST)
        yield note("CK206", f"unpickling {what}: it {deed(acts[0])}", *found)
    brought = [act for act in survey.of("code") if act.how == "runs"]
    kinds = {
        SOURCE: "source code in modules that it holds",
        NATIVE: "native code in folders that it holds",
        SETTINGS: "what its settings name",
    }
    for why, what in kinds.items():
        places = dict.fromkeys(act.name for act in brought if act.why == why)
        if places:
            fact = f"its loader runs {what}: {some(list(places))}"
            yield note("CK217", fact, _TRUST_LOADER)
    named = [f"{act.name} ({_place(act)})" for act in references(survey.acts) if act.grade == "system"]
    if named:
        fact = f"the pickles name what reaches the system, though they do not call it: {some(named)}"
        yield note("CK207", fact, _TRUST)


def system_calls(survey: Survey, advice: AskAdvice) -> Iterator[Finding]:
    """CK205: unpickling would call what reaches the system. CK216: a program in the file would."""
    acts = list(survey.of("system"))
    if not acts:
        return
    command = advice().command
    programs = [act for act in acts if act.how == "runs"]
    calls = [act for act in acts if act.how != "runs"]
    if calls:
        shown = [f"{act.text}, which {act.why} ({_place(act)})" for act in calls]
        hint = "Do not unpickle this file: not with torch.load(weights_only=False), not with pickle.load()."
        yield note("CK205", f"unpickling calls {some(shown, _SHOWN)}", hint, command)
    if programs:
        shown = [f"{act.text}, which {act.why} ({_place(act)})" for act in programs]
        fact = f"the program in the file has {some(shown, _SHOWN)}"
        yield note("CK216", fact, f"Do not load it: {_LOADERS} run it.", command)


def deed(act: Act) -> str:
    """Return what an act does, as part of a sentence."""
    verb = {
        "calls": "calls",
        "builds": "builds",
        "refers": "imports",
        "sets": "sets a state:",
        "adds": "adds items:",
        "asks": "asks the loader for",
        "odd": "holds",
    }
    return f"{verb[act.how]} {act.name if act.how in ('builds', 'refers') else act.text} ({_place(act)})"


def _place(act: Act) -> str:
    return place(act.record, act.offset, act.nested_at)


def loading(
    survey: Survey, checkpoints: Sequence[Checkpoint], *, refused: bool, is_alone: bool = True
) -> tuple[str, ...]:
    """
    Return a line for each way to load a file: what it would run. The first of the checkpoints is the file, the others
    members.

    Where it is not ``alone``, something is found in other files of its folder.
    """
    first = checkpoints[0]
    traits = first.traits
    is_empty = not (survey.names or any(one.streams or one.traits.program for one in checkpoints))
    if not (survey.acts or survey.unseen) and (traits.is_plain or is_empty):
        others = "" if is_alone else "; what other files of the folder run is said above"
        loader = traits.call if traits.is_read else "ckptool.load()"
        return (f"{loader} opens it and runs nothing: it holds no pickle{others}",)
    runs = _runs([act for act in survey.acts if act.how != "runs"])
    if runs == _DATA and survey.unseen:
        runs += ", as far as it was looked at"
    if traits.is_trusted:
        return (f"{traits.call} unpickles its index and its values without weights_only, which {runs}",)
    if traits.loader != "torch.load":
        programs = [act.text for act in survey.acts if act.how == "runs" and act.grade != "program"]
        opens = "runs the program in it" if traits.program else "opens it"
        has = f", which has {some(programs, 1)}" if programs else ""
        return (f"{traits.call} {opens}{has}", f"pickle.load() of a part of it {runs}")
    opens = "refuses it" if refused else "opens it and runs nothing"
    return (f"torch.load() {opens}", *(f"{loader} {runs}" for loader in traits.unpickled_by))


def of_refused(acts: Sequence[Act]) -> Iterator[str]:
    """Yield what unpickling a file would do that cannot be opened; nothing if no more than data is known of it."""
    what = _runs(acts)
    if what != _DATA:
        is_program = all(act.how == "runs" for act in acts if act.how != "refers")
        yield show(f"what {'loads' if is_program else 'unpickles'} it all the same {what}")


def _runs(acts: Sequence[Act]) -> str:
    """Return what acts run, as part of a sentence."""
    system = [act.text for act in acts if act.grade == "system" and act.how != "refers"]
    code = [act for act in acts if act.grade in ("code", "system")]
    if system:
        return f"calls {some(system, 1)}"
    if code and all(act.why == NATIVE for act in code):
        return f"runs {some(list(dict.fromkeys(act.text for act in code)))}"
    if packages := _packages(code):
        return f"runs code of {some(packages)}"
    return "may do more than make data" if code else _DATA


def _packages(acts: Iterable[Act]) -> list[str]:
    """Return the packages that code is of, those first of which something is called."""
    named = [act for act in acts if " " not in act.name]
    return list(dict.fromkeys(act.package for act in sorted(named, key=lambda act: act.how == "refers")))
