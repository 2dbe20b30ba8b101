"""
Refuses or notes before anything is written: unknown names, empty results, entries that torch refuses.

Plain ``torch.load(path)`` refuses a whole file for one object of other code than torch's, so such entries are refused.
Of calls in the new pickle, those that reach the system are refused, all others listed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import nlargest
from typing import TypeAlias

from ckptool.cancellation import each
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.completeness import halves_alone, refuse_stubs, stubs_in
from ckptool.checkpoints.entries import not_averaged
from ckptool.checkpoints.quantized import BY_TORCHAO, keep, within
from ckptool.checkpoints.weights import NameChanges, Weights, by_name, prepare
from ckptool.errors import MigrationRefused
from ckptool.formats.json_beside import quantization_among, quantization_of
from ckptool.limits import DEFAULT_LIMITS
from ckptool.messages import counted, show, some
from ckptool.migration.changes import Changes
from ckptool.migration.plan import METADATA, Plan
from ckptool.migration.tree_rewriter import TreeRewriter
from ckptool.names.matching import Shapes
from ckptool.names.renaming import Rule, Substitution, Trials, matched, matches
from ckptool.pickles.nodes import Inert
from ckptool.pickles.values import kind_of
from ckptool.pickles.weights_only import why_refused
from ckptool.pickles.writer import write_pickle
from ckptool.sources.source import BytesSource
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import TensorInfo

_NEAREST = 3
Unmatched: TypeAlias = tuple[str, str]
"""An option, and the text given to it that matches no name."""


class _Noted:
    """A substitution that is applied within bounds, and remembers whether it has changed any name."""

    def __init__(self, rule: Substitution, trials: Trials) -> None:
        self.rule = rule
        self._trials = trials
        self.was_asked = self.has_changed = False

    def __call__(self, names: Sequence[str]) -> list[str]:
        renamed = [self._trials.on(name, self.rule.renamed) for name in names]
        self.was_asked = True
        self.has_changed = self.has_changed or renamed != list(names)
        return renamed


def noted(rules: Sequence[Rule], trials: Trials) -> tuple[Rule, ...]:
    """Return the rules of one migration, wrapped so that ``unmatched`` can tell which changed nothing."""
    return tuple(_Noted(rule, trials) if isinstance(rule, Substitution) else rule for rule in rules)


def refuse_nothing(checkpoint: Checkpoint, plan: Plan, changes: Changes) -> None:
    """Raise MigrationRefused if a plan leaves no tensor, breaks quantised weights, or has options without a match."""
    wrong = None if changes.break_quantized or changes.dequantize else broken(checkpoint, plan)
    if wrong is not None:
        raise MigrationRefused(wrong, kind="breaks-quantized", hint=keep(checkpoint.part_of))
    sides = list(_sides(checkpoint, plan, changes)) if not changes.allow_empty else []
    many = next((len(before) for before, left in sides if before and not left), 0)
    gone = ("the only tensor is left out" if many == 1 else f"none of the {many:,} tensors is left") if many else ""
    found = unmatched(checkpoint, plan, changes)
    include = [text for option, text in found if option == "include"]
    names = _compared(checkpoint, plan) if found else {}
    if gone and include:
        listed = f"{_words('include', include)} match{'es' if len(include) == 1 else ''} none"
        hint = _nearest(include[0], names) or None
        raise MigrationRefused(f"{gone}: {listed}", kind="no-tensor-left", hint=hint)
    found = [one for one in found if one[0] != "include" or not changes.allow_empty]
    if found and not gone and not changes.allow_unmatched:
        count = sum(map(len, names.values()))
        where = f"none of the {count:,} names" if count else "no name"
        there: Collection[str] = {tensor.info.location for tensor in checkpoint.tensors.values()}
        option = found[0][0]
        if option == "drop_metadata":
            there = _free_metadata(checkpoint)
            where = f"none of the {len(there):,} keys of metadata"
        listed = f"It has {some(sorted(there))}." if there else ""
        near = listed if option in ("to", "drop_metadata") else _nearest(found[0][1], names)
        raise nothing_matches(found, where, near)
    if gone:
        hint = "Leave out less, or say with `allow_empty=True` that this is meant."
        raise MigrationRefused(f"{gone}{_by(changes)}", kind="no-tensor-left", hint=hint)
    for before, left in sides:
        if left and not any(info.numel for info in left) and (plan.weights or any(info.numel for info in before)):
            raise MigrationRefused(
                _none_has_elements(len(left)),
                kind="no-elements",
                hint="Where training was partitioned, the values are in other files: put them together first. "
                "If this is meant, say so with `allow_empty=True`.",
            )

    if not (changes.allow_missing or changes.allow_empty or plan.keeps_layout):
        taken = checkpoint.weights if plan.weights is None else plan.weights.state_dict
        if taken is not None:  # everything else may be empty
            refuse_stubs(checkpoint, taken, plan.names.filter)
        there = {name: LazyTensor(name, info) for name, info in plan.expected if name is not None}
        halves = halves_alone(there) if plan.dropped or plan.renamed else None
        if halves is not None and halves_alone(checkpoint.tensors) is None:
            hint = "If this is meant, say so with `allow_missing=True`."
            raise MigrationRefused(f"it would leave halves: {halves.fact}", kind="half-adapter", hint=hint)


def _state_dicts(checkpoint: Checkpoint, plan: Plan) -> Sequence[StateDict]:
    return by_name(checkpoint) if plan.weights is None else [plan.weights.state_dict]


def unmatched(checkpoint: Checkpoint, plan: Plan, changes: Changes) -> list[Unmatched]:
    """Return the names, globs and patterns in the changes that match nothing in the checkpoint."""
    found: list[Unmatched] = []
    if changes.include or changes.exclude:
        names = _compared(checkpoint, plan)
        for option, given, read in zip(
            ("include", "exclude"), (changes.include, changes.exclude), plan.names.filter, strict=True
        ):
            found += [(option, text) for text, glob in zip(given, read, strict=False) if not matched(glob, names)]
    for rule in plan.names.rules:
        # Where an empty result is allowed, no name may be left to change.
        if isinstance(rule, _Noted) and not rule.has_changed and (rule.was_asked or not changes.allow_empty):
            found.append(("rename", str(rule.rule)))
    there = {tensor.info.location for tensor in checkpoint.tensors.values()} | plan.retagged.keys()
    tags = () if isinstance(changes.to, str | None) else changes.to
    found += [("to", tag) for tag in tags if tag not in there]
    found += [("drop_metadata", glob) for glob, keys in dropped_metadata(checkpoint, changes).items() if not keys]
    return found + [("keep_dtype", pattern) for pattern in (plan.casting.unmatched if plan.casting else ())]


def dropped_metadata(checkpoint: Checkpoint, changes: Changes) -> dict[str, list[str]]:
    """Return the keys of metadata that each glob removes; refuse to remove those that readers need."""
    free = _free_metadata(checkpoint)
    if kept := [repr(glob) for glob in changes.drop_metadata if glob in checkpoint.metadata and glob not in free]:
        fact = f"metadata {some(kept)} says whose file it is, or what names, ties or order are read from, and stays"
        raise MigrationRefused(fact, kind="reserved-metadata", hint="Leave out other keys.")
    return {glob: [key for key in free if matches(glob, key)] for glob in changes.drop_metadata}


def _free_metadata(checkpoint: Checkpoint) -> list[str]:
    return [key for key in checkpoint.recorded.texts if key != "format"]


def nothing_matches(found: Sequence[Unmatched], where: str, near: str = "") -> MigrationRefused:
    """Return the error for options that match nothing; ``where`` describes the names, ``near`` is a hint."""
    option = found[0][0]
    texts = [text for other, text in found if other == option]
    text = f"nothing in the file was saved on {some(list(map(repr, texts)))}" if option == "to" else ""
    one, several = ("changes", "change") if option == "rename" else ("matches", "match")
    return MigrationRefused(
        text or f"{_words(option, texts)} {one if len(texts) == 1 else several} {where}",
        kind="no-such-name",
        hint=f"{near} If this is meant, say so with `allow_unmatched=True`.".lstrip(),
    )


def refuse_cut_apart(checkpoint: Checkpoint, wholes: Shapes, first: Shapes, changes: Changes) -> None:
    """Raise MigrationRefused where slices separate rows of a quantised weight from their scales."""
    found = None if changes.break_quantized else quantization_of(checkpoint)
    if found is not None and (wrong := found.cut_apart(wholes, first)):
        raise MigrationRefused(wrong, kind="breaks-quantized", path=checkpoint.path, hint=keep(checkpoint.part_of))


def broken(checkpoint: Checkpoint, plan: Plan) -> str | None:
    """Return which quantised weights a plan casts, or separates from their scales; None if there are none."""
    weights = plan.weights
    old = weights.old_names if weights is not None else {new: name for name, new in plan.renamed}
    head = weights.state_dict.head if weights is not None else ""
    types = {name: info.dtype.name for name, info in plan.expected if name is not None}
    types |= {name: types[kept] for name, kept in plan.tied.items()}
    names = {head + old.get(name, name): name for name in types}
    left = {was: types[name] for was, name in names.items()}
    before = {name: tensor.info.dtype.name for name, tensor in checkpoint.tensors.items()}
    if left == before and not old and not plan.dropped:
        return None
    # Values, and tensors nested in an entry, in a tuple say, go where their entry goes.
    entries = dict(plan.renamed)
    if weights is not None:
        entries = {head + old.get(name, name): name for name in weights.others}
        entries |= {f"{METADATA}{key}": f"{METADATA}{key}" for key, _ in weights.texts}
    taken = {*left, *(name for name, _ in within(before, entries))}
    found = quantization_among(checkpoint, taken)
    if found is None:
        return None
    if plan.renamed and BY_TORCHAO in checkpoint.metadata:
        return f"{BY_TORCHAO!r} in its header has the names by which torchao finds {found.short}, and they would change"
    if weights is None:
        entries = {name: name for name in found.numbers} | entries
    gone = {name for name, _ in found.within({*plan.dropped, *(head + one for one in plan.dropped)})}
    for name, entry in found.within(entries):
        if name not in left and name not in gone:
            left[name], names[name] = before.get(name, ""), entries[entry] + name[len(entry) :]
    return found.damage(left, is_cast=plan.casting is not None) or found.apart(names)


def notes(checkpoint: Checkpoint, plan: Plan, changes: Changes) -> Iterator[str]:
    """Yield notes on requested names without effect, on weights without elements, and on parts in other files."""
    taken = checkpoint.weights if plan.weights is None else plan.weights.state_dict
    if checkpoint.part_of is not None:
        yield f"{checkpoint.part_of.what}: what is in the others is not here"
    if taken and not any(tensor.info.numel for tensor in taken.values()):
        yield f"{_none_has_elements(len(taken))}: their values may be in other files"
    if taken and (lacking := not_averaged(checkpoint, taken)):
        yield lacking
    for one in _state_dicts(checkpoint, plan):
        stubs = stubs_in(checkpoint, one) if any(tensor.info.numel for tensor in one.values()) else None
        for found in (stubs, halves_alone(one)):
            if found is not None and any(plan.names.filter.takes(name, one.key) for name in found.names):
                yield f"{found.fact}. {found.hint}"
    for option, text in unmatched(checkpoint, plan, changes):
        if option != "keep_dtype":
            yield nothing_matches([(option, text)], "no name").message


def _none_has_elements(count: int) -> str:
    return f"all {count:,} tensors of the weights have no elements" if count > 1 else "the weights have no elements"


def _sides(checkpoint: Checkpoint, plan: Plan, changes: Changes) -> Iterator[tuple[list[TensorInfo], list[TensorInfo]]]:
    """Yield lists of the tensors before and after; if everything is taken, also of the weights that globs apply to."""
    left = [info for _, info in plan.expected]
    if plan.weights is not None:
        yield [tensor.info for tensor in plan.weights.state_dict.values()], left
        return
    yield [tensor.info for tensor in checkpoint.tensors.values()], left
    if changes.include or changes.exclude:
        paths = {one.head + name: tensor.info for one in by_name(checkpoint) for name, tensor in one.items()}
        yield list(paths.values()), [paths[path] for path in paths.keys() - set(plan.dropped)]


def names_of(checkpoint: Checkpoint, state_dicts: Sequence[StateDict]) -> dict[str, list[str]]:
    """Return the names that globs are compared with, by the key of their state dict."""
    return {one.key: prepare(checkpoint, one, NameChanges()).names for one in state_dicts}


def _compared(checkpoint: Checkpoint, plan: Plan) -> dict[str, list[str]]:
    return names_of(checkpoint, _state_dicts(checkpoint, plan))


def _nearest(glob: str, names: Mapping[str, Sequence[str]]) -> str:
    """Return a sentence with the names that contain the text of a glob, or else begin most like it."""
    text = glob.partition("=")[0].strip("*?.^$")

    def likeness(place: tuple[str, str]) -> tuple[bool, int]:
        paths = place[1], ".".join(place)
        return text in place[1], max(len(os.path.commonprefix((text, path))) for path in paths)  # noqa: RUF071 - letters

    near = nlargest(_NEAREST, ((key, name) for key, own in names.items() for name in own), key=likeness)
    return f"The nearest names are {', '.join(name for _, name in near)}." if near else ""


def _by(changes: Changes) -> str:
    """Return the options that leave something out, for a message."""
    given = (("include", changes.include), ("exclude", changes.exclude), ("drop", changes.drop))
    words = [_words(option, values) for option, values in given if values]
    words += ["drop_unsupported"] if changes.drop_unsupported else []
    return f": {', '.join(words)}" if words else ""


def _words(option: str, values: Sequence[str]) -> str:
    return ", ".join(f"{option} {value!r}" for value in values)


def kept_calls(plan: Plan, changes: Changes) -> tuple[str, ...]:
    """Return what unpickling the new file would call, beyond what makes data; refuse calls that reach the system."""
    if not plan.pickles or (plan.weights is not None and not plan.weights.others):
        return ()  # weights alone
    from ckptool.formats.runnable.pickle_search import Search

    search = Search(DEFAULT_LIMITS)
    for data in plan.pickles:
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


def without_refused(checkpoint: Checkpoint, weights: Weights, *, drop: bool) -> Weights:
    """Return the weights without entries that ``torch.load`` refuses; raise MigrationRefused unless ``drop``."""
    others, refused = weights.others, dict[str, str]()
    if others and _why_refused(checkpoint, list(others.values())) is not None:  # at once: most have many that are alike
        found = (
            (name, _why_refused(checkpoint, one)) for name, one in each(others.items(), checkpoint.source.cancellation)
        )
        refused = {name: why for name, why in found if why is not None}
    if refused and not drop:
        named = [f"{name!r} ({kind_of(others[name])}: {why})" for name, why in refused.items()]
        raise MigrationRefused(
            f"{counted(len(refused), 'entry')} that torch.load() refuses by default: {some(named)}",
            kind="unsupported-entries",
            hint="Keep them with `keep_calls=True`, for torch.load(weights_only=False), or leave them out with "
            "`drop_unsupported=True`.",
        )
    return weights.without(refused) if refused else weights


def _why_refused(checkpoint: Checkpoint, entry: Inert) -> str | None:
    """Return the name or opcode for which ``torch.load`` refuses an entry, as it would be written; None if it loads."""
    return why_refused(write_pickle(entry, TreeRewriter(checkpoint.rebuilder or Rebuilder(), None)))
