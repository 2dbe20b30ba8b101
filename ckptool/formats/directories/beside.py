"""
Find what is in a folder beside its checkpoint, and what is missing there, by names and small files of JSON.

Nothing odd there makes the checkpoint unreadable: text that cannot be read is ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from ckptool.checkpoints.parsed import Beside, Parsed, Remark
from ckptool.errors import Failure
from ckptool.formats import filenames
from ckptool.formats.filenames import ADAPTER, ENGINE, TRAINER, Choice
from ckptool.formats.json_beside import json_object
from ckptool.messages import counted, some
from ckptool.pickles import nodes
from ckptool.sources.folder import FolderSource
from ckptool.sources.paths import is_likely

_WORDS: Final = 80
"""Most characters of one fact that is shown."""
_LISTED: Final = 8
_UNFINISHED: Final = (".incomplete", ".aria2", ".part", ".crdownload", ".tmp")
"""Suffixes of downloads until they are finished; aria2 has such a file beside the one that it fills."""
_DOWNLOADS: Final = ".cache/huggingface/download"
"""Where the hub's client keeps files of a local folder while it downloads them."""
_BLOBS: Final = "blobs"
_OF_MODEL: Final = "config.json"
_ARCHITECTURES: Final = "architectures"
"""What transformers writes into the configuration of each model that has weights."""
_ARGUMENTS: Final = "training_args.bin"
_TO_GO_ON: Final = {"optimizer": "optimizer", "scheduler": "scheduler", "rng": "state of random numbers"}


_PARAMETERS: Final = "hyperparams.yaml"
_FILE: Final = re.compile(r"^[^#\n]*/([\w-]+\.ckpt)\b", re.MULTILINE)
"""A file that a component is loaded from: ``!ref <pretrained_path>/classifier.ckpt``."""
_TEXT_NBYTES: Final = 1 << 20


def beside(folder: FolderSource, used: Collection[str], choice: Choice, folders: Collection[str]) -> Iterator[Beside]:
    """Yield what is notable in a folder, without ``used`` files; ``folders`` are those that may be checkpoints."""
    indexes = [name for name in used if name.endswith(".json")]
    twins = {one.name: one for one in choice.twins}
    for name in folder.files:
        if name in used:
            continue
        twin = twins.get(name)
        if twin is not None:
            role = "variant" if twin.is_variant else "duplicate"
            yield _file(folder, name, role, f"of {twin.of}")
        elif any(filenames.belongs_to(index, name) for index in indexes):
            yield _file(folder, name, "leftover")
        elif name.endswith(".json") and (row := filenames.named(name)).role:
            yield _file(folder, name, row.role, _said(json_object(folder, name), row.facts))
        elif is_likely(name):
            is_other = name in choice.strangers
            yield _file(folder, name, filenames.role_of(name) or ("other" if is_other else "checkpoint"))
    for name in folder.folders:
        if name in folders and name not in used:
            yield Beside(name, filenames.role_of(name) or "folder", folder.place_of(name))
    yield from unfinished(folder)


def unfinished(folder: FolderSource) -> Iterator[Beside]:
    """Yield the downloads in a folder that were not finished."""
    places = ["", _DOWNLOADS] if ".cache" in folder.folders else [""]
    for place in (*places, *([_BLOBS] if _BLOBS in folder.folders else ())):
        for name in folder.names(place)[0]:
            stem, suffix = os.path.splitext(name)
            if suffix in _UNFINISHED and (suffix == _UNFINISHED[0] or is_likely(stem)):
                yield _file(folder, f"{place}/{name}".lstrip("/"), "incomplete")


def _file(folder: FolderSource, name: str, role: str, about: str | None = None) -> Beside:
    return Beside(name, role, folder.place_of(name), folder.nbytes_of(name), about)


def _said(found: Mapping[str, object], facts: Mapping[str, str]) -> str | None:
    said = ""
    for key, label in facts.items():
        if found.get(key) not in (None, "", []):
            said += f"{' ' if label == 'of' else ', '}{label} {_fact(found[key])}"
    return said.lstrip(", ").replace(",  ", ", ") or None


def _fact(value: object) -> str:
    if isinstance(value, list):
        return some([_fact(one) for one in value[:_LISTED] if isinstance(one, str | int | float)], _LISTED)
    return f"{value:g}" if isinstance(value, float) else str(value)[:_WORDS] if isinstance(value, str | int) else "…"


def without_weights(folder: FolderSource, choice: Choice, opened: Parsed) -> Iterator[Remark]:
    """Yield a remark on checkpoints of a folder without weights; ``opened`` is what was read of ``choice``."""
    candidates = choice.candidates
    elsewhere = any(one.kind == "folder" for one in candidates)
    found = []
    if ADAPTER in folder.files and elsewhere and not filenames.has_weights(folder.files):
        found.append(f"the adapter of {ADAPTER!r}")
    elif _OF_MODEL in folder.files and elsewhere and _ARCHITECTURES in json_object(folder, _OF_MODEL):
        found.append(f"the model of {_OF_MODEL!r}")
    if TRAINER in folder.files and candidates and all(filenames.role_of(one.name) for one in candidates):
        found.append(f"the one of {TRAINER!r}")
    found += [repr(name) for name in folder.folders if not name.startswith(".") and _is_bare(folder, name)]
    if found:
        what = f"{counted(len(found), 'checkpoint')} of the folder without weights: {some(found)}"
        yield Remark("CK165", what, "Get its files again, or delete it if saving was not finished.")
    row = filenames.named(candidates[0].name if len(candidates) == 1 else "")
    if row.key and nodes.item(opened.root, row.key) is not None:
        what = f"{candidates[0].name!r} is {row.of}, of which there are none here"
        yield Remark("CK165", what, "Get the folder again.")


def missing_parts(folder: FolderSource) -> Iterator[Remark]:
    """Yield a remark on missing files that the parameters of speechbrain name."""
    if _PARAMETERS not in folder.files:
        return
    try:
        text = folder.content(_PARAMETERS, _TEXT_NBYTES).decode("utf-8", "replace")
    except Failure:
        return
    named = dict.fromkeys(_FILE.findall(text))
    missing = [repr(name) for name in named if name not in folder.files]
    if missing and len(missing) < len(named):  # else they are elsewhere
        what = f"{counted(len(missing), 'file')} that {_PARAMETERS!r} names not there: {some(missing)}"
        yield Remark("CK164", what, "Download what is missing, if all components are needed.")


def missing_files(folder: FolderSource) -> Iterator[Remark]:
    """Yield remarks on missing files that a Trainer needs to go on, or peft to load an adapter."""
    if ADAPTER not in folder.files and any(name.startswith("adapter_model.") for name in folder.files):
        what = f"an adapter of peft without {ADAPTER!r}, which says what it is for, and how strong it is"
        yield Remark("CK166", what, "Copy the folder again, with all of its files.")
    named = [*folder.files, *folder.folders]
    roles = {filenames.role_of(name) for name in named}
    if any(ENGINE.fullmatch(name) for name in named):
        roles |= {"optimizer", "scheduler"}
    if "rng" not in roles and not roles >= {"optimizer", "scheduler"}:
        return  # only the weights were saved
    is_trainers = TRAINER in folder.files or _ARGUMENTS in folder.files
    missing = [what for role, what in _TO_GO_ON.items() if role not in roles] if is_trainers else []
    missing += [repr(name) for name in (TRAINER, _ARGUMENTS) if is_trainers and name not in folder.files]
    if missing:
        what = f"a Trainer saved here, and there is no {some(missing)}: training cannot go on as it was"
        yield Remark("CK166", what, "Copy the folder again, with all of its files, if it is to.")


def _is_bare(folder: FolderSource, name: str) -> bool:
    files, folders = folder.names(name)
    if ADAPTER in files and not filenames.has_weights(files):
        return not filenames.choose(files).candidates
    return TRAINER in files and not folders and not filenames.choose(files).candidates
