"""
A folder that several processes write: each file is a job that any of them may take.

The process that writes the folder makes the plan. A job is plain data: the source with the versions of its files, the
requested changes, and which file of the plan to write where. A worker makes the same plan from the same indexes, or
refuses; it reads only what goes into its file, reads the file back, and publishes it in the folder, which has no name
yet. When all files are complete, the index is written, and the folder gets its name. A job whose process ends is done
again: the last file under the name replaces others with the same bytes.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from zlib import crc32

from ckptool.errors import FileUnavailable, OutputFailed, SourceChanged, about
from ckptool.formats import open_checkpoint
from ckptool.limits import DEFAULT_LIMITS
from ckptool.migration.changes import Changes
from ckptool.migration.make_plan import make_plan
from ckptool.migration.output import Place, SinkFolder, mode_of, open_place
from ckptool.migration.plan import Plan
from ckptool.migration.writing import Writing
from ckptool.pickles.reader import gc_paused
from ckptool.sources.files import open_source
from ckptool.sources.source import Closing, Meter, Progress, Source
from ckptool.tensors.reading import LazyTensor

if TYPE_CHECKING:
    from ckptool.migration.casting import Lost

Version: TypeAlias = list[Any]
Versions: TypeAlias = dict[str, Version]
"""What tells versions of files apart, by path: size and time, or what the server reports."""


class Job(NamedTuple):
    """One file of a folder, for any process; all fields but the last four are the same for each job."""

    source: str
    """A path, or an address with how it is reached."""
    target: str | None
    """The requested target."""
    changes: Changes
    verifies: bool
    syncs: bool
    folder: str
    """The path of the folder to show in errors."""
    versions: Versions
    mark: int
    """A checksum of the plan."""
    order: str
    """A random id of the folder, shared by its jobs and by no others."""
    number: int
    """Its place among the files of the plan."""
    name: str
    nbytes: int
    place: Place


class Written(NamedTuple):
    """The result of a job: plain data."""

    number: int
    readers: list[str]
    """Names of the libraries that read it back."""
    compared: list[int]
    """Positions of the payloads whose pieces were all compared with the checksums of their files."""
    lost: dict[int, Lost]
    """See ``Casting.errors``."""
    versions: Versions
    """Those of the files of the source that were opened."""
    starts: array[int]
    """Offsets of its payloads."""


Tell: TypeAlias = Callable[[int, int, int], None]
"""Called with the number of a job, and how many bytes were written for it and read back so far."""
Writers: TypeAlias = Callable[[Sequence[Job], Tell], Generator[Written, None, None]]
"""Has each job done, in any order, and yields the results. After it is closed, no job is running."""


class Opened(Closing):
    """The source and the plan of one folder's jobs, any of which may be given; used in a ``with`` block."""

    def __init__(self, job: Job) -> None:
        self._versions = job.versions
        self._changes = job.changes
        with ExitStack() as opened:
            self._checkpoint = opened.enter_context(open_checkpoint(job.source))
            with about(self._checkpoint.path), gc_paused():
                self._plan = make_plan(self._checkpoint, job.target, self._changes)
                self._checkpoint.release_tree()
                self._compare()
            if _mark(self._plan) != job.mark:
                raise _changed(self._checkpoint.path)
            self._opened = opened.pop_all()

    def write(self, job: Job, progress: Progress | None = None, read_back: Progress | None = None) -> Written:
        """
        Do one of the jobs. A job may be done again, and by several processes at once.

        Raises:
            SourceChanged: The source is not the one that was planned, or changes meanwhile.
            OutputFailed: It could not be written, or is not what was to be written.
            CkptoolError: The source cannot be read, or is damaged.
        """
        checkpoint = self._checkpoint
        file, casting = self._plan.files[job.number], self._plan.casting
        limits = DEFAULT_LIMITS if job.verifies else None
        writing = Writing(checkpoint, self._plan, self._changes, limits, Meter(read_back, file.nbytes))
        with about(checkpoint.path):
            begin, end = 0, len(self._plan.expected)
            if file.reader is not None:  # a file of safetensors needs the tensors of its payloads alone
                begin = sum(len(one.payloads) for one in self._plan.files[: job.number])
                end = begin + len(file.payloads)
            needed = islice(self._plan.expected, begin, end)
            checkpoint.announce(LazyTensor(file.name, info) for _, info in needed)
            with open_place(job.place, progress, mode_of(checkpoint.source)) as output:
                starts = writing.file(file, output, syncs=job.syncs, about=job.folder)
                output.publish()
            versions = self._compare()
        pieces = [payload.pieces() for payload in file.payloads]
        compared = [number for number, one in enumerate(pieces) if one is not None and one.is_compared]
        lost = casting.errors if casting else {}
        return Written(job.number, list(writing.readers), compared, lost, versions, starts)

    def _compare(self) -> Versions:
        """Return the versions of the files that were opened; raise SourceChanged if they are not the planned ones."""
        found = _versions(self._checkpoint.source)
        _refuse_others(self._versions, found)
        return found

    def close(self) -> None:
        """Close the source."""
        self._opened.close()


def hand_out(
    writers: Writers,
    source: str,
    target: str | None,
    progress: Progress | None,
    read_back: Progress | None,
    writing: Writing,
    folder: SinkFolder,
) -> list[int]:
    """Have the files of a folder written as jobs, record the results, and return the offsets of their payloads."""
    plan, versions, order = writing.plan, _versions(writing.checkpoint.source), os.urandom(16).hex()
    how = writing.limits is not None, writing.syncs(folder), folder.path
    same = (source, target, writing.changes, *how, versions, _mark(plan), order)
    numbered = [(number, file) for number, file in enumerate(plan.files) if file.payloads]
    jobs = [Job(*same, at, one.name, one.nbytes, folder.elsewhere(one.name, one.nbytes)) for at, one in numbered]
    left = {job.number: job for job in jobs}
    starts: dict[int, array[int]] = {}
    far: tuple[dict[int, int], dict[int, int]] = {}, {}

    def tell(number: int, *done: int) -> None:
        for show, known, nbytes in zip((progress, read_back), far, done, strict=True):
            if nbytes > known.get(number, 0):  # one that is done again does not go back
                known[number] = nbytes
                if show is not None:
                    show(sum(known.values()), plan.nbytes)

    with closing(writers(jobs, tell)) as found:
        for written in found:
            if left.pop(written.number, None) is None:
                continue  # it was done twice
            _refuse_others(versions, written.versions)
            versions.update(written.versions)
            writing.readers.update(dict.fromkeys(written.readers))
            copied = [plan.files[written.number].payloads[number].pieces() for number in written.compared]
            for pieces in filter(None, copied):
                pieces.release()
            if plan.casting is not None:
                plan.casting.written_elsewhere(written.lost)
            starts[written.number] = written.starts
    lacking = [f"{job.name!r} was not written" for job in left.values()]
    for fact in chain(lacking, filter(None, (_lacks(job, folder) for job in jobs))):
        raise OutputFailed(fact, kind="verification-failed", path=folder.path)
    writing.checkpoint.check_unchanged()
    writing.meter.read(sum(job.nbytes for job in jobs))
    return [start for number in sorted(starts) for start in starts[number]]


def _mark(plan: Plan) -> int:
    """Return a checksum of a plan: of the names and sizes of its files, and of the index."""
    found = crc32(repr([(file.name, file.nbytes) for file in plan.files]).encode())
    for part in (part for file in plan.files if not file.payloads for part in file.content(())):
        found = crc32(part, found) if isinstance(part, bytes) else found
    return found


def _versions(source: Source) -> Versions:
    return {path: list(version) for path, version in source.versions()}


def _refuse_others(known: Mapping[str, Version], found: Mapping[str, Version]) -> None:
    for path, version in found.items():
        if known.get(path, version) != version:
            raise _changed(path)


def _changed(path: str) -> SourceChanged:
    hint = "Read it again once it is complete."
    return SourceChanged("the file was changed while it was being read", hint=hint, path=path)


def _lacks(job: Job, folder: SinkFolder) -> str:
    """Return why the file of a job is not in the temporary folder with its planned size; empty if it is."""
    try:
        source, _ = open_source(folder.reading_path(job.name))
    except FileUnavailable as error:
        return f"{job.name!r} is not there: {error.message}"
    with closing(source):
        is_whole = source.nbytes == job.nbytes
        return "" if is_whole else f"{job.name!r} has {source.nbytes:,} bytes, and {job.nbytes:,} were planned"
