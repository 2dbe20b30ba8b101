"""
What the files of DeepSpeed's ranks hold, as one tree.

See runtime/engine.py, ``_save_checkpoint``, the ``state_dict`` of each optimizer in runtime/zero/, and
utils/zero_to_fp32.py of DeepSpeed. The tree:

    ""          the weights: float32 masters; from ``module`` what the optimizer lacks; ties
    module      the weights as the model computed with them, in stages 1 and 2
    optimizer   state of each parameter, by name
    …           the engine's state, and what the client put beside it

The weights have no key of their own: their names are those of the model.

Finding each parameter in the flat tensors of the ranks takes arithmetic alone.

Stages 1 and 2 store the parameters of a group one after another, and cut that anywhere: one lane for each group, of the
ranks' tensors in order. Stage 3 cuts each parameter into equal parts, and each rank stores its own one after another:
one lane for each rank, of its sub-groups' tensors. A parameter is spans of flat tensors, in order.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from struct import pack, unpack
from typing import Final, NamedTuple, TypeAlias

from ckptool.cancellation import Cancellation, check_cancelled
from ckptool.checkpoints.parsed import Parsed, Remark
from ckptool.errors import MalformedFile
from ckptool.formats.directories.side_by_side import ANOTHER_SAVE, FolderTree, TreeBuilder, agree
from ckptool.messages import some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Global, Inert, PairList, Pairs
from ckptool.sources.source import Source
from ckptool.tensors import dtypes
from ckptool.tensors.dtypes import DType
from ckptool.tensors.pieces import Piece, joined, packed
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.rebuild import as_sizes
from ckptool.tensors.tensor import StorageRef, TensorInfo, is_size, row_major

Shape: TypeAlias = tuple[int, ...]

MODEL_FILE: Final = re.compile(r"(?:[a-z0-9]{1,8}_)?(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
OPTIM_FILE: Final = re.compile(r"(?:[a-z0-9]{1,8}_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
LAYER_FILE: Final = re.compile(r"layer_(\d{1,6})-(?:model_(\d{1,6})-)?model_states\.pt")
EXPERT_FILE: Final = re.compile(r"(?:layer_(\d{1,6})_)?expert_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt")

STRUCTURE: Final = frozenset(
    (
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
    )
)
"""Keys of model states that are about tensors; the rest is the engine's state, and the client's."""
OF_PARTITION: Final = frozenset(
    (
        "single_partition_of_fp32_groups",
        "fp32_flat_groups",
        "base_optimizer_state",
        "optimizer_state_dict",
        "group_paddings",
        "param_alignment_paddings",
        "param_slice_mappings",
        "partition_count",
        "zero_stage",
        "ds_version",
        "ds_config",
    )
)
"""Keys of the optimizer's states that are about partitions; the rest is not partitioned."""
_MOST_SETTINGS: Final = 200


class _File:
    """A file of a rank, and the pairs of its outermost mapping."""

    def __init__(self, name: str, parsed: Parsed) -> None:
        self.name = name
        self.parsed = parsed
        self.pairs: Pairs = nodes.mapping_pairs(parsed.root) or []
        if parsed.rebuilder is None or not self.pairs:
            raise self.malformed(f"it holds {nodes.class_name(parsed.root)} and no states of an engine")
        self.rebuilder = parsed.rebuilder
        version = self.field("ds_version")
        self.version = version if isinstance(version, str) and len(version) < 64 else None
        """The release of DeepSpeed that wrote it."""

    def field(self, key: str) -> Inert:
        """Return what is under a key; None if nothing is."""
        return nodes.lookup(self.pairs, key)

    def number(self, key: str) -> int | None:
        """Return the number under a key."""
        return _size_or_enum(self.field(key))

    @cached_property
    def settings(self) -> dict[str, str | float]:
        """The settings of the engine, which it writes into every file: numbers and words, two levels deep."""
        found: dict[str, str | float] = {}
        for key, value in (nodes.mapping_pairs(self.field("ds_config")) or [])[:_MOST_SETTINGS]:
            for own, leaf in (nodes.mapping_pairs(value) or [("", value)])[:_MOST_SETTINGS]:
                if isinstance(key, str) and isinstance(own, str) and isinstance(leaf, str | int | float):
                    found[f"{key}.{own}".rstrip(".")] = leaf
        return found

    def malformed(self, what: str) -> MalformedFile:
        """Return the error for a file that contradicts itself."""
        return MalformedFile(f"{self.name!r}: {what}", kind="malformed-states", hint="Get the file again.")

    def shapes(self, node: Inert, what: str) -> dict[str, Shape]:
        """Return the shapes in a mapping, by name."""
        found: dict[str, Shape] = {}
        for name, size in nodes.mapping_pairs(node) or []:
            if type(name) is not str or name in found:
                raise self.malformed(f"{what} has a name twice, or one that is not text")
            try:
                found[name] = as_sizes(size)
            except MalformedFile as error:
                raise self.malformed(f"{what} has no shape for {name!r}") from error
        return found


class ModelStates(_File):
    """``*_model_states.pt``."""

    def __init__(self, name: str, parsed: Parsed) -> None:
        super().__init__(name, parsed)
        shared = nodes.mapping_pairs(self.field("shared_params")) or []
        self.shared = {name: kept for name, kept in shared if type(name) is str and type(kept) is str}
        """Names whose parameter is stored under another name, with that name."""
        buffers = self.field("buffer_names")
        self.buffers = {one for one in buffers if type(one) is str} if isinstance(buffers, list) else set[str]()
        """The names of the buffers in ``module``."""

    @cached_property
    def module(self) -> dict[str, TensorInfo] | None:
        """The tensors of ``module`` by name; None where it has none, as for pipelines."""
        if self.field("module") is None:
            return None
        tensors = self.parsed.contents.tensors
        return {name[len("module.") :]: info for name, info in tensors.items() if name.startswith("module.")}

    @cached_property
    def groups(self) -> list[dict[str, Shape]] | None:
        """The shapes of the parameters that are trained, for each group of the optimizer; None for stage 0."""
        said = self.field("param_shapes")
        if said is None:
            return None
        return [self.shapes(group, "param_shapes") for group in (said if isinstance(said, list) else [said])]

    @cached_property
    def frozen(self) -> dict[str, Shape]:
        """The shapes of the parameters that are not trained, where they are kept apart."""
        return self.shapes(self.field("frozen_param_shapes"), "frozen_param_shapes")

    @cached_property
    def fragments(self) -> dict[str, TensorInfo]:
        """This rank's parts of the parameters that are not trained."""
        pairs = nodes.mapping_pairs(self.field("frozen_param_fragments")) or []
        found = ((name, self.rebuilder.tensor(node)) for name, node in pairs if type(name) is str)
        return {name: info for name, info in found if info is not None}


class OptimStates(_File):
    """``*_optim_states.pt``: what one data-parallel rank keeps of the optimizer."""

    def __init__(self, name: str, parsed: Parsed) -> None:
        super().__init__(name, parsed)
        inner = nodes.mapping_pairs(self.field("optimizer_state_dict"))
        if inner is None:
            raise self.malformed("no optimizer_state_dict")
        self.inner = inner
        self.of_stage_3 = nodes.lookup(inner, "fp32_flat_groups") is not None
        said = _size_or_enum(nodes.lookup(inner, "zero_stage"))
        self.stage = said if said is not None else 3 if self.of_stage_3 else 2
        """The stage of ZeRO, which decides what was partitioned."""
        counts = nodes.lookup(inner, "partition_count")
        listed = map(_size_or_enum, counts if isinstance(counts, list) else [counts])
        self.counts = tuple(one for one in listed if one is not None)
        """Into how many parts each group was partitioned; empty if the file does not record it."""

    @cached_property
    def flats(self) -> list[TensorInfo]:
        """The flat tensors of float32 masters: one for each group, or for each sub-group of stage 3."""
        key = "fp32_flat_groups" if self.of_stage_3 else "single_partition_of_fp32_groups"
        said = nodes.lookup(self.inner, key)
        if not isinstance(said, list):
            raise self.malformed(f"no {key}")
        found = []
        for index, node in enumerate(said):
            info = self.rebuilder.tensor(node)
            if info is None or len(info.shape) != 1 or not is_plain(info):
                raise self.malformed(f"{key}.{index} is not a flat tensor")
            found.append(info)
        return found

    @cached_property
    def alignments(self) -> list[list[int]] | None:
        """How many elements of padding follow each parameter, by group; None where none does."""
        said = nodes.lookup(self.inner, "param_alignment_paddings")
        if said is None:
            return None
        if not isinstance(said, list) or not all(isinstance(one, list) and all(map(is_size, one)) for one in said):
            raise self.malformed("param_alignment_paddings are not sizes")
        return said

    @cached_property
    def slices(self) -> list[frozenset[str]] | None:
        """The parameters of which the file says that it has parts, by group; None if it does not say."""
        said = nodes.lookup(self.inner, "param_slice_mappings")
        if not isinstance(said, list) or len(said) != len(self.flats):
            return None
        return [frozenset(name for name, _ in nodes.mapping_pairs(one) or [] if type(name) is str) for one in said]

    @cached_property
    def base(self) -> Pairs:
        """What torch's optimizer saved: the state of each flat tensor, and the settings by group."""
        key = "optimizer_state_dict" if self.of_stage_3 else "base_optimizer_state"
        return nodes.mapping_pairs(nodes.lookup(self.inner, key)) or []

    @cached_property
    def state(self) -> dict[int, dict[str, Inert]]:
        """What the optimizer keeps of each flat tensor, by its number."""
        found: dict[int, dict[str, Inert]] = {}
        for index, values in nodes.mapping_pairs(nodes.lookup(self.base, "state")) or []:
            if type(index) is int and 0 <= index < len(self.flats):
                pairs = nodes.mapping_pairs(values) or []
                found[index] = {key: value for key, value in pairs if type(key) is str}
        return found

    def flats_of(self, key: str) -> list[TensorInfo | None]:
        """Return the state under a key for each flat tensor: as long, or longer by padding; None for any other."""
        infos = [self.rebuilder.tensor(self.state.get(index, {}).get(key)) for index in range(len(self.flats))]
        return [
            info if info is not None and len(info.shape) == 1 and is_plain(info) and info.numel >= flat.numel else None
            for info, flat in zip(infos, self.flats, strict=True)
        ]

    def steps(self) -> dict[int, float]:
        """Return how often each flat tensor was stepped, if the file records it. Reads a number for each."""
        found = {}
        for index, values in self.state.items():
            step = values.get("step")
            info = self.rebuilder.tensor(step)
            if info is not None and info.dtype.name in ("float32", "int64") and info.numel == 1 and is_plain(info):
                data = memoryview(LazyTensor("step", info).read())
                step = data.cast("f" if info.dtype.name == "float32" else "q")[0]
            if isinstance(step, int | float):
                found[index] = step
        return found


def is_plain(info: TensorInfo) -> bool:
    """Return whether the elements of a tensor are in the file unchanged and consecutive."""
    return info.storage is not None and info.layout == "strided" and info.is_contiguous


def _size_or_enum(node: Inert) -> int | None:
    """Return a number, or the number that a member of an enum is made from."""
    if isinstance(node, Call) and isinstance(node.args, tuple) and len(node.args) == 1:
        node = node.args[0]
    return node if is_size(node) else None


def steps_agree(files: Sequence[OptimStates]) -> None:
    """Raise MalformedFile if the ranks' parts of the optimizer were stepped a different number of times."""
    steps = [(one.name, one.steps()) for one in files]
    for index in steps[0][1]:
        agree("steps of the optimizer", [(name, found.get(index)) for name, found in steps])


class Span(NamedTuple):
    """Consecutive elements of a flat tensor of a rank."""

    rank: int
    number: int
    """The number of the flat tensor among those of the rank."""
    start: int
    numel: int


class Place(NamedTuple):
    """Where the elements of a parameter are, in order."""

    shape: Shape
    spans: tuple[Span, ...]
    flat: int
    """Number of the flat tensor with its first element: the optimizer's state of it has the same number."""


class _Lane:
    """Consecutive flat tensors, each with its rank, its number there, and how many elements it has."""

    def __init__(self, flats: Iterable[tuple[int, int, int]]) -> None:
        self._flats = list(flats)
        self._ends = list(accumulate(numel for _, _, numel in self._flats))
        self.numel = self._ends[-1] if self._ends else 0

    def cut(self, start: int, count: int) -> Iterator[Span]:
        """Yield the spans of flat tensors that make up consecutive elements."""
        at = bisect_right(self._ends, start)  # a lane may have very many flat tensors, and be cut very often
        while count:
            rank, number, numel = self._flats[at]
            inside = start - (self._ends[at] - numel)
            taken = min(count, numel - inside)
            if taken:
                yield Span(rank, number, inside, taken)
            start, count, at = start + taken, count - taken, at + 1


class Engine:
    """
    What the data-parallel ranks of one model-parallel rank saved, and where in it each parameter is.

    ``models`` is one file; in stage 3, one of each rank that exists. In stage 0 there are no ``optims``, and no places.
    """

    def __init__(
        self, cancellation: Cancellation | None, models: Sequence[ModelStates], optims: Sequence[OptimStates]
    ) -> None:
        self.cancellation = cancellation
        self.models = models
        self.optims = optims
        self.of_stage_3 = bool(optims) and optims[0].of_stage_3
        """Whether the parameters were partitioned, too."""
        self.places: Mapping[str, Place] = dict(self._places(models[0])) if optims else {}

    def _places(self, model: ModelStates) -> Iterator[tuple[str, Place]]:
        files = self.optims
        agree("numbers of flat tensors", [(one.name, len(one.flats)) for one in files])
        agree("element types", [(one.name, flat.dtype.name) for one in files for flat in one.flats])
        groups = model.groups or []
        names = [name for group in groups for name in group]
        if len(set(names)) < len(names):
            raise _mixed(f"param_shapes of {model.name!r} has a parameter in two groups")
        if self.of_stage_3:
            agree("sizes of flat tensors", [(one.name, [flat.numel for flat in one.flats]) for one in files])
        return (self._of_stage_3 if self.of_stage_3 else self._of_stage_2)(model, groups)

    def _of_stage_2(self, model: ModelStates, groups: list[dict[str, Shape]]) -> Iterator[tuple[str, Place]]:
        first = self.optims[0]
        if len(groups) != len(first.flats):
            raise _mixed(f"param_shapes has {len(groups):,} groups, the optimizer {len(first.flats):,}")
        step = 2 * len(self.optims)  # DeepSpeed pads the end of a group to this
        for number, shapes in enumerate(groups):
            lane = _Lane((rank, number, one.flats[number].numel) for rank, one in enumerate(self.optims))
            known = first.alignments is not None and number < len(first.alignments)
            behind = first.alignments[number] if first.alignments is not None and known else [0] * len(shapes)
            if len(behind) != len(shapes):
                raise _mixed(f"group {number} has {len(shapes):,} parameters, and paddings behind {len(behind):,}")
            start = 0
            places: list[tuple[str, Shape, int]] = []
            for (name, shape), padding in zip(shapes.items(), behind, strict=True):
                places.append((name, shape, start))
                start += prod(shape) + padding
            used = start - (behind[-1] if behind else 0)
            if used > lane.numel or -(-start // step) != -(-lane.numel // step):
                raise _mixed(
                    f"group {number} needs {start:,} elements by param_shapes of {model.name!r}, "
                    f"the ranks have {lane.numel:,}"
                )
            for name, shape, at in places:
                yield name, Place(shape, tuple(lane.cut(at, prod(shape))), number)

    def _of_stage_3(self, model: ModelStates, groups: list[dict[str, Shape]]) -> Iterator[tuple[str, Place]]:
        flats = [one.flats for one in self.optims]
        lanes = [_Lane((rank, at, flat.numel) for at, flat in enumerate(own)) for rank, own in enumerate(flats)]
        shapes = {name: shape for group in groups for name, shape in group.items()}
        parts = {name: -(-prod(shape) // len(lanes)) for name, shape in shapes.items()}
        if shapes and not flats[0]:
            raise _mixed(f"param_shapes of {model.name!r} has {len(shapes):,} parameters, the optimizer no flat tensor")
        needed = sum(parts.values())
        if needed != lanes[0].numel:
            raise _mixed(
                f"each rank needs {needed:,} elements by param_shapes of {model.name!r}, it has {lanes[0].numel:,}"
            )
        start = 0
        for name, shape in shapes.items():
            numel, part = prod(shape), parts[name]
            counts = [max(0, min(part, numel - rank * part)) for rank in range(len(lanes))]
            spans = tuple(span for lane, count in zip(lanes, counts, strict=True) for span in lane.cut(start, count))
            yield name, Place(shape, spans, spans[0].number if spans else 0)
            start += part

    def names_of(self, rank: int) -> list[frozenset[str]]:
        """Return the parameters of which a rank has parts, for each group of stages 1 and 2."""
        found: list[set[str]] = [set() for _ in self.optims[0].flats]
        for name, place in self.places.items():
            for span in place.spans:
                if span.rank == rank:
                    found[span.number].add(name)
        return [frozenset(names) for names in found]

    def master(self, name: str) -> TensorInfo:
        """Return a whole parameter, as the optimizer has it."""
        flats = [one.flats for one in self.optims]
        return self._whole(name, self.places[name], flats, flats[0][0].dtype)

    def state_of(self, name: str, key: str, flats: Sequence[Sequence[TensorInfo | None]]) -> TensorInfo | None:
        """Return the optimizer's state of a parameter, one element for each; None unless all ranks have it."""
        place = self.places[name]
        parts = [flats[span.rank][span.number] for span in place.spans]
        first = parts[0] if parts else None
        if first is None or any(part is None or part.dtype != first.dtype for part in parts):
            return None
        return self._whole(f"{name}: {key}", place, flats, first.dtype)

    def _whole(self, name: str, place: Place, flats: Sequence[Sequence[TensorInfo | None]], dtype: DType) -> TensorInfo:
        pieces = []
        at = 0
        for rank, number, start, numel in place.spans:
            info = flats[rank][number]
            assert info is not None  # the caller saw it
            pieces.append(Piece((at,), (numel,), self.optims[rank].name, partial(part_of, info, start, numel)))
            at += numel
        return joined(name, place.shape, dtype, pieces, self.cancellation, is_flat=True)


def part_of(info: TensorInfo, start: int, count: int) -> TensorInfo:
    """Return consecutive elements of a tensor whose elements are consecutive."""
    return info._replace(shape=(count,), stride=(1,), storage_offset=info.storage_offset + start)


def _mixed(what: str) -> MalformedFile:
    return MalformedFile(what, kind="mixed-saves", hint=ANOTHER_SAVE)


_ORDERED_DICT = Global("collections", "OrderedDict")
NARROW: Final = ("float16", "bfloat16")


def weights(engine: Engine) -> tuple[dict[str, TensorInfo], list[str]]:
    """
    Return the whole weights of an engine by name, and the names without a value in any file.

    The weights are in the order of ``module``, and tied ones are the same object.
    """
    model, places = engine.models[0], engine.places
    module = model.module or {}
    shared = {name: kept for name, kept in model.shared.items() if name not in places}
    found: dict[str, TensorInfo] = {}
    named = dict.fromkeys((*module, *model.frozen, *places))
    for name in named:
        check_cancelled(engine.cancellation)
        info = None if name in shared else _weight(engine, name, module.get(name))
        if info is not None:
            found[name] = info
    found |= {name: found[kept] for name, kept in shared.items() if kept in found}
    absent = [name for name in (*(one for one in named if one not in shared), *shared) if name not in found]
    return {name: found[name] for name in dict.fromkeys((*module, *found)) if name in found}, absent


def _weight(engine: Engine, name: str, info: TensorInfo | None) -> TensorInfo | None:
    """Return one weight, which may be the one of ``module``; None if it has no value."""
    model = engine.models[0]
    if name in engine.places:
        return engine.master(name)
    if name in model.frozen:
        return _frozen(engine, name, model.frozen[name])
    is_buffer = name in model.buffers
    if info is None or (engine.of_stage_3 and not info.numel and not is_buffer):
        return None  # what stage 3 leaves of a parameter
    if is_buffer and engine.places and info.dtype.name in NARROW and info.storage is not None:
        return widened(info)
    return info


def _frozen(engine: Engine, name: str, shape: Shape) -> TensorInfo | None:
    """Return a parameter that is not trained: whole in the first file, or in stage 3 a part in each."""
    numel = prod(shape)
    parts = [one.fragments.get(name) for one in engine.models]
    whole = [part for part in parts if part is not None and part.storage is not None and part.is_contiguous]
    if len(whole) < len(parts):
        return None
    if not engine.of_stage_3:
        if whole[0].numel != numel:
            raise _misfit(name, numel, whole[0].numel)
        return whole[0]._replace(shape=shape, stride=row_major(shape))
    each = -(-numel // len(engine.optims))
    pieces = []
    for index, info in enumerate(whole):
        count = max(0, min(each, numel - index * each))
        if info.numel < count or info.dtype != whole[0].dtype:
            raise _misfit(name, count, info.numel)
        if count:
            file = engine.models[index].name
            pieces.append(Piece((index * each,), (count,), file, partial(part_of, info, 0, count)))
    if sum(piece.numel for piece in pieces) < numel:
        return None
    return joined(name, shape, whole[0].dtype, pieces, engine.cancellation, is_flat=True)


def _misfit(name: str, needed: int, actual: int) -> MalformedFile:
    return MalformedFile(
        f"the frozen parameter {name!r} needs {needed:,} elements, there are {actual:,}",
        kind="malformed-states",
        hint="Get the folder again, from one save.",
        needed=needed,
        actual=actual,
    )


def state_dict(builder: TreeBuilder, tensors: Mapping[str, TensorInfo], like: Inert, others: Pairs) -> Inert:
    """Return tensors as a state dict, with the versions of modules in ``like``, and other entries."""
    leaves: dict[int, Inert] = {}
    for info in tensors.values():
        if id(info) not in leaves:
            leaves[id(info)] = builder.tensor(info)
    made = ordered_dict([*((name, leaves[id(info)]) for name, info in tensors.items()), *others])
    made.state = like.state if isinstance(like, Call) else None
    return made


def ordered_dict(pairs: PairList) -> Call:
    """Return an ``OrderedDict`` of these pairs."""
    made = Call(_ORDERED_DICT, ())
    made.pairs = pairs
    return made


def optimizer(tree: FolderTree, engine: Engine) -> tuple[PairList, list[Inert]]:
    """Return the state of each parameter, by its name, and the settings of each group of parameters."""
    first = engine.optims[0]
    keys = list(dict.fromkeys(key for one in engine.optims for values in one.state.values() for key in values))
    flats = {key: [one.flats_of(key) for one in engine.optims] for key in keys if key != "step"}
    state: PairList = []
    missing: dict[str, None] = {}
    for name, place in engine.places.items():
        own: PairList = []
        for key, of_ranks in flats.items():
            info = engine.state_of(name, key, of_ranks)
            if info is not None:
                own.append((key, tree.tensor(info)))
            elif place.spans:
                missing[key] = None
        step = first.state.get(place.flat, {}).get("step")
        if step is not None:
            own.append(("step", tree.transplant(step, first.rebuilder)))
        if own:
            state.append((name, Dict(own)))
    if missing:
        what = f"not of every rank, or not of each element one: {some(list(missing))} of the optimizer"
        tree.remarks.append(Remark("CK153", what))
    said, shapes = nodes.lookup(first.base, "param_groups"), engine.models[0].groups or []
    groups = said if isinstance(said, list) else []
    if len(groups) == len(shapes):
        pairs = [nodes.mapping_pairs(group) or [] for group in groups]
        groups = [
            Dict([(key, list(names) if key == "params" else value) for key, value in own])
            for own, names in zip(pairs, shapes, strict=True)
        ]
    return state, groups


def widened(info: TensorInfo) -> TensorInfo:
    """Return a tensor of float16 or bfloat16 as one of float32, packed; its bytes are made when read."""
    source = _WideningSource(info)
    storage = StorageRef("widened", info.location, source.nbytes, source, 0)
    return TensorInfo(dtypes.BY_NAME["float32"], info.shape, row_major(info.shape), 0, storage, info.location)


class _WideningSource(Source):
    def __init__(self, info: TensorInfo) -> None:
        assert info.storage is not None and info.dtype.name in NARROW  # noqa: PT018 - the caller saw it
        self._dtype = info.dtype.name
        self._narrow = packed(info)
        self.cancellation = self._narrow.cancellation
        self.nbytes = 4 * info.numel

    def read(self, offset: int, nbytes: int) -> bytes:
        first, last = offset // 4, -(-(offset + nbytes) // 4)
        narrow = self._narrow.read(2 * first, 2 * (last - first))
        if self._dtype == "bfloat16":  # the upper half of a float32
            wide = bytearray(2 * len(narrow))
            wide[2::4], wide[3::4] = narrow[0::2], narrow[1::2]
        else:
            count = last - first
            wide = bytearray(pack(f"<{count}f", *unpack(f"<{count}e", narrow)))
        start = offset - 4 * first
        return bytes(wide[start : start + nbytes])
