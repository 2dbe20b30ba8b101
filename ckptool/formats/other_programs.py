"""
Programs for other loaders, beside checkpoints and in archives: Keras, TensorFlow, TorchServe, MLflow, settings.

They are recognised by their first bytes, words in their text, or their names. Nothing of them is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Final, TypeAlias

from ckptool.errors import Failure
from ckptool.messages import cut
from ckptool.pickles.alarms import SETTINGS, SOURCE
from ckptool.sources.source import Source

Known: TypeAlias = tuple[str, str, str | None]
"""A file, what its loader runs, and why; or what the file is, and None, if it is not inspected."""

_BLOCK: Final = 1 << 20
_MOST_SEARCHED: Final = 1 << 30
_MOST_READ: Final = 4 << 20
_LONGEST: Final = 200
_HDF5: Final = b"\x89HDF\r\n\x1a\n"
_HDF5_AT: Final = (0, 512, 1024, 2048, 4096, 8192)
"""Offsets of the signature: a user block of such a size may precede it."""
_OF_HDF5: Final = (".h5", ".hdf5", ".hdf", ".keras")
_OF_KERAS: Final = b"model_config"
"""The attribute of a whole model, which files of weights alone lack."""
_KERAS: Final = "a Keras model, whose loader may run code in it"
_TAGS: Final = "settings with tags that a loader may call"
_TAG: Final = re.compile(
    rb"yaml\.org,2002:python|^%TAG|!(?:<!)?(?:apply(?:ref)?|new|name|module):"
    rb"|!!?python/(?!(?:none|bool|str|unicode|bytes|int|long|float|complex|list|tuple|dict)(?![\w/:.]))",
    re.MULTILINE,
)
_TARGET: Final = re.compile(rb"(?<!\w)_target_[\"']?\s*:")
_NUMBERED: Final = re.compile(rb"\\(?:x|u00)([0-7][0-9A-Fa-f])")
"""A character of a string in YAML or JSON by its number."""
NEMO: Final = "model_config.yaml"
"""The settings from which NeMo makes a model; for what they call, see ``programs.of_settings``."""
_SQLITE: Final = b"SQLite format 3\0"
_COMMENT: Final = re.compile(rb"^[ \t]*#[^\r\n]*", re.MULTILINE)
_PERCENT: Final = re.compile(rb"%([0-9A-Fa-f]{2})")
_LOADER: Final = re.compile(rb"loader_module[\"']?\s*:\s*[\"']?(?!mlflow\.)\w|model_code_path[\"']?\s*:\s*(?!null)\S")
_CONFIG: Final = re.compile(r"(?:\w+_)?config(?:_\w+)?\.json|modules\.json|model_index\.json")
_MENTION: Final = re.compile(r'"([\w./-]+--)?((?:\w+\.)+)([A-Za-z_]\w*)"')
_COMPONENT: Final = re.compile(r'\[\s*"(\w+)"\s*,\s*"\w+"\s*\]')
_ESCAPE: Final = re.compile(r"\\u00([0-7][0-9A-Fa-f])")
_PY: Final = ".py"


def in_content(name: str, source: Source) -> str | None:
    """
    Return what a file is if a loader may run code in it, and it is not inspected; None for all others.

    ``name`` may be a path, also in an archive.
    """
    last = re.split(r"/|::", name)[-1].lower()
    if last in ("saved_model.pb", "saved_model.pbtxt"):
        return "a TensorFlow SavedModel, whose graph is a program"
    if source.read(0, min(len(_SQLITE), source.nbytes)) == _SQLITE:
        return "a database of SQLite, whose values may be pickles"
    if last.endswith((".yaml", ".yml", ".json")) and not last.endswith(NEMO) and _names_targets(source):
        return "settings that name what a loader calls (_target_)"
    if last == "mlmodel" or last.endswith((".yaml", ".yml")):
        text = source.read(0, min(source.nbytes, _MOST_READ)).replace(b"\0", b"")  # of UTF-16
        text = _PERCENT.sub(lambda one: bytes([int(one[1], 16)]), _COMMENT.sub(b"", text))
        if last == "mlmodel":
            return "an MLflow model with a loader of its own" if _LOADER.search(text) else None
        if _TAG.search(text):
            return _TAGS
        return f"settings after {_MOST_READ:,} bytes" if source.nbytes > _MOST_READ else None
    places = _HDF5_AT if last.endswith(_OF_HDF5) else (0,)
    if not any(source.read(at, len(_HDF5)) == _HDF5 for at in places if at + len(_HDF5) <= source.nbytes):
        return None
    for at in range(0, min(source.nbytes, _MOST_SEARCHED), _BLOCK):
        if _OF_KERAS in source.read(at, min(_BLOCK + len(_OF_KERAS), source.nbytes - at)):
            return _KERAS
    return f"HDF5 after {_MOST_SEARCHED:,} bytes, which may be {_KERAS}" if source.nbytes > _MOST_SEARCHED else None


def _names_targets(source: Source) -> bool:
    """Return whether settings have a key ``_target_``, by which Hydra calls functions, as far as they are searched."""
    for at in range(0, min(source.nbytes, _MOST_SEARCHED), _BLOCK):
        text = source.read(at, min(_BLOCK + _LONGEST, source.nbytes - at)).replace(b"\0", b"")  # of UTF-16
        text = _NUMBERED.sub(lambda one: bytes([int(one[1], 16)]), text) if b"\\" in text else text
        if b"_target_" in text and _TARGET.search(_COMMENT.sub(b"", text)):
            return True
    return False


def among(names: Collection[str], head: Callable[[str, int], bytes]) -> Iterator[Known]:
    """
    Yield the files for which a loader runs code because of their names, or of names in settings.

    ``head`` returns the first bytes of a file, as many as requested, or raises a ``Failure``.
    """
    scripts = {name.removesuffix(_PY).removesuffix("/__init__") for name in names if name.endswith(_PY)}
    for name in names:
        folder, _, last = name.rpartition("/")
        beside = f"{folder}/" if folder else ""
        if name.endswith("MAR-INF/MANIFEST.json"):
            yield name, "an archive of TorchServe, whose handler is a program", None
        elif last == "model.weights.h5" and f"{beside}config.json" in names:
            yield name, _KERAS, None
        elif name in ("handler.py", "custom_generate/generate.py"):
            yield name, name.removesuffix(_PY).replace("/", "."), SOURCE
        elif _CONFIG.fullmatch(last):
            try:
                data = head(name, _MOST_READ + 1)
            except Failure:
                continue  # an error of reading is reported elsewhere
            if len(data) > _MOST_READ:
                yield name, f"settings of more than {_MOST_READ:,} bytes", None
            text = _ESCAPE.sub(lambda one: chr(int(one[1], 16)), str(data, "utf-8", "replace"))
            named = _named(text, beside, scripts, is_pipeline=last == "model_index.json")
            yield from ((name, cut(what, _LONGEST), why) for what, why in named)


def _named(text: str, beside: str, scripts: Collection[str], *, is_pipeline: bool) -> Iterator[tuple[str, str]]:
    """Yield the modules that settings name and that are beside them, or in another repository."""
    if '"auto_map"' in text:
        elsewhere = (one[0].strip('"') for one in _MENTION.finditer(text) if one[1])
        yield from ((one, SETTINGS) for one in dict.fromkeys(elsewhere))
    modules = dict.fromkeys(one[2].rstrip(".") for one in _MENTION.finditer(text) if scripts and not one[1])
    yield from ((one, SOURCE) for one in modules if f"{beside}{one.replace('.', '/')}" in scripts)
    if is_pipeline:
        parts = {one.rpartition("/")[2] for one in scripts if one.startswith(beside)}
        yield from ((one, SOURCE) for one in dict.fromkeys(_COMPONENT.findall(text)) if one in parts)
