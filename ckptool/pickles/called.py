"""
What a pickle does, judged by the calls in the tree that was read from it.

That is enough for nearly all files: they call what is known by its name, and change no more than what they have made.
Where a name is asked for that harmless calls could be given to call, all arguments and states are looked at as well.
Where there is more to it than that, ``tracer`` has to follow the pickle. The tree holds all that the tracer sees at any
moment, and maybe more that came later; so what is not found in it is not found there either.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptool.pickles import changing, grading, nodes, reaching, results
from ckptool.pickles.dangerous_names import INSIDE
from ckptool.pickles.effects import Effect, How
from ckptool.pickles.grades import Grade, grade_of, is_plain
from ckptool.pickles.judging import SHORT, Repeats, looks_at_given
from ckptool.pickles.made_objects import makes_classes
from ckptool.pickles.nodes import Call, CallKind, Dict, Global, Inert, Pairs, PersistentId
from ckptool.pickles.plain_names import CONTAINERS, STATELESS
from ckptool.pickles.reaching import Looks
from ckptool.pickles.scanner import may_hold_pickles
from ckptool.pickles.verdicts import Verdict

if TYPE_CHECKING:
    from ckptool.pickles.reader import Pickle

_SPECIAL: Final = INSIDE | grading.LOOKED_UP
_OF_STATES: Final = _SPECIAL - {"__wrapped__"}
"""Keys of a state that may change what an object does; what it says that it wraps is only shown."""
_MOST_REPEATED: Final = 1 << 16
"""Elements of what is given again; with more, the pickle has to be followed."""
_NO_ARGUMENTS: Final = ()
"""There is one empty tuple, so that its identity says it all; another one would only be looked at in vain."""
_NOTHING: Final[tuple[tuple[Inert, ...], ...]] = ((), ([],))
"""Arguments that hold nothing."""
_GIVE_CALLS_OF_PACKAGES: Final = frozenset(("functools.partial",))
"""Names of which it matters what harmless calls are given, though alone they call nothing that reaches the system."""
_NAMES: Final = (Global, PersistentId)
"""
What is called, mostly, and may be looked up: each is equal to itself alone. The hash of a tuple is that of all in it.
"""
_CONSTANTS: Final = frozenset((bool, int, float, type(None)))
_NEVER_CALLED: Final = _CONSTANTS | {str}
"""Types of values that do nothing as a method of what has them."""


class Told(NamedTuple):
    """What calls of one name come to."""

    offset: int
    """Of the first."""
    verdict: Verdict
    times: int


class _Bare:
    """Calls of one name that are given nothing: what they come to is asked for once."""

    __slots__ = ("offset", "times", "verdicts")

    def __init__(self, offset: int, verdicts: Sequence[Verdict]) -> None:
        self.offset = offset
        """Of the first."""
        self.verdicts = verdicts
        self.times = 0


class Unclear(Exception):
    """The pickle has to be followed."""


class _Wary(Exception):
    """A name was met that harmless calls may be given."""


class _About(NamedTuple):
    """What a name alone says about its calls, and about what they give."""

    referred: tuple[Verdict, ...]
    """What it comes to that a pickle asks for it."""
    wary: tuple[str, ...]
    """Those of these names that harmless calls may be given."""
    may_reach: bool
    """It may reach the system when it is called."""
    is_done: bool
    """A call makes data, whatever it is given."""
    is_plain: bool
    """A call without arguments makes data."""
    is_container: bool
    is_stateless: bool
    is_of_package: bool
    """It is that of a class of a package that is not known, whose code a call runs, and nothing else."""


@lru_cache(maxsize=1 << 12)
def _about(module: str, name: str) -> _About:
    full = reaching.canonical(module, name)
    referred = tuple(grading.judge(Effect("refers", Global(module, name), None, 0), None))
    is_class = name.isidentifier() and name.lstrip("_")[:1].isupper()
    is_own = is_class and reaching.package_of(full) not in changing.KNOWN and not reaching.is_pickler(full)
    hows: tuple[How, How] = ("calls", "builds")
    return _About(
        referred,
        tuple(one.name for one in referred if grading.is_wary(one)),
        bool(name) and reaching.reaching(full, name) is not None,
        grading.is_done(module, name),
        is_plain(module, name),
        full in CONTAINERS,
        full in STATELESS,
        is_own and all(grade_of(full, name, how) == ("code", None) for how in hows),
    )


def told(names: Sequence[Global], pickles: Sequence[Pickle]) -> tuple[list[Told], bool]:
    """
    Return what pickles come to, in order, and whether they ask for a name that harmless calls may be given.

    ``names`` are all that they ask for.

    Raises:
        Unclear: They have to be followed.
    """
    try:
        return _told(names, pickles, None), False
    except _Wary:
        return _told(names, pickles, Looks(has_classes=any(map(makes_classes, names)))), True


def reach(names: Sequence[Global], pickles: Sequence[Pickle]) -> Grade | None:
    """
    Return how far pickles reach, where that is no further than code of packages; None where it may be further.

    This is the grade of what ``told`` returns, without which calls they are.
    """
    known = [(name, _about(name.module, name.name)) for name in names]
    own: set[Inert] = {name for name, one in known if one.is_of_package}
    ids = (node for one in pickles for node in one.persistent_ids if type(node.pid) is not tuple or len(node.pid) < 5)
    own.update(node for node in ids if nodes.global_of(node) in own)  # a storage's has five parts
    wary = [one for _, about in known if about.wary for one in about.wary]
    if not _GIVE_CALLS_OF_PACKAGES.issuperset(wary):
        return None
    # Then no name reaches the system, and what code of packages is given cannot either.
    looks = Looks(has_classes=any(map(makes_classes, names))) if wary else None
    try:
        found = [one for _, verdicts, _ in _verdicts(names, pickles, looks, own) for one in verdicts]
    except (Unclear, _Wary):
        return None
    if any(one.grade == "system" for one in found):
        return None
    is_own = own and any(type(call.func) in _NAMES and call.func in own for one in pickles for call in one.calls)
    return "code" if is_own or any(one.how != "refers" for one in found) else "data"


def _told(names: Sequence[Global], pickles: Sequence[Pickle], looks: Looks | None) -> list[Told]:
    found: dict[tuple[str, str], Told] = {}
    for offset, verdicts, times in _verdicts(names, pickles, looks):
        for one in verdicts:
            known = found.get((one.how, one.name))
            first = known if known is not None and known.offset <= offset else Told(offset, one, 0)
            found[one.how, one.name] = first._replace(times=times + (known.times if known is not None else 0))
    return sorted(found.values(), key=lambda one: one.offset)


def _verdicts(
    names: Sequence[Global], pickles: Sequence[Pickle], looks: Looks | None, skipped: Collection[Inert] = ()
) -> Iterator[tuple[int, Sequence[Verdict], int]]:
    """
    Yield what names and calls come to: the offset, the verdicts, and how often they are met.

    ``skipped`` are names whose calls are not to be looked at.
    """
    known = [(name, _about(name.module, name.name)) for name in names]
    for name, one in known:
        if one.wary and looks is None:
            raise _Wary
        if one.referred:
            yield name.offset, one.referred, 1
    if looks is not None and any(one.may_reach for _, one in known):  # else no id holds what does
        asked = tuple(node.pid for one in pickles for node in one.persistent_ids)
        if reaching.passed(asked, looks) is not None:
            raise Unclear
    calls = list(chain.from_iterable(one.calls for one in pickles))
    changed = [call for call in calls if call.state is not None or call.items or call.pairs]
    containers = {id(name) for name, one in known if one.is_container}
    is_any_stateless = any(one.is_stateless for _, one in known)
    states: set[int] = set()
    repeats = Repeats(_MOST_REPEATED)
    for call in changed:
        if (call.items or call.pairs) and id(call.func) not in containers and not changing.takes(call, "adds"):
            raise Unclear
        if call.state is not None:
            if looks is not None and repeats.are_too_many(call.state):
                raise Unclear
            _look_at_state(call, states, looks, is_any_stateless=is_any_stateless)
    done: set[Inert] = {name for name, one in known if one.is_done}
    plain = {name for name, one in known if one.is_plain}
    places = zip(calls, chain.from_iterable(one.call_offsets for one in pickles), strict=True)
    if looks is not None:
        rest = _but_harmless(places, done, plain, set(map(id, changed)))
        todo: Iterable[tuple[Call, int]] = (
            (call, offset)
            for call, offset in rest
            if type(call.func) not in _NAMES or call.func not in skipped or call.kwargs is not None
        )
    else:
        done.update(skipped)
        todo = [
            (call, offset)
            for call, offset in places
            if type(func := call.func) not in _NAMES
            or (func not in done and (func not in plain or call.args is not _NO_ARGUMENTS))
        ]
    bare: dict[tuple[int, CallKind, int], _Bare] = {}
    for call, offset in todo:
        if call.kwargs is not None or call.args not in _NOTHING:
            yield offset, _unwary(_of_call(call, offset, looks, repeats), looks), 1
            continue
        key = (id(call.func), call.how, len(call.args))
        if key not in bare:
            bare[key] = _Bare(offset, _unwary(_of_call(call, offset, looks, repeats), looks))
        bare[key].times += 1
    yield from ((one.offset, one.verdicts, one.times) for one in bare.values())


def _unwary(verdicts: Sequence[Verdict], looks: Looks | None) -> Sequence[Verdict]:
    """Return verdicts, unless what calls are given, and what becomes of their results, decides from now on."""
    if looks is None and any(map(grading.is_wary, verdicts)):
        raise _Wary
    return verdicts


def _but_harmless(
    calls: Iterable[tuple[Call, int]], done: Container[Inert], plain: Container[Inert], is_changed: Container[int]
) -> Iterator[tuple[Call, int]]:
    """Leave out calls that make data of nothing, of constants, or of what other such calls give that stay as made."""
    harmless: set[int] = set()
    for call, offset in calls:
        func = call.func
        if type(func) not in _NAMES:
            yield call, offset
        elif call.args is _NO_ARGUMENTS and call.kwargs is None and func in plain:
            if id(call) not in is_changed:
                harmless.add(id(call))
        elif func in done and id(call) not in is_changed and _is_given_constants(call, harmless):
            harmless.add(id(call))
        else:
            yield call, offset


def _of_call(call: Call, offset: int, looks: Looks | None, repeats: Repeats) -> list[Verdict]:
    """Return what a call comes to, if what it gives need not be followed, nor is called."""
    func = nodes.global_of(call.func)
    if func is None:
        raise Unclear
    effect = _effect(call, offset)
    if (looks is not None or looks_at_given(effect)) and repeats.are_too_many(call.args):
        raise Unclear
    if looks is not None and looks.methods and type(call.args) is tuple:
        effect = effect._replace(arguments=tuple(looks.methods.get(id(one), one) for one in call.args))
    known = results.result(effect)
    if type(known) is bytes:
        return []
    if known is not None and not _is_dull_method(effect, known):
        raise Unclear
    if looks is not None and type(known) is Global:
        looks.methods[id(call)] = known
    if type(call.args) is tuple and len(call.args) == 1 and type(call.args[0]) is Call:
        inner = results.result(_effect(call.args[0], offset))
        effect = effect if type(inner) is not bytes else effect._replace(arguments=(inner,))
    if grading.loads_bytes(effect):  # what is in them is looked at itself
        if not may_hold_pickles(effect.arguments[0]):
            raise Unclear
        return []
    if looks is None and call.state is not None and changing.keeps_calls(func):
        raise _Wary
    found = list(grading.judge(effect, looks))
    if looks is None and known is not None:
        raise _Wary
    if looks is not None and any(one.grade == "system" for one in found):
        raise Unclear
    return found


def _is_dull_method(effect: Effect, known: Inert) -> bool:
    """Say whether what a call gives is a method of an object of the file, of torch's or an unknown class."""
    holder = effect.arguments[0]
    made = nodes.global_of(holder.func) if type(holder) is Call else None
    if made is None or type(known) is not Global:
        return False
    if known.module != made.module or known.name != f"{made.name}.{effect.arguments[1]}":
        return False  # it has got something under that name
    name = reaching.canonical(known.module, known.name)
    package = reaching.package_of(name)
    return (package == "torch" or package not in changing.KNOWN) and reaching.reaching(name, known.name) is None


def _is_given_constants(call: Call, harmless: Container[int]) -> bool:
    """Say whether a call is given nothing but constants, ids, and what harmless calls give."""
    if call.kwargs is not None or type(call.args) is not tuple or len(call.args) > SHORT:
        return False
    for one in call.args:
        kind = type(one)
        if kind is tuple:
            if len(one) > SHORT or not _CONSTANTS.issuperset(map(type, one)):
                return False
        elif kind not in _CONSTANTS and kind is not PersistentId and id(one) not in harmless:
            return False
    return True


def _effect(call: Call, offset: int) -> Effect:
    return Effect("calls" if call.how == "reduce" else "builds", call.func, call.args, offset, call.kwargs)


def _look_at_state(call: Call, known: set[int], looks: Looks | None, *, is_any_stateless: bool) -> None:
    """
    Look whether a state sets attributes whose names are text and mean nothing to Python.

    ``known`` gets the states that were looked at.
    """
    state = call.state
    if is_any_stateless and not changing.takes(call, "sets"):
        raise Unclear
    if id(state) not in known:
        known.add(id(state))
        has_slots = type(state) is tuple and len(state) == 2
        for part in state if has_slots else (state,):
            if type(part) is not Dict and type(part) is not Call:
                continue
            if part.pairs and not _is_dull(part.pairs, _SPECIAL if has_slots else _OF_STATES):
                raise Unclear
    if looks is not None and changing.sets_slots(call, state):
        raise Unclear  # whether its class has a function for that by then, the order decides
    if looks is not None and next(changing.state_given(call, state, looks), None) is not None:
        raise Unclear


def _is_dull(pairs: Pairs, special: frozenset[str]) -> bool:
    for key, value in pairs:
        if type(key) is not str:
            return False
        if key in special and (key not in grading.LOOKED_UP or type(value) not in _NEVER_CALLED):
            return False
    return True
