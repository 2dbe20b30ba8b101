"""Which state dict of a checkpoint goes into a given model, and under which names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.weights import NameChanges, Weights, WeightsChoice, prepare
from ckptool.errors import (
    Failure,
    IncompleteWeights,
    MigrationRefused,
    UnsupportedFeature,
    WeightsMismatch,
    WeightsNotFound,
)
from ckptool.loading.custom_loading import own_loader, rehearse
from ckptool.loading.fill_plan import FillPlan, name_changes, plan
from ckptool.loading.load import Strip, chosen_weights, torch_state_dict
from ckptool.loading.memory.assembly import Assembly
from ckptool.loading.memory.placement import META, placement
from ckptool.names.matching import Renames
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.tensors.reading import LazyTensor

T = TypeVar("T")
Made: TypeAlias = Callable[[Weights], Weights]


def as_it_is(weights: Weights) -> Weights:
    """Return weights as they are in the file."""
    return weights


class Choice(NamedTuple):
    """Which weights of a checkpoint a model is to get."""

    model: torch.nn.Module
    checkpoint: Checkpoint
    key: str | None
    weights: WeightsChoice
    allow_missing: bool = False
    made: Made = as_it_is
    """Converts the weights (to dense ones, to another layout) before they are compared with the model."""
    needs_bare_names: bool = False
    """Whether ``made`` applies a recipe: its rules are for names without wrappers, so these are stripped first."""

    def targets(
        self, *, strict: bool = True, include: Sequence[str] = (), prefix: str = ""
    ) -> tuple[StateDict, FillPlan] | None:
        """
        Return the chosen state dict and its plan; if several could be meant, the only one that fits.

        ``include`` holds globs of the model's names. ``prefix`` takes the file's names below it, and strips it.

        Return None if ``load_state_dict`` has to fill the model: the model has loading code of its own, or torch
        accepts what no plan explains (entries for a module that is None, a number that was saved as a list of one).

        Raises:
            WeightsNotFound, WeightsMismatch, UnsupportedFeature: As ``plan``.
            UnsupportedFeature: A part is requested, and the model has loading code of its own.
        """
        model, is_part = self.model, bool(include or prefix)
        if (own := own_loader(model)) is not None:
            if is_part:
                hint = "Load the part with ckptool.load(), and give it to model.load_state_dict(part, strict=False)."
                raise UnsupportedFeature(f"the model is filled by its own code, for {own}, as a whole", hint=hint)
            return None

        def fits(found: Mapping[str, LazyTensor]) -> bool:
            head = f"{prefix.rstrip('.')}." if prefix else ""
            below = {name[len(head) :]: one for name, one in found.items() if name.startswith(head)}
            with suppress(WeightsMismatch, WeightsNotFound):
                return bool(below and plan(model, below, include=include))
            return False

        try:
            chosen = self.made(
                self._chosen(fits, "wrappers" if prefix or self.needs_bare_names else None).part((), prefix)
            )
            filling = plan(model, chosen.tensors, strict=strict, others=tuple(chosen.others), include=include)
            return chosen.state_dict, filling._replace(left_out=(*chosen.dropped, *filling.left_out))
        except WeightsMismatch as error:
            if not is_part and self._torch_takes(error, strict=strict):
                return None
            if self.weights == "auto" and self._takes("raw", include, prefix) and self._takes("ema", include, prefix):
                error.hint = "Say which, `weights='raw'` or `weights='ema'`: the file has both for this model."
            if self.needs_bare_names and "from_pretrained(folder)" in (error.hint or ""):
                first = "ckptool.migrate(path, folder, recipe=…, max_shard_size='5GB', config_from=…)"
                error.hint = f"{error.hint} Write that folder first: {first}."
            raise

    def _takes(self, weights: WeightsChoice, include: Sequence[str], prefix: str) -> bool:
        with suppress(Failure):
            return self._replace(weights=weights).targets(include=include, prefix=prefix) is not None
        return False

    def _torch_takes(self, error: WeightsMismatch, *, strict: bool) -> bool:
        """Return whether torch accepts what a plan refuses, and loads each tensor whose shape seems to differ."""
        with suppress(Failure):
            chosen = chosen_weights(self.checkpoint, self.key, self.weights)
            state = torch_state_dict(self.checkpoint, chosen, Assembly(placement(META)))
            taken = rehearse(self.model, state, strict=strict, device=META)
            return taken is not None and {one for one, _, _ in error.reshaped}.isdisjoint(taken.missing)
        return False

    def through_own_code(self, load: Callable[[Weights, Renames], T], *, strict: bool = True) -> T:
        """
        Call ``load`` with the chosen weights and the changes to their names, and return its result.

        It is tried first with the names that the model seems to have, then with those of the file, because the
        model's code may know names that it does not show. If the file does not record the versions of classes, those
        of the model's modules are tried first, then the first version, which classes know how to convert.

        Raises:
            WeightsNotFound: There are no weights, or several could be meant.
            CkptoolError: The first error of ``load``, if it fails with all of them.
        """
        model, checkpoint = self.model, self.checkpoint
        strip: Strip = "wrappers" if self.needs_bare_names else None
        chosen = self.made(self._chosen(lambda found: name_changes(model, found)[1], strip))
        changes, _ = name_changes(model, chosen.tensors, strict=strict)
        ways: list[tuple[Weights, Renames]] = [(chosen, ())]
        if changes and not self.needs_bare_names:
            rules = tuple(change.rule for change in changes)
            with suppress(MigrationRefused):  # some entries that are not tensors have other names
                ways.insert(0, (self.made(prepare(checkpoint, chosen.state_dict, NameChanges(rules))), changes))
        if chosen.assumed or not (chosen.modules or checkpoint.traits.keeps_versions):
            ways = [(_with_versions_of(model, taken), changes) for taken, changes in ways] + ways
        return _first_that_loads(ways, load)

    def _chosen(self, fits: Callable[[StateDict], bool], strip: Strip = None) -> Weights:
        """Return the chosen weights, or the only ones that fit; if there are none, those of a model without tensors."""
        checkpoint, key = self.checkpoint, self.key
        try:
            return chosen_weights(checkpoint, key, self.weights, strip, fits, allow_missing=self.allow_missing)
        except (IncompleteWeights, WeightsMismatch, WeightsNotFound) as error:
            is_chosen = isinstance(error, IncompleteWeights) or self.weights != "auto"
            bare = None if is_chosen else _without_tensors(checkpoint, key)
            if bare is None:
                raise
            return prepare(checkpoint, bare, NameChanges())


def _first_that_loads(ways: Sequence[tuple[Weights, Renames]], load: Callable[[Weights, Renames], T]) -> T:
    """Return the result of ``load`` for the first weights that it accepts; if there are none, raise its first error."""
    (weights, changes), *others = ways
    try:
        return load(weights, changes)
    except (WeightsMismatch, UnsupportedFeature):
        if others:
            with suppress(WeightsMismatch, UnsupportedFeature):
                return _first_that_loads(others, load)
        raise


def _with_versions_of(model: torch.nn.Module, weights: Weights) -> Weights:
    """Return weights with the versions of the model's own modules where those of the file are assumed or unknown."""
    taken = weights.assumed if weights.modules else dict(model.named_modules())
    own = {path: {"version": module._version} for path, module in model.named_modules() if path in taken}
    return weights._replace(modules={**weights.modules, **own})


def _without_tensors(checkpoint: Checkpoint, key: str | None) -> StateDict | None:
    """Return the state dict of a model without tensors (only activations, say), which looks like any other value."""
    if checkpoint.traits.is_plain and not checkpoint.tensors:
        return StateDict("", "model", {}, None)
    if key is None and any(one.role in ("model", "ema") for one in checkpoint.state_dicts):
        return None
    node = checkpoint.root
    for component in key.split(".") if key else ():
        node = nodes.item(node, component)
    found = {key or "": node}
    if key is None and not _is_state_dict(node):
        inside = [pair for pair in nodes.mapping_pairs(node) or [] if isinstance(pair[0], str)]
        found = {name: one for name, one in inside if nodes.lookup(nodes.attribute_pairs(one), "_metadata")}
    if len(found) != 1 or not _is_state_dict(next(iter(found.values()))):
        return None
    path, node = found.popitem()
    if any(one.key == path for one in checkpoint.state_dicts):  # it has tensors, but they are not weights
        return None
    walk = next((walk for at, walk in checkpoint.walks if at == path), None)
    return StateDict(path, "model", {}, walk.modules[0][1] if walk else None, node)


def _is_state_dict(node: Inert) -> bool:
    """Return whether a value without tensors is a state dict: empty, or with what torch records in it; or a model."""
    attributes = {name for name, _ in nodes.attribute_pairs(node) if isinstance(name, str)}
    pairs = nodes.mapping_pairs(node)
    if pairs is None:
        return attributes >= {"_parameters", "_buffers", "_modules"}
    return not pairs or "_metadata" in attributes
