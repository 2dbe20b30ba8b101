"""
What the ranks of an engine saved, as one tree: the weights, what the optimizer keeps of each, the engine's state.

    ""          the weights: float32 masters; from ``module`` what the optimizer has not; ties
    module      the weights as the model computed with them, in stages 1 and 2
    optimizer   state of each parameter, by name
    …           the engine's state, and what the client put beside it

The weights have no name of their own: theirs are those that the model has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from struct import pack, unpack
from typing import Final, NamedTuple

from ckptool.cancellation import check_cancelled
from ckptool.checkpoints.companions import Remark
from ckptool.errors import MalformedFile
from ckptool.formats.directories.deepspeed.partitions import Partitions, part_of
from ckptool.formats.directories.deepspeed.states import ModelStates, OptimStates
from ckptool.formats.directories.tree import TreeBuilder
from ckptool.messages import some
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Dict, Global, Inert, PairList, Pairs
from ckptool.sources.folder import FolderSource
from ckptool.tensors import dtypes
from ckptool.tensors.pieces import Piece, PiecesSource, in_pieces
from ckptool.tensors.tensor import StorageRef, TensorInfo, row_major

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
        source = PiecesSource((numel,), whole[0].dtype, pieces, self._folder.cancellation, name=name)
        return in_pieces(name, shape, whole[0].dtype, source, "cpu")


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


def beside(pairs: Iterator[tuple[str, Inert]], taken: Sequence[str]) -> Pairs:
    """Return entries of a file, to stand beside others: a name that one of those has gets a mark."""
    used = set(taken)
    found: PairList = []
    for key, value in pairs:
        name = key
        while name in used:
            name += "_"
        used.add(name)
        found.append((name, value))
    return found


def widened(info: TensorInfo) -> TensorInfo:
    """Return the facts of a tensor of float16 or bfloat16 as one of float32, packed; its bytes are made when read."""
    source = _WideningSource(info)
    storage = StorageRef("widened", info.location, source.nbytes, source, 0)
    return TensorInfo(dtypes.BY_NAME["float32"], info.shape, row_major(info.shape), 0, storage, info.location)


class _WideningSource:
    is_compressed = False

    def __init__(self, info: TensorInfo) -> None:
        assert info.storage is not None and info.dtype.name in NARROW  # noqa: PT018 - the caller saw it
        whole = Piece((0,) * len(info.shape), info.shape, "", lambda: info)
        self._dtype = info.dtype.name
        self._narrow = PiecesSource(info.shape, info.dtype, [whole], info.storage.source.cancellation)
        self.cancellation = info.storage.source.cancellation
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

    def file_offset(self, offset: int) -> None:  # noqa: ARG002 - a source
        """No file has these bytes."""
        return

    def close(self) -> None:
        """Its bytes are another source's."""
