"""
Files of other loaders beside checkpoints and in archives: Keras, TensorFlow, TorchServe, MLflow.

They are recognised by their first bytes, words in their text, or their names. Nothing of them is parsed.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from posixpath import normpath
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
_LINE_END: Final = re.compile(r"\r\n?|[\x85\u2028\u2029]")
_COMMENT: Final = re.compile(r"^[ \t]*#[^\n\"']*$", re.MULTILINE)
"""A line with a quotation mark may be in a text that has several lines, and ends there."""
_CHARACTER: Final = re.compile(r"\\(?:x|u00|U0{6})([0-9A-Fa-f]{2})|\\\n[ \t]*")
"""In a quoted text: a character by its number, or a line that continues."""
_PERCENT: Final = re.compile(r"%([0-9A-Fa-f]{2})")
_TAG: Final = re.compile(
    r"yaml\.org,2002:python|^%TAG|!(?:<!)?(?:apply(?:ref)?|new|name|module):"
    r"|!!?python/(?!(?:none|bool|str|unicode|bytes|int|long|float|complex|list|tuple|dict)(?![\w/:.]))",
    re.MULTILINE,
)


def _key(name: str) -> str:
    """Return the pattern of a key of YAML; a text with an anchor or a tag may become one elsewhere."""
    return rf"(?:(?<!\w){name}[\"']?\s*[:#]|(?<!\w)[&!][^\s&!]*\s+[\"']?{name}(?!\w))"


_TARGET: Final = re.compile(_key("_target_"))
_TARGET_ANYWHERE: Final = re.compile(r"(?<!\w)_target_(?!\w)")
_OF_MLFLOW: Final = re.compile(
    r"loader_module(?![\"']?[ \t]*:[ \t]+[\"']?mlflow\.[\w.]+[\"']?[ \t]*(?:[,}\n]|$))"
    rf"|(?:model_code_path|{_key('code')})(?![\"']?[ \t]*:?[ \t]*(?:null|~)?[ \t]*(?:[,}}\n]|$))"
)
"""What is more than a loader of MLflow's own without code in the folder."""
NEMO: Final = "model_config.yaml"
"""The settings from which NeMo makes a model; for what they call, see ``programs.of_settings``."""
_SQLITE: Final = b"SQLite format 3\0"
_CONFIG: Final = re.compile(r"(?:\w+_)?config(?:_\w+)?\.json|modules\.json|model_index\.json")
_STRING: Final = r'"[^"\\]*(?:\\.?[^"\\]*)*(?:"|\Z)'
"""A string of JSON; the last one may have no end, so that none is searched twice."""
_IS_STRING: Final = re.compile(rf"({_STRING})", re.DOTALL)
_COMPONENT: Final = re.compile(rf"\[\s*({_STRING})\s*,\s*{_STRING}\s*\]", re.DOTALL)
_IS_ELSEWHERE: Final = re.compile(r"[\w./-]{1,200}?--[^-]").match
_PY: Final = ".py"
_SCRIPTS: Final = ("handler.py", "custom_generate/generate.py")
_MANIFEST: Final = "MAR-INF/MANIFEST.json"
_WEIGHTS: Final = "model.weights.h5"


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
    is_yaml = last.endswith((".yaml", ".yml")) and not last.endswith(NEMO)
    if (is_yaml or last.endswith(".json")) and _names_targets(source):
        return "settings that name what a loader calls (_target_)"
    if is_yaml or last == "mlmodel":
        text = uncommented(_decoded(source.read(0, min(source.nbytes, _MOST_READ))))
        if last == "mlmodel":
            return "an MLflow model with code or a loader of its own" if _OF_MLFLOW.search(text) else None
        if _TAG.search(_PERCENT.sub(lambda one: chr(int(one[1], 16)), text)):
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
    mention = _TARGET if source.nbytes <= _BLOCK else _TARGET_ANYWHERE  # a block may end within a key
    for at in range(0, min(source.nbytes, _MOST_SEARCHED), _BLOCK):
        if mention.search(uncommented(_decoded(source.read(at, min(_BLOCK + _LONGEST, source.nbytes - at))))):
            return True
    return False


def _decoded(data: bytes) -> str:
    is_wide = data.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
    return str(data, "utf-16" if is_wide else "utf-8", "replace").removeprefix("\ufeff").replace("\0", "")


def uncommented(text: str) -> str:
    """Return YAML or JSON without lines of comments, and with characters in the place of their numbers."""
    text = _COMMENT.sub("", _LINE_END.sub("\n", text))
    return _CHARACTER.sub(lambda one: chr(int(one[1] or "0", 16)).strip("\0"), text) if "\\" in text else text


def is_telling(name: str) -> bool:
    """Return whether a loader may run code because of a file of this name in a folder: see ``among``."""
    return name in (*_SCRIPTS, _MANIFEST, _WEIGHTS) or _CONFIG.fullmatch(name) is not None


def among(names: Collection[str], head: Callable[[str, int], bytes]) -> Iterator[Known]:
    """
    Yield the files for which a loader runs code because of their names, or of names in settings.

    ``head`` returns the first bytes of a file, as many as requested, or raises a ``Failure``.
    """
    scripts = {name.removesuffix(_PY).removesuffix("/__init__") for name in names if name.endswith(_PY)}
    for name in names:
        folder, _, last = name.rpartition("/")
        beside = f"{folder}/" if folder else ""
        if name.endswith(_MANIFEST):
            yield name, "an archive of TorchServe, whose handler is a program", None
        elif last == _WEIGHTS and f"{beside}config.json" in names:
            yield name, _KERAS, None
        elif name in _SCRIPTS:
            yield name, name.removesuffix(_PY).replace("/", "."), SOURCE
        elif _CONFIG.fullmatch(last):
            try:
                data = head(name, _MOST_READ + 1)
            except Failure:
                continue  # an error of reading is reported elsewhere
            if len(data) > _MOST_READ:
                yield name, f"settings of more than {_MOST_READ:,} bytes", None
            named = _named(_decoded(data), beside, scripts, is_pipeline=last == "model_index.json")
            yield from ((name, cut(what, _LONGEST), why) for what, why in named)


def _named(text: str, beside: str, scripts: Collection[str], *, is_pipeline: bool) -> Iterator[tuple[str, str]]:
    """Yield the modules that settings name and that are beside them, or in another repository."""
    texts = dict.fromkeys(_strings(_IS_STRING, text))
    classes = [one for one in texts if "." in one and one.rpartition(".")[2].isidentifier()]
    if "auto_map" in texts:
        yield from ((one, SETTINGS) for one in classes if _IS_ELSEWHERE(one))
    modules = dict.fromkeys(one.rpartition(".")[0] for one in classes)
    yield from ((one, SOURCE) for one in modules if normpath(f"{beside}{one.replace('.', '/')}") in scripts)
    if is_pipeline:
        parts = {one.rpartition("/")[2] for one in scripts if one.startswith(beside)}
        yield from ((one, SOURCE) for one in _strings(_COMPONENT, text) if one in parts)


def _strings(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    """Yield the strings of JSON in the group of each match, equal ones once."""
    import json  # few checkpoints have settings

    decode = json.JSONDecoder(strict=False).decode
    for found in dict.fromkeys(pattern.findall(text)):
        with suppress(ValueError):
            yield str(decode(found))
