"""
Weights in another floating type: each tensor becomes one whose bytes are cast while they are read.

Nothing is cast before it is written, a few megabytes at a time, so a plan stays cheap and memory bounded. The
arithmetic is torch's, by way of ``torch_bridge``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ckptool import dtypes
from ckptool.dtypes import DType
from ckptool.errors import MigrationRefused
from ckptool.tensors import LazyTensor, StorageRef, TensorInfo, identity, row_major
from ckptool.weights import Weights

TARGETS = ("float16", "bfloat16", "float32", "float64")
_FLOATING = (*TARGETS, "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


class Cast(NamedTuple):
    """What casting did to one tensor."""

    name: str
    source: str
    target: str
    max_error: float
    """The largest absolute difference to the value before, among finite ones; 0 until the tensor was written."""
    overflowed: int
    """Finite values that the new type cannot hold and that became its largest."""


class CastSource:
    """The bytes of a tensor in another type, cast on each read."""

    def __init__(self, tensor: LazyTensor, target: DType, *, saturate: bool) -> None:
        self._tensor = tensor
        self._target = target
        self._saturate = saturate
        self.nbytes = tensor.info.numel * target.itemsize
        self.max_error = 0.0
        self.overflowed = 0

    def read(self, offset: int, nbytes: int) -> bytes:
        """
        Return the cast bytes. Both numbers must be multiples of the element size.

        Raises:
            MigrationRefused: A finite value does not fit, and values were not to be saturated.
        """
        from ckptool import torch_bridge  # nobody else on the way to a file needs it

        size = self._target.itemsize
        data = self._tensor.read_range(offset // size, nbytes // size)
        cast = torch_bridge.cast(data, self._tensor.info.dtype.name, self._target.name)
        if cast.overflowed and not self._saturate:
            raise MigrationRefused(
                f"{cast.overflowed:,} values of {self._tensor.name!r} are too large for {self._target.name}",
                kind="overflow",
                hint="Keep its type with --keep-dtype, use bfloat16, or take the largest value with --saturate.",
            )
        self.max_error = max(self.max_error, cast.max_error)
        self.overflowed += cast.overflowed
        return cast.data

    def file_offset(self, offset: int) -> None:  # noqa: ARG002 - these bytes stand in no file
        """Return None: these bytes stand in no file."""
        return

    def close(self) -> None:
        """Nothing of its own to release."""


class Casting:
    """The casts of one migration."""

    def __init__(self, dtype: str, keep: Sequence[str] = (), *, saturate: bool = False) -> None:
        if dtype not in TARGETS:
            raise MigrationRefused(
                f"not a type to cast to: {dtype!r}", kind="not-a-dtype", hint=f"Choose from {', '.join(TARGETS)}."
            )
        try:
            self._keep = [re.compile(pattern) for pattern in keep]
        except re.error as error:
            raise MigrationRefused(f"not a regular expression: {error}", kind="bad-pattern") from error
        self._target = dtypes.BY_NAME[dtype]
        self._saturate = saturate
        self._sources: list[tuple[str, str, CastSource]] = []

    def apply(self, weights: Weights) -> Weights:
        """Return the weights with every floating tensor in the new type; tied names stay tied."""
        made: dict[tuple[object, ...], TensorInfo] = {}
        tensors: dict[str, LazyTensor] = {}
        for name, tensor in weights.tensors.items():
            if not self._takes(name, tensor.info):
                tensors[name] = tensor
                continue
            key = identity(tensor.info)
            if key not in made:
                made[key] = self._cast(name, tensor)
            tensors[name] = LazyTensor(name, made[key])
        return weights._replace(tensors=tensors)

    @property
    def casts(self) -> tuple[Cast, ...]:
        """What was cast, and what it cost: complete once everything was written."""
        return tuple(
            Cast(name, source, self._target.name, cast.max_error, cast.overflowed)
            for name, source, cast in self._sources
        )

    def _takes(self, name: str, info: TensorInfo) -> bool:
        plain = info.storage is not None and info.layout == "strided"
        if not plain or info.dtype.name not in _FLOATING or info.dtype is self._target:
            return False
        return not any(pattern.search(name) for pattern in self._keep)

    def _cast(self, name: str, tensor: LazyTensor) -> TensorInfo:
        source = CastSource(tensor, self._target, saturate=self._saturate)
        self._sources.append((name, tensor.info.dtype.name, source))
        info = tensor.info
        storage = StorageRef(name, info.location, source.nbytes, source, 0)
        return info._replace(
            dtype=self._target,
            stride=row_major(info.shape),
            storage_offset=0,
            storage=storage,
            conj=False,
            neg=False,
            parts=(),
        )
