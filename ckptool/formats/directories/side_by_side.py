"""Files that are parts of one checkpoint and cannot be put together: a tree of them all, each under its own name."""

from __future__ import annotations

from collections.abc import Mapping

from ckptool.checkpoints.arrays import collect_weights
from ckptool.checkpoints.parsed import Parsed, Remark, Shard, Stream, Traits
from ckptool.formats.directories.tree import TreeBuilder
from ckptool.formats.probe import Probe
from ckptool.pickles.nodes import Dict, Inert
from ckptool.sources.folder import FolderSource


def of_files(
    folder: FolderSource,
    probe: Probe,
    name: str,
    traits: Traits,
    files: Mapping[str, tuple[str, Parsed]],
    why: str | None,
    remarks: tuple[Remark, ...] = (),
) -> Parsed:
    """Return what ``files`` hold, each a file's name and what was read of it, under their keys; ``why`` not as one."""
    builder = TreeBuilder(probe.limits)
    pairs: list[tuple[Inert, Inert]] = []
    for key, (_, parsed) in files.items():
        root = parsed.root
        pairs.append((key, root if parsed.rebuilder is None else builder.transplant(root, parsed.rebuilder)))
    return of_tree(folder, probe, name, traits, Dict(pairs), builder, list(files.values()))._replace(
        unmerged=why, remarks=remarks
    )


def of_tree(
    folder: FolderSource,
    probe: Probe,
    name: str,
    traits: Traits,
    root: Inert,
    builder: TreeBuilder,
    files: list[tuple[str, Parsed]],
) -> Parsed:
    """Return a tree that was made of several files as what a format found in a folder."""
    contents = collect_weights(root, builder.rebuilder, probe.limits)
    streams: list[Stream] = []
    for file, parsed in files:
        streams += [one._replace(record=f"{file}/{one.record}".rstrip("/")) for one in parsed.streams]
    return Parsed(
        folder,
        name,
        traits,
        contents,
        root=root,
        rebuilder=builder.rebuilder,
        notes=tuple(f"{file!r}: {note}" for file, parsed in files for note in parsed.notes),
        damage=next((f"{file!r}: {one.damage}" for file, one in files if one.damage), None),
        streams=tuple(streams),
        archives=tuple(archive for _, parsed in files for archive in parsed.archives),
        shards=tuple(
            Shard(file, len(parsed.contents.tensors), parsed.source.nbytes, parsed.source) for file, parsed in files
        ),
    )
