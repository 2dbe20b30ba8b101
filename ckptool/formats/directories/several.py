"""
Several checkpoints in one folder: they are listed, as those of an archive are, unless their content singles one out.

Of files with names of any kind, one may have the weights, and the others an optimizer, or a counter in text.
The components of a diffusers pipeline are one checkpoint together: ``unet.conv_in.weight``.

``model_index.json`` has the class of each component of a pipeline of diffusers; some may be missing.

    {"_class_name": "…", "unet": ["diffusers", "UNet2DConditionModel"], "safety_checker": [null, null]}
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import ckptool.system as system
from ckptool.checkpoints.contents import collect
from ckptool.checkpoints.parsed import Parsed, Remark, Traits
from ckptool.errors import CkptoolError, Failure, FileUnavailable, NotACheckpoint, UnknownFormat
from ckptool.formats import slices
from ckptool.formats.directories import pointers
from ckptool.formats.directories.side_by_side import TreeBuilder, nested
from ckptool.formats.filenames import ADAPTER, PIPELINE, Candidate
from ckptool.formats.json_beside import json_object
from ckptool.formats.members import holds_tensors, listed, member, shard, with_weights
from ckptool.formats.probe import Probe
from ckptool.formats.slices import numbering
from ckptool.messages import counted, some
from ckptool.sources.descriptors import LINK
from ckptool.sources.files import FileSource
from ckptool.sources.folder import FolderSource
from ckptool.sources.paths import is_likely

Found: TypeAlias = "tuple[FileSource | FolderSource, Parsed]"
Opening: TypeAlias = Callable[[FolderSource, Candidate, Probe], Found]

NAME: Final = "folder"
PIPELINE_TRAITS: Final = Traits(has_tree=True, loader="diffusers.DiffusionPipeline.from_pretrained")
_MOST: Final = 64
"""Most candidates that are opened to choose one of them."""
_SHOWN: Final = 4
_CONFIG: Final = "config.json"
_ANNOUNCED: Final = {ADAPTER: "adapter_model.safetensors", _CONFIG: "model.safetensors", PIPELINE: "its folders"}
"""Small files beside weights, with the usual names of these weights."""
"""Components with weights have a ``config.json``; others have a file with another name."""
_WITHOUT_WEIGHTS: Final = re.compile(r".*(?:Tokenizer|TokenizerFast|Scheduler|Processor|Extractor)")


def read(
    folder: FolderSource, candidates: Sequence[Candidate], opening: Opening, probe: Probe
) -> tuple[FileSource | FolderSource, Parsed, list[str]]:
    """
    Return what a folder with several candidates holds, and the names that this takes up.

    Raises:
        FileUnavailable: There are no candidates, or too many to open them all.
        CkptoolError: None of them can be read.
    """
    if not candidates:
        raise no_checkpoint(folder)
    if len(candidates) > _MOST:
        raise _too_many(folder.path, candidates)
    opened, failures = _opened(folder, candidates, opening, probe)
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
        return (
            source,
            parsed._replace(unopened=_unopened(failures)),
            [*_names(candidates, [name]), *(one.name for one in parsed.shards)],
        )
    if not opened:
        raise no_checkpoint(folder)
    for source, _ in opened.values():
        if source is not folder:
            folder.adopt(source)
    kept = holding or by_name
    if PIPELINE in folder.files and not failures and all(one.form == "state_dict" for one in kept.values()):
        return folder, _pipeline(folder, kept, probe), _names(candidates, kept)
    parsed = listed(folder, NAME, [member(*one) for one in kept.items()], by_name)
    why, first = slices.together(by_name), next(iter(by_name))
    can_join = why is not None and why.endswith(slices.WHICH) and not by_name[first].inside
    remedy = numbering.how_to_join(first, folder.path) if can_join else ""
    parsed = parsed._replace(unmerged=why, unmerged_remedy=remedy, unopened=_unopened(failures))
    shards = [shard.name for one in by_name.values() for shard in one.shards]
    return folder, parsed, [*_names(candidates, by_name), *shards]


def _opened(
    folder: FolderSource, candidates: Sequence[Candidate], opening: Opening, probe: Probe
) -> tuple[dict[str, Found], dict[str, CkptoolError]]:
    """Return the candidates that are checkpoints, and why the others are not."""
    opened: dict[str, Found] = {}
    failures: dict[str, CkptoolError] = {}
    try:
        for one in candidates:
            try:
                opened[one.name] = opening(folder, one, probe)
            except Failure as error:
                failures[one.name] = error
    except BaseException:
        for source, _ in opened.values():
            source.close()
        raise
    return opened, failures


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
        NAME,
        PIPELINE_TRAITS,
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
            for one in found.shards or (shard(_file(found), found),)
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


def no_checkpoint(folder: FolderSource) -> FileUnavailable:
    """Return the error for a folder without a checkpoint, with what is there instead."""
    lost = pointers.lost(folder)
    if lost is not None:
        return lost
    links = [name for name in folder.folders if folder.is_link(name)]
    if links and not folder.files:
        fact = f"a directory of links, which are not followed: {some([*map(system.quoted, links)], _SHOWN)}"
        return FileUnavailable(fact, kind="directory", hint="Give the path of the folder that one leads to.")
    names = sorted(folder.files, key=lambda name: not is_likely(name))
    if names:
        shown = some([*map(system.quoted, names)], _SHOWN)
        fact = f"a directory with {'one file' if len(names) == 1 else counted(len(names), 'file')}, none a checkpoint"
        weights = next((name for said, name in _ANNOUNCED.items() if said in folder.files), None)
        hint = f"Copy the weights, too ({weights})." if weights is not None else f"Name a file in it: {shown}"
        return FileUnavailable(fact, kind="directory", hint=hint)
    folders = some([*map(system.quoted, folder.folders)], _SHOWN)
    return FileUnavailable(
        "a directory without files",
        kind="directory",
        hint=f"Name a file in one of its folders: {folders}" if folders else "Copy the folder again, with its files.",
    )


def _too_many(path: str, candidates: Sequence[Candidate]) -> FileUnavailable:
    what = "folder" if all(one.kind == "folder" for one in candidates) else "file"
    return FileUnavailable(
        f"a directory with {counted(len(candidates), what)} that may be checkpoints; {_MOST} are looked into",
        kind="directory",
        hint="Look at each of them.",
        command=system.command_line("ckptool", "inspect", "-b", "-r", "--", path),
        needed=len(candidates),
        actual=_MOST,
    )


def missing_components(folder: FolderSource, checkpoints: Collection[str]) -> tuple[list[str], list[Remark]]:
    """Return the components of a pipeline without weights, and a remark on them; ``checkpoints`` have weights."""
    if PIPELINE not in folder.files:
        return [], []
    named = [name for name, said in json_object(folder, PIPELINE).items() if _has_weights(said)]
    links = [name for name in named if name in folder.folders and folder.is_link(name)]
    found = dict.fromkeys(links, "is a link, which is not followed")
    found |= {name: "has no weights in its folder" for name in folder.folders if _is_bare(folder, name, checkpoints)}
    if all(name in named for name in checkpoints):  # else it is the index of another one
        found |= {name: "is not there" for name in named if name not in folder.folders}
    why = some([f"{name!r} {why}" for name, why in found.items()])
    what = f"{counted(len(found), 'component')} of the pipeline without weights: {why}"
    remark = Remark("CK164", what, "Download what is missing, if the whole pipeline is needed.")
    return list(found), [remark] if found else []


def _is_bare(folder: FolderSource, name: str, checkpoints: Collection[str]) -> bool:
    """Return whether a folder has the configuration of a model, and no weights."""
    return name not in checkpoints and not folder.is_link(name) and _CONFIG in folder.names(name)[0]


def _has_weights(said: object) -> bool:
    """Return whether a component is of a class with weights, by its name."""
    if not isinstance(said, list) or len(said) != 2 or not isinstance(said[1], str):
        return False
    return _WITHOUT_WEIGHTS.fullmatch(said[1]) is None
