"""
Files beside the weights of a Hugging Face model that are needed to use them: settings, tokenizers, templates.

``config_from`` copies them into a folder of shards, byte for byte. Only ``config.json`` changes where weights are cast
or made dense: libraries load weights in the type that it names.

https://github.com/huggingface/transformers; src/transformers/utils/__init__.py, tokenization_utils_base.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import Failure, MigrationRefused, SourceChanged, about
from ckptool.formats.json_beside import QUANTIZED, json_object
from ckptool.messages import as_path, some
from ckptool.migration.changes import Changes
from ckptool.migration.plan import OutFile, Part, file_of_bytes
from ckptool.sources.folder import FolderSource
from ckptool.sources.paths import is_remote

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
        changed = _edited(folder, changes) if _CONFIG in found else None
        if changes.dequantize:
            found = {name: nbytes for name, nbytes in found.items() if name == _CONFIG or name not in QUANTIZED}
    files = [OutFile(name, nbytes, partial(_copied, place, name, nbytes)) for name, nbytes in found.items()]
    if changed is not None:
        files = [file_of_bytes(_CONFIG, changed), *(file for file in files if file.name != _CONFIG)]
    return files


def left_behind(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a note if the source's folder has settings of a model, which stay there."""
    path = checkpoint.path
    if is_remote(path) or not os.path.exists(path):
        return
    place = path if os.path.isdir(path) else os.path.dirname(path) or os.curdir
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


def _edited(folder: FolderSource, changes: Changes) -> bytes | None:
    """Return ``config.json`` edited for the weights that are written; None if nothing in it changes."""
    settings = dict(json_object(folder, _CONFIG))
    if not settings and changes.dequantize:
        fact = f"{_CONFIG!r} cannot be read, and may say that the weights are quantised"
        raise MigrationRefused(fact, kind="no-settings", hint="Mend it, or leave out `config_from=`.")
    is_cast = changes.dtype is not None and _put(settings, str(changes.dtype))
    gone = changes.dequantize and _take_out(settings)
    return json.dumps(settings, indent=2, ensure_ascii=False).encode() if is_cast or gone else None


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
