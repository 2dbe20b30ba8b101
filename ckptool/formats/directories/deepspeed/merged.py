"""
What the ranks of an engine saved, as one tree: the weights, what the optimizer keeps of each, the engine's state.

    ""          the weights: float32 masters; from ``module`` what the optimizer has not; ties
    module      the weights as the model computed with them, in stages 1 and 2
    optimizer   state of each parameter, by name
    …           the engine's state, and what the client put beside it

The weights have no name of their own: theirs are those that the model has.

Where each parameter lies in the flat tensors of the ranks: arithmetic alone.

Stages 1 and 2 lay the parameters of a group one behind the other, and cut that anywhere: one lane for each group, of
the ranks' tensors in order. Stage 3 cuts each parameter into equal parts, and each rank lays its own behind each other:
one lane for each rank, of its sub-groups' tensors. A parameter is runs of lanes, in order.

See utils/zero_to_fp32.py of DeepSpeed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from struct import pack, unpack
from typing import Final, NamedTuple

from ckptool.cancellation import check_cancelled, each
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


class Run(NamedTuple):
    """Consecutive elements of a lane."""

    lane: int
    start: int
    numel: int


class Place(NamedTuple):
    """A parameter: its shape, and the runs that its elements are."""

    shape: Shape
    runs: tuple[Run, ...]
    flat: int
    """Number of the flat tensor that its first element is in: the optimizer's state of it has the same."""


class Flat(NamedTuple):
    """A flat tensor of a rank."""

    rank: int
    number: int
    """Which of the rank's."""
    numel: int


class Lane:
    """Flat tensors one behind the other."""

    def __init__(self, flats: Sequence[Flat]) -> None:
        self.flats = flats
        self._ends = list(accumulate(flat.numel for flat in flats))
        self.numel = self._ends[-1] if flats else 0

    def cut(self, start: int, count: int) -> Iterator[tuple[Flat, int, int]]:
        """Yield the parts of flat tensors that a run is: each tensor, where in it, and how many elements."""
        at = bisect_right(self._ends, start)
        while count:
            flat = self.flats[at]
            inside = start - (self._ends[at] - flat.numel)
            taken = min(count, flat.numel - inside)
            if taken:
                yield flat, inside, taken
            start, count, at = start + taken, count - taken, at + 1


class Partitions:
    """The flat tensors of all data-parallel ranks, and where in them each parameter is."""

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
            self.lanes = [Lane(_flats(rank, one)) for rank, one in enumerate(files)]
            self.places = dict(self._of_stage_3(model, groups))
        else:
            by_rank = [_flats(rank, one) for rank, one in enumerate(files)]
            self.lanes = [Lane(column) for column in zip(*by_rank, strict=True)]
            self.places = dict(self._of_stage_2(model, groups))

    @property
    def dtype(self) -> DType | None:
        """The element type of the masters."""
        flats = self._files[0].flats
        return flats[0].dtype if flats else None

    def _of_stage_2(self, model: ModelStates, groups: list[dict[str, Shape]]) -> Iterator[tuple[str, Place]]:
        if len(groups) != len(self.lanes):
            raise _mixed(f"param_shapes has {len(groups):,} groups, the optimizer {len(self.lanes):,}")
        alignments = self._files[0].alignments
        step = 2 * len(self._files)  # DeepSpeed pads the end of a group to this
        for number, (shapes, lane) in enumerate(zip(groups, self.lanes, strict=True)):
            behind = alignments[number] if alignments is not None and number < len(alignments) else [0] * len(shapes)
            if len(behind) != len(shapes):
                raise _mixed(f"group {number} has {len(shapes):,} parameters, and paddings behind {len(behind):,}")
            start = 0
            for (name, shape), padding in zip(shapes.items(), behind, strict=True):
                count = prod(shape)
                yield name, Place(shape, (Run(number, start, count),), number)
                start += count + padding
            used = start - (behind[-1] if behind else 0)
            if used > lane.numel or -(-start // step) != -(-lane.numel // step):
                raise _mixed(
                    f"group {number} needs {start:,} elements by param_shapes of {model.name!r}, "
                    f"the ranks have {lane.numel:,}"
                )

    def _of_stage_3(self, model: ModelStates, groups: list[dict[str, Shape]]) -> Iterator[tuple[str, Place]]:
        ranks, start = len(self.lanes), 0
        lane = self.lanes[0]
        for shapes in groups:
            for name, shape in shapes.items():
                numel = prod(shape)
                part = -(-numel // ranks)
                if start + part > lane.numel:
                    break
                runs = tuple(
                    Run(rank, start, min(part, numel - rank * part)) for rank in range(ranks) if rank * part < numel
                )
                flat = next(lane.cut(start, 1), None) if part else None
                yield name, Place(shape, runs, flat[0].number if flat else 0)
                start += part
        needed = sum(-(-prod(shape) // ranks) for shapes in groups for shape in shapes.values())
        if needed != lane.numel:
            raise _mixed(
                f"each rank needs {needed:,} elements by param_shapes of {model.name!r}, it has {lane.numel:,}"
            )

    def names_of(self, rank: int) -> list[frozenset[str]]:
        """Return the parameters of which a rank has parts, for each group of stages 1 and 2."""
        begins = [sum(flat.numel for flat in lane.flats[:rank]) for lane in self.lanes]
        found: list[list[str]] = [[] for _ in self.lanes]
        for name, place in self.places.items():
            for lane, start, count in place.runs:
                end = begins[lane] + self.lanes[lane].flats[rank].numel
                if count and start < end and start + count > begins[lane]:
                    found[lane].append(name)
        return [frozenset(names) for names in found]

    def master(self, name: str) -> TensorInfo:
        """Return the facts of a whole parameter, as the optimizer has it."""
        flats = [one.flats for one in self._files]
        dtype = self.dtype
        assert dtype is not None  # there is a parameter
        return self._whole(name, self.places[name], flats, dtype)

    def state_of(self, name: str, key: str, flats: Sequence[Sequence[TensorInfo | None]]) -> TensorInfo | None:
        """Return what the optimizer keeps of a parameter, of each element one; None unless all ranks have it."""
        place = self.places[name]
        parts = [
            flats[flat.rank][flat.number] for run in place.runs for flat, _, _ in self.lanes[run.lane].cut(*run[1:])
        ]
        first = parts[0] if parts else None
        if first is None or any(part is None or part.dtype != first.dtype for part in parts):
            return None
        return self._whole(f"{name}: {key}", place, flats, first.dtype)

    def _whole(self, name: str, place: Place, flats: Sequence[Sequence[TensorInfo | None]], dtype: DType) -> TensorInfo:
        pieces = []
        at = 0
        for lane, start, numel in place.runs:
            for flat, inside, taken in self.lanes[lane].cut(start, numel):
                info = flats[flat.rank][flat.number]
                assert info is not None  # the caller saw it
                pieces.append(
                    Piece((at,), (taken,), self._files[flat.rank].name, partial(part_of, info, inside, taken))
                )
                at += taken
        return joined(name, place.shape, dtype, pieces, self._folder.cancellation, is_flat=True)

    def flats_of(self, key: str) -> list[list[TensorInfo | None]]:
        """Return what each rank keeps under a key of each of its flat tensors, where it is one of each element."""
        return [[_like(one, index, key, flat.numel) for index, flat in enumerate(one.flats)] for one in self._files]


def _like(file: OptimStates, index: int, key: str, numel: int) -> TensorInfo | None:
    """Return a flat tensor of state that is as long as the master, or longer by padding."""
    info = file.rebuilder.tensor(file.state.get(index, {}).get(key))
    flat = info is not None and len(info.shape) == 1 and info.storage is not None and info.is_contiguous
    return info if info is not None and flat and info.numel >= numel else None


def _flats(rank: int, file: OptimStates) -> list[Flat]:
    return [Flat(rank, index, info.numel) for index, info in enumerate(each(file.flats, None))]


def part_of(info: TensorInfo, start: int, count: int) -> TensorInfo:
    """Return the facts of some consecutive elements of a tensor whose elements are consecutive."""
    return info._replace(shape=(count,), stride=(1,), storage_offset=info.storage_offset + start)


def _mixed(what: str) -> MalformedFile:
    return MalformedFile(what, kind="mixed-saves", hint=ANOTHER_SAVE)


_ORDERED_DICT = Global("collections", "OrderedDict")
_SCALAR = "step"
NARROW: Final = ("float16", "bfloat16")


class Engine(NamedTuple):
    """What the data-parallel ranks of one model-parallel rank saved; ``partitions`` is None in stage 0."""

    models: Sequence[ModelStates]
    """One; in stage 3, one of each rank that is there."""
    optims: Sequence[OptimStates]
    partitions: Partitions | None

    @property
    def of_stage_3(self) -> bool:
        """Whether the parameters were partitioned, too."""
        return bool(self.optims) and self.optims[0].of_stage_3


class Weights:
    """The whole weights of an engine, name by name, in the order of its ``module``."""

    def __init__(self, folder: FolderSource, engine: Engine) -> None:
        self._folder = folder
        self._engine = engine
        self._model = engine.models[0]
        self._places = engine.partitions.places if engine.partitions is not None else {}
        self.absent: list[str] = []
        """Names without a value in any file, once ``tensors`` looked for them."""

    def tensors(self, module: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Return all by name; ``module`` are those that the model computed with. Tied ones are one and the same."""
        shared = {name: kept for name, kept in self._model.shared.items() if name not in self._places}
        found: dict[str, TensorInfo] = {}
        for name in dict.fromkeys((*module, *self._model.frozen, *self._places)):
            check_cancelled(self._folder.cancellation)
            info = None if name in shared else self._tensor(name, module)
            if info is not None:
                found[name] = info
            elif name not in shared:
                self.absent.append(name)
        for name, kept in shared.items():
            if kept in found:
                found[name] = found[kept]
            else:
                self.absent.append(name)
        order = dict.fromkeys((*module, *found))
        return {name: found[name] for name in order if name in found}

    def _tensor(self, name: str, module: Mapping[str, TensorInfo]) -> TensorInfo | None:
        if name in self._places and self._engine.partitions is not None:
            return self._engine.partitions.master(name)
        if name in self._model.frozen:
            return self._frozen(name, self._model.frozen[name])
        info = module.get(name)
        is_buffer = name in self._model.buffers
        if info is None or (self._engine.of_stage_3 and not info.numel and not is_buffer):
            return None  # what stage 3 leaves of a parameter
        if is_buffer and self._places and info.dtype.name in NARROW and info.storage is not None:
            return widened(info)
        return info

    def _frozen(self, name: str, shape: tuple[int, ...]) -> TensorInfo | None:
        """Return a parameter that is not trained: whole in the first file, or in stage 3 a part in each."""
        numel = prod(shape)
        parts = [one.fragment(name) for one in self._engine.models]
        if any(part is None or part.storage is None or not part.is_contiguous for part in parts):
            return None
        whole = [part for part in parts if part is not None]
        if not self._engine.of_stage_3:
            if whole[0].numel != numel:
                raise _misfit(name, numel, whole[0].numel)
            return whole[0]._replace(shape=shape, stride=row_major(shape))
        each = -(-numel // len(self._engine.optims))
        pieces = []
        for index, info in enumerate(whole):
            count = max(0, min(each, numel - index * each))
            if info.numel < count or info.dtype != whole[0].dtype:
                raise _misfit(name, count, info.numel)
            if count:
                file = self._engine.models[index].name
                pieces.append(Piece((index * each,), (count,), file, partial(part_of, info, 0, count)))
        if sum(piece.numel for piece in pieces) < numel:
            return None
        return joined(name, shape, whole[0].dtype, pieces, self._folder.cancellation, is_flat=True)


def _misfit(name: str, needed: int, actual: int) -> MalformedFile:
    return MalformedFile(
        f"the frozen parameter {name!r} needs {needed:,} elements, there are {actual:,}",
        kind="malformed-states",
        hint="Get the folder again, from one save.",
        needed=needed,
        actual=actual,
    )


def state_dict(builder: TreeBuilder, tensors: Mapping[str, TensorInfo], like: Inert, others: Pairs) -> Inert:
    """Return tensors as a state dict, with the versions of modules that another has, and what else it holds."""
    leaves: dict[int, Inert] = {}
    for info in tensors.values():
        if id(info) not in leaves:
            leaves[id(info)] = builder.tensor(info)
    made = Call(_ORDERED_DICT, ())
    made.pairs = [*((name, leaves[id(info)]) for name, info in tensors.items()), *others]
    made.state = like.state if isinstance(like, Call) else None
    return made


def optimizer(builder: TreeBuilder, engine: Engine, remarks: list[Remark]) -> Inert:
    """Return the state of the optimizer: of each parameter, by its name, and the settings of each group."""
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
            info = partitions.state_of(name, key, flats) if place.runs else None
            if info is not None:
                own.append((key, builder.tensor(info)))
            elif place.runs:
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
    """Return the settings of the groups, with the names of their parameters."""
    said, shapes = engine.optims[0].param_groups, engine.models[0].groups or []
    if not isinstance(said, list) or len(said) != len(shapes):
        return said if isinstance(said, list) else []
    found = []
    for group, names in zip(said, shapes, strict=True):
        pairs = nodes.mapping_pairs(group) or []
        found.append(Dict([(key, list(names) if key == "params" else value) for key, value in pairs]))
    return found


def widened(info: TensorInfo) -> TensorInfo:
    """Return the facts of a tensor of float16 or bfloat16 as one of float32, packed; its bytes are made when read."""
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
