"""
``load``: the weights of a checkpoint as a state dict of ``torch.Tensor``, on any device.

For one rank's shard of the weights, tensors are cut along a dimension, and only the rank's part is read. A part along
the first dimension is one range of the file. Along others, its elements are gathered while reading.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch

from ckptool.arguments import checked
from ckptool.checkpoints.checkpoint import Checkpoint, StateDict
from ckptool.checkpoints.completeness import (
    halves_alone,
    holds_storage,
    refuse_broken,
    refuse_incomplete,
    refuse_slice,
)
from ckptool.checkpoints.entries import not_averaged
from ckptool.checkpoints.quantized import CASTABLE, keep, within
from ckptool.checkpoints.quantized_layouts import TYPES
from ckptool.checkpoints.weights import (
    NameChanges,
    Weights,
    WeightsChoice,
    choose,
    left_beside,
    names_matching,
    prepare,
)
from ckptool.errors import (
    CkptoolError,
    IncompleteWeights,
    MalformedFile,
    MigrationRefused,
    TruncatedFile,
    UnsupportedFeature,
    WeightsNotFound,
    about,
)
from ckptool.formats import open_checkpoint
from ckptool.formats.json_beside import quantization_among
from ckptool.limits import DEFAULT_LIMITS, Limits, refuse_repeated
from ckptool.loading.extra_state import values_with_tensors
from ckptool.loading.memory.assembly import Assembly, Cost
from ckptool.loading.memory.filling import Mmap
from ckptool.loading.memory.placement import MapLocation, placement
from ckptool.loading.memory.threads import castable
from ckptool.messages import no_values, show, some
from ckptool.names import renaming
from ckptool.pickles.reader import gc_paused
from ckptool.sources.files import Origin
from ckptool.sources.paths import command_line, shown_path
from ckptool.sources.source import Progress
from ckptool.tensors.dtypes import spelled
from ckptool.tensors.payloads import check_storages
from ckptool.tensors.pieces import in_pieces, packed
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, identity, storages_nbytes

Strip: TypeAlias = Literal["wrappers", "module"] | None
Cut: TypeAlias = tuple[int, int, int]
"""The dimension that a tensor is cut along, the number of the rank (from 0), and the number of ranks."""
Shard: TypeAlias = Mapping[str, Cut]
"""Cuts, by globs of the names of tensors."""

logger = logging.getLogger("ckptool")


@checked()
def load(
    source: Origin,
    map_location: MapLocation = "cpu",
    *,
    device: str | torch.device | None = None,
    key: str | None = None,
    weights: WeightsChoice = "auto",
    strip: Strip = "wrappers",
    include: Sequence[str] = (),
    prefix: str = "",
    shard: Shard | None = None,
    dtype: torch.dtype | str | None = None,
    mmap: Mmap = "auto",
    verify: bool = False,
    allow_missing: bool = False,
    break_quantized: bool = False,
    dequantize: bool = False,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> OrderedDict[str, Any]:
    """
    Return the weights of a checkpoint of any form as an ordered state dict, with its ``_metadata``.

    Nothing in the file runs, whatever it is: a state dict, a training checkpoint, a whole model (its class is not
    needed), safetensors, TorchScript. ``source`` is a path, bytes, or a binary file object. ``map_location`` is what
    ``torch.load`` takes, and ``device`` another word for it; tags that were saved are never obeyed, and no accelerator
    is started that it does not name. ``key`` is the path of a state dict; an empty one takes all of them, with names
    from the top of the file. ``weights`` picks the averaged (``ema``) or the ``raw`` ones, or those that DeepSpeed
    computed with (``module``), which may be rounded. ``strip`` removes what wrappers put before every name; if only
    some names have it, all keep it. After that, ``include`` takes the names that match a glob, or one of several,
    ``prefix`` takes the names below it, and strips it, and ``shard`` takes one rank's part of the tensors that match a
    glob: ``(dimension, rank, ranks)``. The rest is not read.

    Tensors that share memory in the file share it again, and all can be written to: the file never changes. With
    ``mmap``, those on the CPU are views of a private mapping of the file, whose pages all processes share until they
    write to them; replacing the file by renaming another over it is safe, but truncating it kills every process that
    maps it. ``auto`` maps local files, and reads those on a network file system. ``dtype`` is the type that floating
    tensors are cast to: ``torch.float16`` or ``"fp16"``; quantised weights, whose scales would be rounded, are refused
    then, unless ``break_quantized`` says that this is meant. Without a cast, a warning is logged if scales are not
    among the weights. ``dequantize`` makes plain weights of them, of type ``dtype``, or of the type of their scales, or
    bfloat16. ``verify`` first compares the file with the checksums in it, in a separate pass. ``allow_missing`` goes on
    if the file does not have all that the model's own ``state_dict()`` would hold, or only code could make it.
    ``progress`` is called with the bytes that were read so far, and those to be read in all; mapped bytes are not among
    these. A process that has loaded can fork. Safe to call from several threads.

    Raises:
        DamagedFile: ``verify`` found bytes that differ from those that were written.
        DeviceUnavailable: ``map_location`` names a device that is not here.
        AmbiguousWeights: Several state dicts could be the weights; ``candidates`` and the hint list them.
        IncompleteWeights: The file does not have all of them, or only code could name or make a part.
        OutOfMemory: They need more than there is. Nothing was loaded.
        MigrationRefused: ``dequantize`` is set, and nothing is quantised, or something cannot be made dense.
        UnsupportedFeature: A tensor is of a kind that only code of its own can make; or a cast would break quantised
            weights, or lose finite values that are too large for ``dtype``; or ``shard`` cannot cut a tensor evenly.
        WeightsNotFound: No state dict is the chosen weights, or ``include``, ``prefix`` or ``shard`` matches no name.
        CkptoolError: The file cannot be read, or the call was cancelled.
        TypeError: An argument is of another type than its annotation says.
        ValueError: It has a value that it does not take, or ``map_location`` and ``device`` differ.
    """
    place = placement(map_location, device)
    cast_to = castable(dtype)

    def state_dict() -> OrderedDict[str, Any]:
        with opened(source, limits) as checkpoint:
            if verify:
                checkpoint.check_index()
            chosen = chosen_weights(checkpoint, key, weights, strip, allow_missing=allow_missing).part(include, prefix)
            if also := checkpoint.also_under(chosen.state_dict.key):
                logger.info("%s: the same weights are under %s, too", checkpoint.path, show(some(also)))
            if verify:
                check_storages(chosen.tensors.values(), ())
            breaks = None if dequantize else break_quantized
            taken = _taken(checkpoint, chosen, shard, cast_to, limits, breaks_quantized=breaks)
            assembly = Assembly(place, mmap=mmap, dtype=cast_to, cancellation=limits.cancellation)
            state = torch_state_dict(checkpoint, taken, assembly, progress, allow_missing=allow_missing)
            checkpoint.check_unchanged()
            return state

    with gc_paused():  # until the tree of nodes is freed
        return state_dict()


def _taken(
    checkpoint: Checkpoint,
    chosen: Weights,
    shard: Shard | None,
    dtype: torch.dtype | None,
    limits: Limits,
    *,
    breaks_quantized: bool | None,
) -> Weights:
    """
    Return the weights to load: dense if ``breaks_quantized`` is None, else the shard.

    If it is False, refuse a cast that breaks quantised weights; without a cast, warn if their scales are not loaded.
    """
    refuse_broken(chosen.tensors.values())
    infos = {name: one.info for name, one in chosen.tensors.items()}
    if empty := [name for name, info in infos.items() if info.location == "meta" and info.storage is None]:
        logger.warning("%s: %s", checkpoint.path, show(no_values(empty)))
    if arrays := [info for info in infos.values() if info.is_array]:
        made, hint = storages_nbytes(arrays), "Take some of them with `include=`."
        refuse_repeated(made, checkpoint.file_nbytes, limits, hint)
    if breaks_quantized is None:
        if shard:
            raise ValueError("dequantize= makes whole weights: it cannot be combined with shard=")
        return dense(checkpoint, chosen, dtype)
    taken = share_of(chosen, shard)
    tensors = taken.tensors.values()
    if not breaks_quantized and (dtype is not None or any(one.info.dtype.name in TYPES for one in tensors)):
        head = f"{taken.state_dict.key}." if taken.state_dict.key else ""
        others = {head + taken.old_names[name] for name in taken.others}
        left = ((one, cast_of(one, dtype)) for one in tensors)
        refuse_broken_quantized(checkpoint, left, others, dtype, warns=dtype is None)
    return taken


def share_of(weights: Weights, shard: Shard | None) -> Weights:
    """
    Return weights in which each tensor that is cut is replaced by the rank's part of it.

    Raises:
        UnsupportedFeature: A tensor cannot be cut: it lacks the dimension, equal parts, or plain elements.
        ValueError: There is no such rank, or two globs that match a name give different cuts.
        WeightsNotFound: A glob matches no name.
    """
    cuts: dict[str, Cut] = {}
    for glob, cut in (shard or {}).items():
        cut = _, rank, world = int(cut[0]), int(cut[1]), int(cut[2])
        if not 0 <= rank < world:
            raise ValueError(f"shard[{glob!r}] is (dimension, rank, ranks), and has rank {rank} of {world}")
        for name in names_matching("shard", glob, list(weights.tensors)):
            if cuts.setdefault(name, cut) != cut:
                raise ValueError(f"shard says {cut} of {name!r} for {glob!r}, and {cuts[name]} for another glob")
    parts: dict[object, TensorInfo] = {}  # tied tensors stay tied
    tensors = dict(weights.tensors)
    for name, cut in cuts.items():
        key = identity(tensors[name].info), cut
        if key not in parts:
            parts[key] = _part(tensors[name], *cut)
        tensors[name] = LazyTensor(tensors[name].name, parts[key])
    return weights._replace(tensors=tensors)


def _part(tensor: LazyTensor, dim: int, rank: int, world: int) -> TensorInfo:
    """Return the facts of one rank's part of a tensor, as if it were stored by itself."""
    shape = list(tensor.shape)
    if not -len(shape) <= dim < len(shape):
        raise _uneven(tensor, f"has no dimension {dim}: its shape is {shape}")
    rows, left = divmod(shape[dim], world)
    if left:
        fact = f"{shape[dim]:,} = {world:,} * {rows:,} + {left:,}"
        raise _uneven(tensor, f"{shape} has no {world:,} equal parts along dimension {dim}: {fact}")
    info = tensor[(*[slice(None)] * (dim % len(shape)), slice(rank * rows, (rank + 1) * rows))].info
    if info.is_contiguous or info.storage is None:
        return info
    whole = in_pieces(info.storage.key, info.shape, info.dtype, packed(info, tensor.name), info.location)
    return whole._replace(requires_grad=info.requires_grad, kind=info.kind, subclass=info.subclass)


def _uneven(tensor: LazyTensor, fact: str) -> UnsupportedFeature:
    return UnsupportedFeature(f"tensor {tensor.name!r} {fact}", kind="uneven-shard", hint="Cut it in another way.")


def dense(checkpoint: Checkpoint, chosen: Weights, dtype: torch.dtype | None) -> Weights:
    """Return weights with dense tensors, of type ``dtype`` if it is given, in place of quantised ones."""
    from ckptool.dense import make_dense  # few files have some

    name = None if dtype is None else spelled(dtype)
    return make_dense(checkpoint, chosen, name, at_once=True)[0]


@checked()
def predict_memory(
    source: Origin,
    map_location: MapLocation = "cpu",
    dtype: torch.dtype | str | None = None,
    *,
    device: str | torch.device | None = None,
    key: str | None = None,
    weights: WeightsChoice = "auto",
    include: Sequence[str] = (),
    prefix: str = "",
    shard: Shard | None = None,
    mmap: Mmap = "auto",
    limits: Limits = DEFAULT_LIMITS,
) -> Cost:
    """
    Return what ``load`` would need of host and device memory, in bytes. Reads the index alone, and allocates nothing.

    Raises:
        CkptoolError: As ``load``.
        ValueError: As ``load``.
    """
    place = placement(map_location, device)
    dtype = castable(dtype)
    with opened(source, limits) as checkpoint:
        chosen = share_of(chosen_weights(checkpoint, key, weights, "wrappers").part(include, prefix), shard)
        return Assembly(place, mmap=mmap, dtype=dtype).cost(chosen.tensors)


def refuse_broken_quantized(
    checkpoint: Checkpoint,
    left: Iterable[tuple[LazyTensor, torch.dtype | None]],
    others: Collection[str] = (),
    dtype: torch.dtype | None = None,
    *,
    warns: bool = False,
) -> None:
    """
    Raise UnsupportedFeature if quantised weights would be cast, cut apart, or left without their scales.

    ``left`` are the tensors that are loaded, each with the type that it gets, or None for its own. ``others`` are the
    paths of loaded entries that are not tensors, but may hold some, which get ``dtype``. With ``warns``, all but cut
    tensors are only logged.
    """
    left = list(left)
    types = {one.name: spelled(cast or one.dtype) for one, cast in left}
    inside = (name for name, _ in within(checkpoint.tensors, others)) if others else ()
    found = quantization_among(checkpoint, {*types, *inside})
    if found is None:
        return
    for name in (name for name, _ in found.within(others) if name not in types):
        one = checkpoint.tensors.get(name)
        types[name] = spelled(cast_of(one, dtype) or one.dtype) if one is not None else ""
    wholes = {name: one.shape for name, one in checkpoint.tensors.items()}
    cut = found.cut_apart(wholes, {one.name: one.shape for one, _ in left})
    wrong = cut or found.damage(types, is_cast=dtype is not None)
    if wrong is not None and warns and not cut:
        logger.warning("%s: %s", checkpoint.path, show(wrong))
    elif wrong is not None:
        hint = keep(checkpoint.part_of).replace(" (`keep_dtype=`)", "")
        raise UnsupportedFeature(wrong, kind="breaks-quantized", hint=hint)


def cast_of(tensor: LazyTensor, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the type that ``dtype=`` casts a tensor to; None if it keeps its own."""
    return dtype if dtype is not None and tensor.dtype in CASTABLE else None


def chosen_weights(
    checkpoint: Checkpoint,
    key: str | None,
    weights: WeightsChoice,
    strip: Strip = None,
    fits: Callable[[StateDict], bool] | None = None,
    *,
    allow_missing: bool = False,
) -> Weights:
    """Return the chosen weights under their final names; if several could be meant, the only ones that ``fits``."""
    try:
        state_dict = choose(checkpoint, key, weights, fits)
    except WeightsNotFound as error:
        if "`form=" in (error.hint or ""):
            error.hint = None  # it is about migrating
        raise
    if not allow_missing:
        refuse_slice(checkpoint, weights)
        refuse_incomplete(checkpoint, state_dict)
    halves = halves_alone(state_dict)
    facts = [not_averaged(checkpoint, state_dict), left_beside(checkpoint, key, state_dict), halves and halves.fact]
    facts += [remark.what for remark in checkpoint.remarks if remark.code in ("CK123", "CK127", "CK145")]
    for fact in filter(None, facts):
        logger.warning("%s: %s", checkpoint.path, show(fact))
    rules: tuple[renaming.Rule, ...] = ()
    if strip is not None:
        rules = (renaming.strip_wrappers if strip == "wrappers" else renaming.strip_module,)
    try:
        return prepare(checkpoint, state_dict, NameChanges(rules).chosen(weights))
    except MigrationRefused as error:
        logger.info("%s: names are kept as they are: %s", checkpoint.path, show(error.message))
        return prepare(checkpoint, state_dict, NameChanges().chosen(weights))


@contextmanager
def opened(source: Origin, limits: Limits) -> Iterator[Checkpoint]:
    """Open a checkpoint for a block. Add its path to errors and, where it helps, a command that shows more."""
    checkpoint: Checkpoint | None = None
    try:
        with open_checkpoint(source, limits=limits) as checkpoint, about(checkpoint.path):
            yield checkpoint
    except CkptoolError as error:
        if isinstance(source, str | os.PathLike):
            _add_command(error, shown_path(source), is_open=checkpoint is not None)
        raise


def _add_command(error: CkptoolError, path: str, *, is_open: bool) -> None:
    """Add a command line that shows more about the file to an error, and a hint about it, if one helps."""
    if isinstance(error, TruncatedFile):
        aim, command = "see what is left of it", command_line(path, "check")
    elif isinstance(error, MalformedFile) and is_open:
        aim, command = "see which parts are damaged", command_line(path, "check", deep=True)
    elif isinstance(error, WeightsNotFound) and not error.candidates:
        aim, command = "see what it holds", command_line(path, "inspect", all=True)
    else:
        return
    error.hint = f"{error.hint.rstrip('.')}, or {aim}." if error.hint else f"{aim.capitalize()}."
    error.command = command


def torch_state_dict(
    checkpoint: Checkpoint,
    weights: Weights,
    assembly: Assembly,
    progress: Progress | None = None,
    *,
    allow_missing: bool = False,
) -> OrderedDict[str, Any]:
    """
    Return weights as ``state_dict()`` would return them: tensors, other entries in their places, ``_metadata``.

    Raises:
        IncompleteWeights: An entry that only code could make holds tensors, and not ``allow_missing``.
    """
    checkpoint.announce(weights.tensors.values())
    made = assembly.tensors(weights.tensors, progress)
    others = values_with_tensors(weights.others, checkpoint.rebuilder, assembly) if weights.others else {}
    entries: OrderedDict[str, Any] = made if isinstance(made, OrderedDict) else OrderedDict(made)
    if others:  # packed parameters, extra state
        entries = OrderedDict((name, made[name] if name in made else others[name]) for name in weights.names)
    unmade = {name: value for name, value in others.items() if isinstance(value, UnsupportedFeature)}
    key = f"{weights.state_dict.key}." if weights.state_dict.key else ""
    for name, value in unmade.items() if not allow_missing else ():
        head, node = f"{key}{weights.old_names[name]}.", weights.others[name]
        if any(one.startswith(head) for one in checkpoint.tensors) or holds_storage(checkpoint.rebuilder, node):
            error = IncompleteWeights(
                f"entry {name!r} holds tensors in {value.message}, which only code can make",
                hint="To go on without such entries, say `allow_missing=True`.",
            )
            error.missing = tuple(unmade)
            raise error
    for name, value in unmade.items():
        logger.warning("%s: entry %r is left out: it holds %s", checkpoint.path, name, show(value.message))
        del entries[name]
    if weights.modules:
        entries._metadata = OrderedDict(weights.modules)  # type: ignore[attr-defined]
    return entries
