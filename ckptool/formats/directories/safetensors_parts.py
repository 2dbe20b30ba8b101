"""
Folders of safetensors files with parts of tensors: DCP's writer for Hugging Face, and nanotron.

If every rank writes for itself, DCP's writer for Hugging Face leaves files of pieces, and no index.

    shard-00001-model-00001-of-00002.safetensors    rank 0, for the first of two files that they would be together

Metadata in each has the offsets of its pieces: ``DCP_SHARDING_INFO``, ``{"name": {"saved_offsets": [8, 0]}, …}``. The
shape of a whole tensor is written nowhere: it is as large as its pieces reach. So the files cannot show whether the
last rank is missing. See torch/distributed/checkpoint/hf_storage.py.

Nanotron has a folder for each module, and a file for each parameter, or for each part of it.

    checkpoint_metadata.json                                            numbers of ranks, steps
    model/model/final_layer_norm/model_weight.safetensors               whole
    model/…/qkv_proj/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors    the part of a rank

Each holds one tensor, ``data``. Its metadata maps slices of it to slices of the whole tensor, whose shape it has, too:
``0,8,None|None,None,None#8,16,None|None,None,None``. See src/nanotron/serialize/ and parallel/parameters.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from ckptool.cancellation import each
from ckptool.checkpoints.contents import Contents, Group
from ckptool.checkpoints.parsed import Parsed, Remark
from ckptool.errors import LimitExceeded, MalformedFile, within
from ckptool.formats import safetensors, sharded
from ckptool.formats.directories.side_by_side import given, opened, tiling_fault
from ckptool.formats.probe import Probe
from ckptool.formats.strict_json import parse_object
from ckptool.messages import counted, some
from ckptool.sources.folder import FolderSource
from ckptool.tensors.pieces import Box, Piece, joined
from ckptool.tensors.tensor import MAX_RANK, TensorInfo, is_countable, is_size

DCP: Final = "dcp_safetensors"
NANOTRON: Final = "nanotron"
AGAIN: Final = "Copy the folder again, with the files of all ranks."
_INFO: Final = safetensors.OF_PIECES
_SUFFIX: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_HEAD_NBYTES: Final = 1 << 20
_OF_RANK: Final = re.compile(r"shard-(\d{1,9})-(.*)\.safetensors")
_MOST_LOOKED_AT: Final = 8
_MARK: Final = "checkpoint_metadata.json"
_MODEL: Final = "model"
_FILE: Final = re.compile(
    r"model_(.{1,200}?)(?:\.safetensors)?(?:_pp-rank-\d{1,6}-of-\d{1,6}_tp-rank-\d{1,6}-of-\d{1,6}"
    r"(?:_exp-rank-\d{1,6}-of-\d{1,6})?)?\.safetensors"
)
_SLICE: Final = re.compile(r"(\d{1,18}|None),(\d{1,18}|None),(1|None)")
_NUMBER: Final = re.compile(r"\d{1,18}")
_NUMPY: Final = re.compile(r"np\.\w{1,10}\(")
_MOST_FOLDERS: Final = 100_000
_MOST_TEXT: Final = 1 << 16


class Part(NamedTuple):
    """A box of a whole tensor, and the tensor that fills it."""

    box: Box
    file: str
    info: TensorInfo


def _of_parts(
    folder: FolderSource,
    layout: str,
    parts: Mapping[str, Sequence[Part]],
    shapes: Mapping[str, tuple[int, ...]],
    files: Mapping[str, Parsed],
    remarks: Sequence[Remark],
) -> Parsed:
    """
    Return tensors whose parts are in files of safetensors as one checkpoint.

    If parts do not fill their tensor, that is a remark, and reading the tensor raises an error.

    Raises:
        MalformedFile: Parts of a tensor are of several types, or a file is none of safetensors.
    """
    if others := [name for name, one in files.items() if one.format != safetensors.NAME]:
        raise MalformedFile(f"{some(others)}: no file of safetensors", kind="piece", hint=AGAIN)
    told = list(remarks)
    contents = Contents({name: _whole(folder, name, shapes[name], own, told) for name, own in parts.items()})
    contents.groups.append(Group("", "mapping", list(parts)))
    shards = tuple(sharded.shard(name, one) for name, one in files.items())
    return Parsed(
        folder, layout, safetensors.TRAITS, contents, fixed_form="state_dict", shards=shards, remarks=tuple(told)
    )


def _whole(
    folder: FolderSource, name: str, shape: tuple[int, ...], parts: Sequence[Part], remarks: list[Remark]
) -> TensorInfo:
    dtype = parts[0].info.dtype
    if any(one.info.dtype != dtype for one in parts):
        raise MalformedFile(f"the pieces of {name!r} differ in type", kind="piece", hint=AGAIN)
    found: dict[Box, Part] = {}
    for part in parts:
        found.setdefault(part.box, part)
    boxes = sorted(found)
    if fault := tiling_fault(name, shape, boxes):
        remarks.append(Remark("CK141", fault.message, AGAIN))
    pieces = [Piece(*box, found[box].file, partial(given, found[box].info)) for box in boxes]
    return joined(name, shape, dtype, pieces, folder.cancellation, fault=fault)


def sniff_dcp(folder: FolderSource) -> bool:
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


def read_dcp(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the headers of all files; no tensor is read.

    Raises:
        MalformedFile: The metadata about the pieces in a file makes no sense.
        CkptoolError: A file cannot be read.
    """
    files: dict[str, Parsed] = {}
    parts: dict[str, list[Part]] = {}
    for name in _files(folder):
        files[name] = opened(folder, probe, name)
        with within(repr(name)):
            for tensor, part in _parts(name, files[name]):
                parts.setdefault(tensor, []).append(part)
    if len(parts) > probe.limits.tensors:
        raise LimitExceeded(f"more than {probe.limits.tensors:,} tensors", needed=len(parts))
    remarks = list(_remarks(list(files), parts))
    metadata, notes = sharded.merged_texts(
        {key: text for key, text in one.metadata.items() if key not in safetensors.ABOUT_PIECES}
        for one in files.values()
    )
    shapes = {name: _reach(name, own) for name, own in parts.items()}
    return _of_parts(folder, DCP, parts, shapes, files, remarks)._replace(
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


def _remarks(files: Sequence[str], parts: Mapping[str, Sequence[Part]]) -> Iterator[Remark]:
    """Yield remarks on ranks without any file, and on files that a rank lacks, while others have theirs."""
    known = {int(match[1]) for file in files if (match := _OF_RANK.fullmatch(file))}
    gone = [str(rank) for rank in range(1, max(known, default=0)) if rank not in known] if len(known) < 1 << 20 else []
    if gone:
        what = f"no file of {counted(len(gone), 'rank')}, by the numbers in the names: {some(gone)}"
        yield Remark("CK140", what, AGAIN)
    what = f"the files of {counted(len(known) or len(files), 'rank')}, and nothing says how many there were, or how "
    yield Remark("CK145", f"{what}large the tensors: complete as far as the files tell")
    # Ranks cut all tensors of one mesh together, so what is cut by some of these ranks was cut by all of them. A rank
    # has no part of a tensor that is too small for all, though, and may have had none of a whole file.
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


def sniff_nanotron(folder: FolderSource) -> bool:
    """Return whether there are folders of modules with files of parameters, and their metadata."""
    if _MARK not in folder.files or _MODEL not in folder.folders:
        return False
    return next(_nanotron_files(folder), None) is not None


def _nanotron_files(folder: FolderSource) -> Iterator[tuple[str, str]]:
    """Yield the name of each parameter, and the path of each of its files."""
    todo = [_MODEL]
    for _ in range(_MOST_FOLDERS):
        if not todo:
            return
        inside = todo.pop()
        files, folders = folder.names(inside)
        modules = inside.split("/")[1:]
        for file in files:
            if match := _FILE.fullmatch(file):
                yield ".".join((*modules, match[1])), f"{inside}/{file}"
        todo += (f"{inside}/{one}" for one in reversed(folders))
    raise LimitExceeded(f"more than {_MOST_FOLDERS:,} folders of modules", actual=_MOST_FOLDERS)


def read_nanotron(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the headers of all files; no tensor is read.

    Raises:
        MalformedFile: The metadata of the save, or about the part in a file, makes no sense.
        CkptoolError: A file cannot be read.
    """
    parse_object(folder.content(_MARK, _HEAD_NBYTES), repr(_MARK), "index", has_constants=True)
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, list[Part]] = {}
    files: dict[str, Parsed] = {}
    for name, file in each(_nanotron_files(folder), probe.limits.cancellation):
        files[file] = opened(folder, probe, file)
        shape, own = _slices(file, files[file])
        if shapes.setdefault(name, shape) != shape:
            raise MalformedFile(f"{file!r}: {name!r} has another shape than for other ranks", kind="mixed-saves")
        parts.setdefault(name, []).extend(own)
        if len(files) > probe.limits.tensors:
            raise LimitExceeded(f"more than {probe.limits.tensors:,} files of tensors", actual=probe.limits.tensors)
    return _of_parts(folder, NANOTRON, parts, shapes, files, [])


def _slices(file: str, parsed: Parsed) -> tuple[tuple[int, ...], list[Part]]:
    """Return the shape of the whole tensor of a file, and the parts of it that are in the file."""
    info = parsed.contents.tensors.get("data")
    if info is None or len(parsed.contents.tensors) > 1:
        raise MalformedFile(f"{file!r} does not hold one tensor, 'data'", kind="malformed-sharding")
    pairs, said = (parsed.metadata.get(key) for key in ("local_global_slices_pairs", "unsharded_shape"))
    if pairs is None or said is None:
        return info.shape, [Part(((0,) * len(info.shape), info.shape), file, info)]
    if len(pairs) > _MOST_TEXT or len(said) > _MOST_TEXT:
        raise LimitExceeded(f"{file!r} says more than {_MOST_TEXT:,} characters of its slices", actual=_MOST_TEXT)
    shape = tuple(map(int, _NUMBER.findall(_NUMPY.sub("", said))))
    if not is_countable(shape) or len(shape) > MAX_RANK:
        raise MalformedFile(f"{file!r} has no shape of the whole tensor", kind="malformed-sharding")
    found = []
    for pair in pairs.split(";"):
        local, _, whole = pair.partition("#")
        (offsets, sizes), box = _box(file, local, info.shape), _box(file, whole, shape)
        if sizes != box[1]:
            raise MalformedFile(f"{file!r} has slices of two sizes: {pair[:80]!r}", kind="malformed-sharding")
        start = sum(at * step for at, step in zip(offsets, info.stride, strict=True))
        own = info._replace(shape=sizes, storage_offset=info.storage_offset + start)
        found.append(Part(box, file, own))
    return shape, found


def _box(file: str, text: str, shape: tuple[int, ...]) -> Box:
    slices = [_SLICE.fullmatch(one) for one in text.split("|")]
    ends: list[tuple[int, int]] = []
    for size, one in zip(shape, slices, strict=False):
        begin = 0 if one is None or one[1] == "None" else int(one[1])
        end = size if one is None or one[2] == "None" else int(one[2])
        ends.append((begin, end))
    if (
        None in slices
        or len(slices) != len(shape)
        or any(not a <= b <= size for (a, b), size in zip(ends, shape, strict=True))
    ):
        raise MalformedFile(
            f"{file!r} has slices that are none of {list(shape)}: {text[:80]!r}", kind="malformed-sharding"
        )
    return tuple(a for a, _ in ends), tuple(b - a for a, b in ends)
