"""Combine files that are one checkpoint, and list checkpoints inside an archive or a folder of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckptool.archives.archive import Archive
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.contents import Contents
from ckptool.checkpoints.parsed import Member, Parsed, Shard, Traits
from ckptool.sources.source import Source


def shard(name: str, parsed: Parsed) -> Shard:
    """Return a file as one of the shards of a checkpoint."""
    return Shard(name, len(parsed.contents.tensors), parsed.source.nbytes, parsed.source)


def with_files(whole: Parsed, files: Sequence[tuple[str, Parsed]], kind: str = "") -> Parsed:
    """Return a checkpoint with its files, their notes, streams and archives; messages call each file a ``kind``."""
    return whole._replace(
        notes=(*whole.notes, *(f"{kind}{name!r}: {note}" for name, one in files for note in one.notes)),
        damage=next((f"{kind}{name!r}: {one.damage}" for name, one in files if one.damage), None),
        streams=tuple(stream.inside(name) for name, one in files for stream in one.streams),
        archives=tuple(archive for _, one in files for archive in one.archives),
        shards=tuple(shard(name, one) for name, one in files),
    )


def placed(parsed: Parsed, archive: Archive | None, name: str) -> Parsed:
    """Return a checkpoint as a member of an archive: the names of its own members get this prefix."""
    return parsed._replace(
        member=name if parsed.member is None else f"{name}::{parsed.member}",
        archives=(*((archive,) if archive is not None else ()), *parsed.archives),
        members=tuple(one._replace(name=f"{name}::{one.name}") for one in parsed.members),
        inside={f"{name}::{key}": placed(one, archive, name) for key, one in parsed.inside.items()},
        unopened=tuple((f"{name}::{key}", why) for key, why in parsed.unopened),
    )


def member(name: str, found: Parsed, nbytes: int | None = None) -> Member:
    """Return the listing of a checkpoint in an archive or a folder; ``nbytes`` is its size there, if known."""
    return Member(name, found.format, found.form, found.number, found.file_nbytes if nbytes is None else nbytes)


def listed(
    source: Source, layout: str, members: Sequence[Member], inside: Mapping[str, Parsed], archive: Archive | None = None
) -> Parsed:
    """Return several checkpoints of which none is chosen: ``inside`` are all that can be opened."""
    return Parsed(
        source,
        layout,
        Traits(),
        Contents(),
        fixed_form="archive",
        members=tuple(members),
        inside={name: placed(found, archive, name) for name, found in inside.items()},
    )


def holds_tensors(parsed: Parsed) -> bool:
    contents = parsed.contents
    return bool(contents.tensors or contents.attributes or parsed.constants or parsed.members)


def with_weights(holding: dict[str, Parsed]) -> dict[str, Parsed]:
    """Return those that hold the weights of a model; empty if there is only one to choose from."""
    if len(holding) < 2:  # nothing to tell apart
        return {}
    return {
        name: found
        for name, found in holding.items()
        if found.members or Checkpoint("", found.source, found).weights is not None
    }
