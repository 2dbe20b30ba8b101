"""
The layouts of checkpoints that are directories, and ``open_folder``, which finds the checkpoint that a folder leads to.

Names of files are hints where to look; the content of the files is proof. A layout, in which several files are one
checkpoint, is a module of its own. All other folders contain whole files, or folders that do: ``filenames`` decides
which of them may be meant. A single one is opened; of several, none is chosen, but all are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol, TypeAlias

from ckptool.checkpoints.parsed import Parsed, Remark
from ckptool.errors import (
    CkptoolError,
    Failure,
    FileUnavailable,
    LimitExceeded,
    NotACheckpoint,
    UnknownFormat,
    about,
)
from ckptool.formats import filenames, sharded, slices
from ckptool.formats.directories import beside, pointers, several
from ckptool.formats.filenames import ADAPTER, PIPELINE, Candidate, Choice
from ckptool.formats.json_beside import json_object, missing_adapter_parts
from ckptool.formats.probe import Probe
from ckptool.limits import Limits
from ckptool.sources.descriptors import LINK
from ckptool.sources.files import FileSource
from ckptool.sources.folder import FolderSource
from ckptool.tensors.pieces import PiecesSource

Opened: TypeAlias = "tuple[FileSource | FolderSource, Parsed]"
"""The source of a checkpoint, which the caller has to close, and its content."""

_DEEPEST: Final = 5
_MOST_FOLDERS: Final = 500
"""Most folders below one that are searched for checkpoints."""


class Layout(Protocol):
    """What the module of a layout contains."""

    NAME: str

    def sniff(self, folder: FolderSource) -> bool:
        """Return whether the folder has this layout."""
        ...

    def read(self, folder: FolderSource, probe: Probe) -> Parsed:
        """Read the indexes in a folder that ``sniff`` recognised; no tensor is read."""
        ...


def layouts_in_order() -> Iterator[Layout]:
    """Yield the layouts, in the order in which they are tried."""
    from ckptool.formats.directories import (
        dcp,
        deepspeed,
        deepspeed_universal,
        hf_storage,
        megatron,
        nanotron,
        rank_files,
        torch_checkpointing,
    )

    yield dcp
    yield hf_storage
    yield deepspeed_universal  # before deepspeed, whose files are beside it
    yield deepspeed
    yield megatron
    yield nanotron
    yield rank_files
    yield torch_checkpointing


def is_one(folder: FolderSource) -> bool:
    """Return whether the files of a folder are one checkpoint together, as those of a layout or a pipeline are."""
    return PIPELINE in folder.files or _layout(folder) is not None


def _layout(folder: FolderSource) -> Layout | None:
    return next((one for one in layouts_in_order() if one.sniff(folder)), None)


def open_folder(folder: FolderSource, probe: Probe) -> Opened:
    """
    Return the checkpoint that a folder is, or leads to. The folder is closed, unless the checkpoint reads from it.

    Raises:
        FileUnavailable: It is not a checkpoint that is known; the message says what is there.
        CkptoolError: It is one, and cannot be read.
    """
    source: FileSource | FolderSource | None = None
    try:
        with about(folder.path):
            source, parsed = _read(folder, probe)
            folder.check_unchanged()
            return source, parsed
    finally:
        if source is not folder:
            folder.close()


def _refuse_repeated(folder: FolderSource, parsed: Parsed, limits: Limits) -> None:
    """Raise LimitExceeded if tensors in pieces are far larger than the files: pieces may repeat the same bytes."""
    seen: set[int] = set()
    needed = 0
    for info in parsed.contents.tensors.values():
        if info.storage is not None and isinstance(info.storage.source, PiecesSource):
            needed += 0 if id(info.storage.source) in seen else info.storage.nbytes
            seen.add(id(info.storage.source))
    held = sum(file.nbytes for _, file in folder.opened())
    if needed > limits.expanded(held):
        raise LimitExceeded(
            f"its tensors in pieces are {needed:,} bytes, and its files {held:,}",
            hint="Get the folder again, from one save.",
            needed=needed,
            actual=limits.expanded(held),
        )


def _read(folder: FolderSource, probe: Probe) -> Opened:
    layout = _layout(folder)
    if layout is not None:
        parsed = layout.read(folder, probe)
        _refuse_repeated(folder, parsed, probe.limits)
        used = [name for name, _ in folder.opened()]
        inside = {name.partition("/")[0] for name in used}
        others = [name for name in checkpoint_folders(folder) if name not in inside]
        return folder, _with_beside(folder, parsed, used, Choice(()), others)
    choice, folders = offers(folder)
    try:
        return _open_choice(folder, choice, folders, probe)
    except (FileUnavailable, NotACheckpoint, UnknownFormat) as error:
        below = _of_folders(folder, folders)
        if not _are_strangers(folder, choice, error) or not below.candidates:
            raise
        strangers = tuple(one.name for one in choice.candidates)
        return _open_choice(folder, below._replace(strangers=strangers), folders, probe)


def _are_strangers(folder: FolderSource, choice: Choice, error: CkptoolError) -> bool:
    """Return whether files of a folder that could not be opened are not of its checkpoint, by name and error."""
    is_none = not isinstance(error, FileUnavailable) or error.kind in (LINK, "directory")
    return is_none and all(one.kind == "file" for one in choice.candidates) and not filenames.has_weights(folder.files)


def _open_choice(folder: FolderSource, choice: Choice, folders: Sequence[str], probe: Probe) -> Opened:
    """Open what a folder offers: the only candidate, or several together."""
    source: FileSource | FolderSource
    if len(choice.candidates) == 1:
        (chosen,) = choice.candidates
        source, parsed = open_candidate(folder, chosen, probe)
        if chosen.kind == "file":
            with slices.opening_of(folder.detached, probe) as opening:
                parsed = slices.as_part(parsed, chosen.name, folder.path, folder.files, opening)
        elif chosen.kind != "folder" and parsed.part_of is None:
            parsed = slices.marked_if_incomplete(parsed, chosen.name, folder.path, folder.files)
        if ADAPTER in folder.files and chosen.name.startswith("adapter_model."):
            found = missing_adapter_parts(json_object(folder, ADAPTER), parsed)
            parsed = parsed._replace(remarks=(*parsed.remarks, *found))
        used = [chosen.name, *chosen.files, *(shard.name for shard in parsed.shards)]
    else:
        source, parsed, used = several.read(folder, choice.candidates, open_candidate, probe)
    missing, said = several.missing_components(folder, folders)
    remarks = [*parsed.remarks, *said]
    remarks += beside.without_weights(folder, choice, parsed)
    remarks += beside.missing_parts(folder)
    remarks += beside.missing_files(folder)
    unread = [name for name, _ in parsed.unopened] if PIPELINE in folder.files else []  # of its components
    parsed = parsed._replace(remarks=tuple(remarks), absent=(*parsed.absent, *missing, *unread))
    return source, _with_beside(folder, parsed, used, choice, folders)


def offers(folder: FolderSource) -> tuple[Choice, list[str]]:
    """Return the possible checkpoints of a folder, and the folders in it that could be checkpoints."""
    choice = filenames.choose(folder.files)
    snapshot = pointers.snapshot(folder)
    if snapshot is not None:
        return Choice((Candidate(snapshot, "folder"),)), [snapshot]
    folders = checkpoint_folders(folder)
    if not choice.candidates:
        choice = _of_folders(folder, folders)
    if not choice.candidates:
        choice = filenames.helpers(folder.files)
    if not choice.candidates:
        choice = Choice(tuple(Candidate(name, "folder") for name in folders))
    archives = [name for name in folder.files if name.lower().endswith(".zip")]
    if not choice.candidates and len(archives) == 1:  # as stable-baselines3 saves
        choice = Choice((Candidate(archives[0], "file"),))
    return choice, folders


def _of_folders(folder: FolderSource, folders: Sequence[str]) -> Choice:
    """Return the folders in a folder that may be meant: those with weights, or the one that a pointer names."""
    weights = [name for name in folders if filenames.role_of(name) is None]
    named = pointers.followed(folder, weights)
    return Choice(tuple(Candidate(name, "folder") for name in ([named] if named is not None else weights)))


def open_candidate(folder: FolderSource, candidate: Candidate, probe: Probe) -> Opened:
    """Open one of the files or folders that a folder offers."""
    if candidate.kind == "folder":
        below = folder.below(candidate.name)
        return open_folder(below, probe.beside(below))
    if candidate.kind == "set":
        sharded.refuse_many(candidate.total, probe.limits)
        missing = [one for one in candidate.files if not folder.has(one)]
        if missing:
            raise sharded.missing_shards(missing, len(candidate.files))
        parsed = sharded.read_set(folder, candidate.files, probe)
        what = f"no index names the {len(candidate.files):,} shards: they are together by their names"
        return folder, parsed._replace(remarks=(*parsed.remarks, Remark("CK168", what)))
    source = folder.detached(candidate.name)
    try:
        with about(source.path):
            if candidate.kind == "index":
                return _of_index(folder, candidate.name, source, probe)
            parsed = probe.beside(source).read()
            source.check_unchanged()
            return source, parsed
    except BaseException:
        source.close()
        raise


def _of_index(folder: FolderSource, name: str, source: FileSource, probe: Probe) -> Opened:
    """Open the shards that an index names; if none of them exists, the complete set that exists instead."""
    try:
        parsed = probe.beside(source).read()
    except FileUnavailable as error:
        there = filenames.other_set(name, folder.files) if sharded.lacks_all(error) else None
        if there is None:
            raise
        source.close()
        _, parsed = open_candidate(folder, there, probe)
        what = (
            f"{name!r} names {error.needed:,} shards, none of which is here: the {there.total:,} that are were opened"
        )
        remark = Remark("CK162", what, "Remove the index, or get it again: it is of another save.")
        return folder, parsed._replace(remarks=(remark, *(one for one in parsed.remarks if one.code != "CK168")))
    source.check_unchanged()
    return source, parsed


def _with_beside(
    folder: FolderSource, parsed: Parsed, used: Iterable[str], choice: Choice, folders: Sequence[str]
) -> Parsed:
    return parsed._replace(beside=(*parsed.beside, *beside.beside(folder, frozenset(used), choice, folders)))


def checkpoint_folders(folder: FolderSource) -> list[str]:
    """Return the names of the folders in a folder that could be checkpoints; links are not followed."""
    return _checkpoint_folders(folder, [_MOST_FOLDERS], 0)


def _checkpoint_folders(folder: FolderSource, budget: list[int], depth: int) -> list[str]:
    found = []
    for name in folder.folders:
        if name.startswith(".") or depth >= _DEEPEST or budget[0] <= 0:
            continue
        budget[0] -= 1
        try:
            below = folder.below(name)
        except Failure:  # a link, or not permitted
            continue
        try:
            if _is_checkpoint(below, budget, depth + 1):
                found.append(name)
        finally:
            below.close()
    return found


def _is_checkpoint(folder: FolderSource, budget: list[int], depth: int) -> bool:
    """Return whether a folder could be, or lead to, a checkpoint."""
    if _layout(folder) is not None or filenames.choose(folder.files).candidates:
        return True
    return bool(filenames.helpers(folder.files).candidates or _checkpoint_folders(folder, budget, depth))
