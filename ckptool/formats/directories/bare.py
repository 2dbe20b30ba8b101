"""Folders without weights, but with what is usually beside them: remarks that say what was opened instead."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from ckptool.checkpoints.companions import Remark
from ckptool.checkpoints.completeness import GATHER
from ckptool.checkpoints.parsed import Parsed
from ckptool.errors import Failure
from ckptool.formats.directories import choosing
from ckptool.formats.directories.beside import json_object
from ckptool.formats.directories.choosing import Choice
from ckptool.messages import counted, quoted, some
from ckptool.pickles import nodes
from ckptool.sources.folder import FolderSource

OF_ADAPTER: Final = "adapter_config.json"
_OF_MODEL: Final = "config.json"
_ARCHITECTURES: Final = "architectures"
"""What transformers writes into the configuration of each model that has weights."""
_OF_TRAINER: Final = "trainer_state.json"
"""What a Trainer writes into each folder that it saves into, after the weights."""
_ARGUMENTS: Final = "training_args.bin"
ENGINE: Final = re.compile(r"global_step\d+")
"""A folder of states of DeepSpeed's engine."""
_TO_GO_ON: Final = {"optimizer": "optimizer", "scheduler": "scheduler", "rng": "state of random numbers"}


_PLAIN: Final = re.compile(r"[\w.]{1,80}")
"""The name of a module, and no pattern."""
_PARAMETERS: Final = "hyperparams.yaml"
_FILE: Final = re.compile(r"^[^#\n]*/([\w-]+\.ckpt)\b", re.MULTILINE)
"""A file that a component is loaded from: ``!ref <pretrained_path>/classifier.ckpt``."""
_TEXT_NBYTES: Final = 1 << 20
VALUES: Final = {
    "common.pt": ("checkpoint_version", "what Megatron-core keeps beside the pieces of tensors"),
    "meta.pt": ("pytorch-lightning_version", "what Lightning keeps beside the pieces of tensors"),
}
"""Files of values that are saved with others: a key that is in each, and what it is."""


def without_weights(folder: FolderSource, choice: Choice, opened: Parsed) -> Iterator[Remark]:
    """Yield which of a folder's checkpoints have no weights, where ``choice`` was opened of it."""
    candidates = choice.candidates
    elsewhere = any(one.kind == "folder" for one in candidates)
    found = []
    if OF_ADAPTER in folder.files and elsewhere and not choosing.has_weights(folder.files):
        found.append(f"the adapter of {OF_ADAPTER!r}")
    elif _OF_MODEL in folder.files and elsewhere and _ARCHITECTURES in json_object(folder, _OF_MODEL):
        found.append(f"the model of {_OF_MODEL!r}")
    if _OF_TRAINER in folder.files and candidates and all(choosing.role_of(one.name) for one in candidates):
        found.append(f"the one of {_OF_TRAINER!r}")
    found += [repr(name) for name in folder.folders if not name.startswith(".") and _is_bare(folder, name)]
    if found:
        what = f"{counted(len(found), 'checkpoint')} of the folder without weights: {some(found)}"
        yield Remark("CK165", what, "Get its files again, or delete it if saving was not finished.")
    for name in [one.name for one in candidates if len(candidates) == 1 and one.name in VALUES]:
        key, what = VALUES[name]
        if nodes.lookup(nodes.mapping_pairs(opened.root) or [], key) is not None:
            yield Remark("CK165", f"{name!r} is {what}, of which there are none here", "Get the folder again.")


def hollow_adapter(settings: Mapping[str, object], parsed: Parsed) -> Iterator[Remark]:
    """Yield what an adapter lacks that the settings beside it announce."""
    kind, targets, names = settings.get("peft_type"), settings.get("target_modules"), parsed.contents.tensors
    listed = targets if isinstance(targets, list) else []
    plain = [one for one in listed if isinstance(one, str) and _PLAIN.fullmatch(one)]
    lacking = [one for one in plain if len(plain) == len(listed) and not any(one in name for name in names)]
    if not isinstance(kind, str) or (names and not lacking):
        return
    said = f"{OF_ADAPTER!r} announces one: {quoted(kind)}{f' on {some(plain)}' if plain else ''}"
    if not names or len(lacking) == len(plain):
        what = "an adapter without tensors" if not names else "an adapter without a tensor of these modules"
        yield Remark("CK122", f"{what}, and {said}", GATHER)
    else:
        yield Remark("CK123", f"no tensor of the adapter is of {some(lacking)}, and {said}", "The model may have none.")


def missing_parts(folder: FolderSource) -> Iterator[Remark]:
    """Yield which files the parameters of speechbrain name, that are not there."""
    if _PARAMETERS not in folder.files:
        return
    try:
        text = folder.content(_PARAMETERS, _TEXT_NBYTES).decode("utf-8", "replace")
    except Failure:
        return
    named = dict.fromkeys(_FILE.findall(text))
    missing = [repr(name) for name in named if name not in folder.files]
    if missing and len(missing) < len(named):  # else they lie elsewhere
        what = f"{counted(len(missing), 'file')} that {_PARAMETERS!r} names not there: {some(missing)}"
        yield Remark("CK164", what, "Download what is missing, if all components are needed.")


def missing_of_trainer(folder: FolderSource) -> Iterator[Remark]:
    """Yield which of the files are not there that a Trainer needs to go on, where others of them are."""
    named = [*folder.files, *folder.folders]
    roles = {choosing.role_of(name) for name in named}
    if any(ENGINE.fullmatch(name) for name in named):
        roles |= {"optimizer", "scheduler"}
    if "rng" not in roles and not roles >= {"optimizer", "scheduler"}:
        return  # weights alone were asked for
    is_trainers = _OF_TRAINER in folder.files or _ARGUMENTS in folder.files
    missing = [what for role, what in _TO_GO_ON.items() if role not in roles] if is_trainers else []
    missing += [repr(name) for name in (_OF_TRAINER, _ARGUMENTS) if is_trainers and name not in folder.files]
    if missing:
        what = f"a Trainer saved here, and there is no {some(missing)}: training cannot go on as it was"
        yield Remark("CK166", what, "Copy the folder again, with all of its files, if it is to.")


def _is_bare(folder: FolderSource, name: str) -> bool:
    files, folders = folder.names(name)
    if OF_ADAPTER in files and not choosing.has_weights(files):
        return not choosing.choose(files).candidates
    return _OF_TRAINER in files and not folders and not choosing.choose(files).candidates
