"""
What models register with ``register_load_state_dict_post_hook``: hooks that compute something from new weights, or edit
the lists of names that are missing or unexpected.

torch itself runs them, in its own order and with its own lists: the model is given its own tensors once more, after
they were filled. Each of them takes its own place, so nothing is copied.
"""

from __future__ import annotations

import copy
import dis
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from ckptool.errors import UnsupportedFeature
from ckptool.loading.hollow import hollow_model


class Names(NamedTuple):
    """The result of a load, as hooks are given it."""

    loaded: tuple[str, ...]
    unexpected: Mapping[str, str]
    """The file's names for what the model has no use for, by what they would be in the model."""
    tied: Collection[str]
    """Names of the model that were not there, of tensors that were loaded under another: no fault, but torch tells."""
    facts: Mapping[str, Any]
    """The ``_metadata`` of the state dict."""


class Left(NamedTuple):
    """The names that hooks have left in the lists of ``load_state_dict``."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def has_post_hooks(model: torch.nn.Module) -> bool:
    """Say whether a model has hooks that are to run after its weights were loaded."""
    return any(module._load_state_dict_post_hooks for module in model.modules())


def run_post_hooks(model: torch.nn.Module, names: Names) -> Left:
    """Run the hooks of a model that was filled. What they raise is raised."""
    tensors = model.state_dict(keep_vars=True)
    is_inference = any(tensor.is_inference() for tensor in tensors.values())
    state = OrderedDict((name, torch.empty(0, device="cpu")) for name in names.unexpected)
    state.update((name, tensors[name]) for name in names.loaded)
    if names.facts:  # torch writes into it
        state._metadata = copy.deepcopy(OrderedDict(names.facts))  # type: ignore[attr-defined]
    with torch.inference_mode(is_inference), torch.no_grad():
        left = model.load_state_dict(state, strict=False, assign=True)
    return Left(
        tuple(name for name in left.missing_keys if name not in names.tied),
        tuple(names.unexpected.get(name, name) for name in left.unexpected_keys),
    )


def try_post_hooks(model: torch.nn.Module, names: Names) -> Left | None:
    """Return what the hooks would leave, tried on a copy without memory; None if they cannot be tried."""
    with suppress(Exception):  # whatever the model's own code raises
        return run_post_hooks(with_tried_hooks(hollow_model(model), model), names)
    return None


def with_tried_hooks(hollowed: torch.nn.Module, model: torch.nn.Module) -> torch.nn.Module:
    """
    Let the hooks of a copy without memory fail: most compute with values, and what counts is which names they leave.

    Raises:
        UnsupportedFeature: The hooks use the model itself.
    """
    if (name := reaches(hollowed, model)) is not None:
        raise UnsupportedFeature(f"a load_state_dict post-hook of {name} uses the model itself", kind="own-loading")
    for module in hollowed.modules():
        hooks = module._load_state_dict_post_hooks
        module._load_state_dict_post_hooks = OrderedDict((key, partial(_tried, hook)) for key, hook in hooks.items())
    return hollowed


def _tried(hook: Any, module: torch.nn.Module, keys: Any) -> None:
    with suppress(Exception):
        hook(module, keys)


def drop_post_hooks(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model that has forgotten its hooks."""
    for module in model.modules():
        module._load_state_dict_post_hooks = OrderedDict()
    return model


def reaches(fresh: torch.nn.Module, model: torch.nn.Module, *, before: bool = False) -> str | None:
    """
    Return the class of a module in a copy of a model whose hooks use parts of the model itself, if one does; also those
    ``before`` loading.

    A copy of a method belongs to the copied module, but a function is not copied, nor is what it closes over.
    """
    parts = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    for module in fresh.modules():
        hooks = list(module._load_state_dict_post_hooks.values())
        if before:  # torch has them in objects of its own
            hooks += [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
        if any(id(one) in parts for one in _reached(hooks)):
            return type(module).__name__
    return None


def _reached(hooks: Iterable[Any]) -> Iterator[Any]:
    """Yield what functions refer to, and what that refers to in turn."""
    waiting, seen = list(hooks), dict[int, Any]()  # what is kept keeps its id
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen[id(one)] = one
            yield one
            waiting += _held(one)


def _held(one: Any) -> Iterator[Any]:
    kind = type(one)  # isinstance() would ask proxies what they are
    if issubclass(kind, FunctionType):
        for cell in one.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # it is empty
                continue
        yield from (*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values())
        yield from (one.__globals__[name] for name in _global_names(one.__code__) if name in one.__globals__)
    elif issubclass(kind, MethodType):
        yield from (one.__func__, one.__self__)
    elif issubclass(kind, partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif issubclass(kind, weakref.ref):
        yield one()
    elif issubclass(kind, list | tuple | set | frozenset):
        yield from one
    elif issubclass(kind, dict):
        yield from one.values()


def _global_names(code: CodeType) -> Iterator[str]:
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)
