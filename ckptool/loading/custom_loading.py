"""
Models that load through their own code: hooks, overrides, packed parameters, lazy layers. ``load_state_dict`` fills
them, after it was tried on a copy: so a load that fails leaves the model as it was, here too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from ckptool.errors import KeyMismatch, UnsupportedFeature
from ckptool.loading.hollow import is_lazy
from ckptool.loading.memory.threads import in_own_thread
from ckptool.loading.model_plan import entries_of, model_tensors, partly
from ckptool.loading.post_hooks import drop_post_hooks, has_post_hooks, with_tried_hooks
from ckptool.loading.rehearsal import Copying, Left, as_ckptool_error, take, tried
from ckptool.names.matching import is_benign

T = TypeVar("T")


class OwnLoading(NamedTuple):
    """What a model left out of a state dict that it took."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]
    """Names that were not there, and the name of the same tensor that was."""
    is_told: bool = True
    """False where an override does not return the names."""


def own_loader(model: torch.nn.Module) -> str | None:
    """Return the class or hook that takes part in loading, if it is not one of torch's own that only adds defaults."""
    if _overrides(model, "load_state_dict"):
        return f"{type(model).__name__}.load_state_dict"
    for module in model.modules():
        for method in ("_load_from_state_dict", "_save_to_state_dict", "state_dict"):
            if _overrides(module, method):
                return f"{type(module).__name__}.{method}"
        if module._load_state_dict_pre_hooks or module._state_dict_hooks:
            return f"a hook of {type(module).__name__}"
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers()) if not is_lazy(tensor)}
    for name, value in entries_of(model).items():
        if not isinstance(value, torch.Tensor) or id(value) not in own:
            return f"the state_dict() that makes {name!r}"
    return None


def _overrides(module: torch.nn.Module, method: str) -> bool:
    """Say whether a module has a method of its own where torch has one."""
    home = getattr(type(module), method).__module__
    is_torch_s = home.startswith("torch.nn.modules.")
    return not is_torch_s or method in vars(module)


def rehearse(
    model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool, ways: Sequence[Copying] = ("hollow", "whole")
) -> OwnLoading | None:
    """
    Return what ``load_state_dict`` would leave out, without changing the model; None if the model cannot be copied.

    Hooks that run after it may take names out, but may need values: they are tried only where names do not fit.

    Raises:
        KeyMismatch: Names are missing or unexpected; where hooks were tried, those that they leave.
        ShapeMismatch: torch says that shapes differ; the message is torch's.
        UnsupportedFeature: The model's code does not take it.
    """
    if _may_not_be_copied(model, state):
        ways = ("whole",)
    for how in ways:
        try:
            return _in_mode(model, partial(_rehearsed, model, state, how, strict=strict))
        except UnsupportedFeature:  # on a hollow copy perhaps for want of values
            if how == ways[-1]:
                raise
    return None


def fill(
    model: torch.nn.Module,
    state: Mapping[str, Any],
    rehearsed: OwnLoading | None = None,
    *,
    strict: bool,
    is_fresh: bool = False,
) -> OwnLoading:
    """
    Load a state dict in the model's own way, and return what was left out; ``is_fresh``: nobody has the model yet.

    Raises:
        WeightsMismatch, UnsupportedFeature: The model's code does not take what it took when it was tried, or it was
            not tried. Some of the model may be new.
        Exception: Whatever its hooks for after loading raise. The weights are loaded.
    """
    is_meta = any(tensor.is_meta for tensor in model_tensors(model).values())
    tied = _tied_places(model) if is_meta else []
    tells = rehearsed.is_told if rehearsed is not None else not _overrides(model, "load_state_dict")
    try:
        left = _in_mode(model, partial(take, model, state, strict=strict and not tells, assign=is_meta))
    except Exception as error:
        if has_post_hooks(model) and not str(error).startswith("Error(s) in loading"):
            raise
        raise as_ckptool_error(model, error, touched=not is_fresh) from error
    for places in tied:
        made = [one for module, name in places if not (one := getattr(module, name)).is_meta]
        for module, name in places if made else ():
            setattr(module, name, made[-1])  # of several the last counts, as where they are copied
    if rehearsed is not None and not has_post_hooks(model):
        return rehearsed
    return _left_out(model, left, state, strict=strict)


def _in_mode(model: torch.nn.Module, function: Callable[[], T]) -> T:
    """Run a function in a thread of its own, in inference mode if tensors of the model were made in it."""
    # What was made in inference mode can be written to in that mode alone, and a thread of its own is not in it.
    is_inference = any(tensor.is_inference() for tensor in model_tensors(model).values() if not is_lazy(tensor))

    def run() -> T:
        with torch.inference_mode(is_inference), torch.no_grad():
            return function()

    return in_own_thread(run)


def _may_not_be_copied(model: torch.nn.Module, state: Mapping[str, Any]) -> bool:
    """Say whether a value may not go into the memory of the model's: a hollow copy would take it as it is."""
    for name, tensor in model_tensors(model).items():
        value = state.get(name)
        if isinstance(value, torch.Tensor) and not (is_lazy(tensor) or tensor.is_meta):
            if (value.layout, value.is_quantized) != (tensor.layout, tensor.is_quantized):
                return True
            if tensor.layout == torch.strided and torch._debug_has_internal_overlap(tensor) == 1:
                return True
    return False


def _tied_places(model: torch.nn.Module) -> list[list[tuple[torch.nn.Module, str]]]:
    """Return the places of each tensor that a model has more than once."""
    found: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append((module, name))
    return [places for places in found.values() if len(places) > 1]


def _rehearsed(model: torch.nn.Module, state: Mapping[str, Any], how: Copying, *, strict: bool) -> OwnLoading | None:
    def left(prepared: Any) -> OwnLoading | None:
        found = tried(model, state, how, prepared, strict=strict)
        return None if found is None else _left_out(model, found, state, strict=strict)

    try:
        return left(drop_post_hooks)
    except KeyMismatch as mismatch:
        if not strict or not has_post_hooks(model):
            raise
        try:
            return left(lambda copied: with_tried_hooks(copied, model))
        except UnsupportedFeature:
            raise mismatch from None


def _left_out(model: torch.nn.Module, found: Left, state: Mapping[str, Any], *, strict: bool) -> OwnLoading:
    """
    Return what ``load_state_dict`` left out of a state dict; hooks may add names of their own to what it says.

    Raises:
        KeyMismatch: Names are missing or unexpected.
    """
    tied = _tied(model, found.missing)
    lacking = tuple(name for name in found.missing if name not in tied)
    missing = tuple(name for name in lacking if not is_benign(name))
    unexpected = tuple(name for name in found.unexpected if not is_benign(name))
    nothing_fits = len(state) > 0 and set(unexpected) >= set(state)
    if (missing or unexpected) and (strict or nothing_fits):
        mismatch = KeyMismatch(
            f"the weights do not fit the model: missing {', '.join(missing[:8]) or 'nothing'}; "
            f"unexpected {', '.join(unexpected[:8]) or 'nothing'}",
            hint="Check that this is the model's file." if nothing_fits else partly(missing),
        )
        mismatch.missing, mismatch.unexpected = missing, unexpected
        raise mismatch
    return OwnLoading(lacking, found.unexpected, tuple(tied.items()), found.is_told)


def _tied(model: torch.nn.Module, missing: Collection[str]) -> dict[str, str]:
    """Return the missing names of tensors that were there under another name, and that name."""
    tensors = model_tensors(model)
    there = {id(tensor): name for name, tensor in tensors.items() if name not in missing}
    return {name: there[id(tensors[name])] for name in missing if name in tensors and id(tensors[name]) in there}
