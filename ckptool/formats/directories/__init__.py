"""
``open_folder``: which checkpoint a folder is or leads to; the list of layouts.

Names of files are hints where to look; the content of the files is proof. A layout, in which several files are one
checkpoint, is a module of its own. All other folders contain whole files, or folders that do: ``filenames`` decides
which of them may be meant. A single one is opened; of several, none is chosen, but all are listed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Final, NamedTuple, TypeAlias

import ckptool.system as system
from ckptool.checkpoints.contents import collect
from ckptool.checkpoints.parsed import Parsed, Remark, Traits
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
from ckptool.formats.directories import beside
from ckptool.formats.directories.side_by_side import TreeBuilder, nested
from ckptool.formats.filenames import ADAPTER, PIPELINE, Candidate, Choice
from ckptool.formats.json_beside import json_object, missing_adapter_parts
from ckptool.formats.packed import holds_tensors, listed, member, with_weights
from ckptool.formats.probe import Probe
from ckptool.formats.slices import numbering
from ckptool.limits import Limits
from ckptool.messages import counted
from ckptool.sources.descriptors import LINK
from ckptool.sources.files import FileSource
from ckptool.sources.folder import FolderSource
from ckptool.tensors.pieces import PiecesSource

Opened: TypeAlias = "tuple[FileSource | FolderSource, Parsed]"
"""The source of a checkpoint, which the caller has to close, and its content."""

_SEVERAL: Final = "folder"
_PIPELINE_TRAITS: Final = Traits(has_tree=True, loader="diffusers.DiffusionPipeline.from_pretrained")
_MOST: Final = 64
"""Most candidates that are opened to choose one of them."""
_DEEPEST: Final = 5
_MOST_FOLDERS: Final = 500
"""Most folders below one that are searched for checkpoints."""


class Layout(NamedTuple):
    """How folders that are one checkpoint are recognised, and read."""

    sniff: Callable[[FolderSource], bool]
    """Returns whether a folder has this layout."""
    read: Callable[[FolderSource, Probe], Parsed]
    """Reads the indexes in such a folder; no tensor is read."""


def layouts_in_order() -> Iterator[Layout]:
    """Yield the layouts, in the order in which they are tried."""
    from ckptool.formats.directories import dcp, deepspeed, megatron, rank_files, safetensors_parts

    yield Layout(dcp.sniff, dcp.read)
    yield Layout(safetensors_parts.sniff_dcp, safetensors_parts.read_dcp)
    yield Layout(deepspeed.sniff_universal, deepspeed.read_universal)  # before the files that are beside it
    yield Layout(deepspeed.sniff, deepspeed.read)
    yield Layout(megatron.sniff, megatron.read)
    yield Layout(safetensors_parts.sniff_nanotron, safetensors_parts.read_nanotron)
    yield Layout(rank_files.sniff, rank_files.read)
    yield Layout(rank_files.sniff_indexed, rank_files.read_indexed)


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
    # Tied tensors share a source, which counts once.
    storages = [info.storage for info in parsed.contents.tensors.values() if info.storage is not None]
    needed = sum({id(one.source): one.nbytes for one in storages if isinstance(one.source, PiecesSource)}.values())
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
        is_none = not isinstance(error, FileUnavailable) or error.kind in (LINK, "directory")
        are_files = all(one.kind == "file" for one in choice.candidates) and not filenames.has_weights(folder.files)
        if not (below and is_none and are_files):  # else the files are not of the folder's checkpoint
            raise
        strangers = tuple(one.name for one in choice.candidates)
        return _open_choice(folder, Choice(below, strangers=strangers), folders, probe)


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
        (source, parsed), used = _open_several(folder, choice.candidates, probe)
    components = beside.missing_components(folder, folders)
    remarks = (*parsed.remarks, *beside.missing(folder, choice, parsed, components))
    unread = [name for name, _ in parsed.unopened] if PIPELINE in folder.files else []  # of its components
    parsed = parsed._replace(remarks=remarks, absent=(*parsed.absent, *components, *unread))
    return source, _with_beside(folder, parsed, used, choice, folders)


def _open_several(folder: FolderSource, candidates: Sequence[Candidate], probe: Probe) -> tuple[Opened, list[str]]:
    """
    Return what a folder with several candidates, or none, holds, and the names that this takes up.

    Files may have names of any kind: one may have the weights, and the others an optimizer, or a counter in text. All
    are listed, as those of an archive are, unless their content singles one out, or they are the components of a
    pipeline of diffusers.
    """
    if not candidates:
        raise beside.no_checkpoint(folder)
    if len(candidates) > _MOST:
        what = "folder" if all(one.kind == "folder" for one in candidates) else "file"
        raise FileUnavailable(
            f"a directory with {counted(len(candidates), what)} that may be checkpoints; {_MOST} are looked into",
            kind="directory",
            hint="Look at each of them.",
            command=system.command_line("ckptool", "inspect", "-b", "-r", "--", folder.path),
            needed=len(candidates),
            actual=_MOST,
        )
    opened: dict[str, Opened] = {}
    failures: dict[str, CkptoolError] = {}
    with ExitStack() as stack:
        for one in candidates:
            try:
                opened[one.name] = open_candidate(folder, one, probe)
                stack.push(closing(opened[one.name][0]))
            except Failure as error:
                failures[one.name] = error
        stack.pop_all()
    by_name = {name: parsed for name, (_, parsed) in opened.items()}
    holding = {name: found for name, found in by_name.items() if holds_tensors(found)}
    chosen = next((names for names in (holding, with_weights(holding), by_name) if len(names) == 1), None)
    if chosen is not None:
        (name,) = chosen
        source, parsed = opened.pop(name)
        for other, _ in opened.values():
            if other is not folder:
                other.close()

        def failed(other: str) -> Parsed:
            raise failures[other]

        part = parsed.part_of or slices.part_of(name, folder.path, [name, *failures], parsed, failed)
        parsed = parsed._replace(part_of=part)
        count = len(by_name) + sum(error.kind != LINK for error in failures.values())
        if count > 1:
            held = "weights" if with_weights(by_name) else "tensors" if holding else "anything"
            what = f"{name!r} was opened, which alone holds {held} of {count:,} that may be checkpoints here"
            parsed = parsed._replace(remarks=(*parsed.remarks, Remark("CK167", what)))
        used = [*_names(candidates, [name]), *(one.name for one in parsed.shards)]
        return (source, parsed._replace(unopened=_unopened(failures))), used
    if not opened:
        raise beside.no_checkpoint(folder)
    for source, _ in opened.values():
        if source is not folder:
            folder.adopt(source)
    kept = holding or by_name
    if PIPELINE in folder.files and not failures and all(one.form == "state_dict" for one in kept.values()):
        return (folder, _pipeline(folder, kept, probe)), _names(candidates, kept)
    parsed = listed(folder, _SEVERAL, [member(*one) for one in kept.items()], by_name)
    why, first = slices.together(by_name), next(iter(by_name))
    can_join = why is not None and why.endswith(slices.WHICH) and not by_name[first].inside
    remedy = numbering.how_to_join(first, folder.path) if can_join else ""
    parsed = parsed._replace(unmerged=why, unmerged_remedy=remedy, unopened=_unopened(failures))
    shards = [shard.name for one in by_name.values() for shard in one.shards]
    return (folder, parsed), [*_names(candidates, by_name), *shards]


def _pipeline(folder: FolderSource, components: Mapping[str, Parsed], probe: Probe) -> Parsed:
    """Return state dicts as one checkpoint, in which the names of each begin with the name of its folder."""
    builder = TreeBuilder(probe.limits)
    leaves = [
        ((component, name), builder.tensor(info))
        for component, found in components.items()
        for name, info in found.contents.tensors.items()
    ]
    root = nested(leaves)
    return Parsed(
        folder,
        _SEVERAL,
        _PIPELINE_TRAITS,
        collect(root, builder.rebuilder, probe.limits),
        root=root,
        rebuilder=builder.rebuilder,
        notes=tuple(f"{name!r}: {note}" for name, found in components.items() for note in found.notes),
        damage=next((found.damage for found in components.values() if found.damage), None),
        members=tuple(member(*one) for one in components.items()),
        streams=tuple(
            one._replace(record=f"{name}/{one.record}") if found.shards else one.inside(f"{name}/{_file(found)}")
            for name, found in components.items()
            for one in found.streams
        ),
        archives=tuple(archive for found in components.values() for archive in found.archives),
        shards=tuple(
            one._replace(name=f"{name}/{one.name}")
            for name, found in components.items()
            for one in found.shards or (sharded.shard(_file(found), found),)
        ),
        shard_of={
            f"{component}.{name}": f"{component}/{found.shard_of.get(name) or _file(found)}"
            for component, found in components.items()
            for name in found.contents.tensors
        },
        beside=tuple(one for found in components.values() for one in found.beside),
    )


def _file(found: Parsed) -> str:
    return "" if isinstance(found.source, FolderSource) else os.path.basename(getattr(found.source, "path", ""))


def _unopened(failures: Mapping[str, CkptoolError]) -> tuple[tuple[str, str], ...]:
    """Return the files that should be checkpoints, and why they cannot be opened; without text files and links."""
    return tuple(
        (name, error.message)
        for name, error in failures.items()
        if not isinstance(error, (NotACheckpoint, UnknownFormat)) and error.kind != LINK
    )


def _names(candidates: Sequence[Candidate], names: Iterable[str]) -> list[str]:
    known = {one.name: one for one in candidates}
    return [file for name in names for file in (name, *known[name].files)]


def offers(folder: FolderSource) -> tuple[Choice, list[str]]:
    """Return the possible checkpoints of a folder, and the folders in it that could be checkpoints."""
    choice = filenames.choose(folder.files)
    snapshot = beside.snapshot(folder)
    if snapshot is not None:
        return Choice((Candidate(snapshot, "folder"),)), [snapshot]
    folders = checkpoint_folders(folder)
    archives = [name for name in folder.files if name.lower().endswith(".zip")]
    candidates = (
        choice.candidates
        or _of_folders(folder, folders)
        or tuple(filenames.candidates(folder.files))  # what trainers put beside weights, as there are no others
        or tuple(Candidate(name, "folder") for name in folders)
        or tuple(Candidate(name, "file") for name in archives if len(archives) == 1)  # as stable-baselines3 saves
    )
    return choice._replace(candidates=candidates), folders


def _of_folders(folder: FolderSource, folders: Sequence[str]) -> tuple[Candidate, ...]:
    """Return the folders in a folder that may be meant: those with weights, or the one that a pointer names."""
    weights = [name for name in folders if filenames.role_of(name) is None]
    named = beside.followed(folder, weights)
    return tuple(Candidate(name, "folder") for name in ([named] if named is not None else weights))


def open_candidate(folder: FolderSource, candidate: Candidate, probe: Probe) -> Opened:
    """Open one of the files or folders that a folder offers."""
    if candidate.kind == "folder":
        below = folder.below(candidate.name)
        return open_folder(below, probe.beside(below))
    if candidate.kind == "set":
        sharded.refuse_many(candidate.total, probe.limits)
        missing = [one for one in candidate.files if not folder.has(one)]
        sharded.refuse_missing_shards(missing, len(candidate.files), "beside the others")
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


def checkpoint_folders(folder: FolderSource, budget: list[int] | None = None, depth: int = 0) -> list[str]:
    """
    Return the names of the folders in a folder that could be, or lead to, checkpoints; links are not followed.

    No more than ``budget`` folders are searched, in all that are below the outermost one.
    """
    budget = [_MOST_FOLDERS] if budget is None else budget  # a list, because all levels take from the same one
    found = []
    for name in folder.folders:
        if name.startswith(".") or depth >= _DEEPEST or budget[0] <= 0:
            continue
        budget[0] -= 1
        try:
            below = folder.below(name)
        except Failure:  # a link, or not permitted
            continue
        with closing(below):
            if _layout(below) or any(filenames.candidates(below.files)) or checkpoint_folders(below, budget, depth + 1):
                found.append(name)
    return found
