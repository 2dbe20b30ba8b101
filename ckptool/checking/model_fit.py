"""Whether the weights of a checkpoint fit into a model: what is missing, unexpected or of another shape, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

from ckptool.checking.finding import Advice, Finding, literal, migration, note, state_dict
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.weights import NameChanges, choose, prepare
from ckptool.errors import Failure, MigrationRefused, WeightsNotFound
from ckptool.messages import some
from ckptool.names.matching import Renames, Shapes, as_options, is_benign, match
from ckptool.names.suggestions import guess_renames, nearest

_MOST_EXCLUDED = 8
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


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
    fit = _Fit(checkpoint, chosen.key, expected, {name: one.info.shape for name, one in tensors.items()}, model)
    if fit.lacks and (layout := _in_another_layout(checkpoint, chosen, expected, model, is_file=not places)):
        yield layout
        return
    yield from fit.findings()
    if places:
        from ckptool.torch_ops.models import kind_mismatches, ties_with_two_values

        taken = {name: tensors[old] for name, old in fit.pairs.items()}
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


class _Fit:
    """Compares names and shapes of a file with those of a model, and makes findings with advice."""

    def __init__(self, checkpoint: Checkpoint, key: str, expected: Shapes, found: Shapes, model: str) -> None:
        self._checkpoint, self._key, self._model = checkpoint, key, model
        self._expected, self._found = expected, found
        self._matched = matched = match(expected, found)
        self._lacking = lacking = [name for name in matched.missing if not is_benign(name)]
        in_other_names = matched.target_wrapped and bool(matched.changes)
        self._guesses = guess_renames(expected, found) if in_other_names or (lacking and matched.unexpected) else ()
        self._is_whole = not lacking and not in_other_names
        """Whether the model has all that it wants, so that unexpected names can be left out."""
        wanted = {one.expected for one in matched.reshaped}
        self._has_spare = self._is_whole and wanted.isdisjoint(found[name] for name in matched.unexpected)
        self._taken = [*matched.pairs.values(), *(one.found_name for one in matched.reshaped)]
        """The names of the file that the model has tensors for, also of another shape."""

    @property
    def lacks(self) -> bool:
        """Whether names are missing, and others are left over."""
        return bool(self._lacking and self._matched.unexpected)

    @property
    def pairs(self) -> Mapping[str, str]:
        """Names of the model, to those of the file, where shapes are equal."""
        return self._matched.pairs

    def findings(self) -> Iterator[Finding]:
        matched, total = self._matched, f"{len(self._expected):,}"
        if matched.exact and not matched.changes:
            fact = f"all {total} names and shapes are those of {self._model}"
            if matched.target_wrapped:
                yield note("CK601", f"{fact}, once its wrappers are off", "Load it before the model is wrapped.")
            else:
                yield note("CK601", fact)
        elif matched.pairs and (matched.changes or matched.alternatives):
            ways = [as_options(changes) for changes in (matched.changes, *matched.alternatives)]
            how = "under other names" if len(ways) == 1 else "more than once"
            what = f"{len(matched.pairs):,} of {total} names of {self._model} are there {how}: {some(ways)}"
            advice = self._advice_on_names(None if len(ways) == 1 else "Choose one of them.")
            yield note("CK602" if len(ways) == 1 else "CK606", what, *advice)
        yield from self._missing()
        yield from self._unexpected()
        yield from self._reshaped()

    def _advice_on_names(self, why: str | None) -> Advice:
        if self._is_whole:
            return self._migrate(self._matched.changes, self._left_out(), why)
        before = "Load it before the model is wrapped"
        if self._matched.target_wrapped and self._guesses:
            return self._migrate(self._guesses, {}, f"{before}, or rename.")
        if self._matched.target_wrapped and not self._lacking:
            return Advice(f"{before}.")
        return Advice(f"Even so, {len(self._lacking):,} would be missing.")

    def _missing(self) -> Iterator[Finding]:
        matched, missing = self._matched, self._lacking
        computed = [name for name in matched.missing if is_benign(name)]
        if missing:
            near = nearest(missing, self._expected, matched.unexpected, self._found)
            listed = [f"{name} (like {near[name]}?)" if name in near else name for name in missing]
            if self._guesses:
                advice = self._migrate(self._guesses, {}, "If these are the same tensors, rename them.")
            elif not self._taken:
                advice = self._another()
            elif near:
                advice = Advice("If these are the same tensors, migrate it and rename them: `rename='RE=REPL'`.")
            else:
                advice = Advice("Take the checkpoint that goes with this model, or build the model as the file's was.")
            yield note("CK603", f"{len(missing):,} missing: {some(listed)}", *advice)
        if computed:
            what = f"{len(computed):,} missing that models compute themselves: {some(computed)}"
            hint = None if missing else "Load with strict=False if load_state_dict() minds."
            yield note("CK603", what, hint, severity="info")

    def _unexpected(self) -> Iterator[Finding]:
        unexpected = self._matched.unexpected
        if not unexpected:
            return
        others = [name for name in unexpected if not is_benign(name)]
        if options := self._left_out():
            advice = self._migrate(self._matched.changes, options, "Leave out what the model has no use for.")
        elif not self._taken and not self._guesses:
            advice = self._another()
        elif self._has_spare:
            advice = Advice("Load with strict=False.")
        else:
            advice = Advice("Leave none of them out: what is missing may be among them, under other names.")
        what = f"{len(unexpected):,} unexpected: {some(others or unexpected)}"
        yield note("CK604", what, *advice, severity="warning" if others else "info")

    def _reshaped(self) -> Iterator[Finding]:
        reshaped = self._matched.reshaped
        if not reshaped:
            return
        listed = [f"{one.found_name} is {list(one.found)}, not {list(one.expected)}" for one in reshaped]
        paired = list(self._matched.pairs.values())
        excluded = _excluding([one.found_name for one in reshaped], paired) if paired and self._has_spare else []
        advice = Advice("Build the model with the file's sizes.")
        if excluded:
            why = "Leave them out of the file and load the result with strict=False, or build the model with its sizes."
            options = self._left_out()
            options["exclude"] = [*options.get("exclude", ()), *excluded]
            advice = self._migrate(self._matched.changes, options, why)
        yield note("CK605", f"{len(reshaped):,} of another shape: {some(listed)}", *advice)

    def _another(self) -> Advice:
        return Advice(f"Check that this file and {self._model} belong together: they have no name in common.")

    def _left_out(self) -> dict[str, list[str]]:
        """Return options that leave out the unexpected names, if a few globs can do that, and tensors remain."""
        unexpected, taken = self._matched.unexpected, self._taken
        if not unexpected or not taken or not self._has_spare:
            return {}
        for head in (one.argument for one in self._matched.changes if one.option == "strip_prefix"):
            inside = [name.startswith(f"{head}.") for name in taken]
            if all(inside) and not any(name.startswith(f"{head}.") for name in unexpected):
                return {"include": [f"{literal(head)}.*"]}
        excluded = _excluding(unexpected, taken)
        return {"exclude": excluded} if excluded else {}

    def _migrate(self, changes: Renames, options: Mapping[str, list[str]], why: str | None) -> Advice:
        return migration(self._checkpoint, why, renames=changes, form="state_dict", key=self._key, **options)


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
