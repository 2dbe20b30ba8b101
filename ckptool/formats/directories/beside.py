"""
What lies in a folder beside its checkpoint, what is missing there, and where its pointers lead.

Names and small files decide. Nothing odd there makes the checkpoint unreadable: text that cannot be read is ignored.

A pointer is a file of one line that names the folder of the last save: ``latest`` of DeepSpeed, and what other
frameworks call it. Any file may have such a name. So a pointer counts only if it leads to a checkpoint, or names a
folder like those that exist: then that one is missing, or was not finished.

In the cache of Hugging Face's hub, a file names the snapshot that the main branch of a repository is at:

    models--org--name/refs/main                    text: the commit
    models--org--name/snapshots/<commit>/…         links to ../../blobs/<digest>

https://huggingface.co/docs/huggingface_hub/guides/manage-cache

``model_index.json`` has the class of each component of a pipeline of diffusers; some may be missing.

    {"_class_name": "…", "unet": ["diffusers", "UNet2DConditionModel"], "safety_checker": [null, null]}
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import ckptool.system as system
from ckptool.checkpoints.parsed import Beside, Parsed, Remark
from ckptool.errors import Failure, FileUnavailable, MalformedFile
from ckptool.formats import filenames
from ckptool.formats.filenames import ADAPTER, ENGINE, PIPELINE, TRAINER, Choice
from ckptool.formats.json_beside import json_object
from ckptool.messages import counted, some
from ckptool.pickles import nodes
from ckptool.sources.folder import FolderSource
from ckptool.sources.paths import MEGATRON, POINTERS, is_likely

_LONGEST: Final = 255
_NUMBER: Final = re.compile(r"[0-9]+")
_COMMIT: Final = re.compile(rb"[0-9a-f]{40}")
_MAIN: Final = "refs/main"
_MAIN_NBYTES: Final = 4096
_SNAPSHOTS: Final = "snapshots"
_BLOBS: Final = "blobs"
_WORDS: Final = 80
"""Most characters of one fact that is shown."""
_LISTED: Final = 8
_SHOWN: Final = 4
_UNFINISHED: Final = (".incomplete", ".aria2", ".part", ".crdownload", ".tmp")
"""Suffixes of downloads until they are finished; aria2 has such a file beside the one that it fills."""
_DOWNLOADS: Final = ".cache/huggingface/download"
"""Where the hub's client keeps files of a local folder while it downloads them."""
_CONFIG: Final = "config.json"
_ARCHITECTURES: Final = "architectures"
"""What transformers writes into the configuration of each model that has weights."""
_ANNOUNCED: Final = {ADAPTER: "adapter_model.safetensors", _CONFIG: "model.safetensors", PIPELINE: "its folders"}
"""Small files beside weights, with the usual names of these weights."""
_WITHOUT_WEIGHTS: Final = re.compile(r".*(?:Tokenizer|TokenizerFast|Scheduler|Processor|Extractor)")
"""Classes of components that have no weights; those that have some have a ``config.json``."""
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
    for name in [one for one in folder.files if one not in used]:
        if (twin := twins.get(name)) is not None:
            yield _file(folder, name, "variant" if twin.is_variant else "duplicate", f"of {twin.of}")
        elif any(filenames.belongs_to(index, name) for index in indexes):
            yield _file(folder, name, "leftover")
        elif name.endswith(".json") and (row := filenames.named(name)).role:
            yield _file(folder, name, row.role, _said(json_object(folder, name), row.facts))
        elif is_likely(name):
            other = "other" if name in choice.strangers else "checkpoint"
            yield _file(folder, name, filenames.role_of(name) or other)
    for name in folder.folders:
        if name in folders and name not in used:
            yield Beside(name, filenames.role_of(name) or "folder", folder.place_of(name))
    yield from unfinished(folder)


def unfinished(folder: FolderSource) -> Iterator[Beside]:
    """Yield the downloads in a folder that were not finished."""
    for place in ["", *(one for one in (_DOWNLOADS, _BLOBS) if one.partition("/")[0] in folder.folders)]:
        for name in folder.names(place)[0]:
            stem, suffix = os.path.splitext(name)
            if suffix in _UNFINISHED and (suffix == _UNFINISHED[0] or is_likely(stem)):
                yield _file(folder, f"{place}/{name}".lstrip("/"), "incomplete")


def _file(folder: FolderSource, name: str, role: str, about: str | None = None) -> Beside:
    return Beside(name, role, folder.place_of(name), folder.nbytes_of(name), about)


def _said(found: Mapping[str, object], facts: Mapping[str, str]) -> str | None:
    said = [(label, _fact(found[key])) for key, label in facts.items() if found.get(key) not in (None, "", [])]
    text = "".join(f"{' ' if label == 'of' else ', '}{label} {fact}" for label, fact in said)
    return text.lstrip(", ").replace(",  ", ", ") or None  # an empty label leaves two spaces


def _fact(value: object) -> str:
    if isinstance(value, list):
        return some([_fact(one) for one in value[:_LISTED] if isinstance(one, str | int | float)], _LISTED)
    return f"{value:g}" if isinstance(value, float) else str(value)[:_WORDS] if isinstance(value, str | int) else "…"


def missing_components(folder: FolderSource, checkpoints: Collection[str]) -> dict[str, str]:
    """Return the components of a pipeline without weights, and why; ``checkpoints`` are the folders with weights."""
    if PIPELINE not in folder.files:
        return {}
    classes = {
        name: said[1]
        for name, said in json_object(folder, PIPELINE).items()
        if isinstance(said, list) and len(said) == 2 and isinstance(said[1], str)
    }
    named = [name for name, cls in classes.items() if not _WITHOUT_WEIGHTS.fullmatch(cls)]
    others = [name for name in folder.folders if name not in checkpoints]
    links = [name for name in others if folder.is_link(name)]
    found = {name: "is a link, which is not followed" for name in named if name in links}
    bare = [name for name in others if name not in links and _CONFIG in folder.names(name)[0]]
    found |= dict.fromkeys(bare, "has no weights in its folder")
    if all(name in named for name in checkpoints):  # else it is the index of another one
        found |= {name: "is not there" for name in named if name not in folder.folders}
    return found


def missing(folder: FolderSource, choice: Choice, opened: Parsed, components: Mapping[str, str]) -> Iterator[Remark]:
    """
    Yield remarks on what is missing in a folder.

    ``opened`` is what was read of ``choice``; ``components`` are those of a pipeline without weights, and why.
    """
    if components:
        why = some([f"{name!r} {why}" for name, why in components.items()])
        what = f"{counted(len(components), 'component')} of the pipeline without weights: {why}"
        yield Remark("CK164", what, "Download what is missing, if the whole pipeline is needed.")
    if PIPELINE in folder.files and not json_object(folder, PIPELINE):
        what = f"{PIPELINE!r} is empty or broken, and nothing else says which components there are"
        yield Remark("CK164", what, "Get it again.")
    yield from _without_weights(folder, choice, opened)
    if _PARAMETERS in folder.files:
        yield from _without_parts(folder)
    if ADAPTER not in folder.files and any(name.startswith("adapter_model.") for name in folder.files):
        what = f"an adapter of peft without {ADAPTER!r}, which says what it is for, and how strong it is"
        yield Remark("CK166", what, "Copy the folder again, with all of its files.")
    yield from _without_training(folder)


def _without_weights(folder: FolderSource, choice: Choice, opened: Parsed) -> Iterator[Remark]:
    candidates = choice.candidates
    elsewhere = any(one.kind == "folder" for one in candidates)
    found = []
    if ADAPTER in folder.files and elsewhere and not filenames.has_weights(folder.files):
        found.append(f"the adapter of {ADAPTER!r}")
    elif _CONFIG in folder.files and elsewhere and _ARCHITECTURES in json_object(folder, _CONFIG):
        found.append(f"the model of {_CONFIG!r}")
    if TRAINER in folder.files and candidates and all(filenames.role_of(one.name) for one in candidates):
        found.append(f"the one of {TRAINER!r}")
    for name in folder.folders:
        files, folders = folder.names(name) if not name.startswith(".") else ((), ())
        is_announced = (TRAINER in files and not folders) or (ADAPTER in files and not filenames.has_weights(files))
        if is_announced and not filenames.choose(files).candidates:
            found.append(repr(name))
    if found:
        what = f"{counted(len(found), 'checkpoint')} of the folder without weights: {some(found)}"
        yield Remark("CK165", what, "Get its files again, or delete it if saving was not finished.")
    row = filenames.named(candidates[0].name if len(candidates) == 1 else "")
    if row.key and nodes.item(opened.root, row.key) is not None:
        what = f"{candidates[0].name!r} is {row.of}, of which there are none here"
        yield Remark("CK165", what, "Get the folder again.")


def _without_parts(folder: FolderSource) -> Iterator[Remark]:
    """Yield a remark on missing files that the parameters of speechbrain name."""
    try:
        text = folder.content(_PARAMETERS, _TEXT_NBYTES).decode("utf-8", "replace")
    except Failure:
        return
    named = dict.fromkeys(_FILE.findall(text))
    gone = [repr(name) for name in named if name not in folder.files]
    if gone and len(gone) < len(named):  # else they are elsewhere
        what = f"{counted(len(gone), 'file')} that {_PARAMETERS!r} names not there: {some(gone)}"
        yield Remark("CK164", what, "Download what is missing, if all components are needed.")


def _without_training(folder: FolderSource) -> Iterator[Remark]:
    """Yield a remark on missing files that a Trainer needs to go on."""
    named = [*folder.files, *folder.folders]
    roles = {filenames.role_of(name) for name in named}
    if any(ENGINE.fullmatch(name) for name in named):
        roles |= {"optimizer", "scheduler"}
    if "rng" not in roles and not roles >= {"optimizer", "scheduler"}:
        return  # only the weights were saved
    if TRAINER in folder.files or _ARGUMENTS in folder.files:
        gone = [what for role, what in _TO_GO_ON.items() if role not in roles]
        gone += [repr(name) for name in (TRAINER, _ARGUMENTS) if name not in folder.files]
        if gone:
            what = f"a Trainer saved here, and there is no {some(gone)}: training cannot go on as it was"
            yield Remark("CK166", what, "Copy the folder again, with all of its files, if it is to.")


def named_by(folder: FolderSource, pointer: str) -> str | None:
    """Return the name of a folder that a file contains; None if there is no such file, or no such name in it."""
    if pointer not in folder.files:
        return None
    try:
        text = folder.content(pointer, _LONGEST).decode().strip()
    except (Failure, UnicodeDecodeError):
        return None
    if pointer == MEGATRON and text.isascii() and text.isdigit():
        return f"iter_{int(text):07}"
    return text if text not in ("", ".", "..") and not any(one in text for one in "/\\\0\n") else None


def followed(folder: FolderSource, candidates: Collection[str]) -> str | None:
    """
    Return the one of several folders that a pointer names; None if none does.

    Raises:
        FileUnavailable: It names one like these, which does not exist, or contains no checkpoint.
    """
    for pointer, name in _pointers(folder):
        if name in candidates:
            return name
        alike = [one for one in candidates if _NUMBER.sub("0", one) == _NUMBER.sub("0", name)]
        if alike:
            raise _leads_nowhere(folder, pointer, name, alike)
    return None


def place(folder: FolderSource, pointer: str, saves: Sequence[str]) -> str:
    """
    Return the folder that a pointer names; ``saves`` are the folders that its writer saved into.

    Raises:
        FileUnavailable: There is no such folder.
        MalformedFile: It contains no name of a folder.
    """
    name = named_by(folder, pointer)
    if name is None:
        fact = f"{pointer!r} has no name of a folder beside it"
        raise MalformedFile(fact, kind="malformed-pointer", hint=f"Name one that is there: {some(saves)}")
    if name not in folder.folders:
        raise _leads_nowhere(folder, pointer, name, saves)
    return name


def _pointers(folder: FolderSource) -> Iterator[tuple[str, str]]:
    for pointer in POINTERS:
        name = named_by(folder, pointer)
        if name is not None:
            yield pointer, name


def _leads_nowhere(folder: FolderSource, pointer: str, name: str, others: Collection[str]) -> FileUnavailable:
    """Return the error for a pointer that names a folder without a checkpoint."""
    gone = "there is no such folder" if name not in folder.folders else "there is no checkpoint in it"
    return FileUnavailable(
        f"{pointer!r} names {name!r}, and {gone}",
        kind="missing",
        hint=f"Name one that is there: {some(list(others))}" if others else "Saving was not finished, or it was moved.",
    )


def snapshot(folder: FolderSource) -> str | None:
    """Return the path of the snapshot of a repository's main branch, below the repository; None if it is not one."""
    if _SNAPSHOTS not in folder.folders or not folder.has(_MAIN):
        return None
    try:
        commit = folder.content(_MAIN, _MAIN_NBYTES).strip()
    except Failure:
        return None
    name = commit.decode("ascii", "replace")
    known = _COMMIT.fullmatch(commit) and name in folder.names(_SNAPSHOTS)[1]
    return f"{_SNAPSHOTS}/{name}" if known else None


def no_checkpoint(folder: FolderSource) -> FileUnavailable:
    """Return the error for a folder without a checkpoint, with what is there instead."""
    for pointer, name in _pointers(folder):
        return _leads_nowhere(folder, pointer, name, ())
    links = [name for name in folder.folders if folder.is_link(name)]
    if links and not folder.files:
        fact = f"a directory of links, which are not followed: {some([*map(system.quoted, links)], _SHOWN)}"
        return FileUnavailable(fact, kind="directory", hint="Give the path of the folder that one leads to.")
    names = sorted(folder.files, key=lambda name: not is_likely(name))
    if names:
        shown = some([*map(system.quoted, names)], _SHOWN)
        fact = f"a directory with {'one file' if len(names) == 1 else counted(len(names), 'file')}, none a checkpoint"
        weights = next((name for said, name in _ANNOUNCED.items() if said in folder.files), None)
        hint = f"Copy the weights, too ({weights})." if weights is not None else f"Name a file in it: {shown}"
        return FileUnavailable(fact, kind="directory", hint=hint)
    folders = some([*map(system.quoted, folder.folders)], _SHOWN)
    return FileUnavailable(
        "a directory without files",
        kind="directory",
        hint=f"Name a file in one of its folders: {folders}" if folders else "Copy the folder again, with its files.",
    )
