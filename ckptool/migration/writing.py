"""
Carries out a plan of any form: writes the files, has them read back and compared, and publishes them.

Each file is filled, put on the disk, and read back, byte for byte; other processes may do that. When all files are
complete, the result is opened as any checkpoint is, and its tensors are compared with the plan. Only then does it get
its name. A single file is a folder of one; a clone shares the source's bytes, except those of an edit.

Where a file holds the bytes of a large payload unchanged, threads copy it: each takes a run of bytes, reads it,
computes its CRC-32 and writes it to its position. Everything else goes in order through one thread. Calls that copy in
the system (``copy_file_range``, ``sendfile``) were measured, and are no faster than such pieces; and the bytes are read
for their checksums in any case.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from zlib import crc32

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import Cancelled, OutputFailed
from ckptool.formats import open_checkpoint
from ckptool.limits import Limits
from ckptool.migration.changes import Changes
from ckptool.migration.output import Output, Sink, SinkFile
from ckptool.migration.plan import OutFile, Plan
from ckptool.migration.verify import (
    OffsetOf,
    Written,
    among,
    compare_bytes,
    compare_tensors,
    compare_values,
    expected_tensors,
    in_its_file,
    reading_back,
)
from ckptool.pickles.reader import gc_paused
from ckptool.sources.checksums import WORTH_A_THREAD, joined_crc32, pieces, runs, threads
from ckptool.sources.files import FileSource
from ckptool.sources.paths import is_remote
from ckptool.sources.source import Closing, Meter, ReadAhead
from ckptool.tensors.payloads import Payload, check_storages
from ckptool.tensors.pieces import Extent, PiecesSource

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")


class Writing:
    """One plan that is being written, or some of its files."""

    def __init__(
        self, checkpoint: Checkpoint, plan: Plan, changes: Changes, limits: Limits | None, meter: Meter
    ) -> None:
        self.checkpoint = checkpoint
        self.plan = plan
        self.limits = limits
        """Limits for reading the result back; None if it is not verified."""
        self.meter = meter
        """Counts what is read back."""
        self.readers: dict[str, None] = {} if limits is None else {"ckptool": None}
        """Names of the libraries that read it back, in order."""
        self.changes = changes

    def run(self, sink: Sink, elsewhere: Elsewhere | None = None) -> int:
        """
        Write all files, publish the result, and return its size in bytes. Files with payloads may be written
        ``elsewhere``, before the index.
        """
        plan = self.plan
        sink.reserve(plan.nbytes)
        files = plan.files
        starts = array("Q")
        if elsewhere is not None:
            starts.extend(elsewhere(self, sink))
            files = [file for file in files if not file.payloads]
        with ExitStack() as opened:
            before: SinkFile | None = None
            for file in files:
                output: SinkFile = sink.file(file.name)
                opened.enter_context(output)
                starts.extend(self.file(file, output, syncs=self.syncs(sink), about=sink.path))
                if before is not None:  # writing this file gave the disk time for the one before
                    self._keep(before)
                before = output
            if before is not None:
                self._keep(before)
            if self.limits is not None:
                # Source tensors may have been read in parts, without comparing their storages' checksums.
                read = plan.weights.taken if plan.weights is not None else plan.casting.tensors if plan.casting else []
                parts = [part for one in plan.made for part in one.parts]
                check_storages([*read, *parts, *plan.cut], plan.payloads)
                self.checkpoint.check_unchanged()
                with self._reading_back(sink.path):
                    for part, file in zip(plan.parts, plan.files, strict=False):
                        self._compare(part, sink.reading_path(file.name), starts[: len(file.payloads)])
                        starts = starts[len(file.payloads) :]
                    if not plan.parts:
                        self._compare(plan, sink.reading_path(), starts)
            nbytes = output.nbytes if plan.builds_model else plan.nbytes
            sink.publish()
        return nbytes

    def _keep(self, output: SinkFile) -> None:
        """Publish a file in its folder, which is itself not published yet."""
        if self.plan.is_folder:
            output.publish()
            output.close()

    def syncs(self, sink: Sink) -> bool:
        """Return whether files must be on the disk before they get their names: verified or replacing others."""
        return self.limits is not None or bool(sink.replaced)

    def file(self, file: OutFile, output: SinkFile, *, syncs: bool, about: str) -> array[int]:
        """
        Write a file, and read it back if it is to be verified; return the offsets of its payloads. The file has no name
        yet.

        ``about`` is the path that errors of reading back name.
        """
        output.reserve(file.nbytes)
        written = self._fill(file, output)
        self.checkpoint.check_unchanged()
        if output.nbytes != file.nbytes and not self.plan.builds_model:
            what = f"{output.nbytes:,} bytes were written, and {file.nbytes:,} were planned"
            raise OutputFailed(what, kind="verification-failed", path=about)
        if syncs:
            output.sync()
        if self.limits is not None:
            path = output.reading_path()
            with self._reading_back(about):
                if written is not None:
                    compare_bytes(path, written, self.limits, self.meter)
                if file.reader is not None and not is_remote(path) and (other := file.reader(path)):
                    self.readers[other] = None
        return written.starts if written is not None else array("Q")

    def _fill(self, file: OutFile, output: SinkFile) -> Written | None:
        """Write a file, and return what was written; None for a clone, or a model that torch saves."""
        if file.base is not None:
            assert isinstance(output, Output)  # nothing else is planned so
            output.clone(file.base.fileno())
            for run in file.edits:
                output.fill(run.offset, memoryview(run.data))
            return None
        if self.plan.builds_model:
            from ckptool.torch_ops.models import save_model

            assert self.plan.weights is not None  # the model is built for them
            path = output.reading_path()
            save_model(str(self.changes.model), self.changes.model_arguments, self.plan.weights.tensors, path)
            return None
        return fill(file, output, checksums=self.limits is not None)

    def _compare(self, plan: Plan, path: str, starts: array[int]) -> None:
        """Open what was written, and compare it with the plan."""
        limits = self.limits
        assert limits is not None  # else nothing is read back
        if plan.builds_model and plan.weights is not None:
            compare_values(path, plan.weights, limits, self.meter)
            return
        one_by_one = plan.form == "safetensors" and len(starts) == len(plan.expected)
        place: OffsetOf | None = in_its_file if plan.keeps_layout else None
        if not plan.keeps_layout and plan.packed is None:
            place = among(plan.files[0].payloads, starts)
        expected = expected_tensors(plan, place, starts if one_by_one else ())
        with gc_paused(), open_checkpoint(path, limits=limits) as found:
            compare_tensors(found, expected, place, plan.packed)

    @contextmanager
    def _reading_back(self, path: str) -> Iterator[None]:
        """Raise OutputFailed for any error in a file that was written, or SourceChanged if the source has changed."""
        hint = "Try again, or write to another disk: this one, or the memory, does not keep what it is given."
        try:
            with reading_back(path, hint):
                yield
        except Cancelled as error:
            error.path = self.checkpoint.path  # the new file has no name yet
            raise
        except OutputFailed:
            self.checkpoint.check_unchanged()  # a model is compared with the source itself
            for payload in self.plan.payloads:  # the checksum that was taken over may be wrong
                if payload.known_crc32:
                    payload.check(reduce(lambda found, chunk: crc32(chunk, found), payload.chunks(), 0))
            raise
        self.checkpoint.check_unchanged()


Elsewhere: TypeAlias = Callable[[Writing, Any], Iterable[int]]
"""Has the files that have payloads written by others, and returns the offsets of the payloads."""


def fill(file: OutFile, output: SinkFile, *, checksums: bool = True) -> Written:
    """
    Write the content of a file; return the offsets of its payloads, with the CRC-32 of what was read for each.

    Those that the source has of large payloads are taken over. Without ``checksums``, others are 0 where no content
    needs them.
    """
    starts, ends, found = array("Q"), array("Q"), array("Q")
    rest = 0
    with Transfer(output, checksums=checksums) as transfer:
        for part in file.content(found):
            if isinstance(part, bytes):
                rest = crc32(part, rest)
                output.write(part)
            else:
                starts.append(output.position)
                found.append(transfer.send(part, checksum=file.needs_checksums))
                ends.append(output.position)
    output.flush()
    return Written(starts, ends, found, rest)


class Transfer(Closing):
    """
    One output being filled. Used in a ``with`` block.

    The checksum that a source has of a large payload is taken over unread: what is read back is compared with it, and
    reading twice what was copied is saved. Without ``checksums``, none is computed where there is none, either.
    """

    def __init__(self, output: SinkFile, *, checksums: bool = True) -> None:
        self._output = output
        self._checksums = checksums
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: tuple[FileSource, ReadAhead] | None = None

    def send(self, payload: Payload, *, checksum: bool = False) -> int:
        """Append a payload, and return its CRC-32 or that of the source; ``checksum`` requires one in any case."""
        extents, pieces = payload.extents(), payload.pieces()
        checksum = not payload.known_crc32 and (self._checksums or checksum)
        found = 0
        if extents is None and pieces is not None and payload.nbytes >= WORTH_A_THREAD:
            found = self._put_together(pieces, checksum=checksum)
        elif extents is None:
            chunks = payload.chunks()
            for chunk in self._computed(chunks) if payload.nbytes >= WORTH_A_THREAD else chunks:
                found = crc32(chunk, found)
                self._output.write(chunk)
        elif all(extent.nbytes >= WORTH_A_THREAD for extent in extents):
            found = self._copy(extents, checksum=checksum)
        else:
            for extent in extents:
                if extent.nbytes >= WORTH_A_THREAD:
                    of_extent = self._copy([extent], checksum=True)
                else:
                    if self._ahead is None or self._ahead[0] is not extent.file:  # the next are likely to be adjacent
                        self._ahead = extent.file, ReadAhead(extent.file)
                    data = self._ahead[1].read(extent.offset, extent.nbytes)
                    self._output.write(data)
                    of_extent = crc32(data)
                    extent.check(of_extent)
                found = joined_crc32(found, of_extent, extent.nbytes)
        if extents is not None and pieces is not None:
            pieces.release()
        if extents is not None and not checksum:
            return payload.known_crc32
        payload.check(found)
        return found

    def _copy(self, extents: Sequence[Extent], *, checksum: bool) -> int:
        """Append runs of bytes of files, and return their CRC-32, or 0 without ``checksum``."""
        output = self._output
        begin = output.leave(sum(extent.nbytes for extent in extents))
        ends = accumulate((extent.nbytes for extent in extents), initial=begin)

        def copy(run: tuple[FileSource, int, int, int]) -> int:
            file, start, stop, shift = run
            found = 0
            for position, piece in pieces(file, start, stop):
                if checksum:
                    found = crc32(piece, found)
                output.fill(position + shift, piece)
            return found

        work = [
            [(one.file, *run, at - one.offset) for run in runs(one.offset, one.offset + one.nbytes)]
            for one, at in zip(extents, ends, strict=False)
        ]
        done = self._each(copy, chain.from_iterable(work))
        found = 0
        for extent, own in zip(extents, work, strict=True):
            of_extent = 0
            for (_, start, stop, _), of_run in zip(own, done, strict=False):
                output.filled(stop - start)
                of_extent = joined_crc32(of_extent, of_run, stop - start) if checksum else 0
            if checksum:
                extent.check(of_extent)
                found = joined_crc32(found, of_extent, extent.nbytes)
        return found

    def _put_together(self, source: PiecesSource, *, checksum: bool) -> int:
        """Append a tensor in pieces, band by band, and return the CRC-32 of its bytes, or 0 without ``checksum``."""
        output, checked, band = self._output, source.checked(), source.band_nbytes
        shift = output.leave(source.nbytes)
        memory = threading.local()

        def fill(start: int) -> int:
            if not hasattr(memory, "view"):
                memory.view = memoryview(bytearray(band))
            view = memory.view[: source.nbytes - start]
            checked.read_into(start, view)
            output.fill(start + shift, view)
            return crc32(view) if checksum else 0

        found = 0
        starts = range(0, source.nbytes, band)
        for start, of_band in zip(starts, self._each(fill, starts), strict=True):
            nbytes = min(band, source.nbytes - start)
            output.filled(nbytes)
            found = joined_crc32(found, of_band, nbytes)
        checked.compare()
        source.release()
        return found if checksum else 0

    def _computed(self, chunks: Iterator[T]) -> Iterator[T]:
        """Yield chunks in order; a thread computes or unpacks each while the one before it is written."""
        pool = self._threads()
        coming = pool.submit(next, chunks, None)
        while (chunk := coming.result()) is not None:
            coming = pool.submit(next, chunks, None)
            yield chunk

    def _each(self, do: Callable[[T], int], work: Iterable[T]) -> Iterator[int]:
        """Call a function for each piece of work, in several threads if the output takes bytes in any order."""
        return self._threads().map(do, work) if self._output.takes_any_order else map(do, work)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = threads()
        return self._pool

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
