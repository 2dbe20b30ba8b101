"""
What DCP's writer for Hugging Face leaves if every rank writes for itself: safetensors files of pieces, and no index.

    shard-00001-model-00001-of-00002.safetensors    rank 0, for the first of two files that they would be together

Metadata in each has the offsets of its pieces: ``DCP_SHARDING_INFO``, ``{"name": {"saved_offsets": [8, 0]}, …}``. The
shape of a whole tensor is written nowhere: it is as large as its pieces reach. So the files cannot show whether the
last rank is missing. See torch/distributed/checkpoint/hf_storage.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ckptool.checkpoints.parsed import Parsed, Remark
from ckptool.errors import LimitExceeded, MalformedFile, within
from ckptool.formats import safetensors, sharded
from ckptool.formats.directories import side_by_side
from ckptool.formats.directories.side_by_side import AGAIN, Part, of_parts
from ckptool.formats.probe import Probe
from ckptool.formats.strict_json import parse_object
from ckptool.messages import counted, some
from ckptool.sources.folder import FolderSource
from ckptool.tensors.tensor import is_countable, is_size

NAME = "dcp_safetensors"
TRAITS = safetensors.TRAITS
_INFO: Final = safetensors.OF_PIECES
_SUFFIX: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_HEAD_NBYTES: Final = 1 << 20
_OF_RANK: Final = re.compile(r"shard-(\d{1,9})-(.*)\.safetensors")
_MOST_LOOKED_AT: Final = 8


def sniff(folder: FolderSource) -> bool:
    """Return whether one of the first safetensors files has the offsets of its pieces."""
    mark = f'"{_INFO}"'.encode()
    files = _files(folder)[:_MOST_LOOKED_AT]
    if files and _OF_RANK.fullmatch(files[0]) is None and any(name.endswith(_INDEX) for name in folder.files):
        return False  # whole tensors, as the index says
    return any(mark in folder.head(name, _HEAD_NBYTES) for name in files)


def _files(folder: FolderSource) -> list[str]:
    """Return the safetensors files in a folder with the name of a rank's; all of them if none has one."""
    found = [name for name in folder.files if name.endswith(_SUFFIX)]
    return [name for name in found if _OF_RANK.fullmatch(name)] or found


def read(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the headers of all files; no tensor is read.

    Raises:
        MalformedFile: The metadata about the pieces in a file makes no sense.
        CkptoolError: A file cannot be read.
    """
    files: dict[str, Parsed] = {}
    parts: dict[str, list[Part]] = {}
    for name in _files(folder):
        files[name] = side_by_side.opened(folder, probe, name)
        with within(repr(name)):
            for tensor, part in _parts(name, files[name]):
                parts.setdefault(tensor, []).append(part)
    if len(parts) > probe.limits.tensors:
        raise LimitExceeded(f"more than {probe.limits.tensors:,} tensors", needed=len(parts))
    remarks = [*_ranks(list(files)), *_missing_parts(parts)]
    metadata, notes = sharded.merged_texts(
        {key: text for key, text in one.metadata.items() if key not in safetensors.ABOUT_PIECES}
        for one in files.values()
    )
    shapes = {name: _reach(name, own) for name, own in parts.items()}
    return of_parts(folder, NAME, parts, shapes, files, remarks)._replace(
        source=next(iter(files.values())).source, metadata=metadata, notes=tuple(notes)
    )


def _parts(file: str, parsed: Parsed) -> Iterator[tuple[str, Part]]:
    said = parse_object(parsed.metadata.get(_INFO, "{}").encode(), _INFO, "sharding")
    for name, info in parsed.contents.tensors.items():
        where = said.get(name)
        offsets = where.get("saved_offsets") if isinstance(where, dict) else [0] * len(info.shape)
        if not isinstance(offsets, list) or len(offsets) != len(info.shape) or not all(map(is_size, offsets)):
            raise MalformedFile(f"{_INFO} says no place of {name!r}", kind="malformed-sharding")
        yield name, Part((tuple(offsets), info.shape), file, info)


def _reach(name: str, parts: Sequence[Part]) -> tuple[int, ...]:
    """Return the shape of the whole tensor: it is as large as its pieces reach."""
    ranks = {len(part.box[0]) for part in parts}
    if len(ranks) > 1:
        raise MalformedFile(f"the pieces of {name!r} differ in the number of dimensions", kind="piece", hint=AGAIN)
    ends = [[begin + size for begin, size in zip(*part.box, strict=True)] for part in parts]
    shape = tuple(map(max, zip(*ends, strict=True)))
    if not is_countable(shape):
        raise MalformedFile(f"the pieces of {name!r} reach further than torch can count", kind="piece")
    return shape


def _ranks(files: Sequence[str]) -> Iterator[Remark]:
    known = {int(match[1]) for file in files if (match := _OF_RANK.fullmatch(file))}
    missing = [rank for rank in range(1, max(known, default=0)) if rank not in known] if len(known) < 1 << 20 else []
    if missing:
        what = (
            f"no file of {counted(len(missing), 'rank')}, by the numbers in the names: {some(list(map(str, missing)))}"
        )
        yield Remark("CK140", what, AGAIN)
    yield Remark(
        "CK145",
        f"the files of {counted(len(known) or len(files), 'rank')}, and nothing says how many there were, or how large "
        f"the tensors: complete as far as the files tell",
    )


def _missing_parts(parts: Mapping[str, Sequence[Part]]) -> Iterator[Remark]:
    """
    Yield a remark on files that a rank lacks, and all others have with which it cut other tensors.

    Ranks cut all tensors of one mesh together, so what is cut by some of these ranks was cut by all of them. A rank has
    no part of a tensor that is too small for all, though, and may have had none of a whole file.
    """
    meshes: dict[frozenset[int], None] = {}
    ranks_of: dict[str, set[int]] = {}
    for own in parts.values():
        found = [match for part in own if (match := _OF_RANK.fullmatch(part.file))]
        ranks = frozenset(int(match[1]) for match in found)
        if len({part.box for part in own}) > 1:
            meshes[ranks] = None
        if found and own[0].info.shape:
            ranks_of.setdefault(found[0][2], set()).update(ranks)
    missing = [
        f"shard-{rank:05}-{output}{_SUFFIX}"
        for output, ranks in ranks_of.items()
        for rank in sorted(set().union(*(mesh for mesh in meshes if ranks < mesh)) - ranks)
    ]
    if missing:
        what = f"ranks have no file that the others have, or had nothing for it: {some(missing)}"
        yield Remark("CK156", what, "If they were there, get them: without them, tensors are smaller than they were.")
