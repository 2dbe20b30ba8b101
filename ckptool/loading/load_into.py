"""
``load_into``: the weights of a checkpoint into a model that exists, tensor by tensor, never two copies at once.

Everything that can be known beforehand is checked beforehand. Then memory that is to be what the file has is read into
directly, the rest comes through pieces of a few mebibytes, and what was on the meta device is put in its place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

import torch

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.roles import Role
from ckptool.checkpoints.weights import NameChanges, Weights, WeightsChoice, prepare, with_candidates
from ckptool.errors import AmbiguousWeights, IncompleteWeights, KeyMismatch, WeightsMismatch, WeightsNotFound
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.loading.custom_loading import load_through, own_loader
from ckptool.loading.load import check_options, chosen_weights, opened, torch_state_dict
from ckptool.loading.memory.assembly import Assembly, Progress
from ckptool.loading.memory.device import DeviceMemory
from ckptool.loading.memory.host import HostMemory, Mmap
from ckptool.loading.memory.placement import CPU, MapLocation, placement
from ckptool.loading.memory.threads import in_own_thread
from ckptool.loading.model_plan import (
    PARTLY,
    FillPlan,
    Target,
    fits_bytewise,
    is_own_memory,
    name_changes,
    names_for_hooks,
    plan,
)
from ckptool.loading.optimizers import read_optimizer
from ckptool.loading.post_hooks import has_post_hooks, run_post_hooks
from ckptool.loading.report import LoadReport, report_of, report_through
from ckptool.messages import show
from ckptool.names.matching import Renames, is_benign
from ckptool.sources.files import Origin, file_under
from ckptool.tensors.payloads import check_storages
from ckptool.tensors.reading import LazyTensor

_PIECE_NBYTES: Final = 4 << 20

logger = logging.getLogger("ckptool")


def load_into(
    model: torch.nn.Module,
    source: Origin,
    *,
    key: str | None = None,
    weights: WeightsChoice = "auto",
    strict: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
    map_location: MapLocation = "cpu",
    dtype: torch.dtype | None = None,
    mmap: Mmap = "auto",
    verify: bool = False,
    allow_missing: bool = False,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> LoadReport:
    """
    Load the weights of a checkpoint of any form into a model, and say what was loaded. Nothing in the file runs.

    Tensors of the model keep their device, their type and their memory: the file's bytes are read into it. Those on the
    meta device are replaced by new ones on ``map_location``, of the file's type or ``dtype``, as ``load`` makes them.
    At no time are there two copies. Names that differ by a wrapper, or by one prefix that all of the model's need, are
    matched, and reported. ``strict`` fails on names that either side lacks, but not on buffers that models compute
    themselves (``num_batches_tracked``, ``position_ids``). Where several state dicts could be the weights, the one that
    fits is. ``optimizer`` gets the state that the file has for it, on the devices of its parameters. A model that takes
    part in loading (hooks before it, overrides, packed parameters) is tried on a copy without memory, then given mapped
    tensors. Hooks after loading are run on the filled model, and may edit what is missing and unexpected, as for torch;
    where names do not fit without that, they are tried on such a copy first, unless they use the model itself.

    Guarantee: everything is checked before the first byte is copied, so a load that fails changes nothing, unless the
    file itself breaks, the call is cancelled, or ``progress`` raises, while the model's memory is read into: then some
    of it may be new. What a hook raises after loading is raised as it is, as is a KeyMismatch for names that it adds:
    then all weights are new, and what hooks make of them may not be.
    ``verify`` first compares the file with its own checksums, in a separate pass. ``allow_missing`` goes on where the
    file does not have all that the ``state_dict()`` of its own model would hold.

    Raises:
        AmbiguousWeights: Several state dicts could be the weights, and more than one fits.
        IncompleteWeights: The file does not have all of them, or only code could name or make a part.
        KeyMismatch: Names are missing or unexpected; the nearest are named.
        ShapeMismatch: Shapes differ, whatever ``strict`` says.
        DamagedFile: ``verify`` found bytes that are not those that were written.
        UnsupportedFeature: The model loads through code of its own that cannot be tried beforehand.
        Cancelled: ``limits`` have a cancellation, and it was.
        CkptoolError: As ``load``.
        ValueError: As ``load``.
    """
    started = time.perf_counter()
    place = placement(map_location)
    check_options(dtype, weights, mmap)
    with opened(source, limits) as checkpoint:
        if verify:
            checkpoint.check_index()
        state = read_optimizer(checkpoint, optimizer, mmap) if optimizer is not None else None
        assembly = Assembly(place, mmap=mmap, dtype=dtype, cancellation=limits.cancellation)
        if own_loader(model) is None:
            found, filling = choose_targets(model, checkpoint, key, weights, strict=strict, allow_missing=allow_missing)
            if verify:
                check_storages([target.source for target in filling.targets], ())
            _load_plainly(model, checkpoint, filling, assembly, progress)
            filling = after_hooks(model, filling, strict=strict)
            report = report_of(model, checkpoint.path, found, filling, started)
        else:
            chosen, changes = choose_renamed(model, checkpoint, key, weights, allow_missing=allow_missing)
            if verify:
                check_storages(chosen.tensors.values(), ())
            entries = torch_state_dict(checkpoint, chosen, assembly, progress, allow_missing=allow_missing)
            taken = load_through(model, entries, strict=strict)
            report = report_through(model, checkpoint.path, chosen, taken, started)._replace(changes=changes)
        if state is not None:
            state.apply()
            report = report._replace(optimizer=state.parameters)
    logger.info("%s", report.line)
    if report.still_meta:
        logger.warning("%s: still on the meta device: %s", report.path, show(", ".join(report.still_meta[:8])))
    return report


def _load_plainly(
    model: torch.nn.Module, checkpoint: Checkpoint, filling: FillPlan, assembly: Assembly, progress: Progress | None
) -> None:
    fresh = {one.name: one.source for one in filling.targets if one.tensor.is_meta}
    made = assembly.tensors(fresh, progress) if fresh else {}
    checkpoint.check_unchanged()
    _fill([one for one in filling.targets if one.name not in made], progress)
    assign(model, {id(one.tensor): made[one.name] for one in filling.targets if one.name in made})


def after_hooks(model: torch.nn.Module, filling: FillPlan, *, strict: bool = True) -> FillPlan:
    """
    Run the hooks of a model that was filled, and return the plan with the names that they have left.

    Raises:
        KeyMismatch: With ``strict``, there are some that they have not taken out, or that they have added.
    """
    if not has_post_hooks(model):
        return filling
    names = names_for_hooks(filling.match, filling.tied, filling.facts)
    left = in_own_thread(lambda: run_post_hooks(model, names))
    missing, unexpected = (tuple(name for name in some if not is_benign(name)) for some in left)
    if strict and (missing or unexpected):
        mismatch = KeyMismatch(
            f"the model was filled, but its hooks leave names: missing {', '.join(missing[:8]) or 'nothing'}; "
            f"unexpected {', '.join(unexpected[:8]) or 'nothing'}",
            hint=PARTLY,
        )
        mismatch.missing, mismatch.unexpected = missing, unexpected
        raise mismatch
    return filling._replace(missing=left.missing, unexpected=left.unexpected)


def choose_targets(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    key: str | None,
    weights: WeightsChoice,
    *,
    strict: bool = True,
    allow_missing: bool = False,
) -> tuple[str, FillPlan]:
    """Return the chosen state dict and how it fits; of several, the only one that does."""

    def fits(found: Mapping[str, LazyTensor]) -> bool:
        with suppress(WeightsMismatch):
            return bool(plan(model, found))
        return False

    chosen = _choose(checkpoint, key, weights, fits, allow_missing=allow_missing)
    return chosen.state_dict.key, plan(model, chosen.tensors, strict=strict, facts=chosen.modules)


def choose_renamed(
    model: torch.nn.Module,
    checkpoint: Checkpoint,
    key: str | None,
    weights: WeightsChoice,
    *,
    allow_missing: bool = False,
) -> tuple[Weights, Renames]:
    """Return the weights under the names of a model that loads through its own code, and how they were renamed."""

    def fits(found: Mapping[str, LazyTensor]) -> bool:
        return name_changes(model, found)[1]

    chosen = _choose(checkpoint, key, weights, fits, allow_missing=allow_missing)
    changes, _ = name_changes(model, chosen.tensors)
    if changes:
        chosen = prepare(checkpoint, chosen.state_dict, NameChanges(tuple(change.rule for change in changes)))
    return chosen, changes


def _choose(
    checkpoint: Checkpoint,
    key: str | None,
    weights: WeightsChoice,
    fits: Callable[[Mapping[str, LazyTensor]], bool],
    *,
    allow_missing: bool,
) -> Weights:
    """Return the weights that were chosen; without a choice, the only ones that fit."""
    try:
        return chosen_weights(checkpoint, key, weights, None, allow_missing=allow_missing)
    except IncompleteWeights:
        raise
    except WeightsNotFound as error:
        if key is not None or weights != "auto":
            raise
        roles: tuple[tuple[Role, ...], ...] = (("model",), ("ema", "other"))
        found = ([one for one in checkpoint.state_dicts if one.role in some and fits(one)] for some in roles)
        fitting = next(filter(None, found), [])
        if len(fitting) == 1:
            return chosen_weights(checkpoint, fitting[0].key, weights, None, allow_missing=allow_missing)
        if not fitting:
            raise KeyMismatch(f"no state dict fits the model: {error.message}", hint=error.hint) from error
        raise with_candidates(AmbiguousWeights(f"{len(fitting)} state dicts fit the model"), fitting) from error


def _fill(targets: list[Target], progress: Progress | None) -> None:
    """Copy from the file into the model's memory."""
    # Two reads into one memory would meet: of several sources for one tensor the last counts, as for torch.
    targets = list({id(target.tensor): target for target in targets}.values())
    host, devices = HostMemory(False), dict[torch.device, DeviceMemory]()
    others = []
    for target in targets:
        info, device = target.source.info, target.tensor.device
        storage = info.storage
        if storage is None or not fits_bytewise(target.tensor, target.source):
            others.append(target)
            continue
        memory = _bytes_of(target.tensor)
        offset = storage.offset + info.storage_offset * info.dtype.itemsize
        under = file_under(storage.source, offset)
        if device != CPU:
            devices.setdefault(device, DeviceMemory(device)).read_into(storage.source, offset, memory)
        elif under is not None:
            host.read_into(*under, memory)
        else:
            others.append(target)
    total, done = sum(target.source.info.nbytes for target in targets), 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    host.fill(count)
    for waiting in devices.values():
        waiting.fill(count)
    if others:
        in_own_thread(partial(_copy_all, others, count))
    for target in targets:
        if not target.tensor.is_inference():  # those have no versions
            torch.autograd.graph.increment_version(target.tensor)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8."""
    start = tensor.storage_offset() * tensor.itemsize
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), start, (tensor.numel() * tensor.itemsize,), (1,))


def _copy_all(targets: list[Target], count: Callable[[int], None]) -> None:
    for target in targets:
        # What was made in inference mode can be written to in that mode alone; leaving it switches gradients on.
        with torch.inference_mode(target.tensor.is_inference()), torch.no_grad():
            _copy(target)
        count(target.source.info.nbytes)


def _copy(target: Target) -> None:
    """Copy one tensor whose values or places change on the way: by pieces, where both sides are plain."""
    info, tensor = target.source.info, target.tensor.detach()
    is_plain = is_own_memory(tensor) and info.storage is not None and info.layout == "strided"
    if not is_plain or info.dtype.packed > 1 or not tensor.is_contiguous():
        tensor.copy_(Assembly(placement(CPU)).tensors({target.name: target.source})[target.name])
        return
    flat, position = tensor.view(-1), 0
    dtype = getattr(torch, info.dtype.name)
    for chunk in target.source.chunks(_PIECE_NBYTES):
        if chunk:
            values = torch.frombuffer(bytearray(chunk), dtype=dtype)
            flat[position : position + len(values)].copy_(values)
            position += len(values)


def assign(model: torch.nn.Module, made: Mapping[int, torch.Tensor]) -> None:
    """Put tensors in the place of parameters and buffers, by their ``id``; what was tied is tied again."""
    parameters: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in made:
                if id(parameter) not in parameters:
                    parameters[id(parameter)] = parameter_like(parameter, made[id(parameter)])
                module._parameters[name] = parameters[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in made:
                module._buffers[name] = made[id(buffer)]


def parameter_like(old: torch.Tensor, values: torch.Tensor) -> torch.nn.Parameter:
    """Return values as a parameter that is trained if ``old`` is; integers never are."""
    is_trained = old.requires_grad and (values.is_floating_point() or values.is_complex())
    return torch.nn.Parameter(values, requires_grad=is_trained)
