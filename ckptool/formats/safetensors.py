"""
A safetensors file: a JSON header, then the tensors, tiling the rest of the file in order.

    u64 N          length of the header, little-endian
    N bytes        {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {…}}
    the rest       row-major, little-endian; offsets count from here

https://github.com/huggingface/safetensors, "Format"
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from operator import itemgetter
from typing import TypeAlias

from ckptool.cancellation import Cancellation, each
from ckptool.checkpoints.contents import Contents, Group
from ckptool.checkpoints.modules import facts_by_module
from ckptool.checkpoints.parsed import Parsed, Recorded, Remark, Traits
from ckptool.errors import (
    AmbiguousFile,
    LimitExceeded,
    MalformedFile,
    TruncatedFile,
    UnreadableFile,
    UnsupportedFeature,
)
from ckptool.formats.probe import Probe
from ckptool.formats.strict_json import parse, parse_object
from ckptool.limits import DEFAULT_LIMITS
from ckptool.messages import counted, quoted, some
from ckptool.sources.source import Source
from ckptool.tensors import dtypes
from ckptool.tensors.tensor import (
    MAX_RANK,
    MAX_SIZE,
    StorageRef,
    TensorInfo,
    is_countable,
    is_size,
    row_major,
)

NAME = "safetensors"
TRAITS = Traits(
    is_plain=True,
    keeps_devices=False,
    keeps_ties=False,
    keeps_order=False,
    keeps_versions=False,  # but for what migrate writes
    loader="safetensors.torch.load_file",
    edited_by="header",
)

ORDER_KEY = "ckptool.order"
MODULES_KEY = "ckptool.modules"
"""Keys of ``__metadata__`` under which the order of names and the facts of modules survive."""

RESERVED = frozenset({"format", ORDER_KEY, MODULES_KEY})
"""Keys of ``__metadata__`` that are never names of tensors."""

OF_PIECES = "DCP_SHARDING_INFO"
"""Metadata in which DCP gives the offsets of the pieces in a file."""
ABOUT_PIECES = (OF_PIECES, "DCP_VERSION")
"""Metadata about the pieces in one file, and not about the whole tensors."""
_SPACE = b" \t\n\r"
_FIELDS = ("dtype", "shape", "data_offsets")
_BLOCK_NBYTES = 1 << 16
_Layout: TypeAlias = tuple[dtypes.DType, tuple[int, ...], tuple[int, ...], int]
"""What all tensors of one type and one shape share: these, the stride, and the size in bytes."""
_MAX_DEPTH = 125
"""Levels of unknown fields: the reference library's parser follows 127 levels, two of which contain these."""


def sniff(probe: Probe) -> bool:
    """Return whether the file begins with a plausible length and an opening brace, maybe after white space."""
    return is_safetensors(probe.source, probe.head)


def is_safetensors(source: Source, head: bytes) -> bool:
    """Return whether a source is such a file, or the beginning of one; ``head`` are its first bytes."""
    # No limit on the length here: a header that is too long or cut short is this format's own to refuse.
    if int.from_bytes(head[:8], "little") >= 1 << 40:
        return False
    first = head[8:9]
    return first == b"{" or (first != b"" and first in _SPACE and _first_character(source) == b"{")


def _first_character(source: Source) -> bytes:
    """Return the first byte of a header that is not white space."""
    for start in range(8, source.nbytes, _BLOCK_NBYTES):
        text = source.read(start, min(_BLOCK_NBYTES, source.nbytes - start)).lstrip(_SPACE)
        if text:
            return text[:1]
    return b""


def read(probe: Probe) -> Parsed:
    """Read the header of a safetensors file; no tensor is read."""
    source, limits = probe.source, probe.limits
    length = int.from_bytes(probe.head[:8], "little")
    if length > limits.header_nbytes:
        fact = f"a safetensors header of {length:,} bytes; {limits.header_nbytes:,} are allowed"
        raise LimitExceeded(fact, needed=length, actual=limits.header_nbytes)
    if 8 + length > source.nbytes:
        raise _truncated("its header ends", 8 + length, source.nbytes)
    text = source.read(8, length)
    header = _parse(text, limits.cancellation)
    metadata, odd = _metadata(header.pop("__metadata__", None))
    notes = tuple(_notes(text, header))
    contents = Contents()
    group = Group("", "mapping")
    if header:
        contents.groups.append(group)
    position = 0
    start = 8 + length
    if len(header) > limits.tensors:
        raise LimitExceeded(f"more than {limits.tensors:,} tensors", needed=len(header), actual=limits.tensors)
    known: dict[str, _Layout] = {}
    placed = []
    for name, entry in each(header.items(), limits.cancellation):
        if len(name) > limits.name_nbytes:
            fact = f"a name of {len(name):,} characters; {limits.name_nbytes:,} are allowed"
            raise LimitExceeded(fact, kind="name-too-long", needed=len(name), actual=limits.name_nbytes)
        begin, end = _begin(name, entry)
        header[name] = layout = _layout(name, entry, known)  # the entry goes: it takes more memory
        placed.append((begin, end, name, layout))
    placed.sort(key=itemgetter(0, 1))
    for begin, end, name, (dtype, shape, stride, nbytes) in each(placed, limits.cancellation):
        if nbytes != end - begin:
            fact = f"tensor {name!r} needs {nbytes:,} bytes, its range has {end - begin:,}"
            raise MalformedFile(fact, kind="malformed-safetensors", needed=nbytes, actual=end - begin)
        if begin != position:
            what = "overlaps the one before it" if begin < position else f"leaves {begin - position:,} bytes unused"
            raise AmbiguousFile(f"tensor {name!r} {what}", kind="ambiguous-safetensors", offset=start + begin)
        position = end
        storage = StorageRef(name, "cpu", nbytes, source, start + begin)
        contents.tensors[name] = TensorInfo(dtype, shape, stride, 0, storage, "cpu")
    if start + position > source.nbytes:
        raise _truncated("its tensors end", start + position, source.nbytes)
    if start + position < source.nbytes:
        raise AmbiguousFile(
            f"{source.nbytes - start - position:,} bytes after the last tensor",
            kind="ambiguous-safetensors",
            hint="Cut them off, or write the file again: the reference library refuses it.",
            offset=start + position,
        )
    # The header's own order is the writer's; the bytes follow it, or it follows the bytes.
    contents.tensors = {name: contents.tensors[name] for name in header}
    group.names = list(header)
    return Parsed(
        source,
        NAME,
        TRAITS,
        contents,
        fixed_form="state_dict" if header else "data",
        metadata=metadata,
        recorded=decode(metadata, header, limits.cancellation),
        notes=notes,
        remarks=(Remark("CK118", odd, "Write it again with 'ckptool migrate': what is not text becomes text."),)
        if odd
        else (),
    )


def _notes(text: bytes, header: dict[str, object]) -> Iterator[str]:
    """Yield notes on what is odd in a header that the reference library still reads."""
    spaces = 0 if text.startswith(b"{") else len(text) - len(text.lstrip(_SPACE))
    if spaces:
        yield f"{counted(spaces, 'byte')} of white space before the header, which other readers may not take"
    odd = [entry for entry in header.values() if isinstance(entry, dict) and len(entry) > len(_FIELDS)]
    unknown = sorted({field for entry in odd for field in entry.keys() - set(_FIELDS)})
    if unknown:
        yield f"header fields that nobody knows are left out: {some(unknown)}"


def decode(metadata: Mapping[str, str], names: Mapping[str, object], cancellation: Cancellation | None) -> Recorded:
    """
    Return what the metadata of a file records about its tensors; ``names`` are the names in the file.

    The reference library writes ties, too; only ``encode`` writes the rest, which is ignored where it could not have
    written it.
    """
    ties = {
        name: kept for name, kept in metadata.items() if kept in names and name not in names and name not in RESERVED
    }
    order = _decoded(metadata.get(ORDER_KEY), cancellation)
    modules = _decoded(metadata.get(MODULES_KEY), cancellation)
    listed: list[str] = order if isinstance(order, list) and all(isinstance(name, str) for name in order) else []
    is_whole = len(set(listed)) == len(listed) == len(names) + len(ties) and all(
        name in names or name in ties for name in listed
    )
    # A number alone is a version: nearly every module has that and no more.
    written = modules.items() if isinstance(modules, dict) else ()
    facts = [(path, {"version": entry} if isinstance(entry, int) else entry) for path, entry in written]
    return Recorded(
        ties,
        tuple(listed) if is_whole else (),
        facts_by_module(facts),
        {
            key: text
            for key, text in metadata.items()
            if (key not in RESERVED or (key == "format" and text != "pt")) and key not in ties
        },
    )


def encode(recorded: Recorded) -> dict[str, str]:
    """Return the metadata that records this, for ``decode`` to read."""
    import json  # JSON is not what most files need

    metadata = {"format": "pt", **recorded.texts, **recorded.ties}
    if recorded.order:
        metadata[ORDER_KEY] = json.dumps(recorded.order, separators=(",", ":"))
    if recorded.modules:
        facts = {
            path: entry["version"] if entry.keys() == {"version"} else entry for path, entry in recorded.modules.items()
        }
        metadata[MODULES_KEY] = json.dumps(facts, separators=(",", ":"))
    return metadata


def _decoded(text: str | None, cancellation: Cancellation | None) -> object:
    """Return the JSON in an entry of ours; None if it is malformed, which makes no tensor unreadable."""
    if not text:
        return None
    try:
        return parse(text.encode(), "an entry of __metadata__", "metadata", cancellation)
    except UnreadableFile:
        return None


def places(source: Source) -> dict[str, tuple[int, int]]:
    """
    Return begin and end of each tensor, in bytes from the start of the file, even if the file ends before that.

    Raises:
        MalformedFile: The header is not JSON, or is cut short.
    """
    length = int.from_bytes(source.read(0, min(8, source.nbytes)), "little")
    if length > min(DEFAULT_LIMITS.header_nbytes, source.nbytes - 8):
        raise MalformedFile("the safetensors header is not whole", kind="malformed-safetensors")
    header = _parse(source.read(8, length))
    header.pop("__metadata__", None)
    offsets = {name: _begin(name, entry) for name, entry in header.items()}
    return {name: (8 + length + begin, 8 + length + end) for name, (begin, end) in offsets.items()}


def _parse(data: bytes, cancellation: Cancellation | None = None) -> dict[str, object]:
    if data.startswith(b'{},"__metadata__":'):
        fact = "a safetensors header of metadata alone, which safetensors 0.4 and older wrote as no JSON"
        raise MalformedFile(fact, kind="malformed-safetensors", hint="It holds no tensors: save the weights again.")
    header = parse_object(data, "the safetensors header", "safetensors", cancellation)
    for name, entry in header.items():
        # The reference library also takes a list of the three, and a type as the key of an object.
        if type(entry) is list and len(entry) == len(_FIELDS):
            header[name] = entry = dict(zip(_FIELDS, entry, strict=True))
        if isinstance(entry, dict) and name != "__metadata__" and isinstance(dtype := entry.get("dtype"), dict):
            header[name] = {**entry, "dtype": next(iter(dtype)) if list(dtype.values()) == [None] else None}
    return header


def _metadata(found: object) -> tuple[dict[str, str], str | None]:
    """Return the metadata as text, with JSON of any kind as text, too, and a note on that."""
    if found is None:
        return {}, None
    entries: dict[str, object] = found if isinstance(found, dict) else {"__metadata__": found}
    text = {key: value for key, value in entries.items() if isinstance(value, str)}
    if text == found:
        return text, None
    from json import dumps

    try:
        text = {key: text[key] if key in text else dumps(value) for key, value in entries.items()}
    except RecursionError as error:
        raise MalformedFile("__metadata__ is nested beyond all measure", kind="malformed-safetensors") from error
    odd = [quoted(key) for key, value in entries.items() if text[key] is not value or entries is not found]
    return text, f"metadata that is not text, so safetensors refuses the file, is taken as text: {some(odd)}"


def _begin(name: str, entry: object) -> tuple[int, int]:
    """Return the begin and end of a tensor, in bytes from the end of the header."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if type(offsets) is list and len(offsets) == 2:
        begin, end = offsets
        if type(begin) is type(end) is int and 0 <= begin < MAX_SIZE and 0 <= end < MAX_SIZE:
            return begin, end
    raise MalformedFile(f"tensor {name!r} has no valid data_offsets", kind="malformed-safetensors")


def _layout(name: str, entry: object, known: dict[str, _Layout]) -> _Layout:
    """Return the layout of a tensor; ``known`` are those made before, as most tensors share a few."""
    assert isinstance(entry, dict)  # _begin saw it
    code, sizes = entry.get("dtype"), entry.get("shape")
    if not (type(code) is str and type(sizes) is list and len(sizes) <= MAX_RANK and all(map(is_size, sizes))):
        raise MalformedFile(f"tensor {name!r} has no valid dtype and shape", kind="malformed-safetensors")
    if len(entry) > len(_FIELDS) and _is_deep(entry):
        raise MalformedFile(f"tensor {name!r} has a shape or fields beyond all measure", kind="malformed-safetensors")
    key = f"{code}{sizes}"  # text, because its hash is random: numbers can be chosen to have one hash
    if key in known:
        return known[key]
    shape = tuple(sizes)
    if not is_countable(shape):
        raise MalformedFile(f"tensor {name!r} has a shape or fields beyond all measure", kind="malformed-safetensors")
    dtype = dtypes.BY_SAFETENSORS.get(code)
    if dtype is None:
        raise UnsupportedFeature(f"tensor {name!r} has dtype {code!r}, which torch has no type for", kind="dtype")
    if code == "F4":  # the header counts values, torch pairs of them
        if not shape or shape[-1] % 2:
            raise MalformedFile(f"tensor {name!r} has an odd number of F4 values", kind="malformed-safetensors")
        shape = (*shape[:-1], shape[-1] // 2)
    known[key] = dtype, shape, row_major(shape), prod(shape) * dtype.itemsize
    return known[key]


def _is_deep(entry: dict[str, object]) -> bool:
    """Return whether unknown fields are nested deeper than the reference library follows."""
    level = _containers(value for key, value in entry.items() if key not in _FIELDS)
    for _ in range(_MAX_DEPTH):
        if not level:
            return False
        level = _containers(value for one in level for value in (one.values() if isinstance(one, dict) else one))
    return bool(level)


def _containers(values: Iterable[object]) -> list[dict[str, object] | list[object]]:
    return [value for value in values if isinstance(value, dict | list)]


def _truncated(what: str, needed: int, actual: int) -> TruncatedFile:
    return TruncatedFile.early(f"{what} at byte {needed:,}, the file has {actual:,}", "safetensors", actual, needed)


def begins_at_zero(text: str) -> bool:
    """Return whether the offsets of all pieces in such metadata are 0."""
    places = parse_object(text.encode(), OF_PIECES, "sharding").values()
    found = [place.get("saved_offsets") if isinstance(place, dict) else None for place in places]
    return all(isinstance(offsets, list) and not any(offsets) for offsets in found)
