"""Whether the weights of a checkpoint fit into a model: what is missing, unexpected or of another shape, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptool.checking.advice import literal, migration, state_dict
from ckptool.checking.finding import Advice, Finding, note
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.weights import NameChanges, choose, prepare
from ckptool.errors import MigrationRefused, WeightsNotFound
from ckptool.messages import some
from ckptool.names.matching import Renames, Shapes, as_options, is_benign, match
from ckptool.names.suggestions import guess_renames, nearest

_MOST_EXCLUDED = 8


def shapes_of(checkpoint: Checkpoint, key: str | None = None) -> dict[str, tuple[int, ...]]:
    """
    Return the shapes of the weights of a checkpoint, by name, tied names among them.

    Raises:
        WeightsNotFound: It is not known which state dict they are.
    """
    return _shapes(checkpoint, choose(checkpoint, key, "auto"))


def examine(checkpoint: Checkpoint, expected: Shapes, model: str, key: str | None = None) -> Iterator[Finding]:
    """
    Yield how the weights of a checkpoint fit the names and shapes that ``model`` expects.

    CK601 they fit, CK602 they do under other names, CK603 missing, CK604 unexpected, CK605 of another shape, CK606 it
    cannot be known which names are meant; CK600 they cannot be compared: it is not known which state dict it is.
    """
    try:
        chosen = choose(checkpoint, key, "auto")
        found = _shapes(checkpoint, chosen)
    except (WeightsNotFound, MigrationRefused) as error:
        advice = Advice(error.hint) if error.hint else state_dict(checkpoint)
        yield note("CK600", f"cannot be compared with {model}: {error.message}", *advice)
        return
    yield from _Fit(checkpoint, chosen.key, expected, found, model).findings()


def _shapes(checkpoint: Checkpoint, chosen: StateDict) -> dict[str, tuple[int, ...]]:
    weights = prepare(checkpoint, chosen, NameChanges())
    return {name: tensor.info.shape for name, tensor in weights.tensors.items()}


class _Fit:
    def __init__(self, checkpoint: Checkpoint, key: str, expected: Shapes, found: Shapes, model: str) -> None:
        self._checkpoint = checkpoint
        self._key = key
        self._expected = expected
        self._found = found
        self._matched = match(expected, found)
        self._model = model
        matched = self._matched
        self._lacking = lacking = [name for name in matched.missing if not is_benign(name)]
        in_other_names = matched.target_wrapped and bool(matched.changes)
        self._guesses = guess_renames(expected, found) if in_other_names or (lacking and matched.unexpected) else ()
        wanted = {one.expected for one in matched.reshaped}
        self._is_whole = not lacking and not in_other_names
        """Whether nothing that the model wants is lost if the unexpected is left out."""
        self._has_spare = self._is_whole and wanted.isdisjoint(found[name] for name in matched.unexpected)

    def findings(self) -> Iterator[Finding]:
        matched = self._matched
        total = len(self._expected)
        if matched.exact and not matched.changes:
            inside = ", once its wrappers are off" if matched.target_wrapped else ""
            hint = "Load it before the model is wrapped." if inside else None
            yield note("CK601", f"all {total:,} names and shapes are those of {self._model}{inside}", hint)
        elif matched.pairs and (matched.changes or matched.alternatives):
            ways = [as_options(changes) for changes in (matched.changes, *matched.alternatives)]
            one = len(ways) == 1
            there = f"there {'under other names' if one else 'more than once'}: {some(ways)}"
            what = f"{len(matched.pairs):,} of {total:,} names of {self._model} are {there}"
            why = None if one else "Choose one of them."
            if self._is_whole:
                advice = self._migrate(matched.changes, self._left_out(), why=why)
            elif matched.target_wrapped and self._guesses:
                advice = self._migrate(self._guesses, {}, why="Load it before the model is wrapped, or rename.")
            elif matched.target_wrapped and not self._lacking:
                advice = Advice("Load it before the model is wrapped.")
            else:
                advice = Advice(f"Even so, {len(self._lacking):,} would be missing.")
            yield note("CK602" if one else "CK606", what, *advice)
        yield from self._missing()
        yield from self._unexpected()
        yield from self._reshaped()

    def _missing(self) -> Iterator[Finding]:
        matched, missing = self._matched, self._lacking
        computed = [name for name in matched.missing if is_benign(name)]
        if missing:
            near = nearest(missing, self._expected, matched.unexpected, self._found)
            listed = [f"{name} (like {near[name]}?)" if name in near else name for name in missing]
            if self._guesses:
                advice = self._migrate(self._guesses, {}, why="If these are the same tensors, rename them.")
            elif not self._taken:
                advice = Advice(self._another)
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
        options = self._left_out()
        if options:
            advice = self._migrate(self._matched.changes, options, why="Leave out what the model has no use for.")
        elif not self._taken and not self._guesses:
            advice = Advice(self._another)
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
            why = "Leave them out and load the rest with strict=False, or build the model with the file's sizes."
            options = self._left_out()
            options["exclude"] = [*options.get("exclude", ()), *excluded]
            advice = self._migrate(self._matched.changes, options, why)
        yield note("CK605", f"{len(reshaped):,} of another shape: {some(listed)}", *advice)

    @property
    def _taken(self) -> list[str]:
        """The names of the file that the model has a place for, of another shape too."""
        return [*self._matched.pairs.values(), *(one.found_name for one in self._matched.reshaped)]

    @property
    def _another(self) -> str:
        return f"Check that this file and {self._model} belong together: they have no name in common."

    def _left_out(self) -> dict[str, list[str]]:
        """Return the options that leave out what is unexpected, where a few of them can, and anything is left."""
        unexpected, taken = self._matched.unexpected, self._taken
        if not unexpected or not taken or not self._has_spare:
            return {}
        for change in self._matched.changes:
            head = f"{change.argument}."
            if (
                change.option == "strip_prefix"
                and all(name.startswith(head) for name in taken)
                and not any(name.startswith(head) for name in unexpected)
            ):
                return {"include": [f"{literal(change.argument)}.*"]}
        excluded = _excluding(unexpected, taken)
        return {"exclude": excluded} if excluded else {}

    def _migrate(self, changes: Renames, options: Mapping[str, list[str]], why: str | None = None) -> Advice:
        return migration(self._checkpoint, why, renames=changes, form="state_dict", key=self._key, **options)


def _excluding(names: Sequence[str], taken: Sequence[str]) -> list[str]:
    """Return the globs that leave these names out and not those that are taken: by their heads, if they are many."""
    globs = [literal(name) for name in names]
    if len(names) > _MOST_EXCLUDED:
        parts = [name.partition(".") for name in names]
        heads = {head for head, _, _ in parts}
        if any(name.partition(".")[0] in heads for name in taken):
            return []
        globs = list(dict.fromkeys(f"{literal(head)}.*" if dot else literal(head) for head, dot, _ in parts))
    return globs if len(globs) <= _MOST_EXCLUDED else []
