"""
What a pipeline of diffusers names, and what of it is there: ``model_index.json`` has the class of each component.

    {"_class_name": "…", "unet": ["diffusers", "UNet2DConditionModel"], "safety_checker": [null, null]}
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from ckptool.checkpoints.companions import Remark
from ckptool.formats.directories.beside import json_object
from ckptool.messages import counted, some
from ckptool.sources.folder import FolderSource

INDEX: Final = "model_index.json"
_CONFIG: Final = "config.json"
"""Models have one; what has no weights calls it otherwise."""
_WITHOUT_WEIGHTS: Final = re.compile(r".*(?:Tokenizer|TokenizerFast|Scheduler|Processor|Extractor)")


def missing_components(folder: FolderSource, checkpoints: Collection[str]) -> dict[str, str]:
    """Return the components of a pipeline without weights, and why; ``checkpoints`` are the folders that have some."""
    if INDEX not in folder.files:
        return {}
    named = [name for name, said in json_object(folder, INDEX).items() if _has_weights(said)]
    links = [name for name in named if name in folder.folders and folder.is_link(name)]
    found = dict.fromkeys(links, "is a link, which is not followed")
    found |= {name: "has no weights in its folder" for name in folder.folders if _is_bare(folder, name, checkpoints)}
    if all(name in named for name in checkpoints):  # else it is the index of another one
        found |= {name: "is not there" for name in named if name not in folder.folders}
    return found


def remarks(missing: Mapping[str, str]) -> Iterator[Remark]:
    """Yield what is said of the components that are missing."""
    if missing:
        listed = some([f"{name!r} {why}" for name, why in missing.items()])
        what = f"{counted(len(missing), 'component')} of the pipeline without weights: {listed}"
        yield Remark("CK164", what, "Download what is missing, if the whole pipeline is needed.")


def _is_bare(folder: FolderSource, name: str, checkpoints: Collection[str]) -> bool:
    """Say whether a folder is of a model, and has no weights."""
    return name not in checkpoints and not folder.is_link(name) and _CONFIG in folder.names(name)[0]


def _has_weights(said: object) -> bool:
    """Say whether a component is of a class that has weights, going by its name."""
    if not isinstance(said, list) or len(said) != 2 or not isinstance(said[1], str):
        return False
    return _WITHOUT_WEIGHTS.fullmatch(said[1]) is None
