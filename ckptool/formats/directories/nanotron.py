"""
Nanotron's checkpoints: a folder for each module, and a safetensors file for each parameter, or for each part of it.

    checkpoint_metadata.json                                            numbers of ranks, steps
    model/model/final_layer_norm/model_weight.safetensors               whole
    model/…/qkv_proj/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors    the part of a rank

Each holds one tensor, ``data``. Its metadata maps slices of it to slices of the whole tensor, whose shape it has, too:
``0,8,None|None,None,None#8,16,None|None,None,None``. See src/nanotron/serialize/ and parallel/parameters.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from ckptool.cancellation import each
from ckptool.checkpoints.parsed import Parsed
from ckptool.errors import LimitExceeded, MalformedFile
from ckptool.formats import safetensors
from ckptool.formats.directories import side_by_side
from ckptool.formats.directories.side_by_side import Part, of_parts
from ckptool.formats.probe import Probe
from ckptool.sources.folder import FolderSource
from ckptool.tensors.pieces import Box
from ckptool.tensors.tensor import MAX_RANK, is_countable

NAME: Final = "nanotron"
TRAITS: Final = safetensors.TRAITS
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


def sniff(folder: FolderSource) -> bool:
    """Return whether there are folders of modules with files of parameters, and their metadata."""
    if _MARK not in folder.files or _MODEL not in folder.folders:
        return False
    return next(_files(folder), None) is not None


def _files(folder: FolderSource) -> Iterator[tuple[str, str]]:
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


def read(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the headers of all files; no tensor is read.

    Raises:
        MalformedFile: The metadata about the part in a file makes no sense.
        CkptoolError: A file cannot be read.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, list[Part]] = {}
    files: dict[str, Parsed] = {}
    for name, file in each(_files(folder), probe.limits.cancellation):
        files[file] = side_by_side.opened(folder, probe, file)
        shape, own = _parts(file, files[file])
        if shapes.setdefault(name, shape) != shape:
            raise MalformedFile(f"{file!r}: {name!r} has another shape than for other ranks", kind="mixed-saves")
        parts.setdefault(name, []).extend(own)
        if len(files) > probe.limits.tensors:
            raise LimitExceeded(f"more than {probe.limits.tensors:,} files of tensors", actual=probe.limits.tensors)
    return of_parts(folder, NAME, parts, shapes, files, [])


def _parts(file: str, parsed: Parsed) -> tuple[tuple[int, ...], list[Part]]:
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
