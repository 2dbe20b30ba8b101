"""
Read back a torch file that was just written, every byte of it, and compare it with the plan.

1. Checksums: each payload, and everything between payloads together, has the bytes that were written.
2. Readers that share no code with the writers then find the directory and parse the pickle: the file holds the tensors
   that were planned.

Local headers and entries of the directory are not parsed again: they have the same few fields for every member,
whatever the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from ckptool.archives.zip_directory import find_directory
from ckptool.checkpoints.contents import collect
from ckptool.checkpoints.weights import Weights
from ckptool.errors import OutputFailed
from ckptool.limits import Limits
from ckptool.migration.zip_writer import WrittenZip
from ckptool.pickles.gc_pause import gc_paused
from ckptool.pickles.nodes import Inert
from ckptool.pickles.reader import read_pickle
from ckptool.sources.checksums import checksums_of_file
from ckptool.sources.files import open_source
from ckptool.sources.source import BytesSource, Meter, SliceSource, prefetch
from ckptool.tensors.payloads import CHUNK_NBYTES, StoragePayload
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.tensor import TensorInfo, TypedStorage, storage_id


def verify(
    path: str,
    written: WrittenZip,
    storages: Sequence[StoragePayload],
    expected: Sequence[tuple[str | None, TensorInfo]],
    limits: Limits,
    meter: Meter,
) -> None:
    """
    Read a zip back: every byte, and every tensor with its name, type, shape and position in its storage.

    Raises:
        OutputFailed: The file does not hold what was to be written.
    """
    source, _ = open_source(path, limits.cancellation)
    with closing(source), gc_paused():
        prefetch(source, [(0, source.nbytes)])
        members = written.members
        ranges = [(member.offset, member.offset + member.nbytes) for member in members]
        checksums, frame = checksums_of_file(source, ranges, meter)
        for member, checksum in zip(members, checksums, strict=True):
            if checksum != member.crc32:
                raise _failed(f"{member.name!r} was not written as it was read")
        directory, _ = find_directory(source)
        if frame != written.frame_crc32 or directory[::2] != (written.directory, len(members)):
            raise _failed("its headers are not those that were written")
        tree = read_pickle(SliceSource(source, members[0].offset, members[0].nbytes)).root
        rebuilder = Rebuilder(_WrittenStorages(storages).resolve)
        rebuilder.take_arrays(take=any(info.is_array for _, info in expected))
        found = collect(tree, rebuilder, limits).tensors
        if len(found) != len(expected) or any(map(_differ, found.items(), expected)):
            raise _failed("the tensors in it are not those that were to be written")


def verify_model(path: str, weights: Weights, limits: Limits, meter: Meter) -> None:
    """
    Read back a whole model that torch saved, and compare every tensor's bytes with the weights.

    Raises:
        OutputFailed: They differ.
    """
    from ckptool.formats import open_checkpoint

    with open_checkpoint(path, limits=limits) as found:
        for name, tensor in weights.tensors.items():
            if name not in found.tensors or found.tensors[name].read() != tensor.read():
                raise OutputFailed(f"tensor {name!r} was not written as it was read", kind="verification-failed")
            meter.read(tensor.info.nbytes)


class _WrittenStorages:
    """The storages that the pickle of the written file refers to: those of the source, by their new keys."""

    def __init__(self, payloads: Sequence[StoragePayload]) -> None:
        self._payloads = {str(number): payload for number, payload in enumerate(payloads)}

    def resolve(self, pid: Inert) -> TypedStorage | None:
        named = storage_id(pid)
        if named is None:
            return None
        payload = self._payloads.get(named.key)
        if payload is None or payload.nbytes != named.nbytes:
            raise _failed(f"its storage {named.key!r} is not the one that was to be written")
        return TypedStorage(payload.storage, named.dtype)


def _failed(what: str) -> OutputFailed:
    return OutputFailed(what, kind="verification-failed")


def _differ(found: tuple[str, TensorInfo], expected: tuple[str | None, TensorInfo]) -> bool:
    return (expected[0] is not None and found[0] != expected[0]) or are_unlike(found[1], expected[1])


def are_unlike(one: TensorInfo, other: TensorInfo, *, of_files: bool = False) -> bool:
    """Say whether two tensors are not the same elements; with ``of_files``, of two files in which they stand alike."""
    if kind_of(one) != kind_of(other):
        return True
    if begin_of(one, of_files) != begin_of(other, of_files) and not _are_equal_in_pickles(one, other):
        return True
    if one.layout == "strided":
        return False  # the parts of a plain tensor (a gradient, attributes) are not its value
    parts, others = ([part for _, part in info.parts] for info in (one, other))
    if len(parts) != len(others):
        return True
    return any(are_unlike(*pair, of_files=of_files) for pair in zip(parts, others, strict=True))


def kind_of(info: TensorInfo) -> tuple[object, ...]:
    """Return what tensors have in common that differ in nothing but their elements."""
    return info.dtype.name, info.shape, info.stride, info.layout, info.conj, info.neg


def begin_of(info: TensorInfo, of_files: bool) -> tuple[int, int] | None:
    """Return where the first element is in the source, whether the tensor views a storage or a part of one."""
    storage = info.storage
    if storage is None:
        return None
    of_file = of_files and storage.source.file_offset(0) is not None
    begin = storage.offset + info.storage_offset * info.dtype.itemsize // info.dtype.packed
    return 0 if of_file else id(storage.source), begin


def _are_equal_in_pickles(one: TensorInfo, other: TensorInfo) -> bool:
    """Say whether the bytes of both are inside the pickles themselves, as numpy's are, and are equal."""
    storages = [info.storage for info in (one, other) if info.storage is not None]
    inside = [isinstance(storage.source, BytesSource) and storage.file_offset is None for storage in storages]
    if inside != [True, True] and not (one.is_array and other.is_array):
        return False
    pieces = (LazyTensor("", info).chunks(CHUNK_NBYTES) for info in (one, other))
    return one.nbytes == other.nbytes and all(a == b for a, b in zip(*pieces, strict=True))
