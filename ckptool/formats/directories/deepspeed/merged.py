"""
What the ranks of an engine saved, as one tree: the weights, the optimizer's state of each, the engine's state.

    ""          the weights: float32 masters; from ``module`` what the optimizer lacks; ties
    module      the weights as the model computed with them, in stages 1 and 2
    optimizer   state of each parameter, by name
    …           the engine's state, and what the client put beside it

The weights have no key of their own: their names are those of the model.

Finding each parameter in the flat tensors of the ranks takes arithmetic alone.

Stages 1 and 2 store the parameters of a group one after another, and cut that anywhere: one lane for each group, of the
ranks' tensors in order. Stage 3 cuts each parameter into equal parts, and each rank stores its own one after another:
one lane for each rank, of its sub-groups' tensors. A parameter is spans of flat tensors, in order.

See utils/zero_to_fp32.py of DeepSpeed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from struct import pack, unpack
from typing import Final, NamedTuple

from ckptool.cancellation import check_cancelled
from ckptool.checkpoints.parsed import Remark
from ckptool.errors import MalformedFile
from ckptool.formats.directories.deepspeed.states import ModelStates, OptimStates
from ckptool.formats.directories.side_by_side import ANOTHER_SAVE, TreeBuilder, agree
from ckptool.messages import some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Global, Inert, PairList, Pairs
from ckptool.sources.folder import FolderSource
from ckptool.sources.source import Source
from ckptool.tensors import dtypes
from ckptool.tensors.dtypes import DType
from ckptool.tensors.pieces import Piece, joined, packed
from ckptool.tensors.tensor import StorageRef, TensorInfo, row_major

Shape = tuple[int, ...]


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
        at = bisect_right(self._ends, start)
        while count:
            rank, number, numel = self._flats[at]
            inside = start - (self._ends[at] - numel)
            taken = min(count, numel - inside)
            if taken:
                yield Span(rank, number, inside, taken)
            start, count, at = start + taken, count - taken, at + 1


class Partitions:
    """The flat tensors of all data-parallel ranks, and the place of each parameter in them."""

    def __init__(self, folder: FolderSource, model: ModelStates, files: Sequence[OptimStates]) -> None:
        self._folder = folder
        self._files = files
        agree("numbers of flat tensors", [(one.name, len(one.flats)) for one in files])
        agree("element types", [(one.name, flat.dtype.name) for one in files for flat in one.flats])
        groups = model.groups or []
        names = [name for group in groups for name in group]
        if len(set(names)) < len(names):
            raise _mixed(f"param_shapes of {model.name!r} has a parameter in two groups")
        if files[0].of_stage_3:
            agree("sizes of flat tensors", [(one.name, [flat.numel for flat in one.flats]) for one in files])
        self.places = dict((self._of_stage_3 if files[0].of_stage_3 else self._of_stage_2)(model, groups))

    def _of_stage_2(self, model: ModelStates, groups: list[dict[str, Shape]]) -> Iterator[tuple[str, Place]]:
        first = self._files[0]
        if len(groups) != len(first.flats):
            raise _mixed(f"param_shapes has {len(groups):,} groups, the optimizer {len(first.flats):,}")
        step = 2 * len(self._files)  # DeepSpeed pads the end of a group to this
        for number, shapes in enumerate(groups):
            lane = _Lane((rank, number, one.flats[number].numel) for rank, one in enumerate(self._files))
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
        flats = [one.flats for one in self._files]
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
        found: list[set[str]] = [set() for _ in self._files[0].flats]
        for name, place in self.places.items():
            for span in place.spans:
                if span.rank == rank:
                    found[span.number].add(name)
        return [frozenset(names) for names in found]

    def master(self, name: str) -> TensorInfo:
        """Return a whole parameter, as the optimizer has it."""
        flats = [one.flats for one in self._files]
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
            pieces.append(Piece((at,), (numel,), self._files[rank].name, partial(part_of, info, start, numel)))
            at += numel
        return joined(name, place.shape, dtype, pieces, self._folder.cancellation, is_flat=True)

    def flats_of(self, key: str) -> list[list[TensorInfo | None]]:
        """Return each rank's state under a key for each of its flat tensors; None if it is not one element for each."""
        return [[_like(one, index, key, flat.numel) for index, flat in enumerate(one.flats)] for one in self._files]


def _like(file: OptimStates, index: int, key: str, numel: int) -> TensorInfo | None:
    """Return a flat tensor of state that is as long as the master, or longer by padding."""
    info = file.rebuilder.tensor(file.state.get(index, {}).get(key))
    flat = info is not None and len(info.shape) == 1 and info.storage is not None and info.is_contiguous
    return info if info is not None and flat and info.numel >= numel else None


def part_of(info: TensorInfo, start: int, count: int) -> TensorInfo:
    """Return consecutive elements of a tensor whose elements are consecutive."""
    return info._replace(shape=(count,), stride=(1,), storage_offset=info.storage_offset + start)


def _mixed(what: str) -> MalformedFile:
    return MalformedFile(what, kind="mixed-saves", hint=ANOTHER_SAVE)


_ORDERED_DICT = Global("collections", "OrderedDict")
_SCALAR = "step"
NARROW: Final = ("float16", "bfloat16")


class Engine(NamedTuple):
    """What the data-parallel ranks of one model-parallel rank saved; ``partitions`` is None in stage 0."""

    models: Sequence[ModelStates]
    """One; in stage 3, one of each rank that exists."""
    optims: Sequence[OptimStates]
    partitions: Partitions | None

    @property
    def of_stage_3(self) -> bool:
        """Whether the parameters were partitioned, too."""
        return bool(self.optims) and self.optims[0].of_stage_3

    @property
    def places(self) -> Mapping[str, Place]:
        """The place of each parameter that the optimizer has."""
        return self.partitions.places if self.partitions is not None else {}


def weights(folder: FolderSource, engine: Engine) -> tuple[dict[str, TensorInfo], list[str]]:
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
        check_cancelled(folder.cancellation)
        info = None if name in shared else _weight(folder, engine, name, module.get(name))
        if info is not None:
            found[name] = info
    found |= {name: found[kept] for name, kept in shared.items() if kept in found}
    absent = [name for name in (*(one for one in named if one not in shared), *shared) if name not in found]
    return {name: found[name] for name in dict.fromkeys((*module, *found)) if name in found}, absent


def _weight(folder: FolderSource, engine: Engine, name: str, info: TensorInfo | None) -> TensorInfo | None:
    """Return one weight, which may be the one of ``module``; None if it has no value."""
    model = engine.models[0]
    if engine.partitions is not None and name in engine.places:
        return engine.partitions.master(name)
    if name in model.frozen:
        return _frozen(folder, engine, name, model.frozen[name])
    is_buffer = name in model.buffers
    if info is None or (engine.of_stage_3 and not info.numel and not is_buffer):
        return None  # what stage 3 leaves of a parameter
    if is_buffer and engine.places and info.dtype.name in NARROW and info.storage is not None:
        return widened(info)
    return info


def _frozen(folder: FolderSource, engine: Engine, name: str, shape: Shape) -> TensorInfo | None:
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
    return joined(name, shape, whole[0].dtype, pieces, folder.cancellation, is_flat=True)


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


def optimizer(builder: TreeBuilder, engine: Engine, remarks: list[Remark]) -> Inert:
    """Return the state of the optimizer: for each parameter, by its name, and the settings of each group."""
    partitions, first = engine.partitions, engine.optims[0]
    assert partitions is not None  # the caller saw it
    keys = list(dict.fromkeys(key for one in engine.optims for values in one.state.values() for key in values))
    flat = {key: partitions.flats_of(key) for key in keys if key != _SCALAR}
    steps = {index: values.get(_SCALAR) for index, values in first.state.items()}
    state: PairList = []
    missing: dict[str, None] = {}
    for name, place in partitions.places.items():
        own: PairList = []
        for key, flats in flat.items():
            info = partitions.state_of(name, key, flats)
            if info is not None:
                own.append((key, builder.tensor(info)))
            elif place.spans:
                missing[key] = None
        if steps.get(place.flat) is not None:
            own.append((_SCALAR, builder.transplant(steps[place.flat], first.rebuilder)))
        if own:
            state.append((name, Dict(own)))
    if missing:
        what = f"not of every rank, or not of each element one: {some(list(missing))} of the optimizer"
        remarks.append(Remark("CK153", what))
    pairs: PairList = [("state", Dict(state)), ("param_groups", _groups(engine))]
    pairs += [(key, builder.transplant(value, first.rebuilder)) for key, value in first.others()]
    return Dict(pairs)


def _groups(engine: Engine) -> Inert:
    said, shapes = engine.optims[0].param_groups, engine.models[0].groups or []
    if not isinstance(said, list) or len(said) != len(shapes):
        return said if isinstance(said, list) else []
    found = []
    for group, names in zip(said, shapes, strict=True):
        pairs = nodes.mapping_pairs(group) or []
        found.append(Dict([(key, list(names) if key == "params" else value) for key, value in pairs]))
    return found


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
