"""
``TensorInfo`` to ``torch.Tensor``: reads each storage once into memory of its device.

Tensors that share memory in the file share it again. Of a storage that is not mapped, only the span that the wanted
tensors use is read.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from ckptool.cancellation import Cancellation, check_cancelled, each
from ckptool.errors import DamagedFile, MalformedFile, OutOfMemory, UnsupportedFeature
from ckptool.loading.memory.filling import DeviceMemory, HostMemory, Memory, Mmap, buffer_of
from ckptool.loading.memory.placement import (
    CPU,
    META,
    QUANTIZED,
    Placement,
    moved_by,
    placement,
    special_tensor,
    torch_dtype,
)
from ckptool.loading.memory.threads import Zeroed, apart_on_cpu, cast_tensor, is_castable, warn_of_zeros
from ckptool.messages import not_cast, show
from ckptool.sections import completed
from ckptool.sources.checksums import checksum_in_memory
from ckptool.sources.source import Meter, Progress, Source
from ckptool.system import free_memory
from ckptool.tensors.pieces import PiecesSource, Place
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import SPARSE_PARTS, StorageRef, TensorInfo
from ckptool.torch_ops.devices import accelerator

_ALIGNMENT: Final = 64
"""The first byte of a span of a storage is a multiple of this: enough for any element, and for vector loads."""
_CAST_NBYTES: Final = 256 << 20
"""After so many uncast bytes, what was read is cast, and the uncast bytes are freed."""


logger = logging.getLogger("ckptool")


class Cost(NamedTuple):
    """The memory that tensors need, in bytes."""

    host_nbytes: int
    """Memory on the host that this process alone uses, when all is loaded."""
    mapped_nbytes: int
    """Pages of the file that are mapped: the system keeps them once for all processes, and may drop them."""
    device_nbytes: int
    """Memory of accelerators, when all is loaded."""
    passing_nbytes: int
    """Memory that is needed in addition while loading: uncast bytes, staging buffers."""

    def __dir__(self) -> list[str]:
        return completed(self)

    def __str__(self) -> str:
        return (
            f"host {self.host_nbytes:,} bytes, device {self.device_nbytes:,}, mapped {self.mapped_nbytes:,}, "
            f"and {self.passing_nbytes:,} while loading"
        )


@dataclass(slots=True, eq=False)
class _Block:
    """One storage, or the span of it that tensors use, from byte ``first`` to ``last``."""

    root: StorageRef
    source: Source
    first: int
    last: int = 0
    itemsize: int = 1
    types: set[torch.dtype] = field(default_factory=set)
    tensors: list[tuple[str, TensorInfo]] = field(default_factory=list)
    memory: torch.Tensor | None = None
    nothing: torch.Tensor | None = None
    """Memory of no bytes on the device of the storage, for tensors without elements."""
    is_scale: bool = False
    """Whether it holds the scales of quantised tensors, which are not weights: they keep their type."""
    cast: torch.dtype | None = None
    """The type that all elements were cast to; None if they were not."""

    @property
    def nbytes(self) -> int:
        return max(0, self.last - self.first)


class Assembly:
    """
    Makes the tensors of one state dict. ``dtype`` is the type that floating tensors are cast to, on their new device.

    ``verify`` compares each storage with its checksum in the file, once it is in memory on the CPU.
    """

    def __init__(
        self,
        place: Placement,
        *,
        mmap: Mmap = "auto",
        dtype: torch.dtype | None = None,
        verify: bool = False,
        cancellation: Cancellation | None = None,
    ) -> None:
        self._verify = verify
        self._verified: set[Place] = set()
        self.cancellation = cancellation
        self._place = place
        self._dtype = dtype
        self._zeroed: Zeroed = {}
        self._host = HostMemory(mmap)
        self._memories: dict[torch.device, Memory] = {CPU: self._host}
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._whole: dict[tuple[int, int], torch.Tensor] = {}
        """Tensors over storages that are mapped as a whole; other tensors of such a storage share its memory."""

    def tensors(self, wanted: Mapping[str, LazyTensor], progress: Progress | None = None) -> dict[str, torch.Tensor]:
        """
        Return the tensors by name, in order.

        Raises:
            UnsupportedFeature: One is of a kind that only code of its own could make.
            OutOfMemory: They need more than there is.
            CkptoolError: The file cannot be read any more.
        """
        is_changed = self._place.mover is not None or self._dtype is not None or self._verify
        made = self._mapped_views(wanted) if self._place.everywhere == CPU and not is_changed else {}
        if len(made) == len(wanted):
            return made
        rest = {name: tensor for name, tensor in wanted.items() if name not in made}
        for name, tensor in each(rest.items(), self.cancellation):
            self._note(name, tensor.info)
        self._check_room()
        cast = rest.items() if self._dtype is not None else ()
        if kept := [f"{name} ({one.dtype})" for name, one in cast if one.dtype.startswith("complex")]:
            logger.warning("%s", show(not_cast(kept)))
        self._load(progress)
        built = {name: self._build(name, tensor.info) for name, tensor in each(rest.items(), self.cancellation)}
        warn_of_zeros(self._zeroed)
        return {name: made[name] if name in made else built[name] for name in wanted}

    def cost(self, wanted: Mapping[str, LazyTensor]) -> Cost:
        """Return what ``tensors`` would need; nothing is allocated."""
        for name, tensor in wanted.items():
            self._note(name, tensor.info)
        blocks = self._open_blocks()
        needed, mapped = self._needed(blocks)
        device = sum(nbytes for where, nbytes in needed.items() if where.type not in ("cpu", "meta"))
        uncast = {
            id(block): block.nbytes
            for block in blocks
            if self._cast_of(block) is not None
            and not (self._place.device(block.root.location).type == "cpu" and self._is_mapped(block))
        }
        passing = max(sum(uncast.get(id(block), 0) for block in batch) for batch in self._batches(blocks))
        staging = DeviceMemory.STAGING_NBYTES if device else 0
        return Cost(needed.get(CPU, 0), mapped, device, passing + staging)

    def _mapped_views(self, wanted: Mapping[str, LazyTensor]) -> dict[str, torch.Tensor]:
        """Return the tensors that are plain views of mapped storages. Most are, so this loop has to be fast."""
        made: OrderedDict[str, torch.Tensor] = OrderedDict()  # the type of a state dict
        whole, from_buffer = self._whole, torch.frombuffer
        types: dict[str, tuple[torch.dtype, int]] = {}
        last: Source | None = None
        for name, tensor in each(wanted.items(), self.cancellation):
            # Taken apart in one step: a third of the time at 20,000 tensors.
            dtype, shape, stride, first, storage, _, _, _, layout, parts, _, _, conj, neg = tensor.info
            if storage is None or parts or conj or neg or layout != "strided" or dtype.packed > 1:
                continue
            _, _, nbytes, source, start, big_endian, _, root = storage
            if big_endian or root is not None:
                continue
            if source is not last:
                last = source
                mapping, begin = self._host.mapped(source) or (None, 0)
            known = types.get(dtype.name)
            if known is None:
                known = types[dtype.name] = (torch_dtype(tensor.info), dtype.itemsize)
            of_type, itemsize = known
            key, offset = (id(source), start), begin + start
            if mapping is None or key in whole or offset % itemsize or nbytes < itemsize:
                continue
            count = nbytes // itemsize
            made[name] = whole[key] = base = from_buffer(mapping, dtype=of_type, count=count, offset=offset)
            if len(shape) != 1 or shape[0] != count or stride[0] != 1:
                base.as_strided_(shape, stride, first or None)
        return made

    def _note(self, name: str, info: TensorInfo, *, is_scale: bool = False) -> None:
        """Note which bytes of which storage a tensor needs."""
        for part, below in info.parts:
            self._note(f"{name}[{part}]", below, is_scale=info.layout in QUANTIZED)
        storage, itemsize = info.storage, info.dtype.itemsize
        if storage is None:
            return
        block = self._block(storage)
        shift = storage.offset - block.root.offset
        if self._verify:
            first, last = 0, block.root.nbytes
        elif info.dtype.packed > 1 or storage.big_endian:
            first, last = shift, shift + storage.nbytes
        elif info.numel:
            steps = sum((size - 1) * step for size, step in zip(info.shape, info.stride, strict=True))
            first = shift + info.storage_offset * itemsize
            last = first + (steps + 1) * itemsize
        else:
            return
        if block.memory is not None:
            if block.first <= first and last <= block.last:
                return
            root = storage.whole or storage  # a smaller span of it was loaded before
            block = self._blocks[id(root.source), root.offset] = _Block(root, root.source, root.nbytes)
        block.first = min(block.first, first // _ALIGNMENT * _ALIGNMENT)
        block.last = max(block.last, last)
        block.itemsize = max(block.itemsize, itemsize)
        block.types.add(torch_dtype(info))
        block.tensors.append((name, info))
        block.is_scale |= is_scale
        if shift % itemsize:
            raise MalformedFile(f"tensor {name!r} begins in the middle of an element", kind="malformed-tensor")

    def _block(self, storage: StorageRef) -> _Block:
        root = storage.whole or storage
        key = (id(root.source), root.offset)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block(root, root.source, root.nbytes)
            if key in self._whole:
                block.memory, block.first, block.last = self._whole[key], 0, self._whole[key].untyped_storage().nbytes()
        return block

    def _open_blocks(self) -> list[_Block]:
        return [block for block in self._blocks.values() if block.types and block.memory is None]

    def _needed(self, blocks: list[_Block]) -> tuple[dict[torch.device, int], int]:
        """Return the bytes that each device needs once the blocks are loaded, and the number of mapped bytes."""
        needed: dict[torch.device, int] = {}
        mapped = 0
        for block in blocks:
            device, target = self._place.device(block.root.location), self._cast_of(block)
            if device == CPU and target is None and self._is_mapped(block):
                mapped += block.nbytes
            else:
                nbytes = block.nbytes if target is None else block.nbytes // block.itemsize * target.itemsize
                needed[device] = needed.get(device, 0) + nbytes
        return needed, mapped

    def _is_mapped(self, block: _Block) -> bool:
        return self._host.can_map(block.root.source, block.root.offset + block.first, block.itemsize)

    def _check_room(self) -> None:
        """Raise OutOfMemory if a device, or the host, is known to have less memory free than it needs."""
        for device, nbytes in self._needed(self._open_blocks())[0].items():
            hint, api = "Choose another device, or a smaller dtype=.", accelerator(device.type)
            room = None if api is None else api.room(device)
            if device == CPU:
                hint = "Map the file with mmap=True, cast with a smaller dtype=, or load fewer tensors."
                room = free_memory()
            if room is not None and nbytes > room:
                fact = f"the weights need {nbytes:,} bytes on {device}, which has {room:,} free"
                raise OutOfMemory(fact, hint=hint, needed=nbytes, actual=room)

    def _load(self, progress: Progress | None) -> None:
        blocks = self._open_blocks()
        meter = Meter(progress, sum(block.nbytes for block in blocks))
        reached = 0
        for batch in self._batches(blocks):
            for block in each(batch, self.cancellation):
                if self._verify and isinstance(block.source, PiecesSource):
                    block.source = block.source.checked()
                device = self._place.device(block.root.location)
                if device not in self._memories:
                    self._memories[device] = DeviceMemory(device)
                offset = block.root.offset + block.first
                block.memory = self._memories[device].take(block.source, offset, block.nbytes, block.itemsize)
            for memory in self._memories.values():
                memory.fill(meter.read)
            for block in batch:
                check_cancelled(self.cancellation)  # a cast takes long and cannot be stopped
                self._finish(block)
            reached += sum(block.nbytes for block in batch)
            if meter.done < reached:  # the rest was mapped, or came from memory
                meter.read(reached - meter.done)

    def _batches(self, blocks: list[_Block]) -> Iterator[list[_Block]]:
        """Yield the blocks to read at once: all, unless they are cast, and uncast bytes have to be freed in between."""
        batch: list[_Block] = []
        held = 0
        for block in blocks:
            batch.append(block)
            held += block.nbytes if self._cast_of(block) is not None else 0
            if held >= _CAST_NBYTES:
                yield batch
                batch, held = [], 0
        yield batch

    def _cast_of(self, block: _Block) -> torch.dtype | None:
        """Return the type that a storage is cast to as a whole, so that tensors still share it; None if it is not."""
        only = next(iter(block.types)) if len(block.types) == 1 else None
        is_cast = only is not None and is_castable(only) and only != self._dtype and not block.is_scale
        return self._dtype if is_cast else None

    def _finish(self, block: _Block) -> None:
        """Convert a storage that was read: to the machine's byte order, the user's device, and the requested type."""
        memory, root, source = block.memory, block.root, block.source
        if memory is None or not memory.numel():
            return
        if self._verify and isinstance(source, PiecesSource):
            source.compare(self._verified)
            source.check(self._verified)
        elif self._verify and root.crc32 and checksum_in_memory(buffer_of(memory), self.cancellation) != root.crc32:
            raise DamagedFile(
                f"storage {root.key!r} of {root.nbytes:,} bytes does not match its checksum",
                hint="Download the file again.",
            )
        if root.big_endian and not memory.is_meta:
            if len(block.types) > 1 or memory.device != CPU:
                hint = "Load it to the CPU, or migrate the file first."
                raise UnsupportedFeature(f"storage {root.key!r} is big-endian", kind="byte-order", hint=hint)
            memory.untyped_storage().byteswap(next(iter(block.types)))  # type: ignore[no-untyped-call]
        if self._place.mover is not None:
            block.memory = memory = moved_by(self._place.mover, memory, root.location)
        target = self._cast_of(block)
        if target is not None:
            values = memory[: block.nbytes // block.itemsize * block.itemsize].view(next(iter(block.types)))
            views = (
                (name, values.as_strided(one.shape, one.stride, _first(block, one))) for name, one in block.tensors
            )
            block.memory, block.cast = cast_tensor(values, target, lambda: views, self._zeroed), target

    def _build(self, name: str, info: TensorInfo, *, is_scale: bool = False) -> torch.Tensor:
        if info.layout in SPARSE_PARTS or info.layout in QUANTIZED:
            has_scales = info.layout in QUANTIZED
            parts = {part: self._build(f"{name}[{part}]", below, is_scale=has_scales) for part, below in info.parts}
            integers = self._strided(name, info) if has_scales and info.storage is not None else None
            device = next((part.device for part in parts.values()), CPU)
            return apart_on_cpu(device, lambda: special_tensor(name, info, parts, integers))
        if info.layout != "strided" or (info.storage is None and info.location != "meta"):
            raise UnsupportedFeature(
                f"tensor {name!r} is {info.subclass or info.layout}, which only code of its own can make",
                kind="no-plain-bytes",
                hint="Leave it out, or load the file with the library that wrote it.",
            )
        return self._strided(name, info, is_scale=is_scale)

    def _nothing(self, block: _Block) -> torch.Tensor:
        if block.nothing is None:
            is_there = block.memory is not None and bool(block.memory.numel())
            device = block.memory.device if is_there else self._place.device(block.root.location)  # type: ignore[union-attr]
            block.nothing = torch.empty(0, dtype=torch.uint8, device=device)
            if self._place.mover is not None and not is_there:
                block.nothing = moved_by(self._place.mover, block.nothing, block.root.location)
        return block.nothing

    def _strided(self, name: str, info: TensorInfo, *, is_scale: bool = False) -> torch.Tensor:
        """Return a tensor as a view of its storage."""
        dtype, storage = torch_dtype(info), info.storage
        wanted = self._dtype if self._dtype is not None and is_castable(dtype) and not is_scale else dtype
        if storage is None:
            return torch.empty_strided(info.shape, info.stride, dtype=wanted, device=META)
        block = self._block(storage)
        memory, has, offset = block.memory, block.cast or dtype, 0
        if memory is None or not info.numel:
            memory, has = self._nothing(block), wanted
        else:
            offset = _first(block, info)
        made = torch.empty(0, dtype=has, device=memory.device)
        try:
            made.set_(memory.untyped_storage(), offset, info.shape, info.stride)
        except NotImplementedError as error:
            raise UnsupportedFeature(
                f"torch has no tensors of {dtype} on {memory.device}",
                kind="no-such-dtype",
                hint="Load it to the CPU, or leave it out.",
            ) from error
        if info.conj:
            made = made.conj()
        if info.neg:
            made = torch._neg_view(made)
        return made if made.dtype == wanted else cast_tensor(made, wanted, lambda: [(name, made)], self._zeroed)


def _first(block: _Block, info: TensorInfo) -> int:
    """Return the index of a tensor's first element in the memory of its block."""
    start = info.storage.offset - block.root.offset - block.first if info.storage is not None else 0
    return start // info.dtype.itemsize + info.storage_offset


def as_torch(tensor: LazyTensor) -> torch.Tensor:
    """Return a tensor in memory of the CPU; see ``LazyTensor.torch``."""
    return Assembly(placement("cpu")).tensors({tensor.name: tensor})[tensor.name]
