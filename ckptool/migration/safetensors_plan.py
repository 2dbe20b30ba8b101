"""
The plan of a safetensors file, or of a folder of shards with an index.

Tensors are packed in the library's order (by type, then name). The metadata has ``{"format": "pt"}`` and, for each tied
name that was left out, ``removed → kept``; spaces pad the header to a multiple of 8. The order of names and the
modules' facts, for which the library has no keys, are stored under keys of our own.

https://github.com/huggingface/safetensors; bindings/python/py_src/safetensors/torch.py

The folder is that of huggingface_hub's ``save_torch_state_dict``.

Shards are filled in the order of the names. A tensor larger than a shard gets one of its own, before the one that is
being filled. Tied names are left out, and are in the index with the name that is kept; what fits into one file is that
file alone. The order of names and the modules' facts are in the first shard.

https://github.com/huggingface/huggingface_hub; src/huggingface_hub/serialization/_base.py, _torch.py

``config_from`` copies files beside the weights of a Hugging Face model that are needed to use them into that folder:
settings, tokenizers, templates, byte for byte. Only ``config.json`` changes where weights are cast or made dense:
libraries load weights in the type that it names.

https://github.com/huggingface/transformers; src/transformers/utils/__init__.py, tokenization_utils_base.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any, Final

from ckptool.cancellation import Cancellation, each
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.parsed import Recorded
from ckptool.checkpoints.weights import Weights, refuse_others
from ckptool.errors import Failure, MigrationRefused, OutputFailed, SourceChanged, about
from ckptool.formats.json_beside import QUANTIZED, json_object
from ckptool.formats.safetensors import ABOUT_PIECES, MODULES_KEY, ORDER_KEY, RESERVED, encode
from ckptool.messages import as_path, some
from ckptool.migration.changes import Changes, most_nbytes_of
from ckptool.migration.plan import METADATA, OutFile, Part, Plan, file_of_bytes, is_plain, split
from ckptool.migration.selection import dropped_metadata
from ckptool.sources.folder import FolderSource
from ckptool.tensors.payloads import payload_of
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity

# fmt: off
_DTYPE_ORDER: Final = (
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)
# fmt: on
_NEWER_DTYPES: Final = {"F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64"}
"""Types that releases of the reference library before 0.8 may not know; they refuse the whole file."""
_LENGTH_NBYTES: Final = 8
_INDEX: Final = "model.safetensors.index.json"


def plan_weights(
    plan: Plan, checkpoint: Checkpoint, weights: Weights, changes: Changes, start: int | None = None
) -> Plan:
    """
    Return the plan of the weights as a safetensors file, or with ``max_shard_size`` as a folder of shards.

    Tensors stay in place if ``start`` is their offset in the file; a record of the order of names stays, too, if it
    fits.
    """
    cancellation, most_nbytes = checkpoint.source.cancellation, most_nbytes_of(changes)
    new, globs = changes.set_metadata, dropped_metadata(checkpoint, changes)
    gone = dict.fromkeys(key for keys in globs.values() for key in keys if key not in new)
    texts = {**{key: text for key, text in weights.texts if key not in gone}, **new}
    weights = weights._replace(texts=tuple(texts.items()))
    tensors, tied, left_out = _select(checkpoint, weights, changes)
    kept = {name: tensor for name, tensor in tensors.items() if name not in tied} if tied else tensors
    _refuse_reserved(new, tied, kept)
    sizes = ((name, tensor.info.nbytes) for name, tensor in kept.items())
    parts = [list(kept)] if most_nbytes is None else split(sizes, most_nbytes) or [[]]
    orders = parts
    if start is None:  # the order in which the reference library packs them
        codes = {name: str(tensor.info.dtype.safetensors) for name, tensor in kept.items()}
        orders = [sorted(part, key=lambda name: (-_DTYPE_ORDER.index(codes[name]), name)) for part in parts]
    is_one = len(parts) == 1
    found = [name for part in (orders if is_one else parts) for name in part]  # the order without a record of it
    order = tuple(tensors)
    # A text that readers would take for a tied name is left out.
    texts = {key: text for key, text in texts.items() if text not in tensors or text in tied}
    recorded = Recorded(tied if is_one else {}, () if order == (*found, *tied) else order, weights.modules, texts)
    first = encode(recorded)
    names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    names = ["" if most_nbytes is None else "model.safetensors"] if is_one else names
    metadata = [first, *([{"format": first["format"]}] * (len(parts) - 1))]
    packed = [_pack(*one, kept, cancellation, start) for one in zip(names, orders, metadata, strict=True)]
    if checkpoint.recorded.order and start is not None and not recorded.order:
        longer = _pack(names[0], orders[0], encode(recorded._replace(order=order)), kept, cancellation, start)
        if len(longer[1].rstrip(b" ")) <= start - _LENGTH_NBYTES or new:  # new text must not displace the order
            packed = [longer]
    files = [file for file, _ in packed]
    if not is_one:
        weight_map = {name: file for file, part in zip(names, parts, strict=True) for name in part}
        total = sum(tensor.info.nbytes for tensor in kept.values())
        index = json.dumps({"metadata": {"total_size": total, **tied}, "weight_map": weight_map}, indent=2)
        files.append(file_of_bytes(_INDEX, index.encode()))
    return replace(
        plan,
        weights=weights,
        tied=tied,
        renamed=weights.renamed,
        dropped=(*weights.dropped, *left_out, *(f"{METADATA}{key}" for key in gone)),
        metadata={key: text for key, text in new.items() if checkpoint.metadata.get(key) != text},
        files=files,
        expected=[(name, kept[name].info) for one in orders for name in one],
        packed=kept,
        header=packed[0][1],
    )


def _select(
    checkpoint: Checkpoint, weights: Weights, changes: Changes
) -> tuple[dict[str, LazyTensor], dict[str, str], list[str]]:
    """Return the tensors that the format can hold, in order; tied names with the name to keep; other entries."""
    cancellation = checkpoint.source.cancellation
    unsupported = {}
    for name, tensor in each(weights.tensors.items(), cancellation):
        code = tensor.info.dtype.safetensors
        if not is_plain(tensor.info) or code is None or (code == "F4" and not tensor.shape):
            unsupported[name] = tensor
    refuse_others(checkpoint, {**unsupported, **weights.others}, drop=changes.drop_unsupported)
    if "__metadata__" in weights.tensors:
        raise MigrationRefused(
            "safetensors keeps the name '__metadata__' for itself",
            kind="reserved-name",
            hint="Rename it with `rename=`.",
        )
    tensors = {name: tensor for name, tensor in weights.tensors.items() if name not in unsupported}
    same: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in each(tensors.items(), cancellation) if not changes.expand_tied else ():
        same.setdefault(identity(tensor.info), []).append(name)
    groups = [sorted(names, key=lambda name: (name not in RESERVED, name)) for names in same.values() if len(names) > 1]
    tied = {name: names[0] for names in groups for name in names[1:]}  # the first in the alphabet is kept
    return tensors, tied, [*unsupported, *weights.others]


def _refuse_reserved(new: Mapping[str, str], tied: Collection[str], kept: Collection[str]) -> None:
    """Raise MigrationRefused for metadata that readers would take for names, ties or places of tensors."""
    for key, text in new.items():
        fact = ""
        if key in (ORDER_KEY, MODULES_KEY, *ABOUT_PIECES) or key in tied:
            fact = f"metadata {key!r} is what names, ties or places of tensors are read from"
        elif text in kept:
            fact = f"metadata {key!r} with the text {text!r} would make it another name of that tensor"
        if fact:
            raise MigrationRefused(fact, kind="reserved-metadata", hint="Choose another key, or another text.")


def _pack(
    name: str,
    order: Sequence[str],
    metadata: dict[str, str],
    tensors: Mapping[str, LazyTensor],
    cancellation: Cancellation | None,
    start: int | None,
) -> tuple[OutFile, bytes]:
    """Return a file with the tensors in ``order`` and this metadata, and its header."""
    payloads = [payload_of(tensors[one]) for one in each(order, cancellation)]
    entries: dict[str, object] = {"__metadata__": metadata}
    position = 0
    for one, payload in each(zip(order, payloads, strict=True), cancellation):
        info = tensors[one].info
        code = info.dtype.safetensors
        # The header counts values, and torch packs two of these into one.
        shape = [*info.shape[:-1], info.shape[-1] * 2] if code == "F4" else list(info.shape)
        if start is not None and info.storage is not None:
            position = info.storage.offset - start
        entries[one] = {"dtype": code, "shape": shape, "data_offsets": [position, position + payload.nbytes]}
        position += payload.nbytes
    try:
        header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise MigrationRefused(
            "a name, or a text, that is not valid Unicode cannot be written into a header", kind="unsupported-name"
        ) from error
    header += b" " * (-len(header) % 8)
    nbytes = _LENGTH_NBYTES + len(header) + sum(payload.nbytes for payload in payloads)
    codes = {tensors[one].info.dtype.safetensors for one in order}
    reader = partial(_open_with_reference, names=order, dtypes=codes, metadata=metadata)
    begin = len(header).to_bytes(_LENGTH_NBYTES, "little"), header
    return OutFile(name, nbytes, lambda _: chain(begin, payloads), payloads, reader=reader), header


def _open_with_reference(
    path: str, names: Sequence[str], dtypes: set[str | None], metadata: dict[str, str]
) -> str | None:
    """Compare what the reference library reads; return its name and version, or None if it cannot be used here."""
    try:
        import safetensors
        from safetensors import SafetensorError
    except ImportError:
        return None
    try:
        reference = _reference(path)
        if reference is None:
            return None
        with reference as opened:
            found, said = set(opened.keys()), opened.metadata()
    except (SafetensorError, OSError) as error:
        if "InvalidHeaderDeserialization" in str(error) and dtypes & _NEWER_DTYPES:
            return None
        raise OutputFailed(f"the safetensors library refuses it: {error}", kind="verification-failed") from error
    if found != set(names) or said != metadata:
        what = "tensors" if said == metadata else "metadata"
        raise OutputFailed(f"the safetensors library finds other {what} in it", kind="verification-failed")
    return f"safetensors {safetensors.__version__}"


def _reference(path: str) -> Any:
    """Open a file with the reference library: by way of numpy or, as that is slow to import, else of torch."""
    from safetensors import safe_open

    for framework in ("numpy", "pt"):
        try:
            return safe_open(path, framework=framework)
        except ImportError:
            continue
    return None


_NAMES: Final = (
    *("config.json", "*_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*"),
    *("merges.txt", "chat_template.*", "*.model", "*.tiktoken", "*.spm"),
)
_OTHERS: Final = ("*.py", "*.pth", "*.pt", "*.bin", "*.safetensors")
"""Not copied: code of a model, which nobody requested, and weights, which are written anew."""
_MOST_NBYTES: Final = 128 << 20
_TYPES: Final = ("torch_dtype", "dtype")
_CONFIG: Final = "config.json"
_QUANTISED: Final = QUANTIZED[_CONFIG]


def config_files(changes: Changes) -> list[OutFile]:
    """
    Return the files that are copied from the folder ``config_from``.

    Raises:
        FileUnavailable: There is no such folder.
        MigrationRefused: It has none of these files, or one is too large for settings.
    """
    place = str(changes.config_from)
    with about(place), closing(FolderSource(place)) as folder:
        found = {name: folder.nbytes_of(name) or 0 for name in _among(folder)}
        if not found:
            hint = "Name the folder that has the config.json of the model."
            raise MigrationRefused(f"{as_path(place)} has no settings of a model", kind="no-settings", hint=hint)
        for name, nbytes in found.items():
            if nbytes > _MOST_NBYTES:
                fact = f"{as_path(os.path.join(place, name))} has {nbytes:,} bytes, and no settings have so many"
                raise MigrationRefused(fact, kind="no-settings", hint="Copy by hand what you need of it.")
        settings = dict(json_object(folder, _CONFIG)) if _CONFIG in found else {}
        if not settings and changes.dequantize and _CONFIG in found:
            fact = f"{_CONFIG!r} cannot be read, and may say that the weights are quantised"
            raise MigrationRefused(fact, kind="no-settings", hint="Mend it, or leave out `config_from=`.")
        is_cast = changes.dtype is not None and _put(settings, str(changes.dtype))
        is_dense = changes.dequantize and _take_out(settings)
        if changes.dequantize:
            found = {name: nbytes for name, nbytes in found.items() if name == _CONFIG or name not in QUANTIZED}
    files = [OutFile(name, nbytes, partial(_copied, place, name, nbytes)) for name, nbytes in found.items()]
    if is_cast or is_dense:
        changed = file_of_bytes(_CONFIG, json.dumps(settings, indent=2, ensure_ascii=False).encode())
        files = [changed, *(file for file in files if file.name != _CONFIG)]
    return files


def left_behind(place: str) -> Iterator[str]:
    """Yield a note if the source's folder has settings of a model, which stay there."""
    try:
        with closing(FolderSource(place)) as folder:
            names = _among(folder)
    except Failure:
        return
    if _CONFIG in names:
        yield f"{some(names)} beside the source stay there: `config_from={place!r}` takes them along"


def _among(folder: FolderSource) -> list[str]:
    names = (name for name in folder.files if not any(fnmatchcase(name, other) for other in _OTHERS))
    return sorted(name for name in names if any(fnmatchcase(name, one) for one in _NAMES))


def _copied(place: str, name: str, nbytes: int, _: Sequence[int]) -> Iterator[Part]:
    with closing(FolderSource(place)) as folder:
        data = folder.content(name, _MOST_NBYTES)
    if len(data) != nbytes:
        raise SourceChanged(f"{as_path(os.path.join(place, name))} has {len(data):,} bytes, and had {nbytes:,}")
    yield data


def _take_out(settings: dict[str, Any]) -> bool:
    """Remove the settings of quantised weights, those of a model's parts too; return whether there were any."""
    inner = [one for key, one in settings.items() if isinstance(one, dict) and key not in _QUANTISED]
    gone = [settings.pop(key) for key in _QUANTISED if key in settings]
    return any([bool(gone), *map(_take_out, inner)])


def _put(settings: Any, dtype: str) -> bool:
    """Set the type in settings, and in those of a model's parts; return whether one was named there."""
    if not isinstance(settings, dict):
        return False
    named = [key for key in _TYPES if isinstance(settings.get(key), str)]
    settings.update(dict.fromkeys(named, dtype))
    parts = [key for key in settings if key.endswith("_config") and key != "quantization_config"]
    return any([bool(named), *(_put(settings[key], dtype) for key in parts)])
