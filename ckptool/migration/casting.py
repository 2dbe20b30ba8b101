"""
Casts in a migration: tensors in another floating type, cast while they are read.

Values are cast only while they are written, a few megabytes at a time, so a plan stays cheap and memory bounded. The
arithmetic is torch's, by way of ``torch_ops``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import add
from typing import Final, NamedTuple

from ckptool.checkpoints.weights import Weights
from ckptool.errors import MigrationRefused
from ckptool.messages import MANY_ZEROED, counted, some, zero_now
from ckptool.names.renaming import LONGEST, Trials, two_readings
from ckptool.tensors.dtypes import BY_NAME, DType
from ckptool.tensors.payloads import ComputedSource, Payload, StoragePayload
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo

TARGETS = ("float16", "bfloat16", "float32", "float64")
_FLOATING = (*TARGETS, "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_PIECE_NBYTES: Final = 1 << 22


class Cast(NamedTuple):
    """What casting did to one tensor."""

    name: str
    source: str
    target: str
    max_error: float
    """The largest absolute difference to the value before, among finite ones; 0 until the tensor was written."""
    overflowed: int
    """Finite values that the new type cannot hold and that became its largest."""


class Lost(NamedTuple):
    """What a cast has lost of what was read so far."""

    max_error: float = 0.0
    overflowed: int = 0
    nonzero: int = 0
    """Elements that are not zero, where the new type can round small values to zero."""
    zeroed: int = 0
    """Those of them that became zero."""
    nan: int = 0
    """Elements that are NaN, and were before."""


class CastSource(ComputedSource):
    """The bytes of a tensor in another type, cast while they are read from the first to the last."""

    def __init__(self, tensor: LazyTensor, target: DType, *, saturate: bool) -> None:
        super().__init__(tensor.name, tensor.info.numel * target.itemsize)
        self._tensor = tensor
        self._target = target
        self._saturate = saturate
        self.lost = Lost()

    def made(self) -> Iterator[bytes]:
        self.lost = Lost()
        # A strided or deflated tensor is read once, however many pieces are requested.
        return map(self._cast, self._tensor.chunks(_PIECE_NBYTES))

    def _cast(self, data: bytes) -> bytes:
        from ckptool.torch_ops import values as torch_values  # no other migration needs torch

        cast = torch_values.cast(data, self._tensor.info.dtype.name, self._target.name)
        if cast.overflowed and not self._saturate:
            has_wider = self._target.name == "float16" and self._tensor.info.dtype.name != "float64"
            raise MigrationRefused(
                f"tensor {self._tensor.name!r} has values that are too large for {self._target.name}: "
                f"at least {cast.overflowed:,} of {self._tensor.info.numel:,}",
                kind="overflow",
                hint=f"Keep its type with `keep_dtype=`, {'use bfloat16, ' * has_wider}or take the largest value with "
                "`saturate=True`.",
            )
        max_error, *counts = self.lost
        sums = map(add, counts, (cast.overflowed, cast.nonzero, cast.zeroed, cast.nan))
        self.lost = Lost(max(max_error, cast.max_error), *sums)
        return cast.data


class Casting:
    """The casts of one migration."""

    def __init__(self, dtype: str, keep: Sequence[str], trials: Trials, *, saturate: bool = False) -> None:
        if dtype not in TARGETS:
            raise MigrationRefused(
                f"not a type to cast to: {dtype!r}", kind="not-a-dtype", hint=f"Choose from {', '.join(TARGETS)}."
            )
        try:
            self._keep = [re.compile(pattern) for pattern in keep]
        except re.error as error:
            raise MigrationRefused(f"not a regular expression: {error}", kind="bad-pattern") from error
        if "" in keep:
            raise MigrationRefused("an empty keep_dtype would keep every type", kind="bad-pattern")
        self._trials = trials
        self.keeps_nothing: tuple[str, ...] = tuple(keep)
        """Patterns of ``keep`` that no name has matched so far."""
        self._target = BY_NAME[dtype]
        self._saturate = saturate
        self._sources: list[tuple[str, str, CastSource]] = []
        self._names: list[tuple[str, str]] = []
        self.leaves: list[str] = []
        """Complex and sparse tensors, with their types: these are never cast."""
        self.kept_with: dict[str, str] = {}
        """Names that keep their type only because they are tied to a name that keeps its own, to that name."""
        self._made: dict[Memory | None, TensorInfo] = {}
        self.tensors: list[LazyTensor] = []
        """The tensors that are read to be cast."""

    def apply(self, weights: Weights) -> Weights:
        """Return the weights with every floating tensor in the new type."""
        head = weights.state_dict.head
        self.take((name, name, head + name, one) for name, one in weights.tensors.items())
        tensors = {name: LazyTensor(name, self.info(tensor.info)) for name, tensor in weights.tensors.items()}
        return weights._replace(tensors=tensors)

    def take(self, named: Iterable[tuple[str, str, str, LazyTensor]]) -> None:
        """
        Register tensors to cast, each as (name in reports, name, full path, tensor).

        Tied names stay tied: one that keeps its type keeps it for all.
        """
        chosen: dict[Memory, tuple[str, LazyTensor]] = {}
        places: list[tuple[Memory, str, str]] = []
        for shown, name, path, tensor in named:
            self._names.append((name, path))
            info, memory = tensor.info, memory_of(tensor.info)
            if memory is not None and self._takes(info):
                chosen.setdefault(memory, (shown, tensor))
                places.append((memory, name, path))
            elif info.dtype.name.startswith("complex") or (info.layout != "strided" and info.dtype.name in _FLOATING):
                self.leaves.append(f"{shown} ({info.layout} {info.dtype.name})".replace("(strided ", "("))
        matching = [one for pattern in self._keep for one in self._matching(pattern, places)]
        kept, matched = dict(matching), set(matching)
        self.kept_with |= {name: kept[one] for one, name, _ in places if one in kept and (one, name) not in matched}
        for memory, (name, tensor) in chosen.items():
            if memory not in kept:
                source = CastSource(tensor, self._target, saturate=self._saturate)
                self._sources.append((name, tensor.info.dtype.name, source))
                self._made[memory] = source.tensor(tensor.info, self._target)
                self.tensors.append(tensor)

    def _matching(
        self, pattern: re.Pattern[str], places: Sequence[tuple[Memory, str, str]]
    ) -> list[tuple[Memory, str]]:
        """Return (memory, name) of tensors whose names match a pattern, or else of those whose full paths do."""
        own = [(memory, name) for memory, name, _ in places if self._trials.on(name, pattern.search)]
        is_open = (not own or pattern.pattern.startswith("^")) and any(name != path for _, name, path in places)
        full = [place for place in places if is_open and self._trials.on(place[2], pattern.search)]
        found = own or [(memory, name) for memory, name, _ in full]
        if own and full and [memory for memory, _, _ in full] != [memory for memory, _ in own]:
            raise two_readings(pattern.pattern, [path for _, _, path in full], [name for _, name in own])
        if found:
            self.keeps_nothing = tuple(one for one in self.keeps_nothing if one != pattern.pattern)
        return found

    @property
    def unmatched(self) -> list[str]:
        """Patterns of ``keep`` that match no name at all, not even of a tensor that cannot be cast."""
        names = [name for pair in self._names for name in pair if len(name) <= LONGEST] if self.keeps_nothing else []
        left = [pattern for pattern in self._keep if pattern.pattern in self.keeps_nothing]
        return [one.pattern for one in left if not any(self._trials.on(name, one.search) for name in names)]

    def info(self, info: TensorInfo) -> TensorInfo:
        """Return what a tensor becomes: itself if it is not to be cast. The same memory gives the same tensor."""
        made = self._made.get(memory_of(info))
        if made is None:
            return info
        alike = (made.requires_grad, made.kind) == (info.requires_grad, info.kind)
        return made if alike else made._replace(requires_grad=info.requires_grad, kind=info.kind)

    def refuse_what_was_missed(self, storages: Iterable[Payload]) -> None:
        """Raise MigrationRefused if a tensor that is to be cast is not among what is written."""
        written = {id(payload.storage.source) for payload in storages if isinstance(payload, StoragePayload)}
        missed = [name for name, _, source in self._sources if id(source) not in written]
        if missed:
            raise MigrationRefused(
                f"{missed[0]!r} cannot be cast in place",
                kind="unsupported-cast",
                hint="Keep its type with `keep_dtype=`, or take the weights alone: `form='state_dict'`.",
            )

    @property
    def casts(self) -> tuple[Cast, ...]:
        """What was cast, and with what error: complete once everything was written."""
        return tuple(
            Cast(name, source, self._target.name, cast.lost.max_error, cast.lost.overflowed)
            for name, source, cast in self._sources
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the casts that were written."""
        lost = ((name, one.lost) for name, _, one in self._sources if one.lost.nonzero)
        shares = {name: one.zeroed / one.nonzero for name, one in lost}
        zeroed = {name: share for name, share in shares.items() if share > MANY_ZEROED}
        notes: tuple[str, ...] = (zero_now(zeroed, self._target.name),) if zeroed else ()
        if nan := {name: one.lost.nan for name, _, one in self._sources if one.lost.nan}:
            named = some([f"{name} ({count:,})" for name, count in nan.items()])
            notes += (f"{counted(sum(nan.values()), 'value')} of what was cast, NaN before and after: {named}",)
        return notes

    @property
    def errors(self) -> dict[int, Lost]:
        """What each cast that was written has lost, by its position among the casts of the plan."""
        return {number: one.lost for number, (_, _, one) in enumerate(self._sources) if one.was_read}

    def written_elsewhere(self, errors: Mapping[int, Lost]) -> None:
        """Take over what casts have lost that another process with the same plan has written."""
        for number, lost in errors.items():
            self._sources[number][2].lost = lost

    def passed_over(self, named: Iterable[tuple[str, TensorInfo]]) -> list[str]:
        """Return the full paths of tensors that could be cast but are not registered."""
        paths = {path for _, path in self._names}
        return [path for path, info in named if path not in paths and self._takes(info)]

    def _takes(self, info: TensorInfo) -> bool:
        return info.layout == "strided" and info.dtype.name in _FLOATING and info.dtype is not self._target


Memory = tuple[object, ...]


def memory_of(info: TensorInfo) -> Memory | None:
    """Return a key that is equal for all names of one tensor, with or without elements; None if it has no storage."""
    storage = info.storage
    if storage is None:
        return None
    where = (id(storage.source), storage.offset, info.storage_offset)
    # As text, whose hash is random: a file could choose numbers with equal hashes, on which a dict takes hours.
    return (*where, info.dtype.name, str((info.shape, info.stride)), info.conj, info.neg)
