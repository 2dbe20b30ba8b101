"""
The SHA-256 of a file beside the digest of its weights, from one reading of its bytes, with the checksums or without.

Elements that the file holds as they are, one after the other, are hashed while the file passes. Those of views in
another order, of compressed members and of other files are read again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from hashlib import sha256
from typing import TYPE_CHECKING, TypeAlias

from ckptool.cancellation import Cancellation
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.digest import digest_of, tensors_of
from ckptool.errors import CkptoolError, Failure
from ckptool.limits import Limits
from ckptool.sources.checksums import read_once
from ckptool.sources.files import Origin, file_under, open_source
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity

if TYPE_CHECKING:
    from hashlib import _Hash as HASH

Range: TypeAlias = tuple[int, int, tuple[object, ...]]
"""Where elements begin and end in the file, and the identity of their tensor."""


class Hashing:
    """Takes the bytes of a file in order, and hashes all of them, and those of each tensor that lies in them."""

    def __init__(self, checkpoint: Checkpoint, limits: Limits) -> None:
        self._checkpoint = checkpoint
        self._limits = limits
        self._file = sha256()
        self._seen = 0
        is_one = not (checkpoint.shards or checkpoint.parts) and checkpoint.source.file_offset(0) == 0
        self.watch = self._take if is_one else None
        """Takes the pieces; None where the checkpoint is not one file."""
        self._waiting: list[Range] = []
        """Those that begin first are last."""
        self._within: list[tuple[Range, HASH]] = []
        self._known: dict[tuple[object, ...], str] = {}
        self._error: CkptoolError | None = None
        try:
            tensors = tensors_of(checkpoint, limits)
        except Failure as error:
            self._error = error
        else:
            self._waiting = sorted(self._ranges(tensors.values()), key=lambda one: one[0], reverse=True)

    def _ranges(self, tensors: Iterable[LazyTensor]) -> Iterable[Range]:
        for info in {identity(one.info): one.info for one in tensors}.values():
            storage = info.storage
            if storage is None or not info.nbytes or not info.is_as_stored:
                continue
            if info.dtype.packed > 1 and info.storage_offset:
                continue
            under = file_under(storage.source, storage.offset)
            if under is not None and under[0] is self._checkpoint.source:
                start = under[1] + info.storage_offset * info.dtype.itemsize
                yield start, start + info.nbytes, identity(info)

    def _take(self, start: int, piece: memoryview) -> None:
        if start < self._seen:  # of another archive in the same file
            return
        stop = self._seen = start + len(piece)
        self._file.update(piece)
        while self._waiting and self._waiting[-1][0] < stop:
            self._within.append((self._waiting.pop(), sha256()))
        for one, found in self._within:
            found.update(piece[max(one[0] - start, 0) : one[1] - start])
        if any(one[1] <= stop for one, _ in self._within):
            self._known.update((one[2], found.hexdigest()) for one, found in self._within if one[1] <= stop)
            self._within = [pair for pair in self._within if pair[0][1] > stop]

    def finish(self) -> tuple[str | None, str | None, CkptoolError | None]:
        """
        Return the SHA-256 of the file, and the digest, or the error that says why there is none.

        The first is None where the checkpoint is several files. What did not pass is read now.
        """
        content, error = None, self._error
        if self.watch is not None:
            if self._seen != self._checkpoint.source.nbytes:
                read_once(self._checkpoint.source, self.watch)
            content = self._file.hexdigest()
        try:
            digest = digest_of(self._checkpoint, self._limits, hashed=self._known) if error is None else None
        except Failure as failure:
            digest, error = None, failure
        return content, digest, error


def sha256_of(origin: Origin, cancellation: Cancellation | None = None) -> str | None:
    """Return the SHA-256 of a file, as ``sha256sum`` prints it; None for a folder, and for what cannot be read."""
    try:
        source, _ = open_source(origin, cancellation)
        found = sha256()
        with closing(source):
            read_once(source, lambda _, piece: found.update(piece))
        return found.hexdigest()
    except Failure:
        return None
