"""
Models that load through code of their own: hooks, overrides, packed parameters. They are filled by ``load_state_dict``.

What would happen is tried first, on a copy of the model without memory, with tensors without memory: so a load that
fails leaves the model as it was, here too.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ckptool.errors import KeyMismatch, ShapeMismatch, UnsupportedFeature
from ckptool.match_keys import is_benign
from ckptool.torch_bridge.arithmetic import in_own_thread


class OwnLoading(NamedTuple):
    """What a model left out of a state dict that it took."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


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
        KeyMismatch, ShapeMismatch, UnsupportedFeature: As below; the model is as it was.
    """
    found = _try_loading(model, state, strict=strict)
    is_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    in_own_thread(lambda: model.load_state_dict(state, strict=False, assign=is_meta))
    return found


def _try_loading(model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool) -> OwnLoading:
    """
    Return what ``load_state_dict`` would leave out, without changing the model.

    Raises:
        KeyMismatch: Names are missing or unexpected.
        ShapeMismatch: torch says that shapes differ; the message is torch's.
        UnsupportedFeature: The model's code cannot be tried on tensors without memory.
    """
    fresh: dict[int, Any] = {id(tensor): _hollow(tensor) for tensor in (*model.parameters(), *model.buffers())}
    # Numbers stay: quantised layers look at their scale. So does what is no tensor, packed weights say, and all that
    # may be packed with quantised weights, which needs values.
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.numel() > 1}
    emptied = {} if any(value.is_quantized for value in tensors.values()) else tensors
    hollow = OrderedDict((name, _hollow(value) if name in emptied else value) for name, value in state.items())
    # torch notes in the dictionaries inside that it assigns: the load itself, which may have to copy, has its own.
    hollow._metadata = copy.deepcopy(getattr(state, "_metadata", None))  # type: ignore[attr-defined]
    try:
        found = copy.deepcopy(model, fresh).load_state_dict(hollow, strict=False, assign=True)
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise _untried(model, error) from error
        reason = "; ".join(line.strip() for line in str(error).splitlines()[1:5])
        raise ShapeMismatch(reason, hint="Build the model with the sizes that it was saved with.") from error
    except Exception as error:  # whatever the model's own code raises
        raise _untried(model, error) from error
    missing = tuple(name for name in found.missing_keys if not is_benign(name))
    unexpected = tuple(name for name in found.unexpected_keys if not is_benign(name))
    nothing_fits = len(unexpected) == len(state)
    if (missing or unexpected) and (strict or nothing_fits):
        mismatch = KeyMismatch(
            f"the weights do not fit the model: missing {', '.join(missing[:8]) or 'nothing'}; "
            f"unexpected {', '.join(unexpected[:8]) or 'nothing'}",
            hint="Check that this is the model's file." if nothing_fits else "Pass strict=False to load what fits.",
        )
        mismatch.missing, mismatch.unexpected = missing, unexpected
        raise mismatch
    return OwnLoading(tuple(found.missing_keys), tuple(found.unexpected_keys))


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same kind that has no memory."""
    with torch.no_grad():
        if isinstance(tensor, torch.nn.UninitializedParameter):
            return torch.nn.UninitializedParameter(tensor.requires_grad, device="meta")  # type: ignore[call-arg, arg-type]
        if isinstance(tensor, torch.nn.parameter.UninitializedBuffer):
            return torch.nn.parameter.UninitializedBuffer(device="meta")  # type: ignore[call-arg]
        made = tensor.detach().to("meta")
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def _untried(model: torch.nn.Module, error: Exception) -> UnsupportedFeature:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return UnsupportedFeature(
        f"{type(model).__name__} loads through code of its own, which cannot be tried beforehand: {first}",
        kind="own-loading",
        hint="Use model.load_state_dict(ckptool.load(path)).",
    )
