"""Several files that are one checkpoint: read, compared, and put under one tree, or each under its own name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from ckptool.checkpoints.arrays import collect_weights
from ckptool.checkpoints.companions import Remark, Shard
from ckptool.checkpoints.parsed import Parsed, Stream, Traits
from ckptool.errors import CkptoolError, Failure, MalformedFile
from ckptool.formats.directories.tree import TreeBuilder
from ckptool.formats.probe import Probe
from ckptool.pickles.nodes import Dict, Inert
from ckptool.sources.folder import FolderSource
from ckptool.tensors.pieces import Box, Piece, PiecesSource, check_tiling, in_pieces
from ckptool.tensors.tensor import TensorInfo

ANOTHER_SAVE: Final = "Its files are of different saves: get the folder again, from one."


def opened(folder: FolderSource, probe: Probe, name: str) -> Parsed:
    """Read a file of the folder; errors have its name."""
    source = folder.open(name)
    try:
        return probe.read_inner(source)
    except CkptoolError as error:
        error.message = f"{name!r}: {error.message}"
        raise


def agree(what: str, said: Iterable[tuple[str, object]]) -> None:
    """Raise MalformedFile unless all files that say something say the same."""
    first: tuple[str, object] | None = None
    for name, value in said:
        if value is None:
            continue
        if first is None:
            first = name, value
        elif value != first[1]:
            fact = f"{what} differ: {_shown(first[1])} in {first[0]!r}, {_shown(value)} in {name!r}"
            raise MalformedFile(fact, kind="mixed-saves", hint=ANOTHER_SAVE)


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


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


def of_file(folder: FolderSource, probe: Probe, name: str, traits: Traits, file: str, parsed: Parsed) -> Parsed:
    """Return the one file that a folder's checkpoint is, as what a format found there."""
    builder = TreeBuilder(probe.limits)
    root = parsed.root if parsed.rebuilder is None else builder.transplant(parsed.root, parsed.rebuilder)
    return of_tree(folder, probe, name, traits, root, builder, [(file, parsed)])


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
        streams += [one.inside(file) for one in parsed.streams]
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


AGAIN: Final = "Copy the folder again, with the files of all ranks."


class Part(NamedTuple):
    """A box of a whole tensor, and the tensor that fills it."""

    box: Box
    file: str
    info: TensorInfo


def whole(
    folder: FolderSource, name: str, shape: tuple[int, ...], parts: Sequence[Part], remarks: list[Remark]
) -> TensorInfo:
    """
    Return the tensor that parts are; if they do not fill it, ``remarks`` gets the reason, and reading it raises.

    Raises:
        MalformedFile: They are of several types.
    """
    dtype = parts[0].info.dtype
    if any(one.info.dtype != dtype for one in parts):
        raise MalformedFile(f"the pieces of {name!r} differ in type", kind="piece", hint=AGAIN)
    found: dict[Box, Part] = {}
    for part in parts:
        found.setdefault(part.box, part)
    boxes = sorted(found)
    fault: CkptoolError | None = None
    try:
        check_tiling(name, shape, boxes)
    except Failure as error:
        fault = error
        remarks.append(Remark("CK141", error.message, AGAIN))
    pieces = [Piece(*box, found[box].file, partial(_given, found[box].info)) for box in boxes]
    source = PiecesSource(shape, dtype, pieces, folder.cancellation, name=name, fault=fault)
    return in_pieces(name, shape, dtype, source, "cpu")


def _given(info: TensorInfo) -> TensorInfo:
    return info
