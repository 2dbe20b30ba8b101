"""
An index of shards: JSON that names the file of each tensor. Together they are one checkpoint.

    {"metadata": {"total_size": 24}, "weight_map": {"name": "model-00001-of-00002.safetensors", …}}

Names are files beside the index or below its folder: ``descriptors`` decides which are opened. The format of the
checkpoint is that of its shards. Written by the ``save_pretrained`` of transformers and diffusers; see
https://github.com/huggingface/huggingface_hub, serialization/_base.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from ckptool.checkpoints.contents import Contents, Group
from ckptool.checkpoints.parsed import Parsed, PartOf, Recorded, Shard, Traits
from ckptool.checkpoints.roles import role_of
from ckptool.errors import (
    AmbiguousFile,
    CkptoolError,
    FileUnavailable,
    LimitExceeded,
    MalformedFile,
    TruncatedFile,
    UnsupportedFeature,
    within,
)
from ckptool.formats import safetensors
from ckptool.formats.filenames import lacking
from ckptool.formats.probe import Probe
from ckptool.formats.strict_json import parse_object
from ckptool.limits import Limits, refuse_long
from ckptool.messages import counted, some
from ckptool.sources.descriptors import components
from ckptool.sources.folder import FolderSource
from ckptool.sources.source import Source, SourceInFolder

NAME = "sharded"
TRAITS = Traits()
"""Not those of a checkpoint, which has the traits of its shards."""

_FIRST = 512
_HEAD_NBYTES = 16 << 20
_METADATA = "_metadata"
"""What torch keeps beside a state dict: the versions of modules."""
_AGAIN = "Get the index and the shards again, from one place."


def sniff(probe: Probe) -> bool:
    """Return whether this is an index in a file, so that there can be others beside it."""
    return hasattr(probe.source, "open_sibling") and is_index(probe.source)


def is_index(source: Source) -> bool:
    """Return whether a file is an object with a ``weight_map``."""
    if not source.read(0, min(source.nbytes, _FIRST)).lstrip().startswith(b"{"):
        return False
    data = source.read(0, min(source.nbytes, _HEAD_NBYTES))
    return re.search(rb'"weight_map"\s{0,100}:\s{0,100}\{', data) is not None


def read(probe: Probe) -> Parsed:
    """
    Return the checkpoint of an index and its shards. The indexes of the shards are read, but no tensor.

    Raises:
        MalformedFile: A name is not that of a file beside the index, or tensors are not where the index has them.
        FileUnavailable: Shards are missing (``missing-shards``), or not to be opened.
        AmbiguousFile: A tensor is in two shards, or two shards are one file.
        UnsupportedFeature: A shard is not a state dict.
        CkptoolError: A shard cannot be read; the message has its name.
    """
    index = cast("SourceInFolder", probe.source)  # sniff saw it
    if probe.depth:  # inside another source there are no files: it is beside one
        raise MalformedFile("an index of shards itself", kind="nested-index")
    shard_of, announced_nbytes, texts = _parse(index, probe.limits)
    opened = {name: _read_shard(probe, name, source) for name, source in _open_shards(index, shard_of).items()}
    _compare(shard_of, opened)
    opened = _without_places(opened, announced_nbytes)
    parsed = _merged(index, shard_of, opened, texts, probe)._replace(announced_nbytes=announced_nbytes)
    if lost := lacking(opened):
        held = sum(info.total_nbytes for info in parsed.contents.tensors.values())
        if held != announced_nbytes:  # else it counts only what it names
            what = f"an index that does not name {some(lost)} of the same set"
            remedy = "Get the index again, and what is missing."
            return parsed._replace(part_of=PartOf(what, os.path.dirname(index.path), True, remedy))
    return parsed


def read_set(folder: FolderSource, names: Sequence[str], probe: Probe) -> Parsed:
    """
    Return the checkpoint of shards without an index; ``names`` are all of them, in order.

    Raises:
        CkptoolError: As ``read``.
    """
    opened = _without_places({name: _read_shard(probe, name, folder.open(name)) for name in names}, None)
    return _merged(folder, _holders(opened), opened, {}, probe)


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


def _merged(
    source: Source,
    shard_of: Mapping[str, str],
    opened: Mapping[str, Parsed],
    texts: Mapping[str, str],
    probe: Probe,
) -> Parsed:
    """Return shards as one checkpoint, whose tensors are those of ``shard_of``, in its order."""
    formats = list(dict.fromkeys(shard.format for shard in opened.values()))
    if len(formats) > 1:
        raise UnsupportedFeature(f"shards of several formats: {', '.join(formats)}", kind="shard-format")
    tensors = {name: opened[shard].contents.tensors[name] for name, shard in shard_of.items()}
    contents = Contents(tensors)
    contents.groups.append(Group("", "mapping", list(tensors)))
    metadata, notes = merged_texts([texts, *(shard.metadata for shard in opened.values())])
    whole = Parsed(
        source,
        formats[0],
        next(iter(opened.values())).traits,
        contents,
        fixed_form="state_dict",
        metadata=metadata,
        recorded=safetensors.decode(metadata, tensors, probe.limits.cancellation) if metadata else Recorded(),
        notes=tuple(notes),
        remarks=tuple(
            one._replace(what=f"shard {name!r}: {one.what}") for name, shard in opened.items() for one in shard.remarks
        ),
        shard_of=shard_of,
    )
    return with_files(whole, list(opened.items()), "shard ")


def _parse(index: SourceInFolder, limits: Limits) -> tuple[dict[str, str], int | None, dict[str, str]]:
    """Return the shard of each tensor, the announced bytes, and the other texts of an index: which names are tied."""
    if index.nbytes > limits.header_nbytes:
        fact = f"an index of shards of {index.nbytes:,} bytes; {limits.header_nbytes:,} are allowed"
        raise LimitExceeded(fact, needed=index.nbytes, actual=limits.header_nbytes)
    data = index.read(0, index.nbytes)
    try:
        found = parse_object(data, "the index of shards", "index")
    except MalformedFile as error:
        if data.rstrip().endswith(b"}"):
            raise
        raise TruncatedFile(
            f"truncated: the index of shards has {len(data):,} bytes and does not end with a brace",
            kind="truncated-index",
            hint="Download the file again.",
            actual=len(data),
        ) from error
    shard_of, metadata = found.get("weight_map"), found.get("metadata")
    if not isinstance(shard_of, dict) or not shard_of or not all(type(name) is str for name in shard_of.values()):
        raise MalformedFile("weight_map is not a mapping of tensors to files", kind="malformed-index")
    if len(shard_of) > limits.tensors:
        raise LimitExceeded(f"more than {limits.tensors:,} tensors", needed=len(shard_of), actual=limits.tensors)
    shard_of = {tensor: name.removeprefix("./") for tensor, name in shard_of.items()}
    names = dict.fromkeys(shard_of.values())
    refuse_many(len(names), limits)
    refuse_long("the name of a shard", *names)
    for name in names:
        components(name)
    facts = metadata if isinstance(metadata, dict) else {}
    announced = facts.get("total_size")
    texts = {key: text for key, text in facts.items() if isinstance(text, str)}
    return shard_of, announced if type(announced) is int else None, texts


def refuse_many(count: int, limits: Limits) -> None:
    """Raise LimitExceeded for more shards than the limits allow."""
    if count > limits.shards:
        raise LimitExceeded(f"{count:,} shards; {limits.shards:,} are allowed", needed=count, actual=limits.shards)


def _open_shards(index: SourceInFolder, shard_of: Mapping[str, str]) -> dict[str, SourceInFolder]:
    names = dict.fromkeys(shard_of.values())
    opened: dict[str, SourceInFolder] = {}
    missing: list[str] = []
    places = {index.place: os.path.basename(index.path)}
    for name in names:
        try:
            source = opened[name] = index.open_sibling(name)
            other = places.setdefault(source.place, name)
            if other is not name:
                raise AmbiguousFile(f"{other!r} and shard {name!r} are one file", kind="ambiguous-shards")
        except FileUnavailable as error:
            if error.kind != "missing":
                error.message = f"shard {name!r}: {error.message}"
                raise
            missing.append(name)
    refuse_missing_shards(missing, len(names), "beside the index")
    return opened


def refuse_missing(missing: Sequence[str], needed: int, what: str, hint: str) -> None:
    """Raise FileUnavailable for the ``missing`` files of a set of ``needed`` ones, which ``what`` counts in words."""
    if missing:
        fact = f"{len(missing):,} of {what} not there: {some(missing)}"
        raise FileUnavailable.of_set(fact, hint, needed, needed - len(missing))


def refuse_missing_shards(missing: Sequence[str], needed: int, where: str) -> None:
    """Raise FileUnavailable for shards that are missing; they should be ``where``."""
    hint = f"Put {'it' if len(missing) == 1 else 'them'} {where}: download what is missing."
    refuse_missing(list(map(repr, missing)), needed, counted(needed, "shard"), hint)


def lacks_all(error: CkptoolError) -> bool:
    """Return whether an error means that none of the shards of an index exists."""
    return error.kind == "missing-shards" and error.actual == 0


def _read_shard(probe: Probe, name: str, source: Source) -> Parsed:
    """Return the state dict in a shard; errors have its name."""
    with within(f"shard {name!r}"):
        shard = probe.read_inner(source)
        may_be_one = shard.traits.has_tree or shard.traits.is_plain
        if not may_be_one or shard.member is not None or shard.source is not source:
            raise UnsupportedFeature(f"a file of format {shard.format}, packed or of its own", kind="shard-format")
        contents = shard.contents
        others = [path for path, _ in contents.extras if path != _METADATA]
        groups = [group for group in contents.groups if group.names]
        flat = [group for group in groups if not group.key and group.class_name is None]
        is_flat = len(groups) == len(flat) == 1 and role_of(flat[0], contents) == "model"
        if contents.attributes or others or not (is_flat or (not contents.tensors and not groups)):
            raise UnsupportedFeature("no state dict and nothing else", kind="shard-form")
    if not contents.extras:
        return shard
    return shard._replace(notes=(*shard.notes, "the versions of modules that it holds are left out"))


def _compare(shard_of: Mapping[str, str], opened: Mapping[str, Parsed]) -> None:
    """Raise an error unless each tensor is in the shard that the index names for it, and in no other."""
    holders = _holders(opened)
    missing = [name for name, shard in shard_of.items() if holders.get(name) != shard]
    if missing:
        name = missing[0]
        where = f", but in {holders[name]!r}" if name in holders else ""
        raise MalformedFile(
            f"{len(missing):,} of {counted(len(shard_of), 'tensor')} not in the shard that the index names: "
            f"{name!r} is not in {shard_of[name]!r}{where}",
            kind="shard-tensors",
            hint=_AGAIN,
        )
    if len(holders) > len(shard_of):
        extra = [name for name in holders if name not in shard_of]
        fact = f"{counted(len(extra), 'tensor')} of shards not in the index: {some(list(map(repr, extra)))}"
        raise MalformedFile(fact, kind="shard-tensors", hint=_AGAIN)


def _holders(opened: Mapping[str, Parsed]) -> dict[str, str]:
    """Return the shard of each tensor; a tensor in two of them is an error."""
    holders: dict[str, str] = {}
    for shard, parsed in opened.items():
        for name in parsed.contents.tensors:
            other = holders.setdefault(name, shard)
            if other is not shard:
                fact = f"tensor {name!r} is in {other!r} and in {shard!r}"
                raise AmbiguousFile(fact, kind="ambiguous-shards", hint=_AGAIN)
    return holders


def _without_places(opened: Mapping[str, Parsed], announced_nbytes: int | None) -> dict[str, Parsed]:
    """
    Return shards without the metadata about the offsets of pieces.

    Raises:
        UnsupportedFeature: They hold pieces. DCP's writer for Hugging Face adds such metadata to whole tensors, too:
            these begin at 0, and have all bytes that the index counts.
    """
    about = safetensors.ABOUT_PIECES
    of_pieces = [name for name, shard in opened.items() if safetensors.OF_PIECES in shard.metadata]
    held = sum(info.nbytes for name in opened for info in opened[name].contents.tensors.values()) if of_pieces else 0
    for name in of_pieces:
        if held != announced_nbytes or not safetensors.begins_at_zero(opened[name].metadata[safetensors.OF_PIECES]):
            raise UnsupportedFeature(
                f"shard {name!r}: pieces of tensors, which are not a shard of an index", kind="shard-format"
            )
    return {
        name: shard._replace(metadata={key: said for key, said in shard.metadata.items() if key not in about})
        for name, shard in opened.items()
    }


def merged_texts(texts: Iterable[Mapping[str, str]]) -> tuple[dict[str, str], list[str]]:
    """Return the metadata that the index and the shards agree on, and a note on what they do not agree on."""
    found: dict[str, str] = {}
    differing: dict[str, None] = {}
    for one in texts:
        for key, text in one.items():
            if found.setdefault(key, text) != text:
                differing[key] = None
    notes = [f"shards differ in metadata, which is left out: {some(list(map(repr, differing)))}"] if differing else []
    return {key: text for key, text in found.items() if key not in differing}, notes
