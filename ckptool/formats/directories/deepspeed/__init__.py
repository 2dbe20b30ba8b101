"""
A folder that an engine of DeepSpeed saved into, whatever the stage of ZeRO: files of ranks, merged.

    latest                                          text: the tag, which is a folder beside it
    <tag>/mp_rank_00_model_states.pt                stages 0 to 2; of stage 3, one for each rank
    <tag>/zero_pp_rank_0_mp_rank_00_optim_states.pt stages 1 to 3: one for each data-parallel rank
    <tag>/layer_03-model_states.pt                  pipelines: one for each layer

Nothing but the files of states is read; scripts that lie beside them are not looked at. See runtime/engine.py.
"""

from __future__ import annotations

from ckptool.checkpoints.parsed import Parsed
from ckptool.formats import filenames
from ckptool.formats.directories import pointers
from ckptool.formats.directories.deepspeed import states
from ckptool.formats.probe import Probe
from ckptool.sources.folder import FolderSource

NAME = "deepspeed"
_LATEST = "latest"


def sniff(folder: FolderSource) -> bool:
    """Say whether an engine saved into the folder, or into folders in it, of which ``latest`` names one."""
    if _has_states(folder, ""):
        return True
    # A trainer has the model's weights there, and the engine's states beside.
    return _LATEST in folder.files and bool(_tags(folder)) and not filenames.has_weights(folder.files)


def _tags(folder: FolderSource) -> list[str]:
    """Return the folders that an engine saved into."""
    return [name for name in folder.folders if _has_states(folder, name)]


def _has_states(folder: FolderSource, inside: str) -> bool:
    return any(_is_states(name) for name in folder.names(inside)[0])


def _is_states(name: str) -> bool:
    return any(
        kind.fullmatch(name) for kind in (states.MODEL_FILE, states.OPTIM_FILE, states.LAYER_FILE, states.EXPERT_FILE)
    )


def read(folder: FolderSource, probe: Probe) -> Parsed:
    """
    Read the states of all ranks, and put together what was partitioned; no tensor is read.

    Raises:
        FileUnavailable: ``latest`` names a folder that is not there, or files of ranks are missing.
        MalformedFile: The files are of different saves, or do not fit together.
    """
    from ckptool.formats.directories.deepspeed.reader import read_tag

    return read_tag(folder, probe, "" if _has_states(folder, "") else pointers.place(folder, _LATEST, _tags(folder)))
