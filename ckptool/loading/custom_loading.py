"""
Fills models that load through their own code: hooks, overrides, packed parameters, lazy layers.

Their ``load_state_dict`` does it. If a model can be copied, a copy on the CPU loads first: if that fails, the model is
unchanged.
"""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch.nn.parameter import is_lazy

from ckptool.errors import CkptoolError, KeyMismatch, ShapeMismatch, UnsupportedFeature
from ckptool.loading.fill_plan import entries_of, model_tensors, other_sizes, partly
from ckptool.loading.memory.placement import CPU
from ckptool.loading.memory.threads import in_own_thread
from ckptool.names.matching import is_benign, may_be_missing
from ckptool.system import free_memory

T = TypeVar("T")
_HOLDERS: Final = (MethodType, partial, list, tuple, set, frozenset, dict)
_PART: Final = "; it loads through its own code, and a part of it may be new"


class OwnLoading(NamedTuple):
    """What ``load_state_dict`` left out of a state dict, or of the model."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    tied: tuple[tuple[str, str], ...] = ()
    """Name that was missing, name of the same tensor that was not."""
    is_tried: bool = True
    """False if the model has loaded, and no copy of it did so before."""
    forgiven: tuple[str, ...] = ()
    """Missing names that hooks for after loading have removed from ``missing``."""


def own_loader(model: torch.nn.Module) -> str | None:
    """Return the name of a method or hook of the model's own that takes part in loading; None if there is none."""
    if _overrides(model, "load_state_dict"):
        return f"{type(model).__name__}.load_state_dict"
    for module in model.modules():
        for method in ("_load_from_state_dict", "_save_to_state_dict", "state_dict"):
            if _overrides(module, method):
                return f"{type(module).__name__}.{method}"
        if module._load_state_dict_pre_hooks or module._state_dict_hooks or module._load_state_dict_post_hooks:
            return f"a hook of {type(module).__name__}"
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers()) if not is_lazy(tensor)}
    for name, value in entries_of(model).items():
        if not isinstance(value, torch.Tensor) or id(value) not in own:
            return f"the state_dict() that makes {name!r}"
    return None


def _overrides(module: torch.nn.Module, method: str) -> bool:
    """Return whether a module overrides a method of torch's modules."""
    is_torch_s = getattr(type(module), method).__module__.startswith("torch.nn.modules.")
    return not is_torch_s or method in vars(module)


def _has_post_hooks(model: torch.nn.Module) -> bool:
    return any(module._load_state_dict_post_hooks for module in model.modules())


def rehearse(
    model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool, device: torch.device = CPU
) -> OwnLoading | None:
    """
    Try ``load_state_dict`` on a copy of the model on ``device``, and return what it leaves out.

    Return None if the model cannot be copied: something in it cannot, its hooks use the model itself, or there is no
    memory. Hooks for after loading are run only if names do not fit: they may remove such names from the result.

    Raises:
        KeyMismatch: Names are missing or unexpected; if hooks were run, those that they left.
        ShapeMismatch: torch says that shapes differ; the message is torch's.
        UnsupportedFeature: The model's code does not take it.
    """

    def tried(*, with_hooks: bool) -> OwnLoading | None:
        try:
            fresh, given = _copies(model, state, device)
        except Exception:  # noqa: BLE001 - a lock, a file, a handle of a library; no memory
            return None
        for module in () if with_hooks else fresh.modules():
            module._load_state_dict_post_hooks = OrderedDict()
        if uses_original(fresh, model) is not None:
            return None
        try:
            left = _take(fresh, given, strict=strict)
        except Exception as error:  # whatever the model's own code raises
            raise _as_ckptool_error(model, error) from error
        return _left_out(model, left, state, strict=strict)

    def rehearsed() -> OwnLoading | None:
        try:
            return tried(with_hooks=False)
        except KeyMismatch as mismatch:
            with suppress(UnsupportedFeature):
                if _has_post_hooks(model) and (found := tried(with_hooks=True)) is not None:
                    return found._replace(forgiven=mismatch.missing)
            raise

    return _in_mode(model, rehearsed)


def fill(
    model: torch.nn.Module,
    state: Mapping[str, Any],
    rehearsed: OwnLoading | None = None,
    *,
    strict: bool,
    is_fresh: bool = False,
) -> OwnLoading:
    """
    Load a state dict through the model's own code, and return what was left out; ``is_fresh``: nobody uses it yet.

    Raises:
        WeightsMismatch, UnsupportedFeature: The model's code does not take it. Some of the model may be new.
        Exception: Whatever its hooks for after loading raise. The weights are loaded.
    """
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules() if _is_on_meta(model) else ():
        for name, tensor in (module._parameters | module._buffers).items():
            places.setdefault(id(tensor), []).append((module, name))
    part = "" if is_fresh else _PART
    try:
        left = _in_mode(model, partial(_take, model, state, strict=strict))
    except Exception as error:
        if _has_post_hooks(model) and not str(error).startswith("Error(s) in loading"):
            raise
        raise _as_ckptool_error(model, error, part) from error
    for tied in places.values():
        made = [one for module, name in tied if (one := getattr(module, name)) is not None and not one.is_meta]
        for module, name in tied if made and len(tied) > 1 else ():
            setattr(module, name, made[-1])  # the last counts, as it does where they are copied
    found = _left_out(model, left, state, part, strict=strict)
    gone = () if rehearsed is None else (*rehearsed.missing, *rehearsed.forgiven)
    forgiven = tuple(name for name in gone if name not in found.missing)
    return found._replace(is_tried=is_fresh or rehearsed is not None, forgiven=forgiven)


def copies_of_tensors(model: torch.nn.Module, device: torch.device | None = None) -> dict[int, Any]:
    """
    Return copies of tensors of a model by their ``id``, as the memo of ``copy.deepcopy``: of tensors that it cannot
    copy (of lazy layers, or computed from parameters, as by ``weight_norm``), and of all that are not on ``device``.
    """
    found: dict[int, Any] = {}
    attributes = (value for module in model.modules() for value in vars(module).values())
    computed = (value for value in attributes if isinstance(value, torch.Tensor) and not value.is_leaf)
    for tensor in (*model.parameters(), *model.buffers(), *computed):
        place = tensor.device if device is None or tensor.is_meta else device
        if is_lazy(tensor):
            kind: Any = type(tensor)
            found[id(tensor)] = kind(requires_grad=tensor.requires_grad, device=place, dtype=tensor.dtype)
        elif not tensor.is_leaf or tensor.device != place:
            with torch.no_grad():
                made = tensor.detach().to(place, copy=True)
            made = torch.nn.Parameter(made, False) if isinstance(tensor, torch.nn.Parameter) else made
            found[id(tensor)] = made.requires_grad_(tensor.requires_grad)
    return found


def uses_original(fresh: torch.nn.Module, model: torch.nn.Module) -> str | None:
    """
    Return the class of a module in a copy that is the original's own, or whose load hooks use parts of the original.

    A copy of a method belongs to the copied module, but a function is not copied, nor is what it refers to.
    """
    parts = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    for module in fresh.modules():
        before, after = module._load_state_dict_pre_hooks.values(), module._load_state_dict_post_hooks.values()
        waiting = [module, *after, *(getattr(hook, "hook", hook) for hook in before)]  # torch wraps these in objects
        seen: dict[int, Any] = {}  # an object that is kept keeps its id
        while waiting:
            one = waiting.pop()
            if id(one) in parts:
                return type(module).__name__
            if id(one) not in seen:
                seen[id(one)] = one
                waiting += _known_to(one)
    return None


def _known_to(one: Any) -> list[Any]:
    """Return what a function, method, partial or weak reference refers to, or what a container holds."""
    kind = type(one)  # isinstance() would ask proxies what they are
    if issubclass(kind, FunctionType):
        outside = inspect.getclosurevars(one)
        return [outside.nonlocals, outside.globals, one.__defaults__, one.__kwdefaults__]
    if issubclass(kind, weakref.ref):
        return [one()]
    return gc.get_referents(one) if issubclass(kind, _HOLDERS) else []


def _is_on_meta(model: torch.nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _copies(
    model: torch.nn.Module, state: Mapping[str, Any], device: torch.device
) -> tuple[torch.nn.Module, OrderedDict[str, Any]]:
    """Return copies of a model, on ``device``, and of a state dict, which hooks may change."""
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    own = [one for one in (*model.parameters(), *model.buffers()) if not is_lazy(one)]
    real = [one for one in (*tensors, *own) if one.layout is torch.strided and not one.is_meta]
    needed = sum(one.nbytes for one in real) if device == CPU else 0
    free = free_memory()
    if free is not None and needed > free:
        raise MemoryError(needed)
    # A deep copy of a tensor would copy its whole storage.
    known: dict[int, Any] = {id(one): one.detach().clone() for one in tensors}
    given = OrderedDict((name, copy.deepcopy(value, known)) for name, value in state.items())
    # torch notes ``assign`` in the inner dictionaries: the real load, which may differ, must not share them.
    given._metadata = copy.deepcopy(getattr(state, "_metadata", None))  # type: ignore[attr-defined]
    return copy.deepcopy(model, copies_of_tensors(model, device)), given


def _take(model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool) -> OwnLoading:
    """
    Let a model load a state dict. Names that torch's method leaves out are checked afterwards; an override has to
    check them itself, and may lack arguments that torch's method has, or its result.
    """
    loader: Any = model.load_state_dict
    taken = inspect.signature(loader).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    options = {"strict": strict and _overrides(model, "load_state_dict"), "assign": _is_on_meta(model)}
    found = loader(state, **{name: value for name, value in options.items() if takes_any or name in taken})
    missing, unexpected = (getattr(found, name, ()) for name in ("missing_keys", "unexpected_keys"))
    return OwnLoading(tuple(missing), tuple(unexpected))


def _in_mode(model: torch.nn.Module, function: Callable[[], T]) -> T:
    """Run a function in a thread of its own, in inference mode if tensors of the model were made in it."""
    # Tensors made in inference mode can only be written in it, and a new thread is not in it.
    is_inference = any(tensor.is_inference() for tensor in model_tensors(model).values() if not is_lazy(tensor))

    def run() -> T:
        with torch.inference_mode(is_inference), torch.no_grad():
            return function()

    return in_own_thread(run)


def _left_out(
    model: torch.nn.Module, found: OwnLoading, state: Mapping[str, Any], part: str = "", *, strict: bool
) -> OwnLoading:
    """
    Return what ``load_state_dict`` left out, without tied names; its result, ``found``, may have names that hooks add.

    Raises:
        KeyMismatch: Names are missing or unexpected.
    """
    entries, tensors = entries_of(model), model_tensors(model)
    found = found._replace(missing=(*found.missing, *_made_up(entries, state, found)))
    there = {id(tensor): name for name, tensor in tensors.items() if name not in found.missing}
    lacking = {name: there.get(id(tensors.get(name))) for name in found.missing}
    untied = tuple(name for name, other in lacking.items() if other is None)
    missing = tuple(name for name in untied if not is_benign(name))
    unexpected = tuple(name for name in found.unexpected if not is_benign(name))
    empty = {name for name, tensor in tensors.items() if not (is_lazy(tensor) or tensor.numel())}
    wanted = {name for name in entries if not (name in empty or may_be_missing(name))}
    is_left = len(state) > 0 and set(found.unexpected) >= set(state)
    nothing_fits = is_left or (len(wanted) > 0 and wanted <= set(missing))
    if (missing or unexpected) and (strict or nothing_fits):
        mismatch = KeyMismatch(
            f"the weights do not fit the model: missing {', '.join(missing[:8]) or 'nothing'}; "
            f"unexpected {', '.join(unexpected[:8]) or 'nothing'}{part}",
            hint="Check that this is the model's file." if nothing_fits else partly(missing),
        )
        mismatch.missing, mismatch.unexpected = missing, unexpected
        raise mismatch
    tied = tuple((name, other) for name, other in lacking.items() if other is not None)
    return found._replace(missing=untied, tied=tied)


def _made_up(entries: Mapping[str, Any], state: Mapping[str, Any], found: OwnLoading) -> tuple[str, ...]:
    """Return counters of batches that ``state`` lacks and torch does not report: it adds them itself for old files."""
    counters = {name for name in (*entries, *state) if name.rpartition(".")[2] == "num_batches_tracked"}
    if counters & state.keys() - entries.keys() - {*found.unexpected}:  # the model's own code may have renamed them
        return ()
    return tuple(name for name in entries if name in counters and name not in state and name not in found.missing)


def _as_ckptool_error(model: torch.nn.Module, error: Exception, part: str = "") -> CkptoolError:
    """Return an error of a model's loading code as one of ours; ``part`` is added if some of the model may be new."""
    if isinstance(error, CkptoolError):
        return error
    text = str(error).strip() or type(error).__name__
    first, *more = [line.strip() for line in text.splitlines()]
    reason = "; ".join(more[:4]) if more and first.startswith("Error(s) in loading") else first
    if "size mismatch for" in text:
        return ShapeMismatch(f"{reason}{part}", hint=other_sizes())
    if "Missing key(s)" in text or "Unexpected key(s)" in text:
        return KeyMismatch(f"the weights do not fit the model: {reason}{part}", hint="Check that it is its file.")
    return UnsupportedFeature(
        f"{type(model).__name__} loads through code of its own, which fails: {reason}{part}",
        kind="own-loading",
        hint="Check that this is the model's file, and that it was saved by this release of the model's code.",
    )
