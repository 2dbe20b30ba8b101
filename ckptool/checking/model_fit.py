"""Whether the weights of a checkpoint fit a model: what is missing, unexpected or of another shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from ckptool.checking.finding import Advice, Finding, literal, migration, note, state_dict
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.weights import NameChanges, choose, prepare
from ckptool.errors import Failure, MigrationRefused, WeightsNotFound
from ckptool.messages import some
from ckptool.names.matching import KeyMatch, Renames, Shapes, as_options, is_benign, match
from ckptool.names.suggestions import guess_renames, nearest

_MOST_EXCLUDED = 8
_BEFORE: Final = "Load it before the model is wrapped"
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
Options: TypeAlias = Mapping[str, list[str]]
Migrate: TypeAlias = Callable[[Renames, Options, "str | None"], Advice]


def shapes_of(checkpoint: Checkpoint, key: str | None = None) -> dict[str, tuple[int, ...]]:
    """
    Return the shapes of the weights of a checkpoint, by name, tied names among them.

    Raises:
        WeightsNotFound: It is not clear which state dict is the weights.
    """
    weights = prepare(checkpoint, choose(checkpoint, key, "auto"), NameChanges())
    return {name: tensor.info.shape for name, tensor in weights.tensors.items()}


def examine(
    checkpoint: Checkpoint,
    expected: Shapes,
    model: str,
    key: str | None = None,
    places: Mapping[str, Any] = _NOTHING,
) -> Iterator[Finding]:
    """
    Yield findings on how the weights of a checkpoint fit ``expected``, the names and shapes of ``model``, and
    ``places``, its tensors by name, if there are any.

    CK601 they fit, CK602 they do under other names, CK603 missing, CK604 unexpected, CK605 of another shape, CK606
    names match in several ways, CK607 of another kind; CK600 they cannot be compared: it is not clear which state dict
    is meant.
    """
    try:
        chosen = choose(checkpoint, key, "auto")
        tensors = prepare(checkpoint, chosen, NameChanges()).tensors
    except (WeightsNotFound, MigrationRefused) as error:
        advice = Advice(error.hint) if error.hint else state_dict(checkpoint)
        yield note("CK600", f"cannot be compared with {model}: {error.message}", *advice)
        return
    found = {name: one.info.shape for name, one in tensors.items()}
    matched = match(expected, found)
    lacks = matched.unexpected and not all(map(is_benign, matched.missing))
    if lacks and (layout := _in_another_layout(checkpoint, chosen, expected, model, is_file=not places)):
        yield layout
        return
    yield from _compared(checkpoint, chosen.key, expected, found, model, matched)
    if places:
        from ckptool.torch_ops.models import kind_mismatches, ties_with_two_values

        taken = {name: tensors[old] for name, old in matched.pairs.items()}
        if apart := kind_mismatches(taken, places):
            yield note("CK607", some(apart), "Build the model with tensors of the file's kind.")
            return
        tied: list[tuple[str, str]] = []
        with suppress(Failure):  # other findings report bytes that cannot be read
            tied = ties_with_two_values(taken, places)
        if tied:
            pairs = some([f"{kept} and {name}" for kept, name in tied])
            yield note("CK607", f"{model} ties names for which the file has different values: {pairs}")


def _in_another_layout(
    checkpoint: Checkpoint, chosen: StateDict, expected: Shapes, model: str, *, is_file: bool
) -> Finding | None:
    """Return the finding that recipes make all expected tensors of the weights in exactly one way; else None."""
    from ckptool.recipes.like import routes_to  # most weights fit

    way, *others = routes_to(checkpoint, prepare(checkpoint, chosen, NameChanges()), expected)
    if others or not way.fits or not way.steps:
        return None
    fact = f"all {len(expected):,} names and shapes of {model} are there in another layout: {way.options}"
    if is_file:
        given: dict[str, Any] = {"like": model}
    elif way.then or len(way.steps) > 1:
        return note("CK602", fact)
    else:
        (step,) = way.steps
        given = {"renames": way.changes, "recipe": step.recipe.name, "reverse": step.reverse}
    advice = migration(checkpoint, "Write it in that layout.", **given, key=chosen.key, form="state_dict")
    return note("CK602", fact, *advice)


def _compared(
    checkpoint: Checkpoint, key: str, expected: Shapes, found: Shapes, model: str, matched: KeyMatch
) -> Iterator[Finding]:
    """Yield findings on names and shapes of a file and of a model, with advice."""
    unexpected, reshaped, total = matched.unexpected, matched.reshaped, f"{len(expected):,}"
    lacking = [name for name in matched.missing if not is_benign(name)]
    in_other_names = matched.target_wrapped and bool(matched.changes)
    guesses = guess_renames(expected, found) if in_other_names or (lacking and unexpected) else ()
    is_whole = not lacking and not in_other_names
    # The names of the file that the model has tensors for, also of another shape.
    taken = [*matched.pairs.values(), *(one.found_name for one in reshaped)]
    # Only if the model has all that it wants, unexpected names can be left out.
    has_spare = is_whole and {one.expected for one in reshaped}.isdisjoint(found[name] for name in unexpected)
    left_out = _left_out(matched, taken) if unexpected and taken and has_spare else {}
    another = Advice(f"Check that this file and {model} belong together: they have no name in common.")

    def migrate(changes: Renames, options: Options, why: str | None) -> Advice:
        return migration(checkpoint, why, renames=changes, form="state_dict", key=key, **options)

    if matched.exact and not matched.changes:
        wrapped = (", once its wrappers are off", f"{_BEFORE}.") if matched.target_wrapped else ("", None)
        yield note("CK601", f"all {total} names and shapes are those of {model}{wrapped[0]}", wrapped[1])
    elif matched.pairs and (matched.changes or matched.alternatives):
        ways = [as_options(changes) for changes in (matched.changes, *matched.alternatives)]
        is_one = len(ways) == 1
        if is_whole:
            advice = migrate(matched.changes, left_out, None if is_one else "Choose one of them.")
        elif matched.target_wrapped and guesses:
            advice = migrate(guesses, {}, f"{_BEFORE}, or rename.")
        else:
            is_all = matched.target_wrapped and not lacking
            advice = Advice(f"{_BEFORE}." if is_all else f"Even so, {len(lacking):,} would be missing.")
        how = "under other names" if is_one else "more than once"
        fact = f"{len(matched.pairs):,} of {total} names of {model} are there {how}: {some(ways)}"
        yield note("CK602" if is_one else "CK606", fact, *advice)
    if lacking:
        near = nearest(lacking, expected, unexpected, found)
        listed = [f"{name} (like {near[name]}?)" if name in near else name for name in lacking]
        if guesses:
            advice = migrate(guesses, {}, "If these are the same tensors, rename them.")
        elif not taken:
            advice = another
        elif near:
            advice = Advice("If these are the same tensors, migrate it and rename them: `rename='RE=REPL'`.")
        else:
            advice = Advice("Take the checkpoint that goes with this model, or build the model as the file's was.")
        yield note("CK603", f"{len(lacking):,} missing: {some(listed)}", *advice)
    if computed := [name for name in matched.missing if is_benign(name)]:
        what = f"{len(computed):,} missing that models compute themselves: {some(computed)}"
        hint = None if lacking else "Load with strict=False if load_state_dict() minds."
        yield note("CK603", what, hint, severity="info")
    if unexpected or reshaped:
        yield from _beyond(matched, migrate, left_out, another if not taken and not guesses else None, has_spare)


def _beyond(
    matched: KeyMatch, migrate: Migrate, left_out: Options, another: Advice | None, has_spare: bool
) -> Iterator[Finding]:
    """Yield findings on names that the model has no use for, and on tensors of another shape."""
    unexpected, reshaped = matched.unexpected, matched.reshaped
    if unexpected:
        others = [name for name in unexpected if not is_benign(name)]
        if left_out:
            advice = migrate(matched.changes, left_out, "Leave out what the model has no use for.")
        elif another is not None:
            advice = another
        elif has_spare:
            advice = Advice("Load with strict=False.")
        else:
            advice = Advice("Leave none of them out: what is missing may be among them, under other names.")
        what = f"{len(unexpected):,} unexpected: {some(others or unexpected)}"
        yield note("CK604", what, *advice, severity="warning" if others else "info")
    if reshaped:
        paired = list(matched.pairs.values())
        names = {one.found_name: one for one in reshaped}
        advice = Advice("Build the model with the file's sizes.")
        if excluded := _excluding([*names], paired) if paired and has_spare else []:
            why = "Leave them out of the file and load the result with strict=False, or build the model with its sizes."
            excluded = [*left_out.get("exclude", ()), *excluded]
            advice = migrate(matched.changes, {**left_out, "exclude": excluded}, why)
        listed = [f"{name} is {list(one.found)}, not {list(one.expected)}" for name, one in names.items()]
        yield note("CK605", f"{len(reshaped):,} of another shape: {some(listed)}", *advice)


def _left_out(matched: KeyMatch, taken: Sequence[str]) -> Options:
    """Return options that leave out the unexpected names, if a few globs can do that; else nothing."""
    for head in (one.argument for one in matched.changes if one.option == "strip_prefix"):
        inside = [name.startswith(f"{head}.") for name in taken]
        if all(inside) and not any(name.startswith(f"{head}.") for name in matched.unexpected):
            return {"include": [f"{literal(head)}.*"]}
    excluded = _excluding(matched.unexpected, taken)
    return {"exclude": excluded} if excluded else {}


def _excluding(names: Sequence[str], taken: Sequence[str]) -> list[str]:
    """Return globs that match ``names``, and none of ``taken``: by first components if they are many; else nothing."""
    globs = [literal(name) for name in names]
    if len(names) > _MOST_EXCLUDED:
        parts = [name.partition(".") for name in names]
        heads = {head for head, _, _ in parts}
        if any(name.partition(".")[0] in heads for name in taken):
            return []
        globs = list(dict.fromkeys(f"{literal(head)}.*" if dot else literal(head) for head, dot, _ in parts))
    return globs if len(globs) <= _MOST_EXCLUDED else []
