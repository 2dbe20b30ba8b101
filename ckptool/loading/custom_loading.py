"""
Models that load through their own code: hooks, overrides, packed parameters. They are filled by ``load_state_dict``.

What would happen is tried first, on a copy of the model without memory, with tensors without memory: so a load that
fails leaves the model as it was, here too.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch

from ckptool.errors import KeyMismatch, ShapeMismatch, UnsupportedFeature
from ckptool.loading.hollow import hollow, hollow_model
from ckptool.loading.memory.threads import in_own_thread
from ckptool.loading.model_plan import PARTLY, model_tensors
from ckptool.loading.post_hooks import drop_post_hooks, has_post_hooks, with_tried_hooks
from ckptool.names.matching import is_benign


class OwnLoading(NamedTuple):
    """What a model left out of a state dict that it took."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]
    """Names that were not there, and the name of the same tensor that was."""


def own_loader(model: torch.nn.Module) -> str | None:
    """Return the class or hook that takes part in loading, if it is not one of torch's own that only adds defaults."""
    if type(model).load_state_dict is not torch.nn.Module.load_state_dict:
        return f"{type(model).__name__}.load_state_dict"
    for module in model.modules():
        loader = type(module)._load_from_state_dict
        if not loader.__module__.startswith("torch.nn.modules."):
            return f"{type(module).__name__}._load_from_state_dict"
        if module._load_state_dict_pre_hooks:
            return f"a hook of {type(module).__name__}"
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or id(value) not in own:
            return f"the state_dict() that makes {name!r}"
    return None


def load_through(model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool) -> OwnLoading:
    """
    Load a state dict in the model's own way, after it was tried, and return what was left out.

    Raises:
        KeyMismatch, ShapeMismatch, UnsupportedFeature: As below; the model is as it was, unless it was what the hooks
            left that did not fit. What hooks raise is raised, too, after the weights were loaded.
    """
    tensors = model_tensors(model).values()
    is_meta = any(tensor.is_meta for tensor in tensors)
    # What was made in inference mode can be written to in that mode alone, and a thread of its own is not in it.
    is_inference = any(tensor.is_inference() for tensor in tensors)
    with torch.inference_mode(is_inference or torch.is_inference_mode_enabled()):
        found = _try_loading(model, state, strict=strict)
    tied = _tied_places(model) if is_meta else []

    def load() -> Any:
        with torch.inference_mode(is_inference), torch.no_grad():
            return model.load_state_dict(state, strict=False, assign=is_meta)

    left = in_own_thread(load)
    for places in tied:
        made = [slots[name] for slots, name in places if not slots[name].is_meta]
        for slots, name in places if made else ():
            slots[name] = made[-1]  # of several the last counts, as where they are copied
    return _left_out(model, left, len(state), strict=strict) if has_post_hooks(model) else found


def _tied_places(model: torch.nn.Module) -> list[list[tuple[dict[str, Any], str]]]:
    """Return the places of each tensor that a model has more than once."""
    found: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is not None:
                    found.setdefault(id(tensor), []).append((slots, name))
    return [places for places in found.values() if len(places) > 1]


def _try_loading(model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool) -> OwnLoading:
    """
    Return what ``load_state_dict`` would leave out, without changing the model.

    Hooks that run after it may take names out, but may need values: they are tried only where names do not fit.

    Raises:
        KeyMismatch: Names are missing or unexpected; where hooks were tried, those that they leave.
        ShapeMismatch: torch says that shapes differ; the message is torch's.
        UnsupportedFeature: The model's code cannot be tried on tensors without memory.
    """

    def left(prepared: Callable[[torch.nn.Module], torch.nn.Module]) -> OwnLoading:
        return _left_out(model, _load_hollow(model, state, prepared), len(state), strict=strict)

    try:
        return left(drop_post_hooks)
    except KeyMismatch as mismatch:
        if not strict or not has_post_hooks(model):
            raise
        try:
            return left(lambda hollowed: with_tried_hooks(hollowed, model))
        except UnsupportedFeature:
            raise mismatch from None


def _load_hollow(
    model: torch.nn.Module, state: Mapping[str, Any], prepared: Callable[[torch.nn.Module], torch.nn.Module]
) -> Any:
    """Return what ``load_state_dict`` of a copy without memory returns."""
    # Numbers stay: quantised layers look at their scale. So does what is no tensor, packed weights say, and all that
    # may be packed with quantised weights, which needs values.
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.numel() > 1}
    emptied = {} if any(value.is_quantized for value in tensors.values()) else tensors
    without = OrderedDict((name, hollow(value) if name in emptied else value) for name, value in state.items())
    # torch notes in the dictionaries inside that it assigns: the load itself, which may have to copy, has its own.
    without._metadata = copy.deepcopy(getattr(state, "_metadata", None))  # type: ignore[attr-defined]
    try:
        return prepared(hollow_model(model)).load_state_dict(without, strict=False, assign=True)
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise _untried(model, error) from error
        reason = "; ".join(line.strip() for line in str(error).splitlines()[1:5])
        raise ShapeMismatch(reason, hint="Build the model with the sizes that it was saved with.") from error
    except Exception as error:  # whatever the model's own code raises
        raise _untried(model, error) from error


def _left_out(model: torch.nn.Module, found: Any, total: int, *, strict: bool) -> OwnLoading:
    """
    Return what ``load_state_dict`` left out of a state dict with this number of entries.

    Raises:
        KeyMismatch: Names are missing or unexpected.
    """
    tied = _tied(model, found.missing_keys)
    lacking = tuple(name for name in found.missing_keys if name not in tied)
    missing = tuple(name for name in lacking if not is_benign(name))
    unexpected = tuple(name for name in found.unexpected_keys if not is_benign(name))
    nothing_fits = len(unexpected) == total
    if (missing or unexpected) and (strict or nothing_fits):
        mismatch = KeyMismatch(
            f"the weights do not fit the model: missing {', '.join(missing[:8]) or 'nothing'}; "
            f"unexpected {', '.join(unexpected[:8]) or 'nothing'}",
            hint="Check that this is the model's file." if nothing_fits else PARTLY,
        )
        mismatch.missing, mismatch.unexpected = missing, unexpected
        raise mismatch
    return OwnLoading(lacking, tuple(found.unexpected_keys), tuple(tied.items()))


def _tied(model: torch.nn.Module, missing: Collection[str]) -> dict[str, str]:
    """Return the missing names of tensors that were there under another name, and that name."""
    tensors = model_tensors(model)
    there = {id(tensor): name for name, tensor in tensors.items() if name not in missing}
    return {name: there[id(tensors[name])] for name in missing if name in tensors and id(tensors[name]) in there}


def _untried(model: torch.nn.Module, error: Exception) -> UnsupportedFeature:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return UnsupportedFeature(
        f"{type(model).__name__} loads through code of its own, which cannot be tried beforehand: {first}",
        kind="own-loading",
        hint="Use model.load_state_dict(ckptool.load(path)).",
    )
