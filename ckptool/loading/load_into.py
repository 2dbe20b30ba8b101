"""
``load_into``: the weights of a checkpoint into an existing model, without a second copy.

All that can be checked is checked before anything changes. Then the file's bytes are read right into the memory of
tensors that store them unchanged, other tensors are copied one by one, and those on the meta device are replaced.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ckptool.arguments import checked
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.completeness import refuse_broken
from ckptool.checkpoints.weights import Weights, WeightsChoice
from ckptool.errors import KeyMismatch, UnsupportedFeature, WeightsMismatch
from ckptool.formats.json_beside import quantization_of
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.loading.choice import Choice, Made
from ckptool.loading.custom_loading import fill, rehearse
from ckptool.loading.fill_plan import FillPlan, Target, check_model, check_placing, has_same_bytes, model_tensors
from ckptool.loading.load import (
    cast_of,
    dense,
    opened,
    refuse_broken_quantized,
    torch_state_dict,
)
from ckptool.loading.memory.assembly import Assembly
from ckptool.loading.memory.filling import DeviceMemory, HostMemory, Memory, Mmap
from ckptool.loading.memory.placement import CPU, MapLocation, placement, torch_dtype
from ckptool.loading.memory.threads import in_own_thread, refuse_overflows
from ckptool.loading.optimizers import read_optimizer
from ckptool.loading.report import LoadReport, report_of, report_through
from ckptool.messages import some
from ckptool.names.matching import Renames, may_be_missing
from ckptool.recipes import NO_NUMBERS, requested_recipe
from ckptool.sources.files import Origin
from ckptool.sources.source import Meter, Progress
from ckptool.tensors.payloads import check_storages
from ckptool.tensors.reading import LazyTensor
from ckptool.torch_ops.models import codes_for_floats, ties_with_two_values
from ckptool.torch_ops.values import narrows

if TYPE_CHECKING:
    from ckptool.recipes.find import Layout

logger = logging.getLogger("ckptool")
_DENSE_FIRST = "Its weights are quantised: make them dense, with ckptool.load_into(model, path, dequantize=True)."


@checked("model")
def load_into(
    model: torch.nn.Module,
    source: Origin,
    *,
    key: str | None = None,
    weights: WeightsChoice = "auto",
    strict: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
    map_location: MapLocation = "cpu",
    device: str | torch.device | None = None,
    include: Sequence[str] = (),
    prefix: str = "",
    dtype: torch.dtype | str | None = None,
    mmap: Mmap = "auto",
    verify: bool = False,
    allow_missing: bool = False,
    break_quantized: bool = False,
    dequantize: bool = False,
    recipe: str | os.PathLike[str] | None = None,
    reverse: bool = False,
    recipe_arguments: Mapping[str, int] = NO_NUMBERS,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> LoadReport:
    """
    Load the weights of a checkpoint of any form into a model, and say what was loaded. Nothing in the file runs.

    Tensors of the model keep their device, their type and their memory: the file's bytes are read into it. Those on the
    meta device are replaced by new ones on ``map_location``, of the file's type or ``dtype``, as ``load`` makes them;
    where there are none, another device or type is refused. At no time are there two copies. Names that differ by a
    wrapper, or by one prefix that all of the model's need (without ``strict``: most), are matched, and reported.
    ``strict`` fails on names that either side lacks, but not on buffers that models compute themselves
    (``num_batches_tracked``, ``position_ids``), and on different values for names that the model ties; without it, the
    last name's value counts. If several state dicts could be the weights, the one that fits is taken; if none does, all
    of them together, where names from the top of the file are those of the model. ``include`` fills only tensors whose
    names in the model match a glob, or one of several. ``prefix`` takes only the file's names below it, and strips it.
    ``dequantize`` first makes quantised weights dense, and a ``recipe``, by its name or the path of one, puts the
    weights into another layout, as ``migrate`` does. ``optimizer`` gets the file's state for it, on its devices.

    A model that takes part in loading (hooks, overrides, packed parameters, lazy layers, extra state) is filled by its
    own ``load_state_dict``. A copy of it on the CPU loads first, without hooks for after loading unless names do not
    fit: that needs memory for the weights twice more. One that cannot be copied, or whose hooks use the model itself,
    or for which there is no room, loads without that: a failure may leave a part of the weights.

    Guarantee: all is checked before the first byte is copied, so a load that fails changes nothing. But some weights
    may be new if, while they are read, the file turns out to be damaged, a device fails, the call is cancelled or
    ``progress`` raises; or if a model that takes part fails without a copy, or after its copy did not (the error says
    so). What a hook raises after loading is raised unchanged: then all weights are new. The rest is as for ``load``.

    Raises:
        AmbiguousWeights: Several state dicts could be the weights, and more than one fits.
        IncompleteWeights: The file does not have all of them, or only code could name or make a part.
        KeyMismatch: Names are missing or unexpected; the nearest are named. Without ``strict``: no weight would be new.
        ShapeMismatch: Shapes differ, whatever ``strict`` says.
        WeightsMismatch: The file has different values for names that the model ties.
        DamagedFile: ``verify`` found bytes that differ from those that were written.
        UnsupportedFeature: The model's own code does not take the file (it says why), or would break what is quantised;
            or a tensor has values that its new type cannot hold: finite floats, or integers that would be others.
        CkptoolError, ValueError, TypeError: As ``load``; ``model`` is not a module, or is a class.
    """
    check_model(model)
    started, place, dtype = time.perf_counter(), *check_placing(model, map_location, device, dtype)
    breaks, layout = break_quantized or dequantize, requested_recipe(recipe, recipe_arguments, reverse=reverse)
    with opened(source, limits) as checkpoint, _telling_of_quantised(checkpoint, None if dequantize else model):
        if verify:
            checkpoint.check_index()
        state = read_optimizer(checkpoint, model, optimizer, mmap) if optimizer is not None else None
        assembly = Assembly(place, mmap=mmap, dtype=dtype, cancellation=limits.cancellation)
        made = _made(checkpoint, dtype or _type_of(model), layout, dequantize=dequantize)
        choice = Choice(model, checkpoint, key, weights, allow_missing, made, layout is not None)
        load = _Load(choice, assembly, started, dtype, mmap, progress, strict, verify, breaks)
        targets = choice.targets(strict=strict, include=include, prefix=prefix)
        through = partial(choice.through_own_code, load.through_own_code, strict=strict)
        report = load.planned(*targets) if targets is not None else through()
        report = report._replace(also_under=checkpoint.also_under(report.key))
        if optimizer is not None and state is not None:
            in_own_thread(partial(optimizer.load_state_dict, state))
            report = report._replace(optimizer=len(state["state"]))
    return _logged(report)


def _logged(report: LoadReport) -> LoadReport:
    is_less = report.still_meta or report.tied_apart or not all(map(may_be_missing, report.missing))
    logger.log(logging.WARNING if is_less else logging.INFO, "%s", report.line)
    return report


def _made(checkpoint: Checkpoint, dtype: torch.dtype | None, layout: Layout | None, *, dequantize: bool) -> Made:
    """Return the conversion of the chosen weights: to dense ones, to another layout, or both."""

    def made(weights: Weights) -> Weights:
        plain = dense(checkpoint, weights, dtype) if dequantize else weights
        return plain if layout is None else layout(checkpoint, plain).weights

    return made


@contextmanager
def _telling_of_quantised(checkpoint: Checkpoint, model: torch.nn.Module | None) -> Iterator[None]:
    """Replace the hint of an error about names or shapes if the file is quantised, and the model has only floats."""
    try:
        yield
    except WeightsMismatch as error:
        matrices = [one for one in model.parameters() if one.ndim > 1] if model is not None else []
        found = quantization_of(checkpoint) if matrices else None
        if found is not None and found.bound and all(one.is_floating_point() and one.itemsize > 1 for one in matrices):
            error.hint = _DENSE_FIRST
        raise


def _type_of(model: torch.nn.Module) -> torch.dtype | None:
    """Return the floating type that all tensors of a model share; None if they differ, or parameters are on meta."""
    types = {one.dtype for one in (*model.parameters(), *model.buffers()) if one.is_floating_point()}
    return types.pop() if len(types) == 1 and not any(one.is_meta for one in model.parameters()) else None


class _Load(NamedTuple):
    """The options of one load into a model, and the two ways to carry it out."""

    choice: Choice
    assembly: Assembly
    started: float
    dtype: torch.dtype | None
    mmap: Mmap
    progress: Progress | None
    strict: bool
    verify: bool
    breaks_quantized: bool

    def planned(self, found: StateDict, filling: FillPlan) -> LoadReport:
        """Fill the model by a plan, and return the report."""
        model, checkpoint = self.choice.model, self.choice.checkpoint
        refuse_broken_plan(checkpoint, filling, self.dtype, allowed=self.breaks_quantized)
        if self.verify:
            check_storages(filling.taken.values(), ())
        apart = tied_apart(model, filling.taken, strict=self.strict)
        fresh = {one.name: one.source for one in filling.targets if one.tensor.is_meta}
        checkpoint.announce(one.source for one in filling.targets)
        made = self.assembly.tensors(fresh, self.progress) if fresh else {}
        rest = [one for one in filling.targets if one.name not in made]
        smaller = (one for one in rest if narrows(torch_dtype(one.source.info), one.tensor.dtype))
        values = ((one.name, _values(one, self.mmap), one.tensor.dtype) for one in smaller)
        in_own_thread(lambda: refuse_overflows(values))
        checkpoint.check_unchanged()
        _fill(rest, self.mmap, self.progress)
        assign(model, {id(one.tensor): made[one.name] for one in filling.targets if one.name in made})
        return report_of(model, checkpoint.path, found, filling, self.started, apart)

    def through_own_code(self, chosen: Weights, changes: Renames) -> LoadReport:
        """Let the model load weights through its own code, and return the report."""
        model, checkpoint, strict = self.choice.model, self.choice.checkpoint, self.strict
        refuse_broken(chosen.tensors.values())
        if self.verify:
            check_storages(chosen.tensors.values(), ())
        entries = torch_state_dict(checkpoint, chosen, self.assembly, allow_missing=self.choice.allow_missing)
        try:
            rehearsed = rehearse(model, entries, strict=strict)
            if not self.breaks_quantized:
                own = dict(model.named_parameters())
                _refuse_integers((one, own.get(name)) for name, one in chosen.tensors.items())
                gone = set(rehearsed.unexpected) if rehearsed is not None else ()
                taken_in = (one for name, one in chosen.tensors.items() if name not in gone)
                refuse_broken_quantized(checkpoint, ((one, cast_of(one, self.dtype)) for one in taken_in))
            refuse_overflows_in(model, entries)
            apart = tied_apart(model, chosen.tensors, strict=strict)
            taken = fill(model, entries, rehearsed, strict=strict)
        except KeyMismatch as error:
            unmade = [name for name in chosen.others if name not in entries and name in error.missing]
            if unmade:
                fact = f"The file has {some(unmade)}, but only code could make what it holds."
                error.hint = f"{fact} {error.hint}" if error.hint else fact
            raise
        report = report_through(model, checkpoint.path, chosen, taken, self.started)
        return report._replace(changes=changes, tied_apart=apart)


def tied_apart(model: torch.nn.Module, taken: Mapping[str, LazyTensor], *, strict: bool) -> tuple[tuple[str, str], ...]:
    """
    Return pairs of names that a model ties, but for which the file has different values; the last name's would count.

    Raises:
        WeightsMismatch: There are such pairs, and ``strict`` is True.
    """
    own = model_tensors(model)
    apart = tuple(ties_with_two_values(taken, {name: own[name] for name in taken if name in own}))
    is_one = all(own[kept] is own[name] for kept, name in apart)  # of two that overlap, either may be written last
    if apart and (strict or not is_one):
        pairs = some([f"{kept} and {name}" for kept, name in apart])
        last = "say ckptool.load_into(model, path, strict=False): then the last name's value counts"
        raise WeightsMismatch(
            f"the model ties names for which the file has different values: {pairs}",
            kind="tied-values",
            hint=f"Untie them, or {last}." if is_one else "Untie them: each needs memory of its own.",
        )
    return apart


def refuse_broken_plan(
    checkpoint: Checkpoint, filling: FillPlan, dtype: torch.dtype | None, *, allowed: bool = False
) -> None:
    """Raise UnsupportedFeature where a model would take quantised weights as another type, or without their scales."""
    refuse_broken(filling.taken.values())
    if allowed:
        return
    _refuse_integers((one.source, one.tensor) for one in filling.targets)
    targets = ((one.source, one.tensor) for one in filling.targets)
    kinds = ((source, cast_of(source, dtype) if tensor.is_meta else tensor.dtype) for source, tensor in targets)
    refuse_broken_quantized(checkpoint, kinds)


def _refuse_integers(taken: Iterable[tuple[LazyTensor, torch.Tensor | None]]) -> None:
    """Raise UnsupportedFeature if matrices of integers, which seem quantised, would go into parameters of floats."""
    if fact := codes_for_floats(taken):
        hint = "Make them dense (`dequantize=True`); if this is meant, say so with `break_quantized=True`."
        raise UnsupportedFeature(fact, kind="breaks-quantized", hint=hint)


def _fill(targets: list[Target], mmap: Mmap, progress: Progress | None) -> None:
    """Read or copy tensors of the file into the model's memory."""
    # Two reads into the same memory would race: if a tensor has several sources, the last counts, as for torch.
    targets = list({id(target.tensor): target for target in targets}.values())
    memories: dict[torch.device, Memory] = {CPU: HostMemory(False)}
    others = []
    for target in targets:
        info, device = target.source.info, target.tensor.device
        storage = info.storage
        is_inflated = storage is not None and storage.source.is_compressed and device == CPU
        if storage is None or is_inflated or not has_same_bytes(target.tensor, target.source):
            others.append(target)
            continue
        start = target.tensor.storage_offset() * target.tensor.itemsize
        memory = torch.empty(0, dtype=torch.uint8, device=device)
        memory.set_(target.tensor.untyped_storage(), start, (target.tensor.nbytes,), (1,))
        offset = storage.offset + info.storage_offset * info.dtype.itemsize
        if device not in memories:
            memories[device] = DeviceMemory(device)
        memories[device].read_into(storage.source, offset, memory)
    meter = Meter(progress, sum(target.source.info.nbytes for target in targets))
    for waiting in memories.values():
        waiting.fill(meter.read)
    if others:
        in_own_thread(partial(_copy_all, others, mmap, meter))
    for target in targets:
        if not target.tensor.is_inference():  # inference tensors have no version counter
            torch.autograd.graph.increment_version(target.tensor)


def _copy_all(targets: list[Target], mmap: Mmap, meter: Meter) -> None:
    for target in targets:
        # Tensors made in inference mode can only be written in it; inference_mode(False) enables gradients.
        with torch.inference_mode(target.tensor.is_inference()), torch.no_grad():
            target.tensor.detach().copy_(_values(target, mmap))
        meter.read(target.source.info.nbytes)


def _values(target: Target, mmap: Mmap) -> torch.Tensor:
    """Return a tensor of the file on the CPU: mapped if possible, else in memory that is freed with it."""
    return Assembly(placement(CPU), mmap=mmap).tensors({target.name: target.source})[target.name]


def refuse_overflows_in(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Raise UnsupportedFeature if a tensor of a state dict has values that the model's type for it cannot hold."""
    own = {name: one.dtype for name, one in model_tensors(model).items() if not one.is_meta and not is_lazy(one)}
    there = ((name, value) for name, value in state.items() if isinstance(value, torch.Tensor) and name in own)
    smaller = [(name, value, own[name]) for name, value in there if narrows(value.dtype, own[name])]
    in_own_thread(lambda: refuse_overflows(smaller))


def assign(model: torch.nn.Module, made: Mapping[int, torch.Tensor]) -> None:
    """Replace parameters and buffers by new tensors, by the ``id`` of the old ones; tied ones stay tied."""
    parameters: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        # With setattr(), as torch does: an LSTM also keeps its parameters in a list.
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in made:
                if id(parameter) not in parameters:
                    parameters[id(parameter)] = parameter_like(parameter, made[id(parameter)])
                setattr(module, name, parameters[id(parameter)])
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and id(buffer) in made:
                setattr(module, name, made[id(buffer)])


def parameter_like(old: torch.Tensor, values: torch.Tensor) -> torch.nn.Parameter:
    """Return values as a parameter that requires gradients if ``old`` does; integers never do."""
    is_trained = old.requires_grad and (values.is_floating_point() or values.is_complex())
    return torch.nn.Parameter(values, requires_grad=is_trained)
