"""
What ``load_state_dict`` would do with a state dict, tried on a copy of the model, so that a load that fails leaves the
model as it was.

A copy without memory costs next to nothing, but models whose code needs values cannot load into it: those are copied
whole, on the CPU. Where not even that can be done, nothing is tried.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch

from ckptool.errors import CkptoolError, KeyMismatch, ShapeMismatch, UnsupportedFeature
from ckptool.loading.hollow import hollow, hollow_model, model_on_cpu

Copying = Literal["hollow", "whole"]


class Left(NamedTuple):
    """The names that ``load_state_dict`` leaves."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    is_told: bool = True
    """False where an override does not return them."""


def take(model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool = False, assign: bool = False) -> Left:
    """Let a model load a state dict; an override may lack arguments that torch's own method has."""
    loader = model.load_state_dict
    taken = inspect.signature(loader).parameters.values()
    takes_any = any(one.kind is one.VAR_KEYWORD for one in taken)
    options = {"strict": strict, "assign": assign}
    names = options if takes_any else {one.name for one in taken}
    found: Any = loader(state, **{name: value for name, value in options.items() if name in names})
    try:
        return Left(tuple(found.missing_keys), tuple(found.unexpected_keys))
    except AttributeError:  # it returned something else
        return Left((), (), is_told=False)


def tried(
    model: torch.nn.Module,
    state: Mapping[str, Any],
    how: Copying,
    prepared: Callable[[torch.nn.Module], torch.nn.Module],
    *,
    strict: bool,
) -> Left | None:
    """
    Return what ``load_state_dict`` of a copy of the model leaves; None if there can be no copy.

    Raises:
        WeightsMismatch: Names or shapes differ.
        UnsupportedFeature: The model's code fails; on a hollow copy, perhaps for want of values.
    """

    def attempt(*, strict: bool) -> Left | None:
        try:
            copied = hollow_model(model) if how == "hollow" else model_on_cpu(model)
        except Exception:  # noqa: BLE001 - whatever it holds
            return None
        fresh = _hollow_state(state) if how == "hollow" else _whole_state(state)
        is_assigned = how == "hollow" or any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        with _kept(model):
            try:
                return take(prepared(copied), fresh, strict=strict, assign=is_assigned)
            except Exception as error:  # whatever the model's own code raises
                raise as_ckptool_error(model, error) from error

    left = attempt(strict=False)
    return left if left is None or left.is_told or not strict else attempt(strict=True)


@contextmanager
def _kept(model: torch.nn.Module) -> Iterator[None]:
    """Put back what hooks of a copy change in the model itself, where they are functions that refer to it."""
    parts: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        parts += [(part, dict(part)) for part in (vars(module), module._parameters, module._buffers)]
    try:
        yield
    finally:
        for part, before in parts:
            if {name: id(value) for name, value in part.items()} != {n: id(value) for n, value in before.items()}:
                part.clear()
                part.update(before)


def _hollow_state(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a state dict whose tensors have no memory, but for what models look at."""
    # Numbers stay: quantised layers look at their scale. So does what is no tensor, packed weights say, and all that
    # may be packed with quantised weights, which needs values.
    large = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.numel() > 1}
    if any(value.is_quantized for value in large.values()):
        return _whole_state(state)
    return _state_of(state, {name: hollow(value) for name, value in large.items()})


def _whole_state(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a state dict with copies of all tensors: hooks may write to them."""
    return _state_of(state, {})


def _state_of(state: Mapping[str, Any], made: Mapping[str, torch.Tensor]) -> OrderedDict[str, Any]:
    found: OrderedDict[str, Any] = OrderedDict(
        (name, made[name] if name in made else _apart(value)) for name, value in state.items()
    )
    # torch notes in the dictionaries inside that it assigns: the load itself, which may have to copy, has its own.
    found._metadata = copy.deepcopy(getattr(state, "_metadata", None))  # type: ignore[attr-defined]
    return found


def _apart(value: Any) -> Any:
    """Return a copy that shares no memory; a deep copy of a tensor would copy all that shares its storage, too."""
    if isinstance(value, torch.Tensor):
        try:
            return value.detach().clone()
        except RuntimeError:  # some quantised tensors have no copies
            return value
    if isinstance(value, list | tuple):
        return type(value)(map(_apart, value))
    if isinstance(value, dict):
        return {key: _apart(one) for key, one in value.items()}
    return copy.deepcopy(value)


def as_ckptool_error(model: torch.nn.Module, error: Exception, *, touched: bool = False) -> CkptoolError:
    """Return what a model's loading code raised as an error that says why; ``touched``: it had begun to fill it."""
    if isinstance(error, CkptoolError):
        return error
    text = str(error).strip() or type(error).__name__
    first, *more = [line.strip() for line in text.splitlines()]
    reason = "; ".join(more[:4]) if more and first.startswith("Error(s) in loading") else first
    after = "; some of the model may be new" if touched else ""
    if "size mismatch for" in text:
        return ShapeMismatch(f"{reason}{after}", hint="Build the model with the sizes that it was saved with.")
    if "Missing key(s)" in text or "Unexpected key(s)" in text:
        return KeyMismatch(f"the weights do not fit the model: {reason}{after}", hint="Check that it is its file.")
    return UnsupportedFeature(
        f"{type(model).__name__} loads through code of its own, which fails: {reason}{after}",
        kind="own-loading",
        hint="Check that this is the model's file, and that it was saved by this release of the model's code.",
    )
