"""
``open_checkpoint``, which finds the format of a file; the list of formats, a module each.

Content decides, never the suffix: each format gets the same ``Probe`` of a file, and recognises its own files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from ckptool.arguments import checked
from ckptool.cancellation import Cancellation
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.parsed import Parsed, Traits
from ckptool.errors import CkptoolError, Failure, FileUnavailable, LimitExceeded, NotACheckpoint, UnknownFormat, about
from ckptool.formats.probe import Probe
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.pickles.reader import gc_paused
from ckptool.sources import files, paths
from ckptool.sources.files import Origin, open_source
from ckptool.sources.journal import refuse_edited
from ckptool.sources.paths import shown_path
from ckptool.system import command_line

if TYPE_CHECKING:
    from ckptool.sources.folder import FolderSource


class Format(Protocol):
    """What the module of a format contains."""

    NAME: str
    TRAITS: Traits

    def sniff(self, probe: Probe) -> bool:
        """Return whether the file is in this format."""
        ...

    def read(self, probe: Probe) -> Parsed:
        """Read the index of a file that ``sniff`` recognised; no tensor is read."""
        ...


_MEMBER_MARK = "::"
_POINTERS = (".metadata", *paths.POINTERS)
"""Names of files that stand for their directory."""
_LONGEST_POINTER = 512
"""Most bytes of such a file, which is a line of text; no checkpoint is shorter."""


def formats_in_order() -> Iterator[Format]:
    """
    Yield the formats, one module each, in the order in which they are tried.

    Most files are of the first three; the others are imported only when it is their turn.
    """
    from ckptool.formats import safetensors, torch_zip, torchscript

    yield safetensors  # before pickles: the low byte of its length may be 0x80
    yield torchscript  # before torch_zip, which it is a kind of
    yield torch_zip

    from ckptool.formats import packed, plain_pickle, pt2, sharded, torch_legacy, torch_tar, torchscript_json

    yield pt2
    yield torchscript_json
    yield torch_legacy  # before plain pickles, which it begins with
    yield torch_tar
    yield packed  # after every format that is itself a zip or a tar
    yield plain_pickle
    yield sharded  # text, unlike all others


@checked()
def open_checkpoint(origin: Origin, *, limits: Limits = DEFAULT_LIMITS) -> Checkpoint:
    """
    Open a checkpoint of any known format, going by content and never by suffix.

    ``origin`` is a path, bytes, or a binary file object, which is read from its beginning, whatever its position.
    A path may end in ``::MEMBER`` to pick one file of an archive. It may lead to an index of shards, which have to be
    in its folder, or to a directory. Only the index is read: no tensor data.
    No code in the file runs, and torch is not imported.

    Raises:
        FileUnavailable: The path is missing, not permitted, or neither a file nor a directory that is a checkpoint.
        NotACheckpoint: The file is something else, which the message names.
        UnknownFormat: No format recognises it.
        Cancelled: The cancellation in ``limits`` was triggered. No file is open.
        CkptoolError: A format recognises it, but cannot read the rest.
    """
    path, member = _split_member(origin)
    with gc_paused(), _naming(shown_path(path) if isinstance(path, str) else None):
        try:
            source, shown = open_source(path, limits.cancellation)
        except FileUnavailable as error:
            if error.kind != "directory":
                raise
            assert isinstance(path, str | os.PathLike)  # nothing else is a directory
            return _open_folder(os.fspath(path), member, limits)
        try:
            with _naming(shown):
                probe = Probe(source, limits, _read)
                parsed = _read_file(probe, path, member)
                if parsed.part_of is not None and not parsed.part_of.path:  # of an archive
                    place = _MEMBER_MARK.join([shown, *(member or "").split(_MEMBER_MARK)[:-1]])
                    parsed = parsed._replace(part_of=parsed.part_of._replace(path=place))
                if isinstance(source, files.FileSource):
                    source.check_unchanged()
                return Checkpoint(shown, source, parsed)
        except BaseException as error:
            source.close()
            if isinstance(error, CkptoolError) and isinstance(source, files.FileSource):
                refuse_edited(os.path.realpath(source.path), "unread", "damaged", "torn")
            raise


def folder_source(path: str, cancellation: Cancellation | None = None) -> FolderSource:
    """
    Return a folder as a source: a local one, or a prefix of a store.

    Raises:
        FileUnavailable: There is no such folder, or it cannot be read.
    """
    if not paths.is_remote(path):
        from ckptool.sources.folder import FolderSource  # most are files

        return FolderSource(path, cancellation)
    from ckptool.sources.remote_folder import open_prefix  # few folders are remote

    return open_prefix(path, cancellation)


def _open_folder(path: str, member: str | None, limits: Limits) -> Checkpoint:
    from ckptool.formats import directories  # most are files

    if member is not None:
        return open_checkpoint(paths.below(path, member), limits=limits)
    folder = folder_source(path, limits.cancellation)
    source, parsed = directories.open_folder(folder, Probe(folder, limits, _read))
    if parsed.part_of is None:
        from ckptool.formats import slices

        part = slices.rank_of_megatron(path)
        if part is None and source is not folder:
            part = slices.of_ranks(source.path, parsed, Probe(source, limits, _read))
        parsed = (
            slices.of_hosts(parsed, Probe(source, limits, _read)) if part is None else parsed._replace(part_of=part)
        )
    return Checkpoint(source.path, source, parsed)


def _read(probe: Probe) -> Parsed:
    for one in formats_in_order():
        if one.sniff(probe):
            return one.read(probe)
    from ckptool.formats.identify import name_foreign  # thirty kinds of file, needed only when no format fits

    fact = f"{probe.source.nbytes:,} bytes that begin with {probe.head[:16].hex(' ')}"
    raise name_foreign(probe.source) or UnknownFormat(
        f"not a checkpoint that any format recognises: {fact}",
        hint="Check that this is the file you meant.",
        actual=probe.source.nbytes,
    )


def _read_file(probe: Probe, path: Origin, member: str | None) -> Parsed:
    """
    Read a file, or a member of it.

    If the name of the file shows that it is one of a set, note that, or explain by it why it cannot be read.
    """
    if member:
        from ckptool.formats import packed

        return packed.read_member(probe, member)
    if not isinstance(path, str):
        return _read(probe)
    from ckptool.formats import slices

    try:
        return slices.with_file_set(path, _read(probe), probe)
    except Failure as error:
        explained = slices.explained(error, path)
        if explained is error:
            # Only for names that indices have: a scan of many foreign files would list their folder for each of them.
            if isinstance(error, NotACheckpoint | UnknownFormat) and path.endswith(".json"):
                _lead_to_folder(error, os.path.dirname(path) or ".")
            raise
        raise explained from error


def _lead_to_folder(error: CkptoolError, place: str) -> None:
    """Add the folder of a file to the error that it is no checkpoint, if the folder is one by its layout."""
    from ckptool.formats import directories

    if os.path.isdir(place):
        with suppress(Failure), closing(folder_source(place)) as folder:
            if directories.is_one(folder):
                error.hint, error.command = "Give the folder.", command_line("ckptool", "inspect", place)


def member_in(origin: Origin) -> str | None:
    """Return the member of an archive that a path names after ``::``; None if it names none."""
    try:
        return _split_member(origin)[1]
    except Failure:  # not a valid address: opening it reports why
        return None


def _split_member(origin: Origin) -> tuple[Origin, str | None]:
    if not isinstance(origin, str | os.PathLike):
        return origin, None
    path = os.fspath(origin)
    if paths.is_remote(path):
        from ckptool.sources.address import as_remote

        return as_remote(path).split_member()
    folder, name = os.path.split(path)
    if name in _POINTERS and _is_pointer(path):
        return folder or ".", None
    if _MEMBER_MARK not in path or os.path.lexists(path):
        return path, None
    outer, _, member = path.partition(_MEMBER_MARK)
    return outer, member


def _is_pointer(path: str) -> bool:
    """Return whether a file with such a name may stand for its directory: a line of text, or an index of DCP."""
    if path.endswith(_POINTERS[0]):  # other programs have text in files of this name
        return os.path.isfile(path) and paths.first_bytes(path, 1) in (b"\x80", b"")
    return os.path.isfile(path) and os.path.getsize(path) <= _LONGEST_POINTER


@contextmanager
def _naming(path: str | None) -> Iterator[None]:
    """Add the path of the file to errors of the block; MemoryError becomes LimitExceeded."""
    with about(path):
        try:
            yield
        except MemoryError as error:
            raise LimitExceeded("what it holds needs more memory than there is") from error
