"""
Where each parameter lies in the flat tensors of the ranks: arithmetic alone.

Stages 1 and 2 lay the parameters of a group one behind the other, and cut that anywhere: one lane for each group, of
the ranks' tensors in order. Stage 3 cuts each parameter into equal parts, and each rank lays its own behind each other:
one lane for each rank, of its sub-groups' tensors. A parameter is runs of lanes, in order.

See utils/zero_to_fp32.py of DeepSpeed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import NamedTuple

from ckptool.cancellation import each
from ckptool.errors import MalformedFile
from ckptool.formats.directories.deepspeed.states import ModelStates, OptimStates
from ckptool.formats.directories.side_by_side import ANOTHER_SAVE, agree
from ckptool.sources.folder import FolderSource
from ckptool.tensors.dtypes import DType
from ckptool.tensors.pieces import Piece, PiecesSource, in_pieces
from ckptool.tensors.tensor import TensorInfo

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
        source = PiecesSource((at,), dtype, pieces, self._folder.cancellation, name=name)
        return in_pieces(name, place.shape, dtype, source, "cpu")

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
