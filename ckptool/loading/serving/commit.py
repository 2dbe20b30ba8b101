"""
How a live model gets new weights: copied into its memory, or as a second module.

A ``Gate`` keeps calls out meanwhile: it is a lock for many readers, or for one writer, which readers cannot starve.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from ckptool.cancellation import LOOK_SECONDS, Cancellation, check_cancelled
from ckptool.errors import UnsupportedFeature
from ckptool.loading.custom_loading import OwnLoading, copies_of_tensors, fill, uses_original
from ckptool.loading.fill_plan import Target
from ckptool.loading.load_into import assign, parameter_like
from ckptool.loading.memory.threads import (
    apart_on_cpu,
    in_own_thread,
    translate_out_of_memory,
    wait_for,
)
from ckptool.torch_ops.devices import accelerator


def overwrite(model: torch.nn.Module, targets: tuple[Target, ...], staged: Mapping[str, torch.Tensor]) -> None:
    """
    Copy staged weights into the model's own memory, and put them in place of tensors on the meta device.

    On return, the copies may still run on this thread's streams: see ``ready``.
    """
    assign(model, {id(one.tensor): staged[one.name] for one in targets if one.tensor.is_meta})
    real = [one for one in targets if not one.tensor.is_meta]
    devices = {staged[one.name].device if one.tensor.is_meta else one.tensor.device for one in targets}
    wait_for(devices)  # calls have returned, but their kernels may still run

    def copy_all() -> None:
        for one in real:
            with torch.inference_mode(one.tensor.is_inference()), torch.no_grad():
                one.tensor.detach().copy_(staged[one.name], non_blocking=False)

    in_own_thread(copy_all)


def fill_in_place(model: torch.nn.Module, state: Mapping[str, Any], rehearsed: OwnLoading | None) -> OwnLoading:
    """Let a model that has served load through its own code, once its devices have finished all work for it."""
    wait_for({tensor.device for tensor in (*model.parameters(), *model.buffers())})
    taken = fill(model, state, rehearsed, strict=True)
    wait_for({tensor.device for tensor in (*model.parameters(), *model.buffers())})
    return taken


def moved(values: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return values on a device and of a type; the same tensor, if it is so already."""
    if (values.device, values.dtype) == (device, dtype):
        return values
    with translate_out_of_memory(values.nbytes, device):
        return apart_on_cpu(values.device, lambda: values.to(device, dtype))


def with_weights(
    model: torch.nn.Module, targets: tuple[Target, ...], staged: Mapping[str, torch.Tensor]
) -> torch.nn.Module:
    """
    Return a copy of the model with other weights; it shares those that are not replaced.

    Raises:
        UnsupportedFeature: As ``copy_of``.
    """
    fresh: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for one in targets:
        old = one.tensor
        new = staged[one.name] if old.is_meta else moved(staged[one.name], old.device, old.dtype)
        is_parameter = isinstance(old, torch.nn.Parameter)
        fresh[id(old)] = parameter_like(old, new) if is_parameter else new
    return copy_of(model, fresh)


def ready(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model once this thread's work on its devices is done: calls will use other streams."""
    wait_for({tensor.device for tensor in (*model.parameters(), *model.buffers())}, own=True)
    return model


def retire(model: torch.nn.Module) -> None:
    """
    Keep the weights of a model that no longer serves until its devices have done what calls left them to do.

    When the last call returns, its kernels may still wait on a stream of the caller's, but nothing refers to the model
    any more: its memory would be reused at once.
    """
    tensors = [*model.parameters(), *model.buffers()]
    devices = {tensor.device for tensor in tensors if accelerator(tensor.device.type) is not None}
    if devices:
        weakref.finalize(model, _let_go, tensors, devices).atexit = False


def _let_go(tensors: list[torch.Tensor], devices: set[torch.device]) -> None:
    wait_for(devices)
    tensors.clear()


def copy_of(model: torch.nn.Module, kept: Mapping[int, Any] | None = None) -> torch.nn.Module:
    """
    Return a copy of a model; ``kept`` maps the ``id`` of an object to what replaces it in the copy, uncopied.

    A plain attribute that is a view of a weight becomes a view of the weight's copy.

    Raises:
        UnsupportedFeature: The model holds something that cannot be copied, a lock say, or hooks that would work on the
            model and not on its copy.
    """
    try:
        known = copies_of_tensors(model) | dict(kept or {})
        for view, weight in _views_of_weights(model):
            new = copy.deepcopy(weight, known)  # itself, if it is known
            if new.stride() == weight.stride():
                start = view.storage_offset() - weight.storage_offset() + new.storage_offset()
                known[id(view)] = new.detach().as_strided(view.size(), view.stride(), start)
        fresh = copy.deepcopy(model, known)
        name = uses_original(fresh, model)
        reason = f"{name} is its own copy, or a load hook of {name} uses the model itself" if name else ""
    except Exception as error:  # noqa: BLE001 - whatever copying raises
        reason = str(error) or type(error).__name__
    if reason:
        raise UnsupportedFeature(
            f"the model cannot be copied: {reason}",
            kind="not-copyable",
            hint="Let hooks use the module that they are given, or use commit='in_place', which needs no copy.",
        )
    return fresh


def _views_of_weights(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield plain attributes that are views of a weight, as ``spectral_norm`` makes them, each with that weight."""
    weights = {id(one): one for one in (*model.parameters(), *model.buffers()) if _has_memory(one)}
    at: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    for weight in weights.values():
        at.setdefault((weight.untyped_storage().data_ptr(), weight.dtype), []).append(weight)
    attributes = (value for module in model.modules() for value in vars(module).values() if _has_memory(value))
    for value in (value for value in attributes if id(value) not in weights):
        begin, end = _extent(value)
        for weight in at.get((value.untyped_storage().data_ptr(), value.dtype), ()):
            first, last = _extent(weight)
            if first <= begin and end <= last:
                yield value, weight
                break


def _has_memory(value: Any) -> bool:
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return is_plain and not value.is_meta and value.numel() > 0


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the indices of a tensor's first and last element in its storage."""
    begin = int(tensor.storage_offset())
    return begin, begin + sum((size - 1) * step for size, step in zip(tensor.size(), tensor.stride(), strict=True))


class Gate:
    """A lock for many readers, or for one writer. A waiting writer goes first, so that readers cannot starve it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._waiting = 0
        self._is_alone = False
        self._mine = threading.local()

    def enter(self) -> SimpleNamespace:
        """
        Enter as a reader, once no writer is inside or waits.

        Pass the result to ``leave``: it counts how many times this thread is inside.
        """
        visits: SimpleNamespace | None = getattr(self._mine, "visits", None)
        if visits is None:
            visits = self._mine.visits = SimpleNamespace(depth=0)
        with self._changed:
            if not visits.depth:  # a thread that is inside already must not wait for itself
                while self._is_alone or self._waiting:
                    self._changed.wait()
                self._inside += 1
            visits.depth += 1
        return visits

    def leave(self, visits: SimpleNamespace) -> None:
        """Leave, once for each ``enter``; any thread may: servers end requests in other threads than they began in."""
        with self._changed:
            visits.depth -= 1
            if not visits.depth:
                self._inside -= 1
                if not self._inside and self._waiting:
                    self._changed.notify_all()

    @contextmanager
    def alone(self, cancellation: Cancellation | None = None) -> Iterator[None]:
        """
        Enter a block as the writer: no reader is inside.

        Raises:
            Cancelled: The call was cancelled while others were still inside.
            RuntimeError: This thread is inside.
        """
        if getattr(getattr(self._mine, "visits", None), "depth", 0):
            raise RuntimeError("reload() inside use() would wait for itself")
        with self._changed:
            self._waiting += 1
            try:
                while self._inside or self._is_alone:
                    check_cancelled(cancellation)
                    self._changed.wait(None if cancellation is None else LOOK_SECONDS)
                self._is_alone = True
            finally:  # the wait may be interrupted
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()
