"""
Whether a file for torch that was just written is what was to be written: read back, every byte of it.

The bytes are compared, by checksums, with those that were meant: payloads one by one, everything between them
together. That what was meant is a zip that says what was planned is seen by readers that know nothing of the writers:
they find the directory, and interpret the pickle. Headers and the entries of the directory are not interpreted again:
they are the same few fields for every member, whatever the checkpoint.
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
from ckptool.pickles.nodes import Inert, collector_paused
from ckptool.pickles.reader import read_pickle
from ckptool.sources.checksums import checksums_of_file
from ckptool.sources.files import open_source
from ckptool.sources.source import BytesSource, SliceSource
from ckptool.tensors.payloads import StoragePayload
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.storage_ids import TypedStorage, storage_id
from ckptool.tensors.tensor import TensorInfo


def verify(
    path: str,
    written: WrittenZip,
    storages: Sequence[StoragePayload],
    expected: Sequence[tuple[str | None, TensorInfo]],
    limits: Limits,
) -> None:
    """
    Read a zip back: every byte, and of every tensor its name, type, shape and place in its storage.

    Raises:
        OutputFailed: What stands in the file is not what was to be written.
    """
    source, _ = open_source(path, limits.cancellation)
    with closing(source), collector_paused():
        members = written.members
        ranges = [(member.offset, member.offset + member.nbytes) for member in members]
        checksums, frame = checksums_of_file(source, ranges)
        for member, checksum in zip(members, checksums, strict=True):
            if checksum != member.crc32:
                raise _failed(f"{member.name!r} was not written as it was read")
        directory, _ = find_directory(source)
        if frame != written.frame_crc32 or directory[::2] != (written.directory, len(members)):
            raise _failed("its headers are not those that were written")
        tree = read_pickle(SliceSource(source, members[0].offset, members[0].nbytes)).root
        found = collect(tree, Rebuilder(_WrittenStorages(storages)), limits).tensors
        if len(found) != len(expected) or any(map(_differ, found.items(), expected)):
            raise _failed("the tensors in it are not those that were to be written")


def verify_model(path: str, weights: Weights, limits: Limits) -> None:
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


class _WrittenStorages:
    """What the pickle of a file that was just written refers to: the storages of the source that stand in it."""

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

    def nested(self, stream: bytes) -> None:  # noqa: ARG002
        return


def _failed(what: str) -> OutputFailed:
    return OutputFailed(what, kind="verification-failed")


def _differ(found: tuple[str, TensorInfo], expected: tuple[str | None, TensorInfo]) -> bool:
    return (expected[0] is not None and found[0] != expected[0]) or _are_unlike(found[1], expected[1])


def _are_unlike(one: TensorInfo, other: TensorInfo) -> bool:
    if (one.dtype, one.shape, one.stride) != (other.dtype, other.shape, other.stride):
        return True
    if (one.layout, one.conj, one.neg) != (other.layout, other.conj, other.neg):
        return True
    if _begin(one) != _begin(other) and not _stand_in_pickles_alike(one, other):
        return True
    if one.layout == "strided":
        return False  # what hangs on a plain tensor (a gradient, attributes) is not the tensor's value
    parts, others = ([part for _, part in info.parts] for info in (one, other))
    return len(parts) != len(others) or any(map(_are_unlike, parts, others))


def _begin(info: TensorInfo) -> tuple[int, int] | None:
    """Return where in the source the first element stands; a view of a storage and of its whole give the same."""
    storage = info.storage
    if storage is None:
        return None
    return id(storage.source), storage.offset + info.storage_offset * info.dtype.itemsize // info.dtype.packed


def _stand_in_pickles_alike(one: TensorInfo, other: TensorInfo) -> bool:
    """Say whether the bytes of both stand in the pickles themselves, as numpy's do, and are the same."""
    storages = [info.storage for info in (one, other) if info.storage is not None]
    inside = [isinstance(storage.source, BytesSource) and storage.file_offset is None for storage in storages]
    return inside == [True, True] and LazyTensor("", one).read() == LazyTensor("", other).read()
